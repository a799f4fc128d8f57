"""Who evaluates embeddings in `evaluate.py`, and the made embeddings. Libraries are imported where they are used."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 24  # pairs multiplied at a time: 64 MB
Figures = dict[str, float]


class Size(NamedTuple):
    """How many images, dimensions and classes, and the smallest and largest class."""

    rows: int
    dims: int
    classes: int
    smallest: int
    largest: int


SIZES = {
    "sop": Size(60_502, 512, 11_316, 2, 12),
    "cub": Size(5_924, 512, 100, 41, 60),
    "small": Size(3_000, 64, 200, 5, 20),
}


def made(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Semantic and uncertainty embeddings [n, d], and labels."""
    g = torch.Generator().manual_seed(0)
    extra = torch.randperm(size.classes * (size.largest - size.smallest), generator=g)
    extra = extra[: size.rows - size.classes * size.smallest] % size.classes
    labels = torch.cat([torch.arange(size.classes).repeat(size.smallest), extra])
    labels = labels[torch.randperm(len(labels), generator=g)]
    latent = torch.randn(size.classes, 24, generator=g)[labels] + 0.6 * torch.randn(size.rows, 24, generator=g)
    x = latent @ torch.randn(24, size.dims, generator=g) + 0.5 * torch.randn(size.rows, size.dims, generator=g)
    u = torch.randn(size.rows, size.dims, generator=g) * torch.rand(size.rows, 1, generator=g) * size.dims**-0.5
    return torch.nn.functional.normalize(x), u, labels


def ours(x: Tensor, u: Tensor, labels: Tensor) -> Figures:
    from idml.evaluation import evaluate_retrieval

    return evaluate_retrieval(x, labels, recall_at=(1, 10))


def introspective(x: Tensor, u: Tensor, labels: Tensor) -> Figures:
    from idml import Embeddings, IntrospectiveMetric
    from idml.evaluation import evaluate_retrieval

    return evaluate_retrieval(Embeddings(x, u), labels, metric=IntrospectiveMetric(), recall_at=(1, 10))


def nmi(x: Tensor, u: Tensor, labels: Tensor) -> Figures:
    from idml.evaluation.retrieval import cluster_rows, normalized_mutual_information

    return {"nmi": normalized_mutual_information(labels, cluster_rows(x, len(labels.unique())))}


def pml(x: Tensor, labels: Tensor, custom: bool) -> Figures:
    from pytorch_metric_learning.distances import LpDistance
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    names = {"precision_at_1": "recall@1", "r_precision": "r_precision", "mean_average_precision_at_r": "map@r"}
    search = CustomKNN(LpDistance(normalize_embeddings=False), batch_size=256) if custom else None  # None: its faiss
    found = AccuracyCalculator(include=tuple(names), k="max_bin_count", knn_func=search).get_accuracy(x, labels)
    return {ours: found[theirs] for theirs, ours in names.items()}


def flat(x: Tensor, u: Tensor, labels: Tensor) -> Callable[[], Figures]:
    """Neighbours only; what they amount to is counted after the clock has stopped."""
    import faiss

    counts = torch.bincount(labels)
    k = max(10, int(counts.max()) - 1)
    index = faiss.IndexFlatL2(x.shape[1])
    index.add(x.numpy())
    found = torch.from_numpy(index.search(x.numpy(), k + 1)[1])

    def figures() -> Figures:
        own = found == torch.arange(len(x)).unsqueeze(1)
        others = found.gather(1, own.int().argsort(dim=1, stable=True))[:, :k]
        hits, place = labels[others] == labels.unsqueeze(1), torch.arange(1, k + 1)
        r = counts[labels].unsqueeze(1) - 1
        first = hits & (place <= r)
        precision = first * first.cumsum(1) / place.double()
        return {
            "recall@1": float(hits[:, 0].double().mean()),
            "recall@10": float(hits[:, :10].any(1).double().mean()),
            "r_precision": float((first.sum(1, keepdim=True) / r.double()).mean()),
            "map@r": float((precision.sum(1, keepdim=True) / r).mean()),
        }

    return figures


def oml(x: Tensor, u: Tensor, labels: Tensor) -> Figures:
    from oml.functional.knn import batched_knn
    from oml.functional.metrics import calc_retrieval_metrics

    k, ids = max(10, int(torch.bincount(labels).max()) - 1), torch.arange(len(x))
    _, found, wanted = batched_knn(x, ids, ids, top_n=k, labels_gt=labels)
    recalls = calc_retrieval_metrics(found, wanted, cmc_top_k=(1, 10), precision_top_k=(), map_top_k=(), verbose=False)
    return {f"recall@{k}": float(v) for k, v in recalls["cmc"].items()}


def product(x: Tensor, rows: int | None = None) -> float:
    """Seconds for the product of all pairs, from some of the queries, by the faster of torch and numpy."""
    rows = len(x) if rows is None else min(rows, len(x))
    room = torch.empty(max(1, min(CHUNK // len(x), rows)), len(x)).fill_(0.0)  # fresh pages are no part of the product

    def by_torch(a: Tensor, out: Tensor) -> None:
        torch.mm(a, x.T, out=out)

    def by_numpy(a: Tensor, out: Tensor) -> None:
        np.matmul(a.numpy(), x.numpy().T, out=out.numpy())

    tried = {f: _seconds(f, x[: len(room)], room) for f in (by_torch, by_numpy, by_torch, by_numpy)}
    faster = min(tried, key=tried.__getitem__)
    return sum(_seconds(faster, part, room) for part in x[:rows].split(len(room))) * len(x) / rows


def _seconds(multiply: Callable[[Tensor, Tensor], None], part: Tensor, room: Tensor) -> float:
    out = room[: len(part)]
    started = time.perf_counter()
    multiply(part, out)
    return time.perf_counter() - started


OURS = {"floor": lambda x, u, labels: {"seconds": product(x)}, "ours": ours, "introspective": introspective, "nmi": nmi}
PEERS = {
    "faiss": flat,
    "pml-custom": lambda x, u, labels: pml(x, labels, custom=True),
    "pml-faiss": lambda x, u, labels: pml(x, labels, custom=False),
    "oml": oml,
}
