"""Checkpoints: everything a run needs to continue, in one safetensors file that is written whole or not at all."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from idml.files import lock_file, write_atomic
from idml.model import Model
from idml.progress import Note, silent
from idml.training.config import TrainConfig, from_stored, list_differences, to_dict


@dataclass(frozen=True)
class Position:
    """How far a run is: ``step`` steps are done, of which ``epoch_start`` before the current ``epoch``.

    The best held-out result was seen at ``best_step``.
    """

    step: int = 0
    epoch: int = 0
    epoch_start: int = 0
    best_step: int = -1
    best_score: float = -1.0


def save_checkpoint(
    path: Path,
    model: Model,
    method: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Position,
    config: TrainConfig,
    dataset: str,
    pixels: str,
) -> None:
    """Write everything that changes during training. Random numbers need no saving: they follow from the step.

    ``dataset`` and ``pixels`` are hashes of the names and of the pixels of the images.
    """
    from safetensors.torch import save

    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    tensors |= {f"method.{k}": v for k, v in method.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{k}": torch.as_tensor(v) for k, v in state.items()}
    note: dict[str, Any] = {"progress": asdict(progress), "config": to_dict(config), "dataset": dataset}
    note["pixels"], note["weights_sha256"] = pixels, model.config.weights_sha256
    data = save({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, metadata={"idml": json.dumps(note)})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)


def load_checkpoint(
    path: Path,
    model: Model,
    method: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    dataset: str,
    pixels: str,
) -> Position:
    """Restore a checkpoint; one of another configuration, data set or file of weights is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            note = json.loads(file.metadata()["idml"])
            options, data, progress = dict(note["config"]), note["dataset"], Position(**note["progress"])
            weights, seen = note.get("weights_sha256"), note.get("pixels", pixels)  # older ones do not say
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a sound checkpoint ({str(error).splitlines()[0]})") from None
    another_version = f"{path} was written by another version of idml: train into a new directory"
    try:
        before = from_stored(options)
    except ValueError as error:
        raise ValueError(f"{another_version} ({error})") from None
    changed = list_differences(before, config)
    if changed:
        raise ValueError(f"cannot resume with other options: {'; '.join(changed)}")
    if weights != model.config.weights_sha256:
        raise ValueError(f"cannot resume with other weights: {config.weights} is not the file this run began with")
    if data != dataset:
        raise ValueError(f"cannot resume on other data: {config.data} no longer holds the images this run began with")
    if seen != pixels:
        raise ValueError(f"cannot resume on other data: images of {config.data} have changed since this run began")
    try:
        model.load_state_dict(_below("model.", tensors))
        method.load_state_dict(_below("method.", tensors))
    except RuntimeError:  # the same options, but other tensors
        raise ValueError(another_version) from None
    state = optimizer.state_dict()
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in _below("optimizer.", tensors).items():
        number, key = name.split(".", 1)
        moments.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({"state": moments, "param_groups": state["param_groups"]})
    return progress


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def check_resumable(run: Path, note: Note = silent) -> None:
    """Raise ``ValueError`` if there is no run to continue; a run without a checkpoint gets a note.

    A run begins when its config.yaml is written: a refused one leaves a folder without it.
    """
    begun = (run / "checkpoints" / "last.safetensors").exists()
    if not begun and not (run / "config.yaml").exists():
        raise ValueError(f"there is no run {str(run)!r} to continue; leave out --resume to start one")
    if not begun:
        note(f"{run} has no checkpoint: the run starts at its beginning")


def check_free(run: Path, *, resume: bool) -> None:
    """Raise ``ValueError`` if the directory holds a run that a new one would overwrite."""
    if not resume and (run / "checkpoints" / "last.safetensors").exists():
        raise ValueError(f"{str(run)!r} already holds a run; continue it with --resume or choose another directory")


def lock_run(run: Path) -> BinaryIO:
    """Hold the run directory for this process until the returned file is closed; a second run is refused."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        return lock_file(run / ".lock", wait=False)
    except BlockingIOError:
        raise ValueError(f"another run is writing into {str(run)!r}") from None
    except OSError as error:
        raise ValueError(f"cannot write into the run directory {str(run)!r} ({error.strerror})") from None
