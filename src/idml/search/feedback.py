"""What people said about answers: kept with a gallery, used as queries by the next calibration, shown and deletable.

A judgement holds the embedding of the query, not its picture; there is one for each picture. A gallery in a folder
keeps them in feedback.json:

    {"judgements": [{"id", "query", "right", "found", "label", "semantic", "uncertainty"}, …], "sha256"}

The checksum is that of the judgements as JSON.
"""

import hashlib
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from idml.calibration.evidence import ROUNDING
from idml.embeddings import Embeddings
from idml.files import lock_file, write_atomic
from idml.search.engines import DamagedGallery, Properties
from idml.search.gallery import Location, is_milvus
from idml.search.gallery_folder import FEEDBACK

_MOST = 10_000  # judgements kept; the oldest go first


@dataclass(frozen=True, eq=False)
class Feedback:
    """A judgement about the first result of a query."""

    id: str
    query: str
    """A name of the query, such as its file name."""
    right: bool
    """Whether the first result shows what the query shows."""
    found: str | None
    """The label of the first result."""
    label: str | None
    """The right label, if somebody told it: that of the first result if it is right. None: it is not known."""
    embedding: Embeddings


def add_feedback(
    location: Location,
    properties: Properties,
    embedding: Embeddings,
    *,
    query: str,
    right: bool,
    found: str | None,
    label: str | None = None,
) -> Feedback:
    """Keep a judgement about one query. The label of the first result is the right one if ``right``.

    It replaces the judgements about the same picture: copies would count as independent queries in a calibration.
    """
    if len(embedding) != 1:
        raise ValueError(f"a judgement is about one query, got {len(embedding)}")
    told = found if right else label
    if right and label is not None and label != found:
        raise ValueError(f"the answer {found!r} cannot be right if the label is {label!r}")
    if not right and label is not None and label == found:
        raise ValueError(f"the answer {found!r} cannot be wrong if it is the right label")
    new = Feedback(secrets.token_hex(8), query, right, found, told, embedding.detach())
    path = _path(location)
    with lock_file(path.with_name(f".{FEEDBACK}.lock")):
        others = [one for one in read_feedback(location, properties) if not _same_picture(one, new)]
        _write(path, [*others, new][-_MOST:])
    return new


def read_feedback(location: Location, properties: Properties) -> list[Feedback]:
    """The judgements of a gallery, the oldest first; none in Milvus."""
    if is_milvus(location):
        return []
    path = _path(location)
    try:
        content = json.loads(path.read_bytes())
        rows = content["judgements"]
        if content["sha256"] != _checksum(rows):
            raise ValueError("the checksum is another one")
        return [_decode(row, properties.dimensions, properties.uncertainty) for row in rows]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DamagedGallery(f"{path} is damaged: delete it, or restore it from a backup") from None


def delete_feedback(location: Location, properties: Properties, ids: Sequence[str] | None = None) -> int:
    """Delete judgements, or all of them, also damaged ones; return how many could be read."""
    path = _path(location)
    with lock_file(path.with_name(f".{FEEDBACK}.lock")):
        try:
            before = read_feedback(location, properties)
        except DamagedGallery:
            if ids is not None:
                raise
            before = []
            path.unlink()
        kept = [] if ids is None else [one for one in before if one.id not in ids]
        if len(kept) < len(before):
            _write(path, kept)
    return len(before) - len(kept)


def _same_picture(one: Feedback, other: Feedback) -> bool:
    return float((one.embedding.unit - other.embedding.unit).norm()) < ROUNDING


def _path(location: Location) -> Path:
    if is_milvus(location):
        raise ValueError("a gallery in Milvus keeps no feedback: calibrate it with --queries DIR")
    return Path(location) / FEEDBACK


def _write(path: Path, judgements: Sequence[Feedback]) -> None:
    rows = [
        {
            "id": one.id,
            "query": one.query,
            "right": one.right,
            "found": one.found,
            "label": one.label,
            "semantic": one.embedding.semantic[0].tolist(),
            "uncertainty": one.embedding.uncertainty[0].tolist(),
        }
        for one in judgements
    ]
    write_atomic(path, (json.dumps({"judgements": rows, "sha256": _checksum(rows)}) + "\n").encode())


def _checksum(rows: object) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _decode(row: dict[str, object], dimensions: int, uncertainty: int) -> Feedback:
    s, u = row["semantic"], row["uncertainty"]
    texts = (row["id"], row["query"], row["found"], row["label"])
    if not isinstance(s, list) or not isinstance(u, list) or len(s) != dimensions or len(u) != uncertainty:
        raise ValueError("vectors of another length")
    if not all(math.isfinite(x) for x in (*s, *u)) or not isinstance(row["right"], bool):
        raise ValueError("values of another kind")
    if not all(isinstance(text, str) or (text is None and i > 1) for i, text in enumerate(texts)):
        raise ValueError("values of another kind")
    id, query, found, label = texts
    embedding = Embeddings(torch.tensor([s]).float(), torch.tensor([u]).float().reshape(1, len(u)))
    return Feedback(id, query, row["right"], found, label, embedding)  # type: ignore[arg-type]
