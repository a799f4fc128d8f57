"""The stored rows: written and read back unchanged, merged from cells, and damage that is named."""

import json

import numpy as np
import pytest

from idml.files import lock_file
from idml.reproduction.stored_results import StoredRows, collect_cells, write_rows


def row(name, seed=0, version=1, classes=5, **more):
    draw = np.random.default_rng(seed)
    queries = draw.integers(1, 60, classes)
    sums = {
        "queries": queries.tolist(),
        "hits": draw.integers(0, queries + 1).tolist(),
        "map@r": [round(x, 4) for x in (draw.random(classes) * queries).tolist()],
    }
    other = {**sums, "hits": [0] * classes}
    metric = {"introspective": {"selected": {"recall@1": 0.0}, "classes": other}} if seed % 2 else {}
    options = {"loss": "contrastive", "method": "plain", "lr": 1e-3, "seed": seed}
    return {
        "version": version,
        "name": name,
        "commit": "abc1234",
        "options": options,
        "classes": sums,
        **metric,
        **more,
    }


def test_rows_are_read_back_as_they_were_written_sorted_by_name(tmp_path):
    rows = [row("b", 1, score=1 / 3), row("a", 2), row("a", 3, version=2), row("c", 4, classes=900), row("c0", 5)]
    del rows[1]["classes"]  # a study has no sums
    write_rows(tmp_path / "x-frozen.jsonl", rows)
    stored = StoredRows(tmp_path / "x-frozen.jsonl")
    assert list(stored) == [rows[1], rows[0], rows[3], rows[4], rows[2]]
    assert stored.get(2, "a") == rows[2]
    assert stored.get(3, "a") is None
    text = (tmp_path / "x-frozen.jsonl").read_text()
    assert len(text.splitlines()) == len(stored) == 5
    assert "queries" not in text
    before = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    write_rows(tmp_path / "x-frozen.jsonl", list(stored))
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == before


def test_cells_are_merged_once_and_a_newer_cell_replaces_a_row(tmp_path):
    folder = tmp_path / "cells" / "x-frozen"
    folder.mkdir(parents=True)
    assert collect_cells(tmp_path)["collected"] == {}
    write_rows(tmp_path / "x-frozen.jsonl", [row("a", 2), row("b", 1)])
    stored = StoredRows(tmp_path / "x-frozen.jsonl")
    assert stored.get(1, "c") is None
    (folder / "a.json").write_text(json.dumps(row("a", 6)))
    (folder / "c.json").write_text(json.dumps(row("c", 3)))
    (folder / "d.json").write_text("{")
    (folder / "e.lock").write_text("")
    (folder / "e.run").mkdir()
    lines = []

    def note(line):
        lines.append(line)
        with pytest.raises(BlockingIOError):  # nobody else can collect at the same time
            lock_file(tmp_path / "cells" / "collect.lock", wait=False)

    assert collect_cells(tmp_path, note)["table"] == "collected 2 into x-frozen.jsonl"
    assert lines == [f"{folder / 'd.json'} is damaged and is left where it is"]
    assert sorted(path.name for path in folder.iterdir()) == ["d.json", "e.lock", "e.run"]
    assert stored.get(1, "c") == row("c", 3)  # an open reader notices
    assert stored.get(1, "a") == row("a", 6)
    assert len(stored) == 3


def test_damage_is_named_with_its_line(tmp_path):
    path = tmp_path / "x-frozen.jsonl"
    write_rows(path, [row("a"), row("b")])
    sound = path.read_text()
    path.write_text(sound[:-20])
    with pytest.raises(ValueError, match=r"x-frozen\.jsonl: line 2 is damaged .*restore the file with git"):
        len(StoredRows(path))
    path.write_text(sound)
    path.with_suffix(".npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"x-frozen\.npz is damaged or missing"):
        len(StoredRows(path))
    assert len(StoredRows(tmp_path / "absent.jsonl")) == 0
