"""Records: dataclasses in checked JSON files."""

from dataclasses import dataclass

import pytest

from idml.calibration.stored import read_record, write_record


@dataclass(frozen=True)
class Record:
    name: str
    values: tuple[float, ...]
    note: str | None = None


def test_a_record_is_read_back(tmp_path):
    record = Record("a", (1.0, 2.5))
    write_record(tmp_path / "r.json", record, kind="test", version=1)
    assert read_record(tmp_path / "r.json", Record, kind="test", version=1) == record


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"a"', '"b"', "its checksum does not fit"),
        ('"test"', '"other"', "not a file of kind 'test'"),
        ('"version": 1', '"version": 2', "has version 2 of 'test'; this program reads 1: make it again"),
        ("{", "", "it is not JSON"),
    ],
)
def test_a_damaged_or_foreign_record_is_refused(tmp_path, old, new, message):
    path = tmp_path / "r.json"
    write_record(path, Record("a", (1.0,)), kind="test", version=1)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        read_record(path, Record, kind="test", version=1)
