"""What decode reports of its slots and pages, in total and by rank."""

from collections.abc import Sequence

from decode.admission import Admission
from decode.local import LocalQueue
from transfer import wire
from transfer.pages import PagePool


class Loads:
    """Counts for `wire.Load`.

    Cached pages that no room holds count as free. Queued requests are those without a seat, and
    those whose prompts are still to be computed here. All others run, even if their pages are still
    on their way: they have slots, which nobody else can have.
    """

    def __init__(self, admission: Admission, local: LocalQueue, pools: Sequence[PagePool]) -> None:
        self._admission = admission
        self._local = local
        self._pools = pools

    @property
    def num_held(self) -> int:
        """Pages that rooms hold."""
        return sum(pool.num_pages - pool.num_to_have for pool in self._pools)

    @property
    def num_cached(self) -> int:
        return sum(map(len, self._admission.caches))

    def total(self, steps: int) -> wire.Load:
        """Over all ranks."""
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
            pages_free=sum(self._pools[rank].num_to_have for rank in ranks),
            slots_total=slots,
            slots_free=free,
            steps=steps,
        )
