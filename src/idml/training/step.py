"""One step: a batch's embeddings, its loss, and the gradients; in one piece, in parts or in several processes."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.methods.base import Method
from idml.model import Model
from idml.training.config import TrainConfig
from idml.training.distributed import Processes


def compute_gradients(
    batch: Batch, numbers: Tensor, model: Model, method: Method, config: TrainConfig, processes: Processes, seed: int
) -> tuple[dict[str, float], Embeddings]:
    """The terms of a batch's loss and its embeddings; the gradients of their sum are left in the parameters.

    ``numbers`` are the places of the batch's original images in the training set.

    This process embeds its share of the batch, in parts of ``micro_batch`` images if asked for. Those are embedded
    twice: first without history for the loss, which sees all of them, then part by part with the gradient that the
    loss gave each embedding (Gao et al., 2021). So the gradients are those of the whole batch.
    """
    ways: dict[str, Callable[[Tensor], Embeddings]] = {"all": model, "last": model.last_stage, "heads": model.heads}
    embed = ways[config.train]
    share = processes.share(batch.images)
    parts = share.split(config.micro_batch or len(share))

    def embed_part(part: int) -> Embeddings:
        torch.manual_seed(seed + part)  # for random draws inside the network
        with torch.autocast(share.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            return embed(parts[part])

    if len(parts) == 1:
        own = embed_part(0)
    else:
        with torch.no_grad():
            own = Embeddings.cat([embed_part(part) for part in range(len(parts))])
        own = Embeddings(own.semantic.requires_grad_(), own.uncertainty.requires_grad_())
    whole = processes.gather(own)
    terms = method.loss(whole, batch, numbers, seed)
    value = torch.stack(list(terms.values())).sum() if len(terms) > 1 else next(iter(terms.values()))
    if not bool(torch.isfinite(value)):
        raise ValueError(f"the loss is {float(value.detach())}")
    value.backward()
    if len(parts) > 1:
        for part in range(len(parts)):
            _backpropagate_part(embed_part(part), own, part * config.micro_batch)
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
    known = [(x, g[start : start + len(part)]) for x, g in both if g is not None]  # the plain metric leaves u alone
    torch.autograd.backward([x for x, _ in known], [g for _, g in known])
