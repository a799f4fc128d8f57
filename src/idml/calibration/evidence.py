"""What an answer rests on: the scores of a search from which P(right) is calculated.

`build_evidence` is the only place where they are made. Search, calibration and the study of promises all call it, so a
query gets the same evidence everywhere. The scores come from the list of the k = 10 nearest images, d₁ ≤ … ≤ d_k, which
every engine gives. Each score is larger where the answer is less certain:

    level     ‖u‖ of the query                       nearest       d₁
    pair      β = ‖u_q + u_1‖, 1 the first image     kth           d_k
    gap       −(d₂ − d₁)                             spread        d₁ / d_k

In a labelled gallery there are four more. d_other is the distance of the first listed image of another class than the
first one's; if the list holds a single class, it is d_k:

    margin    −(d_other − d₁)                        entropy       −Σ p·ln p, p the labels' shares among the k
    ratio     d₁ / d_other                           disagreement  1 − share of the k with the first one's label

The ratio 0/0 is 1. If the list holds one image, d₂ = d_k = d₁.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idml.embeddings import Embeddings, Index, as_rows, full_precision
from idml.evaluation.knn import Search
from idml.evaluation.scores import label_entropy

WITHOUT_LABELS = ("level", "nearest", "kth", "spread", "gap", "pair")
WITH_LABELS = ("margin", "ratio", "entropy", "disagreement")

NEIGHBOURS = 10  # the k above
SEARCHED = f"{NEIGHBOURS} nearest, euclidean"

ROUNDING = 1e-3  # smaller distances between unit vectors are rounding: the two pictures are the same
_PROFILE = 1000  # images whose nearest distances describe a gallery


@dataclass(frozen=True, eq=False)
class Evidence:
    """The scores of n queries, see the head of this file; None for a score that the gallery cannot give.

    Numbers that are not finite raise ``ValueError``.
    """

    level: Tensor
    nearest: Tensor
    kth: Tensor
    spread: Tensor
    gap: Tensor
    pair: Tensor | None = None
    margin: Tensor | None = None
    ratio: Tensor | None = None
    entropy: Tensor | None = None
    disagreement: Tensor | None = None
    searched: str = SEARCHED
    """The kind of search. Scores of different kinds cannot be compared."""

    def __post_init__(self) -> None:
        n = len(self.nearest)
        for name, x in self.scores.items():
            if x.shape != (n,) or not x.is_floating_point():
                raise ValueError(f"{name} must be floats [{n}], got {x.dtype} {list(x.shape)}")
            bad = (~torch.isfinite(x)).nonzero().flatten()
            if len(bad):
                raise ValueError(f"{len(bad)} of {n} values of {name} are NaN or infinite (first: query {int(bad[0])})")

    @property
    def scores(self) -> dict[str, Tensor]:
        """The available scores by name."""
        named = ((name, getattr(self, name)) for name in (*WITHOUT_LABELS, *WITH_LABELS))
        return {name: x for name, x in named if x is not None}

    @property
    def labelled(self) -> bool:
        """Whether the gallery's labels were known."""
        return self.margin is not None

    def __len__(self) -> int:
        return len(self.nearest)

    def __getitem__(self, index: Index) -> "Evidence":
        rows = as_rows(index, len(self))
        return replace(self, **{name: x[rows] for name, x in self.scores.items()})  # type: ignore[arg-type]

    @classmethod
    def cat(cls, parts: "Sequence[Evidence]") -> "Evidence":
        """Join evidence with the same scores from the same kind of search."""
        names = [*parts[0].scores]
        if any([*part.scores] != names or part.searched != parts[0].searched for part in parts):
            raise ValueError("only evidence with the same scores can be joined")
        scores = {name: torch.cat([part.scores[name] for part in parts]) for name in names}
        return cls(**scores, searched=parts[0].searched)


def build_evidence(
    queries: Embeddings, distances: Tensor, nearest_uncertainty: Tensor, *, classes: Tensor | None = None
) -> Evidence:
    """Build the evidence of queries from their lists of nearest images.

    Args:
        queries: the queries [n].
        distances: of the images listed [n, listed], ascending; ∞ where a query finds fewer. Only the first 10 are used.
        nearest_uncertainty: u of the first image of each list [n, d].
        classes: numbers of the listed images' classes [n, listed], 0 or more; read only where the distance is finite.
            None for a gallery without labels.

    >>> query = Embeddings(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.3, 0.0]]))
    >>> distances, u = torch.tensor([[0.2, 0.4, 0.8]]), torch.tensor([[0.1, 0.3]])
    >>> found = build_evidence(query, distances, u, classes=torch.tensor([[3, 3, 1]]))
    >>> found.margin, found.gap, found.pair, found.disagreement
    (tensor([-0.6000]), tensor([-0.2000]), tensor([0.5000]), tensor([0.3333]))
    """
    if distances.ndim != 2 or distances.shape[1] == 0 or not distances.is_floating_point():
        raise ValueError(f"distances must be floats [queries, k], got {distances.dtype} {list(distances.shape)}")
    if classes is not None and classes.shape != distances.shape:
        raise ValueError(f"classes must be numbers {list(distances.shape)}, got {list(classes.shape)}")
    d = full_precision(distances[:, :NEIGHBOURS])
    listed = d != torch.inf
    total = listed.sum(dim=1)
    if len(empty := (total == 0).nonzero().flatten()):
        raise ValueError(f"{len(empty)} of {len(d)} queries found no image at all (first: query {int(empty[0])})")
    first, kth = d[:, 0], d.gather(1, total.unsqueeze(1) - 1).squeeze(1)
    second = torch.where(total > 1, d[:, min(1, d.shape[1] - 1)], first)
    scores = {
        "level": queries.detach().level.to(d),
        "nearest": first,
        "kth": kth,
        "spread": _ratio(first, kth),
        "gap": first - second,
        "pair": _pair_uncertainty(queries, nearest_uncertainty).to(d),
    }
    if classes is not None:
        near = classes[:, :NEIGHBOURS].to(d.device)
        if bool((near[listed] < 0).any()):
            raise ValueError("the classes of listed images must be numbers of 0 or more")
        near = near.clamp_min(0)
        differs = (near != near[:, :1]) & listed
        place = differs.int().argmax(dim=1, keepdim=True)
        other = torch.where(differs.any(dim=1), d.gather(1, place).squeeze(1), kth)
        scores["margin"], scores["ratio"] = first - other, _ratio(first, other)
        scores["entropy"] = label_entropy(near, listed).to(d)
        scores["disagreement"] = differs.sum(dim=1).to(d) / total
    return Evidence(**scores)  # type: ignore[arg-type]


def _pair_uncertainty(queries: Embeddings, nearest_uncertainty: Tensor) -> Tensor:
    """β of each query and its first image [n]; an uncertainty of no dimensions counts as 0."""
    u, v = (full_precision(x.detach()) for x in (queries.uncertainty, nearest_uncertainty))
    both = u + v.to(u) if u.shape[1] == v.shape[1] else u if v.shape[1] == 0 else v
    length: Tensor = torch.linalg.vector_norm(both, dim=1)
    return length


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 1.0, a / b)


@dataclass(frozen=True)
class Profile:
    """A description of a gallery: its size, and the sorted distances of some of its images to their nearest other one.

    >>> corners = Embeddings.certain(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]))
    >>> Profile.of(corners).size, [round(d, 4) for d in Profile.of(corners).nearest]
    (4, [1.4142, 1.4142, 1.4142, 1.4142])
    """

    size: int
    nearest: tuple[float, ...]

    def __post_init__(self) -> None:
        in_order = list(self.nearest) == sorted(self.nearest) and min(self.nearest, default=-1.0) >= 0
        if not (in_order and len(self.nearest) <= self.size):
            raise ValueError("the profile of a gallery has impossible values")

    @classmethod
    def of(cls, gallery: Embeddings) -> "Profile":
        """Measure d₁ of up to 1000 of the gallery's images, drawn at random, each left out of its own search."""
        rows = sample_profile_rows(len(gallery))
        search = Search(gallery[rows], gallery, None, rows, torch.arange(len(gallery)))
        search.require_neighbours()
        return cls(len(gallery), tuple(search.top(1).distances[:, 0].double().sort().values.tolist()))


def sample_profile_rows(images: int) -> Tensor:
    """Draw the images whose distances a `Profile` holds: up to 1000 of ``images``, always the same ones, ascending."""
    order: Tensor = torch.randperm(images, generator=torch.Generator().manual_seed(0))
    return order[:_PROFILE].sort().values
