"""The one runner: makes the cells of tables and studies, each once, and gives every arm the same protocol.

A *cell* is one training run and what was measured of it. Its options name it, so two tables that ask for the same run
share a cell. Its file is written atomically. A stopped run is resumed. Several workers may run at the same time: each
takes a cell that is free. A file that is damaged, or that another version of the protocol, other options or other
images made, counts as absent: the cell is made again, and one line says so.

The protocol of tables: with seed 0 an arm is trained at each learning rate of its regime. The rate with the best score
on held-out training classes is chosen, and the other seeds are trained at it. The epoch is chosen on the same held-out
classes. The test classes are looked at when everything is chosen.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import idml
from idml.data.datasets import Dataset, load_dataset
from idml.embeddings import Embeddings
from idml.files import lock_file, write_atomic
from idml.model import Model
from idml.progress import Note, Progress, silent
from idml.reproduction.measure import measure_raw, measure_run
from idml.reproduction.regimes import UNTAUGHT_U, Arm, Regime
from idml.reproduction.stored_results import Row, StoredRows, cells_folder
from idml.training.config import TrainConfig, from_dict, options_of
from idml.training.distributed import Processes
from idml.training.loop import train

VERSION = 2
"""The version of the protocol: raised by hand when cells would come out differently. Rows of others are not used.

1: CUB from images with 128 pixels; originals and mixtures in one pair matrix. 2: docs/reproduction.md.
"""
RAW = "raw"
_LONGEST = 120  # characters of a name
_PAUSE = 5.0  # seconds between two looks at the cells of other workers
_NEUTRAL = {"tau": 5.0, "gamma": 0.0}  # values that arms may ask for and that are the same as not asking


@dataclass(frozen=True)
class Cell:
    """One run: its name, and its options (all but ``data`` and ``out``)."""

    name: str
    options: dict[str, Any]


def keep_nothing(run: Path, epoch: int, model: Model) -> None:
    """Keep no model of a run but the last and the selected one."""


@dataclass(frozen=True)
class Measures:
    """What is measured of a finished run, and of the features without training; both return what a row keeps."""

    run: Callable[[TrainConfig, Path, Dataset, Embeddings, Progress], dict[str, Any]] = measure_run
    raw: Callable[[TrainConfig, Dataset, int], dict[str, Any]] = measure_raw
    keep: Callable[[Path, int, Model], None] = keep_nothing
    """Called with the run and the model after each epoch, to keep what ``run`` needs; it must not look at a test."""


# -------------------- cells --------------------


class Store:
    """The cells of a data set in a regime: collected in ``out``/DATA-REGIME.jsonl, new ones in `cells_folder`.

    ``weights`` is a file with the trunk's weights; a row keeps its hash, not its name.
    """

    def __init__(
        self, out: Path, data: str, regime: Regime, note: Note = silent, *, weights: Path | None = None
    ) -> None:
        self.out, self.data, self.regime, self.note, self.weights = out, data, regime, note, weights
        place = f"{data.partition(':')[0]}-{regime.name}"
        self.rows = StoredRows(out / f"{place}.jsonl")
        self.folder = cells_folder(out) / place
        self.images: str | None = None
        """A hash of the images, where they are known: cells of other images are not used."""
        self._known: dict[str, Row] = {}
        self._said: set[str] = set()

    def cell(self, loss: str, options: Mapping[str, Any], rate: float, seed: int, study: str = "") -> Cell:
        """Return the cell of an arm at a learning rate."""
        base = self.regime.base
        own = {k: v for k, v in options.items() if k in base or k not in _NEUTRAL or _NEUTRAL[k] != v}
        chosen = {**base, **own, "loss": loss, "lr": rate, "seed": seed}
        words = [study] * bool(study) + [loss, str(own["method"])]
        for key in sorted(own):
            if key != "method" and own[key] != base.get(key):
                words.append(f"{key}={'+'.join(own[key]) if isinstance(own[key], tuple) else _number(own[key])}")
        name = "-".join(words)
        if len(name) > _LONGEST:
            name = f"{name[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        flat = {key: list(value) if isinstance(value, tuple) else value for key, value in sorted(chosen.items())}
        return Cell(f"{name}-lr={_number(rate)}-seed={seed}", flat)

    def raw_cell(self, study: str = "", seed: int = 0) -> Cell:
        """Return the cell of the features without training; those of a study have a seed."""
        return Cell(f"{study}-{RAW}-seed={seed}", {"seed": seed}) if study else Cell(RAW, {})

    def config(self, cell: Cell, out: Path) -> TrainConfig:
        """Return the options of a cell as `idml train` reads them; what it refuses is a ``ValueError``."""
        options = {**self.regime.base, **cell.options}
        own = options_of(options.get("method", TrainConfig.method))
        implied = {**UNTAUGHT_U, "detach": True}  # left out where the method has no such option: it does so anyway
        shared = {key: v for key, v in options.items() if key in own or implied.get(key, MISSING) != v}
        local = {} if self.weights is None else {"weights": str(self.weights)}
        return from_dict({**shared, **local, "data": self.data, "out": str(out)})

    def read(self, cell: Cell) -> Row | None:
        """Return what was measured, or None if the cell has to be made."""
        if cell.name not in self._known:
            found = self._read_file(cell) or self._read_row(cell)
            if found is None:
                return None
            self._known[cell.name] = found
        return self._known[cell.name]

    def weights_hash(self) -> str:
        """Return a hash of the file with the trunk's weights."""
        return hashlib.sha256(self.weights.read_bytes()).hexdigest()[:16] if self.weights is not None else ""

    def count_old_rows(self) -> int:
        """Return how many stored rows other versions of the protocol made."""
        return sum(row["version"] != VERSION for row in self.rows)

    def raw(self) -> Row | None:
        """Return the figures of the features that nothing was learned on."""
        return self.read(self.raw_cell())

    @contextmanager
    def take(self, cell: Cell) -> Iterator[bool]:
        """Yield whether this worker may make the cell; another worker's is not free until finished or stopped.

        The lock's file goes with the finished cell. A worker that had opened it before finds the cell when it reads.
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

    def make(self, cell: Cell, dataset: Dataset, report: Progress, measures: Measures, *, first: bool = True) -> None:
        """Train and measure a cell, or resume it; a run whose loss stops being a number is kept as failed.

        Of several processes that train it together, the first one measures and writes.
        """
        started = time.perf_counter()
        self.folder.mkdir(parents=True, exist_ok=True)
        run = self.folder / f"{cell.name}.run"
        found: dict[str, Any]
        if "method" in cell.options:
            found = self._train(cell, run, dataset, report, measures, first=first)
        else:
            found = measures.raw(self.config(cell, run), dataset, cell.options.get("seed", 0)) if first else {}
        if not first:
            return
        if self.weights is not None:
            found["weights"] = self.weights_hash()
        made = {"date": time.strftime("%Y-%m-%d"), "machine": machine_name()}
        found |= {"seconds": round(time.perf_counter() - started, 1), **made, "images": _fingerprint(dataset)}
        row = {"version": VERSION, "name": cell.name, "commit": source_commit(), "options": cell.options, **found}
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in row.items())
        write_atomic(self.folder / f"{cell.name}.json", f"{{\n{lines}\n}}\n".encode())
        shutil.rmtree(run, ignore_errors=True)

    def _train(
        self, cell: Cell, run: Path, dataset: Dataset, report: Progress, measures: Measures, *, first: bool
    ) -> dict[str, Any]:
        config = self.config(cell, run)
        seen: list[Embeddings] = []
        options: dict[str, Any] = {"resume": True, "dataset": dataset, "pages": False, "report": report}
        options["after_epoch"] = partial(measures.keep, run)
        try:
            metrics = train(config, **options, tested=seen.append)
        except ValueError as error:
            if "cannot resume" in str(error) or "not a sound checkpoint" in str(error):
                self.note(f"{cell.name}: started again: {error}")
                shutil.rmtree(run)
                metrics = train(config, **options, tested=seen.append)
            elif re.match(r"step \d+: .*\b(nan|inf|NaN or infinity)\b", str(error)):
                return {"failed": str(error).partition("; images")[0]}
            else:
                raise
        return {**metrics, **measures.run(config, run, dataset, seen[-1], report)} if metrics and first else {}

    def _read_file(self, cell: Cell) -> Row | None:
        path = self.folder / f"{cell.name}.json"
        try:
            found: Row = json.loads(path.read_text())
            fault = self._fault(found, cell)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            fault = f"is damaged ({type(error).__name__})"
        if fault:
            self._say(f"{path.name} {fault} and is made again")
        return None if fault else found

    def _read_row(self, cell: Cell) -> Row | None:
        found = self.rows.get(VERSION, cell.name)
        fault = self._fault(found, cell) if found else ""
        if fault:
            self._say(f"rows of {self.rows.path.name} {fault.replace('was', 'were')}: they are not used")
        return None if fault else found

    def _fault(self, found: Row, cell: Cell) -> str:
        """Why a row does not serve as the cell, or nothing."""
        if found["version"] != VERSION:
            return f"is of version {found['version']} of the protocol, not {VERSION},"
        if found["options"] != json.loads(json.dumps(cell.options)):
            return "was made with other options"
        if self.images is not None and found["images"] != self.images:
            return "was made from other images"
        if "date" not in found:
            return "is not complete"
        return ""

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.note(line)


def open_store(
    out: Path, data: str, regime: Regime, dataset: Dataset, note: Note, *, weights: Path | None = None
) -> Store:
    """Return the store of a data set that is there: cells of other images are made again."""
    store = Store(out, data, regime, note, weights=weights)
    store.images = _fingerprint(dataset)
    return store


def load_official_dataset(data: str, note: Note) -> Dataset:
    """Load the data set; it is refused if it lacks more than one image in a thousand, and fewer are noted.

    Copies of Cars196 lack 15 of its 16,185 images.
    """
    dataset = load_dataset(data, strict=True, spare=1e-3)
    for line in dataset.notes:
        note(line)
    return replace(dataset, notes=())  # once, and not again for every run


@cache
def source_commit() -> str:
    """Return the commit of the checkout that this code is run from; "+" after it: the source has been changed."""
    package = Path(idml.__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, check=True).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").strip()) / "src" / "idml" != package.resolve():
            return "unknown"
        return git("rev-parse", "--short=7", "HEAD").strip() + "+" * bool(git("status", "--porcelain", "."))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _fingerprint(dataset: Dataset) -> str:
    return f"{dataset.train.fingerprint}-{dataset.test.fingerprint}"


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def machine_name() -> str:
    """Return the processor or the GPU, the cores in use, and the version of torch."""
    try:
        model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else (model[1] if model else platform.machine())
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} used"
    return f"{device}, {cores}, torch {torch.__version__}"


# -------------------- the protocol of tables --------------------


@dataclass(frozen=True)
class ArmProgress:
    """The state of an arm: its runs by seed at the chosen rate, the cells that are missing, or why it cannot run."""

    arm: Arm
    rate: float | None
    runs: dict[int, Row]
    missing: tuple[Cell, ...]
    refused: str = ""
    left: int = 0
    """How many runs are still to do, including those whose learning rate is not chosen yet."""


def read_progress(store: Store, arm: Arm, seeds: int) -> ArmProgress:
    """Return the state of an arm, from the stored cells alone; options that the config refuses are its ``refused``."""
    rates = store.regime.rates
    tuning = {rate: store.cell(arm.loss, arm.options, rate, 0) for rate in rates}
    tried = {rate: store.read(cell) for rate, cell in tuning.items()}
    missing = [tuning[rate] for rate in rates if tried[rate] is None]
    if missing:
        if reason := _refusal(store, missing[0]):
            return ArmProgress(arm, None, {}, (), reason)
        return ArmProgress(arm, None, {}, tuple(missing), left=len(missing) + seeds - 1)
    scores = {rate: found["selected_score"] for rate, found in tried.items() if found and "failed" not in found}
    if not scores:
        return ArmProgress(arm, None, {}, (), "training failed at every learning rate")
    rate = max(scores, key=lambda r: (scores[r], -r))
    cells = {seed: store.cell(arm.loss, arm.options, rate, seed) for seed in range(seeds)}
    found = {seed: store.read(cell) for seed, cell in cells.items()}
    runs = {seed: run for seed, run in found.items() if run is not None and "failed" not in run}
    left = tuple(cells[seed] for seed in range(seeds) if found[seed] is None)
    return ArmProgress(arm, rate, runs, left, left=len(left))


def _refusal(store: Store, cell: Cell) -> str:
    try:
        store.config(cell, Path("cell"))
    except ValueError as error:
        return str(error)
    return ""


def missing_cells(store: Store, arms: Iterable[Arm], seeds: int) -> list[Cell]:
    """Return what can be made now, each cell once: the raw features, then seed by seed."""
    cells = {} if store.raw() else {RAW: store.raw_cell()}
    progress = [read_progress(store, arm, seeds) for arm in arms]
    for cell in sorted((c for each in progress for c in each.missing), key=lambda c: int(c.options["seed"])):
        cells.setdefault(cell.name, cell)
    return list(cells.values())


# -------------------- making what is missing --------------------


def run_missing(
    store: Store,
    missing: Callable[[], list[Cell]],
    dataset: Dataset,
    measures: Measures,
    *,
    report: Progress,
    note: Note,
) -> None:
    """Make cells until ``missing`` returns none. Other workers may do the same: each takes a cell that is free."""
    processes, waiting = Processes(), False
    while True:
        cells = missing()
        if not _agree(processes, bool(cells)):
            return
        if _make_one(store, cells, processes, dataset, measures, report, note):
            waiting = False
            continue
        if not waiting:
            note(f"waiting for {len(cells)} cells that other workers are making")
            waiting = True
        time.sleep(_PAUSE)


def _make_one(
    store: Store,
    cells: list[Cell],
    processes: Processes,
    dataset: Dataset,
    measures: Measures,
    report: Progress,
    note: Note,
) -> bool:
    """Take the first free cell and make it; all processes of one run make the same cell."""
    if not processes.first:
        cell = _agree(processes, None)
        if cell is not None:
            store.make(cell, dataset, report, measures, first=False)
        return _agree(processes, None) is not None
    for cell in cells:
        with store.take(cell) as mine:
            if not mine:
                continue
            if store.read(cell) is None:  # otherwise another worker has just finished it
                _agree(processes, cell)
                store.make(cell, dataset, report, measures)
                found = store.read(cell) or {}
                score = found.get("failed", "measured")  # no test figure: nothing may be chosen by it
                if "selected_score" in found:
                    score = f"held-out MAP@R {found['selected_score']:.1%}"
                note(f"{cell.name}: {score} in {found['seconds']:.0f} s")
            else:
                _agree(processes, None)
        _agree(processes, True)
        return True
    _agree(processes, None)
    _agree(processes, None)
    return False


def _agree(processes: Processes, choice: Any) -> Any:
    """Return what the first process chose, in all processes."""
    if processes.count == 1:
        return choice
    box = [choice]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]
