"""The states of one transfer, as each side sees it.

    prefill:  QUEUED -> GRANTED -> COMPUTING -> SENDING -> DONE
    decode:   QUEUED -> RESERVED -> RECEIVING -> READY -> DECODING -> DONE

From every state but DONE a room may become FAILED; DONE and FAILED are final.
"""

import enum
from dataclasses import dataclass, field
from typing import Final

_MOST_ENDED: Final = 1 << 16


class Side(enum.Enum):
    """The role whose view of the room this is."""

    PREFILL = "prefill"
    DECODE = "decode"


class State(enum.Enum):
    """The state of a room."""

    QUEUED = "queued"
    GRANTED = "granted"  # prefill: decode has pages for it
    COMPUTING = "computing"  # prefill: its first chunk is dispatched
    SENDING = "sending"  # prefill: all is computed, pages are on their way
    RESERVED = "reserved"  # decode: slot and pages are taken
    RECEIVING = "receiving"  # decode: the first pages came, or it computes them itself
    READY = "ready"  # decode: all pages and the first token are here
    DECODING = "decoding"  # decode: the slot is in the batch
    DONE = "done"
    FAILED = "failed"


LEGAL: dict[Side, dict[State, tuple[State, ...]]] = {
    Side.PREFILL: {
        State.QUEUED: (State.GRANTED, State.FAILED),
        State.GRANTED: (State.COMPUTING, State.FAILED),
        State.COMPUTING: (State.SENDING, State.FAILED),
        State.SENDING: (State.DONE, State.FAILED),
    },
    Side.DECODE: {
        State.QUEUED: (State.RESERVED, State.FAILED),
        State.RESERVED: (State.RECEIVING, State.FAILED),
        State.RECEIVING: (State.READY, State.FAILED),
        # A request that ends with its first token never enters the batch.
        State.READY: (State.DECODING, State.DONE, State.FAILED),
        State.DECODING: (State.DONE, State.FAILED),
    },
}


@dataclass(slots=True)
class Room:
    """One attempt's transfer on one side. The caller provides all times."""

    room: int
    side: Side
    opened_s: float  # monotonic
    deadline_s: float  # monotonic
    arrival_s: float  # monotonic, when the client's request arrived: the oldest goes first
    state: State = State.QUEUED
    entered_s: dict[State, float] = field(default_factory=dict)  # monotonic

    def __post_init__(self) -> None:
        self.entered_s[State.QUEUED] = self.opened_s

    def advance(self, state: State, now_s: float) -> None:
        """Enter a state. now_s: monotonic. An illegal transition is our bug."""
        legal = LEGAL[self.side].get(self.state, ())
        assert state in legal, f"room {self.room} on {self.side.value}: {self.state} -> {state}"
        self.state = state
        self.entered_s[state] = now_s


class EndedRooms(dict[int, None]):
    """The rooms that ended last, so that what comes late for them is known as such."""

    def add(self, room: int) -> None:
        self[room] = None
        if len(self) > _MOST_ENDED:
            del self[next(iter(self))]
