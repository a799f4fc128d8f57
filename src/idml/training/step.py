"""One step: a batch's embeddings, its loss, and the gradients; in one piece, in parts or in several processes."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.methods.base import Method
from idml.model import BatchRows, Model
from idml.training.config import TrainConfig
from idml.training.distributed import Processes


def compute_gradients(
    batch: Batch, numbers: Tensor, model: Model, method: Method, config: TrainConfig, processes: Processes, seed: int
) -> tuple[dict[str, float], Embeddings]:
    """The terms of a batch's loss and its embeddings; the gradients of their sum are left in the parameters.

    ``numbers`` are the places of the batch's original images in the training set.

    This process embeds its share of the batch, in parts of ``micro_batch`` images if asked for. Those are embedded
    twice: first without history for the loss, which sees all of them, then part by part with the gradient that the
    loss gave each embedding (Gao et al., 2021). So the gradients are those of the whole batch: dropout in the heads
    draws its masks by the row of the whole batch. Random draws inside the trunk differ with the parts.
    """
    compute_features: Callable[[Tensor], Tensor] = {
        "all": model.training_features,
        "last": model.last_stage_features,
        "heads": lambda features: features,
    }[config.train]
    share, rows = processes.share(batch.images), processes.share(torch.arange(len(batch.images)))
    size = config.micro_batch or len(share)
    parts = list(zip(share.split(size), rows.split(size), strict=True))

    def features_of(part: int) -> Tensor:
        torch.manual_seed(seed + part)  # for random draws inside the trunk
        with autocast:
            return compute_features(parts[part][0])

    def embed(features: Tensor, rows: Tensor) -> Embeddings:
        with autocast:
            return model.outputs(features, BatchRows(seed, rows, len(batch.images)))

    autocast = torch.autocast(share.device.type, torch.bfloat16, enabled=config.precision == "bfloat16")
    if len(parts) == 1:
        own = embed(features_of(0), rows)
    else:
        with torch.no_grad():  # the heads see all parts at once: a new uncertainty head starts at the whole share
            own = embed(torch.cat([features_of(part) for part in range(len(parts))]), rows)
        own = Embeddings(own.semantic.requires_grad_(), own.uncertainty.requires_grad_())
    whole = processes.gather(own)
    terms = method.loss(whole, batch, numbers, seed)
    value = torch.stack(list(terms.values())).sum() if len(terms) > 1 else next(iter(terms.values()))
    if not bool(torch.isfinite(value)):
        raise ValueError(f"the loss is {float(value.detach())}")
    value.backward()
    if len(parts) > 1:
        for part in range(len(parts)):
            _backpropagate_part(embed(features_of(part), parts[part][1]), own, part * size)
    processes.sum_gradients(model)
    processes.average_statistics(model)
    return {name: float(term.detach()) for name, term in terms.items()}, whole.detach()


def check_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Raise ``ValueError`` for gradients that are not finite; one sum is faster to test than every number."""
    for grad in (p.grad for p in parameters if p.grad is not None):
        if not bool(torch.isfinite(grad.sum())) and not bool(torch.isfinite(grad).all()):
            raise ValueError("the gradients hold NaN or infinity")


def check_weights(*modules: nn.Module) -> None:
    """Raise ``ValueError`` for weights or statistics that are not finite: they must not replace a good checkpoint."""
    if not all(bool(torch.isfinite(x).all()) for module in modules for x in module.state_dict().values()):
        raise ValueError("the weights hold NaN or infinity: a smaller learning rate may help")


def _backpropagate_part(part: Embeddings, whole: Embeddings, start: int) -> None:
    """Send the gradients that ``whole`` got at the rows of ``part`` back through the network."""
    both = ((part.semantic, whole.semantic.grad), (part.uncertainty, whole.uncertainty.grad))
    known = [  # the plain metric leaves u alone; during warm-up the uncertainty head may be frozen
        (x, g[start : start + len(part)]) for x, g in both if g is not None and x.requires_grad
    ]
    torch.autograd.backward([x for x, _ in known], [g for _, g in known])
