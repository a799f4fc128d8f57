"""`idml embed`: the embeddings of a folder of images in one .npz file, for other programs.

    vectors  float32 [n, d]   s, not normalised
    level    float32 [n]      ‖u‖; 0 for a model without u
    names    text [n]         path below the folder
    labels   text [n]         first sub-folder of the path; empty if there is none
    model    text             fingerprint of the model

No array is pickled: ``numpy.load(file, allow_pickle=False)`` reads them all.
"""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from idml.embeddings import Embeddings
from idml.files import write_atomic
from idml.model.model import PRETRAINED, resolve_model
from idml.progress import Count, Note, silent
from idml.records import Record
from idml.search.embedder import BATCH, Runtime, open_embedder
from idml.search.indexing import MAX_BYTES, label_of, list_images
from idml.search.uploads import Upload, embed_uploads

_MAX_NAMED = 20  # unreadable images that get a line of their own


def embed_images(
    images: str | Path,
    to: str | Path,
    *,
    model: str | Path = PRETRAINED,
    weights: str | Path | None = None,
    image_size: int | None = None,
    runtime: Runtime = "auto",
    progress: Count = silent,
    note: Note = silent,
) -> "EmbeddedImages":
    """Write the embeddings of the images in a folder to an .npz file; return figures.

    Args:
        images: a folder with images, or one image file.
        to: the file to write; its name ends in .npz.
        model: a run folder, a model file, ``pretrained`` or ``timm:NAME``.
        weights: a safetensors file with the weights of ``timm:NAME``.
        image_size: the side of the images that ``timm:NAME`` sees, in pixels; by default its own.
        runtime: the library that runs the model, as in `open_embedder`.
        progress: called with the number of images done and the number of all images.
        note: called with lines for the user; unreadable images are named and left out.
    """
    file = Path(to)
    if file.suffix != ".npz":
        raise ValueError(f"the name of the file to write ends in .npz, got {file.name!r}")
    if file.is_dir():
        raise ValueError(f"{file} is a folder; name a file to write")
    if not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(file.absolute().parent)!r} to write {file.name} to")
    root, names, others = _list(images, note)
    if not names:
        raise ValueError(f"there is no image in {str(images)!r}")
    embedder = open_embedder(resolve_model(model, weights, image_size=image_size), runtime=runtime, images=len(names))
    kept: list[str] = []
    broken: list[str] = []
    parts: list[Embeddings] = []
    for start in range(0, len(names), BATCH):
        read: list[str] = []
        uploads = _read_files(root, names[start : start + BATCH], read, broken)
        found = embed_uploads(embedder, uploads, lambda position, error: broken.append(str(error)))
        if found.embeddings is not None:
            kept += [read[position] for position in found.positions]
            parts.append(found.embeddings)
        progress(min(start + BATCH, len(names)), len(names))
    for line in broken[:_MAX_NAMED]:
        note(line)
    if len(broken) > _MAX_NAMED:
        note(f"… {len(broken) - _MAX_NAMED} more images cannot be read")
    if not parts:
        raise ValueError(f"no image in {str(images)!r} can be read ({len(names):,} tried); nothing was written")
    embeddings = Embeddings.cat(parts)
    arrays = {
        "vectors": embeddings.semantic.float().numpy(),
        "level": embeddings.level.float().numpy(),
        "names": np.array(kept, dtype=np.str_),
        "labels": np.array([label_of(name) or "" for name in kept], dtype=np.str_),
        "model": np.array(embedder.fingerprint),
    }
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    write_atomic(file, out.getvalue())
    count, dimensions = arrays["vectors"].shape
    return EmbeddedImages(
        file=str(file),
        images=count,
        dimensions=dimensions,
        labelled=int((arrays["labels"] != "").sum()),
        broken=len(broken),
        skipped=others,
        model=embedder.fingerprint,
    )


class EmbeddedImages(Record):
    """What `embed_images` wrote: the file, and how many images it holds."""

    @property
    def file(self) -> str:
        """The file."""
        return str(self["file"])

    @property
    def images(self) -> int:
        """The number of images in the file."""
        return int(self["images"])

    @property
    def dimensions(self) -> int:
        """The size of a vector."""
        return int(self["dimensions"])

    def lines(self) -> list[str]:
        """Return one line with all counts."""
        words = f"{self.images:,} images, {self.dimensions} dimensions; {self['broken']:,} broken"
        return [f"{self.file}: {words}, {self['skipped']:,} skipped"]


def _list(images: str | Path, note: Note) -> tuple[str, list[str], int]:
    """The folder, the names of the images in it, and how many other files are there."""
    if os.path.isfile(images):
        return os.path.split(os.path.abspath(images))[0], [os.path.basename(images)], 0
    root = os.path.realpath(images)
    if not os.path.isdir(root):
        raise FileNotFoundError(f"there is no folder {str(images)!r}")
    listing = list_images(root, None)
    for line in listing.notes:
        note(line)
    return root, listing.names, len(listing.others)


def _read_files(root: str, names: list[str], read: list[str], broken: list[str]) -> Iterator[Upload]:
    """Read files; their names are added to ``read``, or the reason why they cannot be read to ``broken``."""
    for name in names:
        try:
            with open(os.path.join(root, name), "rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            broken.append(f"cannot read the image {name!r}: {error.strerror}")
            continue
        if len(data) > MAX_BYTES:
            broken.append(f"cannot read the image {name!r}: it is larger than {MAX_BYTES:,} bytes")
            continue
        read.append(name)
        yield Upload(data, name=name)
