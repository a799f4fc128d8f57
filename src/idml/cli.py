"""The command line: parses, calls, prints. Whatever it does, a Python user can do with one call."""

import argparse
import json
import sys
from typing import Any, NoReturn

from idml.training.options import add_options, chosen_options

_COMMANDS = {"train": "train a model on a data set"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line on standard error and exit status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 only on success."""
    parser = _Parser(prog="idml", description="Image search that knows when it does not know.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    training = commands.add_parser("train", help=_COMMANDS["train"], description=_COMMANDS["train"])
    training.add_argument("--config", metavar="FILE", help="a YAML file with options; flags override it")
    training.add_argument("--resume", action="store_true", help="go on with the run in --out")
    training.add_argument("--json", action="store_true", help="print the result as one JSON object, the last line")
    add_options(training)
    options = parser.parse_args(arguments)
    try:
        return _train(options)
    except (ValueError, OSError) as error:
        print(f"idml {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"idml {options.command}: interrupted", file=sys.stderr)
        return 130


def _train(options: argparse.Namespace) -> int:
    config = chosen_options(options)
    from idml.training.display import Display
    from idml.training.loop import Interrupted, train

    try:
        with Display(config) as display:
            metrics = train(config, resume=options.resume, report=display.report, note=display.note)
    except Interrupted as stop:
        print(f"idml train: {stop}", file=sys.stderr)
        return 143
    _print(metrics, options.json, f"the model is in {config.out}")
    return 0


def _print(result: dict[str, Any], as_json: bool, summary: str) -> None:
    if as_json:
        print(json.dumps(result))
        return
    for name in ("selected", "last"):
        figures = ", ".join(f"{key} {value:.1%}" for key, value in result[name].items())
        print(f"{name}: {figures}")
    print(summary)


if __name__ == "__main__":
    sys.exit(main())
