"""The images of a data set that a run was not trained on."""

from pathlib import Path
from typing import Any

from idml.data.datasets import hold_out, load_dataset
from idml.data.sources import Dataset

_OWN_IMAGES = ("folder", "csv")  # what these name lies at a path; every other word names one data set wherever it is


def unseen(data: str, split: str | None, trained: dict[str, Any]) -> tuple[Dataset, str]:
    """The test images of ``data`` whose classes a run has not seen, and the split they come from.

    ``trained`` are the run's own options. If it was trained on ``data``, ``split`` is by default the run's own, and
    every class that it learned from is left out: of a run on all classes ("all") those remain that it held out for
    validation. Of other data, or of a run that does not say what it was trained on, nothing is left out, and a line in
    ``notes`` says so.
    """
    theirs, their_split = str(trained.get("data", "")), str(trained.get("split", "official"))
    same = _same(data, theirs)
    chosen = split if split is not None else their_split if same else "official"
    dataset = load_dataset(data, split=chosen)
    notes = list(dataset.notes)
    if not same:
        what = f"was trained on {theirs.partition(':')[0]}" if theirs else "does not say what it was trained on"
        notes.append(f"the run {what}: that it has not seen the classes of {data.partition(':')[0]} is taken on trust")
        return Dataset(dataset.name, dataset.train, dataset.test, dataset.gallery, tuple(notes)), chosen
    train = dataset.train if chosen == their_split else load_dataset(data, split=their_split).train
    learned = {*hold_out(train, _holdout(trained))[0].classes}
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


def _same(data: str, other: str) -> bool:
    (kind, _, path), (their_kind, _, their_path) = data.partition(":"), other.partition(":")
    if kind != their_kind:
        return False
    return kind not in _OWN_IMAGES or Path(path).expanduser().resolve() == Path(their_path).expanduser().resolve()


def _holdout(trained: dict[str, Any]) -> float:
    share = trained.get("holdout", 0.0)
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ValueError(f"the run's config.yaml says holdout: {share!r}, which is no share of its classes")
    return share
