"""Records: dataclasses in checked JSON files."""

from dataclasses import dataclass

import pytest

from idml.calibration.stored import decode_record, encode_record


@dataclass(frozen=True)
class Record:
    name: str
    values: tuple[float, ...]
    note: str | None = None


def test_a_record_is_read_back():
    record = Record("a", (1.0, 2.5))
    data = encode_record(record, kind="test", version=1)
    assert decode_record(data, "r.json", Record, kind="test", version=1) == record


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"a"', '"b"', "its checksum does not fit"),
        ('"test"', '"other"', "is no file of kind 'test'"),
        ('"version": 1', '"version": 2', "has version 2 of 'test'; this program reads 1$"),
        ("{", "", "it is not JSON"),
    ],
)
def test_a_damaged_or_foreign_record_is_refused(old, new, message):
    data = encode_record(Record("a", (1.0,)), kind="test", version=1).decode().replace(old, new).encode()
    with pytest.raises(ValueError, match=message):
        decode_record(data, "r.json", Record, kind="test", version=1)
