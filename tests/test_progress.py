import pytest

from idml.errors import printable
from idml.progress import Display

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
