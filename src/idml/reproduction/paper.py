"""The figures of the paper's tables (paper.csv), by data set, loss and arm."""

import csv
from functools import cache
from importlib.resources import files


@cache
def paper_numbers() -> dict[tuple[str, str, str], dict[str, float]]:
    """All of them, in per cent.

    >>> paper_numbers()["cub", "proxy_anchor", "idml"]["R@1"]
    70.7
    """
    text = files("idml.reproduction").joinpath("paper.csv").read_text()
    numbers = {}
    for row in csv.DictReader(text.splitlines()):
        key = (row.pop("data"), row.pop("loss"), row.pop("arm"))
        numbers[key] = {figure: float(value) for figure, value in row.items() if value}
    return numbers


def paper_figure(data: str, arm: tuple[str, str], figure: str) -> float | None:
    """One figure, where the paper has it.

    >>> paper_figure("glyphs", ("proxy_anchor", "idml"), "R@1")
    """
    return paper_numbers().get((data, *arm), {}).get(figure)


def paper_gain(data: str, arm: tuple[str, str], over: tuple[str, str]) -> float | None:
    """How much the paper has an arm above another in R@1, where it has both.

    >>> round(paper_gain("cub", ("proxy_anchor", "idml"), ("proxy_anchor", "plain")), 1)
    1.7
    """
    a, b = (paper_figure(data, key, "R@1") for key in (arm, over))
    return None if a is None or b is None else a - b
