"""Results for Python: mappings, as ``--json`` prints them, that show themselves in a few lines."""

from typing import Any


class Record(dict[str, Any]):
    """A result. Its keys are those of the JSON; its text is for people.

    >>> Record({"recall@1": 0.61234, "queries": 1200, "bins": [1, 2, 3]})
    Record(recall@1=0.6123, queries=1,200, bins=…)
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={_short(value)}' for key, value in self.items())})"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the lines that a person should read: by default a line for each single value."""
        shown = {key: value for key, value in self.items() if not isinstance(value, dict | list | tuple)}
        width = max(map(len, shown), default=0)
        return [f"{key:<{width}}  {_short(value)}" for key, value in shown.items()]


def format_figures(name: str, figures: dict[str, float]) -> str:
    """Return figures in one line.

    >>> format_figures("last", {"recall@1": 0.61234, "map@r": 0.25})
    'last: recall@1 0.612, map@r 0.250'
    """
    return f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items())


def _short(value: object) -> str:
    if isinstance(value, dict | list | tuple):
        return "…" if value else "none"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
