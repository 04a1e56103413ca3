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
        left = [self._local.left(rank) for rank in range(len(self._pools))]
        slots, free = self._admission.num_slots, self._admission.num_free_slots
        seated = sum(requests for requests, _ in left)
        return wire.Load(
            queued_requests=self._admission.num_waiting + seated,
            queued_tokens=self._admission.waiting_tokens + sum(tokens for _, tokens in left),
            running_requests=slots - free - seated,
            pages_total=sum(pool.num_pages for pool in self._pools),
            pages_free=sum(map(self._free, range(len(self._pools)))),
            slots_total=slots,
            slots_free=free,
            steps=steps,
        )

    def by_rank(self, steps: int) -> tuple[wire.Load, ...]:
        """See wire.Heartbeat; () with one rank. Rooms that wait for any rank are in no load."""
        if len(self._pools) == 1:
            return ()
        slots = self._admission.num_slots // len(self._pools)
        loads = []
        for rank, pool in enumerate(self._pools):
            free = self._admission.rank_free_slots(rank)
            seated, tokens_left = self._local.left(rank)
            waiting, tokens_waiting = self._admission.waiting_for(rank)
            loads.append(
                wire.Load(
                    queued_requests=waiting + seated,
                    queued_tokens=tokens_waiting + tokens_left,
                    running_requests=slots - free - seated,
                    pages_total=pool.num_pages,
                    pages_free=self._free(rank),
                    slots_total=slots,
                    slots_free=free,
                    steps=steps,
                )
            )
        return tuple(loads)

    def _free(self, rank: int) -> int:
        pool = self._pools[rank]
        return min(pool.num_free + self._evictable[rank], pool.num_pages)

    def _count(self) -> None:
        self._due_s = self._clock.monotonic_s() + _COUNT_AGAIN_S
        for rank, cache in enumerate(self._admission.caches):
            self._evictable[rank] = cache.num_evictable()
