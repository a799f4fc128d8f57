"""`idml reproduce comparator-costs`: time and memory of a training step of each system of Table 1.

Each arm is trained in a process of its own, on one core, for a few epochs of made-up rows: what a frozen trunk, or all
of the trunk but its last stage, would give for a training set of the usual size. The cost of a step does not depend on
what the rows show, and the rows are the same for all arms. Measured are

    seconds    processor time of an epoch, with what the method does before it, divided by its steps
    memory     the peak of the resident memory above its peak after all imports: model, rows, optimiser, a step

Processor time is not that of the clock, so other programs on the machine change it little. The results are kept in
``out``/comparator-costs.json under the data set and the regime, and `idml reproduce table1 --comparators` shows them.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.compat import ensure_torchvision
from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.files import write_atomic
from idml.methods.base import Method
from idml.model import Model
from idml.progress import Note, silent
from idml.reproduction.claims import Key
from idml.reproduction.comparators import PROXY_ANCHOR, comparators_table
from idml.reproduction.regimes import Arms, Regime, regime_for
from idml.reproduction.runner import Store, machine_name, source_commit
from idml.training.build import build, build_optimiser, set_learning_rate, set_modes
from idml.training.config import TrainConfig
from idml.training.distributed import Processes
from idml.training.step import compute_gradients

NAME = "comparator-costs"
FILE = f"{NAME}.json"
EPOCHS = {"frozen": 4, "last": 1}
"""Epochs that are measured; four hold a clustering of every method that clusters."""
_CLASSES, _IMAGES = {"cub": 90, "cars": 88}, {"cub": 5270, "cars": 7250}
"""Classes and images that learn: the training set without the classes that are held out."""
_STEPS = 4  # steps of an epoch with the last stage
_SEED = 0


@dataclass(frozen=True)
class Cost:
    """What a step of an arm costs, and what one of plain ProxyAnchor does."""

    seconds: float
    memory: float
    """Bytes."""

    def text(self, usual: "Cost") -> tuple[str, str]:
        """Time and memory for a table, each with its ratio to ``usual``."""
        return (
            f"{1000 * self.seconds:,.0f} ms ({self.seconds / usual.seconds:.1f}×)",
            f"{self.memory / 1e6:,.0f} MB ({self.memory / usual.memory:.1f}×)",
        )


def read_costs(out: Path, data: str, regime: str) -> dict[Key, Cost]:
    """Return the stored costs of the arms for a data set and a regime; empty if they were not measured."""
    path = out / FILE
    if not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text())
        arms = stored.get(f"{data}-{regime}", {}).get("arms", [])
        return {(arm["loss"], arm["name"]): Cost(float(arm["seconds"]), float(arm["memory"])) for arm in arms}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}); restore the file with git") from None


def relative_times(costs: Mapping[Key, Cost]) -> dict[Key, float]:
    """Return the time of a step of each arm in units of one of plain ProxyAnchor; empty if that is not known."""
    usual = costs.get(PROXY_ANCHOR)
    return {} if usual is None else {key: cost.seconds / usual.seconds for key, cost in costs.items()}


# -------------------- all arms --------------------


def measure_costs(
    data: str | None, regime: str | None, out: Path, *, dry_run: bool = False, note: Note = silent
) -> dict[str, Any]:
    """Measure all arms of a data set in the regimes frozen and last, or in one of them; write and return them."""
    kind = (data or "cub").partition(":")[0]
    if kind not in _CLASSES:
        raise ValueError(f"the costs are those of cub or cars, not of {kind}")
    if regime is not None and regime not in EPOCHS:
        raise ValueError(f"the costs are those of the regimes {' and '.join(EPOCHS)}, not of {regime}")
    chosen = [regime] if regime else list(EPOCHS)
    lines, found, path = list[str](), dict[str, Any](), out / FILE
    for name in chosen:
        arms = comparators_table(Arms(kind, regime_for(kind, name=name))).arms
        if dry_run:
            lines.append(f"{kind}, {name}: {len(arms)} processes of about {'20' if name == 'frozen' else '60'} seconds")
            continue
        measured = []
        for place, arm in enumerate(arms, start=1):
            note(f"{kind}, {name}: {arm} ({place} of {len(arms)})")
            cost = _measure_apart(kind, name, arm.key)
            measured.append({"loss": arm.loss, "name": arm.name, **cost})
        facts = {"date": time.strftime("%Y-%m-%d"), "machine": machine_name(), "commit": source_commit()}
        found[f"{kind}-{name}"] = {**facts, "arms": measured}
        stored = json.loads(path.read_text()) if path.exists() else {}
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps({**stored, **found}, indent=1, ensure_ascii=False) + "\n").encode())
    if dry_run:
        return {"table": "\n".join(lines)}
    for key, part in found.items():
        lines.append(f"{key}, on {part['machine']}:")
        costs = {(arm["loss"], arm["name"]): Cost(arm["seconds"], arm["memory"]) for arm in part["arms"]}
        lines += [f"  {', '.join((*arm, *cost.text(costs[PROXY_ANCHOR])))}" for arm, cost in costs.items()]
    return {"table": "\n".join([*lines, f"written to {path}"]), "costs": found}


def _measure_apart(data: str, regime: str, key: Key) -> dict[str, Any]:
    """Run this file as a process of its own, for one arm."""
    words = [sys.executable, "-m", "idml.reproduction.comparator_costs", data, regime, *key]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise OSError(f"measuring {key[1]} ({key[0]}) failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    cost: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return cost


# -------------------- one arm, in this process --------------------


def measure_arm(data: str, regime: Regime, key: Key, *, images: int, classes: int, steps: int = 0) -> dict[str, float]:
    """Train an arm on made-up rows; return seconds a step and the peak of memory above that of the imports.

    ``steps`` limits the steps of an epoch; 0: as many as there are.
    """
    before = _peak()
    (arm,) = (arm for arm in comparators_table(Arms(data, regime)).arms if arm.key == key)
    store = Store(Path(), data, regime)
    config = store.config(store.cell(arm.loss, arm.options, regime.rates[0], _SEED), Path("cost"))
    torch.manual_seed(_SEED)
    labels = torch.arange(images) % classes
    model, method = build(config, labels, classes)
    optimizer, processes = build_optimiser(model, method, config), Processes()
    rows = _MadeUpRows(config, model, labels)
    method.embed = rows.embed
    spent, done = 0.0, 0
    for epoch in range(EPOCHS[regime.name]):
        started = time.process_time()
        method.start_epoch(epoch, rows.embed)
        plan = method.plan(torch.arange(images), batch_size=config.batch_size, per_class=config.per_class, epoch=epoch)
        set_modes(model, config, epoch)
        method.train()
        spent += time.process_time() - started
        for step, numbers in enumerate(plan[: steps or len(plan)]):
            batch = rows.batch(method, numbers, epoch, step)
            started = time.process_time()
            set_learning_rate(optimizer, config, epoch, step / len(plan))
            optimizer.zero_grad(set_to_none=True)
            compute_gradients(batch, numbers, model, method, config, processes, seed=step)
            optimizer.step()
            if epoch or step:  # the first step allocates
                spent += time.process_time() - started
                done += 1
    return {"seconds": spent / done, "memory": float(_peak() - before)}


class _MadeUpRows:
    """Rows of images that learn: features, or inputs of the last stage; those of a class lie around a mean."""

    def __init__(self, config: TrainConfig, model: Model, labels: Tensor) -> None:
        self.config, self.model, self.labels = config, model, labels
        generator = torch.Generator().manual_seed(_SEED)
        shape: tuple[int, ...] = (model.trunk.width,)
        self.kept = len(labels)  # for the last stage fewer: rows are large, and no method reads all of them
        if config.train == "last":
            side = model.trunk.image_size
            with torch.no_grad():
                shape = model.stages.activations(torch.zeros(1, model.config.in_chans, side, side)).shape[1:]
            self.kept = min(self.kept, 4 * config.batch_size)
        means = torch.randn(int(labels.max()) + 1, *shape, generator=generator)
        rows = means[labels[: self.kept]] + torch.randn(self.kept, *shape, generator=generator)
        self.rows = rows.relu_().half() if config.train == "last" else rows.relu_()

    def batch(self, method: Method, numbers: Tensor, epoch: int, step: int) -> Batch:
        """A batch of the planned images, with what the method adds."""
        labels = self.labels[numbers]
        empty = torch.zeros(len(numbers), 1, 1, 1)
        drawn = method.add_images(empty, labels, seed=_SEED, epoch=epoch, step=step)
        places = torch.cat([numbers, (numbers + 1).repeat(2)])[: len(drawn.labels)] % self.kept
        return Batch(self.rows[places], drawn.labels, drawn.mixed, drawn.lam)

    def embed(self) -> tuple[Tensor, Embeddings]:
        """What `Method.start_epoch` gets of all images."""
        return torch.arange(len(self.labels)), self.model.embed_features(self.rows, outputs=True)


def _peak() -> int:
    """The largest resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _main() -> None:
    data, regime, loss, name = sys.argv[1:]
    torch.set_num_threads(1)
    ensure_torchvision()
    for module in ("timm", "sklearn.cluster", "sklearn.metrics", "scipy.optimize"):
        import_module(module)  # an import is no cost of a method
    steps = _STEPS if regime == "last" else 0
    sizes = {"images": _IMAGES[data], "classes": _CLASSES[data]}
    print(json.dumps(measure_arm(data, regime_for(data, name=regime), (loss, name), **sizes, steps=steps)))


if __name__ == "__main__":
    _main()
