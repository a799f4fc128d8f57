"""The files of a gallery in a folder, apart from its database: model and image files.

The gallery holds copies of what it needs from the run, so the run is not needed later:

    GALLERY/model/model.safetensors                  the model; for the pretrained trunk instead …
    GALLERY/model/pretrained                         … a file with the name of the trunk
    GALLERY/model/model.onnx                         the exported model, if the run has one
    GALLERY/model/config.yaml, learned.json          the options of the run and which images it learned from
    GALLERY/model/source.json                        where the weights come from, and their licence
    GALLERY/model/checksums.json                     {name: SHA-256} of these three
    GALLERY/calibration.json, calibration.html       what `idml calibrate` stores
    GALLERY/feedback.json                            what people said about answers
    GALLERY/position-maps.sqlite                     position maps for re-ranking, if there are any
    GALLERY/uploads/                                 uploaded images, named by their ids
    GALLERY/roots.json                               {name: folder}, the indexed folders; they stay where they are;
                                                     with a checksum

The path of an item begins with the name of its root (an indexed folder, or ``uploads``), followed by the path below it.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from idml.files import lock_file, sync_folder, write_atomic
from idml.model.backbones import PACKAGED
from idml.model.model import FILE, LEARNED, PRETRAINED, resolve_model
from idml.model.onnx import ONNX
from idml.model.weight_sources import SOURCE
from idml.search.engines import DamagedGallery
from idml.search.uploads import EXTENSIONS

MODEL = "model"
CALIBRATION, REPORT, FEEDBACK = "calibration.json", "calibration.html", "feedback.json"
POSITION_MAPS = "position-maps.sqlite"
UPLOADS, ROOTS = "uploads", "roots.json"
_OPTIONAL_FILES = (ONNX, "config.yaml", LEARNED, SOURCE)
CHECKSUMS = "checksums.json"
_CHECKED_FILES = ("config.yaml", LEARNED, SOURCE)  # the model and its export have a fingerprint and a checksum
_UPLOAD_ID = re.compile("[0-9a-f]{32}")


class MissingMap(ValueError):
    """A gallery has no position map of an image, or none at all."""


# -------------------- model --------------------


def run_folder(run: str | Path) -> Path:
    """Return the folder of a run, given the folder, its model file or ``timm:NAME``."""
    run = resolve_model(run)
    return Path(run) if Path(run).is_dir() else Path(run).parent


def lock_creation(folder: Path) -> BinaryIO:
    """Make a folder and lock the creation of a gallery in it, until the returned file is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    return lock_file(folder / ".create.lock")


def copy_model(run: str | Path, folder: Path) -> None:
    """Copy the model of a run, its export, its options and what it learned from into the folder of a new gallery."""
    run = resolve_model(run)
    path = Path(run)
    if str(run) == PRETRAINED:
        content = {PRETRAINED: f"{PACKAGED}\n".encode()}
    else:
        content = {FILE: (path / FILE if path.is_dir() else path).read_bytes(), **_read_optional_files(run)}
    to = folder / MODEL
    to.mkdir(parents=True, exist_ok=True)
    for name in {FILE, PRETRAINED, CHECKSUMS, *_OPTIONAL_FILES} - content.keys():
        (to / name).unlink(missing_ok=True)  # left by a kill while another gallery was being created here
    for name, data in content.items():
        write_atomic(to / name, data)
    _write_checksums(to)


def update_model_files(run: str | Path, folder: Path) -> None:
    """Copy the files beside the model of a run into an existing gallery; keep those the run lacks."""
    (folder / MODEL / CHECKSUMS).unlink(missing_ok=True)  # a kill leaves new files without checksums, not with old ones
    for name, data in _read_optional_files(run).items():
        write_atomic(folder / MODEL / name, data)
    _write_checksums(folder / MODEL)


def _write_checksums(home: Path) -> None:
    found = {name: _sha256(home / name) for name in _CHECKED_FILES if (home / name).exists()}
    if found:
        write_atomic(home / CHECKSUMS, (json.dumps(found, indent=1) + "\n").encode())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_changed_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Compare the small files beside a gallery's model with their checksums; a gallery of version 0.1.0 has none."""
    home = folder / MODEL
    try:
        stored = json.loads((home / CHECKSUMS).read_bytes())
    except FileNotFoundError:
        return
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict) or not stored.keys() <= set(_CHECKED_FILES):
        yield home / CHECKSUMS, "it is damaged; idml index with --model RUN writes it again"
        return
    for name in _CHECKED_FILES:
        if not (home / name).exists():
            if name in stored:
                yield home / name, "it is missing"
        elif stored.get(name) != _sha256(home / name):
            yield home / name, "it is damaged: its checksum does not fit"


def _read_optional_files(run: str | Path) -> dict[str, bytes]:
    paths = [] if str(run) == PRETRAINED else [run_folder(run) / name for name in _OPTIONAL_FILES]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def find_model(folder: Path) -> str | Path:
    """Return what `open_embedder` needs to open the model in a gallery's folder."""
    home = folder / MODEL
    if (home / FILE).is_file():
        return home
    if not (home / PRETRAINED).is_file():
        raise FileNotFoundError(f"the gallery {folder} contains no model; name the run that it was made with")
    trunk = (home / PRETRAINED).read_text(errors="replace").strip()
    if trunk != PACKAGED:
        raise ValueError(f"the gallery {folder} was made with the trunk {trunk!r}, this version of idml has {PACKAGED}")
    return PRETRAINED


# -------------------- image files --------------------


def _checksum(roots: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(roots, sort_keys=True).encode()).hexdigest()


class ImageRoots:
    """The folders that contain the image files of a gallery. Roots added by another process are visible at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> dict[str, str]:
        """Read the indexed folders by name; a list without a checksum was written by an older version or by hand."""
        path = self.folder / ROOTS
        try:
            roots = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            raise DamagedGallery(f"{path} is damaged: it is not JSON") from None
        if isinstance(roots, dict) and isinstance(roots.get("folders"), dict):
            if roots.keys() != {"folders", "checksum"} or roots["checksum"] != _checksum(roots["folders"]):
                raise DamagedGallery(
                    f"{path} is damaged: its checksum does not fit the folders; docs/search.md has a remedy"
                )
            roots = roots["folders"]
        if not isinstance(roots, dict) or not all(isinstance(root, str) for root in roots.values()):
            raise DamagedGallery(f"{path} is damaged: it should name folders")
        return roots

    def register(self, folder: str) -> str:
        """Return the name of a folder (an absolute path, links resolved); add it to the roots if it is new."""
        with lock_file(self.folder / f".{ROOTS}.lock"):  # another process may index another folder
            roots = self.read()
            for name, root in roots.items():
                if root == folder:
                    return name
            own = os.path.basename(folder) or "root"
            taken = {UPLOADS, *roots}
            name = next(x for n in range(1, len(taken) + 2) if (x := own if n == 1 else f"{own}-{n}") not in taken)
            roots[name] = folder
            content = {"folders": roots, "checksum": _checksum(roots)}
            write_atomic(self.folder / ROOTS, (json.dumps(content, indent=1) + "\n").encode())
            return name

    def find_file(self, path: str) -> Path | None:
        """Return the file for an item's path, links resolved; None if it does not exist or is outside its root."""
        name, _, rest = path.partition("/")
        root = str(self.folder / UPLOADS) if name == UPLOADS else self.read().get(name)
        if not rest or root is None:
            return None
        base = os.path.realpath(root)
        file = os.path.realpath(os.path.join(base, rest))
        inside = file.startswith(base.rstrip("/") + "/")
        return Path(file) if inside and os.path.isfile(file) else None

    def write_upload(self, path: str, data: bytes) -> None:
        """Write the bytes of an uploaded image durably to its path."""
        file = self.folder / path
        if not file.parent.is_dir():
            file.parent.mkdir()
            sync_folder(self.folder)
        write_atomic(file, data)

    def delete_upload(self, id: str) -> None:
        """Delete the bytes of an uploaded image, if there are any."""
        if _UPLOAD_ID.fullmatch(id):
            for extension in EXTENSIONS.values():
                (self.folder / UPLOADS / f"{id}.{extension}").unlink(missing_ok=True)
