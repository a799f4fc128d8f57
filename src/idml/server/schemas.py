"""The shapes of what the service returns, as OpenAPI shows them."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from idml.server.responses import number, text

if TYPE_CHECKING:
    from idml.calibration.risk_control import RiskGuarantee
    from idml.search.engines import Item
    from idml.search.gallery import Gallery, Reply
    from idml.search.gallery import Result as Found
    from idml.search.tsne_map import Point


class Error(BaseModel):
    """Why a request was not served, in one line."""

    error: str


class Health(BaseModel):
    """That the service is there."""

    status: Literal["ok"] = "ok"
    items: int


class Promised(BaseModel):
    """What can be promised for one wished error rate; ``confidence`` 0.9: one calibration in ten may fail."""

    max_error: float
    confidence: float
    possible: bool
    threshold: float | None
    coverage: float | None
    reason: str

    @classmethod
    def of(cls, promise: "RiskGuarantee") -> "Promised":
        """As the calibration gives it."""
        return cls(
            max_error=promise.max_error,
            confidence=promise.confidence,
            possible=promise.possible,
            threshold=number(promise.threshold),
            coverage=number(promise.coverage),
            reason=promise.reason,
        )


class About(BaseModel):
    """The gallery; promises hold where no more than ``unknown_share`` of the queries have no right answer in it.

    ``writable`` is for whoever asks.
    """

    items: int
    labelled: int
    classes: int
    model: str
    calibrated: bool
    unknown_share: float | None
    drift: str
    writable: bool
    promises: list[Promised]

    @classmethod
    def of(cls, gallery: "Gallery") -> "About":
        """As it is now."""
        status = gallery.status()
        return cls(
            items=status.items,
            labelled=status.labelled,
            classes=status.classes,
            model=status.model,
            calibrated=status.calibrated,
            unknown_share=number(status.unknown_share),
            drift=status.drift,
            writable=status.writable,
            promises=[Promised.of(promise) for promise in gallery.guarantees()],
        )


class Result(BaseModel):
    """An item that was found; ``probability`` that it is of the query's class, null if uncalibrated."""

    id: str
    path: str
    label: str | None
    distance: float | None
    probability: float | None
    level: float | None
    duplicates: list[str]

    @classmethod
    def of(cls, found: "Found") -> "Result":
        """As the gallery found it."""
        return cls(
            id=found.id,
            path=text(found.path),
            label=None if found.label is None else text(found.label),
            distance=number(found.distance),
            probability=number(found.probability),
            level=number(found.level),
            duplicates=list(found.duplicates),
        )


class Answered(BaseModel):
    """The answer to a query and what was found, nearest first.

    ``set_size``: the first so many results hold a right image as surely as asked; null if not asked or not possible.
    """

    state: Literal["match", "unsure", "not in the collection"]
    reason: str
    probability: float | None
    novelty: float | None
    calibrated: bool
    level: float | None
    set_size: int | None
    results: list[Result]
    notes: list[str]
    took_ms: float

    @classmethod
    def of(cls, reply: "Reply", seconds: float) -> "Answered":
        """As the gallery answered, after so many seconds."""
        answer = reply.answer
        return cls(
            state=answer.state.value,
            reason=text(answer.reason),
            probability=number(answer.probability),
            novelty=number(answer.novelty),
            calibrated=reply.calibrated,
            level=number(reply.level),
            set_size=answer.results,
            results=[Result.of(result) for result in reply.results],
            notes=[text(note) for note in reply.notes],
            took_ms=round(1000 * seconds, 1),
        )


class Shown(BaseModel):
    """An item; ``level`` is its uncertainty ‖u‖."""

    id: str
    path: str
    label: str | None
    level: float | None

    @classmethod
    def of(cls, item: "Item", level: float) -> "Shown":
        """As the gallery keeps it."""
        label = None if item.label is None else text(item.label)
        return cls(id=item.id, path=text(item.path), label=label, level=number(level))


class Page(BaseModel):
    """Some of the items, and how many there are."""

    total: int
    items: list[Shown]


class Kept(BaseModel):
    """The item that an uploaded image has become; not new if it was there before."""

    id: str
    new: bool


class Place(BaseModel):
    """An item on the map."""

    id: str
    x: float | None
    y: float | None
    label: str | None
    level: float | None

    @classmethod
    def of(cls, point: "Point") -> "Place":
        """As the map has it."""
        label = None if point.label is None else text(point.label)
        return cls(id=point.id, x=number(point.x), y=number(point.y), label=label, level=number(point.level))


class Map(BaseModel):
    """The map of the gallery."""

    points: list[Place]
