"""The score of mutation testing: the page agrees with what is stored, and finished modules are not run again."""

import json

import pytest

import mutants

MODULE = "training/checkpoint.py"


def test_the_page_is_written_from_the_stored_results():
    text = mutants.PAGE.read_text()
    assert mutants.with_report(text, mutants.stored_rows()) == text
    figures = mutants.FIGURES.read_text()
    assert mutants.with_figure(figures, mutants.stored_rows()) == figures


def test_every_module_and_every_test_file_exists():
    for module in mutants.MODULES:
        assert (mutants.ROOT / "src" / "idml" / module).is_file()
        files = [word for word in mutants.tests_of(module) if not word.startswith("--")]
        left_out = [word.partition("=")[2] for word in mutants.tests_of(module) if word.startswith("--")]
        for file, _, test in (word.partition("::") for word in [*files, *left_out]):
            assert test in (mutants.ROOT / file).read_text()
    assert set(mutants.EQUIVALENT) <= set(mutants.MODULES)


def row(survivors=(), mutants_of=200, **more):
    lines = {f"idml.training.checkpoint.x_{name}__mutmut_1": line for name, line in survivors}
    hashes = {"source": mutants.source_hash(MODULE), "tests": mutants.tests_hash(MODULE)}
    return {**hashes, "mutants": mutants_of, "run": mutants_of, "endless": 0, "survivors": lines, **more}


def test_the_report_counts_and_lists_survivors(monkeypatch):
    monkeypatch.setitem(mutants.EQUIVALENT, MODULE, {"b = None": "b is never read"})
    text = mutants.report({MODULE: row([("_below", "a = 2"), ("lock_run", "b = None"), ("f", "")], endless=1)})
    assert f"| `{MODULE}` | 200 | 200 | 197 (1 endless) | 3 | 1 | 98.5 % |" in text
    assert "| `server/security.py` | | | | | | not run |" in text
    assert "- below 1: `a = 2`\n" in text
    assert "- lock_run 1: `b = None` (equivalent: b is never read)\n" in text
    assert text.endswith("- f 1: a line was removed")
    assert "| all | 200 | 200 | 197 | 3 | | 98.5 % |" in text
    assert "98.5 %; of an older version of the module |" not in text
    assert "98.5 %; of an older version of the module |" in mutants.report(
        {MODULE: row([("a", "x")] * 3, source="another", mutants_of=66)}
    )


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A store, a page and a work folder of their own, and a mutmut that finds one survivor of two mutants."""
    monkeypatch.setattr(mutants, "STORE", tmp_path / "mutants.json")
    monkeypatch.setattr(mutants, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(mutants, "WORK", tmp_path / "work")
    monkeypatch.setattr(mutants, "FIGURES", tmp_path / "figures.md")
    mutants.FIGURES.write_text("| kills | 9 | `make faults` |\n| mutants | old | `make mutants` |\nend\n")
    mutants.PAGE.write_text(f"head\n{mutants.BEGIN}\n{mutants.END}\nfoot\n")
    runs = []

    def run(folder, names=()):
        assert f'only_mutate = ["src/idml/{MODULE}"]' in (folder / "pyproject.toml").read_text()
        runs.append(list(names))
        meta = mutants.meta_file(folder, MODULE)
        meta.parent.mkdir(parents=True, exist_ok=True)
        codes = {"x__mutmut_1": 1, "x__mutmut_2": 1 if names else 0}
        meta.write_text(json.dumps({"exit_code_by_key": codes}))

    monkeypatch.setattr(mutants, "run_mutants", run)
    monkeypatch.setattr(mutants, "changed_lines", lambda folder, module, names: dict.fromkeys(names, "x = 2"))
    return runs


def test_a_finished_module_is_not_run_again(made, monkeypatch):
    mutants.main(["checkpoint"])
    (stored,) = mutants.stored_rows().values()
    assert (stored["mutants"], stored["survivors"]) == (2, {"x__mutmut_2": "x = 2"})
    assert "50.0 %" in mutants.PAGE.read_text()
    assert mutants.FIGURES.read_text().splitlines() == [
        "| kills | 9 | `make faults` |",
        "| mutants | 2 in 1 of 10 modules, of which 1 are finished; 50.0 % killed, at least 50.0 % in each"
        " ([survivors](mutants.md)) | `make mutants` |",
        "end",
    ]
    assert mutants.PAGE.read_text().startswith("head\n")
    assert mutants.PAGE.read_text().endswith("foot\n")
    mutants.main(["checkpoint"])
    assert made == [[]]
    monkeypatch.setattr(mutants, "tests_hash", lambda module: "more tests")
    mutants.main(["checkpoint"])
    assert made == [[], ["x__mutmut_2"]]  # only the survivor
    assert mutants.stored_rows()[MODULE]["survivors"] == {}
    assert "100.0 %" in mutants.PAGE.read_text()
    monkeypatch.setattr(mutants, "source_hash", lambda module: "another source")
    mutants.main(["--page"])
    assert "of an older version" in mutants.PAGE.read_text()
    mutants.main(["checkpoint"])
    assert made == [[], ["x__mutmut_2"], []]


def test_an_interrupted_module_goes_on(made, monkeypatch):
    def interrupted(folder, names=()):
        meta = mutants.meta_file(folder, MODULE)
        meta.parent.mkdir(parents=True, exist_ok=True)
        meta.write_text(json.dumps({"exit_code_by_key": {"x__mutmut_1": 0, "x__mutmut_2": 1, "x__mutmut_3": None}}))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mutants, "run_mutants", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mutants.main(["checkpoint"])
    stored = mutants.stored_rows()[MODULE]
    assert (stored["mutants"], stored["run"], list(stored["survivors"])) == (3, 2, ["x__mutmut_1"])
    assert "| 3 | 2 | 1 | 1 | 0 | 50.0 %; not finished |" in mutants.report(mutants.stored_rows())
    folder = mutants.WORK / "training"
    mutants.forget_survivors(folder, [MODULE])
    assert mutants.exit_codes(folder, MODULE)["x__mutmut_1"] == 0  # the tests are the same
    tests_hash = mutants.tests_hash
    monkeypatch.setattr(mutants, "tests_hash", lambda module: "more tests")
    mutants.forget_survivors(folder, [MODULE])
    assert mutants.exit_codes(folder, MODULE) == {"x__mutmut_1": None, "x__mutmut_2": 1, "x__mutmut_3": None}
    monkeypatch.setattr(mutants, "tests_hash", tests_hash)
    mutants.main(["checkpoint"])
    assert mutants.done(mutants.stored_rows()[MODULE])
    assert made == [[]]
