"""The cells that all tables share: one training run and what was found of it, made once, by one worker.

A cell is named by its options, so two tables that ask for the same run ask for the same cell. Its file is written whole
or not at all; a run that was stopped is gone on with; a file that is damaged, or that another version of the protocol,
other options or other images made, counts as absent and is made again, which is said in one line.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from idml.data.datasets import Dataset
from idml.embeddings import Embeddings
from idml.files import lock_file, write_atomic
from idml.progress import Note, Progress, silent
from idml.reproduction.grid import UNTAUGHT, Cell
from idml.reproduction.judging import judge, judge_raw
from idml.reproduction.regimes import Regime
from idml.training.config import TrainConfig, from_dict
from idml.training.loop import train

VERSION = 1  # raised by hand when cells would come out differently: those of another version are made again
RAW = "raw"
_LONGEST = 120  # characters of a name
_NAMED = ("loss", "method", "lr", "seed")
_TRUNK = ("freeze_trunk", "train")  # the folder's regime says it


class Store:
    """The cells of a data set in a regime, in ``out``/cells-<data>-<regime>."""

    def __init__(self, out: Path, data: str, regime: Regime, note: Note = silent) -> None:
        self.data, self.regime, self.note = data, regime, note
        self.folder = out / f"cells-{data.partition(':')[0]}-{regime.name}"
        self.images: str | None = None
        """A hash of the images, where they are known: cells of other images are not taken."""
        self._known: dict[str, dict[str, Any]] = {}
        self._said: set[str] = set()

    def cell(self, loss: str, options: Mapping[str, Any], rate: float, seed: int) -> Cell:
        """The cell of an arm at a learning rate; options that the config refuses are its ``ValueError``."""
        own = {**options, "loss": loss, "lr": rate, "seed": seed}
        config = from_dict({**self.regime.base, **own, "data": self.data, "out": "cell"})
        return Cell(_name(config, from_dict({**self.regime.base, "data": self.data, "out": "cell"})), _options(config))

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """What was found, or None where it has to be made."""
        if cell.name not in self._known:
            found = self._sound(cell)
            if found is None:
                return None
            self._known[cell.name] = found
        return self._known[cell.name]

    def raw(self) -> dict[str, Any] | None:
        """What the features reach that nothing was learned on."""
        return self.read(Cell(RAW, {}))

    @contextmanager
    def taken(self, cell: Cell) -> Iterator[bool]:
        """Whether the cell is this worker's to make; another one's, until it is finished or stopped, is not.

        The lock's file goes with the finished cell. A worker that had opened it before finds the cell when it asks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{cell.name}.lock"
        try:
            lock = lock_file(path, wait=False)
        except BlockingIOError:
            yield False
            return
        with lock:
            try:
                yield True
            finally:
                if self.read(cell) is not None:
                    path.unlink(missing_ok=True)

    def make(self, cell: Cell, dataset: Dataset, report: Progress, *, first: bool = True) -> None:
        """Train and judge a cell, or go on with it; one whose training fails on its numbers is kept as failed.

        Of several processes that train it together the first one judges and writes.
        """
        started = time.perf_counter()
        self.folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any]
        if cell.name == RAW:
            found = judge_raw(dataset, self.regime.base) if first else {}
        else:
            found = self._train(cell, dataset, report)
        if not first:
            return
        found |= {"seconds": round(time.perf_counter() - started, 1), **_made(), "images": _fingerprint(dataset)}
        result = {"version": VERSION, "options": cell.options, **found}
        write_atomic(self.folder / f"{cell.name}.json", (_json(result) + "\n").encode())
        shutil.rmtree(self._run(cell), ignore_errors=True)

    def _run(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.run"

    def _train(self, cell: Cell, dataset: Dataset, report: Progress) -> dict[str, Any]:
        run = self._run(cell)
        config = from_dict({**self.regime.base, **cell.options, "data": self.data, "out": str(run)})
        seen: list[Embeddings] = []
        options: dict[str, Any] = {"resume": True, "dataset": dataset, "pages": False, "report": report}
        try:
            metrics = train(config, **options, tested=seen.append)
        except ValueError as error:
            if "cannot resume" in str(error) or "not a sound checkpoint" in str(error):
                self.note(f"{cell.name}: begun anew: {error}")
                shutil.rmtree(run)
                metrics = train(config, **options, tested=seen.append)
            elif re.match(r"step \d+: .*\b(nan|inf|NaN or infinity)\b", str(error)):
                return {"failed": str(error).partition("; images")[0]}
            else:
                raise
        return {**metrics, **judge(config, run, dataset, seen[-1])} if metrics else {}

    def _sound(self, cell: Cell) -> dict[str, Any] | None:
        path = self.folder / f"{cell.name}.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            fault = self._fault(found, cell)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            fault = f"is damaged ({type(error).__name__})"
        line = f"{path.name} {fault} and is made again"
        if fault and line not in self._said:
            self._said.add(line)
            self.note(line)
        return None if fault else found

    def _fault(self, found: dict[str, Any], cell: Cell) -> str:
        """Why a file does not serve as the cell, or nothing."""
        if found["version"] != VERSION:
            return f"is of version {found['version']} of the protocol, not {VERSION},"
        if _without(found["options"], _TRUNK) != json.loads(json.dumps(_without(cell.options, _TRUNK))):
            return "was made with other options"
        if self.images is not None and found["images"] != self.images:
            return "was made from other images"
        if not isinstance(found["seconds"], float) or not ("failed" in found or "classes" in found):
            return "is not whole"
        return ""


def open_store(out: Path, data: str, regime: Regime, dataset: Dataset, note: Note) -> Store:
    """The store of a data set that is there: cells of other images are made again."""
    store = Store(out, data, regime, note)
    store.images = _fingerprint(dataset)
    return store


def _fingerprint(dataset: Dataset) -> str:
    return f"{dataset.train.fingerprint}-{dataset.test.fingerprint}"


def _options(config: TrainConfig) -> dict[str, Any]:
    """What differs from the defaults, but for where data and results lie; what always tells cells apart is kept."""
    chosen = {}
    for item in fields(config):
        value = getattr(config, item.name)
        default = UNTAUGHT.get(item.name, item.default if item.default is not MISSING else None)
        if item.name in _NAMED or (item.name not in ("data", "out", "workers") and value != default):
            chosen[item.name] = list(value) if isinstance(value, tuple) else value
    return chosen


def _name(config: TrainConfig, base: TrainConfig) -> str:
    """Loss and method, what else differs from the regime's options, learning rate and seed."""
    own, usual = asdict(config), asdict(base)
    words = [config.loss, config.method]
    for key in sorted(own):
        if key not in (*_NAMED, "data", "out") and own[key] != usual[key]:
            value = own[key]
            words.append(f"{key}={'+'.join(value) if isinstance(value, tuple) else _number(value)}")
    name = "-".join(words)
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"{name}-lr={_number(config.lr)}-seed={config.seed}"


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _without(options: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in keys}


def _made() -> dict[str, str]:
    """When and on what."""
    import torch

    try:
        model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else (model[1] if model else platform.machine())
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} used"
    return {"date": time.strftime("%Y-%m-%d"), "machine": f"{device}, {cores}, torch {torch.__version__}"}


def _json(result: dict[str, Any]) -> str:
    """One key a line; lists stay on theirs."""
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
    return f"{{\n{lines}\n}}"
