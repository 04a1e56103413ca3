"""How long a call takes: warm-up, then batches long enough for the clock, then the median."""

import statistics
import time
from collections.abc import Callable
from typing import Any

WARM_UPS = 3  # CUDA graphs are captured in the first runs of an executable


def seconds_per_call(
    call: Callable[[], Any],
    wait: Callable[[Any], Any],
    budget_s: float = 1.0,
    batches: int = 5,
) -> float:
    """Median over batches of the mean time of one call.

    call: starts the work, and may return before it is done. wait: waits for what a call returned.
    Calls of one batch follow each other without waiting, as in a busy engine.
    budget_s: about how long all batches together may take.
    """
    for _ in range(WARM_UPS):
        wait(call())
    start = time.perf_counter()
    wait(call())
    once_s = max(time.perf_counter() - start, 1e-7)
    calls = max(1, int(budget_s / batches / once_s))
    found = []
    for _ in range(batches if once_s < budget_s else 2):
        start = time.perf_counter()
        last = None
        for _ in range(calls):
            last = call()
        wait(last)
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)
