"""What a search shows about its own answer: the evidence from which `idml.calibration.stored` tells P(right).

Everything comes from one list of the k nearest images, d₁ ≤ … ≤ d_k, so that any engine's answer will do. Each score is
larger where the answer is less certain:

    level     ‖u‖ of the query                       nearest       d₁
    pair      β = ‖u_q + u_1‖, 1 the first image     kth           d_k
    gap       −(d₂ − d₁)                             spread        d₁ / d_k

and from a labelled gallery, d_other the distance of the first image in the list that is not of the first one's class
(d_k, which it exceeds, if the list holds a single class):

    margin    −(d_other − d₁)                        entropy       −Σ p·ln p, p the labels' shares among the k
    ratio     d₁ / d_other                           disagreement  1 − share of the k with the first one's label

A ratio 0/0 is 1. Where the list holds one image, d₂ = d_k = d₁.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idml.embeddings import Embeddings, Index, as_rows, full_precision
from idml.evaluation.knn import Names, Search, numbered
from idml.evaluation.scores import _entropy, _seen
from idml.metric import IntrospectiveMetric

WITHOUT_LABELS = ("level", "nearest", "kth", "spread", "gap", "pair")
WITH_LABELS = ("margin", "ratio", "entropy", "disagreement")

_PROFILE = 1000  # images, and distances kept, that stand for a gallery


@dataclass(frozen=True, eq=False)
class Evidence:
    """The scores of n queries, see the head of this file; None for what the gallery cannot tell.

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
    indices: Tensor | None = None  # the images listed [n, m], −1 where there are fewer
    searched: str = ""  # how, for instance "10 nearest, euclidean": scores of another search cannot be compared

    def __post_init__(self) -> None:
        n = len(self.nearest)
        for name, x in self.scores.items():
            if x.shape != (n,) or not x.is_floating_point():
                raise ValueError(f"{name} must be floats [{n}], got {x.dtype} {list(x.shape)}")
            bad = (~torch.isfinite(x)).nonzero().flatten()
            if len(bad):
                raise ValueError(f"{len(bad)} of {n} values of {name} are NaN or infinite (first: query {int(bad[0])})")
        if self.indices is not None and (self.indices.ndim != 2 or len(self.indices) != n):
            raise ValueError(f"indices must be [{n}, listed], got {list(self.indices.shape)}")

    @property
    def scores(self) -> dict[str, Tensor]:
        """The scores there are, by name."""
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
        indices = None if self.indices is None else self.indices[rows]
        return replace(self, indices=indices, **{name: x[rows] for name, x in self.scores.items()})  # type: ignore[arg-type]


def evidence_from_lists(
    distances: Tensor,
    level: Tensor,
    *,
    classes: Tensor | None = None,
    pair: Tensor | None = None,
    indices: Tensor | None = None,
    searched: str = "",
) -> Evidence:
    """The evidence of lists of neighbours, as any engine gives them.

    Args:
        distances: [n, k], ascending; ∞ where a query sees fewer than k images.
        level: ‖u‖ of the queries [n].
        classes: numbers of the neighbours' classes [n, k], 0 or more; read only where the distance is finite.
        pair: β of each query and its first neighbour [n].
        indices: the images listed; kept as given.
        searched: kept as given.

    >>> lists = torch.tensor([[0.2, 0.4, 0.8]])
    >>> found = evidence_from_lists(lists, torch.zeros(1), classes=torch.tensor([[3, 3, 1]]))
    >>> found.margin, found.gap, found.disagreement
    (tensor([-0.6000]), tensor([-0.2000]), tensor([0.3333]))
    """
    if distances.ndim != 2 or distances.shape[1] == 0 or not distances.is_floating_point():
        raise ValueError(f"distances must be floats [queries, k], got {distances.dtype} {list(distances.shape)}")
    d = full_precision(distances)
    seen = d != torch.inf
    total = seen.sum(dim=1)
    if len(empty := (total == 0).nonzero().flatten()):
        raise ValueError(f"{len(empty)} of {len(d)} queries found no image at all (first: query {int(empty[0])})")
    first, kth = d[:, 0], d.gather(1, total.unsqueeze(1) - 1).squeeze(1)
    second = torch.where(total > 1, d[:, min(1, d.shape[1] - 1)], first)
    scores = {
        "level": full_precision(level).to(d),
        "nearest": first,
        "kth": kth,
        "spread": _ratio(first, kth),
        "gap": first - second,
        "pair": None if pair is None else full_precision(pair).to(d),
    }
    if classes is not None:
        if classes.shape != d.shape or bool((classes[seen] < 0).any()):
            raise ValueError(f"classes must be numbers of 0 or more {list(d.shape)}, got {list(classes.shape)}")
        near = classes.clamp_min(0)
        differs = (near != near[:, :1]) & seen
        place = differs.int().argmax(dim=1, keepdim=True)
        other = torch.where(differs.any(dim=1), d.gather(1, place).squeeze(1), kth)
        scores["margin"], scores["ratio"] = first - other, _ratio(first, other)
        scores["entropy"] = _entropy(near, seen).to(d)
        scores["disagreement"] = differs.sum(dim=1).to(d) / total
    return Evidence(**scores, indices=indices, searched=searched)  # type: ignore[arg-type]


def gather_evidence(
    queries: Embeddings,
    gallery: Embeddings,
    gallery_labels: Names | None = None,
    *,
    query_ids: Names | None = None,
    gallery_ids: Names | None = None,
    metric: IntrospectiveMetric | None = None,
    k: int = 10,
    listed: int | None = None,
) -> Evidence:
    """The evidence of queries against a gallery, from one exact search; arguments as in `idml.evaluation.nearest`.

    ``listed`` (k if not given) is how many neighbours ``indices`` keeps, for result sets of more than k images.

    >>> gallery = Embeddings.certain(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    >>> found = gather_evidence(Embeddings.certain(torch.tensor([[1.0, 0.0]])), gallery, ["cat", "dog", "dog"], k=2)
    >>> found.nearest, found.margin, found.indices
    (tensor([0.]), tensor([-1.4142]), tensor([[0, 1]]))
    """
    search = Search(queries, gallery, metric, query_ids, gallery_ids)
    found = _seen(search, max(k, listed or k))
    indices, distances = found.indices.cpu(), found.distances[:, :k].cpu()
    classes = None
    if gallery_labels is not None:
        (codes,) = numbered("labels", gallery_labels)
        if len(codes) != len(gallery):
            raise ValueError(f"{len(codes)} gallery labels for {len(gallery)} gallery images")
        classes = codes[indices[:, :k].clamp_min(0)]
    u, v = full_precision(queries.uncertainty.detach()), full_precision(gallery.uncertainty.detach())
    first = v[found.indices[:, 0]]
    both = u + first if u.shape[1] == v.shape[1] else u if v.shape[1] == 0 else first  # no dimensions: u = 0
    introspective = metric is not None and metric.rule == "similar"
    how = f"introspective τ={metric.tau:g} γ={metric.gamma:g}" if metric and introspective else "euclidean"
    return evidence_from_lists(
        distances,
        queries.detach().level.cpu(),
        classes=classes,
        pair=torch.linalg.vector_norm(both, dim=1).cpu(),
        indices=indices,
        searched=f"{k} nearest, {how}",
    )


def first_right(indices: Tensor, labels: Names, gallery_labels: Names) -> Tensor:
    """The place of the first image of the query's class in its list [n], from 1; 0 where the list holds none.

    ``first_right(…) == 1`` says where the first result is right.

    >>> first_right(torch.tensor([[0, 1], [2, 1], [0, -1]]), ["cat", "dog", "cow"], ["cat", "dog", "cat"])
    tensor([1, 2, 0])
    """
    own, theirs = numbered("labels", labels, gallery_labels)
    if indices.ndim != 2 or len(indices) != len(own):
        raise ValueError(f"{len(own)} labels for lists of shape {list(indices.shape)}")
    right = (theirs[indices.clamp_min(0)] == own.unsqueeze(1)) & (indices >= 0)
    return torch.where(right.any(dim=1), right.int().argmax(dim=1) + 1, 0)


@dataclass(frozen=True)
class Profile:
    """What a gallery looks like from within: its size, and sorted distances from some of its images to their nearest.

    >>> corners = Embeddings.certain(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]))
    >>> Profile.of(corners).size, [round(d, 4) for d in Profile.of(corners).nearest]
    (4, [1.4142, 1.4142, 1.4142, 1.4142])
    """

    size: int
    nearest: tuple[float, ...]

    @classmethod
    def of(cls, gallery: Embeddings, *, metric: IntrospectiveMetric | None = None, seed: int = 0) -> "Profile":
        """Leave-one-out d₁ of up to 1000 of the gallery's images, drawn at random."""
        n = len(gallery)
        rows = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:_PROFILE].sort().values
        found = _seen(Search(gallery[rows], gallery, metric, rows, torch.arange(n)), 1)
        return cls(n, tuple(found.distances[:, 0].double().sort().values.tolist()))


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 1.0, a / b)
