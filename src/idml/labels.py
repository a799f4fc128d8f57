"""Label sets: which images match.

A mixed image x = λx₁ + (1−λ)x₂ carries the *set* {l₁, l₂}; two images match when their sets intersect.
A plain label is a set of one.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from idml.embeddings import Index, as_rows

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FEW = 9  # up to this many comparisons per pair, comparing beats counting common labels


class LabelSets:
    """One set of class numbers for each image, held as a padded integer tensor ``ids`` [n, k].

    >>> y = LabelSets(torch.tensor([0, 1, 2]))
    >>> z = LabelSets.mixed(torch.tensor([0, 1]), torch.tensor([2, 1]))
    >>> y.matches(z)
    tensor([[ True, False],
            [False,  True],
            [ True, False]])
    """

    ids: Tensor

    def __init__(self, labels: Tensor) -> None:
        if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.dtype not in _INTEGERS:
            got = (
                f"{labels.dtype} of shape {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
            )
            raise ValueError(f"labels must be a 1-D tensor of integers, got {got}")
        if len(labels) and int(labels.min()) < 0:
            raise ValueError(f"labels must be 0 or larger, got {int(labels.min())}")
        self.ids = labels.long().unsqueeze(1)

    @classmethod
    def _of_ids(cls, ids: Tensor) -> "LabelSets":
        new = cls.__new__(cls)
        new.ids = ids
        return new

    @classmethod
    def mixed(cls, first: Tensor, second: Tensor) -> "LabelSets":
        """Build the sets {l₁, l₂} of images mixed from two images."""
        a, b = cls(first), cls(second)
        if len(a) != len(b):
            raise ValueError(f"the two lists of labels differ in length: {len(a)} and {len(b)}")
        if a.ids.device != b.ids.device:
            raise ValueError(f"the labels are on {a.ids.device} and {b.ids.device}")
        return cls._of_ids(torch.cat([a.ids, b.ids], dim=1))

    @classmethod
    def of(cls, sets: Iterable[Iterable[int]], device: torch.device | str | None = None) -> "LabelSets":
        """Build sets with any number of labels for each image."""
        lists = [sorted(set(labels)) for labels in sets]
        if not all(lists):
            raise ValueError(f"image {next(i for i, x in enumerate(lists) if not x)} has no label; every set needs one")
        width = max((len(labels) for labels in lists), default=1)
        flat = cls(torch.tensor([label for labels in lists for label in labels], dtype=torch.long))
        ids = torch.full((len(lists), width), -1)
        sizes = torch.tensor([len(labels) for labels in lists], dtype=torch.long)
        ids[torch.arange(width) < sizes.unsqueeze(1)] = flat.ids.squeeze(1)
        return cls._of_ids(ids.to(device))

    @classmethod
    def cat(cls, parts: "Sequence[LabelSets]") -> "LabelSets":
        """Join several batches into one; smaller sets are padded."""
        if not parts:
            raise ValueError("nothing to concatenate: the list of label sets is empty")
        width = max(p.ids.shape[1] for p in parts)
        return cls._of_ids(
            torch.cat([torch.nn.functional.pad(p.ids, (0, width - p.ids.shape[1]), value=-1) for p in parts])
        )

    def matches(self, other: "LabelSets | None" = None) -> Tensor:
        """Return which sets intersect, bool [n, m]; without ``other``, the batch against itself."""
        a, b = self.ids, (self if other is None else other).ids
        if a.device != b.device:
            raise ValueError(f"label sets are on {a.device} and {b.device}")
        if a.shape[1] * b.shape[1] > _FEW:
            return self._count_common(b)
        b = b.masked_fill(b < 0, -2)  # padding equals nothing, not even padding
        out = a[:, :1] == b[:, 0]
        for i in range(a.shape[1]):
            for j in range(b.shape[1]):
                if i or j:
                    out |= a[:, i, None] == b[:, j]
        return out

    def _count_common(self, b: Tensor) -> Tensor:
        """Match large sets: incidence [n, labels] times incidence [labels, m] counts the common labels."""
        known, numbers = torch.unique(torch.cat([self.ids.flatten(), b.flatten()]), return_inverse=True)
        has_padding = bool(known[0] < 0) if len(known) else False
        numbers_a, numbers_b = numbers.split([self.ids.numel(), b.numel()])

        def incidence(n: Tensor, rows: int) -> Tensor:
            table = torch.zeros(rows, len(known), device=n.device).scatter_(1, n.view(rows, -1), 1.0)
            return table[:, 1:] if has_padding else table

        return incidence(numbers_a, len(self)) @ incidence(numbers_b, len(b)).T > 0

    def in_classes(self, num_classes: int) -> Tensor:
        """Return which of the classes 0 … num_classes−1 each set holds, bool [n, num_classes]."""
        self.check_below(num_classes)
        ids = torch.where(self.ids < 0, self.ids[:, :1], self.ids)  # padding repeats the first label
        return torch.zeros(len(self), num_classes, dtype=torch.bool, device=ids.device).scatter_(1, ids, True)

    def check_below(self, num_classes: int) -> None:
        """Raise ``ValueError`` if a label does not name one of ``num_classes`` classes."""
        if len(self) and int(self.ids.max()) >= num_classes:
            raise ValueError(f"label {int(self.ids.max())} is outside the {num_classes} classes 0 … {num_classes - 1}")

    def to(self, device: torch.device | str) -> "LabelSets":
        """Move the sets to a device."""
        return self._of_ids(self.ids.to(device))

    def tolist(self) -> list[list[int]]:
        """Return the sets as sorted lists."""
        return [sorted({i for i in row if i >= 0}) for row in self.ids.tolist()]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Index) -> "LabelSets":
        return self._of_ids(self.ids[as_rows(index, len(self))])

    def __repr__(self) -> str:
        shown = ", ".join("{" + ", ".join(map(str, s)) + "}" for s in self[:4].tolist())
        return f"LabelSets({len(self)} images: {shown}{', …' if len(self) > 4 else ''})"


def pair_masks(matches: Tensor, others: bool = False) -> tuple[Tensor, Tensor]:
    """Return the positive and the negative pairs of a batch against itself; no image is paired with itself.

    With ``others`` the columns are other images than the rows, so every pair counts.
    """
    if others:
        return matches.clone(), ~matches
    return matches.clone().fill_diagonal_(False), (~matches).fill_diagonal_(False)
