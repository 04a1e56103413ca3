"""Tunes how often Python's garbage collector runs in a process that lives long."""

import gc

_COLLECT_AFTER = 20_000  # objects made and not yet freed since the last run; Python's own is 700


def calm_collector() -> None:
    """Let the collector look at less, and less often. Called once, when the start is over.

    Objects made during the start stay for good. Those of streams and routes are freed by reference
    counts; with thousands of streams, each search of all of them for cycles would take
    milliseconds. So a request must leave no cycle behind: it would stay for a million requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 50, 50)
