"""Text for users that several parts of idml share: error messages, and names that are safe to show."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

_MOST_SUGGESTED = 3


def unknown_name(what: str, name: object, known: Iterable[str], *, whose: str = "", choices: str = "") -> str:
    """Build the message for a name that is not among the ``known`` ones; it suggests what may have been meant.

    ``whose`` follows the name. ``choices`` stands for the list of known names where that list is long.

    >>> unknown_name("rule", "simlar", ["similar", "strict"])
    "unknown rule 'simlar'; did you mean 'similar'? (one of similar, strict)"
    """
    names = list(known)
    near = [repr(other) for other in find_similar(str(name), names)]
    words = " or ".join([", ".join(near[:-1]), near[-1]] if len(near) > 1 else near)
    hint = f"; did you mean {words}?" if near else ""
    return f"unknown {what} {name!r}{whose}{hint} ({choices or 'one of ' + (', '.join(names) or 'none')})"


def find_similar(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that a person who wrote ``name`` may have meant, the most likely first.

    Names that differ in capitals or separators alone come first, then those that begin with it or contain it, then
    the nearest by spelling. A name that is like none of them has no suggestion.

    >>> find_similar("triplet", ["soft_triple", "triplet_semihard"])
    ['triplet_semihard']
    """
    written, names = _fold(name), {other: _fold(other) for other in known}
    equal = [other for other, folded in names.items() if folded == written]
    if equal or not written:
        return equal[:1]
    begins = [other for other, folded in names.items() if folded.startswith(written)]
    begins += [other for other, folded in names.items() if len(folded) > 2 and written.startswith(folded)]
    contains = [other for other, folded in names.items() if len(written) > 2 and written in folded]
    found = begins or contains
    if found:
        ratio = {other: SequenceMatcher(None, written, names[other]).ratio() for other in found}
        return sorted(found, key=lambda other: -ratio[other])[:_MOST_SUGGESTED]
    near = get_close_matches(written, names.values(), n=1, cutoff=0.65)
    return [other for other, folded in names.items() if folded in near]


def _fold(name: str) -> str:
    """Return a name without capitals, leading dashes and differences of separators."""
    return name.casefold().lstrip("-").replace("_", "-").replace(" ", "-")


def printable(text: object) -> str:
    """Return a text with every character escaped that is not printable: names of files may move a terminal's cursor.

    >>> printable("red\x1b[31m\\nbird \u202e")
    'red\\\\x1b[31m\\\\nbird \\\\u202e'
    """
    shown = str(text)
    return shown if shown.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in shown)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
