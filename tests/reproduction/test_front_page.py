"""The tables of the README."""

import json

import pytest

from idml.reproduction.front_page import claim_table, expectation_table, replace_between_marks, write_front_page

CELL = {
    "draws": 200, "images": 7585, "classes": 160, "right": 0.571,
    "rates": {
        "0.05": {
            "refused": 40.0, "coverage": 60.0, "fresh_answered": 50.0, "fresh_wrong": 2.0, "recognised": 20.0,
            "rejected": 8.0,
        },
    },
}  # fmt: skip
HEADER = ["the paper says", "gain in the paper", "gain here", "verdict", "where"]
CLAIMS = [
    ["IDML improves ProxyAnchor", "+1.7", "+0.1", "not confirmed", "birds"],
    ["IDML improves ProxyAnchor", "+3.2", "+1.0", "confirmed", "cars"],
    ["Mixup improves ProxyAnchor", "+0.8", "+0.4", "not confirmed", "birds"],
    ["τ = 5 is best", "", "", "not run yet", "birds"],
]


def test_expectations_are_means_over_the_draws(tmp_path):
    sure = {**CELL, "rates": {"0.05": {**CELL["rates"]["0.05"], "coverage": 120.0}}}
    shares = {"0.25": {"rates": CELL["rates"]}, "0": {"rates": sure["rates"]}}
    cells = {
        "draws cub pretrained by class 0.25": CELL,
        "draws cub pretrained by class 0": sure,
        "unlabelled cub pretrained": {"draws": 200, "pictures": 1500, "shares": shares},
    }
    (tmp_path / "promises.json").write_text(json.dumps(cells))
    *_, labelled, unlabelled = expectation_table(tmp_path).splitlines()
    shown = "| 7,585 / 160 | pretrained, no training | 57 % | 60 % | 30 % | 4 % | 20 % | 10 % |"
    assert labelled == f"| CUB-200-2011: birds {shown}"
    assert unlabelled.endswith("| 1,500 / – | pretrained, no training | – | 60 % | 30 % | 4 % | 20 % | 10 % |")


@pytest.mark.parametrize(("answered", "shown"), [(0.0, "0 %"), (0.1, "under 1 %")])
def test_few_answers_have_no_share_of_wrong_ones(tmp_path, answered, shown):
    sums = {**CELL["rates"]["0.05"], "coverage": answered, "fresh_answered": answered, "fresh_wrong": 0.2 * answered}
    cell = {**CELL, "rates": {"0.05": sums}}
    (tmp_path / "promises.json").write_text(json.dumps({"draws cars trained by class 0.25": cell}))
    assert f"| – | {shown} | too few | 20 % | 10 % |" in expectation_table(tmp_path)


def test_without_rows_the_table_says_so(tmp_path):
    assert "not measured yet" in expectation_table(tmp_path)


def test_claims_stand_in_a_table_for_each_place_and_those_that_are_not_decided_below():
    text = claim_table(HEADER, CLAIMS)
    birds, cars = text.partition("Not decided")[0].split("Measured on cars:\n\n")
    assert birds.startswith("Measured on birds:\n\n| the paper says | gain in the paper | gain here | verdict |\n")
    assert birds.count("| not confirmed |") == 2
    assert "| IDML improves ProxyAnchor | +3.2 | +1.0 | confirmed |" in cars
    assert text.endswith("Not decided, because not run yet:\n\n- birds: τ = 5 is best")
    assert claim_table(HEADER, CLAIMS[3:]).startswith("Not decided, because not run yet")


def test_the_page_is_written_between_its_marks(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(
        "a\n<!-- expectations -->old<!-- end of expectations -->\n<!-- claims -->old<!-- end of claims -->\nz\n"
    )
    write_front_page(page, "new", tmp_path)
    text = page.read_text()
    assert text.startswith("a\n")
    assert text.endswith("\nz\n")
    assert "old" not in text
    assert "<!-- claims -->\nnew\n<!-- end of claims -->" in text
    write_front_page(page, "new", tmp_path)
    assert page.read_text() == text


def test_the_readme_of_another_project_is_left_alone(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("mine")
    write_front_page(page, "new", tmp_path)
    write_front_page(tmp_path / "absent.md", "new", tmp_path)
    assert page.read_text() == "mine"
    with pytest.raises(ValueError, match="lacks the marks"):
        replace_between_marks("mine", "claims", "")
