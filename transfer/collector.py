"""Tunes how often Python's garbage collector runs in our processes."""

import gc
from typing import Final

# Objects made and not yet freed since the last run, then runs until the next older generation has
# its own. Python's own are 700, 10 and 10 in 3.12.
_PYTHONS: Final = gc.get_threshold()
_STARTING: Final = 10_000, 20, 100
_CALM: Final = 20_000, 50, 50


def rest_while_starting() -> None:
    """Let the collector run rarely from now on: modules, traces and programs are there to stay.

    For workers: Python would search all of them again and again, for a tenth of the start.
    """
    gc.set_threshold(*_STARTING)


def keep_what_started() -> None:
    """Let no collection look at what is there, and have them as often as Python does.

    For workers, once they are ready: jaxlib releases memory when one happens (transfer/worker.py).
    """
    _freeze(_PYTHONS)


def calm_collector() -> None:
    """Let the collector look at less, and less often. Called once, when the start is over.

    Objects made during the start stay for good. Those of streams and routes are freed by reference
    counts; with thousands of streams, each search of all of them for cycles would take
    milliseconds. So a request must leave no cycle behind: it would stay for a million requests.
    """
    _freeze(_CALM)


def _freeze(thresholds: tuple[int, int, int]) -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
