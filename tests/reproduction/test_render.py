"""The tables in the docs are those of the stored rows."""

import re
from pathlib import Path

import pytest

from idml.reproduction.guarantee_study import GUARANTEE
from idml.reproduction.regimes import regime_for
from idml.reproduction.render import markdown_table, results_markdown, stored_results
from idml.reproduction.runner import Store
from idml.reproduction.studies import STUDIES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def test_the_results_page_is_rendered_from_the_stored_rows():
    text = results_markdown(stored_results(RESULTS), RESULTS)
    assert (ROOT / "docs" / "results.md").read_text() == text, "run `idml reproduce results`"


@pytest.mark.parametrize(
    ("page", "study", "data", "seeds", "names"),
    [
        ("uncertainty", STUDIES["uncertainty"], "cub", 3, ["r_auroc"]),
        ("uncertainty", STUDIES["uncertainty"], "cars", 3, ["r_auroc"]),
        ("audit", STUDIES["audit"], "cub", 3, ["table"]),
        ("audit", STUDIES["audit"], "glyphs", 3, ["table", "ambiguous"]),
        ("calibration", GUARANTEE, "cub", 1, ["table", "against"]),
        ("calibration", GUARANTEE, "cars", 1, ["table", "against"]),
        ("calibration", GUARANTEE, "glyphs", 1, ["table", "against"]),
    ],
)
def test_tables_of_the_studies_in_the_docs_are_those_of_the_stored_rows(page, study, data, seeds, names):
    store = Store(RESULTS, data, regime_for(data))
    rows = [store.read(cell) for cell in study.cells(store, seeds)]
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for table in study.tables(rows):
        if table.name in names:
            assert markdown_table(table.header, table.rows) in text


def test_every_stored_row_says_its_version_and_the_commit_that_made_it():
    for path in RESULTS.glob("*.jsonl"):
        data, regime = path.stem.rsplit("-", 1)
        for row in Store(RESULTS, data, regime_for(data, name=regime)).rows:
            assert row["version"] == 1
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
