"""The evaluation benchmark at a tiny size: all contenders find the same, and a process reports what it took."""

from argparse import Namespace

import pytest

from contenders import OURS, PEERS, Size, made
from evaluate import FIGURES, differences, line, measure

TINY = Size(rows=260, dims=12, classes=20, smallest=5, largest=20)


def test_contenders_agree():
    given = made(TINY)
    results = {}
    for name, run in {"ours": OURS["ours"], **PEERS}.items():
        if name != "oml":  # needs a Python of its own
            figures = run(*given)
            results[name] = {"figures": figures() if callable(figures) else figures}
    assert all(0.1 < results["ours"]["figures"][key] <= 1 for key in FIGURES)
    assert differences(results) == []
    results["faiss"]["figures"]["map@r"] += 1e-5
    assert [what.split(":")[0] for what in differences(results)] == ["map@r"]


@pytest.mark.parametrize(
    ("name", "limit", "wanted"), [("introspective", 60, "recall@1"), ("nobody", 60, "no result: ")]
)
def test_a_contender_reports_from_its_own_process(name, limit, wanted):
    results = measure(TINY, [name], Namespace(json=True, limit=limit, oml_python=None))
    assert wanted in line(name, results[name])
