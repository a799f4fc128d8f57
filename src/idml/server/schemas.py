"""The JSON objects that the service returns, as OpenAPI documents them."""

import logging
from typing import Literal, get_args

from pydantic import BaseModel

from idml.calibration.risk_control import RiskGuarantee
from idml.search.engines import DamagedGallery, Item
from idml.search.feedback import Feedback, read_feedback
from idml.search.gallery import Gallery
from idml.search.results import Reply, Result
from idml.search.tsne_map import Point
from idml.server.responses import json_number, json_text

log = logging.getLogger("idml.server")
Reranker = Literal["diml"]


class Error(BaseModel):
    """Why a request was refused, in one line."""

    error: str


class Health(BaseModel):
    """The service is running and not stuck."""

    status: Literal["ok"] = "ok"
    items: int


class Guarantee(BaseModel):
    """What can be guaranteed for one error rate. ``confidence`` 0.9: one calibration in ten may fail."""

    max_error: float
    confidence: float
    possible: bool
    threshold: float | None
    coverage: float | None
    approximate: bool
    reason: str

    @classmethod
    def of(cls, guarantee: RiskGuarantee) -> "Guarantee":
        """Convert a guarantee of the calibration."""
        return cls(
            max_error=guarantee.max_error,
            confidence=guarantee.confidence,
            possible=guarantee.possible,
            threshold=json_number(guarantee.threshold),
            coverage=json_number(guarantee.coverage),
            approximate=guarantee.approximate,
            reason=guarantee.reason,
        )


class GalleryInfo(BaseModel):
    """The gallery and its name. Guarantees hold if at most ``unknown_share`` of the queries have no right answer in it.

    Of the calibration's unknown queries, the share ``recognised`` was answered *not in the collection*, and of its
    known ones the share ``rejected``; null if that is not known. ``level_speaks``: ‖u‖ ranks wrong answers better than
    chance here. ``drift`` says why nothing is guaranteed any more although there is a calibration: the gallery has
    changed, or too many of the latest queries are unknown. ``growth`` describes a small change of size that guarantees
    cover; both are empty otherwise. ``queries``: what the queries of the calibration were. ``feedback``: how many
    judgements are kept; null if none can be or their file is damaged. ``rerankers``: the values of ``rerank`` that a
    search accepts here; none if the gallery has no position maps. ``writable`` says whether the sender of the request
    may change the gallery.
    """

    name: str
    items: int
    labelled: int
    classes: int
    model: str
    calibrated: bool
    unknown_share: float | None
    recognised: float | None
    rejected: float | None
    level_speaks: bool
    drift: str
    growth: str
    queries: str
    feedback: int | None
    rerankers: list[Reranker]
    writable: bool
    promises: list[Guarantee]

    @classmethod
    def of(cls, gallery: Gallery) -> "GalleryInfo":
        """Describe the current state of a gallery."""
        status = gallery.status()
        return cls(
            name=json_text(gallery.name),
            items=status.items,
            labelled=status.labelled,
            classes=status.classes,
            model=status.model,
            calibrated=status.calibrated,
            unknown_share=json_number(status.unknown_share),
            recognised=json_number(status.recognised),
            rejected=json_number(status.rejected),
            drift=status.drift,
            growth=status.growth,
            level_speaks=status.level_speaks,
            queries=json_text(status.queries),
            feedback=count_feedback(gallery),
            rerankers=available_rerankers(gallery),
            writable=status.writable,
            promises=[Guarantee.of(guarantee) for guarantee in gallery.guarantees()],
        )


def count_feedback(gallery: Gallery) -> int | None:
    """Return how many judgements are kept; None in Milvus, which keeps none, and if their file is damaged."""
    if gallery.roots is None:
        return None
    try:
        return len(read_feedback(gallery.location, gallery.engine.properties))
    except DamagedGallery as error:
        log.warning("judgements cannot be read: %s", error)
        return None


def available_rerankers(gallery: Gallery) -> list[Reranker]:
    """Return the values of ``rerank`` that a search accepts."""
    return list(get_args(Reranker)) if gallery.has_maps else []


class FoundItem(BaseModel):
    """An item that was found; ``probability`` that it has the class of the query, null if uncalibrated."""

    id: str
    path: str
    label: str | None
    distance: float | None
    probability: float | None
    level: float | None
    duplicates: list[str]

    @classmethod
    def of(cls, found: Result) -> "FoundItem":
        """Convert a result of the gallery."""
        return cls(
            id=found.id,
            path=json_text(found.path),
            label=None if found.label is None else json_text(found.label),
            distance=json_number(found.distance),
            probability=json_number(found.probability),
            level=json_number(found.level),
            duplicates=list(found.duplicates),
        )


class SearchAnswer(BaseModel):
    """The answer to a query and the items that were found, nearest first.

    ``set_size``: how many of the first results contain a right image at the requested rate; null if not requested or
    not possible.
    """

    state: Literal["match", "unsure", "not in the collection"]
    reason: str
    probability: float | None
    novelty: float | None
    calibrated: bool
    promised: bool
    level: float | None
    set_size: int | None
    results: list[FoundItem]
    notes: list[str]
    took_ms: float

    @classmethod
    def of(cls, reply: Reply, seconds: float) -> "SearchAnswer":
        """Convert a reply of the gallery, which took ``seconds``."""
        answer = reply.answer
        return cls(
            state=answer.state.value,
            reason=json_text(answer.reason),
            probability=json_number(answer.probability),
            novelty=json_number(answer.novelty),
            calibrated=reply.calibrated,
            promised=answer.promised,
            level=json_number(reply.level),
            set_size=answer.results,
            results=[FoundItem.of(result) for result in reply.results],
            notes=[json_text(note) for note in reply.notes],
            took_ms=round(1000 * seconds, 1),
        )


class Judgement(BaseModel):
    """What somebody said about the first result of a query: it was right or wrong; ``label`` is the right one."""

    id: str
    query: str
    right: bool
    found: str | None
    label: str | None

    @classmethod
    def of(cls, kept: Feedback) -> "Judgement":
        """Convert a judgement of the gallery."""
        found, label = (None if text is None else json_text(text) for text in (kept.found, kept.label))
        return cls(id=kept.id, query=json_text(kept.query), right=kept.right, found=found, label=label)


class Judgements(BaseModel):
    """All judgements, the oldest first."""

    feedback: list[Judgement]


class ItemInfo(BaseModel):
    """An item; ``level`` is its uncertainty ‖u‖."""

    id: str
    path: str
    label: str | None
    level: float | None

    @classmethod
    def of(cls, item: Item, level: float) -> "ItemInfo":
        """Convert an item of the gallery."""
        label = None if item.label is None else json_text(item.label)
        return cls(id=item.id, path=json_text(item.path), label=label, level=json_number(level))


class ItemPage(BaseModel):
    """Some of the items, and the total number."""

    total: int
    items: list[ItemInfo]


class LabelCount(BaseModel):
    """A label and the number of items that have it."""

    label: str
    items: int


class LabelPage(BaseModel):
    """Some of the labels in alphabetical order, and how many there are."""

    total: int
    labels: list[LabelCount]


class AddedItem(BaseModel):
    """The item of an uploaded image; not new if it existed before."""

    id: str
    new: bool


class MapPoint(BaseModel):
    """An item on the map."""

    id: str
    x: float | None
    y: float | None
    label: str | None
    level: float | None

    @classmethod
    def of(cls, point: Point) -> "MapPoint":
        """Convert a point of the map."""
        label = None if point.label is None else json_text(point.label)
        return cls(
            id=point.id, x=json_number(point.x), y=json_number(point.y), label=label, level=json_number(point.level)
        )


class MapProgress(BaseModel):
    """The map is being computed: ask again."""

    status: Literal["computing"] = "computing"


class GalleryMap(BaseModel):
    """The map of the gallery."""

    points: list[MapPoint]
