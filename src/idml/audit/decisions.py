"""What a person decided about the images of an audit: decisions.csv, which is only ever appended to.

    time,kind,image,label,decision,new_label,checksum

A line is one decision, written by one call under a lock and forced to disk: a kill leaves it there as a whole or not at
all, and two writers never lose each other's. The last word on an image counts. Line breaks, backslashes and bytes that
are not UTF-8 are written as \n, \\, \udcff; a cell that a spreadsheet would take for a formula starts with a quote.
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

from idml.audit.findings import AuditImages, checksum
from idml.data.layouts import format_count
from idml.data.sources import FileSource
from idml.files import lock_file, sync_folder, write_atomic

FILE = "decisions.csv"
KINDS = ("mislabelled", "duplicate", "ambiguous")
CHOICES = ("keep", "relabel", "exclude", "undo")
LONGEST_LABEL = 200
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}
_PLAIN = {written: char for char, written in _ESCAPES.items()}


@dataclass(frozen=True)
class Decision:
    """One decision about an image that stood in one of the lists under its label; ``undo`` takes the last one back."""

    time: str
    kind: str
    image: str
    label: str
    decision: str
    new_label: str
    checksum: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"the kind {self.kind!r} is none of {', '.join(KINDS)}")
        if self.decision not in CHOICES:
            raise ValueError(f"the decision {self.decision!r} is none of {', '.join(CHOICES)}")
        if not re.fullmatch("[0-9a-f]{16}", self.checksum):
            raise ValueError(f"{self.checksum!r} is no checksum of 16 hexadecimal digits")
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", self.time):
            raise ValueError(f"{self.time!r} is no time such as 2026-11-16T10:00:00Z")
        if not self.image:
            raise ValueError("the image has no name")
        if (self.decision == "relabel") != bool(self.new_label):
            raise ValueError("a new label goes with relabel, and only with it")
        if self.new_label:
            require_label(self.new_label)


HEADER = ",".join(field.name for field in fields(Decision)).encode()


def require_label(label: str) -> None:
    """Raise a ``ValueError`` if this cannot be the label that a person gives an image."""
    if not label or label != label.strip() or len(label) > LONGEST_LABEL or not label.isprintable():
        raise ValueError(
            f"a label is 1 to {LONGEST_LABEL} printable characters without blanks around them, not {label[:80]!r}"
        )


def now() -> str:
    """The time as decisions have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def harmless(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula: a leading = + - @ tab or carriage return gets a quote."""
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


def append(folder: Path, decision: Decision) -> None:
    """Write a decision behind the others; on return it is on disk. A torn last line is mended first."""
    path = folder / FILE
    with _locked(path) as file:
        content = _whole(file)
        _parse(content, path)  # nothing is added to a file that cannot be read
        end = _sound_end(content)
        ended = content[:end].endswith(b"\n") or end == 0
        line = b"" if ended else b"\n"
        line += _line(decision) if end else HEADER + b"\n" + _line(decision)
        try:
            os.ftruncate(file, end)
            _write_at(file, line, end)
            os.fsync(file)
        except OSError:
            os.ftruncate(file, end)  # a full disk: half a line is none
            raise
        if not end:
            sync_folder(folder)


def read(folder: Path) -> list[Decision]:
    """All decisions in order; none if there is no file. A torn last line is passed over, garbage a ``ValueError``."""
    path = folder / FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return _parse(content, path)


class Settled:
    """What holds after all decisions: the last word on each image."""

    def __init__(self, history: Iterable[Decision]) -> None:
        self._said: dict[tuple[str, str], dict[str, Decision]] = {}
        for decision in history:
            kinds = self._said.setdefault((decision.image, decision.label), {})
            kinds.pop(decision.kind, None)  # so that the order is that of the last words
            if decision.decision != "undo":
                kinds[decision.kind] = decision

    def of(self, kind: str, image: str, label: str, checksum: str) -> Decision | None:
        """The decision that settles an image in a list; none if the image has changed since.

        Relabelling or excluding settles it in every list, keeping it only in its own.
        """
        said = self._said.get((image, label), {})
        if (own := said.get(kind)) is not None and own.checksum == checksum:
            return own
        return self.change(image, label, checksum)

    def change(self, image: str, label: str, checksum: str) -> Decision | None:
        """The last relabelling or exclusion of an image, as long as it has not changed."""
        said = self._said.get((image, label), {}).values()
        changes = [d for d in said if d.decision in ("relabel", "exclude") and d.checksum == checksum]
        return changes[-1] if changes else None

    def outdated(self, image: str, label: str, checksum: str) -> bool:
        """Whether the image was to be relabelled or excluded, but has changed since."""
        said = self._said.get((image, label), {}).values()
        return any(d.decision in ("relabel", "exclude") and d.checksum != checksum for d in said)

    def images(self) -> set[tuple[str, str]]:
        """The names and labels that have a word on them."""
        return {key for key, said in self._said.items() if said}


def _line(decision: Decision) -> bytes:
    text = io.StringIO()
    cells = (_quoted("".join(_ESCAPES.get(char, char) for char in cell)) for cell in astuple(decision))
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _quoted(cell: str) -> str:
    return f"'{cell}" if cell.startswith((*_FORMULA, "'")) else cell  # a quote too, so that one can be taken away


def _parse(content: bytes, path: Path) -> list[Decision]:
    lines = content[: _sound_end(content)].split(b"\n")
    first = content.split(b"\n")[0].rstrip(b"\r")
    if first != HEADER and not (HEADER.startswith(first) and b"\n" not in content):  # the header may be torn too
        raise ValueError(f"{path}, line 1: expected the columns {HEADER.decode()}; move the file away to start anew")
    decisions = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            decisions.append(_read_line(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number:,} is damaged: {error}; mend or remove that line") from None
    return decisions


def _read_line(line: bytes) -> Decision:
    try:
        (cells,) = csv.reader([line.rstrip(b"\r").decode()], strict=True)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(str(error)) from None
    if len(cells) != len(fields(Decision)):
        raise ValueError(f"{len(cells)} fields instead of {len(fields(Decision))}")
    return Decision(*(_plain(cell.removeprefix("'")) for cell in cells))


def _plain(cell: str) -> str:
    def meant(found: re.Match[str]) -> str:
        text = found[0]
        return chr(int(text[2:], 16)) if text[1] == "u" else _PLAIN[text]

    if re.search(r"\\(?![\\nrt0]|u[0-9a-f]{4})", re.sub(r"\\\\", "", cell)):
        raise ValueError(f"a backslash in {cell!r} that means nothing")
    return re.sub(r"\\(?:[\\nrt0]|u[0-9a-f]{4})", meant, cell)


def _sound_end(content: bytes) -> int:
    """Where the whole lines end. A last line without a line break counts if it is complete: an editor left it so."""
    end = content.rfind(b"\n") + 1
    try:
        if end:
            _read_line(content[end:])
    except ValueError:
        return end
    return len(content) if end else 0


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, open and held by this writer alone; again if an editor has put another in its place meanwhile."""
    while True:
        with lock_file(path) as file:
            try:
                same = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            except FileNotFoundError:
                same = False
            if same:
                yield file.fileno()
                return


def _whole(file: int) -> bytes:
    content = b""
    while part := os.pread(file, 1 << 20, len(content)):
        content += part
    return content


def _write_at(file: int, data: bytes, position: int) -> None:
    while data:
        written = os.pwrite(file, data, position)
        data, position = data[written:], position + written


# -------------------- cleaned --------------------
# The data set as the decisions of a review leave it: cleaned.csv, which `--data csv:…` reads.


CLEANED_FILE = "cleaned.csv"
LINK = "images"  # beside it, to the folder of the images: a CSV file names only what lies below it


@dataclass(frozen=True)
class Cleaned:
    """What `write_cleaned` did: where the list is, how many images it holds, and what was changed."""

    path: str
    images: int
    relabelled: int
    excluded: int
    notes: tuple[str, ...]


def cleaned(
    images: AuditImages, settled: Settled, prefix: str = f"{LINK}/"
) -> tuple[list[tuple[str, str, str]], Cleaned]:
    """The rows (path, label, split) of the cleaned list, paths starting with ``prefix``, and what was changed.

    A relabelled image moves to the part of its new class, if that class is in one part alone. A decision about an image
    that has changed since is not applied, and an image whose name is not UTF-8 cannot be listed: both are noted.
    """
    roots = {source.root if isinstance(source, FileSource) else None for source in images.sources}
    if None in roots or len(roots) != 1:
        raise ValueError(
            f"{images.name} does not lie in a folder of image files, so {CLEANED_FILE} cannot name its images; "
            "unpack a .tar and audit the folder to get one"
        )
    parts: dict[str, set[str]] = {}
    for label, split in zip(images.labels.tolist(), images.splits, strict=True):
        parts.setdefault(images.classes[label], set()).add(split)
    words, rows = settled.images(), []
    relabelled = excluded = unlisted = stale = 0
    for number, source in enumerate(images.sources):
        label, split = images.label(number), images.splits[number]
        if (source.name, label) in words:
            digest = checksum(source)
            change = settled.change(source.name, label, digest)
            stale += change is None and settled.outdated(source.name, label, digest)
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
            f"{format_count(unlisted, 'image')} left out of {CLEANED_FILE}: names that are not UTF-8 cannot stand in it"
        )
    if stale:
        notes.append(f"{format_count(stale, 'image')} changed after the decision: it is not applied, decide again")
    return rows, Cleaned("", len(rows), relabelled, excluded, tuple(notes))


def write_cleaned(images: AuditImages, settled: Settled, folder: Path) -> Cleaned:
    """Write ``folder``/cleaned.csv and the link to the images beside it; a ``ValueError`` where there can be none."""
    root = next((source.root.resolve() for source in images.sources if isinstance(source, FileSource)), None)
    home = folder.resolve()
    below = root is not None and root.is_relative_to(home)  # then no link is needed
    prefix = f"{LINK}/" if root is None or not below else f"{root.relative_to(home).as_posix()}/".removeprefix("./")
    rows, done = cleaned(images, settled, prefix)
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
    return Cleaned(str(folder / CLEANED_FILE), done.images, done.relabelled, done.excluded, done.notes)


def _link(link: Path, target: Path) -> None:
    """Make ``link`` lead to the target, as a whole or not at all."""
    if link.is_symlink():
        if Path(os.readlink(link)) == target:
            return
    elif link.exists():
        raise ValueError(f"{link} is in the way: the link to the images goes there; move it or choose another --out")
    temporary = link.with_name(f".{link.name}.part")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target, target_is_directory=True)
    temporary.replace(link)
