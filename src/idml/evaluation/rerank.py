"""Re-ranking of the first neighbours of each query by the structural matching of DIML."""

from dataclasses import dataclass

import torch
from torch import Tensor

from idml.data.pixel_cache import Pixels
from idml.embeddings import Embeddings, unit_rows
from idml.model import Model
from idml.model.feature_cache import FeatureCache
from idml.model.heads import LinearHead
from idml.model.structural_matching import structural_similarities
from idml.progress import Count

TOP, GRID = 100, 4
RERANKERS = ("diml",)
_PAIRS = 3200  # pairs matched at a time


@dataclass(frozen=True, eq=False)
class MatchedImages:
    """Images as structural matching sees them: unit embeddings [n, d] and unit rows of their positions [n, r, d]."""

    whole: Tensor
    maps: Tensor


def linear_head(model: Model) -> LinearHead:
    """Return the head that embeds single positions too; a model without such a head is an error."""
    if not isinstance(model.semantic, LinearHead):
        raise ValueError("re-ranking by diml needs a linear head: models of timm:NAME and models with slices have none")
    return model.semantic


def match_positions(model: Model, pixels: Pixels, embeddings: Embeddings, progress: Count) -> MatchedImages:
    """Compute the position maps of the usable images, which pass through the same head as the pooled features."""
    head = linear_head(model)
    cache = FeatureCache(model, images=len(pixels.usable), grid=GRID)
    rows = cache.load_view(pixels, progress=progress)
    parts = []
    with torch.no_grad():
        for start in range(0, len(rows), 256):
            features = torch.from_numpy(rows[start : start + 256].copy()).float().to(model.device)
            positions = head(features.unflatten(1, (-1, model.trunk.width))[:, 1:])
            parts.append(unit_rows(positions.flatten(0, 1)).view_as(positions).cpu())
    return MatchedImages(embeddings.unit.cpu(), torch.cat(parts))


@dataclass(frozen=True, eq=False)
class StructuralReranker:
    """Sorts the first ``top`` neighbours of a query anew by ŝ₁·ŝ₂ + Σ T·S; the rest keep their order."""

    queries: MatchedImages
    gallery: MatchedImages
    top: int = TOP

    def __call__(self, rows: Tensor, found: Tensor) -> Tensor:
        """Return the neighbours ``found`` [m, k] of the queries ``rows`` [m] in their new order; −1 stays last."""
        first, rest = found[:, : self.top].cpu(), found[:, self.top :]
        line, place = (first >= 0).nonzero(as_tuple=True)
        values = torch.full(first.shape, -torch.inf)
        for i, j in zip(line.split(_PAIRS), place.split(_PAIRS), strict=True):
            query, other = rows.cpu()[i], first[i, j]
            x, y = self.queries.whole[query], self.gallery.whole[other]
            structural = structural_similarities(self.queries.maps[query], x, self.gallery.maps[other], y)
            values[i, j] = ((x * y).sum(dim=1) + structural).to(values.dtype)
        order = values.argsort(dim=1, descending=True, stable=True)
        return torch.cat([first.gather(1, order).to(found.device), rest], dim=1)
