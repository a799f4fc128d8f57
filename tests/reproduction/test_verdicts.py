"""The claims as a table over data sets."""

from idml.report_html import table
from idml.reproduction.claims import CANNOT_TELL, CONFIRMED, NOT_CONFIRMED, Verdict
from idml.reproduction.verdicts import by_place, coloured, counted

TOLD = [
    ("a helps", "cub, frozen", Verdict(CONFIRMED, "+1")),
    ("b helps", "cub, frozen", Verdict(NOT_CONFIRMED, "-1")),
    ("a helps", "glyphs, scratch", Verdict(CANNOT_TELL, "one seed")),
]


def test_a_row_for_each_claim_and_a_column_for_each_place():
    header, rows = by_place(TOLD)
    assert header == ["claim", "cub, frozen", "glyphs, scratch"]
    assert rows == [
        ["a helps", "confirmed: +1", "cannot tell at this scale: one seed"],
        ["b helps", "not confirmed: -1", ""],
    ]


def test_counts_name_only_what_occurs():
    assert counted(v for *_, v in TOLD) == "1 confirmed, 1 not confirmed, 1 cannot tell at this scale"


def test_every_verdict_has_its_colour():
    text = coloured(table(*by_place(TOLD)))
    for kind, word in (("confirmed", CONFIRMED), ("not", NOT_CONFIRMED), ("cannot", CANNOT_TELL)):
        assert f"<b class='{kind}'>{word}</b><br>" in text
