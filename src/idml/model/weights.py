"""Weights from local safetensors files: read without trust, and checked before anything is changed."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

Form = Literal["timm", "keras"]
"""How a trunk with the name of a timm model is built: as timm builds it, or as Keras built its ResNet-50."""
_BYTE_SCALE = 200.0
"""Images of bytes less their mean have a variance of about 4000, normalised images one of about 1."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors of a file, and where they came from."""

    path: Path
    sha256: str
    tensors: dict[str, Tensor]


def read_weights(path: str | Path) -> Weights:
    """Read a file of weights; what is no sound safetensors file is refused in one line."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; weights are one safetensors file")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of weights at {path}")
    tensors = read_safetensors(path)[1]
    with path.open("rb") as content:
        return Weights(path, hashlib.file_digest(content, "sha256").hexdigest(), tensors)


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a file that is there; a pickle is refused unread."""
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        head = file.read(9)
    # a safetensors file begins with the length of its header, which may be any bytes, and then the header's brace
    if (head[:2] == b"PK" or head[:1] == b"\x80") and head[8:] != b"{":
        raise ValueError(f"{path} is a pickle (torch.save) file; idml reads only safetensors, which cannot run code")
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a sound safetensors file ({error})") from None


def check_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], owner: str) -> None:
    """Raise ``ValueError`` unless ``tensors`` have the names, shapes and kinds of ``expected`` and are finite."""
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    fault = f"{path} does not fit {owner}"
    if missing:
        also = f"; {len(unknown)} others do not belong to it (first: {unknown[0]})" if unknown else ""
        raise ValueError(f"{fault}: {len(missing)} of {len(expected)} tensors are missing (first: {missing[0]}){also}")
    if unknown:
        raise ValueError(f"{fault}: {len(unknown)} tensors do not belong to it (first: {unknown[0]})")
    for name, tensor in tensors.items():
        needed = expected[name]
        if tensor.shape != needed.shape:
            raise ValueError(f"{fault}: {name} has shape {list(tensor.shape)}, {owner} needs {list(needed.shape)}")
        if tensor.is_floating_point() != needed.is_floating_point() or tensor.is_complex():
            raise ValueError(f"{fault}: {name} is {tensor.dtype}, {owner} needs {needed.dtype}")
        if not bool(torch.isfinite(tensor.to(needed.dtype)).all()):
            raise ValueError(f"{path}: {name} holds NaN or infinity")


def load_weights(network: nn.Module, weights: Weights, classifier: Collection[str], owner: str) -> None:
    """Load weights into a network without a classifier; ``classifier`` names the modules of the file to leave out.

    Every other tensor must fit. Counters of batches (``num_batches_tracked``) may be missing: they are no weights.
    """
    expected = network.state_dict()
    prefixes = tuple(f"{name}." for name in classifier)
    found = {
        name: tensor for name, tensor in weights.tensors.items() if name in expected or not name.startswith(prefixes)
    }
    for name, tensor in expected.items():
        if name.endswith(".num_batches_tracked"):
            found.setdefault(name, tensor)
    check_tensors(weights.path, found, expected, owner)
    network.load_state_dict(found)


def find_form(trunk: str, weights: Weights) -> Form:
    """Find the form of the trunk that the weights are for; only `resnet50` has two.

    The variance that the first normalisation expects, over the squared length of its filter, is about the variance of
    the images. Keras' weights are for images of bytes (their median is 4947), timm's for normalised ones (about 1).
    """
    stem, variance = weights.tensors.get("conv1.weight"), weights.tensors.get("bn1.running_var")
    if trunk.partition(".")[0] != "resnet50" or stem is None or variance is None:
        return "timm"
    if stem.ndim != 4 or variance.shape != stem.shape[:1]:
        return "timm"
    ratios = variance.double() / stem.double().square().sum(dim=(1, 2, 3))
    return "keras" if float(ratios.nanmedian()) > _BYTE_SCALE else "timm"
