"""Which form of mixtures `--method idml` has by default: chosen on held-out training classes, with everything trained.

The candidates are the forms of IDML in the table `finetune`, for ProxyAnchor and multi-similarity. The form with the
largest MAP@R on held-out training classes is chosen: the mean over both losses and all seeds. No figure of the test
classes is read here. `idml reproduce finetune` shows none until the choice stands in `regimes.CHOSEN_FORM`.
"""

import statistics
from pathlib import Path
from typing import Any

from idml.progress import Note, silent
from idml.reproduction import regimes
from idml.reproduction.paper_tables import TRAINED_FORMS
from idml.reproduction.regimes import LOSSES, Arms, regime_for
from idml.reproduction.render import markdown_table
from idml.reproduction.runner import Store, read_progress

FORM_LOSSES = ("proxy_anchor", "multi_similarity")


def held_out_scores(store: Store, seeds: int) -> dict[str, dict[tuple[str, int], float | None]]:
    """Return the held-out MAP@R of each form by loss and seed; None where a run is missing or failed."""
    arms, scores = Arms(store.data, store.regime), dict[str, dict[tuple[str, int], float | None]]()
    for form in TRAINED_FORMS:
        scores[form] = {}
        for loss in FORM_LOSSES:
            runs = read_progress(store, arms.form(loss, form), seeds).runs
            for seed in range(seeds):
                scores[form][loss, seed] = runs[seed]["selected_score"] if seed in runs else None
    return scores


def choose_form(scores: dict[str, dict[tuple[str, int], float | None]]) -> str | None:
    """Return the form with the largest mean; None while a run is missing.

    >>> choose_form({"sets": {("a", 0): 0.2, ("b", 0): 0.4}, "weighted": {("a", 0): 0.3, ("b", 0): 0.35}})
    'weighted'
    """
    means = {}
    for form, found in scores.items():
        known = [score for score in found.values() if score is not None]
        if len(known) < len(found):
            return None
        means[form] = statistics.mean(known)
    return max(means, key=lambda form: means[form])


def default_form(out: Path, data: str, seeds: int | None = None, note: Note = silent) -> dict[str, Any]:
    """Return the table of held-out scores and the choice, from stored rows."""
    regime = regime_for(data, name="full")
    scores = held_out_scores(Store(out, data, regime, note), seeds or regime.seeds)
    chosen = choose_form(scores)
    columns = list(next(iter(scores.values())))
    header = ["form", *(f"{LOSSES[loss]}, seed {seed}" for loss, seed in columns), "mean"]
    rows = []
    for form, found in scores.items():
        values = [found[column] for column in columns]
        known = [value for value in values if value is not None]
        mean = f"{100 * statistics.mean(known):.2f}" if len(known) == len(values) else "–"
        rows.append([form, *("–" if value is None else f"{100 * value:.2f}" for value in values), mean])
    if chosen is None:
        line = "Nothing is chosen: runs are missing (idml reproduce finetune makes them)."
    elif chosen == regimes.CHOSEN_FORM:
        line = f"Chosen: {chosen}, as regimes.CHOSEN_FORM says."
    else:
        line = f"Chosen: {chosen}. Set CHOSEN_FORM in idml/reproduction/regimes.py, and the default of `--method idml`."
    text = "\n\n".join(["MAP@R on held-out training classes, in per cent", markdown_table(header, rows), line])
    return {"table": text, "chosen": chosen, "header": header, "rows": rows}
