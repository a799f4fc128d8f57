"""The command line: parses, calls, prints. Whatever it does, a Python user can do with one call."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from idml.cli_search import add_commands
from idml.memory import keep_memory
from idml.training.options import add_options, chosen_options


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
        help="table1 … table6, tau, gamma, embedding-size, trend, levels, step-tsne, gradients, metrics, noise, beta, "
        "proxies, introspection, settings, fit, found, finetune; first, uncertainty, guarantee, audit; results (the "
        "page of all)",
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
    from idml.training.display import Display
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
    from idml.training.display import Display

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
    from idml.reproduction.command import reproduce
    from idml.training.display import Display
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
    from idml.training.display import Display

    with Display() as display:
        display.progress.update(display.task, description="evaluating")
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
