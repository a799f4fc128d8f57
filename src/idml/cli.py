"""The command line: parses, calls, prints. Whatever it does, a Python user can do with one call."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from idml.compat import keep_memory
from idml.methods import METHODS
from idml.methods.options import Option
from idml.training.config import PRESETS, TrainConfig, common_options, from_dict, methods_with, options_of

if TYPE_CHECKING:
    from idml.progress import Display
    from idml.search.gallery import Gallery


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line on standard error and exit status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 only on success."""
    parser = _Parser(prog="idml", description="Image search that knows when it does not know.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    training = commands.add_parser("train", help="train a model", description="Train a model on a data set.")
    training.set_defaults(handler=_train)
    training.add_argument("--config", metavar="FILE", help="a YAML file with options; flags override it")
    training.add_argument("--resume", action="store_true", help="go on with the run in --out")
    add_options(training)
    if (sys.argv[1:] if arguments is None else arguments)[:1] == ["train"]:  # this imports torch
        add_method_options(training)

    showing = commands.add_parser("demo", help="plain loss and IDML on glyphs", description="A first run in minutes.")
    showing.set_defaults(handler=_demo)
    showing.add_argument("--out", metavar="DIR", default="runs/demo", help="where to put it (default runs/demo)")

    reproducing = commands.add_parser(
        "reproduce", help="a table of results", description="Make a table, cell by cell; a stopped one goes on."
    )
    reproducing.set_defaults(handler=_reproduce)
    reproducing.add_argument(
        "what",
        metavar="WHAT",
        help="table1 … table6, tau, gamma, embedding-size, trend, levels, step-tsne, gradients, metrics, proxies, "
        "teach-u, fit, margins, finetune; uncertainty, guarantee, audit; noise, beta, settings, found (shown only); "
        "results (the page of all); collect (merge finished runs into the stored results)",
    )
    reproducing.add_argument(
        "--scale", metavar="WORD", default="laptop", help="laptop (default), or paper: ResNet-50 on GPUs"
    )
    reproducing.add_argument(
        "--regime", metavar="WORD", help="on a laptop: frozen, last, full or scratch (default by the data set)"
    )
    reproducing.add_argument("--data", metavar="SPEC", help="data set (default glyphs)")
    reproducing.add_argument("--seeds", type=int, metavar="N", help="runs of each arm (default by the table)")
    reproducing.add_argument("--out", metavar="DIR", default="results", help="where to put it (default results)")
    reproducing.add_argument("--dry-run", action="store_true", help="only say what would be done")

    evaluating = commands.add_parser(
        "evaluate", help="measure a run", description="Retrieval, clustering and uncertainty on the test classes."
    )
    evaluating.set_defaults(handler=_evaluate)
    evaluating.add_argument("of", metavar="RUN", help="a run directory")
    evaluating.add_argument("--data", metavar="SPEC", required=True, help="data set, as in idml train")
    evaluating.add_argument(
        "--metric", metavar="WORD", default="euclidean", help="euclidean (default) or introspective"
    )
    evaluating.add_argument(
        "--split", metavar="SPLIT", default="official", help="which classes test (default official)"
    )
    evaluating.add_argument("--ensemble", metavar="RUN", nargs="+", default=[], help="further runs that vote with this")
    evaluating.add_argument("--graded", action="store_true", help="three strengths of every degradation, not only one")
    evaluating.add_argument("--out", metavar="DIR", help="where report.html goes (default RUN/evaluation)")

    add_commands(commands)
    for command in (training, showing, reproducing, evaluating):
        command.add_argument("--json", action="store_true", help="print the result as one JSON object, the last line")
    options = parser.parse_args(arguments)
    keep_memory()
    try:
        status: int = options.handler(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"idml {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"idml {options.command}: interrupted", file=sys.stderr)
        return 130
    return status


def _train(options: argparse.Namespace) -> int:
    config = chosen_options(options)
    from idml.progress import Display
    from idml.training.loop import Interrupted, train

    try:
        with Display() as display:
            metrics = train(config, resume=options.resume, report=display.report, note=display.note)
    except Interrupted as stop:
        print(f"idml train: {stop}", file=sys.stderr)
        return 143
    if not metrics:  # of several processes the first one reports
        return 0
    _print_figures({name: metrics[name] for name in ("selected", "last")}, metrics, options.json)
    print(f"the report is {Path(config.out) / 'report.html'}", file=sys.stderr)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from idml.demo import demo
    from idml.progress import Display

    with Display() as display:
        results = demo(Path(options.out), report=display.report, note=display.note)
    rows = {method: results[method]["selected"] for method in ("plain", "idml")}
    _print_figures({**rows, "‖u‖, AUROC": results["uncertainty"]}, results, options.json)
    if not options.json:
        for name, counts in results["search"]["counts"].items():
            print(f"{name} queries: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
        for sample in results["search"]["samples"]:
            print(f"{sample['image']}: {sample['state'].upper()} ({sample['reason']})")
    out = Path(options.out)
    print(f"the report is {out / 'report.html'}", file=sys.stderr)
    print(f"to search in a browser: idml serve {out / 'gallery'}, then open http://127.0.0.1:8000", file=sys.stderr)
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from idml.progress import Display
    from idml.reproduction.reproduce import reproduce
    from idml.training.loop import Interrupted

    try:
        with Display() as display:
            results = reproduce(
                options.what,
                options.data,
                options.seeds,
                Path(options.out),
                scale=options.scale,
                regime=options.regime,
                dry_run=options.dry_run,
                report=display.report,
                note=display.note,
            )
    except Interrupted:
        print("idml reproduce: stopped; the same command goes on", file=sys.stderr)
        return 143
    print(json.dumps(results) if options.json else results["table"])
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from idml.evaluation.evaluate import evaluate_run
    from idml.progress import Display

    with Display("evaluating") as display:
        result = evaluate_run(
            options.of,
            options.data,
            metric=options.metric,
            split=options.split,
            ensemble=options.ensemble,
            graded=options.graded,
            out=options.out,
            progress=display.report,
            note=display.note,
        )
    names = [name for name in ("recall@1", "r_precision", "map@r", "nmi") if result[name] is not None]
    _print_figures({result["data"]: {name: result[name] for name in names}}, result, options.json)
    if not options.json:
        print("\n".join(["scores of uncertainty, by R-AUROC (0.5 is chance):", *result["verdict"]]))
    print(f"the report is {result['report']}", file=sys.stderr)
    return 0


def _print_figures(rows: dict[str, dict[str, float]], result: dict[str, Any], as_json: bool) -> None:
    """The figures for a person, or the whole result for a program."""
    if as_json:
        print(json.dumps(result))
        return
    for name, figures in rows.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items()))


if __name__ == "__main__":
    sys.exit(main())


# -------------------- cli_search --------------------
# The commands of the back door: calibrate, index, gallery, search, serve, audit, export. They parse, call, print.


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
    keeping.add_argument("action", choices=["list", "remove", "label", "verify", "compact", "backup"])
    keeping.add_argument("place", metavar="GALLERY", help="a folder, or milvus://host:port/collection")
    keeping.add_argument("ids", metavar="ID", nargs="*", help="items to remove or label; for backup, the file to write")
    keeping.add_argument("--label", metavar="LABEL", help="for the action label; left out, labels are taken away")
    keeping.add_argument("--run", metavar="RUN", help="the run of a Milvus gallery")

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
    from idml.progress import Display

    with Display(what) as display:
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
    from idml.search.indexing import index_folder

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
    with open_engine(place, run=run, write=action == "compact") as engine:
        if action == "list":
            listed = [{"id": i.id, "path": i.path, "label": i.label} for i in engine.items()]
            _show({"items": listed}, options.json, [f"{i['id']}  {i['label'] or '-'}  {i['path']!r}" for i in listed])
        elif action == "verify":
            problems = [str(problem) for problem in engine.verify()]
            _show({"problems": problems}, options.json, problems or [f"all {len(engine):,} items are sound"])
            return 2 if problems else 0
        elif action == "backup":
            if len(options.ids) != 1:
                raise ValueError(f"name one file to write: idml gallery backup {place} FILE")
            engine.backup(options.ids[0])
            items = len(engine)
            _show({"file": options.ids[0], "items": items}, options.json, [f"{items:,} items in {options.ids[0]}"])
        else:
            given = engine.compact()
            lines = [f"{given:,} removed items given back, {len(engine):,} items"]
            _show({"changed": given, "items": len(engine)}, options.json, lines)
    return 0


def _search(options: argparse.Namespace) -> int:
    from idml.data.images import read_image
    from idml.search.answers import RiskTargets
    from idml.search.gallery import Gallery

    targets = RiskTargets(max_error=options.max_error, max_missed=options.max_missed)
    images = [read_image(path) for path in options.images]
    with Gallery.open(options.place, run=options.run, runtime=options.runtime) as gallery:
        replies = gallery.search(images, options.k, targets)
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
    from idml.server.serve import serve

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


# ---- the options of a training run as flags, and as a YAML file ----


_LISTED = {"ambiguity": "KIND", "loss_parameters": "NAME=X"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each option that all methods share, ``image_size`` as --image-size."""
    words = " or ".join(PRESETS)
    parser.add_argument("--preset", metavar="WORD", help=f"begin with the options of {words}; others override them")
    parser.add_argument(
        "--freeze-trunk",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="train the heads alone, in seconds: the same as --train heads",
    )
    for option in common_options():
        default = "" if option.default in (dataclasses.MISSING, (), None) else f" (default {option.default})"
        _add_flag(parser, option, default)


def add_method_options(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each option that only some methods have, grouped by the methods that have it."""
    groups: dict[tuple[str, ...], Any] = {}
    for name in {name: None for method in METHODS for name in options_of(method)}:
        methods = methods_with(name)
        if tuple(methods) not in groups:
            groups[tuple(methods)] = parser.add_argument_group(f"options of method {', '.join(methods)}")
        defaults: dict[object, list[str]] = {}
        for method in methods:
            defaults.setdefault(options_of(method)[name].default, []).append(method)
        words = [f"{value} with {', '.join(own)}" for value, own in defaults.items()]
        only = next(iter(defaults))
        default = f" (default {'; '.join(words) if len(words) > 1 else only})"
        _add_flag(groups[tuple(methods)], options_of(methods[0])[name], "" if only is None else default)


def _add_flag(parser: Any, option: Option, default: str) -> None:
    flag, text = f"--{option.name.replace('_', '-')}", (option.text + default).replace("%", "%%")
    if option.type is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    elif option.name in _LISTED:
        parser.add_argument(flag, nargs="*", default=argparse.SUPPRESS, metavar=_LISTED[option.name], help=text)
    else:
        convert = next((t for t in (int, float) if option.type is t or t in get_args(option.type)), str)
        metavar = {int: "N", float: "X"}.get(convert, "WORD")
        parser.add_argument(flag, type=convert, default=argparse.SUPPRESS, metavar=metavar, help=text)


def chosen_options(namespace: argparse.Namespace) -> TrainConfig:
    """The configuration that the flags and the file given by --config describe; flags win."""
    values = _read(Path(namespace.config)) if getattr(namespace, "config", None) else {}
    ignored = {"command", "handler", "config", "resume", "json"}
    given = {key: value for key, value in vars(namespace).items() if key not in ignored}
    return from_dict(values | {key: value for key, value in given.items() if key != "preset" or value})


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(path)!r}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a YAML file ({str(error).splitlines()[0]})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold options as 'name: value' lines")
    return values
