"""The training loop, from top to bottom: setup, data, model, resume, epochs, judging, finish.

Randomness is a pure function of (seed, epoch, step): which images, their crops, λ, the partners. None of it is saved.
A run that is killed at any moment and resumed ends with the same weights, bit for bit, on the same machine.
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

from idml.compat import cpu_computes_bfloat16
from idml.data.datasets import Dataset, ImageSet, check_spec, hold_out, load_dataset
from idml.data.images import resized_side
from idml.data.pixel_cache import Pixels, load_pixels
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings
from idml.evaluation import evaluate_retrieval
from idml.files import write_atomic
from idml.model import Model, load_model, save_model
from idml.model.backbones import check_trunk
from idml.model.feature_cache import embed_view
from idml.model.model import LEARNED
from idml.model.weight_sources import find_source, write_source
from idml.progress import Count, Note, Progress, image_counter, silent
from idml.records import Record, format_figures
from idml.training.batches import FrozenImages, FrozenStream, Stream, explain_killed_workers
from idml.training.build import (
    build,
    build_optimiser,
    fold_as_trained,
    set_learning_rate,
    set_modes,
    start_at_principal_components,
)
from idml.training.checkpoint import Position, check_free, load_checkpoint, lock_run, save_checkpoint
from idml.training.config import Train, TrainConfig, fit_batch_size, to_dict
from idml.training.distributed import Processes
from idml.training.run_log import Log, measure_uncertainty, stop_on_sigterm, write_report
from idml.training.step import check_gradients, check_weights, compute_gradients


class TrainResult(Record):
    """Figures of a run on the test classes: of the ``selected`` model, which is kept, and of the ``last`` one."""

    @property
    def selected(self) -> dict[str, float]:
        """Figures of the model that the held-out classes chose."""
        return dict(self["selected"])

    @property
    def last(self) -> dict[str, float]:
        """Figures of the model of the last epoch."""
        return dict(self["last"])

    @property
    def steps(self) -> int:
        """How many steps were trained."""
        return int(self["steps"])

    def lines(self) -> list[str]:
        """Return the figures of both models."""
        return [format_figures(name, self[name]) for name in ("selected", "last") if name in self]


class Interrupted(Exception):
    """The run was asked to stop (SIGTERM); a checkpoint has been written."""


@explain_killed_workers()
def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    dataset: Dataset | None = None,
    pages: bool = True,
    report: Progress = silent,
    note: Note = silent,
    tested: Callable[[Embeddings], None] = lambda embeddings: None,
    after_epoch: Callable[[int, Model], None] = lambda epoch, model: None,
) -> "TrainResult":
    """Train a model and leave it in ``config.out``; returns what metrics.json holds.

    Args:
        config: the options of the run.
        resume: continue from the last checkpoint, if there is one.
        dataset: the data set that ``config.data`` names, if it is already loaded.
        pages: whether to write report.html and curves for TensorBoard.
        report: called with every row of log.jsonl, and with the number of images decoded while the cache is built.
        note: called with lines that a person should see.
        tested: called with the embeddings of the test images by the selected model.
        after_epoch: called by the first process with the number of epochs done and the model, before their checkpoint.

    Of several processes the first one writes and reports; the others return an empty result.
    """
    # ---- setup: processes, the run directory, signals ----
    run, processes = Path(config.out), Processes()
    device = processes.device
    if config.precision == "bfloat16" and device.type == "cpu" and not cpu_computes_bfloat16():
        raise ValueError("precision bfloat16: this CPU cannot compute in it; use float32")
    processes.check_shares(config.batch_size, config.added_images)
    if not processes.first:
        report, note = silent, silent
    check_trunk(config.trunk)  # before a run directory is made
    if dataset is None:
        check_spec(config.data)
    with contextlib.ExitStack() as stack:
        if processes.first:
            stack.enter_context(lock_run(run))
        asked_to_stop = stack.enter_context(stop_on_sigterm())
        last = run / "checkpoints" / "last.safetensors"
        check_free(run, resume=resume)

        count_images = partial(image_counter, report)

        # ---- data: the training classes, some of them held out for choosing the best epoch; the test classes ----
        if dataset is None:
            dataset = load_dataset(config.data, split=config.split, strict=config.strict_data)
        for line in dataset.notes:
            note(line)
        seen, held_out = hold_out(dataset.train, config.holdout)
        asked, config = config.batch_size, fit_batch_size(config, seen.labels)
        if config.batch_size != asked:
            note(f"{len(seen.classes)} classes to train on: batches of {config.batch_size} images instead of {asked}")
            processes.check_shares(config.batch_size, config.added_images)

        if (warm_up := config.warm_up_note) is not None:
            note(warm_up)

        # ---- model and method; the model says how large the images are ----
        torch.manual_seed(config.seed)
        model, method = build(config, seen.labels, len(seen.classes))
        model.to(device)
        method.to(device)
        side = resized_side(model.trunk.image_size)

        def load_images(images: ImageSet) -> Pixels:
            pixels = load_pixels(images, side, progress=count_images("decoded"))
            for reason in pixels.broken.values():
                note(f"{images.name}: left out: {reason}")
            if pixels.broken:
                note(f"{images.name}: {len(pixels.broken)} of {len(images)} images left out")
            return pixels

        judged = [part for part in (dataset.test, dataset.gallery, held_out) if part is not None]
        ahead = config.crops * len(seen) + sum(map(len, judged)) if config.train == "heads" else 0
        judge = Judge(config.train, count_images("seen by the trunk"), ahead)
        test = load_images(dataset.test)  # now: a data set that cannot be tested on is refused before hours of training
        gallery = None if dataset.gallery is None else load_images(dataset.gallery)
        judge.check_pairs(test, gallery)
        validation = None if held_out is None else load_images(held_out)
        if validation is not None and not judge.has_pairs(validation):
            note(f"the {len(validation.images)} held-out images are alone in their classes: the last epoch is taken")
            validation = None
        learned = load_images(seen)
        images = Stream(learned, config, method, model.trunk.image_size, device)
        stream: Stream | FrozenStream | FrozenImages = images
        if config.train != "all":
            frozen = FrozenImages if method.plans_batches else FrozenStream
            stream = frozen(images, model, count_images("seen by the trunk"))

        # ---- resume: start at the pretrained weights, or at the last checkpoint ----
        optimizer = build_optimiser(model, method, config)
        fingerprint, progress = dataset.train.fingerprint, Position()
        digest = "-".join(part.digest for part in (learned, validation) if part is not None)
        if resume and last.exists():
            progress = load_checkpoint(last, model, method, optimizer, config, fingerprint, digest)
        elif config.pca and config.starts_from_weights:
            turned = config.seed if method.rotated_start else None
            start_at_principal_components(model, stream.features(model), rotation_seed=turned)
        processes.broadcast(model, method)
        log = None
        if processes.first:
            options = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
            write_atomic(run / "config.yaml", options.encode())
            log = Log(run, progress.step, board=pages)
            stack.callback(log.close)

        def checkpoint() -> None:
            if processes.first:
                save_checkpoint(last, model, method, optimizer, progress, config, fingerprint, digest)

        def embed_training_images() -> tuple[Tensor, Embeddings]:
            return learned.usable, judge.embed(model, learned, outputs=True)

        method.embed = embed_training_images

        @contextlib.contextmanager
        def name_images(step: int, numbers: Tensor) -> Iterator[None]:
            """Add the step and its images to the message of an error."""
            try:
                yield
            except ValueError as error:
                names = ", ".join(seen.sources[i].name for i in numbers[:4].tolist())
                whole = f"step {step}: {error}; images: {names}, … ({len(numbers)}); the last checkpoint stays"
                raise ValueError(whole) from None

        # ---- epochs ----
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        epochs = config.epochs
        for epoch in range(progress.epoch, epochs):
            first, skipped = progress.epoch_start, progress.step - progress.epoch_start
            if not skipped:  # else its start is in the checkpoint
                method.start_epoch(epoch, embed_training_images)
                processes.broadcast(method)
            steps = len(stream.plan(epoch))
            set_modes(model, config, epoch)
            method.train()
            rows: list[dict[str, Any]] = []
            started = time.perf_counter()
            for numbers, batch in stream.batches(epoch, first, skip=skipped):
                now = first + skipped + len(rows)
                set_learning_rate(optimizer, config, epoch, (now - first) / steps)
                optimizer.zero_grad(set_to_none=True)
                seed = random_stream("step", config.seed, epoch, now).initial_seed()
                with name_images(now, numbers):
                    terms, embeddings = compute_gradients(batch, numbers, model, method, config, processes, seed)
                    check_gradients(parameters)
                nn.utils.clip_grad_value_(parameters, config.clip)
                optimizer.step()
                progress = dataclasses.replace(progress, step=now + 1)
                row = {"step": now + 1, "epoch": epoch, "loss": sum(terms.values())}
                row |= {f"loss_{name}": term for name, term in terms.items()} if len(terms) > 1 else {}
                row["lr"] = optimizer.param_groups[0]["lr"]
                row |= measure_uncertainty(embeddings, batch.mixed) | method.measure(embeddings, batch)
                row["images/s"] = len(batch.images) / (time.perf_counter() - started)
                started = time.perf_counter()
                rows.append(row)
                if log is not None:
                    log.write(row)
                report({**row, "steps": first + (epochs - epoch) * steps})
                if skipped + len(rows) == steps:  # the checkpoint of an epoch comes after its validation
                    break
                stopping = processes.any(asked_to_stop())
                if stopping or (now + 1) % config.checkpoint_every == 0:
                    with name_images(now, numbers):
                        check_weights(model, method)
                    checkpoint()
                if stopping:
                    raise Interrupted(f"stopped after step {now + 1}; continue with --resume")

            # ---- judging, once an epoch: held-out classes, the best model, a checkpoint ----
            for warning in method.warn(rows):
                note(f"epoch {epoch}: {warning}")
            step = first + steps
            if log is not None:
                with name_images(now, numbers):
                    check_weights(model, method)
                    score = {} if validation is None else judge.measure(model, validation)
                current = score.get("map@r", float(epoch))  # with nothing held out the last epoch is taken
                if current > progress.best_score:
                    progress = dataclasses.replace(progress, best_step=step, best_score=current)
                    save_model(model, run / "checkpoints" / "best")
                if score:
                    figures = {"step": step, "epoch": epoch, **{f"held_out_{k}": v for k, v in score.items()}}
                    log.write(figures)
                    report(figures)
                after_epoch(epoch + 1, model)
            progress = dataclasses.replace(progress, epoch=epoch + 1, epoch_start=step)
            checkpoint()
            if processes.any(asked_to_stop()) and epoch < epochs - 1:
                raise Interrupted(f"stopped after step {step}; continue with --resume")
        if not processes.first:
            return TrainResult()

        # ---- finish: the last and the selected model, judged on the test classes ----
        model.eval()
        save_model(model, run / "checkpoints" / "last")
        best = fold_as_trained(load_model(run / "checkpoints" / "best"), config).to(device)
        with name_images(progress.step - 1, stream.plan(epochs - 1)[-1]):
            embeddings = judge.embed(best, test)
            tested(embeddings)
            selected = judge.measure(best, test, gallery, embeddings)
            same = progress.best_step == progress.step
            metrics = TrainResult(
                steps=progress.step,
                selected_step=progress.best_step,
                selected_score=progress.best_score,
                selected=selected,
                last=selected if same else judge.measure(model, test, gallery),
            )
        save_model(best, run)
        write_learned(run, seen, config)
        start = {"file": best.config.weights_file, "sha256": best.config.weights_sha256}
        write_source(run, find_source(config.trunk, pretrained=config.pretrained, **start))
        if pages:
            write_report(run, config, metrics, test, embeddings.level)
        write_atomic(run / "metrics.json", (json.dumps(metrics, indent=2) + "\n").encode())
        return metrics


def write_learned(run: Path, seen: ImageSet, config: TrainConfig) -> None:
    """Write which images the run has learned from, by the checksums of their bytes, and whether its trunk learned."""
    content = {"trunk": "frozen" if config.train == "heads" else "trained", "images": sorted(seen.checksums)}
    write_atomic(run / LEARNED, (json.dumps(content) + "\n").encode())


class Judge:
    """Embeds sets of images as a test sees them and measures retrieval by the plain metric on s.

    What does not learn is computed once for each set of images. ``images`` is the number of images that a frozen trunk
    will see in this run.
    """

    def __init__(self, train: Train, progress: Count, images: int = 0) -> None:
        self.train, self.progress, self.images = train, progress, images

    def embed(self, model: Model, pixels: Pixels, *, outputs: bool = False) -> Embeddings:
        """The embeddings of the usable images, or what a loss reads of them."""
        keep, last = self.train != "all", self.train == "last"
        return embed_view(
            model, pixels, keep=keep, last=last, outputs=outputs, images=self.images, progress=self.progress
        )

    def has_pairs(self, pixels: Pixels, gallery: Pixels | None = None) -> bool:
        """Whether any image has another of its class to find."""
        labels = pixels.images.labels[pixels.usable]
        if gallery is not None:
            return bool(torch.isin(labels, gallery.images.labels[gallery.usable]).any())
        return bool((labels.bincount() > 1).any())

    def check_pairs(self, pixels: Pixels, gallery: Pixels | None) -> None:
        """Raise ``ValueError`` for images that cannot be judged by."""
        if not self.has_pairs(pixels, gallery):
            count = len(pixels.usable)
            raise ValueError(f"{pixels.images.name}: none of the {count} images has another image of its class to find")

    def measure(
        self, model: Model, pixels: Pixels, gallery: Pixels | None = None, embeddings: Embeddings | None = None
    ) -> dict[str, float]:
        """Recall@1, R-Precision and MAP@R, among the images themselves or in a gallery; ``embeddings`` if known."""
        figures = evaluate_retrieval(
            self.embed(model, pixels) if embeddings is None else embeddings,
            pixels.images.labels[pixels.usable],
            gallery=None if gallery is None else self.embed(model, gallery),
            gallery_labels=None if gallery is None else gallery.images.labels[gallery.usable],
            recall_at=(1,),
        )
        return {key: float(figures[key] or 0.0) for key in ("recall@1", "r_precision", "map@r")}
