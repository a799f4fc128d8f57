"""Results of a gallery that are re-ranked by position maps (DIML, Zhao et al., ICCV 2021).

`idml index FOLDER --to GALLERY --maps` stores the map of every image. `idml search --rerank diml` sorts the first 100
results of a query anew by ŝ₁·ŝ₂ + Σ T·S (`idml.model.structural_matching`); near duplicates stay together.

The calibration of a gallery is that of a search without re-ranking: it says nothing about another first result. So
no answer of a re-ranked search is calibrated or promised, and a match is one only if the class of the first result (in
a gallery without labels: the image) stays the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from idml.errors import unknown_name
from idml.evaluation.rerank import RERANKERS, TOP, MatchedImages, StructuralReranker
from idml.progress import Count, Note, silent
from idml.search.answers import Answer, RiskTargets, State
from idml.search.engines import Item
from idml.search.gallery import Gallery
from idml.search.position_maps import PositionMapper, PositionMaps
from idml.search.results import Reply, Result, check_count
from idml.search.uploads import Upload

NOTE = "re-ranked by {}: the calibration is that of a search without re-ranking, so nothing is promised"
_BATCH = 64
_MAX_NAMED = 20  # images without a map that get a line of their own
_ATTEMPTS = 5  # searches of a gallery that changes during the search


def require_folder(gallery: Gallery) -> Path:
    """Return the folder of a gallery; one in Milvus keeps no position maps."""
    if gallery.roots is None:
        raise ValueError(f"{gallery.location} is in Milvus, which keeps no position maps: use a gallery in a folder")
    return gallery.roots.folder


def add_maps(gallery: Gallery, *, progress: Count = silent, note: Note = silent) -> int:
    """Compute and store the maps that a gallery lacks; return how many. Images without a readable file get a note."""
    folder = require_folder(gallery)
    if not gallery.writable:
        raise ValueError(f"the gallery {gallery.location} is open for reading only")
    maps = PositionMaps(folder)
    missing = maps.find_missing(gallery.items())
    mapper = PositionMapper(folder)
    unread = 0
    for start in range(0, len(missing), _BATCH):
        read: list[tuple[Item, Image.Image]] = []
        for item in missing[start : start + _BATCH]:
            try:
                read.append((item, _read_original(gallery, item)))
            except (ValueError, OSError) as error:
                unread += 1
                if unread <= _MAX_NAMED:
                    note(f"no position map of {item.path or item.id!r}: {error}")
        if read:
            maps.write([item for item, _ in read], mapper.compute([image for _, image in read]))
        progress(min(start + _BATCH, len(missing)), len(missing))
    if unread > _MAX_NAMED:
        note(f"… {unread - _MAX_NAMED} more images have no position map")
    return len(missing) - unread


def _read_original(gallery: Gallery, item: Item) -> Image.Image:
    """Read the image file of an item; one that is missing or has changed is a ``ValueError``."""
    file = gallery.image_file(item.id)
    if file is None:
        raise ValueError("its file is missing")
    image = Upload(file.read_bytes(), name=file.name)
    if image.checksum != item.checksum:
        raise ValueError("its file has changed since it was added")
    return image.decode()


# -------------------- re-ranking --------------------


@dataclass(frozen=True)
class _Query:
    """A query as structural matching sees it."""

    unit: Tensor
    map: Tensor


def search_reranked(
    gallery: Gallery, images: Sequence[Image.Image], k: int, targets: RiskTargets | None, rerank: str
) -> list[Reply]:
    """Search for RGB images and sort the first 100 results of each anew; see the module for what may be promised."""
    check_count(k)
    if rerank not in RERANKERS:
        raise ValueError(unknown_name("re-ranker", rerank, RERANKERS))
    folder = require_folder(gallery)
    if not PositionMaps(folder).file.exists():
        raise ValueError(f"the gallery {gallery.location} has no position maps: idml index --maps makes them")
    if targets is not None and targets.max_missed is not None:
        raise ValueError("a set that misses rarely is one of a search without re-ranking: leave out one of the two")
    if not images:
        return []
    embeddings, positions = gallery.embedder.embed(images), PositionMapper(folder).compute(images)
    queries = [_Query(unit, own) for unit, own in zip(embeddings.unit, positions, strict=True)]
    for _ in range(_ATTEMPTS):
        replies = gallery.search_embeddings(embeddings, max(k, TOP), targets)
        try:
            return [_rerank(gallery, query, reply, k, rerank) for query, reply in zip(queries, replies, strict=True)]
        except ValueError:
            if all(result.id in gallery.engine for reply in replies for result in reply.results):
                raise  # else an item was removed during the search
    raise OSError(f"the gallery {gallery.location} changes too fast to be searched; try again")


def _rerank(gallery: Gallery, query: _Query, reply: Reply, k: int, rerank: str) -> Reply:
    """A reply with its first 100 results in their new order, without what the calibration says."""
    results = _sort(gallery, query, reply.results) if reply.results else ()
    plain = [replace(result, probability=None) for result in results[:k]]
    answer = _answer(reply.answer, reply.results, plain)
    return replace(
        reply, answer=answer, results=tuple(plain), calibrated=False, notes=(*reply.notes, NOTE.format(rerank))
    )


def _sort(gallery: Gallery, query: _Query, results: Sequence[Result]) -> list[Result]:
    ids = [result.id for result in results]
    unit = gallery.engine.embeddings(ids).unit
    items = [item for item in gallery.get_many(ids[:TOP]) if item is not None]
    first = MatchedImages(unit[:TOP].float(), PositionMaps(require_folder(gallery)).read(items, unit.shape[1]))
    sort = StructuralReranker(MatchedImages(query.unit[None].float(), query.map[None]), first)
    order = sort(torch.zeros(1, dtype=torch.long), torch.arange(len(first.maps))[None])[0].tolist()
    return [results[place] for place in [*order, *range(len(order), len(results))]]


def _answer(before: Answer, results: Sequence[Result], now: Sequence[Result]) -> Answer:
    """The answer without a promise: *match* only where the first result shows the same as before."""
    answer = replace(before, calibrated=False, promised=False, probability=None, results=None)
    if not now or before.state is not State.MATCH:
        return answer
    old, new = results[0], now[0]
    same = old.id == new.id or (old.label is not None and old.label == new.label)
    if same:
        return answer
    what = "image" if old.label is None else "class"
    return replace(answer, state=State.UNSURE, reason=f"re-ranking puts another {what} first")
