"""A gallery calibrated on itself: which queries, against loops over all distances, and what is refused in one line."""

import hashlib
import json

import pytest
import torch
from synthetic_images import as_items, cloud, picture, save_run, write_picture

from idml import Embeddings, cli
from idml.calibration import calibrate as figures_of
from idml.calibration.stored import Calibration
from idml.search import gallery_calibration
from idml.search.answers import RiskTargets
from idml.search.feedback import add_feedback
from idml.search.gallery import Gallery
from idml.search.gallery_calibration import calibrate_gallery
from idml.search.indexing import index_folder

pytestmark = pytest.mark.usefixtures("_no_waiting", "_few_rounds")


@pytest.fixture
def _few_rounds(monkeypatch):
    monkeypatch.setattr(figures_of, "_ROUNDS", 20)


@pytest.fixture
def labelled(run, tmp_path):
    """A gallery of 40 classes with 12 images each, its embeddings and labels."""
    stored, labels = cloud(40, 12, noise=0.7, seed=2)
    with Gallery.create(tmp_path / "g", run) as gallery:
        gallery.add_embedded(as_items(labels.tolist()), stored)
    return tmp_path / "g", stored, labels


@pytest.fixture
def fitted(monkeypatch):
    """The queries that a calibration was fitted to, by what it was fitted."""
    seen = []
    before = gallery_calibration.calibrate_queries

    def keep(found, **options):
        seen.append(found)
        return before(found, **options)

    monkeypatch.setattr(gallery_calibration, "calibrate_queries", keep)
    return seen


def test_each_image_is_a_query_without_itself_and_without_its_class(labelled, fitted):
    place, stored, labels = labelled
    result = calibrate_gallery(place)
    (found,) = fitted
    queries, n = found.queries, len(labels)
    assert (result["known_queries"], result["unknown_queries"], result["classes"]) == (n, n, 40)
    d = torch.cdist(stored.unit, stored.unit).fill_diagonal_(torch.inf)
    assert torch.equal(queries.correct[:n], labels[d.argmin(dim=1)] == labels)
    without = d.masked_fill(labels[:, None] == labels, torch.inf)
    torch.testing.assert_close(queries.evidence.nearest[n:], without.min(dim=1).values, rtol=0, atol=1e-5)
    assert not bool(queries.correct[n:].any())
    assert (found.labelled, found.known_by_image) == (True, True)
    stored_calibration = Calibration.load(place / "calibration.json")
    assert (stored_calibration.unknown, stored_calibration.counts.moments.clusters) == (0.25, 20)
    assert stored_calibration.queries == result["queries"].replace("—", "-")
    assert any("approximate: 20 classes were counted" in line for line in result["words"])
    report = (place / "calibration.html").read_text()
    kept = [promise for promise in result["promises"] if promise["possible"]]
    assert kept
    assert all(promise["observed"] <= promise["max_error"] for promise in kept)
    assert all(f">{promise['observed']:.1%}</td>" in report for promise in kept)
    with Gallery.open(place) as gallery:
        (reply,) = gallery.search_embeddings(stored[:1], targets=RiskTargets(max_error=0.3))
        assert (reply.answer.calibrated, reply.answer.promised, reply.notes) == (True, True, ())
    assert calibrate_gallery(place, unknown=0.0)["counted_classes"] == 0
    all_known = Calibration.load(place / "calibration.json")
    assert all_known.unknown == 0
    assert "half of the classes" in report
    assert "half of the images" in (place / "calibration.html").read_text()
    assert fitted[0].classes is None  # every class is asked
    assert all_known.counts.total < n  # about half of the known queries; unknown ones have no weight then


def test_classes_that_the_trunk_has_learned_are_no_queries(labelled, fitted):
    place, _, labels = labelled
    learned = [item.checksum[:16] for item in as_items(labels.tolist()) if int(item.label[1:]) < 15]
    (place / "model" / "learned.json").write_text(json.dumps({"trunk": "trained", "images": learned[::3]}))
    result = calibrate_gallery(place)
    assert {*fitted[0].queries.labels.tolist()} == {n for n in range(40) if int(sorted(map(str, range(40)))[n]) >= 15}
    assert "15 classes that the model has learned from are left out" in result["queries"]
    every = [item.checksum[:16] for item in as_items(labels.tolist())]
    (place / "model" / "learned.json").write_text(json.dumps({"trunk": "trained", "images": every}))
    with pytest.raises(ValueError, match=r"learned from every class .* calibrate with --queries DIR"):
        calibrate_gallery(place)
    (place / "model" / "learned.json").write_text("[]")
    with pytest.raises(ValueError, match="is damaged"):
        calibrate_gallery(place)


def test_learned_classes_are_queried_under_heads_that_never_saw_them(run, tmp_path, fitted):
    for c in range(12):
        for n in range(8):
            write_picture(tmp_path / "photos" / f"c{c:02d}" / f"{n}.png", c, n)
    with Gallery.create(tmp_path / "g", run) as gallery:
        index_folder(gallery, tmp_path / "photos")
        items = list(gallery.items())
    learned = [item.checksum[:16] for item in items if item.label < "c09"]
    (tmp_path / "g" / "model" / "learned.json").write_text(json.dumps({"trunk": "frozen", "images": learned}))
    asked = []

    def refit(model, files, labels, was_learned, folds, progress):
        asked.append((model, [file.parent.name for file in files], folds))
        for fold in range(2):
            yield Embeddings(torch.eye(12)[labels] + 0.01 * (fold + 1), torch.full((len(labels), 2), float(fold + 1)))

    with pytest.raises(ValueError, match="has learned from the gallery's classes"):
        calibrate_gallery(tmp_path / "g")
    halves = lambda labels, was_learned: torch.where(labels < 9, labels % 2, -1)  # noqa: E731
    result = calibrate_gallery(tmp_path / "g", refit=refit, assign_folds=halves)
    assert "cross-fitted: 9 classes by heads that were trained again without them" in result["queries"]
    assert (result["known_queries"], result["unknown_queries"]) == (96, 96)
    ((model, names, _),) = asked
    assert (model, names) == (tmp_path / "g" / "model", [item.label for item in items])
    queries = fitted[0].queries
    level = queries.evidence.level
    for fold in (0, 1):  # the heads of a fold meet its classes alone
        met = queries.labels[(level - (fold + 1) * 2**0.5).abs() < 1e-5]
        assert {*met.tolist()} == {c for c in range(9) if c % 2 == fold}


def test_the_users_own_queries(run, tmp_path, fitted):
    for c in range(12):
        for n in range(10):
            write_picture(tmp_path / ("photos" if n < 5 else "asked") / f"c{c:02d}" / f"{n}.png", c, n)
    for c in range(60, 90):
        write_picture(tmp_path / "asked" / f"other{c}" / "0.png", c)
    with Gallery.create(tmp_path / "g", run) as gallery:
        index_folder(gallery, tmp_path / "photos")
    result = calibrate_gallery(tmp_path / "g", queries=tmp_path / "asked", unknown=0.1)
    assert (result["known_queries"], result["unknown_queries"]) == (60, 30)
    assert result["queries"] == "90 images in asked, 30 of them of 30 unknown classes"
    assert fitted[0].classes == 12
    (tmp_path / "asked" / "other60" / "0.png").unlink()  # half of 29 may be fewer than 10
    result = calibrate_gallery(tmp_path / "g", queries=tmp_path / "asked")
    assert (result["known_queries"], result["unknown_queries"]) == (60, 89)
    assert "also without their class" in result["queries"]
    (tmp_path / "asked" / "other61" / "0.png").write_bytes(b"no image")
    notes: list[str] = []
    result = calibrate_gallery(tmp_path / "g", queries=tmp_path / "asked", note=notes.append)
    assert (result["known_queries"], result["unknown_queries"]) == (60, 88)
    assert result["queries"].startswith("88 images in asked, 28 of them of 28 unknown classes")
    assert notes[0].startswith("the model does not say which images it has learned from")
    assert "other61/0.png" in notes[1]
    assert notes[2] == "1 of 89 query images were left out: they cannot be read"
    assert result["notes"] == notes
    write_picture(tmp_path / "asked" / "beside.png", 3)
    calibrate_gallery(tmp_path / "g", queries=tmp_path / "asked", note=notes.append)
    assert any("1 image directly in" in line and "needs a sub-folder" in line for line in notes)


def folder_gallery(run, folder, *, classes=40, images=8, copied=False):
    """A gallery of a folder whose pictures are all noise, so that only a picture itself is near it."""
    for c in range(classes):
        for n in range(images):
            write_picture(folder / "photos" / f"c{c:02d}" / f"{n}.png", 1000 * c + n)
            if copied:
                write_picture(folder / "photos" / f"c{c:02d}" / f"again{n}.png", 1000 * c + n)
    notes: list[str] = []
    with Gallery.create(folder / "g", run) as gallery:
        index_folder(gallery, folder / "photos", note=notes.append)
    return folder / "g", notes


def test_a_query_that_is_in_the_gallery_never_finds_itself(run, tmp_path, fitted):
    """The indexed folder as --queries promises no more than the gallery on itself; so do copies of each file."""
    place, notes = folder_gallery(run, tmp_path / "once")
    assert notes == []
    own = calibrate_gallery(place)
    assert own["right"] < 100  # the pictures of a class have nothing in common
    told: list[str] = []
    asked = calibrate_gallery(place, queries=tmp_path / "once" / "photos", note=told.append)
    assert "320 of 320 query images are in the gallery too: none of them finds itself" in told
    assert asked["right"] == own["right"]
    for one, other in zip(asked["promises"], own["promises"], strict=True):
        assert one["coverage"] <= other["coverage"] + 0.05
    assert float(fitted[1].queries.evidence.nearest.min()) > 0.001

    place, notes = folder_gallery(run, tmp_path / "twice", copied=True)
    assert notes == ["320 images added with bytes that are in the gallery under another name too"]
    told.clear()
    own = calibrate_gallery(place, note=told.append)
    words = "640 images of the gallery have the bytes of another one: none of them finds its copies "
    assert words + "(with --keep-copies they count as different pictures)" in told
    assert own["right"] == 2 * asked["right"]
    assert calibrate_gallery(place, keep_copies=True)["right"] == 2 * 320  # each finds its copy
    assert calibrate_gallery(place, queries=tmp_path / "twice" / "photos")["right"] == own["right"]
    with Gallery.open(place, write=True) as gallery:  # indexing again adds nothing, and says nothing
        index_folder(gallery, tmp_path / "twice" / "photos", note=notes.append)
    assert len(notes) == 1


def test_an_image_whose_only_companions_are_copies(run, tmp_path):
    """It has no right answer; and one whose other classes are copies of it cannot be asked without its own."""
    for n in range(60):
        write_picture(tmp_path / "photos" / "many" / f"{n}.png", 3, n)
    write_picture(tmp_path / "photos" / "one" / "copy.png", 3, 0)
    write_picture(tmp_path / "photos" / "one" / "again.png", 3, 0)
    with Gallery.create(tmp_path / "g", run) as gallery:
        index_folder(gallery, tmp_path / "photos")
    result = calibrate_gallery(tmp_path / "g", unknown=0.0)
    assert (result["known_queries"], result["unknown_queries"]) == (60, 59 + 2)
    for n in range(2):
        write_picture(tmp_path / "equal" / f"c{n}" / "0.png", 3, 0)
    with Gallery.create(tmp_path / "e", run) as gallery:
        index_folder(gallery, tmp_path / "equal")
    with pytest.raises(ValueError, match="has copies of one image: index more"):
        calibrate_gallery(tmp_path / "e")


def test_a_judged_picture_that_was_added_later_does_not_find_itself(labelled, fitted):
    place, stored, labels = labelled
    calibrate_gallery(place)
    with Gallery.open(place) as gallery:
        for row in (0, 100):  # as if they had been judged before they were added
            nearly = Embeddings(stored[[row]].semantic * 1.00001, stored[[row]].uncertainty)
            options = {"query": "q.jpg", "right": False, "found": "c39", "label": f"c{int(labels[row])}"}
            add_feedback(place, gallery.engine.properties, nearly, **options)
        new = Embeddings(-stored[[200]].semantic, stored[[200]].uncertainty)
        add_feedback(place, gallery.engine.properties, new, query="q.jpg", right=False, found="c39", label="c1")
    told: list[str] = []
    calibrate_gallery(place, note=told.append)
    assert "2 of 3 judged pictures are in the gallery too: none of them finds itself" in told
    judged = fitted[1].queries[-3:]
    itself = fitted[1].queries[torch.tensor([0, 100])]
    torch.testing.assert_close(judged.evidence.nearest[:2], itself.evidence.nearest, rtol=0, atol=1e-5)


def test_queries_that_the_model_has_learned_from_are_left_out(labelled, tmp_path, fitted):
    place, _, _ = labelled
    for c in range(12):
        for n in range(6):
            write_picture(tmp_path / "asked" / f"c{c}" / f"{n}.png", c, n)
    files = sorted((tmp_path / "asked").rglob("*.png"))
    sums = [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files]
    learned = place / "model" / "learned.json"
    learned.write_text(json.dumps({"trunk": "frozen", "images": sums[:2]}))
    told: list[str] = []
    result = calibrate_gallery(place, queries=tmp_path / "asked", note=told.append)
    assert result["queries"].startswith("70 images in asked")
    assert told[:2] == [f"the model has learned from {str(file)!r}" for file in files[:2]]
    assert told[2] == "2 of 72 query images were left out: the model has learned from them"
    learned.write_text(json.dumps({"trunk": "frozen", "images": sums}))
    with pytest.raises(ValueError, match="the model has learned from all 72 query images"):
        calibrate_gallery(place, queries=tmp_path / "asked")


def test_queries_of_which_none_can_be_read(labelled, tmp_path):
    place, _, _ = labelled
    (tmp_path / "asked" / "a").mkdir(parents=True)
    (tmp_path / "asked" / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"no image in .*asked' can be read \(1 tried\)"):
        calibrate_gallery(place, queries=tmp_path / "asked")


def test_without_labels_changed_copies_are_the_queries(run, tmp_path, fitted):
    for n in range(70):
        write_picture(tmp_path / "photos" / f"{n}.png", n)
    picture(3).save(tmp_path / "photos" / "copy.png", compress_level=1)  # the same picture in another file
    with Gallery.create(tmp_path / "g", run) as gallery:
        index_folder(gallery, tmp_path / "photos")
    result = calibrate_gallery(tmp_path / "g", unknown=0.2)
    (found,) = fitted
    assert (found.labelled, found.known_by_image, result["labelled"]) == (False, False, False)
    assert (result["known_queries"], result["unknown_queries"]) == (142, 142)
    assert len(found.queries.labels.unique()) == 70  # near duplicates are one picture
    assert any("shows another picture" in line for line in result["words"])
    assert "half of the pictures" in (tmp_path / "g" / "calibration.html").read_text()
    assert result["right"] > 100
    assert not bool(found.queries.correct[142:].any())
    (tmp_path / "photos" / "7.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"'photos/7.png' is needed and not there"):
        calibrate_gallery(tmp_path / "g")
    with pytest.raises(ValueError, match="needs a gallery in which every image has a label"):
        calibrate_gallery(tmp_path / "g", queries=tmp_path)


def test_unusual_galleries_are_one_line_or_an_answer(run, tmp_path):
    def gallery_of(name, labels, embeddings=None):
        with Gallery.create(tmp_path / name, run) as gallery:
            gallery.add_embedded(as_items(labels), cloud(1, len(labels))[0] if embeddings is None else embeddings)
        return tmp_path / name

    with pytest.raises(ValueError, match="has no image: index more"):
        calibrate_gallery(gallery_of("empty", []))
    with pytest.raises(ValueError, match="has one image: index more"):
        calibrate_gallery(gallery_of("one", [1]))
    single = gallery_of("single", [1] * 60)
    with pytest.raises(ValueError, match="holds a single class; for queries that are all of this class, --unknown 0"):
        calibrate_gallery(single)
    assert calibrate_gallery(single, unknown=0.0)["right"] == 60
    with pytest.raises(ValueError, match="needs 50 queries with a right answer, there are 20"):
        calibrate_gallery(gallery_of("few", [n // 2 for n in range(20)]))
    with pytest.raises(ValueError, match="there are 0"):
        calibrate_gallery(gallery_of("alone", list(range(60))))
    equal = Embeddings(torch.ones(80, 16), torch.ones(80, 16))
    result = calibrate_gallery(gallery_of("equal", [n % 2 for n in range(80)], equal))
    assert not any(promise["possible"] for promise in result["promises"])
    notes = []
    mixed = gallery_of("mixed", [None, *[n % 5 for n in range(79)]])
    with pytest.raises(FileNotFoundError, match="is needed and not there"):
        calibrate_gallery(mixed, note=notes.append)
    assert notes[0].startswith("1 of 80 images have no label: calibrated as a gallery without labels")
    for share in (-0.1, 0.91, float("nan")):
        with pytest.raises(ValueError, match=r"must be from 0 to 0.9"):
            calibrate_gallery(single, unknown=share)


def test_calibrating_again_mends_a_gallery_that_doubled(labelled):
    place, _, labels = labelled
    calibrate_gallery(place)
    more, theirs = cloud(40, 12, noise=0.7, seed=2)
    with Gallery.open(place, write=True) as gallery:
        moved = Embeddings(more.semantic + 0.3 * torch.randn(more.semantic.shape), more.uncertainty)
        gallery.add_embedded(as_items(theirs.tolist(), first=5000), moved)
        assert "100 % larger" in gallery.status().drift
    calibrate_gallery(place)
    with Gallery.open(place) as gallery:
        assert (gallery.status().drift, gallery.status().growth) == ("", "")
    assert len(labels) == 480


def test_growth_through_the_command_line(run, tmp_path, capsys):
    """20 % more images keep the promise and are said; twice as many void it; calibrating again mends it."""

    def add(count):
        for kind in range(24):
            for number in range(count):
                if not (path := tmp_path / "photos" / f"class{kind:02}" / f"{number}.png").exists():
                    write_picture(path, kind, number)
        assert cli.main(["index", str(tmp_path / "photos"), "--to", str(place), "--model", str(run)]) == 0

    def ask():
        capsys.readouterr()
        assert cli.main(["search", str(place), str(tmp_path / "query.png"), "--max-error", "0.3", "--json"]) == 0
        (reply,) = json.loads(capsys.readouterr().out)["replies"]
        return reply["state"], reply["promised"], " ".join(reply["notes"])

    place = tmp_path / "g"
    write_picture(tmp_path / "query.png", 3, 100)
    add(10)
    assert cli.main(["calibrate", str(place)]) == 0
    assert ask()[:2] == ("match", True)
    add(12)
    state, promised, notes = ask()
    assert (state, promised) == ("match", True)
    assert "20 % larger than at calibration; promises cover 20 %" in notes
    add(20)
    state, promised, notes = ask()
    assert not promised
    assert "100 % larger than at calibration" in notes
    assert "nothing is promised until you calibrate again (idml calibrate)" in notes
    assert cli.main(["calibrate", str(place)]) == 0
    assert ask() == ("match", True, "")


def test_a_damaged_calibration_can_be_replaced(labelled):
    place, _, _ = labelled
    (place / "calibration.json").write_bytes(b"{}")
    calibrate_gallery(place)
    assert save_run is not None
    Gallery.open(place).close()
