"""`idml evaluate`: everything that is measured of a run on a data set's test classes, kept by what it depends on."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from idml.data.augment import GRADED, MIXED, View
from idml.data.datasets import load_dataset
from idml.data.sources import Dataset
from idml.evaluation.candidate import Candidate, pixels_of
from idml.evaluation.figures import figures, verdicts
from idml.evaluation.measuring import MIDDLE, fit_predictor, measure
from idml.evaluation.report import build_report
from idml.files import write_whole
from idml.metric import IntrospectiveMetric
from idml.model import fingerprint

VERSION = 1  # goes up when a figure comes to mean something else: older results are then made again
METRICS = ("euclidean", "introspective")
Progress = Callable[[dict[str, Any]], None]
Note = Callable[[str], None]


def evaluate_run(
    run: str | Path,
    data: str,
    *,
    metric: str = "euclidean",
    split: str = "official",
    ensemble: Sequence[str | Path] = (),
    graded: bool = False,
    out: str | Path | None = None,
    progress: Progress = lambda row: None,
    note: Note = lambda text: None,
) -> dict[str, Any]:
    """Retrieval, clustering and uncertainty figures of the model in ``run`` on the test classes of ``data``.

    Args:
        run: a run directory.
        data: a SPEC as in `idml.data.datasets.load_dataset`, and ``split`` likewise.
        metric: what compares images in the test: "euclidean" on s, or "introspective" with the run's τ and γ.
        split: which classes train and which test.
        ensemble: further runs that vote with this one.
        graded: three strengths of every degradation instead of the middle one.
        out: where report.html goes; by default ``run``/evaluation.
        progress: called with rows of how many images are done.
        note: called with lines that a person should see.

    The result is kept in ``run``/evaluation under a hash of the models, the images, the metric and the views; a second
    call reads it. docs/evaluation.md says what it holds.
    """
    runs = [Path(path) for path in (run, *ensemble)]
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; known are {' and '.join(METRICS)}")
    models = [fingerprint(path) for path in runs]
    options = [_options(path) for path in runs]
    metrics = [
        _metric(path, told) if metric == "introspective" else None for path, told in zip(runs, options, strict=True)
    ]
    dataset = load_dataset(data, split=split)
    views = GRADED if graded else MIDDLE
    if len(dataset.test.labels.unique()) > 1:  # images of a single class have nothing to be mixed with
        views = (MIXED, *views)
    told = {name: options[0].get(name) for name in ("method", "introspection", "rule", "split")}
    sets = [None if images is None else images.version for images in (dataset.train, dataset.test, dataset.gallery)]
    parts = (VERSION, models, sets, split, metrics, told, views)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    folder = runs[0] / "evaluation"
    place = folder if out is None else Path(out)
    result = _read(folder, key)
    if result is None:
        head: dict[str, Any] = {"data": dataset.name, "split": split, "metric": metric, "key": key}
        if metrics[0] is not None:
            head |= {"tau": metrics[0].tau, "gamma": metrics[0].gamma}
        head["model"] = {"fingerprint": models[0], "method": told["method"]}
        head["notes"] = [*dataset.notes, *_warnings(told, split, metric)]
        result, page = _evaluate(runs, dataset, metrics, views, head, progress, note)
        folder.mkdir(exist_ok=True)
        write_whole(folder / f"{key}.html", page)
        write_whole(folder / f"{key}.json", (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    else:
        for line in result["notes"]:
            note(line)
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / "report.html", (folder / f"{key}.html").read_bytes())
    return {**result, "report": str(place / "report.html")}


def _evaluate(
    runs: list[Path],
    dataset: Dataset,
    metrics: list[IntrospectiveMetric | None],
    views: tuple[View, ...],
    head: dict[str, Any],
    progress: Progress,
    note: Note,
) -> tuple[dict[str, Any], bytes]:
    """The result, which begins with ``head``, and its page."""
    notes: list[str] = head["notes"]
    for line in notes:
        note(line)

    def keep(line: str) -> None:
        if line not in notes:  # the models of an ensemble may all complain about one image
            notes.append(line)
            note(line)

    def counted(what: str) -> Callable[[int, int], None]:
        return lambda done, images: progress({"done": done, "images": images, "what": what})

    loaded = [Candidate.load(path, dataset, metric, counted, keep) for path, metric in zip(runs, metrics, strict=True)]
    candidate, config = loaded[0], loaded[0].model.config
    train = pixels_of(candidate.model, dataset.train, counted, keep)
    measured = measure(candidate, views, loaded[1:], fit_predictor(candidate, train, keep))
    n = len(measured.rows)
    if candidate.metric is not None:
        keep("NMI is not defined with the introspective metric: k-means goes by Euclidean distances")
    result: dict[str, Any] = {
        **head,
        "model": {"trunk": config.trunk, "embedding_dim": config.embedding_dim, **head["model"]},
        "ensemble": len(runs) - 1,
        **measured.retrieval,
        "classes": len(measured.labels.unique()),
        "own_score": "sigma" if config.uncertainty == "gaussian" else "level",
        **figures(measured, lambda done, total: counted("resampled")(done * n, total * n)),
    }
    result["verdict"] = verdicts(result)
    return result, build_report(result, measured, candidate, note)


def _options(run: Path) -> dict[str, Any]:
    """What the run was trained with, if it says so."""
    path = run / "config.yaml"
    try:
        options = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a YAML file ({str(error).splitlines()[0]})") from None
    if not isinstance(options, dict):
        raise ValueError(f"{path} must hold options as 'name: value' lines")
    return options


def _metric(run: Path, options: dict[str, Any]) -> IntrospectiveMetric:
    if "tau" not in options or "gamma" not in options:
        raise ValueError(f"{run / 'config.yaml'} names no tau and gamma, which the introspective metric needs")
    return IntrospectiveMetric(options["tau"], options["gamma"])


def untaught(trained: dict[str, Any]) -> list[str]:
    """What to say of the u of a run with these options, if nothing taught it."""
    method, signal = trained.get("method"), trained.get("introspection")
    if method not in ("plain", "mixup") or signal not in (None, "none"):
        return []
    return [f"the run was trained by {method} alone: nothing taught its uncertainty embedding anything"]


def _warnings(told: dict[str, Any], split: str, metric: str) -> list[str]:
    """What makes the figures of this run mean less than they seem to."""
    lines = untaught(told)
    if told["split"] is not None and str(told["split"]) != split:
        lines.append(
            f"the run was trained with the split {told['split']!r}: it may have seen the test classes of {split!r}"
        )
    if metric == "introspective" and told["rule"] not in (None, "similar"):
        lines.append(f"the run was trained with the rule {told['rule']!r}; the test uses 'similar', which ranks images")
    return lines


def _read(folder: Path, key: str) -> dict[str, Any] | None:
    """A result that was kept; one that is damaged counts as absent."""
    try:
        result = json.loads((folder / f"{key}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return result if isinstance(result, dict) and (folder / f"{key}.html").is_file() else None
