"""P(an image found at a distance is of the query's class), from lists of results whose classes are known."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from idml.calibration.confidence import isotonic


@dataclass(frozen=True)
class Alike:
    """P falls with the distance and is linear between the ``knots``; beyond the last ones it stays as it is there."""

    knots: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.knots, self.knots[1:], strict=False))
        falling = all(a >= b for a, b in zip(self.shares, self.shares[1:], strict=False))
        bounded = all(0 <= share <= 1 for share in self.shares)
        if not self.knots or len(self.knots) != len(self.shares) or not (rising and falling and bounded):
            raise ValueError("the curve of single results does not fall from knot to knot")

    @classmethod
    def fit(cls, distances: Tensor, alike: Tensor) -> "Alike":
        """Isotonic regression over all results listed for some queries.

        Args:
            distances: of the images listed [n, m]; ∞ where a list ends before.
            alike: bool [n, m], this image is of the query's class.

        Where the m nearest are all alike, P is (m + 1)/(m + 2), and 1/(m + 2) where the m farthest are all different
        (Laplace's rule of succession): a few results never make certainty.

        >>> curve = Alike.fit(torch.tensor([[0.1, 0.2, 0.5, 0.9]]), torch.tensor([[True, True, False, False]]))
        >>> curve.probability(torch.tensor([0.0, 0.1, 0.9]))
        tensor([0.7500, 0.7500, 0.2500], dtype=torch.float64)
        """
        if distances.ndim != 2 or alike.shape != distances.shape or alike.dtype != torch.bool:
            raise ValueError(f"need distances [n, m] and a bool mask, got {list(distances.shape)} and {alike.dtype}")
        listed = distances != torch.inf
        d, same = distances[listed].double(), alike[listed]
        n = len(d)
        if n == 0 or not bool(torch.isfinite(d).all()):
            raise ValueError("the lists of results are empty, or hold distances that are no numbers")
        knots, shares = isotonic(d, same)
        sure, hopeless = (n + 1) / (n + 2), 1 / (n + 2)  # where isotonic's own limits hold
        nearest = n if bool(same.all()) else int((d < d[~same].min()).sum())
        farthest = n if not bool(same.any()) else int((d > d[same].max()).sum())
        between = [share for share in shares if hopeless < share < sure]
        top = max([(nearest + 1) / (nearest + 2), *between])
        bottom = min([1 / (farthest + 2), *between])
        return cls(knots, tuple(top if s >= sure else bottom if s <= hopeless else s for s in shares))

    def probability(self, distances: Tensor) -> Tensor:
        """P for distances of any shape, in float64."""
        d = distances.detach().cpu().double()
        if bool(d.isnan().any()):
            raise ValueError(f"{int(d.isnan().sum())} of {d.numel()} distances are NaN")
        return torch.as_tensor(np.interp(d.numpy(), self.knots, self.shares), dtype=torch.float64)
