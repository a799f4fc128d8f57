"""`idml calibrate`: answers fitted on classes that a run was not trained on, kept in the run with a report."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from idml.calibration.comparison import compare, verdict
from idml.calibration.evidence import Profile
from idml.calibration.open_set import Pool, Trial, draw_unknown
from idml.calibration.report import build_page
from idml.calibration.stored import Calibration, split_queries
from idml.calibration.unseen import unseen
from idml.data.sampling import random_stream
from idml.evaluation.evaluate import Candidate, _options, untaught
from idml.files import write_whole
from idml.model import fingerprint
from idml.model.feature_cache import CLEAN

FILES = {"labelled": "calibration.json", "unlabelled": "calibration-unlabelled.json"}
REPORT = "calibration.html"
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # wished error rates that the report has a line for
_LISTED = 50  # results of each query that are looked at: the largest result set
_CLASSES, _QUERIES = 5, 50  # with fewer there is nothing to fit

Progress = Callable[[dict[str, Any]], None]
Note = Callable[[str], None]


def calibrate_run(
    run: str | Path,
    data: str,
    *,
    split: str | None = None,
    unknown: float = 0.25,
    seed: int = 0,
    progress: Progress = lambda row: None,
    note: Note = lambda text: None,
) -> dict[str, Any]:
    """Fit the answers of the model in ``run`` on classes of ``data`` that it was not trained on.

    Args:
        run: a run directory; it gets calibration.json (for galleries with labels), calibration-unlabelled.json (for
            those without) and calibration.html.
        data: a SPEC as in `idml.data.datasets.load_dataset`.
        split: which classes of ``data`` are test classes; by default the run's own split. Classes that the run learned
            from are left out, so of a run on all classes those remain that it held out for validation.
        unknown: the share of the queries whose classes are kept out of the gallery. The promises hold where about as
            many queries have no right answer.
        seed: of the unknown classes, of the part of the queries that is counted, and of the folds.
        progress: called with rows of how many images are done.
        note: called with lines that a person should see.

    The images of known classes are the gallery, each left out when it is the query (where the data set has a gallery of
    its own, as In-Shop, that one without the unknown classes). docs/calibration.md says what the result holds.
    """
    folder = Path(run)
    model = fingerprint(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; name the run directory that holds it: the calibration goes there")
    trained = _options(folder)
    dataset, chosen = unseen(data, split, trained)
    notes: list[str] = []

    def keep(line: str) -> None:
        notes.append(line)
        note(line)

    def counted(what: str) -> Callable[[int, int], None]:
        return lambda done, images: progress({"done": done, "images": images, "what": what})

    for line in dataset.notes:
        keep(line)
    candidate = Candidate.load(folder, dataset, None, counted, keep)
    _require_enough(candidate, dataset.name)
    for line in untaught(trained):
        keep(line)
    theirs = () if candidate.gallery is None else (candidate.shelf, candidate.gallery_labels)
    pool = Pool(candidate.look(CLEAN)[1], candidate.labels, *theirs, depth=2 * _LISTED)
    strange = draw_unknown(candidate.labels, unknown, random_stream("unknown classes", seed))
    trial = pool.without(strange, listed=_LISTED)
    profile = Profile.of(pool.gallery[trial.gallery])
    fitted = {
        kind: Calibration.fit(
            trial.evidence,
            trial.correct,
            labelled=kind == "labelled",
            seed=seed,
            groups=trial.labels,
            known=trial.known,
            places=trial.places,
            listed=(trial.distances, trial.alike),
            profile=profile,
            model=model,
        )
        for kind in FILES
    }
    result: dict[str, Any] = {
        "data": dataset.name,
        "split": chosen,
        "seed": seed,
        "model": model,
        "method": trained.get("method"),
        "score": "‖σ‖" if candidate.model.config.uncertainty == "gaussian" else "‖u‖",
        "classes": len(trial.labels.unique()),
        "unknown_classes": len(strange),
        "gallery": profile.size,
        "queries": len(trial),
        "unknown_queries": int((~trial.known).sum()),
        "unknown_share": float((~trial.known).double().mean()),
        "right": int(trial.correct.sum()),
        "notes": notes,
    }
    for kind, found in fitted.items():
        result[kind] = _figures(found, trial, seed)
        counted("resampled")((list(FILES).index(kind) + 1) * len(trial), len(FILES) * len(trial))
    result["words"] = _words(result)
    for kind, name in FILES.items():
        fitted[kind].save(folder / name)
    write_whole(folder / REPORT, build_page(result))
    return {**result, "files": [str(folder / name) for name in FILES.values()], "report": str(folder / REPORT)}


def _require_enough(candidate: Candidate, name: str) -> None:
    labels, gallery = candidate.labels, candidate.gallery_labels
    others = 1 if candidate.gallery is None else 0
    findable = gallery.bincount(minlength=int(labels.max()) + 1)[labels] > others
    classes = len(labels[findable].unique())
    if classes < _CLASSES or len(labels) < _QUERIES:
        raise ValueError(
            f"{name}: a calibration needs {_CLASSES} classes of two images or more and {_QUERIES} images, none of them "
            f"trained on, and here are {classes} and {len(labels)}; another --split, or other images, may have more"
        )


def _figures(found: Calibration, trial: Trial, seed: int) -> dict[str, Any]:
    """What is known of one calibration, all but ``scores`` from the queries that it was not fitted to."""
    held = split_queries(len(trial), seed=seed)[0]
    evidence, known = trial.evidence[held], trial.known[held]
    away = {share: found.absent(evidence, share) for share in (0.01, 0.05, 0.1, 0.2)}
    return {
        "chosen": found.right.name,
        "fitted": [asdict(figure) for figure in found.table],
        "counted": found.counts.total,
        "ece": found.ece,
        "bins": [asdict(b) for b in found.bins],
        "promises": [_promise(found, error) for error in ERRORS],
        "curve": [[error / 100, found.promise(error / 100).coverage] for error in range(1, 51)],
        "sets": [_set(found, missed) for missed in (0.05, 0.1, 0.2)],
        "novelty": {
            "score": found.novelty_score,
            "unknown": int((~known).sum()),
            "told": {f"{share:g}": _share(strange[~known]) for share, strange in away.items()},
            "sent_away": {f"{share:g}": _share(strange[known]) for share, strange in away.items()},
        },
        **compare(trial, labelled=found.labelled, seed=seed),
    }


def _promise(found: Calibration, error: float) -> dict[str, Any]:
    promise = found.promise(error)
    return {
        "max_error": error,
        "possible": promise.kept,
        "threshold": promise.threshold,
        "coverage": promise.coverage,
        "answered": promise.answered,
        "wrong": promise.wrong,
        "reason": promise.reason,
    }


def _set(found: Calibration, missed: float) -> dict[str, Any]:
    promise, size = found.promise_sets(missed), None
    if promise.threshold is not None and found.sets is not None:
        size = found.sets.mean_size[found.sets.counts.thresholds.index(promise.threshold)]
    return {"max_missed": missed, "possible": promise.kept, "mean_size": size, "reason": promise.reason}


def _share(mask: torch.Tensor) -> float | None:
    return float(mask.double().mean()) if len(mask) else None


def _words(result: dict[str, Any]) -> list[str]:
    """The calibration in plain words."""
    queries, right = result["queries"], result["right"]
    lines = [
        f"{queries:,} queries, {result['unknown_queries']:,} of them with no image of their class in the gallery; "
        f"{right:,} ({right / queries:.1%}) first results are right",
        f"what is promised is for queries of which no more than about {result['unknown_share']:.0%} are unknown",
    ]
    for kind in FILES:
        figures = result[kind]
        lines.append(f"galleries {'with' if kind == 'labelled' else 'without'} labels:")
        for promise in figures["promises"]:
            if promise["max_error"] in (0.05, 0.1, 0.2):
                kept = (
                    f"at most {promise['max_error']:.0%} wrong answers: {promise['coverage']:.1%} of queries answered"
                )
                lines.append(f"  {kept if promise['possible'] else promise['reason']}")
        told = figures["novelty"]["told"]["0.05"]
        if told is not None:
            lines.append(f"  {told:.1%} of the unknown queries are told, at 5 % of the known ones")
        lines += [f"  {line}" for line in verdict(figures, result["score"])]
    return lines
