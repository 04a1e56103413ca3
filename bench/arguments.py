"""Parsers for arguments of the benchmarks: numbers in a range, and the flags of a server."""

import argparse
import math
import shlex
from collections.abc import Callable

from transfer.flags import API_KEY_ENV

_OWN_FLAGS = ("--host", "--port", "--uds")


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """A parser of finite numbers of this kind that are at least `least`."""
    return _ranged(kind, lambda value: value >= least, f"at least {least}")


def up_to(most: int) -> Callable[[str], float]:
    """A parser of integers from 0 to `most`."""
    return _ranged(int, lambda value: 0 <= value <= most, f"from 0 to {most}")


def _ranged(
    kind: Callable[[str], float], holds: Callable[[float], bool], said: str
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not -math.inf < value < math.inf:  # takes an int of any size, as isfinite does not
            raise argparse.ArgumentTypeError(f"must be finite, got {value}")
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {said}, got {value}")
        return value

    parse.__name__ = kind.__name__  # argparse's error names it: "invalid int value"
    return parse


INT32_MAX = (1 << 31) - 1  # servers count with it
INT64_MAX = (1 << 63) - 1  # JAX takes no larger seed, nor does a file of rows
_LEAST, _MOST = 1e-6, 1e6  # beyond, a run would have no beginning or no end
moderate = _ranged(float, lambda value: _LEAST <= value <= _MOST, f"from {_LEAST:g} to {_MOST:g}")


def numbers(text: str) -> tuple[int, ...]:
    """Parse one integer, or several separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        message = f"expected a number, or several with commas between, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def api_key(text: str) -> str:
    """A key that a server can have: a line end, as from a file, would be one of the request."""
    if text != text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(
            f"it, or ${API_KEY_ENV}, must not have control characters, nor blanks or line ends "
            "around it"
        )
    return text


def server_args(text: str) -> list[str]:
    """Parse a server's flags, quoted as for a shell. The benchmark chooses where it listens."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: {text!r}") from None
    for word in words:
        flag = word.partition("=")[0]
        if flag in _OWN_FLAGS:
            raise argparse.ArgumentTypeError(f"the benchmark chooses {flag} itself, got {text!r}")
        if flag == "--api-key":
            message = f"{flag} would stand in rows, for all to read; `serve` has ${API_KEY_ENV}"
            raise argparse.ArgumentTypeError(message)
    return words
