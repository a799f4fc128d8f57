"""The tables in the docs are those of the stored rows."""

import re
from pathlib import Path

import pytest

from idml.reproduction.guarantee_study import GUARANTEE
from idml.reproduction.regimes import regime_for
from idml.reproduction.render import markdown_table
from idml.reproduction.results_page import results_markdown, stored_results
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


@pytest.mark.parametrize(
    ("page", "study", "data", "seeds", "names"),
    [
        ("uncertainty", "uncertainty", "cub", 3, ["r_auroc"]),
        ("uncertainty", "uncertainty", "cars", 3, ["r_auroc"]),
        ("audit", "audit", "cub", 3, ["table"]),
        ("audit", "audit", "glyphs", 3, ["table", "ambiguous"]),
        ("calibration", "guarantee", "cub", 1, ["table", "against"]),
        ("calibration", "guarantee", "cars", 1, ["table", "against"]),
        ("calibration", "guarantee", "glyphs", 1, ["table", "against"]),
    ],
)
def test_tables_of_the_studies_in_the_docs_are_those_of_the_stored_rows(page, study, data, seeds, names):
    """Of version 1 of the protocol: version 2 did not make these studies again."""
    order = ("raw", *METHODS)
    stored = StoredRows(RESULTS / f"{data}-{regime_for(data).name}.jsonl")
    rows = [row for row in stored if row["version"] == 1 and row["name"].startswith(f"{study}-")]
    rows = [row for row in rows if row["options"].get("seed", 0) < seeds]
    rows.sort(key=lambda row: (row["options"].get("loss", ""), order.index(row["options"].get("method", "raw"))))
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for table in {**STUDIES, "guarantee": GUARANTEE}[study].tables(rows):
        if table.name in names:
            assert markdown_table(table.header, table.rows) in text
    assert "version 1" in text


def test_every_stored_row_says_its_version_and_the_commit_that_made_it():
    for path in RESULTS.glob("*.jsonl"):
        data, regime = path.stem.rsplit("-", 1)
        for row in Store(RESULTS, data, regime_for(data, name=regime)).rows:
            assert row["version"] in (1, 2)
            assert re.fullmatch(r"[0-9a-f]{7,}", row["commit"]), row["name"]
            assert row["options"].keys() >= {"loss", "method", "lr", "seed"} or "raw" in row["name"]


def test_the_fine_tuned_table_of_the_docs_is_that_of_the_stored_evaluations():
    text = (ROOT / "docs" / "uncertainty.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"\| (plain|idml) \| (query|gallery)? ?\|", line)]
    store = Store(RESULTS, "cub", regime_for("cub", name="full"))
    shown = 0
    for method in ("plain", "idml"):
        row = store.rows.get(1, f"evaluate-multi_similarity-{method}-lr=0.0002-seed=0")
        right = " | ".join(f"{100 * view['value']:.1f} %" for view in row["accuracy"].values())
        assert f"| {method} | | right answers | {right} |" in lines
        for score, views in row["uncertainty"].items():
            cells = []
            for view in row["accuracy"]:
                low, high = views[view]["intervals"]["r_auroc"]
                cells.append(f"{views[view]['r_auroc']:.2f} [{low:.2f}, {high:.2f}]")
            found = [line for line in lines if f"| {method} |" in line and f"| {score} |" in line]
            assert [line.replace(" *", "").split(" | ", 3)[3] for line in found] == [" | ".join(cells) + " |"]
            shown += 1
    assert shown == len(lines) - 2
