"""Faults of a run that nothing else causes: an uncertainty that says nothing, other data, a killed loader process."""

import multiprocessing
import os
import weakref

import numpy as np
import pytest
from PIL import Image

from idml.methods import ism
from idml.methods.ism import warn_of_uninformative_u
from idml.training.batches import explain_killed_workers
from idml.training.config import from_dict
from idml.training.loop import train


def rows(*levels, spread=1.0, weight=0.9):
    return [{"level_clean": level, "level_spread": spread, "weight": weight} for level in levels]


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (rows(*[1e-9] * 8), "the uncertainty has collapsed: mean ‖u‖ 1.0e-09"),
        (rows(*[1.0] * 12, *[1e-9] * 4), "collapsed"),  # the last quarter counts
        (rows(*[9.0] * 8, spread=1e-4, weight=0.01), "inflated: ‖u‖ 9.00 for every image alike"),
        (rows(*[1e-9] * 4, *[1.0] * 4), ""),
        (rows(*[9.0] * 8, spread=5.0, weight=0.01), ""),  # large, but it tells images apart
        ([], ""),
    ],
    ids=["collapsed", "collapsed at the end", "inflated", "recovered", "informative", "no steps"],
)
def test_a_collapsed_or_inflated_uncertainty_is_reported(log, words, options, tmp_path, monkeypatch):
    found = warn_of_uninformative_u(log)
    assert len(found) == bool(words)
    assert words in "".join(found)
    if words == "collapsed":  # and a run says it
        monkeypatch.setattr(ism, "COLLAPSED", 1e9)
        notes = []
        train(from_dict({**options, "epochs": 1, "out": str(tmp_path / "run")}), note=notes.append)
        assert any("the uncertainty has collapsed" in note for note in notes)


@pytest.fixture
def album(tmp_path):
    noise = np.random.default_rng(0)
    for label in "abcdefgh":
        (tmp_path / "album" / label).mkdir(parents=True)
        for i in range(14):
            pixels = noise.integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "album" / label / f"{i}.png")
    return tmp_path / "album"


@pytest.fixture
def config(options, album, tmp_path, monkeypatch):
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    return {**options, "data": f"folder:{album}", "out": str(tmp_path / "run"), "epochs": 2, "checkpoint_every": 1}


class Stop(Exception):
    pass


@pytest.mark.parametrize("change", ["added", "removed", "renamed", "replaced", "touched"])
def test_a_run_is_not_resumed_on_other_data(config, album, change):
    def stop(row):
        if row.get("step") == 2:
            raise Stop

    with pytest.raises(Stop):
        train(from_dict(config), report=stop)
    image = album / "a" / "0.png"
    if change == "added":
        Image.new("RGB", (9, 9)).save(album / "a" / "new.png")
    elif change == "removed":
        image.unlink()
    elif change == "replaced":  # by another picture of the same name, size and time
        before = image.stat()
        image.write_bytes((album / "b" / "0.png").read_bytes())
        os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "touched":  # a copy of the data has other times
        os.utime(image)
        train(from_dict(config), resume=True)
        return
    else:
        image.rename(album / "a" / "other.png")
    with pytest.raises(ValueError, match="cannot resume on other data") as refusal:
        train(from_dict(config), resume=True)
    assert "\n" not in str(refusal.value)


def test_the_error_of_a_killed_loader_process_keeps_no_loader_alive():
    class Loader:
        pass

    loaders = []

    @explain_killed_workers()
    def run():
        loader = Loader()
        loaders.append(weakref.ref(loader))
        raise ConnectionResetError("the process is gone, its signal has not arrived")

    with pytest.raises(OSError, match="killed") as error:
        run()
    assert loaders[0]() is None
    assert error.value.__context__ is not None  # what would keep it alive is still there


def test_a_killed_loader_process_is_one_line_and_the_run_resumes(config, tmp_path):
    def kill(row):
        if row.get("step") == 1:
            for child in multiprocessing.active_children():
                child.kill()

    config = {**config, "workers": 1, "batch_size": 4}
    with pytest.raises(OSError, match=r"a process that prepares batches was killed.*--resume") as error:
        train(from_dict(config), report=kill)
    assert "\n" not in str(error.value)
    train(from_dict(config), resume=True)
    whole = {**config, "out": str(tmp_path / "whole")}
    train(from_dict(whole))
    model = "model.safetensors"
    assert (tmp_path / "run" / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()
