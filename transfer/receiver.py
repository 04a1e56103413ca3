"""The receiving end of every backend: takes frames from its connections, and answers them."""

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from model.config import KVSpec
from transfer import wire
from transfer.backend import (
    Finished,
    FirstToken,
    Frame,
    Kind,
    OnReceiverEvent,
    ReceiverEvent,
    Refused,
    SenderLost,
)
from transfer.errors import BadMessage, Code, FrameRefused, Refusal
from transfer.inbound import Feeder, HeadCopy, Inbound
from transfer.room import EndedRooms

log = logging.getLogger(__name__)

_FROM_SENDERS = (Kind.PAGES, Kind.FINISH, Kind.CANCEL)


def _check_kind(frame: Frame) -> None:
    if frame.kind not in _FROM_SENDERS:
        raise BadMessage(f"unexpected {frame.kind.name} frame")


class Receiver(ABC):
    """Decode's end. Its events come from threads of its own.

    A backend adds connections, as feeders.
    """

    def __init__(self, kv: KVSpec, tp_size: int, on_event: OnReceiverEvent) -> None:
        self.counters: Counter[str] = Counter()  # frames, bytes, and refusals by reason
        # How long frames may wait for their room to be expected: only where another process says
        # which rooms are, and its word may take longer than the first frame.
        self.room_wait_s = 0.0
        self._on_event = on_event
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # rooms are expected, or over
        self._inbound = Inbound(kv, tp_size)
        self._over = EndedRooms()  # for which no late frame waits; none where none may wait
        self._closed = False

    @abstractmethod
    def start(self) -> str:
        """Begin to take frames; returns the data address that goes into grants."""

    @abstractmethod
    def close(self) -> None:
        """End every connection; no events follow."""

    # --- decode's calls ---------------------------------------------------------------------------

    def expect(
        self, room: int, epoch: int, num_pages: int, shards: Sequence[int] | None = None
    ) -> None:
        """Take frames of this room from now on.

        shards: of the room's rank, those that come to this process; None: all.
        """
        with self._lock:
            self._inbound.expect(room, epoch, num_pages, shards)
            if self.room_wait_s:
                self._changed.notify_all()

    def forget(self, room: int) -> None:
        """Refuse frames of this room from now on. Unknown rooms are ignored."""
        with self._lock:
            self._inbound.forget(room)
            if self.room_wait_s:
                self._over.add(room)
                self._changed.notify_all()

    def ack(self, room: int) -> None:
        """Tell the sender that all pages arrived. Call before forget."""
        with self._lock:
            feeders = self._inbound.feeders(room)
        for feeder in feeders:
            feeder.reply(Frame(Kind.ACK, room))

    # --- the connections' calls ------------------------------------------------------------------

    def admits(self, feeder: Feeder, frame: Frame) -> bool:
        """Check a frame's header before its payload is read. False: refused, skip the payload.

        Raises BadMessage for a kind of frame that senders do not send.
        """
        _check_kind(frame)
        try:
            with self._lock:
                if self.room_wait_s:
                    self._await_room(frame.room)
                self._inbound.check(frame, feeder)
        except FrameRefused as error:
            self._refuse(feeder, frame, error)
            return False
        return True

    def take(
        self, feeder: Feeder, frame: Frame, meta: bytes, payload: np.ndarray, intact: bool
    ) -> None:
        """Check and deliver a frame. payload: u8[payload_len].

        intact: whether its digest was right. Raises BadMessage when it was not, and for a kind of
        frame that senders do not send.
        """
        if not intact:
            self.damaged()
        _check_kind(frame)
        event: ReceiverEvent | HeadCopy | None
        try:
            if frame.kind is Kind.FINISH:
                first = wire.decode(meta, FirstToken)
            with self._lock:
                if self.room_wait_s:
                    self._await_room(frame.room)
                # Even if `admits` checked it: the room may have ended while the payload came.
                self._inbound.check(frame, feeder)
                if frame.kind is Kind.PAGES:
                    event = self._inbound.pages(frame, feeder, payload)
                    self.counters["frames"] += 1
                    self.counters["bytes"] += payload.nbytes
                elif frame.kind is Kind.FINISH:
                    is_last = self._inbound.finish(frame, feeder, first.num_senders)
                    event = Finished(frame.room, first) if is_last else None
                else:
                    self._inbound.forget(frame.room)
                    event = SenderLost((frame.room,), "cancelled by the sender", Code.GONE)
        except (FrameRefused, BadMessage) as error:
            self._refuse(feeder, frame, error)
            return
        if isinstance(event, HeadCopy):
            event.make()
            with self._lock:
                event = self._inbound.copied(event)
        if event is not None:
            self._on_event(event)

    def _await_room(self, room: int) -> None:
        """Wait until the room is expected, or over, for as long as frames may (lock held)."""
        self._changed.wait_for(
            lambda: self._closed or self._inbound.knows(room) or room in self._over,
            self.room_wait_s,
        )

    def damaged(self) -> NoReturn:
        """A frame's digest is wrong: raises BadMessage, which ends the connection.

        The frame's room number may be what was damaged, and the room it was meant for would wait
        for ever; so every room of the connection is over.
        """
        self.count("refused_digest")
        raise BadMessage("digest: what came is not what was sent")

    def busy(self, feeder: Feeder) -> bool:
        """Whether this connection owes frames."""
        with self._lock:
            return self._inbound.owes(feeder)

    def left(self, feeder: Feeder, message: str) -> None:
        """A connection has ended: its unfinished rooms will get no more pages."""
        with self._lock:
            rooms = self._inbound.left(feeder)
        if rooms and not self._closed:
            self._on_event(SenderLost(rooms, message, Code.PEER_LOST))

    def count(self, what: str) -> None:
        with self._lock:
            self.counters[what] += 1

    def _refuse(self, feeder: Feeder, frame: Frame, error: FrameRefused | BadMessage) -> None:
        """Count a refusal and tell the sender, whose room is over; ours ends by its own rules."""
        reason = error.reason if isinstance(error, FrameRefused) else Refusal.MALFORMED
        if frame.kind is Kind.CANCEL and reason in (Refusal.UNKNOWN_ROOM, Refusal.ORDER):
            return  # the room is over already, which is what the sender wants
        with self._lock:
            self.counters[f"refused_{reason}"] += 1
            self._inbound.spoil(frame, feeder)
        if frame.kind is Kind.CANCEL:
            return  # nobody waits for an answer to it
        # A request that ends early leaves frames on their way: that is no error.
        level = logging.DEBUG if reason is Refusal.UNKNOWN_ROOM else logging.WARNING
        log.log(level, "frame of room %d refused: %s", frame.room, error)
        code = Code.GONE if reason is Refusal.UNKNOWN_ROOM else Code.STALE
        feeder.reply(Frame(Kind.NACK, frame.room), wire.encode(Refused(code.value, str(error))))
