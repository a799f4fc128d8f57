"""Random numbers and batches. Each draw is a pure function of (purpose, seed, epoch, …): nothing is saved to resume."""

import hashlib
import operator

import torch
from torch import Tensor

from idml.labels import LabelSets


def random_stream(purpose: str, *numbers: int) -> torch.Generator:
    """Return the CPU generator of a purpose and some numbers, such as (seed, epoch, step).

    Each purpose has its own stream, so a new draw in one place changes no draw in another.

    >>> torch.rand(2, generator=random_stream("crop", 0, 3, 17))
    tensor([0.5036, 0.2974])
    """
    key = repr((purpose, *(operator.index(number) for number in numbers))).encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)  # 63 bits: a valid seed everywhere


def random_batches(labels: Tensor, batch_size: int, *, seed: int, epoch: int) -> list[Tensor]:
    """Return the image numbers of each batch of an epoch: a permutation, cut; an incomplete last batch is dropped.

    >>> [batch.tolist() for batch in random_batches(torch.tensor([0, 0, 1, 1, 2]), 2, seed=0, epoch=0)]
    [[3, 2], [4, 0]]
    """
    labels = _checked(labels, batch_size)
    order = torch.randperm(len(labels), generator=random_stream("random batches", seed, epoch))
    return list(order[: len(order) // batch_size * batch_size].split(batch_size))


def class_batches(labels: Tensor, batch_size: int, per_class: int, *, seed: int, epoch: int) -> list[Tensor]:
    """Return the image numbers of each batch of an epoch: batch_size / m classes with m = ``per_class`` images each.

    The shuffled images of a class are cut into ⌈n_c / m⌉ groups of m. The last group is filled up from the beginning,
    so an image occurs twice in a batch only if its class has fewer than m images. Then batches of distinct classes are
    drawn until too few groups are left for another one; classes with many groups left are more likely. So an epoch
    misses fewer images than a batch holds. The exception is a class so large that it would have to be in more batches
    than the other classes can fill: each epoch misses another random part of it.

    If m > 1, images that are alone in their class are left out: an image paired with itself teaches nothing.
    """
    labels = _checked(labels, batch_size)
    if per_class < 1 or batch_size % per_class:
        raise ValueError(f"batch_size {batch_size} must be a multiple of per_class {per_class}, which is 1 or larger")
    generator = random_stream("class batches", seed, epoch)
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]  # class after class, each in random order
    sizes = torch.unique(labels, return_counts=True)[1]
    starts = sizes.cumsum(0) - sizes
    enough = sizes >= min(per_class, 2)
    starts, sizes = starts[enough], sizes[enough]

    classes = batch_size // per_class
    if len(sizes) < classes:
        lone = int((~enough).sum())
        raise ValueError(
            f"a batch of {batch_size} with {per_class} images per class needs {classes} classes, but there are "
            f"{len(sizes)}"
            + (f" with two images or more, and {lone} of one image, left out" if lone else "")
            + (
                f": choose a batch_size of {len(sizes) * per_class} or less"
                if len(sizes) > 1
                else ": training compares classes, so it needs two or more (split all trains on every class)"
            )
        )
    left, batches = _groups_to_place((sizes + per_class - 1) // per_class, classes, generator)
    placed = torch.zeros_like(left)
    member = torch.arange(per_class)
    out = []
    for remaining in range(batches, 0, -1):
        # Races of exponential clocks: the chance to be among the first is proportional to the groups left. A class
        # with a group for each remaining batch has to be in all of them, and there is always room for those.
        clock = torch.empty(len(left)).exponential_(generator=generator) / left
        clock[left == remaining] = -1.0
        chosen = clock.topk(classes, largest=False).indices
        within = (placed[chosen, None] * per_class + member) % sizes[chosen, None]
        out.append(order[starts[chosen, None] + within].flatten())
        placed[chosen] += 1
        left[chosen] -= 1
    return out


def _groups_to_place(groups: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Return how many groups of each class an epoch holds, and its number of batches B.

    B is the largest number with Σ min(groups, B) ≥ classes · B: exactly then B batches of distinct classes exist.
    The few groups beyond classes · B are dropped at random.
    """
    low, high = 1, int(groups.sum()) // classes  # the condition holds at 1 and, by concavity, up to B
    while low < high:
        middle = (low + high + 1) // 2
        if int(groups.clamp(max=middle).sum()) >= classes * middle:
            low = middle
        else:
            high = middle - 1
    kept = groups.clamp(max=low)
    owner = torch.arange(len(kept)).repeat_interleave(kept)
    owner = owner[torch.randperm(len(owner), generator=generator)[: classes * low]]
    return torch.bincount(owner, minlength=len(kept)), low


def _checked(labels: Tensor, batch_size: int) -> Tensor:
    labels = LabelSets(labels).ids.squeeze(1).cpu()
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or larger, got {batch_size}")
    if not len(labels):
        raise ValueError("there are no images to make batches from")
    if len(labels) < batch_size:
        hint = f"choose a batch_size of {len(labels)} or less"
        raise ValueError(f"a batch needs {batch_size} images, but there are {len(labels)}: {hint}")
    return labels
