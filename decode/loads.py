"""What decode reports of its slots and pages, in total and by rank."""

from collections.abc import Sequence

from decode.admission import Admission
from decode.local import LocalQueue
from transfer import wire
from transfer.clock import Clock
from transfer.pages import PagePool

_COUNT_AGAIN_S = 0.2  # counting a cache's evictable pages walks it, too long for every step


class Loads:
    """Counts for `wire.Load`.

    Cached pages that no room holds count as free. Queued requests are those without a seat, and
    those whose prompts are still to be computed here. All others run, even if their pages are still
    on their way: they have slots, which nobody else can have.
    """

    def __init__(
        self, admission: Admission, local: LocalQueue, pools: Sequence[PagePool], clock: Clock
    ) -> None:
        self._admission = admission
        self._local = local
        self._pools = pools
        self._clock = clock
        self._evictable = [0] * len(pools)  # by rank, as of the last count
        self._due_s = 0.0

    @property
    def num_held(self) -> int:
        """Pages that rooms hold, counted now."""
        self._count()
        return sum(pool.num_held for pool in self._pools) - sum(self._evictable)

    @property
    def num_cached(self) -> int:
        return sum(map(len, self._admission.caches))

    def total(self, steps: int) -> wire.Load:
        """Over all ranks."""
        if self._clock.monotonic_s() >= self._due_s:
            self._count()
        admission = self._admission
        waiting = admission.num_waiting, admission.waiting_tokens
        return self._load(range(len(self._pools)), waiting, admission.num_free_slots, steps)

    def by_rank(self, steps: int) -> tuple[wire.Load, ...]:
        """See wire.Heartbeat; () with one rank. Rooms that wait for any rank are in no load."""
        if len(self._pools) == 1:
            return ()
        waiting_for, free_slots = self._admission.waiting_for, self._admission.rank_free_slots
        ranks = range(len(self._pools))
        return tuple(self._load([at], waiting_for(at), free_slots(at), steps) for at in ranks)

    def _load(
        self, ranks: Sequence[int], waiting: tuple[int, int], free: int, steps: int
    ) -> wire.Load:
        """waiting: rooms without a seat, and their tokens. free: slots."""
        left = [self._local.left(rank) for rank in ranks]
        seated = sum(requests for requests, _ in left)
        slots = len(ranks) * self._admission.num_slots // len(self._pools)
        return wire.Load(
            queued_requests=waiting[0] + seated,
            queued_tokens=waiting[1] + sum(tokens for _, tokens in left),
            running_requests=slots - free - seated,
            pages_total=sum(self._pools[rank].num_pages for rank in ranks),
            pages_free=sum(map(self._free, ranks)),
            slots_total=slots,
            slots_free=free,
            steps=steps,
        )

    def _free(self, rank: int) -> int:
        pool = self._pools[rank]
        return min(pool.num_free + self._evictable[rank], pool.num_pages)

    def _count(self) -> None:
        self._due_s = self._clock.monotonic_s() + _COUNT_AGAIN_S
        for rank, cache in enumerate(self._admission.caches):
            self._evictable[rank] = cache.num_evictable()
