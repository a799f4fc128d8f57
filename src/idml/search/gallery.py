"""A gallery: items kept by an engine, a model that embeds images for it, and answers to queries.

A gallery in a folder carries its model and calibrations (`carried`) and knows where its image files are (`roots`).
One in Milvus keeps the items only; its model is named whenever it is opened.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from idml.calibration.evidence import Profile
from idml.calibration.risk_control import ERROR_RATES, RiskGuarantee
from idml.calibration.stored import Calibration
from idml.embeddings import Embeddings
from idml.search.answers import Answer, RiskTargets, State
from idml.search.embedder import Embedder, Runtime, open_embedder
from idml.search.engines import Added, Engine, Properties
from idml.search.gallery_folder import MODEL, Calibrations, Upload, carried, carry, carry_later
from idml.search.opening import Place, create_engine, is_made, is_milvus, open_engine
from idml.search.results import Reply, Result, Setting, Vanished, reply
from idml.search.shelf import Shelf

__all__ = ["Added", "Gallery", "Reply", "Result", "Status", "Upload", "open_engine", "open_or_create"]

_TRIES = 5  # searches of a gallery that changes meanwhile


@dataclass(frozen=True)
class Status:
    """A gallery at a glance."""

    items: int
    labelled: int
    """Items that have a label."""
    classes: int
    """Labels that occur."""
    model: str
    """Its fingerprint."""
    calibrated: bool
    unknown_share: float | None
    """Of the calibration's queries: promises are for no more unknown ones than about that; None if not calibrated."""
    drift: str
    """How the gallery has changed since calibration; empty if it has not much, or nothing is known."""
    writable: bool


class Gallery(Shelf):
    """Images that can be searched. `create`, `open` and `open_or_create` make one; threads may share it.

    One process may write to a gallery in a folder. Others read it, each one state until `refresh`. Changes go through
    these methods, not through the engine, or the counts and the profile would not notice.
    """

    def __init__(
        self, place: Place, engine: Engine, embedder: Embedder, calibrations: Calibrations, *, writable: bool
    ) -> None:
        super().__init__(place, engine, embedder, writable=writable)
        self._calibrations = calibrations
        self._drift: tuple[Calibration, Profile, str] | None = None

    @classmethod
    def create(cls, place: Place, run: Place, *, runtime: Runtime = "torch") -> "Gallery":
        """An empty gallery for the model of ``run`` (a run folder, a model file, or ``pretrained``), open for writing.

        Args:
            place: a folder, which is made, or milvus://host:port/collection.
            run: where the model and its calibrations are; a folder takes copies of them.
            runtime: what runs the model, "torch" or "onnx".
        """
        if is_made(place):
            raise ValueError(f"there is a gallery at {place} already")
        embedder = open_embedder(run, runtime=runtime)
        calibrations = Calibrations.load(run, embedder.fingerprint)
        if not is_milvus(place):
            carry(run, Path(place))  # before there is a gallery: a kill leaves none, not one without a model
        properties = Properties(embedder.fingerprint, embedder.dimensions, embedder.uncertainty)
        return cls(place, create_engine(place, properties), embedder, calibrations, writable=True)

    @classmethod
    def open(
        cls, place: Place, *, run: Place | None = None, write: bool = False, runtime: Runtime = "torch"
    ) -> "Gallery":
        """A gallery that is there, for reading, or as its one writer.

        Args:
            place: a folder, or milvus://host:port/collection.
            run: the run the gallery was made with. In Milvus it is needed. For a folder its calibrations are used,
                and taken over by a writer, as its exported model is: so a run that was calibrated later brings them in.
            write: open for writing.
            runtime: what runs the model, "torch" or "onnx".
        """
        if is_milvus(place) and run is None:
            raise ValueError(f"{place} carries no model; name the run that it was made with")
        engine = open_engine(place, run=run, write=write)
        try:
            source = carried(Path(place)) if run is None else run
            embedder = open_embedder(source, runtime=runtime)
            if embedder.fingerprint != engine.properties.model:
                raise ValueError(f"the model in {place} is not the one that the gallery was made with")
            calibrations = Calibrations.load(source, embedder.fingerprint)
            if run is not None and not is_milvus(place):
                if write:
                    carry_later(run, Path(place))
                own = Calibrations.load(Path(place) / MODEL, embedder.fingerprint)
                calibrations = calibrations.or_else(own)
            return cls(place, engine, embedder, calibrations, writable=write)
        except BaseException:
            engine.close()
            raise

    @property
    def calibration(self) -> Calibration | None:
        """The one for galleries with labels if every item has one, else the one for galleries without; or None."""
        counts = self._census.counts
        all_labelled = counts.items == counts.labelled
        return self._calibrations.labelled if all_labelled else self._calibrations.unlabelled

    def search(self, images: Sequence[Image.Image], k: int = 10, targets: RiskTargets | None = None) -> list[Reply]:
        """The reply to each RGB image (`decode_image` gives them), with up to ``k`` results."""
        return self.reply(self.embedder.embed(images), k, targets) if len(images) else []

    def reply(self, queries: Embeddings, k: int = 10, targets: RiskTargets | None = None) -> list[Reply]:
        """The reply to each query that the gallery's model has embedded."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be a whole number above 0, got {k!r}")
        for _ in range(_TRIES):
            if len(self.engine) == 0:
                empty = Answer(State.NOVEL, "the collection is empty", False)
                return [Reply(empty, (), level, False, ()) for level in queries.level.tolist()]
            try:
                return reply(self.engine, queries, k, targets or RiskTargets(), self._setting())
            except Vanished:
                with self.still:  # whoever changes it here is done then
                    if self.roots is None:  # in Milvus it may have been somebody else
                        self._census.forget()
        raise OSError(f"the gallery {self.place} is changing too fast to be searched; try again")

    def _setting(self) -> Setting:
        """How queries are answered now."""
        counts, calibration = self._census.counts, self.calibration
        bare = counts.items - counts.labelled
        notes = []
        if 0 < bare < counts.items:
            notes.append(f"{bare} of {counts.items} images have no label: answered as a collection without labels")
        if calibration is None:
            kind = "without" if bare else "with"
            notes.append(f"not calibrated for collections {kind} labels: nothing is promised (see idml calibrate)")
        notes += [line] if (line := self._drifted(calibration)) else []
        labelled = bare == 0 if calibration is None else calibration.labelled
        return Setting(labelled, calibration, self._census.profile, tuple(notes))

    def _drifted(self, calibration: Calibration | None) -> str:
        """A line on how the gallery has changed since calibration, or nothing."""
        profile = self._census.profile
        if calibration is None or calibration.profile is None or profile is None:
            return ""
        known = self._drift
        if known is None or known[0] is not calibration or known[1] is not profile:
            found = calibration.drift(profile)
            line = f"the gallery has changed since calibration: {found.reason}" if found.changed else ""
            self._drift = known = (calibration, profile, line)
        return known[2]

    def status(self) -> Status:
        """The gallery at a glance."""
        counts, calibration = self._census.counts, self.calibration
        model, drift = self.embedder.fingerprint, self._drifted(calibration)
        unknown = None if calibration is None else calibration.unknown
        return Status(*counts, model, calibration is not None, unknown, drift, self.writable)

    def guarantees(self, errors: Sequence[float] = ERROR_RATES, confidence: float = 0.9) -> list[RiskGuarantee]:
        """What can be promised for each wished error rate; nothing if the gallery is not calibrated."""
        calibration = self.calibration
        return [] if calibration is None else [calibration.find_guarantee(error, confidence) for error in errors]


def open_or_create(place: Place, run: Place, *, runtime: Runtime = "torch") -> Gallery:
    """The gallery at ``place`` for the model of ``run``, open for writing; made if it is not there."""
    if is_made(place):
        return Gallery.open(place, run=run, write=True, runtime=runtime)
    return Gallery.create(place, run, runtime=runtime)
