"""Cells: what names them, that each is made once, by one worker, and what happens to broken ones; the protocol."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from idml.data.datasets import load_dataset
from idml.reproduction import runner
from idml.reproduction.paper_tables import TABLES
from idml.reproduction.regimes import Arms, regime_for
from idml.reproduction.runner import (
    RAW,
    Cell,
    Measures,
    Store,
    load_official_dataset,
    missing_cells,
    open_store,
    read_progress,
    run_missing,
    source_commit,
)
from idml.reproduction.stored_results import collect_cells


class Stopped(Exception):
    pass


def quiet(_):
    pass


def stop_at_step_two(row):
    if row.get("step") == 2:
        raise Stopped


@pytest.fixture
def plain(patterns, small, tmp_path):
    """A store, the cell of a plain run in it, and the data set."""
    dataset = load_dataset(patterns)
    store = open_store(tmp_path / "out", patterns, small, dataset, quiet)
    return store, store.cell("contrastive", {"method": "plain"}, 1e-3, 0), dataset


def short_measure(*_):
    return {}


SHORT = Measures(run=short_measure)  # where only the making of a cell is of interest


# -------------------- names --------------------


def test_the_same_options_are_one_cell_in_every_table(tmp_path):
    regime = regime_for("cub:x")
    store, arms = Store(tmp_path, "cub:x", regime), Arms("cub:x", regime)
    asked = [arms.arm("proxy_anchor", "idml"), *TABLES["tau"](arms).arms, *TABLES["gamma"](arms).arms]
    names = {store.cell(arm.loss, arm.options, 1e-3, 0).name for arm in asked if arm.name in ("idml", "τ = 5", "γ = 0")}
    assert names == {"proxy_anchor-idml-labels=sets-mixing=separate-lr=0.001-seed=0"}
    other = store.cell("proxy_anchor", {"method": "idml", "tau": 3.0, "ambiguity": ("blur",)}, 3e-4, 2)
    assert other.name == "proxy_anchor-idml-ambiguity=blur-tau=3-lr=0.0003-seed=2"
    assert other.options["ambiguity"] == ["blur"]
    assert other.options["epochs"] == 12
    assert not {"data", "out"} & other.options.keys()


@pytest.mark.parametrize("data", ["cub:x", "cars:x", "glyphs", "sop:x"])
@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_different_options_are_different_cells(tmp_path, data, scale):
    regime = regime_for(data, scale)
    store, arms, seen = Store(tmp_path, data, regime), Arms(data, regime), {}
    for build in TABLES.values():
        for arm in build(arms).arms:
            for rate in regime.rates:
                cell = store.cell(arm.loss, arm.options, rate, 0)
                assert seen.setdefault(cell.name, cell.options) == cell.options
                assert len(cell.name) < 200
    assert len({json.dumps(options, sort_keys=True) for options in seen.values()}) == len(seen)


def test_a_long_name_is_cut_and_stays_unique(tmp_path, small):
    store = Store(tmp_path, "folder:x", small)
    many = {"tau": 3.25, "weight_decay": 0.125, "step_factor": 0.75, "schedule": "cosine", "warmup_epochs": 1}
    many |= {"ambiguity": ("low_resolution", "blur", "occlusion"), "method": "idml", "clip": 3.5}
    names = [store.cell("multi_similarity", {**many, "proxy_lr": p}, 1e-3, 0).name for p in (10.0, 20.0)]
    assert names[0] != names[1]
    assert all(len(name) < 160 for name in names)


# -------------------- cells --------------------


def test_a_row_has_what_intervals_and_verdicts_need(patterns, small, tmp_path):
    dataset = load_dataset(patterns)
    store = open_store(tmp_path / "out", patterns, small, dataset, quiet)
    cell = store.cell("proxy_anchor", {"method": "idml"}, 1e-3, 0)
    assert store.read(cell) is None
    store.make(cell, dataset, quiet, Measures())
    found = store.read(cell)
    assert sum(found["classes"]["queries"]) == 24
    assert len(found["classes"]["hits"]) == 6
    assert sum(found["classes"]["hits"]) / 24 == pytest.approx(found["selected"]["recall@1"])
    assert sum(found["classes"]["map@r"]) / 24 == pytest.approx(found["selected"]["map@r"], abs=1e-4)
    assert found["images_seen"] == found["steps"] * 16  # mixtures double the batch of 8
    assert {"weight", "level_spread", "auroc_mixed", "r_auroc", "last", "nmi", "machine", "date"} <= found.keys()
    assert (found["version"], found["name"], found["commit"]) == (2, cell.name, source_commit())
    low, high = found["r_auroc_interval"]
    assert low <= found["r_auroc"] <= high
    assert len(found["levels"]["mixed"]) == 21
    assert len(found["trend"]["level_mixed"]) == 1
    assert 0 <= found["introspective"]["selected"]["map@r"] <= 1
    assert [path.name for path in store.folder.iterdir()] == [f"{cell.name}.json"]
    text = (store.folder / f"{cell.name}.json").read_text()
    assert str(tmp_path) not in text
    assert len(text) < 20_000

    assert collect_cells(tmp_path / "out")["collected"] == {"folder-frozen": 1}
    assert list(store.folder.iterdir()) == []
    fresh = open_store(tmp_path / "out", patterns, small, dataset, quiet)
    assert fresh.read(cell) == found


def test_a_row_has_how_much_the_parts_of_a_head_are_used(patterns, small, tmp_path):
    dataset = load_dataset(patterns)
    store = open_store(tmp_path / "out", patterns, small, dataset, quiet)
    for loss, method, figure in (("margin_dw", "dcml", "largest_choice"), ("proxy_anchor", "drml", "largest_node")):
        cell = store.cell(loss, {"method": method}, 1e-3, 0)
        store.make(cell, dataset, quiet, Measures())
        found = store.read(cell)
        assert 0.25 <= found[figure] <= 1
        assert len(found["trend"][figure]) == 1


def test_the_commit_is_that_of_the_checkout():
    root = Path(__file__).parents[2]
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        assert source_commit() == "unknown"
    else:
        assert head.stdout.startswith(source_commit().removesuffix("+"))


def test_damaged_outdated_and_foreign_cells_count_as_absent(plain, patterns, small, tmp_path, monkeypatch):
    store, cell, dataset = plain
    lines = []
    store.make(cell, dataset, quiet, SHORT)
    path = store.folder / f"{cell.name}.json"
    sound = json.loads(path.read_text())

    def read(row, images=store.images):
        path.write_text(row if isinstance(row, str) else json.dumps(row))
        fresh = Store(tmp_path / "out", patterns, small, lines.append)
        fresh.images = images
        return fresh.read(cell)

    assert read(sound) == sound
    for row, word in (
        (json.dumps(sound)[:-30], "damaged"),
        ("[]", "damaged"),
        ({key: value for key, value in sound.items() if key != "date"}, "not complete"),
        ({**sound, "version": 0}, "is of version 0 of the protocol"),
        ({**sound, "options": {**sound["options"], "lr": 9.0}}, "other options"),
    ):
        assert read(row) is None
        assert word in lines[-1]
        assert "\n" not in lines[-1]
    assert read(sound, images="others") is None
    assert "made from other images" in lines[-1]

    path.write_text(json.dumps(sound))
    collect_cells(tmp_path / "out")
    fresh = Store(tmp_path / "out", patterns, small, lines.append)
    fresh.images = "others"
    assert fresh.read(cell) is None
    assert lines[-1] == "rows of folder-frozen.jsonl were made from other images: they are not used"
    monkeypatch.setattr(runner, "VERSION", 99)
    assert Store(tmp_path / "out", patterns, small).read(cell) is None


def test_a_stopped_cell_is_resumed_and_one_of_other_options_starts_again(plain, patterns, small, tmp_path):
    store, cell, dataset = plain
    with pytest.raises(Stopped):
        store.make(cell, dataset, stop_at_step_two, SHORT)
    assert store.read(cell) is None
    run = store.folder / f"{cell.name}.run"
    assert (run / "checkpoints" / "last.safetensors").exists()
    steps = []
    store.make(cell, dataset, steps.append, SHORT)
    assert 1 not in [row.get("step") for row in steps]  # the first step was not done again
    path = store.folder / f"{cell.name}.json"
    first = json.loads(path.read_text())
    path.unlink()

    other = store.cell("contrastive", {"method": "plain"}, 1e-2, 0)
    with pytest.raises(Stopped):
        store.make(other, dataset, stop_at_step_two, SHORT)
    shutil.move(store.folder / f"{other.name}.run", run)
    lines = []
    again = open_store(tmp_path / "out", patterns, small, dataset, lines.append)
    again.make(cell, dataset, quiet, SHORT)
    assert "started again: cannot resume with other options" in lines[-1]
    assert again.read(cell)["selected"] == first["selected"]


def test_a_run_whose_loss_is_not_a_number_is_kept_as_failed(plain, monkeypatch):
    store, cell, dataset = plain

    def broken(config, **_):
        raise ValueError("step 3: the loss is nan; images: a/0.png, … (8); the last checkpoint stays")

    monkeypatch.setattr(runner, "train", broken)
    store.make(cell, dataset, quiet, SHORT)
    assert store.read(cell)["failed"] == "step 3: the loss is nan"

    for reason in (
        "precision bfloat16: this CPU cannot compute in it; use float32",
        "step 0: an overflow that is a mistake of ours; images: a, … (8)",
    ):

        def refused(config, reason=reason, **_):
            raise ValueError(reason)

        monkeypatch.setattr(runner, "train", refused)
        with pytest.raises(ValueError, match=re.escape(reason)):
            store.make(store.cell("contrastive", {"method": "plain"}, 1e-2, 0), dataset, quiet, SHORT)


def test_cells_lie_where_the_environment_says_and_are_collected_from_there(
    plain, patterns, small, tmp_path, monkeypatch
):
    _, cell, dataset = plain
    monkeypatch.setenv("IDML_RUNS", str(tmp_path / "runs"))
    store = open_store(tmp_path / "out", patterns, small, dataset, quiet)
    store.make(cell, dataset, quiet, SHORT)
    assert not (tmp_path / "out" / "cells").exists()
    assert (tmp_path / "runs" / "folder-frozen" / f"{cell.name}.json").exists()
    assert collect_cells(tmp_path / "out")["collected"] == {"folder-frozen": 1}
    monkeypatch.delenv("IDML_RUNS")
    assert open_store(tmp_path / "out", patterns, small, dataset, quiet).read(cell)["name"] == cell.name


def test_rows_keep_the_hash_of_local_weights_and_not_their_place(tmp_path, small):
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"weights")
    store = Store(tmp_path / "out", "folder:x", small, weights=file)
    cell = store.cell("contrastive", {"method": "plain"}, 1e-3, 0)
    assert store.config(cell, tmp_path / "run").weights == str(file)
    assert "weights" not in cell.options
    assert hashlib.sha256(b"weights").hexdigest()[:16] == store.weights_hash()


def test_one_worker_at_a_time_takes_a_cell(tmp_path, small):
    workers = [Store(tmp_path, "folder:x", small) for _ in range(2)]
    with workers[0].take(Cell("cell", {})) as first:
        assert first
        with workers[1].take(Cell("cell", {})) as second:
            assert not second
        with workers[1].take(Cell("other", {})) as second:
            assert second
    with workers[1].take(Cell("cell", {})) as second:
        assert second  # a stopped worker leaves it free


# -------------------- the protocol --------------------


def test_tuning_comes_first_then_the_other_seeds_at_the_best_rate(tmp_path, small):
    store, arm = Store(tmp_path, "folder:x", small), Arms("folder:x", small).plain("contrastive")
    assert [cell.name for cell in missing_cells(store, [arm, arm], 3)] == [
        RAW, "contrastive-plain-lr=0.001-seed=0", "contrastive-plain-lr=0.01-seed=0",
    ]  # fmt: skip
    scores = {}
    store.read = lambda cell: scores.get(cell.name)
    scores["contrastive-plain-lr=0.001-seed=0"] = {"selected_score": 0.3}
    assert read_progress(store, arm, 3).left == 3
    scores["contrastive-plain-lr=0.01-seed=0"] = {"selected_score": 0.4}
    at = read_progress(store, arm, 3)
    assert at.rate == 1e-2
    assert [cell.name for cell in at.missing] == [f"contrastive-plain-lr=0.01-seed={s}" for s in (1, 2)]
    scores["contrastive-plain-lr=0.01-seed=0"] = {"failed": "step 1: the loss is nan"}
    assert read_progress(store, arm, 3).rate == 1e-3
    scores["contrastive-plain-lr=0.001-seed=0"] = {"failed": "step 1: the loss is nan"}
    assert read_progress(store, arm, 3).refused == "training failed at every learning rate"


def test_workers_wait_for_each_other(plain, monkeypatch):
    store, cell, dataset = plain
    monkeypatch.setattr(runner, "_PAUSE", 0.0)
    real, busy, lines = Store.take, ["raw", "raw", "raw"], []

    @contextmanager
    def take(self, cell):
        if busy and cell.name == busy[-1]:
            busy.pop()
            yield False
            return
        with real(self, cell) as mine:
            yield mine

    monkeypatch.setattr(Store, "take", take)
    cells = [store.raw_cell(), cell]

    def missing():
        return [each for each in cells if store.read(each) is None]

    run_missing(store, missing, dataset, SHORT, report=quiet, note=lines.append)
    made = [line.partition(":")[0] for line in lines if " in " in line]
    assert made == [cell.name, "raw"]  # the next free cell comes first
    assert sum("waiting for 1 cells" in line for line in lines) == 1
    assert sorted(path.suffix for path in store.folder.iterdir()) == [".json", ".json"]  # no locks and runs are left


TOGETHER = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from idml.reproduction.regimes import Regime, Speed
from idml.reproduction.runner import Measures, load_official_dataset, open_store, run_missing
from idml.training.distributed import Processes, end_process

base = {
    "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8, "epochs": 1, "batch_size": 8,
    "per_class": 2, "holdout": 0.34, "teach_u": "none", "u_hidden": 0,
}
assert Processes().count == 2
dataset = load_official_dataset(sys.argv[1], print)
store = open_store(Path(sys.argv[2]), sys.argv[1], Regime("frozen", base, Speed(1000, 1, "a test")), dataset, print)
cells = [store.raw_cell(), store.cell("proxy_anchor", {"method": "idml"}, 1e-3, 0)]
missing = lambda: [cell for cell in cells if store.read(cell) is None]
run_missing(store, missing, dataset, Measures(), report=lambda row: None, note=lambda line: None)
end_process(0)
"""


def test_two_processes_make_every_cell_once_and_together(patterns, tmp_path):
    """Processes that train one cell together, as `accelerate launch` or `torchrun` starts them on several GPUs."""
    script = tmp_path / "script.py"
    script.write_text(TOGETHER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*launch, patterns, str(tmp_path / "out")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = sorted((tmp_path / "out" / "cells" / "folder-frozen").iterdir())
    assert [cell.suffix for cell in cells] == [".json"] * 2
    assert all("classes" in json.loads(cell.read_text()) for cell in cells)


def csv_with_one_image_missing(tmp_path: Path, listed: int) -> str:
    rows = ["path,label"]
    for i in range(listed):
        rows.append(f"{i}.png,{'ab'[i % 2]}")
        if i < listed - 1:
            Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    return f"csv:{tmp_path / 'list.csv'}"


def test_one_image_in_a_thousand_may_be_missing_and_is_noted(tmp_path):
    notes: list[str] = []
    dataset = load_official_dataset(csv_with_one_image_missing(tmp_path, 1001), notes.append)
    assert len(dataset.train) + len(dataset.test) == 1000
    assert len([line for line in notes if "1 image missing" in line]) == 1
    assert dataset.notes == ()  # the runs do not repeat it


def test_more_missing_images_are_refused(tmp_path):
    with pytest.raises(ValueError, match="1 image missing"):
        load_official_dataset(csv_with_one_image_missing(tmp_path, 999), quiet)
