"""`idml train --dry-run`: what a run would do, with everything checked that can be checked without reading a pixel."""

from pathlib import Path
from typing import Any

from idml.data.datasets import hold_out, load_dataset
from idml.model.backbones import check_trunk
from idml.training.build import build
from idml.training.checkpoint import check_free
from idml.training.config import TrainConfig, fit_batch_size, to_dict


def plan_run(config: TrainConfig, *, resume: bool = False) -> dict[str, Any]:
    """Return the options of a run, the images and classes of its data set, and ``words`` to show.

    The model is built, so weights that are not on this computer yet are fetched. A trunk, weights or a data set that is
    not there is an error of one line. So are weights of another architecture, and an option of the method or a
    parameter of the loss that cannot be. No run is written.
    """
    check_free(Path(config.out), resume=resume)
    check_trunk(config.trunk)
    dataset = load_dataset(config.data, split=config.split, strict=config.strict_data)
    seen, held_out = hold_out(dataset.train, config.holdout)
    config = fit_batch_size(config, seen.labels)
    build(config, seen.labels, len(seen.classes))  # it refuses sizes that do not divide, and weights that do not fit
    parts = {"train": seen, "held out": held_out, "test": dataset.test, "gallery": dataset.gallery}
    counts = {
        name: {"images": len(images), "classes": len(images.classes)}
        for name, images in parts.items()
        if images is not None
    }
    words = [f"{name}: {n['images']:,} images of {n['classes']:,} classes" for name, n in counts.items()]
    epochs = f"{config.epochs:,} epoch{'s' * (config.epochs > 1)}"
    words.append(f"{config.method} with {config.loss} on {config.trunk}: {epochs}")
    if line := config.warm_up_note:
        words.append(line)
    words.append(f"batches of {config.batch_size:,} images; the run would be {config.out}")
    return {"options": to_dict(config), "data": counts, "words": [*dataset.notes, *words]}
