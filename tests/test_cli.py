import json
import re
import subprocess
import sys

import pytest

import idml
from idml import cli, demo
from idml.data import datasets
from idml.data.datasets import Dataset


@pytest.fixture
def few_glyphs(monkeypatch, tmp_path):
    """The glyphs cut down to some classes, so that a demo takes seconds."""
    whole = datasets.load_glyphs()
    cut = Dataset("glyphs", whole.train.of_classes(range(40)), whole.test.of_classes(range(60)), notes=("a few",))
    monkeypatch.setattr(datasets, "load_glyphs", lambda: cut)
    monkeypatch.setattr(demo, "load_glyphs", lambda: cut)
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(demo.SETTINGS, "epochs", 1)
    return cut


def test_demo(few_glyphs, tmp_path, capsys):
    assert few_glyphs.test.ambiguous.any()
    out = tmp_path / "demo"
    assert cli.main(["demo", "--out", str(out), "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["plain"]["steps"] == results["idml"]["steps"] > 0
    for page in ("report.html", "plain/report.html", "idml/report.html"):
        text = (out / page).read_text()
        assert text.endswith("</html>")
        assert not re.search(r"""(src|href|url)[=(]['"]?http""", text)  # nothing from elsewhere
    assert (out / "idml" / "report.html").read_text().count("data:image/png") == 2
    assert (out / "gallery" / "calibration.html").exists()
    assert results["search"]["max_error"] == 0.05
    counts = results["search"]["counts"]
    assert counts["known"]["match"] > counts["known"]["queries"] / 2 > counts["known"]["wrong matches"]
    assert counts["unknown"]["match"] == counts["unknown"]["wrong matches"] < counts["unknown"]["queries"] / 2
    given = {state for state in ("match", "unsure", "not in the collection") if any(c[state] for c in counts.values())}
    assert {sample["state"] for sample in results["search"]["samples"]} == given >= {"match", "not in the collection"}
    trained = [(out / method / "log.jsonl").stat().st_mtime_ns for method in ("plain", "idml")]
    assert cli.main(["demo", "--out", str(out)]) == 0
    assert [(out / method / "log.jsonl").stat().st_mtime_ns for method in ("plain", "idml")] == trained
    said = capsys.readouterr()
    assert "plain: recall@1" in said.out
    assert "report.html" in said.err
    assert f"idml serve {out / 'gallery'}" in said.err
    first = results["search"]["samples"][0]["image"]
    assert cli.main(["search", str(out / "gallery"), str(out / first), "--max-error", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["replies"][0]["state"] == "match"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "the option 'data' is missing"),
        (["train", "--data", "glyphs", "--out", "x", "--epochs", "many"], "invalid int value: 'many'"),
        (["train", "--data", "glyphs", "--out", "x", "--epochs", "0"], "epochs must be a whole number of at least 1"),
        (["train", "--data", "cup:x", "--out", "x"], "cup"),
        (["train", "--data", "folder:/nowhere/at/all", "--out", "x"], "nowhere"),
        (["train", "--data", "glyphs", "--out", "x", "--config", "none.yaml"], "there is no file 'none.yaml'"),
        (["train", "--data", "glyphs", "--out", "x", "--loss", "triplet"], "unknown loss 'triplet'; did you mean"),
        (["train", "--data", "glyphs", "--out", "x", "--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr()
    assert status == 2
    assert words in said.err
    lines = said.err.splitlines()
    assert lines[-1].startswith("idml")
    assert "Traceback" not in said.err
    assert said.out == ""


TOO_LARGE = [
    (MemoryError(), "not enough memory (no reason given)"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\nexactly"), "not enough memory ([enforce"),
    (OverflowError("cannot convert float infinity to integer"), "cannot convert"),
]


@pytest.mark.parametrize(("error", "words"), TOO_LARGE, ids=["MemoryError", "torch", "OverflowError"])
def test_too_much_memory_is_one_line(error, words, monkeypatch, capsys):
    def fail(options):
        raise error

    monkeypatch.setattr(cli, "_export", fail)
    assert cli.main(["export", "run", "--out", "x"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_without_a_command_the_help_is_printed(capsys):
    assert cli.main([]) == 0
    said = capsys.readouterr()
    assert all(f"\n    {name}" in said.out for name in ("train", "evaluate", "search", "serve", "reproduce"))
    assert said.err == ""


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"idml {idml.__version__}\n"


@pytest.mark.parametrize("command", [["--help"], ["search", "--help"]], ids=" ".join)
def test_help_does_not_import_torch(command):
    code = (
        f"import sys; from idml import cli\ntry: cli.main({command})\nexcept SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "--json" in done.stdout or command == ["--help"]


def test_a_reader_that_stops_reading_ends_the_command_silently(tmp_path):
    command = [sys.executable, "-m", "idml.cli", "reproduce", "table1", "--data", "cub:absent", "--dry-run"]
    command += ["--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        writer.stdout.close()  # before a line is there
        said = writer.stderr.read()
        assert "rror" not in said
        assert "Broken" not in said
        assert writer.wait() == 141
