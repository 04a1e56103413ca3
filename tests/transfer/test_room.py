"""A room's states: only legal moves, and a bounded table that remembers what has expired."""

import itertools

import pytest

from transfer.room import LEGAL, Room, RoomTable, Side, State

PREFILL_PATH = [State.GRANTED, State.COMPUTING, State.SENDING, State.DONE]
DECODE_PATH = [State.RESERVED, State.RECEIVING, State.READY, State.DECODING, State.DONE]


def a_room(side: Side = Side.DECODE, room: int = 7, deadline_s: float = 100.0) -> Room:
    return Room(room, side, opened_s=10.0, deadline_s=deadline_s, arrival_s=9.0)


@pytest.mark.parametrize(
    ("side", "path"), [(Side.PREFILL, PREFILL_PATH), (Side.DECODE, DECODE_PATH)]
)
def test_a_good_room_walks_its_path_and_remembers_when(side: Side, path: list[State]) -> None:
    room = a_room(side)
    for at, state in enumerate(path):
        room.advance(state, 11.0 + at)
    assert room.state.is_final
    assert room.entered_s == {
        State.QUEUED: 10.0,
        **{state: 11.0 + at for at, state in enumerate(path)},
    }


@pytest.mark.parametrize(
    ("side", "path"), [(Side.PREFILL, PREFILL_PATH), (Side.DECODE, DECODE_PATH)]
)
def test_a_room_can_fail_from_every_state_but_the_last(side: Side, path: list[State]) -> None:
    for length in range(len(path)):
        room = a_room(side)
        for state in path[:length]:
            room.advance(state, 11.0)
        room.advance(State.FAILED, 12.0)
        assert room.state is State.FAILED


@pytest.mark.parametrize("side", list(Side))
def test_every_move_outside_the_table_is_caught_and_changes_nothing(side: Side) -> None:
    for state, target in itertools.product(State, State):
        if target in LEGAL[side].get(state, ()):
            continue
        room = a_room(side)
        room.state = state
        with pytest.raises(AssertionError, match=str(target)):
            room.advance(target, 11.0)
        assert room.state is state
        assert target is State.QUEUED or target not in room.entered_s


@pytest.mark.parametrize("side", list(Side))
def test_final_states_lead_nowhere(side: Side) -> None:
    assert State.DONE not in LEGAL[side]
    assert State.FAILED not in LEGAL[side]


def test_a_full_table_refuses_and_takes_again_after_a_removal() -> None:
    table = RoomTable(max_rooms=2)
    first, second, third = (a_room(room=number) for number in (1, 2, 3))
    assert table.add(first)
    assert table.add(second)
    assert not table.add(third)
    assert table.get(3) is None
    first.advance(State.FAILED, 11.0)
    table.remove(1)
    assert table.add(third)
    assert len(table) == 2
    assert table.get(3) is third


def test_a_room_stands_in_the_table_once() -> None:
    table = RoomTable(max_rooms=2)
    table.add(a_room())
    with pytest.raises(AssertionError, match="twice"):
        table.add(a_room())


def test_a_living_room_cannot_be_removed() -> None:
    table = RoomTable(max_rooms=2)
    table.add(a_room())
    with pytest.raises(AssertionError, match="removed in"):
        table.remove(7)


def test_expired_names_the_rooms_whose_deadline_has_passed() -> None:
    table = RoomTable(max_rooms=3)
    rooms = [a_room(room=number, deadline_s=20.0 + number) for number in (1, 2, 3)]
    for room in rooms:
        table.add(room)
    assert table.expired(21.0) == ()
    assert table.expired(22.5) == tuple(rooms[:2])
