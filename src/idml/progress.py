"""What a person sees of a training run: a progress bar with the loss, the speed and the uncertainty."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """A progress bar on standard error; where that is no terminal, a line at the end of each epoch."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("training", total=None, figures="")

    def __enter__(self) -> "Display":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def report(self, row: dict[str, Any]) -> None:
        """A row of the log (a step, or an epoch's held-out figures), or how many images are prepared."""
        if "what" in row:
            figures = f"images {row['what']}"
            self.progress.update(self.task, completed=row["done"], total=row["images"], figures=figures)
        elif "loss" in row:
            mixed = f" mixed {row['level_mixed']:.2f}" if "level_mixed" in row else ""
            figures = f"loss {row['loss']:.3f}  {row['images/s']:.0f} img/s  ‖u‖ {row['level_clean']:.2f}{mixed}"
            self.progress.update(self.task, completed=row["step"], total=row["steps"], figures=figures)
        else:
            held_out = ", ".join(f"{k.removeprefix('held_out_')} {v:.1%}" for k, v in row.items() if "held_out" in k)
            self.note(f"epoch {row['epoch']}: held-out {held_out}")

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)
