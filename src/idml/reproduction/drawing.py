"""Plots of tables: matplotlib figures that become small SVG drawings."""

from typing import TYPE_CHECKING

from idml.reproduction.claims import Found
from idml.reproduction.compare import Estimate, estimate, gain
from idml.reproduction.paper import paper_gain
from idml.reproduction.protocol import Course
from idml.reproduction.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure whose SVG keeps its text as text."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "idml", "font.size": 9})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plot_of(what: str, table: Table, found: Found) -> "Figure | None":
    """The drawing that suits a table: a trend, levels, a sweep, or the gains; None where nothing is there to draw."""
    if what == "trend":
        return _trend(table, found)
    if what == "levels":
        return _levels(table, found)
    if table.sweep is not None:
        return _sweep(table, found)
    return _gains(table, found)


def _known(table: Table, found: Found) -> list[Course]:
    return [found.courses[arm.key] for arm in table.arms if found.courses[arm.key].runs]


def _gains(table: Table, found: Found) -> "Figure | None":
    """The gain in R@1 of each arm over the better of raw features and plain, with its interval; the paper's beside."""
    shown: list[tuple[str, Estimate, float | None]] = []
    for at in _known(table, found):
        rival = found.rival(at.arm.key) if at.arm.name != at.arm.against else None
        if rival is not None:
            theirs = paper_gain(found.data, at.arm.key, (at.arm.loss, at.arm.against))
            shown.append((str(at.arm), gain(at.runs, rival[1], tested=at.arm.tested), theirs))
    if not shown:
        return None
    figure = new_figure(8, 1.1 + 0.24 * len(shown))
    axes = figure.subplots()
    for place, (_, value, theirs) in enumerate(reversed(shown)):
        colour = "tab:green" if value.low > 0 else "tab:red" if value.high < 0 else "tab:gray"
        axes.plot([value.low, value.high], [place, place], color=colour)
        axes.plot([value.mean], [place], "o", color=colour, markersize=4)
        if theirs is not None:
            axes.plot([theirs], [place], "D", color="black", markerfacecolor="none", markersize=4)
    axes.axvline(0, color="black", linewidth=0.7)
    axes.set_yticks(range(len(shown)), [name for name, *_ in reversed(shown)])
    paper = "; ◇ the paper's" if any(theirs is not None for *_, theirs in shown) else ""
    axes.set(
        xlabel=f"gain in R@1 over the better of raw and plain, 95 % intervals{paper}", ylim=(-0.6, len(shown) - 0.4)
    )
    return figure


def _sweep(table: Table, found: Found) -> "Figure | None":
    """R@1 against what is varied, with the interval of its difference to plain; plain and raw features beside it."""
    assert table.sweep is not None
    symbol, values = table.sweep
    known = [(value, found.courses[arm.key]) for value, arm in zip(values, table.arms[-len(values) :], strict=True)]
    points = [(value, estimate(at.runs).mean, at) for value, at in known if at.runs]
    if not points:
        return None
    figure = new_figure(7.5, 3.2)
    axes = figure.subplots()
    axes.plot([value for value, *_ in points], [mean for _, mean, _ in points], marker="o", label="idml")
    plain = [(value, mean, at.runs, found.runs((at.arm.loss, at.arm.against))) for value, mean, at in points]
    if all(own for *_, own in plain):
        x, gains = [value for value, *_ in plain], [gain(runs, own) for *_, runs, own in plain]
        low = [mean - (g.mean - g.low) for (_, mean, *_), g in zip(plain, gains, strict=True)]
        high = [mean + (g.high - g.mean) for (_, mean, *_), g in zip(plain, gains, strict=True)]
        axes.fill_between(x, low, high, alpha=0.2, label="95 % of the difference to plain")
        axes.plot(x, [estimate(own).mean for *_, own in plain], "--", color="black", linewidth=0.8, label="plain")
    if found.raw is not None:
        axes.axhline(estimate({0: found.raw}).mean, color="gray", linestyle=":", linewidth=0.8, label="raw features")
    axes.set(xlabel=symbol, ylabel="R@1, %")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _trend(table: Table, found: Found) -> "Figure | None":
    """‖u‖ of clean and mixed images by epoch, a line for each seed."""
    runs = [run for at in _known(table, found) for run in at.runs.values() if "level_mixed" in run.get("trend", {})]
    if not runs:
        return None
    figure = new_figure(5.5, 3.2)
    axes = figure.subplots()
    for number, run in enumerate(runs):
        for kind, colour in (("clean", "tab:blue"), ("mixed", "tab:orange")):
            axes.plot(run["trend"][f"level_{kind}"], color=colour, linewidth=1, label=None if number else kind)
    axes.set(xlabel="epoch", ylabel="‖u‖, mean of the epoch")
    axes.legend(frameon=False)
    return figure


def _levels(table: Table, found: Found) -> "Figure | None":
    """How ‖u‖ is distributed over clean and mixed test images: one panel for each arm that learned it, seed 0."""
    shown = [at for at in _known(table, found) if 0 in at.runs and at.arm.name != "plain"]
    if not shown:
        return None
    figure = new_figure(3 * len(shown), 2.8)
    for at, axes in zip(shown, figure.subplots(1, len(shown), squeeze=False)[0], strict=True):
        for kind, quantiles in at.runs[0]["levels"].items():
            axes.plot(quantiles, [100 * i / (len(quantiles) - 1) for i in range(len(quantiles))], label=kind)
        axes.set(title=str(at.arm), xlabel="‖u‖", ylabel="images below, %")
        axes.legend(frameon=False)
    return figure
