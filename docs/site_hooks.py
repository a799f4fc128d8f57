"""Pages of the site that are made from the code: command line, Python names, HTTP API, examples, pages beside docs/.

A public name without a docstring ends the build with an error.
"""

import contextlib
import inspect
import io
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
BESIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "examples.md": "examples/README.md"}
PUBLIC = {
    "idml": "The front door. These names are imported on first use.",
    "idml.losses": "Losses over pairs and with proxies. `build_loss` makes one; the functions work on any matrix.",
    "idml.model": "Networks with a semantic and an uncertainty head.",
    "idml.methods.base": "What a training method is: see [Your own method](../own_method.md).",
    "idml.evaluation": "Retrieval figures, exact neighbours, and the quality of uncertainty scores.",
    "idml.search.gallery": "Galleries, and the replies to queries.",
    "idml.search.indexing": "Adding a folder of images to a gallery.",
    "idml.server.serve": "The HTTP service.",
    "idml.pml": "Distances for pytorch-metric-learning (`pip install 'idml[pml]'`).",
}
"""The public modules, with what each is for. Their public names are those of ``__all__``, else those they define."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/command_line.md": command_line(),
        "reference/python.md": python_names(),
        "reference/http.md": http_api(),
    }
    pages |= {page: (ROOT / source).read_text() for page, source in BESIDE.items()}
    pages["examples.md"] += scripts()
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links from docs/ to the pages and scripts beside it lead to their copies in the site, and the other way round.

    A block that tests do not run (```python no-run) is an ordinary block here: the site knows no such language.
    """
    markdown = re.sub(r"^(`{3,}python) no-run$", r"\1", markdown, flags=re.MULTILINE)
    for page, source in BESIDE.items():
        markdown = markdown.replace(f"](../{source})", f"]({page})")
    markdown = re.sub(r"\]\((?:(?:\.\./)?examples/)?(\w+)\.py\)", r"](examples.md#\1)", markdown)
    return re.sub(r"\]\((?:\.\./)?docs/", "](", markdown)


# -------------------- the command line --------------------


def command_line() -> str:
    """The help of every command, as the parser prints it."""
    from idml.cli import main

    def help_of(*words: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([*words, "--help"])
        return said.getvalue().strip()

    def block(text: str) -> str:
        return f"```text\n{text}\n```\n"

    overview = help_of()
    parts = [f"## idml {command}\n\n{block(help_of(command))}" for command in command_names(overview)]
    return "\n".join(["# Command line\n", block(overview), *parts])


def command_names(overview: str) -> list[str]:
    """The commands that the overview lists."""
    return re.findall(r"^ {2,4}([a-z]+)(?= {2}|$)", overview, re.MULTILINE)


# -------------------- Python names --------------------


def public_names(module: ModuleType) -> dict[str, Any]:
    """The public names of a module with what they stand for: those of ``__all__``, else those that it defines."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [
            name
            for name, thing in vars(module).items()
            if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
        ]
    names = {name: getattr(module, name) for name in listed if not name.startswith("__")}
    return {
        name: import_module("idml.audit.run").audit_run if inspect.ismodule(thing) else thing  # a package one can call
        for name, thing in names.items()
    }


def undocumented(thing: Any, name: str) -> list[str]:
    """The names of a function or class, and of the public methods it defines, that have no docstring."""
    found = [] if (thing.__doc__ or "").strip() else [name]
    if inspect.isclass(thing):
        for own, member in vars(thing).items():
            member = getattr(member, "__func__", member)
            if not own.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                found += [] if (member.__doc__ or "").strip() else [f"{name}.{own}"]
    return found


def python_names() -> str:
    """Every public name of the public modules, each once, described by its docstring."""
    lines = ["# Python", "", "All public names. Heavy libraries are imported on first use.", ""]
    missing, seen = list[str](), set[str]()
    for place, text in PUBLIC.items():
        lines += [f"## {place}", "", text, ""]
        for name, thing in public_names(import_module(place)).items():
            if not callable(thing):  # a table such as LOSSES
                lines += [f"::: {place}.{name}", ""]
                continue
            missing += undocumented(thing, f"{place}.{name}")
            home = f"{thing.__module__}.{thing.__qualname__}"
            if home in seen:
                lines += [f"- `{name}`: see `{home}` on this page", ""]
            else:
                lines += [f"::: {home}", ""]
            seen.add(home)
    if missing:
        raise PluginError(f"public names without a docstring: {', '.join(missing)}")
    return "\n".join(lines)


# -------------------- the HTTP API --------------------


def http_api() -> str:
    """The paths of the service's OpenAPI document."""
    from idml.server.app import build_app
    from idml.server.limits import Limits
    from idml.server.security import Keys

    described = build_app(None, keys=Keys(), limits=Limits(), hosts=None).openapi()  # the document needs no gallery
    lines = ["# HTTP API", "", described["info"].get("description", ""), ""]
    for path, methods in described["paths"].items():
        for method, call in methods.items():
            lines += [f"## {method.upper()} {path}", "", call.get("description") or call.get("summary", ""), ""]
            parameters = call.get("parameters", [])
            if parameters:
                lines += ["| parameter | in | meaning |", "| --- | --- | --- |"]
                lines += [
                    f"| `{p['name']}` | {p['in']} | {p.get('description') or p['schema'].get('description', '')} |"
                    for p in parameters
                ]
                lines.append("")
            replies = {code: reply.get("description", "") for code, reply in call.get("responses", {}).items()}
            lines += ["| status | meaning |", "| --- | --- |"]
            lines += [*(f"| {code} | {text} |" for code, text in replies.items()), ""]
    end = "The service serves the whole document, with the schemas of requests and replies, at `/openapi.json`."
    return "\n".join([*lines, end, ""])


# -------------------- examples --------------------


def scripts() -> str:
    """The source of every example, each under its name."""
    sources = {path.stem: path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))}
    return "".join(f"\n## {name}\n\n```python\n{text}```\n" for name, text in sources.items())
