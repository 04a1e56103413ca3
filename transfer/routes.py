"""Which data-parallel rank of which prefill worker has which room: the table, and its updates.

Pure. The registry keeps one table, and each decode worker a copy. Nothing waits for a route: a
grant goes to the prefill worker, which knows the rank itself. So a table may forget routes: it
holds at most max_rooms rooms, drops the oldest first, and keeps none longer than ttl_s.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from transfer import wire
from transfer.errors import BadMessage

MAX_ROOMS = 1 << 18
TTL_S = 600.0


@dataclass(slots=True)
class _Owner:
    """One incarnation of a worker, with its rooms in the order in which they expire."""

    epoch: int
    number: int  # of the latest Routes
    until_s: float  # when all that it has told by now has expired
    rooms: OrderedDict[int, tuple[int, float]] = field(default_factory=OrderedDict)  # rank, until


class RouteTable:
    """Rooms and ranks by worker. Times are monotonic seconds, given by the caller."""

    def __init__(self, max_rooms: int = MAX_ROOMS, ttl_s: float = TTL_S) -> None:
        assert max_rooms > 0
        assert ttl_s > 0
        self.max_rooms = max_rooms
        self.ttl_s = ttl_s
        self._owners: dict[str, _Owner] = {}
        self._num_rooms = 0

    def __len__(self) -> int:
        return self._num_rooms

    def get(self, worker_id: str, epoch: int, room: int) -> int | None:
        """The rank that this incarnation bound the room to; None if unknown."""
        owner = self._owners.get(worker_id)
        if owner is None or owner.epoch != epoch:
            return None
        route = owner.rooms.get(room)
        return None if route is None else route[0]

    def apply(self, routes: wire.Routes, now_s: float) -> bool:
        """Apply a message; False when it was stale: from an older epoch, or overtaken.

        Raises BadMessage when rooms and ranks do not pair.
        """
        found = _pairs(routes)
        ended = wire.unpack_i64(routes.ended).tolist()
        owner = self._owners.get(routes.worker_id)
        if owner is not None and _stale(routes, owner):
            return False
        until_s = now_s + self.ttl_s
        if owner is None or routes.epoch != owner.epoch or routes.whole:
            self.drop(routes.worker_id)
            owner = self._owners[routes.worker_id] = _Owner(routes.epoch, routes.number, until_s)
        owner.number, owner.until_s = routes.number, until_s
        rooms, num_before = owner.rooms, len(owner.rooms)
        for room, rank in found.items():
            if room in rooms:
                del rooms[room]  # inserted again below, as the newest
            rooms[room] = rank, until_s
        for room in ended:
            rooms.pop(room, None)
        self._num_rooms += len(rooms) - num_before
        while self._num_rooms > self.max_rooms:
            self._forget_oldest()
        return True

    def drop(self, worker_id: str) -> None:
        """Forget a worker that is gone, and its rooms."""
        owner = self._owners.pop(worker_id, None)
        if owner is not None:
            self._num_rooms -= len(owner.rooms)

    def drop_others(self, worker_id: str, epoch: int) -> None:
        """Forget other incarnations of this worker."""
        owner = self._owners.get(worker_id)
        if owner is not None and owner.epoch != epoch:
            self.drop(worker_id)

    def clear(self) -> None:
        """Forget everybody."""
        self._owners.clear()
        self._num_rooms = 0

    def expire(self, now_s: float) -> int:
        """Forget rooms that are too old, and who told nothing since; returns how many rooms."""
        before = self._num_rooms
        for worker_id, owner in list(self._owners.items()):
            while owner.rooms and next(iter(owner.rooms.values()))[1] <= now_s:
                owner.rooms.popitem(last=False)
                self._num_rooms -= 1
            if owner.until_s <= now_s:  # a registry does not say whom it dropped
                self.drop(worker_id)
        return before - self._num_rooms

    def snapshot(self) -> list[wire.Routes]:
        """All routes, one message per worker."""
        return [
            wire.Routes(
                worker_id,
                owner.epoch,
                owner.number,
                wire.pack_i64(list(owner.rooms)),
                wire.pack_i32([rank for rank, _ in owner.rooms.values()]),
                whole=True,
            )
            for worker_id, owner in self._owners.items()
        ]

    def _forget_oldest(self) -> None:
        oldest = min(
            (owner for owner in self._owners.values() if owner.rooms),
            key=lambda owner: next(iter(owner.rooms.values()))[1],
        )
        oldest.rooms.popitem(last=False)
        self._num_rooms -= 1


class RouteNews:
    """Changes to one worker's routes, collected between two messages.

    live: the routes of all its rooms, bounded by the worker's own limit on rooms. A room that ends
    before it was told is never told.
    """

    def __init__(self, worker_id: str, epoch: int) -> None:
        self.live: dict[int, int] = {}
        self._worker_id = worker_id
        self._epoch = epoch
        self._number = 0
        self._bound: dict[int, int] = {}
        self._ended: list[int] = []
        self._whole = True

    def add(self, bound: Iterable[tuple[int, int]], ended: Iterable[int]) -> None:
        """Add rooms with their ranks, and rooms that ended; a room may be in both."""
        for room, rank in bound:
            self.live[room] = self._bound[room] = rank
        for room in ended:
            if self.live.pop(room, None) is not None and self._bound.pop(room, None) is None:
                self._ended.append(room)

    def tell_all(self) -> None:
        """Make the next message whole: the registry may have forgotten routes, or never known."""
        self._whole = True

    def take(self) -> wire.Routes | None:
        """The next message; None when there is nothing to tell."""
        told = self.live if self._whole else self._bound
        if not (self._whole or told or self._ended):
            return None
        self._number += 1
        routes = wire.Routes(
            self._worker_id,
            self._epoch,
            self._number,
            wire.pack_i64(list(told)),
            wire.pack_i32(list(told.values())),
            b"" if self._whole else wire.pack_i64(self._ended),
            self._whole,
        )
        self._bound, self._ended, self._whole = {}, [], False
        return routes


def _stale(routes: wire.Routes, owner: _Owner) -> bool:
    if routes.epoch != owner.epoch:
        return routes.epoch < owner.epoch
    # A snapshot has the number of the last message in it, and may repeat known routes.
    return routes.number < owner.number + (not routes.whole)


def _pairs(routes: wire.Routes) -> dict[int, int]:
    rooms = wire.unpack_i64(routes.rooms).tolist()
    ranks = wire.unpack_i32(routes.ranks).tolist()
    if len(rooms) != len(ranks):
        raise BadMessage(f"routes of {len(rooms)} rooms to {len(ranks)} ranks")
    if ranks and min(ranks) < 0:
        raise BadMessage(f"a route to rank {min(ranks)}, at least 0")
    return dict(zip(rooms, ranks, strict=True))
