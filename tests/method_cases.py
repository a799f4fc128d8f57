"""Small runs of every method: the losses that each goes with, and options that suit a few tiny images."""

import os

from idml.methods import METHODS

PAPER = ("plain", "mixup", "ism", "idml", "pel", "pel-mixup")
COMPARATORS = [method for method in METHODS if method not in PAPER]
TAUGHT = ("plain", "mixup", *COMPARATORS)
"""Methods that teach u by ranking beside the loss."""

_LOSSES = {
    "nir": "proxy_anchor",
    "dreml": "softmax",
    "drml": "proxy_anchor",
    "mic": "margin_dw",
    "dcml": "margin_dw",
    "pads": "margin_dw",
    "ranked-lmh": "ranked_list",
}
_OPTIONS = {
    "dreml": {"members": 4},
    "dac": {"groups": 2, "regroup_epochs": 1, "whole_epochs": 0.3},
    "mic": {"clusters": 4, "per_cluster": 2, "recluster_epochs": 1},
    "diva": {"queue": 20},
    "pads": {"policy_steps": 1},
    "abe": {"learners": 2},
    "ranked-lmh": {"stage_heads": 2},
}
_NOT_FROZEN = ("abe", "ranked-lmh")
_FROZEN_ALIKE = () if os.environ.get("IDML_KILLS") else ("nir", "dreml", "drml", "dcml")
FROZEN = [method for method in METHODS if method not in (*_NOT_FROZEN, *_FROZEN_ALIKE)]
"""Methods whose frozen runs are killed; `make faults` adds those that read features as plain training does."""


def losses_of(method):
    """The losses that tests train a method with."""
    if method in PAPER:
        return ("multi_similarity", "proxy_anchor")
    return (_LOSSES.get(method, "multi_similarity"),)


def case(method, loss=None):
    """The method, its loss and its options for small runs."""
    return {"method": method, "loss": loss or losses_of(method)[-1], **_OPTIONS.get(method, {})}


CASES = [("plain", "rankmi"), *((method, loss) for method in METHODS for loss in losses_of(method))]
