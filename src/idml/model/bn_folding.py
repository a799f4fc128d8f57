"""Batch-norm folding: a frozen normalisation is computed inside the convolution before it. Weights stay as they are.

With frozen statistics a normalisation after a convolution is a scale and a shift of each channel:

    γ (w ∗ x − μ) / √(σ² + ε) + b  =  (s w) ∗ x + (b − s μ),   s = γ / √(σ² + ε):

one convolution instead of two passes over its output, and the same saving in the backward pass. w, γ and b stay
parameters. On a CPU the clipping of ReLU6 is computed inside the convolution too.
"""

from collections import Counter
from functools import lru_cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idml.model.backbones import Trunk

_SMALL = 49
"""`_Convolution` treats maps of at most this many positions as vectors."""
_POINTWISE: Any = None
if torch.backends.mkldnn.is_available():
    _POINTWISE = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
Settings = tuple[Any, Any, Any, int]
"""Stride, padding, dilation and groups of a convolution."""


def fold_frozen_normalisation(trunk: Trunk) -> int:
    """Compute each convolution of ``trunk`` and the frozen normalisation after it as one; return how many there are.

    Running one image shows which module follows which. The names in the trunk's state dict stay. If folding would
    change the features, the trunk stays as it was.
    """
    weight = trunk.mean
    image = torch.rand(1, weight.shape[1], trunk.image_size, trunk.image_size, generator=torch.Generator())
    image, modes = image.to(weight), {module: module.training for module in trunk.modules()}
    trunk.eval()
    with torch.no_grad():
        pairs, before = _trace(trunk, image)
        for convolution, norm in pairs:
            cast(Any, convolution).forward = partial(_convolve, convolution, norm)
            cast(Any, norm).forward = partial(_activate, convolution, norm)
        same = torch.allclose(trunk(image), before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))
    if not same:
        for pair in pairs:
            for part in pair:
                del part.forward
        pairs = []
    for module, training in modes.items():
        module.training = training
    return len(pairs)


def _trace(trunk: Trunk, image: Tensor) -> tuple[list[tuple[nn.Conv2d, nn.BatchNorm2d]], Tensor]:
    """Return the convolutions followed directly by a normalisation, with it, and the features of ``image``."""
    made: dict[int, tuple[nn.Conv2d, Tensor]] = {}  # keeps the tensors alive, so that no two have the same id
    pairs: list[tuple[nn.Conv2d, nn.BatchNorm2d]] = []
    uses: Counter[nn.Module] = Counter()

    def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
        uses[module] += 1
        made[id(output)] = cast(nn.Conv2d, module), output

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        uses[module] += 1
        if id(inputs[0]) in made:
            pairs.append((made[id(inputs[0])][0], cast(nn.BatchNorm2d, module)))

    hooks = []
    for module in trunk.modules():
        if type(module).__name__ in ("Conv2d", "Conv2dSame"):
            hooks.append(module.register_forward_hook(after))
        elif type(module).__name__ in ("BatchNorm2d", "BatchNormAct2d"):
            hooks.append(module.register_forward_pre_hook(before))
    try:
        features = trunk(image)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        (c, n) for c, n in pairs if uses[c] == uses[n] == 1 and c.padding_mode == "zeros" and _can_fold(n)
    ], features


def _can_fold(norm: nn.BatchNorm2d) -> bool:
    return norm.affine and norm.running_mean is not None


def _convolve(convolution: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Compute (s w) ∗ x + (b − s μ)."""
    mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
    scale = norm.weight * torch.rsqrt(variance + norm.eps)
    weight, shift = convolution.weight * scale.view(-1, 1, 1, 1), norm.bias - mean * scale
    if convolution.bias is not None:
        shift = shift + convolution.bias * scale
    padding = convolution.padding
    if type(convolution).__name__ == "Conv2dSame":
        from timm.layers.padding import pad_same

        kernel, stride, dilation = convolution.kernel_size, convolution.stride, convolution.dilation
        x, padding = pad_same(x, list(kernel), list(stride), list(dilation)), (0, 0)
    settings: Settings = (convolution.stride, padding, convolution.dilation, convolution.groups)
    if isinstance(padding, str) or not _plain_cpu(x):
        return F.conv2d(x, weight, shift, *settings)
    return cast(Tensor, _Convolution.apply(x, weight, shift, settings, _limits(convolution, norm, x)))


def _activate(convolution: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Apply what remains of a normalisation: timm's modules include the activation."""
    act = getattr(norm, "act", None)
    if act is None or _limits(convolution, norm, x) is not None:
        return x
    x = cast(Any, norm).drop(x)
    if isinstance(act, nn.Hardtanh):  # in place it would first copy its input for the backward pass
        return F.hardtanh(x, act.min_val, act.max_val)
    return cast(Tensor, act(x))


def _plain_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _limits(convolution: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> tuple[float, float] | None:
    """Return where the activation clips, if oneDNN can clip inside the convolution; ``x`` is an input of either."""
    act = getattr(norm, "act", None)
    if not isinstance(act, nn.Hardtanh) or not isinstance(cast(Any, norm).drop, nn.Identity) or _POINTWISE is None:
        return None
    fits = x.dtype == torch.float32 and _plain_cpu(x) and not isinstance(convolution.padding, str)
    return (act.min_val, act.max_val) if fits else None


class _Convolution(torch.autograd.Function):
    """A convolution, clipped at ``limits`` in the same pass if there are any.

    For a wide depthwise filter on small maps (stride 1, same size) the gradient of the weights is computed by matrix
    products, because oneDNN is slow for filters of 5 × 5. On a map of p positions the filter of a channel is a
    p × p matrix T, T[a, b] = w[b − a]. Its gradient is Σ g xᵀ over the images, and that of w[d] the sum over the places
    with b − a = d.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, shift: Tensor, settings: Settings, limits: tuple[float, float] | None
    ) -> Tensor:
        ctx.settings, ctx.limits = settings, limits
        stride, padding, dilation, groups = settings
        if limits is None:
            y = F.conv2d(x, weight, shift, *settings)
            ctx.save_for_backward(x, weight)
        else:
            y = _POINTWISE(x, weight, shift, padding, stride, dilation, groups, "hardtanh", limits, "")
            ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight, *y), (stride, padding, dilation, groups) = gradients, ctx.saved_tensors, ctx.settings
        if ctx.limits is not None:
            g = torch.ops.aten.hardtanh_backward(g, y[0], *ctx.limits)
        ours = _is_small_depthwise(x, weight, ctx.settings)
        wanted = [ctx.needs_input_grad[0], not ours, False]
        of_x, of_weight, _ = torch.ops.aten.convolution_backward(
            g, x, weight, [len(weight)], stride, padding, dilation, False, [0, 0], groups, wanted
        )
        if ours:
            g_maps, x_maps = (_by_channel(v) for v in (g, x))  # [channels, n, positions]
            of_matrix = torch.bmm(g_maps.transpose(1, 2), x_maps).flatten(1)
            of_weight = (of_matrix @ _offsets(*x.shape[2:], weight.shape[-1]).to(of_matrix)).view_as(weight)
        return of_x, of_weight, g.sum(dim=(0, 2, 3)), None, None  # oneDNN takes longer for the sum than torch


def _is_small_depthwise(x: Tensor, weight: Tensor, settings: Settings) -> bool:
    stride, padding, dilation, groups = settings
    height, width = weight.shape[2:]
    return (
        groups == x.shape[1] == len(weight) > 1
        and stride == dilation == (1, 1)
        and height == width > 3  # oneDNN is slow for wide filters only
        and width % 2 == 1
        and padding == (width // 2, width // 2)
        and x.shape[2] * x.shape[3] <= _SMALL
    )


def _by_channel(maps: Tensor) -> Tensor:
    """Transpose channels-last maps [n, channels, height, width] to [channels, n, positions]."""
    n, channels, height, width = maps.shape
    return maps.permute(0, 2, 3, 1).reshape(-1, channels).t().contiguous().view(channels, n, height * width)


@lru_cache
def _offsets(height: int, width: int, side: int) -> Tensor:
    """Return where each entry of a filter stands in its matrix, [positions · positions, side · side] of 0 and 1."""
    y, x = torch.arange(height), torch.arange(width)
    down = (y[None, :] - y[:, None] + side // 2)[:, None, :, None].expand(height, width, height, width)
    right = (x[None, :] - x[:, None] + side // 2)[None, :, None, :].expand(height, width, height, width)
    inside = (down >= 0) & (down < side) & (right >= 0) & (right < side)
    entry = torch.where(inside, down * side + right, side * side).flatten()
    return F.one_hot(entry, side * side + 1)[:, :-1].float()
