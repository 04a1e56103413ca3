"""How often Python's garbage collector looks at a process that lives long."""

import gc

_COLLECT_AFTER = 20_000  # objects made and not yet freed since the last look; Python has 700


def calm_collector() -> None:
    """Let it look at less, and less often. Called once, when the start is over.

    What the start made stays for good. What streams and routes are made of dies by reference
    counts; with thousands of them, each look at all in search of cycles would take milliseconds.
    So nothing that each request leaves behind may be a cycle: it would stay for a million of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 50, 50)
