"""Who gets a slot and pages, or waits: reserve or refuse, oldest first.

Pure. A request let in owns a slot and the pages of its prompt and its first token; later pages
are taken one at a time (`grow`), and when there is none the youngest seated request is told
to leave (`victim`): it comes back as a new room with its original arrival time, so it is not
the youngest for ever and the oldest always runs to its end.
"""

from bisect import insort
from dataclasses import dataclass, field

from transfer.pages import PagePool


@dataclass(slots=True)
class Seat:
    """What one room owns on decode: a slot and pages."""

    room: int
    num_tokens: int  # tokens whose kv arrives from prefill
    arrival_s: float
    slot: int = -1
    pages: list[int] = field(default_factory=list)


def _age(seat: Seat) -> tuple[float, int]:
    return seat.arrival_s, seat.room


class Admission:
    """Owner of slots and pages, and the queue in front of them."""

    def __init__(self, pool: PagePool, num_slots: int, page_size: int, headroom_pages: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._headroom_pages = headroom_pages
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._waiting: list[Seat] = []  # oldest first
        self._seats: dict[int, Seat] = {}
        self.num_slots = num_slots

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def waiting_tokens(self) -> int:
        return sum(seat.num_tokens for seat in self._waiting)

    def add(self, room: int, num_tokens: int, arrival_s: float) -> None:
        """Queue a room."""
        assert all(seat.room != room for seat in self._waiting), f"room {room} twice"
        assert room not in self._seats, f"room {room} twice"
        insort(self._waiting, Seat(room, num_tokens, arrival_s), key=_age)

    def admit(self) -> tuple[Seat, ...]:
        """Seat as many of the waiting as fit, oldest first; nobody overtakes."""
        seated: list[Seat] = []
        while self._waiting and self._free_slots:
            seat = self._waiting[0]
            need = seat.num_tokens // self._page_size + 1
            headroom = self._headroom_pages if self._seats else 0
            if self._pool.num_free < need + headroom:
                break
            pages = self._pool.reserve(need)
            assert pages is not None
            seat.pages = list(pages)
            seat.slot = self._free_slots.pop()
            del self._waiting[0]
            self._seats[seat.room] = seat
            seated.append(seat)
        return tuple(seated)

    def grow(self, seat: Seat) -> int | None:
        """One more page for a seat, or None when the pool is dry."""
        pages = self._pool.reserve(1)
        if pages is None:
            return None
        seat.pages.append(pages[0])
        return pages[0]

    def victim(self) -> Seat:
        """The youngest seat. There is one whenever a seat could not grow: at worst, itself."""
        return max(self._seats.values(), key=_age)

    def release(self, room: int) -> Seat | None:
        """The room is over, in whatever state: slot and pages go back. None if unknown."""
        seat = self._seats.pop(room, None)
        if seat is None:
            self._waiting = [s for s in self._waiting if s.room != room]
            return None
        self._pool.release(tuple(seat.pages))
        self._free_slots.append(seat.slot)
        seat.pages = []
        return seat

    def check(self) -> None:
        """Slots and pages add up."""
        held = sum(len(seat.pages) for seat in self._seats.values())
        assert held == self._pool.num_held, (held, self._pool.num_held)
        slots = sorted([*self._free_slots, *(s.slot for s in self._seats.values())])
        assert slots == list(range(self.num_slots)), slots
