"""The model: a trunk and two heads, y = {s, u}; saved as one safetensors file that contains its configuration."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from idml.data.sampling import random_stream
from idml.embeddings import Embeddings, full_precision
from idml.errors import unknown_name
from idml.files import cache_folder, lock_file, write_atomic
from idml.model.backbones import (
    PACKAGED,
    SMALL,
    Form,
    Pooling,
    Stages,
    Trunk,
    Weights,
    build_trunk,
    check_tensors,
    find_form,
    packaged_weights,
    read_safetensors,
    read_weights,
)
from idml.model.branches import BRANCHINGS, build_branches
from idml.model.heads import LinearHead, Slices, build_head
from idml.model.weight_sources import find_source, require_hub, write_source

FILE = "model.safetensors"
PRETRAINED = "pretrained"
TIMM = "timm:"  # before the name of a network of timm, used as it is, without heads
PACKAGED_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
PACKAGED_FINGERPRINT = "30b1cd7dd80b5107"  # `hash_weights` of the trunk with the weights of that file
LEARNED = "learned.json"  # beside the model file: the checksums of the images that the run learned from
LOG_VARIANCE_START = -12.0  # at 512-d, noise of length 0.06 beside ‖μ‖ = 1
LOG_VARIANCE_RANGE = (-14.0, 4.0)
HEADS = ("linear", "none", "slices", "logits", "parts", "logit_parts", "shared", "relations", "composed")
LARGEST = {"embedding_dim": 65_536, "u_hidden": 65_536, "in_chans": 1024, "image_size": 4096, "maps": 256}
MOST_SLICES = 1024
START_LEVEL = 0.05  # mean ‖u‖ of the first batch; for log σ², the root mean square of what is added to −12


@dataclass(frozen=True)
class ModelConfig:
    """Everything needed to build a model, except its weights."""

    trunk: str = PACKAGED
    embedding_dim: int = 512
    uncertainty: Literal["introspective", "gaussian"] = "introspective"
    """The output of the second head: u of the paper, or the σ of the PEL baseline."""
    detach: bool = False
    """Whether the uncertainty head reads the features without passing gradient back into the trunk."""
    u_hidden: int = 0
    """Width of a hidden layer in the uncertainty head; 0 means none, a linear head."""
    in_chans: int = 3
    image_size: int | None = None
    """Pixels; None takes the size the trunk was trained on."""
    trunk_form: Form = "timm"
    """timm, or keras: the `resnet50` of Keras, with other strides and another normalisation of the images."""
    weights_file: str | None = None
    """Name of the local file that the trunk started from, if any. Nothing reads that file again."""
    weights_sha256: str | None = None
    """SHA-256 of that file."""
    head: str = "linear"
    """The semantic head: linear, one with slices (`idml.model.heads`), or none: s is the trunk's features."""
    slices: tuple[str, ...] = ()
    """Names of the slices of s, which have equal sizes; none for a linear head."""
    training_slices: tuple[str, ...] = ()
    """Names of further slices of that size, which exist in training alone."""
    branching: str = "none"
    """Whether the trunk has several branches: none, ensemble, attention or stages (`idml.model.branches`)."""
    maps: int = 0
    """Side of the square map of positions that the loss reads beside the pooled features; 0: none."""
    pooling: Pooling = "average+maximum"
    """How the trunk pools its features; timm: as for its own classifier (see `Trunk`)."""

    def __post_init__(self) -> None:
        for name in ("slices", "training_slices"):  # JSON has lists
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or not all(isinstance(word, str) for word in value):
                raise ValueError(f"{name} must be a list of names, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        if self.head not in HEADS:
            raise ValueError(unknown_name("head", self.head, HEADS))
        if (self.head in ("linear", "none")) is bool(self.slices):
            raise ValueError(f"a {self.head} head {'has no' if self.slices else 'needs the names of its'} slices")
        if len({*self.slices, *self.training_slices}) < len(self.slices) + len(self.training_slices):
            raise ValueError(f"the names of slices must differ, got {[*self.slices, *self.training_slices]}")
        if len(self.slices) + len(self.training_slices) > MOST_SLICES:
            raise ValueError(
                f"a model has at most {MOST_SLICES:,} slices, got {len(self.slices) + len(self.training_slices):,}"
            )
        if self.branching not in BRANCHINGS:
            raise ValueError(unknown_name("branching", self.branching, BRANCHINGS))
        if type(self.maps) is not int or self.maps < 0:
            raise ValueError(f"maps must be a whole number of at least 0, got {self.maps!r}")
        for name in ("embedding_dim", "in_chans", "image_size"):
            value = getattr(self, name)
            if not (value is None and name == "image_size") and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive whole number, got {value!r}")
        if self.uncertainty not in ("introspective", "gaussian"):
            raise ValueError(f"uncertainty must be 'introspective' or 'gaussian', got {self.uncertainty!r}")
        for name in ("weights_file", "weights_sha256"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} must be a text, got {getattr(self, name)!r}")
        if not isinstance(self.trunk, str):
            raise ValueError(f"trunk must be the name of a network, got {self.trunk!r}")
        if not isinstance(self.detach, bool):
            raise ValueError(f"detach must be True or False, got {self.detach!r}")
        if type(self.u_hidden) is not int or self.u_hidden < 0:
            raise ValueError(f"u_hidden must be a whole number of at least 0, got {self.u_hidden!r}")
        for name, largest in LARGEST.items():
            if (getattr(self, name) or 0) > largest:
                raise ValueError(f"{name} must be at most {largest:,}, got {getattr(self, name):,}")
        if self.u_hidden and self.uncertainty == "gaussian":
            raise ValueError("u_hidden goes with uncertainty='introspective': the Gaussian head is linear")
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {self.pooling!r}")
        if self.trunk_form not in ("timm", "keras"):
            raise ValueError(f"trunk_form must be 'timm' or 'keras', got {self.trunk_form!r}")
        if self.trunk_form == "keras" and self.trunk.partition(".")[0] != "resnet50":
            raise ValueError(f"trunk_form 'keras' is for resnet50, not for {self.trunk}")

    @property
    def network(self) -> str:
        """The trunk and its form: two networks that compute differently have different names."""
        forms: list[str] = [self.trunk_form] if self.trunk_form != "timm" else []
        forms += ["its own pooling"] if self.pooling == "timm" else []
        return f"{self.trunk} ({', '.join(forms)})" if forms else self.trunk


@dataclass(frozen=True)
class BatchRows:
    """Which rows of a step's batch the heads see, and the seed of the step.

    Dropout draws its masks for the whole batch from the seed and takes these rows. So an image gets the same masks in
    whatever part of the batch and in whatever process it is embedded.
    """

    seed: int
    rows: Tensor
    """The places [n] of the rows in the batch."""
    total: int
    """How many rows the batch has."""

    def draw_mask(self, layer: str, width: int) -> Tensor:
        """Draw which inputs of a layer stay, each with probability ½ [n, width]."""
        stream = random_stream(f"dropout of the {layer}", self.seed)
        return torch.randint(2, (self.total, width), generator=stream, dtype=torch.bool)[self.rows.cpu()]


def standard_deviation(log_variance: Tensor) -> Tensor:
    """Return σ = exp(½·log σ²), log σ² clamped to [−14, 4]."""
    return (0.5 * full_precision(log_variance).clamp(*LOG_VARIANCE_RANGE)).exp()


class UncertaintyHead(nn.Module):
    """The head that maps features to u = c·W·features + b (not normalised), or to the σ of the PEL baseline.

    u starts small, independent of the scale of the trunk's features: the first batch fixes c so that the mean of ‖u‖ is
    0.05. So training begins at the plain metric. (For σ: log σ² begins at −12.) c is small and not W, because an
    optimiser like Adam changes every weight by the learning rate, independent of its size: small weights on large
    features would raise ‖u‖ to 60 within ten steps.

    With ``u_hidden`` the features are standardised by the first batch and pass through a hidden layer before W. In
    training, half of them and half of the layer drop out; otherwise the head memorises a few thousand images. The masks
    follow from ``rows``; without it torch's own generator draws them.
    """

    started: Tensor
    scale: Tensor
    centre: Tensor
    spread: Tensor

    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, config.u_hidden) if config.u_hidden else None
        if self.hidden is not None:
            self.register_buffer("centre", torch.zeros(width))
            self.register_buffer("spread", torch.ones(width))
        self.linear = nn.Linear(config.u_hidden or width, config.embedding_dim)
        nn.init.constant_(self.linear.bias, LOG_VARIANCE_START if config.uncertainty == "gaussian" else 0.0)
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("scale", torch.tensor(1.0))
        self._known_started = False  # a copy in Python, so that no step waits for the GPU
        self.gaussian, self.detach = config.uncertainty == "gaussian", config.detach

    def forward(self, features: Tensor, rows: BatchRows | None = None) -> Tensor:
        """Return u or σ for each row of features [n, dim]; ``rows`` says which rows of a step's batch they are."""
        if self.detach:
            features = features.detach()
        if not self._known_started:
            if not bool(self.started):
                self._start(features)
            self._known_started = bool(self.started)
        features = self._hidden_features(features, rows, drop=self.training)
        out = full_precision(nn.functional.linear(features, self.linear.weight)) * self.scale + self.linear.bias
        return standard_deviation(out) if self.gaussian else out

    @torch.no_grad()
    def _start(self, features: Tensor) -> None:
        if self.hidden is not None:
            self._standardise(features)
            features = self._hidden_features(features, None, drop=False)
        raw = full_precision(nn.functional.linear(features, self.linear.weight.to(features.dtype)))
        level = _mean_over_processes(torch.linalg.vector_norm(raw, dim=1).mean())
        if bool(torch.isfinite(level)) and float(level) > 0:
            wanted = START_LEVEL * (raw.shape[1] ** 0.5 if self.gaussian else 1.0)
            self.scale.copy_(wanted / level)
            self.started.fill_(True)

    def _hidden_features(self, features: Tensor, rows: BatchRows | None, *, drop: bool) -> Tensor:
        """Return the input of the last layer: the features, or the hidden layer's output."""
        if self.hidden is None:
            return features
        x = (full_precision(features) - self.centre) / self.spread
        x = self.hidden(_drop_half(x, "features", rows) if drop else x).relu()
        return _drop_half(x, "hidden layer", rows) if drop else x

    def _standardise(self, features: Tensor) -> None:
        x = full_precision(features)
        centre = _mean_over_processes(x.mean(dim=0))
        spread = _mean_over_processes((x - centre).square().mean(dim=0)).sqrt()
        if bool(torch.isfinite(spread).all()):
            self.centre.copy_(centre)
            self.spread.copy_(torch.where(spread > 1e-6 * centre.abs(), spread, 1.0))


class NoUncertainty(nn.Module):
    """The place of the uncertainty head in a model without heads: u of no dimensions."""

    def forward(self, features: Tensor, rows: BatchRows | None = None) -> Tensor:
        """Return a tensor [n, 0]."""
        return full_precision(features.new_zeros(len(features), 0))


def _drop_half(x: Tensor, layer: str, rows: BatchRows | None) -> Tensor:
    """Return x with half of its entries set to 0, and the others doubled."""
    mask = rows.draw_mask(layer, x.shape[1]).to(x.device) if rows else torch.rand_like(x) < 0.5
    return 2 * x * mask


def _mean_over_processes(share: Tensor) -> Tensor:
    """Average over all processes, each of which sees a share of the batch."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(share)
        share = share / torch.distributed.get_world_size()
    return share


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode; on exit, every part of it returns to its own mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:  # one by one: some may be frozen
            part.training = training


class Model(nn.Module):
    """A network from images to `Embeddings`. Images are uint8 or floats in [0, 1]; the model normalises them."""

    def __init__(self, config: ModelConfig, *, pretrained: bool = False, weights: Weights | None = None) -> None:
        super().__init__()
        self.trunk = build_trunk(
            config.trunk,
            pretrained=pretrained,
            in_chans=config.in_chans,
            image_size=config.image_size,
            form=config.trunk_form,
            pooling=config.pooling,
            weights=weights,
        )
        if config.branching != "none":
            self.trunk = build_branches(
                self.trunk,
                config.branching,
                len(config.slices),
                None if pretrained or weights is not None else (config.trunk, config.in_chans, config.trunk_form),
            )
        self.config = config = dataclasses.replace(config, image_size=self.trunk.image_size)
        self.has_outputs = False
        self.semantic: Any
        self.uncertainty: Any
        if config.head == "none":
            self.config = dataclasses.replace(config, embedding_dim=self.trunk.width)
            self.semantic, self.uncertainty = nn.Identity(), NoUncertainty()
            return
        self.semantic = LinearHead(self.trunk.width, config.embedding_dim)
        self.has_outputs = config.head != "linear" or config.maps > 0
        if self.has_outputs:
            self.semantic = build_head(
                self.trunk.width, config.embedding_dim, config.head, config.slices, config.training_slices
            )
        self.uncertainty = UncertaintyHead(self.trunk.width, config)

    def forward(self, images: Tensor) -> Embeddings:
        """Embed a batch of images [n, c, h, w]."""
        return self.heads(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """Return the trunk's pooled features [n, width]."""
        out: Tensor = self.trunk(self._checked(images))
        return out

    def positions(self, images: Tensor) -> Tensor:
        """Return the trunk's features at every position [n, positions, width]."""
        return self.trunk.positions(self._checked(images))

    def _checked(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or images.shape[1] != self.config.in_chans:
            raise ValueError(f"images must be [n, {self.config.in_chans}, height, width], got {list(images.shape)}")
        if len(images) == 0:
            raise ValueError("the batch is empty: there is no image to embed")
        if images.dtype == torch.uint8:
            images = images / 255
        elif not images.is_floating_point():
            raise ValueError(f"images must be uint8 or floats in [0, 1], got {images.dtype}")
        return images.to(self.trunk.mean.dtype)

    def heads(self, features: Tensor, rows: BatchRows | None = None) -> Embeddings:
        """Return the embeddings of features [n, width]; in training, dropout draws its masks for ``rows``."""
        return Embeddings(full_precision(self.semantic(features)), self.uncertainty(features, rows))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.trunk.mean.device

    # ---- what a method's loss reads ----

    def outputs(self, features: Tensor, rows: BatchRows | None = None) -> Embeddings:
        """Return what a loss reads of `training_features`: the head's ``outputs`` instead of s, and u."""
        if not self.has_outputs:
            return self.heads(features, rows)
        pooled = features[:, : self.trunk.width]
        return Embeddings(full_precision(self.semantic.outputs(features)), self.uncertainty(pooled, rows))

    def training_features(self, images: Tensor) -> Tensor:
        """Return the pooled features [n, width]; with ``maps``, followed by those of every position."""
        return self.features_with_map(images, self.config.maps) if self.config.maps else self.features(images)

    def features_with_map(self, images: Tensor, grid: int) -> Tensor:
        """Return the pooled features, then those of grid × grid positions [n, (1 + grid²)·width]."""
        return _with_map(self.positions(images), grid)

    def training_outputs(self, images: Tensor) -> Embeddings:
        """Return what a loss reads of images [n, c, h, w]."""
        return self.outputs(self.training_features(images))

    def last_stage_features(self, activations: Tensor) -> Tensor:
        """Return the same of inputs of the trunk's last stage [n, c, h, w]."""
        if not self.config.maps:
            return self.stages.features(activations)
        return _with_map(self.stages.positions(activations), self.config.maps)

    def last_stage_outputs(self, activations: Tensor) -> Embeddings:
        """Return what a loss reads of inputs of the trunk's last stage [n, c, h, w]."""
        return self.outputs(self.last_stage_features(activations))

    def slice(self, embeddings: Embeddings, name: str) -> Embeddings:
        """Return one named slice of s with the same u; a model without slices is a ``ValueError``."""
        size = self.config.embedding_dim // max(len(self.config.slices), 1)
        columns = Slices(self.config.slices, size).columns(name)
        return Embeddings(embeddings.semantic[:, columns], embeddings.uncertainty)

    @cached_property
    def stages(self) -> Stages:
        """The trunk in two parts; a trunk whose last stage is not known is a ``ValueError``."""
        return self.trunk.split()

    def last_stage(self, activations: Tensor) -> Embeddings:
        """Return the embeddings of inputs of the trunk's last stage [n, c, h, w]."""
        return self.heads(self.stages.features(activations))

    def embed(self, images: "Tensor | str | Path | Sequence[str | Path]", *, batch_size: int = 64) -> Embeddings:
        """Embed images (a tensor) or image files (paths) by the test protocol; the result is on the CPU.

        Files are decoded, resized and cropped in the centre to the model's image size.
        """
        if isinstance(images, str | Path):
            images = [images]
        if len(images) == 0:
            raise ValueError("there is no image to embed")
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or larger, got {batch_size}")
        if isinstance(images, Tensor) and images.is_floating_point() and float(images.max()) > 2:
            raise ValueError(f"float images must lie in [0, 1], these reach {float(images.max()):.0f}; divide by 255")
        return self._embed_batches(self, self._batches(images, batch_size))

    def embed_features(self, features: Tensor, *, batch_size: int = 4096, outputs: bool = False) -> Embeddings:
        """Embed features [n, width] that the trunk computed before; the result is on the CPU.

        With ``outputs`` it is what a loss reads instead.
        """
        return self._embed_batches(self.outputs if outputs else self.heads, features.split(batch_size))

    def embed_activations(self, batches: Iterable[Tensor], *, outputs: bool = False) -> Embeddings:
        """Embed batches of inputs of the trunk's last stage; the result is on the CPU."""
        return self._embed_batches(self.last_stage_outputs if outputs else self.last_stage, batches)

    @torch.no_grad()
    def _embed_batches(self, function: Callable[[Tensor], Embeddings], batches: Iterable[Tensor]) -> Embeddings:
        device = self.device
        with evaluation_mode(self):
            return Embeddings.cat([function(batch.to(device)).to("cpu") for batch in batches])

    def _batches(self, images: Tensor | Sequence[str | Path], size: int) -> Iterator[Tensor]:
        from idml.data.images import load_square

        for start in range(0, len(images), size):
            part = images[start : start + size]
            if isinstance(part, Tensor):
                yield part
            else:
                grey = self.config.in_chans == 1
                yield torch.stack([load_square(path, self.trunk.image_size, grey=grey) for path in part])


def _with_map(positions: Tensor, grid: int) -> Tensor:
    pooled = positions.mean(dim=1) + positions.amax(dim=1)
    return torch.cat([pooled, pool_positions(positions, grid).flatten(1)], dim=1)


def pool_positions(positions: Tensor, side: int) -> Tensor:
    """Average positions [n, positions, width] into a map of ``side`` × ``side`` [n, side², width].

    As in DIML (Zhao et al., 2021) the map is first enlarged bilinearly to 4 times that side, so any map fits.
    """
    n, count, width = positions.shape
    edge = round(count**0.5)
    if edge * edge != count:
        raise ValueError(f"the trunk has no position maps: its {count} positions do not form a square")
    maps = positions.transpose(1, 2).reshape(n, width, edge, edge)
    if edge != side:
        maps = nn.functional.interpolate(maps, size=(4 * side, 4 * side), mode="bilinear", align_corners=False)
        maps = nn.functional.avg_pool2d(maps, 4)
    return maps.flatten(2).transpose(1, 2)


def build_model(
    trunk: str = PACKAGED, *, pretrained: bool = True, weights: str | Path | None = None, **config: Any
) -> Model:
    """Build a new model; ``config`` are the other fields of `ModelConfig`. ``conv4`` starts from random weights.

    ``weights`` is a safetensors file that the trunk starts from instead; its name and SHA-256 are kept in the
    configuration, and so is the form of the trunk that it is for, which is found unless ``trunk_form`` is given.

    >>> model = build_model("conv4", embedding_dim=8)
    >>> model(torch.rand(3, 3, 28, 28))
    Embeddings(3 images, semantic 8-d, uncertainty 8-d, torch.float32, cpu)
    """
    known = {f.name for f in dataclasses.fields(ModelConfig)}
    unknown = sorted(set(config) - known)
    if unknown:
        raise ValueError(unknown_name("model option", unknown[0], sorted(known)))
    if weights is None:
        pretrained = pretrained and trunk != SMALL
        if pretrained and trunk != PACKAGED:
            require_hub(trunk)
        return Model(ModelConfig(trunk=trunk, **config), pretrained=pretrained)
    given = read_weights(weights)
    source = {"weights_file": given.path.name, "weights_sha256": given.sha256}
    form = config.pop("trunk_form", None) or find_form(trunk, given)
    return Model(ModelConfig(trunk=trunk, trunk_form=form, **{**config, **source}), weights=given)


# -------------------- files --------------------


def save_model(model: Model, run: str | Path) -> Path:
    """Write weights and configuration to the file ``run``/model.safetensors, atomically."""
    from safetensors.torch import save

    folder = Path(run)
    folder.mkdir(parents=True, exist_ok=True)
    data = save(
        {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()},
        metadata={"idml": json.dumps(dataclasses.asdict(model.config))},  # one entry: several come in any order
    )
    write_atomic(folder / FILE, data)
    return folder / FILE


def load_model(run: str | Path, *, weights: str | Path | None = None) -> Model:
    """Load a model, ready for use. Only safetensors files are read.

    Args:
        run: a run folder, a model file, ``pretrained`` (the default trunk, without heads), or ``timm:NAME`` (see
            `resolve_model`).
        weights: a safetensors file with the weights of the network ``timm:NAME``.
    """
    run = resolve_model(run, weights)
    if str(run) == PRETRAINED:
        return Model(ModelConfig(head="none"), pretrained=True).eval()
    path = Path(run)
    path = path / FILE if path.is_dir() else path
    config, tensors = _read(path)
    try:
        with torch.device("meta"):  # shapes without memory: a small file may describe a very large model
            _check_members(config, len(tensors))
            expected = Model(config).state_dict()
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:  # of a trunk that cannot have this size
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: {reason}") from None
    check_tensors(path, tensors, expected, "the model")
    model = Model(config)
    model.load_state_dict(tensors)
    return model.eval()


def _check_members(config: ModelConfig, tensors: int) -> None:
    """Refuse an ensemble that has more networks than a file's tensors: to build a thousand networks takes minutes."""
    if config.branching != "ensemble":
        return
    trunk = build_trunk(config.trunk, pretrained=False, in_chans=config.in_chans, image_size=config.image_size)
    needed = len(config.slices) * len(trunk.network.state_dict())
    if tensors < needed:
        raise ValueError(f"its {len(config.slices):,} networks have {needed:,} tensors, and the file has {tensors:,}")


def resolve_model(run: str | Path, weights: str | Path | None = None, *, image_size: int | None = None) -> str | Path:
    """Return ``run``; for ``timm:NAME``, a folder in the cache with a model of that network as timm uses it.

    The model has no heads: s is what timm's classifier would read. Its weights come from ``weights``, a safetensors
    file, or from the hub; both are needed only once. It sees images of ``image_size`` pixels a side, by default as many
    as its weights were made for.
    """
    if not str(run).startswith(TIMM):
        if weights is not None:
            raise ValueError(f"weights go with a model {TIMM}NAME; {run} has its own")
        if image_size is not None:
            raise ValueError(f"an image size goes with a model {TIMM}NAME; {run} has its own")
        return run
    name = str(run).removeprefix(TIMM)
    if not name or "/" in name:
        raise ValueError(f"name a network of timm: {TIMM}NAME, such as {TIMM}resnet50; got {str(run)!r}")
    key = name if weights is None else f"{name}-{read_weights(weights).sha256[:16]}"
    folder = cache_folder() / "timm" / (key if image_size is None else f"{key}-{image_size}px")
    if not (folder / FILE).is_file():
        model = _build_without_heads(name, weights, image_size)
        folder.mkdir(parents=True, exist_ok=True)
        with lock_file(folder / ".lock"):
            source = {"file": model.config.weights_file, "sha256": model.config.weights_sha256}
            write_source(folder, find_source(name, pretrained=True, **source))
            write_atomic(folder / LEARNED, b'{"trunk": "frozen", "images": []}\n')  # nothing of the user's
            # the name of the file does not belong to the model: the same weights have the same fingerprint
            model.config = dataclasses.replace(model.config, weights_file=None, weights_sha256=None)
            save_model(model, folder)
    return folder


def _build_without_heads(name: str, weights: str | Path | None, image_size: int | None) -> Model:
    """Build a network of timm as timm uses it, and try it on one image."""
    try:
        model = build_model(name, weights=weights, head="none", pooling="timm", image_size=image_size)
        found = model.embed(torch.zeros(1, 3, model.trunk.image_size, model.trunk.image_size)).semantic
    except (RuntimeError, TypeError, AttributeError, AssertionError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"the network {name!r} cannot embed images ({reason})") from None
    if found.shape != (1, model.trunk.width):
        raise ValueError(f"the network {name!r} gives no vector of {model.trunk.width} features for an image")
    return model


def _missing_model(path: Path) -> FileNotFoundError:
    return FileNotFoundError(f"there is no model at {path}; a run directory contains a {FILE}")


def _read(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    if not path.is_file():
        raise _missing_model(path)
    metadata, tensors = read_safetensors(path)
    return _parse_config(path, metadata), tensors


def read_config(path: Path) -> ModelConfig:
    """Read the configuration in a model file, without its weights."""
    if not path.is_file():
        raise _missing_model(path)
    return _parse_config(path, read_safetensors(path, tensors=False)[0])


def _parse_config(path: Path, metadata: dict[str, str]) -> ModelConfig:
    description = metadata.get("idml")
    if description is None:
        raise ValueError(f"{path} contains no idml model configuration; it was not written by idml")
    try:
        values = json.loads(description)
        if values.pop("bound", None) is not None:
            raise ValueError("its option bound was removed: train the model again without it")
        return ModelConfig(**values)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} has a model configuration that this version cannot read ({reason})") from None


# -------------------- fingerprints --------------------


def fingerprint(path: str | Path) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a model file, or of the model file in a run."""
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    if not file.is_file():
        raise _missing_model(file)
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def fingerprint_of(run: str | Path) -> str:
    """Return the fingerprint of the model in ``run``, which may also be ``pretrained`` or ``timm:NAME``."""
    return pretrained_fingerprint() if str(run) == PRETRAINED else fingerprint(resolve_model(run))


@lru_cache(maxsize=1)
def pretrained_fingerprint() -> str:
    """Return the hash of the default trunk's name and weights; for the known file of weights, without building it."""
    with packaged_weights().open("rb") as content:
        known = hashlib.file_digest(content, "sha256").hexdigest() == PACKAGED_SHA256
    return PACKAGED_FINGERPRINT if known else hash_weights(pretrained_trunk(), PACKAGED)


def hash_weights(module: nn.Module, what: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of ``what`` and of a module's weights with their names."""
    digest = hashlib.sha256(what.encode())
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def pretrained_trunk() -> Trunk:
    """Return the default trunk with its pretrained weights."""
    return build_trunk(PACKAGED, pretrained=True).eval().to(best_device())


def best_device() -> str:
    """Return the GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
