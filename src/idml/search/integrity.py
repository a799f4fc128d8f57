"""`idml gallery verify`: check everything that a gallery in a folder needs, not only its database.

The model is compared with the fingerprint in the database. The small files beside it, the calibration, the feedback,
the position maps, the exported model and the list of roots are compared with their own checksums, and every image file,
uploaded or indexed, with the checksum that its item has in the database.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from idml.model.model import FILE, fingerprint
from idml.model.onnx import ONNX, read_onnx
from idml.progress import Count, silent
from idml.search.engines import DamagedGallery, Engine, Item
from idml.search.engines.base import Problem
from idml.search.feedback import read_feedback
from idml.search.gallery import read_calibration
from idml.search.gallery_folder import (
    CALIBRATION,
    FEEDBACK,
    MODEL,
    UPLOADS,
    ImageRoots,
    find_changed_files,
    find_model,
)
from idml.search.position_maps import PositionMaps


def verify_folder(engine: Engine, folder: Path, *, progress: Count = silent) -> list[Problem]:
    """Check the gallery in a folder; return what is damaged, missing or changed. ``progress`` counts image files."""
    problems = [*engine.verify(), *_check_model(engine, folder), *PositionMaps(folder).find_problems()]
    try:
        items = list(engine.items())
    except DamagedGallery:  # the engine has named the damaged rows; the others can still be read one by one
        items = []
    return problems + list(_check_images(items, folder, progress))


def _check_model(engine: Engine, folder: Path) -> Iterator[Problem]:
    home, model = folder / MODEL, engine.properties.model
    try:
        find_model(folder)
        if (home / FILE).is_file() and fingerprint(home) != model:
            yield Problem(str(home / FILE), None, "it is damaged, or not the model that the gallery was made with")
    except (ValueError, OSError) as error:
        yield Problem(str(home), None, str(error))
    for file, reason in find_changed_files(folder):
        yield Problem(str(file), None, reason)
    try:
        read_calibration(folder, engine)
    except (ValueError, OSError) as error:
        yield Problem(str(folder / CALIBRATION), None, str(error))
    try:
        read_feedback(folder, engine.properties)
    except (ValueError, OSError) as error:
        yield Problem(str(folder / FEEDBACK), None, str(error))
    if (home / ONNX).exists():
        try:
            if read_onnx(home / ONNX).fingerprint != model:
                yield Problem(str(home / ONNX), None, "it was exported from another model")
        except (ValueError, OSError) as error:
            yield Problem(str(home / ONNX), None, str(error))


def _check_images(items: list[Item], folder: Path, progress: Count) -> Iterator[Problem]:
    try:
        roots = {**ImageRoots(folder).read(), UPLOADS: str(folder / UPLOADS)}
    except (ValueError, OSError) as error:
        yield Problem(str(folder), None, str(error))
        roots = {UPLOADS: str(folder / UPLOADS)}
    named = set()
    for done, item in enumerate(items, start=1):
        name, _, rest = item.path.partition("/")
        root = roots.get(name)
        if root is None or not os.path.isdir(root):
            if name not in named:
                named.add(name)
                where = "it is not among the roots" if root is None else f"there is no folder {root!r}"
                yield Problem(str(folder), None, f"the images of the root {name!r} are missing: {where}")
        elif reason := _compare(os.path.join(root, rest), item.checksum):
            yield Problem(str(folder), item.id, f"the original {item.path!r} {reason}")
        progress(done, len(items))


def _compare(file: str, checksum: str) -> str:
    """Say what is wrong with an image file; empty if its bytes have the checksum."""
    try:
        with open(file, "rb") as content:
            same = hashlib.file_digest(content, "sha256").hexdigest() == checksum
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if same else "has changed since it was added"
