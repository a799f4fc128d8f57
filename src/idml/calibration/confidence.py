"""P(the first result is right) from the evidence of a search.

    doubt  x = b + Σ w_j·(f_j − mean_j)/deviation_j          logistic regression on "wrong"
    P        = c·σ(−x) + (1 − c)·g(x)                        g: isotonic regression of "right" on x

w minimises the mean log loss + λ/2·‖w‖². The candidates are every single score, the mix of all scores, and the mix
without u (‖u‖ and β). The candidate with the largest cross-validated R-AUROC is chosen. If others come within 0.01 of
it, x is the mean over all of them, because a choice among equals would depend on chance. P falls strictly with x, so a
single score keeps its order. λ and c are chosen by cross-validated log loss. If groups (classes) are given, no group is
divided between folds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from idml.calibration.evidence import WITH_LABELS, WITHOUT_LABELS, Evidence
from idml.evaluation.uncertainty import auroc

_FOLDS = 5
_PENALTIES = (1e-4, 1e-2, 1e-1)
_BLENDS = (1.0, 0.5, 0.1)
P_RIGHT, MIX, MIX_WITHOUT_U = "P(right)", "mix", "mix without u"  # their names in tables

_FAR = 10.0  # scores are clipped at this many deviations
_SLOPE = 1e-3  # the smallest weight of a single score: it keeps its order even if the fit finds no effect
_LARGEST_WEIGHT = 1e9  # of a stored model: sums of larger weights may overflow
_EQUAL = 0.01  # of R-AUROC: candidates within this distance of the best one are averaged with it


@dataclass(frozen=True)
class ScoreQuality:
    """How well a candidate ranks wrong answers, by cross-validation; None if no fold had right and wrong answers."""

    name: str
    r_auroc: float | None
    augrc: float | None


@dataclass(frozen=True)
class ConfidenceModel:
    """The model of P(right), see the head of this file.

    ``name`` says which candidates were chosen, ``candidates`` has the figures of all of them.
    """

    name: str
    features: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    blend: float
    knots: tuple[float, ...]
    shares: tuple[float, ...]
    candidates: tuple[ScoreQuality, ...]

    def __post_init__(self) -> None:
        widths = {len(x) for x in (self.features, self.mean, self.deviation, self.weights)}
        if len(widths) > 1 or len(self.knots) != len(self.shares) or not (self.knots or self.blend == 1):
            raise ValueError("the parts of the model of P(right) do not fit together")
        unknown = set(self.features) - {*WITHOUT_LABELS, *WITH_LABELS}
        bounded = max(map(abs, (self.bias, *self.weights))) <= _LARGEST_WEIGHT
        rising = all(a <= b for a, b in pairwise(self.knots))
        falling = all(a >= b for a, b in pairwise(self.shares)) and all(0 <= share <= 1 for share in self.shares)
        if unknown or not (0 <= self.blend <= 1 and min(self.deviation, default=1) > 0 and bounded):
            raise ValueError("the model of P(right) has impossible values")
        if not (rising and falling):
            raise ValueError("the curve of P(right) does not fall from knot to knot")

    def doubt(self, evidence: Evidence) -> Tensor:
        """The doubt x of each query [n] in float64."""
        kept = (self.mean, self.deviation, self.weights)
        mean, deviation, weights = (torch.tensor(t, dtype=torch.float64) for t in kept)
        z = (score_matrix(evidence, self.features) - mean) / deviation
        return self.bias + z.clamp(-_FAR, _FAR) @ weights

    def probability(self, evidence: Evidence) -> Tensor:
        """P(the first result is right) [n] in float64."""
        return _blended(self.doubt(evidence), self.blend, self.knots, self.shares)

    @classmethod
    def fit(
        cls, evidence: Evidence, correct: Tensor, *, labelled: bool = True, groups: Tensor | None = None, seed: int = 0
    ) -> "ConfidenceModel":
        """Choose the candidates and fit them; ``labelled=False`` uses only the scores of a gallery without labels.

        >>> near = torch.linspace(0, 1, 200)
        >>> noise = torch.rand(200, generator=torch.Generator().manual_seed(0))
        >>> evidence = Evidence(level=noise, nearest=near, kth=1 + near, spread=noise, gap=-noise)
        >>> model = ConfidenceModel.fit(evidence, noise > near, labelled=False)
        >>> model.name, model.probability(evidence[[0, 199]]).round(decimals=1)
        ('mean of mix, mix without u', tensor([1., 0.], dtype=torch.float64))
        """
        names = tuple(name for name in (*WITHOUT_LABELS, *WITH_LABELS) if name in evidence.scores)
        names = names if labelled else tuple(name for name in names if name in WITHOUT_LABELS)
        x, wrong = score_matrix(evidence, names), (~correct).double()
        if len(x) == 0:
            raise ValueError("there are no queries to fit P(right) to")
        mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0)
        deviation[deviation <= 1e-9 * mean.abs().clamp_min(1e-9)] = 1.0  # a constant score has no effect
        z = ((x - mean) / deviation).clamp(-_FAR, _FAR)
        folds = assign_folds(len(z), groups, seed)
        mixes = {MIX: names, MIX_WITHOUT_U: tuple(n for n in names if n not in ("level", "pair"))}
        penalty: dict[str, float] = {}
        guesses = {name: z[:, i] for i, name in enumerate(names)}
        for mix, used in mixes.items():
            columns = z[:, [names.index(n) for n in used]]
            tried = [(_log_loss(g := predict_out_of_fold(columns, wrong, folds, p), wrong), p, g) for p in _PENALTIES]
            _, penalty[mix], guesses[mix] = min(tried, key=lambda t: (t[0], t[1]))
        candidates = tuple(_measure_quality(name, guess, correct, folds) for name, guess in guesses.items())
        chosen = _choose(candidates)
        weights, bias = torch.zeros(len(names), dtype=torch.float64), 0.0
        for name in chosen:
            place = [names.index(n) for n in mixes.get(name, (name,))]
            own, constant = logistic(z[:, place], wrong, penalty.get(name, _PENALTIES[0]))
            weights[place] += (own if name in mixes else own.clamp_min(_SLOPE)) / len(chosen)
            bias += constant / len(chosen)
        place = weights.nonzero().flatten().tolist()
        if len(chosen) > 1:  # a mean of doubts varies less than each of them: stretch it
            slope, constant = logistic((bias + z @ weights).unsqueeze(1), wrong, _PENALTIES[0])
            stretch = max(_SLOPE, float(slope))
            weights, bias = stretch * weights, constant + stretch * bias
        doubt = bias + z[:, place] @ weights[place]
        blend = _blend(doubt, wrong, folds) if any(c.r_auroc is not None for c in candidates) else 1.0
        knots, shares = isotonic(doubt, correct) if blend < 1 else ((), ())
        kept, spread, slopes = (tuple(t[place].tolist()) for t in (mean, deviation, weights))
        used, title = tuple(names[i] for i in place), f"mean of {', '.join(chosen)}" if len(chosen) > 1 else chosen[0]
        return cls(title, used, kept, spread, slopes, bias, blend, knots, shares, candidates)


def _choose(candidates: Sequence[ScoreQuality]) -> list[str]:
    """The best candidate and those that are about as good; the nearest distance if no candidate has a figure."""
    known = {quality.name: quality.r_auroc for quality in candidates if quality.r_auroc is not None}
    best = max(known.values(), default=0.0)
    return [name for name, value in known.items() if value >= best - _EQUAL] or ["nearest"]


def logistic(z: Tensor, wrong: Tensor, penalty: float) -> tuple[Tensor, float]:
    """Weights and bias that minimise the mean log loss + penalty/2·‖w‖², by Newton's method with halved steps.

    If all answers are right or all are wrong, the weights are 0 and the bias is that of Laplace's rule of succession.

    >>> weights, bias = logistic(torch.tensor([[-1.0], [1.0], [-1.0], [1.0]]).double(), torch.tensor([0, 1, 0, 1]), 0.1)
    >>> round(float(weights), 3), round(bias, 9)
    (1.634, 0.0)
    """
    n, count = len(z), float(wrong.sum())
    if count in (0, n):
        return z.new_zeros(z.shape[1]), math.log((count + 1) / (n - count + 1))
    design = np.concatenate([z.numpy(), np.ones((n, 1))], axis=1)  # many small steps: numpy's calls cost less
    sign = 1 - 2 * wrong.numpy().astype(np.float64)
    ridge = np.append(np.full(z.shape[1], penalty), 0.0)
    w, x = np.zeros(len(ridge)), np.zeros(n)
    loss = math.log(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-x.clip(-500, 500)))
        gradient = design.T @ (p - (1 - sign) / 2) / n + ridge * w
        curvature = (design.T * (p * (1 - p))) @ design / n + np.diag(ridge + 1e-10)
        step = np.linalg.solve(curvature, gradient)
        for halvings in range(20):
            tried = w - step / 2**halvings
            x = design @ tried
            lower = float(np.logaddexp(0, sign * x).mean() + ridge @ tried**2 / 2)
            if lower <= loss:
                break
        if not loss - lower > 1e-12:
            break
        w, loss = tried, lower
    return torch.from_numpy(w[:-1]), float(w[-1])


def isotonic(doubt: Tensor, correct: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Fit g: knots and falling shares of right answers, linear in between; shares lie in [1, n + 1]/(n + 2).

    >>> isotonic(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([True, False, True, False]))
    ((0.0, 1.5, 3.0), (0.8333333333333334, 0.5, 0.16666666666666666))
    """
    from scipy.optimize import isotonic_regression

    value, place, count = doubt.double().unique(return_inverse=True, return_counts=True)
    right = torch.zeros(len(value), dtype=torch.float64).index_add_(0, place, correct.double()) / count
    fit = isotonic_regression(right.numpy(), weights=count.numpy(), increasing=False)
    blocks = np.asarray(fit.blocks)
    mass, moment = (np.add.reduceat(a, blocks[:-1]) for a in (count.numpy(), (count * value).numpy()))
    n = len(doubt)
    shares = np.clip(fit.x[blocks[:-1]], 1 / (n + 2), (n + 1) / (n + 2))
    return tuple((moment / mass).tolist()), tuple(shares.tolist())


def _blended(doubt: Tensor, blend: float, knots: Sequence[float], shares: Sequence[float]) -> Tensor:
    p = torch.sigmoid(-doubt)
    return p if blend == 1 else blend * p + (1 - blend) * torch.from_numpy(np.interp(doubt.numpy(), knots, shares))


def _blend(doubt: Tensor, wrong: Tensor, folds: Tensor) -> float:
    """The share c of the logistic curve with the lowest cross-validated log loss."""
    losses = dict.fromkeys(_BLENDS, 0.0)
    for fold in folds.unique():
        rest, held = folds != fold, folds == fold
        if bool(rest.any()):
            curve = isotonic(doubt[rest], wrong[rest] == 0)
            for c in _BLENDS:
                p = _blended(doubt[held], c, *curve)
                losses[c] -= float(torch.where(wrong[held] == 0, p, 1 - p).clamp_min(1e-12).log().sum())
    return min(_BLENDS, key=lambda c: losses[c])


def assign_folds(n: int, groups: Tensor | None, seed: int) -> Tensor:
    """Assign each query to one of five folds [n]; a group stays in one fold."""
    if groups is not None and groups.shape != (n,):
        raise ValueError(f"groups must be one per query, got shape {list(groups.shape)} for {n} queries")
    group = torch.arange(n) if groups is None else groups.unique(return_inverse=True)[1]
    order = torch.randperm(int(group.max()) + 1, generator=torch.Generator().manual_seed(seed))
    return order[group] % _FOLDS


def predict_out_of_fold(z: Tensor, wrong: Tensor, folds: Tensor, penalty: float) -> Tensor:
    """Predict the doubt about each query [n] by a logistic regression on the other folds."""
    out = torch.zeros_like(wrong)
    for fold in folds.unique():
        held = folds == fold
        weights, bias = logistic(z[~held], wrong[~held], penalty)
        out[held] = bias + z[held] @ weights
    return out


def _measure_quality(name: str, doubt: Tensor, correct: Tensor, folds: Tensor) -> ScoreQuality:
    """Means over the folds that hold both right and wrong answers; AUGRC by its identity with R-AUROC."""
    found = []
    for fold in folds.unique():
        x, right = doubt[folds == fold], correct[folds == fold]
        n, error = len(x), 1 - int(right.sum()) / len(x)
        if 0 < error < 1:
            area = auroc(x, ~right)
            found.append((area, (1 - area) * (1 - error) * error + error * error / 2 + error / (2 * n)))
    if not found:
        return ScoreQuality(name, None, None)
    r_auroc, augrc = (sum(column) / len(found) for column in zip(*found, strict=True))
    return ScoreQuality(name, r_auroc, augrc)


def _log_loss(doubt: Tensor, wrong: Tensor) -> float:
    return float(torch.nn.functional.binary_cross_entropy_with_logits(doubt, wrong))


def score_matrix(evidence: Evidence, names: Sequence[str]) -> Tensor:
    """The named scores as a matrix [n, names] in float64."""
    scores = evidence.scores
    if missing := [name for name in names if name not in scores]:
        raise ValueError(f"the evidence lacks {', '.join(missing)}: it was calibrated for another kind of gallery")
    return torch.stack([scores[name].detach().cpu().double() for name in names], dim=1)
