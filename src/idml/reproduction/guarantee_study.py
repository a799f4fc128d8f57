"""The guarantee study: do guarantees hold, and is P(right) ever below a single score?

One model for each seed embeds the test images once. Each of 200 rounds draws classes that are not in the gallery (0, 25
or 50 % of the queries) and then a calibration sample, half as large as the population of all queries:

    by image   single queries, drawn independently with replacement: the case that the guarantee covers
    by class   whole classes, drawn with replacement: queries of one class depend on each other, nothing is guaranteed

The true error rate of a threshold is that of the whole population, from which the sample was drawn. A guarantee is
*violated* where that rate is above the target; this may happen in a share δ = 0.1 of all rounds, including those that
end without a guarantee. The table also has the errors among *fresh* queries, which were not drawn. These vary by chance
too, so they exceed the target more often.

Expected cost on two cores: CUB at 112 px 3 minutes of features for each seed, glyphs a minute of training, then for
each seed and share 1 to 3 minutes, on glyphs 2 to 6.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.calibration.confidence import P_RIGHT
from idml.calibration.open_set import OpenSetQueries, QueryPool, draw_unknown
from idml.calibration.risk_control import ERROR_RATES, clopper_pearson
from idml.calibration.score_comparison import compare_scores
from idml.calibration.stored import Calibration
from idml.data.augment import CLEAN
from idml.data.datasets import Dataset
from idml.data.sampling import random_stream
from idml.evaluation.evaluate import EvaluatedModel
from idml.files import write_atomic
from idml.progress import Progress, image_counter, silent
from idml.reproduction.regimes import method_options
from idml.reproduction.runner import Cell, Measures, Store
from idml.reproduction.stored_results import Row
from idml.reproduction.studies import Study, StudyTable
from idml.training.config import TrainConfig

SHARES, ROUNDS, DELTA = (0.0, 0.25, 0.5), 200, 0.1
COMPARED = 10  # rounds in which P is compared with every score
GALLERIES, SAMPLES = ("labelled", "unlabelled"), ("image", "class")
REJECTED = 0.05  # the share of known queries that may be answered with "not in the collection"


# -------------------- rounds --------------------


def guarantee_cells(store: Store, seeds: int) -> list[Cell]:
    """Return a cell for each seed."""
    rate = store.regime.study_rate
    return [
        store.cell("multi_similarity", method_options("idml"), rate, seed, study="guarantee") for seed in range(seeds)
    ]


def measure_guarantee(config: TrainConfig, run: Path, dataset: Dataset, _: object, report: Progress) -> dict[str, Any]:
    """Return what `measure_share` finds for each share of unknown queries; a finished share is kept in the run."""

    candidate = EvaluatedModel.load(run, dataset, None, partial(image_counter, report), silent)
    theirs = () if candidate.gallery is None else (candidate.gallery_embeddings, candidate.gallery_labels)
    pool = QueryPool(candidate.embed_view(CLEAN)[1], candidate.labels, *theirs)
    shares = {}
    for share in SHARES:
        name = f"{round(100 * share)}"
        path = run / f"unknown-{name}.json"
        if not path.exists():
            write_atomic(path, json.dumps(measure_share(pool, share, ROUNDS, report)).encode())
        shares[name] = json.loads(path.read_text())
    return {"rounds": ROUNDS, "shares": shares}


def measure_share(pool: QueryPool, share: float, rounds: int, report: Progress = silent) -> dict[str, Any]:
    """Return what happens to the guarantees at one share of unknown queries, and what P is worth there.

    ``guarantees``: for each gallery, sample and target error rate the sums over the rounds of `count_outcomes`;
    ``scores``: what `compare_scores` finds for each gallery in each of the first ten rounds (with no unknown classes,
    where all rounds have the same queries, in the first).
    """
    sums: dict[str, dict[str, dict[str, dict[str, float]]]] = {g: {s: {} for s in SAMPLES} for g in GALLERIES}
    scores: dict[str, list[dict[str, Any]]] = {g: [] for g in GALLERIES}
    trial = initial = _trial(pool, share, 0)
    for number in range(rounds):
        if share and number:
            trial = _trial(pool, share, number)
        for gallery in GALLERIES if number < (COMPARED if share else 1) else ():
            scores[gallery].append(compare_scores(trial, labelled=gallery == "labelled", seed=number))
        for sample in SAMPLES:
            rows = draw_sample(trial, sample, random_stream(f"guarantee by {sample}", number))
            for gallery in GALLERIES:
                found = Calibration.fit(
                    trial.evidence[rows],
                    trial.correct[rows],
                    labelled=gallery == "labelled",
                    groups=trial.labels[rows],
                    known=trial.known[rows],
                    seed=number,
                )
                for error, counts in count_outcomes(found, trial, rows).items():
                    into = sums[gallery][sample].setdefault(error, dict.fromkeys(counts, 0.0))
                    for name, value in counts.items():
                        into[name] += value
        report({"done": (number + 1) * len(trial), "images": rounds * len(trial), "what": "calibrated and tested"})
    return {
        "queries": len(initial),
        "classes": len(initial.labels.unique()),
        "right": float(initial.correct.double().mean()),
        "guarantees": sums,
        "scores": scores,
    }


def _trial(pool: QueryPool, share: float, number: int) -> OpenSetQueries:
    return pool.search(without=draw_unknown(pool.labels, share, random_stream("guarantee, unknown classes", number)))


def draw_sample(trial: OpenSetQueries, sample: str, generator: torch.Generator) -> Tensor:
    """Draw a calibration sample with replacement: half as many queries as there are, or half as many classes."""
    if sample == "image":
        return torch.randint(len(trial), (len(trial) // 2,), generator=generator)
    order = trial.labels.argsort(stable=True)
    members = order.split(trial.labels.unique(return_counts=True)[1].tolist())
    drawn = torch.randint(len(members), (max(1, len(members) // 2),), generator=generator).tolist()
    return torch.cat([members[i] for i in drawn])


def count_outcomes(found: Calibration, trial: OpenSetQueries, rows: Tensor) -> dict[str, dict[str, float]]:
    """Count what a calibration on the queries ``rows`` does, for each target error rate.

    ``guaranteed``: 1 or 0; ``answered``: the share of all queries; ``error``: the true error rate (0 if nothing is
    answered); ``violated``: it is above the target; of the fresh queries how many are answered, answered wrong, and
    whether these exceed the target rate; how many are unknown, and of these recognised; how many known, and rejected.
    """
    fresh = torch.ones(len(trial), dtype=torch.bool)
    fresh[rows] = False
    p, far, out = found.probability(trial.evidence), found.absent(trial.evidence, REJECTED), {}
    for target in ERROR_RATES:
        threshold = found.find_guarantee(target, 1 - DELTA).threshold
        match = p >= threshold if threshold is not None else torch.zeros_like(fresh)
        wrong = match & ~trial.correct
        answered, new, new_wrong = (int(mask.sum()) for mask in (match, match & fresh, wrong & fresh))
        error = int(wrong.sum()) / max(1, answered)
        counted = {"unknown": ~trial.known & fresh, "known": trial.known & fresh}
        out[f"{target:g}"] = {
            "guaranteed": float(threshold is not None),
            "answered": answered / len(trial),
            "error": error,
            "violated": float(error > target),
            "fresh_answered": float(new),
            "fresh_wrong": float(new_wrong),
            "fresh_above": float(new_wrong > target * new),
            **{name: float(mask.sum()) for name, mask in counted.items()},
            "recognised": float((counted["unknown"] & far & ~match).sum()),
            "rejected": float((counted["known"] & far & ~match).sum()),
        }
    return out


# -------------------- tables --------------------


def guarantee_tables(rows: list[Row]) -> list[StudyTable]:
    """Return the tables of guarantees, of P against the best single score, and of every score."""
    results = [
        {"seed": row["options"]["seed"], "unknown": int(name) / 100, "rounds": row["rounds"], **found}
        for row in rows
        for name, found in row["shares"].items()
    ]
    best = "P(right) against the best single score, on classes that had no part in its fit"
    means = "Every score: means over draws and seeds, in brackets those of the 95 % intervals"
    return [
        StudyTable("table", "Guarantees: sums over all rounds and seeds; δ = 10 %", *guarantee_table(results)),
        StudyTable("against", best, *against_table(results)),
        StudyTable("scores", means, *score_table(results)),
    ]


def guarantee_table(results: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return a row for each gallery, share of unknown queries and target, with samples by image and by class.

    "Violated" has its 95 % interval (Clopper–Pearson); it is starred where that lies above δ.
    """
    header = [
        "gallery", "unknown", "target error", "by image: guaranteed", "answered", "wrong among fresh", "violated",
        "fresh above target", "by class: guaranteed", "answered", "wrong among fresh", "violated",
        "unknown recognised", "known rejected",
    ]  # fmt: skip
    rows = []
    for gallery, share, group in _groups(results):
        rounds = sum(r["rounds"] for r in group)
        for target in group[0]["guarantees"][gallery]["image"]:
            image, by_class = (_total(group, gallery, sample, target) for sample in ("image", "class"))
            open_set = _share(image["recognised"], image["unknown"]), _share(image["rejected"], image["known"])
            above = _share(image["fresh_above"], rounds)
            cells = [*_violations(image, rounds), above, *_violations(by_class, rounds), *open_set]
            rows.append([gallery, f"{share:.0%}", f"{float(target):.0%}", *cells])
    return header, rows


def _total(group: list[Row], gallery: str, sample: str, target: str) -> dict[str, float]:
    """What was counted in all rounds of all seeds."""
    parts = [result["guarantees"][gallery][sample][target] for result in group]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _violations(total: dict[str, float], rounds: int) -> list[str]:
    low, high = clopper_pearson(round(total["violated"]), rounds)
    violated = f"{total['violated'] / rounds:.1%} [{low:.1%}, {high:.1%}]" + (" *" if low > DELTA else "")
    shares = [_share(total[name], rounds) for name in ("guaranteed", "answered")]
    return [*shares, _share(total["fresh_wrong"], total["fresh_answered"]), violated]


def against_table(results: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return P and the best single score of each gallery, share and seed: means over the draws.

    The best single score is that of each draw, chosen with hindsight by the figures that it is then compared by.
    """
    header = [
        "gallery", "unknown", "seed", "P, R-AUROC", "best single score", "its R-AUROC", "difference",
        "AUGRC × 1000 saved", "draws", "P below in R-AUROC (clearly)", "in AUGRC (clearly)", "u adds to the mix",
    ]  # fmt: skip
    rows = []
    for gallery, share, group in _groups(results):
        for result in group:
            drawn = result["scores"][gallery]
            gains = [draw["gain"] for draw in drawn]
            names = [draw["best"] for draw in drawn]
            singles = [draw["scores"][draw["best"]] for draw in drawn]
            own = _means([draw["scores"][P_RIGHT] for draw in drawn], "r_auroc", span=False)
            single = [max(sorted(set(names)), key=names.count), _means(singles, "r_auroc", span=False)]
            saved = [_means(gains, "r_auroc", sign=True), _means(gains, "augrc", 1000.0, sign=True)]
            counts = [str(len(gains)), _below(gains, "r_auroc"), _below(gains, "augrc")]
            of_u = _means([draw["gain_of_u"] for draw in drawn], "r_auroc", sign=True)
            rows.append([gallery, f"{share:.0%}", str(result["seed"]), own, *single, *saved, *counts, of_u])
    return header, rows


def score_table(results: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return R-AUROC, AUGRC and the AUROC for unknown queries of P, the blends and every single score."""
    rows = []
    for gallery, share, group in _groups(results):
        drawn = [draw["scores"] for result in group for draw in result["scores"][gallery]]
        for name in drawn[0]:
            found = [scores[name] for scores in drawn]
            figures = (("r_auroc", 1.0), ("augrc", 1000.0), ("unknown", 1.0))
            rows.append([gallery, f"{share:.0%}", name, *(_means(found, figure, factor) for figure, factor in figures)])
    return ["gallery", "unknown", "score", "R-AUROC", "AUGRC × 1000", "recognises unknown (AUROC)"], rows


def _groups(results: list[Row]) -> list[tuple[str, float, list[Row]]]:
    """The results of all seeds for each gallery and share of unknown queries."""
    shares = sorted({result["unknown"] for result in results})
    return [
        (gallery, share, [result for result in results if result["unknown"] == share])
        for gallery in results[0]["guarantees"]
        for share in shares
    ]


def _means(
    found: list[dict[str, Any]], figure: str, factor: float = 1.0, *, span: bool = True, sign: bool = False
) -> str:
    """The mean of a figure, and of the ends of its intervals."""
    known = [f for f in found if f[figure] is not None and f["intervals"][figure] is not None]
    if not known:
        return "–"
    form = f"{'+' if sign else ''}.{1 if factor > 1 else 3}f"
    middle = format(factor * _mean([f[figure] for f in known]), form)
    low, high = (format(factor * _mean([f["intervals"][figure][i] for f in known]), form) for i in (0, 1))
    return f"{middle} [{low}, {high}]" if span else middle


def _below(gains: list[dict[str, Any]], figure: str) -> str:
    """In how many draws P is below, and in how many of these the whole interval of the difference is."""
    below = [gain for gain in gains if gain[figure] is not None and gain[figure] < 0]
    return f"{len(below)} ({sum(gain['intervals'][figure][1] < 0 for gain in below)})"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


GUARANTEE = Study(guarantee_cells, Measures(run=measure_guarantee), guarantee_tables)
