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
from idml.audit.decisions import (
    DECISIONS_FILE,
    HEADER,
    CurrentDecisions,
    Decision,
    append_decision,
    current_time,
    escape_formula,
    read_decisions,
)

SUM, OTHER = "0123456789abcdef", "fedcba9876543210"


def decided(image="a.png", decision="keep", new="", *, kind="mislabelled", label="a", checksum=SUM):
    return Decision(current_time(), kind, image, label, decision, new, checksum)


def test_decisions_are_read_back(tmp_path):
    assert read_decisions(tmp_path) == []
    decisions = [decided(), decided("b.png", "relabel", "c"), decided("c.png", "exclude", kind="duplicate")]
    for decision in decisions:
        append_decision(tmp_path, decision)
    assert read_decisions(tmp_path) == decisions
    lines = (tmp_path / DECISIONS_FILE).read_text().splitlines()
    assert lines[0] == "time,kind,image,label,decision,new_label,checksum"
    assert len(lines) == 4


NAMES = ["a\nb.png", "a\r\nb", "\\n", "\\udc41", "tab\there", "nul\0", "'quoted", '"x",y', "=1+1", "-2", "@a", "\t=x",
         "caf\udce9.png", "é/ü 字.png", "<script>.png", " spaces ", ",", "\\", "''", "\r=1"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_one_line_and_comes_back(name, tmp_path):
    append_decision(tmp_path, decided(name, label=name))
    append_decision(tmp_path, decided("last"))
    assert [d.image for d in read_decisions(tmp_path)] == [name, "last"]
    assert read_decisions(tmp_path)[0].label == name
    content = (tmp_path / DECISIONS_FILE).read_bytes()
    assert content.count(b"\n") == 3
    for row in csv.reader(content.decode().splitlines()):
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row)


@given(name=st.text(min_size=1, max_size=20), label=st.text(max_size=20))
def test_any_text_comes_back(name, label, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    append_decision(folder, decided(name, label=label))
    assert [(d.image, d.label) for d in read_decisions(folder)] == [(name, label)]


def test_an_incomplete_last_line_is_removed(tmp_path):
    append_decision(tmp_path, decided("a.png"))
    append_decision(tmp_path, decided("b.png", "relabel", "new, label"))
    path, whole = tmp_path / DECISIONS_FILE, (tmp_path / DECISIONS_FILE).read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        lines = sum(end <= cut for end in ends)
        complete = cut + 1 in ends[1:]  # only the line break is missing: nothing of the decision is lost
        expected = ["a.png", "b.png"][: max(lines - 1, 0) + complete]
        assert [d.image for d in read_decisions(tmp_path)] == expected, cut
        append_decision(tmp_path, decided("c.png"))
        assert [d.image for d in read_decisions(tmp_path)] == [*expected, "c.png"], cut
        assert path.read_bytes().endswith(b"\n")


def test_a_file_saved_by_an_editor_is_read(tmp_path):
    append_decision(tmp_path, decided("a.png"))
    path = tmp_path / DECISIONS_FILE
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\r\n")
    assert [d.image for d in read_decisions(tmp_path)] == ["a.png"]
    append_decision(tmp_path, decided("b.png"))
    assert [d.image for d in read_decisions(tmp_path)] == ["a.png", "b.png"]


LINE = f"2026-11-16T10:00:00Z,mislabelled,a.png,a,keep,,{SUM}"


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("garbage", 1, "expected the columns time,kind"),
        ("garbage\n", 1, "expected the columns time,kind"),
        ("\x89PNG\r\n\x1a\n", 1, "expected the columns"),
        ("{header}\nsomething\n{line}\n", 2, "1 fields instead of 7"),
        ("{header}\n{line}\n{line},more\n", 3, "8 fields instead of 7"),
        ("{header}\n{line}\n\n" + LINE.replace("keep", "burn") + "\n", 4, "unknown decision 'burn'; use one of keep"),
        ("{header}\n" + LINE.replace("mislabelled", "wrong") + "\n", 2, "unknown kind 'wrong'; use one of mislabelled"),
        ("{header}\n" + LINE.replace(SUM, "xyz") + "\n", 2, "'xyz' is not a checksum"),
        ("{header}\n" + LINE.replace("2026-11", "soon") + "\n", 2, "is not a time such as"),
        ("{header}\n" + LINE.replace("keep,,", "relabel,,") + "\n", 2, "relabel needs a new label"),
        ("{header}\n" + LINE.replace("keep,,", "keep,b,") + "\n", 2, "relabel needs a new label"),
        ("{header}\n" + LINE.replace("a.png", "a\\x.png") + "\n", 2, "a backslash"),
        ("{header}\n" + LINE.replace("a.png", '"a"b') + "\n{line}\n", 2, "',' expected after '\"'"),
        ("{header}\n" + LINE.replace("a.png", "\udcff") + "\n{line}\n", 2, "can't decode byte"),
        ("{header}\n" + LINE.replace("a.png", "") + "\n", 2, "the image has no name"),
    ],
)
def test_damage_is_reported_with_its_line_and_not_changed(content, line, words, tmp_path):
    content = content.replace("{header}", HEADER.decode()).replace("{line}", LINE)
    data = content.encode("utf-8", "surrogateescape") if "\x89" not in content else content.encode("latin-1")
    (tmp_path / DECISIONS_FILE).write_bytes(data)
    for action in (lambda: read_decisions(tmp_path), lambda: append_decision(tmp_path, decided())):
        with pytest.raises(ValueError, match=rf"decisions\.csv, line {line}\b") as caught:
            action()
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    assert (tmp_path / DECISIONS_FILE).read_bytes() == data


@pytest.mark.parametrize("label", ["", " a", "a ", "a\nb", "x" * 201, "caf\udce9", "\0"])
def test_invalid_labels_are_refused(label):
    with pytest.raises(ValueError, match="label"):
        decided(decision="relabel", new=label)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    append_decision(tmp_path, decided("a.png"))
    before, write = (tmp_path / DECISIONS_FILE).read_bytes(), os.pwrite

    def full(file, data, position):
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(file, data[:20], position)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        append_decision(tmp_path, decided("b.png"))
    assert (tmp_path / DECISIONS_FILE).read_bytes() == before


def _writer(folder, name, count):
    for i in range(count):
        append_decision(folder, decided(f"{name}-{i}"))


def test_parallel_writers_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_writer, args=(tmp_path, name, 15)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    images = [d.image for d in read_decisions(tmp_path)]
    assert sorted(images) == sorted(f"{name}-{i}" for name in "abcd" for i in range(15))
    for name in "abcd":
        assert [i for i in images if i.startswith(name)] == [f"{name}-{i}" for i in range(15)]


def test_decisions_survive_sigkill_at_any_moment(tmp_path):
    context = multiprocessing.get_context("fork")
    for round_ in range(10 * int(os.environ.get("IDML_KILLS", "1"))):
        told, tell = context.Pipe(duplex=False)

        def work(round_=round_, tell=tell):
            for i in range(10**6):
                append_decision(tmp_path, decided(f"{round_}-{i}"))
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
        images = [d.image for d in read_decisions(tmp_path) if d.image.startswith(f"{round_}-")]
        assert len(images) in (last + 1, last + 2)
        assert images == [f"{round_}-{i}" for i in range(len(images))]
    append_decision(tmp_path, decided("the end"))
    assert read_decisions(tmp_path)[-1].image == "the end"


def test_a_file_replaced_by_an_editor_is_written(tmp_path, monkeypatch):
    append_decision(tmp_path, decided("old"))
    lock, replaced = files.fcntl.flock, []

    def slow(file, how):
        if not replaced:  # while this writer waits for the lock
            other = tmp_path / "other"
            other.write_bytes((tmp_path / DECISIONS_FILE).read_bytes())
            replaced.append(other.replace(tmp_path / DECISIONS_FILE))
        lock(file, how)

    monkeypatch.setattr(files.fcntl, "flock", slow)
    append_decision(tmp_path, decided("new"))
    assert [d.image for d in read_decisions(tmp_path)] == ["old", "new"]


# ---- what holds


def test_the_last_decision_counts_and_undo_revokes_it():
    history = [decided(), decided(decision="relabel", new="b")]
    assert CurrentDecisions(history).find("mislabelled", "a.png", "a", SUM).new_label == "b"
    assert CurrentDecisions([*history, decided(decision="undo")]).find("mislabelled", "a.png", "a", SUM) is None
    assert CurrentDecisions([*history, decided(decision="undo")]).images() == set()
    assert CurrentDecisions([]).find("mislabelled", "a.png", "a", SUM) is None


def test_keep_counts_in_one_list_and_corrections_in_all():
    kept = CurrentDecisions([decided()])
    assert kept.find("mislabelled", "a.png", "a", SUM) is not None
    assert kept.find("duplicate", "a.png", "a", SUM) is None
    assert kept.find_correction("a.png", "a", SUM) is None
    gone = CurrentDecisions([decided(decision="exclude", kind="duplicate")])
    assert gone.find("mislabelled", "a.png", "a", SUM).decision == "exclude"
    both = CurrentDecisions([decided(decision="exclude", kind="duplicate"), decided(decision="relabel", new="b")])
    assert both.find_correction("a.png", "a", SUM).new_label == "b"


def test_a_decision_does_not_apply_to_a_changed_image():
    settled = CurrentDecisions([decided(decision="exclude")])
    assert settled.find("mislabelled", "a.png", "a", OTHER) is None
    assert settled.find_correction("a.png", "a", OTHER) is None
    assert settled.is_outdated("a.png", "a", OTHER)
    assert not settled.is_outdated("a.png", "a", SUM)
    assert settled.find("mislabelled", "a.png", "b", SUM) is None  # the same file under another label


@pytest.mark.parametrize("cell", ["=1", "+1", "-1", "@x", "\tx", "\rx"])
def test_formulas_are_escaped(cell):
    assert escape_formula(cell) == f"'{cell}"
    assert escape_formula(f"a{cell}") == f"a{cell}"
