"""The search benchmark at its small size: who is exact, what is reported, and what ends a contender."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import search
import search_turns
from search_contenders import CONTENDERS, SIZES, make
from search_server import TESTS

sys.path.append(str(TESTS))
from milvus_server import missing

SMALL = SIZES["small"]
SEARCHED = {"added", "added/s", "adding MB", "open s", "recall", "p50 ms", "p99 ms", "batch/s", "held MB", "mapped MB"}
SLOW = """
import time
import search, search_contenders
class Slow(search_contenders.Contender):
    needs = ()
    def fill(self):
        yield {"added": 7}
        time.sleep(60)
search.CONTENDERS["slow"] = Slow
search.contend("slow", "fill", "small", ".", ".", limit=1)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make(folder, SMALL)
    return folder


def test_nearest_are_the_nearest(data):
    x = np.fromfile(data / "vectors.f32", np.float32).reshape(SMALL.rows, SMALL.dims).astype(float)
    queries, nearest = np.load(data / "queries.npy").astype(float), np.load(data / "nearest.npy")
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-6)
    for query, rows in zip(queries[::16], nearest[::16], strict=True):
        assert rows.tolist() == np.argsort(((x - query) ** 2).sum(1))[:10].tolist()


@pytest.mark.parametrize("name", ["faiss-l2", "faiss-ip", "faiss-ivf"])
def test_faiss(name, data, tmp_path):
    contender = CONTENDERS[name](data, SMALL, str(tmp_path / "kept"))
    *_, last = contender.fill()
    assert last["added"] == SMALL.rows
    contender.open()
    found, nearest = contender.search(np.load(data / "queries.npy")), np.load(data / "nearest.npy")
    shared = sum(len({*a} & {*b}) for a, b in zip(found.tolist(), nearest.tolist(), strict=True)) / nearest.size
    assert shared > (0.5 if name == "faiss-ivf" else 0.999)


if "IDML_KILLS" in os.environ:  # half a minute each: in make faults alone

    def test_the_embedded_engine_reports_from_its_own_processes(data, monkeypatch):
        monkeypatch.setattr(search, "FLAT", ("faiss-ip",))
        monkeypatch.setattr(search_turns, "ROUNDS", (2, 2))
        figures = search.measure("embedded", "small", str(data), 120)
        assert set(figures) == {*SEARCHED, "follow s", "disk MB", "single / faiss", "batch / faiss"}
        assert figures["added"] == SMALL.rows
        assert figures["recall"] == 1
        assert figures["p50 ms"] <= figures["p99 ms"]
        assert figures["disk MB"] * 2**20 > SMALL.rows * SMALL.dims * 4
        assert "1.0000" in search.line("embedded", figures)
        *goals, _, growth, where = search.verdict(60_502, 64, "HNSW", {"embedded": figures})
        assert all("goal" in goal for goal in goals)
        assert "100 ms at about" in growth
        assert "move to Milvus" in where
        assert search.verdict(SMALL.rows, 64, "HNSW", {"embedded": figures}) == []

    @pytest.mark.skipif(bool(missing()), reason=missing() or "there is a server")
    def test_milvus_reports_too(data):
        figures = search.measure("milvus", "small", str(data), 300)
        assert set(figures) == {*SEARCHED, "ready s", "server MB", "peak MB", "disk MB"}
        assert figures["recall"] > 0.9
        assert figures["server MB"] <= figures["peak MB"]


def test_a_contender_that_takes_too_long_is_ended(data, tmp_path, monkeypatch):
    run = subprocess.run([sys.executable, "-c", SLOW], cwd=Path(search.__file__).parent, capture_output=True, text=True)
    assert run.returncode == -signal.SIGALRM
    assert run.stdout == '{"added": 7}\n'
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho '{\"added\": 7}'\nkill -ALRM $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    figures = search.measure("embedded", "small", str(data), 60)
    assert figures == {"added": 7, "nothing": "no result in 60 s", "disk MB": 0}
    assert search.line("embedded", figures).endswith("no result in 60 s (7 were added)")
    assert search.verdict(60_502, 512, "HNSW", {"embedded": figures}) == []


def test_a_contender_that_fails_says_why(data):
    figures = search.measure("nobody", "small", str(data), 60)
    assert figures["nothing"] == "no result: KeyError: 'nobody'"


def test_where_to_move():
    ours = {
        "p50 ms": 20.0, "batch/s": 500.0, "single / faiss": 1.0, "batch / faiss": 1.31, "open s": 11.0, "follow s": 0.1,
        "added/s": 3000.0, "held MB": 10.0, "mapped MB": 120.0, "single / old": 1.11,
    }  # fmt: skip
    server = {"p50 ms": 5.0, "batch/s": 1000.0, "recall": 0.98}
    flat = {"faiss-l2": {"p50 ms": 21.0}, "faiss-ip": {"p50 ms": 20.0}}
    *goals, _, growth, crossing, _ = search.verdict(60_000, 512, "HNSW", {"embedded": ours, "milvus": server, **flat})
    assert [goal.rpartition(": ")[2] for goal in goals] == ["met", "missed", "missed", "met", "met", "met"]
    assert "at about 300,000 vectors" in growth
    assert "HNSW (recall 0.980)" in crossing
    assert "about 15,000 vectors for a single query, of 30,000 in batches" in crossing
