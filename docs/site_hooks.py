"""Pages of the site that are made from the code: the command line, the HTTP API, and the pages beside docs/."""

import contextlib
import io
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
COMMANDS = (
    "train", "demo", "evaluate", "reproduce", "calibrate", "index", "gallery", "search", "serve", "audit", "export",
)  # fmt: skip
BESIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {"reference/command_line.md": command_line(), "reference/http.md": http_api()}
    pages |= {page: (ROOT / source).read_text() for page, source in BESIDE.items()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links from docs/ to the pages beside it lead to their copies in the site."""
    for page, source in BESIDE.items():
        markdown = markdown.replace(f"](../{source})", f"]({page})")
    return re.sub(r"\]\(docs/", "](", markdown)


def command_line() -> str:
    """The help of every command, as the parser prints it."""
    from idml.cli import main

    def help_of(*words: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([*words, "--help"])
        return f"```text\n{said.getvalue().strip()}\n```\n"

    parts = [f"## idml {command}\n\n{help_of(command)}" for command in COMMANDS]
    return "\n".join(["# Command line\n", help_of(), *parts])


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
