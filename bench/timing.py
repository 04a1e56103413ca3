"""Times calls: warm-up, then batches long enough for the clock, then the median.

It also limits how many measurements are begun in the time that there is.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TextIO

WARM_UPS = 3  # CUDA graphs are captured in the first runs of an executable
_BATCHES = 5


@dataclass(frozen=True)
class Allowance:
    """Until when measurements may go on, by a clock."""

    end_s: float = math.inf
    clock: Callable[[], float] = time.monotonic

    def spend[T](
        self,
        tasks: Mapping[str, Callable[[], T]],
        out: TextIO,
        least_s: Callable[[], float] = lambda: 0.0,
    ) -> list[T]:
        """Do tasks in order, the most telling first; returns their results.

        A task is begun only while more than least_s is left. Prints the names of those left out.
        """
        done: list[T] = []
        for number, task in enumerate(tasks.values()):
            if self.end_s - self.clock() <= least_s():
                left_out = ", ".join([*tasks][number:])
                print(f"left out, for want of time: {left_out}", file=out, flush=True)
                break
            done.append(task())
        return done


ENDLESS: Final = Allowance()


def seconds_per_call(
    call: Callable[[], Any], wait: Callable[[Any], Any], budget_s: float = 1.0
) -> float:
    """Median over batches of the mean time of one call.

    call: starts the work, and may return before it is done. wait: waits for what a call returned.
    Calls of one batch follow each other without waiting, as in a busy engine.
    budget_s: about how long all batches may take together.
    """
    for _ in range(WARM_UPS):
        wait(call())
    start = time.perf_counter()
    wait(call())
    once_s = max(time.perf_counter() - start, 1e-7)
    calls = max(1, int(budget_s / _BATCHES / once_s))
    found = []
    for _ in range(_BATCHES if once_s < budget_s else 2):
        start = time.perf_counter()
        last = None
        for _ in range(calls):
            last = call()
        wait(last)
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)
