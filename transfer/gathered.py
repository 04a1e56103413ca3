"""Pages that every node of a worker has gathered from its own devices, until they have left."""

from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np

from model.calls import Calls


class RunEngine(Protocol):
    """What moves runs of pages, between the devices of one node and its host."""

    @property
    def calls(self) -> Calls: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def max_run_pages(self) -> int: ...
    def gather_runs(self, page_ids: Sequence[Sequence[int]]) -> list[list[Any]]: ...
    def place_run(
        self, rank: int, page_ids: Sequence[int], shards: Sequence[np.ndarray]
    ) -> None: ...


class GatheredPages:
    """Runs by ticket. All nodes gather the same runs, each of its own shards."""

    def __init__(self, engine: RunEngine) -> None:
        self._engine = engine
        self._tickets = count()
        self._runs: dict[int, list[list[Any]]] = {}
        self._calls = engine.calls
        self._calls.add("gather", self._gather)
        self._calls.add("drop", self._drop)

    def gather(self, page_ids: Sequence[Sequence[int]]) -> int:
        """Dispatch the gathering of one run of each rank, which may be empty; returns a ticket."""
        ticket = next(self._tickets)
        lengths = np.array([len(run) for run in page_ids], np.int32)
        flat = np.fromiter((page for run in page_ids for page in run), np.int32)
        self._calls("gather", ticket, lengths, flat, page_ids=page_ids)
        return ticket

    def of(self, ticket: int, rank: int) -> list[Any]:
        """This node's shards of a rank's run, in order, for `numpy.asarray`.

        A shard is [layers, planes, n, page_size, kv heads, head_dim], with n at least the length of
        the run.
        """
        return self._runs[ticket][rank]

    def drop(self, ticket: int) -> None:
        """Let go of all nodes' shards of the runs."""
        self._calls("drop", ticket)

    def _gather(
        self,
        ticket: int,
        lengths: np.ndarray,
        flat: np.ndarray,
        page_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if page_ids is None:
            page_ids = [run.tolist() for run in np.split(flat, np.cumsum(lengths)[:-1])]
        self._runs[ticket] = self._engine.gather_runs(page_ids)

    def _drop(self, ticket: int) -> None:
        del self._runs[ticket]
