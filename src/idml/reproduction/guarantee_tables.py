"""The tables of `idml reproduce guarantee`: promises, scores, and P against the best single score."""

from pathlib import Path
from typing import Any

from idml.calibration.report import P
from idml.calibration.risk_control import clopper_pearson
from idml.reproduction.grid import write_table

_DELTA = 0.1
Result = dict[str, Any]


def write_tables(folder: Path, results: list[Result]) -> str:
    """Write table, scores and against as Markdown, CSV and HTML; returns them under their titles."""
    texts = []
    for name, title, (header, rows) in (
        ("table", "Promises: sums over all rounds and seeds; δ = 10 %", promises(results)),
        ("against", "P(right) against the best single score, on classes that had no part in its fit", against(results)),
        ("scores", "Every score: means over draws and seeds, in brackets those of the 95 % intervals", scores(results)),
    ):
        texts.append(f"{title}\n\n{write_table(folder, name, header, rows)}")
    return "\n\n".join(texts)


def promises(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    """A row for each gallery, share of unknown queries and wished error rate, samples by image and by class beside it.

    "Broken" has its 95 % interval (Clopper–Pearson); it is starred where that lies above δ.
    """
    header = [
        "gallery", "unknown", "wished error", "by image: promised", "answered", "wrong among fresh", "broken",
        "fresh above", "by class: promised", "answered", "wrong among fresh", "broken", "unknown told",
        "known sent away",
    ]  # fmt: skip
    rows = []
    for gallery, share, group in _groups(results):
        rounds = sum(r["options"]["rounds"] for r in group)
        for wished in group[0]["promises"][gallery]["image"]:
            image, by_class = (_total(group, gallery, sample, wished) for sample in ("image", "class"))
            told = _share(image["told"], image["unknown"]), _share(image["sent_away"], image["known"])
            above = _share(image["fresh_above"], rounds)
            cells = [*_kept(image, rounds), above, *_kept(by_class, rounds), *told]
            rows.append([gallery, f"{share:.0%}", f"{float(wished):.0%}", *cells])
    return header, rows


def _total(group: list[Result], gallery: str, sample: str, wished: str) -> dict[str, float]:
    """What was counted in all rounds of all seeds."""
    parts = [result["promises"][gallery][sample][wished] for result in group]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _kept(total: dict[str, float], rounds: int) -> list[str]:
    low, high = clopper_pearson(round(total["broken"]), rounds)
    broken = f"{total['broken'] / rounds:.1%} [{low:.1%}, {high:.1%}]" + (" *" if low > _DELTA else "")
    shares = [_share(total[name], rounds) for name in ("promised", "answered")]
    return [*shares, _share(total["fresh_wrong"], total["fresh_answered"]), broken]


def against(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    """P and the best single score of each gallery, share and seed: means over the draws; flagged where P is below it.

    The best single score is that of each draw, chosen with hindsight by the figures that it is then compared by.
    """
    header = [
        "gallery", "unknown", "seed", "P, R-AUROC", "best single score", "its R-AUROC", "difference",
        "AUGRC × 1000 saved", "draws", "P below in R-AUROC (clearly)", "in AUGRC (clearly)", "u adds to the mix",
    ]  # fmt: skip
    rows = []
    for gallery, share, group in _groups(results):
        for result in group:
            drawn = result["scores"][gallery]
            gains = [told["gain"] for told in drawn]
            names = [told["best"] for told in drawn]
            singles = [told["scores"][told["best"]] for told in drawn]
            own = _means([told["scores"][P] for told in drawn], "r_auroc", span=False)
            single = [max(sorted(set(names)), key=names.count), _means(singles, "r_auroc", span=False)]
            saved = [_means(gains, "r_auroc", sign=True), _means(gains, "augrc", 1000.0, sign=True)]
            counts = [str(len(gains)), _below(gains, "r_auroc"), _below(gains, "augrc")]
            of_u = _means([told["gain_of_u"] for told in drawn], "r_auroc", sign=True)
            rows.append([gallery, f"{share:.0%}", str(result["options"]["seed"]), own, *single, *saved, *counts, of_u])
    return header, rows


def scores(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    """R-AUROC, AUGRC and what tells unknown queries, for P, the mixes and every single score."""
    rows = []
    for gallery, share, group in _groups(results):
        drawn = [told["scores"] for result in group for told in result["scores"][gallery]]
        for name in drawn[0]:
            found = [scores[name] for scores in drawn]
            figures = (("r_auroc", 1.0), ("augrc", 1000.0), ("unknown", 1.0))
            rows.append([gallery, f"{share:.0%}", name, *(_means(found, figure, factor) for figure, factor in figures)])
    return ["gallery", "unknown", "score", "R-AUROC", "AUGRC × 1000", "tells unknown (AUROC)"], rows


def _groups(results: list[Result]) -> list[tuple[str, float, list[Result]]]:
    """The results of all seeds for each gallery and share of unknown queries."""
    shares = sorted({result["options"]["unknown"] for result in results})
    return [
        (gallery, share, [result for result in results if result["options"]["unknown"] == share])
        for gallery in results[0]["promises"]
        for share in shares
    ]


def _means(
    found: list[dict[str, Any]], figure: str, factor: float = 1.0, *, span: bool = True, sign: bool = False
) -> str:
    """The mean of a figure, and of the ends of its intervals."""
    known = [f for f in found if f[figure] is not None and f["intervals"][figure] is not None]
    if not known:
        return "–"
    form = f"{'+' if sign else ''}.{1 if factor > 1 else 3}f"
    middle = format(factor * _mean([f[figure] for f in known]), form)
    low, high = (format(factor * _mean([f["intervals"][figure][i] for f in known]), form) for i in (0, 1))
    return f"{middle} [{low}, {high}]" if span else middle


def _below(gains: list[dict[str, Any]], figure: str) -> str:
    """In how many draws P is below, and in how many of these the whole interval of the difference is."""
    below = [gain for gain in gains if gain[figure] is not None and gain[figure] < 0]
    return f"{len(below)} ({sum(gain['intervals'][figure][1] < 0 for gain in below)})"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
