"""The script that repeats the tests: it goes on where it ended, and names what failed."""

import json
from types import SimpleNamespace

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


def test_the_work_of_others_is_measured(monkeypatch):
    clocks = {"busy_seconds": [100, 112], "own_seconds": [5, 8]}  # of the 12 seconds 3 were the tests'
    for name, values in clocks.items():
        monkeypatch.setattr(repeat, name, iter(values).__next__)
    done = SimpleNamespace(returncode=0, stdout="1 passed")
    monkeypatch.setattr(repeat, "time", SimpleNamespace(monotonic=iter([0, 10]).__next__, strftime=str))
    monkeypatch.setattr(repeat, "os", SimpleNamespace(cpu_count=lambda: 2))
    monkeypatch.setattr(repeat, "subprocess", SimpleNamespace(run=lambda *_, **__: done))
    found = repeat.run_tests([], burners=0)
    assert (found["seconds"], found["others"]) == (10, 0.45)


def test_the_clocks_count_processor_seconds():
    before = repeat.busy_seconds(), repeat.own_seconds()
    code = "import time\nwhile time.process_time() < 0.5: pass"
    repeat.subprocess.run([repeat.sys.executable, "-c", code], check=True)
    assert repeat.own_seconds() - before[1] > 0.4
    assert repeat.busy_seconds() - before[0] > 0.4


def test_the_page_names_the_runs():
    run = {"passed": True, "seconds": 600, "others": 0.45, "date": "2026-11-19"}
    runs = [{**run, "passed": False}, {**run, "seconds": 660}, {**run, "seconds": 720, "others": 0.47}]
    (line,) = repeat.with_figure(f"{repeat.LINE} not yet | `make repeat` |", runs).splitlines()
    assert "2 of 3 runs of the same code passed, 10 to 12 minutes each" in line
    assert "beside other work that took 45 % to 47 % of all cores" in line
    assert any(text.startswith(repeat.LINE) for text in repeat.PAGE.read_text().splitlines())
