"""How good a model is between and after epochs: retrieval by the plain metric on s."""

from collections.abc import Callable

import torch

from idml.data.pixel_cache import Pixels
from idml.embeddings import Embeddings
from idml.evaluation import evaluate_retrieval
from idml.model import Model
from idml.model.feature_cache import embed_view
from idml.training.config import Train


class Judge:
    """Embeds sets of images as a test sees them and takes their figures; what does not learn sees each set once."""

    def __init__(self, part: Train, progress: Callable[[int, int], None]) -> None:
        self.part, self.progress = part, progress

    def embeddings(self, model: Model, pixels: Pixels) -> Embeddings:
        """The embeddings of the usable images."""
        keep, last = self.part != "all", self.part == "last"
        return embed_view(model, pixels, keep=keep, last=last, progress=self.progress)

    def has_pairs(self, pixels: Pixels, gallery: Pixels | None = None) -> bool:
        """Whether any image has another of its class to find."""
        labels = pixels.images.labels[pixels.usable]
        if gallery is not None:
            return bool(torch.isin(labels, gallery.images.labels[gallery.usable]).any())
        return bool((labels.bincount() > 1).any())

    def require_pairs(self, pixels: Pixels, gallery: Pixels | None) -> None:
        """Refuse images that cannot be judged by."""
        if not self.has_pairs(pixels, gallery):
            count = len(pixels.usable)
            raise ValueError(f"{pixels.images.name}: none of the {count} images has another image of its class to find")

    def figures(
        self, model: Model, pixels: Pixels, gallery: Pixels | None = None, embeddings: Embeddings | None = None
    ) -> dict[str, float]:
        """Recall@1, R-Precision and MAP@R, among the images themselves or in a gallery; ``embeddings`` if known."""
        figures = evaluate_retrieval(
            self.embeddings(model, pixels) if embeddings is None else embeddings,
            pixels.images.labels[pixels.usable],
            gallery=None if gallery is None else self.embeddings(model, gallery),
            gallery_labels=None if gallery is None else gallery.images.labels[gallery.usable],
            recall_at=(1,),
        )
        return {key: float(figures[key] or 0.0) for key in ("recall@1", "r_precision", "map@r")}
