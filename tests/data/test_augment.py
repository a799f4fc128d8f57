"""Augmentation: formulas against loops, nothing else changed, the same draws after a resume; views."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

from idml.data.augment import (
    GRADED,
    KINDS,
    MIXED,
    View,
    apply_ambiguity,
    blur,
    centre_crop,
    crop_and_flip,
    cutmix,
    low_resolution,
    mixup,
    occlude,
    other_class,
    with_mixtures,
)
from idml.data.datasets import ImageSet
from idml.data.pixel_cache import Pixels
from idml.data.sampling import random_stream
from idml.data.sources import ArraySource


def stream(*numbers):
    return random_stream("test", *numbers)


def some_images(n=8, c=3, h=10, w=12, dtype=torch.float32):
    return torch.rand(n, c, h, w, generator=torch.Generator().manual_seed(7)).to(dtype)


def partners(sets):
    """Who was mixed in, if image i has the label i."""
    return torch.tensor([next((j for j in s if j != i), i) for i, s in enumerate(sets.tolist())])


RANDOM = {
    "mixup": lambda x, g: mixup(x, torch.arange(len(x)), g)[0],
    "cutmix": lambda x, g: cutmix(x, torch.arange(len(x)), g)[0],
    "blur": blur,
    "occlude": occlude,
    "crop_and_flip": lambda x, g: crop_and_flip(x, 7, g),
}
FIXED = {"low_resolution": low_resolution, "centre_crop": lambda x: centre_crop(x, 7)}
EVERY = {**RANDOM, **{name: lambda x, g, f=f: f(x) for name, f in FIXED.items()}}


# Randomness


@pytest.mark.parametrize("kinds", [*[(k,) for k in KINDS], KINDS], ids="+".join)
def test_a_batch_is_a_function_of_seed_epoch_and_step_alone(kinds):
    x, y = some_images(16), torch.arange(16)

    def batch(seed, epoch, step):
        out = apply_ambiguity(x, y, kinds, seed=seed, epoch=epoch, step=step)
        return out.images, out.labels.tolist(), out.lam

    before, first = x.clone(), batch(1, 2, 3)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = batch(1, 2, 3)
    assert torch.equal(again[0], first[0])
    assert again[1:] == first[1:]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, before)  # the caller's images stay as they are
    if kinds != ("low_resolution",):
        for other in [(2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 3, 2)]:
            assert not torch.equal(batch(*other)[0], first[0])


def test_adding_a_kind_moves_no_draw_of_another():
    x, y, key = some_images(16), torch.arange(16), {"seed": 0, "epoch": 1, "step": 2}
    alone = apply_ambiguity(x, y, ["mixup"], **key)
    joined = apply_ambiguity(x, y, ["mixup", "blur", "occlusion"], **key)
    assert joined.lam == alone.lam
    assert joined.labels.tolist() == alone.labels.tolist()
    hidden = apply_ambiguity(x, y, ["occlusion"], **key).images != x
    blurred = apply_ambiguity(x, y, ["blur"], **key).images
    both = apply_ambiguity(x, y, ["occlusion", "blur"], **key).images
    assert torch.equal(both[~hidden], blurred[~hidden])


# Mixup and CutMix


def test_lambda_is_uniform():
    x, y = some_images(2, 1, 1, 1), torch.arange(2)
    drawn = [apply_ambiguity(x, y, ["mixup"], seed=0, epoch=i % 7, step=i).lam for i in range(1500)]
    assert stats.kstest(drawn, "uniform").pvalue > 0.01
    other = [apply_ambiguity(x, y, ["cutmix"], seed=0, epoch=i % 7, step=i).lam for i in range(20)]
    assert other == drawn[:20]


@given(st.integers(2, 7), st.integers(0, 1000))
def test_mixup_is_its_formula_with_one_lambda(n, step):
    x = some_images(n, 2, 2, 3)
    batch = with_mixtures(x, torch.arange(n), "mixup", stream(step))
    mixed, sets = mixup(x, torch.arange(n), stream(step))
    assert torch.equal(batch.images, torch.cat([x, mixed]))
    assert batch.labels.tolist() == [[i] for i in range(n)] + sets.tolist()
    assert batch.mixed.tolist() == [False] * n + [True] * n
    lam, partner = batch.lam, partners(sets)
    assert sorted(partner.tolist()) == list(range(n))
    assert all(p != i for i, p in enumerate(partner.tolist()))
    for i in range(n):
        for c in range(2):
            for v in range(2):
                for u in range(3):
                    assert mixed[i, c, v, u] == lam * x[i, c, v, u] + (1 - lam) * x[partner[i], c, v, u]


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 1000))
def test_cutmix_takes_one_box_of_the_partner(h, w, step):
    x = some_images(4, 2, h, w)
    batch = with_mixtures(x, torch.arange(4), "cutmix", stream(step))
    mixed, partner = batch.images[4:], partners(batch.labels[4:])
    foreign = mixed != x
    assert torch.equal(mixed, torch.where(foreign, x[partner], x))
    box = foreign[0, 0]
    assert torch.equal(foreign, box.expand_as(foreign))
    assert int(box.sum()) == int(box.any(1).sum()) * int(box.any(0).sum())
    rows = box.any(1).nonzero().flatten()
    assert len(rows) == 0 or int(rows[-1] - rows[0]) + 1 == len(rows)
    assert abs(int(box.sum()) / (h * w) - (1 - batch.lam)) <= 0.5 / w + 1e-6


@pytest.mark.parametrize("mix", [mixup, cutmix])
def test_the_ends_of_lambda(mix):
    x, y = some_images(6), torch.arange(6)
    assert torch.equal(mix(x, y, stream(0), lam=1.0)[0], x)
    mixed, sets = mix(x, y, stream(0), lam=0.0)
    assert torch.equal(mixed, x[partners(sets)])


def test_cutmix_boxes_reach_every_pixel():
    x, hit = some_images(2, 1, 6, 6), torch.zeros(6, 6)
    for step in range(200):
        hit += (cutmix(x, torch.arange(2), stream(step), lam=0.75)[0] != x)[0, 0]
    assert hit.min() > 0
    assert torch.allclose(hit.sum(), torch.tensor(200.0 * 9))


def test_label_sets_hold_both_parents_and_no_more():
    labels = torch.tensor([4, 4, 9, 2])
    for step in range(20):
        _, numbers = mixup(some_images(4), torch.arange(4), stream(step))
        _, sets = mixup(some_images(4), labels, stream(step))
        assert sets.tolist() == [sorted({int(labels[i]) for i in s}) for s in numbers.tolist()]


# In place: low resolution, blur, occlusion


def test_low_resolution_is_down_and_up():
    x = torch.rand(2, 3, 256, 256)
    small = torch.nn.functional.interpolate(x, (200, 200), mode="bilinear", antialias=True)
    expected = torch.nn.functional.interpolate(small, (256, 256), mode="bilinear")
    assert torch.equal(low_resolution(x), expected)
    assert torch.equal(low_resolution(x, 1.0), x)
    detail = [float(low_resolution(x, f).diff(dim=3).abs().mean()) for f in (1.0, 200 / 256, 0.5, 0.25, 0.001)]
    assert detail == sorted(detail, reverse=True)
    assert detail[-1] < 1e-7  # one pixel is left


@pytest.mark.parametrize("change", [low_resolution, lambda x: blur(x, stream(0), p=1.0, sigma=3.0)])
@pytest.mark.parametrize("shape", [(20, 30), (3, 2), (1, 1)])
def test_constant_images_stay(change, shape):
    x = torch.rand(4, 3, 1, 1).expand(-1, -1, *shape)
    torch.testing.assert_close(change(x), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("h", "w"), [(9, 7), (2, 5), (1, 1)])
@pytest.mark.parametrize("sigma", [0.5, 1.7])
def test_blur_is_an_explicit_convolution(h, w, sigma):
    x = some_images(2, 2, h, w, torch.float64)
    radius = math.ceil(3 * sigma)
    weight = [math.exp(-(t**2) / (2 * sigma**2)) for t in range(-radius, radius + 1)]
    weight = [k / sum(weight) for k in weight]

    def at(plane, i, j):
        i, j = i % (2 * h), j % (2 * w)
        return plane[i if i < h else 2 * h - 1 - i][j if j < w else 2 * w - 1 - j]

    blurred = blur(x, stream(0), p=1.0, sigma=sigma)
    for image, out in zip(x.flatten(0, 1).tolist(), blurred.flatten(0, 1), strict=True):
        expected = [
            [
                sum(
                    weight[a + radius] * weight[b + radius] * at(image, i + a, j + b)
                    for a in range(-radius, radius + 1)
                    for b in range(-radius, radius + 1)
                )
                for j in range(w)
            ]
            for i in range(h)
        ]
        torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_blur_keeps_the_mean_and_smooths_each_image_differently():
    x = some_images(1, 3, 16, 16).expand(40, -1, -1, -1).contiguous()
    y = blur(x, stream(0), p=1.0)
    torch.testing.assert_close(y.mean(dim=(2, 3)), x.mean(dim=(2, 3)), rtol=0, atol=1e-6)
    assert len(y.flatten(1).std(dim=1).unique()) > 35
    grey = blur(x[:, :1].expand_as(x), stream(0), p=1.0)
    torch.testing.assert_close(grey, grey[:, :1].expand_as(x), rtol=0, atol=1e-6)  # one σ for all channels
    roughness = [float(blur(x, stream(0), p=1.0, sigma=s).std()) for s in (0.0, 0.5, 1.0, 2.0, 8.0)]
    assert roughness == sorted(roughness, reverse=True)
    assert torch.equal(blur(x, stream(0), p=1.0, sigma=0.0), x)


@pytest.mark.parametrize("change", [partial(blur, sigma=(0.5, 2.0)), occlude], ids=["blur", "occlude"])
def test_about_half_of_the_images_change_and_the_rest_not_a_bit(change):
    x = some_images(400, 1, 12, 12)
    y = change(x, stream(0), p=0.5)
    touched = (y != x).flatten(1).any(dim=1)
    assert 160 < int(touched.sum()) < 240
    assert torch.equal(y[~touched], x[~touched])
    assert torch.equal(change(x, stream(0), p=0.0), x)
    assert (change(x, stream(0), p=1.0) != x).flatten(1).any(dim=1).all()


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.integers(0, 100))
def test_occlusion_hides_the_share_in_one_box_of_mean_colour(h, w, share, step):
    x = some_images(3, 2, h, w) + torch.arange(h * w).view(h, w)  # no pixel has the mean colour but by its place
    y = occlude(x, stream(step), p=1.0, share=share)
    mean = x.mean(dim=(2, 3), keepdim=True).expand_as(x)
    hidden = (y != x).any(dim=1)
    for image in range(3):
        box = hidden[image]
        assert torch.equal(y[image], torch.where(box, mean[image], x[image]))
        area = int(box.any(1).sum()) * int(box.any(0).sum())
        assert area - int(box.sum()) <= 1  # one pixel may be the mean already
        assert abs(area - share * h * w) <= max(h, w) / 2 + 1


def test_occlusion_draws_the_shares_of_random_erasing():
    x = some_images(1000, 1, 64, 64)
    hidden = (occlude(x, stream(0), p=1.0) != x)[:, 0]
    share = hidden.flatten(1).float().mean(dim=1)
    assert 0.015 < share.min() < 0.03
    assert 0.32 < share.max() < 0.335
    assert stats.kstest(share.numpy(), stats.uniform(0.02, 0.31).cdf).pvalue > 0.01
    height, width = hidden.any(2).sum(1), hidden.any(1).sum(1)
    assert (height / width).max() > 2.5
    assert (width / height).max() > 2.5
    assert hidden.any(dim=0).float().mean() > 0.99  # boxes reach the borders


# Crops and flips


def test_crops_are_slices_and_half_are_flipped():
    h, w, size, n = 9, 11, 6, 600
    x = torch.arange(n * 2 * h * w, dtype=torch.float64).view(n, 2, h, w)  # a value tells its place
    y = crop_and_flip(x, size, stream(0))
    seen, flips = set(), 0
    for image, crop in zip(x, y, strict=True):
        flipped = bool(crop[0, 0, 0] > crop[0, 0, 1])
        crop = crop.flip(2) if flipped else crop
        top, left = divmod(int(crop[0, 0, 0] - image[0, 0, 0]), w)
        assert torch.equal(crop, image[:, top : top + size, left : left + size])
        seen.add((top, left))
        flips += flipped
    assert len(seen) == (h - size + 1) * (w - size + 1)
    assert 250 < flips < 350


def test_crops_of_the_whole_image_and_without_flips():
    x = some_images(5, 3, 8, 8)
    assert torch.equal(crop_and_flip(x, 8, stream(0), p=0.0), x)
    assert torch.equal(crop_and_flip(x, 8, stream(0), p=1.0), x.flip(3))
    assert torch.equal(centre_crop(x, 8), x)
    assert torch.equal(centre_crop(some_images(5, 3, 9, 12), 4), some_images(5, 3, 9, 12)[:, :, 2:6, 4:8])


# All together


def test_kinds_combine_in_place_first():
    x, y, key = some_images(16), torch.arange(16), {"seed": 0, "epoch": 1, "step": 2}
    batch = apply_ambiguity(x, y, ["mixup", "occlusion", "blur", "low_resolution"], **key)
    clean = occlude(
        blur(low_resolution(x), random_stream("blur", 0, 1, 2)),
        random_stream("occlusion", 0, 1, 2),
    )
    assert torch.equal(batch.images[:16], clean)
    partner = partners(batch.labels[16:])
    assert torch.equal(batch.images[16:], batch.lam * clean + (1 - batch.lam) * clean[partner])


def test_mixup_and_cutmix_take_turns():
    x, y = some_images(4), torch.arange(4)
    chosen = []
    for step in range(60):
        both = apply_ambiguity(x, y, ["cutmix", "mixup"], seed=0, epoch=0, step=step).images
        each = [apply_ambiguity(x, y, [kind], seed=0, epoch=0, step=step).images for kind in ("mixup", "cutmix")]
        same = [torch.equal(both, images) for images in each]
        assert any(same)
        chosen.append(same.index(True))
    assert 15 < sum(chosen) < 45


@pytest.mark.parametrize("kinds", [(), ("blur",), "occlusion", ("low_resolution", "blur", "occlusion")])
def test_kinds_in_place_keep_the_batch_and_its_labels(kinds):
    x, y = some_images(6), torch.tensor([3, 1, 4, 1, 5, 9])
    batch = apply_ambiguity(x, y, kinds, seed=0, epoch=0, step=0)
    assert batch.images.shape == x.shape
    assert batch.labels.tolist() == [[int(v)] for v in y]
    assert batch.mixed.tolist() == [False] * 6
    assert batch.lam is None


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_floating_type_and_the_range_are_kept(name, dtype):
    x = some_images(dtype=dtype)
    y = EVERY[name](x, stream(1))
    assert y.dtype == dtype
    assert y.min() >= -1e-6
    assert y.max() <= 1 + 1e-6
    as_float = EVERY[name](x.float(), stream(1))  # the same draws whatever the type
    torch.testing.assert_close(y.float(), as_float, rtol=0, atol=0.01)


@pytest.mark.parametrize("name", EVERY)
def test_bytes_become_floats(name):
    x = some_images().mul(255).round().to(torch.uint8)
    torch.testing.assert_close(EVERY[name](x, stream(1)), EVERY[name](x.float() / 255, stream(1)))


@pytest.mark.parametrize("name", [n for n in EVERY if n not in ("mixup", "cutmix")])
def test_the_device_is_kept_and_never_asked_for_a_value(name):
    y = EVERY[name](torch.empty(8, 3, 10, 12, device="meta"), stream(1))  # it has no values to give
    assert y.device.type == "meta"


@pytest.mark.parametrize("name", EVERY)
def test_memory_layout_does_not_matter(name):
    x = some_images()
    y = EVERY[name](x.contiguous(memory_format=torch.channels_last), stream(1))
    torch.testing.assert_close(y, EVERY[name](x, stream(1)), rtol=0, atol=1e-6)


# Bad input


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "images",
    [torch.rand(3, 8, 8), torch.rand(0, 3, 8, 8), torch.rand(2, 3, 0, 8), torch.ones(2, 3, 8, 8, dtype=torch.long)],
    ids=["no batch", "no images", "no pixels", "int64"],
)
def test_what_is_no_batch_of_images_is_refused(name, images):
    with pytest.raises(ValueError, match="images must be a batch"):
        EVERY[name](images, stream(0))


X, Y = some_images(4), torch.arange(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: apply_ambiguity(X, Y, ["mixupp"], seed=0, epoch=0, step=0), "'mixupp'; did you mean 'mixup'"),
        (lambda: apply_ambiguity(X, Y, "oclusion", seed=0, epoch=0, step=0), "did you mean 'occlusion'"),
        (lambda: with_mixtures(X, Y, "blur", stream(0)), "unknown kind of ambiguity 'blur'"),
        (lambda: apply_ambiguity(X, Y[:3], [], seed=0, epoch=0, step=0), "4 images but 3 labels"),
        (lambda: mixup(X, Y[:3], stream(0)), "4 images but 3 labels"),
        (lambda: mixup(X, Y.float(), stream(0)), "1-D tensor of integers"),
        (lambda: mixup(X[:1], Y[:1], stream(0)), "two images or more, got 1"),
        (lambda: cutmix(X, Y, stream(0), lam=1.5), "λ must lie in 0 … 1"),
        (lambda: mixup(X, Y, stream(0), lam=math.nan), "λ must lie in 0 … 1"),
        (lambda: low_resolution(X, 0), "resolution factor"),
        (lambda: low_resolution(X, 1.1), "resolution factor"),
        (lambda: blur(X, stream(0), sigma=-1.0), "sigma must be"),
        (lambda: blur(X, stream(0), sigma=math.inf), "sigma must be"),
        (lambda: blur(X, stream(0), sigma=(2.0, 1.0)), "sigma must be"),
        (lambda: blur(X, stream(0), p=1.2), "probability lies in"),
        (lambda: occlude(X, stream(0), share=1.2), "share must be"),
        (lambda: occlude(X, stream(0), share=(0.1, math.nan)), "share must be"),
        (lambda: crop_and_flip(X, 11, stream(0)), "crop of 11 × 11 does not fit images of 10 × 12"),
        (lambda: crop_and_flip(X, 0, stream(0)), "does not fit"),
        (lambda: centre_crop(X, 13), "does not fit"),
    ],
)
def test_bad_settings_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Views


@pytest.fixture(scope="module")
def pixels():
    noise = np.random.default_rng(0)
    array = noise.integers(0, 256, (24, 20, 20, 3), dtype=np.uint8)
    sources = [ArraySource(str(i), image) for i, image in enumerate(array)]
    images = ImageSet("noise", sources, torch.arange(24) // 4, tuple("abcdef"))
    return Pixels(images, array, {5: "broken"}, "digest")


@pytest.mark.parametrize("view", [View(), MIXED, *GRADED], ids=str)
def test_a_view_of_an_image_does_not_depend_on_the_other_images(pixels, view):
    whole = view.images(pixels, pixels.usable, 16)
    assert whole.shape == (23, 3, 16, 16)
    assert float(whole.min()) >= -1e-6
    assert float(whole.max()) <= 1 + 1e-6
    some = torch.tensor([2, 11, 7])
    places = torch.searchsorted(pixels.usable, some)
    torch.testing.assert_close(view.images(pixels, some, 16), whole[places], rtol=0, atol=1e-6)


def test_clean_is_the_centre_and_mixed_a_weighted_sum(pixels):
    clean = View().images(pixels, pixels.usable, 16)
    assert torch.equal(clean, centre_crop(pixels.batch(pixels.usable), 16))
    mixed = View("mixed", 0.25).images(pixels, pixels.usable, 16)
    partner = other_class(pixels.images.labels[pixels.usable], 0)
    for i in range(len(clean)):
        torch.testing.assert_close(mixed[i], 0.75 * clean[i] + 0.25 * clean[partner[i]])


@pytest.mark.parametrize("kind", ["crop", "blur", "low_resolution", "occlusion"])
def test_strength_zero_changes_nothing_and_more_changes_more(pixels, kind):
    clean = View().images(pixels, pixels.usable, 16)
    change = [
        float((View(kind, strength).images(pixels, pixels.usable, 16) - clean).square().mean())
        for strength in (0.0, 0.05, 0.2, 0.6)
    ]
    assert change[0] == pytest.approx(0, abs=1e-6)
    assert change[0] < change[1] <= change[2] < change[3] or kind in ("crop", "low_resolution")
    assert change[3] > 0


def test_occlusion_hides_its_share(pixels):
    clean = View().images(pixels, pixels.usable, 16)
    hidden = (View("occlusion", 0.25).images(pixels, pixels.usable, 16) != clean).any(dim=1).double().mean()
    assert float(hidden) == pytest.approx(0.25, abs=0.05)


def test_a_crop_is_a_window_enlarged(pixels):
    image = View().images(pixels, torch.tensor([3]), 16)[0]
    seen = View("crop", 0.5).images(pixels, torch.tensor([3]), 16)[0]
    picture = Image.fromarray((image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
    errors = []
    for top in range(9):
        for left in range(9):
            window = picture.crop((left, top, left + 8, top + 8)).resize((16, 16), Image.Resampling.BILINEAR)
            errors.append(float(np.abs(np.asarray(window) / 255 - seen.permute(1, 2, 0).numpy()).max()))
    assert min(errors) < 0.01
    assert sorted(errors)[1] > 0.1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.integers(0, 99))
def test_partners_are_of_another_class(labels, seed):
    labels = torch.tensor(labels)
    if len(labels.unique()) == 1:
        with pytest.raises(ValueError, match="needs two classes"):
            other_class(labels, seed)
        return
    partner = other_class(labels, seed)
    assert bool((labels[partner] != labels).all())
    assert torch.equal(partner, other_class(labels, seed))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("fog",), "unknown view 'fog'"), (("blur", 1.5), "lies in 0 … 1"), (("crop", float("nan")), "0 … 1")],
)
def test_bad_views(arguments, words):
    with pytest.raises(ValueError, match=words):
        View(*arguments)


@pytest.mark.parametrize("beta", [0.5, 2.0, 8.0])
def test_the_share_of_the_first_image_is_drawn_from_beta(beta):
    images, labels = torch.zeros(2, 1, 1, 1), torch.tensor([0, 1])
    drawn = [apply_ambiguity(images, labels, ("mixup",), beta=beta, seed=0, epoch=0, step=i).lam for i in range(2000)]
    assert stats.kstest(drawn, "beta", (beta, beta)).pvalue > 0.01
    assert stats.kstest(drawn, "uniform").pvalue < 0.01
