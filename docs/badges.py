"""The badges of the README, docs/badges.svg, from what the repository itself says; no other host is asked.

    python docs/badges.py

There is no badge of a build: it would be true only where a server runs one. A test compares the file with this script.
"""

import html
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "badges.svg"
_HEIGHT, _LETTER, _EDGE, _GAP = 20, 6.6, 7, 6  # pixels
_GREY, _BLUE = "#4a4f57", "#3949ab"


def read_facts() -> dict[str, str]:
    """Return the two words of each badge."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    about = project["project"]
    pythons = [found[1] for line in about["classifiers"] if (found := re.search(r"Python :: (3\.\d+)$", line))]
    (version,) = re.findall(r'__version__ = "(.+)"', (ROOT / "src" / "idml" / "version.py").read_text())
    facts = {"version": version, "python": " | ".join(pythons), "license": about["license"]}
    if (ROOT / "src" / "idml" / "py.typed").is_file() and project["tool"]["mypy"]["strict"]:
        facts["typed"] = "mypy strict"
    return facts


def draw_badges(facts: dict[str, str]) -> str:
    """Return one picture with a badge for each fact, in a row."""
    parts, x = [], 0.0
    for name, value in facts.items():
        left, right = (round(len(word) * _LETTER + 2 * _EDGE, 1) for word in (name, value))
        parts.append(f'<rect x="{x:g}" width="{left + right:g}" height="{_HEIGHT}" rx="3" fill="{_BLUE}"/>')
        parts.append(f'<rect x="{x:g}" width="{left:g}" height="{_HEIGHT}" rx="3" fill="{_GREY}"/>')
        for start, width, word in ((x, left, name), (x + left, right, value)):
            place = f'x="{start + width / 2:g}" y="14" textLength="{width - 2 * _EDGE:g}"'
            parts.append(f"<text {place}>{html.escape(word)}</text>")
        x = round(x + left + right + _GAP, 1)
    title = ", ".join(f"{name} {value}" for name, value in facts.items())
    style = 'fill="#fff" text-anchor="middle" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{x - _GAP:g}" height="{_HEIGHT}" role="img"'
    return f"{head}><title>{html.escape(title)}</title><g {style}>{''.join(parts)}</g></svg>\n"


if __name__ == "__main__":
    FILE.write_text(draw_badges(read_facts()))
