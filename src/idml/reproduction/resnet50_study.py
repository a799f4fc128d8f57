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
observation, not a result. Expected cost: 3 core hours an arm (both cores: 1.5 hours).
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
from idml.reproduction.claims import Runs, estimate, gain, paper_figure, paper_gain
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
    "arm", "epochs", "images seen", "R@1, last epoch", "R@1, selected epoch", "epoch", "the paper", "MAP@R, last epoch",
    "over plain, same images", "over plain, same epochs", "mean weight", "R-AUROC of ‖u‖",
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
        best = _best_epoch(plain, HALF)
        seen = plain["images_seen"] * HALF // plain["options"]["epochs"]
        tested = plain["tested"]
        lines.append(_line("plain", HALF, seen, tested[_LAST], tested[_SELECTED], best, plain, None, None))
    for name, row in found.items():
        last, epochs = row["tested"]["last"], row["options"]["epochs"]
        same_images = plain["tested"]["last"] if plain is not None and name != "plain" else None
        same_epochs = plain["tested"].get(_LAST) if plain is not None and name != "plain" else None
        best = _best_epoch(row, epochs)
        lines.append(_line(name, epochs, row["images_seen"], last, row, best, row, same_images, same_epochs))
    title = "The paper's own network: ResNet-50, CUB, 224 pixels, ProxyAnchor, one seed (an observation)"
    return [StudyTable("table", title, _COLUMNS, lines)]


def resnet50_verdict(rows: list[Row]) -> list[str] | None:
    """Return the paper's gain, ours over plain with as many images, and that it is an observation; None: not run."""
    found = {_arm_of(row): row for row in rows if "failed" not in row}
    if not {"plain", "idml"} <= found.keys():
        return None
    last = {name: _alone(row["tested"]["last"]) for name, row in found.items()}
    theirs = paper_gain("cub", (LOSS, "idml"), (LOSS, "plain"))
    ours = f"{gain(last['idml'], last['plain']).text(sign=True)} over plain with as many images"
    return ["" if theirs is None else f"{theirs:+.1f}", ours, "observation: one seed"]


def _line(
    name: str,
    epochs: int,
    seen: int,
    last: Row,
    selected: Row,
    best: int,
    row: Row,
    images: Row | None,
    half: Row | None,
) -> list[str]:
    def change(over: Row | None) -> str:
        return "" if over is None else gain(_alone(last), _alone(over)).text(sign=True)

    theirs = paper_figure("cub", (LOSS, name), "R@1")
    weight = f"{row['weight']:.3f}" if "weight" in row else ""
    r_auroc = f"{row['r_auroc']:.2f}" + (
        " [{:.2f}, {:.2f}]".format(*row["r_auroc_interval"]) if row.get("r_auroc_interval") else ""
    )
    figures = [estimate(_alone(last)).text(), estimate(_alone(selected)).text(), str(best)]
    return [
        name, str(epochs), f"{seen:,}", *figures, "" if theirs is None else f"{theirs:.1f}",
        estimate(_alone(last), "MAP@R").text(), change(images), change(half), weight,
        r_auroc if row is selected else "",
    ]  # fmt: skip


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
