"""Tracks which workers have failed so often in a row that others are picked for a while.

    CLOSED     picked as usual; a number of failures in a row opens the breaker
    OPEN       passed over for a back-off time, which doubles up to a bound
    HALF_OPEN  the back-off is over: one attempt may try; the breaker closes, or opens twice as long

If a worker failed because pages could not reach it, successes that need no pages do not close its
breaker until that is long ago. A failure counts only if its attempt was picked after the last
counted failure: a hundred rooms that one accident ends are one failure. The caller may ignore
breakers when there is no other worker: a poor worker is better than none, and a success there
closes its breaker.
"""

import enum
import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass

FIRST_S = 1.0
LONGEST_S = 60.0
# So long after a worker could not be reached with pages, a success without pages closes again.
FORGIVEN_S = 2 * LONGEST_S


class State(enum.Enum):
    """Whether a worker may be picked."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass(slots=True)
class _Breaker:
    failures: int = 0  # in a row, while closed
    opened: int = 0  # times in a row; 0 = closed
    until_s: float = 0.0  # open until then
    counted_s: float = -math.inf  # when the last failure was counted
    trial: object = None  # the attempt that tries it, while half open
    of_pages: bool = False  # in one of these failures its peer could not reach it with pages


class Breakers[K: Hashable]:
    """A breaker for each worker that failed. Times are monotonic seconds, given by the caller.

    attempt: any object, compared by identity. picked_s: when that attempt was picked.
    """

    def __init__(self, most_failures: int) -> None:
        assert most_failures > 0
        self._most_failures = most_failures
        self._breakers: dict[K, _Breaker] = {}

    def state(self, worker: K, now_s: float) -> State:
        breaker = self._breakers.get(worker)
        if breaker is None or not breaker.opened:
            return State.CLOSED
        return State.OPEN if now_s < breaker.until_s else State.HALF_OPEN

    def is_out(self, worker: K, now_s: float) -> bool:
        """Whether the worker is to be passed over."""
        state = self.state(worker, now_s)
        if state is State.HALF_OPEN:
            return self._breakers[worker].trial is not None
        return state is State.OPEN

    def picked(self, worker: K, attempt: object, now_s: float) -> None:
        """An attempt goes to the worker; if its breaker is half open, the attempt is its trial."""
        if self.state(worker, now_s) is State.HALF_OPEN and not self.is_out(worker, now_s):
            self._breakers[worker].trial = attempt

    def left(self, worker: K, attempt: object) -> None:
        """The attempt is over and will say no more of the worker: another may be the trial."""
        breaker = self._breakers.get(worker)
        if breaker is not None and breaker.trial is attempt:
            breaker.trial = None

    def succeeded(self, worker: K, picked_s: float, of_pages: bool = True) -> None:
        """The worker did what it was picked for. of_pages: its peer reached it with pages, too."""
        breaker = self._breakers.get(worker)
        if breaker is None:
            return
        # Otherwise answers of one token would keep sending there attempts that need pages.
        if breaker.of_pages and not of_pages and picked_s - breaker.counted_s < FORGIVEN_S:
            return
        # If the breaker has opened since, a success of an earlier attempt is no news.
        if not breaker.opened or picked_s > breaker.counted_s:
            del self._breakers[worker]

    def failed(self, worker: K, picked_s: float, now_s: float, of_pages: bool = False) -> None:
        """The worker failed by its own fault. of_pages: its peer could not reach it with pages."""
        breaker = self._breakers.setdefault(worker, _Breaker())
        breaker.of_pages |= of_pages
        state = self.state(worker, now_s)
        if state is State.OPEN or picked_s <= breaker.counted_s:
            return
        breaker.counted_s = now_s
        breaker.failures += 1
        if state is State.HALF_OPEN or breaker.failures >= self._most_failures:
            pause_s = min(FIRST_S * 2.0 ** min(breaker.opened, 10), LONGEST_S)
            breaker.opened += 1
            breaker.until_s = now_s + pause_s
            breaker.trial = None

    def keep(self, workers: Collection[K]) -> None:
        """Forget all others: those incarnations are gone."""
        for worker in [worker for worker in self._breakers if worker not in workers]:
            del self._breakers[worker]
