"""Bad input to a whole run: it trains on what can be used, or ends with one line, status 2 and nothing half-written."""

import os
import re
import resource
import shutil
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from idml import cli
from idml.model import load_model
from idml.training.config import from_dict
from idml.training.loop import train

EIGHT = dict.fromkeys("abcdefgh", 4)  # the first four classes train, the others test


class Runs:
    """Runs of one epoch on a folder of noise."""

    def __init__(self, options, folder, capsys):
        self.data, self.out, self.cache, self.capsys = folder / "album", folder / "run", folder / "cache", capsys
        self.options = {**options, "epochs": 1, "data": f"folder:{self.data}", "out": str(self.out)}

    def album(self, counts=EIGHT):
        noise = np.random.default_rng(0)
        for name, count in counts.items():
            (self.data / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(noise.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(self.data / name / f"{i}.png")
        return self.data

    def command(self, *arguments, **changed):
        """The exit status of the command, and the lines it says."""
        for key, value in {**self.options, **changed}.items():
            flag = key.replace("_", "-")
            switch = (f"--{flag}" if value else f"--no-{flag}",)
            arguments += switch if isinstance(value, bool) else (f"--{flag}", str(value))
        status = cli.main(["train", *arguments])
        said = self.capsys.readouterr()
        assert "Traceback" not in said.err
        assert (said.out == "") is (status != 0)
        assert not [*self.out.rglob("*.part"), *self.cache.rglob("*.part")]
        return status, said.err.splitlines()

    def refused(self, *arguments, **changed):
        """The one line with which the command ends."""
        status, lines = self.command(*arguments, **changed)
        assert status == 2
        assert [i for i, line in enumerate(lines) if line.startswith("idml train:")] == [len(lines) - 1]
        return lines[-1]

    def trained(self, report=lambda row: None, **changed):
        """Train to the end; the notes."""
        notes = []
        metrics = train(from_dict({**self.options, **changed}), report=report, note=notes.append)
        assert metrics["steps"] == self.steps() > 0
        assert load_model(self.out)
        return notes

    def steps(self):
        return (self.out / "log.jsonl").read_text().count('"loss"') if (self.out / "log.jsonl").exists() else 0


@pytest.fixture
def runs(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    return Runs(options, tmp_path, capsys)


@pytest.mark.parametrize(
    ("counts", "changed", "words"),
    [
        ({"": 0}, {}, "there is no image in a sub-folder of"),
        ({"a": 8}, {}, 'one class is not enough to train and test; the split "all" uses it for both'),
        ({"a": 8}, {"split": "all"}, "a batch of 8 with 2 images per class needs 4 classes"),
        ({**dict.fromkeys("abcdefgh", 1), **dict.fromkeys("ijklmnop", 2)}, {"holdout": 0}, "0 with two images or more"),
        (
            dict.fromkeys("abcd", 4),
            {},
            "a batch of 8 with 2 images per class needs 4 classes, but there are 2: choose a batch_size of 4",
        ),
        ({"a": 1, "b": 1, "c": 2, "d": 2}, {"per_class": 0}, "a batch needs 8 images, but there are 2"),
    ],
    ids=["empty", "one class", "one class for all", "single images", "few classes", "few images"],
)
def test_too_little_to_train_on(runs, counts, changed, words):
    runs.album(counts)
    assert words in runs.refused(**changed)
    assert not (runs.out / "checkpoints").exists()


@pytest.mark.parametrize(("names", "single"), [("abcdefgh", "efgh"), ("abcdefghijklmnop", "beg")], ids=["test", "held"])
def test_too_little_to_judge_by_is_said_before_training(runs, names, single):
    runs.album({name: 1 if name in single else 4 for name in names})
    status, lines = runs.command(batch_size=4)
    assert status == 0 or "has another image of its class" in lines[-1]
    assert status == 0 or runs.steps() == 0


def test_just_enough_to_train_on(runs):
    runs.album({"a": 8, "b": 1})
    assert runs.trained(split="all", batch_size=2) == ["folder all: 1 class of one image"]
    shutil.rmtree(runs.out)
    shutil.rmtree(runs.data / "b")
    assert runs.trained(split="all", batch_size=2) == []


@pytest.mark.parametrize("loss", ["multi_similarity", "margin_dw", "proxy_anchor"])
def test_the_same_image_in_every_class(runs, loss):
    first, *others = sorted(runs.album().glob("*/*.png"))
    for i, path in enumerate(others):
        path.unlink()
        (shutil.copy, os.symlink, os.link)[i % 3](first, path)
    assert not any("left out" in note for note in runs.trained(loss=loss))


def test_strange_names(runs):
    raw = os.fsdecode(b"not UTF-8 \xff")
    root = runs.album(dict.fromkeys((" a b ", "two\nlines", "größe 画", raw, "-n", "x;y", "'\"", "[red]"), 4))
    for folder in root.iterdir():
        (folder / "0.png").rename(folder / "new\nline é.png")
        (folder / "1.png").rename(folder / f"{raw}.png")
    long = f"{'long ' * 40} :cat:.jpg"
    for name in ("two\nlines/bro\nken ü.jpg", f"x;y/{long}"):
        (root / name).write_text("text")
    status, lines = runs.command(split="all")
    assert status == 0
    assert any(r"'two\nlines/bro\nken ü.jpg'" in line for line in lines)
    assert any(long in line for line in lines)


def test_a_folder_whose_name_is_not_utf8(runs):
    folder = runs.album().rename(runs.data.with_name(os.fsdecode(b"raw \xff")))
    assert runs.command(data=f"folder:{folder}")[0] == 0


def test_link_loops(runs):
    links = {"a/here": ".", "b/up": "..", "self": "self", "c/self.png": "self.png"}
    root = runs.album()
    for name, target in links.items():
        (root / name).symlink_to(target)
    assert "folder: 2 links to folders not followed" in runs.trained()
    assert "self" in runs.refused(data=f"folder:{root / 'self'}", out=f"{runs.out}-self")


def bomb():
    """A black 1-bit PNG of 30,000 × 30,000 pixels: 100 kB."""
    packer, side = zlib.compressobj(1), 30_000
    body = b"".join(packer.compress(bytes(1 + side // 8)) for _ in range(side)) + packer.flush()
    parts = {b"IHDR": struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0), b"IDAT": body, b"IEND": b""}
    chunks = [struct.pack(">I", len(v)) + k + v + struct.pack(">I", zlib.crc32(k + v)) for k, v in parts.items()]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_unreadable_images_are_named_counted_and_left_out(runs):
    root = runs.album()
    Image.new("RGB", (1, 1), (9, 99, 199)).save(root / "a/one pixel.png")
    Image.effect_noise((64, 64), 50).save(root / "cut.jpg")
    text, cut = b"a letter, not a picture\n" * 100, (root / "cut.jpg").read_bytes()[:1500]
    bad = {"a/text.jpg": text, "b/empty.jpg": b"", "c/cut.jpg": cut, "d/bomb.png": bomb(), "h/test.jpg": text}
    for name, content in bad.items():
        (root / name).write_bytes(content)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    notes = runs.trained()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000  # kB; the bomb alone would be 900 MB
    assert [sum(repr(name) in note for note in notes) for name in bad] == [1] * 5
    assert "900000000 pixels" in next(note for note in notes if "bomb" in note)
    assert not any("one pixel" in note for note in notes)
    assert any(re.search(r"\b4 .*images", note) for note in notes)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([f"a/x{i}.jpg" for i in range(101)], "folder train: 101 of 117"),
        ([f"{c}/{i}.png" for c in "abcd" for i in range(4)], "folder train: 16 of 16"),
        ([f"{c}/{i}.png" for c in "efgh" for i in range(4)], "folder test: 16 of 16"),
    ],
    ids=["101", "all to train on", "all to test on"],
)
def test_too_many_unreadable_images(runs, files, words):
    runs.album()
    for name in files:
        (runs.data / name).write_text("text")
    assert f"{words} images cannot be read (first: cannot read the image '{files[0]}'" in runs.refused()
    assert runs.steps() == 0


def test_a_file_vanishes_before_it_is_decoded(runs):
    path, away = runs.album() / "b" / "2.png", runs.data / "away"
    notes = runs.trained(lambda row: path.rename(away) if path.exists() else None)
    assert sum("there is no image 'b/2.png'" in note for note in notes) == 1
    away.rename(path)
    shutil.rmtree(runs.out)
    assert not any("b/2.png" in note for note in runs.trained())


@pytest.mark.parametrize("classes", ["abcd", "abcdefgh"])
def test_files_vanish_during_training(runs, classes):
    root = runs.album()
    folders = [root / name for name in classes]

    runs.trained(lambda row: [shutil.rmtree(folder, ignore_errors=True) for folder in folders if "loss" in row])
    assert not (runs.data / "a").exists()


@pytest.fixture
def stopped(runs):
    """The checkpoint after the second step of a run that stopped after the third of six."""
    runs.album()
    runs.options["epochs"] = 3
    with pytest.raises(ZeroDivisionError):
        train(from_dict(runs.options), report=lambda row: 1 / (3 - row.get("step", 0)))
    return runs.out / "checkpoints" / "last.safetensors"


def test_a_full_disk_keeps_the_old_checkpoint(runs, stopped):
    before, limits = stopped.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))  # the system writes half, then refuses
    try:
        assert "File too large" in runs.refused("--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert stopped.read_bytes() == before
    assert runs.command("--resume")[0] == 0


def test_room_for_the_pixels_is_taken_before_decoding(runs):
    files = []
    runs.album(dict.fromkeys(EIGHT, 10))
    runs.trained(lambda row: files.extend(path.stat() for path in runs.cache.glob("*.part")))
    assert files[0].st_blocks * 512 >= files[0].st_size


def test_a_damaged_checkpoint(runs, stopped):
    sound = stopped.read_bytes()
    model = (stopped.parent / "best" / "model.safetensors").read_bytes()
    for damaged in (b"", sound[:5], sound[:1000], sound[:-1], model):
        stopped.write_bytes(damaged)
        assert "last.safetensors is not a sound checkpoint" in runs.refused("--resume")
        assert stopped.read_bytes() == damaged


def test_a_checkpoint_of_another_version(runs, stopped):
    with safe_open(stopped, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del tensors["model.uncertainty.scale"]
    save_file(tensors, stopped, metadata)
    assert "was written by another version of idml: train into a new directory" in runs.refused("--resume")


@pytest.mark.parametrize("place", ["file", "file/below", "read-only/run", "/proc/run"])
def test_a_run_directory_that_cannot_be_written(runs, tmp_path, place):
    runs.album()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "read-only").mkdir(mode=0o500)
    if place == "read-only/run" and os.access(tmp_path / "read-only", os.W_OK):
        place = "/sys/run"  # permissions do not bind root
    assert "cannot write into the run directory" in runs.refused(out=str(tmp_path / place))
    assert (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "read-only").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate: 1.0", "unknown option 'learning_rate' (idml train --help lists them)"),
        ("- data: glyphs", "must hold options as 'name: value' lines"),
        ("lr: [1", "is not a YAML file"),
        ("ambiguity: null", "ambiguity"),
        ("loss: [triplet]", "loss"),
    ],
)
def test_bad_yaml(runs, tmp_path, text, words):
    runs.album()
    (tmp_path / "my.yaml").write_text(text)
    assert words in runs.refused("--config", str(tmp_path / "my.yaml"))
    assert runs.steps() == 0


@pytest.mark.parametrize("steps", [2, 1])
def test_exploding_weights_stop_the_run(runs, steps):
    runs.album(dict.fromkeys(EIGHT, 2 * steps))
    line = runs.refused(lr=1e30)  # the first step spoils the weights
    assert "NaN" in line
    assert re.search(r"step [01]\b.* [a-h]/\d\.png", line)
    assert not (runs.out / "model.safetensors").exists()


@pytest.mark.parametrize(("factor", "every"), [(1e30, 100), (1e13, 100), (1e13, 1)])
def test_exploding_weights_leave_the_last_good_checkpoint(runs, factor, every):
    runs.album()
    line = runs.refused(epochs=3, step_epochs=1, step_factor=factor, checkpoint_every=every)  # from the second epoch on
    assert "; the last checkpoint stays" in line
    tensors = load_file(runs.out / "checkpoints" / "last.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_learning_rate_beyond_floats(runs):
    runs.album()
    assert "lr" in runs.refused(lr=1e300)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"method": "drml", "loss": "proxy_anchor", "nodes": 3, "embedding_dim": 9}, "the width of the features 256"),
        ({"method": "dac", "groups": 3}, "embedding_dim 8 does not divide into 3 slices"),
        ({"method": "dac", "groups": 8, "embedding_dim": 32}, "two classes with two images each: use fewer groups"),
        ({"method": "mic", "loss": "margin_dw", "clusters": 90, "per_cluster": 2}, "90 clusters need at least 90"),
        ({"method": "diml", "loss": "proxy_anchor"}, "method diml compares pairs of images, not proxies"),
        ({"method": "pads", "loss": "contrastive"}, "margin_dw"),
    ],
)
def test_what_a_comparator_cannot_be_trained_with(changed, words, runs):
    runs.album(dict.fromkeys("abcdefgh", 2))
    line = runs.refused(**{**changed, "holdout": 0.0, "batch_size": 8})
    assert words in line
    assert runs.steps() == 0
