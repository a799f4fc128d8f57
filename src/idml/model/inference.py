"""Forward passes of a network that is not being trained: by ONNX Runtime where that saves time, else by torch.

An export takes seconds, a pass saves milliseconds, so ONNX Runtime is used if enough images are ahead (`export_pays`).
Torch is used on a GPU, and for a network that cannot be exported. docs/export.md lists where exported networks lie.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from idml.files import cache_folder
from idml.model.backbones import Trunk, build_trunk
from idml.model.model import Model, evaluation_mode, hash_weights
from idml.model.onnx import BATCH, FORMAT, export_once, export_trunk, find_onnx, open_session

FEWEST = 100  # images that an export is considered for
WORTH_EXPORTING = 5e9  # outputs of layers; computing them takes torch about twice as long as an export
_sessions: OrderedDict[str, Any] = OrderedDict()  # of the trunks used last


# -------------------- the choice --------------------


def export_pays(trunk: Trunk, images: int) -> bool:
    """Whether to export a network for so many images: a function of the network and the number alone.

    The work for an image is counted in outputs of convolutions and linear layers, because memory traffic costs most of
    the time: 1.7 million for the default trunk at 112 pixels, 6.7 at 224, 11 for a ResNet-50, 0.05 for conv4 at 28.
    """
    if images < FEWEST or any(p.device.type != "cpu" or p.dtype != torch.float32 for p in trunk.parameters()):
        return False
    return images * _count_outputs(trunk) >= WORTH_EXPORTING


@torch.no_grad()
def _count_outputs(trunk: Trunk) -> int:
    """Count the numbers that the convolutions and linear layers write for one image."""
    counted: list[int] = []
    layers = [module for module in trunk.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(lambda _, __, out: counted.append(out.numel())) for layer in layers]
    image = torch.zeros(1, trunk.mean.shape[1], trunk.image_size, trunk.image_size)
    try:
        with evaluation_mode(trunk):
            trunk(image)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counted)


# -------------------- trunks --------------------


class TrunkSession:
    """The trunk of a model in ONNX Runtime; a ``ValueError`` if it cannot be exported.

    With ``keep`` the exported trunk is stored in the cache. A process opens a trunk once. A pass runs on one core:
    `idml.model.feature_cache.FeatureCache.compute_all` makes as many passes at a time as there are cores.
    """

    def __init__(self, model: Model, *, keep: bool) -> None:
        config = model.config
        fingerprint = hash_weights(model.trunk, repr((config.network, config.in_chans, config.image_size)))
        self.session = _sessions.pop(fingerprint, None)
        if self.session is None:
            places = [cache_folder() / f"trunk-{fingerprint}-v{FORMAT}.onnx"] if keep else []
            file = find_onnx(places, fingerprint)
            file = file or export_once(places, fingerprint, lambda: _export(model, fingerprint))
            self.session = open_session(file.data, threads=1)
        _sessions[fingerprint] = self.session
        while len(_sessions) > 2:
            _sessions.popitem(last=False)

    def features(self, images: Tensor) -> Tensor:
        """Return the features [n, width] of images, uint8 or floats in [0, 1]."""
        images = images / 255 if images.dtype == torch.uint8 else images.float()
        parts = (part.contiguous().numpy() for part in images.split(BATCH))
        return torch.cat([torch.from_numpy(self.session.run(["features"], {"images": part})[0]) for part in parts])


def _export(model: Model, fingerprint: str) -> bytes:
    """Export the trunk as it is stored: one with folded normalisation computes the same in other operations."""
    config = model.config
    trunk = build_trunk(
        config.trunk,
        pretrained=False,
        in_chans=config.in_chans,
        image_size=config.image_size,
        form=config.trunk_form,
        pooling=config.pooling,
    )
    trunk.load_state_dict(model.trunk.state_dict())
    return export_trunk(trunk.eval(), config, fingerprint)
