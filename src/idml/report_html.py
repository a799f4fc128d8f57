"""Parts of report pages: self-contained HTML with tables, pictures and figures; and the t-SNE that figures show."""

import base64
import html
import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from idml.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LARGEST = 130  # pixels, including the frame
_SHORT = 20  # letters: a cell with at most this many stays on one line
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # controls, directions
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .2rem .8rem; text-align: left; border-bottom: 1px solid #ddd }
.number { text-align: right } .number, .short { white-space: nowrap } small { color: #666 }
img, svg { max-width: 100%; height: auto }
"""


def page(title: str, *parts: str) -> bytes:
    """Build a complete HTML page that loads nothing from elsewhere."""
    text = "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    text += f"<title>{html.escape(title)}</title><style>{_STYLE}</style>{''.join(parts)}</html>"
    return _HIDDEN.sub(lambda found: printable(found[0]), text).encode(errors="backslashreplace")


def table(header: list[str], rows: list[list[str]]) -> str:
    """Build an HTML table; numbers are aligned to the right, their intervals in small type."""
    right = [any(_is_number(row[i]) for row in rows) for i in range(len(header))]
    lines = ["".join(_cell("th", cell, number=right[i]) for i, cell in enumerate(header))]
    lines += ["".join(_cell("td", cell, number=_is_number(cell)) for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def prose(text: str) -> str:
    """Build a paragraph; `code`, *emphasis* and **strong words** are marked as in Markdown."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    marked = re.sub(r"[*]{2}([^*`<>]+)[*]{2}", r"<strong>\1</strong>", marked)
    marked = re.sub(r"[*]([^*`<>]+)[*]", r"<em>\1</em>", marked)
    return f"<p>{marked}</p>"


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"[-+−]?[\d.,]+( ?%| ?± ?[\d.]+| \[.*\])?", cell) is not None


def _cell(tag: str, text: str, *, number: bool) -> str:
    shown = re.sub(r"(\[.*\])$", r"<small>\1</small>", html.escape(text)) if number else html.escape(text)
    kind = "number" if number else "short" if len(text) <= _SHORT else ""
    return f"<{tag} class='{kind}'>{shown}</{tag}>" if kind else f"<{tag}>{shown}</{tag}>"


def picture(images: NDArray[np.uint8], text: str) -> str:
    """Show images [n, side, side, 3] side by side, at most 128 pixels high; ``text`` describes them."""
    row = np.concatenate(list(np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=128)), axis=1)
    shown = Image.fromarray(row)
    if len(row) > _LARGEST:
        shown = shown.resize((round(shown.width * _LARGEST / len(row)), _LARGEST), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    shown.save(file, "PNG")
    return f"<p>{_embedded(file, text)}</p>"


def drawing(figure: "Figure", text: str, *, pixels: bool = False) -> str:
    """Embed a matplotlib figure as SVG, or, if it has thousands of points, as ``pixels``."""
    if pixels:
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=100)
        return f"<p>{_embedded(data, text)}</p>"
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()
    start = f"<svg role='img' aria-label='{html.escape(text)}'"
    return f"<p>{svg[svg.index('<svg') :].replace('<svg', start, 1)}</p>"


def _embedded(png: io.BytesIO, text: str) -> str:
    return f"<img alt='{html.escape(text)}' src='data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}'>"


def tsne_positions(points: NDArray[np.floating], check: Callable[[], None] = lambda: None) -> NDArray[np.float64]:
    """Place points [n, d] in the plane [n, 2] by t-SNE: the same points always get the same places.

    At least four points are needed, and they must not all be equal. ``check`` is called now and then: an error that it
    raises ends the work.
    """
    import torch
    from openTSNE import TSNE

    place = TSNE(
        perplexity=min(30, (len(points) - 1) / 3),
        random_state=0,
        n_jobs=torch.get_num_threads(),
        negative_gradient_method="bh",
        callbacks=lambda *progress: check(),
        callbacks_every_iters=25,
    ).fit(points)
    return np.asarray(place, dtype=np.float64)
