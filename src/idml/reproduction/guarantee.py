"""The guarantee table: are promises kept, and is P(right) ever below a single score?

One model a seed, in laptop mode (on glyphs the small trunk from scratch), embeds the test images once. Each of 200
rounds draws classes that are not in the gallery (0, 25 or 50 % of the queries) and then a calibration sample, half as
large as the population of all queries:

    by image   single queries, drawn with replacement, each on its own: what the promise speaks of
    by class   whole classes, drawn with replacement: queries of one class hang together, and nothing is promised

The true error rate of a threshold is that of the whole population, from which the sample was drawn. A promise is
*broken* where it is above the wished rate; among all rounds, also those that end in "cannot promise", this may happen
in a share δ = 0.1. Beside it stand the errors among *fresh* queries, those that were not drawn; their own luck comes on
top, so they exceed the wished rate more often.

Expected cost on two cores: CUB at 112 px 3 minutes of features for each seed, glyphs a minute of training, then for
each seed and share 1 to 3 minutes, on glyphs 2 to 6.
"""

import json
import shutil
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.calibration.calibrate import compare
from idml.calibration.open_set import OpenSetQueries, QueryPool, draw_unknown
from idml.calibration.stored import Calibration
from idml.data.datasets import load_dataset
from idml.data.sampling import random_stream
from idml.evaluation.evaluate import EvaluatedModel
from idml.files import write_atomic
from idml.model.feature_cache import CLEAN
from idml.progress import Note, Progress, image_counter, silent
from idml.reproduction import first
from idml.reproduction.grid import UNTAUGHT, Cell, _read
from idml.reproduction.guarantee_tables import write_tables
from idml.training.config import from_dict
from idml.training.loop import train

ERRORS, SHARES, ROUNDS, DELTA = (0.05, 0.1, 0.2), (0.0, 0.25, 0.5), 200, 0.1
COMPARED = 10  # rounds in which P is compared with every score
GALLERIES, SAMPLES = ("labelled", "unlabelled"), ("image", "class")
SENT_AWAY = 0.05  # the share of known queries that may be told "not in the collection"


def cells(data: str, seeds: int) -> list[Cell]:
    """A cell for each seed and share of unknown queries; its options are those of the run, and what is done with it."""
    settings = first.SCRATCH if data == "glyphs" else first.FROZEN
    return [
        Cell(
            f"{seed}-unknown-{round(100 * share)}",
            {
                **settings,
                "loss": "multi_similarity",
                "method": "idml",
                "seed": seed,
                "unknown": share,
                "rounds": ROUNDS,
            },
        )
        for seed in range(seeds)
        for share in SHARES
    ]


def reproduce_guarantee(
    data: str,
    seeds: int,
    out: Path,
    *,
    dry_run: bool = False,
    report: Progress = silent,
    note: Note = silent,
) -> dict[str, Any]:
    """Run what is missing and write the tables beside the results."""
    folder, planned = out / f"guarantee-{data.partition(':')[0]}", cells(data, seeds)
    missing = [cell for cell in planned if not (folder / f"{cell.name}.json").exists()]
    if dry_run:
        names = [cell.name for cell in missing]
        return {"missing": names, "table": "\n".join([f"{len(names)} of {len(planned)} cells to do", *names])}
    for seed, of_seed in groupby(missing, key=lambda cell: int(cell.options["seed"])):
        run, todo = folder / f"{seed}.run", list(of_seed)
        pool = _pool(data, run, todo[0], report)
        for cell in todo:
            result = {"options": cell.options, "data": data.partition(":")[0], **measure(pool, cell, report)}
            write_atomic(folder / f"{cell.name}.json", (json.dumps(result, indent=1) + "\n").encode())
            note(f"{cell.name}: {result['queries']:,} queries, {result['right']:.1%} first results right")
        shutil.rmtree(run)
    results = {cell.name: _read(folder / f"{cell.name}.json", cell) for cell in planned}
    return {"results": results, "table": write_tables(folder, list(results.values()))}


def _pool(data: str, run: Path, cell: Cell, report: Progress) -> QueryPool:
    """The embedded test images of a run, which is trained if it is not there."""
    options = {name: value for name, value in cell.options.items() if name not in ("unknown", "rounds")}
    config = from_dict({**UNTAUGHT, **options, "data": data, "out": str(run)})
    if not (run / "metrics.json").exists():
        run.parent.mkdir(parents=True, exist_ok=True)
        train(config, resume=True, report=report)

    counted = partial(image_counter, report)

    candidate = EvaluatedModel.load(run, load_dataset(data, split=config.split), None, counted, lambda line: None)
    theirs = () if candidate.gallery is None else (candidate.gallery_embeddings, candidate.gallery_labels)
    return QueryPool(candidate.embed_view(CLEAN)[1], candidate.labels, *theirs)


def measure(pool: QueryPool, cell: Cell, report: Progress = silent) -> dict[str, Any]:
    """What happens to the promises at one share of unknown queries, and what P is worth there.

    ``promises``: for each gallery, sample and wished error rate the sums over the rounds of what `outcome` counts;
    ``scores``: what `compare` finds for each gallery in each of the first ten rounds (with no unknown classes, where
    all rounds are about the same queries, in the first).
    """
    share, rounds = cell.options["unknown"], cell.options["rounds"]
    sums: dict[str, dict[str, dict[str, dict[str, float]]]] = {g: {s: {} for s in SAMPLES} for g in GALLERIES}
    scores: dict[str, list[dict[str, Any]]] = {g: [] for g in GALLERIES}
    trial = begun = _trial(pool, share, 0)
    for number in range(rounds):
        if share and number:
            trial = _trial(pool, share, number)
        for gallery in GALLERIES if number < (COMPARED if share else 1) else ():
            scores[gallery].append(compare(trial, labelled=gallery == "labelled", seed=number))
        for sample in SAMPLES:
            rows = draw(trial, sample, random_stream(f"guarantee by {sample}", number))
            for gallery in GALLERIES:
                found = Calibration.fit(
                    trial.evidence[rows],
                    trial.correct[rows],
                    labelled=gallery == "labelled",
                    groups=trial.labels[rows],
                    known=trial.known[rows],
                    seed=number,
                )
                for error, counts in outcome(found, trial, rows).items():
                    into = sums[gallery][sample].setdefault(error, dict.fromkeys(counts, 0.0))
                    for name, value in counts.items():
                        into[name] += value
        report({"done": (number + 1) * len(trial), "images": rounds * len(trial), "what": "calibrated and tested"})
    return {
        "queries": len(begun),
        "classes": len(begun.labels.unique()),
        "right": float(begun.correct.double().mean()),
        "promises": sums,
        "scores": scores,
    }


def _trial(pool: QueryPool, share: float, number: int) -> OpenSetQueries:
    return pool.search(without=draw_unknown(pool.labels, share, random_stream("guarantee, unknown classes", number)))


def draw(trial: OpenSetQueries, sample: str, generator: torch.Generator) -> Tensor:
    """A calibration sample, with replacement: half as many queries as there are, or half as many classes."""
    if sample == "image":
        return torch.randint(len(trial), (len(trial) // 2,), generator=generator)
    order = trial.labels.argsort(stable=True)
    members = order.split(trial.labels.unique(return_counts=True)[1].tolist())
    drawn = torch.randint(len(members), (max(1, len(members) // 2),), generator=generator).tolist()
    return torch.cat([members[i] for i in drawn])


def outcome(found: Calibration, trial: OpenSetQueries, rows: Tensor) -> dict[str, dict[str, float]]:
    """What a calibration on the queries ``rows`` does, for each wished error rate.

    ``promised``: 1 or 0; ``answered``: the share of all queries; ``error``: the true error rate (0 if nothing is
    answered); ``broken``: it is above the wished one; of the fresh queries how many are answered, answered wrong, and
    whether these exceed the wished rate; how many are unknown, and of these told so; how many known, and sent away.
    """
    fresh = torch.ones(len(trial), dtype=torch.bool)
    fresh[rows] = False
    p, far, out = found.probability(trial.evidence), found.absent(trial.evidence, SENT_AWAY), {}
    for wished in ERRORS:
        threshold = found.find_guarantee(wished, 1 - DELTA).threshold
        match = p >= threshold if threshold is not None else torch.zeros_like(fresh)
        wrong = match & ~trial.correct
        answered, new, new_wrong = (int(mask.sum()) for mask in (match, match & fresh, wrong & fresh))
        error = int(wrong.sum()) / max(1, answered)
        counted = {"unknown": ~trial.known & fresh, "known": trial.known & fresh}
        out[f"{wished:g}"] = {
            "promised": float(threshold is not None),
            "answered": answered / len(trial),
            "error": error,
            "broken": float(error > wished),
            "fresh_answered": float(new),
            "fresh_wrong": float(new_wrong),
            "fresh_above": float(new_wrong > wished * new),
            **{name: float(mask.sum()) for name, mask in counted.items()},
            "told": float((counted["unknown"] & far & ~match).sum()),
            "sent_away": float((counted["known"] & far & ~match).sum()),
        }
    return out
