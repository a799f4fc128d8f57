"""The command line: it parses, calls and prints. A Python user can do the same with one call for each command.

Each command has a function that adds its parser and one that runs it, side by side. Everything heavy is imported when
a command runs, so that ``idml --help`` answers at once.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from idml import __version__
from idml.cli_parser import SETTINGS, Parser, list_choices
from idml.compat import keep_memory
from idml.errors import printable
from idml.progress import Display, image_counter
from idml.records import format_figures
from idml.training.keywords import TrainOptions

Handler = Callable[[argparse.Namespace], int]
_GALLERY = "a folder, or milvus://host:port/collection"
_RUN = "a run directory, 'pretrained', or timm:NAME for a network of timm"
_MILVUS_MODEL = f"the model of a Milvus gallery: {_RUN}"
_SPEC = "data set, as in idml train"
_TABLES = {
    "table1": "seven losses, plain and with IDML; with --comparators, the other systems",
    "table2": "the parts of IDML, and PEL",
    "table3": "forms of ambiguous images, without and with the metric",
    "table4": "how the metric treats uncertain pairs in training",
    "table5": "what compares images in the test",
    "table6": "batch sizes",
    "tau": "figure: the temperature τ",
    "gamma": "figure: the bias γ",
    "embedding-size": "figure: the size of the embeddings",
    "trend": "figure: ‖u‖ during training",
    "levels": "figure: ‖u‖ of clean and mixed images",
    "step-tsne": "figure: one gradient step",
    "gradients": "figure: gradients of the metric",
    "metrics": "figure: forms of the metric",
    "u": "whether ‖u‖ of a query ranks errors",
    "finetune": "everything trained: plain, Mixup, the forms of IDML, the release",
    "default-form": "which form of mixtures the held-out classes choose",
    "finetune-long": "plain and the chosen form, three times as long",
    "live-u": "what keeps u alive inside the metric",
    "resnet50": "the paper's own network, from local weights",
    "uncertainty": "every score of uncertainty",
    "promises": "whether promised error rates are kept",
    "audit": "label errors that were put in, and found",
    "comparator-costs": "time and memory of a step of each system of table1 --comparators",
    "results": "the pages of all stored results",
    "collect": "merge finished runs into the stored results",
}
_SCALES = {"laptop": "hours on a CPU (default)", "paper": "ResNet-50 on GPUs"}
_REGIMES = {
    "frozen": "the heads, on features of a pretrained trunk",
    "last": "the last stage and the heads",
    "full": "the whole network",
    "resnet50": "the whole of the paper's network",
    "scratch": "a small network, from random weights",
}
_STUDIED = {"pretrained": "the pretrained trunk (default)", "trained": "models that were trained on the data"}
_METRICS = {"euclidean": "distance of the unit vectors", "introspective": "the metric that the run was trained with"}
_RERANKINGS = {"diml": "by matching positions of both images"}
_RERANK_HELP = "order the first 100 results again; nothing is promised then\n" + list_choices(_RERANKINGS)
_RUNTIMES = {"auto": "ONNX Runtime where it saves time", "torch": "PyTorch", "onnx": "ONNX Runtime"}
_RUNTIME_HELP = "what runs the model (default auto)\n" + list_choices(_RUNTIMES)
_ACTIONS = {
    "list": "show the items: id, label, path",
    "remove": "remove items by their ids",
    "label": "give items the label of --label",
    "verify": "read everything, and name what is damaged",
    "compact": "free the space of removed items",
    "backup": "copy a gallery in use to a file",
    "feedback": "show or delete judgements about answers",
    "info": "describe the gallery, its model and the source of its weights",
}
_SHELLS = {
    "bash": "idml completion bash > ~/.local/share/bash-completion/completions/idml",
    "zsh": "idml completion zsh > a folder of $fpath, as _idml",
    "fish": "idml completion fish > ~/.config/fish/completions/idml.fish",
    "tcsh": "idml completion tcsh > a file that ~/.tcshrc sources",
}
_SHORT = ("gallery", "search", "export")  # commands that end too soon to use freed memory again
_GROUPS = {
    "your images": ("index", "calibrate", "search", "serve", "gallery", "embed"),
    "models": ("train", "evaluate", "audit", "export"),
    "what idml can do": ("demo", "reproduce"),
    "the shell": ("completion",),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 only on success."""
    given = sys.argv[1:] if arguments is None else arguments
    parser, commands = build_parser(given[:1])
    if given and given[0] in commands:
        commands[given[0]].words = given[1:]
    elif given and given[0].startswith("-"):
        flag = given[0].partition("=")[0]
        owners = _commands_with(flag, commands)
        if owners and flag not in ("-h", "--help", "--version"):
            of = "every command" if len(owners) == len(commands) else ", ".join(owners)
            parser.error(f"{flag!r} is an option of {of}: write it after the command")
        parser.words = given
    options, unexpected = parser.parse_known_args(given)
    if unexpected:
        word = unexpected[0]
        place = commands.get(options.command, parser)
        place.error(f"unknown option {word!r}" if word.startswith("-") else f"unexpected argument {word!r}")
    if options.command is None:
        parser.print_help()
        return 0
    if options.command not in _SHORT:
        keep_memory()
    try:
        status: int = options.handler(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has stopped reading, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, OverflowError) as error:
        print(f"idml {options.command}: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):  # torch has no class of its own for it
            raise
        reason = printable(" ".join(str(error).split())) or "no reason given"
        print(f"idml {options.command}: there is not enough memory ({reason})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"idml {options.command}: interrupted", file=sys.stderr)
        return 130
    return status


def build_parser(chosen: list[str]) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the command line and those of the ``chosen`` commands; of all if none of them exists.

    The flags of `idml train` need torch: they are there only if train is chosen.
    """
    parser = Parser(
        prog="idml", usage="idml COMMAND …", description="Image search that knows when it does not know.", **SETTINGS
    )
    parser.add_argument("--version", action="version", version=f"idml {__version__}")
    commands: Any = parser.add_subparsers(prog="idml", dest="command", metavar="COMMAND", help=argparse.SUPPRESS)
    adders: dict[str, Callable[[Any], None]] = {
        "train": lambda commands: _add_train(commands, flags="train" in chosen),
        "demo": _add_demo,
        "evaluate": _add_evaluate,
        "reproduce": _add_reproduce,
        "calibrate": _add_calibrate,
        "index": _add_index,
        "embed": _add_embed,
        "gallery": _add_gallery,
        "search": _add_search,
        "serve": _add_serve,
        "audit": _add_audit,
        "export": _add_export,
        "completion": _add_completion,
    }
    for name in [name for name in adders if name in chosen] or adders:
        adders[name](commands)
    if len(commands.choices) == len(adders):
        parser.epilog = _list_commands(commands.choices)
    return parser, commands.choices


def _commands_with(flag: str, commands: Mapping[str, Parser]) -> list[str]:
    """Return the commands that have a flag; the flags of train are taken from the keywords of `idml.train`."""
    keywords = {*TrainOptions.__required_keys__, *TrainOptions.__optional_keys__, "config", "dry_run", "resume"}
    trains = flag.removeprefix("--").removeprefix("no-").replace("-", "_") in keywords
    flags = {
        name: {word for action in parser.arguments for word in action.option_strings}
        for name, parser in commands.items()
    }
    return [f"'idml {name}'" for name in commands if flag in flags[name] or (name == "train" and trains)]


def _list_commands(commands: dict[str, Parser]) -> str:
    """The commands in groups, with a line each."""
    width, lines = max(map(len, commands)), []
    for title, names in _GROUPS.items():
        lines += [f"{title}:", *(f"    {name:<{width}}  {commands[name].description}" for name in names), ""]
    return "\n".join([*lines, "'idml COMMAND --help' shows the options of a command."])


def _add_command(commands: Any, name: str, handler: Handler, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=f"{help[0].upper()}{help[1:]}.", **SETTINGS
    )
    parser.set_defaults(handler=handler)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, the last line")
    return parser


def _add_runtime(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtime",
        choices=[*_RUNTIMES],
        default="auto",
        help=_RUNTIME_HELP,
    )


def _add_model(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--model", metavar="RUN", help=help)
    parser.add_argument(
        "--weights", metavar="FILE", help="with --model timm:NAME: its weights, a safetensors file (default: the hub)"
    )
    parser.add_argument(
        "--image-size",
        type=int,
        metavar="PIXELS",
        help="with --model timm:NAME: the side of the images that the network sees (default: its own)",
    )


def _chosen_model(options: argparse.Namespace) -> Any:
    """The model named by --model, --weights and --image-size: None, or what every function takes as a run."""
    if options.model is None and options.weights is None and options.image_size is None:
        return None
    from idml.model.model import resolve_model

    if options.model is None:
        given = "--weights" if options.weights is not None else "--image-size"
        raise ValueError(f"{given} goes with --model timm:NAME, which names the network that it is for")
    return resolve_model(options.model, options.weights, image_size=options.image_size)


def _print_result(result: dict[str, Any], as_json: bool, lines: list[str], report: object = None) -> None:
    """Print the whole result for a program, or lines for a person; and where the report is, if there is one."""
    shown = [line if line.isprintable() else printable(line) for line in lines]
    print(json.dumps(result) if as_json else "\n".join(shown))
    if report is not None:
        _print_note(f"the report is {report}")


def _print_note(line: object) -> None:
    print(printable(line), file=sys.stderr, flush=True)


# -------------------- train --------------------


def _add_train(commands: Any, *, flags: bool) -> None:
    parser = _add_command(commands, "train", _train, "train a model on a data set")
    parser.usage = "idml train --data SPEC --out RUN [options]"
    parser.add_argument("--config", metavar="FILE", help="a YAML file with options; flags override it")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--dry-run", action="store_true", help="check the options and the data, and say what would run")
    if flags:
        from idml.cli_train import add_method_options, add_options

        add_options(parser)
        add_method_options(parser)


def _train(options: argparse.Namespace) -> int:
    from idml.cli_train import chosen_options

    config = chosen_options(options)
    from idml.training.checkpoint import check_resumable
    from idml.training.loop import Interrupted, train

    if options.resume:
        check_resumable(Path(config.out), _print_note)
    if options.dry_run:
        from idml.training.plan import plan_run

        plan = plan_run(config, resume=options.resume)
        _print_result(plan, options.json, plan["words"])
        return 0
    try:
        with Display() as display:
            metrics = train(config, resume=options.resume, report=display.report, note=display.note)
    except Interrupted as stop:
        _print_note(f"idml train: {stop}")
        return 143
    if not metrics:  # of several processes only the first one reports
        return 0
    _print_result(metrics, options.json, metrics.lines(), Path(config.out) / "report.html")
    return 0


# -------------------- demo, evaluate, reproduce --------------------


def _add_demo(commands: Any) -> None:
    parser = _add_command(commands, "demo", _demo, "train the plain loss and IDML on glyphs, then search")
    parser.add_argument("--out", metavar="DIR", help="where to put it (default runs/demo, or runs/demo-quick)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the signs: seconds, with worse figures")


def _demo(options: argparse.Namespace) -> int:
    from idml.demo import demo

    out = Path(options.out or ("runs/demo-quick" if options.quick else "runs/demo"))
    with Display("demo") as display:
        results = demo(out, quick=options.quick, report=display.report, note=display.note)
    lines = [format_figures(method, results[method]["selected"]) for method in ("plain", "idml")]
    for name, counts in results["search"]["counts"].items():
        lines.append(f"{name} queries: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
    for sample in results["search"]["samples"]:
        mark = ", an error" if sample["error"] else ""
        lines.append(f"{sample['image']}: {sample['state'].upper()} ({sample['reason']}{mark})")
    _print_result(results, options.json, lines, out / "report.html")
    _print_note(f"to search in a browser: idml serve {out / 'gallery'}, then open http://127.0.0.1:8000")
    return 0


def _add_evaluate(commands: Any) -> None:
    parser = _add_command(
        commands, "evaluate", _evaluate, "measure retrieval, clustering and uncertainty of a run on the test classes"
    )
    parser.add_argument("of", metavar="RUN", help="a run directory")
    parser.add_argument("--data", metavar="SPEC", required=True, help=_SPEC)
    parser.add_argument(
        "--metric",
        choices=["euclidean", "introspective"],
        default="euclidean",
        help="what neighbours are found by (default euclidean)\n" + list_choices(_METRICS),
    )
    parser.add_argument("--split", metavar="SPLIT", default="official", help="which classes test (default official)")
    parser.add_argument("--ensemble", metavar="RUN", nargs="+", default=[], help="further runs that vote with this one")
    parser.add_argument("--graded", action="store_true", help="three strengths of every degradation instead of one")
    parser.add_argument(
        "--rerank",
        choices=["diml"],
        help="order the first 100 neighbours of a query again\n" + list_choices(_RERANKINGS),
    )
    parser.add_argument("--out", metavar="DIR", help="where report.html goes (default RUN/evaluation)")


def _evaluate(options: argparse.Namespace) -> int:
    from idml.evaluation.evaluate import evaluate_run

    with Display("evaluating") as display:
        result = evaluate_run(
            options.of,
            options.data,
            metric=options.metric,
            split=options.split,
            ensemble=options.ensemble,
            graded=options.graded,
            rerank=options.rerank,
            out=options.out,
            progress=display.report,
            note=display.note,
        )
    _print_result(result, options.json, result.lines(), result["report"])
    return 0


def _add_reproduce(commands: Any) -> None:
    parser = _add_command(
        commands, "reproduce", _reproduce, "make a table or figure; the same command continues a stopped one"
    )
    parser.add_argument("what", metavar="WHAT", help="what to make\n" + list_choices(_TABLES))
    parser.add_argument("--scale", choices=[*_SCALES], default="laptop", help="how large\n" + list_choices(_SCALES))
    parser.add_argument(
        "--regime",
        choices=[*_REGIMES],
        help="on a laptop, what is trained (default by the data set)\n" + list_choices(_REGIMES),
    )
    parser.add_argument("--data", metavar="SPEC", help="data set (default glyphs)")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each arm (default by the table)")
    parser.add_argument("--out", metavar="DIR", default="results", help="where to put it (default results)")
    parser.add_argument("--weights", metavar="FILE", help="resnet50: the trunk's ImageNet weights (safetensors)")
    parser.add_argument(
        "--comparators", action="store_true", help="table1: the other systems that the paper compares with"
    )
    parser.add_argument("--model", choices=[*_STUDIED], help="promises: what is studied\n" + list_choices(_STUDIED))
    parser.add_argument(
        "--dry-run", action="store_true", help="check that the data is there, and say what would be done"
    )


def _reproduce(options: argparse.Namespace) -> int:
    from idml.reproduction.reproduce import reproduce
    from idml.training.loop import Interrupted

    try:
        with Display(options.what) as display:
            results = reproduce(
                options.what,
                options.data,
                options.seeds,
                Path(options.out),
                scale=options.scale,
                regime=options.regime,
                weights=None if options.weights is None else Path(options.weights),
                comparators=options.comparators,
                model=options.model,
                dry_run=options.dry_run,
                report=display.report,
                note=display.note,
            )
    except Interrupted:
        _print_note("idml reproduce: stopped; the same command continues")
        return 143
    _print_result(results, options.json, results["table"].splitlines())
    return 0


# -------------------- calibrate, index, gallery --------------------


def _add_calibrate(commands: Any) -> None:
    parser = _add_command(
        commands, "calibrate", _calibrate, "calibrate a gallery on itself, and store what may be promised in it"
    )
    parser.add_argument("place", metavar="GALLERY", help=_GALLERY)
    parser.add_argument("--queries", metavar="DIR", help="your own images, one sub-folder for each label, as queries")
    parser.add_argument(
        "--unknown",
        type=float,
        metavar="X",
        default=0.25,
        help="share of queries that show nothing of the gallery (default 0.25)",
    )
    parser.add_argument(
        "--keep-copies",
        action="store_true",
        help="images with the same bytes are different pictures, and new pictures will find such images too",
    )
    _add_model(parser, _MILVUS_MODEL)
    _add_runtime(parser)


def _calibrate(options: argparse.Namespace) -> int:
    from idml import calibrate

    with Display("calibrating") as display:
        result = calibrate(
            options.place,
            queries=options.queries,
            unknown=options.unknown,
            keep_copies=options.keep_copies,
            run=_chosen_model(options),
            runtime=options.runtime,
            progress=display.report,
            note=display.note,
        )
    _print_result(result, options.json, result["words"], result.get("report"))
    return 0


def _add_index(commands: Any) -> None:
    parser = _add_command(commands, "index", _index, "add a folder of images to a gallery")
    parser.add_argument("images", metavar="IMAGES", help="a folder; its sub-folders are labels")
    parser.add_argument("--to", metavar="GALLERY", required=True, help=_GALLERY)
    _add_model(parser, f"{_RUN} (default: the gallery's own, or pretrained)")
    parser.add_argument(
        "--maps", action="store_true", help="also store position maps of all its images, for search --rerank diml"
    )
    _add_runtime(parser)


def _index(options: argparse.Namespace) -> int:
    from idml.search.gallery import gallery_exists, open_or_create
    from idml.search.indexing import add_maps, check_folder, index_folder

    if not gallery_exists(options.to):
        check_folder(Path(options.images), _print_note)  # before a gallery is made for nothing
    with (
        Display("indexing") as display,
        open_or_create(options.to, _chosen_model(options), runtime=options.runtime) as gallery,
    ):
        counter = image_counter(display.report, "embedded")
        maps = None
        if options.maps:
            gallery.require_folder()  # before the images are embedded
        done = index_folder(gallery, Path(options.images), progress=counter, note=display.note)
        if options.maps:
            maps = add_maps(gallery, progress=image_counter(display.report, "mapped"), note=display.note)
        items, promising = len(gallery), gallery.calibration is not None and not gallery.outgrown
    words = ", ".join(f"{value:,} {name}" for name, value in asdict(done).items())
    result = {**asdict(done), "items": items, "gallery": options.to}
    lines = [f"{options.to}: {words}; {items:,} images in all"]
    if maps is not None:
        result["maps"] = maps
        lines.append(f"{maps:,} new position maps")
    if items > 1 and not promising:
        lines.append(f"next: idml calibrate {options.to}")
    _print_result(result, options.json, lines)
    return 0


def _add_embed(commands: Any) -> None:
    parser = _add_command(commands, "embed", _embed, "write the embeddings of images to a file, for other programs")
    parser.add_argument("images", metavar="IMAGES", help="a folder, whose sub-folders are labels, or one image")
    parser.add_argument("--to", metavar="FILE", required=True, help="the file to write, such as photos.npz")
    _add_model(parser, f"{_RUN} (default: pretrained)")
    _add_runtime(parser)


def _embed(options: argparse.Namespace) -> int:
    from idml.search.embed import embed_images

    with Display("embedding") as display:
        result = embed_images(
            options.images,
            to=options.to,
            model=_chosen_model(options) or "pretrained",
            runtime=options.runtime,
            progress=image_counter(display.report, "embedded"),
            note=display.note,
        )
    _print_result(result, options.json, result.lines())
    return 0


def _add_gallery(commands: Any) -> None:
    parser = _add_command(commands, "gallery", _gallery, "describe, list, change, check or compact a gallery")
    parser.add_argument("action", metavar="ACTION", choices=[*_ACTIONS], help="what to do\n" + list_choices(_ACTIONS))
    parser.add_argument("place", metavar="GALLERY", help=_GALLERY)
    parser.add_argument(
        "ids",
        metavar="ID",
        nargs="*",
        default=[],  # or argparse names it among what is missing
        help="items to remove or label; for backup, the file to write; judgements to delete",
    )
    parser.add_argument("--label", metavar="LABEL", help="for the action label; without it, labels are removed")
    parser.add_argument(
        "--delete", action="store_true", help="for the action feedback: delete the judgements named, or all"
    )
    _add_model(parser, _MILVUS_MODEL)


def _gallery(options: argparse.Namespace) -> int:
    from idml.search.gallery import Gallery, open_engine

    action, place, run = options.action, options.place, _chosen_model(options)
    _check_action(options)
    if action in ("remove", "label"):
        if not options.ids:
            raise ValueError(f"name the items to {action}; 'idml gallery list {place}' shows their ids")
        _check_label(options.label)
        with Gallery.open(place, run=run, write=True) as gallery:
            new = action == "label" and _is_new_label(gallery, options.label)
            missing = [id for id in options.ids if id not in gallery.engine] if action == "remove" else []
            relabelled = dict.fromkeys(options.ids, options.label)
            changed = gallery.remove(options.ids) if action == "remove" else gallery.relabel(relabelled)
            result = {"changed": changed, "items": len(gallery), "missing": missing}
        _print_result(result, options.json, [f"{changed:,} changed, {result['items']:,} items"])
        if new:
            _print_note(f"no other image has the label {options.label!r}")
        if missing:
            also = f" (nor {len(missing) - 1:,} more of these)" if len(missing) > 1 else ""
            _print_note(
                f"idml gallery: {place} has no item {missing[0]!r}{also}; 'idml gallery list {place}' shows all ids"
            )
        return 2 if missing else 0
    with open_engine(place, run=run, write=action == "compact") as engine:
        if action == "feedback":
            return _show_feedback(options, engine.properties)
        elif action == "info":
            from idml.search.info import describe_gallery, describe_words

            info = describe_gallery(place, engine, run)
            _print_result(info, options.json, describe_words(info))
        elif action == "list":
            listed = [{"id": i.id, "path": i.path, "label": i.label} for i in engine.items()]
            lines = [f"{i['id']}  {i['label'] or '-'}  {i['path']!r}" for i in listed]
            _print_result({"items": listed}, options.json, lines)
        elif action == "verify":
            from idml.search.gallery import is_milvus
            from idml.search.integrity import verify_folder

            with Display("verifying") as display:
                counter = image_counter(display.report, "compared")
                found = engine.verify() if is_milvus(place) else verify_folder(engine, Path(place), progress=counter)
            problems = [str(problem) for problem in found]
            _print_result({"problems": problems}, options.json, problems or [f"all {len(engine):,} items are sound"])
            return 2 if problems else 0
        elif action == "backup":
            if len(options.ids) != 1:
                raise ValueError(f"name one file to write: idml gallery backup {place} FILE")
            (file,), items = options.ids, len(engine)
            engine.backup(file)
            _print_result({"file": file, "items": items}, options.json, [f"{items:,} items in {file}"])
        else:
            freed = engine.compact()
            lines = [f"{freed:,} removed items freed, {len(engine):,} items"]
            _print_result({"changed": freed, "items": len(engine)}, options.json, lines)
    return 0


def _check_label(label: str | None) -> None:
    """Refuse a label that the API would refuse or change."""
    from idml.search.uploads import clean_label

    if label is not None and (label == "" or clean_label(label) != label):
        raise ValueError(f"a label is not empty and has no spaces at its ends, got {label!r}")


def _is_new_label(gallery: Any, label: str | None) -> bool:
    return label is not None and all(item.label != label for item in gallery.items())


def _check_action(options: argparse.Namespace) -> None:
    """Refuse what an action would ignore."""
    action = options.action
    if options.ids and action not in ("remove", "label", "backup", "feedback"):
        raise ValueError(f"unexpected argument {options.ids[0]!r}: 'idml gallery {action}' is about the whole gallery")
    if options.label is not None and action != "label":
        raise ValueError(f"--label goes with the action label, not with {action}")
    if options.delete and action != "feedback":
        raise ValueError(f"--delete deletes judgements, with the action feedback, not with {action}")
    if action == "feedback" and options.ids and not options.delete:
        raise ValueError("to delete these judgements, add --delete; without names, all are shown")


def _show_feedback(options: argparse.Namespace, properties: Any) -> int:
    from idml.search.feedback import delete_feedback, read_feedback

    place = options.place
    if options.delete and not options.ids:  # also if they cannot be read any more
        deleted = delete_feedback(place, properties)
        _print_result({"deleted": deleted}, options.json, [f"{deleted:,} judgements deleted"])
        return 0
    judged = read_feedback(place, properties)
    if options.delete:
        missing = [id for id in options.ids if id not in {one.id for one in judged}]
        deleted = delete_feedback(place, properties, options.ids)
        _print_result({"deleted": deleted}, options.json, [f"{deleted:,} judgements deleted"])
        if missing:
            _print_note(
                f"idml gallery: there is no judgement {missing[0]!r}; 'idml gallery feedback {place}' shows all"
            )
        return 2 if missing else 0
    rows = [{"id": f.id, "query": f.query, "right": f.right, "found": f.found, "label": f.label} for f in judged]
    lines = [
        f"{f.id}  {'right' if f.right else 'wrong'}  found {f.found or '-'}, is {f.label or '?'}  {f.query!r}"
        for f in judged
    ]
    _print_result({"feedback": rows}, options.json, lines or ["nobody has judged an answer yet"])
    return 0


# -------------------- search, serve --------------------


def _add_search(commands: Any) -> None:
    parser = _add_command(commands, "search", _search, "search a gallery for images")
    parser.add_argument("place", metavar="GALLERY", help=_GALLERY)
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image files")
    parser.add_argument("-k", type=int, metavar="N", default=10, help="results (default 10)")
    parser.add_argument(
        "--max-error",
        type=float,
        metavar="X",
        default=0.05,
        help="share of wrong matches that you accept (default 0.05)",
    )
    parser.add_argument(
        "--feedback",
        choices=["right", "wrong"],
        help="keep your judgement of the first result for the next calibration",
    )
    parser.add_argument("--label", metavar="LABEL", help="with --feedback wrong: what the image shows")
    parser.add_argument(
        "--max-missed", type=float, metavar="X", help="show results until at most this share of lists has no right one"
    )
    parser.add_argument("--rerank", choices=[*_RERANKINGS], help=_RERANK_HELP)
    _add_model(parser, _MILVUS_MODEL)
    _add_runtime(parser)


def _search(options: argparse.Namespace) -> int:
    from idml.data.images import read_image
    from idml.search.answers import RiskTargets
    from idml.search.gallery import Gallery

    if options.label is not None and options.feedback != "wrong":
        raise ValueError("--label says what an image shows whose answer is wrong: use it with --feedback wrong")
    if options.rerank is not None and options.feedback is not None:
        raise ValueError("--feedback judges answers for the next calibration, which is one without --rerank")
    _check_label(options.label)
    targets = RiskTargets(max_error=options.max_error, max_missed=options.max_missed)
    images = [read_image(path) for path in options.images]
    with Gallery.open(options.place, run=_chosen_model(options), runtime=options.runtime) as gallery:
        if options.rerank is not None:
            replies = gallery.search(images, options.k, targets, rerank=options.rerank)
        else:
            queries = gallery.embedder.embed(images)
            replies = gallery.search_embeddings(queries, options.k, targets)
        if options.feedback is not None:
            _keep_feedback(options, gallery, queries, replies)
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
    _print_result({"replies": found}, options.json, lines)
    return 0


def _keep_feedback(options: argparse.Namespace, gallery: Any, queries: Any, replies: list[Any]) -> None:
    from idml.search.feedback import add_feedback

    right, status = options.feedback == "right", gallery.status()
    for i, (path, reply) in enumerate(zip(options.images, replies, strict=True)):
        found = reply.results[0].label if reply.results else None
        add_feedback(
            gallery.location,
            gallery.engine.properties,
            queries[[i]],
            query=Path(path).name,
            right=right,
            found=found,
            label=options.label,
        )
        if found is not None:  # what was judged is the first result, not the answer: say what that means
            shown = found if right else options.label
            words = f"it does not show {found!r}" if shown is None else f"it shows {shown!r}"
            _print_note(f"kept about {path}: {words}")
    if _is_new_label(gallery, options.label):
        _print_note(f"no image of the gallery has the label {options.label!r}: to a calibration it is an unknown class")
    if status.labelled < status.items:
        _print_note("a calibration uses judgements only if every image of the gallery has a label")
    elif not right and options.label is None:
        _print_note("the next calibration can use this only if --label says what is shown")
    _print_note(f"'idml gallery feedback {options.place}' shows and deletes judgements")


def _add_serve(commands: Any) -> None:
    parser = _add_command(commands, "serve", _serve, "start an HTTP service and a page to search with")
    parser.add_argument("place", metavar="GALLERY", help=_GALLERY)
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address (default 127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="P", default=8000, help="port (default 8000)")
    _add_model(parser, _MILVUS_MODEL)
    _add_runtime(parser)


def _serve(options: argparse.Namespace) -> int:
    from idml.server.serve import serve

    def print_end(result: dict[str, str]) -> None:
        if options.json:
            _print_result(result, True, [])
            sys.stdout.flush()  # the signal that ended the service may now end this process

    serve(
        options.place,
        host=options.host,
        port=options.port,
        run=_chosen_model(options),
        runtime=options.runtime,
        note=_print_note,
        ended=print_end,
    )
    return 0


# -------------------- audit, export, completion --------------------


def _add_audit(commands: Any) -> None:
    parser = _add_command(commands, "audit", _audit, "rank likely mislabelled, ambiguous and duplicate images")
    parser.add_argument("of", metavar="RUN", help=_RUN)
    parser.add_argument("--data", metavar="SPEC", required=True, help=_SPEC)
    parser.add_argument("--out", metavar="DIR", required=True, help="where the lists and the page go")
    parser.add_argument("--split", metavar="SPLIT", default="official", help="as in idml train (default official)")
    parser.add_argument("--review", action="store_true", help="open a page on this machine to decide image by image")
    parser.add_argument("--port", type=int, metavar="P", default=8001, help="port of the review (default 8001)")


def _audit(options: argparse.Namespace) -> int:
    from idml.audit.run import audit_run

    with Display("auditing") as display:
        result = audit_run(
            options.of, options.data, options.out, split=options.split, progress=display.report, note=display.note
        )
    _print_result(result, options.json, result.lines(), result["report"])
    if options.review:
        from idml.audit.review import serve_review

        serve_review(options.out, options.data, split=options.split, port=options.port, note=_print_note)
    return 0


def _add_export(commands: Any) -> None:
    parser = _add_command(commands, "export", _export, "write a model as ONNX")
    parser.add_argument("of", metavar="RUN", help=_RUN)
    parser.add_argument("--out", metavar="FILE", required=True, help="the file to write, such as model.onnx")


def _export(options: argparse.Namespace) -> int:
    from idml.model.onnx import export_onnx

    result = export_onnx(options.of, options.out)
    _print_result(result, options.json, [f"{options.out}: equal to the model within {result['difference']:.1g}"])
    return 0


def _add_completion(commands: Any) -> None:
    parser = _add_command(commands, "completion", _completion, "print the script that completes commands with Tab")
    parser.add_argument("shell", metavar="SHELL", choices=[*_SHELLS], help="the shell\n" + list_choices(_SHELLS))


def _completion(options: argparse.Namespace) -> int:
    import shtab

    parser, commands = build_parser([*build_parser([])[1]])
    files = {"FILE": shtab.FILE, "IMAGE": shtab.FILE}
    files |= dict.fromkeys(("DIR", "RUN", "GALLERY", "IMAGES"), shtab.DIRECTORY)
    for command in (parser, *commands.values()):
        for action in command.arguments:
            listed = action.help != argparse.SUPPRESS  # shtab skips an action whose help is suppressed
            action.help = (action.help or "").partition("\n")[0] if listed else "what to do"
            if action.metavar in files:
                action.complete = files[action.metavar]  # type: ignore[attr-defined]
    script = shtab.complete(parser, options.shell)
    _print_result({"script": script}, options.json, script.splitlines())
    return 0


if __name__ == "__main__":
    status = main()
    if "LOCAL_RANK" in os.environ:  # one of several processes of torchrun or accelerate
        from idml.training.distributed import end_process

        end_process(status)
    sys.exit(status)
