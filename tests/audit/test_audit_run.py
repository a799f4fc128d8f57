"""`audit_run` end to end on pictures with planted mistakes, and what a review leaves: remembered, applied."""

import csv
import io
import json
import math
import os
import re
import shutil
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import idml.audit.findings
from idml.audit import run as auditing
from idml.audit.decisions import (
    DECISIONS_FILE,
    CurrentDecisions,
    Decision,
    append_decision,
    apply_decisions,
    current_time,
    read_decisions,
    write_cleaned,
)
from idml.audit.findings import AuditImages, image_checksum
from idml.audit.run import audit_run, read_audit
from idml.data.datasets import Dataset, load_dataset
from idml.model import Model, build_model, save_model
from idml.training.config import from_dict
from idml.training.loop import train

WRONG = "=HYPERLINK(1) <b>&.png"
FOREIGN = os.fsdecode(b"caf\xe9.png")  # a name that is not UTF-8


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IDML_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    save_model(build_model("conv4", image_size=28, embedding_dim=16), folder)
    return folder


def pictures(root, classes=8, each=6):
    """Noisy patterns, one for each class."""
    noise = np.random.default_rng(0)
    for c in range(classes):
        (root / f"class {c}").mkdir(parents=True)
        pattern = np.kron(noise.integers(60, 196, (4, 4, 3)), np.ones((12, 12, 1)))
        for i in range(each):
            pixels = (pattern + noise.normal(0, 30, pattern.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"class {c}" / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One image under a wrong label, one in two classes and parts, one compressed anew, one with a foreign name."""
    root = pictures(tmp_path_factory.mktemp("made") / "data")
    (root / "class 0" / "0.png").rename(root / "class 5" / WRONG)
    shutil.copy(root / "class 1" / "1.png", root / "class 7" / "copy.png")
    Image.open(root / "class 2" / "2.png").save(root / "class 2" / "again.jpg", quality=85)
    (root / "class 3" / "3.png").rename(root / "class 3" / FOREIGN)
    return root


@pytest.fixture
def data(made, tmp_path):
    return shutil.copytree(made, tmp_path / "data")


@pytest.fixture(scope="module")
def first(run, made, tmp_path_factory):
    """The audit of the pictures as they were made."""
    out = tmp_path_factory.mktemp("audits") / "out"
    notes = []
    return out, audit_run(run, f"folder:{made}", out, note=notes.append), notes


def findings(out, kind):
    return [finding for finding in read_audit(out)["findings"] if finding["kind"] == kind]


def decide(out, finding, decision, label=""):
    about = (finding["kind"], finding["image"], finding["label"])
    append_decision(out, Decision(current_time(), *about, decision, label, finding["checksum"]))


@pytest.mark.parametrize(
    ("near", "score", "words"),
    [
        ([1, 1, 0], 0.5, "1.65 times as far from the other images of 'a' as from those of 'b'; {}2 are 'b' and 1 'a'"),
        ([1, 0, 0], 3.0, "20 times as far from the other images of 'a' as from those of 'b'; {}"),
        ([2, 2, 2], 0.004, "slightly farther from the other images of 'a' than from those of 'b'; {}"),
    ],
)
def test_the_reason_of_a_wrong_label(near, score, words):
    subject = SimpleNamespace(images=SimpleNamespace(classes=["a", "b", "c"]), labels=torch.tensor(near))
    open = "of the 3 nearest, " if near[1] == 1 else "its nearest images do not decide between the two"
    assert idml.audit.findings._explain_label(subject, (1, 0), score, [0, 1, 2]) == words.format(open)


def test_planted_problems_are_found(first):
    out, result, notes = first
    wrong = findings(out, "mislabelled")
    assert {(f["image"], f["label"], f["suggested"]) for f in wrong[:2]} == {
        (f"class 5/{WRONG}", "class 5", "class 0"),
        ("class 7/copy.png", "class 7", "class 1"),
    }
    assert wrong[0]["score"] > wrong[1]["score"] > 0
    for found in wrong:  # the reason is what decided, and nothing that is said or shown contradicts it
        own, other = found["label"], found["suggested"]
        told = re.fullmatch(
            rf"(?:slightly farther|([\d.]+) times as far) from the other images of '{own}' (?:as|than) from those of "
            rf"'{other}'; (?:of the 10 nearest, (\d+) are '{other}' and (\d+) '{own}'"
            "|its nearest images do not decide between the two)",
            found["why"],
        )
        assert told[1] is None or float(told[1]) == pytest.approx(math.exp(found["score"]), abs=0.006)
        assert told[2] is None or int(told[2]) > int(told[3])
        shown = [partner["label"] for partner in found["partners"]]
        assert shown[:2] == [other, own]
        assert {*shown} == {own, other}
        assert found["image"] not in [partner["image"] for partner in found["partners"]]
    copies = findings(out, "duplicate")
    assert copies[0]["image"] == "class 7/copy.png"
    assert copies[0]["suggested"] == "class 1"
    assert copies[0]["score"] == 1.0
    assert copies[0]["why"] == ("the same pixels as 'class 1/1.png', which is labelled 'class 1', which is in train")
    assert "class 2/again.jpg" in [f["image"] for f in copies] + [f["partners"][0]["image"] for f in copies]
    assert [f["rank"] for f in wrong] == list(range(1, len(wrong) + 1))
    assert result["images"] == 50
    assert result["parts"] == {"train": 24, "test": 26}
    assert result["counts"]["mislabelled"] == {"listed": len(wrong), "open": len(wrong)}
    assert result["cleaned"] is None
    assert (
        result["notes"]
        == notes
        == ["the model may have learned wrong labels of its training images: they rank lower than they should"]
    )
    json.dumps(result, allow_nan=False)


def test_the_csv_contains_every_finding_and_no_formula(first):
    out, _, _ = first
    content = (out / "audit.csv").read_text()  # UTF-8 whatever the names are
    rows = list(csv.DictReader(io.StringIO(content)))
    assert list(rows[0])[:9] == [
        "rank", "kind", "image", "split", "label", "suggested label", "score", "why", "partners",
    ]  # fmt: skip
    whole = read_audit(out)["findings"]
    assert [(row["kind"], int(row["rank"])) for row in rows] == [(f["kind"], f["rank"]) for f in whole]
    for row in rows:
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row.values())


def test_a_formula_in_a_name_a_label_or_a_score_is_quoted(run, tmp_path):
    root = pictures(tmp_path / "data", classes=4, each=4)
    (root / "class 0").rename(root / "=cmd()")
    (root / "class 2" / "1.png").rename(root / "=cmd()" / "@wrong.png")
    (root / "class 1").rename(root / "\x1b[2J\n\u202e")
    audit_run(run, f"folder:{root}", tmp_path / "out")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "audit.csv").read_text())))
    mine = next(row for row in rows if row["image"] == "'=cmd()/@wrong.png")
    assert mine["label"] == "'=cmd()"
    cells = [cell for row in rows for cell in row.values()]
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in cells)
    assert all(cell.isprintable() for cell in cells)
    assert r"\x1b[2J\n\u202e" in "".join(cells)
    page = (tmp_path / "out" / "report.html").read_text()
    assert not {"\x1b", "\u202e"} & {*page}


def test_the_report_shows_the_top_of_each_list_and_is_self_contained(first):
    page = (first[0] / "report.html").read_text()
    assert page.endswith("</html>")
    assert not re.search(r"""(src|href|url)[=(]['"]?http""", page)
    assert "=HYPERLINK(1) &lt;b&gt;&amp;.png" in page
    assert "<b>&" not in page
    assert page.count("data:image/png") >= 4
    assert "<svg" in page  # the histogram
    for title in ("Likely mislabelled", "Duplicates", "Ambiguous"):
        assert f"<h2>{title}</h2>" in page


def test_names_that_are_not_utf_8_can_be_audited(run, tmp_path):
    root = pictures(tmp_path / "data", classes=4, each=4)
    (root / "class 0" / "0.png").rename(root / "class 3" / FOREIGN)
    out = tmp_path / "out"
    audit_run(run, f"folder:{root}", out)
    found = findings(out, "mislabelled")[0]
    assert found["image"] == f"class 3/{FOREIGN}"
    assert "caf\\udce9.png" in (out / "audit.csv").read_text()
    assert "caf\\udce9.png" in (out / "report.html").read_text()
    decide(out, found, "keep")
    audit_run(run, f"folder:{root}", out)
    assert findings(out, "mislabelled")[-1]["decision"]["decision"] == "keep"


def test_the_model_sees_the_images_once(run, made, tmp_path, monkeypatch):
    audit_run(run, f"folder:{made}", tmp_path / "one")
    seen = []
    features = Model.features
    monkeypatch.setattr(Model, "features", lambda self, x: seen.append(len(x)) or features(self, x))
    audit_run(run, f"folder:{made}", tmp_path / "two")
    assert sum(seen) == 24  # the cropped copies of the first part alone
    assert (tmp_path / "one" / "audit.csv").read_bytes() == (tmp_path / "two" / "audit.csv").read_bytes()


# ---- decisions


def test_decided_images_come_last(run, data, tmp_path):
    out, spec = tmp_path / "out", f"folder:{data}"
    audit_run(run, spec, out)
    before = findings(out, "mislabelled")
    decide(out, before[0], "keep")
    result = audit_run(run, spec, out)
    after = findings(out, "mislabelled")
    assert [f["image"] for f in after] == [f["image"] for f in [*before[1:], before[0]]]
    assert after[-1]["decision"]["decision"] == "keep"
    assert [f["rank"] for f in after] == list(range(1, len(after) + 1))
    assert result["counts"]["mislabelled"] == {"listed": len(before), "open": len(before) - 1}
    rows = list(csv.DictReader(io.StringIO((out / "audit.csv").read_text())))
    assert [row["decision"] for row in rows if row["kind"] == "mislabelled"][-1] == "keep"
    os.utime(data / before[0]["image"])  # touched, not changed
    assert audit_run(run, spec, out)["counts"]["mislabelled"]["open"] == len(before) - 1
    image = Image.open(data / before[0]["image"])
    image.putpixel((0, 0), (1, 2, 3))
    image.save(data / before[0]["image"])
    assert audit_run(run, spec, out)["counts"]["mislabelled"]["open"] == len(before)  # asked again


def test_an_excluded_image_is_decided_in_every_list(run, data, tmp_path):
    out = tmp_path / "out"
    audit_run(run, f"folder:{data}", out)
    copy = findings(out, "duplicate")[0]
    decide(out, copy, "exclude")
    audit_run(run, f"folder:{data}", out)
    for kind in ("mislabelled", "duplicate"):
        last = findings(out, kind)[-1]
        assert (last["image"], last["decision"]["decision"]) == ("class 7/copy.png", "exclude")


def test_the_cleaned_list_can_be_trained_on(run, data, tmp_path):
    out, spec = tmp_path / "out", f"folder:{data}"
    audit_run(run, spec, out)
    wrong = next(f for f in findings(out, "mislabelled") if WRONG in f["image"])
    decide(out, wrong, "relabel", "class 0")
    decide(out, findings(out, "duplicate")[0], "exclude")
    notes = []
    result = audit_run(run, spec, out, note=notes.append)
    told = result["cleaned"]
    assert {key: told[key] for key in ("images", "relabelled", "excluded")} == {
        "images": 48, "relabelled": 1, "excluded": 1,
    }  # fmt: skip
    assert "1 image left out of cleaned.csv: it cannot contain names that are not UTF-8" in notes
    before, after = load_dataset(spec), load_dataset(f"csv:{out / 'cleaned.csv'}", strict=True)
    old = {s.name: (p, x.classes[int(y)]) for p, x in named(before) for s, y in zip(x.sources, x.labels, strict=True)}
    new = {s.name: (p, x.classes[int(y)]) for p, x in named(after) for s, y in zip(x.sources, x.labels, strict=True)}
    expected = {f"images/{name}": told for name, told in old.items() if FOREIGN not in name}
    del expected["images/class 7/copy.png"]
    expected[f"images/class 5/{WRONG}"] = ("train", "class 0")  # it moves to the part of its class
    assert new == expected
    options = {"trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 4, "epochs": 1}
    data = f"csv:{out / 'cleaned.csv'}"
    trained = train(
        from_dict(
            {"data": data, "out": str(tmp_path / "run"), "batch_size": 8, "per_class": 2, "holdout": 0, **options}
        )
    )
    assert trained["steps"] > 0


def named(dataset):
    return (("train", dataset.train), ("test", dataset.test))


def test_a_cleaned_list_can_be_cleaned_again(run, data, tmp_path):
    (data / "class 3" / FOREIGN).unlink()
    out = tmp_path / "out"
    audit_run(run, f"folder:{data}", out)
    decide(out, findings(out, "duplicate")[0], "exclude")
    audit_run(run, f"folder:{data}", out)
    again = f"csv:{out / 'cleaned.csv'}"
    audit_run(run, again, out)
    wrong = next(f for f in findings(out, "mislabelled") if WRONG in f["image"])
    assert wrong["image"] == f"images/class 5/{WRONG}"
    decide(out, wrong, "relabel", "a new class")
    result = audit_run(run, again, out)
    assert result["cleaned"]["images"] == 48
    classes = load_dataset(again, split="all").train.classes
    assert "a new class" in classes


def test_a_list_whose_split_is_all_has_no_split(run, data, tmp_path):
    out = tmp_path / "out"
    audit_run(run, f"folder:{data}", out, split="all")
    decide(out, findings(out, "mislabelled")[0], "exclude")
    audit_run(run, f"folder:{data}", out, split="all")
    assert (out / "cleaned.csv").read_text().splitlines()[0] == "path,label"
    assert len(load_dataset(f"csv:{out / 'cleaned.csv'}", split="all").train) == 48
    assert {f["split"] for f in read_audit(out)["findings"]} == {"all"}


def test_a_tar_cannot_be_cleaned_and_says_so(run, made, tmp_path):
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(made, arcname="data")
    out, spec = tmp_path / "out", f"folder:{tmp_path / 'data.tar'}"
    notes = []
    audit_run(run, spec, out, note=notes.append)
    assert len(notes) == 1
    decide(out, findings(out, "mislabelled")[0], "exclude")
    result = audit_run(run, spec, out, note=notes.append)
    assert result["cleaned"] is None
    assert "unpack a .tar and audit the folder to get one" in notes[-1]
    assert result["counts"]["mislabelled"]["open"] == result["counts"]["mislabelled"]["listed"] - 1
    assert not (out / "cleaned.csv").exists()


def test_a_file_in_the_place_of_the_link_is_reported(run, data, tmp_path):
    out, notes = tmp_path / "out", []
    audit_run(run, f"folder:{data}", out)
    decide(out, findings(out, "mislabelled")[0], "keep")
    (out / "images").mkdir()
    assert audit_run(run, f"folder:{data}", out, note=notes.append)["cleaned"] is None
    assert "images exists, but the link to the images" in notes[-1]
    (out / "images").rmdir()
    (out / "images").symlink_to("elsewhere")  # of an earlier audit: it is led anew
    assert audit_run(run, f"folder:{data}", out)["cleaned"]["images"] == 49
    assert (out / "images").resolve() == data.resolve()


def test_decisions_that_leave_no_image_are_reported(data, tmp_path):
    images = AuditImages.of(load_dataset(f"folder:{data}"))
    gone = [
        Decision(current_time(), "duplicate", s.name, images.label(i), "exclude", "", image_checksum(s))
        for i, s in enumerate(images.sources)
    ]
    with pytest.raises(ValueError, match="the decisions leave no image"):
        write_cleaned(images, CurrentDecisions(gone), tmp_path)


def test_a_gallery_is_a_part_too_and_an_image_may_have_two_labels(run, data, tmp_path):
    whole = load_dataset(f"folder:{data}")
    dataset = Dataset("shop", whole.train, whole.test[:10], whole.test[10:])
    images = AuditImages.of(dataset)
    assert images.splits == ["train"] * 24 + ["test"] * 10 + ["gallery"] * 16
    assert [images.label(n) for n in (0, 24, 34)] == ["class 0", "class 4", images.label(34)]
    rows, _ = apply_decisions(images, CurrentDecisions([]))
    assert {split for _, _, split in rows} == {"train", "test"}
    lines = ["path,label", *(f"data/{s.name},{s.name[:7]}" for s in whole.train.sources if FOREIGN not in s.name)]
    (tmp_path / "list.csv").write_text("\n".join([*lines, "data/class 1/1.png,class 2"]))
    audit_run(run, f"csv:{tmp_path / 'list.csv'}", tmp_path / "out")
    twice = findings(tmp_path / "out", "duplicate")[0]
    assert (twice["image"], twice["label"], twice["suggested"]) == ("data/class 1/1.png", "class 2", "class 1")
    decide(tmp_path / "out", twice, "exclude")
    audit_run(run, f"csv:{tmp_path / 'list.csv'}", tmp_path / "out")
    kept = load_dataset(f"csv:{tmp_path / 'out' / 'cleaned.csv'}", split="all").train
    assert len(kept) == 23
    assert "images/data/class 1/1.png" in [source.name for source in kept.sources]  # under its right label


# ---- bad input


def refused(words, *arguments, error=ValueError, **options):
    with pytest.raises(error) as caught:
        audit_run(*arguments, **options)
    assert "\n" not in str(caught.value)
    assert words in str(caught.value)


def test_an_out_that_is_a_file(run, made, tmp_path):
    (tmp_path / "out").write_text("mine")
    refused("out is a file; an audit needs a folder", run, f"folder:{made}", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_damaged_decisions_are_reported_first(run, made, tmp_path, monkeypatch):
    (tmp_path / DECISIONS_FILE).write_text("nonsense\n")
    monkeypatch.setattr(auditing, "load_model", lambda run: pytest.fail("too late"))
    refused("decisions.csv, line 1", run, f"folder:{made}", tmp_path)


def test_no_run_a_run_of_another_size_and_no_data(run, made, tmp_path):
    refused("there is no model at", tmp_path / "none", f"folder:{made}", tmp_path / "o", error=FileNotFoundError)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    data = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(data.replace(b'embedding_dim\\": 16', b'embedding_dim\\": 32'))
    refused("weight has shape [16", other, f"folder:{made}", tmp_path / "o")
    refused("there is no '", run, f"folder:{made}/nowhere", tmp_path / "o", error=FileNotFoundError)
    refused("unknown data set 'nothing'", run, "nothing", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_one_class_a_single_image_and_images_alone(run, tmp_path):
    root = pictures(tmp_path / "one", classes=1, each=5)
    refused("one class is not enough", run, f"folder:{root}", tmp_path / "o")
    result = audit_run(run, f"folder:{root}", tmp_path / "o", split="all")
    assert "all images have the same class: no label can be judged" in result["notes"]
    assert result["counts"]["mislabelled"] == {"listed": 0, "open": 0}
    single = pictures(tmp_path / "single", classes=1, each=1)
    refused("an audit needs at least two readable images", run, f"folder:{single}", tmp_path / "s", split="all")
    lonely = pictures(tmp_path / "lonely", classes=6, each=1)
    result = audit_run(run, f"folder:{lonely}", tmp_path / "l")
    assert "6 images alone in a class: such a label cannot be judged" in result["notes"]


def test_an_empty_split(run, made, tmp_path):
    (made.parent / "list.csv").write_text("path,label,split\ndata/class 1/1.png,a,train\ndata/class 1/2.png,b,train\n")
    refused("there is no test image", run, f"csv:{made.parent / 'list.csv'}", tmp_path / "o")


def test_broken_images_are_left_out_and_counted(run, data, tmp_path):
    (data / "class 4" / "0.png").write_bytes(b"no image")
    result = audit_run(run, f"folder:{data}", tmp_path / "o")
    assert any("1 of 24 images left out" in line or "1 of 26 images left out" in line for line in result["notes"])
    numbers = [f["number"] for f in read_audit(tmp_path / "o")["findings"]]
    images = AuditImages.of(load_dataset(f"folder:{data}"))
    assert all(images.sources[n].name != "class 4/0.png" for n in numbers)
    by_number = {f["number"]: f["image"] for f in read_audit(tmp_path / "o")["findings"]}
    assert all(images.sources[n].name == name for n, name in by_number.items())


def test_embeddings_that_are_not_finite(run, made, tmp_path, monkeypatch):
    embed = Model.embed_features

    def broken(self, features):
        embeddings = embed(self, features)
        embeddings.semantic[0] = float("nan")
        return embeddings

    monkeypatch.setattr(Model, "embed_features", broken)
    refused("1 embeddings hold NaN or infinity (first: 'class 0/1.png')", run, f"folder:{made}", tmp_path / "o")


def test_audit_with_the_pretrained_trunk(made, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = build_model("conv4", image_size=28)
    monkeypatch.setattr(auditing, "build_model", lambda: model)  # the real one takes its time
    result = audit_run("pretrained", f"folder:{made}", tmp_path / "o")
    assert result["model"] == "the pretrained trunk"
    assert result["notes"] == []
    first = {f["image"] for f in findings(tmp_path / "o", "mislabelled")[:2]}
    assert f"class 5/{WRONG}" in first


def test_files_that_are_not_audits(tmp_path):
    with pytest.raises(FileNotFoundError, match="run idml audit first"):
        read_audit(tmp_path)
    for content, words in (("{", "is damaged: it is not JSON"), ("[1]", "is not an audit"), ("{}", "is not an audit")):
        (tmp_path / "audit.json").write_text(content)
        with pytest.raises(ValueError, match=words):
            read_audit(tmp_path)
    assert read_decisions(tmp_path) == []
