r"""Decisions of a review: decisions.csv, a log to which lines are only appended, and cleaned.csv, its result.

    time,kind,image,label,decision,new_label,checksum

Each line is one decision, written in one call under a lock and forced to disk. A kill leaves a whole line or none, and
two writers do not lose each other's lines. The last decision on an image counts. Line breaks, backslashes and bytes
that are not UTF-8 are written as \n, \\, \udcff. A cell that a spreadsheet would read as a formula begins with a quote.

cleaned.csv lists the data set with the decisions applied; ``--data csv:…`` reads it.
"""

import csv
import io
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from idml.audit.findings import AuditImages, image_checksum
from idml.data.layouts import format_count
from idml.data.sources import FileSource
from idml.files import lock_file, sync_folder, write_atomic

DECISIONS_FILE, CLEANED_FILE = "decisions.csv", "cleaned.csv"
LINK = "images"  # beside cleaned.csv, to the folder of the images: a CSV file names only files below its own folder
KINDS = ("mislabelled", "duplicate", "ambiguous")
CHOICES = ("keep", "relabel", "exclude", "undo")
MAX_LABEL = 200
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}
_UNESCAPED = {written: char for char, written in _ESCAPES.items()}


@dataclass(frozen=True)
class Decision:
    """One decision on an image in one of the lists; ``undo`` revokes the last one."""

    time: str
    kind: str
    image: str
    label: str
    decision: str
    new_label: str
    checksum: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}; use one of {', '.join(KINDS)}")
        if self.decision not in CHOICES:
            raise ValueError(f"unknown decision {self.decision!r}; use one of {', '.join(CHOICES)}")
        if not re.fullmatch("[0-9a-f]{16}", self.checksum):
            raise ValueError(f"{self.checksum!r} is not a checksum of 16 hexadecimal digits")
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", self.time):
            raise ValueError(f"{self.time!r} is not a time such as 2026-11-16T10:00:00Z")
        if not self.image:
            raise ValueError("the image has no name")
        if (self.decision == "relabel") != bool(self.new_label):
            raise ValueError("relabel needs a new label, and other decisions must not have one")
        if self.new_label:
            check_label(self.new_label)


HEADER = ",".join(field.name for field in fields(Decision)).encode()


def check_label(label: str) -> None:
    """Raise a ``ValueError`` if a user must not give this label to an image."""
    if not label or label != label.strip() or len(label) > MAX_LABEL or not label.isprintable():
        raise ValueError(
            f"a label is 1 to {MAX_LABEL} printable characters without spaces at its ends, got {label[:80]!r}"
        )


def current_time() -> str:
    """Return the current time in the format of decisions.csv."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def escape_formula(cell: str) -> str:
    """Put a quote before a cell that a spreadsheet would read as a formula (= + - @ tab, carriage return)."""
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


def append_decision(folder: Path, decision: Decision) -> None:
    """Append a decision and force it to disk. An incomplete last line is removed first."""
    path = folder / DECISIONS_FILE
    with _locked(path) as file:
        content = _read_all(file)
        _parse(content, path)  # do not append to a file that cannot be read
        end = _complete_end(content)
        ended = content[:end].endswith(b"\n") or end == 0
        line = b"" if ended else b"\n"
        line += _format_line(decision) if end else HEADER + b"\n" + _format_line(decision)
        try:
            os.ftruncate(file, end)
            _write_at(file, line, end)
            os.fsync(file)
        except OSError:
            os.ftruncate(file, end)  # a full disk: remove the incomplete line
            raise
        if not end:
            sync_folder(folder)


def read_decisions(folder: Path) -> list[Decision]:
    """Read all decisions in order; an incomplete last line is ignored, any other damage is a ``ValueError``."""
    path = folder / DECISIONS_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return _parse(content, path)


class CurrentDecisions:
    """The decisions that are in force: the last one on each image."""

    def __init__(self, history: Iterable[Decision]) -> None:
        self._decisions: dict[tuple[str, str], dict[str, Decision]] = {}
        for decision in history:
            kinds = self._decisions.setdefault((decision.image, decision.label), {})
            kinds.pop(decision.kind, None)  # keep the order of the last decisions
            if decision.decision != "undo":
                kinds[decision.kind] = decision

    def find(self, kind: str, image: str, label: str, checksum: str) -> Decision | None:
        """Return the decision on an image in a list; None if there is none, or if the image has changed since.

        A relabelling or exclusion counts in every list; keeping an image counts only in its own list.
        """
        own = self._decisions.get((image, label), {}).get(kind)
        if own is not None and own.checksum == checksum:
            return own
        return self.find_correction(image, label, checksum)

    def find_correction(self, image: str, label: str, checksum: str) -> Decision | None:
        """Return the last relabelling or exclusion of an image; None if the image has changed since."""
        corrections = [d for d in self._corrections(image, label) if d.checksum == checksum]
        return corrections[-1] if corrections else None

    def is_outdated(self, image: str, label: str, checksum: str) -> bool:
        """Return whether an image was relabelled or excluded, but has changed since."""
        return any(d.checksum != checksum for d in self._corrections(image, label))

    def images(self) -> set[tuple[str, str]]:
        """Return the names and labels of all images with a decision."""
        return {key for key, kinds in self._decisions.items() if kinds}

    def _corrections(self, image: str, label: str) -> list[Decision]:
        decisions = self._decisions.get((image, label), {}).values()
        return [d for d in decisions if d.decision in ("relabel", "exclude")]


def _format_line(decision: Decision) -> bytes:
    text = io.StringIO()
    cells = (_quoted("".join(map(_escape, cell))) for cell in astuple(decision))
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _escape(character: str) -> str:
    if character.isprintable() and character != "\\":
        return character
    return _ESCAPES.get(character) or (f"\\u{ord(character):04x}" if ord(character) < 0x10000 else character)


def _quoted(cell: str) -> str:
    """Escape a cell; also one that begins with a quote, so that reading can always remove one."""
    return f"'{cell}" if cell.startswith((*_FORMULA, "'")) else cell


def _parse(content: bytes, path: Path) -> list[Decision]:
    lines = content[: _complete_end(content)].split(b"\n")
    first = content.split(b"\n")[0].rstrip(b"\r")
    if first != HEADER and not (HEADER.startswith(first) and b"\n" not in content):  # the header may be incomplete too
        raise ValueError(f"{path}, line 1: expected the columns {HEADER.decode()}; move the file away to start again")
    decisions = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            decisions.append(_read_line(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number:,} is damaged: {error}; repair or remove that line") from None
    return decisions


def _read_line(line: bytes) -> Decision:
    try:
        (cells,) = csv.reader([line.rstrip(b"\r").decode()], strict=True)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(str(error)) from None
    if len(cells) != len(fields(Decision)):
        raise ValueError(f"{len(cells)} fields instead of {len(fields(Decision))}")
    return Decision(*(_unescape(cell.removeprefix("'")) for cell in cells))


def _unescape(cell: str) -> str:
    def replacement(found: re.Match[str]) -> str:
        text = found[0]
        return chr(int(text[2:], 16)) if text[1] == "u" else _UNESCAPED[text]

    if re.search(r"\\(?![\\nrt0]|u[0-9a-f]{4})", re.sub(r"\\\\", "", cell)):
        raise ValueError(f"a backslash in {cell!r} that is not an escape")
    return re.sub(r"\\(?:[\\nrt0]|u[0-9a-f]{4})", replacement, cell)


def _complete_end(content: bytes) -> int:
    """Return where the complete lines end. A last line without a line break counts if it is complete (by an editor)."""
    end = content.rfind(b"\n") + 1
    try:
        if end:
            _read_line(content[end:])
    except ValueError:
        return end
    return len(content) if end else 0


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open and lock the file; try again if an editor has replaced it before the lock."""
    while True:
        with lock_file(path) as file:
            try:
                same = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            except FileNotFoundError:
                same = False
            if same:
                yield file.fileno()
                return


def _read_all(file: int) -> bytes:
    content = b""
    while part := os.pread(file, 1 << 20, len(content)):
        content += part
    return content


def _write_at(file: int, data: bytes, position: int) -> None:
    while data:
        written = os.pwrite(file, data, position)
        data, position = data[written:], position + written


# -------------------- cleaned.csv --------------------


@dataclass(frozen=True)
class CleanedList:
    """The result of `write_cleaned`: the file, its number of images, and what was changed."""

    path: str
    images: int
    relabelled: int
    excluded: int
    notes: tuple[str, ...]


def apply_decisions(
    images: AuditImages, decisions: CurrentDecisions, prefix: str = f"{LINK}/"
) -> tuple[list[tuple[str, str, str]], CleanedList]:
    """Return the rows (path, label, split) of the cleaned list, with paths below ``prefix``, and what was changed.

    A relabelled image moves to the split of its new class if that class is in one split only. A decision on an image
    that has changed since is not applied, and an image whose name is not UTF-8 cannot be listed; notes say so.
    """
    roots = {source.root if isinstance(source, FileSource) else None for source in images.sources}
    if None in roots or len(roots) != 1:
        raise ValueError(
            f"{images.name} is not a folder of image files, so {CLEANED_FILE} cannot name its images; "
            "unpack a .tar and audit the folder to get one"
        )
    parts: dict[str, set[str]] = {}
    for label, split in zip(images.labels.tolist(), images.splits, strict=True):
        parts.setdefault(images.classes[label], set()).add(split)
    decided, rows = decisions.images(), []
    relabelled = excluded = unlisted = stale = 0
    for number, source in enumerate(images.sources):
        label, split = images.label(number), images.splits[number]
        if (source.name, label) in decided:
            digest = image_checksum(source)
            change = decisions.find_correction(source.name, label, digest)
            stale += change is None and decisions.is_outdated(source.name, label, digest)
            if change is not None and change.decision == "exclude":
                excluded += 1
                continue
            if change is not None:
                relabelled += 1
                label = change.new_label
                (split,) = parts.get(label, {split}) if len(parts.get(label, {split})) == 1 else {split}
        try:
            source.name.encode()
        except UnicodeEncodeError:
            unlisted += 1
            continue
        rows.append((f"{prefix}{source.name}", label, "test" if split == "gallery" else split))
    notes = []
    if unlisted:
        notes.append(
            f"{format_count(unlisted, 'image')} left out of {CLEANED_FILE}: it cannot contain names that are not UTF-8"
        )
    if stale:
        notes.append(f"{format_count(stale, 'image')} changed after the decision: it is not applied, decide again")
    return rows, CleanedList("", len(rows), relabelled, excluded, tuple(notes))


def write_cleaned(images: AuditImages, decisions: CurrentDecisions, folder: Path) -> CleanedList:
    """Write ``folder``/cleaned.csv and the link to the images beside it; ``ValueError`` if that is not possible."""
    root = next((source.root.resolve() for source in images.sources if isinstance(source, FileSource)), None)
    home = folder.resolve()
    below = root is not None and root.is_relative_to(home)  # then no link is needed
    prefix = f"{LINK}/" if root is None or not below else f"{root.relative_to(home).as_posix()}/".removeprefix("./")
    rows, done = apply_decisions(images, decisions, prefix)
    if not rows:
        raise ValueError(f"the decisions leave no image for {folder / CLEANED_FILE}")
    if root is not None and not below:
        _link(folder / LINK, root)
    whole = {split for _, _, split in rows} == {"all"}
    columns = 2 if whole else 3
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("path", "label", "split")[:columns])
    table.writerows(row[:columns] for row in rows)
    write_atomic(folder / CLEANED_FILE, text.getvalue().encode())
    return CleanedList(str(folder / CLEANED_FILE), done.images, done.relabelled, done.excluded, done.notes)


def _link(link: Path, target: Path) -> None:
    """Create the link to the target, or replace it, in one step."""
    if link.is_symlink():
        if Path(os.readlink(link)) == target:
            return
    elif link.exists():
        raise ValueError(f"{link} exists, but the link to the images belongs there; move it or choose another --out")
    temporary = link.with_name(f".{link.name}.part")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target, target_is_directory=True)
    temporary.replace(link)
