"""What a gallery needs beside its items: the model, its export, and the calibrations with and without labels.

A gallery in a folder carries copies, so that it needs no run later:

    GALLERY/model/model.safetensors                  the model; or, for the pretrained trunk, …
    GALLERY/model/pretrained                         … a line with the trunk's name
    GALLERY/model/model.onnx                         the exported model, if the run has it
    GALLERY/model/calibration.json                   for galleries with labels, if the run has it
    GALLERY/model/calibration-unlabelled.json        for galleries without, if the run has it
"""

import hashlib
import io
import json
import os
import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from PIL import Image

from idml.calibration.stored import Calibration
from idml.data.images import FORMATS, decode_image
from idml.files import sync_folder, write_atomic
from idml.model.backbones import PACKAGED
from idml.model.model import FILE, PRETRAINED
from idml.search.embedder import ONNX
from idml.search.results import SEARCHED

MODEL = "model"
LABELLED, UNLABELLED = "calibration.json", "calibration-unlabelled.json"
_BESIDE = (LABELLED, UNLABELLED, ONNX)


@dataclass(frozen=True)
class Calibrations:
    """The calibrations of a model; None where there is none."""

    labelled: Calibration | None = None
    unlabelled: Calibration | None = None

    @classmethod
    def load(cls, run: str | Path, model: str) -> "Calibrations":
        """Those beside the model of ``run``; one of another model, or of another kind, is refused."""
        if str(run) == PRETRAINED:
            return cls()
        folder = run_folder(run)
        return cls(_load(folder / LABELLED, model, True), _load(folder / UNLABELLED, model, False))

    def or_else(self, other: "Calibrations") -> "Calibrations":
        """These, and those of ``other`` where there is none."""
        return Calibrations(self.labelled or other.labelled, self.unlabelled or other.unlabelled)


def _load(path: Path, model: str, labelled: bool) -> Calibration | None:
    if not path.exists():
        return None
    found = Calibration.load(path, model=model)
    if found.labelled != labelled:
        raise ValueError(f"{path} is for galleries {'with' if found.labelled else 'without'} labels: calibrate again")
    if found.searched != SEARCHED:
        raise ValueError(f"{path} was made for {found.searched!r}, a gallery needs {SEARCHED!r}: calibrate again")
    return found


def run_folder(run: str | Path) -> Path:
    """The folder of a run that is named by it or by its model file."""
    return Path(run) if Path(run).is_dir() else Path(run).parent


def carry(run: str | Path, folder: Path) -> None:
    """Copy a run's model and what belongs to it into ``folder``, where a gallery is going to be made."""
    path = Path(run)
    if str(run) == PRETRAINED:
        content = {PRETRAINED: f"{PACKAGED}\n".encode()}
    else:
        content = {FILE: (path / FILE if path.is_dir() else path).read_bytes(), **_beside(run)}
    to = folder / MODEL
    to.mkdir(parents=True, exist_ok=True)
    for name in {FILE, PRETRAINED, *_BESIDE} - content.keys():
        (to / name).unlink(missing_ok=True)  # a kill may have left it when another gallery was being made here
    for name, data in content.items():
        write_atomic(to / name, data)


def carry_later(run: str | Path, folder: Path) -> None:
    """Copy what a run has beside its model into the gallery in ``folder``; what it lacks stays as it is there."""
    for name, data in _beside(run).items():
        write_atomic(folder / MODEL / name, data)


def _beside(run: str | Path) -> dict[str, bytes]:
    paths = [] if str(run) == PRETRAINED else [run_folder(run) / name for name in _BESIDE]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def carried(folder: Path) -> str | Path:
    """What `open_embedder` takes for the model that the gallery in ``folder`` carries."""
    home = folder / MODEL
    if (home / FILE).is_file():
        return home
    if not (home / PRETRAINED).is_file():
        raise FileNotFoundError(f"the gallery {folder} carries no model; name the run that it was made with")
    trunk = (home / PRETRAINED).read_text(errors="replace").strip()
    if trunk != PACKAGED:
        raise ValueError(f"the gallery {folder} was made with the trunk {trunk!r}, this version of idml has {PACKAGED}")
    return PRETRAINED


# -------------------- roots --------------------
# Where the image files of a gallery in a folder are.
#
#     GALLERY/uploads/      images that were sent, under their ids
#     GALLERY/roots.json    {name: folder}, the folders that were indexed and stay where they are
#
# An item's path is the name of its root, and the path below that.


UPLOADS, ROOTS = "uploads", "roots.json"
_UPLOADED = re.compile("[0-9a-f]{32}")


class Roots:
    """The roots of the gallery in ``folder``. What another process adds is seen at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> dict[str, str]:
        """The indexed folders by name."""
        path = self.folder / ROOTS
        try:
            roots = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            raise ValueError(f"{path} is damaged: it is not JSON") from None
        if not isinstance(roots, dict) or not all(isinstance(root, str) for root in roots.values()):
            raise ValueError(f"{path} is damaged: it should name folders")
        return roots

    def name(self, folder: str) -> str:
        """The name of a folder (absolute, links resolved), which becomes a root if it is none yet."""
        roots = self.read()
        for name, root in roots.items():
            if root == folder:
                return name
        own = os.path.basename(folder) or "root"
        taken = {UPLOADS, *roots}
        name = next(x for n in range(1, len(taken) + 2) if (x := own if n == 1 else f"{own}-{n}") not in taken)
        write_atomic(self.folder / ROOTS, (json.dumps({**roots, name: folder}, indent=1) + "\n").encode())
        return name

    def find(self, path: str) -> Path | None:
        """The file of an item's path, links resolved; None if there is none, or it lies outside its root."""
        name, _, rest = path.partition("/")
        root = str(self.folder / UPLOADS) if name == UPLOADS else self.read().get(name)
        if not rest or root is None:
            return None
        base = os.path.realpath(root)
        file = os.path.realpath(os.path.join(base, rest))
        inside = file.startswith(base.rstrip("/") + "/")
        return Path(file) if inside and os.path.isfile(file) else None

    def keep(self, path: str, data: bytes) -> None:
        """Write the bytes of an uploaded image to its path; on return they are on the disk."""
        file = self.folder / path
        if not file.parent.is_dir():
            file.parent.mkdir()
            sync_folder(self.folder)
        write_atomic(file, data)

    def forget(self, id: str) -> None:
        """Delete the bytes of an uploaded image, if there are any."""
        if _UPLOADED.fullmatch(id):
            for extension in EXTENSIONS.values():
                (self.folder / UPLOADS / f"{id}.{extension}").unlink(missing_ok=True)


# -------------------- thumbnails --------------------
# An image's bytes as a gallery needs them: the picture, its small version, and what kind of file it is.


SIDE = 128  # pixels along the longer side of a thumbnail
EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif"}


@dataclass(frozen=True)
class Upload:
    """An image that somebody sends. Its name is shown in error messages and used for nothing else.

    >>> Upload(b"no image", name="holiday.jpg").decode()
    Traceback (most recent call last):
    ...
    ValueError: cannot read the image 'holiday.jpg': it is none of JPEG, PNG, WEBP, GIF, BMP, TIFF
    """

    data: bytes
    label: str | None = None
    name: str = ""

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of the bytes."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def id(self) -> str:
        """The id of the item that it becomes: equal images are one item."""
        return self.checksum[:32]

    def decode(self) -> Image.Image:
        """The image as RGB; ``ValueError`` if it cannot be read."""
        return decode_image(io.BytesIO(self.data), self.name[:1000] or "upload")

    @property
    def extension(self) -> str:
        """What a file of this kind is called, as its content tells; for an image that `decode` could read."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(self.data), formats=FORMATS) as image:
                return EXTENSIONS.get(str(image.format), "jpg")  # several photographs in one JPEG are called MPO


def thumbnail(image: Image.Image) -> bytes:
    """A JPEG of an RGB image, at most 128 pixels a side, that carries nothing but pixels.

    >>> Image.open(io.BytesIO(thumbnail(Image.new("RGB", (640, 480))))).size
    (128, 96)
    """
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    bare = Image.new("RGB", small.size)  # what came with the file (comments, XMP, places) stays behind
    bare.paste(small)
    out = io.BytesIO()
    bare.save(out, "JPEG", quality=85)
    return out.getvalue()
