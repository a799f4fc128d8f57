"""Progress of long work: the callbacks that report it, and the display that shows it on a terminal."""

from collections.abc import Callable
from typing import Any

from idml.errors import printable

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


class Display:
    """A progress bar on standard error; if that is not a terminal, one line at the end of each epoch."""

    def __init__(self, what: str = "training") -> None:
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

    def __enter__(self) -> "Display":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def report(self, row: dict[str, Any]) -> None:
        """Show a row (see ``Progress``)."""
        if "what" in row:
            figures = f"images {row['what']}"
            self.bar.update(self.task, completed=row["done"], total=row["images"], figures=figures)
        elif "loss" in row:
            mixed = f" mixed {row['level_mixed']:.2f}" if "level_mixed" in row else ""
            figures = f"loss {row['loss']:.3f}  {row['images/s']:.0f} img/s  ‖u‖ {row['level_clean']:.2f}{mixed}"
            self.bar.update(self.task, completed=row["step"], total=row["steps"], figures=figures)
        else:
            held_out = ", ".join(f"{k.removeprefix('held_out_')} {v:.1%}" for k, v in row.items() if "held_out" in k)
            self.note(f"epoch {row['epoch']}: held-out {held_out}")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(printable(text), highlight=False, markup=False, emoji=False, soft_wrap=True)
