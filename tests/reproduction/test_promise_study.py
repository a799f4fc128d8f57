"""The study of promises on made embeddings: draws against loops, kept and broken promises, tables, the page."""

import json
from dataclasses import replace

import pytest
import torch
from scipy.stats import binom

from idml import Embeddings
from idml.calibration import risk_control
from idml.calibration.calibrate import CalibrationQueries, fit_queries
from idml.calibration.open_set import QueryPool
from idml.cli import main
from idml.data.sampling import random_stream
from idml.evaluation.knn import nearest
from idml.progress import silent
from idml.reproduction import promise_draws, promise_fresh, promise_study
from idml.reproduction.front_page import PROMISES
from idml.reproduction.promise_draws import Curve, Population, draw, measure_draw, mixture, take_queries
from idml.reproduction.promise_fresh import (
    Everything,
    assign_parts,
    grow,
    keep_out,
    leave_out_copies,
    measure_fresh,
    measure_growth,
    rehearse,
)
from idml.reproduction.promise_study import Cells, draw_many
from idml.reproduction.promise_tables import render_promises
from idml.search.gallery_calibration import search_known_and_unknown


def made(classes=60, each=8, seed=0):
    """Classes in pairs, near each other to a different degree: some unknown classes are matched again and again."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes // 2, 16, generator=g).repeat_interleave(2, 0)
    apart = 1.5 * torch.rand(classes, 1, generator=g)
    labels = torch.arange(classes).repeat_interleave(each)
    own = centres + apart * torch.randn(classes, 16, generator=g)
    semantic = own[labels] + 0.6 * torch.randn(len(labels), 16, generator=g)
    return Embeddings(semantic, torch.zeros(len(labels), 1)), labels


@pytest.fixture(scope="module")
def population():
    embeddings, labels = made()
    return Population.of(CalibrationQueries(search_known_and_unknown(QueryPool(embeddings, labels)), True, ""))


def test_each_image_is_a_known_and_an_unknown_query(population):
    queries = population.found.queries
    assert (len(population), population.classes) == (480, 60)
    assert bool(queries.known[population.known].all())
    assert not bool(queries.known[population.unknown].any())
    assert torch.equal(queries.labels[population.known], queries.labels[population.unknown])
    level = queries.evidence.level  # of the query itself: the same for both
    assert torch.equal(level[population.known], level[population.unknown])


def test_draws_are_images_or_whole_classes(population):
    one = draw(population, "image", 300, random_stream("x"))
    assert len(one.images) == 300
    assert set(one.fresh_known.nonzero().flatten().tolist()) == set(range(480)) - set(one.images.tolist())
    assert torch.equal(one.groups, population.labels[one.images])
    by_class = draw(population, "class", 10**9, random_stream("x"))
    assert len(by_class.groups.unique()) == 60  # a class drawn twice is two classes
    for group in by_class.groups.unique():
        assert len(population.labels[by_class.images[by_class.groups == group]].unique()) == 1
    drawn = population.labels[by_class.images].unique()
    assert len(drawn) < 60
    assert bool((population.labels[by_class.fresh_unknown][:, None] != drawn).all())
    assert bool(torch.isin(population.labels[by_class.fresh_known], drawn).all())
    times = population.labels[by_class.images].bincount(minlength=60) // 8
    assert torch.equal(by_class.weights, times[population.labels].float())
    assert len(draw(population, "class", 100, random_stream("x")).images) == 100


def test_curves_against_loops():
    g = torch.Generator().manual_seed(1)
    p = torch.rand(60, generator=g, dtype=torch.float64).mul(10).round().div(10)  # with ties
    known, wrong = torch.arange(60) < 40, torch.rand(60, generator=g) < 0.4
    one, other = mixture(0.3, known.float(), (~known).float())
    assert float(one.sum()) == pytest.approx(0.7)
    assert float(other.sum()) == pytest.approx(0.3)
    weights = (one + other).tolist()
    curve, best = Curve.of(p, wrong.double(), one + other), dict.fromkeys((0.2, 0.4, 0.6), 0.0)
    for threshold in sorted(set(p.tolist())):
        inside = [i for i in range(60) if p[i] >= threshold]
        answered, bad = sum(weights[i] for i in inside), sum(weights[i] for i in inside if wrong[i])
        assert curve.at(threshold) == pytest.approx((answered, bad))
        for rate in best:
            if bad <= rate * answered:
                best[rate] = max(best[rate], answered)
    assert {rate: curve.best_coverage(rate) for rate in best} == pytest.approx(best)
    assert curve.at(None) == (0.0, 0.0)


def test_a_draw_is_measured_as_loops_do(population):
    drawn = draw(population, "class", 10**9, random_stream("y"))
    counts, classes = measure_draw(population, drawn, 0.25, 3)
    assert classes == 30
    calibration = fit_queries(take_queries(population, drawn), unknown=0.25, seed=3)
    queries = population.found.queries
    p = calibration.probability(queries.evidence).tolist()
    threshold = calibration.find_guarantee(0.2).threshold
    known = [(drawn.weights[i].item(), int(row)) for i, row in enumerate(population.known)]
    total = sum(w for w, _ in known)
    matched = [(w, row) for w, row in known if p[row] >= threshold]
    answered = 0.75 * sum(w for w, _ in matched) / total
    bad = 0.75 * sum(w for w, row in matched if not queries.correct[row]) / total
    false = 0.25 * sum(p[int(row)] >= threshold for row in population.unknown) / len(population)
    assert counts["0.2"]["coverage"] == pytest.approx(answered + false)
    assert counts["0.2"]["broken"] == float(bad + false > 0.2 * (answered + false))
    assert counts["0.2"]["coverage"] <= counts["0.2"]["coverage_oracle"] or counts["0.2"]["broken"]


def test_promises_are_kept_and_a_broken_bound_is_noticed(population, monkeypatch):
    """A bound that counts images, or one that promises what it saw, breaks more often than chance allows."""
    found = draw_many(population, "class", 0.5, 40, silent)["rates"]
    for rate in ("0.1", "0.2"):
        assert binom.sf(found[rate]["broken"] - 1, 40, 0.12) > 0.01, rate  # 30 counted classes: about 12 %
        assert found[rate]["coverage"] <= found[rate]["coverage_by_image"] + 1e-9
    assert found["0.2"]["broken_by_image"] > found["0.2"]["broken"]
    plain = risk_control.clustered_p_values
    monkeypatch.setattr(
        risk_control, "clustered_p_values", lambda moments, rate: [x / 10 for x in plain(moments, rate)]
    )
    broken = draw_many(population, "class", 0.5, 40, silent)["rates"]
    assert binom.sf(broken["0.2"]["broken"] - 1, 40, 0.12) < 0.01


def test_finished_cells_are_kept_and_shown(population, tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    page, out = tmp_path / "docs" / "calibration.md", tmp_path / "results"
    page.write_text("before\n<!-- promises -->\nold\n<!-- end of promises -->\nafter\n")
    cells = Cells(out / PROMISES)
    monkeypatch.setattr(promise_study, "load_population", lambda *_: population)
    promise_study.measure_draws(cells, "made pretrained", [None], 2, silent, silent)
    assert len(cells.read()) == 6
    before = json.dumps(cells.read())
    monkeypatch.setattr(promise_study, "load_population", None)
    promise_study.measure_draws(cells, "made pretrained", [None], 2, silent, silent)  # nothing is missing
    assert json.dumps(cells.read()) == before
    shown = promise_study.study_promises(None, "pretrained", out, report=silent, note=silent)["table"]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert shown in text
    assert "480 images of 60 classes, 30 of them counted" in shown
    assert shown.count("of 2 |") == 18
    assert main(["reproduce", "promises", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{shown}\n"  # line by line
    assert main(["reproduce", "u", "--model", "trained", "--out", str(out)]) == 2
    assert "--model goes with promises, not with u" in capsys.readouterr().err


def test_goals_that_are_missed_are_counted():
    total = {"refused": 0.0, "broken": 50.0, "coverage": 20.0, "coverage_by_image": 22.0, "coverage_oracle": 40.0}
    total |= {"fresh_answered": 20.0, "fresh_wrong": 2.0, "recognised": 10.0, "rejected": 5.0}
    cell = {"draws": 200, "images": 5, "classes": 400, "counted_classes": 200.0, "right": 0.5}
    rates = {f"{rate:g}": total for rate in promise_draws.RATES}
    shown = render_promises({"draws cub pretrained by class 0.25": {**cell, "rates": rates}})
    assert "in at most 50 of 200 draws of a row (goal 29), 25.0 % on average" in shown
    assert "at least 0.50 × that of an oracle (below the goal in 2 of 2 rows)" in shown
    assert "at least 0.91 × that of a bound by image (below the goal in 0 of 2 rows)" in shown


def test_copies_are_drawn_by_picture(population):
    copies = replace(population, found=replace(population.found, known_by_image=False, labelled=False))
    drawn = draw(copies, "class", 10**9, random_stream("z"), classes_drawn=20)
    assert len(drawn.groups.unique()) == 20
    assert float(drawn.weights.min()) == 1
    assert torch.equal(drawn.fresh_known, drawn.fresh_unknown)


def test_galleries_that_keep_images_out_are_searched_as_if_they_were_made(monkeypatch):
    """Lists of one search of everything, restricted, give the queries of a search in each gallery."""
    embeddings, labels = made(20, 6)
    learned, nothing = torch.zeros(len(labels), dtype=torch.bool), torch.zeros_like(labels)
    monkeypatch.setattr(promise_fresh, "_DEPTH", 30)  # some lists are too short and searched again
    everything = Everything(labels, learned, nothing, [(embeddings, nearest(embeddings, 30))])
    out = keep_out(labels, learned, random_stream("k"))
    outside = [label for label in labels.unique().tolist() if bool(out[labels == label].all())]
    assert len(outside) == 4
    rest = ~torch.isin(labels, torch.tensor(outside))
    assert 5 < int((out & rest).sum()) < 40
    rows = (~out).nonzero().flatten()
    pool = QueryPool(embeddings[rows], labels[rows])
    expected = search_known_and_unknown(pool)
    found = everything.collect(~out).queries
    assert_same_queries(found, expected)
    asked = everything.search(out, ~out)
    assert_same_queries(asked, QueryPool(embeddings[out], labels[out], embeddings[rows], labels[rows]).search())
    assert set(asked.labels[~asked.known].tolist()) == set(outside)


def assert_same_queries(found, expected):
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.known, expected.known)
    assert torch.equal(found.correct, expected.correct)
    for name, scores in expected.evidence.scores.items():
        torch.testing.assert_close(found.evidence.scores[name], scores, msg=name)


def test_learned_images_stay_and_each_is_asked_by_the_heads_that_fit():
    embeddings, labels = made(20, 6)
    learned = (labels < 8) & (torch.arange(len(labels)) % 6 < 4)
    asked = torch.where(labels < 8, 1 + labels % 2, 0)
    other = [made(20, 6, seed=seed)[0] for seed in (1, 2)]
    views = [embeddings, *other]
    everything = Everything(labels, learned, asked, [(view, nearest(view, 256)) for view in views])
    out = keep_out(labels, learned, random_stream("k"))
    assert not bool((out & learned).any())
    assert bool(out[(labels < 8) & ~learned].all())
    assert all(bool(out[labels == label].any()) != bool(out[labels == label].all()) for label in range(8))
    queries = everything.collect(~out).queries
    inside = (~out).nonzero().flatten()
    for is_known in (True, False):
        found, expected = [], []
        for view in asked[inside].unique().tolist():
            rows = (~out & (asked == view)).nonzero().flatten()
            place = torch.searchsorted(inside, rows)
            e = views[view]
            pool = QueryPool(e[rows], labels[rows], e[inside], labels[inside], rows=place)
            alone = pool.search() if is_known else pool.search_without_own()
            expected += alone.evidence.nearest[alone.known == is_known].tolist()
        found = queries.evidence.nearest[queries.known == is_known].tolist()
        assert sorted(found) == pytest.approx(sorted(expected))


def test_a_copy_of_a_learned_image_makes_no_class_a_learned_one():
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    collection = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 0, 0]).bool()
    learned = torch.tensor([1, 1, 0, 1, 0, 1, 0, 0, 1, 0]).bool()  # 0 but for one; a copy in 1, in 2, and kept out
    assert leave_out_copies(labels, learned, collection).nonzero().flatten().tolist() == [0, 1]


def test_a_rehearsal_takes_queries_away_from_the_calibration():
    embeddings, labels = made(40, 8)
    found = CalibrationQueries(search_known_and_unknown(QueryPool(embeddings, labels)), True, "")
    left, asked = rehearse(found, random_stream("r"))
    outside = asked.labels[~asked.known].unique()
    assert len(outside) == 10
    assert int((~asked.known).sum()) == 80
    assert not bool(torch.isin(left.queries.labels, outside).any())
    assert len(left.queries) + int(asked.known[~torch.isin(asked.labels, outside)].sum()) == 2 * 30 * 8
    assert 30 < int(asked.known.sum()) < 100


def test_fresh_images_are_as_wrong_as_rehearsed_ones_unless_they_differ():
    """Unknown classes like those of the gallery are rehearsed well; ones that lie on its classes are noticed."""

    def compare(semantic, learned):
        embeddings, none = Embeddings(semantic, torch.zeros(len(labels), 1)), torch.zeros_like(labels)
        cell = measure_fresh([Everything(labels, learned, none, [(embeddings, nearest(embeddings, 256))])], 10, silent)
        assert (cell["galleries"], cell["classes"]) == (10, 16)
        assert "16 unknown classes" in render_promises({"fresh made pretrained": cell})
        rates = cell["shares"]["0.5"]
        fresh, rehearsed = (rates[kind]["0.2"] for kind in promise_fresh.ASKED[1:])
        return fresh["wrong"] / fresh["answered"] - rehearsed["wrong"] / rehearsed["answered"]

    made_embeddings, labels = made(80, 8, seed=3)
    semantic = made_embeddings.semantic
    assert abs(compare(semantic, labels < 0)) < 0.1
    same = semantic.clone()
    same[labels >= 64] = semantic[labels < 16]  # the classes kept out look like classes of the gallery
    assert compare(same, (labels < 64) & (torch.arange(len(labels)) % 8 < 6)) > 0.15


def test_galleries_are_divided_among_the_trainings():
    embeddings, labels = made(40, 8)
    other, none = made(40, 8, seed=1)[0], torch.zeros_like(labels)
    one, two = (Everything(labels, labels < 0, none, [(e, nearest(e, 256))]) for e in (embeddings, other))

    def wrong(searched, galleries):
        cell = measure_fresh(searched, galleries, silent)
        assert cell["trainings"] == len(searched)
        return cell["shares"]["0.5"]["fresh"]["0.2"]["wrong"]

    second = wrong([two], 2) - wrong([two], 1)
    assert wrong([one, two], 2) == pytest.approx(wrong([one], 1) + second)
    assert second != pytest.approx(wrong([one], 2) - wrong([one], 1))


def test_each_training_does_without_other_images_of_every_class():
    labels = torch.arange(3).repeat(10)
    parts = assign_parts(labels, random_stream("p"))
    for label in range(3):
        assert parts[labels == label].bincount().tolist() == [2] * promise_fresh.TRAININGS


def test_galleries_grow_by_images_or_by_whole_classes():
    labels = torch.arange(40).repeat_interleave(5)
    inside = labels < 31
    half, larger, whole = grow(torch.arange(200), inside, random_stream("grow"))
    assert (int(half.sum()), int(larger.sum()), int(whole.sum())) == (78, 93, 155)  # never more than a fifth larger
    by_class = grow(labels, inside, random_stream("grow"))
    assert [len(labels[part].unique()) for part in by_class] == [16, 19, 31]
    assert [int(part.sum()) for part in by_class] == [80, 95, 155]
    for parts in ((half, larger, whole), by_class):
        assert bool((parts[0] <= parts[1]).all())
        assert bool((parts[1] <= parts[2]).all())
        assert torch.equal(parts[2], inside)


def test_a_gallery_that_doubles_says_so_and_is_mended_by_a_calibration():
    embeddings, labels = made(80, 8, seed=3)
    view = (embeddings, nearest(embeddings, 256))
    everything = Everything(labels, labels < 0, torch.zeros_like(labels), [view])
    cell = measure_growth([everything], 4, 0.25, silent)
    drifted = {kind: [cell[kind][stage]["drifted"] for stage in promise_fresh.STAGES] for kind in promise_fresh.KINDS}
    assert drifted["images"][0] == drifted["classes"][0] == 0
    assert drifted["images"][2] == drifted["classes"][2] == 4  # twice as large: all say so
    assert drifted["images"][3] == drifted["classes"][3] == 0
    again = [cell[kind]["calibrated again"]["rates"] for kind in promise_fresh.KINDS]
    assert again[0] == again[1]  # the whole gallery, however it grew
    stale, mended = (cell["classes"][stage]["rates"]["0.2"] for stage in promise_fresh.STAGES[2:])
    assert stale != mended
    assert "4 galleries" in render_promises({"growth made pretrained": cell})
