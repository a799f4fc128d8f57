"""Methods: how a batch of images becomes a loss.

A new method is one file here, one line in `METHODS`, one test. The files are imported when a method is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from idml.errors import unknown_name

if TYPE_CHECKING:
    from idml.methods.base import Method

METHODS: dict[str, str] = {
    "plain": "idml.methods.plain:Plain",
    "mixup": "idml.methods.mixup:Mixup",
    "ism": "idml.methods.ism:Ism",
    "idml": "idml.methods.idml:Idml",
    "pel": "idml.methods.pel:Pel",
    "pel-mixup": "idml.methods.pel:PelMixup",
    "nir": "idml.methods.nir:Nir",
    "dreml": "idml.methods.dreml:Dreml",
    "diml": "idml.methods.diml:Diml",
    "drml": "idml.methods.drml:Drml",
    "dac": "idml.methods.dac:Dac",
    "mic": "idml.methods.mic:Mic",
    "diva": "idml.methods.diva:Diva",
    "dcml": "idml.methods.dcml:Dcml",
    "pads": "idml.methods.pads:Pads",
    "abe": "idml.methods.abe:Abe",
    "ranked-lmh": "idml.methods.ranked_lmh:RankedLmh",
}


def find_method(name: str) -> "type[Method]":
    """The class of the method called ``name``."""
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(unknown_name("method", name, METHODS))
    module, _, attribute = METHODS[name].partition(":")
    found: type[Method] = getattr(import_module(module), attribute)
    return found
