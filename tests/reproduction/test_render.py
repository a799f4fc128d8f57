"""The tables in the docs are those of the stored rows."""

import re
from pathlib import Path

import pytest

from idml.reproduction.front_page import PROMISES, expectation_table, replace_between_marks
from idml.reproduction.promise_study import MARK, Cells
from idml.reproduction.promise_tables import render_promises
from idml.reproduction.regimes import regime_for
from idml.reproduction.render import markdown_table
from idml.reproduction.results_page import describe_claims, results_markdown, stored_results
from idml.reproduction.runner import Store
from idml.reproduction.stored_results import StoredRows
from idml.reproduction.studies import METHODS, STUDIES
from idml.reproduction.version1_page import version1_markdown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def test_the_pages_of_results_are_rendered_from_the_stored_rows():
    texts = {"results": results_markdown(stored_results(RESULTS), RESULTS), "results-v1": version1_markdown(RESULTS)}
    for name, text in texts.items():
        assert (ROOT / "docs" / f"{name}.md").read_text() == text, "run `idml reproduce results`"
    assert "old weight" in texts["results-v1"]
    assert len(texts["results"].partition("## How to read")[0]) < 6000  # what a visitor reads first


def study_tables(study, data, seeds):
    """The tables of a study of version 1 of the protocol: version 2 did not make these studies again."""
    order = ("raw", *METHODS)
    stored = StoredRows(RESULTS / f"{data}-{regime_for(data).name}.jsonl")
    rows = [row for row in stored if row["version"] == 1 and row["name"].startswith(f"{study}-")]
    rows = [row for row in rows if row["options"].get("seed", 0) < seeds]
    rows.sort(key=lambda row: (row["options"].get("loss", ""), order.index(row["options"].get("method", "raw"))))
    return STUDIES[study].tables(rows)


@pytest.mark.parametrize(
    ("page", "study", "data", "seeds", "names"),
    [
        ("audit_measured", "audit", "cub", 3, ["table"]),
        ("audit_measured", "audit", "glyphs", 3, ["table", "ambiguous"]),
    ],
)
def test_tables_of_the_studies_in_the_docs_are_those_of_the_stored_rows(page, study, data, seeds, names):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for table in study_tables(study, data, seeds):
        if table.name in names:
            assert markdown_table(table.header, table.rows) in text
    assert "version 1" in text


def test_the_tables_of_promises_are_rendered_from_the_stored_cells():
    text = (ROOT / "docs" / "calibration.md").read_text()
    shown = render_promises(Cells(RESULTS / PROMISES).read())
    assert replace_between_marks(text, MARK, shown) == text, "run `idml reproduce promises`"


def test_every_stored_row_says_its_version_and_the_commit_that_made_it():
    for path in RESULTS.glob("*.jsonl"):
        data, regime = path.stem.rsplit("-", 1)
        for row in Store(RESULTS, data, regime_for(data, name=regime)).rows:
            assert row["version"] in (1, 2)
            assert re.fullmatch(r"[0-9a-f]{7,}", row["commit"]), row["name"]
            assert row["options"].keys() >= {"loss", "method", "lr", "seed"} or "raw" in row["name"]


def test_the_summary_of_uncertainty_scores_is_that_of_the_study():
    text = (ROOT / "docs" / "uncertainty.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    places = [
        ("cub", "multi_similarity"),
        ("cub", "proxy_anchor"),
        ("cars", "multi_similarity"),
        ("cars", "proxy_anchor"),
    ]
    stored = {}
    for data in ("cub", "cars"):
        (table,) = (table for table in study_tables("uncertainty", data, 3) if table.name == "r_auroc")
        stored |= {(data, loss, method, score): clean for loss, method, _, score, clean, *_ in table.rows}
    for score, method, *cells in lines[2:]:
        assert cells == [stored[*place, method, score].removesuffix(" *") for place in places]
    assert len(lines) == 13


def test_figures_of_uncertainty_in_the_prose_are_stored():
    text = (ROOT / "docs" / "uncertainty.md").read_text()
    (table,) = (table for table in study_tables("uncertainty", "cub", 3) if table.name == "detects")
    column = {name.split()[0]: i for i, name in enumerate(table.header)}
    found = {(row[0], row[1]): row for row in table.rows if row[column["score"]] == "level"}

    def figures(method, *views):
        row = found["proxy_anchor", method]
        return [row[column[view]].split()[0] for view in views]

    assert f"(AUROC {figures('idml', 'mixed')[0]}; untrained {figures('plain', 'mixed')[0]})" in text
    trained, untrained = (sorted(figures(method, "low_resolution", "blur")) for method in ("ism", "plain"))
    assert f"({trained[0]} to {trained[1]}; untrained {untrained[0]} to {untrained[1]})" in text

    old = (ROOT / "docs" / "results-v1.md").read_text()
    taught = re.findall(r"\| Multi-Sim \| plain \| teach_u ranking, u_hidden 64 .* \| (\S+) \|", old)
    assert f"{taught[1]} on CUB and {taught[0]} on Cars196" in text
    store = Store(RESULTS, "cub", regime_for("cub", name="full"))
    rows = [store.rows.get(1, f"evaluate-multi_similarity-{method}-lr=0.0002-seed=0") for method in ("plain", "idml")]
    right = [f"{100 * row['accuracy']['clean']['value']:.1f}" for row in rows]
    assert f"(R@1 {right[0]} plain, {right[1]} IDML)" in text
    scores = {
        name: [f"{row['uncertainty'][name]['clean']['r_auroc']:.2f}" for row in rows]
        for name in ("level", "predicted_error", "disagreement")
    }
    assert f"‖u‖ {scores['level'][0]} untrained and {scores['level'][1]} trained" in text
    assert scores["predicted_error"] == ["0.63", "0.63"]
    assert f"the disagreement {scores['disagreement'][0]} and {scores['disagreement'][1]}" in text


def test_the_tables_of_the_readme_are_those_of_the_stored_rows():
    text = (ROOT / "README.md").read_text()
    results = stored_results(RESULTS)
    for name, table in (
        ("expectations", expectation_table(RESULTS)),
        ("claims", describe_claims(results)),
    ):
        assert replace_between_marks(text, name, table) == text, "run `idml reproduce results`"
