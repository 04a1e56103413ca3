"""What command lines of benchmarks take: numbers in range, and the flags of a server."""

import argparse
import math
import shlex
from collections.abc import Callable

_OWN_FLAGS = ("--host", "--port", "--uds")
API_KEY_ENV = "KVFERRY_API_KEY"


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Parses a number of this kind that is no less, and finite."""
    return _ranged(kind, lambda value: value >= least, f"at least {least}")


def _ranged(
    kind: Callable[[str], float], holds: Callable[[float], bool], said: str
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not -math.inf < value < math.inf:  # of an int of any size, too
            raise argparse.ArgumentTypeError(f"must be finite, got {value}")
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {said}, got {value}")
        return value

    parse.__name__ = kind.__name__  # what argparse calls text that is no number
    return parse


above_zero = _ranged(float, lambda value: value > 0, "above 0")


def numbers(text: str) -> tuple[int, ...]:
    """Parses one, or several with commas between."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        message = f"expected a number, or several with commas between, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def server_args(text: str) -> list[str]:
    """Parses flags of a server, quoted as for a shell. Where it listens is for the benchmark."""
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
