"""Which rooms get a slot and pages, and which wait: reserve or refuse, oldest first.

Pure. A request that is let in owns a slot and the pages of its prompt and its first token; later
pages are taken one at a time (`grow`). When there is none left, the youngest seated request has to
leave (`victim`). It comes back as a new room that is as old as its request, so it does not stay the
youngest for ever, and the oldest request always runs to its end.

All data-parallel ranks share one queue. Each rank has slots and pages of its own; a request's rank
is chosen when the request is let in, unless it was dictated. No younger request overtakes one that
waits for a rank on that rank.

Pages of prompts stay in their rank's prefix cache, whether prefill sent them or decode computed
them. They count as free: where a page is needed, the oldest cached one that nobody holds is taken.
"""

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from transfer.host_pages import HostPages
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache, Sharing

_EVICTED_SHIFT = 8  # evict at least a 256th of the pool at once


@dataclass(slots=True)
class Seat:
    """What one room owns on decode: a slot and pages."""

    room: int
    num_tokens: int  # tokens whose kv is shared, arrives from prefill, or is computed here
    arrival_s: float
    rank: int = -1  # dictated, or chosen when it is seated
    sharing: Sharing | None = None  # None: it shares no pages
    is_local: bool = False  # decode computes it itself
    slot: int = -1  # counted over all ranks, those of rank 0 first
    pages: list[int] = field(default_factory=list)
    ring: list[int] = field(default_factory=list)  # see decode/rings.py
    num_cached: int = 0  # tokens of the prompt that pages of the prefix cache hold


def _age(seat: Seat) -> tuple[float, int]:
    return seat.arrival_s, seat.room


class Admission:
    """Owner of slots and pages of all ranks, and the queue in front of them."""

    def __init__(
        self,
        pools: Sequence[PagePool],
        rank_slots: int,
        page_size: int,
        headroom_pages: int,
        caching: bool = False,
        ring_pages: int = 0,
        hosts: Sequence[HostPages] | None = None,
    ) -> None:
        """pools: one per rank. rank_slots: slots of each rank. caching: keep prompts' pages.

        ring_pages: most pages of a seat's ring; 0: no rings. hosts: of each rank, which
        keeps what its cache evicts.
        """
        assert not (caching and ring_pages), "a prefix needs all pages of all layers"
        self._pools = pools
        self.caches = tuple(
            PrefixCache(pool, page_size, caching, hosts[rank] if hosts else None)
            for rank, pool in enumerate(pools)
        )
        self.page_size = page_size
        # A seat that grows takes two pages until its ring is whole.
        self._headroom_pages = headroom_pages * (2 if ring_pages else 1)
        self._ring_pages = ring_pages
        self._free_slots = [
            list(range((rank + 1) * rank_slots - 1, rank * rank_slots - 1, -1))
            for rank in range(len(pools))
        ]
        self._waiting: list[Seat] = []  # oldest first
        # Of those that wait: rooms and tokens by the rank that they want, and last, as rank -1,
        # of those that take any. Kept up to date, since loads are told in every turn.
        self._rooms_waiting = [0] * (len(pools) + 1)
        self._tokens_waiting = [0] * (len(pools) + 1)
        self._may_fit = False  # something changed for waiting rooms since they were looked at
        self._seats: dict[int, Seat] = {}
        self._num_seated = [0] * len(pools)
        self.num_slots = len(pools) * rank_slots

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def may_admit(self) -> bool:
        """Whether rooms wait and something has changed for them since `admit` looked."""
        return self._may_fit and bool(self._waiting)

    @property
    def num_free_slots(self) -> int:
        return sum(map(len, self._free_slots))

    @property
    def waiting_tokens(self) -> int:
        return sum(self._tokens_waiting)

    def waiting_for(self, rank: int) -> tuple[int, int]:
        """Rooms that wait for a seat on this very rank, and their tokens."""
        return self._rooms_waiting[rank], self._tokens_waiting[rank]

    def rank_free_slots(self, rank: int) -> int:
        """Free slots of one rank."""
        return len(self._free_slots[rank])

    def add(
        self,
        room: int,
        num_tokens: int,
        arrival_s: float,
        rank: int = -1,
        sharing: Sharing | None = None,
        is_local: bool = False,
    ) -> None:
        """Queue a room; rank: dictated, or -1. sharing, is_local: see Seat."""
        assert -1 <= rank < len(self._pools), rank
        assert all(seat.room != room for seat in self._waiting), f"room {room} twice"
        assert room not in self._seats, f"room {room} twice"
        self._may_fit = True
        seat = Seat(room, num_tokens, arrival_s, rank, sharing, is_local)
        insort(self._waiting, seat, key=_age)
        self._count_waiting(seat, 1)

    def admit(self) -> tuple[Seat, ...]:
        """Seat as many waiting rooms as fit, oldest first; none is overtaken on a rank it wants."""
        if not self._may_fit:
            return ()
        self._may_fit = False
        seated: list[Seat] = []
        open_ranks = {rank for rank, slots in enumerate(self._free_slots) if slots}
        at = 0
        while open_ranks and at < len(self._waiting):
            seat = self._waiting[at]
            wanted = open_ranks if seat.rank < 0 else open_ranks & {seat.rank}
            rank = self._roomiest(wanted, seat)
            if rank is None:
                open_ranks -= wanted
                at += 1
                continue
            del self._waiting[at]
            self._count_waiting(seat, -1)
            self._sit(seat, rank)
            seated.append(seat)
            if not self._free_slots[rank]:
                open_ranks.discard(rank)
        return tuple(seated)

    def grow(self, seat: Seat) -> int | None:
        """Take one more page for a seat, and one for its ring unless that is full.

        Returns None, with nothing taken, when the pool of its rank is dry.
        """
        in_ring = len(seat.ring) < self._ring_pages
        pages = self._reserve(seat.rank, 1 + in_ring)
        if pages is None:
            return None
        seat.pages.append(pages[0])
        seat.ring += pages[1:]
        return pages[0]

    def share(self, seat: Seat) -> None:
        """Replace pages of a seat's own by those that the cache has of its prompt by now.

        Nothing was written yet to the pages that are replaced.
        """
        if seat.sharing is None:
            return
        cache, pool = self.caches[seat.rank], self._pools[seat.rank]
        cached = seat.sharing.cached(cache)
        if len(cached) * self.page_size <= seat.num_cached:
            return
        pages = cache.share(cached)
        pool.release(seat.pages[: len(pages)])
        seat.pages[: len(pages)] = pages
        seat.num_cached = len(pages) * self.page_size
        self._may_fit = True

    def digest(self, seat: Seat, num_sent: int) -> None:
        """Digest the pages of a prompt of which num_sent were sent.

        `filled` needs all: for a long prompt at once, they would hold up a step.
        """
        if seat.sharing is not None:
            num_pages = seat.num_cached // self.page_size + num_sent
            seat.sharing.first(self.caches[seat.rank], num_pages)

    def filled(self, seat: Seat, num_tokens: int) -> None:
        """The pages of a prompt's first num_tokens tokens are filled before any later call.

        So from now on, others may share them.
        """
        if seat.sharing is None:
            return
        cache, full = self.caches[seat.rank], num_tokens // self.page_size
        found = seat.sharing.first(cache, full)
        cache.insert(found, seat.pages[:full])
        # A room that was found too large may need fewer pages of its own now.
        if any(each.sharing and each.sharing.begins_with(found) for each in self._waiting):
            self._may_fit = True

    def victim(self, rank: int) -> Seat:
        """The youngest seat of the rank.

        There is one whenever a seat could not grow: at worst, that seat itself.
        """
        return max((seat for seat in self._seats.values() if seat.rank == rank), key=_age)

    def release(self, room: int) -> Seat | None:
        """The room is over, in whatever state: its slot and pages go back. None if it had none."""
        self._may_fit = True
        seat = self._seats.pop(room, None)
        if seat is None:
            self._leave_queue(room)
            return None
        self._pools[seat.rank].release((*seat.pages, *seat.ring))
        self._free_slots[seat.rank].append(seat.slot)
        self._num_seated[seat.rank] -= 1
        seat.pages, seat.ring = [], []
        return seat

    def check(self, each_page: bool = True) -> None:
        """Assert that slots and pages add up.

        each_page: not only the number of pages, but who holds each. Where many seats share a long
        prefix this takes tens of milliseconds, for which a step would have to wait.
        """
        for rank, pool in enumerate(self._pools):
            seats = [seat for seat in self._seats.values() if seat.rank == rank]
            held = [self.caches[rank].pages, *(pages for s in seats for pages in (s.pages, s.ring))]
            references = sum(map(len, held))
            assert references == pool.num_references, (rank, references, pool.num_references)
            if each_page:
                owners = Counter(chain(*held))
                assert len(owners) == pool.num_held, (rank, len(owners), pool.num_held)
                for page, count in owners.items():
                    assert count == pool.refcount(page), (rank, page, count, pool.refcount(page))
            assert len(seats) == self._num_seated[rank], (rank, len(seats))
            slots = sorted([*self._free_slots[rank], *(seat.slot for seat in seats)])
            first = rank * self.num_slots // len(self._pools)
            assert slots == list(range(first, first + len(slots))), slots
            waiting = [seat.num_tokens for seat in self._waiting if seat.rank == rank]
            assert self.waiting_for(rank) == (len(waiting), sum(waiting)), (rank, waiting)
        free = self.num_free_slots
        assert free + len(self._seats) == self.num_slots, (free, len(self._seats))

    def _leave_queue(self, room: int) -> None:
        """Take a room that has no seat out of those that wait. Unknown rooms are ignored."""
        for at, seat in enumerate(self._waiting):
            if seat.room == room:
                del self._waiting[at]
                self._count_waiting(seat, -1)
                return

    def _count_waiting(self, seat: Seat, more: int) -> None:
        """Count a seat that begins (1) or ends (-1) to wait, under the rank that it wants."""
        self._rooms_waiting[seat.rank] += more
        self._tokens_waiting[seat.rank] += more * seat.num_tokens

    def _roomiest(self, ranks: set[int], seat: Seat) -> int | None:
        """Of these ranks, all with a free slot, one that fits: with most pages, then most slots."""
        fitting = [rank for rank in ranks if self._fits(rank, seat)]
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        return max(
            fitting,
            key=lambda rank: (self._pools[rank].num_to_have, len(self._free_slots[rank]), -rank),
        )

    def _fits(self, rank: int, seat: Seat) -> bool:
        headroom, cache = self._headroom_pages if self._num_seated[rank] else 0, self.caches[rank]
        short = sum(self._need(seat.num_tokens)) + headroom - self._pools[rank].num_free
        if short <= 0:
            return True
        shared: Sequence[bytes] = ()
        if seat.sharing is not None:
            shared = seat.sharing.cached(cache)
        return cache.can_evict(short - len(shared), frozenset(shared))

    def _reserve(self, rank: int, num_pages: int) -> tuple[int, ...] | None:
        """Take free pages, then cached ones; None, with none taken, when there are too few."""
        pool = self._pools[rank]
        short = num_pages - pool.num_free
        if short > 0:
            # Eviction walks past all pages that long streams hold, so it is done seldom, and of
            # a large pool more is evicted at once.
            self.caches[rank].evict(max(short, pool.num_pages >> _EVICTED_SHIFT))
        return pool.reserve(num_pages)

    def _need(self, num_tokens: int) -> tuple[int, int]:
        """Pages for a prompt and its first token, and how many more for its ring."""
        num_pages = num_tokens // self.page_size + 1
        return num_pages, min(num_pages, self._ring_pages)

    def _sit(self, seat: Seat, rank: int) -> None:
        cache = self.caches[rank]
        found, num_cached = seat.sharing.found(cache) if seat.sharing is not None else ([], 0)
        shared = cache.share(found[:num_cached])
        num_pages, in_ring = self._need(seat.num_tokens)
        fresh = self._reserve(rank, num_pages + in_ring - len(shared))
        assert fresh is not None
        seat.rank = rank
        seat.pages = [*shared, *fresh[in_ring:]]
        seat.ring = list(fresh[:in_ring])
        cache.restore(found, seat.pages[: len(found)], num_cached)
        seat.num_cached = len(found) * self.page_size
        seat.slot = self._free_slots[rank].pop()
        self._num_seated[rank] += 1
        self._seats[seat.room] = seat
