"""`idml index`: add the images of a folder to a gallery, and bring them up to date on each run.

The path of an item is the name of the folder in the gallery (`ImageRoots`) and the path below the folder; its id is a
hash of that path. Its label is the first sub-folder of the path, if there is one. Hidden files and links to folders are
skipped, and so are files without the extension of an image, which are counted and named. Files are read in the order of
their names, and each 64 are stored together: a kill loses at most the last 64, and the next run continues from there.

Threads work on a few files each, one thread for each core: they read, decode and embed them. So no core waits while
another one decodes, and the main thread only stores what they have made.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from idml.data.images import decode_image
from idml.data.layouts import EXTENSIONS, describe_others, format_count
from idml.embeddings import Embeddings
from idml.parallel import run_in_threads, run_on_cores
from idml.progress import Count, Note, silent
from idml.search.embedder import Embedder, share_cores
from idml.search.engines import Item
from idml.search.gallery import Gallery
from idml.search.uploads import EmbeddedImages, Upload, embed_uploads, find_intact

_BATCH = 64
_MAX_THREADS = 8  # each may hold a decoded image of 200 MB
MAX_BYTES = 1 << 30  # a larger file is not an image
_MAX_NAMED = 20  # unreadable images that get a line of their own


@dataclass(frozen=True)
class Indexed:
    """How many images of a folder were added, replaced, unchanged, removed and unreadable; and other files."""

    new: int
    replaced: int
    unchanged: int
    removed: int
    broken: int
    skipped: int = 0
    """Files that are not of a type that is read."""


def index_folder(
    gallery: Gallery,
    folder: Path,
    *,
    progress: Count = silent,
    note: Note = silent,
) -> Indexed:
    """Add the images of a folder to a gallery, and remove the items whose files no longer exist.

    An image whose bytes are unchanged is not embedded again and keeps its label, even one that was set by hand. An
    image that cannot be decoded is skipped with a note. A file that cannot be read now gets a note, and its item stays.
    If not one image can be read, that is a ``ValueError`` and nothing changes. A note counts the images whose bytes are
    in the gallery under another name.

    Args:
        gallery: open for writing.
        folder: the folder to index; its name separates its items from those of other folders.
        progress: called with the number of images done and the number of all images.
        note: called with lines for the user.
    """
    if not gallery.writable:
        raise ValueError(f"the gallery {gallery.location} is open for reading only")
    root = _find_root(folder)
    listing = list_images(root, None if gallery.roots is None else gallery.roots.folder)
    if gallery.roots is not None and root not in gallery.roots.read().values():
        _require_image(folder, root, listing, note)  # before the folder is registered
    prefix = f"{_root_name(gallery, root)}/"
    before = {item.path: item for item in gallery.items() if item.path.startswith(prefix)}
    if before and not listing.names:
        raise ValueError(
            f"the folder {str(folder)!r} contains no image, but the gallery has {len(before)} from it: nothing was "
            "changed (to remove them, use idml gallery remove)"
        )
    if not listing.names:
        raise ValueError(_no_image(folder, listing))
    threads = min(_MAX_THREADS, torch.get_num_threads())
    embedder = share_cores(gallery.embedder, threads)
    indexer = _Indexer(gallery, embedder, threads, root, prefix, before, progress, note)
    indexer.add_files(listing.names)
    if not os.path.isdir(root):
        raise FileNotFoundError(f"the folder {str(folder)!r} is gone; what was read is kept, nothing was removed")
    for line in listing.notes:
        note(line)
    if indexer.broken > _MAX_NAMED:
        note(f"… {indexer.broken - _MAX_NAMED} more images cannot be read")
    if indexer.broken == len(listing.names):
        raise ValueError(_none_readable(folder, indexer.broken))
    unreadable = tuple(prefix + name for name in listing.unreadable)
    gone = [item.id for path, item in before.items() if path not in indexer.seen and not path.startswith(unreadable)]
    removed = gallery.remove(gone) if gone else 0
    if copies := _count_copies(gallery, indexer.added):
        note(f"{format_count(copies, 'image')} added with bytes that are in the gallery under another name too")
    return Indexed(
        indexer.new, indexer.replaced, indexer.unchanged, removed, indexer.broken, skipped=len(listing.others)
    )


def _count_copies(gallery: Gallery, added: Mapping[str, int]) -> int:
    """How many of the images added, counted by checksum, have the bytes of another one; of equal ones all but one."""
    total = Counter(item.checksum for item in gallery.items() if item.checksum in added) if added else {}
    return sum(min(count, total[checksum] - 1) for checksum, count in added.items())


def check_folder(folder: Path, note: Note = silent) -> None:
    """Raise an error of one line unless an image in the folder or below it can be read; ``note`` gets the reasons."""
    root = _find_root(folder)
    _require_image(folder, root, list_images(root, None), note)


def _require_image(folder: Path, root: str, listing: "Listing", note: Note) -> None:
    if not listing.names:
        raise ValueError(_no_image(folder, listing))
    reasons: list[str] = []
    for name in listing.names:
        try:
            decode_image(os.path.join(root, name), name)
            return
        except (ValueError, OSError) as error:
            reasons.append(str(error))
    for line in reasons[:_MAX_NAMED]:
        note(line)
    if len(reasons) > _MAX_NAMED:
        note(f"… {len(reasons) - _MAX_NAMED} more images cannot be read")
    raise ValueError(_none_readable(folder, len(reasons)))


def _none_readable(folder: Path, tried: int) -> str:
    return f"no image in {str(folder)!r} can be read ({tried:,} tried); nothing was changed"


def _find_root(folder: Path) -> str:
    root = os.path.realpath(folder)
    if not os.path.isdir(root):
        wrong = (
            f"{str(folder)!r} is a file, name its folder"
            if os.path.exists(root)
            else f"there is no folder {str(folder)!r}"
        )
        raise FileNotFoundError(f"{wrong}; nothing was changed")
    return root


def _no_image(folder: Path, listing: "Listing") -> str:
    skipped = f"; {format_count(listing.links, 'link')} to folders not followed" if listing.links else ""
    return f"the folder {str(folder)!r} contains no image ({', '.join(EXTENSIONS)}): nothing was changed{skipped}"


@dataclass
class Listing:
    """The image files below a folder, sub-folders that cannot be read (each ends with /), other files, and notes."""

    names: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    links: int = 0
    """How many links to folders were not followed."""


def list_images(root: str, gallery_folder: Path | None) -> Listing:
    """List all image files below ``root``, except those of the gallery itself."""
    own = None if gallery_folder is None else os.path.realpath(gallery_folder)
    if own is not None and f"{root}/".startswith(f"{own}/"):
        raise ValueError(f"the folder {root!r} belongs to the gallery itself")
    listing, open_folders, outside = Listing(), [""], 0
    while open_folders:
        prefix = open_folders.pop()
        try:
            with os.scandir(os.path.join(root, prefix)) as content:
                entries = [entry for entry in content if not entry.name.startswith(".")]
        except OSError as error:
            if prefix == "":
                raise OSError(f"cannot read the folder {root!r} ({error.strerror}); nothing was changed") from None
            listing.unreadable.append(prefix)
            listing.notes.append(f"cannot read the folder {prefix!r} ({error.strerror}); its images stay as they were")
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.path != own:
                    open_folders.append(f"{prefix}{entry.name}/")
            elif os.path.isdir(entry):
                listing.links += 1
            elif not os.path.isfile(entry):
                continue
            elif not entry.name.lower().endswith(EXTENSIONS):
                listing.others.append(prefix + entry.name)
            else:
                listing.names.append(prefix + entry.name)
                outside += not os.path.realpath(entry).startswith(f"{root.rstrip('/')}/")
    listing.names.sort()
    if listing.others:
        listing.notes.append(describe_others(sorted(listing.others)))
    if listing.links:
        listing.notes.append(f"{format_count(listing.links, 'link')} to folders not followed")
    if outside:
        listing.notes.append(f"{outside} images are links to files outside the folder: only their thumbnails are shown")
    return listing


def _root_name(gallery: Gallery, root: str) -> str:
    """Return the name of a folder in the gallery; Milvus keeps no list of folders, so a hash of the path is added."""
    if gallery.roots is not None:
        return gallery.roots.register(root)
    return f"{os.path.basename(root) or 'root'}-{hashlib.sha256(os.fsencode(root)).hexdigest()[:8]}"


@dataclass
class _Group:
    """What a thread has made of some files: new items, and the paths of items that stay as they are."""

    files: int
    items: list[Item] = field(default_factory=list)
    embedded: EmbeddedImages = field(default_factory=lambda: EmbeddedImages([], None, []))
    unchanged: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Why files were skipped."""


@dataclass
class _Indexer:
    """Adds files to a gallery and counts them. ``seen`` are the paths of the items that stay."""

    gallery: Gallery
    embedder: Embedder
    threads: int
    root: str
    prefix: str
    before: dict[str, Item]
    progress: Count
    note: Note
    seen: set[str] = field(default_factory=set)
    added: Counter[str] = field(default_factory=Counter)
    """The checksums of the items that were added or replaced."""
    new: int = 0
    replaced: int = 0
    unchanged: int = 0
    broken: int = 0

    def add_files(self, names: Sequence[str]) -> None:
        """Add files, each 64 of them in one change."""
        done, waiting = 0, list[_Group]()
        shared = self.embedder is not self.gallery.embedder  # one that leaves other cores to other threads
        run = run_on_cores if shared else run_in_threads
        with closing(run(self._jobs(names), self.threads)) as groups:
            for group in groups:
                done += group.files
                waiting.append(group)
                if done % _BATCH == 0 or done == len(names):
                    self._store(waiting)
                    waiting = []
                    self.progress(done, len(names))

    def _jobs(self, names: Sequence[str]) -> Iterator[Callable[[], _Group]]:
        """Divide files into groups as large as the embedder likes them; no group is in two changes."""
        size = min(_BATCH, self.embedder.batch)
        for start in range(0, len(names), _BATCH):
            batch = names[start : start + _BATCH]
            known = {path for name in batch if (path := self.prefix + name) in self.before}
            if self.gallery.roots is not None:  # Milvus checks its own storage
                intact = find_intact(self.gallery.engine, [self.before[path].id for path in known])
                known = {path for path in known if self.before[path].id in intact}
            for i in range(0, len(batch), size):
                yield partial(self._embed_files, batch[i : i + size], known)

    def _embed_files(self, names: Sequence[str], known: set[str]) -> _Group:
        """Read files and embed those that are new or changed. Several threads do this at once."""
        group = _Group(len(names))

        def changed_files() -> Iterator[Upload]:
            for name in names:
                path = self.prefix + name
                if (image := self._read_file(name, path, group)) is None:
                    continue
                if path in known and self.before[path].checksum == image.checksum:
                    group.unchanged.append(path)
                    continue
                group.items.append(Item(path, image.checksum, label_of(name), _id_of(path)))
                yield image

        group.embedded = embed_uploads(
            self.embedder, changed_files(), lambda position, error: group.broken.append(str(error))
        )
        return group

    def _read_file(self, name: str, path: str, group: _Group) -> Upload | None:
        """Read a file; None if that fails. Only the item of a file that no longer exists is removed."""
        file = os.path.join(self.root, name)
        try:
            if os.path.getsize(file) <= MAX_BYTES:
                with open(file, "rb") as content:
                    return Upload(content.read(MAX_BYTES), name=name)
            group.broken.append(f"cannot read the image {name!r}: it is larger than {MAX_BYTES:,} bytes")
        except FileNotFoundError:
            pass
        except OSError as error:
            group.unreadable.append(path)
            group.broken.append(f"cannot read the image {name!r}: {error.strerror}")
        return None

    def _store(self, groups: Sequence[_Group]) -> None:
        """Add what is new in one change, and count."""
        chosen = [group.items[position] for group in groups for position in group.embedded.positions]
        if chosen:
            embeddings = [group.embedded.embeddings for group in groups if group.embedded.embeddings is not None]
            thumbnails = [thumbnail for group in groups for thumbnail in group.embedded.thumbnails]
            added = self.gallery.add_embedded(chosen, Embeddings.cat(embeddings), thumbnails)
            self.new, self.replaced = self.new + added.new, self.replaced + added.replaced
            self.unchanged += added.unchanged
            self.seen.update(item.path for item in chosen)
            self.added.update(item.checksum for item in chosen)
        for group in groups:
            self.unchanged += len(group.unchanged)
            self.seen.update(group.unchanged, group.unreadable)
            for reason in group.broken:
                self.broken += 1
                if self.broken <= _MAX_NAMED:
                    self.note(reason)


def label_of(name: str) -> str | None:
    """Return the first sub-folder of a name; bytes that are not UTF-8 are escaped."""
    first, slash, _ = name.partition("/")
    return os.fsencode(first).decode("utf-8", "backslashreplace") if slash else None


def _id_of(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]


# -------------------- position maps --------------------


def add_maps(gallery: Gallery, *, progress: Count = silent, note: Note = silent) -> int:
    """Compute and store the maps that a gallery lacks; return how many. Images without a readable file get a note."""
    folder = gallery.require_folder()
    if not gallery.writable:
        raise ValueError(f"the gallery {gallery.location} is open for reading only")
    from idml.search.position_maps import PositionMapper, PositionMaps  # only --maps needs them

    maps = PositionMaps(folder)
    missing = maps.find_missing(gallery.items())
    mapper = PositionMapper(folder)
    unread = 0
    for start in range(0, len(missing), _BATCH):
        read: list[tuple[Item, Image.Image]] = []
        for item in missing[start : start + _BATCH]:
            try:
                read.append((item, _read_original(gallery, item)))
            except (ValueError, OSError) as error:
                unread += 1
                if unread <= _MAX_NAMED:
                    note(f"no position map of {item.path or item.id!r}: {error}")
        if read:
            maps.write([item for item, _ in read], mapper.compute([image for _, image in read]))
        progress(min(start + _BATCH, len(missing)), len(missing))
    if unread > _MAX_NAMED:
        note(f"… {unread - _MAX_NAMED} more images have no position map")
    return len(missing) - unread


def _read_original(gallery: Gallery, item: Item) -> Image.Image:
    """Read the image file of an item; one that is missing or has changed is a ``ValueError``."""
    file = gallery.image_file(item.id)
    if file is None:
        raise ValueError("its file is missing")
    image = Upload(file.read_bytes(), name=file.name)
    if image.checksum != item.checksum:
        raise ValueError("its file has changed since it was added")
    return image.decode()
