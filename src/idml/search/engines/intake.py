"""Embeddings as they come in, to be stored or searched for, checked and turned into rows."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from idml.embeddings import Embeddings, require_finite
from idml.metric import IntrospectiveMetric
from idml.search.engines import Item, Properties
from idml.search.engines.exact import LARGEST, Side
from idml.search.engines.vectors import FLOAT, Rows


def item_rows(embeddings: Embeddings, properties: Properties) -> tuple[list[Rows], list[float]]:
    """The rows of each vector file, and the levels ‖u‖."""
    rows = [_semantic(embeddings, properties)]
    if properties.uncertainty:
        rows.append(_uncertainty(embeddings, properties))
    levels: list[float] = embeddings.detach().level.float().tolist()
    return rows, levels


def query_rows(queries: Embeddings, properties: Properties, metric: IntrospectiveMetric | None) -> Side:
    """Queries ready for `ExactSearch`, with u if there is a metric."""
    if not isinstance(queries, Embeddings):
        raise ValueError(f"queries must be Embeddings, got {type(queries).__name__}")
    semantic = _semantic(queries, properties)
    if metric is None:
        return Side.of(semantic, semantic[:, :0])
    if not properties.uncertainty:
        raise ValueError("this gallery keeps no uncertainty vectors: it is searched without the introspective metric")
    return Side.of(semantic, _uncertainty(queries, properties))


def ranking(metric: IntrospectiveMetric | None) -> IntrospectiveMetric | None:
    """The metric if it changes the order of items, None if it is the distance of unit vectors."""
    if metric is None or metric.rule == "off":
        return None
    if metric.rule != "similar":
        raise ValueError(f"rule {metric.rule!r} does not rank images; rules that do: 'similar', 'off'")
    return metric


def check_batch(items: Sequence[Item], embeddings: Embeddings, thumbnails: Sequence[bytes] | None) -> list[bytes]:
    """The thumbnails, one for each item; whatever does not fit together is refused."""
    if not isinstance(embeddings, Embeddings):
        raise ValueError(f"items come with Embeddings, got {type(embeddings).__name__}")
    if not all(isinstance(item, Item) for item in items):
        raise ValueError("only Items can be added")
    images = [b""] * len(items) if thumbnails is None else list(thumbnails)
    if not all(isinstance(image, bytes) for image in images):
        raise ValueError("thumbnails must be bytes")
    if not len(items) == len(embeddings) == len(images):
        raise ValueError(f"{len(items)} items, {len(embeddings)} embeddings and {len(images)} thumbnails do not fit")
    return images


def _semantic(embeddings: Embeddings, properties: Properties) -> Rows:
    width = embeddings.semantic.shape[1]
    if width != properties.dimensions:
        raise ValueError(f"the embeddings have {width} dimensions, the gallery {properties.dimensions}")
    return _rows(embeddings.detach().unit)


def _uncertainty(embeddings: Embeddings, properties: Properties) -> Rows:
    u, width = embeddings.uncertainty.detach(), properties.uncertainty
    if u.shape[1] == 0:  # certain: u = 0
        u = u.new_zeros(len(u), width)
    if u.shape[1] != width:
        raise ValueError(f"the embeddings have {u.shape[1]} uncertainty dimensions, the gallery {width}")
    require_finite("uncertainty", u)
    if u.numel() and float(u.abs().max()) > LARGEST / math.sqrt(width):
        raise ValueError(f"the uncertainty reaches {float(u.abs().max()):.0e}, which is more than can be compared")
    return _rows(u)


def _rows(x: Tensor) -> Rows:
    return np.ascontiguousarray(x.to("cpu", torch.float32).numpy(), FLOAT)
