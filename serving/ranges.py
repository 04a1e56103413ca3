"""Checks of a request's numbers, counts and token ids, and how messages show refused numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from model.buckets import mask_words
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


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises ApiError for no ids, and for one that is not in the vocabulary."""
    if not ids:
        raise bad_field(name, "must have at least one token")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = told(low if low < 0 else high)
        raise bad_field(name, f"token id {wrong} is not in the vocabulary, 0 to {vocab_size - 1}")


def mask_of(name: str, ids: Sequence[int] | None, vocab_size: int) -> bytes:
    """The ids as bits of a mask, see model.buckets.mask_words; b"" for None. Raises ApiError."""
    if ids is None:
        return b""
    check_token_ids(name, few(name, ids, vocab_size), vocab_size)
    bits = np.zeros(32 * mask_words(vocab_size), np.bool_)
    bits[np.asarray(ids)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def id_prompts(name: str, given: Sequence[Any], vocab_size: int) -> list[list[int]]:
    """The prompts of a field with the token ids of one, or with a list for each. Raises ApiError.

    given: integers, and lists of them.
    """
    flat = [item for item in given if isinstance(item, int)]
    if flat and len(flat) < len(given):
        raise bad_field(name, "must be token ids, or lists of them, not both")
    lists = [flat] if flat else list(given)
    if not lists:
        raise bad_field(name, "must not be empty")
    for ids in lists:
        check_token_ids(name, ids, vocab_size)
    return lists


def told(value: float) -> str:
    """A client's number, spelled for a message: in JSON it may have thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**_MAX_DIGITS:
        return f"a number of more than {_MAX_DIGITS} digits"
    return str(value)
