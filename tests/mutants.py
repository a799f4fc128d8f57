"""Mutation testing of the modules that carry promises: run mutmut, keep the results, write docs/mutants.md.

    python tests/mutants.py                 run what is not finished, then write the page
    python tests/mutants.py checkpoint      only the modules whose path holds a word
    python tests/mutants.py --page          write the page from results/mutants.json, run nothing

The modules of a folder are run together, with the tests in TESTS, in mutants/<folder>/, where mutmut keeps its state:
an interrupted run goes on there. What was run of a module is stored in results/mutants.json, with hashes of its source
and of its tests. As long as both are the same, a finished module is not run again, on any machine. If only the tests
have changed, only the survivors are run again; a mutant that was killed stays killed. If the source has changed, all of
its mutants are run.

A mutant counts as killed if a test fails, or if it makes a test endless. EQUIVALENT lists the survivors that behave as
the original does, each with the reason; they count as survivors all the same.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, FIGURES = ROOT / "docs" / "mutants.md", ROOT / "docs" / "reliability.md"
STORE, WORK = ROOT / "results" / "mutants.json", ROOT / "mutants"
BEGIN, END = "<!-- mutants: python tests/mutants.py -->", "<!-- end of mutants -->"
ALIVE = (0, 5, 33)  # exit codes in mutmut's files: all tests passed; no test was found; none reaches the function
TIMEOUT = (-24, 24, 36, 152, 255)
GOAL = 0.85

TESTS = {  # of the modules below src/idml; long tests are left out
    "calibration": "tests/calibration/test_evidence.py tests/calibration/test_cluster_bound.py"
    " tests/calibration/test_risk_control.py"
    " --deselect=tests/calibration/test_cluster_bound.py::test_promises_are_kept_where_classes_hang_together"
    " --deselect=tests/calibration/test_cluster_bound.py"
    "::test_classes_that_were_not_counted_break_few_promises_at_nine_tenths_unknown",
    "training": "tests/training/test_checkpoint.py"
    " --deselect=tests/training/test_checkpoint.py::test_one_run_a_directory",
    "server": "tests/server/test_request_guard.py tests/server/test_security_keys.py",
    "search": "tests/search/test_sqlite.py tests/search/test_sqlite_storage.py tests/search/test_sqlite_files.py"
    " tests/search/test_readers.py tests/search/test_damage.py"
    " --deselect=tests/search/test_damage.py::test_every_flipped_bit_is_found_or_harmless"
    " --deselect=tests/search/test_readers.py::test_a_reader_beside_a_busy_writer"
    " --deselect=tests/search/test_readers.py::test_several_processes_write_at_once"
    " --deselect=tests/search/test_sqlite.py::TestGallery"
    " --deselect=tests/search/test_sqlite.py::test_search_never_imports_training",
}
MODULES = [
    "calibration/evidence.py",
    "calibration/cluster_bound.py",
    "calibration/risk_control.py",
    "training/checkpoint.py",
    "server/security.py",
    "search/engines/sqlite.py",
    "search/engines/sqlite_changes.py",
    "search/engines/sqlite_integrity.py",
    "search/engines/sqlite_storage.py",
    "search/engines/sqlite_vectors.py",
]
EQUIVALENT: dict[str, dict[str, str]] = {  # a piece of the changed line, and why nothing can tell it from the original
    "calibration/cluster_bound.py": {
        "strict=": "both lists have the same length by construction",
        "CT,CT->T": "the names of the indices of a product do not matter",
        "int(places.max()) + 2": "one class more without queries adds zeros",
    },
    "calibration/evidence.py": {
        "search.top(2)": "only the first of the two distances is read",
        "default=-2.0": "every number below 0 refuses an empty profile",
    },
    "calibration/risk_control.py": {
        "if ratio >= 1 else 'smaller'": "at a ratio of 1 the text is not used",
        "{101 * GROWTH:.0f}": "20.2 is written as 20",
        "1 < moments.clusters < ENOUGH_CLUSTERS": "with one cluster nothing is promised",
        "if rate <= max_error]": "the same test twice passes twice",
        "zip(*tests,": "the lists have the same length by construction",
        "zip(moments.wrong, moments.answered": "the lengths are compared before the pairs are read",
        "zip(self.wrong, self.answered": "the lengths are compared before the pairs are read",
        "max(2, len(p))": "with one query 1/8 is the smaller one",
        "range(_STEPS + 1) if": "0 is below the first share",
        "if step / _STEPS > first)": "the first share is in the set already",
        "np.where(None, 1.0, bdtr(": "P(Bin(0, ε) ≤ 0) is 1 by itself",
        "np.asarray(wrong, dtype=None)": "scipy converts whole numbers by itself",
        "np.asarray(wrong, )": "scipy converts whole numbers by itself",
        "np.asarray(total, dtype=None)": "whole numbers are of this type without being asked",
        "np.asarray(total, )": "whole numbers are of this type without being asked",
    },
}
SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {modules}
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = {options}
also_copy = ["benchmarks"]
process_isolation = "{isolation}"
use_git_change_detection = false
timeout_multiplier = 10.0
timeout_constant = 6.0
"""
OPTIONS = "no:cacheprovider no:unraisableexception no:threadexception"  # the last two search all memory for garbage
PLUGINS = "_hypothesis_pytestplugin anyio.pytest_plugin"  # to find all others takes longer than a test
Row = dict[str, Any]


def digest(paths: list[Path]) -> str:
    """A short hash of the content of files."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def source_hash(module: str) -> str:
    """The hash of a module."""
    return digest([ROOT / "src" / "idml" / module])


def folder_of(module: str) -> str:
    """The first folder of a module's path; its modules have the same tests."""
    return module.partition("/")[0]


def tests_of(module: str) -> list[str]:
    """Arguments of pytest that select the tests of a module."""
    return TESTS[folder_of(module)].split()


def tests_hash(module: str) -> str:
    """The hash of a module's tests, and of what lies beside them and is no test itself."""
    files = {ROOT / word for word in tests_of(module) if not word.startswith("--")}
    beside = {other for file in files for other in file.parent.glob("*.py") if not other.name.startswith("test_")}
    return digest(sorted(files | beside))


# -------------------- running --------------------


def prepare(modules: list[str]) -> Path:
    """Make the folder in which mutmut runs: links to the sources and tests, and settings for these modules."""
    folder = WORK / folder_of(modules[0])
    sources = folder / "mutants" / "src"
    sources.mkdir(parents=True, exist_ok=True)  # Python remembers a path that is not there
    for name in ("src", "tests", "benchmarks"):
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(Path("..", "..", name))
    paths = json.dumps([f"src/idml/{module}" for module in modules])
    options = [word for name in f"{OPTIONS} {PLUGINS}".split() for word in ("-p", name)]
    # torch cannot compute gradients after a fork of a process that has
    isolation = "forkserver" if folder.name == "training" else "fork"
    tests = json.dumps(tests_of(modules[0]))
    settings = SETTINGS.format(modules=paths, tests=tests, options=json.dumps(options), isolation=isolation)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings)
    for module in MODULES:  # mutmut takes a plain copy of a module for its mutants if it lies there before
        meta = meta_file(folder, module)
        if module not in modules:
            meta.unlink(missing_ok=True)
        if not meta.exists():
            (sources / "idml" / module).unlink(missing_ok=True)
    return folder


def meta_file(folder: Path, module: str) -> Path:
    """Where mutmut keeps the exit codes of a module's mutants."""
    return folder / "mutants" / "src" / "idml" / f"{module}.meta"


def exit_codes(folder: Path, module: str) -> dict[str, int | None]:
    """The exit codes of a module's mutants, None for those that were not run."""
    meta = meta_file(folder, module)
    codes: dict[str, int | None] = json.loads(meta.read_text())["exit_code_by_key"] if meta.exists() else {}
    return codes


def survives(code: int | None) -> bool:
    """Whether an exit code is that of a survivor."""
    return code in ALIVE


def forget_survivors(folder: Path, modules: list[str]) -> None:
    """Let the survivors of an interrupted run be run again if the tests have changed since; note the hashes of now."""
    note, tests = folder / "hashes.json", tests_hash(modules[0])
    if note.exists() and json.loads(note.read_text())["tests"] != tests:
        for meta in (meta_file(folder, module) for module in modules):
            content = json.loads(meta.read_text()) if meta.exists() else {"exit_code_by_key": {}}
            codes = content["exit_code_by_key"]
            content["exit_code_by_key"] = {name: None if survives(code) else code for name, code in codes.items()}
            if codes:
                meta.write_text(json.dumps(content))
    sources = {module: source_hash(module) for module in modules}
    note.write_text(json.dumps({"tests": tests, "sources": sources}))


def run_mutants(folder: Path, names: Sequence[str] = ()) -> None:
    """Let mutmut run all mutants that were not run yet, or those with these names."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "mutants" / "src"),  # for the processes that tests start
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",  # threads do not survive a fork
    }
    command = [Path(sys.executable).with_name("mutmut"), "run", "--max-children", "1", *names]
    subprocess.run(command, cwd=folder, env=environment, check=True)


def run_all(modules: list[str]) -> None:
    """Run all mutants of some modules with the same tests, and store what was run."""
    folder = prepare(modules)
    forget_survivors(folder, modules)
    try:
        run_mutants(folder)
    finally:
        collect(folder)


def collect(folder: Path) -> None:
    """Store what was run in a folder, also of modules that are not finished."""
    note = folder / "hashes.json"
    hashes = json.loads(note.read_text()) if note.exists() else {"tests": "", "sources": {}}
    for module, source in hashes["sources"].items():
        codes = exit_codes(folder, module)
        run = sum(code is not None for code in codes.values())
        known = {"source": source, "tests": hashes["tests"], "mutants": len(codes), "run": run}
        old = stored_rows().get(module, {})
        better = old.get("source") != source or not done(old) or run == len(codes)
        if run and better and {name: old.get(name) for name in known} != known:
            alive = [name for name, code in codes.items() if survives(code)]
            endless = sum(code in TIMEOUT for code in codes.values())
            row = {**known, "endless": endless, "survivors": changed_lines(folder, module, alive)}
            store(stored_rows() | {module: row})


def done(row: Row) -> bool:
    """Whether all mutants of a row were run."""
    return bool(row["run"] == row["mutants"])


def run_survivors(before: dict[str, Row]) -> None:
    """Run the survivors of some modules with the same tests, whose tests have changed, and store the rest of them."""
    modules, tests = list(before), tests_hash(next(iter(before)))
    folder = prepare(modules)
    names = [name for row in before.values() for name in row["survivors"]]
    if names:
        run_mutants(folder, names)
    for module, row in before.items():
        codes = exit_codes(folder, module)
        survivors = {name: line for name, line in row["survivors"].items() if survives(codes[name])}
        endless = row["endless"] + sum(codes[name] in TIMEOUT for name in row["survivors"])
        store(stored_rows() | {module: {**row, "tests": tests, "endless": endless, "survivors": survivors}})


def changed_lines(folder: Path, module: str, mutants: list[str]) -> dict[str, str]:
    """The line of each mutant that differs from the original; empty if a line was removed."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    found = {}
    with contextlib.chdir(folder):
        for mutant in mutants:
            lines = get_diff_for_mutant(mutant, path=Path("src", "idml", module)).splitlines()
            new = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
            found[mutant] = " ".join(new)
    return found


# -------------------- the page --------------------


def reason(module: str, line: str) -> str:
    """Why a survivor behaves as the original; empty if it does not, or if nobody has looked."""
    return next((why for piece, why in EQUIVALENT.get(module, {}).items() if piece in line), "")


def percent(killed: int, total: int) -> str:
    """A share as it is written in the docs."""
    return f"{100 * killed / total:.1f} %"


def report(rows: dict[str, Row]) -> str:
    """The table and the list of survivors in Markdown."""
    table = ["| module | mutants | run | killed | survived | of these equivalent | score |", "| --- " * 7 + "|"]
    lists = []
    for module in MODULES:
        if module not in rows:
            table.append(f"| `{module}` | | | | | | not run |")
            continue
        row = rows[module]
        survivors, run = row["survivors"], row["run"]
        killed = run - len(survivors)
        alike = sum(bool(reason(module, line)) for line in survivors.values())
        note = f" ({row['endless']} endless)" if row["endless"] else ""
        older = "" if row["source"] == source_hash(module) else "; of an older version of the module"
        score = percent(killed, run) + ("" if done(row) else "; not finished") + older
        counts = f"{row['mutants']} | {run} | {killed}{note} | {len(survivors)} | {alike}"
        table.append(f"| `{module}` | {counts} | {score} |")
        if survivors:
            lists.append(f"\n### {module}\n")
        for mutant, line in survivors.items():
            name = mutant.rpartition(".")[2].replace("ǁ", ".").removeprefix("x").lstrip("._").replace("__mutmut_", " ")
            why = f" (equivalent: {reason(module, line)})" if reason(module, line) else ""
            code = line.replace("`", "'")[:160]
            lists.append(f"- {name}: `{code}`{why}" if code else f"- {name}: a line was removed{why}")
    total, run = (sum(row[name] for row in rows.values()) for name in ("mutants", "run"))
    alive = sum(len(row["survivors"]) for row in rows.values())
    if run:
        table.append(f"| all | {total} | {run} | {run - alive} | {alive} | | {percent(run - alive, run)} |")
    return "\n".join([*table, "", "## Survivors", *lists])


def with_report(text: str, rows: dict[str, Row]) -> str:
    """The page with the current report."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{report(rows)}\n\n{END}{after}"


def with_figure(text: str, rows: dict[str, Row]) -> str:
    """The page of all figures with the current line about mutants."""
    run = sum(row["run"] for row in rows.values())
    killed = run - sum(len(row["survivors"]) for row in rows.values())
    lowest = min((1 - len(row["survivors"]) / row["run"] for row in rows.values()), default=0.0)
    score = f"{percent(killed, run)} killed, at least {100 * lowest:.1f} % in each" if run else "not run"
    finished = sum(done(row) for row in rows.values())
    modules = f"{len(rows)} of {len(MODULES)} modules, of which {finished} are finished"
    figure = f"{run:,} in {modules}; {score} ([survivors](mutants.md))"
    line = f"| mutants | {figure} | `make mutants` |"
    return "\n".join(line if old.startswith("| mutants |") else old for old in text.split("\n"))


def write_pages() -> None:
    """Write the figures into both pages."""
    rows = stored_rows()
    PAGE.write_text(with_report(PAGE.read_text(), rows))
    FIGURES.write_text(with_figure(FIGURES.read_text(), rows))


def stored_rows() -> dict[str, Row]:
    """What was run of each module."""
    rows: dict[str, Row] = json.loads(STORE.read_text()) if STORE.exists() else {}
    return rows


def finished_rows() -> dict[str, Row]:
    """The rows of modules that were run to the end as they are now."""
    return {name: row for name, row in stored_rows().items() if done(row) and row["source"] == source_hash(name)}


def store(rows: dict[str, Row]) -> None:
    """Write the rows of all modules."""
    rows = {module: rows[module] for module in MODULES if module in rows}
    STORE.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Run what is not finished and write the page."""
    parser = argparse.ArgumentParser(description="mutation testing of the modules that carry promises")
    parser.add_argument("words", nargs="*", help="run only modules whose path contains one of these")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    options = parser.parse_args(arguments)
    for folder in () if options.page else TESTS:
        modules = [module for module in MODULES if folder_of(module) == folder]
        if options.words:
            modules = [module for module in modules if any(word in module for word in options.words)]
        collect(WORK / folder)
        rows = finished_rows()
        here = [module for module in modules if module not in rows or exit_codes(WORK / folder, module)]
        if any(module not in rows for module in modules):
            run_all(here)
        rows = {name: row for name, row in finished_rows().items() if name in modules}
        if changed := {name: row for name, row in rows.items() if row["tests"] != tests_hash(name)}:
            run_survivors(changed)
    write_pages()


if __name__ == "__main__":
    main()
