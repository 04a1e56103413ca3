"""The only source of time: a clock that is passed in, so that tests and the simulator own it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Reads time; nothing here waits."""

    def now_s(self) -> float:
        """Unix time in seconds, to be shown: hosts' clocks differ, and may be set at any time."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that only grow, for waits and measurements; comparable within one host."""
        ...

    def thread_cpu_s(self) -> float:
        """Seconds of CPU time that the calling thread has used."""
        ...


class SystemClock:
    """The machine's clock."""

    now_s = staticmethod(time.time)
    monotonic_s = staticmethod(time.monotonic)
    thread_cpu_s = staticmethod(time.thread_time)


class ManualClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, start_s: float = 1_000_000.0, unix_s: float = 1_500_000_000.0) -> None:
        self._monotonic_s = start_s
        self._ahead_s = unix_s - start_s
        self.used_cpu_s = 0.0  # set by hand

    def now_s(self) -> float:
        return self._monotonic_s + self._ahead_s

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def thread_cpu_s(self) -> float:
        return self.used_cpu_s

    def advance(self, seconds: float) -> None:
        """Move time forward. Raises ValueError if seconds < 0."""
        if seconds < 0:
            raise ValueError(f"a clock moves forward only, got {seconds}")
        self._monotonic_s += seconds

    def set_ahead(self, seconds: float) -> None:
        """Move the wall clock, back when seconds < 0; no time passes."""
        self._ahead_s += seconds


SYSTEM_CLOCK = SystemClock()
