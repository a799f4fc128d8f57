"""The items of a gallery: how images come in, change and go."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from idml.embeddings import Embeddings
from idml.search.adding import embed_uploads, undamaged
from idml.search.census import Census
from idml.search.embedder import Embedder
from idml.search.engines import Added, Engine, Item
from idml.search.gallery_folder import UPLOADS, Roots, Upload
from idml.search.opening import Place, is_milvus


class Shelf:
    """What a gallery does but answer queries."""

    def __init__(self, place: Place, engine: Engine, embedder: Embedder, *, writable: bool) -> None:
        self.place, self.engine, self.embedder, self.writable = str(place), engine, embedder, writable
        self.roots = None if is_milvus(place) else Roots(Path(place))
        self.still = threading.RLock()  # held during changes: nothing changes for who holds it
        self._census = Census(engine, self.still)

    def add(self, images: Sequence[Upload]) -> Added:
        """Add images, all or none of them; on return they can no longer be lost.

        The same bytes are the same item: one that is there already is left alone, but for a label that is given. A
        gallery in a folder keeps the bytes.
        """
        self._require_writable()
        last = {image.id: image for image in images}
        before = {id: item for id, item in zip(last, self.engine.get_many(list(last)), strict=True) if item is not None}
        known = {*before} if self.roots is None else undamaged(self.engine, list(before))  # Milvus looks after its own
        new = [image for id, image in last.items() if id not in known]
        fresh = embed_uploads(self.embedder, new)
        items = [self._item(image, before.get(image.id)) for image in new]
        with self.still:
            there = [item for item in self.engine.get_many(list(known)) if item is not None]
            lost = [item for item in there if self.roots is not None and self.roots.find(item.path) is None]
            for item in [*items, *lost]:
                if self.roots is not None and item.path.startswith(f"{UPLOADS}/"):
                    self.roots.keep(item.path, last[item.id].data)
            added = Added(0, 0, 0)
            if fresh.embeddings is not None:
                added = self.put(items, fresh.embeddings, fresh.thumbnails)
            labels = {item.id: label for item in there if (label := last[item.id].label) is not None}
            changed = self.relabel(labels) if labels else 0
        return Added(added.new, added.replaced + changed, added.unchanged + len(known) - changed)

    def _item(self, image: Upload, damaged: Item | None) -> Item:
        path = "" if self.roots is None else f"{UPLOADS}/{image.id}.{image.extension}"
        label = damaged.label if image.label is None and damaged is not None else image.label
        return Item(path, image.checksum, label)

    def put(self, items: Sequence[Item], embeddings: Embeddings, thumbnails: Sequence[bytes] | None = None) -> Added:
        """Add items that are embedded already; see `Engine.add`."""
        with self._census.watching(item.id for item in items):
            return self.engine.add(items, embeddings, thumbnails)

    def remove(self, ids: Iterable[str]) -> int:
        """Remove items, and the bytes of uploaded ones; how many there were. Unknown ids are passed over."""
        if isinstance(ids, str):
            raise ValueError(f"ids must be a list of ids, got the string {ids!r}")
        ids = list(ids)
        with self._census.watching(ids):
            removed = self.engine.remove(ids)
            if self.roots is not None:
                for id in ids:  # also if it was not there: a kill may have come between the two
                    self.roots.forget(id)
        return removed

    def relabel(self, labels: Mapping[str, str | None]) -> int:
        """Give items other labels; how many changed. An unknown id is an error, and then nothing changes."""
        with self._census.watching(labels):
            return self.engine.relabel(labels)

    def get(self, id: str) -> Item | None:
        """The item with this id, if there is one."""
        return self.engine.get(id)

    def get_many(self, ids: Sequence[str]) -> list[Item | None]:
        """The item with each of these ids, None where there is none."""
        return self.engine.get_many(ids)

    def items(self) -> Iterator[Item]:
        """All items."""
        return self.engine.items()

    def thumbnail(self, id: str) -> bytes:
        """The item's thumbnail, a JPEG."""
        return self.engine.thumbnail(id)

    def image_file(self, id: str) -> Path | None:
        """The item's image file, links resolved; None if there is none, or it is not below its root any more."""
        item = self.engine.get(id)
        return None if item is None or self.roots is None else self.roots.find(item.path)

    def refresh(self) -> bool:
        """Go on to the newest state; whether there was one."""
        with self.still:
            newer = self.engine.refresh()
            if newer:
                self._census.forget()
            return newer

    def close(self) -> None:
        """Let go of the engine."""
        self.engine.close()

    def _require_writable(self) -> None:
        if not self.writable:
            raise ValueError(f"the gallery {self.place} is open for reading only")

    def __len__(self) -> int:
        return len(self.engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
