"""`idml calibrate`: fit a calibration on classes that a run was not trained on, and store it in the run with a report.

The report compares P(right) with every single score and the mixes, each on classes that were not used for its fit.
Classes are put into five folds. P (chosen and fitted on the other four folds), the mix of all scores, the mix without u
(‖u‖ and β), and each single score are measured within each fold; the figures are means over the folds. Intervals are
paired: each of 1,000 rounds draws the same classes of every fold for all of them.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idml.calibration.confidence import (
    MIX,
    MIX_WITHOUT_U,
    P_RIGHT,
    ConfidenceModel,
    assign_folds,
    predict_out_of_fold,
    score_matrix,
)
from idml.calibration.evidence import WITHOUT_LABELS, Profile
from idml.calibration.open_set import OpenSetQueries, QueryPool, draw_unknown, load_unseen
from idml.calibration.report import build_page
from idml.calibration.risk_control import ERROR_RATES
from idml.calibration.stored import Calibration, split_queries
from idml.data.augment import CLEAN
from idml.data.sampling import random_stream
from idml.evaluation.bootstrap import Rounds, draw_classes, interval, resampled_auroc, resampled_uncertainty
from idml.evaluation.evaluate import EvaluatedModel, describe_untaught, read_run_options
from idml.evaluation.uncertainty import auroc, evaluate_uncertainty
from idml.files import write_atomic
from idml.model import fingerprint
from idml.progress import Note, Progress, image_counter, silent

FILES = {"labelled": "calibration.json", "unlabelled": "calibration-unlabelled.json"}
REPORT = "calibration.html"

_LISTED = 50  # results listed for each query: the largest result set
_CLASSES, _QUERIES = 5, 50  # the smallest numbers that can be fitted
_REJECTED = (0.01, 0.05, 0.1, 0.2)  # shares of known queries that may be rejected, in the report
_PENALTY = 1e-2  # of the two mixes in the comparison; P chooses its own


def calibrate_run(
    run: str | Path,
    data: str,
    *,
    split: str | None = None,
    unknown: float = 0.25,
    seed: int = 0,
    progress: Progress = silent,
    note: Note = silent,
) -> dict[str, Any]:
    """Calibrate the model in ``run`` on classes of ``data`` that it was not trained on.

    Args:
        run: a run directory. It gets calibration.json (for galleries with labels), calibration-unlabelled.json (for
            galleries without labels) and calibration.html.
        data: a SPEC as in `idml.data.datasets.load_dataset`.
        split: which classes of ``data`` are test classes; by default the run's own split. Classes that the run learned
            from are left out. Of a run on all classes, the classes remain that it held out for validation.
        unknown: the share of the queries whose classes are kept out of the gallery. The guarantees hold if about as
            many queries, or fewer, have no right answer.
        seed: of the unknown classes, of the part of the queries that is counted, and of the folds.
        progress: called with rows of how many images are done.
        note: called with lines for the user.

    The gallery holds the images of the known classes; each is left out if it is the query. If the data set has its own
    gallery (In-Shop), that one without the unknown classes is used. docs/calibration.md describes the result.
    """
    folder = Path(run)
    model = fingerprint(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; name the run directory that holds it: the calibration is stored there")
    trained = read_run_options(folder)
    dataset, chosen = load_unseen(data, split, trained)
    notes: list[str] = []

    def keep(line: str) -> None:
        notes.append(line)
        note(line)

    count_images = partial(image_counter, progress)

    for line in dataset.notes:
        keep(line)
    candidate = EvaluatedModel.load(folder, dataset, None, count_images, keep)
    _require_enough(candidate, dataset.name)
    for line in describe_untaught(trained):
        keep(line)
    gallery = () if candidate.gallery is None else (candidate.gallery_embeddings, candidate.gallery_labels)
    pool = QueryPool(candidate.embed_view(CLEAN)[1], candidate.labels, *gallery, depth=2 * _LISTED)
    unknown_classes = draw_unknown(candidate.labels, unknown, random_stream("unknown classes", seed))
    queries = pool.search(without=unknown_classes, listed=_LISTED)
    profile = Profile.of(pool.gallery[queries.gallery])
    calibrations = {
        kind: Calibration.fit(
            queries.evidence,
            queries.correct,
            labelled=kind == "labelled",
            seed=seed,
            groups=queries.labels,
            known=queries.known,
            distances=queries.distances,
            same_class=queries.same_class,
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
        "classes": len(queries.labels.unique()),
        "unknown_classes": len(unknown_classes),
        "gallery": profile.size,
        "queries": len(queries),
        "unknown_queries": int((~queries.known).sum()),
        "unknown_share": float((~queries.known).double().mean()),
        "right": int(queries.correct.sum()),
        "notes": notes,
    }
    for number, (kind, calibration) in enumerate(calibrations.items(), 1):
        result[kind] = _summarise(calibration, queries, seed)
        count_images("resampled")(number * len(queries), len(FILES) * len(queries))
    result["words"] = _describe(result)
    for kind, name in FILES.items():
        calibrations[kind].save(folder / name)
    write_atomic(folder / REPORT, build_page(result))
    return {**result, "files": [str(folder / name) for name in FILES.values()], "report": str(folder / REPORT)}


def _require_enough(candidate: EvaluatedModel, name: str) -> None:
    labels, gallery = candidate.labels, candidate.gallery_labels
    own = 1 if candidate.gallery is None else 0
    findable = gallery.bincount(minlength=int(labels.max()) + 1)[labels] > own
    classes = len(labels[findable].unique())
    if classes < _CLASSES or len(labels) < _QUERIES:
        raise ValueError(
            f"{name}: a calibration needs {_CLASSES} classes of two images or more and {_QUERIES} images that the run "
            f"was not trained on; there are {classes} classes and {len(labels)} images: try another --split, or other "
            "images"
        )


# -------------------- the result --------------------


def _summarise(calibration: Calibration, queries: OpenSetQueries, seed: int) -> dict[str, Any]:
    """The figures of one calibration, all but ``scores`` from the queries that it was not fitted to."""
    held = split_queries(len(queries), seed=seed)[0]
    evidence, known = queries.evidence[held], queries.known[held]
    rejected = {share: calibration.absent(evidence, share) for share in _REJECTED}
    return {
        "chosen": calibration.confidence_model.name,
        "fitted": [asdict(quality) for quality in calibration.confidence_model.candidates],
        "counted": calibration.counts.total,
        "ece": calibration.ece,
        "bins": [asdict(b) for b in calibration.bins],
        "promises": [_summarise_guarantee(calibration, error) for error in ERROR_RATES],
        "curve": [[error / 100, calibration.find_guarantee(error / 100).coverage] for error in range(1, 51)],
        "sets": [_summarise_sets(calibration, missed) for missed in (0.05, 0.1, 0.2)],
        "novelty": {
            "score": calibration.novelty_score,
            "unknown": int((~known).sum()),
            "recognised": {f"{share:g}": _mean_of(mask[~known]) for share, mask in rejected.items()},
            "rejected": {f"{share:g}": _mean_of(mask[known]) for share, mask in rejected.items()},
        },
        **compare_scores(queries, labelled=calibration.labelled, seed=seed),
    }


def _summarise_guarantee(calibration: Calibration, error: float) -> dict[str, Any]:
    guarantee = calibration.find_guarantee(error)
    return {
        "max_error": error,
        "possible": guarantee.possible,
        "threshold": guarantee.threshold,
        "coverage": guarantee.coverage,
        "answered": guarantee.answered,
        "wrong": guarantee.wrong,
        "reason": guarantee.reason,
    }


def _summarise_sets(calibration: Calibration, missed: float) -> dict[str, Any]:
    guarantee, size = calibration.find_set_guarantee(missed), None
    if guarantee.threshold is not None and calibration.sets is not None:
        size = calibration.sets.mean_size[calibration.sets.counts.thresholds.index(guarantee.threshold)]
    return {"max_missed": missed, "possible": guarantee.possible, "mean_size": size, "reason": guarantee.reason}


def _mean_of(mask: Tensor) -> float | None:
    return float(mask.double().mean()) if len(mask) else None


def _describe(result: dict[str, Any]) -> list[str]:
    """Describe a calibration in sentences."""
    queries, right = result["queries"], result["right"]
    lines = [
        f"{queries:,} queries, {result['unknown_queries']:,} of them with no image of their class in the gallery; "
        f"{right:,} ({right / queries:.1%}) first results are right",
        f"the promises are for queries of which about {result['unknown_share']:.0%} or fewer are unknown",
    ]
    for kind in FILES:
        figures = result[kind]
        lines.append(f"galleries {'with' if kind == 'labelled' else 'without'} labels:")
        for promise in figures["promises"]:
            if promise["max_error"] in (0.05, 0.1, 0.2):
                rate, coverage = promise["max_error"], promise["coverage"]
                possible = f"at most {rate:.0%} wrong answers: {coverage:.1%} of queries are answered"
                lines.append(f"  {possible if promise['possible'] else promise['reason']}")
        recognised, rejected = (figures["novelty"][name]["0.05"] for name in ("recognised", "rejected"))
        if recognised is not None:
            known = "" if rejected is None else f"; {rejected:.1%} of known ones are wrongly rejected"
            lines.append(f"  {recognised:.1%} of unknown queries are recognised{known}")
        lines += [f"  {line}" for line in describe_comparison(figures, result["score"])]
    return lines


# -------------------- P(right) against single scores --------------------


class ScoreFigures(NamedTuple):
    """The figures of a score, and the same figures in each round of resampled classes."""

    values: dict[str, float | None]
    rounds: dict[str, Tensor]

    @property
    def intervals(self) -> dict[str, list[float] | None]:
        """The 95 % intervals of the figures."""
        return {name: interval(x) for name, x in self.rounds.items()}


def compare_scores(queries: OpenSetQueries, *, labelled: bool, seed: int = 0, rounds: int = 1000) -> dict[str, Any]:
    """Measure how well P(right), the mixes and every single score rank wrong answers.

    Returns:
        ``scores``: by name ``r_auroc``, ``augrc`` (of wrong answers among all), ``unknown`` (AUROC for unknown queries
        against known ones; None if there are none) and ``intervals`` of these; ``best``: the single score of the
        largest R-AUROC; ``gain``: how far P is above it; ``gain_of_u``: how far the mix is above the mix without u,
        each with ``r_auroc``, ``augrc`` (positive if it is smaller, that is better) and ``intervals``.
    """
    folds = assign_folds(len(queries), queries.labels, seed)
    scores = _cross_fit_scores(queries, labelled, folds, seed)
    drawn = [draw_classes(queries.labels[folds == fold], rounds=rounds, seed=int(fold)) for fold in folds.unique()]
    figures = {name: _measure_score(score, queries, folds, drawn) for name, score in scores.items()}
    singles = [name for name in scores if name not in (P_RIGHT, MIX, MIX_WITHOUT_U)]
    best = max(singles, key=lambda name: figures[name].values["r_auroc"] or 0.0)
    return {
        "scores": {name: {**found.values, "intervals": found.intervals} for name, found in figures.items()},
        "best": best,
        "gain": _subtract(figures[P_RIGHT], figures[best]),
        "gain_of_u": _subtract(figures[MIX], figures[MIX_WITHOUT_U]),
    }


def _cross_fit_scores(queries: OpenSetQueries, labelled: bool, folds: Tensor, seed: int) -> dict[str, Tensor]:
    """1 − P, the mixes and the single scores; what is fitted is fitted on the other folds."""
    evidence, correct = queries.evidence, queries.correct
    singles = {n: x.double() for n, x in evidence.scores.items() if labelled or n in WITHOUT_LABELS}
    doubt = torch.zeros(len(queries), dtype=torch.float64)
    for fold in folds.unique():
        rest, held = (folds != fold).nonzero().flatten(), (folds == fold).nonzero().flatten()
        groups = queries.labels[rest]
        model = ConfidenceModel.fit(evidence[rest], correct[rest], labelled=labelled, groups=groups, seed=seed)
        doubt[held] = 1 - model.probability(evidence[held])
    x = score_matrix(evidence, list(singles))
    z = (x - x.mean(dim=0)) / x.std(dim=0).clamp_min(1e-12)
    without_u = [i for i, name in enumerate(singles) if name not in ("level", "pair")]
    wrong = (~correct).double()
    mixes = {MIX: z, MIX_WITHOUT_U: z[:, without_u]}
    mixed = {name: predict_out_of_fold(part, wrong, folds, _PENALTY) for name, part in mixes.items()}
    return {P_RIGHT: doubt, **mixed, **singles}


def _measure_score(score: Tensor, queries: OpenSetQueries, folds: Tensor, drawn: list[Rounds]) -> ScoreFigures:
    values: dict[str, list[float | None]] = {"r_auroc": [], "augrc": [], "unknown": []}
    rounds: dict[str, list[Tensor]] = {name: [] for name in values}
    for fold, classes in zip(folds.unique(), drawn, strict=True):
        rows = folds == fold
        x, correct, unknown = score[rows], queries.correct[rows], ~queries.known[rows]
        figures, resampled = evaluate_uncertainty(x, correct), resampled_uncertainty(x, correct, classes)
        figures["unknown"] = auroc(x, unknown) if 0 < int(unknown.sum()) < len(x) else None
        resampled["unknown"] = resampled_auroc(x, unknown, classes)
        for name in values:
            values[name].append(figures[name])
            rounds[name].append(resampled[name])
    defined = {name: [v for v in in_folds if v is not None] for name, in_folds in values.items()}
    means = {name: sum(in_folds) / len(in_folds) if in_folds else None for name, in_folds in defined.items()}
    return ScoreFigures(means, {name: torch.stack(in_folds).nanmean(dim=0) for name, in_folds in rounds.items()})


def _subtract(above: ScoreFigures, below: ScoreFigures) -> dict[str, Any]:
    """How much better ``above`` is, with intervals."""
    better = {"r_auroc": 1, "augrc": -1}
    values: dict[str, float | None] = {}
    for name, sign in better.items():
        a, b = above.values[name], below.values[name]
        values[name] = None if a is None or b is None else sign * (a - b)
    rounds = {name: sign * (above.rounds[name] - below.rounds[name]) for name, sign in better.items()}
    return {**values, "intervals": {name: interval(x) for name, x in rounds.items()}}


def describe_comparison(compared: dict[str, Any], level_name: str = "‖u‖") -> list[str]:
    """Say in sentences whether P is below the best single score, and what u (or σ of a Gaussian model) adds."""
    scores, best = compared["scores"], compared["best"]
    if scores[P_RIGHT]["r_auroc"] is None:
        return ["all answers are right, or all are wrong: there is nothing to rank"]
    own = f"P(right), R-AUROC {scores[P_RIGHT]['r_auroc']:.3f},"
    lines = [_describe_gain(compared["gain"], own, f"the best single score, {best}")]
    level, chance = scores["level"], "no better than chance"
    span = level["intervals"]["r_auroc"]
    if span is not None and span[0] > 0.5:
        chance = "better than chance"
    elif span is not None and span[1] < 0.5:
        chance = "worse than chance: it is smaller for wrong answers"
    lines.append(f"{level_name} alone, R-AUROC {level['r_auroc']:.3f}{_format_span(span)}, is {chance}")
    lines.append(_describe_gain(compared["gain_of_u"], "the mix with u", "the mix without u"))
    return lines


def _describe_gain(gain: dict[str, Any], name: str, other: str) -> str:
    span = gain["intervals"]["r_auroc"]
    if abs(gain["r_auroc"]) < 0.0005 and (span is None or span[0] <= 0 <= span[1]):
        word = "no different from"
    elif span is None or span[0] <= 0 <= span[1]:
        word = "not clearly above" if gain["r_auroc"] >= 0 else "below, but not clearly,"
    else:
        word = "above" if span[0] > 0 else "BELOW"
    return f"{name} is {word} {other}: {gain['r_auroc']:+.3f}{_format_span(span)}"


def _format_span(span: list[float] | None) -> str:
    return "" if span is None else f" [{span[0]:.3f}, {span[1]:.3f}]"
