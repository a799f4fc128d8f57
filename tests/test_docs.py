"""What the documents show, runs; what they name, exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "example", "exec"), names)
    assert len(names) > 1


MADE = re.findall(r'"([\w/]+\.md)"', (ROOT / "docs" / "site_hooks.py").read_text())  # pages of the site alone


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    made = MADE if page.name == "index.md" else ()
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists() or target in made, target


def test_make_commands_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text())
    assert commands
    assert set(commands) <= targets
