"""Tables of the study of promises, in Markdown, from its stored cells alone."""

from typing import Any

from idml.reproduction.promise_draws import RATES, SHARES
from idml.reproduction.promise_fresh import ASKED
from idml.reproduction.render import markdown_table

Cell = dict[str, Any]
_NAMES = {"cub": "CUB", "cars": "Cars", "cub+cars": "CUB and Cars together", "glyphs": "Glyphs"}
_MODELS = {"pretrained": "`pretrained`", "trained": "trained"}
_ORDER = ("cub", "cars", "cub+cars", "glyphs")
_MANY = 100  # counted classes from which on the goals for classes hold
_MOST = 29  # broken draws of 200 in one row: at 10 % chance exceeds it in 2 % of all rows
_SOME = 0.001  # coverages below this are not compared


def render_promises(cells: dict[str, Cell]) -> str:
    """Return all tables."""
    names = sorted(
        {" ".join(key.split()[1:3]) for key in cells},
        key=lambda name: (_ORDER.index(name.split()[0]) if name.split()[0] in _ORDER else 99, name),
    )
    parts = [_goals(cells)]
    for name in names:
        found = {key: cell for key, cell in cells.items() if key.startswith(f"draws {name} by ")}
        if found:
            parts.append(_draw_section(name, found))
    for kind, build in (("fresh", _fresh_table), ("growth", _growth_table), ("unlabelled", _copies_tables)):
        sections = [build(name, cells[f"{kind} {name}"]) for name in names if f"{kind} {name}" in cells]
        if sections:
            parts += [_TITLES[kind], *sections]
    return "\n\n".join(part for part in parts if part)


_TITLES = {
    "fresh": "### Images and classes that were kept out\n"
    "Many galleries of one data set: for each, a fifth of the classes and a fifth of the images of the others are kept "
    "out at random; the rest is calibrated, and asked with what was kept out. For a trained model, the galleries are "
    "divided among several trainings of its heads, each without other images of the classes that it learns. *Wrong* is "
    "the share among all matches. "
    "*Above ε* counts galleries. The images asked are a sample too, so chance puts more than 10 % of the galleries "
    "above ε. What chance does is seen from the last columns: a calibration without a quarter of the classes and a "
    "fifth of the images is asked with the real images, and with those of the gallery that were taken away, left out "
    "of it as calibration leaves them out (*rehearsed*). If real images are wrong no more often than rehearsed ones, "
    "then what calibration simulates is what happens.",
    "growth": "### A gallery that grows\n"
    "Images and classes are kept out in the same way. Calibrated with half of the other images (or with the images of "
    "half of the classes) and 25 % unknown queries, then asked at each stage with what was kept out. *Says so* is the "
    "share of galleries whose answers say that nothing is promised any more.",
    "unlabelled": "### Without labels\n"
    "The same gallery without its labels: a match is wrong if it shows another picture. 600 pictures are drawn from "
    "1,500, 200 times. Then 20 of these calibrations are asked with changes that no calibration uses (grey; contrast "
    "halved or doubled; noise; mirrored; a white border; a caption), and with real near duplicates: photographs that "
    "were kept out and are in the gallery a second time, found by their pixels.",
}


def _title(name: str) -> str:
    data, model = name.split()
    return f"{_NAMES.get(data, data)}, {_MODELS.get(model, model)}"


# -------------------- draws --------------------


def _draw_section(name: str, found: dict[str, Cell]) -> str:
    header = [
        "unknown", "ε", "by class: answered", "wrong", "broken", "refused", "× by-image bound", "× oracle",
        "by image: answered", "wrong", "broken", "refused", "unknown recognised", "known rejected",
    ]  # fmt: skip
    rows = []
    for share in SHARES:
        pair = [found.get(f"draws {name} by {sample} {share:g}") for sample in ("class", "image")]
        for rate in RATES:
            cells = []
            for place, cell in enumerate(pair):
                cells += _draw_cells(cell, rate, ratios=place == 0)
            one = pair[0] or pair[1]
            if one is None:
                continue
            total, draws = one["rates"][f"{rate:g}"], one["draws"]
            open_set = [_percent(total["recognised"] / draws) if share else "–", _percent(total["rejected"] / draws)]
            rows.append([_percent(share, 0), _percent(rate, 0), *cells, *open_set])
    cell = next(iter(found.values()))
    counted = max(cell["counted_classes"] for cell in found.values())
    about = f"{cell['images']:,} images of {cell['classes']} classes, {counted:.0f} of them counted"
    line = f"**{_title(name)}**: {about}; {_percent(cell['right'])} of the first results of known queries are right."
    return f"{line}\n\n{markdown_table(header, rows)}"


def _draw_cells(cell: Cell | None, rate: float, *, ratios: bool) -> list[str]:
    if cell is None:
        return ["–"] * (6 if ratios else 4)
    total, draws = cell["rates"][f"{rate:g}"], cell["draws"]
    broken = f"{round(total['broken'])} of {draws}"
    out = [
        _percent(total["coverage"] / draws),
        _ratio(total["fresh_wrong"], total["fresh_answered"], percent=True),
        broken,
        _percent(total["refused"] / draws, 0),
    ]
    if ratios:
        out += [_ratio(total["coverage"], total[f"coverage_{other}"]) for other in ("by_image", "oracle")]
    return out


def _goals(cells: dict[str, Cell]) -> str:
    """Say in sentences which goals are met."""
    counted: dict[str, float] = {}
    for key, cell in cells.items():
        if key.startswith("draws "):
            name = " ".join(key.split()[1:3])
            counted[name] = max(counted.get(name, 0), cell["counted_classes"])
    rows: dict[str, list[tuple[str, dict[str, float]]]] = {"image": [], "many": [], "few": []}
    for key, cell in cells.items():
        if key.startswith("draws "):
            _, data, model, _, sample, _ = key.split()
            kind = sample if sample == "image" else "many" if counted[f"{data} {model}"] >= _MANY else "few"
            for rate, total in cell["rates"].items():
                rows[kind].append((rate, {name: value / cell["draws"] for name, value in total.items()}))
    broken = {kind: [total["broken"] for _, total in found] for kind, found in rows.items()}
    lines = []
    if broken["image"]:
        lines.append(
            f"- **By image** a promise was broken in at most {_percent(max(broken['image']))} of the draws of a row "
            f"(goal 10 %), {_percent(_mean(broken['image']))} on average."
        )
    if broken["many"]:
        lines.append(
            f"- **By class**, with {_MANY} counted classes or more: in at most {200 * max(broken['many']):.0f} of 200 "
            f"draws of a row (goal {_MOST}), {_percent(_mean(broken['many']))} on average (goal 10 %)."
        )
    for rates, goal in ((("0.1", "0.2"), 0.8), (("0.05",), 0.6)) if broken["many"] else ():
        texts = []
        for other, words in (("by_image", "a bound by image"), ("oracle", "an oracle")):
            values = [
                total["coverage"] / total[f"coverage_{other}"]
                for rate, total in rows["many"]
                if rate in rates and total[f"coverage_{other}"] >= _SOME
            ]
            below = sum(value < goal for value in values)
            low = f"at least {min(values):.2f} × that of {words}" if values else f"nothing to compare with {words}"
            texts.append(f"{low} (below the goal in {below} of {len(values)} rows)")
        at = " and ".join(_percent(float(rate), 0) for rate in rates)
        lines.append(f"- **Coverage** there at ε = {at}, goal {goal:g} ×: {'; '.join(texts)}.")
    if broken["few"]:
        lines.append(
            f"- By class with fewer counted classes: in at most {_percent(max(broken['few']))} of the draws of a row, "
            f"{_percent(_mean(broken['few']))} on average."
        )
    return "\n".join(lines)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


# -------------------- fresh images, growth, copies --------------------


def _fresh_table(name: str, cell: Cell) -> str:
    header = ["unknown", "ε", "answered", "wrong", "above ε", "refused", "unknown recognised", "known rejected"]
    header += ["fewer queries: wrong", "above ε", "rehearsed: wrong", "above ε"]
    rows, n = [], cell["galleries"]
    for share, kinds in cell["shares"].items():
        for rate in kinds[ASKED[0]]:
            total, fewer, rehearsed = (kinds[kind][rate] for kind in ASKED)
            open_set = [_percent(total["recognised"] / n) if float(share) else "–", _percent(total["rejected"] / n)]
            cells = [*_answers(total, n), *open_set]
            for other in (fewer, rehearsed):
                cells += _answers(other, n)[1:3]
            rows.append([_percent(float(share), 0), _percent(float(rate), 0), *cells])
    about = (
        f"{n} galleries, each asked with about {cell['known']:,.0f} known images and {cell['unknown']:,.0f} images of "
        f"{cell['classes']:.0f} unknown classes{_trainings(cell)}"
    )
    return f"**{_title(name)}**: {about}.\n\n{markdown_table(header, rows)}"


def _growth_table(name: str, cell: Cell) -> str:
    header = ["grows by", "stage", "says so"]
    for rate in RATES:
        header += [f"ε = {_percent(rate, 0)}: answered", "wrong"]
    rows, n = [], cell["galleries"]
    for kind in ("images", "classes"):
        for stage, found in cell[kind].items():
            cells = []
            for total in found["rates"].values():
                cells += [_percent(total["answered"] / n), _ratio(total["wrong"], total["answered"], percent=True)]
            rows.append([kind, stage, _percent(found["drifted"] / n, 0), *cells])
    return f"**{_title(name)}**: {n} galleries{_trainings(cell)}.\n\n{markdown_table(header, rows)}"


def _trainings(cell: Cell) -> str:
    count = cell.get("trainings", 1)
    return f"; {count} trainings" if count > 1 else ""


def _copies_tables(name: str, cell: Cell) -> str:
    header = ["unknown", "ε", "answered", "wrong", "broken", "refused", "× oracle"]
    rows, n = [], cell["draws"]
    for share, found in cell["shares"].items():
        for rate, total in found["rates"].items():
            oracle = _ratio(total["coverage"], total["coverage_oracle"])
            four = [
                _percent(total["coverage"] / n),
                _ratio(total["fresh_wrong"], total["fresh_answered"], percent=True),
                f"{total['broken']:.0f} of {n}",
                _percent(total["refused"] / n, 0),
            ]
            rows.append([_percent(float(share), 0), _percent(float(rate), 0), *four, oracle])
    others, m = cell["shares"]["0.25"]["others"], cell["calibrations"]
    lines = []
    for kind, rates in others.items():
        cells = []
        for total in rates.values():
            cells += [_percent(total["answered"] / m), _ratio(total["wrong"], total["answered"], percent=True)]
        if cells:
            lines.append([kind, f"{cell['asked'][kind]:,}", *cells])
    head = ["queries, 25 % unknown", "known"]
    for rate in RATES:
        head += [f"ε = {_percent(rate, 0)}: answered", "wrong"]
    return f"**{_title(name)}**\n\n{markdown_table(header, rows)}\n\n{markdown_table(head, lines)}"


def _answers(total: dict[str, float], n: int) -> list[str]:
    return [
        _percent(total["answered"] / n),
        _ratio(total["wrong"], total["answered"], percent=True),
        f"{total['above']:.0f} of {n}",
        _percent(total["refused"] / n, 0),
    ]


def _percent(x: float, digits: int = 1) -> str:
    return f"{100 * x:.{digits}f} %"


def _ratio(part: float, whole: float, *, percent: bool = False) -> str:
    if whole <= 0:
        return "–"
    return _percent(part / whole) if percent else f"{part / whole:.2f}"
