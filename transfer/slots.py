"""The ends of a connection whose pages lie in the receiver's memory: PAGES names a slot.

A frame's header, meta and digest travel on the connection, its payload does not. See
transfer/staging.py for who owns which slot, and transfer/shm.py and transfer/nixl.py for how a
payload gets there.
"""

import logging

import numpy as np

from transfer import wire
from transfer.backend import Frame, Kind, without_payload
from transfer.framing import Connection, Incoming
from transfer.outbound import Job
from transfer.staging import Credit, FillableSlots, InSlot, LentSlots
from transfer.tcp import TcpFeeder, TcpLane

log = logging.getLogger(__name__)

# The size of frames and slots, unless one page has more: small enough that copying one frame
# overlaps reading the one before it, large enough that the cost per frame hardly shows.
FRAME_BYTES = 4 << 20


class SlotLane(TcpLane):
    """The sender's end; it sends pages by TCP unless it has slots."""

    elsewhere = ""  # the name of how pages travel with slots
    in_one_memory = True  # both ends share memory: a sampled digest is enough
    writes_at_once = True  # writing into a slot does not wait
    slots: FillableSlots | None = None

    @property
    def way(self) -> str:
        return "tcp" if self.slots is None else self.elsewhere

    @property
    def takes_pages(self) -> bool:
        return self.slots is None or self.slots.num_free > 0

    def send(self, connection: Connection, job: Job) -> None:
        if self.slots is None or job.payload is None:
            super().send(connection, job)
            return
        _, data = self._in_slot(self.slots, job, job.payload)
        connection.send_whole(data)

    def try_send(self, job: Job) -> bool:
        connection = self._connection
        if connection is None:
            return False
        slots = self.slots  # read after _connection: they are set before it is
        if slots is None or job.payload is None:
            return super().try_send(job)
        if not self.writes_at_once or not slots.fits(job.num_bytes):
            return False
        slot, data = self._in_slot(slots, job, job.payload)
        is_sent = connection.try_send(data)
        if not is_sent:
            slots.keep(slot)
        return is_sent

    def _in_slot(self, slots: FillableSlots, job: Job, payload: np.ndarray) -> tuple[int, bytes]:
        """Write a payload into a slot. Returns the slot, and the frame that names it."""
        slot, written = slots.write(payload)
        meta = wire.encode(InSlot(slot))
        return slot, without_payload(job.frame, meta, written, self.in_one_memory)

    def heard(self, frame: Frame, meta: bytes) -> None:
        if frame.kind is Kind.CREDIT and self.slots is not None:
            self.slots.take_back(wire.decode(meta, Credit))
        else:
            super().heard(frame, meta)

    def ended(self) -> None:
        with self.leaving:
            if self.slots is not None:
                self.slots.close()
            self.slots = None


class SlotFeeder(TcpFeeder):
    """The receiver's end, with the memory lent to its sender."""

    slots: LentSlots | None = None
    in_one_memory = True  # as SlotLane's

    def lent(self, way: str) -> None:
        """The sender has been told of the slots."""
        assert self.slots is not None
        self.in_use = True
        self.receiver.count(f"connections_{way}")
        num_bytes = self.slots.shape.num_bytes
        log.info("pages from %s travel by %s, %d bytes", self.name, way, num_bytes)

    def take(self, connection: Connection, incoming: Incoming) -> None:
        frame = incoming.frame
        if frame.kind is not Kind.PAGES:
            super().take(connection, incoming)
            return
        assert self.slots is not None
        payload = self.slots.take(wire.decode(incoming.meta, InSlot).slot, frame.payload_len)
        intact = connection.receive_elsewhere(incoming, memoryview(payload), self.in_one_memory)
        self.receiver.take(self, frame, incoming.meta, payload, intact)

    def before_waiting(self, connection: Connection) -> None:
        while self.slots is not None and (credit := self.slots.credit()) is not None:
            connection.send(Frame(Kind.CREDIT), wire.encode(credit))

    def ended(self) -> None:
        if self.slots is not None:
            self.slots.close()
