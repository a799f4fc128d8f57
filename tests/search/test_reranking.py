"""Re-ranked results: their order by explicit matching, what is no longer promised, and maps that do not fit."""

import hashlib
import sqlite3
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from synthetic_images import DIMENSIONS, fit_calibrations, picture, save_run, write_picture

from idml.calibration.stored import Calibration
from idml.data.images import read_image
from idml.model import build_model, load_model, save_model
from idml.model.model import pool_positions
from idml.model.structural_matching import structural_similarities
from idml.search.answers import Answer, RiskTargets, State
from idml.search.embedder import prepare_image
from idml.search.gallery import Gallery, Upload
from idml.search.gallery_folder import MissingMap
from idml.search.indexing import add_maps, index_folder
from idml.search.integrity import verify_folder
from idml.search.position_maps import PositionMapper, PositionMaps
from idml.search.reranking import _answer
from idml.search.results import Result

CLASSES, EACH = 6, 8


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run, and a folder of six classes."""
    folder = tmp_path_factory.mktemp("reranked")
    save_run(folder / "run")
    for kind in range(CLASSES):
        for n in range(EACH):
            write_picture(folder / "photos" / f"c{kind}" / f"{n}.png", kind, n)
    return folder


@pytest.fixture
def mapped(place, tmp_path, request):
    request.getfixturevalue("_no_waiting")
    with Gallery.create(tmp_path / "g", place / "run") as made:
        index_folder(made, place / "photos")
        assert add_maps(made) == CLASSES * EACH
        yield made


def expected_scores(run, query, files):
    """ŝ₁·ŝ₂ + Σ T·S of the query and each file, computed from the model alone."""
    model = load_model(run).eval()

    def seen(image):
        pixels = prepare_image(image, model.trunk.image_size)[None] / 255
        with torch.no_grad():
            whole, positions = model(pixels).unit, model.semantic(pool_positions(model.positions(pixels), 4))
        return whole, torch.nn.functional.normalize(positions, dim=2)

    (x, own), scores = seen(query), []
    for file in files:
        y, other = seen(read_image(file))
        scores.append(float((x @ y.T) + structural_similarities(own, x, other, y)))
    return scores


def test_the_order_is_that_of_structural_matching(mapped, place):
    query = picture(2, 100)
    (reply,) = mapped.search([query], CLASSES * EACH, None, rerank="diml")
    (plain,) = mapped.search([query], k=CLASSES * EACH)
    assert {r.id for r in reply.results} == {r.id for r in plain.results}  # near duplicates are one result
    assert [r.id for r in reply.results] != [r.id for r in plain.results]
    found = expected_scores(place / "run", query, [place / r.path for r in reply.results])
    assert all(a >= b - 1e-3 for a, b in pairwise(found))  # maps are stored in float16
    assert found[0] - found[-1] > 0.05
    few = mapped.search([query, picture(3, 100)], 3, None, rerank="diml")
    assert [r.id for r in few[0].results] == [r.id for r in reply.results[:3]]
    assert len(few) == 2


def test_an_item_is_searched_without_itself(mapped, place):
    (own, *_), all_items = list(mapped.items()), CLASSES * EACH
    (reply,) = mapped.search_items([own.id], all_items, rerank="diml")
    (plain,) = mapped.search_items([own.id], all_items)
    assert {r.id for r in reply.results} == {r.id for r in plain.results}
    assert own.id not in {r.id for r in reply.results}
    found = expected_scores(place / "run", read_image(place / own.path), [place / r.path for r in reply.results])
    assert all(a >= b - 1e-3 for a, b in pairwise(found))
    assert (reply.calibrated, reply.answer.promised) == (False, False)
    assert mapped.search_items([], rerank="diml") == mapped.search([], rerank="diml") == []


def test_nothing_is_promised(mapped, place):
    fit_calibrations(place / "run")
    mapped.store_calibration(Calibration.load(place / "run" / "calibration.json"))
    query = picture(2, 100)
    (plain,) = mapped.search([query])
    assert (plain.calibrated, plain.answer.probability is None) == (True, False)
    (reply,) = mapped.search([query], 5, RiskTargets(max_error=0.5), rerank="diml")
    answer = reply.answer
    assert (reply.calibrated, answer.calibrated, answer.promised, answer.probability) == (False, False, False, None)
    assert all(result.probability is None for result in reply.results)
    assert "nothing is promised" in reply.notes[-1]
    with pytest.raises(ValueError, match="a search without re-ranking: leave out one of the two"):
        mapped.search([query], 5, RiskTargets(max_missed=0.1), rerank="diml")


@pytest.mark.parametrize(
    ("before", "now", "state"),
    [
        (("a", "bird"), ("b", "bird"), State.MATCH),
        (("a", "bird"), ("b", "cat"), State.UNSURE),
        (("a", None), ("a", None), State.MATCH),
        (("a", None), ("b", None), State.UNSURE),
    ],
)
def test_a_match_needs_the_same_class_first(before, now, state):
    old, new = (Result(id, "", label, 0.1, 0.9, 0.0, ()) for id, label in (before, now))
    found = _answer(Answer(State.MATCH, "clear match", True, True, 0.9), [old], [new])
    assert (found.state, found.promised, found.calibrated, found.probability) == (state, False, False, None)
    novel = Answer(State.NOVEL, "far from everything", True, True, 0.1)
    assert _answer(novel, [old], [new]).state is State.NOVEL
    assert _answer(novel, [], []).promised is False


def test_maps_follow_the_images(mapped, place, tmp_path):
    maps = PositionMaps(tmp_path / "g")
    assert add_maps(mapped) == 0
    first, second = list(mapped.items())[:2]
    mapped.remove([first.id])
    with closing(sqlite3.connect(maps.file)) as file:
        assert file.execute("SELECT count(*) FROM maps").fetchone() == (CLASSES * EACH - 1,)
    with pytest.raises(ValueError, match="has no position map: run idml index --maps again"):
        maps.read([first], DIMENSIONS)
    other = type(second)(second.path, hashlib.sha256(b"another image").hexdigest(), second.label, second.id)
    assert maps.find_missing([second, other]) == [other]
    stored = maps.read([second], DIMENSIONS)
    computed = PositionMapper(tmp_path / "g").compute([read_image(place / second.path)])
    torch.testing.assert_close(stored, computed, rtol=0, atol=1e-3)
    added = (tmp_path / "new.png", picture(5, 77))
    added[1].save(added[0])
    mapped.add([Upload(added[0].read_bytes())])
    assert add_maps(mapped) == 0  # an image that is added to a gallery with maps gets one
    (reply,) = mapped.search([added[1]], 5, None, rerank="diml")
    assert reply.results[0].distance == pytest.approx(0, abs=1e-3)
    maps.delete([reply.results[0].id])
    with pytest.raises(MissingMap, match="has no position map: run idml index --maps again"):
        mapped.search([added[1]], 5, None, rerank="diml")
    assert add_maps(mapped) == 1  # an uploaded image has a file too
    torch.testing.assert_close(
        maps.read([mapped.get(reply.results[0].id)], DIMENSIONS),
        PositionMapper(tmp_path / "g").compute([added[1]]),
        rtol=0,
        atol=1e-3,
    )


def test_an_image_that_changed_or_vanished_gets_no_map(place, tmp_path):
    photos = tmp_path / "photos"
    for n in range(3):
        write_picture(photos / "a" / f"{n}.png", 1, n)
    with Gallery.create(tmp_path / "g", place / "run") as made:
        index_folder(made, photos)
        (photos / "a" / "0.png").unlink()
        write_picture(photos / "a" / "1.png", 4)
        notes = []
        assert add_maps(made, note=notes.append) == 1
        assert ["its file is missing" in notes[0], "has changed since it was added" in notes[1]] == [True, True]


def test_damage_is_named(mapped, tmp_path):
    maps = PositionMaps(tmp_path / "g")
    item = next(iter(mapped.items()))
    with closing(sqlite3.connect(maps.file)) as file, file:
        file.execute("UPDATE maps SET map = zeroblob(length(map)) WHERE id = ?", (item.id.encode(),))
    with pytest.raises(ValueError, match=f"the map of item '{item.id}' is damaged"):
        maps.read([item], DIMENSIONS)
    (problem,) = [p for p in verify_folder(mapped.engine, tmp_path / "g") if "position map" in p.reason]
    assert problem.item == item.id
    maps.file.write_bytes(b"not a database" * 100)
    with pytest.raises(ValueError, match="is damaged or cannot be used"):
        mapped.search([picture(1)], 5, None, rerank="diml")
    assert any("is damaged" in p.reason for p in verify_folder(mapped.engine, tmp_path / "g"))


def test_what_cannot_be_reranked_is_refused(place, tmp_path):
    with Gallery.create(tmp_path / "g", place / "run") as made:
        index_folder(made, place / "photos")
        with pytest.raises(ValueError, match="the gallery has no position maps: idml index --maps makes them"):
            made.search([picture(1)], 5, None, rerank="diml")
        with pytest.raises(ValueError, match="unknown re-ranker 'dilm'; did you mean 'diml'"):
            made.search([picture(1)], 5, None, rerank="dilm")
        with pytest.raises(ValueError, match="k must be a whole number above 0, got 0"):
            made.search([picture(1)], 0, None, rerank="diml")
    far = SimpleNamespace(roots=None)
    with pytest.raises(MissingMap, match="a gallery in Milvus keeps no position maps: use one in a folder"):
        Gallery.require_folder(far)
    with Gallery.open(tmp_path / "g") as made, pytest.raises(ValueError, match="open for reading only"):
        add_maps(made)
    torch.manual_seed(0)
    sliced = build_model("conv4", embedding_dim=8, image_size=28, head="slices", slices=("a", "b"))
    sliced(torch.rand(8, 3, 28, 28))
    save_model(sliced, tmp_path / "sliced")
    words = "needs a linear head"
    with Gallery.create(tmp_path / "s", tmp_path / "sliced") as made, pytest.raises(ValueError, match=words):
        add_maps(made)
