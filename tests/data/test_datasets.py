"""SPECs, splits, folders and CSV files; the real CUB and Cars where they are there."""

import io
import os
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from idml.data import datasets, layouts
from idml.data import datasets as catalogue
from idml.data.datasets import Dataset, ImageSet, load_dataset
from idml.data.sources import ArraySource

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def picture(grey):
    file = io.BytesIO()
    Image.new("L", (3, 2), grey).save(file, "PNG")
    return file.getvalue()


def write(root, *names):
    """Pictures of grey 1, 2, … below a folder."""
    for grey, name in enumerate(names, start=1):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(picture(grey))
    return root


def packed(root):
    with tarfile.open(f"{root}.tar", "w") as archive:
        archive.add(root, arcname=root.name)
    return f"{root}.tar"


def names(images):
    return [source.name for source in images.sources]


def refused(spec, *words, error=ValueError, **options):
    with pytest.raises(error) as caught:
        load_dataset(spec, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


# ---- real data


def real(name):
    if not (REAL / name).exists():
        pytest.skip(f"the data is absent: {name}")
    return REAL / name


def timed(spec):
    start = time.process_time()
    data = load_dataset(spec)
    assert time.process_time() - start < 5  # about 1 on an idle core; one look per image at a list would take minutes
    return data


def test_real_cub():
    data = timed(f"cub:{real('cub_200_2011_256px.tar')}")
    assert (len(data.train), len(data.test)) == (5864, 5924)
    assert data.train.labels.unique().tolist() == data.test.labels.unique().tolist() == list(range(100))
    assert (data.train.classes[0], data.train.classes[-1]) == ("001.Black_footed_Albatross", "100.Brown_Pelican")
    assert (data.test.classes[0], data.test.classes[-1]) == ("101.White_Pelican", "200.Common_Yellowthroat")
    for images in (data.train, data.test):
        for source, label in zip(images.sources, images.labels.tolist(), strict=True):
            assert source.name.split("/")[1] == images.classes[label]
    assert min(data.test.sources[-1].decode().size) == 256
    assert data.gallery is None
    assert data.notes == ()


def test_real_cars():
    path = real("stanford_cars_128px.tar")
    data = timed(f"cars:{path}")
    assert (len(data.train), len(data.test)) == (8054 - 6, 8131 - 9)
    assert data.train.labels.unique().tolist() == data.test.labels.unique().tolist() == list(range(98))
    assert data.train.classes[0] == "AM General Hummer SUV 2000"
    assert data.test.classes[-1] == "smart fortwo Convertible 2012"
    assert min(data.train.sources[0].decode().size) == 128
    assert data.notes == (
        "cars: 15 images missing (train 8,048 of 8,054, test 8,122 of 8,131); "
        "15 listed but absent, 'cars_train/01427.jpg' first",
    )
    refused(f"cars:{path}", "15 images missing", "'cars_train/01427.jpg' first", strict=True)
    refused(f"cars:{path}", "15 images missing", strict=True, spare=8e-4)
    assert len(load_dataset(f"cars:{path}", strict=True, spare=1e-3).train) == 8054 - 6


# ---- SPECs


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cup:x", ("'cup'", "did you mean 'cub'?", "inshop:PATH")),
        ("CUB:x", ("did you mean 'cub'?",)),
        ("glyph", ("did you mean 'glyphs'?",)),
        ("glyphs:x", ("did you mean 'glyphs'?",)),
        ("", ("one of glyphs, cub:PATH, cars:PATH, sop:PATH, inshop:PATH, folder:PATH, csv:FILE",)),
        ("zzz\n:x", ("one of glyphs",)),
        ("cub", ("needs a path: cub:PATH",)),
        ("csv:", ("needs a path: csv:FILE",)),
    ],
)
def test_unknown_specs_are_refused(spec, words):
    refused(spec, *words)


@pytest.mark.parametrize("kind", layouts_kinds := ["cub", "cars", "sop", "inshop", "folder", "csv"])
def test_missing_paths_are_named(tmp_path, kind):
    refused(f"{kind}:{tmp_path}/no\nwhere", "there is no ", r"no\nwhere", error=FileNotFoundError)
    refused(f"{kind}:\0", "there is no ", error=FileNotFoundError)


@pytest.mark.parametrize("kind", layouts_kinds)
def test_what_is_no_file_is_refused(tmp_path, kind):
    os.mkfifo(tmp_path / "pipe.tar")
    refused(f"{kind}:{tmp_path / 'pipe.tar'}", "pipe.tar", "file")


def test_a_folder_is_no_csv(tmp_path):
    refused(f"csv:{tmp_path}", "is not a file")


def test_a_colon_and_a_tilde_in_the_path(tmp_path, monkeypatch):
    write(tmp_path / "a:b", "x/1.png", "y/1.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names(load_dataset("folder:~/a:b").train) == ["x/1.png"]


def test_unreadable_files_are_one_line(tmp_path, monkeypatch):
    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    write(tmp_path, "x/1.png", "y/1.png")
    monkeypatch.setattr(layouts.os, "scandir", forbidden)
    refused(f"folder:{tmp_path}", f"cannot read '{tmp_path}", "Permission denied")


def test_all_glyphs_train_and_test(monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (6, 4, 4), dtype=np.uint8)
    halves = [
        ImageSet(
            name,
            [ArraySource(f"{name}{i}", noise[i]) for i in range(3)],
            torch.tensor([0, 1, 1]),
            (f"{name}a", f"{name}b"),
            torch.tensor([True, False, False]),
        )
        for name in ("train", "test")
    ]
    monkeypatch.setattr(datasets, "load_glyphs", lambda: Dataset("glyphs", *halves, notes=("a note",)))
    both = load_dataset("glyphs", split="all")
    assert both.train is both.test
    assert both.train.labels.tolist() == [0, 1, 1, 2, 3, 3]
    assert both.train.classes == ("traina", "trainb", "testa", "testb")
    assert both.train.ambiguous.tolist() == [True, False, False] * 2
    assert both.notes == ("a note",)


def test_glyphs_are_loaded_by_name(monkeypatch):
    monkeypatch.setattr(datasets, "load_glyphs", lambda: "the glyphs")
    assert load_dataset("glyphs") == "the glyphs"
    refused("glyphs", "official", split="0.8")


# ---- official counts


@pytest.mark.parametrize(
    ("official", "gone", "note"),
    [
        ({"train": 2, "test": 2}, None, None),
        ({"train": 3, "test": 2}, None, "sop: 1 image missing (train 2 of 3, test 2 of 2)"),
        ({"train": 1, "test": 2}, None, "sop: 1 image too many (train 2 of 1, test 2 of 2)"),
        ({"train": 1, "test": 4}, None, "sop: 2 images missing and 1 image too many (train 2 of 1, test 2 of 4)"),
        (
            {"train": 2, "test": 3},
            "b/2.png",
            "sop: 2 images missing (train 2 of 2, test 1 of 3); 1 listed but absent, 'b/2.png' first",
        ),
    ],
)
def test_a_difference_from_the_official_counts_is_noted_or_refused(tmp_path, monkeypatch, official, gone, note):
    write(tmp_path, *(name for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png") if name != gone))
    images = [
        layouts.Listed(f"{c}/{i}.png", int(c == "b"), "train" if c == "a" else "test") for c in "ab" for i in (1, 2)
    ]
    listing = layouts.Listing(layouts.Folder(tmp_path), ("a", "b"), images, official)
    monkeypatch.setitem(catalogue.LAYOUTS, "sop", lambda path: listing)
    assert [line for line in load_dataset("sop:.").notes if "of one image" not in line] == ([note] if note else [])
    if note:
        refused("sop:.", note, str(tmp_path), strict=True)
        refused("sop:.", note, str(tmp_path), strict=True, spare=0.1)
        assert note in load_dataset("sop:.", strict=True, spare=1.0).notes
    else:
        assert len(load_dataset("sop:.", strict=True).train) == 2


# ---- splits


@pytest.fixture
def ten(tmp_path):
    return write(tmp_path / "ten", *(f"class {c}/{i}.jpg" for c in range(1, 11) for i in (1, 2)))


@pytest.mark.parametrize(
    ("split", "trained"), [("official", 5), ("0.5", 5), ("0.8", 8), ("0.25", 3), ("0.01", 1), ("0.99", 9), (".3", 3)]
)
@pytest.mark.parametrize("tar", [False, True])
def test_a_share_of_the_classes_trains_in_natural_order(ten, split, trained, tar):
    data = load_dataset(f"folder:{packed(ten) if tar else ten}", split=split)
    assert data.train.classes == tuple(f"class {c}" for c in range(1, trained + 1))
    assert data.test.classes == tuple(f"class {c}" for c in range(trained + 1, 11))
    for images in (data.train, data.test):
        assert images.labels.tolist() == [c for c in range(len(images.classes)) for _ in (1, 2)]
        assert names(images) == [f"{name}/{i}.jpg" for name in images.classes for i in (1, 2)]
    assert data.notes == ()


def test_of_an_odd_number_of_classes_the_larger_half_trains(tmp_path):
    data = load_dataset(f"folder:{write(tmp_path, 'a/1.png', 'b/1.png', 'c/1.png')}")
    assert (data.train.classes, data.test.classes) == (("a", "b"), ("c",))


def test_all_trains_and_tests_on_everything(ten):
    data = load_dataset(f"folder:{ten}", split="all")
    assert len(data.train) == len(data.test) == 20
    assert len(data.train.classes) == 10
    assert data.train.fingerprint == data.test.fingerprint


@pytest.mark.parametrize("split", ["half", "", "0", "1", "1.0", "-0.5", "nan", "inf", "80%", "Official"])
def test_unknown_splits_are_refused(ten, split):
    refused(f"folder:{ten}", '"official", "all"', '"0.8"', repr(split), split=split)


def test_one_class_is_enough_only_for_all(tmp_path):
    write(tmp_path, "only/1.png", "only/2.png")
    for split in ("official", "0.5"):
        refused(f"folder:{tmp_path}", "one class", '"all"', split=split)
    assert len(load_dataset(f"folder:{tmp_path}", split="all").train) == 2


# ---- folders


@pytest.mark.parametrize("tar", [False, True])
def test_folder_takes_images_of_any_depth_and_passes_over_the_rest(tmp_path, tar):
    root = write(
        tmp_path / "pets",
        "cat/2.JPG",
        "cat/10.jpeg",
        "cat/kittens/deep/1.Png",
        "cat/.hidden.jpg",
        "cat/.thumbs/1.jpg",
        ".git/1.jpg",
        "dog\nold/ü b.TIFF",
        "dog\nold/1.webp",
        "dog\nold/2.gif",
        "dog\nold/3.bmp",
        "dog\nold/4.tif",
        "loose.png",
        "cat/notes.txt",
        "empty/readme.md",
    )
    data = load_dataset(f"folder:{packed(root) if tar else root}", split="0.5")
    assert names(data.train) == ["cat/2.JPG", "cat/10.jpeg", "cat/kittens/deep/1.Png"]
    assert names(data.test) == [f"dog\nold/{name}" for name in ("1.webp", "2.gif", "3.bmp", "4.tif", "ü b.TIFF")]
    assert [source.decode().getpixel((0, 0))[0] for source in data.train.sources] == [1, 2, 3]
    assert data.test.sources[-1].decode().getpixel((0, 0))[0] == 7
    others = "folder: 2 files of other types left out ('cat/notes.txt', 'empty/readme.md')"
    assert data.notes == (others, "folder: 1 image in no sub-folder left out")


def test_an_outer_folder_of_a_tar_is_looked_through_only_if_it_holds_classes(tmp_path):
    root = write(tmp_path / "cats", "1.png", "kittens/2.png")
    data = load_dataset(f"folder:{packed(root)}", split="all")
    assert data.train.classes == ("cats",)
    assert names(data.train) == ["cats/1.png", "cats/kittens/2.png"]


def test_a_tar_gives_the_names_of_its_folder(tmp_path):
    root = write(tmp_path / "pets", "cat/2.png", "cat/a/1.png", "dog/\udcff.png", "dog/é\n.png")
    one, two = load_dataset(f"folder:{root}"), load_dataset(f"folder:{packed(root)}")
    assert names(one.test) == names(two.test)
    assert one.train.fingerprint == two.train.fingerprint
    assert one.test.fingerprint == two.test.fingerprint
    assert [s.decode().getpixel((0, 0))[0] for s in two.train.sources] == [1, 2]


def test_links_to_folders_are_not_followed_and_links_to_files_are(tmp_path):
    root = write(tmp_path / "pets", "cat/1.png", "dog/1.png")
    write(tmp_path / "elsewhere", "2.png")
    for link, target in {
        "cat/loop": root,
        "self": root / "self",
        "outside": tmp_path / "elsewhere",
        "twin": root / "cat",
        "dog/2.png": tmp_path / "elsewhere/2.png",
        "dog/broken.png": root / "gone.png",
        "dog/round.png": root / "dog/round.png",
    }.items():
        (root / link).symlink_to(target)
    data = load_dataset(f"folder:{root}")
    assert names(data.train) == ["cat/1.png"]
    assert names(data.test) == ["dog/1.png", "dog/2.png"]
    assert "folder: 3 links to folders not followed" in data.notes


def test_a_folder_of_links_to_folders_is_refused_and_says_why(tmp_path):
    write(tmp_path / "elsewhere", "cat/1.png", "dog/1.png")
    root = tmp_path / "links"
    root.mkdir()
    for name in ("cat", "dog"):
        (root / name).symlink_to(tmp_path / "elsewhere" / name)
    with pytest.raises(ValueError, match=r"no image in a sub-folder.*; 2 links to folders not followed$"):
        load_dataset(f"folder:{root}")


def test_empty_folders_are_refused(tmp_path):
    refused(f"folder:{tmp_path}", "no image in a sub-folder", ".jpg")
    write(tmp_path, "loose.png", "cat/notes.txt")
    refused(f"folder:{tmp_path}", "no image in a sub-folder")
    (tmp_path / "empty").mkdir()
    refused(f"folder:{packed(tmp_path / 'empty')}", "no image in a sub-folder")


def test_classes_of_one_image_are_noted(tmp_path):
    write(tmp_path, "a/1.png", "b/1.png", "c/1.png", "c/2.png", "d/1.png")
    data = load_dataset(f"folder:{tmp_path}")
    assert data.notes == ("folder train: 2 classes of one image", "folder test: 1 class of one image")
    assert load_dataset(f"folder:{tmp_path}", split="all").notes == ("folder all: 3 classes of one image",)


# ---- CSV


@pytest.fixture
def listed(tmp_path):
    """A function that writes a CSV beside six pictures and returns its SPEC."""
    write(tmp_path, "a 1.png", "sub/b.png", "c\n.png", "é.png", "e.png", "f.png")
    write(tmp_path.parent, "outside.png")

    def save(text):
        (tmp_path / "my list.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
        return f"csv:{tmp_path / 'my list.csv'}"

    return save


def test_csv_with_a_split(listed):
    cats = 'cat,x,train,a 1.png\ncat,,train,"c\n.png"\n\n'
    data = load_dataset(listed(f"\ufefflabel,note,split, path\ncow,,test,sub/b.png\n{cats}cow,,test,é.png\n"))
    assert names(data.train) == ["a 1.png", "c\n.png"]
    assert names(data.test) == ["sub/b.png", "é.png"]
    assert (data.train.classes, data.test.classes) == (("cat",), ("cow",))
    assert [source.decode().getpixel((0, 0))[0] for source in data.train.sources] == [1, 3]
    assert data.notes == ()
    other = load_dataset(f"csv:{data.train.sources[0].root / 'my list.csv'}", split="all")
    assert len(other.train) == 4


def test_csv_without_a_split_halves_its_classes(listed):
    data = load_dataset(listed("path,label\r\ne.png,10\r\nf.png,9\r\n./sub/../a 1.png, 9 \r\nsub/b.png,10\r\n"))
    assert (data.train.classes, data.test.classes) == (("9",), ("10",))
    assert names(data.train) == ["f.png", "a 1.png"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,class\ne.png,a\n", ("line 1", "path, label", "'class'")),
        ("path;label\ne.png;a\n", ("line 1", "path;label")),
        ("path,label,label\ne.png,a,b\n", ("line 1",)),
        ("", ("line 1", "path, label")),
        ("path,label\n", ("lists no image",)),
        ('path,label\n"c\n.png",a\ne.png, \n', ("line 4", "the label is empty")),
        ("path,label\n,a\n", ("line 2", "the path is empty")),
        ("path,label\ne.png\n", ("line 2", "1 fields instead of 2")),
        ("path,label\ne.png,a,b\n", ("line 2", "3 fields instead of 2")),
        ("path,label,split\ne.png,a,train\nf.png,b,val\n", ("line 3", "'val' is neither train nor test")),
        ("path,label,split\ne.png,a,train\nf.png,b,\n", ("line 3", "'' is neither train nor test")),
        ("path,label\n../outside.png,a\n", ("line 2", "leaves the file's folder")),
        ("path,label\nsub/../../outside.png,a\n", ("line 2", "leaves the file's folder")),
        ("path,label\n/etc/x.png,a\n", ("line 2", "absolute")),
        ("path,label\nC:\\x.png,a\n", ("line 2", "absolute")),
        ('path,label\ne.png,"a\n', ("line 2", "unexpected end of data")),
        (b"path,label\n\xe9.png,a\n", ("not UTF-8 at byte 11",)),
        ("path,label\ngone.png,a\n", ("1 image missing", "'gone.png' first")),
        ("path,label,split\ne.png,a,train\n", ("no test image",)),
        ("path,label\ne.png,a\nf.png,a\n", ("one class",)),
    ],
)
def test_bad_csv_files_are_refused_with_the_line(listed, text, words):
    refused(listed(text), *words)


def test_csv_images_that_are_absent_are_noted(listed):
    spec = listed("path,label\ne.png,a\ngone.png,a\nf.png,b\nsub,b\na 1.png,b\nsub/b.png,a\n")
    data = load_dataset(spec)
    assert (names(data.train), names(data.test)) == (["e.png", "sub/b.png"], ["f.png", "a 1.png"])
    assert data.notes == ("csv: 2 images missing; 2 listed but absent, 'gone.png' first",)
    refused(spec, "2 images missing", "'gone.png'", "(in '", strict=True)


def test_csv_lists_an_image_twice(listed):
    data = load_dataset(listed("path,label\ne.png,a\n./e.png,a\nf.png,a\nf.png,b\nf.png,b\na 1.png,b\n"))
    assert (names(data.train), names(data.test)) == (["e.png", "f.png"], ["f.png", "a 1.png"])
    assert data.notes == (
        "csv: 2 images listed more than once, 'e.png' first",
        "csv: 1 image under more than one label, 'f.png' first",
    )


def test_csv_class_in_train_and_test_is_noted(listed):
    text = "path,label,split\ne.png,a,train\nf.png,b,test\na 1.png,b,train\né.png,b,test\nsub/b.png,a,train\n"
    data = load_dataset(listed(text))
    assert (data.train.classes, data.test.classes) == (("a", "b"), ("b",))
    assert data.notes == ("csv: 1 class in train and test, 'b' first", "csv train: 1 class of one image")
