import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from idml.data.datasets import ImageSet
from idml.data.pixel_cache import load_pixels
from idml.data.sources import FileSource


@pytest.fixture
def photos(tmp_path):
    """Twelve noisy photos of three classes."""
    root = tmp_path / "photos"
    root.mkdir()
    noise = np.random.default_rng(0)
    for i in range(12):
        Image.fromarray(noise.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)).save(root / f"{i}.png")
    sources = [FileSource(root, f"{i}.png") for i in range(12)]
    return ImageSet("photos", sources, torch.arange(12) % 3, ("a", "b", "c"))


def test_pixels_are_the_decoded_images(photos, tmp_path):
    pixels = load_pixels(photos, 16, folder=tmp_path / "cache")
    batch = pixels.batch(torch.tensor([3, 0]))
    assert batch.shape == (2, 3, 16, 16)
    assert batch.dtype == torch.uint8
    for row, number in zip(batch, (3, 0), strict=True):
        expected = photos.sources[number].decode().resize((16, 16), Image.Resampling.BILINEAR)
        assert np.array_equal(row.permute(1, 2, 0).numpy(), np.asarray(expected))
    assert pixels.side == 16
    assert torch.equal(pixels.usable, torch.arange(12))


def test_a_second_load_decodes_nothing(photos, tmp_path, monkeypatch):
    first = load_pixels(photos, 16, folder=tmp_path / "cache")
    monkeypatch.setattr(FileSource, "decode", lambda *a, **k: pytest.fail("decoded again"))
    assert np.array_equal(load_pixels(photos, 16, folder=tmp_path / "cache").array, first.array)


def test_other_images_or_sizes_have_their_own_file(photos, tmp_path):
    folder = tmp_path / "cache"
    load_pixels(photos, 16, folder=folder)
    load_pixels(photos, 8, folder=folder)
    load_pixels(photos[:6], 16, folder=folder)
    assert len(list(folder.glob("*.npy"))) == 3
    assert not list(folder.glob("*.part"))


def test_broken_images_are_named_and_left_out(photos, tmp_path):
    (photos.sources[4].root / "4.png").write_bytes(b"no image")
    (photos.sources[7].root / "7.png").unlink()
    pixels = load_pixels(photos, 16, folder=tmp_path / "cache")
    assert set(pixels.broken) == {4, 7}
    assert "4.png" in pixels.broken[4]
    assert pixels.usable.tolist() == [0, 1, 2, 3, 5, 6, 8, 9, 10, 11]
    assert set(load_pixels(photos, 16, folder=tmp_path / "cache").broken) == {4, 7}
    with pytest.raises(ValueError, match=r"2 of 12 images cannot be read .first: cannot read the image '4.png'"):
        load_pixels(photos, 16, folder=tmp_path / "cache", max_broken=1)
    with pytest.raises(ValueError, match="photos: 2 of 12 images cannot be read"):
        load_pixels(photos, 8, folder=tmp_path / "cache", max_broken=1)
    assert not list((tmp_path / "cache").glob("*-8-*.npy"))


@pytest.mark.parametrize(("images", "side", "words"), [(0, 16, "holds no image"), (12, 0, "1 or larger")])
def test_bad_input(photos, tmp_path, images, side, words):
    with pytest.raises(ValueError, match=words):
        load_pixels(photos[:images], side, folder=tmp_path)


BUILD = """
import sys, time, torch
from pathlib import Path
from idml.data.pixel_cache import load_pixels
from idml.data.datasets import ImageSet
from idml.data.sources import FileSource
root, cache = Path(sys.argv[1]), Path(sys.argv[2])
names = [f"{i}.png" for i in range(12)]
images = ImageSet("photos", [FileSource(root, n) for n in names], torch.arange(12) % 3, ("a", "b", "c"))
def slow(done, total):
    print(done, flush=True)
    time.sleep(0.05)
print(int(load_pixels(images, 16, folder=cache, progress=slow).array.sum()), "sum", flush=True)
"""


def test_a_kill_while_building_leaves_nothing_half_made(photos, tmp_path):
    root, cache = photos.sources[0].root, tmp_path / "cache"
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(root), str(cache)], stdout=subprocess.PIPE, text=True)
    while process.stdout.readline().strip() != "5":
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(cache.glob("*.npy"))
    expected = np.stack([np.asarray(s.decode().resize((16, 16), Image.Resampling.BILINEAR)) for s in photos.sources])
    assert np.array_equal(load_pixels(photos, 16, folder=cache).array, expected)


def test_two_processes_build_one_file(photos, tmp_path):
    root, cache = photos.sources[0].root, tmp_path / "cache"
    command = [sys.executable, "-c", BUILD, str(root), str(cache)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=600)[0].split() for process in both]
    assert all(process.returncode == 0 for process in both)
    assert printed[0][-2] == printed[1][-2]
    assert sorted(len(words) for words in printed) == [2, 14]  # one built, the other waited
    assert len(list(cache.glob("*.npy"))) == 1
    assert json.loads(next(cache.glob("*.json")).read_text())["broken"] == {}


def test_same_names_other_pixels_are_another_cache(tmp_path):
    shown = []
    for shade in (10, 200):
        root = tmp_path / str(shade)
        root.mkdir()
        Image.new("RGB", (8, 8), (shade,) * 3).save(root / "a.png")
        images = ImageSet("two folders", [FileSource(root, "a.png")], torch.tensor([0]), ("a",))
        shown.append(int(load_pixels(images, 4, folder=tmp_path / "cache").array[0, 0, 0, 0]))
    assert shown == [10, 200]


def test_an_edited_file_is_decoded_again(tmp_path):
    def shade():
        images = ImageSet("edited", [FileSource(tmp_path, "a.png")], torch.tensor([0]), ("a",))
        return int(load_pixels(images, 4, folder=tmp_path / "cache").array[0, 0, 0, 0])

    Image.new("RGB", (8, 8), (10,) * 3).save(tmp_path / "a.png")
    assert shade() == 10
    Image.new("RGB", (9, 9), (200,) * 3).save(tmp_path / "a.png")
    assert shade() == 200
