"""Text for users that several parts of idml share: error messages, and names that are safe to show."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown_name(what: str, name: object, known: Iterable[str], *, whose: str = "", choices: str = "") -> str:
    """Build the message for a name that is not among the ``known`` ones; it suggests the nearest.

    ``whose`` follows the name. ``choices`` stands for the list of known names where that list is long.

    >>> unknown_name("rule", "simlar", ["similar", "strict"])
    "unknown rule 'simlar'; did you mean 'similar'? (one of similar, strict)"
    """
    names = list(known)
    folded = {known_name.casefold(): known_name for known_name in names}
    near = get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.0)
    hint = f"; did you mean {folded[near[0]]!r}?" if near else ""
    return f"unknown {what} {name!r}{whose}{hint} ({choices or 'one of ' + (', '.join(names) or 'none')})"


def printable(text: object) -> str:
    """Return a text with every character escaped that is not printable: names of files may move a terminal's cursor.

    >>> printable("red\x1b[31m\\nbird \u202e")
    'red\\\\x1b[31m\\\\nbird \\\\u202e'
    """
    shown = str(text)
    return shown if shown.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in shown)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
