"""What became of the claims, as a table: a row for each claim, a column for each data set and regime."""

from collections.abc import Iterable

from idml.reproduction.claims import CANNOT_TELL, CONFIRMED, MISSING, NOT_CONFIRMED, Verdict

WORDS = (CONFIRMED, NOT_CONFIRMED, CANNOT_TELL, MISSING)


def counted(verdicts: Iterable[Verdict]) -> str:
    """How many of each kind there are, in words."""
    words = [verdict.word for verdict in verdicts]
    return ", ".join(f"{words.count(word)} {word}" for word in WORDS if word in words)


def by_place(told: list[tuple[str, str, Verdict]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of (claim, place, verdict); a claim of shared rows is in several tables, and once here."""
    places = list(dict.fromkeys(place for _, place, _ in told))
    cells = {(text, place): f"{verdict.word}: {verdict.reason}" for text, place, verdict in told}
    texts = dict.fromkeys(text for text, *_ in told)
    return ["claim", *places], [[text, *(cells.get((text, place), "") for place in places)] for text in texts]


def coloured(table: str) -> str:
    """The HTML of such a table, with the verdicts told apart by colour."""
    for word in WORDS:
        table = table.replace(f">{word}: ", f"><b class='{word.split()[0]}'>{word}</b><br>")
    return table
