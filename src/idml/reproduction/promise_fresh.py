"""What a calibrated gallery does with images and classes that were kept out of it, and after it has grown.

**fresh**: 200 galleries. For each, a fifth of the classes is kept out at random, and a fifth of the images of the other
classes. The rest is the gallery; it is calibrated as `idml calibrate` does and asked with what was kept out.

Classes that a trained model has learned from stay in the gallery, with the images that it has learned from. So all
galleries of one model are asked with the same images of these classes: one sample, which may be a lucky one. Therefore
the heads are trained anew five times, each time without another fifth of the images of the learned classes, and the
galleries are divided among the model and these five.

The images kept out are a sample too: with 40 unknown classes, more than ε of the answers can be wrong by chance where
the promise holds. What chance does is seen from a *rehearsal*: as many classes and images of the gallery itself are
taken away from the calibration, and asked as the calibration asks its queries (known without themselves, unknown
without their class). Both are asked under the same calibration, on the queries that are left. If real images are wrong
more often than the rehearsed ones, then what the calibration simulates is not what happens.

**growth**: images and classes are kept out in the same way. A gallery of half of the others (of half of the images, or
of the images of half of the classes) is calibrated with 25 % unknown queries, and grows: by 20 %, then to twice its
size; then it is calibrated again. At each stage it is asked with what was kept out.

Each error rate is that of a mixture: known and unknown queries are weighted by the share of unknown ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from idml.calibration.calibrate import CalibrationQueries, fit_queries
from idml.calibration.evidence import Profile
from idml.calibration.open_set import OpenSetQueries, QueryPool
from idml.calibration.risk_control import measure_drift
from idml.calibration.stored import Calibration
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings
from idml.evaluation.knn import Neighbours, nearest
from idml.progress import Progress
from idml.reproduction.promise_collection import KEPT_OUT
from idml.reproduction.promise_draws import (
    CONFIDENCE,
    RATES,
    REJECTED,
    SHARES,
    Curve,
    Sums,
    add_sums,
    mixture,
)
from idml.search.gallery_calibration import GallerySource
from idml.training.refit import assign_folds, refit_heads

GROWN = 40
ASKED = ("fresh", "fresh, fewer queries", "rehearsed, fewer queries")
STAGES = ("at calibration", "20 % larger", "twice as large", "calibrated again")
KINDS = ("images", "classes")
TRAININGS = 5  # of the heads, each without other images of the learned classes
_DEPTH = 256  # neighbours kept of each image; a list that is too short in a gallery is searched again


def count_answers(calibration: Calibration, asked: OpenSetQueries, share: float) -> Sums:
    """What a calibration does with queries, for each ε; the error rate is ``wrong`` / ``answered``."""
    p, absent = calibration.probability(asked.evidence), calibration.absent(asked.evidence, REJECTED)
    known, unknown = mixture(share, asked.known.float(), (~asked.known).float())
    curve, out = Curve.of(p, (~asked.correct).double(), known + unknown), {}
    for rate in RATES:
        promise = calibration.find_guarantee(rate, CONFIDENCE)
        answered, wrong = curve.at(promise.threshold)
        away = absent & (p < (2.0 if promise.threshold is None else promise.threshold))
        out[f"{rate:g}"] = {
            "refused": float(not promise.possible),
            "answered": answered,
            "wrong": wrong,
            "above": float(wrong > rate * answered + 1e-12),
            "recognised": float(away[~asked.known].double().mean()),
            "rejected": float(away[asked.known].double().mean()),
        }
    return out


# -------------------- fresh images and classes --------------------


@dataclass(frozen=True, eq=False)
class Everything:
    """All images of a data set, each searched among all others once; galleries are parts of them.

    ``learned`` [n]: the model has learned from this image. ``views`` are the embeddings and the nearest images of each:
    by the model, and by heads that were trained again. ``asked`` [n] says by which view a calibration asks each image.
    """

    labels: Tensor
    learned: Tensor
    asked: Tensor
    views: list[tuple[Embeddings, Neighbours]]

    @classmethod
    def all_of(cls, source: GallerySource, collection: Tensor, report: Progress) -> list["Everything"]:
        """Search all images by the model, and if it has learned from some, by heads that are trained anew.

        ``collection`` [n]: the image belongs to the collection that the model was trained on.
        """
        labels, folder = source.labels, source.model_folder()
        learned = leave_out_copies(labels, source.read_learned()[0], collection)
        if folder is None or not bool(learned.any()):
            return [
                cls(
                    labels, learned, torch.zeros_like(labels), [(source.embeddings, nearest(source.embeddings, _DEPTH))]
                )
            ]
        files = source.files(range(len(source.items)))

        def search_by(embeddings: Embeddings, learned: Tensor) -> Everything:
            folds = assign_folds(labels, learned)
            views = [embeddings, *refit_heads(folder, files, labels, learned, folds, report)]
            return cls(labels, learned, folds + 1, [(view, nearest(view, _DEPTH)) for view in views])

        whole = torch.isin(labels, labels[learned].unique())
        parts = torch.where(whole, assign_parts(labels, random_stream("promises, trainings")), -1)
        found = [search_by(source.embeddings, learned)]
        for part, embeddings in enumerate(refit_heads(folder, files, labels, whole, parts, report)):
            found.append(search_by(embeddings, whole & (parts != part)))
        return found

    def collect(self, inside: Tensor) -> CalibrationQueries:
        """The queries of a calibration of the gallery with the images ``inside``, as `idml calibrate` has them."""
        parts = []
        for view in range(len(self.views)):
            rows = inside & (self.asked == view)
            if bool(rows.any()):
                pool = self._pool(rows, inside, view)
                found = pool.search()
                parts += [found[found.known], pool.search_without_own()]
        return CalibrationQueries(OpenSetQueries.cat(parts), True, "")

    def search(self, asked: Tensor, inside: Tensor) -> OpenSetQueries:
        """Search the images ``asked`` in the gallery with the images ``inside``."""
        return self._pool(asked, inside, 0).search()

    def _pool(self, asked: Tensor, inside: Tensor, view: int) -> QueryPool:
        embeddings, (indices, distances) = self.views[view]
        place = torch.where(inside, inside.cumsum(0) - 1, -1)
        rows, lists = asked.nonzero().flatten(), indices[asked]
        found = torch.where(lists >= 0, place[lists.clamp_min(0)], -1)
        return QueryPool(
            embeddings[rows],
            self.labels[rows],
            embeddings[inside],
            self.labels[inside],
            rows=place[rows],
            neighbours=Neighbours(found, distances[asked].where(found >= 0, torch.inf)),
        )


def assign_parts(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Divide the images of each class among the trainings: the number of the one that does not learn from it [n].

    >>> assign_parts(torch.zeros(5, dtype=torch.long), torch.Generator()).sort().values
    tensor([0, 1, 2, 3, 4])
    """
    parts = torch.empty_like(labels)
    for label in labels.unique():
        rows = (labels == label).nonzero().flatten()
        parts[rows[torch.randperm(len(rows), generator=generator)]] = torch.arange(len(rows)) % TRAININGS
    return parts


def leave_out_copies(labels: Tensor, learned: Tensor, collection: Tensor) -> Tensor:
    """Which images were learned [n], without those that only have the bytes of a learned image of another class.

    Cars196 has the same file in several classes. A class of the collection was learned if most of its images were.
    """
    own, classes = learned & collection, int(labels.max()) + 1
    counts, learned_counts = (labels[part].bincount(minlength=classes) for part in (collection, own))
    return own & (2 * learned_counts > counts)[labels]


def keep_out(labels: Tensor, learned: Tensor, generator: torch.Generator) -> Tensor:
    """Which images are kept out [n]: a fifth of the classes (none that was learned), a fifth of the other images.

    Images that were learned stay. The other images of a class that was learned are all kept out.
    """
    learned_class = torch.isin(labels, labels[learned].unique())
    classes, free = labels.unique(), labels[~learned_class].unique()
    unknown = free[torch.randperm(len(free), generator=generator)[: round(KEPT_OUT * len(classes))]]
    fresh = torch.rand(len(labels), generator=generator) < KEPT_OUT
    return torch.isin(labels, unknown) | torch.where(learned_class, ~learned, fresh)


def rehearse(found: CalibrationQueries, generator: torch.Generator) -> tuple[CalibrationQueries, OpenSetQueries]:
    """Divide queries into those of a smaller calibration, and those that play the images and classes kept out.

    These are the unknown queries of a quarter of the classes (a fifth of all classes is a quarter of the others), and
    the known queries of a fifth of the images. No query of these classes or images is left for the calibration.
    """
    queries = found.queries
    classes = queries.labels.unique()
    outside = classes[torch.randperm(len(classes), generator=generator)[: round(KEPT_OUT * len(classes) / 0.8)]]
    of_these = torch.isin(queries.labels, outside)
    drawn = torch.rand(len(queries), generator=generator) < KEPT_OUT
    asked = torch.where(queries.known, drawn, of_these)
    left = ~of_these & ~(queries.known & drawn)
    return replace(found, queries=queries[left.nonzero().flatten()]), queries[asked.nonzero().flatten()]


def measure_fresh(searched: Sequence[Everything], galleries: int, report: Progress) -> dict[str, Any]:
    """Calibrate many galleries for each share, and ask them with fresh images; and rehearse it.

    ``searched``: by each training of the model; the galleries are divided among them.
    """
    shares: dict[str, dict[str, Sums]] = {f"{share:g}": {kind: {} for kind in ASKED} for share in SHARES}
    known = unknown = classes = 0
    for number in range(galleries):
        everything, generator = searched[number % len(searched)], random_stream("promises, fresh", number)
        out = keep_out(everything.labels, everything.learned, generator)
        found, asked = everything.collect(~out), everything.search(out, ~out)
        fewer, rehearsed = rehearse(found, generator)
        for share in SHARES:
            whole = fit_queries(found, unknown=share, seed=number, lists=False)
            smaller = fit_queries(fewer, unknown=share, seed=number, lists=False)
            pairs = ((whole, asked), (smaller, asked), (smaller, rehearsed))
            for kind, (calibration, queries) in zip(ASKED, pairs, strict=True):
                add_sums(shares[f"{share:g}"][kind], count_answers(calibration, queries, share))
        known, unknown = known + int(asked.known.sum()), unknown + int((~asked.known).sum())
        classes += len(asked.labels[~asked.known].unique())
        report({"what": "galleries asked", "done": number + 1, "images": galleries})
    means = {"known": known / galleries, "unknown": unknown / galleries, "classes": classes / galleries}
    return {"galleries": galleries, "trainings": len(searched), **means, "shares": shares}


# -------------------- growth --------------------


def measure_growth(searched: Sequence[Everything], galleries: int, share: float, report: Progress) -> dict[str, Any]:
    """Grow many galleries by images and by classes; return what happens at each stage."""
    found: dict[str, Any] = {kind: {stage: {"drifted": 0.0, "rates": {}} for stage in STAGES} for kind in KINDS}
    for number in range(galleries):
        everything, generator = searched[number % len(searched)], random_stream("promises, growth", number)
        labels, embeddings = everything.labels, everything.views[0][0]
        out = keep_out(labels, everything.learned, generator)
        for kind in KINDS:
            half, larger, whole = grow(torch.arange(len(labels)) if kind == "images" else labels, ~out, generator)
            first, again = (
                fit_queries(everything.collect(inside), unknown=share, seed=number, lists=False)
                for inside in (half, whole)
            )
            stages = [(first, half, half), (first, half, larger), (first, half, whole), (again, whole, whole)]
            for stage, (calibration, before, inside) in zip(STAGES, stages, strict=True):
                drift = measure_drift(Profile.of(embeddings[before]), Profile.of(embeddings[inside]))
                found[kind][stage]["drifted"] += float(drift.changed)
                answers = count_answers(calibration, everything.search(out, inside), share)
                add_sums(found[kind][stage]["rates"], answers)
        report({"what": "galleries grown", "done": number + 1, "images": galleries})
    return {"galleries": galleries, "trainings": len(searched), "share": share, **found}


def grow(units: Tensor, inside: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Half of the images ``inside`` [n], a fifth more, and all; images of the same unit [n] come together."""
    present = units[inside].unique()
    half = (len(present) + 1) // 2
    place = torch.full((int(units.max()) + 1,), len(units))
    place[present] = torch.randperm(len(present), generator=generator)
    return inside & (place[units] < half), inside & (place[units] < int(1.2 * half + 1e-9)), inside
