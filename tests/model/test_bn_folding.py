"""A folded trunk against the trunk as timm computes it: features, and the gradients of every parameter."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from idml.model.backbones import Trunk, build_trunk
from idml.model.bn_folding import _POINTWISE, _Convolution, _is_small_depthwise, _offsets, fold_frozen_normalisation
from idml.training.build import build
from idml.training.config import from_dict

needs_onednn = pytest.mark.skipif(_POINTWISE is None, reason="this torch has no oneDNN")


def frozen(trunk: Trunk) -> Trunk:
    """With statistics and weights as if it had been trained, in float64."""
    trunk = trunk.double()
    generator = torch.Generator().manual_seed(1)
    for module in trunk.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low in ((module.running_var, 0.5), (module.weight, 0.5), (module.running_mean, -0.2)):
                noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.data.copy_(low + 0.4 * noise)
            module.eps = 1e-3
    return trunk.eval()


def outcome(trunk: Trunk, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    trunk.zero_grad()
    features = trunk(images)
    features.square().sum().backward()
    return features.detach(), {name: p.grad for name, p in trunk.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "size", "folded"),
    [("tf_efficientnet_lite0", 112, 49), ("resnet18", 64, 20), ("conv4", 32, 4), ("vit_tiny_patch16_224", 32, 0)],
)
def test_features_and_gradients_stay(name, size, folded):
    trunk = frozen(build_trunk(name, pretrained=False, image_size=size))
    images = torch.rand(3, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    features, gradients = outcome(copy.deepcopy(trunk), images)
    names = list(trunk.state_dict())
    assert fold_frozen_normalisation(trunk) == folded
    assert list(trunk.state_dict()) == names
    ours, our_gradients = outcome(trunk, images)
    torch.testing.assert_close(ours, features, rtol=1e-9, atol=1e-9)
    assert our_gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[key], gradient, rtol=1e-7, atol=1e-8 * float(gradient.abs().max()))


def test_a_copy_is_folded_by_its_own_parts():
    trunk = frozen(build_trunk("conv4", pretrained=False))
    fold_frozen_normalisation(trunk)
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    other = copy.deepcopy(trunk)
    with torch.no_grad():
        before = trunk(images)
        for parameter in other.parameters():
            parameter.mul_(2.0)
        torch.testing.assert_close(trunk(images), before)
        assert not torch.allclose(other(images), before)


def test_new_weights_and_statistics_are_seen():
    one, two = (frozen(build_trunk("conv4", pretrained=False)) for _ in range(2))
    fold_frozen_normalisation(one)
    one.load_state_dict(two.state_dict())
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(one(images), two(images))


class Residual(nn.Module):
    """A convolution whose outcome is used twice: behind the normalisation, and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolution(x)
        return y + self.norm(y)


def test_what_would_come_out_differently_stays():
    trunk = frozen(Trunk(Residual(), 3, 16, (0.5,) * 3, (0.5,) * 3))
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    before = trunk(images)
    assert fold_frozen_normalisation(trunk) == 0
    assert torch.equal(trunk(images), before)


def test_modes_stay():
    trunk = build_trunk("conv4", pretrained=False)
    trunk.train()
    trunk.network.layers[1].eval()
    modes = [module.training for module in trunk.modules()]
    fold_frozen_normalisation(trunk)
    assert [module.training for module in trunk.modules()] == modes


@pytest.mark.parametrize(("height", "width", "side"), [(4, 4, 5), (7, 7, 5), (1, 1, 5), (2, 5, 7), (3, 3, 7)])
def test_small_depthwise_against_autograd(height, width, side):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 6, height, width, dtype=torch.float64, generator=generator, requires_grad=True)
    w = torch.randn(6, 1, side, side, dtype=torch.float64, generator=generator, requires_grad=True)
    b = torch.randn(6, dtype=torch.float64, generator=generator, requires_grad=True)
    g = torch.randn(4, 6, height, width, dtype=torch.float64, generator=generator)
    reference = F.conv2d(x, w, b, padding=side // 2, groups=6)
    settings = ((1, 1), (side // 2,) * 2, (1, 1), 6)
    assert _is_small_depthwise(x, w, settings)
    ours = _Convolution.apply(x, w, b, settings, None)
    torch.testing.assert_close(ours, reference)
    for a, e in zip(torch.autograd.grad(ours, (x, w, b), g), torch.autograd.grad(reference, (x, w, b), g), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)
    for row in range(height * width):
        for column in range(height * width):
            down, right = column // width - row // width, column % width - row % width
            entry = torch.zeros(side, side)
            if max(abs(down), abs(right)) <= side // 2:
                entry[down + side // 2, right + side // 2] = 1
            assert torch.equal(_offsets(height, width, side)[row * height * width + column], entry.flatten())


@needs_onednn
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "groups"), [(6, 1, 1, 1), (6, 3, 2, 1), (8, 3, 1, 8), (8, 5, 1, 8), (8, 5, 2, 8)]
)
def test_a_convolution_that_is_cut_off_against_autograd(channels, kernel, stride, groups):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, channels, 7, 7, generator=generator).contiguous(memory_format=torch.channels_last)
    w = torch.randn(8, channels // groups, kernel, kernel, generator=generator)
    b = 3 + torch.randn(8, generator=generator)  # so that both ends are met
    own = [t.requires_grad_() for t in (x, w, b)]
    settings = ((stride, stride), (kernel // 2,) * 2, (1, 1), groups)
    reference = F.hardtanh(F.conv2d(x, w, b, *settings), 0.0, 6.0)
    assert 0 < int((reference == 6).sum()) < int((reference > 0).sum()) < reference.numel()
    ours = _Convolution.apply(x, w, b, settings, (0.0, 6.0))
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
    g = torch.randn(reference.shape, generator=generator)
    for a, e in zip(torch.autograd.grad(ours, own, g), torch.autograd.grad(reference, own, g), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_the_default_trunk_in_float32_cuts_off_within_its_convolutions(monkeypatch):
    cut = []
    real = _Convolution.forward
    monkeypatch.setattr(_Convolution, "forward", staticmethod(lambda *a: (cut.append(a[-1]), real(*a))[1]))
    trunk = build_trunk("tf_efficientnet_lite0", pretrained=True, image_size=64).eval()
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(6))
    features, gradients = outcome(copy.deepcopy(trunk), images)
    fold_frozen_normalisation(trunk)
    cut.clear()
    ours, our_gradients = outcome(trunk, images)
    assert (len(cut), cut.count((0.0, 6.0))) == (49, 33)  # the others end a block, without an activation
    torch.testing.assert_close(ours, features, rtol=1e-3, atol=1e-3)
    for key, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[key], gradient, rtol=1e-2, atol=1e-3 * float(gradient.abs().max()))


@pytest.mark.parametrize(
    ("options", "folded"),
    [({}, True), ({"freeze_bn": False}, False), ({"train": "last"}, True), ({"freeze_trunk": True}, False)],
)
def test_a_run_folds_what_it_freezes(options, folded):
    config = from_dict({"data": "-", "out": "-", "image_size": 64, **options})
    model, _ = build(config, torch.arange(4), 4)
    assert ("forward" in vars(model.trunk.network.conv_stem)) is folded
    reference = build_trunk(config.trunk, pretrained=True, image_size=64).eval()
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        torch.testing.assert_close(model.eval().features(images), reference(images), rtol=1e-3, atol=1e-3)
