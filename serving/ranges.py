"""Range and count checks for a request's fields, and how refused numbers are shown in messages."""

from collections.abc import Sequence

from serving.errors import bad_field

MAX_COUNT = (1 << 31) - 1  # what the wire and the programs hold
_MAX_DIGITS = 20


def in_range[N: (int, float)](
    name: str, value: N, low: float, high: float | None, but: str = "", open_low: bool = False
) -> N:
    """The value, if it is in range. high: None accepts whatever fits 31 bits (MAX_COUNT).

    but: what is accepted besides, worded for the message. Raises ApiError.
    """
    most = MAX_COUNT if high is None else high
    if (value > low if open_low else value >= low) and value <= most:
        return value
    least = f"above {low:g}" if open_low else f"at least {low:g}"
    # A message about the lower bound does not mention MAX_COUNT, which is no limit of the field.
    also = "" if high is None and value < most else f" and at most {most:.12g}"
    raise bad_field(name, f"must be {but + ' ' if but else ''}{least}{also}, got {told(value)}")


def few[T](name: str, items: Sequence[T] | None, most: int) -> Sequence[T]:
    """The items, if there are at most `most`; none for None. Raises ApiError."""
    if items is not None and len(items) > most:
        raise bad_field(name, f"at most {most}, got {len(items)}")
    return items or ()


def told(value: float) -> str:
    """A client's number, spelled for a message: in JSON it may have thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**_MAX_DIGITS:
        return f"a number of more than {_MAX_DIGITS} digits"
    return str(value)
