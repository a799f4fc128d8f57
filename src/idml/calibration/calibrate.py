"""`idml calibrate`: answers fitted on classes that a run was not trained on, kept in the run with a report."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.calibration.confidence import ConfidenceModel, _folds, _matrix, _out_of_fold
from idml.calibration.evidence import WITHOUT_LABELS, Profile
from idml.calibration.open_set import OpenSetQueries, QueryPool, draw_unknown, load_unseen
from idml.calibration.report import P, build_page
from idml.calibration.risk_control import ERROR_RATES
from idml.calibration.stored import Calibration, split_queries
from idml.data.sampling import random_stream
from idml.evaluation.bootstrap import Rounds, draw_classes, interval, resampled_auroc, resampled_uncertainty
from idml.evaluation.evaluate import EvaluatedModel, _options, untaught
from idml.evaluation.uncertainty import auroc, evaluate_uncertainty
from idml.files import write_atomic
from idml.model import fingerprint
from idml.model.feature_cache import CLEAN
from idml.progress import Note, Progress, image_counter, silent

FILES = {"labelled": "calibration.json", "unlabelled": "calibration-unlabelled.json"}
REPORT = "calibration.html"
_LISTED = 50  # results of each query that are looked at: the largest result set
_CLASSES, _QUERIES = 5, 50  # with fewer there is nothing to fit


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
    dataset, chosen = load_unseen(data, split, trained)
    notes: list[str] = []

    def keep(line: str) -> None:
        notes.append(line)
        note(line)

    counted = partial(image_counter, progress)

    for line in dataset.notes:
        keep(line)
    candidate = EvaluatedModel.load(folder, dataset, None, counted, keep)
    _require_enough(candidate, dataset.name)
    for line in untaught(trained):
        keep(line)
    theirs = () if candidate.gallery is None else (candidate.gallery_embeddings, candidate.gallery_labels)
    pool = QueryPool(candidate.embed_view(CLEAN)[1], candidate.labels, *theirs, depth=2 * _LISTED)
    strange = draw_unknown(candidate.labels, unknown, random_stream("unknown classes", seed))
    trial = pool.search(without=strange, listed=_LISTED)
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
            listed=(trial.distances, trial.same_class),
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
    write_atomic(folder / REPORT, build_page(result))
    return {**result, "files": [str(folder / name) for name in FILES.values()], "report": str(folder / REPORT)}


def _require_enough(candidate: EvaluatedModel, name: str) -> None:
    labels, gallery = candidate.labels, candidate.gallery_labels
    others = 1 if candidate.gallery is None else 0
    findable = gallery.bincount(minlength=int(labels.max()) + 1)[labels] > others
    classes = len(labels[findable].unique())
    if classes < _CLASSES or len(labels) < _QUERIES:
        raise ValueError(
            f"{name}: a calibration needs {_CLASSES} classes of two images or more and {_QUERIES} images, none of them "
            f"trained on, and here are {classes} and {len(labels)}; another --split, or other images, may have more"
        )


def _figures(found: Calibration, trial: OpenSetQueries, seed: int) -> dict[str, Any]:
    """What is known of one calibration, all but ``scores`` from the queries that it was not fitted to."""
    held = split_queries(len(trial), seed=seed)[0]
    evidence, known = trial.evidence[held], trial.known[held]
    away = {share: found.absent(evidence, share) for share in (0.01, 0.05, 0.1, 0.2)}
    return {
        "chosen": found.confidence_model.name,
        "fitted": [asdict(figure) for figure in found.table],
        "counted": found.counts.total,
        "ece": found.ece,
        "bins": [asdict(b) for b in found.bins],
        "promises": [_promise(found, error) for error in ERROR_RATES],
        "curve": [[error / 100, found.find_guarantee(error / 100).coverage] for error in range(1, 51)],
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
    promise = found.find_guarantee(error)
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
    promise, size = found.find_set_guarantee(missed), None
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


# -------------------- comparison --------------------
# P(right) against every single score and the mixes, each on classes that had no part in its fit.
#
# Classes are put into five folds. P (chosen and fitted as ever, on the other four folds), the mix of all scores, the
# mix without u (‖u‖ and β), and each score alone are judged within each fold; the figures are means over the folds.
# Intervals are paired: each of 1,000 rounds draws the same classes of every fold for all of them.


MIX, MIX_WITHOUT_U = "mix", "mix without u"
_PENALTY = 1e-2  # of the two mixes; P chooses its own


def compare(trial: OpenSetQueries, *, labelled: bool, seed: int = 0, rounds: int = 1000) -> dict[str, Any]:
    """What each score is worth.

    Returns:
        ``scores``: by name ``r_auroc``, ``augrc`` (of wrong answers among all), ``unknown`` (AUROC for telling unknown
        queries from known ones; None where there are none) and ``intervals`` of these; ``best``: the single score of
        the largest R-AUROC; ``gain``: how far P is above it, ``gain_of_u``: how far the mix is above the one without u,
        each with ``r_auroc``, ``augrc`` (positive where it is smaller, that is better) and ``intervals``.
    """
    folds = _folds(len(trial), trial.labels, seed)
    scores = _scores(trial, labelled, folds, seed)
    drawn = [draw_classes(trial.labels[folds == fold], rounds=rounds, seed=int(fold)) for fold in folds.unique()]
    figures = {name: _compared_figures(score, trial, folds, drawn) for name, score in scores.items()}
    singles = [name for name in scores if name not in (P, MIX, MIX_WITHOUT_U)]
    best = max(singles, key=lambda name: figures[name][0]["r_auroc"] or 0.0)
    return {
        "scores": {name: {**values, "intervals": _intervals(again)} for name, (values, again) in figures.items()},
        "best": best,
        "gain": _gain(figures[P], figures[best]),
        "gain_of_u": _gain(figures[MIX], figures[MIX_WITHOUT_U]),
    }


Found = tuple[dict[str, float | None], dict[str, Tensor]]  # figures, and the same in every round


def _scores(trial: OpenSetQueries, labelled: bool, folds: Tensor, seed: int) -> dict[str, Tensor]:
    evidence, correct = trial.evidence, trial.correct
    singles = {n: x.double() for n, x in evidence.scores.items() if labelled or n in WITHOUT_LABELS}
    doubt = torch.zeros(len(trial), dtype=torch.float64)
    for fold in folds.unique():
        rest, held = (folds != fold).nonzero().flatten(), (folds == fold).nonzero().flatten()
        model = ConfidenceModel.fit(
            evidence[rest], correct[rest], labelled=labelled, groups=trial.labels[rest], seed=seed
        )
        doubt[held] = 1 - model.probability(evidence[held])
    x = _matrix(evidence, list(singles))
    z = (x - x.mean(dim=0)) / x.std(dim=0).clamp_min(1e-12)
    without = [i for i, name in enumerate(singles) if name not in ("level", "pair")]
    wrong = (~correct).double()
    mixes = {MIX: z, MIX_WITHOUT_U: z[:, without]}
    return {P: doubt, **{name: _out_of_fold(part, wrong, folds, _PENALTY) for name, part in mixes.items()}, **singles}


def _compared_figures(score: Tensor, trial: OpenSetQueries, folds: Tensor, drawn: list[Rounds]) -> Found:
    values: dict[str, list[float | None]] = {"r_auroc": [], "augrc": [], "unknown": []}
    again: dict[str, list[Tensor]] = {name: [] for name in values}
    for fold, times in zip(folds.unique(), drawn, strict=True):
        rows = folds == fold
        x, correct, strange = score[rows], trial.correct[rows], ~trial.known[rows]
        told, resampled = evaluate_uncertainty(x, correct), resampled_uncertainty(x, correct, times)
        told["unknown"] = auroc(x, strange) if 0 < int(strange.sum()) < len(x) else None
        resampled["unknown"] = resampled_auroc(x, strange, times)
        for name in values:
            values[name].append(told[name])
            again[name].append(resampled[name])
    means = {name: _mean([v for v in list_ if v is not None]) for name, list_ in values.items()}
    return means, {name: torch.stack(list_).nanmean(dim=0) for name, list_ in again.items()}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _intervals(again: dict[str, Tensor]) -> dict[str, list[float] | None]:
    return {name: interval(x) for name, x in again.items()}


def _gain(above: Found, below: Found) -> dict[str, Any]:
    signs: dict[str, Callable[[Any, Any], Any]] = {"r_auroc": lambda a, b: a - b, "augrc": lambda a, b: b - a}
    values = {
        name: None if above[0][name] is None or below[0][name] is None else sign(above[0][name], below[0][name])
        for name, sign in signs.items()
    }
    rounds = {name: sign(above[1][name], below[1][name]) for name, sign in signs.items()}
    return {**values, "intervals": _intervals(rounds)}


def verdict(compared: dict[str, Any], level_name: str = "‖u‖") -> list[str]:
    """Plain words: whether P is below the best single score, and what u (or σ of a Gaussian model) is worth."""
    scores, best = compared["scores"], compared["best"]
    if scores[P]["r_auroc"] is None:
        return ["all answers are right, or all are wrong: there is nothing to rank"]
    lines = [
        _against(compared["gain"], f"P(right), R-AUROC {scores[P]['r_auroc']:.3f},", f"the best single score, {best}")
    ]
    level, chance = scores["level"], "no better than chance"
    span = level["intervals"]["r_auroc"]
    if span is not None and span[0] > 0.5:
        chance = "better than chance"
    elif span is not None and span[1] < 0.5:
        chance = "worse than chance: small where answers are wrong"
    lines.append(f"{level_name} alone, R-AUROC {level['r_auroc']:.3f}{_span(span)}, is {chance}")
    lines.append(_against(compared["gain_of_u"], "the mix with u", "the mix without it"))
    return lines


def _against(gain: dict[str, Any], name: str, other: str) -> str:
    span = gain["intervals"]["r_auroc"]
    if span is None or span[0] <= 0 <= span[1]:
        word = "not clearly above" if gain["r_auroc"] >= 0 else "below, though not clearly,"
        word = "no different from" if abs(gain["r_auroc"]) < 0.0005 else word
    else:
        word = "above" if span[0] > 0 else "BELOW"
    return f"{name} is {word} {other}: {gain['r_auroc']:+.3f}{_span(span)}"


def _span(span: list[float] | None) -> str:
    return "" if span is None else f" [{span[0]:.3f}, {span[1]:.3f}]"
