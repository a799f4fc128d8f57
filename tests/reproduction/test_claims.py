"""The rule that decides claims, case by case."""

import pytest

from idml.reproduction.arms import Arm
from idml.reproduction.claims import (
    CANNOT_TELL,
    CONFIRMED,
    MISSING,
    NOT_CONFIRMED,
    ErrorsRanked,
    Found,
    Gain,
    LevelFalls,
    MixedAbove,
)
from idml.reproduction.drawing import plot_of
from idml.reproduction.protocol import Course
from idml.reproduction.table import Table

IDML, PLAIN = ("proxy_anchor", "idml"), ("proxy_anchor", "plain")


def runs(*shares, classes=40, **more):
    """A run for each share of right answers, spread evenly over the classes."""
    made = {}
    for seed, share in enumerate(shares):
        hits = [int(share * (c + 1) * 10) - int(share * c * 10) for c in range(classes)]
        own = {"queries": [10] * classes, "hits": hits, "map@r": hits}
        made[seed] = {"classes": own, "selected": {"recall@1": share, "map@r": share}, **more}
    return made


def found(raw=0.1, data="cub", refused="", **arms):
    courses = {}
    for name, own in arms.items():
        courses["proxy_anchor", name] = Course(Arm("proxy_anchor", name, {}), 1e-3, own, (), refused if not own else "")
    return Found(data, courses, None if raw is None else runs(raw)[0])


@pytest.mark.parametrize(
    ("idml", "plain", "raw", "weight", "word"),
    [
        ((0.55, 0.56, 0.57), (0.50, 0.51, 0.52), 0.1, 0.8, CONFIRMED),
        ((0.55, 0.56, 0.57), (0.50, 0.51, 0.52), 0.1, 0.99, NOT_CONFIRMED),  # plain in disguise
        ((0.55, 0.56, 0.57), (0.50, 0.51, 0.52), 0.6, 0.8, NOT_CONFIRMED),  # the raw features are better still
        ((0.50, 0.51, 0.52), (0.55, 0.56, 0.57), 0.1, 0.8, NOT_CONFIRMED),
        ((0.50, 0.51, 0.52), (0.50, 0.51, 0.52), 0.1, 0.8, NOT_CONFIRMED),  # no difference, and that for sure
        ((0.40, 0.60, 0.65), (0.50, 0.51, 0.52), 0.1, 0.8, CANNOT_TELL),  # the paper's +1.7 may hide in the noise
        ((0.55,), (0.50,), 0.1, 0.8, CANNOT_TELL),  # one seed
    ],
)
def test_a_gain(idml, plain, raw, weight, word):
    verdict = Gain("", IDML).judge(found(raw, idml=runs(*idml, weight=weight), plain=runs(*plain)))
    assert verdict.word == word
    if len(idml) > 1:
        assert "in the paper +1.7" in verdict.reason


def test_a_gain_over_a_named_rival_and_the_claim_of_none():
    same = found(idml=runs(0.5, 0.51), mixup=runs(0.5, 0.51))
    assert Gain("", IDML, ("proxy_anchor", "mixup")).judge(same).word == NOT_CONFIRMED
    assert Gain("", IDML, ("proxy_anchor", "mixup"), wanted=False).judge(same).word == CONFIRMED
    above = found(idml=runs(0.6, 0.61, weight=0.5), mixup=runs(0.5, 0.51))
    assert Gain("", IDML, ("proxy_anchor", "mixup"), wanted=False).judge(above).word == NOT_CONFIRMED
    assert Gain("", IDML, ("proxy_anchor", "mixup")).judge(above).word == CONFIRMED
    assert "over mixup" in Gain("", IDML, ("proxy_anchor", "mixup")).judge(above).reason


def test_what_is_missing_is_said_to_be():
    for claim in (Gain("", IDML), MixedAbove("", IDML), LevelFalls("", IDML), ErrorsRanked("", IDML)):
        assert claim.judge(found(idml={}, plain=runs(0.5))).word == MISSING
    verdict = Gain("", IDML).judge(found(idml={}, plain=runs(0.5), refused="unknown method"))
    assert verdict.reason == "idml: unknown method"
    assert Gain("", IDML).judge(found(None, idml=runs(0.5, 0.6), plain=runs(0.5, 0.6))).word == MISSING
    assert Gain("", IDML).judge(found(idml=runs(0.5, 0.6), plain={})).word == MISSING


def test_what_u_tells():
    def judged(claim, **figures):
        own = {s: {key: values[s] for key, values in figures.items()} for s in range(3)}
        return claim.judge(found(idml=own)).word

    assert judged(MixedAbove("", IDML), auroc_mixed=(0.7, 0.72, 0.71)) == CONFIRMED
    assert judged(MixedAbove("", IDML), auroc_mixed=(0.3, 0.9, 0.6)) == CANNOT_TELL
    assert judged(MixedAbove("", IDML), auroc_mixed=(0.4, 0.45, 0.5)) == NOT_CONFIRMED
    training = MixedAbove("", IDML, training=True)
    assert judged(training, level_clean=(1, 2, 3), level_mixed=(1.5, 3.1, 4.4)) == CONFIRMED
    assert judged(training, level_clean=(1, 2, 3), level_mixed=(0.5, 1, 1)) == NOT_CONFIRMED
    falls = tuple({"level_clean": [2, 1 + s / 10], "level_mixed": [3, 2 + s / 10]} for s in range(3))
    rises = tuple({"level_clean": [2, 1], "level_mixed": [3, 4 + s / 10]} for s in range(3))
    assert judged(LevelFalls("", IDML), trend=falls) == CONFIRMED
    assert judged(LevelFalls("", IDML), trend=rises) == NOT_CONFIRMED
    assert judged(ErrorsRanked("", IDML), r_auroc=(0.70, 0.71, 0.72)) == CONFIRMED
    assert judged(ErrorsRanked("", IDML), r_auroc=(0.60, 0.61, 0.62)) == NOT_CONFIRMED


@pytest.mark.parametrize(("data", "diamonds"), [("cub", 1), ("glyphs", 0)])
def test_the_drawing_of_gains_has_the_papers_beside_ours(data, diamonds):
    told = found(data=data, idml=runs(0.55, 0.56), plain=runs(0.50, 0.51))
    figure = plot_of("table1", Table("", tuple(at.arm for at in told.courses.values())), told)
    (axes,) = figure.axes
    marked = [line for line in axes.lines if line.get_marker() == "D"]
    assert len(marked) == diamonds
    assert all(line.get_xdata() == pytest.approx([1.7]) for line in marked)  # 70.7 over 69.0
    assert ("the paper's" in axes.get_xlabel()) == bool(diamonds)
    (own,) = [line for line in axes.lines if line.get_marker() == "o"]
    assert own.get_xdata() == pytest.approx([5.0])
