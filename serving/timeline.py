"""Records what happened to the latest requests, and when; kept small and written only rarely.

Nothing here is done per token. All times are monotonic seconds of this process. Workers report
offsets from when they received a submit (wire.LegRecord); these are read as if the submit had
arrived when it was sent.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from serving.arrival import Arrival
from serving.protocol import Request
from serving.router import Burden, Pair
from transfer import wire
from transfer.clock import Clock
from transfer.errors import BadMessage

_CHUNK_BYTES = 5 * 8  # of wire.LegRecord.chunks
MAX_ATTEMPTS = 32  # kept of one choice: the first, and the latest others


class Writes(Protocol):
    """What counts the writes of a streamed answer to its client."""

    num_writes: int


@dataclass(slots=True)
class Leg:
    """One worker's part of an attempt. None: not yet, or never."""

    worker_id: str
    sent_s: float | None = None  # when the call with the submit began
    answered_s: float | None = None
    record: wire.LegRecord | None = None


@dataclass(slots=True)
class Attempt:
    """One room: both legs at one pair of workers."""

    room: int
    began_s: float
    considered: dict[wire.Role, dict[str, Burden]]
    num_uncached: int  # tokens that were expected to be computed
    legs: dict[wire.Role, Leg]
    left_s: float | None = None
    reason: str = ""  # why the attempt was given up: a code, or preempted
    message: str = ""


@dataclass(slots=True, eq=False)
class ChoiceTimeline:
    """One generation."""

    index: int
    request_id: str
    num_prompt_tokens: int
    attempts: list[Attempt] = field(default_factory=list)
    num_attempts: int = 0
    first_token_s: float | None = None  # at this process
    num_tokens: int = 0  # set when it ends
    ended_s: float | None = None
    ending: str = ""  # finish reason, or error
    error: tuple[str, str] | None = None  # code, message


@dataclass(slots=True, eq=False)
class RequestTimeline:
    """One HTTP request with all of its choices."""

    request_id: str
    arrival_unix_s: float
    arrival_s: float
    streamed: bool
    num_prompt_tokens: int = 0  # each prompt once, however many choices it has
    choices: list[ChoiceTimeline] = field(default_factory=list)
    admitted_s: float | None = None
    writes: Writes | None = None  # while the answer is being written
    first_write_s: float | None = None
    num_writes: int = 0
    ended_s: float | None = None
    error: tuple[str, str] | None = None  # why it was not admitted: code, message

    def written(self, now_s: Callable[[], float]) -> None:
        """The first event is being sent."""
        self.first_write_s = now_s()

    @property
    def all_writes(self) -> int:
        """Writes to the client so far."""
        return self.num_writes if self.writes is None else self.writes.num_writes


class Timelines:
    """This process's running requests, and those that ended last. Used on the event loop.

    Ended requests are kept up to `most` choices; running ones are bounded by admission.
    """

    def __init__(self, most: int, policies: dict[wire.Role, str], clock: Clock) -> None:
        """most: 0 records nothing. policies: those by which each role's worker is picked."""
        self.policies = policies
        self._most = most
        self._clock = clock
        self.on_over: Callable[[RequestTimeline], None] | None = None
        self._over: deque[RequestTimeline] = deque()  # the oldest first
        self._by_id: dict[str, list[RequestTimeline]] = {}  # those kept, the latest last
        self._rooms: dict[int, Attempt] = {}  # of all requests kept
        self._num_choices = 0  # of ended requests

    def open(self, asked: Request, arrival: Arrival) -> RequestTimeline | None:
        """A request came in. None when nothing is to be recorded."""
        if not self._most:
            return None
        request = RequestTimeline(
            asked.request_id, arrival.unix_s, arrival.monotonic_s, asked.stream
        )
        prompts = {id(ask.prompt): len(ask.prompt.ids) for ask in asked.choices}
        request.num_prompt_tokens = sum(prompts.values())
        request.choices = [
            ChoiceTimeline(ask.index, ask.request_id, len(ask.prompt.ids)) for ask in asked.choices
        ]
        for name in _names(request):
            self._by_id.setdefault(name, []).append(request)
        return request

    def find(self, request_id: str) -> RequestTimeline | None:
        """The latest request with that id, its own or that of a prompt in its batch."""
        found = self._by_id.get(request_id)
        return found[-1] if found else None

    def close(self, request: RequestTimeline) -> None:
        """The request ended: its answer was sent, or nobody waits for it any more."""
        request.ended_s = self._clock.monotonic_s()
        request.num_writes, request.writes = request.all_writes, None
        self._over.append(request)
        self._num_choices += len(request.choices)
        while self._num_choices > self._most and len(self._over) > 1:
            self._drop(self._over.popleft())
        if self.on_over is not None:
            self.on_over(request)

    def now_s(self) -> float:
        return self._clock.monotonic_s()

    # --- attempts -------------------------------------------------------------------------------

    def began(self, choice: ChoiceTimeline | None, room: int, pair: Pair) -> None:
        """The choice has a room: a new attempt begins."""
        if choice is None:
            return
        legs: dict[wire.Role, Leg] = {"decode": Leg(pair.decode.info.worker_id)}
        if not pair.is_local:
            legs["prefill"] = Leg(pair.prefill.info.worker_id)
        now_s = self._clock.monotonic_s()
        attempt = Attempt(room, now_s, pair.considered, pair.num_uncached, legs)
        choice.num_attempts += 1
        if len(choice.attempts) == MAX_ATTEMPTS:
            del self._rooms[choice.attempts.pop(1).room]
        choice.attempts.append(attempt)
        self._rooms[room] = attempt

    def left(self, choice: ChoiceTimeline | None, reason: str, message: str = "") -> None:
        """The choice's room was given up; it goes on in another, or ends."""
        if choice is not None and choice.attempts:
            attempt = choice.attempts[-1]
            attempt.left_s = self._clock.monotonic_s()
            attempt.reason, attempt.message = reason, message

    def sent(self, role: wire.Role, rooms: Iterable[int]) -> None:
        """The call with the submits of these rooms begins."""
        now_s = self._clock.monotonic_s()
        for room in rooms:
            if (leg := self._leg(room, role)) is not None:
                leg.sent_s = now_s

    def answered(self, role: wire.Role, rooms: Iterable[int]) -> None:
        """The call with the submits of these rooms was answered."""
        now_s = self._clock.monotonic_s()
        for room in rooms:
            if (leg := self._leg(room, role)) is not None:
                leg.answered_s = now_s

    def over(self, role: wire.Role, records: Iterable[wire.LegRecord]) -> None:
        """Legs have ended at their worker. Raises BadMessage for a record that cannot be read."""
        for record in records:
            if len(record.chunks) % _CHUNK_BYTES:
                raise BadMessage(f"{len(record.chunks)} bytes of chunks of {_CHUNK_BYTES} each")
            if (leg := self._leg(record.room, role)) is not None:
                leg.record = record

    def _leg(self, room: int, role: wire.Role) -> Leg | None:
        """The room's leg of that role; None if the room is not kept or has no such leg."""
        attempt = self._rooms.get(room)
        return None if attempt is None else attempt.legs.get(role)

    def ended(
        self,
        choice: ChoiceTimeline | None,
        ending: str,
        num_tokens: int,
        error: tuple[str, str] | None,
    ) -> None:
        """The generation ended. error: code and message, if it failed."""
        if choice is not None:
            choice.ended_s = self._clock.monotonic_s()
            choice.ending = ending
            choice.num_tokens = num_tokens
            choice.error = error

    def _drop(self, request: RequestTimeline) -> None:
        self._num_choices -= len(request.choices)
        for name in _names(request):
            self._by_id[name].remove(request)
            if not self._by_id[name]:
                del self._by_id[name]
        for choice in request.choices:
            for attempt in choice.attempts:
                del self._rooms[attempt.room]


def _names(request: RequestTimeline) -> set[str]:
    return {request.request_id, *(choice.request_id for choice in request.choices)}
