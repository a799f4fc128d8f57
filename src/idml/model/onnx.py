"""`idml export`: a network as one ONNX file, checked against torch before it is written, and ONNX Runtime to run it.

The file ends with a checksum of everything before it, which is itself ONNX metadata. Other programs read it as any
other ONNX file, and idml notices a flipped byte.
"""

import dataclasses
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from idml.files import lock_file, write_atomic
from idml.model.backbones import PACKAGED, build_trunk
from idml.model.model import PRETRAINED, ModelConfig, fingerprint_of, load_model, resolve_model
from idml.version import __version__

FORMAT = "1"  # raise it when the meaning of an exported file changes: older files are then exported again
OPSET = 18
TOLERANCE = 1e-4
BATCH = 8  # images at once: larger batches leave the caches of a CPU
ONNX = "model.onnx"  # the exported model beside a model
LARGEST = 2**31 - 2**20  # bytes: a protobuf message ends at 2 GB
LIBRARIES = ("onnx", "onnxscript", "onnxruntime")
OUTPUTS = (["semantic"], ["semantic", "uncertainty"], ["features"])
_CHECKSUM = "idml.sha256"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnnxFile:
    """A checked ONNX file written by idml: its bytes, and the model's fingerprint and configuration."""

    data: bytes
    fingerprint: str
    config: ModelConfig


@dataclass(frozen=True)
class _Exported:
    """A new file that was compared with torch: its bytes, the widths of its outputs, and the largest difference."""

    data: bytes
    outputs: dict[str, int]
    difference: float


class _Network(nn.Module):
    """The computation of `idml.model.Model`, with plain tensors as result and no checks."""

    def __init__(self, trunk: nn.Module, heads: dict[str, nn.Module]) -> None:
        super().__init__()
        self.trunk, self.heads = trunk, nn.ModuleDict(heads)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return one output for each head; without heads, the features. Images are uint8 or floats in [0, 1]."""
        features = self.trunk(images / 255 if images.dtype == torch.uint8 else images)
        return tuple(head(features) for head in self.heads.values()) or (features,)


def export_onnx(run: str | Path, out: str | Path) -> dict[str, Any]:
    """Write the model of ``run`` (a run folder, a model.safetensors, or ``pretrained``) to the ONNX file ``out``.

    Input ``images`` uint8 [n, channels, size, size], any n; outputs ``semantic`` [n, d] and ``uncertainty`` [n, d] (σ
    for a PEL run; ``pretrained`` gives the trunk's features as ``semantic`` and no uncertainty). The new file is first
    run on test images: it is written only if it agrees with torch within 1e-4 of a row's largest value.
    """
    path = Path(out)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file, such as {path / 'model.onnx'}")
    if path.suffix != ".onnx":
        raise ValueError(f"the name of an ONNX file ends in .onnx, got {path.name!r}")
    require(*LIBRARIES)
    network, config, fingerprint = _load_network(run)
    path.parent.mkdir(parents=True, exist_ok=True)  # an unusable place is an error before the slow part
    exported = _export(str(run), network, config, fingerprint)
    write_atomic(path, exported.data)
    return {
        "out": str(path),
        "fingerprint": fingerprint,
        "bytes": len(exported.data),
        "image_size": config.image_size,
        "outputs": exported.outputs,
        "difference": exported.difference,
    }


def export_model(run: str | Path) -> bytes:
    """Return the content of the file that `export_onnx` writes."""
    require(*LIBRARIES)
    return _export(str(run), *_load_network(run)).data


def export_trunk(trunk: nn.Module, config: ModelConfig, fingerprint: str) -> bytes:
    """Return an ONNX file of a trunk on the CPU, in evaluation mode: float ``images`` in [0, 1] to ``features``."""
    require(*LIBRARIES)
    return _export(config.trunk, _Network(trunk, {}), config, fingerprint, features=True).data


def _export(
    what: str, network: _Network, config: ModelConfig, fingerprint: str, *, features: bool = False
) -> _Exported:
    """Export a network (a trunk for ``features``) and compare it with torch; ``what`` is its name in messages."""
    size = sum(tensor.nbytes for tensor in network.state_dict().values())
    if size > LARGEST:
        raise ValueError(f"{what}: an ONNX file holds at most 2 GB, and the weights alone are {size / 2**30:.1f} GB")
    images = _make_test_images(config)
    images = images / 255 if features else images
    with torch.no_grad():
        expected = network(images)
    if not all(bool(torch.isfinite(x).all()) for x in expected):
        raise ValueError(f"{what}: the model gives NaN or infinity on ordinary images; there is nothing to export")
    names = list(network.heads) or ["features" if features else "semantic"]
    data = _convert(network, images, names, config, fingerprint)
    difference = _difference(data, images, dict(zip(names, expected, strict=True)))
    if not difference <= TOLERANCE:  # also true for NaN
        raise ValueError(f"{what}: ONNX Runtime and torch differ by {difference:.1e} (at most {TOLERANCE} is allowed)")
    return _Exported(data, {name: x.shape[1] for name, x in zip(names, expected, strict=True)}, difference)


def read_onnx(path: Path) -> OnnxFile:
    """Read a file that idml wrote; any other or damaged file is a ``ValueError``."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} is larger than an ONNX file can be (2 GB)")
    return parse_onnx(path.read_bytes(), str(path))


def parse_onnx(data: bytes, name: str) -> OnnxFile:
    """Check the content of a file; ``name`` is its name in messages."""
    require("onnx")
    length = len(_checksum(b""))
    if data[-length:][:-64] != _checksum(b"")[:-64]:
        raise ValueError(f"{name} is not a complete file of `idml export`")
    if data[-length:] != _checksum(data[:-length]):
        raise ValueError(f"{name} is damaged: its checksum does not fit")
    onnx = import_module("onnx")
    try:
        model = onnx.load_model_from_string(data)
        told = {entry.key: entry.value for entry in model.metadata_props}
        if told["idml.format"] != FORMAT:
            raise ValueError(f"of format {told['idml.format'][:20]!r}")
        if [output.name for output in model.graph.output] not in OUTPUTS:
            raise ValueError("its outputs have other names")
        file = OnnxFile(data, told["idml.fingerprint"], ModelConfig(**json.loads(told["idml.config"])))
    except Exception as error:  # the parsers can raise any exception
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name} is not an ONNX file that this version can read ({reason})") from None
    external = onnx.TensorProto.EXTERNAL
    if any(getattr(part, "data_location", None) == external for part in _parts(model)):
        raise ValueError(f"{name} refers to other files for its weights, which idml does not follow")
    return file


# -------------------- stored exports --------------------


def find_onnx(places: list[Path], fingerprint: str) -> OnnxFile | None:
    """Return the first file that exists, is undamaged and has this fingerprint; the log says why others do not fit."""
    for place in places:
        if not place.is_file():
            continue
        try:
            file = read_onnx(place)
            if file.fingerprint == fingerprint:
                return file
            reason = f"{place} was made from another model ({file.fingerprint}, not {fingerprint})"
        except (ValueError, OSError) as error:
            reason = str(error)
        _log.warning("%s: it is not used", reason)
    return None


def export_once(places: list[Path], fingerprint: str, export: Callable[[], bytes]) -> OnnxFile:
    """Export a network and store it in the first place that can be written, instead of a file that does not fit.

    A second process waits for the first and uses its file. Where nothing can be written, nothing is stored.
    """
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            lock = lock_file(place.with_name(f".{place.name}.lock"))
        except OSError:
            continue
        with lock:
            with suppress(ValueError, OSError):
                file = read_onnx(place)
                if file.fingerprint == fingerprint:
                    return file
            data = _export_with_note(export)
            with suppress(OSError):
                write_atomic(place, data)
        break
    else:
        data = _export_with_note(export)
    file = parse_onnx(data, "the exported network")
    if file.fingerprint != fingerprint:
        raise ValueError("the model changed during the export; try again")
    return file


def _export_with_note(export: Callable[[], bytes]) -> bytes:
    _log.warning("exporting the network for ONNX Runtime; this takes some seconds")
    return export()


# -------------------- sessions --------------------


def open_session(data: bytes, threads: int | None = None) -> Any:
    """Open a model in ONNX Runtime on the CPU. A pass uses ``threads`` threads; by default as many as torch.

    For callers in several threads, passes with one thread each are faster: no thread waits for another within a pass.
    """
    require("onnxruntime")
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised instead
    # waiting threads sleep: other work, such as decoding the next images, needs the cores
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # it has many exception types of its own
        raise ValueError(f"ONNX Runtime cannot use the exported model ({str(error).splitlines()[0]})") from None


def run_session(session: Any, images: Tensor) -> dict[str, Tensor]:
    """Return the outputs by name for uint8 images [n, channels, size, size]."""
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, {"images": images.numpy()})
    return {name: torch.from_numpy(x) for name, x in zip(names, found, strict=True)}


# -------------------- conversion --------------------


def require(*libraries: str) -> None:
    """Raise a ``ValueError`` that says how to install these libraries, if one of them is missing."""
    for name in libraries:
        try:
            import_module(name)
        except ImportError as error:
            raise ValueError(f"{name} cannot be used ({error}); pip install {name}") from None


def _load_network(run: str | Path) -> tuple[_Network, ModelConfig, str]:
    """Load the network on the CPU, with its configuration and fingerprint."""
    run = resolve_model(run)
    fingerprint = fingerprint_of(run)
    if str(run) == PRETRAINED:
        trunk = build_trunk(PACKAGED, pretrained=True)
        config = ModelConfig(PACKAGED, embedding_dim=trunk.width, image_size=trunk.image_size)
        return _Network(trunk, {}).eval(), config, fingerprint
    model = load_model(run)
    if model.config.head == "none":
        return _Network(model.trunk, {}).eval(), model.config, fingerprint
    size = model.trunk.image_size
    # a model that was never trained fixes the scale of u on its first image: the same one as in the torch embedder
    model.embed(torch.full((1, model.config.in_chans, size, size), 128, dtype=torch.uint8))
    if not bool(model.uncertainty.started):
        raise ValueError(f"{run}: the model was never trained, and the scale of u cannot be set with a grey image")
    heads = {"semantic": model.semantic, "uncertainty": model.uncertainty}
    return _Network(model.trunk, heads).eval(), model.config, fingerprint


def _convert(network: _Network, images: Tensor, names: list[str], config: ModelConfig, fingerprint: str) -> bytes:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations inside torch
        try:
            program = torch.onnx.export(
                network,
                (images,),
                dynamo=True,
                external_data=False,
                opset_version=OPSET,
                input_names=["images"],
                output_names=names,
                dynamic_shapes=({0: torch.export.Dim("n")},),
                verbose=False,
            )
        except Exception as error:  # torch and onnxscript raise many kinds
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"torch cannot export {config.trunk} to ONNX ({reason})") from None
    assert program is not None
    model = program.model_proto
    for part in _parts(model):  # torch stores the local path of each operation's source code
        for field in ("metadata_props", "doc_string"):
            if field in part.DESCRIPTOR.fields_by_name:
                part.ClearField(field)
    model.producer_name, model.producer_version = "idml", __version__
    about = {
        "idml.version": __version__,
        "idml.format": FORMAT,
        "idml.fingerprint": fingerprint,
        "idml.config": json.dumps(dataclasses.asdict(config)),
    }
    for key, value in about.items():
        model.metadata_props.add(key=key, value=value)
    body: bytes = model.SerializeToString()
    return body + _checksum(body)


def _checksum(body: bytes) -> bytes:
    """Build one more metadata entry: protobuf reads concatenated messages as one message."""
    model = import_module("onnx").ModelProto()
    model.metadata_props.add(key=_CHECKSUM, value=hashlib.sha256(body).hexdigest())
    data: bytes = model.SerializeToString()
    return data


def _parts(message: Any) -> Iterator[Any]:
    """Yield a protobuf message and all messages within it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _parts(part)


def _make_test_images(config: ModelConfig) -> Tensor:
    """Make test images for a new file: noise, smooth pictures, black, white, and half of each."""
    size, generator = int(config.image_size or 0), torch.Generator().manual_seed(0)
    noise = torch.rand(2, config.in_chans, size, size, generator=generator)
    coarse = torch.rand(3, config.in_chans, 4, 4, generator=generator)
    smooth = nn.functional.interpolate(coarse, (size, size), mode="bilinear")
    flat = torch.stack([torch.zeros_like(noise[0]), torch.ones_like(noise[0]), torch.zeros_like(noise[0])])
    flat[2, :, :, size // 2 :] = 1.0
    return (torch.cat([noise, smooth, flat]) * 255).round().to(torch.uint8)


def _difference(data: bytes, images: Tensor, expected: dict[str, Tensor]) -> float:
    """Return the largest difference to torch, as a share of its row's largest value, in a batch and alone."""
    session, worst = open_session(data), torch.tensor(0.0)
    for part in (slice(None), slice(1)):
        for name, found in run_session(session, images[part]).items():
            wanted = expected[name][part]
            scale = wanted.abs().amax(dim=1, keepdim=True).clamp_min(1e-6)  # a row of zeros has no scale
            worst = torch.maximum(worst, ((found - wanted).abs() / scale).max())
    return float(worst)
