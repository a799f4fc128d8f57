"""Write a run and a gallery of the current version into VERSION.tar.xz beside this file, for `test_stored_formats`.

Run it once when a format changes, and keep the files of the versions before: python tests/stored_formats/make.py
The weights of the model are few and rough, so that the file is small.
"""

import io
import json
import tarfile
import tempfile
from pathlib import Path

import torch
from PIL import Image

from idml import __version__
from idml.calibration.evidence import Evidence
from idml.calibration.stored import Calibration
from idml.data.images import decode_image
from idml.model import build_model, fingerprint, save_model
from idml.search.gallery import Gallery, Upload

LABELS = ("red", "green", None)


def picture(number: int) -> bytes:
    """Return a PNG of 24 × 24 pixels that follows from its number."""
    image = Image.new("RGB", (24, 24), (60 * number % 256, 200 - 30 * number, 90))
    image.paste((255, 255, 0), (number, 2 * number, number + 9, 2 * number + 5))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def search(gallery: Gallery) -> dict[str, object]:
    """Return what a gallery answers to a picture that it holds, and to another."""
    replies = gallery.search([decode_image(io.BytesIO(picture(n)), "query") for n in (1, 9)], 3)
    return {
        "items": [[item.id, item.path, item.label] for item in gallery.items()],
        "found": [[result.id for result in reply.results] for reply in replies],
        "distances": [[round(result.distance, 4) for result in reply.results] for reply in replies],
        "states": [reply.answer.state.value for reply in replies],
        "calibrated": [reply.calibrated for reply in replies],
    }


def main() -> None:
    """Write the file."""
    torch.manual_seed(0)
    model = build_model("conv4", embedding_dim=8, image_size=16)
    for parameter in model.parameters():
        sparse = (torch.rand_like(parameter) < 0.03).float() * parameter.data.sign() / 4
        parameter.data = sparse if parameter.ndim > 1 else parameter.data
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(model, folder / "run")
        evidence = Evidence(*torch.rand(5, 80))
        right, model_file = torch.rand(80) > 0.3, fingerprint(folder / "run")
        with Gallery.create(folder / "gallery", folder / "run") as gallery:
            gallery.add([Upload(picture(n), LABELS[n % 3]) for n in range(5)])
            gallery.store_calibration(Calibration.fit(evidence, right, labelled=False, model=model_file))
            answers = search(gallery)
        (folder / "expected.json").write_text(json.dumps(answers, indent=1))
        for copy in folder.rglob("vectors-*"):
            copy.unlink()  # made again when they are missing
        with tarfile.open(Path(__file__).with_name(f"{__version__}.tar.xz"), "w:xz") as archive:
            archive.add(folder, ".", filter=_without_owner)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return None if member.name.endswith(".lock") or "-wal" in member.name or "-shm" in member.name else member


if __name__ == "__main__":
    main()
