import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

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


GLYPHS = ["train", "--data", "glyphs", "--out", "x"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*GLYPHS, "--loss", "triplet"], "unknown loss 'triplet'; did you mean 'triplet_semihard'?"),
        ([*GLYPHS, "--method", "IDML"], "unknown method 'IDML'; did you mean 'idml'?"),
        ([*GLYPHS, "--trunk", "resnet5"], "unknown trunk 'resnet5'; did you mean 'resnet50'"),
        ([*GLYPHS, "--schedule", "Cosine"], "unknown schedule 'Cosine'; did you mean 'cosine'?"),
        ([*GLYPHS, "--epoch", "3"], "unknown option '--epoch'; did you mean '--epochs'"),
        ([*GLYPHS, "--epochs=3", "--batch_size=8"], "unknown option '--batch_size'; did you mean '--batch-size'?"),
        ([*GLYPHS, "more"], "unexpected argument 'more'"),
        (["train", "--data", "photos", "--out", "x"], "'photos' is a path without a kind: write folder:photos"),
        (["train", "--data", "list.csv", "--out", "x"], "'list.csv' is a path without a kind: write csv:list.csv"),
        (["train", "--data", "folder:phtos", "--out", "x"], "there is no 'phtos'; did you mean folder:photos?"),
        (["train", "--data", "CUB:x", "--out", "x"], "unknown data set 'CUB'; did you mean 'cub'?"),
        ([*GLYPHS, "--resume"], "there is no run 'x' to continue; leave out --resume to start one"),
        (["train", "--data", "folder:nowhere", "--out", "x", "--dry-run"], "nowhere"),
        ([*GLYPHS, "--dry-run", "--trunk", "resnet5"], "unknown trunk 'resnet5'"),
        ([*GLYPHS, "--dry-run", "--resume"], "there is no run 'x' to continue"),
        (["Search", "g", "a.png"], "unknown command 'Search'; did you mean 'search'?"),
        (["retrieve"], "unknown command 'retrieve' (one of "),
        (["--versoin"], "unknown option '--versoin'; did you mean '--version'?"),
        (["--method", "IDML"], "'--method' is an option of 'idml train': write it after the command"),
        (["--no-pca", "train"], "'--no-pca' is an option of 'idml train'"),
        (["--max-error=0.1", "search", "g", "a.png"], "'--max-error' is an option of 'idml search'"),
        (["--json", "search"], "'--json' is an option of every command: write it after the command"),
        (["--dry-run"], "'--dry-run' is an option of 'idml train', 'idml reproduce': write it after the command"),
        (["index", "list.csv", "--to", "g"], "'list.csv' is a file, name its folder; nothing was changed"),
        (["index", "photos", "--too", "g"], "unknown option '--too'; did you mean '--to'"),
        (["index", "photos"], "the following arguments are required: --to ('idml index --help' explains them)"),
        (["gallery", "list"], "the following arguments are required: GALLERY ("),
        (["gallery", "lst", "g"], "unknown action 'lst'; did you mean 'list'?"),
        (["evaluate", "run", "--data", "glyphs", "--metric", "intro"], "did you mean 'introspective'?"),
        (["search", "g", "a.png", "-q"], "unknown option '-q'"),
        (["completion", "cmd"], "unknown shell 'cmd' (one of bash, zsh, fish, tcsh)"),
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["train"], "the option 'data' is missing"),
        (["train", "--data", "glyphs", "--out", "x", "--epochs", "many"], "--epochs takes a whole number, got 'many'"),
        (["train", "--data", "glyphs", "--out", "x", "--epochs", "0"], "epochs must be a whole number of at least 1"),
        (["train", "--data", "cup:x", "--out", "x"], "cup"),
        (["train", "--data", "folder:/nowhere/at/all", "--out", "x"], "nowhere"),
        (["train", "--data", "glyphs", "--out", "x", "--config", "none.yaml"], "there is no file 'none.yaml'"),
        (["train", "--data", "glyphs", "--out", "x", "--loss", "triplet"], "unknown loss 'triplet'; did you mean"),
        (
            ["train", "--data", "glyphs", "--out", "x", "--nothing"],
            "unknown option '--nothing' (idml train --help lists them)",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "list.csv").write_text("path,label\n")
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr()
    assert status == 2
    assert not (tmp_path / "x").exists()
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


def test_a_misspelt_loss_is_noticed_before_data_are_loaded(monkeypatch, tmp_path, capsys):
    def load(*_):
        raise AssertionError("data were loaded")

    monkeypatch.setattr("idml.training.loop.load_dataset", load)
    (tmp_path / "run.yaml").write_text("loss: triplet\n")
    for trunk in (["--config", str(tmp_path / "run.yaml")], ["--trunk", "resnet5"]):
        assert cli.main(["train", "--data", "glyphs", "--out", str(tmp_path / "x"), *trunk]) == 2
        assert "did you mean" in capsys.readouterr().err


def test_a_dry_run_says_what_would_run_and_writes_nothing(few_glyphs, tmp_path, capsys):
    command = ["train", "--data", "glyphs", "--out", str(tmp_path / "run"), "--epochs", "3", "--dry-run"]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "train: " in said
    assert "plain with multi_similarity on tf_efficientnet_lite0: 3 epochs" in said
    assert cli.main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["data"]["train"]["classes"] + plan["data"]["held out"]["classes"] == 40
    weights = tmp_path / "weights.safetensors"
    save_file({"conv.weight": torch.zeros(1)}, weights)  # of another architecture
    for options, words in (
        (["--method", "dac", "--groups", "3"], "embedding_dim 512 does not divide into 3 slices"),
        (["--loss-parameters", "gamma=1"], "unknown parameter 'gamma' of MultiSimilarity"),
        (["--method", "drml", "--loss", "proxy_anchor", "--embedding-dim", "513", "--nodes", "3"], "does not divide"),
        (["--weights", str(weights)], "weights.safetensors"),
    ):
        assert cli.main([*command, *options]) == 2
        assert words in capsys.readouterr().err
    assert plan["options"]["epochs"] == 3
    assert cli.main([*command, "--warmup-epochs", "3"]) == 0
    assert "the trunk does not learn: warm-up has 3 epochs, and the run 3" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_is_continued_at_its_beginning(few_glyphs, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    command = ["train", "--data", "glyphs", "--out", str(tmp_path / "run"), "--resume", "--dry-run"]
    assert cli.main(command) == 2  # what a refused run leaves is no run
    assert "there is no run" in capsys.readouterr().err
    (tmp_path / "run" / "config.yaml").touch()
    assert cli.main(command) == 0
    assert "run has no checkpoint: the run starts at its beginning" in capsys.readouterr().err


def test_the_listed_tables_regimes_and_scales_are_those_of_reproduce():
    from idml.reproduction.regimes import LAPTOP, SCALES
    from idml.reproduction.reproduce import NAMES

    assert sorted(cli._TABLES) == sorted(NAMES)
    assert sorted(cli._REGIMES) == sorted(LAPTOP)
    assert sorted(cli._SCALES) == sorted(SCALES)


@pytest.mark.parametrize("command", sorted(cli.build_parser([])[1]))
def test_help_of_each_command_lists_every_choice(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    for action in cli.build_parser([command])[1][command].arguments:
        assert action.help, action.dest
        for word in action.choices or ():
            assert re.search(rf"\b{re.escape(word)}\b", text), (action.dest, word)


def test_the_overview_groups_all_commands(capsys):
    grouped = [name for names in cli._GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(cli.build_parser([])[1])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_flags_and_losses(shell, tmp_path, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("search", "--max-error", "multi_similarity", "--teach-u", "verify"):
        assert word in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_tab_completes_in_bash(tmp_path, capsys):
    """Ask bash itself, as it does when Tab is pressed."""
    if not shutil.which("bash"):
        pytest.skip("bash is not installed")
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    press = 'source ./script; COMP_WORDS=(idml {}); COMP_CWORD={}; _shtab_idml; echo "${{COMPREPLY[@]}}"'

    def tab(*words):
        code = press.format(" ".join(words), len(words))
        done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert tab("sea") == ["search"]
    assert tab("train", "--epo") == ["--epochs"]
    assert tab("train", "--loss", "tri") == ["triplet_semihard"]


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
    command = [sys.executable, "-m", "idml.cli", "reproduce", "table1", "--data", "cub", "--dry-run"]
    command += ["--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        writer.stdout.close()  # before a line is there
        said = writer.stderr.read()
        assert "rror" not in said
        assert "Broken" not in said
        assert writer.wait() == 141
