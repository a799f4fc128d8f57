"""decisions.csv survives kills, company, editors and damage; what it says is what was decided."""

import csv
import multiprocessing
import os
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idml import files
from idml.audit.decisions import FILE, HEADER, Decision, Settled, append, harmless, now, read

SUM, OTHER = "0123456789abcdef", "fedcba9876543210"


def decided(image="a.png", decision="keep", new="", *, kind="mislabelled", label="a", checksum=SUM):
    return Decision(now(), kind, image, label, decision, new, checksum)


def test_what_was_decided_is_read_back(tmp_path):
    assert read(tmp_path) == []
    decisions = [decided(), decided("b.png", "relabel", "c"), decided("c.png", "exclude", kind="duplicate")]
    for decision in decisions:
        append(tmp_path, decision)
    assert read(tmp_path) == decisions
    lines = (tmp_path / FILE).read_text().splitlines()
    assert lines[0] == "time,kind,image,label,decision,new_label,checksum"
    assert len(lines) == 4


NAMES = ["a\nb.png", "a\r\nb", "\\n", "\\udc41", "tab\there", "nul\0", "'quoted", '"x",y', "=1+1", "-2", "@a", "\t=x",
         "caf\udce9.png", "é/ü 字.png", "<script>.png", " spaces ", ",", "\\", "''", "\r=1"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_one_line_and_comes_back(name, tmp_path):
    append(tmp_path, decided(name, label=name))
    append(tmp_path, decided("last"))
    assert [d.image for d in read(tmp_path)] == [name, "last"]
    assert read(tmp_path)[0].label == name
    content = (tmp_path / FILE).read_bytes()
    assert content.count(b"\n") == 3
    for row in csv.reader(content.decode().splitlines()):
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row)


@given(name=st.text(min_size=1, max_size=20), label=st.text(max_size=20))
def test_any_text_comes_back(name, label, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    append(folder, decided(name, label=label))
    assert [(d.image, d.label) for d in read(folder)] == [(name, label)]


def test_a_torn_last_line_is_mended_wherever_it_was_torn(tmp_path):
    append(tmp_path, decided("a.png"))
    append(tmp_path, decided("b.png", "relabel", "new, label"))
    path, whole = tmp_path / FILE, (tmp_path / FILE).read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        lines = sum(end <= cut for end in ends)
        complete = cut + 1 in ends[1:]  # only the line break is missing: nothing of the decision is lost
        expected = ["a.png", "b.png"][: max(lines - 1, 0) + complete]
        assert [d.image for d in read(tmp_path)] == expected, cut
        append(tmp_path, decided("c.png"))
        assert [d.image for d in read(tmp_path)] == [*expected, "c.png"], cut
        assert path.read_bytes().endswith(b"\n")


def test_a_file_that_an_editor_left_is_read(tmp_path):
    append(tmp_path, decided("a.png"))
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\r\n")
    assert [d.image for d in read(tmp_path)] == ["a.png"]
    append(tmp_path, decided("b.png"))
    assert [d.image for d in read(tmp_path)] == ["a.png", "b.png"]


LINE = f"2026-11-16T10:00:00Z,mislabelled,a.png,a,keep,,{SUM}"


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("garbage", 1, "expected the columns time,kind"),
        ("garbage\n", 1, "expected the columns time,kind"),
        ("\x89PNG\r\n\x1a\n", 1, "expected the columns"),
        ("{header}\nsomething\n{line}\n", 2, "1 fields instead of 7"),
        ("{header}\n{line}\n{line},more\n", 3, "8 fields instead of 7"),
        ("{header}\n{line}\n\n" + LINE.replace("keep", "burn") + "\n", 4, "'burn' is none of keep"),
        ("{header}\n" + LINE.replace("mislabelled", "wrong") + "\n", 2, "'wrong' is none of mislabelled"),
        ("{header}\n" + LINE.replace(SUM, "xyz") + "\n", 2, "'xyz' is no checksum"),
        ("{header}\n" + LINE.replace("2026-11", "soon") + "\n", 2, "is no time such as"),
        ("{header}\n" + LINE.replace("keep,,", "relabel,,") + "\n", 2, "a new label goes with relabel"),
        ("{header}\n" + LINE.replace("keep,,", "keep,b,") + "\n", 2, "a new label goes with relabel"),
        ("{header}\n" + LINE.replace("a.png", "a\\x.png") + "\n", 2, "a backslash"),
        ("{header}\n" + LINE.replace("a.png", '"a"b') + "\n{line}\n", 2, "',' expected after '\"'"),
        ("{header}\n" + LINE.replace("a.png", "\udcff") + "\n{line}\n", 2, "can't decode byte"),
        ("{header}\n" + LINE.replace("a.png", "") + "\n", 2, "the image has no name"),
    ],
)
def test_garbage_is_refused_with_its_line_and_left_alone(content, line, words, tmp_path):
    content = content.replace("{header}", HEADER.decode()).replace("{line}", LINE)
    data = content.encode("utf-8", "surrogateescape") if "\x89" not in content else content.encode("latin-1")
    (tmp_path / FILE).write_bytes(data)
    for action in (lambda: read(tmp_path), lambda: append(tmp_path, decided())):
        with pytest.raises(ValueError, match=rf"decisions\.csv, line {line}\b") as caught:
            action()
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    assert (tmp_path / FILE).read_bytes() == data


@pytest.mark.parametrize("label", ["", " a", "a ", "a\nb", "x" * 201, "caf\udce9", "\0"])
def test_a_label_that_no_list_could_hold_is_refused(label):
    with pytest.raises(ValueError, match="label"):
        decided(decision="relabel", new=label)


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    append(tmp_path, decided("a.png"))
    before, write = (tmp_path / FILE).read_bytes(), os.pwrite

    def full(file, data, position):
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(file, data[:20], position)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        append(tmp_path, decided("b.png"))
    assert (tmp_path / FILE).read_bytes() == before


def _writer(folder, name, count):
    for i in range(count):
        append(folder, decided(f"{name}-{i}"))


def test_writers_in_company_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_writer, args=(tmp_path, name, 15)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    images = [d.image for d in read(tmp_path)]
    assert sorted(images) == sorted(f"{name}-{i}" for name in "abcd" for i in range(15))
    for name in "abcd":
        assert [i for i in images if i.startswith(name)] == [f"{name}-{i}" for i in range(15)]


def test_decisions_survive_sigkill_at_any_moment(tmp_path):
    context = multiprocessing.get_context("fork")
    for round_ in range(10 * int(os.environ.get("IDML_KILLS", "1"))):
        told, tell = context.Pipe(duplex=False)

        def work(round_=round_, tell=tell):
            for i in range(10**6):
                append(tmp_path, decided(f"{round_}-{i}"))
                tell.send(i)

        writer = context.Process(target=work)
        writer.start()
        told.recv()
        time.sleep(0.002 * round_)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        last = 0
        while told.poll():
            last = told.recv()
        images = [d.image for d in read(tmp_path) if d.image.startswith(f"{round_}-")]
        assert len(images) in (last + 1, last + 2)
        assert images == [f"{round_}-{i}" for i in range(len(images))]
    append(tmp_path, decided("the end"))
    assert read(tmp_path)[-1].image == "the end"


def test_a_file_that_an_editor_puts_in_its_place_is_the_one_that_is_written(tmp_path, monkeypatch):
    append(tmp_path, decided("old"))
    lock, replaced = files.fcntl.flock, []

    def slow(file, how):
        if not replaced:  # while this writer waits for the lock
            other = tmp_path / "other"
            other.write_bytes((tmp_path / FILE).read_bytes())
            replaced.append(other.replace(tmp_path / FILE))
        lock(file, how)

    monkeypatch.setattr(files.fcntl, "flock", slow)
    append(tmp_path, decided("new"))
    assert [d.image for d in read(tmp_path)] == ["old", "new"]


# ---- what holds


def test_the_last_word_counts_and_undo_takes_it_back():
    history = [decided(), decided(decision="relabel", new="b")]
    assert Settled(history).of("mislabelled", "a.png", "a", SUM).new_label == "b"
    assert Settled([*history, decided(decision="undo")]).of("mislabelled", "a.png", "a", SUM) is None
    assert Settled([*history, decided(decision="undo")]).images() == set()
    assert Settled([]).of("mislabelled", "a.png", "a", SUM) is None


def test_keeping_settles_one_list_and_a_change_all_of_them():
    kept = Settled([decided()])
    assert kept.of("mislabelled", "a.png", "a", SUM) is not None
    assert kept.of("duplicate", "a.png", "a", SUM) is None
    assert kept.change("a.png", "a", SUM) is None
    gone = Settled([decided(decision="exclude", kind="duplicate")])
    assert gone.of("mislabelled", "a.png", "a", SUM).decision == "exclude"
    both = Settled([decided(decision="exclude", kind="duplicate"), decided(decision="relabel", new="b")])
    assert both.change("a.png", "a", SUM).new_label == "b"


def test_a_decision_is_about_the_image_as_it_was():
    settled = Settled([decided(decision="exclude")])
    assert settled.of("mislabelled", "a.png", "a", OTHER) is None
    assert settled.change("a.png", "a", OTHER) is None
    assert settled.outdated("a.png", "a", OTHER)
    assert not settled.outdated("a.png", "a", SUM)
    assert settled.of("mislabelled", "a.png", "b", SUM) is None  # the same file under another label


@pytest.mark.parametrize("cell", ["=1", "+1", "-1", "@x", "\tx", "\rx"])
def test_formulas_are_made_harmless(cell):
    assert harmless(cell) == f"'{cell}"
    assert harmless(f"a{cell}") == f"a{cell}"
