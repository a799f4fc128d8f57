"""What a gallery needs beside its items: the model, its export, and the calibrations with and without labels.

A gallery in a folder carries copies, so that it needs no run later:

    GALLERY/model/model.safetensors                  the model; or, for the pretrained trunk, …
    GALLERY/model/pretrained                         … a line with the trunk's name
    GALLERY/model/model.onnx                         the exported model, if the run has it
    GALLERY/model/calibration.json                   for galleries with labels, if the run has it
    GALLERY/model/calibration-unlabelled.json        for galleries without, if the run has it
"""

from dataclasses import dataclass
from pathlib import Path

from idml.calibration.stored import Calibration
from idml.files import write_whole
from idml.model.backbones import PACKAGED
from idml.model.model import FILE
from idml.search.embedder import ONNX, PRETRAINED
from idml.search.replies import SEARCHED

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
        write_whole(to / name, data)


def carry_later(run: str | Path, folder: Path) -> None:
    """Copy what a run has beside its model into the gallery in ``folder``; what it lacks stays as it is there."""
    for name, data in _beside(run).items():
        write_whole(folder / MODEL / name, data)


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
