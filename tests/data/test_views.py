import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from idml.data.augment import GRADED, MIXED, View, centre_crop, other_class
from idml.data.datasets import ImageSet
from idml.data.pixel_cache import Pixels
from idml.data.sources import ArraySource


@pytest.fixture(scope="module")
def pixels():
    noise = np.random.default_rng(0)
    array = noise.integers(0, 256, (24, 20, 20, 3), dtype=np.uint8)
    sources = [ArraySource(str(i), image) for i, image in enumerate(array)]
    images = ImageSet("noise", sources, torch.arange(24) // 4, tuple("abcdef"))
    return Pixels(images, array, {5: "broken"})


@pytest.mark.parametrize("view", [View(), MIXED, *GRADED], ids=str)
def test_an_image_looks_the_same_whatever_its_company(pixels, view):
    whole = view.images(pixels, pixels.usable, 16)
    assert whole.shape == (23, 3, 16, 16)
    assert float(whole.min()) >= -1e-6
    assert float(whole.max()) <= 1 + 1e-6
    some = torch.tensor([2, 11, 7])
    places = torch.searchsorted(pixels.usable, some)
    torch.testing.assert_close(view.images(pixels, some, 16), whole[places], rtol=0, atol=1e-6)


def test_clean_and_mixed_are_what_they_say(pixels):
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
