"""The items of a gallery in an order, page by page."""

from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from idml.server.replies import text

if TYPE_CHECKING:
    from idml.search.gallery import Gallery

Order = Literal["uncertain", "added"]


class Listing:
    """The ids, labels and uncertainty levels of a gallery at one moment."""

    def __init__(self, gallery: "Gallery") -> None:
        items = [(item.id, item.label) for item in gallery.items()]
        self._ids, self._labels = [id for id, _ in items], [label for _, label in items]
        self._levels = gallery.engine.levels(self._ids).numpy()
        self._falling = np.argsort(-self._levels, kind="stable")

    def page(self, order: Order, label: str | None, offset: int, limit: int) -> tuple[int, list[tuple[str, float]]]:
        """How many items have the label (all if None), and the id and level of those on the page."""
        rows = range(len(self._ids)) if order == "added" else self._falling.tolist()
        total = len(self._ids)
        if label is not None:
            rows = [row for row in rows if (own := self._labels[row]) is not None and text(own) == label]
            total = len(rows)
        return total, [(self._ids[row], float(self._levels[row])) for row in islice(rows, offset, offset + limit)]
