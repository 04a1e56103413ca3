"""A room's states: only legal moves, each with its time."""

import itertools

import pytest

from transfer.room import LEGAL, Room, Side, State

PREFILL_PATH = [State.GRANTED, State.COMPUTING, State.SENDING, State.DONE]
DECODE_PATH = [State.RESERVED, State.RECEIVING, State.READY, State.DECODING, State.DONE]


def a_room(side: Side) -> Room:
    return Room(7, side, opened_s=10.0, deadline_s=100.0, arrival_s=9.0)


@pytest.mark.parametrize(
    ("side", "path"), [(Side.PREFILL, PREFILL_PATH), (Side.DECODE, DECODE_PATH)]
)
def test_a_good_room_walks_its_path_and_remembers_when(side: Side, path: list[State]) -> None:
    room = a_room(side)
    for at, state in enumerate(path):
        room.advance(state, 11.0 + at)
    assert room.state is State.DONE
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
