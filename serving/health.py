"""Why a worker may not be picked, as /get_server_info and /metrics show it."""

from typing import NamedTuple


class WorkerHealth(NamedTuple):
    """One worker, as one API process sees it."""

    draining: bool  # it leaves
    breaker: str  # serving.breaker.State: it failed often in a row
    stalled: bool  # its loop stands still
