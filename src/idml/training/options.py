"""The fields of `TrainConfig` as command-line flags and as a YAML file."""

import argparse
import ast
import dataclasses
import inspect
import textwrap
from pathlib import Path
from typing import Any, get_args, get_type_hints

from idml.training.config import NAMES, TrainConfig, from_dict

_LISTED = {"ambiguity": "KIND", "loss_parameters": "NAME=X"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """One flag for each field, ``image_size`` as --image-size, with its documentation as help."""
    texts, types = _field_texts(), get_type_hints(TrainConfig)
    words = " or ".join(NAMES)
    parser.add_argument("--preset", metavar="WORD", help=f"begin with the options of {words}; others override them")
    for field in dataclasses.fields(TrainConfig):
        flag, kind = f"--{field.name.replace('_', '-')}", types[field.name]
        default = "" if field.default in (dataclasses.MISSING, (), None) else f" (default {field.default})"
        text = (texts.get(field.name, "") + default).replace("%", "%%")
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        elif field.default == ():
            parser.add_argument(flag, nargs="*", default=argparse.SUPPRESS, metavar=_LISTED[field.name], help=text)
        else:
            convert = next((t for t in (int, float) if kind is t or t in get_args(kind)), str)
            parser.add_argument(flag, type=convert, default=argparse.SUPPRESS, metavar=_word(convert), help=text)


def chosen_options(namespace: argparse.Namespace) -> TrainConfig:
    """The configuration that the flags and the file given by --config describe; flags win."""
    values = _read(Path(namespace.config)) if getattr(namespace, "config", None) else {}
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    values |= {key: value for key, value in vars(namespace).items() if key in names or (key == "preset" and value)}
    return from_dict(values)


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


def _word(convert: type) -> str:
    return {int: "N", float: "X"}.get(convert, "WORD")


def _field_texts() -> dict[str, str]:
    """The string that stands below each field of the class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(TrainConfig))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = after.value if isinstance(after, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[statement.target.id] = value.value
    return texts
