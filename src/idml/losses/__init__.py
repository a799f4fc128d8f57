"""Metric losses with and without the introspective metric, all over label sets.

A new loss is one file here, one line in `LOSSES`, one oracle test.
"""

from typing import Any

from idml.errors import unknown_name
from idml.losses.base import MetricLoss, PairLoss, ProxyLoss
from idml.losses.circle import Circle, circle
from idml.losses.contrastive import Contrastive, contrastive
from idml.losses.fast_ap import FastAP, fast_ap
from idml.losses.margin_dw import MarginDW, margin_dw
from idml.losses.multi_similarity import MultiSimilarity, multi_similarity
from idml.losses.proxy_anchor import ProxyAnchor, proxy_anchor
from idml.losses.proxy_nca import ProxyNCA, proxy_nca
from idml.losses.proxy_nca_pp import ProxyNCAPlusPlus, proxy_nca_pp
from idml.losses.ranked_list import RankedList, ranked_list
from idml.losses.rankmi import RankMI, rankmi
from idml.losses.soft_triple import SoftTriple, soft_triple
from idml.losses.softmax import Softmax, softmax
from idml.losses.triplet_semihard import TripletSemihard, triplet_semihard
from idml.metric import IntrospectiveMetric

LOSSES: dict[str, type[MetricLoss]] = {
    "triplet_semihard": TripletSemihard,
    "proxy_nca": ProxyNCA,
    "fast_ap": FastAP,
    "contrastive": Contrastive,
    "margin_dw": MarginDW,
    "multi_similarity": MultiSimilarity,
    "proxy_anchor": ProxyAnchor,
    "softmax": Softmax,
    "soft_triple": SoftTriple,
    "circle": Circle,
    "proxy_nca_pp": ProxyNCAPlusPlus,
    "ranked_list": RankedList,
    "rankmi": RankMI,
}


def build_loss(
    name: str,
    *,
    metric: IntrospectiveMetric | None = None,
    num_classes: int | None = None,
    embedding_dim: int | None = None,
    **parameters: Any,
) -> MetricLoss:
    """Build the loss called ``name``; ``parameters`` are those of its function.

    ``num_classes`` and ``embedding_dim`` size the proxies of proxy losses; other losses use them to check
    their input. Without ``metric`` the introspective metric with its defaults is used.

    >>> import torch
    >>> loss = build_loss("contrastive", metric=IntrospectiveMetric(rule="off"), negative_margin=0.7)
    >>> loss(torch.eye(3), torch.tensor([0, 0, 1]))
    tensor(1.4142)
    """
    return find_loss(name)(metric=metric, num_classes=num_classes, embedding_dim=embedding_dim, **parameters)


def find_loss(name: str) -> type[MetricLoss]:
    """Return the class of the loss called ``name``."""
    if name not in LOSSES:
        raise ValueError(unknown_name("loss", name, LOSSES))
    return LOSSES[name]


__all__ = [
    "LOSSES",
    "MetricLoss",
    "PairLoss",
    "ProxyLoss",
    "build_loss",
    "circle",
    "contrastive",
    "fast_ap",
    "find_loss",
    "margin_dw",
    "multi_similarity",
    "proxy_anchor",
    "proxy_nca",
    "proxy_nca_pp",
    "ranked_list",
    "rankmi",
    "soft_triple",
    "softmax",
    "triplet_semihard",
]
