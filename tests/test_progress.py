import time

import pytest

from idml.errors import printable
from idml.progress import Display, ProgressLines

STEP = {"step": 3, "steps": 10, "loss": 0.5, "images/s": 100.0, "level_clean": 0.1, "level_mixed": 0.2}


def test_a_run_is_told_in_lines_where_there_is_no_terminal(capsys):
    with Display() as display:
        display.report({"done": 1, "images": 2, "what": "decoded"})
        display.report(STEP)
        display.report({"step": 3, "epoch": 0, "held_out_recall@1": 0.25})
        display.note("[a line with brackets]")
    said = capsys.readouterr()
    assert said.out == ""
    assert "epoch 0: held-out recall@1 25.0%" in said.err
    assert "[a line with brackets]" in said.err


NASTY = {
    "\x1b[2J": "\\x1b[2J",
    "a\nb": "a\\nb",
    "\x9b1m": "\\x9b1m",
    "caf\udce9": "caf\\udce9",
    "\u202etxt": "\\u202etxt",
}


@pytest.mark.parametrize("text", NASTY)
def test_a_terminal_gets_printable_text_only(text, capsys):
    assert printable(f"bird é 鳥 {text}") == f"bird é 鳥 {NASTY[text]}"
    with Display() as display:
        display.note(text)
    assert capsys.readouterr().err == f"{NASTY[text]}\n"


def test_the_bar_follows_the_rows(monkeypatch):
    display = Display()
    display.report({"done": 1, "images": 2, "what": "decoded"})
    assert (display.bar.tasks[0].completed, display.bar.tasks[0].total) == (1, 2)
    display.report(STEP)
    assert (display.bar.tasks[0].completed, display.bar.tasks[0].total) == (3, 10)
    assert "‖u‖ 0.10 mixed 0.20" in display.bar.tasks[0].fields["figures"]


def test_a_display_writes_while_a_command_is_silent(monkeypatch, capsys):
    monkeypatch.setattr("idml.progress.FIRST", 0.0)
    with Display("calibrating") as display:
        while not (said := capsys.readouterr().err):
            time.sleep(0.05)
    assert said.startswith("calibrating: ")
    assert not display._ticker.is_alive()


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self):
        return self.now


def test_lines_come_after_two_seconds_and_then_every_five(monkeypatch):
    monkeypatch.setattr("idml.progress.FIRST", 2.0)
    clock, said = Clock(), []
    lines = ProgressLines("indexing", said.append, clock)
    for second in range(60):  # something is reported every second for a minute
        clock.now = 100.0 + second
        lines.update(f"{second} of 60 images embedded")
    assert [line.split(", ")[1] for line in said] == [f"{second} s" for second in range(2, 60, 5)]
    assert said[0] == "indexing: 2 of 60 images embedded, 2 s"


def test_there_are_lines_while_nothing_is_reported(monkeypatch):
    monkeypatch.setattr("idml.progress.FIRST", 2.0)
    clock, said = Clock(), []
    lines = ProgressLines("calibrating", said.append, clock)
    for second in range(13):
        clock.now = 100.0 + second
        lines.tick()
    assert said == ["calibrating: 2 s", "calibrating: 7 s", "calibrating: 12 s"]


def test_a_quick_command_writes_no_line(monkeypatch):
    monkeypatch.setattr("idml.progress.FIRST", 2.0)
    clock, said = Clock(), []
    lines = ProgressLines("indexing", said.append, clock)
    clock.now += 1.9
    lines.update("64 of 64 images embedded")
    lines.tick()
    assert said == []


def test_the_display_writes_lines_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr("idml.progress.FIRST", 2.0)
    clock = Clock()
    display = Display("indexing", clock)
    for done in (64, 128, 192):
        clock.now += 3
        display.report({"done": done, "images": 192, "what": "embedded"})
    clock.now += 5
    display.report(STEP)
    display.note("t-SNE of 192 images")
    clock.now += 5
    display.lines.tick()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "indexing: 64 of 192 images embedded, 3 s",
        "indexing: 192 of 192 images embedded, 9 s",
        "indexing: 3 of 10 steps, loss 0.500  100 img/s  ‖u‖ 0.10 mixed 0.20, 14 s",
        "t-SNE of 192 images",
        "indexing: 19 s",
    ]
