"""The script that repeats the tests: it goes on where it ended, and names what failed."""

import json

import repeat


def test_runs_are_recorded_and_resumed(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_one.py").write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    monkeypatch.setattr(repeat, "hash_of_code", lambda: "abc")
    log = tmp_path / "deep" / "log.jsonl"
    of_one = ["--log", str(log), "--burners", "1", "-p", "no:cacheprovider", "-q", "--rootdir", str(tmp_path)]
    good = [*of_one, f"{tmp_path}/test_one.py::test_good"]
    assert repeat.main(["--runs", "2", *good]) == 0
    assert "2 of 2 runs passed (abc)" in capsys.readouterr().out
    assert repeat.main(["--runs", "2", *good]) == 0  # nothing is left to do
    assert [json.loads(line)["run"] for line in log.read_text().splitlines()] == [1, 2]
    assert repeat.main(["--runs", "3", *of_one, f"{tmp_path}/test_one.py"]) == 1
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["run"], last["passed"]) == (3, False)
    assert [name.rpartition("::")[2] for name in last["failed"]] == ["test_bad"]
    assert repeat.main(["--runs", "3", *good]) == 1  # a failed run counts
    monkeypatch.setattr(repeat, "hash_of_code", lambda: "another")
    assert repeat.main(["--runs", "1", *good]) == 0


def test_the_code_is_known_by_its_content(tmp_path, monkeypatch):
    repeat.subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("one")
    (tmp_path / "README.md").write_text("one")
    repeat.subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    monkeypatch.setattr(repeat, "ROOT", tmp_path)
    before = repeat.hash_of_code()
    (tmp_path / "README.md").write_text("two")
    assert repeat.hash_of_code() == before
    (tmp_path / "src" / "a.py").write_text("two")
    assert repeat.hash_of_code() != before


def test_the_page_names_the_runs():
    runs = [{"passed": i > 0, "seconds": 600 + 60 * i, "burners": 2, "date": "2026-11-19"} for i in range(3)]
    (line,) = repeat.with_figure(f"{repeat.LINE} not yet | `make repeat` |", runs).splitlines()
    assert "2 of 3 runs of the same code passed, 10 to 12 minutes each, beside 2 processes" in line
    assert any(text.startswith(repeat.LINE) for text in repeat.PAGE.read_text().splitlines())
