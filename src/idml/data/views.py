"""How a test sees images: as they are, mixed with another, or degraded at a graded strength.

A view is a pure function of the image's number and the seed, so that every model is shown the same pixels.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from idml.data.ambiguity import blur, centre_crop, low_resolution, occlude
from idml.data.pixels import Pixels
from idml.data.sampling import random_stream

Kind = Literal["clean", "mixed", "crop", "blur", "low_resolution", "occlusion"]


@dataclass(frozen=True)
class View:
    """A way of seeing images, and how strong it is.

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
            raise ValueError(f"unknown view {self.kind!r}; known are {', '.join(get_args(Kind))}")
        if not 0 <= self.strength < 1 or math.isnan(self.strength):
            raise ValueError(f"the strength of a view lies in 0 … 1, got {self.strength}")

    def __str__(self) -> str:
        return self.kind if self.kind in ("clean", "mixed") else f"{self.kind} {self.strength:g}"

    def images(self, pixels: Pixels, numbers: Tensor, size: int) -> Tensor:
        """The chosen images seen this way, floats [n, 3, size, size]."""
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
        seen = [self._alone(image, number) for image, number in zip(images, numbers.tolist(), strict=True)]
        return torch.cat(seen)

    def _alone(self, image: Tensor, number: int) -> Tensor:
        """What is drawn for each image by itself, so that it does not depend on its company."""
        generator = random_stream(f"view {self.kind}", self.seed, number)
        if self.kind == "occlusion":
            return occlude(image[None], generator, p=1.0, share=self.strength)
        size = image.shape[1]
        side = max(1, round(size * (1 - self.strength)))
        top, left = (int(torch.randint(size - side + 1, (), generator=generator)) for _ in range(2))
        window = image[None, :, top : top + side, left : left + side]
        return functional.interpolate(window, size, mode="bilinear", antialias=True)


MIXED = View("mixed", 0.5)
_STRENGTHS: dict[Kind, tuple[float, ...]] = {
    "crop": (0.2, 0.4, 0.6),
    "blur": (0.01, 0.02, 0.04),
    "low_resolution": (0.5, 0.75, 0.875),
    "occlusion": (0.1, 0.25, 0.5),
}
GRADED = tuple(View(kind, strength) for kind, strengths in _STRENGTHS.items() for strength in strengths)


_HARDEST = {"blur": 0.04, "low_resolution": 0.875, "mixed": 0.5}  # as strong as the strongest views


@dataclass(frozen=True, eq=False)
class Degradations:
    """How each of n images is made harder: the number of its kind in `KINDS`, and the strength 0 … 1, uniform.

    At strength 1 a blur has σ = 0.04 of the side, low resolution has lost 7/8 of the pixels each way, and half of a
    mixture is its partner.
    """

    KINDS: ClassVar[tuple[str, ...]] = tuple(_HARDEST)
    kind: Tensor
    strength: Tensor
    partner: Tensor

    @classmethod
    def draw(cls, n: int, generator: torch.Generator) -> "Degradations":
        """Every kind equally often; partners run through a random cycle of the images."""
        kind = torch.randperm(n, generator=generator) % len(cls.KINDS)
        strength = torch.rand(n, generator=generator)
        cycle = torch.randperm(n, generator=generator)
        return cls(kind, strength, torch.empty_like(cycle).scatter_(0, cycle, cycle.roll(-1)))

    def of(self, images: Tensor) -> Tensor:
        """The degraded copies of floats [n, c, h, w]."""
        size, copies = images.shape[2], []
        for image, number, t, other in zip(
            images, self.kind.tolist(), self.strength.tolist(), self.partner, strict=True
        ):
            kind = self.KINDS[number]
            strength = t * _HARDEST[kind]
            if kind == "blur":
                copies.append(blur(image[None], random_stream("view"), p=1.0, sigma=strength * size))
            elif kind == "low_resolution":
                copies.append(low_resolution(image[None], 1 - strength))
            else:
                copies.append((1 - strength) * image[None] + strength * images[other][None])
        return torch.cat(copies)

    def to(self, device: torch.device) -> "Degradations":
        """The same on a device."""
        return Degradations(self.kind.to(device), self.strength.to(device), self.partner.to(device))


def other_class(labels: Tensor, seed: int) -> Tensor:
    """For each of n labels the place of one that differs from it, drawn by a seeded permutation.

    Where the permutation meets its own class, the next place (going round) of another class is taken, so a partner may
    serve more than one image there.
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
