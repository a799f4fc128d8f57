"""The table of faults in docs/reliability.md: complete, up to date, and every test of it exists."""

import fault_table


def test_every_fault_has_tests_that_exist():
    assert len(fault_table.FAULTS) == 50
    assert all(fault_table.FAULTS.values())
    assert fault_table.missing_tests() == []


def test_the_page_has_the_current_table():
    text = fault_table.PAGE.read_text()
    assert fault_table.with_table(text) == text
    tests = {test for tests in fault_table.FAULTS.values() for test in tests.split()}
    assert f"| 50 faults, {len(tests)} tests |" in text


def test_a_test_that_is_gone_is_named(monkeypatch):
    monkeypatch.setitem(fault_table.FAULTS, "made up", "test_cli.py::test_gone test_nowhere.py::test_x")
    assert fault_table.missing_tests() == ["test_cli.py::test_gone", "test_nowhere.py::test_x"]
