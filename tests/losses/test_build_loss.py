"""What build_loss accepts, and one clear sentence for what it does not."""

import inspect
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from idml import Embeddings, IntrospectiveMetric, LabelSets
from idml.losses import LOSSES, ProxyLoss, build_loss, contrastive, fast_ap, proxy_nca_pp, soft_triple, softmax

OFF = IntrospectiveMetric(rule="off")


def images(n=6, d=4):
    return Embeddings(torch.randn(n, d), torch.randn(n, d))


def test_the_names_of_the_contract():
    assert {
        "triplet_semihard", "proxy_nca", "fast_ap", "contrastive", "margin_dw", "multi_similarity", "proxy_anchor",
        "softmax", "soft_triple", "circle", "proxy_nca_pp", "ranked_list", "rankmi",
    } == set(LOSSES)  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_plain_labels_label_sets_and_plain_tensors(name):
    loss = build_loss(name, metric=OFF, num_classes=3, embedding_dim=4)
    e, y = images(), torch.tensor([0, 0, 1, 1, 2, 2])
    value = loss(e, y, seed=0)
    assert value.shape == ()
    assert torch.equal(value, loss(e, LabelSets(y), seed=0))
    assert torch.equal(value, loss(e.semantic, y, seed=0))


@pytest.mark.parametrize("name", [n for n, c in LOSSES.items() if not issubclass(c, ProxyLoss)])
def test_pair_losses_need_no_sizes(name):
    assert build_loss(name)(images(), torch.tensor([0, 0, 1, 1, 2, 2])).shape == ()


def test_parameters_reach_the_function():
    e, y = images(), torch.tensor([0, 0, 1, 1, 2, 2])
    narrow = build_loss("contrastive", metric=OFF, negative_margin=0.1)(e, y)
    assert torch.equal(narrow, contrastive(OFF.distances(e), LabelSets(y).matches(), negative_margin=0.1))
    assert "negative_margin=0.1" in repr(build_loss("contrastive", negative_margin=0.1))


def test_learnable_proxy_uncertainty_gets_gradient():
    loss = build_loss("proxy_anchor", num_classes=3, embedding_dim=4, proxy_uncertainty=True)
    start = loss.proxy_uncertainty.detach().norm(dim=1).mean()
    assert 0.02 < start < 0.08
    loss(images(), torch.tensor([0, 0, 1, 1, 2, 2])).backward()
    assert loss.proxy_uncertainty.grad.abs().max() > 0


def test_margin_follows_the_seed():
    g = torch.Generator().manual_seed(0)
    e = Embeddings(torch.randn(40, 4, generator=g), torch.zeros(40, 4))
    y, loss = torch.arange(40) // 4, build_loss("margin_dw", metric=OFF)
    assert loss(e, y, seed=1) == loss(e, y, seed=1)
    assert len({float(loss(e, y, seed=s)) for s in range(5)}) > 1


Y = torch.tensor([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: build_loss("contrastiv"), "unknown loss 'contrastiv'; did you mean 'contrastive'"),
        (
            lambda: build_loss("contrastive", negativ_margin=1),
            "unknown parameter 'negativ_margin' of Contrastive; did you mean",
        ),
        (lambda: build_loss("proxy_anchor"), "needs num_classes and embedding_dim"),
        (lambda: build_loss("proxy_anchor", num_classes=0, embedding_dim=4), "num_classes must be a positive"),
        (lambda: build_loss("softmax", num_classes=3, embedding_dim=2.5), "embedding_dim must be a positive"),
        (lambda: build_loss("contrastive", metric=IntrospectiveMetric(rule="strict")), "analysis only"),
        (
            lambda: build_loss("contrastive", metric=IntrospectiveMetric(rule="dissimilar")),
            "Contrastive reads distances, but rule 'dissimilar' has no distance form",
        ),
        (lambda: build_loss("contrastive")(torch.randn(6, 4), Y), "a plain tensor only goes with rule 'off'"),
        (lambda: build_loss("contrastive")([[0.0]], Y), "expected Embeddings, got list"),
        (lambda: build_loss("contrastive", metric=OFF)(torch.arange(6), Y), "floating-point tensor"),
        (lambda: build_loss("contrastive", metric=OFF)(torch.ones(6, 2).long(), Y), "floating-point tensor"),
        (lambda: build_loss("contrastive")(images(), Y[:5]), "6 embeddings but 5 labels"),
        (lambda: build_loss("contrastive")(images(), Y.view(6, 1)), "1-D tensor of integers"),
        (lambda: build_loss("contrastive")(images(), Y.float()), "1-D tensor of integers"),
        (lambda: build_loss("contrastive")(images()[:0], Y[:0]), "the batch is empty"),
        (lambda: build_loss("contrastive")(images(), Y.to("meta")), "embeddings are on cpu but labels are on meta"),
        (lambda: build_loss("contrastive", num_classes=2)(images(), Y), "label 2 is outside the 2 classes"),
        (
            lambda: build_loss("softmax", num_classes=2, embedding_dim=4)(images(), Y),
            "label 2 is outside the 2 classes",
        ),
        (
            lambda: build_loss("softmax", num_classes=3, embedding_dim=5)(images(), Y),
            "embeddings are 4-d, the loss expects 5-d",
        ),
        (
            lambda: build_loss("softmax", num_classes=3, embedding_dim=4).to("meta")(images(), Y),
            "the proxies are on meta but embeddings are on cpu",
        ),
        (lambda: contrastive(torch.rand(2, 2), torch.eye(2).bool(), power=0.5), "power must be at least 1, got 0.5"),
        (lambda: build_loss("ranked_list", gallery_gradient=2.0), "gallery_gradient must lie in 0 … 1, got 2.0"),
        (lambda: contrastive(torch.zeros(3, 3), torch.zeros(3, 3)), "matches must be bool"),
        (
            lambda: contrastive(torch.zeros(3, 3), torch.zeros(3, 1, dtype=torch.bool)),
            "matches must be bool \\[3, 3\\]",
        ),
        (lambda: contrastive(torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.bool)), "square pair matrix"),
        (lambda: contrastive(torch.zeros(3), torch.zeros(3, dtype=torch.bool)), "pair matrix must be"),
        (lambda: softmax(torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.bool)), "matches none of the proxies"),
        (lambda: fast_ap(torch.zeros(2, 2), torch.eye(2).bool(), bins=0), "bins must be 1 or larger"),
        (lambda: proxy_nca_pp(torch.zeros(2, 2), torch.eye(2).bool(), temperature=0.0), "temperature must be positive"),
        (lambda: soft_triple(torch.zeros(2, 5), torch.eye(2).bool(), centers_per_class=2), "5 centres do not divide"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LOSSES)
def test_the_page_of_losses_has_every_option_with_its_default(name):
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    assert page.count(f"| [`{name}`](#{name}) |") == 1
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    written = re.search(r"^Options: (.*?)\.(?: |$)", section, re.MULTILINE)[1]
    shown = {k: Fraction(v) for k, v in re.findall(r"`(\w+)`(?: \(.*?\))? = ([\d./]+)", written)}
    assert written.count(" = ") == len(shown)
    parameters = inspect.signature(LOSSES[name].function).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert {k: float(v) for k, v in shown.items()} == {
        k: v for k, v in options.items() if k not in ("dim", "seed", "critic")
    }
    row = next(line for line in page.splitlines() if line.startswith(f"| [`{name}`]"))
    against = "proxies" if issubclass(LOSSES[name], ProxyLoss) else "images"
    assert row.split(" | ")[3] == f"{against}, {'D' if LOSSES[name].form == 'distance' else 'C'}"
