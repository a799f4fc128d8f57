"""Draws of calibration queries from a population whose true error rates are known.

The population is every query that a gallery gives (`idml.search.gallery_calibration.collect_queries`): each image as a
known query, and again as an unknown one. A draw is what one user would have: a sample of it, as large as a calibration
takes. It is fitted by the code of `idml calibrate`, and the error rate of its threshold in the population is the truth.

    by image   images are drawn one by one, with replacement. The truth is that of all images
    by class   classes are drawn with replacement, and images within them. Known queries are of the classes drawn (these
               are the gallery), so the truth of known queries is that of all images of these classes. Unknown queries
               are of any class, so their truth is that of all classes. Without labels a class is a picture with its
               copies, 600 of them are drawn, and known queries are of any picture

A promise is *broken* if its true error rate is above ε. Queries that were not drawn are *fresh* (of unknown queries by
class: the classes that were not). Three thresholds are compared: the one promised, the one that a bound by image would
promise on the same P and the same counts, and that of an oracle, the lowest with a true error rate of at most ε.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idml.calibration.calibrate import CalibrationQueries, fit_queries
from idml.calibration.risk_control import ThresholdCounts

RATES, SHARES, DRAWS = (0.05, 0.1, 0.2), (0.0, 0.25, 0.5), 200
SAMPLES = ("class", "image")
CONFIDENCE = 0.9
REJECTED = 0.05  # the share of known queries that may be answered with "not in the collection"

Sums = dict[str, dict[str, float]]


# -------------------- the population --------------------


@dataclass(frozen=True, eq=False)
class Population:
    """Queries, and the rows of each image among them. Images are sorted by class; classes are numbered 0 …

    ``known`` [n] and ``unknown`` [n] are the rows of an image as a known and as an unknown query. ``sizes`` and
    ``starts`` say where the images of each class are.
    """

    found: CalibrationQueries
    known: Tensor
    unknown: Tensor
    labels: Tensor
    sizes: Tensor
    starts: Tensor

    @classmethod
    def of(cls, found: CalibrationQueries) -> "Population":
        """Pair the queries of each image. An image that is only an unknown query (alone in its class) is left out.

        Queries come in the same order within each class, once known and once unknown.
        """
        queries = found.queries
        classes = queries.labels[queries.known].unique()
        kept = torch.isin(queries.labels, classes)
        rows = [(mask & kept).nonzero().flatten() for mask in (queries.known, ~queries.known)]
        known, unknown = (part[queries.labels[part].argsort(stable=True)] for part in rows)
        labels = queries.labels[known]
        if not torch.equal(labels, queries.labels[unknown]):
            raise ValueError("every image has to be a known and an unknown query once")
        _, numbers, sizes = labels.unique(return_inverse=True, return_counts=True)
        return cls(found, known, unknown, numbers, sizes, sizes.cumsum(0) - sizes)

    def __len__(self) -> int:
        return len(self.known)

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.sizes)


@dataclass(frozen=True, eq=False)
class Draw:
    """Images drawn from a population, and the groups that calibration sees. ``weights``: of known images in the truth.

    ``fresh_known`` and ``fresh_unknown`` are masks of the images that were not drawn as such queries.
    """

    images: Tensor
    groups: Tensor
    weights: Tensor
    fresh_known: Tensor
    fresh_unknown: Tensor


def draw(
    population: Population, sample: str, most: int, generator: torch.Generator, *, classes_drawn: int | None = None
) -> Draw:
    """Draw about as many images as there are, ``most`` at most, by image or by class (all, or ``classes_drawn``)."""
    n, classes = len(population), population.classes
    if sample == "image":
        images = torch.randint(n, (min(n, most),), generator=generator)
        fresh = torch.ones(n, dtype=torch.bool)
        fresh[images] = False
        return Draw(images, population.labels[images], torch.ones(n), fresh, fresh)
    chosen = torch.randint(classes, (classes_drawn or classes,), generator=generator)
    sizes = population.sizes[chosen]
    groups = torch.arange(len(chosen)).repeat_interleave(sizes)
    place = (torch.rand(len(groups), generator=generator) * sizes[groups]).long()
    images = population.starts[chosen[groups]] + place
    kept = torch.randperm(len(images), generator=generator)[:most].sort().values
    images, groups = images[kept], groups[kept]
    fresh = torch.ones(n, dtype=torch.bool)
    fresh[images] = False
    times = chosen.bincount(minlength=classes)[population.labels]
    if not population.found.known_by_image:
        return Draw(images, groups, torch.ones(n), times == 0, times == 0)
    return Draw(images, groups, times.float(), fresh & (times > 0), times == 0)


def take_queries(population: Population, drawn: Draw) -> CalibrationQueries:
    """The queries of a draw, as `idml calibrate` has them."""
    rows = torch.cat([population.known[drawn.images], population.unknown[drawn.images]])
    queries = replace(population.found.queries[rows], labels=drawn.groups.repeat(2))
    return replace(population.found, queries=queries)


# -------------------- one draw --------------------


@dataclass(frozen=True, eq=False)
class Curve:
    """The share of queries answered, and answered wrong, for every threshold on P: those of weighted queries."""

    p: Tensor  # descending
    answered: Tensor
    wrong: Tensor

    @classmethod
    def of(cls, p: Tensor, wrong: Tensor, weights: Tensor) -> "Curve":
        """Sum up weighted queries; the weights add to 1, or to 0 if there are none."""
        order = p.argsort(descending=True)
        w = weights[order].double()
        return cls(p[order], w.cumsum(0), (w * wrong[order]).cumsum(0))

    def at(self, threshold: float | None) -> tuple[float, float]:
        """The shares answered and answered wrong with P ≥ threshold; with None nothing is answered."""
        if threshold is None:
            return 0.0, 0.0
        count = int(torch.searchsorted(-self.p, -threshold, right=True))
        return (float(self.answered[count - 1]), float(self.wrong[count - 1])) if count else (0.0, 0.0)

    def best_coverage(self, max_error: float) -> float:
        """The largest share that can be answered with a share ``max_error`` of the answers wrong, or less."""
        ends = torch.ones(len(self.p), dtype=torch.bool)
        ends[:-1] = self.p[:-1] != self.p[1:]  # queries with the same P are answered together
        kept = ends & (self.wrong <= max_error * self.answered + 1e-12)
        return float(self.answered[kept].max()) if bool(kept.any()) else 0.0


def mixture(share: float, known: Tensor, unknown: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of known and unknown queries that add to 1 − share and share."""
    parts = ((1 - share, known), (share, unknown))
    one, other = (part * w.double() / w.sum().clamp_min(1e-300) for part, w in parts)
    return one, other


def count_by_image(counts: ThresholdCounts) -> ThresholdCounts:
    """The same counts with a bound for which every query is independent."""
    return counts if counts.moments is None else replace(counts, moments=replace(counts.moments, clusters=0))


def measure_draw(population: Population, drawn: Draw, share: float, seed: int) -> tuple[Sums, int]:
    """Calibrate on a draw; return for each ε what became of the promise, and how many classes were counted."""
    found = take_queries(population, drawn)
    calibration = fit_queries(found, unknown=share, seed=seed, lists=False)
    independent = count_by_image(calibration.counts)
    every = population.found.queries
    p, absent = calibration.probability(every.evidence), calibration.absent(every.evidence, REJECTED)
    rows = torch.cat([population.known, population.unknown])
    p, absent, wrong = p[rows], absent[rows], (~every.correct[rows]).double()
    truth = Curve.of(p, wrong, torch.cat(mixture(share, drawn.weights, torch.ones(len(population)))))
    fresh_weights = drawn.weights * drawn.fresh_known, drawn.fresh_unknown.float()
    fresh = Curve.of(p, wrong, torch.cat(mixture(share, *fresh_weights)))
    out = {}
    for rate in RATES:
        promise, other = (c.find_guarantee(rate, CONFIDENCE) for c in (calibration.counts, independent))
        (answered, bad), (other_answered, other_bad) = truth.at(promise.threshold), truth.at(other.threshold)
        new, new_bad = fresh.at(promise.threshold)
        away = absent & (p < (2.0 if promise.threshold is None else promise.threshold))
        rejected, recognised = away.double().split(len(population))
        out[f"{rate:g}"] = {
            "refused": float(not promise.possible),
            "broken": float(bad > rate * answered + 1e-12),
            "coverage": answered,
            "coverage_by_image": other_answered,
            "broken_by_image": float(other_bad > rate * other_answered + 1e-12),
            "coverage_oracle": truth.best_coverage(rate),
            "fresh_answered": new,
            "fresh_wrong": new_bad,
            "recognised": float((recognised * fresh_weights[1]).sum() / fresh_weights[1].sum().clamp_min(1)),
            "rejected": float((rejected * fresh_weights[0]).sum() / fresh_weights[0].sum().clamp_min(1)),
        }
    moments = calibration.counts.moments
    return out, 0 if moments is None else moments.clusters


def add_sums(total: Sums, more: Sums) -> None:
    """Add the counts of a draw."""
    for rate, counts in more.items():
        into = total.setdefault(rate, dict.fromkeys(counts, 0.0))
        for name, value in counts.items():
            into[name] += value
