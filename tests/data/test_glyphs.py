"""Glyphs: what is drawn, which images have a twin, how the classes are split, and a cache that cannot hurt."""

import errno
import hashlib
import os
import re
import subprocess
import sys
import unicodedata
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageFont

from idml.data import datasets, glyphs
from idml.data.datasets import load_glyphs

SMALL = 8  # pixels: where only the cache is tested


def images(dataset):
    """(name, pixels, class name, ambiguous) of every image of both halves."""
    for half in (dataset.train, dataset.test):
        for source, label, ambiguous in zip(half.sources, half.labels.tolist(), half.ambiguous.tolist(), strict=True):
            yield source.name, source.pixels, half.classes[label], ambiguous


def digest(dataset):
    """A hash of everything that a data set holds."""
    held = hashlib.sha256(repr((dataset.notes, dataset.train.classes, dataset.test.classes)).encode())
    for name, pixels, label, ambiguous in images(dataset):
        held.update(repr((name, label, ambiguous)).encode() + pixels.tobytes())
    return held.hexdigest()


def is_capital(character):
    return "A" <= character <= "Z" or "Α" <= character <= "Ω"


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("glyphs")


@pytest.fixture(scope="session")
def dataset(cache):
    """The data set as it was drawn."""
    return load_glyphs(cache=cache)


@pytest.fixture(scope="session")
def by_font(dataset):
    """Pixels and ambiguity by font, then by character."""
    fonts = defaultdict(dict)
    for name, pixels, _, ambiguous in images(dataset):
        code, font = name.split("/")
        fonts[font][chr(int(code[2:], 16))] = pixels, ambiguous
    return fonts


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Drawings of the Latin and Greek capitals only, the folder of their cache file, and the data set's hash."""
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glyphs, "is_visible", is_capital)
        drawings = glyphs.draw(glyphs._fonts(), SMALL)
        return drawings, folder, digest(load_glyphs(size=SMALL, cache=folder))


@pytest.fixture
def drawn(small, monkeypatch):
    """A list that grows with each drawing; drawing itself costs nothing here."""
    calls = []
    monkeypatch.setattr(glyphs, "draw", lambda fonts, size: (calls.append(size), small[0])[1])
    return calls


# ---- what is drawn


def test_counts(dataset, by_font):
    per_class = Counter(label for _, _, label, _ in images(dataset))
    assert 2000 <= len(per_class) <= 2600
    assert len(per_class) == len(dataset.train.classes) + len(dataset.test.classes)
    assert min(per_class.values()) == 10
    assert max(per_class.values()) == 16 == len(by_font)
    assert sum(per_class.values()) == len(dataset.train) + len(dataset.test) > 30_000
    assert dataset.name == "glyphs"
    assert dataset.gallery is None
    ambiguous = int(dataset.train.ambiguous.sum() + dataset.test.ambiguous.sum())
    for count in (len(per_class), sum(per_class.values()), ambiguous):
        assert f"{count:,}" in dataset.notes[0]
    assert len(dataset.notes) == 1
    assert "\n" not in dataset.notes[0]


def test_every_image_has_ink_in_the_middle_and_none_at_the_edge(dataset):
    for name, pixels, _, _ in images(dataset):
        assert pixels.dtype == np.uint8
        assert pixels.shape == (32, 32)
        assert pixels.max() >= 100, name
        ink = pixels > 0
        assert ink[2:-2, 2:-2].sum() == ink.sum(), name
        for axis in (0, 1):  # centred, up to the pixel that an odd width leaves over
            filled = np.flatnonzero(ink.any(axis))
            assert abs(filled[0] + filled[-1] - 31) <= 2, name


def test_relative_sizes_are_kept(by_font):
    def height(font, character):
        return int((by_font[font][character][0] > 64).any(1).sum())

    for font in by_font:
        assert 17 <= height(font, "H") <= 19
        assert height(font, ".") < height(font, "x") < height(font, "H") < height(font, "Å")


def test_names(dataset):
    for name, _, label, _ in images(dataset):
        code, font = name.split("/")
        character = chr(int(code[2:], 16))
        assert label == f"{code} {unicodedata.name(character)}"
        assert unicodedata.category(character)[0] not in "CZM"
        assert font.endswith(".ttf")
        assert not re.match("LastResort|cm|STIXNonUni|STIXSiz", font)
    names = [name for name, _, _, _ in images(dataset)]
    assert len(set(names)) == len(names)
    assert "U+0041/DejaVuSans.ttf" in names
    assert "U+0041 LATIN CAPITAL LETTER A" in dataset.train.classes + dataset.test.classes
    assert dataset.train.sources[0].decode().mode == "RGB"


def test_what_a_font_lacks_is_not_drawn(by_font):
    folder = glyphs._fonts()[0].parent
    assert "\ufffc" not in by_font["DejaVuSans.ttf"]  # OBJECT REPLACEMENT CHARACTER: in the fonts, but empty
    for font, characters in by_font.items():
        face = ImageFont.truetype(folder / font, 20, layout_engine=ImageFont.Layout.BASIC)
        missing = bytes(face.getmask("\U0010ffff"))
        for character in characters:
            assert bytes(face.getmask(character)) != missing, (font, character)


def test_size(dataset):
    for wrong in (7, 129, 0, -32):
        with pytest.raises(ValueError, match=f"size must lie in 8 … 128, not {wrong}"):
            load_glyphs(size=wrong)


def test_too_few_fonts(tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.get_data_path", lambda: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="needs the fonts that matplotlib ships: 0 found"):
        load_glyphs(cache=tmp_path)


# ---- twins and the split


def test_ambiguous_is_what_comparing_all_pairs_finds(by_font):
    for font in ("DejaVuSans.ttf", "DejaVuSerif-BoldItalic.ttf", "STIXGeneral.ttf"):
        pixels = np.stack([image for image, _ in by_font[font].values()])
        words = pixels.reshape(len(pixels), -1).view(np.uint64)
        expected = [bool((words == row).all(1).sum() > 1) for row in words]
        assert [ambiguous for _, ambiguous in by_font[font].values()] == expected
        assert 20 < sum(expected) < len(expected) / 4


def test_ambiguous_in_every_font(by_font):
    for characters in by_font.values():
        drawn = Counter(image.tobytes() for image, _ in characters.values())
        for image, ambiguous in characters.values():
            assert ambiguous == (drawn[image.tobytes()] > 1)


def test_letters_that_three_alphabets_share(dataset, by_font):
    for letters in ("AΑА", "HΗН", "oοо"):
        codes = [f"U+{ord(letter):04X}" for letter in letters]
        assert (
            sum(
                all(any(label.startswith(code) for label in half.classes) for code in codes)
                for half in (dataset.train, dataset.test)
            )
            == 1
        ), letters
        assert all(by_font["DejaVuSans.ttf"][letter][1] for letter in letters)
    assert not by_font["DejaVuSans.ttf"]["R"][1]


def test_whole_groups_lie_in_one_half(dataset, by_font):
    halves = [{chr(int(label[2:].split()[0], 16)) for label in half.classes} for half in (dataset.train, dataset.test)]
    assert not halves[0] & halves[1]
    assert abs(len(halves[0]) - len(halves[1])) < 0.1 * sum(map(len, halves))
    for characters in by_font.values():
        alike = defaultdict(set)
        for character, (image, _) in characters.items():
            alike[image.tobytes()].add(character)
        assert all(same <= halves[0] or same <= halves[1] for same in alike.values())
    for half in (dataset.train, dataset.test):
        assert sorted(set(half.labels.tolist())) == list(range(len(half.classes)))
        assert half.ambiguous.float().mean() > 0.05


def test_groups_do_not_chain(cache, dataset):
    fonts = glyphs._fonts()
    drawings = glyphs._read(next(cache.iterdir()), glyphs._key(fonts, 32), 32, fonts)
    _, group = glyphs.find_twins(drawings)
    members = Counter(group.values())
    assert max(members.values()) <= 8
    assert sum(count > 1 for count in members.values()) > 100
    assert group[ord("A")] == group[ord("Α")] == group[ord("А")] == ord("A")
    assert all(smallest <= code and group[smallest] == smallest for code, smallest in group.items())


def test_the_half_of_a_group_is_the_same_everywhere():
    assert [glyphs.is_train_group(ord(c)) for c in "ABCDEFGH"] == [True, False, True, True, False, True, True, True]


# ---- the cache


def test_a_cached_load_equals_a_built_one_and_draws_nothing(dataset, cache, monkeypatch):
    monkeypatch.setattr(glyphs, "draw", None)
    assert digest(load_glyphs(cache=cache)) == digest(dataset)
    assert [path.suffix for path in cache.iterdir()] == [".npz"]


def test_the_file_holds_no_pickle(cache, dataset):
    with np.load(next(cache.iterdir()), allow_pickle=False) as held:
        assert {held[name].dtype.kind for name in held} == {"U", "u", "i"}


TWO_PROCESSES = """
import sys, time
from pathlib import Path
from test_glyphs import SMALL, digest, glyphs, is_capital, load_glyphs
folder, write = Path(sys.argv[2]), glyphs._write

def write_together(*arguments):  # both have drawn before either may write
    (folder / f"{sys.argv[1]}.ready").touch()
    late = time.monotonic() + 60
    while len(list(folder.glob("*.ready"))) < 2 and time.monotonic() < late:
        time.sleep(0.001)
    write(*arguments)

glyphs.is_visible, glyphs._write = is_capital, write_together
print(digest(load_glyphs(size=SMALL, cache=folder)))
"""


def test_two_processes_at_once(tmp_path, small, drawn):
    """Both draw for themselves, with other hash seeds: the same as here, and one sound file."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    both = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(number), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": str(number + 1)},
        )
        for number in range(2)
    ]
    assert [process.communicate(timeout=600) for process in both] == [(small[2] + "\n", "")] * 2
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".npz", ".ready", ".ready"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert digest(load_glyphs(size=SMALL, cache=tmp_path)) == small[2]
    assert drawn == []


def test_drawing_again_gives_the_same(dataset):
    fonts = glyphs._fonts()
    again = glyphs.draw(fonts, 32)
    assert digest(datasets._build_glyphs(again, [font.name for font in fonts])) == digest(dataset)


def npy(path, array):
    with path.open("wb") as file:
        np.save(file, array)


def saved(path, **arrays):
    with path.open("wb") as file:
        np.savez(file, **arrays)


FOREIGN = {
    "empty": lambda path, held: path.write_bytes(b""),
    "truncated": lambda path, held: path.write_bytes(path.read_bytes()[:-1000]),
    "half": lambda path, held: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "text": lambda path, held: path.write_text("not an archive\n" * 100),
    "an array": lambda path, held: npy(path, held["pixels"]),
    "other arrays": lambda path, held: saved(path, weights=np.zeros(3)),
    "another key": lambda path, held: saved(path, **held | {"key": np.array("0" * 16)}),
    "pickled": lambda path, held: saved(path, **held | {"fonts": np.array([{}, None], dtype=object)}),
    "another size": lambda path, held: saved(path, **held | {"pixels": held["pixels"][:, 1:]}),
    "fewer images": lambda path, held: saved(path, **held | {"pixels": held["pixels"][1:]}),
    "floats": lambda path, held: saved(path, **held | {"pixels": held["pixels"].astype(np.float32)}),
    "an unknown font": lambda path, held: saved(path, **held | {"fonts": held["fonts"] + 1}),
    "no character": lambda path, held: saved(path, **held | {"characters": held["characters"] + 0x110000}),
    "a number": lambda path, held: saved(path, **held | {"fonts": np.array(3)}),
    "no images": lambda path, held: saved(path, **{name: array[:0] for name, array in held.items() if array.ndim}),
}


@pytest.mark.parametrize("damage", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_damaged_or_foreign_file_is_replaced_with_one_warning(damage, tmp_path, small, drawn):
    load_glyphs(size=SMALL, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    with np.load(path) as file:
        damage(path, dict(file))
    drawn.clear()
    with pytest.warns(UserWarning, match="it is drawn again") as seen:
        assert digest(load_glyphs(size=SMALL, cache=tmp_path)) == small[2]
    assert len(seen) == 1
    assert "\n" not in str(seen[0].message)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_glyphs(size=SMALL, cache=tmp_path)
    assert drawn == [SMALL]


def test_a_flipped_byte_never_goes_unnoticed(tmp_path, small, drawn):
    (whole,) = small[1].iterdir()
    path, data = tmp_path / whole.name, whole.read_bytes()
    places = [*np.random.default_rng(0).integers(0, len(data), 60).tolist(), len(data) - 10, 30, 4]
    for place in places:
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert digest(load_glyphs(size=SMALL, cache=tmp_path)) == small[2]
    assert len(drawn) > 40


@pytest.mark.parametrize("problem", ["read-only", "full disk", "a file is in the way"])
def test_a_folder_that_cannot_be_written_is_only_slower(problem, tmp_path, small, drawn, monkeypatch, capfd):
    folder = tmp_path / "cache"
    if problem == "read-only":
        folder.mkdir(mode=0o555)
        opening = Path.open

        def refuse(path, mode="r", **options):  # root may write anyway, so the refusal is played
            if path.parent == folder and "r" not in mode:
                raise PermissionError(errno.EACCES, "Permission denied")
            return opening(path, mode, **options)

        monkeypatch.setattr(Path, "open", refuse)
    elif problem == "full disk":

        def fill(file, **arrays):
            file.write(b"PK")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(np, "savez_compressed", fill)
    else:
        folder.touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert digest(load_glyphs(size=SMALL, cache=folder)) == small[2]
    assert drawn == [SMALL, SMALL]
    assert problem == "a file is in the way" or list(folder.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_where_the_cache_is(tmp_path, drawn, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("IDML_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for variable, folder in ((None, ".cache/idml"), ("XDG_CACHE_HOME", "xdg/idml"), ("IDML_CACHE", "own")):
        if variable:
            monkeypatch.setenv(variable, str(tmp_path / folder.split("/")[0]))
        load_glyphs(size=SMALL)
        assert [path.suffix for path in (tmp_path / folder).iterdir()] == [".npz"]
    assert len(drawn) == 3


def test_another_size_or_font_is_another_file():
    fonts = glyphs._fonts()
    assert len({glyphs._key(fonts, 32), glyphs._key(fonts, 31), glyphs._key(fonts[1:], 32)}) == 3
