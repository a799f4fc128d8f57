"""The commands of the back door: calibrate, index, gallery, search, serve, audit, export. They parse, call, print."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from idml.search.gallery import Gallery
    from idml.training.display import Display

Commands = Any  # what add_subparsers returns has no public name


def add_commands(commands: Commands) -> None:
    """Add the parsers of these commands."""
    fitting = _command(commands, "calibrate", _calibrate, "fit answers on held-out classes, and store them in the run")
    fitting.add_argument("of", metavar="RUN", help="a run directory")
    fitting.add_argument("--data", metavar="SPEC", required=True, help="data set, as in idml train")
    fitting.add_argument("--split", metavar="SPLIT", help="which classes test (by default as in the run)")
    fitting.add_argument(
        "--unknown", type=float, metavar="X", default=0.25, help="share of queries that no image answers (0.25)"
    )

    indexing = _command(commands, "index", _index, "add a folder of images to a gallery")
    indexing.add_argument("of", metavar="RUN", help="a run directory, or 'pretrained'")
    indexing.add_argument("images", metavar="IMAGES", help="a folder; its sub-folders are labels")
    indexing.add_argument("--to", metavar="GALLERY", required=True, help="a folder, or milvus://host:port/collection")
    _runtime(indexing)

    keeping = _command(commands, "gallery", _gallery, "look after a gallery")
    keeping.add_argument("action", choices=["list", "remove", "label", "verify", "compact"])
    keeping.add_argument("place", metavar="GALLERY", help="a folder, or milvus://host:port/collection")
    keeping.add_argument("ids", metavar="ID", nargs="*", help="items to remove or label")
    keeping.add_argument("--label", metavar="LABEL", help="for the action label; left out, labels are taken away")
    keeping.add_argument("--run", metavar="RUN", help="the run of a Milvus gallery")
    keeping.add_argument("--salvage", action="store_true", help="let compact drop what verify calls damaged")

    asking = _command(commands, "search", _search, "look images up in a gallery")
    asking.add_argument("place", metavar="GALLERY", help="a folder, or milvus://host:port/collection")
    asking.add_argument("images", metavar="IMAGE", nargs="+", help="image files")
    asking.add_argument("-k", type=int, metavar="N", default=10, help="results (default 10)")
    asking.add_argument(
        "--max-error", type=float, metavar="X", default=0.05, help="share of wrong matches that is tolerated (0.05)"
    )
    asking.add_argument(
        "--max-missed",
        type=float,
        metavar="X",
        help="show so many results that at most this share of lists holds no right one",
    )
    asking.add_argument("--run", metavar="RUN", help="the run of a Milvus gallery")
    _runtime(asking)

    serving = _command(commands, "serve", _serve, "an HTTP service and a page to search with")
    serving.add_argument("place", metavar="GALLERY", help="a folder, or milvus://host:port/collection")
    serving.add_argument("--host", metavar="H", default="127.0.0.1", help="address (default 127.0.0.1)")
    serving.add_argument("--port", type=int, metavar="P", default=8000, help="port (default 8000)")
    serving.add_argument("--run", metavar="RUN", help="the run of a Milvus gallery")
    _runtime(serving)

    checking = _command(commands, "audit", _audit, "rank likely mislabelled, ambiguous and duplicate images")
    checking.add_argument("of", metavar="RUN", help="a run directory, or 'pretrained'")
    checking.add_argument("--data", metavar="SPEC", required=True, help="data set, as in idml train")
    checking.add_argument("--out", metavar="DIR", required=True, help="where the lists and the page go")
    checking.add_argument("--split", metavar="SPLIT", default="official", help="as in idml train (default official)")
    checking.add_argument("--review", action="store_true", help="open a page on this machine to decide image by image")
    checking.add_argument("--port", type=int, metavar="P", default=8001, help="port of the review (default 8001)")

    exporting = _command(commands, "export", _export, "write a model as ONNX")
    exporting.add_argument("of", metavar="RUN", help="a run directory, or 'pretrained'")
    exporting.add_argument("--out", metavar="FILE", required=True, help="the file to write, such as model.onnx")


def _command(commands: Commands, name: str, handler: Any, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
    parser.set_defaults(handler=handler)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, the last line")
    return parser


def _runtime(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtime", choices=["torch", "onnx"], default="torch", help="what runs the model (default torch)"
    )


@contextmanager
def _display(what: str) -> Iterator["Display"]:
    from idml.training.display import Display

    with Display() as display:
        display.progress.update(display.task, description=what)
        yield display


def _calibrate(options: argparse.Namespace) -> int:
    from idml.calibration.calibrate import calibrate_run

    with _display("calibrating") as display:
        result = calibrate_run(
            options.of,
            options.data,
            split=options.split,
            unknown=options.unknown,
            progress=display.report,
            note=display.note,
        )
    _show(result, options.json, result["words"])
    print(f"the report is {result['report']}", file=sys.stderr)
    return 0


def _index(options: argparse.Namespace) -> int:
    from idml.search.folder import index_folder

    with _display("indexing") as display, _made(options) as gallery:
        done = index_folder(gallery, Path(options.images), progress=_counted(display), note=display.note)
        items = len(gallery)
    result = {**asdict(done), "items": items, "gallery": options.to}
    words = ", ".join(f"{value:,} {name}" for name, value in asdict(done).items())
    _show(result, options.json, [f"{options.to}: {words}; {items:,} images in all"])
    return 0


def _counted(display: "Display") -> Any:
    return lambda done, total: display.report({"done": done, "images": total, "what": "embedded"})


def _made(options: argparse.Namespace) -> "Gallery":
    """The gallery of ``idml index``, made if it is not there."""
    from idml.search.gallery import open_or_create

    return open_or_create(options.to, options.of, runtime=options.runtime)


def _gallery(options: argparse.Namespace) -> int:
    from idml.search.gallery import Gallery, open_engine

    action, place, run = options.action, options.place, options.run
    if action in ("remove", "label"):
        if not options.ids:
            raise ValueError(f"name the items to {action}; 'idml gallery list {place}' shows their ids")
        with Gallery.open(place, run=run, write=True) as gallery:
            relabelled = dict.fromkeys(options.ids, options.label)
            changed = gallery.remove(options.ids) if action == "remove" else gallery.relabel(relabelled)
            items = len(gallery)
        _show({"changed": changed, "items": items}, options.json, [f"{changed:,} changed, {items:,} items"])
        return 0
    with open_engine(
        place, run=run, write=action == "compact", salvage=action == "verify" or options.salvage
    ) as engine:
        if action == "list":
            listed = [{"id": i.id, "path": i.path, "label": i.label} for i in engine.items()]
            _show({"items": listed}, options.json, [f"{i['id']}  {i['label'] or '-'}  {i['path']!r}" for i in listed])
        elif action == "verify":
            problems = [str(problem) for problem in engine.verify()]
            _show({"problems": problems}, options.json, problems or [f"all {len(engine):,} items are sound"])
            return 2 if problems else 0
        else:
            given = engine.compact()
            lines = [f"{given:,} removed items given back, {len(engine):,} items"]
            _show({"changed": given, "items": len(engine)}, options.json, lines)
    return 0


def _search(options: argparse.Namespace) -> int:
    from idml.data.images import read_image
    from idml.search.answers import Wishes
    from idml.search.gallery import Gallery

    wishes = Wishes(max_error=options.max_error, max_missed=options.max_missed)
    images = [read_image(path) for path in options.images]
    with Gallery.open(options.place, run=options.run, runtime=options.runtime) as gallery:
        replies = gallery.search(images, options.k, wishes)
    found, lines = [], []
    for path, reply in zip(options.images, replies, strict=True):
        found.append({"image": path, **asdict(reply.answer), "level": reply.level, "notes": list(reply.notes)})
        size = found[-1]["set_size"] = reply.answer.results
        found[-1]["results"] = [asdict(result) for result in reply.results]
        chance = "" if reply.answer.probability is None else f", P(right) {reply.answer.probability:.2f}"
        lines.append(f"{path}: {reply.answer.state.value.upper()} ({reply.answer.reason}{chance})")
        if size is not None:
            lines.append(
                f"  a right one is among the first {size} (at most {options.max_missed:.0%} of such lists miss)"
            )
        lines += [f"  {r.distance:.4f}  {r.label or '-'}  {r.path!r}" for r in reply.results]
        lines += [f"  note: {note}" for note in reply.notes]
    _show({"replies": found}, options.json, lines)
    return 0


def _serve(options: argparse.Namespace) -> int:
    from idml.server.running import serve

    serve(options.place, host=options.host, port=options.port, run=options.run, runtime=options.runtime, note=_say)
    return 0


def _audit(options: argparse.Namespace) -> int:
    from idml.audit.run import audit_run

    with _display("auditing") as display:
        result = audit_run(
            options.of,
            options.data,
            options.out,
            split=options.split,
            progress=display.report,
            note=display.note,
        )
    counts = result["counts"].items()
    _show(result, options.json, [f"{kind}: {n['listed']:,} listed, {n['open']:,} not decided" for kind, n in counts])
    print(f"the report is {result['report']}", file=sys.stderr)
    if options.review:
        from idml.audit.review import serve_review

        serve_review(options.out, options.data, split=options.split, port=options.port, note=_say)
    return 0


def _export(options: argparse.Namespace) -> int:
    from idml.model.onnx import export_onnx

    result = export_onnx(options.of, options.out)
    _show(result, options.json, [f"{options.out}: equal to the model within {result['difference']:.1g}"])
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(result: dict[str, Any], as_json: bool, lines: list[str]) -> None:
    """The whole result for a program, or lines for a person."""
    print(json.dumps(result) if as_json else "\n".join(lines))
