"""`idml calibrate`: calibrate a gallery on itself, or on the user's own queries, and store the result with it.

Queries come from the gallery. Each is searched in the whole gallery without itself (known), and again without its class
(unknown). Itself means every image with the same bytes, also for the user's own queries: else a query would find itself
at distance 0, which no new query does. Which images are queries depends on what the model has learned from:

    labels; no class learned             every image
    labels; classes learned, heads only  every image; learned classes by heads that were trained again without them
    labels; classes learned, trunk too   images of the classes that were not learned
    no labels                            changed copies of images; unknown: without the original and its near duplicates
    --queries DIR                        the user's images. Sub-folders are labels; those of no class here are unknown

What people said about answers (`idml.search.feedback`) is added to the queries.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from idml.calibration.calibrate import LISTED, UNKNOWN, CalibrationQueries, calibrate_queries, check_share
from idml.calibration.calibrate import describe_calibration as describe
from idml.calibration.copies import CHANGES, change_copies
from idml.calibration.evidence import ROUNDING, Profile
from idml.calibration.open_set import OpenSetQueries, QueryPool
from idml.calibration.report import build_page, draw_calibration
from idml.calibration.risk_control import FEWEST_CLUSTERS
from idml.calibration.score_comparison import describe_comparison
from idml.data.decoder_process import RefusedImage
from idml.data.images import read_image
from idml.data.layouts import EXTENSIONS, format_count
from idml.embeddings import Embeddings
from idml.evaluation.knn import nearest
from idml.files import write_atomic
from idml.model.model import LEARNED, PRETRAINED
from idml.progress import Note, Progress, image_counter, silent
from idml.records import Record
from idml.search.embedder import BATCH, MANY, Runtime
from idml.search.engines import Item
from idml.search.feedback import Feedback, read_feedback
from idml.search.gallery import Gallery, Location
from idml.search.gallery_folder import MODEL, REPORT, run_folder
from idml.search.results import DUPLICATE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Refit = Callable[[Path, Sequence[Path], Tensor, Tensor, Tensor, Progress], Iterator[Embeddings]]
"""Embeds images by the heads of each fold: model folder, files, labels, learned, folds, progress."""

_LEAST, _MOST, _PAIRS = 4000, 20_000, 4e8  # of images that are queries; of queries × images of the gallery
ORIGINALS, COPIES = 600, 2  # images that are copied, copies of each
_QUERIES = 50  # the smallest number that can be fitted
_MAX_NAMED = 20  # query images that are left out and get a line of their own
_CLOSE = 50  # images of the gallery that are compared with a judged picture
_UNKNOWN_CLASSES = 3 * FEWEST_CLUSTERS  # about half are counted; then these are enough in 499 of 500 splits
_WRONG = {True: "names a wrong class", False: "shows another picture"}


def calibrate_gallery(
    location: Location,
    *,
    queries: str | Path | None = None,
    unknown: float = UNKNOWN,
    keep_copies: bool = False,
    run: Location | None = None,
    runtime: Runtime = "auto",
    seed: int = 0,
    refit: Refit | None = None,
    assign_folds: Callable[[Tensor, Tensor], Tensor] | None = None,
    progress: Progress = silent,
    note: Note = silent,
) -> "CalibrationResult":
    """Calibrate a gallery and store what may be promised in it; return figures and words.

    Args:
        location: a folder, or milvus://host:port/collection.
        queries: a folder of images with one sub-folder for each label; by default the gallery's own images.
        unknown: the share of queries that show nothing of the gallery. The promises hold for this share or less.
        keep_copies: a query may find other images with the same bytes, because new pictures will find such images too.
        run: the run of a Milvus gallery.
        runtime: the library that runs the model.
        seed: of the draws.
        refit: trains the heads of a run again, for classes that it has learned from.
        assign_folds: divides the learned classes for ``refit``: labels [n], learned [n] → folds [n].
        progress: called with rows of how many images are done.
        note: called with lines for the user.
    """
    check_share(unknown)
    notes: list[str] = []

    def keep(line: str) -> None:
        notes.append(line)
        note(line)

    with Gallery.open(location, run=run, runtime=runtime, images=MANY, calibrated=False) as gallery:
        source = GallerySource.read(gallery, run, keep, progress, keep_copies=keep_copies)
        found = collect_queries(source, queries, unknown=unknown, seed=seed, refit=refit, assign_folds=assign_folds)
        _require_queries(found, source, unknown, own=queries is not None)
        profile = Profile.of(source.embeddings)
        model = gallery.embedder.fingerprint
        calibration, figures = calibrate_queries(found, unknown=unknown, profile=profile, model=model, seed=seed)
        gallery.store_calibration(calibration)
    words = describe(calibration, figures, _WRONG[source.labelled])
    known = found.queries.known
    result = {
        "gallery": str(location),
        "items": len(source.items),
        "classes": len(source.names) if source.labelled else 0,
        "labelled": source.labelled,
        "queries": found.words,
        "known_queries": int(known.sum()),
        "unknown_queries": int((~known).sum()),
        "right": int(found.queries.correct.sum()),
        "unknown_share": calibration.unknown,
        "model": model,
        "notes": notes,
        **figures,
        "words": words,
    }
    if gallery.roots is not None:
        path = gallery.roots.folder / REPORT
        split = "pictures" if not source.labelled else "classes" if unknown > 0 else "images"
        fitted = f"P(right) was fitted to half of the {split}; the promises come from the other half."
        level = "‖u‖" if any(calibration.percentiles["level"]) else None  # the pretrained trunk has no u
        intro = [f"{len(source.items):,} images. {fitted}", *describe_comparison(figures, level), *notes]
        write_atomic(path, build_page(f"Calibration of {path.parent.name}", intro, result, {"Figures": figures}))
        result["report"] = str(path)
    return CalibrationResult(result)


class CalibrationResult(Record):
    """What a calibration promises, the figures behind it, and where the report is."""

    @property
    def words(self) -> list[str]:
        """Lines that say what is promised."""
        return list(self["words"])

    @property
    def promises(self) -> list[dict[str, Any]]:
        """For each error rate, whether it is promised, and how many queries are then answered."""
        return list(self["promises"])

    @property
    def report(self) -> str | None:
        """The file of the report; None for a gallery in Milvus."""
        found: str | None = self.get("report")
        return found

    def figure(self) -> "Figure":
        """Draw the reliability diagram, and how many queries are answered at each error rate."""
        return draw_calibration(self)

    def lines(self) -> list[str]:
        """Return what is promised."""
        return self.words


def _require_queries(found: CalibrationQueries, source: "GallerySource", unknown: float, *, own: bool) -> None:
    if unknown > 0 and not bool((~found.queries.known).any()):
        single = "class; for queries that are all of this class, --unknown 0" if source.labelled else "picture"
        raise ValueError(f"no query can be made unknown: the gallery holds a single {single}")
    if (count := int(found.queries.known.sum())) < _QUERIES:
        raise ValueError(
            f"a calibration needs {_QUERIES} queries with a right answer, there are {count}: add images"
            + ("" if own or not source.labelled else ", or calibrate with --queries DIR")
        )


# -------------------- what is there --------------------


@dataclass(frozen=True, eq=False)
class GallerySource:
    """The items of a gallery as a calibration sees them. ``names`` are the labels, numbered by ``labels``."""

    gallery: Gallery
    run: Location | None
    items: list[Item]
    embeddings: Embeddings
    labels: Tensor
    names: dict[str, int]
    feedback: list[Feedback]
    note: Note
    progress: Progress
    keep_copies: bool = False

    @classmethod
    def read(
        cls, gallery: Gallery, run: Location | None, note: Note, progress: Progress, *, keep_copies: bool = False
    ) -> "GallerySource":
        """Read all items of a gallery. With ``keep_copies`` items with the same bytes count as different pictures."""
        items = list(gallery.items())
        if len({item.checksum for item in items}) < 2:
            count = "copies of one image" if len(items) > 1 else "one image" if items else "no image"
            raise ValueError(f"the gallery {gallery.location} has {count}: index more before you calibrate it")
        without = sum(item.label is None for item in items)
        if 0 < without < len(items):
            note(
                f"{without:,} of {len(items):,} images have no label: calibrated as a gallery without labels "
                "(to use labels, put every image into a sub-folder, or label it)"
            )
        embeddings = gallery.engine.embeddings([item.id for item in items])
        names: dict[str, int] = {}
        if without == 0:
            names = {label: n for n, label in enumerate(sorted({item.label or "" for item in items}))}
        numbers = [names[item.label or ""] for item in items] if names else range(len(items))
        feedback = read_feedback(gallery.location, gallery.engine.properties)
        return cls(gallery, run, items, embeddings, torch.tensor(numbers), names, feedback, note, progress, keep_copies)

    @property
    def labelled(self) -> bool:
        """Whether every item has a label."""
        return bool(self.names)

    def files(self, rows: Sequence[int]) -> list[Path]:
        """The image files of some items; one that is gone is an error."""
        roots, found = self.gallery.roots, []
        for row in rows:
            file = None if roots is None else roots.find_file(self.items[row].path)
            if file is None:
                raise FileNotFoundError(
                    f"the image file {self.items[row].path!r} is needed and not there: calibrate with --queries DIR"
                )
            found.append(file)
        return found

    @property
    def pictures(self) -> Tensor:
        """A number for each item [n]; items with the same bytes have the same one, unless copies are kept."""
        if self.keep_copies:
            return torch.arange(len(self.items))
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(item.checksum, len(numbers)) for item in self.items])

    def read_learned(self) -> tuple[Tensor, bool]:
        """Which items the model has learned from [n], and whether its trunk learned too."""
        learned, trunk = self.learned_images()
        return torch.tensor([item.checksum[:16] in learned for item in self.items]), trunk

    def learned_images(self) -> tuple[set[str], bool]:
        """The first 16 digits of the checksums of all images that the model has learned from; if its trunk learned."""
        folder = self.model_folder()
        if folder is None or not (folder / LEARNED).is_file():
            if folder is not None:
                self.note("the model does not say which images it has learned from: assumed, not checked, that none")
            return set(), False
        try:
            content = json.loads((folder / LEARNED).read_bytes())
            return set(content["images"]), content["trunk"] != "frozen"
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"{folder / LEARNED} is damaged: it should name images") from None

    def model_folder(self) -> Path | None:
        """The folder with the model; None for the pretrained trunk."""
        roots = self.gallery.roots
        if roots is not None:
            return None if (roots.folder / MODEL / PRETRAINED).is_file() else roots.folder / MODEL
        return None if self.run is None or str(self.run) == PRETRAINED else run_folder(self.run)


# -------------------- queries --------------------


def collect_queries(
    source: GallerySource,
    folder: str | Path | None = None,
    *,
    unknown: float = UNKNOWN,
    seed: int = 0,
    refit: Refit | None = None,
    assign_folds: Callable[[Tensor, Tensor], Tensor] | None = None,
    most: int | None = None,
    originals: int = ORIGINALS,
) -> CalibrationQueries:
    """Find the queries of a calibration and search them: the user's in ``folder``, or the gallery's own.

    ``most`` images of a labelled gallery are queries (by default `most_queries`), or copies of ``originals`` images of
    one without labels.
    """
    if folder is not None:
        return _user_queries(source, Path(folder), unknown)
    if source.labelled:
        return _labelled_queries(source, refit, assign_folds, seed, most or most_queries(len(source.items)))
    return _copied_queries(source, originals, seed)


def most_queries(images: int) -> int:
    """How many images of a gallery are queries, at most: fewer in a large gallery, where each costs more.

    >>> most_queries(5000), most_queries(40_000), most_queries(1_000_000)
    (20000, 10000, 4000)
    """
    return int(max(_LEAST, min(_MOST, _PAIRS // images)))


def search_known_and_unknown(pool: QueryPool, *, unknown: bool = True) -> OpenSetQueries:
    """Search each query as it is, and again without its class if there are images of other classes to find."""
    known = pool.search(listed=LISTED)
    parts, others = [known[known.known]], pool.visible_without_own > 0
    if unknown and bool(others.any()):
        parts.append(pool[others].search_without_own(listed=LISTED))
    return OpenSetQueries.cat(parts)


def _labelled_queries(
    source: GallerySource,
    refit: Refit | None,
    assign_folds: Callable[[Tensor, Tensor], Tensor] | None,
    seed: int,
    most: int,
) -> CalibrationQueries:
    """Images of the gallery, each searched without itself, and again without its class."""
    labels, pictures, (learned, trunk) = source.labels, source.pictures, source.read_learned()
    if copied := int((pictures.bincount()[pictures] > 1).sum()):
        source.note(
            f"{copied:,} images of the gallery have the bytes of another one: none of them finds its copies "
            "(with --keep-copies they count as different pictures)"
        )
    learned_class = torch.isin(labels, labels[learned].unique())
    classes, count = len(source.names), len(labels[learned].unique())
    fresh = _sample((~learned_class).nonzero().flatten(), most, seed)
    parts, words = [], f"{len(fresh):,} images of the gallery, each left out of it, and again with its whole class"
    if len(fresh):
        pool = QueryPool(
            source.embeddings[fresh], labels[fresh], source.embeddings, labels, rows=fresh, copies=pictures
        )
        parts.append(search_known_and_unknown(pool))
    if count and trunk:
        if count == classes:
            raise ValueError(
                "the model has learned from every class of the gallery, and its trunk was trained too: nothing can be "
                "promised from these images; calibrate with --queries DIR"
            )
        source.note(f"{count:,} of {classes:,} classes are no queries: the model has learned from them")
        words += f"; {count:,} classes that the model has learned from are left out"
    elif count:
        if refit is None or assign_folds is None:
            raise ValueError("the model has learned from the gallery's classes; calibrate with idml calibrate")
        rows = _sample(learned_class.nonzero().flatten(), most, seed)
        folder = source.model_folder()
        assert folder is not None
        folds = assign_folds(labels, learned)
        files = source.files(range(len(labels)))
        for fold, embeddings in enumerate(refit(folder, files, labels, learned, folds, source.progress)):
            own = rows[folds[rows] == fold]
            pool = QueryPool(embeddings[own], labels[own], embeddings, labels, rows=own, copies=pictures)
            parts.append(search_known_and_unknown(pool))
        words = f"{len(fresh) + len(rows):,} images of the gallery, each left out of it, and again with its whole class"
        words += f"; cross-fitted: {count:,} classes by heads that were trained again without them"
    parts += _feedback_queries(source)
    if len(parts) > 1 and source.feedback:
        words += f"; {len(source.feedback):,} answers that people judged"
    return CalibrationQueries(OpenSetQueries.cat(parts), True, words)


def _user_queries(source: GallerySource, folder: Path, unknown: float) -> CalibrationQueries:
    """The user's images; with few unknown classes among them, known ones without their class are unknown too."""
    if not source.labelled:
        raise ValueError("--queries needs a gallery in which every image has a label")
    files, names = _list_queries(folder, source.note)
    files, names = _leave_out_learned(source, files, names)
    embeddings, read, checksums = _embed_files(source, files, folder)
    names = [names[place] for place in read]
    first = {item.checksum: row for row, item in reversed([*enumerate(source.items)])}
    rows = torch.tensor([first.get(checksum, -1) for checksum in checksums])
    if stored := int((rows >= 0).sum()):
        source.note(f"{stored:,} of {len(rows):,} query images are in the gallery too: none of them finds itself")
    numbers = dict(source.names)
    for name in names:
        numbers.setdefault(name, len(numbers))
    labels = torch.tensor([numbers[name] for name in names])
    pool = QueryPool(embeddings, labels, source.embeddings, source.labels, rows=rows, copies=source.pictures)
    found = pool.search(listed=LISTED)
    outside = len(labels[~found.known].unique())
    words = (
        f"{len(names):,} images in {folder.name}, {int((~found.known).sum()):,} of them of {outside:,} unknown classes"
    )
    parts = [found]
    if unknown > 0 and outside < _UNKNOWN_CLASSES and len(source.names) > 1:
        known = found.known & (pool.visible_without_own > 0)
        if bool(known.any()):
            parts.append(pool[known].search_without_own(listed=LISTED))
        words += "; known ones also without their class, because few classes are unknown"
    parts += _feedback_queries(source)
    return CalibrationQueries(OpenSetQueries.cat(parts), True, words, classes=len(source.names))


def _copied_queries(source: GallerySource, originals: int, seed: int) -> CalibrationQueries:
    """Changed copies of images. An original and its near duplicates are one class."""
    total = len(source.items)
    rows = _sample(torch.arange(total), originals, seed)
    files = source.files(rows.tolist())
    report, parts = image_counter(source.progress, "copied"), []
    for done, (row, file) in enumerate(zip(rows.tolist(), files, strict=True), 1):
        copies = change_copies(read_image(file), COPIES, seed=(seed, source.items[row].checksum))
        parts.append(source.gallery.embedder.embed(copies))
        report(done, len(rows))
    labels = group_duplicates(source.items, source.embeddings)
    own = labels[rows].repeat_interleave(COPIES)
    pool = QueryPool(Embeddings.cat(parts), own, source.embeddings, labels)
    words = (
        f"{len(own):,} changed copies ({', '.join(CHANGES)}) of {len(rows):,} images, and again without the original "
        "and its near duplicates"
    )
    return CalibrationQueries(search_known_and_unknown(pool), False, words, known_by_image=False)


def group_duplicates(items: Sequence[Item], embeddings: Embeddings) -> Tensor:
    """A number for each item [n]; near duplicates have the same one."""
    head = list(range(len(items)))

    def find(i: int) -> int:
        while head[i] != i:
            head[i] = head[head[i]]
            i = head[i]
        return i

    first: dict[str, int] = {}
    for i, item in enumerate(items):
        head[find(i)] = find(first.setdefault(item.checksum, i))
    found = nearest(embeddings, 10)
    close = (found.distances < DUPLICATE).nonzero()
    for i, place in close.tolist():
        head[find(i)] = find(int(found.indices[i, place]))
    return torch.tensor([find(i) for i in range(len(head))])


def _feedback_queries(source: GallerySource) -> list[OpenSetQueries]:
    """Queries whose right label users gave as feedback: a label that is not in the gallery is an unknown class.

    Their bytes are not kept. An image at a distance that is mere rounding shows the same picture, and is not found.
    """
    told = [one for one in source.feedback if one.label is not None]
    if not told or not source.labelled:
        return []
    numbers = dict(source.names)
    for one in told:
        numbers.setdefault(str(one.label), len(numbers))
    labels = torch.tensor([numbers[str(one.label)] for one in told])
    embeddings = Embeddings.cat([one.embedding for one in told])
    close, pictures = nearest(embeddings, _CLOSE, gallery=source.embeddings), source.pictures
    same = close.distances < ROUNDING
    rows = torch.where(same[:, 0], close.indices[:, 0], -1)
    for line in same[:, 0].nonzero().flatten().tolist():
        shown = pictures[close.indices[line, same[line]]]
        pictures[torch.isin(pictures, shown)] = shown[0]
    if stored := int((rows >= 0).sum()):
        source.note(f"{stored:,} of {len(told):,} judged pictures are in the gallery too: none of them finds itself")
    pool = QueryPool(embeddings, labels, source.embeddings, source.labels, rows=rows, copies=pictures)
    seeing = pool.visible > 0
    return [pool[seeing].search(listed=LISTED)] if bool(seeing.any()) else []


def _sample(rows: Tensor, most: int, seed: int) -> Tensor:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:most]
    return rows[order].sort().values


def _list_queries(folder: Path, note: Note) -> tuple[list[Path], list[str]]:
    """The images below the sub-folders of a folder, and their labels; images beside the sub-folders are counted."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {str(folder)!r} of queries")
    files, names = [], []
    for sub in sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        for path in sorted(sub.rglob("*")):
            if path.name.lower().endswith(EXTENSIONS) and path.is_file():
                files.append(path)
                names.append(os.fsencode(sub.name).decode("utf-8", "backslashreplace"))
    if not files:
        raise ValueError(
            f"{str(folder)!r} has no images in sub-folders: name a folder with one sub-folder for each label"
        )
    if beside := sum(path.name.lower().endswith(EXTENSIONS) and path.is_file() for path in folder.iterdir()):
        note(
            f"{format_count(beside, 'image')} directly in {str(folder)!r} left out: a query needs a sub-folder, "
            "whose name is its label"
        )
    return files, names


def _leave_out_learned(source: GallerySource, files: list[Path], names: list[str]) -> tuple[list[Path], list[str]]:
    """The query images that the model has not learned from, and their labels. The others are counted and named."""
    learned, _ = source.learned_images()
    fresh = [not learned or _checksum(path)[:16] not in learned for path in files]
    if not any(fresh):
        raise ValueError(
            f"the model has learned from all {len(files):,} query images: nothing can be promised from them; "
            "name a folder of other images"
        )
    out = [path for path, new in zip(files, fresh, strict=True) if not new]
    for path in out[:_MAX_NAMED]:
        source.note(f"the model has learned from {str(path)!r}")
    if out:
        source.note(f"{len(out):,} of {len(files):,} query images were left out: the model has learned from them")
    kept = [(path, name) for path, name, new in zip(files, names, fresh, strict=True) if new]
    return [path for path, _ in kept], [name for _, name in kept]


def _checksum(path: Path) -> str:
    """SHA-256 of a file's bytes, as items have it; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _embed_files(source: GallerySource, files: Sequence[Path], folder: Path) -> tuple[Embeddings, list[int], list[str]]:
    """Embed the images that can be read; their places among the files and checksums. The others are named."""
    report, parts, read, broken = image_counter(source.progress, "embedded"), [], list[int](), list[str]()
    checksums = list[str]()
    for start in range(0, len(files), BATCH):
        batch = []
        for place, path in enumerate(files[start : start + BATCH], start):
            try:
                batch.append(read_image(path))
            except (OSError, RefusedImage) as error:
                broken.append(str(error))
                continue
            read.append(place)
            checksums.append(_checksum(path))
        if batch:
            parts.append(source.gallery.embedder.embed(batch))
        report(min(start + BATCH, len(files)), len(files))
    for line in broken[:_MAX_NAMED]:
        source.note(line)
    if not parts:
        raise ValueError(f"no image in {str(folder)!r} can be read ({len(files):,} tried)")
    if broken:
        source.note(f"{len(broken):,} of {len(files):,} query images were left out: they cannot be read")
    return Embeddings.cat(parts), read, checksums
