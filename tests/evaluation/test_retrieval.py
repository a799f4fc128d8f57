"""Retrieval figures against pytorch-metric-learning, scikit-learn and explicit loops."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.metrics import normalized_mutual_info_score

from idml import Embeddings, IntrospectiveMetric
from idml.data.datasets import load_dataset
from idml.data.pixel_cache import load_pixels
from idml.evaluation import distance_bounds as pairs
from idml.evaluation import evaluate_retrieval, retrieval
from idml.evaluation import knn as neighbours
from idml.evaluation.retrieval import class_sums, cluster_rows, normalized_mutual_information
from idml.model import build_model
from idml.model.feature_cache import load_features


def loops(order, labels, gallery_labels, relevant, recall_at):
    """The definitions, one query at a time, from each query's full ranking."""
    totals, queries = dict.fromkeys([f"recall@{k}" for k in recall_at] + ["r_precision", "map@r"], 0.0), 0
    for ranking, label, r in zip(order, labels, relevant, strict=True):
        if r == 0:
            continue
        queries += 1
        hits = [gallery_labels[j] == label for j in ranking]
        for k in recall_at:
            totals[f"recall@{k}"] += any(hits[:k])
        totals["r_precision"] += sum(hits[:r]) / r
        totals["map@r"] += sum(sum(hits[: i + 1]) / (i + 1) for i in range(r) if hits[i]) / r
    out = {name: total / queries for name, total in totals.items()}
    return out | {"queries": queries, "singletons": len(labels) - queries}


def plain_ranking(x, i, gallery=None, ids=None, gallery_ids=None):
    gallery = x if gallery is None else gallery
    squares = (gallery.double() - x[i].double()).square().sum(1).tolist()
    own = i if ids is None else ids[i]
    return [
        j
        for _, j in sorted((d, j) for j, d in enumerate(squares))
        if (j if gallery_ids is None else gallery_ids[j]) != own
    ]


def expected(x, labels, recall_at=(1, 2, 4, 8)):
    labels = list(labels)
    order = [plain_ranking(x, i) for i in range(len(x))]
    return loops(order, labels, labels, [labels.count(y) - 1 for y in labels], recall_at)


def made(n, classes, d=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    return torch.randn(classes, d, generator=g)[labels] + torch.randn(n, d, generator=g), labels


REPEATED = torch.randint(15, (60,), generator=torch.Generator().manual_seed(5))
CASES = {
    "random": made(80, 9),
    "one class": (torch.randn(20, 4), torch.zeros(20, dtype=torch.long)),
    "singletons": (made(40, 40)[0], torch.tensor([*range(15), *[20] * 3, *[21] * 22])),
    "unequal classes": (made(70, 5)[0], torch.tensor([0] * 50 + [1] * 2 + [2] * 17 + [3])),
    "duplicates within classes": (made(15, 5)[0][REPEATED], made(15, 5)[1][REPEATED]),
    "duplicates across classes": (made(15, 5)[0][REPEATED], made(60, 5)[1]),
    "ties": (torch.randint(3, (60, 2)).float(), made(60, 6)[1]),
    "collapsed": (torch.full((30, 3), 0.7), made(30, 4)[1]),
    "fewer images than K": (made(5, 2)[0], torch.tensor([0, 1, 0, 1, 1])),
    "two images": (torch.randn(2, 3), torch.tensor([4, 4])),
}


@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_of_loops(name):
    x, labels = CASES[name]
    found = evaluate_retrieval(x, labels)
    assert found == pytest.approx(expected(x, labels.tolist()), abs=1e-12)
    assert list(found) == [*(f"recall@{k}" for k in (1, 2, 4, 8)), "r_precision", "map@r", "queries", "singletons"]


@pytest.mark.parametrize(("n", "classes"), [(300, 12), (500, 3), (400, 150)])
def test_figures_are_those_of_pytorch_metric_learning(n, classes):
    x, labels = made(n, classes, d=16, seed=classes)
    names = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    knn = CustomKNN(LpDistance(normalize_embeddings=False))
    theirs = AccuracyCalculator(include=names, knn_func=knn, k="max_bin_count").get_accuracy(x, labels)
    ours = evaluate_retrieval(x, labels)
    for mine, name in zip(("recall@1", "r_precision", "map@r"), names, strict=True):
        assert ours[mine] == pytest.approx(theirs[name], abs=1e-6)
    q, y = made(100, classes, d=16, seed=99)
    theirs = AccuracyCalculator(include=names, knn_func=knn, k="max_bin_count").get_accuracy(q, y, x, labels, False)
    ours = evaluate_retrieval(q, y, gallery=x, gallery_labels=labels)
    for mine, name in zip(("recall@1", "r_precision", "map@r"), names, strict=True):
        assert ours[mine] == pytest.approx(theirs[name], abs=1e-6)


def test_figures_on_real_images_are_those_of_other_libraries(tmp_path, monkeypatch):
    """Features of the pretrained trunk, of photographs: birds, 20 classes, sixty images or so of each."""
    tar = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "cub_200_2011_256px.tar"
    if not tar.exists():
        pytest.skip(f"the data is absent: {tar.name}")
    test = load_dataset(f"cub:{tar}").test[:600:2]
    pixels = load_pixels(test, 73, folder=tmp_path)
    labels = pixels.images.labels[pixels.usable]
    monkeypatch.setenv("IDML_CACHE", str(tmp_path))
    x = load_features(build_model(image_size=64), pixels)
    names = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    knn = CustomKNN(LpDistance())
    theirs = AccuracyCalculator(include=names, knn_func=knn, k="max_bin_count").get_accuracy(x, labels)
    ours = evaluate_retrieval(Embeddings.certain(x), labels, nmi=True)
    for mine, name in zip(("recall@1", "r_precision", "map@r"), names, strict=True):
        assert ours[mine] == pytest.approx(theirs[name], abs=1e-6)
    assert ours["recall@1"] > 0.3  # they are real
    found = cluster_rows(torch.nn.functional.normalize(x), len(labels.unique()))
    assert ours["nmi"] == pytest.approx(normalized_mutual_info_score(labels, found), abs=1e-9)


def test_query_and_gallery_sets_that_share_images():
    x, labels = made(60, 8)
    ids = [f"img{i}" for i in range(60)]
    q, g = slice(0, 30), slice(20, 60)
    found = evaluate_retrieval(
        x[q], labels[q], gallery=x[g], gallery_labels=labels[g], query_ids=ids[q], gallery_ids=ids[g]
    )
    order = [plain_ranking(x[q], i, x[g], ids[q], ids[g]) for i in range(30)]
    kept = labels.tolist()
    relevant = [sum(kept[20 + j] == kept[i] for j in order[i]) for i in range(30)]
    assert found == pytest.approx(loops(order, kept[q], kept[g], relevant, (1, 2, 4, 8)), abs=1e-12)
    whole = evaluate_retrieval(x, labels, gallery=x, gallery_labels=labels, query_ids=ids, gallery_ids=ids)
    assert whole == evaluate_retrieval(x, labels)


def test_queries_without_a_match_in_the_gallery_are_singletons():
    found = evaluate_retrieval(
        torch.tensor([[0.0], [1.0]]), ["a", "b"], gallery=torch.tensor([[0.1], [5.0]]), gallery_labels=["a", "c"]
    )
    assert found == {f"recall@{k}": 1.0 for k in (1, 2, 4, 8)} | {
        "r_precision": 1.0,
        "map@r": 1.0,
        "queries": 1,
        "singletons": 1,
    }


@pytest.mark.parametrize("gamma", [0.0, 3.0])
def test_introspective_metric_at_test_time(gamma):
    x, labels = made(70, 6)
    e, metric = Embeddings(x, torch.randn(70, 5)), IntrospectiveMetric(gamma=gamma)
    distances = metric.distances(e.to(torch.float64)).tolist()
    order = [[j for _, j in sorted((d, j) for j, d in enumerate(row)) if j != i] for i, row in enumerate(distances)]
    kept = labels.tolist()
    wanted = loops(order, kept, kept, [kept.count(y) - 1 for y in kept], (1, 3))
    found = evaluate_retrieval(e, labels, metric=metric, recall_at=(1, 3), nmi=True)
    assert found.pop("nmi") is None
    assert found == pytest.approx(wanted, abs=1e-12)


def test_embeddings_are_compared_by_their_unit_part():
    x, labels = made(60, 6)
    e = Embeddings(x, torch.zeros(60, 0))
    assert evaluate_retrieval(e, labels, nmi=True) == evaluate_retrieval(e.unit, labels, nmi=True)
    assert evaluate_retrieval(e, labels) != evaluate_retrieval(x, labels)


def test_labels_of_any_kind():
    x, labels = made(50, 6)
    wanted = evaluate_retrieval(x, labels)
    names = [f"class {y}" for y in labels.tolist()]
    kinds = (labels.int(), labels.numpy(), labels.tolist(), tuple(labels.tolist()), names, np.array(names), labels - 10)
    for given in kinds:
        assert evaluate_retrieval(x, given) == wanted
    objects = np.array(names, dtype=object)
    assert evaluate_retrieval(x, objects) == wanted
    assert evaluate_retrieval(x.half(), labels) == evaluate_retrieval(x.half().float(), labels)


@pytest.mark.parametrize("size", [1, 37, 4096])
def test_chunk_sizes_do_not_change_the_figures(monkeypatch, size):
    x, labels = CASES["duplicates across classes"]
    e = Embeddings(x, 0.1 * x)
    wanted = [evaluate_retrieval(e, labels, metric=m) for m in (None, IntrospectiveMetric())]
    for room, name in ((neighbours, "_CHUNK"), (neighbours, "_LIST"), (pairs, "_EXACT"), (retrieval, "_HITS")):
        monkeypatch.setattr(room, name, size)
    for metric, figures in zip((None, IntrospectiveMetric()), wanted, strict=True):
        assert evaluate_retrieval(e, labels, metric=metric) == pytest.approx(figures, abs=1e-12)


@pytest.mark.parametrize("groups", [(1, 1), (1, 5), (5, 1), (4, 9), (30, 30), (200, 200)])
def test_nmi_of_given_clusters_equals_scikit_learn(groups):
    a, b = (torch.randint(g, (200,)) for g in groups)
    assert normalized_mutual_information(a, b) == pytest.approx(normalized_mutual_info_score(a, b), abs=1e-12)
    assert normalized_mutual_information(a, a + 3) == pytest.approx(1.0)


def test_nmi_of_separate_classes_is_1_and_reproducible():
    labels = torch.arange(200) % 4
    x = 20 * torch.eye(4)[labels] + 0.1 * torch.randn(200, 4)
    first = evaluate_retrieval(x, labels, nmi=True)
    assert list(first)[-3:] == ["nmi", "queries", "singletons"]
    assert first == evaluate_retrieval(x, labels, nmi=True)
    assert first["nmi"] == pytest.approx(normalized_mutual_info_score(labels, cluster_rows(x, 4)))
    assert 0.5 < first["nmi"] <= 1.0
    assert evaluate_retrieval(torch.ones(6, 2), [0, 0, 1, 1, 2, 2], nmi=True)["nmi"] == 0.0


def test_a_better_embedding_scores_better_and_bounds_hold():
    labels = torch.arange(100) % 10
    perfect = evaluate_retrieval(torch.eye(10)[labels], labels, nmi=True)
    assert all(perfect[name] == 1.0 for name in ("recall@1", "r_precision", "map@r"))
    noise = evaluate_retrieval(torch.randn(100, 4), labels, nmi=True)
    assert all(0.0 <= noise[name] < 0.7 for name in ("recall@1", "r_precision", "map@r", "nmi"))


X, Y = torch.randn(6, 3), [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embeddings": torch.zeros(0, 3), "labels": []}, "there are no query embeddings"),
        ({"embeddings": torch.full((6, 3), math.nan)}, r"in 6 of 6 rows \(first: row 0\)"),
        ({"labels": [0, 0, 1]}, "3 labels for 6 images"),
        ({"labels": torch.zeros(6, 2, dtype=torch.long)}, r"one per image, got shape \[6, 2\]"),
        ({"labels": torch.rand(6)}, "all whole numbers or all strings"),
        ({"labels": [0, "a", 1, 1, 2, 2]}, "all whole numbers or all strings"),
        ({"labels": [0, None, 1, 1, 2, 2]}, "all whole numbers or all strings"),
        ({"labels": list(range(6))}, "none of the 6 images has another image of its class"),
        ({"gallery": X}, "a gallery needs gallery_labels"),
        ({"gallery_labels": Y}, "a gallery needs gallery_labels"),
        ({"gallery": X, "gallery_labels": Y[:3]}, "3 gallery labels for 6 gallery images"),
        ({"gallery": X, "gallery_labels": list("aabbcc")}, "all whole numbers or all strings"),
        ({"gallery": X[:, :2], "gallery_labels": Y}, "queries have 3 dimensions but the gallery has 2"),
        ({"recall_at": (1, 0)}, "recall_at takes whole numbers above 0, got 0"),
        ({"recall_at": (1.0,)}, "recall_at takes whole numbers above 0, got 1.0"),
        ({"recall_at": (True,)}, "recall_at takes whole numbers"),
        ({"recall_at": 5}, "recall_at takes a list"),
        ({"metric": IntrospectiveMetric(rule="strict")}, "rules that do: 'similar', 'off'"),
    ],
)
def test_bad_input_gives_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        evaluate_retrieval(**({"embeddings": X, "labels": Y} | arguments))
    assert "\n" not in str(error.value)


def test_import_does_not_load_the_clustering_libraries():
    code = "import sys, idml.evaluation; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"sklearn", "faiss", "scipy", "timm"} & set(loaded)


@pytest.mark.parametrize("metric", [None, IntrospectiveMetric(2.0, 0.5)])
@pytest.mark.parametrize("apart", [False, True])
def test_sums_of_classes_are_those_of_explicit_loops(metric, apart):
    torch.manual_seed(0)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 5])  # 2 and 5 are alone, 4 is empty
    e = Embeddings(torch.randn(11, 4).double(), torch.rand(11, 3).double())
    known, theirs, other = {}, labels, e
    if apart:
        theirs = torch.tensor([0, 1, 3, 3, 0, 0, 2, 4])
        other = Embeddings(torch.randn(8, 4).double(), torch.rand(8, 3).double())
        known = {"gallery": other, "gallery_labels": theirs}
    found = class_sums(e, labels, **known, metric=metric)
    distances = (metric or IntrospectiveMetric(rule="off")).distances(e, other)
    for c in range(6):
        queries = hits = precision = average = 0
        for i in (labels == c).nonzero().flatten().tolist():
            order = [j for j in distances[i].argsort().tolist() if apart or j != i]
            r = sum(int(theirs[j]) == c for j in order)
            if r == 0:
                continue
            right = [int(theirs[j]) == c for j in order]
            queries += 1
            hits += right[0]
            precision += sum(right[:r]) / r
            average += sum(sum(right[: p + 1]) / (p + 1) for p in range(r) if right[p]) / r
        assert int(found.queries[c]) == queries
        assert found.sums[:, c].tolist() == pytest.approx([hits, precision, average])
    whole = evaluate_retrieval(e, labels, **known, metric=metric, recall_at=(1,))
    assert found.figures == pytest.approx({key: whole[key] for key in ("recall@1", "r_precision", "map@r")})
    assert float(found.correct.double().mean()) == pytest.approx(whole["recall@1"])
    assert len(found.rows) == whole["queries"]
