"""The study `resnet50`: the paper's own network on CUB, with as many images for every arm.

ResNet-50 from ImageNet weights (`--weights`), 224 pixels, 512 dimensions, batches of 120, ProxyAnchor, learning rate
1e-4 (ProxyAnchor's published one), one epoch of warm-up, one seed. The network computes in bfloat16, which halves the
time on a CPU that has it; weights, embeddings, metric and loss are float32, and so are all tests. Mixtures double the
images of a step, so plain training has 12 epochs where IDML and the authors' release have 6: about 63,000 images each.
The learning rate is constant: then the sixth epoch of the plain run is what a plain run of 6 epochs would be, and it is
read from there. Nothing is chosen by the test classes: after epoch 6 the model and the one selected so far are kept,
and all models are tested when training has ended. The plain arm teaches u beside the loss, as `idml train` does by
default; its gradient reaches neither s nor the trunk.

The paper has 69.0 (plain) and 70.7 (IDML) R@1, after 60 epochs and with the best epoch on the test set. One seed is an
observation, not a result. Expected cost: 1 to 3 core hours an arm, by the CPU (half of it with both cores).
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

from idml.data.datasets import Dataset
from idml.data.images import resized_side
from idml.data.pixel_cache import load_pixels
from idml.embeddings import Embeddings
from idml.evaluation.retrieval import class_sums
from idml.model import Model, load_model, save_model
from idml.model.feature_cache import embed_view
from idml.model.model import FILE
from idml.progress import Progress
from idml.reproduction.claims import NOT_INTROSPECTIVE, SAME_AS_PLAIN, Runs, estimate, gain, paper_figure, paper_gain
from idml.reproduction.measure import measure_run, stored_sums
from idml.reproduction.regimes import TAUGHT_U, Arm, Arms
from idml.reproduction.runner import Cell, Measures, Store
from idml.reproduction.stored_results import Row
from idml.reproduction.studies import Study, StudyTable
from idml.training.build import fold_as_trained
from idml.training.config import TrainConfig
from idml.training.distributed import Processes

LOSS = "proxy_anchor"
EPOCHS, HALF = 12, 6
"""Epochs of the plain run, and of the arms with mixtures."""
_LAST, _SELECTED = f"epoch-{HALF}", f"selected-{HALF}"
_COLUMNS = [
    "arm", "epochs", "images seen", "the paper", "R@1, selected epoch", "epoch", "over plain, selected epochs",
    "R@1, last epoch", "over plain, same images", "over plain, same epochs", "MAP@R, selected epoch", "mean weight",
    "R-AUROC of ‖u‖",
]  # fmt: skip


def resnet50_arms(arms: Arms) -> list[Arm]:
    """Return the three arms, the most wanted first."""
    return [arms.arm(LOSS, "plain", **TAUGHT_U, epochs=EPOCHS), arms.arm(LOSS, "idml"), arms.release()]


def resnet50_cells(store: Store, seeds: int) -> list[Cell]:
    """Return the cells of the arms, seed by seed."""
    arms, rate = resnet50_arms(Arms(store.data, store.regime)), store.regime.study_rate
    return [store.cell(LOSS, arm.options, rate, seed) for seed in range(seeds) for arm in arms]


def keep_half(run: Path, epoch: int, model: Model) -> None:
    """Keep the model of the sixth epoch, and the one that the held-out classes have selected so far."""
    if epoch == HALF:
        save_model(model, run / "checkpoints" / _LAST)
        shutil.copytree(run / "checkpoints" / "best", run / "checkpoints" / _SELECTED, dirs_exist_ok=True)


def measure_epochs(
    config: TrainConfig, run: Path, dataset: Dataset, clean: Embeddings, report: Progress
) -> dict[str, Any]:
    """Return what a row of a table keeps, and the figures of the last epoch; of the plain run also those after six."""
    known, tested = {_digest(run): clean}, dict[str, Any]()  # a model that was selected twice is embedded once
    for name in ("last",) if config.epochs <= HALF else ("last", _LAST, _SELECTED):
        folder = run / "checkpoints" / name
        model = fold_as_trained(load_model(folder), config).to(Processes().device)
        pixels = load_pixels(dataset.test, resized_side(model.trunk.image_size))
        if (digest := _digest(folder)) not in known:
            known[digest] = embed_view(model, pixels, keep=config.train != "all", last=config.train == "last")
        sums = class_sums(known[digest], pixels.images.labels[pixels.usable])
        tested[name] = {"selected": sums.figures, "classes": stored_sums(sums)}
    return {**measure_run(config, run, dataset, clean, report), "tested": tested}


def _digest(folder: Path) -> str:
    with (folder / FILE).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# -------------------- the table --------------------


def resnet50_tables(rows: list[Row]) -> list[StudyTable]:
    """Return the table of the arms that are there."""
    found = {_arm_of(row): row for row in rows if "failed" not in row and row["options"]["seed"] == 0}
    plain, lines = found.get("plain"), list[list[str]]()
    if plain is not None and _LAST in plain["tested"]:
        seen = plain["images_seen"] * HALF // plain["options"]["epochs"]
        tested = plain["tested"]
        lines.append(_line("plain", HALF, seen, tested[_SELECTED], tested[_LAST], plain))
    for name, row in found.items():
        last, epochs = row["tested"]["last"], row["options"]["epochs"]
        rivals = (
            None if plain is None or name == "plain" else (plain, plain["tested"]["last"], plain["tested"].get(_LAST))
        )
        lines.append(_line(name, epochs, row["images_seen"], row, last, row, rivals))
    title = "The paper's own network: ResNet-50, CUB, 224 pixels, ProxyAnchor, one seed (an observation)"
    return [StudyTable("table", title, _COLUMNS, lines)]


def resnet50_verdict(rows: list[Row]) -> list[str] | None:
    """Return the paper's gain, ours by the selected epochs, and that it is an observation; None: not run.

    Last epochs would credit IDML with plain's overfitting; the table has them. A metric whose mean weight is almost 1
    is named: it hardly differs from the plain one.
    """
    found = {_arm_of(row): row for row in rows if "failed" not in row}
    if not {"plain", "idml"} <= found.keys():
        return None
    theirs = paper_gain("cub", (LOSS, "idml"), (LOSS, "plain"))
    ours = _change(found["idml"], found["plain"])
    same = f"; {NOT_INTROSPECTIVE}" if found["idml"].get("weight", 0.0) > SAME_AS_PLAIN else ""
    return ["" if theirs is None else f"{theirs:+.1f}", ours, f"observation: one seed{same}"]


def _line(
    name: str,
    epochs: int,
    seen: int,
    selected: Row,
    last: Row,
    row: Row,
    rivals: tuple[Row, Row, Row | None] | None = None,
) -> list[str]:
    """A row of the table; ``rivals``: plain with its selected epoch, its last one, and that after as many epochs."""
    theirs = paper_figure("cub", (LOSS, name), "R@1")
    weight = f"{row['weight']:.3f}" if "weight" in row else ""
    r_auroc = f"{row['r_auroc']:.2f}" + (
        " [{:.2f}, {:.2f}]".format(*row["r_auroc_interval"]) if row.get("r_auroc_interval") else ""
    )
    over_selected, over_last, over_half = rivals or (None, None, None)
    return [
        name, str(epochs), f"{seen:,}", "" if theirs is None else f"{theirs:.1f}",
        estimate(_alone(selected)).text(), str(_best_epoch(row, epochs)), _change(selected, over_selected),
        estimate(_alone(last)).text(), _change(last, over_last), _change(last, over_half),
        estimate(_alone(selected), "MAP@R").text(), weight, r_auroc if row is selected else "",
    ]  # fmt: skip


def _change(row: Row, over: Row | None) -> str:
    return "" if over is None else gain(_alone(row), _alone(over)).text(sign=True)


def _alone(row: Row) -> Runs:
    return {0: row}


def _best_epoch(row: Row, epochs: int) -> int:
    """The epoch that the held-out classes select among the first ``epochs``; the first of equal ones."""
    scores: list[float] = row["trend"]["held_out_map@r"][:epochs]
    return scores.index(max(scores)) + 1


def _arm_of(row: Row) -> str:
    options = row["options"]
    if options["method"] == "plain":
        return "plain"
    return "release" if options.get("rule") == "release" else "idml"


RESNET50 = Study(
    resnet50_cells, Measures(run=measure_epochs, keep=keep_half), resnet50_tables, regime="resnet50", seeds=1
)
