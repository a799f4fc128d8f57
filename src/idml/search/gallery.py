"""A gallery: images that can be searched, the model that embeds them, and calibrated answers to queries.

An engine stores and searches the items, either in a folder or in Milvus (milvus://host:port/collection, or milvuss://
for TLS). A gallery in a folder also holds its model and knows where its image files are (`idml.search.gallery_folder`).
A gallery in Milvus holds only the items, so its run is named each time it is opened. The calibration lies in the
folder, or in the metadata of the collection: every client gives the same answers.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from PIL import Image

from idml.calibration.evidence import SEARCHED, Profile, sample_profile_rows
from idml.calibration.risk_control import ERROR_RATES, Drift, RiskGuarantee, describe_outgrown, notice_unknown
from idml.calibration.stored import Calibration
from idml.data.images import read_image
from idml.embeddings import Embeddings
from idml.model.model import PRETRAINED, fingerprint_of
from idml.search.answers import Answer, RiskTargets, State
from idml.search.embedder import MANY, Embedder, Runtime, open_embedder
from idml.search.engines import Added, Engine, Item, Properties
from idml.search.engines.sqlite import SqliteEngine
from idml.search.engines.sqlite_storage import is_gallery
from idml.search.gallery_folder import (
    CALIBRATION,
    POSITION_MAPS,
    UPLOADS,
    ImageRoots,
    MissingMap,
    copy_model,
    find_model,
    lock_creation,
    update_model_files,
)
from idml.search.results import AnswerContext, GalleryChanged, Reply, Result, build_replies, check_count
from idml.search.uploads import Upload, embed_uploads, find_intact

if TYPE_CHECKING:
    from torch import Tensor

    from idml.search.reranking import GalleryReranker

__all__ = [
    "Added",
    "Gallery",
    "Reply",
    "Result",
    "Status",
    "Upload",
    "open_engine",
    "open_or_create",
]

_SEARCH_ATTEMPTS = 5  # searches of a gallery that changes during the search
_LATEST = 200  # queries whose answers show how many are unknown
_PROFILE_STALE = 0.01  # recompute the distances of a profile after more than this share of the items changed

Location = str | Path


# -------------------- engines by location --------------------


def is_milvus(location: Location) -> bool:
    """Return whether a gallery is in Milvus; otherwise it is in a folder.

    >>> is_milvus("milvus://localhost:19530/birds"), is_milvus("birds")
    (True, False)
    """
    return str(location).startswith(("milvus://", "milvuss://"))


def gallery_exists(location: Location) -> bool:
    """Return whether there is a gallery at this location."""
    if not is_milvus(location):
        return is_gallery(location)
    try:
        open_engine(location).close()
    except FileNotFoundError:
        return False
    return True


def create_engine(location: Location, properties: Properties) -> Engine:
    """Create an empty gallery and return its engine, open for writing."""
    if is_milvus(location):
        from idml.search.engines.milvus import MilvusEngine

        return MilvusEngine.create(str(location), properties)
    return SqliteEngine.create(location, properties)


def open_engine(location: Location, *, run: Location | None = None, write: bool = False) -> Engine:
    """Open only the engine of a gallery, for work that needs no model.

    If a ``run`` is given, the gallery must have been made with its model.
    """
    model = None if run is None else fingerprint_of(run)
    if is_milvus(location):
        from idml.search.engines.milvus import MilvusEngine

        return MilvusEngine.open(str(location), model=model, write=write)
    return SqliteEngine.open(location, model=model, write=write)


# -------------------- the gallery --------------------


@dataclass(frozen=True)
class Status:
    """A summary of a gallery."""

    items: int
    labelled: int
    """Items with a label."""
    classes: int
    """Different labels."""
    model: str
    """The fingerprint of the model."""
    calibrated: bool
    unknown_share: float | None
    """Share of unknown queries in the calibration; guarantees hold up to it. None if not calibrated."""
    recognised: float | None
    """Share of the calibration's unknown queries that were answered *not in the collection*; None if not known."""
    rejected: float | None
    """The same share of its known queries."""
    drift: str
    """Why nothing is guaranteed any more although there is a calibration: the gallery has changed, or too many of the
    latest queries are unknown. Empty if the guarantees apply."""
    growth: str
    """A small change of size since calibration that the guarantees cover; empty if there is none."""
    level_speaks: bool
    """Whether ‖u‖ ranks wrong answers better than chance here."""
    queries: str
    """What the queries of the calibration were, in words; empty if not calibrated."""
    writable: bool


class Gallery:
    """Images that can be searched. Use `create`, `open` or `open_or_create` to get one; threads may share it.

    Several processes may read and write a gallery. After `refresh` the counts and the profile are the newest too.
    Change the gallery through these methods, not through the engine: the methods keep counts and profile up to date.
    """

    def __init__(
        self, location: Location, engine: Engine, embedder: Embedder, calibration: Calibration | None, *, writable: bool
    ) -> None:
        self.location, self.engine, self.embedder, self.writable = str(location), engine, embedder, writable
        self.roots = None if is_milvus(location) else ImageRoots(Path(location))
        self.write_lock = threading.RLock()  # held during changes; hold it to keep the gallery unchanged
        self._statistics = _Statistics(engine, self.write_lock)
        self._calibration = calibration
        self._stored = None if calibration is None else calibration.encode()
        self._drift: tuple[Calibration, Profile, Drift] | None = None
        self._reranker: GalleryReranker | None = None  # holds a model: made when it is needed
        self._latest = _LatestQueries()

    @classmethod
    def create(cls, location: Location, run: Location, *, runtime: Runtime = "auto") -> "Gallery":
        """Create an empty gallery for the model of ``run``, open for writing.

        Args:
            location: a new folder, or milvus://host:port/collection.
            run: a run folder, a model file, or ``pretrained``. A gallery in a folder copies the model.
            runtime: the library that runs the model, as in `open_embedder`.
        """
        if gallery_exists(location):
            raise ValueError(f"there is already a gallery at {location}")
        embedder = open_embedder(run, runtime=runtime, images=MANY)
        properties = Properties(embedder.fingerprint, embedder.dimensions, embedder.uncertainty)
        if is_milvus(location):
            return cls(location, create_engine(location, properties), embedder, None, writable=True)
        with lock_creation(Path(location)):
            if gallery_exists(location):  # somebody else made one while the model was opened: its model must stay
                raise ValueError(f"there is already a gallery at {location}")
            copy_model(run, Path(location))  # first: a kill then leaves no gallery, not one without a model
            return cls(location, create_engine(location, properties), embedder, None, writable=True)

    @classmethod
    def open(
        cls,
        location: Location,
        *,
        run: Location | None = None,
        write: bool = False,
        runtime: Runtime = "auto",
        images: int = 0,
        calibrated: bool = True,
    ) -> "Gallery":
        """Open an existing gallery.

        Args:
            location: a folder, or milvus://host:port/collection.
            run: the run that the gallery was made with; required in Milvus. For a folder, with ``write`` the exported
                model of the run is copied into the gallery.
            write: open for writing.
            runtime: the library that runs the model, as in `open_embedder`.
            images: about how many images will be embedded, as in `open_embedder`.
            calibrated: read the calibration; one that is damaged or of another model is an error.
        """
        if is_milvus(location) and run is None:
            raise ValueError(f"{location} contains no model; name the run that it was made with")
        engine = open_engine(location, run=run, write=write)
        try:
            source = find_model(Path(location)) if run is None else run
            embedder = open_embedder(source, runtime=runtime, images=images)
            if embedder.fingerprint != engine.properties.model:
                raise ValueError(f"the model in {location} is not the model that the gallery was made with")
            if run is not None and write and not is_milvus(location):
                update_model_files(run, Path(location))
            calibration = read_calibration(location, engine) if calibrated else None
            return cls(location, engine, embedder, calibration, writable=write)
        except BaseException:
            engine.close()
            raise

    # ---- searching ----

    def search(
        self,
        images: Sequence[Image.Image | str | Path],
        k: int = 10,
        targets: RiskTargets | None = None,
        *,
        max_error: float | None = None,
        rerank: str | None = None,
    ) -> list[Reply]:
        """Search for images; give a reply with up to ``k`` results for each.

        ``images`` are files, or RGB images as `decode_image` returns them. ``max_error`` is short for
        ``targets=RiskTargets(max_error=…)``. ``rerank="diml"`` sorts the first 100 results anew by position maps, which
        `idml index --maps` stores; nothing is promised then (`idml.search.reranking`).
        """
        if isinstance(images, str | Path):
            raise ValueError(f"images must be a list of images or files, got {str(images)!r}")
        if max_error is not None:
            if targets is not None:
                raise ValueError("give either targets or max_error, not both")
            targets = RiskTargets(max_error=max_error)
        check_count(k)
        reranker = None if rerank is None else self._open_reranker(rerank, targets)
        queries = [image if isinstance(image, Image.Image) else read_image(image) for image in images]
        if not queries:
            return []
        embedded = self.embedder.embed(queries)
        if reranker is None:
            return self.search_embeddings(embedded, k, targets)
        return self._search_reranked(embedded, reranker.compute_maps(queries), k, targets, reranker)

    def search_items(
        self, ids: Sequence[str], k: int = 10, targets: RiskTargets | None = None, *, rerank: str | None = None
    ) -> list[Reply]:
        """Search for items of the gallery, each without itself: the replies are those of a gallery that lacks it."""
        check_count(k)
        reranker = None if rerank is None else self._open_reranker(rerank, targets)
        if not len(ids):
            return []
        stored = self.engine.embeddings(ids)
        if reranker is None:
            return self.search_embeddings(stored, k, targets, without=ids)
        return self._search_reranked(stored, reranker.read_maps(ids), k, targets, reranker, without=ids)

    def search_embeddings(
        self,
        queries: Embeddings,
        k: int = 10,
        targets: RiskTargets | None = None,
        *,
        without: Sequence[str] | None = None,
        counted: bool = True,
    ) -> list[Reply]:
        """Search for queries that the gallery's model has embedded.

        ``without`` names an item to leave out for each. Other queries count among the latest ones, whose answers show
        how many are unknown; not if ``counted`` is False.
        """
        check_count(k)
        for _ in range(_SEARCH_ATTEMPTS):
            if len(self.engine) <= (without is not None):
                reason = "the collection is empty" if without is None else "the collection has no other image"
                empty = Answer(State.NOVEL, reason, False)
                return [Reply(empty, (), level, False, ()) for level in queries.level.tolist()]
            try:
                context = self._answer_context()
                replies = build_replies(self.engine, queries, k, targets or RiskTargets(), context, without=without)
                if counted and without is None:
                    self._latest.count(queries, [reply.answer.state is State.NOVEL for reply in replies])
                void = "" if context.void else self._describe_unknown(context.calibration)
                return [_without_promise(reply, void) for reply in replies] if void else replies
            except GalleryChanged:
                self._statistics.reset()  # after the end of a change by this process; another may have made one too
        raise OSError(f"the gallery {self.location} changes too fast to be searched; try again")

    def _answer_context(self) -> AnswerContext:
        """Collect what all answers depend on in the current state."""
        counts, calibration = self._statistics.counts, self.calibration
        unlabelled = counts.items - counts.labelled
        notes = []
        if 0 < unlabelled < counts.items:
            notes.append(
                f"{unlabelled} of {counts.items} images have no label: answered as a collection without labels"
            )
        if calibration is None:
            notes.append(f"{self._uncalibrated()}: nothing is promised (see idml calibrate)")
        void, growth = self._describe_drift(calibration)
        notes += [line for line in (void, growth) if line]
        labelled = unlabelled == 0 if calibration is None else calibration.labelled
        return AnswerContext(labelled, calibration, self._statistics.profile, tuple(notes), void)

    # ---- re-ranking ----

    @property
    def has_maps(self) -> bool:
        """Whether there are position maps, by which results can be re-ranked."""
        return self.roots is not None and (self.roots.folder / POSITION_MAPS).exists()

    def require_folder(self) -> Path:
        """Return the folder of the gallery; one in Milvus keeps no position maps."""
        if self.roots is None:
            raise MissingMap("a gallery in Milvus keeps no position maps: use one in a folder")
        return self.roots.folder

    def check_rerank(self, rerank: str, targets: RiskTargets | None = None) -> None:
        """Raise ``ValueError`` if results cannot be re-ranked so; `MissingMap` if the gallery has no position maps."""
        self._open_reranker(rerank, targets)

    def _open_reranker(self, rerank: str, targets: RiskTargets | None = None) -> "GalleryReranker":
        from idml.search.reranking import GalleryReranker, check_rerank

        check_rerank(rerank, targets)
        folder = self.require_folder()
        if not self.has_maps:
            raise MissingMap("the gallery has no position maps: idml index --maps makes them")
        if self._reranker is None:
            self._reranker = GalleryReranker(rerank, self.engine, folder)
        return self._reranker

    def _search_reranked(
        self,
        queries: Embeddings,
        maps: "Tensor",
        k: int,
        targets: RiskTargets | None,
        reranker: "GalleryReranker",
        *,
        without: Sequence[str] | None = None,
    ) -> list[Reply]:
        """Search and sort the first results of each query anew by the maps of the queries."""
        for _ in range(_SEARCH_ATTEMPTS):
            replies = self.search_embeddings(queries, max(k, reranker.depth), targets, without=without)
            try:
                return reranker.rerank(queries, maps, replies, k)
            except ValueError:
                if all(result.id in self.engine for reply in replies for result in reply.results):
                    raise  # else an item was removed during the search
        raise OSError(f"the gallery {self.location} changes too fast to be searched; try again")

    # ---- calibration and status ----

    @property
    def calibration(self) -> Calibration | None:
        """The calibration that applies; None if there is none, or if it was made before labels came or went."""
        counts, found = self._statistics.counts, self._calibration
        return found if found is not None and found.labelled == (counts.items == counts.labelled) else None

    @property
    def outgrown(self) -> str:
        """That the number of images alone makes the promises void; empty if it does not. Quick: nothing is searched."""
        found = self.calibration
        if found is None or found.profile is None:
            return ""
        return describe_outgrown(found.profile.size, len(self))

    def _uncalibrated(self) -> str:
        if self._calibration is None:
            return "not calibrated"
        return f"calibrated when its images had {'' if self._calibration.labelled else 'no '}labels"

    def store_calibration(self, calibration: Calibration) -> None:
        """Store a calibration with the gallery and answer by it from now on."""
        if calibration.model != self.embedder.fingerprint:
            raise ValueError(f"the calibration belongs to another model ({calibration.model!r}): calibrate again")
        write_calibration(self.location, self.engine, calibration)
        with self.write_lock:
            self._calibration, self._stored = calibration, calibration.encode()
            self._latest.clear()

    @property
    def name(self) -> str:
        """The name of the collection: that of its folder or Milvus collection, without the path."""
        return self.location.rstrip("/").rpartition("/")[2] if self.roots is None else self.roots.folder.resolve().name

    def guarantees(self, errors: Sequence[float] = ERROR_RATES, confidence: float = 0.9) -> list[RiskGuarantee]:
        """Return what can be guaranteed for each error rate; an empty list if the gallery is not calibrated."""
        calibration = self.calibration
        return [] if calibration is None else [calibration.find_guarantee(error, confidence) for error in errors]

    def status(self) -> Status:
        """Summarise the gallery."""
        found = self.calibration
        void, growth = self._describe_drift(found)
        return Status(
            *self._statistics.counts,
            model=self.embedder.fingerprint,
            calibrated=found is not None,
            unknown_share=None if found is None else found.unknown,
            recognised=None if found is None else found.recognised,
            rejected=None if found is None else found.rejected,
            drift=void or self._describe_unknown(found),
            growth=growth,
            level_speaks=found is not None and found.level_speaks,
            queries="" if found is None else found.queries,
            writable=self.writable,
        )

    def _describe_drift(self, calibration: Calibration | None) -> tuple[str, str]:
        """Why the promises are void, and a small growth that they cover; each empty if there is none."""
        profile = self._statistics.profile
        if calibration is None or calibration.profile is None or profile is None:
            return "", ""
        cached = self._drift
        if cached is None or cached[0] is not calibration or cached[1] is not profile:
            self._drift = cached = (calibration, profile, calibration.drift(profile))
        drift = cached[2]
        void = f"{drift.reason}: nothing is promised until you calibrate again (idml calibrate)"
        return (void, "") if drift.changed else ("", drift.reason)

    def _describe_unknown(self, calibration: Calibration | None) -> str:
        """Why the promises are void if clearly more of the latest queries are unknown than in the calibration."""
        if calibration is None or calibration.recognised is None or calibration.rejected is None:
            return ""
        rates = {"recognised": calibration.recognised, "rejected": calibration.rejected, "share": calibration.unknown}
        rejected, total = self._latest.counts()
        share = notice_unknown(rejected, total, **rates)
        if share is None:
            return ""
        return (
            f"about {share:.0%} of the latest {total} queries seem to show nothing of the collection, and the "
            f"calibration is for {calibration.unknown:.0%} or fewer: nothing is promised (see idml calibrate --unknown)"
        )

    # ---- changes ----

    def add(self, images: Sequence[Upload]) -> Added:
        """Add all of the images, or none if one fails. When this returns, they are stored durably.

        Images with the same bytes are one item. An item that exists already keeps its data and takes over a label
        that is given. A gallery in a folder stores the bytes, and position maps too if it has some already.
        """
        if not self.writable:
            raise ValueError(f"the gallery {self.location} is open for reading only")
        uploads = {image.id: image for image in images}
        existing = [item for item in self.engine.get_many(list(uploads)) if item is not None]
        before = {item.id: item for item in existing}
        intact = {*before} if self.roots is None else find_intact(self.engine, list(before))  # Milvus checks itself
        new = [image for id, image in uploads.items() if id not in intact]
        embedded = embed_uploads(self.embedder, new)
        items = [self._make_item(image, before.get(image.id)) for image in new]
        if items and self.has_maps:
            self._open_reranker("diml").store_maps(items, (image.decode() for image in new))  # else no re-ranking
        with self.write_lock:
            present = [item for item in self.engine.get_many(list(intact)) if item is not None]
            if self.roots is not None:
                without_file = [item for item in present if self.roots.find_file(item.path) is None]
                try:
                    for item in [*items, *without_file]:
                        if item.path.startswith(f"{UPLOADS}/"):
                            self.roots.write_upload(item.path, uploads[item.id].data)
                except OSError:
                    self.engine.free_log()  # there may be space for the next upload
                    raise
            added = Added(0, 0, 0)
            if embedded.embeddings is not None:
                added = self.add_embedded(items, embedded.embeddings, embedded.thumbnails)
            labels = {item.id: label for item in present if (label := uploads[item.id].label) is not None}
            relabelled = self.relabel(labels) if labels else 0
        return Added(added.new, added.replaced + relabelled, added.unchanged + len(intact) - relabelled)

    def _make_item(self, image: Upload, damaged: Item | None) -> Item:
        path = "" if self.roots is None else f"{UPLOADS}/{image.id}.{image.extension}"
        label = damaged.label if image.label is None and damaged is not None else image.label
        return Item(path, image.checksum, label)

    def add_embedded(
        self, items: Sequence[Item], embeddings: Embeddings, thumbnails: Sequence[bytes] | None = None
    ) -> Added:
        """Add items with their embeddings; see `Engine.add`."""
        with self._statistics.track(item.id for item in items):
            return self.engine.add(items, embeddings, thumbnails)

    def remove(self, ids: Iterable[str]) -> int:
        """Remove items and the stored bytes of uploaded ones; return how many existed. Unknown ids are ignored."""
        if isinstance(ids, str):
            raise ValueError(f"ids must be a list of ids, got the string {ids!r}")
        ids = list(ids)
        with self._statistics.track(ids):
            removed = self.engine.remove(ids)
            if self.roots is not None:
                for id in ids:  # also for unknown ids: a kill may have come between the two steps
                    self.roots.delete_upload(id)
                if (self.roots.folder / POSITION_MAPS).exists():
                    from idml.search.position_maps import PositionMaps

                    PositionMaps(self.roots.folder).delete(ids)
        return removed

    def relabel(self, labels: Mapping[str, str | None]) -> int:
        """Change the labels of items; return how many changed. An unknown id is an error, and nothing changes."""
        with self._statistics.track(labels):
            return self.engine.relabel(labels)

    # ---- reading ----

    def get(self, id: str) -> Item | None:
        """Return the item with this id, or None."""
        return self.engine.get(id)

    def get_many(self, ids: Sequence[str]) -> list[Item | None]:
        """Return the item for each id, None where there is none."""
        return self.engine.get_many(ids)

    def items(self) -> Iterator[Item]:
        """Iterate over all items."""
        return self.engine.items()

    def thumbnail(self, id: str) -> bytes:
        """Return the thumbnail of an item, a JPEG."""
        return self.engine.thumbnail(id)

    def image_file(self, id: str) -> Path | None:
        """Return the image file of an item, links resolved; None if it does not exist or is outside its root."""
        item = self.engine.get(id)
        return None if item is None or self.roots is None else self.roots.find_file(item.path)

    def refresh(self) -> bool:
        """Read the newest state; return whether there was a newer one."""
        with self.write_lock:
            newer = self.engine.refresh()
            if newer:
                self._statistics.reset()
            now = stored_calibration(self.location, self.engine)[1]
            if now != self._stored:
                self._calibration, self._stored, newer = read_calibration(self.location, self.engine), now, True
                self._latest.clear()
            return newer

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def __repr__(self) -> str:
        return f"Gallery({str(self.location)!r}, {len(self):,} images)"

    def __len__(self) -> int:
        return len(self.engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_or_create(location: Location, run: Location | None = None, *, runtime: Runtime = "auto") -> Gallery:
    """Open the gallery for writing, or create it with the model of ``run`` (by default the pretrained trunk)."""
    if gallery_exists(location):
        return Gallery.open(location, run=run, write=True, runtime=runtime, images=MANY)
    return Gallery.create(location, PRETRAINED if run is None else run, runtime=runtime)


# -------------------- the latest queries --------------------


class _LatestQueries:
    """Which of the latest different queries were not in the collection; one that is asked again counts once."""

    def __init__(self) -> None:
        self._rejected: dict[bytes, bool] = {}  # by the rounded embedding, the latest at the end
        self._lock = threading.Lock()

    def count(self, queries: Embeddings, rejected: Sequence[bool]) -> None:
        """Count queries. Their embeddings are rounded: they depend a little on the others of their batch."""
        rounded = (100 * queries.unit.detach()).round().cpu().numpy().astype("int8")
        with self._lock:
            for row, own in zip(rounded, rejected, strict=True):
                self._rejected.pop(row.tobytes(), None)
                self._rejected[row.tobytes()] = own
            for key in list(self._rejected)[:-_LATEST]:
                del self._rejected[key]

    def counts(self) -> tuple[int, int]:
        """How many of the queries were not in the collection, and how many queries there are."""
        with self._lock:
            return sum(self._rejected.values()), len(self._rejected)

    def clear(self) -> None:
        """Forget all queries."""
        with self._lock:
            self._rejected.clear()


def _without_promise(reply: Reply, why: str) -> Reply:
    return replace(reply, answer=replace(reply.answer, promised=False), notes=(*reply.notes, why))


# -------------------- calibrations --------------------


def stored_calibration(location: Location, engine: Engine) -> tuple[str, bytes | None]:
    """Where the calibration of a gallery lies, and its bytes; None if there is none."""
    if is_milvus(location):
        return f"the calibration in {location}", engine.read_metadata("calibration")
    path = Path(location) / CALIBRATION
    return str(path), path.read_bytes() if path.exists() else None


def read_calibration(location: Location, engine: Engine) -> Calibration | None:
    """Read the calibration of a gallery; None if there is none. One of another model or search is an error."""
    place, data = stored_calibration(location, engine)
    if data is None:
        return None
    found = Calibration.decode(data, place, model=engine.properties.model)
    if found.searched != SEARCHED:
        raise ValueError(f"{place} was made for {found.searched!r}, a gallery needs {SEARCHED!r}: calibrate again")
    return found


def write_calibration(location: Location, engine: Engine, calibration: Calibration) -> None:
    """Store the calibration of a gallery durably."""
    if is_milvus(location):
        engine.write_metadata("calibration", calibration.encode())
    else:
        calibration.save(Path(location) / CALIBRATION)


# -------------------- counts and profile --------------------


class Counts(NamedTuple):
    """The number of items, of items with a label, and of different labels."""

    items: int
    labelled: int
    classes: int


class _Statistics:
    """Counts and distance profile of a gallery: read once from all items, then updated with each tracked change.

    The profile equals `Profile.of`, but comes from engine searches, so not all vectors have to be read. Its distances
    may be older by a few changes, its size is always the present one.
    """

    def __init__(self, engine: Engine, write_lock: threading.RLock) -> None:
        self._engine, self._lock = engine, write_lock
        self.reset()

    def reset(self) -> None:
        """Forget everything; use it after a change that was not tracked."""
        with self._lock:
            self._labels: Counter[str | None] | None = None
            self._counts: Counts | None = None
            self._profile: Profile | None = None
            self._ids: list[str] | None = None  # in their order, until something changes
            self._changes = 0

    @property
    def counts(self) -> Counts:
        """The current counts."""
        cached = self._counts
        if cached is not None:
            return cached
        with self._lock:
            if self._labels is None:
                items = [(item.id, item.label) for item in self._engine.items()]
                self._ids, self._labels = [id for id, _ in items], Counter(label for _, label in items)
            return self._update_counts(self._labels)

    def _update_counts(self, labels: "Counter[str | None]") -> Counts:
        items, unlabelled = labels.total(), labels[None]
        self._counts = Counts(items, items - unlabelled, len(labels) - (unlabelled > 0))
        return self._counts

    @contextmanager
    def track(self, ids: Iterable[str]) -> Iterator[None]:
        """Hold the write lock while the items with these ids are changed, then update the statistics."""
        ids = list(dict.fromkeys(ids))
        with self._lock:
            before = self._get_items(ids)
            try:
                yield
            finally:
                self._apply_changes(before, self._get_items(ids))

    def _get_items(self, ids: list[str]) -> list[Item | None]:
        return [] if self._labels is None else self._engine.get_many(ids)

    def _apply_changes(self, before: list[Item | None], after: list[Item | None]) -> None:
        if self._labels is None:
            return
        self._ids = None
        for old, new in zip(before, after, strict=True):
            if old is not None:
                self._labels[old.label] -= 1
            if new is not None:
                self._labels[new.label] += 1
            self._changes += old is None or new is None or old.checksum != new.checksum
        self._labels = +self._labels  # drop labels that no item has any more
        self._update_counts(self._labels)

    @property
    def profile(self) -> Profile | None:
        """Distances between the items and their nearest neighbours; None with fewer than two items."""
        with self._lock:
            items = self.counts.items
            if items < 2:
                return None
            found = self._profile
            if found is None or self._changes > _PROFILE_STALE * items or len(found.nearest) > items:
                ids = self._ids or [item.id for item in self._engine.items()]
                self._profile, self._ids, self._changes = _measure_profile(self._engine, ids), None, 0
            elif found.size != items:
                self._profile = replace(found, size=items)
            return self._profile


def _measure_profile(engine: Engine, all_ids: Sequence[str]) -> Profile:
    """Measure the distances from up to 1000 items to their nearest other items."""
    ids = [all_ids[row] for row in sample_profile_rows(len(all_ids)).tolist()]
    found = engine.search(engine.embeddings(ids), 2)
    # an item with two exact copies may not find itself: then the first result is its nearest neighbour
    nearest = [
        float(d[1] if row[0] == own else d[0]) for own, row, d in zip(ids, found.ids, found.distances, strict=True)
    ]
    return Profile(len(all_ids), tuple(sorted(nearest)))
