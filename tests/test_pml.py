"""pytorch-metric-learning's own losses with our metric, and the list of them in the docs."""

import inspect
from pathlib import Path

import pytest
import torch
from pytorch_metric_learning import losses, miners

from idml import Embeddings, IntrospectiveMetric
from idml.losses import build_loss
from idml.pml import IntrospectiveDistance, IntrospectiveSimilarity, joined

DIM, CLASSES = 8, 6
LABELS = torch.arange(CLASSES).repeat_interleave(4)
ARGUMENTS = {
    "ManifoldLoss": {"l": DIM},
    "P2SGradLoss": {"descriptors_dim": DIM, "num_classes": CLASSES},
    "RankedListLoss": {"margin": 0.4, "Tn": 10},
    "CosFaceLoss": {"num_classes": CLASSES, "embedding_size": DIM},
    "SubCenterArcFaceLoss": {"num_classes": CLASSES, "embedding_size": DIM},
}
NOT_A_LOSS_OF_ITS_OWN = {"GenericPairLoss", "SelfSupervisedLoss"}
DOCS = Path(__file__).parent.parent / "docs" / "losses.md"


def images(seed=0):
    g = torch.Generator().manual_seed(seed)
    s, u = torch.randn(len(LABELS), DIM, generator=g), 0.2 * torch.randn(len(LABELS), DIM, generator=g)
    return Embeddings(s.requires_grad_(), u.requires_grad_())


def accepts(name, distance):
    """Whether this loss, given our distance, has a finite value that sends gradient into s and u."""
    kind = getattr(losses, name)
    needed = [p.name for p in inspect.signature(kind.__init__).parameters.values() if p.default is p.empty]
    sizes = {"num_classes": CLASSES, "embedding_size": DIM}
    arguments = ARGUMENTS.get(name, {k: v for k, v in sizes.items() if k in needed})
    e = images()
    try:
        value = kind(distance=distance(DIM), **arguments)(joined(e), LABELS)
        grads = torch.autograd.grad(value, [e.semantic, e.uncertainty])
    except (AssertionError, ValueError, RuntimeError, TypeError):
        return False
    return bool(torch.isfinite(value)) and all(bool(torch.isfinite(g).all() and g.any()) for g in grads)


def documented_rows():
    """The table of docs/losses.md as it should be."""
    names = {n for n, c in inspect.getmembers(losses, inspect.isclass) if n.endswith("Loss")} - NOT_A_LOSS_OF_ITS_OWN
    rows = []
    for name in sorted(names):
        cells = ("yes" if accepts(name, kind) else "–" for kind in (IntrospectiveDistance, IntrospectiveSimilarity))
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return rows


def test_the_docs_list_what_really_accepts_the_metric():
    documented = [line for line in DOCS.read_text().splitlines() if line.startswith("| `") and "Loss`" in line]
    assert documented == documented_rows()
    assert sum("yes" in row for row in documented) > 10


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_their_losses_equal_ours(gamma):
    metric = IntrospectiveMetric(gamma=gamma)
    e = images(1)
    x = joined(e)
    distance, similarity = IntrospectiveDistance(DIM, metric), IntrospectiveSimilarity(DIM, metric)
    semihard = miners.TripletMarginMiner(0.1, "semihard", distance=distance)(x, LABELS)
    hard = miners.MultiSimilarityMiner(0.1, distance=similarity)(x, LABELS)
    pairs = [
        ("contrastive", losses.ContrastiveLoss(0.0, 0.5, distance=distance)(x, LABELS)),
        ("triplet_semihard", losses.TripletMarginLoss(0.1, distance=distance)(x, LABELS, semihard)),
        ("multi_similarity", losses.MultiSimilarityLoss(2, 50, 0.5, distance=similarity)(x, LABELS, hard)),
    ]
    for name, theirs in pairs:
        ours = build_loss(name, metric=metric)(e, LABELS)
        torch.testing.assert_close(ours, theirs)
        inputs = [e.semantic, e.uncertainty]
        for a, b in zip(*(torch.autograd.grad(v, inputs, retain_graph=True) for v in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_proxies_of_the_semantic_size_are_certain():
    theirs = losses.ProxyAnchorLoss(CLASSES, DIM, distance=IntrospectiveSimilarity(DIM))
    ours = build_loss("proxy_anchor", num_classes=CLASSES, embedding_dim=DIM)
    with torch.no_grad():
        theirs.proxies.copy_(ours.proxies)
    e = images(2)
    torch.testing.assert_close(theirs(joined(e), LABELS), ours(e, LABELS))


@pytest.mark.parametrize("kind", [IntrospectiveDistance, IntrospectiveSimilarity])
def test_pairwise_is_the_diagonal(kind):
    e, other = joined(images(3)), joined(images(4))
    many = e.repeat(5, 1), other.repeat(5, 1)  # more than one block
    torch.testing.assert_close(kind(DIM).pairwise_distance(*many), kind(DIM)(*many).diagonal())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: IntrospectiveDistance(0), "semantic_dim must be a positive"),
        (lambda: IntrospectiveDistance(9)(torch.randn(3, 8)), "8-d, less than the 9 semantic dimensions"),
        (
            lambda: IntrospectiveDistance(4, IntrospectiveMetric(rule="dissimilar"))(torch.randn(3, 8)),
            "no distance form",
        ),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()
