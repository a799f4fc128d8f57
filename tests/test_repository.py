"""The files around the code that other programs read: the workflow, the issue forms, the citation."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", ".github/workflows/*.yml"),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/*.yml"),
        ("vendor.citation-file-format", "CITATION.cff"),
    ],
)
def test_files_for_other_programs_are_valid(schema, files):
    found = [str(file) for file in ROOT.glob(files)]
    assert found
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *found]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_workflow_has_no_known_weakness():
    """zizmor looks for stored credentials, injected code and too many permissions; without asking GitHub."""
    zizmor = Path(sys.executable).parent / "zizmor"
    command = [str(zizmor), "--offline", "--quiet", "--config", ".github/zizmor.yml", ".github/workflows"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
