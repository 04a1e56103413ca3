"""Lanes of the sending side: which lane a room takes, and what a room that is over still costs."""

import pytest

from tests.transfer.samples import KV, a_grant
from tests.transfer.test_connections import ManyLanes
from tests.transfer.test_outbound import (
    OneThreadSender,
    QuickLane,
    StillSender,
    queue_room,
)
from transfer import room as room_states
from transfer import wire
from transfer.backend import FirstToken, Frame, Kind, Refused


def test_a_new_room_takes_the_lane_with_the_fewest_bytes_to_send() -> None:
    sender = ManyLanes(connections=2)
    queue_room(sender, 1, 9)
    for room in (2, 3):
        queue_room(sender, room, 1)
    queue_room(sender, 4, 1)
    assert sender.spread == [[1], [2, 3, 4]]


def test_of_lanes_with_nothing_to_send_the_one_with_fewer_rooms_is_taken() -> None:
    sender = ManyLanes(connections=2)
    for room in (1, 2, 3):
        sender.finish(a_grant(room, "a", 1), FirstToken(1, 0, 4))
    sender.finish(a_grant(4, "a", 1), FirstToken(1, 0, 4))
    assert sender.spread == [[1, 3], [2, 4]]


def test_no_lane_is_opened_beyond_the_most_nor_while_one_is_idle() -> None:
    sender = ManyLanes(connections=2)
    queue_room(sender, 1, 1)
    sender.heard(sender.opened[0], Frame(Kind.ACK, 1), b"")
    queue_room(sender, 2, 1)
    assert len(sender.opened) == 1
    for room in (3, 4):
        queue_room(sender, room, 1)
    assert len(sender.opened) == 2


def test_a_lost_lane_leaves_the_others_to_their_rooms() -> None:
    sender = ManyLanes(connections=2)
    for room in (1, 2):
        queue_room(sender, room, 1)
    sender.lost(sender.opened[0], "reset")
    assert [(event.kind, event.room) for event in sender.events] == [("lost", 1)]
    sender.finish(a_grant(2, "a", 1), FirstToken(1, 0, 4))  # it follows the room's pages
    assert len(sender.opened) == 2
    assert list(sender.opened[1].rooms) == [2]


def test_a_cancel_is_not_overtaken_by_what_could_leave_at_once() -> None:
    lane = QuickLane("a")
    sender = StillSender(lane=lane)
    with lane.leaving:
        queue_room(sender, 1, 1)
    sender.cancel(1)
    queue_room(sender, 2, 1)
    assert lane.left == []
    assert sender.left() == [(Kind.CANCEL, 1), (Kind.PAGES, 2), (Kind.FINISH, 2)]


def test_a_cancel_wakes_its_lane() -> None:
    lane = QuickLane("a")
    sender = StillSender(lane=lane)
    queue_room(sender, 1, 1)
    told = lane.told
    sender.cancel(1)
    assert lane.told == told + 1


def test_a_connection_that_cannot_be_opened_beforehand_costs_nobody() -> None:
    sender = OneThreadSender()
    queue_room(sender, 1, 1)
    sender.open(a_grant(2, "b", 1))
    assert sender.events == []
    assert sender.counters["connections_not_opened"] == 1


@pytest.mark.parametrize("ending", ["acked", "nacked", "lost", "cancelled"])
def test_what_comes_late_for_a_room_that_is_over_is_dropped(ending: str) -> None:
    sender = StillSender()
    queue_room(sender, 1, 3)
    if ending == "acked":
        sender.heard(sender.lane, Frame(Kind.ACK, 1), b"")
    elif ending == "nacked":
        sender.heard(sender.lane, Frame(Kind.NACK, 1), wire.encode(Refused("stale", "old")))
    elif ending == "lost":
        sender.lost(sender.lane, "reset")
    else:
        sender.cancel(1)
    sender.left()
    queue_room(sender, 1, 3)
    assert sender.left() == []
    assert sender.in_flight_bytes == 0
    assert not sender.lane.rooms
    assert len(sender.events) == (ending != "cancelled")


def test_what_waits_for_a_refused_room_is_not_sent() -> None:
    sender = StillSender()
    queue_room(sender, 1, 3)
    sender.heard(sender.lane, Frame(Kind.NACK, 1), wire.encode(Refused("stale", "old")))
    assert sender.left() == []
    assert sender.in_flight_bytes == 0


def test_rooms_that_ended_are_remembered_up_to_a_number_the_oldest_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_states, "_MOST_ENDED", 2)
    sender = StillSender()
    for room in (1, 2, 3):
        queue_room(sender, room, 1)
        sender.heard(sender.lane, Frame(Kind.ACK, room), b"")
    for room in (2, 3):  # the sender remembers that these are over
        queue_room(sender, room, 1)
    assert not sender.lane.rooms
    queue_room(sender, 1, 1)
    assert list(sender.lane.rooms) == [1]
    assert len(sender._over) == 2


def test_a_closed_sender_opens_nothing_takes_nothing_and_says_nothing() -> None:
    sender = StillSender()
    queue_room(sender, 1, 1)
    sender.close()
    sender.lost(sender.lane, "closed")
    assert sender.events == []
    sender.open(a_grant(2, "a", 1))
    queue_room(sender, 2, 1)
    assert sender.num_opened == 1
    assert not sender.lane.rooms


def test_how_long_writing_took_is_told_of_each_pair() -> None:
    sender = StillSender()
    sender.clock.advance(50.0)
    queue_room(sender, 1, 3)
    sender.left()  # takes a second per frame
    (pair,) = sender.transfers
    assert (pair.backend, pair.peer) == ("tcp", "a")
    assert (pair.num_bytes, pair.seconds) == (3 * KV.page_bytes, 3.0)


def test_frames_are_as_long_as_their_lane_takes_them() -> None:
    sender = StillSender()
    sender.lane.max_frame_bytes = 2 * KV.page_bytes  # twice the sender's own bound
    queue_room(sender, 1, 3)
    assert sender.left() == [(Kind.PAGES, 1), (Kind.PAGES, 1), (Kind.FINISH, 1)]
