"""Options as frozen dataclasses: their documentation, their flat form, and the checks of their values.

A field may be a dataclass itself, such as the options that several methods share. Its fields then appear flat: flags
and YAML keys do not know which dataclass an option comes from.
"""

import ast
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from idml.errors import unknown_name


@dataclass(frozen=True)
class Option:
    """One option: its name, its type, its default (``MISSING`` if it has none) and its documentation."""

    name: str
    type: Any
    default: Any
    text: str


@cache
def list_options(options: type) -> tuple[Option, ...]:
    """The options of a dataclass, those of nested dataclasses among them.

    The documentation of an option is the string below its field.
    """
    return tuple(_walk(options, None))


def flatten_options(options: Any) -> dict[str, Any]:
    """The values of a dataclass and of its nested dataclasses as one mapping."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        flat |= flatten_options(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return flat


def build_options(options: type, values: Mapping[str, Any]) -> Any:
    """The dataclass ``options`` with the flat ``values``; what they do not name keeps its default."""
    return _replace(options(), values)


def _walk(options: type, defaults: Any) -> Iterator[Option]:
    types, texts = get_type_hints(options), _field_texts(options)
    for field in dataclasses.fields(options):
        default = getattr(defaults, field.name) if defaults is not None else _default(field)
        if dataclasses.is_dataclass(types[field.name]):
            yield from _walk(types[field.name], default)
        else:
            yield Option(field.name, types[field.name], default, texts.get(field.name, ""))


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _replace(options: Any, values: Mapping[str, Any]) -> Any:
    changed = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            changed[field.name] = _replace(value, values)
        elif field.name in values:
            changed[field.name] = values[field.name]
    return dataclasses.replace(options, **changed)


def _field_texts(options: type) -> dict[str, str]:
    """The string below each field of the class; none for a class that has no source file."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(options))).body[0]
    except OSError:
        return {}
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = after.value if isinstance(after, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[statement.target.id] = " ".join(value.value.split())
    return texts


# ---- checks ----


def check_types(options: Any) -> None:
    """Raise ``ValueError`` where a yes/no option, a word or a choice has another value."""
    types = get_type_hints(type(options))
    for field in dataclasses.fields(options):
        kind, value = types[field.name], getattr(options, field.name)
        if kind is bool and type(value) is not bool:
            raise ValueError(f"{field.name} must be true or false, got {value!r}")
        if kind is str and not isinstance(value, str):
            raise ValueError(f"{field.name} must be a word, got {value!r}")
        if get_origin(kind) is Literal:
            check_choice(field.name, value, get_args(kind))


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``; the message names the nearest one."""
    if value not in choices:
        raise ValueError(unknown_name(name, value, choices))


def check_number(
    name: str,
    value: object,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    whole: bool = False,
) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number within the limits."""
    sound = type(value) is int or (type(value) is float and not whole and math.isfinite(value))
    if not sound or not (isinstance(value, int | float) and value >= at_least and value > above):
        what = "a whole number" if whole else "a number"
        limit = f" of at least {at_least:g}" if at_least > -math.inf else f" above {above:g}"
        raise ValueError(f"{name} must be {what}{limit}, got {value!r}")
    if isinstance(value, int | float) and value > at_most:
        raise ValueError(f"{name} must be at most {at_most:g}, got {value!r}")
