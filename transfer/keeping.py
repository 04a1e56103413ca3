"""Moves pages that prefix caches evict to the host's memory, and those that prompts want back."""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np

from transfer.host_pages import HostPages
from transfer.prefix_cache import PrefixCache

_RUNS_SAVED_AHEAD = 4  # gathered but not on the host yet: memory is planned for so many


class _Page(NamedTuple):
    digest: bytes
    group: int
    page_id: int  # in its rank's pool


_Run = Sequence[_Page]


def most_saving(run_pages: Sequence[int]) -> int:
    """Pages of a rank that may be gathered but not on the host yet. run_pages: lengths of runs."""
    return _RUNS_SAVED_AHEAD * run_pages[-1]


class RunEngine(Protocol):
    """What this needs of an engine."""

    @property
    def num_pages(self) -> int: ...
    @property
    def max_run_pages(self) -> int: ...
    def gather_runs(self, page_ids: Sequence[Sequence[int]]) -> list[list[Any]]: ...
    def place_run(
        self, rank: int, page_ids: Sequence[int], shards: Sequence[np.ndarray]
    ) -> None: ...


class Keeping:
    """Carries out what the caches of all ranks have decided, in calls to the engine."""

    def __init__(
        self,
        host: HostPages,
        caches: Sequence[PrefixCache],
        engine: RunEngine,
        groups: int,
        counters: Counter[str],
    ) -> None:
        self._host, self._caches, self._engine = host, caches, engine
        self._groups = groups
        self._counters = counters
        self._saving: deque[list[tuple[_Run, list[Any]]]] = deque()  # what each call gathered
        self._left: list[bytes] = []  # what was evicted in this turn, oldest first

    def dispatch(self) -> None:
        """Gather the evicted pages, then fill the restored ones.

        Call after pages were evicted or restored, before a call to the engine that may write to
        them or read them: the device runs calls in order.
        """
        if not any(cache.evicted or cache.restored for cache in self._caches):
            return
        restored = [self._runs(cache.restored) for cache in self._caches]
        wanted = {page.digest for runs in restored for run in runs for page in run}
        left = [digest for cache in self._caches for digest, _ in cache.evicted]
        self._host.touch(left[::-1])  # or a copy makes room just when its page leaves
        self._left += left
        evicted = [
            self._runs([page for page in cache.evicted if page[0] not in self._host])
            for cache in self._caches
        ]
        for each in zip_longest(*evicted, fillvalue=()):  # one of every rank
            if len(self._saving) == _RUNS_SAVED_AHEAD:
                self._save(self._saving.popleft(), wanted)
            gathered = self._engine.gather_runs([[page.page_id for page in run] for run in each])
            self._saving.append([both for both in zip(each, gathered, strict=True) if both[0]])
        for rank, runs in enumerate(restored):
            for run in runs:
                shards = self._host.fetch([(page.digest, page.group) for page in run])
                self._engine.place_run(rank, [page.page_id for page in run], shards)
        for cache in self._caches:
            self._counters["host_pages_restored"] += len(cache.restored)
            cache.restored.clear()
            cache.evicted.clear()

    def settle(self) -> None:
        """Copy what was gathered to the host's pages; waits for the device to have it."""
        while self._saving:
            self._save(self._saving.popleft())
        # Of a prefix, the host had the beginning already, and got the end just now.
        self._host.touch(self._left[::-1])
        self._left.clear()

    @property
    def num_pages(self) -> int:
        """Pages that the host has, of each group."""
        return len(self._host)

    def _runs(self, pages: Sequence[tuple[bytes, int]]) -> list[_Run]:
        """In runs that fit a compiled gather; the pages of all groups of a prefix side by side."""
        most, per_group = self._engine.max_run_pages, self._engine.num_pages
        of_all = [
            _Page(digest, group, group * per_group + page)
            for digest, page in pages
            for group in range(self._groups)
        ]
        return [of_all[at : at + most] for at in range(0, len(of_all), most)]

    def _save(
        self, gathered: Sequence[tuple[_Run, list[Any]]], besides: Collection[bytes] = ()
    ) -> None:
        for run, arrays in gathered:
            shards = [np.asarray(array) for array in arrays]
            for at, page in enumerate(run):
                pages = [shard[:, :, at] for shard in shards]
                if self._host.put(page.digest, page.group, pages, besides):
                    is_whole = page.group + 1 == self._groups
                    self._counters["host_pages_saved"] += is_whole
