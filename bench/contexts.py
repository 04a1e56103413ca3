"""How long the rows of a decode step are that attention is measured with."""

from typing import Final

from bench.shapes import Shape
from model.buckets import pages_for

_MIXED_ROWS: Final = 16
_LONGEST: Final = 1 << 17
_TIMES: Final = 4  # the shape's context, of a quarter of its largest batch


def mixed_contexts(page_size: int, num_pages: int, longest: int = _LONGEST) -> list[int]:
    """Rows from 1 token to so many at most, each longer than the one before by the same factor.

    num_pages: that all of them fit into.
    """
    while longest > 1:
        rows = [round(longest ** (i / (_MIXED_ROWS - 1))) for i in range(_MIXED_ROWS)]
        if _pages_of(rows, page_size) <= num_pages:
            return rows
        longest //= 2
    return []


def decode_contexts(shape: Shape, num_pages: int) -> dict[str, list[int]]:
    """Tokens of each row, by what rows are called: steps', longer ones, and of all lengths at once.

    num_pages: that the rows of a batch fit into; of those that do not there is nothing.
    """
    found = {f"x{slots}": [shape.context] * slots for slots in shape.slots}
    fewer, longer = max(shape.slots) // _TIMES, _TIMES * shape.context
    if fewer and _pages_of([longer] * fewer, shape.page_size) <= num_pages:
        found[f"x{fewer} of {longer}"] = [longer] * fewer
    if rows := mixed_contexts(shape.page_size, num_pages):
        found[f"x{len(rows)} of 1 to {rows[-1]}"] = rows
    return found


def _pages_of(contexts: list[int], page_size: int) -> int:
    """Of rows with so many tokens and the one that a step adds."""
    return sum(pages_for(tokens + 1, page_size) for tokens in contexts)
