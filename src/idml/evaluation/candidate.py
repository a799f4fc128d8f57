"""A model and the images it is tested on: what it makes of them in a view, and what it finds for them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from idml.data.augment import View, other_class
from idml.data.pixel_cache import Pixels, load_pixels
from idml.data.sources import Dataset, ImageSet
from idml.embeddings import Embeddings
from idml.evaluation.scores import NeighbourScores, neighbour_scores
from idml.metric import IntrospectiveMetric
from idml.model import Model, load_model
from idml.model.feature_cache import CLEAN, view_features

Counted = Callable[[str], Callable[[int, int], None]]
Note = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model, the test images (queries) and, where the data set has one of its own, the gallery.

    Without such a gallery a query is searched among the test images as they are, itself left out by its id; a mixed
    query leaves out both of its parents, for it is half a copy of each.
    """

    model: Model
    queries: Pixels
    gallery: Pixels | None
    metric: IntrospectiveMetric | None
    counted: Counted

    @classmethod
    def load(
        cls, run: Path, dataset: Dataset, metric: IntrospectiveMetric | None, counted: Counted, note: Note
    ) -> "Candidate":
        """The model of a run, and the test images at its size."""
        model = load_model(run)
        if metric is not None and model.config.uncertainty == "gaussian":
            raise ValueError(f"{run}: the introspective metric needs u, and this model gives Gaussians")
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        gallery = None if dataset.gallery is None else pixels_of(model, dataset.gallery, counted, note)
        loaded = cls(model, pixels_of(model, dataset.test, counted, note), gallery, metric, counted)
        found = loaded.gallery_labels.bincount(minlength=len(dataset.test.classes))[loaded.labels]
        if not bool((found > (1 if gallery is None else 0)).any()):  # said before the trunk is asked for anything
            raise ValueError(
                f"{dataset.test.name}: none of the {len(found)} images has another image of its class to find"
            )
        return loaded

    @property
    def labels(self) -> Tensor:
        """The class of each query."""
        return self.queries.images.labels[self.queries.usable]

    @property
    def gallery_labels(self) -> Tensor:
        """The class of each image that is searched."""
        searched = self.gallery or self.queries
        return searched.images.labels[searched.usable]

    @cached_property
    def shelf(self) -> Embeddings:
        """The embeddings of the images that are searched."""
        return self.look(CLEAN, self.gallery)[1]

    def look(self, view: View, pixels: Pixels | None = None) -> tuple[Tensor, Embeddings]:
        """The features and the embeddings of the queries (or of other images) in a view, all finite."""
        pixels = pixels or self.queries
        images = pixels.images
        features = view_features(self.model, pixels, view, progress=self.counted(f"of {images.name}, {view}"))
        embeddings = self.model.embed_features(features)
        sound = [x.isfinite().all(dim=1) for x in (features, embeddings.semantic, embeddings.uncertainty)]
        bad = (~torch.stack(sound).all(dim=0)).nonzero().flatten()
        if len(bad):
            first = images.sources[int(pixels.usable[bad[0]])].name
            raise ValueError(
                f"{images.name}, {view}: the embeddings of {len(bad)} of {len(features)} images hold NaN or infinity "
                f"(first: {first!r})"
            )
        return features, embeddings

    def search(self, embeddings: Embeddings, view: View) -> NeighbourScores:
        """What is found for the queries as embedded in a view; a mixed one may find either parent's class."""
        n, device = len(embeddings), self.model.semantic.weight.device
        queries, shelf, labels, theirs = embeddings.to(device), self.shelf.to(device), self.labels, self.gallery_labels
        everyone = torch.arange(n)
        mixed = view.kind == "mixed"
        partner = other_class(labels, view.seed) if mixed else everyone
        parts, groups = [], disjoint(partner) if mixed and self.gallery is None else [everyone]
        for rows in groups:
            ids = everyone.clone()
            ids[partner[rows]] = rows  # the other parent goes by the query's id
            parts.append(
                neighbour_scores(
                    queries[rows.to(device)],
                    labels[rows],
                    gallery=shelf,
                    gallery_labels=theirs,
                    metric=self.metric,
                    query_ids=rows if self.gallery is None else None,
                    gallery_ids=ids if self.gallery is None else None,
                )
            )
        back = torch.cat(groups).argsort()
        indices = torch.cat([part.indices.cpu() for part in parts])[back]
        first = theirs[indices[:, 0]]
        return NeighbourScores(
            {name: torch.cat([part.scores[name].cpu() for part in parts])[back] for name in parts[0].scores},
            (first == labels) | (first == labels[partner]),
            torch.cat([part.singleton.cpu() for part in parts])[back],
            indices,
        )


def pixels_of(model: Model, images: ImageSet, counted: Counted, note: Note) -> Pixels:
    """The images at the model's working size; what cannot be read is said and left out."""
    pixels = load_pixels(images, round(model.trunk.image_size * 256 / 224), progress=counted("decoded"))
    if pixels.broken:
        first = next(iter(pixels.broken.values()))
        note(f"{images.name}: {len(pixels.broken)} of {len(images)} images left out (first: {first})")
    return pixels


def disjoint(partner: Tensor) -> list[Tensor]:
    """The pairs (i, partner[i]) in groups of which none has an image in two pairs: the numbers i of each.

    A gallery image has one id, so within a group both parents of each mixture can go by one.

    >>> disjoint(torch.tensor([1, 2, 3, 0]))
    [tensor([0, 2]), tensor([1, 3])]
    """
    groups: list[list[int]] = []
    taken: list[set[int]] = []
    for i, j in enumerate(partner.tolist()):
        place = next((g for g, seen in enumerate(taken) if i not in seen and j not in seen), len(groups))
        if place == len(groups):
            groups.append([])
            taken.append(set())
        groups[place].append(i)
        taken[place] |= {i, j}
    return [torch.tensor(group) for group in groups]
