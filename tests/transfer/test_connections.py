"""Several connections between two ends: rooms are spread over them, and each stays on its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.contract.transfer_ends import ShmEnds, TcpEnds
from tests.transfer.samples import KV, logical_pages
from tests.transfer.test_outbound import StillLane, StillSender, queue_room
from transfer.backend import Frame, Kind
from transfer.framing import Connection
from transfer.outbound import Lane
from transfer.tcp import TcpLane, TcpReceiver, TcpSender


class ManyLanes(StillSender):
    """As StillSender, with a lane for each connection."""

    def __init__(self, connections: int) -> None:
        super().__init__(connections)
        self.opened: list[Lane] = []

    def _open_lane(self, address: str) -> Lane:
        self.opened.append(StillLane(address))
        return self.opened[-1]

    @property
    def spread(self) -> list[list[int]]:
        """Open rooms of each lane."""
        return [list(lane.rooms) for lane in self.opened]


def test_a_pair_that_has_a_room_at_a_time_keeps_to_one_connection() -> None:
    sender = ManyLanes(4)
    for room in (1, 2, 3):
        queue_room(sender, room, 1)
        sender.heard(sender.opened[0], Frame(Kind.ACK, room), b"")
    assert len(sender.opened) == 1


def test_rooms_at_a_time_open_connections_up_to_the_bound_and_no_more() -> None:
    sender = ManyLanes(2)
    for room in range(1, 6):
        queue_room(sender, room, 1)
    assert sorted(room for rooms in sender.spread for room in rooms) == [1, 2, 3, 4, 5]
    assert len(sender.opened) == 2


def test_a_room_goes_where_least_waits() -> None:
    sender = ManyLanes(2)
    for room, num_pages in ((1, 9), (2, 1), (3, 2), (4, 1), (5, 9)):
        queue_room(sender, room, num_pages)
    assert sender.spread == [[1], [2, 3, 4, 5]]
    assert [lane.queued_bytes for lane in sender.opened] == [
        9 * KV.page_bytes,
        13 * KV.page_bytes,
    ]


def test_a_lost_connection_loses_its_own_rooms_only_and_is_not_chosen_again() -> None:
    sender = ManyLanes(2)
    for room in (1, 2):
        queue_room(sender, room, 1)
    sender.lost(sender.opened[0], "gone")
    assert [(event.kind, event.room) for event in sender.events] == [("lost", 1)]
    queue_room(sender, 3, 1)
    assert sender.spread == [[], [2], [3]]


def test_a_cancel_finds_the_connection_of_its_room() -> None:
    sender = ManyLanes(2)
    for room in (1, 2):
        queue_room(sender, room, 1)
    sender.cancel(2)
    job = sender.next_job(sender.opened[1])
    assert job is not None
    assert (job.frame.kind, job.frame.room) == (Kind.CANCEL, 2)
    assert sender.spread == [[1], []]


@pytest.fixture(params=[TcpEnds, ShmEnds], ids=["tcp", "shm"])
def open_ends(request: pytest.FixtureRequest) -> Iterator[Callable[[int], TcpEnds]]:
    with ExitStack() as stack:

        def make(connections: int) -> TcpEnds:
            ends: TcpEnds = stack.enter_context(closing(request.param(connections=connections)))
            return ends

        yield make


def test_rooms_of_several_connections_arrive_bit_for_bit(
    open_ends: Callable[[int], TcpEnds],
) -> None:
    ends = open_ends(3)
    rooms = {room: logical_pages(9, seed=room) for room in range(1, 8)}
    for room in rooms:
        ends.receiver.expect(room, 1, 9)
    for room, pages in rooms.items():
        ends.send_room(room, pages)
    ends.until(lambda: len(ends.diary.finished) == len(rooms))
    for room, pages in rooms.items():
        assert (ends.diary.kv_of(room, 9, KV, 1) == pages).all()
        ends.receiver.ack(room)
        ends.receiver.forget(room)
    ends.until(lambda: len(ends.diary.events) == len(rooms))
    assert {event.kind for event in ends.diary.events} == {"acked"}
    assert sum(ends.sender.counters.values()) == 3
    (told,) = ends.sender.transfers
    assert told.num_bytes == sum(pages.nbytes for pages in rooms.values())
    assert told.seconds > 0.0


def test_a_dead_receiver_loses_every_room_of_every_connection_once(
    open_ends: Callable[[int], TcpEnds],
) -> None:
    ends = open_ends(3)
    for room in range(1, 6):
        ends.receiver.expect(room, 1, 2)
        ends.send_room(room, logical_pages(2))
    ends.until(lambda: len(ends.diary.finished) == 5)
    ends.kill_receiver()
    ends.until(lambda: len(ends.diary.events) == 5)
    assert sorted(ends.diary.kinds()) == [("lost", room) for room in range(1, 6)]


def test_a_room_takes_no_connection_that_its_peer_has_ended_though_nobody_here_noticed_yet(
    open_ends: Callable[[int], TcpEnds], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A room lost with a connection is tried again at once, and must not be lost with it twice."""
    ends = open_ends(1)
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2))
    ends.until(lambda: len(ends.diary.finished) == 1)
    assert isinstance(ends.sender, TcpSender)
    (lane,) = ends.sender._all_lanes()
    assert not lane.is_over
    noticing, read = threading.Event(), TcpLane._read

    def late(reader: TcpLane, connection: Connection) -> None:
        if reader is lane:
            noticing.wait()
        read(reader, connection)

    monkeypatch.setattr(TcpLane, "_read", late)
    assert isinstance(ends.receiver, TcpReceiver)
    try:
        for feeder in list(ends.receiver._connections):
            feeder.close()
        ends.until(lambda: lane.is_over)
        ends.receiver.expect(2, 1, 2)
        ends.send_room(2, logical_pages(2))
        ends.until(lambda: len(ends.diary.finished) == 2)
    finally:
        noticing.set()
    ends.until(lambda: ("lost", 1) in ends.diary.kinds())
    assert ends.diary.kinds() == [("lost", 1)]
