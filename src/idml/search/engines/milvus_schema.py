"""What an item is in Milvus: one row of a collection.

    key           SHA-256 of the id, hexadecimal. Any string may be an id, nothing of it ever stands in a filter, and
                  keys lie evenly between 0… and f…, so that all rows can be read range by range
    semantic      the unit vector
    uncertainty   the vector u as float32 in base64, if the gallery keeps it (Milvus 2.3 has one vector a collection)
    level         ‖u‖
    added         when the item came or was replaced, in nanoseconds: the order of items
    changed       when anything of it was last written
    item          id, path, label, checksum, and a digest of vectors, level and thumbnail, as JSON in ASCII
    thumbnail     in base64

The collection's description says what was fixed when the gallery was made.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from idml.evaluation.distance_bounds import Rows
from idml.search.engines.base import FLOAT, DamagedGallery, Item, Properties

FORMAT = 1
LONGEST = 65535  # characters of a text in Milvus
NAMES = 8192  # characters of an item's text: a page of the longest must not be more than a server gives
PAGE = 24 << 20  # bytes asked for or sent at a time; a server takes and gives 64 MB at most
THUMBNAIL = LONGEST // 4 * 3  # bytes of the largest thumbnail
MOST = 16384  # rows that Milvus gives at a time
_OVERHEAD = 512  # bytes of a row's short fields, about

Row = dict[str, Any]


class Text(str):
    """A string for pymilvus, which looks at every letter of a plain one: 0.7 ms for an item with a thumbnail."""

    def __iter__(self) -> Iterator[str]:
        return iter([str(self)])


def fields(properties: Properties) -> list[str]:
    """All fields but the key."""
    u = ["uncertainty"] if properties.uncertainty else []
    return ["semantic", *u, "level", "added", "changed", "item", "thumbnail"]


def page_rows(properties: Properties, names: Sequence[str]) -> int:
    """How many rows with these fields come at a time."""
    sizes = {
        "semantic": 4 * properties.dimensions,
        "uncertainty": 16 * properties.uncertainty // 3,
        "item": NAMES // 2,
        "thumbnail": LONGEST,
    }
    return max(1, min(MOST, PAGE // (_OVERHEAD + sum(sizes.get(name, 0) for name in names))))


def row_bytes(row: Row) -> int:
    """About how many bytes a row takes."""
    return _OVERHEAD + 4 * len(row["semantic"]) + sum(len(x) for x in row.values() if isinstance(x, str))


def key_of(id: str) -> str:
    """The key of an item."""
    return hashlib.sha256(id.encode("utf-8", "surrogateescape")).hexdigest()


def make_row(item: Item, vectors: Sequence[Rows], level: float, thumbnail: bytes, *, added: int, changed: int) -> Row:
    """An item as a row; ``vectors`` are s and, if the gallery keeps it, u. What is too long for Milvus is refused."""
    if len(thumbnail) > THUMBNAIL:
        raise ValueError(f"the thumbnail of {item.id!r} has {len(thumbnail):,} bytes; Milvus takes {THUMBNAIL:,}")
    u = {"uncertainty": _base64(vectors[1].tobytes())} if len(vectors) > 1 else {}
    return {
        "key": key_of(item.id), "semantic": vectors[0], **u, "level": level, "added": added, "changed": changed,
        "item": item_text(item, digest(vectors, level, thumbnail)), "thumbnail": _base64(thumbnail),
    }  # fmt: skip


def digest(vectors: Sequence[Rows], level: float, thumbnail: bytes) -> str:
    """A checksum of everything that the text of a row does not say."""
    parts = [*(x.tobytes() for x in vectors), np.array(level, FLOAT).tobytes(), thumbnail]
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def item_text(item: Item, digest: str) -> str:
    """The text of an item; equal texts mean equal items. One that is too long for Milvus is refused."""
    text = json.dumps({**asdict(item), "digest": digest}, sort_keys=True, separators=(",", ":"))
    if len(text) > NAMES:
        raise ValueError(f"the names of item {item.id[:40]!r} are too long for Milvus ({len(text):,} characters)")
    return text


def read_text(row: Row) -> tuple[Item, str]:
    """The item and the digest of a row."""
    try:
        content = json.loads(row["item"])
        proof = content.pop("digest")
        item = Item(**content)
        if key_of(item.id) != row["key"] or not isinstance(proof, str):
            raise ValueError("it has the key of another one")
        return item, proof
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedGallery(f"the row {row.get('key')!r} cannot be read ({error})") from None


def read_item(row: Row) -> Item:
    """The item of a row."""
    return read_text(row)[0]


def semantic(rows: Sequence[Row], properties: Properties) -> Rows:
    """The vectors s of rows."""
    out = np.empty((len(rows), properties.dimensions), FLOAT)
    for line, row in zip(out, rows, strict=True):
        line[:] = row["semantic"]
    return out


def uncertainty(rows: Sequence[Row], properties: Properties) -> Rows:
    """The vectors u of rows; of no dimensions if the gallery keeps none."""
    out = np.empty((len(rows), properties.uncertainty), FLOAT)
    for line, row in zip(out if properties.uncertainty else [], rows, strict=False):
        data = _bytes(row, "uncertainty")
        if len(data) != line.nbytes:
            raise DamagedGallery(f"the uncertainty of row {row['key']!r} has {len(data)} bytes, not {line.nbytes}")
        line[:] = np.frombuffer(data, FLOAT)
    return out


def thumbnail(row: Row) -> bytes:
    """The thumbnail of a row."""
    return _bytes(row, "thumbnail")


def fault(row: Row, properties: Properties) -> str:
    """What is wrong with a whole row; empty if nothing is."""
    try:
        _, expected = read_text(row)
        s, u = semantic([row], properties)[0], uncertainty([row], properties)[0]
        found = digest([s, u] if properties.uncertainty else [s], row["level"], thumbnail(row))
    except ValueError as error:
        return str(error)
    if not (np.isfinite(s).all() and np.isfinite(u).all()):
        return "the vectors hold NaN or infinity"
    return "" if found == expected else "the vectors, the level or the thumbnail are not what was written"


def schema(properties: Properties) -> Any:
    """The fields of a collection, as pymilvus takes them."""
    from pymilvus import DataType, MilvusClient  # type: ignore[import-untyped,unused-ignore]

    out = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False, description=_describe(properties))
    out.add_field("key", DataType.VARCHAR, is_primary=True, max_length=len(key_of("")))
    for name in fields(properties):
        if name == "semantic":
            out.add_field(name, DataType.FLOAT_VECTOR, dim=properties.dimensions)
        elif name in ("uncertainty", "item", "thumbnail"):
            out.add_field(name, DataType.VARCHAR, max_length=NAMES if name == "item" else LONGEST)
        else:
            out.add_field(name, DataType.FLOAT if name == "level" else DataType.INT64)
    return out


def described(collection: Mapping[str, Any]) -> Properties | None:
    """What was fixed when the gallery was made, from what the server says about its collection; None if not ours."""
    try:
        content = json.loads(collection["description"])
        if content.pop("idml") != FORMAT:
            return None
        properties = Properties(**content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    names = {field["name"]: field for field in collection["fields"]}
    fit = set(names) == {"key", *fields(properties)}
    return properties if fit and names["semantic"]["params"]["dim"] == properties.dimensions else None


def _describe(properties: Properties) -> str:
    return json.dumps({"idml": FORMAT, **asdict(properties)})


def _bytes(row: Row, name: str) -> bytes:
    try:
        return base64.b64decode(row[name], validate=True)
    except ValueError as error:
        raise DamagedGallery(f"the {name} of row {row['key']!r} cannot be read ({error})") from None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
