"""The only door to time: a clock that is passed in, so that tests and the simulator own it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Reads time; nothing here waits."""

    def now_s(self) -> float:
        """Unix time in seconds: comparable between hosts, may jump."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that only grow; comparable within one host (CLOCK_MONOTONIC)."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def monotonic_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward. Raises ValueError if seconds < 0."""
        if seconds < 0:
            raise ValueError(f"a clock moves forward only, got {seconds}")
        self._now_s += seconds


SYSTEM_CLOCK = SystemClock()
