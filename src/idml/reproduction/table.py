"""What a table or figure of the reproduction is."""

from dataclasses import dataclass

from idml.reproduction.arms import Arm
from idml.reproduction.claims import Claim


@dataclass(frozen=True)
class Table:
    """Rows to fill, in order, and the claims that are judged by them."""

    title: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...] = ()
    sweep: tuple[str, tuple[float, ...]] | None = None
    """Of a figure: what is varied in its second to last rows, and its values."""
