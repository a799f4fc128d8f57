"""The training loop, from top to bottom.

Randomness is a pure function of (seed, epoch, step): which images, their crops, λ, the partners. Nothing of it is
saved; a run killed at any moment and resumed ends with the same weights, bit for bit, on the same machine.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from idml.data.datasets import Dataset, ImageSet, hold_out, load_dataset
from idml.data.images import resized_side
from idml.data.pixel_cache import Pixels, load_pixels
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings
from idml.evaluation import evaluate_retrieval
from idml.files import write_atomic
from idml.model import Model, load_model, save_model
from idml.model.feature_cache import embed_view
from idml.progress import Count, Note, Progress, image_counter, silent
from idml.training.batches import FrozenStream, Stream
from idml.training.build import build, build_optimiser, fold_as_trained, set_learning_rate, set_modes
from idml.training.checkpoint import Position, load_checkpoint, lock_run, save_checkpoint
from idml.training.config import Train, TrainConfig, fitted_to, idle_options
from idml.training.distributed import Processes
from idml.training.introspection import Introspection
from idml.training.noise import with_label_noise
from idml.training.run_log import Log, stop_on_sigterm, uncertainty_figures, uncertainty_warnings, write_report
from idml.training.step import learn, require_finite, require_finite_gradients


class Interrupted(Exception):
    """The run was asked to stop (SIGTERM); a checkpoint has been written."""


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    dataset: Dataset | None = None,
    pages: bool = True,
    report: Progress = silent,
    note: Note = silent,
    tested: Callable[[Embeddings], None] = lambda embeddings: None,
) -> dict[str, Any]:
    """Train a model and leave it in ``config.out``; returns what metrics.json holds.

    ``dataset`` is what ``config.data`` names, if it is at hand; without ``pages`` neither report.html nor curves for
    TensorBoard are made. ``report`` is called with every row of log.jsonl, and with the number of images decoded while
    the cache is built; ``note`` with lines a person should see; ``tested`` with what the selected model makes of the
    test images. Of several processes the first one writes and reports; the others return nothing.
    """
    run, processes = Path(config.out), Processes()
    device = processes.device
    if config.precision != "float32" and device.type == "cpu":
        raise ValueError(f"precision {config.precision} needs a GPU: on a CPU it is slower than float32, or crashes")
    processes.require_shares(config.batch_size, config.mixed_images)
    if not processes.first:
        report, note = lambda row: None, lambda text: None
    with contextlib.ExitStack() as stack:
        if processes.first:
            stack.enter_context(lock_run(run))
        asked_to_stop = stack.enter_context(stop_on_sigterm())
        last = run / "checkpoints" / "last.safetensors"
        if last.exists() and not resume:
            raise ValueError(f"{str(run)!r} already holds a run; go on with --resume, or choose another directory")

        # data: the training classes, a part of them held out for choosing the best epoch
        counted = partial(image_counter, report)

        if dataset is None:
            dataset = load_dataset(config.data, split=config.split, strict=config.strict_data)
        for line in (*dataset.notes, *idle_options(config)):
            note(line)
        seen, held_out = hold_out(dataset.train, config.holdout)
        asked, config = config.batch_size, fitted_to(seen.labels, config)
        if config.batch_size != asked:
            note(f"{len(seen.classes)} classes to train on: batches of {config.batch_size} images instead of {asked}")
            processes.require_shares(config.batch_size, config.mixed_images)
        torch.manual_seed(config.seed)
        model, loss = build(config, len(seen.classes))
        model.to(device)
        loss.to(device)
        side = resized_side(model.trunk.image_size)

        def pixels_of(images: ImageSet) -> Pixels:
            pixels = load_pixels(images, side, progress=counted("decoded"))
            for reason in pixels.broken.values():
                note(f"{images.name}: left out: {reason}")
            if pixels.broken:
                note(f"{images.name}: {len(pixels.broken)} of {len(images)} images left out")
            return pixels

        judge = Judge(config.part, counted("seen by the trunk"))
        test = pixels_of(dataset.test)  # now: a data set that cannot be tested on should not be trained on for hours
        gallery = None if dataset.gallery is None else pixels_of(dataset.gallery)
        judge.require_pairs(test, gallery)
        validation = None if held_out is None else pixels_of(held_out)
        if validation is not None and not judge.has_pairs(validation):
            note(f"the {len(validation.images)} held-out images are alone in their classes: the last epoch is taken")
            validation = None
        learned = dataclasses.replace(pixels_of(seen), images=with_label_noise(seen, config))
        images = Stream(learned, config, model.trunk.image_size, device)
        stream = images if config.part == "all" else FrozenStream(images, model, counted("seen by the trunk"))

        # where it starts: at the pretrained weights, or at the last checkpoint
        optimizer = build_optimiser(model, loss, config)
        fingerprint = dataset.train.fingerprint
        introspection = None
        if config.introspection != "none":
            introspection = Introspection(config, learned.images.labels).to(device)
        progress = Position()
        if resume and last.exists():
            progress = load_checkpoint(last, model, loss, optimizer, config, fingerprint, introspection)
        elif config.pca and config.starts_from_weights:
            start_at_principal_components(model, stream.features(model))
        processes.start_alike(model, loss)
        log = None
        if processes.first:
            options = yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)
            write_atomic(run / "config.yaml", options.encode())
            log = Log(run, progress.step, board=pages)
            stack.callback(log.close)

        def checkpoint() -> None:
            if processes.first:
                save_checkpoint(last, model, loss, optimizer, progress, config, fingerprint, introspection)

        @contextlib.contextmanager
        def naming(step: int, numbers: Tensor) -> Iterator[None]:
            try:
                yield
            except ValueError as error:
                names = ", ".join(seen.sources[i].name for i in numbers[:4].tolist())
                whole = f"step {step}: {error}; images: {names}, … ({len(numbers)}); the last checkpoint stays"
                raise ValueError(whole) from None

        # the loop
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        step, epochs = 0, config.epochs
        for epoch in range(epochs):
            steps = len(stream.plan(epoch))
            if step + steps <= progress.step:  # done before the interruption, its validation included
                step += steps
                continue
            skipped = max(0, progress.step - step)
            if introspection is not None:
                introspection.epoch = epoch
                if introspection.signal == "error" and not skipped:  # else the checkpoint knows
                    introspection.look(judge.embeddings(model, learned), learned)
                    processes.start_alike(introspection)
            set_modes(model, config, epoch)
            rows: list[dict[str, Any]] = []
            started = time.perf_counter()
            for numbers, batch in stream.batches(epoch, step, skip=skipped):
                now = step + skipped + len(rows)
                set_learning_rate(optimizer, config, epoch, steps, now)
                optimizer.zero_grad(set_to_none=True)
                seed = random_stream("step", config.seed, epoch, now).initial_seed()
                with naming(now, numbers):
                    value, embeddings = learn(batch, model, loss, config, processes, seed, introspection, numbers)
                    require_finite_gradients(parameters)
                nn.utils.clip_grad_value_(parameters, config.clip)
                optimizer.step()
                progress = dataclasses.replace(progress, step=now + 1)
                row = {"step": now + 1, "epoch": epoch, "loss": value, "lr": optimizer.param_groups[0]["lr"]}
                row |= uncertainty_figures(embeddings, batch.mixed, config)
                row["images/s"] = len(batch.images) / (time.perf_counter() - started)
                started = time.perf_counter()
                rows.append(row)
                if log is not None:
                    log.write(row)
                report({**row, "steps": step + (epochs - epoch) * steps})
                if skipped + len(rows) == steps:  # the checkpoint of an epoch comes after its validation
                    break
                stopping = processes.any(asked_to_stop())
                if stopping or (now + 1) % config.checkpoint_every == 0:
                    with naming(now, numbers):
                        require_finite(model, loss)
                    checkpoint()
                if stopping:
                    raise Interrupted(f"stopped after step {now + 1}; go on with --resume")
            step += steps

            # once an epoch: held-out classes, the best model, a checkpoint
            for warning in uncertainty_warnings(rows, config):
                note(f"epoch {epoch}: {warning}")
            if log is not None:
                with naming(now, numbers):
                    require_finite(model, loss)
                    score = {} if validation is None else judge.figures(model, validation)
                current = score.get("map@r", float(epoch))  # with nothing held out the last epoch is taken
                if current > progress.best_score:
                    progress = dataclasses.replace(progress, best_step=step, best_score=current)
                    save_model(model, run / "checkpoints" / "best")
                if score:
                    figures = {"step": step, "epoch": epoch, **{f"held_out_{k}": v for k, v in score.items()}}
                    log.write(figures)
                    report(figures)
            checkpoint()
            if processes.any(asked_to_stop()) and epoch < epochs - 1:
                raise Interrupted(f"stopped after step {step}; go on with --resume")
        if not processes.first:
            return {}

        # the end: the last and the selected model, judged on the test classes
        save_model(model, run / "checkpoints" / "last")
        best = fold_as_trained(load_model(run / "checkpoints" / "best"), config).to(device)
        with naming(step - 1, stream.plan(epochs - 1)[-1]):
            embeddings = judge.embeddings(best, test)
            tested(embeddings)
            selected = judge.figures(best, test, gallery, embeddings)
            same = progress.best_step == step
            metrics: dict[str, Any] = {
                "steps": step,
                "selected_step": progress.best_step,
                "selected_score": progress.best_score,
                "selected": selected,
                "last": selected if same else judge.figures(model, test, gallery),
            }
        save_model(best, run)
        if pages:
            write_report(run, config, metrics, test, embeddings.level)
        write_atomic(run / "metrics.json", (json.dumps(metrics, indent=2) + "\n").encode())
        return metrics


def _plain(config: TrainConfig) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


# -------------------- judge --------------------
# How good a model is between and after epochs: retrieval by the plain metric on s.


class Judge:
    """Embeds sets of images as a test sees them and takes their figures; what does not learn sees each set once."""

    def __init__(self, part: Train, progress: Count) -> None:
        self.part, self.progress = part, progress

    def embeddings(self, model: Model, pixels: Pixels) -> Embeddings:
        """The embeddings of the usable images."""
        keep, last = self.part != "all", self.part == "last"
        return embed_view(model, pixels, keep=keep, last=last, progress=self.progress)

    def has_pairs(self, pixels: Pixels, gallery: Pixels | None = None) -> bool:
        """Whether any image has another of its class to find."""
        labels = pixels.images.labels[pixels.usable]
        if gallery is not None:
            return bool(torch.isin(labels, gallery.images.labels[gallery.usable]).any())
        return bool((labels.bincount() > 1).any())

    def require_pairs(self, pixels: Pixels, gallery: Pixels | None) -> None:
        """Refuse images that cannot be judged by."""
        if not self.has_pairs(pixels, gallery):
            count = len(pixels.usable)
            raise ValueError(f"{pixels.images.name}: none of the {count} images has another image of its class to find")

    def figures(
        self, model: Model, pixels: Pixels, gallery: Pixels | None = None, embeddings: Embeddings | None = None
    ) -> dict[str, float]:
        """Recall@1, R-Precision and MAP@R, among the images themselves or in a gallery; ``embeddings`` if known."""
        figures = evaluate_retrieval(
            self.embeddings(model, pixels) if embeddings is None else embeddings,
            pixels.images.labels[pixels.usable],
            gallery=None if gallery is None else self.embeddings(model, gallery),
            gallery_labels=None if gallery is None else gallery.images.labels[gallery.usable],
            recall_at=(1,),
        )
        return {key: float(figures[key] or 0.0) for key in ("recall@1", "r_precision", "map@r")}


# -------------------- start --------------------
# Where the semantic head starts: at the principal components of the trunk's features.
#
# A random head throws away most of what a pretrained trunk knows before it has learned anything; this one begins at the
# trunk's own quality.


@torch.no_grad()
def start_at_principal_components(model: Model, features: Tensor) -> None:
    """s = W(f − f̄), the rows of W the directions in which the features [n, width] vary most.

    With more dimensions than the features have, the rest of s starts at 0.
    """
    x = features.cpu().double()
    mean = x.mean(dim=0)
    x = x - mean
    rows = _directions(x)[: model.config.embedding_dim]
    largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
    rows = rows * largest.sign()  # a direction has no sign of its own
    weight, bias = model.semantic.weight, model.semantic.bias
    weight.zero_()
    bias.zero_()
    weight[: len(rows)] = rows.to(weight)
    bias[: len(rows)] = -(rows @ mean).to(bias)


def _directions(x: Tensor) -> Tensor:
    """Orthonormal rows, those along which ``x`` varies most first."""
    rows: Tensor
    try:
        rows = torch.linalg.eigh(x.T @ x)[1].T.flip(0)  # eigenvalues ascend
    except RuntimeError:  # not found, on some CPUs, where a few images span less than the features' width
        rows = torch.linalg.svd(x)[2]
    return rows
