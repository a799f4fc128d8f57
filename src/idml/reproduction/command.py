"""Everything that `idml reproduce` can make, by name."""

from pathlib import Path
from typing import Any

from idml.errors import unknown_name
from idml.progress import Note, Progress, silent
from idml.reproduction.audit import reproduce_audit
from idml.reproduction.first import reproduce_first
from idml.reproduction.guarantee import reproduce_guarantee
from idml.reproduction.reproduce import reproduce_table
from idml.reproduction.results_page import write_results
from idml.reproduction.shapes import draw_gradients, draw_metrics
from idml.reproduction.step import reproduce_step
from idml.reproduction.tables import TABLES
from idml.reproduction.uncertainty import reproduce_uncertainty

_EARLIER = {
    "first": reproduce_first,
    "uncertainty": reproduce_uncertainty,
    "guarantee": reproduce_guarantee,
    "audit": reproduce_audit,
}
_DRAWN = {"gradients": draw_gradients, "metrics": draw_metrics}
NAMES = (*TABLES, "step-tsne", *_DRAWN, *_EARLIER, "results")


def reproduce(
    what: str,
    data: str | None = None,
    seeds: int | None = None,
    out: Path = Path("results"),
    *,
    scale: str = "laptop",
    regime: str | None = None,
    dry_run: bool = False,
    report: Progress = silent,
    note: Note = silent,
) -> dict[str, Any]:
    """Make a table or figure, or with "results" the page of all of them; the key "table" holds its text.

    ``data``, ``seeds``, ``scale`` and ``regime`` have the defaults of `idml.reproduction.reproduce.reproduce_table`.
    """
    if what not in NAMES:
        raise ValueError(unknown_name("table", what, NAMES))
    if seeds is not None and seeds < 1:
        raise ValueError(f"a table needs at least one seed, got {seeds}")
    if what in TABLES:
        return reproduce_table(
            what, data, seeds, out, scale=scale, regime=regime, dry_run=dry_run, report=report, note=note
        )
    if scale != "laptop" or regime is not None:
        raise ValueError(f"{what} has one scale only: leave out --scale and --regime")
    if what in _EARLIER:
        return _EARLIER[what](data or "glyphs", seeds or 3, out, dry_run=dry_run, report=report, note=note)
    if dry_run:
        return {"table": f"{what}: a minute at most, and nothing is trained but for step-tsne one model"}
    if what == "step-tsne":
        return reproduce_step(data or "glyphs", out, report=report, note=note)
    if what == "results":
        return write_results(out, out.absolute().parent / "docs", note=note)
    return _DRAWN[what](out)
