"""`idml index`: the images of a folder as items of a gallery, brought up to date each time.

An item's path is the folder's name in the gallery (`roots`) and the path below the folder; its id is a hash of that.
Its label is the first folder on the way, if there is one. Files that are hidden, or not named like an image, and links
to folders are passed over. Files are taken in the order of their names, 64 at a time, and each 64 are acknowledged
together: a kill costs at most these, and the next call goes on as if nothing had happened.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from idml.data.layouts import EXTENSIONS
from idml.progress import Count, Note, silent
from idml.search.adding import embed_uploads, undamaged
from idml.search.engines import Item
from idml.search.gallery import Gallery
from idml.search.gallery_folder import Upload

_TOGETHER = 64
_LARGEST = 1 << 30  # bytes of a file; more is no image
_NAMED = 20  # broken images that are named one by one


@dataclass(frozen=True)
class Indexed:
    """What became of the images of a folder."""

    new: int
    replaced: int
    unchanged: int
    removed: int
    broken: int


def index_folder(
    gallery: Gallery,
    folder: Path,
    *,
    progress: Count = silent,
    note: Note = silent,
) -> Indexed:
    """Bring the images of a folder into a gallery, and remove those of its items whose files are gone.

    An image with the bytes it had is not embedded again and keeps its label, whoever gave it. An image that cannot be
    decoded is named by ``note`` and left out; what cannot be read at all now is named too, and stays as it was.

    Args:
        gallery: open for writing.
        folder: what is indexed; its name tells its items apart from those of other folders.
        progress: called with how many images are done, and how many there are.
        note: called with lines that a person should see.
    """
    if not gallery.writable:
        raise ValueError(f"the gallery {gallery.place} is open for reading only")
    root = os.path.realpath(folder)
    if not os.path.isdir(root):
        raise FileNotFoundError(f"there is no folder {str(folder)!r}; nothing was changed")
    found = _look(root, None if gallery.roots is None else gallery.roots.folder)
    prefix = f"{_name(gallery, root)}/"
    before = {item.path: item for item in gallery.items() if item.path.startswith(prefix)}
    if before and not found.names:
        raise ValueError(
            f"the folder {str(folder)!r} holds no image, but the gallery has {len(before)} from it: nothing was "
            "changed (if they are to go, idml gallery remove)"
        )
    work = _Work(gallery, root, prefix, before, note)
    for start in range(0, len(found.names), _TOGETHER):
        work.take(found.names[start : start + _TOGETHER])
        progress(min(start + _TOGETHER, len(found.names)), len(found.names))
    if not os.path.isdir(root):
        raise FileNotFoundError(f"the folder {str(folder)!r} is gone; what was read is kept, nothing was removed")
    closed = tuple(prefix + name for name in found.closed)
    gone = [item.id for path, item in before.items() if path not in work.seen and not path.startswith(closed)]
    removed = gallery.remove(gone) if gone else 0
    for line in found.notes:
        note(line)
    if work.broken > _NAMED:
        note(f"… {work.broken - _NAMED} more images cannot be read")
    return Indexed(work.new, work.replaced, work.unchanged, removed, work.broken)


@dataclass
class _Found:
    """The files below a folder, the folders that cannot be read (each with / at its end), and lines about them."""

    names: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _look(root: str, home: Path | None) -> _Found:
    """All image files below ``root``, but for those of the gallery in ``home``."""
    own = None if home is None else os.path.realpath(home)
    if own is not None and f"{root}/".startswith(f"{own}/"):
        raise ValueError(f"the folder {root!r} belongs to the gallery itself")
    found, open_folders, links, outside = _Found(), [""], 0, 0
    while open_folders:
        prefix = open_folders.pop()
        try:
            with os.scandir(os.path.join(root, prefix)) as content:
                entries = [entry for entry in content if not entry.name.startswith(".")]
        except OSError as error:
            if prefix == "":
                raise OSError(f"cannot read the folder {root!r} ({error.strerror}); nothing was changed") from None
            found.closed.append(prefix)
            found.notes.append(f"cannot read the folder {prefix!r} ({error.strerror}); its images stay as they were")
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.path != own:
                    open_folders.append(f"{prefix}{entry.name}/")
            elif os.path.isdir(entry):
                links += 1
            elif entry.name.lower().endswith(EXTENSIONS) and os.path.isfile(entry):
                found.names.append(prefix + entry.name)
                outside += not os.path.realpath(entry).startswith(f"{root.rstrip('/')}/")
    found.names.sort()
    if links:
        found.notes.append(f"{links} links to folders were passed over")
    if outside:
        found.notes.append(f"{outside} images are links that lead out of the folder: only their thumbnails are shown")
    return found


def _name(gallery: Gallery, root: str) -> str:
    """What a folder is called in the gallery; in Milvus, which keeps no list of them, its whole path tells."""
    if gallery.roots is not None:
        return gallery.roots.name(root)
    return f"{os.path.basename(root) or 'root'}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:8]}"


@dataclass
class _Work:
    """Files on their way into the gallery. ``seen`` are the paths of those whose items are to stay."""

    gallery: Gallery
    root: str
    prefix: str
    before: dict[str, Item]
    note: Note
    seen: set[str] = field(default_factory=set)
    new: int = 0
    replaced: int = 0
    unchanged: int = 0
    broken: int = 0

    def take(self, names: Sequence[str]) -> None:
        """Add some files, all at once."""
        paths = [self.prefix + name for name in names]
        known = {path for path in paths if path in self.before}
        if self.gallery.roots is not None:  # (Milvus looks after what it stores)
            sound = undamaged(self.gallery.engine, [self.before[path].id for path in known])
            known = {path for path in known if self.before[path].id in sound}
        items: list[Item] = []

        def changed() -> Iterator[Upload]:
            for name, path in zip(names, paths, strict=True):
                if (image := self._read(name, path)) is None:
                    continue
                if path in known and self.before[path].checksum == image.checksum:
                    self.seen.add(path)
                    self.unchanged += 1
                    continue
                items.append(Item(path, image.checksum, _label(name), _id(path)))
                yield image

        fresh = embed_uploads(self.gallery.embedder, changed(), lambda place, error: self._leave_out(str(error)))
        if fresh.embeddings is not None:
            chosen = [items[place] for place in fresh.places]
            added = self.gallery.put(chosen, fresh.embeddings, fresh.thumbnails)
            self.new, self.replaced = self.new + added.new, self.replaced + added.replaced
            self.unchanged += added.unchanged
            self.seen.update(item.path for item in chosen)

    def _read(self, name: str, path: str) -> Upload | None:
        """The file, or None if it cannot be read; only one that is gone loses its item."""
        file = os.path.join(self.root, name)
        try:
            if os.path.getsize(file) <= _LARGEST:
                with open(file, "rb") as content:
                    return Upload(content.read(_LARGEST), name=name)
            self._leave_out(f"cannot read the image {name!r}: it is larger than {_LARGEST:,} bytes")
        except FileNotFoundError:
            pass
        except OSError as error:
            self.seen.add(path)
            self._leave_out(f"cannot read the image {name!r}: {error.strerror}")
        return None

    def _leave_out(self, reason: str) -> None:
        self.broken += 1
        if self.broken <= _NAMED:
            self.note(reason)


def _label(name: str) -> str | None:
    """The first folder on the way; bytes that are no UTF-8 are written out."""
    first, slash, _ = name.partition("/")
    return os.fsencode(first).decode("utf-8", "backslashreplace") if slash else None


def _id(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]
