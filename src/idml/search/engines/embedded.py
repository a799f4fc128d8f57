"""The embedded engine: a folder, exact search over memory-mapped vectors, and an append log; no server.

What is on disk is said in `generations` (the folder), `store` (its files), `table` and `log` (the records).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from idml.embeddings import Embeddings
from idml.files import sync_folder
from idml.search.engines import Added, DamagedGallery, Engine, Item, Properties, check_text
from idml.search.engines.generations import (
    CURRENT,
    Current,
    lock_writer,
    next_generation,
    open_current,
    read_current,
    sweep,
    write_current,
)
from idml.search.engines.intake import check_batch, item_rows
from idml.search.engines.reading import Reading
from idml.search.engines.store import Store
from idml.search.engines.table import label_record, remove_record
from idml.search.engines.vectors import Rows


class EmbeddedEngine(Reading, Engine):
    """A gallery in a folder, for one writer and any number of readers, in one process or several.

    `create` and `open` make one. A reader stays at the state it opened until `refresh`. Threads may share an object:
    its changes happen one after another, and a search sees the state at its beginning.
    """

    @classmethod
    def create(cls, path: str | Path, properties: Properties) -> "EmbeddedEngine":
        """Make an empty gallery, open for writing. A gallery that is there is refused; other files are left alone."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        lock = lock_writer(path)
        try:
            if (path / CURRENT).exists():
                raise ValueError(f"there is a gallery at {path} already")
            sweep(path, None)
            current = Current(properties, 1)
            store = Store.create(current.folder(path), properties)
            write_current(path, current)
            with suppress(OSError):  # a folder one may not read
                sync_folder(path.parent)
            return cls(path, current, store, lock)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def open(
        cls, path: str | Path, *, model: str | None = None, write: bool = False, salvage: bool = False
    ) -> "EmbeddedEngine":
        """Open a gallery, for reading or as its one writer, who repairs what a kill left.

        Args:
            path: the gallery's folder.
            model: the fingerprint of the model that is going to be used; another one than the gallery's is refused.
            write: open for writing; refused while another process does.
            salvage: pass over damaged records instead of raising `DamagedGallery`; `verify` names them. A writer that
                then calls `compact` keeps what is sound. (A lost removal brings items back, a lost label an old one.)
        """
        path = Path(path)
        properties = read_current(path).properties
        if model is not None and model != properties.model:
            raise ValueError(f"the gallery {path} was made with another model ({properties.model}, not {model})")
        lock = lock_writer(path) if write else None
        try:
            current, store = open_current(path, write=write, salvage=salvage)
            if write:
                sweep(path, current)
            return cls(path, current, store, lock)
        except BaseException:
            if lock is not None:
                lock.close()
            raise

    def add(self, items: Sequence[Item], embeddings: Embeddings, thumbnails: Sequence[bytes] | None = None) -> Added:
        """Add items, all or none: a known id with the same content is left alone, with other content it is replaced.

        Of equal ids the last counts. An item whose stored bytes are damaged counts as one with other content.
        """
        images = check_batch(items, embeddings, thumbnails)
        if not items:
            return Added(0, 0, 0)
        rows, levels = item_rows(embeddings, self.properties)
        with self._changing() as store:
            known = store.table.row
            last = sorted({item.id: n for n, item in enumerate(items)}.values())
            todo = [n for n in last if not self._same(store, items[n], [x[n] for x in rows], levels[n], images[n])]
            replaced = sum(items[n].id in known for n in todo)
            if todo:
                chosen = [items[n] for n in todo]
                store.append(chosen, [x[todo] for x in rows], [levels[n] for n in todo], [images[n] for n in todo])
        return Added(len(todo) - replaced, replaced, len(last) - len(todo))

    def _same(self, store: Store, item: Item, rows: list[Rows], level: float, image: bytes) -> bool:
        row = store.table.row.get(item.id)
        if row is None or store.table.item(row) != item or store.table.levels[row] != level:
            return False
        with suppress(DamagedGallery):
            equal = all(old[row].tobytes() == new.tobytes() for old, new in zip(store.rows(), rows, strict=True))
            return equal and store.thumbnail(row) == image
        return False

    def remove(self, ids: Iterable[str]) -> int:
        """Remove items; how many there were. Ids that are not there are passed over."""
        if isinstance(ids, str):
            raise ValueError(f"ids must be a list of ids, got the string {ids!r}")
        with self._changing() as store:
            known = [id for id in dict.fromkeys(ids) if id in store.table.row]
            if known:
                store.record(remove_record(known))
        return len(known)

    def relabel(self, labels: Mapping[str, str | None]) -> int:
        """Give items other labels; how many changed. An unknown id is an error, and then nothing changes."""
        with self._changing() as store:
            changed = {id: label for id, label in labels.items() if store.table.labels[self._row(id)] != label}
            for label in changed.values():
                if label is not None:
                    check_text("label", label)
            if changed:
                store.record(label_record(changed))
        return len(changed)

    def compact(self) -> int:
        """Give back the room of removed and replaced items; how many there were. Readers go on with the old files."""
        with self._changing() as old:
            current, fresh = next_generation(self.path, self._current, old)
            try:
                write_current(self.path, current)
            except BaseException:  # nobody knows which generation counts on the disk
                fresh.close()
                self.close()
                raise
            self._current, self._store = current, fresh
            old.close()
            sweep(self.path, current)
            return len(old.table) - len(fresh.table)

    @contextmanager
    def _changing(self) -> Iterator[Store]:
        with self._mutex:
            store = self._opened()
            if self._lock is None or self._lock.closed:  # a forked child's is closed
                raise ValueError(f"the gallery {self.path} is open for reading only")
            try:
                yield store
            except OSError as error:
                raise OSError(f"cannot write to the gallery {self.path} ({error.strerror or error})") from error
            finally:
                self._side = None
