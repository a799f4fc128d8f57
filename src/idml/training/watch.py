"""What a run watches: its uncertainty, its log, and whether it is asked to stop."""

import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.embeddings import Embeddings
from idml.files import write_whole
from idml.metric import IntrospectiveMetric
from idml.training.config import TrainConfig


@torch.no_grad()
def uncertainty_figures(embeddings: Embeddings, mixed: Tensor, config: TrainConfig) -> dict[str, float]:
    """‖u‖ of clean and mixed images, its spread among the clean ones, and the mean weight e^(−x) of clean pairs."""
    clean = embeddings[~mixed].detach()
    row = {"level_clean": float(clean.level.mean())}
    if bool(mixed.any()):
        row["level_mixed"] = float(embeddings[mixed].level.mean())
    row["level_spread"] = float(clean.level.std() / clean.level.mean().clamp_min(1e-12)) if len(clean) > 1 else 0.0
    if config.introspective and len(clean) > 1:
        weights = IntrospectiveMetric(config.tau, config.gamma, beta=config.beta).weights(clean)
        row["weight"] = float((weights.sum() - weights.diagonal().sum()) / (len(clean) * (len(clean) - 1)))
    return row


def uncertainty_warnings(rows: list[dict[str, Any]], config: TrainConfig) -> list[str]:
    """The two ways in which an uncertainty says nothing."""
    if not (config.introspective and rows) or config.constant:
        return []
    tail = rows[-max(1, len(rows) // 4) :]
    level, spread, weight = (sum(r[key] for r in tail) / len(tail) for key in ("level_clean", "level_spread", "weight"))
    if level < 1e-3:
        return [f"the uncertainty has collapsed: mean ‖u‖ {level:.1e}, the metric is the plain one"]
    if weight < 0.8 and spread < 0.1:
        return [f"the uncertainty is inflated: ‖u‖ {level:.2f} for every image alike, mean weight {weight:.2f}"]
    return []


class Log:
    """The rows of a run: log.jsonl, one JSON object a line, and with ``board`` the same figures for TensorBoard.

    Rows after ``step`` (the checkpoint a run goes on from) will be made again, so they go.
    """

    def __init__(self, run: Path, step: int, *, board: bool = True) -> None:
        path = run / "log.jsonl"
        if path.exists():
            rows = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
            write_whole(path, "".join(f"{line}\n" for line in rows).encode())
        self.file = path.open("a")
        self.board = None
        if board:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Add a row; it is in the file when this returns."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        for name, value in row.items():
            if self.board is not None and name not in ("step", "epoch"):
                self.board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Write out what is left."""
        self.file.close()
        if self.board is not None:
            self.board.close()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a torn line


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM has arrived since; the old handler comes back at the end, and gets what nobody heeded."""
    arrived: list[int] = []
    unheeded = False
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    except ValueError:  # not the main thread: signals are somebody else's
        yield lambda: False
        return
    try:
        yield lambda: bool(arrived)
        unheeded = bool(arrived)  # it came during the last test, say: the next run of a table must not begin
    finally:
        signal.signal(signal.SIGTERM, before)
    if unheeded:
        signal.raise_signal(signal.SIGTERM)
