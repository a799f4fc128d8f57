"""A gallery as a whole: profile, counts, model and calibrations."""

import json
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
from synthetic_images import as_items, cloud, encoded, fit_calibrations, picture, save_run

from idml import Embeddings
from idml.calibration.evidence import Profile
from idml.calibration.stored import Calibration
from idml.search import gallery as gallery_module
from idml.search.answers import RiskTargets, State
from idml.search.engines import Added
from idml.search.engines.sqlite import SqliteEngine
from idml.search.gallery import Gallery, Upload, open_or_create
from idml.search.gallery_folder import lock_creation

pytestmark = pytest.mark.usefixtures("_no_waiting")


# the gallery as a whole


def test_profile_equals_that_of_all_embeddings(shop):
    gallery, stored, _, _, _ = shop
    assert gallery._statistics.profile.nearest == pytest.approx(Profile.of(stored).nearest, abs=1e-6)
    gallery.add_embedded(as_items([0] * 900, first=5000), cloud(1, 900, seed=3)[0])  # more than are drawn
    assert gallery._statistics.profile.size == 1500
    everything = Embeddings.cat([stored, cloud(1, 900, seed=3)[0]])
    assert gallery._statistics.profile.nearest == pytest.approx(Profile.of(everything).nearest, abs=1e-6)


def test_drift_is_reported(shop):
    gallery, _, _, queries, _ = shop
    assert gallery.status().drift == ""
    gallery.add_embedded(as_items([31] * 1300, first=9000), cloud(1, 1300, noise=0.01, seed=5)[0])
    told = gallery.status().drift
    assert told.startswith("the gallery is 217 % larger than at calibration; its images lie nearer")
    assert told.endswith("nothing is promised until you calibrate again (idml calibrate)")
    (reply,) = gallery.search_embeddings(queries[:1])
    assert (reply.notes, reply.answer.promised) == ((told,), False)
    measured = gallery._drift
    assert gallery.status().drift == told
    assert gallery._drift is measured  # not measured again
    gallery.remove([item.id for item in as_items([31] * 1300, first=9000)])
    assert gallery.status().drift == ""
    assert gallery.search_embeddings(queries[:1])[0].notes == ()


def test_small_growth_is_covered_and_said(shop):
    gallery, _, _, queries, _ = shop
    targets = RiskTargets(max_error=0.2)
    assert gallery.search_embeddings(queries[:1], targets=targets)[0].answer.promised
    gallery.add_embedded(as_items([3] * 60, first=9000), cloud(1, 60, noise=0.9, seed=0)[0])
    status = gallery.status()
    assert (status.drift, status.growth) == ("", "the gallery is 10 % larger than at calibration; promises cover 20 %")
    (reply,) = gallery.search_embeddings(queries[:1], targets=targets)
    assert (reply.notes, reply.answer.promised) == ((status.growth,), True)


def test_more_unknown_queries_than_calibrated_are_noticed(shop):
    gallery, _, _, queries, own = shop
    targets = RiskTargets(max_error=0.2)
    known = gallery.search_embeddings(queries[own < 30], targets=targets)
    assert all(reply.answer.promised and not reply.notes for reply in known)
    replies = gallery.search_embeddings(queries[own >= 30], targets=targets)
    assert not any(reply.answer.promised for reply in replies)
    told = replies[0].notes[-1]
    assert "of the latest 200 queries seem to show nothing of the collection" in told
    assert gallery.status().drift == told
    (similar,) = gallery.search_items([next(gallery.items()).id], targets=targets)
    assert (similar.answer.promised, similar.notes) == (False, (told,))
    gallery.store_calibration(gallery.calibration)
    assert gallery.status().drift == ""
    assert gallery.search_embeddings(queries[:1], targets=targets)[0].answer.promised


def test_a_query_that_is_asked_again_counts_once(shop):
    gallery, _, _, queries, _ = shop
    targets = RiskTargets(max_error=0.2)
    states = [reply.answer.state for reply in gallery.search_embeddings(queries, targets=targets, counted=False)]
    assert gallery._latest.counts() == (0, 0)
    unknown = queries[[states.index(State.NOVEL)]]
    for i in range(30):
        noise = 1e-7 * torch.randn(unknown.semantic.shape, generator=torch.Generator().manual_seed(i))
        asked = Embeddings(unknown.semantic + noise, unknown.uncertainty)  # as in batches of other sizes
        (reply,) = gallery.search_embeddings(asked, targets=RiskTargets(max_error=0.1 + 0.001 * i))
        assert (reply.answer.promised, reply.notes) == (True, ())
    assert gallery._latest.counts() == (1, 1)
    gallery.search_embeddings(Embeddings.cat([queries, unknown]), targets=targets)
    assert gallery._latest.counts()[1] == 200  # the latest ones, and the last one is among them
    gallery.search_embeddings(unknown, targets=targets)
    assert gallery._latest.counts()[1] == 200


def test_a_profile_is_recomputed_after_one_percent_of_changes(shop):
    gallery, stored, labels, _, _ = shop
    first = gallery._statistics.profile
    gallery.add_embedded(as_items([1] * 5, first=7000), cloud(1, 5, seed=4)[0])
    gallery.relabel({item.id: "other" for item in as_items(labels.tolist())})
    assert gallery._statistics.profile.nearest is first.nearest
    assert gallery._statistics.profile.size == len(stored) + 5  # the size is counted after each change
    gallery.add_embedded(as_items([1] * 3, first=8000), cloud(1, 3, seed=4)[0])
    assert gallery._statistics.profile.nearest is not first.nearest
    assert gallery._statistics.profile.size == len(stored) + 8
    gallery.remove([item.id for item in as_items([1] * 8, first=7000)][:5])
    gallery.remove([item.id for item in as_items(labels.tolist())][:4])
    assert gallery._statistics.profile.size == len(gallery) == len(stored) - 1
    assert len(gallery._statistics.profile.nearest) == len(stored) - 1  # no more than there are items


def test_a_gallery_that_was_opened_long_ago_counts_as_one_that_is_opened_now(shop):
    gallery, _, _, queries, _ = shop
    gallery.add_embedded(as_items([3] * 120, first=9000), cloud(1, 120, noise=0.9, seed=0)[0])
    assert gallery.status().drift == ""  # 20 % larger
    gallery.add_embedded(as_items([3] * 4, first=9500), cloud(1, 4, noise=0.9, seed=1)[0])  # below one per cent
    told = "the gallery is 21 % larger than at calibration"
    assert gallery.status().drift.startswith(told)
    (reply,) = gallery.search_embeddings(queries[:1], targets=RiskTargets(max_error=0.2))
    assert (reply.answer.promised, reply.notes) == (False, (gallery.status().drift,))
    with Gallery.open(gallery.location) as fresh:
        assert fresh.status().drift == gallery.status().drift


def test_status_and_promises(shop, world):
    gallery = shop[0]
    status = gallery.status()
    assert (status.items, status.labelled, status.classes) == (600, 600, 30)
    assert (status.calibrated, status.drift, status.writable) == (True, "", True)
    stored = json.loads((world[0] / "calibration.json").read_bytes())["content"]
    assert status.unknown_share == stored["unknown"] > 0.2
    assert status.model == gallery.embedder.fingerprint == gallery.engine.properties.model
    promises = gallery.guarantees()
    assert [p.max_error for p in promises] == [0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5]
    assert promises[4] == Calibration.load(world[0] / "calibration.json").find_guarantee(0.15, 0.9)
    assert gallery.guarantees([0.2], 0.99)[0].confidence == 0.99


@given(st.lists(st.tuples(st.sampled_from(["put", "remove", "relabel"]), st.integers(0, 2**16)), max_size=12))
def test_counts_follow_all_changes(run_gallery, changes):
    gallery = run_gallery
    gallery.remove([item.id for item in list(gallery.items())])
    for kind, number in changes:
        chance = random.Random(number)
        ids = [item.id for item in gallery.items()]
        labels = [chance.choice([None, 0, 1, 2]) for _ in range(chance.randrange(1, 4))]
        if kind == "put":
            gallery.add_embedded(as_items(labels, first=chance.randrange(6)), cloud(1, len(labels), seed=number)[0])
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
        gallery.add_embedded(as_items(labels.tolist()), stored)
        gallery.store_calibration(Calibration.load(run / "calibration.json"))
        expected, promises = gallery.search_embeddings(queries[:5]), gallery.guarantees()
    shutil.rmtree(run)
    shutil.move(tmp_path / "g", tmp_path / "elsewhere")
    with Gallery.open(tmp_path / "elsewhere") as gallery:
        assert gallery.search_embeddings(queries[:5]) == expected
        assert gallery.guarantees() == promises
        assert len(gallery.search([picture(1)])[0].results) == 10


def test_a_calibration_lies_with_the_gallery(world, tmp_path):
    """A reader that has it open sees a new one; it does not count once labels are gone."""
    run, stored, labels, queries, _ = world
    with Gallery.create(tmp_path / "g", run) as writer, Gallery.open(tmp_path / "g") as reader:
        writer.add_embedded(as_items(labels.tolist()), stored)
        reader.refresh()
        assert "not calibrated: nothing is promised" in reader.search_embeddings(queries[:1])[0].notes[0]
        found = Calibration.load(run / "calibration.json")
        writer.store_calibration(found)
        assert reader.refresh()
        assert not reader.refresh()
        assert reader.calibration == found
        assert reader.search_embeddings(queries[:1])[0].answer.calibrated
        writer.relabel({item.id: None for item in writer.items()})
        assert writer.calibration is None
        note = "calibrated when its images had labels: nothing is promised (see idml calibrate)"
        assert writer.search_embeddings(queries[:1])[0].notes == (note,)
        writer.store_calibration(Calibration.load(run / "calibration-unlabelled.json"))
        assert writer.search_embeddings(queries[:1])[0].calibrated


def test_pretrained(tmp_path):
    with Gallery.create(tmp_path / "g", "pretrained", runtime="torch") as gallery:  # an export takes seconds
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


def test_unsuitable_calibrations_are_refused(world, tmp_path):
    found, path = Calibration.load(world[0] / "calibration.json"), tmp_path / "g" / "calibration.json"
    Gallery.create(tmp_path / "g", world[0]).close()
    for content, words in (
        (replace(found, model="0123456789abcdef").encode(), "belongs to another model .*: calibrate again"),
        (
            replace(found, searched="5 nearest, euclidean").encode(),
            "was made for '5 nearest, euclidean', a gallery needs",
        ),
        (b"{}", "is no file of kind 'idml calibration': calibrate again"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            Gallery.open(tmp_path / "g")
    with Gallery.open(tmp_path / "g", calibrated=False) as gallery:
        with pytest.raises(ValueError, match="belongs to another model"):
            gallery.store_calibration(replace(found, model="0123456789abcdef"))
        gallery.store_calibration(found)
    assert Gallery.open(tmp_path / "g").calibration == found


def test_another_model_is_refused(run, gallery, tmp_path):
    gallery.close()
    other = save_run(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="was made with another model"):
        Gallery.open(gallery.location, run=other)
    with pytest.raises(ValueError, match="there is already a gallery at"):
        Gallery.create(gallery.location, other)
    shutil.copy(other / "model.safetensors", tmp_path / "g" / "model" / "model.safetensors")
    with pytest.raises(ValueError, match="is not the model that the gallery was made with"):
        Gallery.open(gallery.location)
    with Gallery.open(gallery.location, run=run, write=True):  # nothing is locked after the refusal
        pass
    shutil.rmtree(tmp_path / "g" / "model")
    with pytest.raises(FileNotFoundError, match="contains no model; name the run"):
        Gallery.open(gallery.location)
    with pytest.raises(FileNotFoundError, match="there is no gallery at"):
        Gallery.open(tmp_path / "nowhere")


def test_creating_a_gallery_again_after_a_kill(run, tmp_path):
    """The model is copied before there is a gallery; what is left of an attempt with another one is no hindrance."""
    (tmp_path / "g" / "model").mkdir(parents=True)
    for name in ("pretrained", "learned.json", "model.safetensors"):
        (tmp_path / "g" / "model" / name).write_bytes(b"left over")
    Gallery.create(tmp_path / "g", run).close()
    assert [path.name for path in (tmp_path / "g" / "model").iterdir()] == ["model.safetensors"]
    Gallery.open(tmp_path / "g").close()
    (tmp_path / "g" / "gallery.sqlite").unlink()
    Gallery.create(tmp_path / "g", tmp_path / "g" / "model").close()  # from its own copy
    Gallery.open(tmp_path / "g").close()


def test_the_second_of_two_creators_leaves_the_model_of_the_first(run, tmp_path, monkeypatch):
    other = save_run(tmp_path / "other", seed=1)
    opened = gallery_module.open_embedder

    def open_slowly(source, **options):
        monkeypatch.setattr(gallery_module, "open_embedder", opened)
        Gallery.create(tmp_path / "g", run).close()  # by somebody else, in the meantime
        return opened(source, **options)

    monkeypatch.setattr(gallery_module, "open_embedder", open_slowly)
    with pytest.raises(ValueError, match="there is already a gallery at"):
        Gallery.create(tmp_path / "g", other)
    Gallery.open(tmp_path / "g", run=run).close()
    Gallery.open(tmp_path / "g").close()


def test_two_creators_do_not_mix_their_files(run, tmp_path):
    with lock_creation(tmp_path / "g"):
        maker = threading.Thread(target=lambda: Gallery.create(tmp_path / "g", run).close())
        maker.start()
        maker.join(0.2)
        assert not (tmp_path / "g" / "model").exists()  # it waits
    maker.join()
    Gallery.open(tmp_path / "g").close()


# Milvus, played by an embedded engine


@pytest.fixture
def milvus(monkeypatch, tmp_path):
    class MilvusEngine:
        @classmethod
        def create(cls, place, properties):
            return SqliteEngine.create(tmp_path / place.rpartition("/")[2], properties)

        @classmethod
        def open(cls, place, *, model=None, write=False):
            return SqliteEngine.open(tmp_path / place.rpartition("/")[2], model=model, write=write)

    module = types.ModuleType("idml.search.engines.milvus")
    module.MilvusEngine = MilvusEngine
    monkeypatch.setitem(sys.modules, "idml.search.engines.milvus", module)
    return "milvus://localhost:19530/birds"


def test_a_gallery_in_milvus(milvus, world):
    run, stored, labels, queries, _ = world
    with pytest.raises(FileNotFoundError):
        Gallery.open(milvus, run=run)
    with open_or_create(milvus, run) as gallery:
        gallery.add_embedded(as_items(labels.tolist()), stored)
        assert not gallery.search_embeddings(queries[:2])[0].calibrated
        upload = Upload(encoded(picture(1)), "c1")
        assert gallery.add([upload]) == Added(1, 0, 0)
        assert gallery.add([upload]) == Added(0, 0, 1)
        assert gallery.get(upload.id).path == ""
        assert gallery.image_file(upload.id) is None
        assert gallery.thumbnail(upload.id)
        assert gallery.remove([upload.id]) == 1
    with pytest.raises(ValueError, match="contains no model; name the run"):
        Gallery.open(milvus)
    with pytest.raises(ValueError, match="there is already a gallery at"):
        Gallery.create(milvus, run)
    with open_or_create(milvus, run) as gallery, Gallery.open(milvus, run=run) as reader:
        gallery.relabel({next(gallery.items()).id: None})  # behind the reader's back
        reader.engine.refresh()
        assert "1 of 600 images have no label" in reader.search_embeddings(queries)[0].notes[0]


def test_a_search_follows_the_changes_of_another_writer(shop):
    gallery, stored, _, _, _ = shop
    assert gallery.search_embeddings(stored[:1])[0].answer.state  # counts are read: all items have labels
    first = next(gallery.items()).id
    with Gallery.open(gallery.location, write=True) as other:
        other.relabel({first: None})
    assert "1 of 600 images have no label" in gallery.search_embeddings(stored[:1])[0].notes[0]


def test_max_error_is_short_for_targets(gallery, monkeypatch):
    gallery.add([Upload(encoded(picture(1)), "a")])
    seen = []
    monkeypatch.setattr(Gallery, "search_embeddings", lambda self, queries, k, targets: seen.append((k, targets)))
    gallery.search([picture(1)], 3, max_error=0.2)
    gallery.search([picture(1)], 3, RiskTargets(max_error=0.2))
    assert seen == [(3, RiskTargets(max_error=0.2))] * 2
    with pytest.raises(ValueError, match="give either targets or max_error"):
        gallery.search([picture(1)], 3, RiskTargets(), max_error=0.2)
