"""Tables of the study of promises, in Markdown, from its stored cells alone."""

from typing import Any


def render_promises(cells: dict[str, Any]) -> str:
    return ""
