"""Position maps of a gallery's images, by which results can be re-ranked (`idml.search.reranking`).

A map has 4 × 4 positions, each of which has passed through the same head as the whole image:

    GALLERY/position-maps.sqlite     by the id of an item: the checksum of its image, the map in float16, a CRC-32

A map takes 32·d bytes, 16 kB at 512 dimensions. Maps follow from the images and the model, so the file may be deleted;
a backup does not hold it. A map counts only for the image that it was made from.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from idml.embeddings import unit_rows
from idml.evaluation.rerank import GRID, linear_head
from idml.model.model import PRETRAINED, best_device, load_model, pool_positions, pretrained_trunk
from idml.search.embedder import prepare_image
from idml.search.engines.base import Item, Problem
from idml.search.engines.sqlite_storage import to_bytes, to_text
from idml.search.gallery_folder import POSITION_MAPS, MissingMap, find_model

_BATCH = 64
_SCHEMA = "CREATE TABLE IF NOT EXISTS maps (id BLOB PRIMARY KEY, checksum TEXT, map BLOB, crc INTEGER)"


# -------------------- stored maps --------------------


class PositionMaps:
    """The file of position maps in the folder of a gallery; it need not exist."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / POSITION_MAPS

    @contextmanager
    def _open(self, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        try:
            mode = "rwc" if write else "ro"
            uri = f"{self.file.absolute().as_uri()}?mode={mode}"
            with closing(sqlite3.connect(uri, uri=True, timeout=60)) as connection:
                if write:
                    connection.execute(_SCHEMA)
                yield connection
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.file} is damaged or cannot be used ({error}); delete it and index again") from None

    def find_missing(self, items: Iterable[Item]) -> list[Item]:
        """Return the items without a map of their present image."""
        known = {}
        if self.file.exists():
            with self._open() as connection:
                known = dict(connection.execute("SELECT id, checksum FROM maps").fetchall())
        return [item for item in items if known.get(to_bytes(item.id)) != item.checksum]

    def write(self, items: Sequence[Item], maps: Tensor) -> None:
        """Store the maps [n, positions, d] of items durably; earlier ones are replaced."""
        blobs = [row.tobytes() for row in maps.half().contiguous().numpy()]
        rows = [(to_bytes(x.id), x.checksum, blob, zlib.crc32(blob)) for x, blob in zip(items, blobs, strict=True)]
        with self._open(write=True) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO maps VALUES (?, ?, ?, ?)", rows)

    def delete(self, ids: Iterable[str]) -> None:
        """Delete the maps of some items, if there are any."""
        if self.file.exists():
            with self._open(write=True) as connection, connection:
                connection.executemany("DELETE FROM maps WHERE id = ?", ((to_bytes(id),) for id in ids))

    def read(self, items: Sequence[Item], dim: int) -> Tensor:
        """Return the maps of items [n, positions, dim] as unit rows; one that is missing or damaged is an error."""
        found: list[tuple[str, bytes, int] | None] = [None] * len(items)
        if self.file.exists():
            with self._open() as connection:
                query = "SELECT checksum, map, crc FROM maps WHERE id = ?"
                found = [connection.execute(query, (to_bytes(item.id),)).fetchone() for item in items]
        maps = []
        for item, row in zip(items, found, strict=True):
            checksum, blob, crc = row or ("", b"", 0)
            if checksum != item.checksum:
                raise MissingMap(f"the image {item.path or item.id!r} has no position map: run idml index --maps again")
            if zlib.crc32(blob) != crc or len(blob) != 2 * GRID**2 * dim:
                raise ValueError(
                    f"{self.file}: the map of item {item.id!r} is damaged; delete the file and index again"
                )
            maps.append(np.frombuffer(blob, np.float16).reshape(GRID**2, dim))
        positions = torch.from_numpy(np.stack(maps)).float()
        return unit_rows(positions.flatten(0, 1)).view_as(positions)

    def find_problems(self) -> list[Problem]:
        """Return the maps that are damaged."""
        if not self.file.exists():
            return []
        try:
            with self._open() as connection:
                rows = connection.execute("SELECT id, map, crc FROM maps")
                bad = [id for id, blob, crc in rows if not isinstance(blob, bytes) or zlib.crc32(blob) != crc]
        except ValueError as error:
            return [Problem(str(self.file), None, str(error))]
        return [
            Problem(str(self.file), to_text(id), "the position map is damaged; delete the file and index again")
            for id in bad
        ]


# -------------------- maps of images --------------------


class PositionMapper:
    """Computes position maps of RGB images with the model of a gallery in a folder, by torch."""

    def __init__(self, folder: Path) -> None:
        source = find_model(folder)
        self.device = best_device()
        self.head: torch.nn.Module = torch.nn.Identity()  # the features of the pretrained trunk are s
        if str(source) == PRETRAINED:
            self.trunk, self.grey = pretrained_trunk(), False
            return
        model = load_model(source).to(self.device).eval()
        self.trunk, self.head, self.grey = model.trunk, linear_head(model), model.config.in_chans == 1

    @torch.no_grad()
    def compute(self, images: Sequence[Image.Image]) -> Tensor:
        """Return the unit rows of the positions of each image [n, 16, d]."""
        pixels = torch.stack([prepare_image(image, self.trunk.image_size, grey=self.grey) for image in images])
        parts = []
        for part in pixels.split(_BATCH):
            features = pool_positions(self.trunk.positions(part.to(self.device) / 255), GRID)
            positions = self.head(features)
            parts.append(unit_rows(positions.flatten(0, 1)).view_as(positions).float().cpu())
        return torch.cat(parts)
