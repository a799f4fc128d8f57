"""Images on their way into a gallery: decoded, embedded and made small, a few at a time."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from PIL import Image

from idml.embeddings import Embeddings
from idml.search.embedder import BATCH, Embedder
from idml.search.engines import DamagedGallery, Engine
from idml.search.gallery_folder import Upload, thumbnail

_TOGETHER = 64
_LARGEST = 1 << 30  # bytes of a file; more is no image
_NAMED = 20  # broken images that are named one by one


_PIXELS = 16_000_000  # decoded at a time, and one image more: what is large does not add up in memory


class Embedded(NamedTuple):
    """What images became: the places of those that could be read, their embeddings and thumbnails."""

    places: list[int]
    embeddings: Embeddings | None  # None if no image could be read
    thumbnails: list[bytes]


def embed_uploads(
    embedder: Embedder, images: Iterable[Upload], broken: Callable[[int, ValueError], None] | None = None
) -> Embedded:
    """Embed images, of which one at a time is asked for.

    One that cannot be decoded raises ``ValueError``; with ``broken`` that is told its place and the error instead.
    """
    places: list[int] = []
    thumbnails: list[bytes] = []
    parts: list[Embeddings] = []
    waiting: list[Image.Image] = []
    for place, image in enumerate(images):
        try:
            picture = image.decode()
        except ValueError as error:
            if broken is None:
                raise
            broken(place, error)
            continue
        places.append(place)
        thumbnails.append(thumbnail(picture))
        waiting.append(picture)
        if len(waiting) == BATCH or sum(x.width * x.height for x in waiting) > _PIXELS:
            parts.append(embedder.embed(waiting))
            waiting = []
    if waiting:
        parts.append(embedder.embed(waiting))
    return Embedded(places, Embeddings.cat(parts) if parts else None, thumbnails)


def undamaged(engine: Engine, ids: Sequence[str]) -> set[str]:
    """Those of the ids that are in a gallery and whose stored bytes are what was written."""
    known = [id for id, item in zip(ids, engine.get_many(ids), strict=True) if item is not None]
    with suppress(DamagedGallery):
        _read(engine, known)
        return set(known)
    out = set()
    for id in known:
        with suppress(DamagedGallery):
            _read(engine, [id])
            out.add(id)
    return out


def _read(engine: Engine, ids: Sequence[str]) -> None:
    if ids:
        engine.embeddings(ids)
    for id in ids:
        engine.thumbnail(id)
