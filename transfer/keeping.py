"""Moves pages that prefix caches evict to the host's memory, and those that prompts want back."""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from transfer.gathered import GatheredPages, RunEngine
from transfer.host_pages import HostMemory, HostPages
from transfer.host_sizes import Hosts
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


class KeptPages:
    """What every node does with its shards: gathered pages are saved, saved ones restored."""

    def __init__(
        self, memories: Sequence[HostMemory | None], engine: RunEngine, gathered: GatheredPages
    ) -> None:
        """memories: of this node, by rank; None: it has no shard of that rank."""
        self._memories, self._engine, self._gathered = memories, engine, gathered
        self._calls = engine.calls
        self._calls.add("save", self._save)
        self._calls.add("restore", self._restore)

    def save(self, ticket: int, moves: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy gathered pages to the host; waits for the device to have them.

        moves: the rank of each page, which one of its run it is, and its place (slot and group).
        """
        self._calls("save", ticket, np.array(moves, np.int32).reshape(-1, 4))

    def restore(self, rank: int, pages: Sequence[tuple[int, int, int]]) -> None:
        """Dispatch the write of pages into a rank's pool: each one's id, and its place."""
        self._calls("restore", rank, np.array(pages, np.int32))

    def _save(self, ticket: int, moves: np.ndarray) -> None:
        for rank in np.unique(moves[:, 0]).tolist():
            memory = self._memories[rank]
            if memory is None:
                continue
            shards = [np.asarray(array) for array in self._gathered.of(ticket, rank)]
            for _, at, slot, group in moves[moves[:, 0] == rank].tolist():
                memory.store((slot, group), [shard[:, :, at] for shard in shards])

    def _restore(self, rank: int, pages: np.ndarray) -> None:
        memory = self._memories[rank]
        places = [(slot, group) for slot, group in pages[:, 1:].tolist()]
        shards = [] if memory is None else memory.fetch(places)
        self._engine.place_run(rank, pages[:, 0].tolist(), shards)


class Keeping:
    """Carries out what the caches of all ranks have decided, in calls to the engine."""

    def __init__(
        self,
        kept: KeptPages,
        caches: Sequence[PrefixCache],
        engine: RunEngine,
        gathered: GatheredPages,
        counters: Counter[str],
    ) -> None:
        """caches: of all ranks, each with the pages of its host."""
        self._kept, self._caches, self._engine = kept, caches, engine
        self._gathered, self._counters = gathered, counters
        # What each call gathered: its ticket, and the runs by rank.
        self._saving: deque[tuple[int, Sequence[_Run]]] = deque()
        # What was evicted in this turn, by the host that may have it, oldest first.
        self._left: dict[HostPages, list[bytes]] = {_host_of(cache): [] for cache in caches}

    def dispatch(self) -> None:
        """Gather the evicted pages, then fill the restored ones.

        Call after pages were evicted or restored, before a call to the engine that may write to
        them or read them: the device runs calls in order.
        """
        if not any(cache.evicted or cache.restored for cache in self._caches):
            return
        restored = [self._runs(cache.restored) for cache in self._caches]
        wanted = {page.digest for runs in restored for run in runs for page in run}
        for cache in self._caches:
            self._left[_host_of(cache)] += [digest for digest, _ in cache.evicted]
        self._touch_left()  # or a copy makes room just when its page leaves
        evicted = [
            self._runs([page for page in cache.evicted if page[0] not in _host_of(cache)])
            for cache in self._caches
        ]
        for each in zip_longest(*evicted, fillvalue=()):  # one of every rank
            if len(self._saving) == _RUNS_SAVED_AHEAD:
                self._save(*self._saving.popleft(), wanted)
            ticket = self._gathered.gather([[page.page_id for page in run] for run in each])
            self._saving.append((ticket, each))
        for rank, (cache, runs) in enumerate(zip(self._caches, restored, strict=True)):
            host = _host_of(cache)
            for run in runs:
                pages = [(page.page_id, *host.place_of(page.digest, page.group)) for page in run]
                self._kept.restore(rank, pages)
        for cache in self._caches:
            self._counters["host_pages_restored"] += len(cache.restored)
            cache.restored.clear()
            cache.evicted.clear()

    def settle(self) -> None:
        """Copy what was gathered to the host's pages; waits for the device to have it."""
        while self._saving:
            self._save(*self._saving.popleft())
        # Of a prefix, the host had the beginning already, and got the end just now.
        self._touch_left()
        for left in self._left.values():
            left.clear()

    @property
    def num_pages(self) -> int:
        """Pages that the host has, of each group."""
        return sum(map(len, self._left))

    def _touch_left(self) -> None:
        for host, left in self._left.items():
            host.touch(left[::-1])

    def _runs(self, pages: Sequence[tuple[bytes, int]]) -> list[_Run]:
        """In runs that fit a compiled gather; the pages of all groups of a prefix side by side."""
        most, per_group = self._engine.max_run_pages, self._engine.num_pages
        of_all = [
            _Page(digest, group, group * per_group + page)
            for digest, page in pages
            for group in range(_host_of(self._caches[0]).groups)
        ]
        return [of_all[at : at + most] for at in range(0, len(of_all), most)]

    def _save(self, ticket: int, runs: Sequence[_Run], besides: Collection[bytes] = ()) -> None:
        moves = []
        for rank, (cache, run) in enumerate(zip(self._caches, runs, strict=True)):
            host = _host_of(cache)
            for at, page in enumerate(run):
                place = host.put(page.digest, page.group, besides)
                if place is not None:
                    moves.append((rank, at, *place))
                    is_whole = page.group + 1 == host.groups
                    self._counters["host_pages_saved"] += is_whole
        self._kept.save(ticket, moves)
        self._gathered.drop(ticket)


def keeping_of(
    hosts: Hosts | None,
    caches: Sequence[PrefixCache],
    engine: RunEngine,
    counters: Counter[str],
    gathered: GatheredPages | None = None,
) -> Keeping | None:
    """None where no host keeps what caches evict. caches: of all ranks."""
    if hosts is None:
        return None
    gathered = gathered or GatheredPages(engine)
    return Keeping(KeptPages(hosts.memories, engine, gathered), caches, engine, gathered, counters)


def _host_of(cache: PrefixCache) -> HostPages:
    assert cache.host is not None, "it keeps what is evicted"
    return cache.host
