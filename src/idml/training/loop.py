"""The training loop, from top to bottom.

Randomness is a pure function of (seed, epoch, step): which images, their crops, λ, the partners. Nothing of it is
saved; a run killed at any moment and resumed ends with the same weights, bit for bit, on the same machine.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from idml.data.ambiguity import apply_ambiguity, centre_crop, crop_and_flip
from idml.data.catalogue import load_dataset
from idml.data.pixels import Pixels, load_pixels
from idml.data.sampling import class_batches, random_batches, random_stream
from idml.data.sources import ImageSet
from idml.embeddings import Embeddings
from idml.evaluation import evaluate_retrieval
from idml.files import write_whole
from idml.losses import MetricLoss, build_loss
from idml.metric import IntrospectiveMetric
from idml.model import Model, build_model, load_model, save_model
from idml.probabilistic import ProbabilisticLoss
from idml.training.checkpoint import Progress, load_checkpoint, lock_run, save_checkpoint
from idml.training.config import TrainConfig
from idml.training.report import write_report
from idml.training.start import start_at_principal_components
from idml.training.watch import open_log, stop_on_sigterm, uncertainty_figures, uncertainty_warnings

Report = Callable[[dict[str, Any]], None]
Note = Callable[[str], None]


class Interrupted(Exception):
    """The run was asked to stop (SIGTERM); a checkpoint has been written."""


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    report: Report = lambda row: None,
    note: Note = lambda text: None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train a model and leave it in ``config.out``; returns what metrics.json holds.

    ``report`` is called with every row of log.jsonl, and with the number of images decoded while the cache is built;
    ``note`` with lines a person should see.
    """
    run = Path(config.out)
    with lock_run(run), stop_on_sigterm() as asked_to_stop:
        last = run / "checkpoints" / "last.safetensors"
        if last.exists() and not resume:
            raise ValueError(f"{str(run)!r} already holds a run; go on with --resume, or choose another directory")

        # data: the training classes, a part of them held out for choosing the best epoch
        dataset = load_dataset(config.data, split=config.split, strict=config.strict_data)
        for line in dataset.notes:
            note(line)
        learn, held_out = _hold_out(dataset.train, config)
        torch.manual_seed(config.seed)
        model, loss = _build(config, len(learn.classes))
        model.to(device)
        loss.to(device)
        size = model.trunk.image_size
        side = round(size * 256 / 224)

        def decoded(done: int, total: int) -> None:
            report({"decoded": done, "images": total})

        parts = {"train": learn, "held out": held_out}
        pixels = {name: load_pixels(s, side, progress=decoded) for name, s in parts.items() if s is not None}
        for name, p in pixels.items():
            for reason in p.broken.values():
                note(f"{name}: left out: {reason}")
        usable = pixels["train"].usable
        labels = learn.labels[usable]

        # optimiser
        optimizer = torch.optim.AdamW(_groups(model, loss, config), lr=config.lr, weight_decay=config.weight_decay)
        fingerprint = dataset.train.fingerprint
        progress = Progress()
        if config.pca and config.starts_from_weights:
            start_at_principal_components(model, _features(model, pixels["train"]))
        if resume and last.exists():
            progress = load_checkpoint(last, model, loss, optimizer, config, fingerprint)
        write_whole(run / "config.yaml", yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True).encode())
        log = open_log(run / "log.jsonl", progress.step)

        def checkpoint() -> None:
            save_checkpoint(last, model, loss, optimizer, progress, config, fingerprint)

        # the loop
        step, epochs = 0, config.epochs
        for epoch in range(epochs):
            batches = _batches(labels, config, epoch)
            if step + len(batches) <= progress.step:  # done before the interruption, its validation included
                step += len(batches)
                continue
            skipped = max(0, progress.step - step)
            step += skipped
            _set_modes(model, config, epoch)
            rows = []
            for numbers, images in _load(pixels["train"], usable, batches[skipped:], config.workers):
                started = time.perf_counter()
                _set_learning_rate(optimizer, config, epoch, len(batches), step)
                torch.manual_seed(_step_seed(config.seed, epoch, step))  # for whatever the trunk itself draws
                cropped = crop_and_flip(images.to(device), size, random_stream("crop", config.seed, epoch, step))
                batch = apply_ambiguity(
                    cropped, learn.labels[numbers].to(device), config.kinds, seed=config.seed, epoch=epoch, step=step
                )
                embeddings = model(batch.images)
                value = _loss_or_explain(loss, embeddings, batch.labels, step, learn, numbers)
                optimizer.zero_grad(set_to_none=True)
                value.backward()
                nn.utils.clip_grad_value_([*model.parameters(), *loss.parameters()], config.clip)
                optimizer.step()
                step += 1
                progress = dataclasses.replace(progress, step=step)
                row = {
                    "step": step,
                    "epoch": epoch,
                    "loss": float(value.detach()),
                    "lr": optimizer.param_groups[0]["lr"],
                }
                row |= uncertainty_figures(embeddings, batch.mixed, config)
                row["images/s"] = len(batch.images) / (time.perf_counter() - started)
                rows.append(row)
                log.write(json.dumps(row) + "\n")
                log.flush()
                report({**row, "steps": (epoch + 1) * len(batches) + (epochs - epoch - 1) * len(batches)})
                if asked_to_stop():
                    checkpoint()
                    raise Interrupted(f"stopped after step {step}; go on with --resume")
                if step % config.checkpoint_every == 0 and len(rows) + skipped < len(batches):
                    checkpoint()

            # once an epoch: held-out classes, the best model, a checkpoint
            score = _validate(model, pixels.get("held out"))
            for warning in uncertainty_warnings(rows, config):
                note(f"epoch {epoch}: {warning}")
            current = score.get("map@r", float(epoch))  # with nothing held out the last epoch is taken
            if current > progress.best_score:
                progress = dataclasses.replace(progress, best_step=step, best_score=current)
                save_model(model, run / "checkpoints" / "best")
            if score:
                figures = {"step": step, "epoch": epoch, **{f"held_out_{k}": v for k, v in score.items()}}
                log.write(json.dumps(figures) + "\n")
                log.flush()
                report(figures)
            checkpoint()

        # the end: the last and the selected model, judged on the test classes
        save_model(model, run / "checkpoints" / "last")
        best = load_model(run / "checkpoints" / "best").to(device)
        save_model(best, run)
        metrics: dict[str, Any] = {
            "steps": step,
            "selected_step": progress.best_step,
            "selected_score": progress.best_score,
        }
        test = load_pixels(dataset.test, side, progress=decoded)
        embeddings = _embed(best, test)
        metrics["selected"] = _figures(embeddings, test)
        metrics["last"] = _validate(model, test)
        write_report(run, config, metrics, test, embeddings.level)
        write_whole(run / "metrics.json", (json.dumps(metrics, indent=2) + "\n").encode())
        log.close()
        return metrics


def _build(config: TrainConfig, classes: int) -> tuple[Model, MetricLoss | ProbabilisticLoss]:
    metric = IntrospectiveMetric(config.tau, config.gamma, "similar" if config.introspective else "off")
    loss = build_loss(config.loss, metric=metric, num_classes=classes, embedding_dim=config.embedding_dim)
    model = build_model(
        config.trunk,
        pretrained=config.pretrained,
        embedding_dim=config.embedding_dim,
        uncertainty="gaussian" if config.probabilistic else "introspective",
        bound=config.bound,
        detach=config.detach,
        image_size=config.image_size,
    )
    return model, ProbabilisticLoss(loss) if config.probabilistic else loss


def _hold_out(images: ImageSet, config: TrainConfig) -> tuple[ImageSet, ImageSet | None]:
    """The classes to learn from and, every 1/holdout-th class, those kept for validation."""
    count = len(images.classes)
    kept = round(count * config.holdout)
    if kept < 2 or count - kept < 2:
        return images, None
    chosen = {round((i + 0.5) * count / kept - 0.5) for i in range(kept)}
    return images.of_classes([c for c in range(count) if c not in chosen]), images.of_classes(sorted(chosen))


def _groups(model: Model, loss: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    heads = [*model.semantic.parameters(), *model.uncertainty.parameters()]
    groups = [
        {"params": list(model.trunk.parameters()), "factor": 1.0},
        {"params": heads, "factor": 1.0},
        {"params": list(loss.parameters()), "factor": config.proxy_lr},
    ]
    return [group for group in groups if group["params"]]


def _set_learning_rate(
    optimizer: torch.optim.Optimizer, config: TrainConfig, epoch: int, steps: int, step: int
) -> None:
    """The learning rate is a function of the step alone."""
    if config.schedule == "step":
        share = config.step_factor ** (epoch // config.step_epochs)
    elif config.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * step / (steps * config.epochs)))
    else:
        share = 1.0
    for group in optimizer.param_groups:
        group["lr"] = config.lr * group["factor"] * share


def _set_modes(model: Model, config: TrainConfig, epoch: int) -> None:
    model.train()
    for parameter in model.trunk.parameters():
        parameter.requires_grad_(epoch >= config.warmup_epochs)
    if config.freeze_bn and config.starts_from_weights:
        for module in model.trunk.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def _batches(labels: Tensor, config: TrainConfig, epoch: int) -> list[Tensor]:
    if config.per_class:
        return class_batches(labels, config.batch_size, config.per_class, seed=config.seed, epoch=epoch)
    return random_batches(labels, config.batch_size, seed=config.seed, epoch=epoch)


class _Rows(Dataset[tuple[Tensor, Tensor]]):
    """Batches by number, so that worker processes can prepare them."""

    def __init__(self, pixels: Pixels, numbers: list[Tensor]) -> None:
        self.pixels, self.numbers = pixels, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = self.numbers[index]
        return numbers, self.pixels.batch(numbers)


def _load(pixels: Pixels, usable: Tensor, batches: list[Tensor], workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    rows = _Rows(pixels, [usable[batch] for batch in batches])
    yield from DataLoader(rows, batch_size=None, shuffle=False, num_workers=workers)


def _loss_or_explain(
    loss: nn.Module, embeddings: Embeddings, labels: Any, step: int, images: ImageSet, numbers: Tensor
) -> Tensor:
    """The loss; if it is not a number, a ``ValueError`` that names the step and the images."""
    names = ", ".join(images.sources[i].name for i in numbers[:4].tolist())
    try:
        value: Tensor = loss(embeddings, labels, seed=step)
    except ValueError as error:
        raise ValueError(
            f"step {step}: {error}; images: {names}, … ({len(numbers)}); the last checkpoint stays"
        ) from None
    if not bool(torch.isfinite(value)):
        raise ValueError(
            f"step {step}: the loss is {float(value)}; images: {names}, … ({len(numbers)}); the last checkpoint stays"
        )
    return value


def _validate(model: Model, pixels: Pixels | None) -> dict[str, float]:
    """Retrieval among images of classes not trained on, by the plain metric on s; nothing without images."""
    return {} if pixels is None else _figures(_embed(model, pixels), pixels)


def _embed(model: Model, pixels: Pixels) -> Embeddings:
    size = model.trunk.image_size
    return Embeddings.cat([model.embed(centre_crop(pixels.batch(n), size)) for n in pixels.usable.split(256)])


@torch.no_grad()
def _features(model: Model, pixels: Pixels, most: int = 4096) -> Tensor:
    """The trunk's features of the images, or of ``most`` of them spread evenly, seen as in a test."""
    model.eval()
    numbers = pixels.usable[torch.linspace(0, len(pixels.usable) - 1, min(most, len(pixels.usable))).long()]
    size, device = model.trunk.image_size, model.semantic.weight.device
    return torch.cat([model.features(centre_crop(pixels.batch(n).to(device), size)) for n in numbers.split(128)])


def _figures(embeddings: Embeddings, pixels: Pixels) -> dict[str, float]:
    figures = evaluate_retrieval(embeddings, pixels.images.labels[pixels.usable], recall_at=(1,))
    return {key: float(figures[key] or 0.0) for key in ("recall@1", "r_precision", "map@r")}


def _step_seed(seed: int, epoch: int, step: int) -> int:
    return random_stream("step", seed, epoch, step).initial_seed()


def _plain(config: TrainConfig) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}
