"""Hosts' clocks: each counts from its own start, and wall clocks get set wrong."""

from random import Random

from transfer.clock import ManualClock

_LONGEST_UP_S = 1e7
_MOST_WRONG_S = 7_200.0


class HostClock:
    """One host's clock; time passes as `time` says."""

    def __init__(self, time: ManualClock, rng: Random) -> None:
        self._time = time
        self._rng = rng
        self._up_s = rng.uniform(-time.monotonic_s(), _LONGEST_UP_S)
        self.wrong_s = 0.0
        self.set_wrong()

    def now_s(self) -> float:
        return self._time.now_s() + self.wrong_s

    def monotonic_s(self) -> float:
        return self._time.monotonic_s() + self._up_s

    def thread_cpu_s(self) -> float:
        return self._time.thread_cpu_s()

    def set_wrong(self) -> None:
        """Set the wall clock forward or back; no time passes."""
        self.wrong_s = self._rng.uniform(-_MOST_WRONG_S, _MOST_WRONG_S)
