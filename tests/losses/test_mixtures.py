"""Every way in which mixtures enter a loss equals an explicit formula over Python sets, values and gradients."""

import loops
import pytest
import torch
from test_label_sets import DIM, OTHER_PARAMETERS, SOFTPLUS, assert_same, looped_pairs

from idml import Embeddings, IntrospectiveMetric, LabelSets
from idml.data.augment import Batch
from idml.losses import LOSSES, ProxyLoss
from idml.methods.base import Task
from idml.methods.idml import Idml, IdmlOptions
from idml.methods.mixup import MixtureOptions
from idml.methods.pel import ProbabilisticLoss, sample
from idml.mining import distance_weighted

N, CLASSES, LAM = 10, 5, 0.3
FIRST = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
SECOND = [2, 1, 0, 4, 3, 2, 1, 0, 3, 3]  # image 5 is mixed with its own class
SETS = [{a} for a in FIRST], [{a, b} for a, b in zip(FIRST, SECOND, strict=True)]
MIXINGS = ("separate", "joint", "against-clean")
NUMBERS = torch.arange(N)


def make_batch():
    """Semantic and uncertainty vectors of N originals and N mixtures, and the batch without its pixels."""
    g = torch.Generator().manual_seed(3)
    centres = torch.randn(CLASSES, DIM, generator=g, dtype=torch.float64)
    parents = centres[FIRST], LAM * centres[FIRST] + (1 - LAM) * centres[SECOND]
    s = torch.cat(parents) + 0.8 * torch.randn(2 * N, DIM, generator=g, dtype=torch.float64)
    u = 0.3 * torch.randn(2 * N, DIM, generator=g, dtype=torch.float64)
    first, second = torch.tensor(FIRST), torch.tensor(SECOND)
    labels = LabelSets.cat([LabelSets(first), LabelSets.mixed(first, second)])
    images, mixed = torch.zeros(2 * N, 1, 1, 1), torch.arange(2 * N) >= N
    return s.requires_grad_(), u.requires_grad_(), Batch(images, labels, mixed, LAM)


def looped(loss, s, u, sets, parameters, others=None):
    """The loss of images s, u by loops; ``others`` are the semantic and uncertainty vectors and sets they meet."""
    name = next(name for name, kind in LOSSES.items() if type(loss) is kind)
    extra, metric = {}, loss.metric
    if isinstance(loss, ProxyLoss):
        pairs = looped_pairs(metric, loss.form, s, u, loss.proxies)
    elif others is None:
        pairs = looped_pairs(metric, loss.form, s, u)
    else:
        pairs, extra = looped_pairs(metric, loss.form, s, u, *others[:2]), {"columns": others[2]}
    if name == "rankmi":
        extra["layers"] = [(layer.weight, layer.bias) for layer in loss.critic[::2]]
    if name in ("margin_dw", "rankmi"):
        columns = sets if others is None else others[2]
        matches = LabelSets.of(sets).matches(LabelSets.of(columns))
        matrix = metric.distances(Embeddings(s, u), None if others is None else Embeddings(*others[:2]))
        drawn = distance_weighted(matrix, matches, DIM, others is not None, seed=7)
        extra["sampled"] = list(zip(*(x.tolist() for x in drawn), strict=True))
    return getattr(loops, name)(pairs, sets, **parameters, **extra)


@pytest.mark.parametrize("labels", ["sets", "weighted"])
@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_originals_and_mixtures(name, mixing, labels):
    s, u, batch = make_batch()
    parameters = OTHER_PARAMETERS[name]
    task = Task(loss=name, classes=CLASSES, embedding_dim=DIM, loss_parameters=parameters)
    torch.manual_seed(5)
    method = Idml(IdmlOptions(mixtures=MixtureOptions(mixing=mixing, labels=labels)), task).double()
    terms = method.loss(Embeddings(s, u), batch, NUMBERS, seed=7)
    loss = method.metric_loss

    plain, mixed = SETS
    clean = (s[:N], u[:N], plain)
    weighted = [(LAM, [{a} for a in FIRST]), (1 - LAM, [{b} for b in SECOND])]
    forms = [(1.0, mixed)] if labels == "sets" else weighted
    if mixing == "joint":
        expected = {"pairs": sum(w * looped(loss, s, u, [*plain, *sets], parameters) for w, sets in forms)}
    else:
        weight = 0.4 if mixing == "against-clean" else 1.0
        meets = clean if mixing == "against-clean" else None
        parts = [w * looped(loss, s[N:], u[N:], sets, parameters, meets) for w, sets in forms]
        expected = {"pairs": looped(loss, *clean, parameters), "mixtures": weight * sum(parts)}
    assert terms.keys() == expected.keys()
    tolerance = 1e-8 if name in SOFTPLUS else 1e-10
    for term, value in expected.items():
        torch.testing.assert_close(terms[term], value, atol=tolerance, rtol=tolerance)
    ours, by_loops = (torch.stack(list(x.values())) for x in (terms, expected))
    assert_same(ours, by_loops, [s, u, *method.parameters()], tolerance)


@pytest.mark.parametrize("mixing", MIXINGS)
def test_samples_of_gaussians_meet_as_the_images_do(mixing):
    s, u, batch = make_batch()
    loss = LOSSES["contrastive"](metric=IntrospectiveMetric(rule="off"), negative_margin=1.2)
    pel = ProbabilisticLoss(loss, samples=3, kl_weight=0.0)
    terms = MixtureOptions(mixing=mixing).terms(pel, Embeddings(s, u.abs()), batch, 7, proxies=False)
    e, clean = Embeddings(s, u.abs()), Embeddings(s[:N], u[:N].abs())
    margin = {"negative_margin": 1.2}
    if mixing == "joint":
        parts = [looped(loss, x, x, [*SETS[0], *SETS[1]], margin) for x in sample(e, 3, 7)]
    elif mixing == "separate":
        parts = [looped(loss, x, x, SETS[1], margin) for x in sample(e[N:], 3, 7)]
    else:
        drawn = sample(Embeddings.cat([e[N:], e[:N]]), 3, 7)
        assert not torch.equal(drawn[:, N:], sample(clean, 3, 7))  # an image and a mixture that meet have draws apart
        parts = [0.4 * looped(loss, x[:N], x[:N], SETS[1], margin, (x[N:], x[N:], SETS[0])) for x in drawn]
    assert_same(terms["pairs" if mixing == "joint" else "mixtures"], loops.mean(parts), [s])


def test_weight_and_share_of_mixtures_have_the_defaults_of_their_form():
    defaults = {mixing: (MixtureOptions(mixing).weight, MixtureOptions(mixing).beta) for mixing in MIXINGS}
    assert defaults == {"separate": (1.0, 1.0), "joint": (1.0, 1.0), "against-clean": (0.4, 2.0)}
    assert MixtureOptions("against-clean", mixture_weight=0.0, mixture_beta=0.5).weight == 0
    assert MixtureOptions("separate", mixture_beta=0.5).beta == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixing": "apart"}, "unknown mixing 'apart'"),
        ({"labels": "soft"}, "unknown labels 'soft'"),
        ({"mixture_weight": -1.0}, "mixture_weight must be a number of at least 0"),
        ({"mixture_beta": 0.0}, "mixture_beta must be a number above 0"),
        ({"mixing": "joint", "mixture_weight": 0.5}, "mixing joint has none"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MixtureOptions(**options)


def test_other_images_need_labels():
    s, u, batch = make_batch()
    loss = LOSSES["contrastive"]()
    with pytest.raises(ValueError, match="other and other_labels go together"):
        loss(Embeddings(s, u), batch.labels, other=Embeddings(s, u))
    with pytest.raises(ValueError, match="20 embeddings but 10 labels"):
        loss(Embeddings(s, u), batch.labels, other=Embeddings(s, u), other_labels=batch.labels[:N])
