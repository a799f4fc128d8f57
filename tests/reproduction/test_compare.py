"""Intervals against explicit loops."""

import random

import pytest

from idml.reproduction import compare
from idml.reproduction.compare import estimate, gain


def made(seed, classes=12, shift=0.0):
    draw = random.Random(seed)
    queries = [draw.randint(3, 9) for _ in range(classes)]
    hits = [min(q, max(0, round(q * (0.4 + shift) + draw.gauss(0, 0.5)))) for q in queries]
    sums = {"queries": queries, "hits": hits, "map@r": [h / 3 for h in hits]}
    return {"classes": sums, "introspective": {"classes": {**sums, "hits": [0] * classes}}}


def same_classes(runs):
    first = next(iter(runs.values()))["classes"]["queries"]
    for run in runs.values():
        run["classes"]["queries"] = first
        run["classes"]["hits"] = [min(a, b) for a, b in zip(first, run["classes"]["hits"], strict=True)]
        run["classes"]["map@r"] = [hits / 3 for hits in run["classes"]["hits"]]
    return runs


def test_the_mean_is_that_of_the_seeds():
    runs = same_classes({seed: made(seed) for seed in range(3)})
    means = [100 * sum(r["classes"]["hits"]) / sum(r["classes"]["queries"]) for r in runs.values()]
    found = estimate(runs)
    assert found.mean == pytest.approx(sum(means) / 3)
    assert found.low < found.mean < found.high
    assert estimate(runs, tested="introspective").mean == 0
    assert estimate(runs, "MAP@R").mean == pytest.approx(found.mean / 3)


def test_intervals_are_those_of_a_bootstrap_over_classes_and_seeds():
    runs = same_classes({seed: made(seed) for seed in range(4)})
    better = same_classes({seed: made(seed, shift=0.15) for seed in range(4)})
    draw, means, gains = random.Random(1), [], []
    for _ in range(4000):
        classes = [draw.randrange(12) for _ in range(12)]
        seeds = [draw.randrange(4) for _ in range(4)]

        def figure(arm, classes=classes, seeds=seeds):
            values = []
            for seed in seeds:
                c = arm[seed]["classes"]
                values.append(sum(c["hits"][i] for i in classes) / sum(c["queries"][i] for i in classes))
            return 100 * sum(values) / 4

        means.append(figure(runs))
        gains.append(figure(better) - figure(runs))
    for found, values in ((estimate(runs), sorted(means)), (gain(better, runs), sorted(gains))):
        assert found.low == pytest.approx(values[100], abs=1.0)
        assert found.high == pytest.approx(values[-100], abs=1.0)


def test_what_is_compared_with_itself_never_differs_and_pairs_are_seeds():
    runs = same_classes({seed: made(seed) for seed in range(3)})
    assert gain(runs, runs) == (0, 0, 0)
    alone = {0: runs[0]}
    assert gain(runs, alone).mean == pytest.approx(0)  # only seed 0 is common
    raw = dict.fromkeys(runs, runs[1])
    assert gain(runs, raw).mean == pytest.approx(estimate(runs).mean - estimate({0: runs[1]}).mean)
    with pytest.raises(ValueError, match="nothing to compare"):
        gain({}, runs)
    assert compare.Estimate(1.26, -0.04, 2.5).text(sign=True) == "+1.3 [-0.0, +2.5]"
