"""Methods outside of a training run, and batches of embeddings for them."""

import torch

from idml import Embeddings, LabelSets
from idml.data.augment import Batch
from idml.methods import find_method
from idml.methods.base import Task
from idml.methods.options import build_options


def method_of(name, *, loss="multi_similarity", classes=4, dim=6, labels=None, seed=0, **options):
    """A method with these options for ``dim`` dimensions."""
    torch.manual_seed(seed)
    kind = find_method(name)
    chosen = build_options(kind.Options, options)
    kind.check_options(chosen, train="all", loss=loss)
    labels = torch.arange(12) % classes if labels is None else labels
    return kind(chosen, Task(loss=loss, classes=classes, embedding_dim=dim, labels=labels))


def batch_of(images, columns, *, classes=4, seed=0, sets=None, dim=None):
    """What a loss reads of ``images`` images, ``columns`` wide, with u of ``dim``; and their batch."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    semantic = torch.randn(classes, columns, generator=g)[labels] + 0.8 * torch.randn(images, columns, generator=g)
    uncertainty = 0.1 * torch.randn(images, dim or columns, generator=g)
    embeddings = Embeddings(semantic.requires_grad_(), uncertainty.requires_grad_())
    known = LabelSets(labels) if sets is None else LabelSets.of(sets)
    return embeddings, Batch(torch.zeros(images, 1, 1, 1), known, torch.zeros(images, dtype=torch.bool))


def assert_same(found, expected, *inputs):
    """Two scalars have the same value, and the same gradients with respect to the inputs."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    gradients = (torch.autograd.grad(x, inputs, retain_graph=True, allow_unused=True) for x in (found, expected))
    for a, b in zip(*gradients, strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def gradients_of(method, embeddings, batch, seed=0):
    """The gradients of the sum of a method's terms with respect to s and u."""
    terms = method.loss(embeddings, batch, torch.arange(len(batch.labels)), seed)
    inputs = [embeddings.semantic, embeddings.uncertainty]
    return torch.autograd.grad(torch.stack(list(terms.values())).sum(), inputs)
