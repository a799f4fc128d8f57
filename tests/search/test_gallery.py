"""A gallery: answers against explicit loops, what it carries, how images come and go, and who may do what."""

import hashlib
import io
import json
import math
import os
import random
import shutil
import sys
import threading
import types
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import child
from made_images import DIMENSIONS, as_items, cloud, encoded, fit_calibrations, picture, save_run
from PIL import Image

import idml.search.replies
from idml import Embeddings
from idml.evaluation.calibration import Calibration
from idml.evaluation.evidence import Profile, gather_evidence
from idml.search.answers import State, Wishes, answer
from idml.search.engines import Added, Item
from idml.search.engines.embedded import EmbeddedEngine
from idml.search.gallery import Gallery, Upload, open_engine, open_or_create
from idml.search.replies import Known, collapse

pytestmark = pytest.mark.usefixtures("_no_waiting")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A calibrated run, with the gallery and the queries of its world."""
    run = save_run(tmp_path_factory.mktemp("calibrated"))
    return run, *fit_calibrations(run)


@pytest.fixture
def gallery(run, tmp_path):
    with Gallery.create(tmp_path / "g", run) as made:
        yield made


@pytest.fixture
def shop(world, tmp_path):
    """A calibrated gallery, what it holds, and queries with their labels."""
    run, stored, labels, queries, own = world
    with Gallery.create(tmp_path / "shop", run) as made:
        made.put(as_items(labels.tolist()), stored)
        yield made, stored, labels, queries, own


# answers


def loops(queries, stored, labels):
    """The scores of the evidence, by definition, for each query."""
    out = []
    for q in range(len(queries)):
        d = [math.dist(queries.unit[q].tolist(), stored.unit[i].tolist()) for i in range(len(stored))]
        near = sorted(range(len(stored)), key=lambda i: (d[i], i))[:10]
        first, last = near[0], near[-1]
        same = [labels[i] == labels[first] for i in near]
        other = next((d[i] for i, s in zip(near, same, strict=True) if not s), d[last])
        shares = [[labels[i] for i in near].count(x) / 10 for x in {int(labels[i]) for i in near}]
        u = queries.uncertainty[q] + stored.uncertainty[first]
        out.append(
            {
                "level": math.sqrt(sum(x * x for x in queries.uncertainty[q].tolist())),
                "nearest": d[first],
                "kth": d[last],
                "spread": d[first] / d[last],
                "gap": d[first] - d[near[1]],
                "pair": math.sqrt(sum(x * x for x in u.tolist())),
                "margin": d[first] - other,
                "ratio": d[first] / other,
                "entropy": -sum(p * math.log(p) for p in shares),
                "disagreement": 1 - sum(same) / 10,
            }
        )
    return out


@pytest.mark.parametrize("k", [1, 3, 10, 17])
def test_evidence_and_results_are_those_of_loops(shop, monkeypatch, k):
    """Whatever k is, the evidence is that of the 10 nearest, and nothing but the evidence makes the answer."""
    gallery, stored, labels, queries, _ = shop
    queries = queries[:12]
    seen = []
    monkeypatch.setattr(idml.search.replies, "answer", lambda *a, **b: seen.append((a, b)) or answer(*a, **b))
    replies = gallery.reply(queries, k)
    (evidence, calibration, wishes), options = seen[0]
    for n, scores in enumerate(loops(queries, stored, labels.tolist())):
        for name, value in scores.items():
            assert float(evidence.scores[name][n]) == pytest.approx(value, abs=2e-5), name
    assert set(evidence.scores) == set(scores)
    assert (calibration, wishes) == (gallery.calibration, Wishes())
    assert options["profile"].size == len(stored)
    expected = answer(gather_evidence(queries, stored, labels), gallery.calibration)
    items = as_items(labels.tolist())
    for n, reply in enumerate(replies):
        assert reply.answer.state == expected[n].state
        assert reply.answer.reason == expected[n].reason
        assert reply.answer.probability == pytest.approx(expected[n].probability, abs=1e-6)
        assert reply.level == pytest.approx(float(queries.level[n]))
        assert reply.calibrated
        assert len(reply.results) == k
        distances = (stored.unit - queries.unit[n]).norm(dim=1)
        order = distances.argsort(stable=True).tolist()[:k]  # (no near duplicates in this world)
        assert [result.id for result in reply.results] == [items[i].id for i in order]
        for result, i in zip(reply.results, order, strict=True):
            assert (result.path, result.label, result.duplicates) == (items[i].path, items[i].label, ())
            assert result.distance == pytest.approx(float(distances[i]), abs=1e-6)
            assert result.level == pytest.approx(float(stored.level[i]))
        first, *others = [result.probability for result in reply.results]
        assert first == reply.answer.probability
        raw = gallery.calibration.pair_probability(torch.tensor([r.distance for r in reply.results[1:]])).tolist()
        assert others == [min(first, p) for p in raw]


def test_three_states_and_both_kinds_of_gallery(shop):
    gallery, stored, _, queries, _ = shop
    wishes = Wishes(max_error=0.1)
    states = {reply.answer.state for reply in gallery.reply(queries, 5, wishes)}
    assert states == set(State)
    assert gallery.calibration.labelled
    assert all(reply.notes == () for reply in gallery.reply(queries[:3]))

    item = next(gallery.items())
    gallery.relabel({item.id: None})
    assert not gallery.calibration.labelled
    found = gallery.reply(queries, 5, wishes)
    expected = answer(gather_evidence(queries, stored), gallery.calibration, wishes)
    assert [r.answer.state for r in found] == [a.state for a in expected]
    assert [r.answer.probability for r in found] == pytest.approx([a.probability for a in expected], abs=1e-6)
    assert found[0].notes == ("1 of 600 images have no label: answered as a collection without labels",)
    gallery.relabel({item.id: item.label})
    assert gallery.calibration.labelled


def test_result_sets_are_shown_whole(shop):
    """The results that an answer speaks of hold every image of the set, duplicates or not, also beyond k."""
    gallery, stored, labels, queries, _ = shop
    twins = stored[:300]  # each a second time, with another id
    gallery.put(as_items(labels[:300].tolist(), first=1000), twins)
    wishes = Wishes(max_missed=0.05)
    evidence = gather_evidence(queries, Embeddings.cat([stored, twins]), torch.cat([labels, labels[:300]]))
    sizes = [a.results for a in answer(evidence, gallery.calibration, wishes)]
    assert len(set(sizes)) > 2
    everyone = Embeddings.cat([stored, twins])
    ids = [item.id for item in gallery.items()]
    for n, reply in enumerate(gallery.reply(queries, 2, wishes)):
        order = (everyone.unit - queries.unit[n]).norm(dim=1).argsort(stable=True).tolist()
        shown = {id for r in reply.results[: reply.answer.results] for id in (r.id, *r.duplicates)}
        assert {ids[i] for i in order[: sizes[n]]} <= shown
        assert len(reply.results) == max(2, reply.answer.results)


def test_without_calibration(gallery):
    stored, labels = cloud(10, 12, noise=0.2)
    queries, _ = cloud(10, 5, noise=0.2)
    strange = Embeddings(-queries.semantic[:5], queries.uncertainty[:5])
    gallery.put(as_items(labels.tolist()), stored)
    assert gallery.calibration is None
    assert gallery.promises() == []
    for given_ in (queries, strange):
        expected = answer(gather_evidence(given_, stored, labels), profile=Profile.of(stored))
        for reply, wanted in zip(gallery.reply(given_), expected, strict=True):
            assert replace(reply.answer, novelty=None) == replace(wanted, novelty=None)
            assert reply.answer.novelty == pytest.approx(wanted.novelty)
            assert not reply.calibrated
            assert all(result.probability is None for result in reply.results)
            assert "not calibrated for collections with labels" in reply.notes[0]
    assert {r.answer.state for r in gallery.reply(strange)} == {State.NOVEL}


def test_tiny_galleries(gallery, shop):
    image = picture(1)
    (reply,) = gallery.search([image])
    assert (reply.answer.state, reply.answer.reason) == (State.NOVEL, "the collection is empty")
    assert (reply.results, reply.calibrated, reply.answer.calibrated) == ((), False, False)
    assert reply.level > 0
    assert gallery.search([]) == []
    gallery.add([Upload(encoded(image), "a")])
    (reply,) = gallery.search([image], k=7)
    assert len(reply.results) == 1
    assert reply.results[0].distance == pytest.approx(0, abs=1e-5)
    assert reply.answer.state is State.UNSURE
    gallery.add([Upload(encoded(picture(n)), "b") for n in (2, 3)])
    assert len(gallery.search([image], k=7)[0].results) == 3
    calibrated, stored, labels, queries, _ = shop
    calibrated.remove([item.id for item in list(calibrated.items())[4:]])
    (reply,) = calibrated.reply(queries[0])
    assert len(reply.results) == 4
    assert reply.calibrated
    expected = answer(gather_evidence(queries[0], stored[:4], labels[:4]), calibrated.calibration)
    assert reply.answer.probability == pytest.approx(expected[0].probability, abs=1e-6)


@pytest.mark.parametrize("k", [0, -1, True, 2.0, "3"])
def test_k_is_a_whole_number(gallery, k):
    with pytest.raises(ValueError, match="k must be a whole number above 0"):
        gallery.search([picture(1)], k=k)


# near duplicates


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=14))
def test_near_duplicates_are_one_result(places):
    """Against the rule, item by item: into the first earlier group whose head is near or has the same bytes."""
    listed = [
        Known(
            Item(f"{n}", hashlib.sha256(f"{n if bytes_ else 0}".encode()).hexdigest()),
            0.0,
            torch.tensor([math.cos(x * 0.0123), math.sin(x * 0.0123)]),
            torch.zeros(2),
        )
        for n, (x, bytes_) in enumerate(places)
    ]
    expected: list[list[int]] = []
    for n, own in enumerate(listed):
        for group in expected:
            head = listed[group[0]]
            if math.dist(head.unit.tolist(), own.unit.tolist()) < 0.02 or head.item.checksum == own.item.checksum:
                group.append(n)
                break
        else:
            expected.append([n])
    assert collapse(listed) == expected


def crowd(gallery, copies, others):
    """``copies`` items in one place and ``others`` further away; a query at that place."""
    s = torch.zeros(copies + others, DIMENSIONS)
    s[:, 0] = 1.0
    s[copies:, 1] = torch.linspace(0.2, 2, others)
    gallery.put(as_items([n % 3 for n in range(len(s))]), Embeddings(s, torch.zeros_like(s)))
    query = torch.zeros(1, DIMENSIONS)
    query[0, 0] = 1.0
    return Embeddings(query, torch.zeros_like(query))


def test_k_counts_results_without_their_duplicates(gallery):
    (reply,) = gallery.reply(crowd(gallery, 15, 30), k=6)
    assert len(reply.results) == 6
    assert len(reply.results[0].duplicates) == 14
    assert all(result.duplicates == () for result in reply.results[1:])
    assert [r.distance for r in reply.results] == sorted(r.distance for r in reply.results)


def test_the_search_for_others_ends_at_four_k(gallery, monkeypatch):
    query = crowd(gallery, 60, 5)
    asked = []
    search = gallery.engine.search
    monkeypatch.setattr(gallery.engine, "search", lambda q, k, *rest: asked.append((len(q), k)) or search(q, k, *rest))
    (reply,) = gallery.reply(query, k=8)
    assert len(reply.results) == 1
    assert len(reply.results[0].duplicates) == 31
    assert max(k for n, k in asked if n == 1) == 32


def test_equal_bytes_are_duplicates_wherever_they_are(gallery):
    e, _ = cloud(1, 3)
    twin = hashlib.sha256(b"twin").hexdigest()
    gallery.put([Item("a", twin, id="a"), Item("b", hashlib.sha256(b"b").hexdigest(), id="b")], e[:2])
    gallery.put([Item("c", twin, id="c")], e[2])
    groups = {(r.id, *r.duplicates) for r in gallery.reply(e[0])[0].results}
    assert groups == {("a", "c"), ("b",)}


# the gallery as a whole


def test_profile_is_that_of_all_embeddings(shop):
    gallery, stored, _, _, _ = shop
    assert gallery._census.profile.nearest == pytest.approx(Profile.of(stored).nearest, abs=1e-6)
    gallery.put(as_items([0] * 900, first=5000), cloud(1, 900, seed=3)[0])  # more than are drawn
    assert gallery._census.profile.size == 1500
    everything = Embeddings.cat([stored, cloud(1, 900, seed=3)[0]])
    assert gallery._census.profile.nearest == pytest.approx(Profile.of(everything).nearest, abs=1e-6)


def test_drift_is_told_once_it_is_there(shop):
    gallery, _, _, queries, _ = shop
    assert gallery.status().drift == ""
    gallery.put(as_items([31] * 1300, first=9000), cloud(1, 1300, noise=0.01, seed=5)[0])
    told = gallery.status().drift
    assert told.startswith("the gallery has changed since calibration: the gallery has 3.17 times as many images")
    assert gallery.reply(queries[:1])[0].notes == (told,)
    assert gallery._drifted(gallery.calibration) is told  # not measured again
    gallery.remove([item.id for item in as_items([31] * 1300, first=9000)])
    assert gallery.status().drift == ""
    assert gallery.reply(queries[:1])[0].notes == ()


def test_a_profile_serves_until_one_in_a_hundred_has_changed(shop):
    gallery, stored, labels, _, _ = shop
    first = gallery._census.profile
    gallery.put(as_items([1] * 5, first=7000), cloud(1, 5, seed=4)[0])
    gallery.relabel({item.id: "other" for item in as_items(labels.tolist())})
    assert gallery._census.profile is first
    gallery.put(as_items([1] * 3, first=8000), cloud(1, 3, seed=4)[0])
    assert gallery._census.profile is not first
    assert gallery._census.profile.size == len(stored) + 8


def test_status_and_promises(shop, world):
    gallery = shop[0]
    status = gallery.status()
    assert (status.items, status.labelled, status.classes) == (600, 600, 30)
    assert (status.calibrated, status.drift, status.writable) == (True, "", True)
    stored = json.loads((world[0] / "calibration.json").read_bytes())["content"]
    assert status.unknown_share == stored["unknown"] > 0.2
    assert status.model == gallery.embedder.fingerprint == gallery.engine.properties.model
    promises = gallery.promises()
    assert [p.max_error for p in promises] == [0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5]
    assert promises[4] == Calibration.load(world[0] / "calibration.json").promise(0.15, 0.9)
    assert gallery.promises([0.2], 0.99)[0].confidence == 0.99


@given(st.lists(st.tuples(st.sampled_from(["put", "remove", "relabel"]), st.integers(0, 2**16)), max_size=12))
def test_counts_are_those_of_counting(run_gallery, changes):
    gallery = run_gallery
    gallery.remove([item.id for item in list(gallery.items())])
    for kind, number in changes:
        chance = random.Random(number)
        ids = [item.id for item in gallery.items()]
        labels = [chance.choice([None, 0, 1, 2]) for _ in range(chance.randrange(1, 4))]
        if kind == "put":
            gallery.put(as_items(labels, first=chance.randrange(6)), cloud(1, len(labels), seed=number)[0])
        elif kind == "remove":
            gallery.remove([*ids[: chance.randrange(3)], "unknown"])
        elif ids:
            gallery.relabel({chance.choice(ids): chance.choice([None, "c0", "new"])})
        labels = [item.label for item in gallery.items()]
        named = [label for label in labels if label is not None]
        status = gallery.status()
        assert (status.items, status.labelled, status.classes) == (len(labels), len(named), len(set(named)))


@pytest.fixture(scope="module")
def run_gallery(run, tmp_path_factory):
    with Gallery.create(tmp_path_factory.mktemp("counted") / "g", run) as gallery:
        yield gallery


# what it carries


def test_a_gallery_needs_no_run_later(tmp_path):
    run = save_run(tmp_path / "run")
    stored, labels, queries, _ = fit_calibrations(run)
    with Gallery.create(tmp_path / "g", run / "model.safetensors") as gallery:
        gallery.put(as_items(labels.tolist()), stored)
        expected, promises = gallery.reply(queries[:5]), gallery.promises()
    shutil.rmtree(run)
    shutil.move(tmp_path / "g", tmp_path / "elsewhere")
    with Gallery.open(tmp_path / "elsewhere") as gallery:
        assert gallery.reply(queries[:5]) == expected
        assert gallery.promises() == promises
        assert len(gallery.search([picture(1)])[0].results) == 10


def test_a_run_that_is_calibrated_later(tmp_path):
    """It brings its calibrations in when it is named; a writer keeps them."""
    run = save_run(tmp_path / "run")
    Gallery.create(tmp_path / "g", run).close()
    stored, _, queries, _ = fit_calibrations(run, kinds=(True,))
    with Gallery.open(tmp_path / "g", run=run) as reader:
        assert reader.calibration is not None
    with Gallery.open(tmp_path / "g") as reader:
        assert reader.calibration is None
    with open_or_create(tmp_path / "g", run) as writer:
        assert writer.calibration is not None
        writer.put(as_items([None] * 600), stored)
        assert writer.calibration is None  # there is none for galleries without labels
        assert "not calibrated for collections without labels" in writer.reply(queries[:1])[0].notes[0]
    (run / "calibration.json").unlink()
    with Gallery.open(tmp_path / "g", run=run, write=True) as gallery:  # what the run has lost is not lost here
        gallery.relabel({item.id: "c" for item in gallery.items()})
        assert gallery.calibration is not None


def test_pretrained(tmp_path):
    with Gallery.create(tmp_path / "g", "pretrained") as gallery:
        gallery.add([Upload(encoded(picture(n, size=(60, 60))), f"c{n % 2}") for n in range(4)])
    assert (tmp_path / "g" / "model" / "pretrained").read_text() == "tf_efficientnet_lite0\n"
    with Gallery.open(tmp_path / "g") as gallery:
        (reply,) = gallery.search([picture(2, size=(60, 60))])
        assert reply.results[0].label == "c0"
        assert reply.results[0].distance == pytest.approx(0, abs=1e-3)
        assert (reply.level, reply.calibrated, gallery.status().calibrated) == (0.0, False, False)
    (tmp_path / "g" / "model" / "pretrained").write_text("some_other_trunk")
    with pytest.raises(ValueError, match="was made with the trunk 'some_other_trunk'"):
        Gallery.open(tmp_path / "g")


def test_calibrations_that_do_not_fit_are_refused(tmp_path):
    run = save_run(tmp_path / "run")
    fit_calibrations(run, model="0123456789abcdef")
    with pytest.raises(ValueError, match=r"belongs to another model .*: calibrate again"):
        Gallery.create(tmp_path / "g", run)
    assert not (tmp_path / "g").exists()
    fit_calibrations(run)
    shutil.copy(run / "calibration.json", run / "calibration-unlabelled.json")
    with pytest.raises(ValueError, match="is for galleries with labels: calibrate again"):
        Gallery.create(tmp_path / "g", run)
    (run / "calibration-unlabelled.json").unlink()
    found = Calibration.load(run / "calibration.json")
    replace(found, searched="5 nearest, euclidean").save(run / "calibration.json")
    with pytest.raises(ValueError, match="was made for '5 nearest, euclidean', a gallery needs '10 nearest"):
        Gallery.create(tmp_path / "g", run)
    (run / "calibration.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match="not a file of kind 'idml calibration'"):
        Gallery.create(tmp_path / "g", run)


def test_the_model_is_the_gallerys(run, gallery, tmp_path):
    gallery.close()
    other = save_run(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="was made with another model"):
        Gallery.open(gallery.place, run=other)
    with pytest.raises(ValueError, match="there is a gallery at"):
        Gallery.create(gallery.place, other)
    shutil.copy(other / "model.safetensors", tmp_path / "g" / "model" / "model.safetensors")
    with pytest.raises(ValueError, match="is not the one that the gallery was made with"):
        Gallery.open(gallery.place)
    with Gallery.open(gallery.place, run=run, write=True):  # nothing is locked after the refusal
        pass
    shutil.rmtree(tmp_path / "g" / "model")
    with pytest.raises(FileNotFoundError, match="carries no model; name the run"):
        Gallery.open(gallery.place)
    with pytest.raises(FileNotFoundError, match="there is no gallery at"):
        Gallery.open(tmp_path / "nowhere")


def test_making_a_gallery_again_after_a_kill(run, tmp_path):
    """The model is copied before there is a gallery; what is left of an attempt with another one is no hindrance."""
    (tmp_path / "g" / "model").mkdir(parents=True)
    for name in ("pretrained", "calibration.json", "model.safetensors"):
        (tmp_path / "g" / "model" / name).write_bytes(b"left over")
    Gallery.create(tmp_path / "g", run).close()
    assert [path.name for path in (tmp_path / "g" / "model").iterdir()] == ["model.safetensors"]
    Gallery.open(tmp_path / "g").close()
    (tmp_path / "g" / "current.json").unlink()
    Gallery.create(tmp_path / "g", tmp_path / "g" / "model").close()  # from its own copy
    Gallery.open(tmp_path / "g").close()


# images come and go


def test_uploads(gallery, tmp_path):
    data = encoded(picture(1), "JPEG")
    upload = Upload(data, "label <b>", "../../evil\n<script>.exe")
    assert gallery.add([upload]) == Added(1, 0, 0)
    item = gallery.get(upload.id)
    assert item == Item(f"uploads/{upload.id}.jpg", hashlib.sha256(data).hexdigest(), "label <b>")
    assert (tmp_path / "g" / item.path).read_bytes() == data
    assert gallery.image_file(item.id) == (tmp_path / "g" / item.path).resolve()
    assert gallery.add([Upload(data)]) == Added(0, 0, 1)  # no label given: it keeps its own
    assert gallery.get(item.id).label == "label <b>"
    assert gallery.add([Upload(data, "a"), Upload(data, "b")]) == Added(0, 1, 0)  # of equal images the last counts
    assert gallery.get(item.id).label == "b"
    (tmp_path / "g" / item.path).unlink()
    assert gallery.add([Upload(data)]) == Added(0, 0, 1)
    assert gallery.image_file(item.id).read_bytes() == data  # what was lost is back
    assert gallery.add([]) == Added(0, 0, 0)
    assert gallery.search([picture(1)])[0].results[0].id == item.id
    assert len(gallery) == 1
    assert gallery.remove([item.id]) == 1
    assert list((tmp_path / "g" / "uploads").iterdir()) == []
    assert gallery.image_file(item.id) is None


@pytest.mark.parametrize(
    ("kind", "extension"),
    [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("GIF", "gif"), ("BMP", "bmp"), ("TIFF", "tif")],
)
def test_the_content_names_the_file(gallery, kind, extension):
    upload = Upload(encoded(picture(1), kind), name="photo.php")
    gallery.add([upload])
    assert gallery.get(upload.id).path == f"uploads/{upload.id}.{extension}"
    gallery.remove([upload.id])
    assert gallery.image_file(upload.id) is None


def test_several_photographs_in_one_jpeg(gallery):
    out = io.BytesIO()
    picture(1).save(out, "MPO", save_all=True, append_images=[picture(2)])
    upload = Upload(out.getvalue())
    gallery.add([upload])
    assert gallery.get(upload.id).path.endswith(".jpg")


@pytest.mark.parametrize("data", [b"", b"no image", encoded(picture(1))[:-40], b"<svg/>", b"%PDF-1.4"])
def test_a_broken_upload_changes_nothing(gallery, tmp_path, data):
    with pytest.raises(ValueError, match=r"cannot read the image 'x\.png'") as caught:
        gallery.add([Upload(encoded(picture(2)), "a"), Upload(data, "b", "x.png")])
    assert "\n" not in str(caught.value)
    assert len(gallery) == 0
    assert not (tmp_path / "g" / "uploads").exists()
    with pytest.raises(ValueError, match="the label of an item must be a sound string"):
        gallery.add([Upload(encoded(picture(2)), "\ud800")])
    assert len(gallery) == 0


def test_bytes_are_on_disk_before_their_item(gallery, tmp_path, monkeypatch):
    upload, add = Upload(encoded(picture(1))), gallery.engine.add
    place = tmp_path / "g" / "uploads" / f"{upload.id}.png"

    def checked(items, *rest):
        assert place.read_bytes() == upload.data
        return add(items, *rest)

    monkeypatch.setattr(gallery.engine, "add", checked)
    gallery.add([upload])
    assert len(gallery) == 1


def test_removing_again_after_a_kill(gallery, tmp_path, monkeypatch):
    """A kill between the item's end and that of its bytes: the next call for it finishes the work."""
    upload = Upload(encoded(picture(1)))
    gallery.add([upload])
    gallery.engine.remove([upload.id])
    assert gallery.remove([upload.id, "../model", "unknown"]) == 0
    assert list((tmp_path / "g" / "uploads").iterdir()) == []
    assert (tmp_path / "g" / "model" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="must be a list of ids"):
        gallery.remove(upload.id)


def test_thumbnails_are_small_and_bare(gallery):
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "secret place"  # turned by a quarter
    wide = picture(1, size=(600, 200))
    data = encoded(wide, "JPEG", exif=exif, comment=b"secret comment", xmp=b"secret xmp", icc_profile=b"secret icc")
    assert data.count(b"secret") >= 3
    upload = Upload(data)
    gallery.add([upload])
    small = gallery.thumbnail(upload.id)
    assert b"secret" not in small
    with Image.open(io.BytesIO(small)) as image:
        assert (image.format, image.size) == ("JPEG", (43, 128))
        assert not image.getexif()
    gallery.add([long := Upload(encoded(Image.new("RGB", (2000, 1))))])
    assert Image.open(io.BytesIO(gallery.thumbnail(long.id))).size == (128, 1)
    gallery.add([tiny := Upload(encoded(Image.new("RGB", (2, 3))))])
    assert Image.open(io.BytesIO(gallery.thumbnail(tiny.id))).size == (2, 3)


def test_adding_again_mends_a_damaged_item(gallery, tmp_path):
    uploads = [Upload(encoded(picture(n)), f"c{n}") for n in range(3)]
    gallery.add(uploads)
    expected = gallery.engine.embeddings()
    gallery.close()
    (folder,) = (tmp_path / "g").glob("generation-*")
    for name, place in (("semantic.f32", 4 * DIMENSIONS), ("thumbnails.bin", -5)):
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 1
        (folder / name).write_bytes(data)
    with Gallery.open(gallery.place, write=True) as opened:
        assert len(opened.engine.verify()) == 2
        assert opened.add([Upload(x.data) for x in uploads]) == Added(0, 2, 1)
        assert opened.engine.verify() == []
        assert torch.allclose(opened.engine.embeddings([x.id for x in uploads]).semantic, expected.semantic, atol=1e-5)
        assert [opened.get(x.id).label for x in uploads] == ["c0", "c1", "c2"]


# who may do what


def test_one_writer_and_readers_that_refresh(gallery):
    with pytest.raises(ValueError, match="is being written to by another process"):
        Gallery.open(gallery.place, write=True)
    with Gallery.open(gallery.place) as reader:
        assert (reader.writable, reader.status().writable) == (False, False)
        gallery.add([Upload(encoded(picture(1)), "a")])
        assert (len(reader), reader.status().items) == (0, 0)
        assert reader.refresh()
        assert (len(reader), reader.status().items, reader.status().classes) == (1, 1, 1)
        assert not reader.refresh()
        id = next(reader.items()).id
        assert reader.image_file(id) is not None
        for change in (
            lambda: reader.add([Upload(encoded(picture(2)))]),
            lambda: reader.remove([id]),
            lambda: reader.relabel({id: "b"}),
        ):
            with pytest.raises(ValueError, match="open for reading only"):
                change()
        assert reader.image_file(id) is not None
    with open_engine(gallery.place) as engine:
        assert len(engine) == 1


def test_no_path_leaves_its_root(gallery, tmp_path):
    """Whatever the items and roots.json say, and wherever links lead."""
    root, secret = tmp_path / "photos", tmp_path / "secret.png"
    (root / "sub").mkdir(parents=True)
    secret.write_bytes(b"secret")
    (root / "sub" / "a.png").write_bytes(b"a")
    (root / "link.png").symlink_to(secret)
    (root / "up").symlink_to(tmp_path)
    (root / "inside.png").symlink_to("sub/a.png")
    (root / "loop.png").symlink_to("loop.png")
    assert gallery.roots.name(str(root)) == "photos"
    names = {
        "photos/sub/a.png": root / "sub" / "a.png",
        "photos/inside.png": root / "sub" / "a.png",
        "photos/link.png": None,
        "photos/up/secret.png": None,
        "photos/loop.png": None,
        "photos/sub": None,
        "photos": None,
        "photos/": None,
        "other/a.png": None,
        "uploads/model.safetensors": None,
        "": None,
        f"photos/{'x' * 5000}": None,
    }
    for n, (path, expected) in enumerate(names.items()):
        gallery.put([Item(path, "0" * 64, id=f"i{n}")], cloud(1, 1)[0])
        assert gallery.image_file(f"i{n}") == (None if expected is None else expected.resolve()), path
        assert gallery.roots.find(f"photos/../../{secret.name}") is None
    assert gallery.image_file("unknown") is None
    for damage in (b"[1]", b'{"a": 1}', b"{", b"\xff"):
        (tmp_path / "g" / "roots.json").write_bytes(damage)
        with pytest.raises(ValueError, match=r"roots\.json is damaged"):
            gallery.image_file("i0")


def test_threads_share_a_gallery(gallery):
    """Searches, adds, labels and removals at once: no error, and the counts are right afterwards."""
    uploads = [Upload(encoded(picture(n % 5, n)), f"c{n % 5}") for n in range(40)]
    gallery.add(uploads[:20])
    queries = gallery.embedder.embed([picture(n % 5, 100 + n) for n in range(8)])
    errors, ended = [], threading.Event()

    def guarded(work):
        def loop():
            try:
                while not ended.is_set():
                    work()
            except Exception as error:
                errors.append(error)

        return threading.Thread(target=loop)

    def look():
        for reply in gallery.reply(queries, k=5):
            assert 1 <= len(reply.results) <= 5
        assert gallery.status().items >= 19

    def come_and_go():
        gallery.add(uploads[20:])
        gallery.relabel({uploads[3].id: None})
        gallery.remove([upload.id for upload in uploads[20:]])
        gallery.relabel({uploads[3].id: "c3"})

    def one_by_one():
        gallery.add([uploads[0]])
        gallery.remove([uploads[0].id])

    threads = [guarded(work) for work in (look, look, come_and_go, one_by_one)]
    for thread in threads:
        thread.start()
    ended.wait(3)
    ended.set()
    for thread in threads:
        thread.join()
    assert errors == []
    labels = [item.label for item in gallery.items()]
    assert gallery.status().items == len(labels) == 19
    assert gallery.status().labelled == sum(label is not None for label in labels)


def test_a_forked_reader_sees_what_was_acknowledged(gallery):
    """The bytes and the item of an acknowledged upload survive the process's death."""
    gallery.close()

    def work():
        with Gallery.open(gallery.place, write=True) as opened:
            opened.add([Upload(encoded(picture(1)), "a")])

    with child(work) as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with Gallery.open(gallery.place) as reader:
        (item,) = reader.items()
        assert hashlib.sha256(reader.image_file(item.id).read_bytes()).hexdigest() == item.checksum


# Milvus, played by an embedded engine


@pytest.fixture
def milvus(monkeypatch, tmp_path):
    class MilvusEngine:
        @classmethod
        def create(cls, place, properties):
            return EmbeddedEngine.create(tmp_path / place.rpartition("/")[2], properties)

        @classmethod
        def open(cls, place, *, model=None, write=False):
            return EmbeddedEngine.open(tmp_path / place.rpartition("/")[2], model=model, write=write)

    module = types.ModuleType("idml.search.engines.milvus")
    module.MilvusEngine = MilvusEngine
    monkeypatch.setitem(sys.modules, "idml.search.engines.milvus", module)
    return "milvus://localhost:19530/birds"


def test_a_gallery_in_milvus(milvus, world):
    run, stored, labels, queries, _ = world
    with pytest.raises(FileNotFoundError):
        Gallery.open(milvus, run=run)
    with open_or_create(milvus, run) as gallery:
        gallery.put(as_items(labels.tolist()), stored)
        assert gallery.reply(queries[:2])[0].calibrated
        upload = Upload(encoded(picture(1)), "c1")
        assert gallery.add([upload]) == Added(1, 0, 0)
        assert gallery.add([upload]) == Added(0, 0, 1)
        assert gallery.get(upload.id).path == ""
        assert gallery.image_file(upload.id) is None
        assert gallery.thumbnail(upload.id)
        assert gallery.remove([upload.id]) == 1
    with pytest.raises(ValueError, match="carries no model; name the run"):
        Gallery.open(milvus)
    with pytest.raises(ValueError, match="there is a gallery at"):
        Gallery.create(milvus, run)
    with open_or_create(milvus, run) as gallery, Gallery.open(milvus, run=run) as reader:
        gallery.relabel({next(gallery.items()).id: None})  # behind the reader's back
        reader.engine.refresh()
        assert "1 of 600 images have no label" in reader.reply(queries)[0].notes[0]
