"""Progress of long work: the callbacks that report it, and the display that shows it on standard error."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from idml.errors import printable

FIRST, EVERY = 2.0, 5.0  # seconds until the first line of progress, and between lines, where there is no terminal

Progress = Callable[[dict[str, Any]], None]
"""Receives one row at a time: a training step, the figures of an epoch, or ``{"what", "done", "images"}``."""

Count = Callable[[int, int], None]
"""Receives how many items are done, and how many there are."""

Note = Callable[[str], None]
"""Receives one line of text for the user."""


def silent(*_: object) -> None:
    """Ignore what is reported: the default of every callback above."""


def image_counter(progress: Progress, what: str) -> Count:
    """Return a ``Count`` that reports the images that are done as rows; ``what`` was done to them ("embedded")."""
    return lambda done, images: progress({"what": what, "done": done, "images": images})


class ProgressLines:
    """Progress as lines, for a log or a pipe: one after two seconds, then one every five.

    ``update`` says what is being done; ``tick`` is called again and again and writes a line if one is due. So there are
    lines too while nothing reports.
    """

    def __init__(self, what: str, write: Note, clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self.write, self.clock = what, write, clock
        self.state = ""
        self.started = clock()
        self.due = self.started + FIRST
        self._lock = threading.Lock()

    def update(self, state: str) -> None:
        """Say what is being done."""
        self.state = state
        self.tick()

    def tick(self) -> None:
        """Write a line if one is due."""
        with self._lock:
            now = self.clock()
            if now < self.due:
                return
            self.due = now + EVERY
        state = f"{self.state}, " if self.state else ""
        self.write(f"{self.what}: {state}{now - self.started:.0f} s")


class Display:
    """Progress on standard error: a bar on a terminal; elsewhere a line every few seconds (`ProgressLines`)."""

    def __init__(self, what: str = "training", clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.console = Console(stderr=True)
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task(what, total=None, figures="")
        self.lines = None if self.console.is_terminal else ProgressLines(what, self._print, clock)
        self._stopped = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> "Display":
        self.bar.start()
        if self.lines is not None and os.environ.get("RANK", "0") == "0":  # of several processes one is enough
            self._ticker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        if self._ticker.is_alive():
            self._ticker.join()
        self.bar.stop()

    def _tick(self) -> None:
        while self.lines is not None and not self._stopped.wait(1.0):
            self.lines.tick()

    def report(self, row: dict[str, Any]) -> None:
        """Show a row (see ``Progress``)."""
        if "what" in row:
            done, total, figures = row["done"], row["images"], f"images {row['what']}"
        elif "loss" in row:
            mixed = f" mixed {row['level_mixed']:.2f}" if "level_mixed" in row else ""
            done, total = row["step"], row["steps"]
            figures = f"loss {row['loss']:.3f}  {row['images/s']:.0f} img/s  ‖u‖ {row['level_clean']:.2f}{mixed}"
        else:
            held_out = ", ".join(f"{k.removeprefix('held_out_')} {v:.1%}" for k, v in row.items() if "held_out" in k)
            self.note(f"epoch {row['epoch']}: held-out {held_out}")
            return
        self.bar.update(self.task, completed=done, total=total, figures=figures)
        if self.lines is not None:
            what = figures if "what" in row else f"steps, {figures}"
            self.lines.update(f"{done:,} of {total:,} {what}")

    def note(self, text: str) -> None:
        """Print a line that stays. It says what comes next, so lines of progress no longer show the last row."""
        if self.lines is not None:
            self.lines.state = ""
        self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(printable(text), highlight=False, markup=False, emoji=False, soft_wrap=True)
