"""What the documents show, runs; what they name, exists."""

import argparse
import ast
import importlib.util
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

import idml
from idml.cli import main
from idml.losses import LOSSES
from idml.methods import METHODS

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
]
README = PAGES[0].read_text()


def read_blocks(page):
    """The fenced blocks of a page: what stands after the fence, and the text; and the page without them."""
    found, fence, rest = [], None, []
    for line in page.read_text().splitlines(keepends=True):
        if fence is None and (opened := re.match(r" *(`{3,})([^`\n]*)$", line)):
            fence = opened[1]
            found.append([opened[2].strip(), ""])
        elif fence is not None and line.strip() == fence:
            fence = None
        elif fence is not None:
            found[-1][1] += line
        else:
            rest.append(line)
    assert fence is None, f"{page} has a block without an end"
    return found, "".join(rest)


def blocks(language):
    """The blocks of all pages in a language."""
    return [
        pytest.param(code, id=f"{page.name}-{i}")
        for page in PAGES
        for i, (name, code) in enumerate(read_blocks(page)[0])
        if name == language
    ]


# -------------------- Python --------------------


@pytest.fixture
def photos(tmp_path, monkeypatch, tiny_run):
    """An empty folder with photos and a query, where a small network stands in for the pretrained one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("idml.search.gallery.PRETRAINED", tiny_run)
    monkeypatch.setattr("idml.losses.LOSSES", dict(LOSSES))  # an example adds one
    noise = np.random.default_rng(0)
    for label in range(24):
        colour = noise.integers(0, 200, (4, 4, 3)).repeat(8, 0).repeat(8, 1)
        (tmp_path / "photos" / f"class {label}").mkdir(parents=True)
        for name in ("photos/class {}/a.png", "photos/class {}/b.png", "photos/class {}/c.png", "query.jpg"):
            pixels = colour + noise.integers(0, 20, colour.shape)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / name.format(label))


@pytest.mark.parametrize("code", blocks("python"))
@pytest.mark.usefixtures("photos")
def test_examples_run(code):
    names = {}
    exec(compile(code, "example", "exec"), names)
    assert len(names) > 1


@pytest.mark.parametrize("code", blocks("python no-run"))
def test_names_of_examples_that_need_a_server_exist(code):
    found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    assert found
    for node in found:
        assert all(hasattr(import_module(node.module), alias.name) for alias in node.names)


# -------------------- commands --------------------


STANDING_FOR = {"X": "1", "N": "1", "NAME": "plain", "centred": "plain"}
"""Values for placeholders; `centred` is the method that a guide adds."""


def command_lines():
    """Every command of a block, and every `idml …` of a text that has no placeholder such as [x], NAME or …."""
    found = {}
    for page in PAGES:
        shell, prose = read_blocks(page)
        lines = [line for name, block in shell if name in ("", "sh", "bash") for line in block.splitlines()]
        mentions = [] if page.name == "CHANGELOG.md" else re.findall(r"`(idml [^`\n]+)`", prose)
        for whole, line in [*((True, line) for line in lines), *((False, line) for line in mentions)]:
            called = re.match(r"(?:[A-Z_]+=\S+ )*(?:idml|(?:torchrun|accelerate) .*-m idml\.cli) (.*)", line)
            if called and not re.search(r"[\[\]…|]|\bNAME\b", called[1].partition("#")[0]):
                words = shlex.split(called[1], comments=True)
                words = [STANDING_FOR.get(word, word) for word in words if word != "&"]
                found.setdefault(f"{page.name}: {' '.join(words)}", (words, whole))
    return [pytest.param(words, whole, id=name) for name, (words, whole) in found.items()]


class Parsed(Exception):
    """The command line was understood."""


@pytest.mark.parametrize(("words", "whole"), command_lines())
def test_commands_are_understood(words, whole, monkeypatch, capsys):
    """A command of a block is complete; one in a sentence, such as `idml index --maps`, may lack arguments."""
    original = argparse.ArgumentParser.parse_known_args

    def parse(self, *arguments, **options):
        namespace, unknown = original(self, *arguments, **options)
        if self.prog == "idml":
            raise (AssertionError(f"unknown words: {unknown}") if unknown else Parsed)
        return namespace, unknown

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    with pytest.raises((Parsed, SystemExit)) as ended:
        main(words)
    said = capsys.readouterr().err
    understood = ended.type is Parsed or ended.value.code == 0
    assert understood or (not whole and "arguments are required" in said), said


def test_commands_are_found():
    assert len(command_lines()) > 60
    with pytest.raises(SystemExit):
        main(["index", "photos", "--into", "gallery"])


def test_make_commands_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"\bmake ([a-z]+)", README)
    assert {"demo", "test"} <= set(commands) <= targets


# -------------------- links --------------------


def import_file(path):
    """A module, imported from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def site_hooks():
    """The hooks of the site."""
    return import_file(ROOT / "docs" / "site_hooks.py")


MADE = re.findall(r'"([\w/]+\.md)"', (ROOT / "docs" / "site_hooks.py").read_text())  # pages of the site alone


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)]*)?\)", page.read_text()):
        if target.startswith(("https://", "http://127.0.0.1")):
            continue
        made = target if page.name == "index.md" else "examples.md" if target.endswith(".py") else ""
        file = page.parent / target if target else page
        assert file.exists() or made in MADE, target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}{anchor}"


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\s-]", "", title.replace("`", "").lower()).strip().replace(" ", "-") for title in titles}


def test_the_site_shows_blocks_that_are_not_run_as_python():
    """The parser of the site takes a fence with a second word for text, and all that follows too."""
    written = "".join(f"```{name}\n{code}```\n" for name, code in read_blocks(ROOT / "docs" / "milvus.md")[0])
    assert "```python no-run\n" in written
    shown = site_hooks().on_page_markdown(written)
    assert set(re.findall(r"^```(.+)$", shown, re.MULTILINE)) == {"sh", "python"}


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w/-]+\.md)$", nav, re.MULTILINE)
    written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert written <= set(listed) <= written | set(MADE)


# -------------------- public names --------------------


def test_the_reference_has_every_public_name():
    text = site_hooks().python_names()
    assert "::: idml.search.gallery.Gallery\n" in text
    for name in idml.__all__:
        if not name.startswith("__"):
            assert re.search(rf"::: idml\.(\w+\.)*({name}|evaluate_run|audit_run)\n", text), name


def test_a_public_name_without_a_docstring_fails_the_build(monkeypatch):
    hooks = site_hooks()
    module = ModuleType("made_up")
    exec(
        "def documented():\n    'Does it.'\n\ndef bare(): pass\n\nclass C:\n    'A class.'\n    def m(self): pass\n",
        vars(module),
    )
    for name in ("documented", "bare", "C"):
        getattr(module, name).__module__ = "made_up"
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setattr(hooks, "PUBLIC", {"made_up": "For this test."})
    with pytest.raises(hooks.PluginError, match=r"without a docstring: made_up\.bare, made_up\.C\.m$"):
        hooks.python_names()


def test_the_reference_has_every_command():
    text = site_hooks().command_line()
    for command in ("train", "demo", "evaluate", "reproduce", "calibrate", "index", "gallery", "search", "serve"):
        assert f"## idml {command}\n" in text
    assert "--max-error" in text


# -------------------- the README --------------------


def test_badges_say_what_the_repository_says():
    """`python docs/badges.py` writes them again; the README names the same facts for those who do not see them."""
    badges = import_file(ROOT / "docs" / "badges.py")
    facts = badges.read_facts()
    assert badges.FILE.read_text() == badges.draw_badges(facts)
    assert facts["version"] == idml.__version__
    assert facts["typed"] == "mypy strict"
    first, *_, last = facts["python"].split(" | ")
    words = f"version {facts['version']}, Python {first} to {last}, {facts['license']}, typed"
    assert f"![{words}](docs/badges.svg)" in README


def test_counts_of_the_readme():
    assert f"There are {len(LOSSES)} losses, {len(METHODS)} methods" in README


def test_a_visitor_reads_little_before_the_first_success():
    """What stands before the commands for one's own photos, and the whole page."""
    read = len(README.partition("idml serve gallery")[0])
    assert f"{round(read, -2):,} characters of the README" in (ROOT / "docs" / "your_photos.md").read_text()
    assert len(README) < 11_000  # with every table of claims


def test_figures_of_the_demo_in_the_readme_are_not_typed_by_hand():
    """The README shows only figures between marks, which `idml reproduce results` writes."""
    prose = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->|^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    assert {*re.findall(r"\d+(?:\.\d+)? %", prose)} == {"5 %"}  # the accepted share of wrong matches
