"""Cells: what they are named by, that they are made once, by one worker, and what becomes of broken ones."""

import json
import re
import shutil

import pytest

from idml.data.datasets import load_dataset
from idml.reproduction import store as store_module
from idml.reproduction.arms import Arms
from idml.reproduction.grid import Cell
from idml.reproduction.regimes import regime_for
from idml.reproduction.store import Store, open_store
from idml.reproduction.tables import TABLES


def quiet(_):
    pass


def test_the_same_options_are_one_cell_whoever_asks(tmp_path):
    regime = regime_for("cub:x")
    store, arms = Store(tmp_path, "cub:x", regime), Arms("cub:x", regime)
    asked = [arms.arm("proxy_anchor", "idml"), *TABLES["tau"](arms).arms, *TABLES["gamma"](arms).arms]
    names = {store.cell(arm.loss, arm.options, 1e-3, 0).name for arm in asked if arm.name in ("idml", "τ = 5", "γ = 0")}
    assert names == {"proxy_anchor-idml-lr=0.001-seed=0"}
    other = store.cell("proxy_anchor", {"method": "idml", "tau": 3.0, "ambiguity": ("blur",)}, 3e-4, 2)
    assert other.name == "proxy_anchor-idml-ambiguity=blur-tau=3-lr=0.0003-seed=2"
    assert other.options["ambiguity"] == ["blur"]
    assert "data" not in other.options
    assert "out" not in other.options


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


def test_a_long_name_is_cut_and_stays_its_own(tmp_path, small):
    store = Store(tmp_path, "folder:x", small)
    many = {"tau": 3.25, "weight_decay": 0.125, "step_factor": 0.75, "schedule": "cosine", "warmup_epochs": 1}
    many |= {"ambiguity": ("low_resolution", "blur", "occlusion"), "method": "idml", "clip": 3.5}
    names = [store.cell("multi_similarity", {**many, "proxy_lr": p}, 1e-3, 0).name for p in (10.0, 20.0)]
    assert names[0] != names[1]
    assert all(len(name) < 160 for name in names)


def test_a_cell_keeps_what_intervals_and_verdicts_need(patterns, small, tmp_path):
    dataset = load_dataset(patterns)
    store = open_store(tmp_path / "out", patterns, small, dataset, quiet)
    cell = store.cell("proxy_anchor", {"method": "idml"}, 1e-3, 0)
    assert store.read(cell) is None
    store.make(cell, dataset, quiet)
    found = store.read(cell)
    assert sum(found["classes"]["queries"]) == 24
    assert len(found["classes"]["hits"]) == 6
    assert sum(found["classes"]["hits"]) / 24 == pytest.approx(found["selected"]["recall@1"])
    assert sum(found["classes"]["map@r"]) / 24 == pytest.approx(found["selected"]["map@r"], abs=1e-4)
    assert found["images_seen"] == found["steps"] * 16  # mixtures double the batch of 8
    assert {"weight", "level_spread", "auroc_mixed", "r_auroc", "last", "nmi", "machine", "date"} <= found.keys()
    assert len(found["levels"]["mixed"]) == 21
    assert len(found["trend"]["level_mixed"]) == 1
    assert 0 <= found["introspective"]["selected"]["map@r"] <= 1
    assert sorted(path.name for path in store.folder.iterdir()) == [f"{cell.name}.json"]
    text = (store.folder / f"{cell.name}.json").read_text()
    assert str(tmp_path) not in text
    assert len(text) < 20_000


def test_damaged_outdated_and_foreign_cells_count_as_absent_and_are_named(patterns, small, tmp_path, monkeypatch):
    dataset, lines = load_dataset(patterns), []
    store = open_store(tmp_path, patterns, small, dataset, quiet)
    cell = store.cell("contrastive", {"method": "plain"}, 1e-3, 0)
    store.make(cell, dataset, quiet)
    path = store.folder / f"{cell.name}.json"
    sound = json.loads(path.read_text())

    def read(text, images=store.images):
        path.write_text(text)
        fresh = Store(tmp_path, patterns, small, lines.append)
        fresh.images = images
        return fresh.read(cell)

    assert read(json.dumps(sound)) == sound
    for text, word in (
        (json.dumps(sound)[:-30], "damaged"),
        ("[]", "damaged"),
        (json.dumps({**sound, "seconds": None}), "not whole"),
        (json.dumps({**sound, "version": 0}), "is of version 0 of the protocol"),
        (json.dumps({**sound, "options": {**sound["options"], "lr": 9.0}}), "other options"),
    ):
        assert read(text) is None
        assert word in lines[-1]
        assert "\n" not in lines[-1]
    assert read(json.dumps(sound), images="others") is None
    assert "made from other images" in lines[-1]
    assert read(json.dumps({**sound, "options": {**sound["options"], "freeze_trunk": True}})) is not None
    monkeypatch.setattr(store_module, "VERSION", 99)
    assert read(json.dumps(sound)) is None


def test_a_stopped_cell_goes_on_and_one_of_other_options_begins_anew(patterns, small, tmp_path):
    dataset, lines = load_dataset(patterns), []
    store = open_store(tmp_path, patterns, small, dataset, lines.append)
    cell = store.cell("contrastive", {"method": "plain"}, 1e-3, 0)

    class Stopped(Exception):
        pass

    def stop(row):
        if row.get("step") == 2:
            raise Stopped

    with pytest.raises(Stopped):
        store.make(cell, dataset, stop)
    assert store.read(cell) is None
    run = store.folder / f"{cell.name}.run"
    assert (run / "checkpoints" / "last.safetensors").exists()
    steps = []
    store.make(cell, dataset, steps.append)
    assert 1 not in [row.get("step") for row in steps]  # the first step was not done again
    path = store.folder / f"{cell.name}.json"
    first = json.loads(path.read_text())
    path.unlink()

    other = store.cell("contrastive", {"method": "plain"}, 1e-2, 0)
    with pytest.raises(Stopped):
        store.make(other, dataset, stop)
    shutil.move(store.folder / f"{other.name}.run", run)
    again = open_store(tmp_path, patterns, small, dataset, lines.append)
    again.make(cell, dataset, quiet)
    assert "begun anew: cannot resume with other options" in lines[-1]
    assert again.read(cell)["selected"] == first["selected"]


def test_a_run_whose_numbers_fail_is_kept_as_failed(patterns, small, tmp_path, monkeypatch):
    dataset = load_dataset(patterns)
    store = open_store(tmp_path, patterns, small, dataset, quiet)
    cell = store.cell("contrastive", {"method": "plain"}, 1e-3, 0)

    def broken(config, **_):
        raise ValueError("step 3: the loss is nan; images: a/0.png, … (8); the last checkpoint stays")

    monkeypatch.setattr(store_module, "train", broken)
    store.make(cell, dataset, quiet)
    assert store.read(cell)["failed"] == "step 3: the loss is nan"

    for reason in ("precision bfloat16 needs a GPU", "step 0: an overflow that is a mistake of ours; images: a, … (8)"):

        def refused(config, reason=reason, **_):
            raise ValueError(reason)

        monkeypatch.setattr(store_module, "train", refused)
        with pytest.raises(ValueError, match=re.escape(reason)):
            store.make(store.cell("contrastive", {"method": "plain"}, 1e-2, 0), dataset, quiet)


def test_a_cell_is_one_workers(tmp_path, small):
    workers = [Store(tmp_path, "folder:x", small) for _ in range(2)]
    with workers[0].taken(Cell("cell", {})) as first:
        assert first
        with workers[1].taken(Cell("cell", {})) as second:
            assert not second
        with workers[1].taken(Cell("other", {})) as second:
            assert second
    with workers[1].taken(Cell("cell", {})) as second:
        assert second  # a stopped worker leaves it free
