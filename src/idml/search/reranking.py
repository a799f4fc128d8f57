"""Results of a gallery that are re-ranked by position maps (DIML, Zhao et al., ICCV 2021).

`idml index FOLDER --to GALLERY --maps` stores the map of every image. ``Gallery.search(images, rerank="diml")``, `idml
search --rerank diml` and the service sort the first 100 results of a query anew by ŝ₁·ŝ₂ + Σ T·S
(`idml.model.structural_matching`); near duplicates stay together.

The calibration of a gallery is that of a search without re-ranking: it says nothing about another first result. So
no answer of a re-ranked search is calibrated or promised, and a match is one only if the class of the first result (in
a gallery without labels: the image) stays the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from idml.embeddings import Embeddings
from idml.errors import unknown_name
from idml.evaluation.rerank import RERANKERS, TOP, MatchedImages, StructuralReranker
from idml.search.answers import Answer, RiskTargets, State
from idml.search.engines import Engine, Item
from idml.search.position_maps import PositionMapper, PositionMaps
from idml.search.results import Reply, Result

NOTE = "re-ranked by {}: the calibration is that of a search without re-ranking, so nothing is promised"


def check_rerank(rerank: str, targets: RiskTargets | None) -> None:
    """Raise ``ValueError`` if there is no such re-ranker, or if it cannot keep the targets."""
    if rerank not in RERANKERS:
        raise ValueError(unknown_name("re-ranker", rerank, RERANKERS))
    if targets is not None and targets.max_missed is not None:
        raise ValueError("a set that misses rarely is one of a search without re-ranking: leave out one of the two")


class GalleryReranker:
    """Sorts the first 100 results of replies anew, by the position maps of a gallery in a folder."""

    depth = TOP  # how many results to search for, at least

    def __init__(self, name: str, engine: Engine, folder: Path) -> None:
        self.name, self._engine, self._folder, self._maps = name, engine, folder, PositionMaps(folder)

    @cached_property
    def _mapper(self) -> PositionMapper:
        return PositionMapper(self._folder)  # loads the model

    def compute_maps(self, images: Sequence[Image.Image]) -> Tensor:
        """Compute the maps [n, positions, d] of RGB images."""
        return self._mapper.compute(images)

    def read_maps(self, ids: Sequence[str]) -> Tensor:
        """Read the stored maps [n, positions, d] of items."""
        items = [item for item in self._engine.get_many(ids) if item is not None]
        if len(items) < len(ids):
            raise ValueError("an item is not in the gallery any more")
        return self._maps.read(items, self._engine.properties.dimensions)

    def store_maps(self, items: Sequence[Item], images: Iterable[Image.Image]) -> None:
        """Compute and store the maps of new items; few decoded images are in memory at a time."""
        self._maps.write(items, torch.cat([self.compute_maps([image]) for image in images]))

    def rerank(self, queries: Embeddings, maps: Tensor, replies: Sequence[Reply], k: int) -> list[Reply]:
        """Return the replies with ``k`` results in their new order, without what the calibration says."""
        whole = queries.unit.float()
        out = []
        for row, reply in enumerate(replies):
            order = self._sort(MatchedImages(whole[[row]], maps[[row]]), reply.results) if reply.results else []
            results = tuple(replace(result, probability=None) for result in order[:k])
            answer = _answer(reply.answer, reply.results, results)
            notes = (*reply.notes, NOTE.format(self.name))
            out.append(replace(reply, answer=answer, results=results, calibrated=False, notes=notes))
        return out

    def _sort(self, query: MatchedImages, results: Sequence[Result]) -> list[Result]:
        first = [result.id for result in results[:TOP]]
        found = MatchedImages(self._engine.embeddings(first).unit.float(), self.read_maps(first))
        sort = StructuralReranker(query, found)
        order = sort(torch.zeros(1, dtype=torch.long), torch.arange(len(found.maps))[None])[0].tolist()
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
