"""The script that repeats the tests: it goes on where it ended, and names what failed."""

import json

import repeat


def test_runs_are_recorded_and_resumed(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_one.py").write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    monkeypatch.setattr(repeat, "commit", lambda: "abc")
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
    monkeypatch.setattr(repeat, "commit", lambda: "another")
    assert repeat.main(["--runs", "1", *good]) == 0
