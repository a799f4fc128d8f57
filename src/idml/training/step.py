"""One step: a batch's embeddings, its loss, and the gradients, whole, in parts or in several processes."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.labels import LabelSets
from idml.model import Model
from idml.training.config import TrainConfig
from idml.training.distributed import Processes
from idml.training.introspection import Introspection

_MAIN = 0.75  # a parent with a larger share of a mixture gives it its only label, if the labels are `main`


def learn(
    batch: Batch,
    model: Model,
    loss: nn.Module,
    config: TrainConfig,
    processes: Processes,
    seed: int,
    introspection: Introspection | None = None,
    numbers: Tensor | None = None,
) -> tuple[float, Embeddings]:
    """The loss of a batch and its embeddings; the gradients are left in the parameters.

    This process embeds its share of the batch, in parts of ``micro_batch`` images if asked for. Those are embedded
    twice: without history for the loss, which sees all of them, then part by part with the gradient that the loss
    gave each embedding (Gao et al., 2021). So the gradients are those of the whole batch.

    ``introspection`` adds its term; ``numbers`` are those of the batch's originals, for what it knows of each image.
    """
    ways: dict[str, Callable[[Tensor], Embeddings]] = {"all": model, "last": model.last_stage, "heads": model.heads}
    embed = ways[config.part]
    share = processes.share(batch.images)
    parts = share.split(config.micro_batch or len(share))

    def embedded(part: int) -> Embeddings:
        torch.manual_seed(seed + part)  # for whatever the trunk itself draws
        with torch.autocast(share.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            return embed(parts[part])

    if len(parts) == 1:
        own = embedded(0)
    else:
        with torch.no_grad():
            own = Embeddings.cat([embedded(part) for part in range(len(parts))])
        own = Embeddings(own.semantic.requires_grad_(), own.uncertainty.requires_grad_())
    whole = processes.gather(own)
    seen = whole if batch.degraded is None else whole[: len(batch.labels)]
    value = _loss_of(loss, seen, batch, config, seed, None if introspection is None else introspection.enters(batch))
    if config.u_penalty:
        value = value + config.u_penalty * seen.uncertainty.square().sum(dim=1).mean()
    if introspection is not None and numbers is not None:
        value = value + introspection.term(whole, batch, numbers)
    if not bool(torch.isfinite(value)):
        raise ValueError(f"the loss is {float(value)}")
    value.backward()
    if len(parts) > 1:
        for part in range(len(parts)):
            _pull(embedded(part), own, part * config.micro_batch)
    processes.sum_gradients(model)
    processes.average_statistics(model)
    return float(value.detach()), seen.detach()


def require_finite_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse gradients that are not numbers; a sum that is one is quicker than a look at each."""
    for grad in (p.grad for p in parameters if p.grad is not None):
        if not bool(torch.isfinite(grad.sum())) and not bool(torch.isfinite(grad).all()):
            raise ValueError("the gradients hold NaN or infinity")


def require_finite(*modules: nn.Module) -> None:
    """Refuse weights and statistics that are not numbers any more: they must not replace a good checkpoint."""
    if not all(bool(torch.isfinite(x).all()) for module in modules for x in module.state_dict().values()):
        raise ValueError("the weights hold NaN or infinity: a smaller learning rate may help")


def _pull(part: Embeddings, whole: Embeddings, start: int) -> None:
    """Send the gradients that ``whole`` got at the rows of ``part`` back through the network."""
    both = ((part.semantic, whole.semantic.grad), (part.uncertainty, whole.uncertainty.grad))
    pulled = [(x, g[start : start + len(part)]) for x, g in both if g is not None]  # the plain metric leaves u alone
    torch.autograd.backward([x for x, _ in pulled], [g for _, g in pulled])


def _loss_of(
    loss: nn.Module, embeddings: Embeddings, batch: Batch, config: TrainConfig, seed: int, enters: Tensor | None
) -> Tensor:
    """The loss with label sets, or with each parent's label, weighted: λ·L(l₁) + (1 − λ)·L(l₂); one λ for the batch."""
    labels = batch.labels
    if enters is not None:
        if not bool(enters.any()):
            return embeddings.semantic.sum() * 0.0
        embeddings, labels = embeddings[enters], labels[enters]
    if config.constant:
        embeddings = Embeddings.certain(embeddings.semantic)
    if config.labels == "sets" or batch.lam is None:
        return _loss(loss, embeddings, labels, seed)
    ids = labels.ids
    first, second = LabelSets(ids[:, 0]), LabelSets(torch.where(ids[:, -1] < 0, ids[:, 0], ids[:, -1]))
    if config.labels == "main":
        main = first if batch.lam > _MAIN else second if batch.lam < 1 - _MAIN else labels
        return _loss(loss, embeddings, main, seed)
    return batch.lam * _loss(loss, embeddings, first, seed) + (1 - batch.lam) * _loss(loss, embeddings, second, seed)


def _loss(loss: nn.Module, embeddings: Embeddings, labels: LabelSets, seed: int) -> Tensor:
    value: Tensor = loss(embeddings, labels, seed=seed)
    return value
