"""The score of mutation testing in docs/mutants.md: mutants and survivors of each module, after `make mutants`.

    python tests/mutants.py            write the page again

mutmut keeps its state in mutants/, so a run that is interrupted goes on. A mutant counts as killed if a test fails, or
if it makes a test endless. EQUIVALENT lists the survivors that behave as the original does, each with the reason; they
count as survivors all the same. A module that was not run to the end is shown with what was run.
"""

import fnmatch
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "mutants.md"
BEGIN, END = "<!-- mutants: python tests/mutants.py -->", "<!-- end of mutants -->"
SURVIVED, UNTESTED = 0, 33  # exit codes in mutmut's files: all tests passed; no test reaches the function
TIMEOUT = (-24, 24, 36, 152, 255)
EQUIVALENT = {  # a piece of the changed line, and why nothing can tell it from the original
    "strict=": "both lists have the same length by construction",
    "CT,CT->T": "the names of the indices of a product do not matter",
    "int(classes.max()) + 2": "one class more without queries adds zeros",
}


def results(folder: Path) -> dict[str, dict[str, int | None]]:
    """Exit codes of all mutants by module."""
    found = {}
    for path in sorted(folder.glob("src/**/*.py.meta")):
        codes = json.loads(path.read_text())["exit_code_by_key"]
        if codes:
            found[str(path.relative_to(folder / "src")).removesuffix(".meta")] = codes
    return found


def changed_line(mutant: str, folder: Path) -> str:
    """The line of a mutant that differs from the original, as mutmut shows it."""
    shown = subprocess.run(
        [sys.executable, "-m", "mutmut", "show", mutant], cwd=folder.parent, capture_output=True, text=True
    ).stdout
    lines = [line[1:].strip() for line in shown.splitlines() if line.startswith("+") and not line.startswith("+++")]
    return " ".join(lines)


def reason(line: str) -> str:
    """Why a survivor behaves as the original; empty if it does not, or if nobody has looked."""
    return next((why for piece, why in EQUIVALENT.items() if fnmatch.fnmatchcase(line, f"*{piece}*")), "")


def report(folder: Path) -> str:
    """The table and the list of survivors in Markdown."""
    rows = ["| module | mutants | run | killed | survived | of these equivalent | score |", "| --- " * 7 + "|"]
    lists = []
    for module, codes in results(folder).items():
        run = {mutant: code for mutant, code in codes.items() if code is not None}
        survivors = [mutant for mutant, code in run.items() if code in (SURVIVED, UNTESTED)]
        lines = {mutant: changed_line(mutant, folder) for mutant in survivors}
        alike = sum(bool(reason(line)) for line in lines.values())
        killed = len(run) - len(survivors)
        score = f"{killed / len(run):.1%}".replace("%", " %") if run else "not run"
        timeouts = Counter(code in TIMEOUT for code in run.values())[True]
        note = f" ({timeouts} endless)" if timeouts else ""
        rows.append(
            f"| `{module}` | {len(codes)} | {len(run)} | {killed}{note} | {len(survivors)} | {alike} | {score} |"
        )
        if survivors:
            lists.append(f"\n### `{module}`\n")
            for mutant, line in lines.items():
                name = mutant.rpartition(".")[2].replace("ǁ", ".").removeprefix("x").lstrip("._")
                why = f" — equivalent: {reason(line)}" if reason(line) else ""
                code = line.replace("`", "'")[:160]
                lists.append(f"- {name}: `{code}`{why}" if code else f"- {name}: a line was removed{why}")
    return "\n".join([*rows, "", "## Survivors", *lists])


def with_report(text: str, folder: Path) -> str:
    """The page with the current report."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{report(folder)}\n\n{END}{after}"


if __name__ == "__main__":
    mutants = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "mutants"
    if not results(mutants):
        sys.exit("there are no mutants: make mutants")
    PAGE.write_text(with_report(PAGE.read_text(), mutants))
