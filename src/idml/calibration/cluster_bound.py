"""A bound on an error rate for queries that hang together, such as the images of one class.

A share π of the queries is of unknown classes. Query i has the weight w_i = (1 − π)/n_known or π/n_unknown. It is
answered (a_i = 1) if P ≥ t, and answered wrong (e_i = 1) if the answer is wrong too. The error rate among the answers
is E/A with E = Σ w_i·e_i and A = Σ w_i·a_i. It is at most ε if and only if the mean of e − ε·a is at most 0 (Fieller,
1954), so no ratio has to be estimated:

    z_i = e_i − ε·a_i            Z = Σ w_i·z_i            p = P(T_ν ≤ Z / √V)
    V   = V_known + V_unknown + 2·max(0, (1 − f)·C)
    V_k = m/(m − 1)·Σ_c (Σ_{i ∈ c} w_i·(z_i − z̄))²       over the m clusters of a kind k, z̄ the mean of the kind
    C   = Σ_c (Σ_{known i ∈ c} w_i·(z_i − z̄))·(Σ_{unknown i ∈ c} w_i·(z_i − z̄))       over the classes c

The clusters of unknown queries are their classes: a new unknown image is of a class that nobody has seen. A new known
image is of one of the gallery's classes, and a share f of these was counted: 1/2 if every class of the gallery is
asked, else the classes counted over those of the gallery. So V_known = (1 − f)·V_class +
f·V_image, the variances with classes and with single images as clusters: sampling without replacement in two stages
(Cochran, 1977). Copies of an image are a cluster, known or not, and there f = 0. T_ν is Student's t with ν = clusters −
1. This is the cluster-robust variance of Liang and Zeger (1986) with the t distribution that Cameron and Miller (2015)
recommend. It is *asymptotic* in the number of clusters: with few clusters it promises too much. If no query was
answered wrong, V says nothing. Therefore a bound that counts images has to hold as well: Clopper and Pearson's with the
effective number of queries of Kish (1965),

    n' = (Σ w_i·a_i)² / Σ w_i²·a_i        k' = n'·E/A        p' = P(Bin(n', ε) ≤ k'), by the beta distribution

and the p-value is max(p, p'), see `idml.calibration.risk_control.clustered_p_values`. If all queries are known and each
is a cluster, p' alone is used. It is *exact* if all weights are equal. Unknown queries always count by class.

If no unknown query was answered, V_unknown is 0 too, and a class that looks like one of the gallery may just not have
been counted. With π ≤ 1/2 promises are kept in simulations and in the studies nevertheless. With π > 1/2 they are not,
and a third bound has to hold, by whole classes. Let q be the share of the unknown queries that are answered, all of
them wrong; E = E_known + π·q and A = A_known + π·q. So the error rate is at most ε if and only if

    q ≤ q* = (ε·A_known − E_known)/((1 − ε)·π)        p'' = P(Bin(m', q*) ≤ m'·q̂), by the beta distribution

with m' = (Σ n_c)²/Σ n_c² classes (Kish, of the numbers n_c of unknown queries of each class) and the share q̂ that was
answered among those counted. A class that is answered as a whole counts 1, one of which a tenth is answered 1/10.
Without any, p'' ≤ δ means (1 − q*)^m' ≤ δ. The p-value is then max(p, p', p''). E_known and A_known are taken as they
were counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

COUNTED = 0.5  # f: the share of the gallery's classes that is counted; the others are fitted
BY_CLASS = 0.5  # with a larger share of unknown queries their classes are counted as a whole too


@dataclass(frozen=True)
class UnknownClasses:
    """What the bound by whole classes needs: π, m', and for each threshold π·q̂; see above."""

    share: float
    classes: float
    answered: tuple[float, ...]


@dataclass(frozen=True)
class ClusterMoments:
    """The sums of the formulas above for each threshold, so that every ε can be tested later.

    ``variance`` and ``shared`` are V_known + V_unknown and C for z = e, for the product of e and a, and for z = a:
    V for any ε is V(e) − 2ε·V(e, a) + ε²·V(a).
    """

    answered: tuple[float, ...]
    wrong: tuple[float, ...]
    effective: tuple[float, ...]
    variance: tuple[tuple[float, float, float], ...]
    shared: tuple[tuple[float, float, float], ...]
    clusters: int
    """How many clusters there are, of the kind with fewer; 0 if all queries are known and each is a cluster."""
    unknown: UnknownClasses | None = field(default=None, metadata={"added": True})
    """Only with a share of unknown queries above 1/2."""

    @classmethod
    def of(
        cls,
        p: Tensor,
        correct: Tensor,
        thresholds: Sequence[float],
        *,
        known: Tensor,
        share: float,
        groups: Tensor,
        known_by_image: bool,
        classes: int | None = None,
    ) -> "ClusterMoments":
        """Sum up a sample.

        Args:
            p: P(right) of the queries [n].
            correct: bool [n], the first result is right.
            thresholds: chosen without looking at this sample.
            known: bool [n], the class of the query is in the gallery.
            share: π, the share of unknown queries to weight the sample by.
            groups: the classes of the queries [n], the clusters of unknown queries.
            known_by_image: known queries are of the gallery's classes, see above; otherwise their groups are clusters.
            classes: of the gallery, if not all of them are asked; f is the share of those counted here, else 1/2.
        """
        kinds = [(mask, part) for mask, part in ((known, 1 - share), (~known, share)) if part > 0]
        if not all(bool(mask.any()) for mask, _ in kinds):
            raise ValueError(f"a share of {share:.0%} unknown queries needs known and unknown queries to count")
        t, places = np.asarray(thresholds, dtype=np.float64), groups.unique(return_inverse=True)[1].numpy()
        answered, wrong, squares = (np.zeros(len(t)) for _ in range(3))
        variance, clusters, by_class = np.zeros((len(t), 3)), [], []
        counted, whole = COUNTED, None
        for mask, part in kinds:
            rows = mask.nonzero().flatten()
            n, own = len(rows), places[rows.numpy()]
            weight, sizes = part / n, np.bincount(own, minlength=int(places.max()) + 1)
            a, e = _count_by_class(p[rows].double().numpy(), correct[rows].numpy(), t, own, len(sizes))
            both_a, both_e = a.sum(0), e.sum(0)
            answered, wrong = answered + weight * both_a, wrong + weight * both_e
            squares += weight**2 * both_a
            sums = weight * np.stack([x - np.outer(sizes, x.sum(0) / n) for x in (e, a)])
            by_class.append(sums)
            m = int((sizes > 0).sum())
            spread = _products(sums, sums) * (m / (m - 1) if m > 1 else 1.0)
            if known_by_image and mask is known:  # the sums over single queries, whose e and a are 0 or 1
                alone = np.stack([both_e - both_e**2 / n, both_e - both_e * both_a / n, both_a - both_a**2 / n], axis=1)
                alone *= weight**2 * (n / (n - 1) if n > 1 else 1.0)
                counted = COUNTED if classes is None else min(1.0, m / classes)
                spread = counted * alone + (1 - counted) * spread if len(kinds) > 1 else alone
                m = n
            variance += spread
            if m < n or mask is not known:  # a class of a single unknown query is a cluster too
                clusters.append(m)
            if mask is not known and share > BY_CLASS:
                whole = UnknownClasses(share, float(n**2 / (sizes**2).sum()), tuple((weight * both_a).tolist()))
        shared = np.zeros_like(variance)
        if len(kinds) > 1:
            shared = _products(by_class[0], by_class[1]) * (1 - counted if known_by_image else 1.0)
        effective = np.divide(answered**2, squares, out=np.zeros(len(t)), where=squares > 0)
        return cls(
            tuple(answered.tolist()),
            tuple(wrong.tolist()),
            tuple(effective.tolist()),
            tuple((x, y, z) for x, y, z in variance.tolist()),
            tuple((x, y, z) for x, y, z in shared.tolist()),
            min(clusters, default=0),
            whole,
        )


def _count_by_class(
    p: NDArray[np.float64], correct: NDArray[np.bool_], t: NDArray[np.float64], classes: NDArray[np.int64], total: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How many queries of each class have P ≥ t, and how many of these are wrong [total, thresholds]."""
    order = np.argsort(-t, kind="stable")  # falling thresholds: a query is answered from its first one on
    first = np.searchsorted(-t[order], -p, side="left")
    out = []
    for weights in (None, (~correct).astype(np.float64)):
        cells = np.bincount(classes * (len(t) + 1) + first, weights, total * (len(t) + 1))
        found = np.empty((total, len(t)))
        found[:, order] = cells.reshape(total, -1)[:, : len(t)].cumsum(1)
        out.append(found)
    return out[0], out[1]


def _products(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums over the clusters of e·e, e·a and a·a for each threshold [thresholds, 3]."""
    (e, a), (f, b) = x, y
    mixed = (np.einsum("ct,ct->t", e, b) + np.einsum("ct,ct->t", a, f)) / 2
    return np.stack([np.einsum("ct,ct->t", e, f), mixed, np.einsum("ct,ct->t", a, b)], axis=1)
