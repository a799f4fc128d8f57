"""Several processes, each with its share of every batch. The loss sees the whole batch, as one process would.

Each process embeds its share, the embeddings are gathered with their gradient, every process computes the same loss
of the whole batch, and the trunk's and heads' gradients are summed. What belongs to the method (such as proxies) gets
the same gradient everywhere, so it needs no exchange.
"""

import atexit
import os
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn

from idml.embeddings import Embeddings


class Processes:
    """The processes of this run (one, unless `accelerate launch` or `torchrun` started more) and their device."""

    def __init__(self) -> None:
        from accelerate import PartialState

        state = PartialState(cpu=not torch.accelerator.is_available())
        self.count, self.rank, self.device = state.num_processes, state.process_index, state.device
        self.first = self.rank == 0
        """Whether this process writes files and reports."""
        if self.count > 1:
            atexit.unregister(_leave)  # so that it is there once
            atexit.register(_leave)

    def check_shares(self, batch_size: int, added: int) -> None:
        """Raise ``ValueError`` for a batch that cannot be shared equally."""
        for name, count in (
            ("batch_size", batch_size),
            ("the number of images added to a batch,", added),
        ):
            if count % self.count:
                raise ValueError(f"{name} {count} is not a multiple of the {self.count} processes")

    def share(self, rows: Tensor) -> Tensor:
        """Every count-th row, so that all shares hold original and added images."""
        return rows[self.rank :: self.count]

    def gather(self, share: Embeddings) -> Embeddings:
        """The embeddings of the whole batch, in its order; gradients go back to each process's own share."""
        if self.count == 1:
            return share
        parts = (_Gather.apply(x, self.rank, self.count) for x in (share.semantic, share.uncertainty))
        return Embeddings(*parts)

    @torch.no_grad()
    def sum_gradients(self, module: nn.Module) -> None:
        """Add up the gradients of all processes, in one exchange."""
        if self.count == 1:
            return
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        distributed.all_reduce(flat)
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))

    @torch.no_grad()
    def average_statistics(self, module: nn.Module) -> None:
        """Give every process the mean of the running statistics of batch normalisation, where it learns them."""
        if self.count == 1:
            return
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
                for statistics in (part.running_mean, part.running_var):
                    if statistics is not None:
                        distributed.all_reduce(statistics)
                        statistics /= self.count

    def broadcast(self, *modules: nn.Module) -> None:
        """Give every process the first one's parameters and buffers."""
        if self.count > 1:
            for module in modules:
                for tensor in module.state_dict().values():
                    distributed.broadcast(tensor, 0)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process: all of them get the same answer."""
        if self.count == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.device)
        distributed.all_reduce(flags)
        return bool(flags > 0)


def _leave() -> None:
    """End the process group in order: a process that exits without this can be aborted by its own threads."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def end_process(status: int) -> NoReturn:
    """End a process of several at once: threads that torch leaves behind sometimes abort an ordinary exit."""
    _leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Gather(torch.autograd.Function):
    """The rows of all processes, interleaved as `Processes.share` took them apart.

    Every process computes the same loss from them, so each already holds the gradient of its own rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, rank: int, count: int) -> Tensor:
        ctx.rank, ctx.count = rank, count
        parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(count)]
        distributed.all_gather(parts, rows.contiguous())
        return torch.stack(parts, dim=1).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.rank :: ctx.count], None, None
