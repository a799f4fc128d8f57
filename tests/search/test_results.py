"""What a gallery answers, against explicit loops; near duplicates are one result."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic_images import DIMENSIONS, as_items, cloud, encoded, picture

import idml.search.results
from idml import Embeddings
from idml.calibration.evidence import Profile
from idml.calibration.open_set import QueryPool
from idml.calibration.stored import Calibration
from idml.search.answers import RiskTargets, State, answer_queries
from idml.search.engines import Item
from idml.search.gallery import Upload
from idml.search.results import FoundItem, group_duplicates

pytestmark = pytest.mark.usefixtures("_no_waiting")


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


def calibration_evidence(queries, stored, labels):
    """The evidence as a calibration builds it, for the same queries in the same gallery."""
    own = torch.zeros(len(queries), dtype=torch.long)  # the evidence does not depend on the queries' classes
    return QueryPool(queries, own, stored, labels).search().evidence


@pytest.mark.parametrize("k", [1, 10, 17])
def test_search_and_calibration_build_the_same_evidence(shop, monkeypatch, k):
    gallery, stored, labels, queries, _ = shop
    seen = []
    record = lambda *a, **b: seen.append(a[0]) or answer_queries(*a, **b)  # noqa: E731
    monkeypatch.setattr(idml.search.results, "answer_queries", record)
    gallery.search_embeddings(queries, k)
    (evidence,) = seen
    expected = calibration_evidence(queries, stored, labels)
    assert evidence.searched == expected.searched
    assert set(evidence.scores) == set(expected.scores)
    for name, score in expected.scores.items():
        torch.testing.assert_close(evidence.scores[name], score, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("k", [1, 3, 10, 17])
def test_evidence_and_results_equal_a_loop(shop, monkeypatch, k):
    """Whatever k is, the evidence is that of the 10 nearest, and nothing but the evidence makes the answer."""
    gallery, stored, labels, queries, _ = shop
    queries = queries[:12]
    seen = []
    monkeypatch.setattr(
        idml.search.results, "answer_queries", lambda *a, **b: seen.append((a, b)) or answer_queries(*a, **b)
    )
    replies = gallery.search_embeddings(queries, k)
    (evidence, calibration, targets), options = seen[0]
    for n, scores in enumerate(loops(queries, stored, labels.tolist())):
        for name, value in scores.items():
            assert float(evidence.scores[name][n]) == pytest.approx(value, abs=2e-5), name
    assert set(evidence.scores) == set(scores)
    assert (calibration, targets) == (gallery.calibration, RiskTargets())
    assert options["profile"].size == len(stored)
    expected = answer_queries(calibration_evidence(queries, stored, labels), gallery.calibration)
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
        raw = gallery.calibration.match_probability(torch.tensor([r.distance for r in reply.results[1:]])).tolist()
        assert others == [min(first, p) for p in raw]


def test_three_states_and_both_kinds_of_gallery(shop, world):
    gallery, stored, labels, queries, _ = shop
    targets = RiskTargets(max_error=0.1)
    assert all(reply.notes == () for reply in gallery.search_embeddings(queries[:3]))
    states = {reply.answer.state for reply in gallery.search_embeddings(queries, 5, targets)}
    assert states == set(State)
    assert gallery.calibration.labelled

    item = next(gallery.items())
    gallery.relabel({item.id: None})
    assert gallery.calibration is None
    gallery.store_calibration(Calibration.load(world[0] / "calibration-unlabelled.json"))
    assert not gallery.calibration.labelled
    found = gallery.search_embeddings(queries, 5, targets)
    expected = answer_queries(calibration_evidence(queries, stored, labels), gallery.calibration, targets)
    assert [r.answer.state for r in found] == [a.state for a in expected]
    assert [r.answer.probability for r in found] == pytest.approx([a.probability for a in expected], abs=1e-6)
    assert found[0].notes[0] == "1 of 600 images have no label: answered as a collection without labels"
    gallery.relabel({item.id: item.label})
    assert gallery.calibration is None


def test_result_sets_are_shown_completely(shop):
    """The results that an answer speaks of hold every image of the set, duplicates or not, also beyond k."""
    gallery, stored, labels, queries, _ = shop
    twins = stored[:300]  # each a second time, with another id
    gallery.add_embedded(as_items(labels[:300].tolist(), first=1000), twins)
    targets = RiskTargets(max_missed=0.05)
    evidence = calibration_evidence(queries, Embeddings.cat([stored, twins]), torch.cat([labels, labels[:300]]))
    sizes = [a.results for a in answer_queries(evidence, gallery.calibration, targets)]
    assert len(set(sizes)) > 2
    everyone = Embeddings.cat([stored, twins])
    ids = [item.id for item in gallery.items()]
    for n, reply in enumerate(gallery.search_embeddings(queries, 2, targets)):
        order = (everyone.unit - queries.unit[n]).norm(dim=1).argsort(stable=True).tolist()
        shown = {id for r in reply.results[: reply.answer.results] for id in (r.id, *r.duplicates)}
        assert {ids[i] for i in order[: sizes[n]]} <= shown
        assert len(reply.results) == max(2, reply.answer.results)


def test_without_calibration(gallery):
    stored, labels = cloud(10, 12, noise=0.2)
    queries, _ = cloud(10, 5, noise=0.2)
    strange = Embeddings(-queries.semantic[:5], queries.uncertainty[:5])
    gallery.add_embedded(as_items(labels.tolist()), stored)
    assert gallery.calibration is None
    assert gallery.guarantees() == []
    for given_ in (queries, strange):
        expected = answer_queries(calibration_evidence(given_, stored, labels), profile=Profile.of(stored))
        for reply, wanted in zip(gallery.search_embeddings(given_), expected, strict=True):
            assert replace(reply.answer, novelty=None) == replace(wanted, novelty=None)
            assert reply.answer.novelty == pytest.approx(wanted.novelty)
            assert not reply.calibrated
            assert all(result.probability is None for result in reply.results)
            assert "not calibrated: nothing is promised" in reply.notes[0]
    assert {r.answer.state for r in gallery.search_embeddings(strange)} == {State.NOVEL}


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
    (reply,) = calibrated.search_embeddings(queries[0])
    assert len(reply.results) == 4
    assert reply.calibrated
    expected = answer_queries(calibration_evidence(queries[0], stored[:4], labels[:4]), calibrated.calibration)
    assert reply.answer.probability == pytest.approx(expected[0].probability, abs=1e-6)


def test_an_item_is_searched_as_if_it_were_not_in_the_gallery(shop):
    gallery, stored, labels, _, _ = shop
    items = as_items(labels.tolist())
    chosen = [3, 77]
    replies = gallery.search_items([items[n].id for n in chosen], 25)
    for n, reply in zip(chosen, replies, strict=True):
        distances = (stored.unit - stored.unit[n]).norm(dim=1)
        order = [i for i in distances.argsort(stable=True).tolist() if i != n][:25]
        assert [result.id for result in reply.results] == [items[i].id for i in order]
        rest = [i for i in range(len(stored)) if i != n]
        evidence = calibration_evidence(stored[[n]], stored[rest], labels[rest])
        (expected,) = answer_queries(evidence, gallery.calibration)
        assert (reply.answer.state, reply.answer.reason) == (expected.state, expected.reason)
        assert reply.answer.probability == pytest.approx(expected.probability, abs=1e-6)
    assert gallery.search_items([]) == []


def test_an_item_with_copies_or_alone(gallery):
    (only,) = items = as_items([1])
    places = torch.ones(5, DIMENSIONS)
    gallery.add_embedded(items, Embeddings.certain(places[:1]))
    (reply,) = gallery.search_items([only.id])
    assert (reply.answer.reason, reply.results) == ("the collection has no other image", ())
    gallery.add_embedded(as_items([1] * 4, first=1), Embeddings.certain(places[:4]))
    (reply,) = gallery.search_items([only.id], 2)  # the engine may list its copies before it
    found = [id for result in reply.results for id in (result.id, *result.duplicates)]
    assert sorted(found) == sorted(item.id for item in as_items([1] * 4, first=1))


@pytest.mark.parametrize("k", [0, -1, True, 2.0, "3"])
def test_k_is_a_whole_number(gallery, k):
    with pytest.raises(ValueError, match="k must be a whole number above 0"):
        gallery.search([picture(1)], k=k)


# near duplicates


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=14))
def test_near_duplicates_are_grouped_into_one_result(places):
    """Against the rule, item by item: into the first earlier group whose head is near or has the same bytes."""
    listed = [
        FoundItem(
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
    assert group_duplicates(listed) == expected


def crowd(gallery, copies, others):
    """``copies`` items in one place and ``others`` further away; a query at that place."""
    s = torch.zeros(copies + others, DIMENSIONS)
    s[:, 0] = 1.0
    s[copies:, 1] = torch.linspace(0.2, 2, others)
    gallery.add_embedded(as_items([n % 3 for n in range(len(s))]), Embeddings(s, torch.zeros_like(s)))
    query = torch.zeros(1, DIMENSIONS)
    query[0, 0] = 1.0
    return Embeddings(query, torch.zeros_like(query))


def test_k_counts_results_without_their_duplicates(gallery):
    (reply,) = gallery.search_embeddings(crowd(gallery, 15, 30), k=6)
    assert len(reply.results) == 6
    assert len(reply.results[0].duplicates) == 14
    assert all(result.duplicates == () for result in reply.results[1:])
    assert [r.distance for r in reply.results] == sorted(r.distance for r in reply.results)


def test_the_search_depth_is_limited_to_four_k(gallery, monkeypatch):
    query = crowd(gallery, 60, 5)
    asked = []
    search = gallery.engine.search
    monkeypatch.setattr(gallery.engine, "search", lambda q, k, *rest: asked.append((len(q), k)) or search(q, k, *rest))
    (reply,) = gallery.search_embeddings(query, k=8)
    assert len(reply.results) == 1
    assert len(reply.results[0].duplicates) == 31
    assert max(k for n, k in asked if n == 1) == 32


def test_equal_bytes_are_duplicates_at_any_distance(gallery):
    e, _ = cloud(1, 3)
    twin = hashlib.sha256(b"twin").hexdigest()
    gallery.add_embedded([Item("a", twin, id="a"), Item("b", hashlib.sha256(b"b").hexdigest(), id="b")], e[:2])
    gallery.add_embedded([Item("c", twin, id="c")], e[2])
    groups = {(r.id, *r.duplicates) for r in gallery.search_embeddings(e[0])[0].results}
    assert groups == {("a", "c"), ("b",)}
