"""Chooses the context lengths of the decode rows with which attention is measured."""

from typing import Final

from bench.shapes import Shape
from model.buckets import pages_for

_MIXED_ROWS: Final = 16
_LONGEST: Final = 1 << 17
_TIMES: Final = 4  # as long as the shape's context, in a quarter of its largest batch


def mixed_contexts(page_size: int, num_pages: int, longest: int = _LONGEST) -> list[int]:
    """Lengths from 1 token to at most `longest`, each longer than the last by the same factor.

    num_pages: the pages into which all rows fit together.
    """
    while longest > 1:
        rows = [round(longest ** (i / (_MIXED_ROWS - 1))) for i in range(_MIXED_ROWS)]
        if _pages_of(rows, page_size) <= num_pages:
            return rows
        longest //= 2
    return []


def decode_contexts(shape: Shape, num_pages: int) -> dict[str, list[int]]:
    """Tokens of each row, by the name of the batch: as in steps, longer, and of all lengths.

    num_pages: the pages there are; longer rows, and those of all lengths, are left out if they do
    not fit.
    """
    found = {f"x{slots}": [shape.context] * slots for slots in shape.slots}
    fewer, longer = max(shape.slots) // _TIMES, _TIMES * shape.context
    if fewer and _pages_of([longer] * fewer, shape.page_size) <= num_pages:
        found[f"x{fewer} of {longer}"] = [longer] * fewer
    if rows := mixed_contexts(shape.page_size, num_pages):
        found[f"x{len(rows)} of 1 to {rows[-1]}"] = rows
    return found


def _pages_of(contexts: list[int], page_size: int) -> int:
    """Pages of rows with these numbers of tokens and the one that a step adds to each."""
    return sum(pages_for(tokens + 1, page_size) for tokens in contexts)
