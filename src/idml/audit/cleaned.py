"""The data set as the decisions of a review leave it: cleaned.csv, which `--data csv:…` reads."""

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path

from idml.audit.decisions import Settled
from idml.audit.images import AuditImages, checksum
from idml.data.layouts import counted
from idml.data.sources import FileSource
from idml.files import write_whole

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
            f"{counted(unlisted, 'image')} left out of {CLEANED_FILE}: names that are not UTF-8 cannot stand in it"
        )
    if stale:
        notes.append(f"{counted(stale, 'image')} changed after the decision: it is not applied, decide again")
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
    write_whole(folder / CLEANED_FILE, text.getvalue().encode())
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
