"""The stored results: for each data set and regime one JSONL file of rows, and one file of per-class sums.

A row is one run: the version of the protocol, its name, the commit that made it, its flat options, and its figures.
results/cub-frozen.jsonl holds a row a line, sorted by name. The sums over the queries of each test class, from which
intervals are resampled, are large; results/cub-frozen.npz holds them as whole numbers:

    keys      version and name of the row; "introspective" after them where the metric compares the test images
    sizes     number of test classes [n]
    queries, hits    queries of each class, and those whose nearest image is of their class [n, c]
    map@r     MAP@R summed over the queries of each class, in units of 1e-4 [n, c]

Workers write each finished run as a small file of its own to results/cells/ (which git ignores), or to the folder that
the environment variable IDML_RUNS names, which survives another checkout. Checkpoints of unfinished runs lie there too.
`collect_cells` merges the finished ones into the two files. Readers look at both.

Rows of version 1 of the protocol have another ``weight``: the mean of e^(−x) of the rule `similar` over pairs of
images, whatever the loss applied. From version 2 on it is what the loss applied.
"""

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idml.files import lock_file, write_atomic
from idml.progress import Note, silent

_SUMS = ("queries", "hits", "map@r")
_UNIT = 1e4  # sums of MAP@R are rounded to four digits
Row = dict[str, Any]
Key = tuple[int, str]


def cells_folder(out: Path) -> Path:
    """Return the folder of new cells and of runs in progress: $IDML_RUNS, else ``out``/cells."""
    own = os.environ.get("IDML_RUNS")
    return Path(own) if own else out / "cells"


class StoredRows:
    """The rows of one data set and regime, by version and name; they are read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int] | None = None
        self._rows: dict[Key, Row] = {}
        self._sums: dict[str, NDArray[Any]] = {}
        self._places: dict[str, int] = {}

    def get(self, version: int, name: str) -> Row | None:
        """Return a row with its sums, or None."""
        self._refresh()
        row = self._rows.get((version, name))
        return None if row is None else self._with_sums(row)

    def __iter__(self) -> Iterator[Row]:
        self._refresh()
        return (self._with_sums(row) for row in self._rows.values())

    def __len__(self) -> int:
        self._refresh()
        return len(self._rows)

    def _refresh(self) -> None:
        try:
            about = self.path.stat()
        except FileNotFoundError:
            return
        if (about.st_mtime_ns, about.st_size) == self._seen:
            return
        rows = {}
        for number, line in enumerate(self.path.read_text().splitlines(), start=1):
            try:
                row = json.loads(line)
                rows[int(row["version"]), str(row["name"])] = row
            except (ValueError, KeyError, TypeError) as error:
                reason = f"line {number} is damaged ({type(error).__name__})"
                raise ValueError(f"{self.path}: {reason}; restore the file with git") from None
        try:
            with np.load(self.path.with_suffix(".npz"), allow_pickle=False) as file:
                self._sums = {name: file[name] for name in ("keys", "sizes", *_SUMS)}
        except (OSError, ValueError, KeyError, EOFError) as error:
            reason = f"is damaged or missing ({type(error).__name__})"
            raise ValueError(f"{self.path.with_suffix('.npz')} {reason}; restore the file with git") from None
        self._places = {key: place for place, key in enumerate(self._sums["keys"].tolist())}
        self._rows, self._seen = rows, (about.st_mtime_ns, about.st_size)

    def _with_sums(self, row: Row) -> Row:
        row = dict(row)
        for key, part in _parts(row):
            if key in self._places:
                place = self._places[key]
                size = int(self._sums["sizes"][place])
                queries, hits, map_r = (self._sums[name][place, :size] for name in _SUMS)
                sums = {"queries": queries.tolist(), "hits": hits.tolist(), "map@r": (map_r / _UNIT).tolist()}
                if part is not row:
                    row["introspective"] = {**part, "classes": sums}
                else:
                    row["classes"] = sums
        return row


def _parts(row: Row) -> list[tuple[str, Row]]:
    """The parts of a row that have sums, each with its key."""
    key = f"{row['version']} {row['name']}"
    other = [(f"{key} introspective", row["introspective"])] if "introspective" in row else []
    return [(key, row), *other]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write all rows of a data set and regime: the sums first, then the rows that refer to them."""
    lines, keys, sums = [], list[str](), list[Mapping[str, list[float]]]()
    for row in sorted(rows, key=lambda row: (row["version"], row["name"])):
        slim = {**row}
        for key, part in _parts(row):
            if "classes" in part:
                keys.append(key)
                sums.append(part["classes"])
                if part is row:
                    del slim["classes"]
                else:
                    slim["introspective"] = {name: value for name, value in part.items() if name != "classes"}
        lines.append(json.dumps(slim, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
    width = max((len(each["queries"]) for each in sums), default=0)
    arrays = {name: np.zeros((len(sums), width), np.int32) for name in _SUMS}
    for place, each in enumerate(sums):
        for name in _SUMS:
            values = np.array(each[name]) * (_UNIT if name == "map@r" else 1)
            arrays[name][place, : len(values)] = values.round()
    file = io.BytesIO()
    sizes = np.array([len(each["queries"]) for each in sums], np.int32)
    np.savez_compressed(file, keys=np.array(keys, np.str_), sizes=sizes, **arrays)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path.with_suffix(".npz"), file.getvalue())
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode())


def collect_cells(out: Path, note: Note = silent) -> dict[str, Any]:
    """Merge the finished cells of `cells_folder` into the stored rows; a cell replaces a row of the same name.

    A cell's file is removed once its row is on disk. A damaged one is named and left.
    """
    counts: dict[str, int] = {}
    cells = cells_folder(out)
    if cells.exists():
        with lock_file(cells / "collect.lock"):  # one at a time: each reads rows, adds to them and writes them
            for folder in sorted(path for path in cells.glob("*") if path.is_dir()):
                if count := _collect_folder(folder, out / f"{folder.name}.jsonl", note):
                    counts[folder.name] = count
    text = ", ".join(f"{count} into {name}.jsonl" for name, count in counts.items())
    return {
        "collected": counts,
        "table": f"collected {text}" if counts else f"there is nothing to collect in {cells}",
    }


def _collect_folder(folder: Path, target: Path, note: Note) -> int:
    cells: dict[Path, Row] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            row = json.loads(path.read_text())
            cells[path] = {**row, "version": int(row["version"]), "name": str(row["name"])}
        except (ValueError, KeyError, TypeError):
            note(f"{path} is damaged and is left where it is")
    if cells:
        rows = {(row["version"], row["name"]): row for row in StoredRows(target)}
        rows |= {(row["version"], row["name"]): row for row in cells.values()}
        write_rows(target, rows.values())
        for path in cells:
            path.unlink()
    return len(cells)
