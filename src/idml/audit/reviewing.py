"""A review: an audit, the images it is about, and what has been decided about each."""

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

from idml.audit.cleaned import Cleaned, write_cleaned
from idml.audit.decisions import KINDS, Decision, Settled, append, now, read
from idml.audit.images import AuditImages, checksum
from idml.audit.report import read_audit
from idml.data.datasets import load_dataset

ALL = "all"


class Review:
    """The audit in a folder; a finding goes by its place in audit.json. Decisions are read anew for every question, so
    that reviews of one folder in several tabs or processes see each other's.
    """

    def __init__(self, folder: Path, data: str, split: str = "official") -> None:
        self.folder, self.audit = folder, read_audit(folder)
        self.images = AuditImages.of(load_dataset(data, split=split))
        if self.images.version != self.audit["images_version"]:
            raise ValueError(f"{folder} holds the audit of other images, or they have changed: audit {data} again")
        self.findings: list[dict[str, Any]] = self.audit["findings"]
        named = ([finding, *finding["partners"]] for finding in self.findings)
        self.shown = {about["number"] for several in named for about in several}
        self.settled()  # a damaged file is refused now, not at the first decision

    def settled(self) -> Settled:
        """What holds after all decisions made until now, by anybody."""
        return Settled(read(self.folder))

    def told(self, place: int | None) -> dict[str, Any]:
        """A finding as the page shows it, and the progress."""
        settled, item = self.settled(), None
        if place is not None:
            decision = self._decision(self.findings[place], settled)
            item = {**self.findings[place], "id": place, "decision": None if decision is None else asdict(decision)}
        counts = {kind: {"total": 0, "open": 0} for kind in (ALL, *KINDS)}
        for finding in self.findings:
            is_open = self._decision(finding, settled) is None
            for kind in (ALL, finding["kind"]):
                counts[kind]["total"] += 1
                counts[kind]["open"] += is_open
        return {"item": item, "progress": counts}

    def next(self, kind: str, after: int, *, decided: bool) -> int | None:
        """The place of the next open finding of a kind, going round; None if all are decided.

        With ``decided`` those come too, and the way ends at the last one, for otherwise it never would.
        """
        if kind not in (ALL, *KINDS):
            raise ValueError(f"the kind {kind[:40]!r} is none of {ALL}, {', '.join(KINDS)}")
        n, settled = len(self.findings), self.settled()
        start = min(max(after + 1, 0), n)
        for place in range(start, n) if decided else (*range(start, n), *range(start)):
            finding = self.findings[place]
            if kind in (ALL, finding["kind"]) and (decided or self._decision(finding, settled) is None):
                return place
        return None

    def decide(self, place: int, decision: str, label: str) -> None:
        """Write a decision down; a ``ValueError`` says what is wrong with it."""
        finding = self.findings[place]
        if decision == "relabel" and label == finding["label"]:
            raise ValueError(f"{label!r} is its label already; keep it, or give another")
        digest = checksum(self.images.sources[finding["number"]])
        if digest != finding["checksum"]:
            raise ValueError(f"{finding['image']!r} has changed since the audit: run it again")
        about = (now(), finding["kind"], finding["image"], finding["label"])
        append(self.folder, Decision(*about, decision, label if decision == "relabel" else "", digest))

    def clean(self) -> Cleaned:
        """Write cleaned.csv; a ``ValueError`` says why there can be none."""
        return write_cleaned(self.images, self.settled(), self.folder)

    def labels(self, text: str) -> list[str]:
        """Some class names that hold the text, those that begin with it first."""
        wanted = text.strip().casefold()
        found = [name for name in self.images.classes if wanted in name.casefold()]
        return sorted(found, key=lambda name: not name.casefold().startswith(wanted))[:50]

    def picture(self, number: int, side: int) -> bytes:
        """An image as a JPEG of at most ``side`` pixels each way; small ones are not enlarged."""
        image = self.images.sources[number].decode(min_side=side)
        image.thumbnail((side, side))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        return file.getvalue()

    def _decision(self, finding: dict[str, Any], settled: Settled) -> Decision | None:
        return settled.of(finding["kind"], finding["image"], finding["label"], finding["checksum"])
