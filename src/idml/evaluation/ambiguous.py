"""Whether ‖u‖ tells the images that are known to be ambiguous."""

import torch
from torch import Tensor

from idml.data.augment import MIXED
from idml.data.pixel_cache import Pixels
from idml.evaluation.uncertainty import auroc
from idml.model import Model
from idml.model.feature_cache import CLEAN, embed_view


def tells_ambiguous(model: Model, pixels: Pixels, *, keep: bool = False) -> dict[str, float]:
    """AUROC of ‖u‖ for mixed images against clean ones, and for images with a twin in another class against the rest.

    The second only where the data set knows its twins (glyphs). 0.5 is chance. ``keep`` is `embed_view`'s.
    """
    clean, mixed = (embed_view(model, pixels, view, keep=keep).level for view in (CLEAN, MIXED))
    told = {"auroc_mixed": auroc_above(mixed, clean)}
    if pixels.images.ambiguous is not None:
        told["auroc_twins"] = auroc(clean, pixels.images.ambiguous[pixels.usable])
    return told


def auroc_above(high: Tensor, low: Tensor) -> float:
    """P(a value of ``high`` > a value of ``low``), ties counted half."""
    both = torch.cat([high, low])
    return auroc(both, torch.arange(len(both)) < len(high))
