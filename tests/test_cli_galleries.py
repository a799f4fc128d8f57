"""Galleries and folders as people have them, and bad input, through the command line: an answer, or one clear line."""

import json
import shutil
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pillow_heif import register_heif_opener

from idml import cli
from idml.model import build_model, save_model

SMALL_RUN = "--trunk conv4 --no-pretrained --image-size 28 --embedding-dim 16 --epochs 1"


def draw(folder, classes, each, *, spread=60, flat=False, suffix="png"):
    """Pictures of some classes; with ``spread`` 0 all pictures of all classes are the same."""
    noise = np.random.default_rng(0)
    first = np.kron(noise.integers(40, 216, (4, 4, 3)), np.ones((8, 8, 1)))
    for c in range(classes):
        pattern = np.kron(noise.integers(40, 216, (4, 4, 3)), np.ones((8, 8, 1))) if spread else first
        home = Path(folder) if flat else Path(folder) / f"c{c:02d}"
        home.mkdir(parents=True, exist_ok=True)
        for n in range(each):
            pixels = (pattern + noise.normal(0, spread, pattern.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(home / f"{c}-{n}.{suffix}")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models, and a gallery of 12 classes with 20 images each that is calibrated."""
    folder = tmp_path_factory.mktemp("galleries")
    with chdir(folder):
        for seed, name in enumerate(("run", "other")):
            torch.manual_seed(seed)
            save_model(build_model("conv4", embedding_dim=16, image_size=28), name)
        draw("photos", 12, 20)
        assert cli.main(["index", "photos", "--to", "ordinary", "--model", "run"]) == 0
        assert cli.main(["calibrate", "ordinary"]) == 0
    return folder


@pytest.fixture
def run(place, tmp_path, monkeypatch, capsys):
    """Runs a command given as one line; its exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    for name in ("run", "other", "photos"):
        Path(name).symlink_to(place / name)
    shutil.copytree(place / "ordinary", "ordinary")

    def call(line):
        try:
            status = cli.main(line.split())
        except SystemExit as stop:  # of the parser
            status = stop.code
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return status, said.out, said.err

    return call


def refuse(answer, words):
    """Check that a command said one clear line and nothing else to programs."""
    status, out, err = answer
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("idml ")
    assert words in err.splitlines()[-1]


def replies(answer):
    """The replies of a search; none of them promises anything unless it is said."""
    status, out, _ = answer
    assert status == 0
    return json.loads(out)["replies"]


def index(run, name, *, model="run"):
    status, out, err = run(f"index {name} --to g-{name} --model {model} --json")
    assert status == 0, err
    return json.loads(out)


# -------------------- files people have --------------------


def test_a_folder_of_which_nothing_can_be_read_makes_no_gallery(run):
    Path("broken/c00").mkdir(parents=True)
    Path("broken/c00/1.png").write_bytes(b"no image")
    words = "no image in 'broken' can be read (1 tried); nothing was changed"
    status, out, err = run("index broken --to new --model run")
    assert (status, out) == (2, "")
    assert err.splitlines()[0].startswith("cannot read the image 'c00/1.png': ")
    assert err.splitlines()[1:] == [f"idml index: {words}"]
    assert not Path("new").exists()
    before = Path("ordinary/roots.json").read_bytes()
    status, out, err = run("index broken --to ordinary")
    assert (status, out) == (2, "")
    assert words in err
    assert Path("ordinary/roots.json").read_bytes() == before


def test_photos_of_phones_are_indexed_searched_embedded_and_trained_on(run):
    register_heif_opener()
    for suffix in ("heic", "avif", "png"):
        draw("phone", 4, 4, spread=30, suffix=suffix)
    Path("phone/c00/film.mov").write_bytes(b"no picture")
    Path("phone/c01/broken.heic").write_bytes(b"\0\0\0\x1cftypheic and nothing else")
    done = index(run, "phone")
    assert (done["new"], done["broken"], done["skipped"]) == (48, 1, 1)
    _, _, err = run("index phone --to g-phone")
    assert "cannot read the image 'c01/broken.heic': this HEIF file is damaged" in err
    assert "1 file of other types left out ('c00/film.mov')" in err
    for suffix in ("heic", "avif"):
        (reply,) = replies(run(f"search g-phone phone/c02/2-1.{suffix} -k 1 --json"))
        assert reply["results"][0]["path"] == f"phone/c02/2-1.{suffix}"
    assert json.loads(run("embed phone --model run --to e.npz --json")[1])["images"] == 48
    Path("phone/c01/broken.heic").unlink()
    status, _, err = run(f"train --data folder:phone --split all --out r {SMALL_RUN} --batch-size 8 --holdout 0")
    assert status == 0, err
    assert "1 file of other types left out ('c00/film.mov')" in err
    assert json.loads(Path("r/source.json").read_text())["source"] == "random numbers"
    assert run("audit r --data folder:phone --split all --out audit")[0] == 0


def test_a_flat_folder(run):
    draw("flat", 60, 1, flat=True)
    assert index(run, "flat")["new"] == 60
    status, out, _ = run("calibrate g-flat --json")
    assert status == 0
    assert json.loads(out)["labelled"] is False
    (reply,) = replies(run("search g-flat flat/3-0.png -k 1 --json"))
    assert (reply["calibrated"], reply["results"][0]["label"]) == (True, None)
    refuse(run(f"train --data folder:flat --out r {SMALL_RUN}"), "there is no image in a sub-folder of 'flat'")


def test_two_classes(run):
    draw("two", 2, 30)
    index(run, "two")
    status, out, _ = run("calibrate g-two")
    assert status == 0
    assert "cannot promise at most 5 % wrong matches here: 1 class was counted" in out
    (reply,) = replies(run("search g-two two/c01/1-5.png -k 1 --json"))
    assert (reply["calibrated"], reply["promised"]) == (True, False)
    refuse(run(f"train --data folder:two --out r {SMALL_RUN}"), "a batch needs 120 images, but there are 30: choose")
    small = f"{SMALL_RUN} --batch-size 20"
    refuse(run(f"train --data folder:two --out r {small}"), "split all trains on every class")
    refuse(run(f"train --data folder:two --split all --out r {small} --holdout 0"), "choose a batch_size of 8 or less")
    assert run(f"train --data folder:two --split all --out r {SMALL_RUN} --batch-size 8 --holdout 0")[0] == 0


def test_classes_of_one_image(run):
    draw("singles", 60, 1)
    index(run, "singles")
    refuse(run("calibrate g-singles"), "needs 50 queries with a right answer, there are 0: add images")
    (reply,) = replies(run("search g-singles singles/c07/7-0.png -k 1 --json"))
    assert (reply["calibrated"], reply["results"][0]["label"]) == (False, "c07")
    refuse(run(f"train --data folder:singles --out r {SMALL_RUN}"), "none of the 30 images has another image")


# -------------------- unusual galleries --------------------


def test_without_a_calibration(run):
    index(run, "photos")
    (reply,) = replies(run("search g-photos photos/c03/3-1.png --json"))
    assert (reply["calibrated"], reply["promised"], reply["probability"]) == (False, False, None)
    assert reply["notes"] == ["not calibrated: nothing is promised (see idml calibrate)"]
    assert "not calibrated (see idml calibrate)" in run("gallery info g-photos")[1]


def test_one_image(run):
    draw("one", 1, 1)
    index(run, "one")
    refuse(run("calibrate g-one"), "has one image: index more before you calibrate it")
    (reply,) = replies(run("search g-one photos/c03/3-1.png --json"))
    assert (reply["calibrated"], reply["promised"], len(reply["results"])) == (False, False, 1)
    refuse(run(f"train --data folder:one --out r {SMALL_RUN}"), "one class is not enough to train and test")


def test_no_image(run):
    Path("none").mkdir()
    refuse(run("index none --to g-none --model run"), "contains no image")
    draw("one", 1, 1)
    index(run, "one")
    assert "next: " not in run("index one --to g-one")[1]  # one image cannot be calibrated
    (item,) = json.loads(run("gallery list g-one --json")[1])["items"]
    assert run(f"gallery remove g-one {item['id']}")[0] == 0
    refuse(run("calibrate g-one"), "has no image")
    (reply,) = replies(run("search g-one photos/c03/3-1.png --json"))
    assert (reply["state"], reply["reason"]) == ("not in the collection", "the collection is empty")


def test_one_class(run):
    draw("class", 1, 60)
    index(run, "class")
    refuse(run("calibrate g-class"), "the gallery holds a single class; for queries that are all of this class")
    assert run("calibrate g-class --unknown 0")[0] == 0
    (reply,) = replies(run("search g-class class/c00/0-1.png --json"))
    assert (reply["calibrated"], reply["state"]) == (True, "unsure")
    assert reply["reason"].startswith("cannot promise at most 5 % wrong matches here: there are 30 calibration queries")


def test_all_images_equal(run):
    draw("equal", 2, 30, spread=0)
    index(run, "equal")
    refuse(run("calibrate g-equal"), "has copies of one image: index more before you calibrate it")
    (reply,) = replies(run("search g-equal equal/c01/1-1.png --json"))
    assert (reply["calibrated"], reply["promised"]) == (False, False)
    draw("same", 60, 1, spread=0, flat=True)
    index(run, "same")
    refuse(run("calibrate g-same"), "has copies of one image: index more before you calibrate it")
    (reply,) = replies(run("search g-same same/1-0.png --json"))
    assert reply["state"] != "not in the collection"


def test_labels_for_some_images(run):
    draw("some", 6, 10)
    for n in range(5):
        shutil.copy(f"some/c00/0-{n}.png", f"some/loose{n}.png")
    index(run, "some")
    status, _, err = run("calibrate g-some")
    assert status == 0
    assert "5 of 65 images have no label: calibrated as a gallery without labels" in err
    (reply,) = replies(run("search g-some some/c01/1-1.png --json"))
    assert reply["notes"][0] == "5 of 65 images have no label: answered as a collection without labels"
    refuse(run("calibrate g-some --queries photos"), "--queries needs a gallery in which every image has a label")


# -------------------- bad input --------------------


def test_queries_that_are_no_images(run):
    Path("letter.jpg").write_text("not a picture")
    Path("cut.heic").write_bytes(b"\0\0\0\x1cftypheic")
    Path("empty.png").write_bytes(b"")
    for name, words in (
        ("letter.jpg", "it is none of JPEG, PNG"),
        ("cut.heic", "this HEIF file is damaged"),
        ("empty.png", "it is none of JPEG, PNG"),
        ("photos", "'photos' is a folder: name image files"),
        ("absent.png", "there is no image 'absent.png'"),
    ):
        refuse(run(f"search ordinary photos/c00/0-0.png {name}"), words)
    Path("queries/c00").mkdir(parents=True)
    shutil.copy("letter.jpg", "queries/c00")
    refuse(run("calibrate ordinary --queries queries"), "no image in 'queries' can be read (1 tried)")


def test_a_calibration_of_another_model(run):
    index(run, "photos", model="other")
    assert run("calibrate g-photos")[0] == 0
    shutil.copy("g-photos/calibration.json", "ordinary/calibration.json")
    refuse(run("search ordinary photos/c00/0-0.png"), "belongs to another model")
    refuse(run("serve ordinary"), "belongs to another model")
    assert "not calibrated: " in run("gallery info ordinary")[1]
    assert run("calibrate ordinary")[0] == 0  # which mends it
    assert replies(run("search ordinary photos/c00/0-0.png --json"))[0]["calibrated"]


def test_a_calibration_of_an_older_version(run):
    content = json.loads(Path("ordinary/calibration.json").read_text())
    Path("ordinary/calibration.json").write_text(json.dumps(content | {"version": 1}))
    refuse(run("search ordinary photos/c00/0-0.png"), "ordinary/calibration.json")
    Path("ordinary/calibration.json").write_text("{}")
    refuse(run("search ordinary photos/c00/0-0.png"), "ordinary/calibration.json")
    assert run("calibrate ordinary")[0] == 0


def test_a_calibration_of_a_gallery_with_labels(run):
    id = json.loads(run("gallery list ordinary --json")[1])["items"][0]["id"]
    assert run(f"gallery label ordinary {id}")[0] == 0  # takes its label away
    told = "calibrated when its images had labels"
    assert f"not calibrated: {told} (see idml calibrate)" in run("gallery info ordinary")[1]
    (reply,) = replies(run("search ordinary photos/c00/0-0.png --json"))
    assert (reply["calibrated"], reply["notes"][1]) == (False, f"{told}: nothing is promised (see idml calibrate)")


def test_a_calibration_of_the_gallery_as_it_was(run):
    shutil.copytree("photos", "more")
    draw("more", 30, 20)
    status, out, _ = run("index more --to ordinary")
    assert (status, out.splitlines()[-1]) == (0, "next: idml calibrate ordinary")
    lines = run("gallery info ordinary")[1].splitlines()
    void = "the gallery is 250 % larger than at calibration: nothing is promised until you calibrate again"
    assert f"{void} (idml calibrate)" in lines
    (reply,) = replies(run("search ordinary photos/c00/0-0.png --json"))
    assert (reply["calibrated"], reply["promised"]) == (True, False)
    assert "250 % larger than at calibration" in reply["notes"][0]
    assert "nothing is promised until you calibrate again" in reply["notes"][0]


@pytest.mark.parametrize("share", ["-0.1", "0.91", "1", "nan", "inf", "much"])
def test_shares_of_unknown_queries(run, share):
    before = Path("ordinary/calibration.json").read_bytes()
    words = "--unknown takes a number, got 'much'" if share == "much" else "must be from 0 to 0.9"
    refuse(run(f"calibrate ordinary --unknown={share}"), words)
    assert Path("ordinary/calibration.json").read_bytes() == before


def test_the_largest_and_smallest_share(run):
    for share in ("0", "0.9"):
        status, out, _ = run(f"calibrate ordinary --unknown {share} --json")
        assert status == 0
        assert json.loads(out)["unknown_share"] == float(share)


def test_a_rate_that_cannot_be_promised(run):
    (reply,) = replies(run("search ordinary photos/c00/0-0.png --max-error 0.001 --json"))
    assert (reply["state"], reply["promised"]) == ("unsure", False)
    assert reply["reason"].startswith("cannot promise at most 0.1 % wrong matches here: ")
    for rate in ("0", "1", "-0.1", "nan", "much", "1e-12"):
        words = "--max-error takes a number" if rate == "much" else "max_error must be"
        refuse(run(f"search ordinary photos/c00/0-0.png --max-error={rate}"), words)
