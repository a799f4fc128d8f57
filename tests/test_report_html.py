"""The parts of report pages."""

import pytest

from idml.report_html import page, prose, table


@pytest.mark.parametrize("number", ["1", "-0.5", "+1.3 [+0.4, +2.2]", "12,345", "8.1 %", "0.68 ± 0.01"])
def test_numbers_stand_to_the_right(number):
    text = table(["what", "how much"], [["ours", number]])
    assert text.count("class='number'") == 2  # the cell and its heading
    assert "<td class='short'>ours</td>" in text
    assert ("<small>[+0.4, +2.2]</small>" in text) == ("[" in number)


@pytest.mark.parametrize("text", ["over 12 rows", "-", "γ = 4", "[a]", ""])
def test_text_stands_to_the_left(text):
    assert "number" not in table(["what"], [[text]])


def test_long_texts_may_wrap_and_nothing_is_markup():
    assert "<td>a &lt;b&gt; and many more words</td>" in table(["x"], [["a <b> and many more words"]])


def test_controls_and_changes_of_direction_are_escaped():
    text = page("a\x1b[2Jb", "<p>c\u202ed\n\x00</p>").decode()
    assert r"a\x1b[2Jb" in text
    assert "<p>c\\u202ed\n\\x00</p>" in text


def test_prose_marks_code_and_emphasis_only():
    assert prose("a *b* `c --d *` <e> cells-*") == "<p>a <em>b</em> <code>c --d *</code> &lt;e&gt; cells-*</p>"
