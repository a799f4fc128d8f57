"""The parser of the command line: mistakes in one line that suggests what was meant, and help with a line a choice."""

import argparse
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from idml.errors import unknown_name


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of a text that has several; other texts are filled as usual."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = []
        for line in text.splitlines():
            hanging = re.match(r"  \S+ {2,}", line)  # a name and what it means
            indent = " " * len(hanging[0]) if hanging and len(hanging[0]) < width // 2 else ""
            lines += textwrap.wrap(line, width, subsequent_indent=indent)
        return lines

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the nearest known name, and exit status 2.

    ``words`` are the arguments that it parses: an unknown flag among them is named before anything else is.
    """

    words: Sequence[str] = ()

    @property
    def arguments(self) -> list[argparse.Action]:
        """All flags and positional arguments."""
        return list(self._actions)

    def error(self, message: str) -> NoReturn:
        """Print one line on standard error and exit with status 2."""
        words = self._unknown_flag() or self._unknown_choice(message) or _describe_number(message) or message
        self.exit(2, f"{self.prog}: {words}\n")

    def _unknown_flag(self) -> str:
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for word in self.words:
            if word == "--":
                break
            flag = word.partition("=")[0]
            if word.startswith("--") and flag not in known:
                return unknown_name("option", flag, known, choices=f"{self.prog} --help lists them")
        return ""

    def _unknown_choice(self, message: str) -> str:
        """Return the message for a value that is not among the choices of its argument; empty for other messages."""
        found = re.match(r"argument (.+?): invalid choice: (['\"])(.*?)\2 \(", message)
        for action in self._actions if found else ():
            names = [*action.option_strings, str(action.metavar or action.dest)]
            if found and found[1] in (*names, "/".join(action.option_strings)) and action.choices is not None:
                return unknown_name(names[0].strip("-").lower(), found[3], list(action.choices))
        return ""


def _describe_number(message: str) -> str:
    """Return the message for a text that is no number; empty for other messages.

    >>> _describe_number("argument --epochs: invalid int value: 'many'")
    "--epochs needs a whole number, got 'many'"
    """
    found = re.fullmatch(r"argument (\S+): invalid (int|float) value: (.*)", message)
    return found.expand(rf"\1 needs a {'whole ' if found[2] == 'int' else ''}number, got \3") if found else ""


SETTINGS: dict[str, Any] = {"formatter_class": HelpFormatter, "allow_abbrev": False}
"""What each parser is made with: an abbreviated flag could mean another one in the next version."""


def list_choices(choices: Mapping[str, str]) -> str:
    """Return one line for each choice, to follow the text of an option in its help.

    >>> print(list_choices({"last": "the last stage", "all": "everything"}))
      last  the last stage
      all   everything
    """
    width = max(map(len, choices))
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in choices.items())
