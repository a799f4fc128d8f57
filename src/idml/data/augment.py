"""Augmentation: crops and flips, ways to make images ambiguous (mixtures, low resolution, blur, occlusion), and views.

All functions act on a batch [n, c, h, w] of floats in [0, 1] (uint8 is converted) on its own device. Random numbers
come from a CPU generator (``sampling.random_stream``), so they are the same on every device. A *view* is how evaluation
sees an image: as it is, mixed with another, or degraded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from idml.data.pixel_cache import Pixels
from idml.data.sampling import random_stream
from idml.embeddings import full_precision
from idml.errors import unknown_name
from idml.labels import LabelSets

IN_PLACE = ("low_resolution", "blur", "occlusion")
MIXTURES = ("mixup", "cutmix")
KINDS = (*MIXTURES, *IN_PLACE)


# -------------------- crops --------------------


def crop_and_flip(images: Tensor, size: int, generator: torch.Generator, p: float = 0.5) -> Tensor:
    """Crop a random window of ``size`` × ``size`` from each image, mirrored left to right with probability p."""
    h, w = _room(images, size)
    top = torch.randint(h + 1, (len(images),), generator=generator).tolist()
    left = torch.randint(w + 1, (len(images),), generator=generator).tolist()
    flipped = _chosen(len(images), p, generator).to(images.device)
    # Stacking slices copies whole rows: on a CPU four times as fast as gathering by index.
    crops = torch.stack([x[:, i : i + size, j : j + size] for x, i, j in zip(images, top, left, strict=True)])
    crops[flipped] = crops[flipped].flip(3)
    return _floats(crops)


def resized_crop_and_flip(images: Tensor, size: int, generator: torch.Generator, p: float = 0.5) -> Tensor:
    """Cut a random part of each image, enlarge it to ``size`` × ``size``, mirror it with probability p.

    The part has 8 to 100 % of the area, uniformly, and a width : height log-uniform in 3 : 4 … 4 : 3, as far as it fits
    (Szegedy et al., 2015).
    """
    _check_images(images)
    n, _, h, w = images.shape
    area = (0.08 + 0.92 * torch.rand(n, generator=generator)) * (h * w)
    ratio = (math.log(3 / 4) + math.log(16 / 9) * torch.rand(n, generator=generator)).exp()
    height, width = (area / ratio).sqrt().round().clamp(1, h).int(), (area * ratio).sqrt().round().clamp(1, w).int()
    top = (torch.rand(n, generator=generator) * (h - height + 1)).floor().clamp(max=h - height).int()
    left = (torch.rand(n, generator=generator) * (w - width + 1)).floor().clamp(max=w - width).int()
    flipped = _chosen(n, p, generator).to(images.device)
    boxes = torch.stack([top, top + height, left, left + width], dim=1).tolist()
    parts = [_floats(x[None, :, a:b, c:d]) for x, (a, b, c, d) in zip(images, boxes, strict=True)]
    crops = torch.cat([functional.interpolate(x, (size, size), mode="bilinear", antialias=True) for x in parts])
    crops[flipped] = crops[flipped].flip(3)
    return crops


def centre_crop(images: Tensor, size: int) -> Tensor:
    """Crop the middle ``size`` × ``size`` of each image."""
    top, left = (room // 2 for room in _room(images, size))
    return _floats(images[:, :, top : top + size, left : left + size])


def _room(images: Tensor, size: int) -> tuple[int, int]:
    """Return how far a window can move down and right."""
    _check_images(images)
    h, w = images.shape[2:]
    if not 1 <= size <= min(h, w):
        raise ValueError(f"a crop of {size} × {size} does not fit images of {h} × {w}")
    return h - size, w - size


# -------------------- ambiguity in training --------------------


@dataclass(frozen=True, eq=False)
class Batch:
    """Images, their label sets, which of them are mixtures, and the share λ of the first image in the mixtures."""

    images: Tensor
    labels: LabelSets
    mixed: Tensor
    lam: float | None = None


def apply_ambiguity(
    images: Tensor,
    labels: Tensor,
    kinds: Sequence[str],
    *,
    beta: float = 1.0,
    seed: int,
    epoch: int,
    step: int,
) -> Batch:
    """Build a training batch with the given kinds of ambiguity, each with its defaults.

    ``low_resolution``, ``blur`` and ``occlusion`` change the images, in this order; then ``mixup`` or ``cutmix`` adds
    as many mixed images, λ ~ Beta(``beta``, ``beta``). With both, each batch draws one of the two. Every kind has its
    own random stream: adding one changes nothing about the others.
    """
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for kind in kinds:
        _check_kind(kind, KINDS)
    images = _floats(images)
    if "low_resolution" in kinds:
        images = low_resolution(images)
    if "blur" in kinds:
        images = blur(images, random_stream("blur", seed, epoch, step))
    if "occlusion" in kinds:
        images = occlude(images, random_stream("occlusion", seed, epoch, step))
    mixing = [kind for kind in MIXTURES if kind in kinds]
    if not mixing:
        unmixed = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        return Batch(images, LabelSets(_labels_of(images, labels)), unmixed)
    choice = torch.randint(len(mixing), (), generator=random_stream("kind of mixture", seed, epoch, step))
    generator = random_stream("mixture", seed, epoch, step)
    return with_mixtures(images, labels, mixing[int(choice)], generator, beta=beta)


def with_mixtures(
    images: Tensor,
    labels: Tensor,
    kind: str,
    generator: torch.Generator,
    *,
    lam: float | None = None,
    beta: float = 1.0,
) -> Batch:
    """Build a batch of 2n: the n images, then n mixtures of them; ``kind`` is ``mixup`` or ``cutmix``."""
    _check_kind(kind, MIXTURES)
    images = _floats(images)
    lam = _lambda(lam, generator, beta)
    mixtures, sets = (mixup if kind == "mixup" else cutmix)(images, labels, generator, lam=lam)
    is_mixed = torch.arange(2 * len(images), device=images.device) >= len(images)
    originals = LabelSets(_labels_of(images, labels))
    return Batch(torch.cat([images, mixtures]), LabelSets.cat([originals, sets]), is_mixed, lam)


def mixup(
    images: Tensor, labels: Tensor, generator: torch.Generator, *, lam: float | None = None
) -> tuple[Tensor, LabelSets]:
    """Mix images, x = λx₁ + (1−λ)x₂, with the label set {l₁, l₂} (Zhang et al., 2018).

    One λ ~ Beta(1, 1) for the batch, unless ``lam`` is given. x₂ runs through a random permutation of the batch that
    is a single cycle: no image is its own partner, every image is one once.
    """
    x, lam = _floats(images), _lambda(lam, generator)
    partner, sets = _partners(x, labels, generator)
    return lam * x + (1 - lam) * x[partner], sets


def cutmix(
    images: Tensor, labels: Tensor, generator: torch.Generator, *, lam: float | None = None
) -> tuple[Tensor, LabelSets]:
    """Paste into x₁ a box of x₂ with the share 1 − λ of the area; the label set is {l₁, l₂} (Yun et al., 2019).

    λ and partners are as in ``mixup``. The box is the same for the whole batch, has the image's aspect ratio and lies
    inside the image (in the original the border may clip it), so its area is exact up to rounding to whole pixels.
    """
    x, lam = _floats(images), _lambda(lam, generator)
    partner, sets = _partners(x, labels, generator)
    h, w = x.shape[2:]
    rows, columns = _boxes(torch.tensor([1 - lam]), torch.tensor([h / w]), h, w, generator)
    return torch.where(rows.to(x.device) & columns.to(x.device), x[partner], x), sets


def _lambda(lam: float | None, generator: torch.Generator, beta: float = 1.0) -> float:
    if lam is None and beta != 1:
        seed = int(torch.randint(1 << 62, (), generator=generator))
        return float(np.random.default_rng(seed).beta(beta, beta))
    if lam is None:
        return float(torch.rand((), dtype=torch.float64, generator=generator))  # Beta(1, 1) is uniform
    if not 0 <= lam <= 1:
        raise ValueError(f"λ must lie in 0 … 1, got {lam}")
    return lam


def _partners(x: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, LabelSets]:
    if len(x) < 2:
        raise ValueError(f"mixing needs two images or more, got {len(x)}")
    cycle = torch.randperm(len(x), generator=generator)
    partner = torch.empty_like(cycle).scatter_(0, cycle, cycle.roll(-1)).to(x.device)
    labels = _labels_of(x, labels)
    return partner, LabelSets.mixed(labels, labels[partner])


def low_resolution(images: Tensor, factor: float = 200 / 256) -> Tensor:
    """Resize images to ``factor`` of their size and back, bilinear, with antialiasing: fine detail is lost."""
    images = _floats(images)
    if not 0 < factor <= 1:
        raise ValueError(f"the resolution factor must lie above 0 and at most at 1, got {factor}")
    size = [int(side) for side in images.shape[2:]]
    small = [max(1, round(side * factor)) for side in size]
    if small == size:
        return images
    down = functional.interpolate(full_precision(images), small, mode="bilinear", antialias=True)
    return functional.interpolate(down, size, mode="bilinear").to(images.dtype)


def blur(
    images: Tensor, generator: torch.Generator, p: float = 0.5, sigma: float | tuple[float, float] = (0.1, 2.0)
) -> Tensor:
    """Blur each image with probability p by a Gaussian exp(−t²/2σ²), its σ in pixels uniform in a range.

    A single number fixes σ; the default range is SimCLR's. The Gaussian ends at 3 × the largest σ. The border is
    mirrored with the edge repeated, so the mean brightness stays.
    """
    images = _floats(images)
    low, high = _range("sigma", sigma, math.inf)
    chosen = _chosen(len(images), p, generator)
    sigmas = (low + (high - low) * torch.rand(len(images), dtype=torch.float64, generator=generator))[chosen]
    if not len(chosen):
        return images
    radius = math.ceil(3 * high)
    taps = torch.arange(-radius, radius + 1)
    kernel = (-taps.square() / (2 * sigmas[:, None].clamp_min(1e-3).square())).exp()  # σ = 0: the image itself
    kernel = (kernel / kernel.sum(dim=1, keepdim=True)).repeat_interleave(images.shape[1], dim=0)
    chosen = chosen.to(images.device)
    h, w = images.shape[2:]
    x = full_precision(images[chosen]).flatten(0, 1).unsqueeze(0)  # [1, m·c, h, w], one group a plane
    kernel = kernel.to(x.dtype).to(x.device)
    x = functional.conv2d(x[:, :, _mirrored(h, radius, x.device)], kernel[:, None, :, None], groups=len(kernel))
    x = functional.conv2d(x[..., _mirrored(w, radius, x.device)], kernel[:, None, None, :], groups=len(kernel))
    return images.index_copy(0, chosen, x.reshape(-1, *images.shape[1:]).to(images.dtype))


def occlude(
    images: Tensor, generator: torch.Generator, p: float = 0.5, share: float | tuple[float, float] = (0.02, 0.33)
) -> Tensor:
    """Hide a random rectangle of each image with probability p, as in random erasing (Zhong et al., 2020).

    The rectangle has a share of the area uniform in a range (a single number fixes it) and a height : width log-uniform
    in 0.3 … 3.3, as far as it fits, and is filled with the image's own mean colour.
    """
    images = _floats(images)
    low, high = _range("share", share, 1.0)
    n, _, h, w = images.shape
    chosen = _chosen(n, p, generator)
    shares = low + (high - low) * torch.rand(n, generator=generator)
    log_fits = (shares * h / w).log(), (h / (w * shares)).log()  # where neither side is longer than the image's
    narrow, wide = (torch.tensor(math.log(r)).clamp(*log_fits) for r in (0.3, 3.3))
    ratio = (narrow + (wide - narrow) * torch.rand(n, generator=generator)).exp()
    rows, columns = _boxes(shares, ratio, h, w, generator)
    hit = torch.zeros(n, 1, 1, 1, dtype=torch.bool).index_fill_(0, chosen, True)
    hidden = (hit & rows).to(images.device) & columns.to(images.device)
    return torch.where(hidden, images.mean(dim=(2, 3), keepdim=True), images)


# -------------------- views in evaluation --------------------


Kind = Literal["clean", "mixed", "crop", "blur", "low_resolution", "occlusion"]


@dataclass(frozen=True)
class View:
    """A way in which evaluation sees images, and its strength.

    A view is a pure function of an image's number and the seed, so every model sees the same pixels.

    ======================  ====================================================================
    ``clean``               the centre of the image
    ``mixed``               strength = the share of another image, of another class
    ``crop``                strength = the share of the side that is cut away at a random place; enlarged again
    ``blur``                strength = σ of the Gaussian, as a share of the side
    ``low_resolution``      strength = the share of the resolution that is lost, each way
    ``occlusion``           strength = the share of the area that is hidden by a grey box
    ======================  ====================================================================
    """

    kind: Kind = "clean"
    strength: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(unknown_name("view", self.kind, get_args(Kind)))
        if not 0 <= self.strength < 1 or math.isnan(self.strength):
            raise ValueError(f"the strength of a view lies in 0 … 1, got {self.strength}")

    def __str__(self) -> str:
        return self.kind if self.kind in ("clean", "mixed") else f"{self.kind} {self.strength:g}"

    def images(self, pixels: Pixels, numbers: Tensor, size: int) -> Tensor:
        """Return the chosen images in this view, floats [n, 3, size, size]."""
        images = centre_crop(pixels.batch(numbers), size)
        if self.kind == "mixed":
            partner = other_class(pixels.images.labels[pixels.usable], self.seed)
            place = torch.searchsorted(pixels.usable, numbers)
            others = centre_crop(pixels.batch(pixels.usable[partner[place]]), size)
            return (1 - self.strength) * images + self.strength * others
        if self.kind == "blur" and self.strength:
            return blur(images, random_stream("view"), p=1.0, sigma=self.strength * size)
        if self.kind == "low_resolution":
            return low_resolution(images, 1 - self.strength)
        if self.kind == "clean":
            return images
        seen = [self._degrade_one(image, number) for image, number in zip(images, numbers.tolist(), strict=True)]
        return torch.cat(seen)

    def _degrade_one(self, image: Tensor, number: int) -> Tensor:
        """Degrade one image by its own random draw, which does not depend on the other images."""
        generator = random_stream(f"view {self.kind}", self.seed, number)
        if self.kind == "occlusion":
            return occlude(image[None], generator, p=1.0, share=self.strength)
        size = image.shape[1]
        side = max(1, round(size * (1 - self.strength)))
        top, left = (int(torch.randint(size - side + 1, (), generator=generator)) for _ in range(2))
        window = image[None, :, top : top + side, left : left + side]
        return functional.interpolate(window, size, mode="bilinear", antialias=True)


CLEAN = View()
MIXED = View("mixed", 0.5)
_STRENGTHS: dict[Kind, tuple[float, ...]] = {
    "crop": (0.2, 0.4, 0.6),
    "blur": (0.01, 0.02, 0.04),
    "low_resolution": (0.5, 0.75, 0.875),
    "occlusion": (0.1, 0.25, 0.5),
}
GRADED = tuple(View(kind, strength) for kind, strengths in _STRENGTHS.items() for strength in strengths)
MIDDLE = GRADED[1::3]  # the middle one of the three strengths of each kind


def other_class(labels: Tensor, seed: int) -> Tensor:
    """Draw for each of n labels the place of a different label, by a seeded permutation.

    If the permutation gives the same class, the next place of another class is taken (cyclically). So one partner may
    serve several images.
    """
    if len(labels) == 0 or bool((labels == labels[0]).all()):
        raise ValueError("mixing images of different classes needs two classes")
    order = torch.randperm(len(labels), generator=random_stream("partners", seed))
    partner = order.roll(1)[order.argsort()]  # the one before it in a random cycle
    place = order.argsort()[partner]
    unequal = labels[partner] != labels
    while not bool(unequal.all()):
        place = torch.where(unequal, place, (place + 1) % len(labels))
        partner = order[place]
        unequal = labels[partner] != labels
    return partner


# -------------------- shared by the above --------------------


def _boxes(shares: Tensor, ratio: Tensor, h: int, w: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw boxes at random places with given shares of the area and height : width.

    Returns the masks of their rows [n, 1, h, 1] and columns [n, 1, 1, w].
    """
    height = (shares * ratio * (h * w)).sqrt().round().clamp(1, h)
    width = (shares * (h * w) / height).round().clamp(0, w)

    def inside(length: Tensor, side: int) -> Tensor:
        start = (torch.rand(len(length), generator=generator) * (side - length + 1)).floor().clamp(max=side - length)
        place = torch.arange(side)
        return (place >= start[:, None]) & (place < (start + length)[:, None])

    return inside(height, h)[:, None, :, None], inside(width, w)[:, None, None, :]


def _mirrored(side: int, radius: int, device: torch.device) -> Tensor:
    """Return the places −radius … side + radius − 1 of an image that continues mirrored: … 1 0 | 0 1 … | … ."""
    place = torch.arange(-radius, side + radius, device=device) % (2 * side)
    return torch.minimum(place, 2 * side - 1 - place)


def _chosen(n: int, p: float, generator: torch.Generator) -> Tensor:
    """Draw each of n images with probability p; return their numbers."""
    if not 0 <= p <= 1:
        raise ValueError(f"a probability lies in 0 … 1, got {p}")
    return (torch.rand(n, generator=generator) < p).nonzero().flatten()


def _range(name: str, value: float | tuple[float, float], most: float) -> tuple[float, float]:
    low, high = value if isinstance(value, tuple | list) else (value, value)
    if not 0 <= low <= high <= most or math.isinf(high):
        raise ValueError(f"{name} must be a number or a range (low, high) of 0 … {most}, got {value}")
    return low, high


def _check_kind(kind: str, known: tuple[str, ...]) -> None:
    if kind not in known:
        raise ValueError(unknown_name("kind of ambiguity", kind, known))


def _check_images(images: Tensor) -> None:
    if images.ndim != 4 or not images.numel() or not (images.is_floating_point() or images.dtype == torch.uint8):
        raise ValueError(
            "images must be a batch [n, c, h, w] of floats or uint8 with at least one pixel, "
            f"got {images.dtype} of shape {list(images.shape)}"
        )


def _floats(images: Tensor) -> Tensor:
    _check_images(images)
    return images.float() / 255 if images.dtype == torch.uint8 else images


def _labels_of(images: Tensor, labels: Tensor) -> Tensor:
    if len(labels) != len(images):
        raise ValueError(f"{len(images)} images but {len(labels)} labels")
    return labels.to(images.device)
