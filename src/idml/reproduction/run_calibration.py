"""Calibration of a run on classes of a data set that it was not trained on, for research.

Galleries are calibrated on themselves (`idml.search.gallery_calibration`). This one measures a model: which of its
scores rank wrong answers, and what could be promised for a gallery like the data set.
"""

from functools import partial
from pathlib import Path
from typing import Any

from idml.calibration.calibrate import describe_figures, summarise
from idml.calibration.evidence import Profile
from idml.calibration.open_set import QueryPool, draw_unknown
from idml.calibration.report import build_page
from idml.calibration.score_comparison import describe_comparison
from idml.calibration.stored import Calibration
from idml.data.augment import CLEAN
from idml.data.datasets import Dataset, hold_out, load_dataset
from idml.data.sampling import random_stream
from idml.evaluation.evaluate import EvaluatedModel, describe_untaught, read_run_options
from idml.files import write_atomic
from idml.model import fingerprint
from idml.progress import Note, Progress, image_counter, silent

FILES = {"labelled": "calibration.json", "unlabelled": "calibration-unlabelled.json"}
REPORT = "calibration.html"

_LISTED = 50  # results listed for each query: the largest result set
_CLASSES, _QUERIES = 5, 50  # the smallest numbers that can be fitted
_PATH_KINDS = ("folder", "csv")  # data sets of these kinds are told apart by their path, all others by their kind


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
        result[kind] = summarise(calibration, queries, seed=seed)
        count_images("resampled")(number * len(queries), len(FILES) * len(queries))
    result["words"] = _describe(result)
    for kind, name in FILES.items():
        calibrations[kind].save(folder / name)
    write_atomic(folder / REPORT, _build_report(result))
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


def _describe(result: dict[str, Any]) -> list[str]:
    """Describe a calibration in sentences."""
    queries, right = result["queries"], result["right"]
    lines = [
        f"{queries:,} queries, {result['unknown_queries']:,} of them with no image of their class in the gallery; "
        f"{right:,} ({right / queries:.1%}) first results are right",
        f"the promises are for queries of which about {result['unknown_share']:.0%} or fewer are unknown",
    ]
    for kind in FILES:
        lines.append(f"galleries {'with' if kind == 'labelled' else 'without'} labels:")
        lines += [f"  {line}" for line in describe_figures(result[kind])]
        lines += [f"  {line}" for line in describe_comparison(result[kind], result["score"])]
    return lines


def _build_report(result: dict[str, Any]) -> bytes:
    trained = f", trained by {result['method']}" if result["method"] else ""
    counts = (
        f"Model {result['model']}{trained}. {result['queries']:,} queries of {result['classes']:,} classes that the "
        f"run was not trained on, against {result['gallery']:,} images. {result['unknown_queries']:,} queries "
        f"({result['unknown_share']:.0%}) have no image of their class there ({result['unknown_classes']:,} classes "
        f"were kept out of the gallery). {result['right']:,} first results are right. P(right) was fitted to half of "
        "the queries; the promises come from the other half. Queries are counted one by one, so for new classes the "
        "promises are estimates."
    )
    parts = {"Galleries with labels": result["labelled"], "Galleries without labels": result["unlabelled"]}
    return build_page(f"Calibration on {result['data']}", [counts, *result["notes"]], result, parts)


# -------------------- unseen classes --------------------


def load_unseen(data: str, split: str | None, trained: dict[str, Any]) -> tuple[Dataset, str]:
    """Load the test images of ``data`` whose classes a run was not trained on; returns them and their split.

    ``trained`` are the options of the run. If it was trained on ``data``, the default of ``split`` is the run's own
    split, and every class that it learned from is left out. Of a run on all classes ("all"), the classes remain that it
    held out for validation. If the run was trained on other data, or does not say on which, nothing is left out, and a
    line in ``notes`` says so.
    """
    own_data, own_split = str(trained.get("data", "")), str(trained.get("split", "official"))
    same = _is_same_data(data, own_data)
    chosen = split if split is not None else own_split if same else "official"
    dataset = load_dataset(data, split=chosen)
    notes = list(dataset.notes)
    if not same:
        what = f"was trained on {own_data.partition(':')[0]}" if own_data else "does not say what it was trained on"
        name = data.partition(":")[0]
        notes.append(f"the run {what}: it is assumed, not checked, that it has not seen the classes of {name}")
        return Dataset(dataset.name, dataset.train, dataset.test, dataset.gallery, tuple(notes)), chosen
    train = dataset.train if chosen == own_split else load_dataset(data, split=own_split).train
    learned = {*hold_out(train, _holdout_share(trained))[0].classes}
    classes = dataset.test.classes
    kept = [number for number, name in enumerate(classes) if name not in learned]
    if not kept:
        raise ValueError(
            f"the run was trained on every class of {data}: calibrate it with images of other classes, or train with "
            "--split 0.8 or --holdout 0.1"
        )
    test, gallery = dataset.test, dataset.gallery
    if len(kept) < len(classes):
        notes.append(f"{len(classes) - len(kept):,} of {len(classes):,} classes left out: the run was trained on them")
        test, gallery = test.of_classes(kept), None if gallery is None else gallery.of_classes(kept)
    return Dataset(dataset.name, train, test, gallery, tuple(notes)), chosen


def _is_same_data(data: str, other: str) -> bool:
    (kind, _, path), (other_kind, _, other_path) = data.partition(":"), other.partition(":")
    if kind != other_kind:
        return False
    return kind not in _PATH_KINDS or Path(path).expanduser().resolve() == Path(other_path).expanduser().resolve()


def _holdout_share(trained: dict[str, Any]) -> float:
    share = trained.get("holdout", 0.0)
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ValueError(f"the run's config.yaml says holdout: {share!r}; it must be a number from 0 to below 1")
    return share
