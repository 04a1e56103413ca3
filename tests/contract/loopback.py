"""A transfer backend for tests: both ends in one process, driven by hand, with injected faults.

Frames are bytes here too and pass the same checks as on a socket. Nothing moves until `pump`,
which is one tick: it delivers in order what senders and receivers have queued, except for what
a fault drops, delays or changes. There are no threads and no clock: a run repeats exactly.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from model.config import KVSpec
from transfer.backend import (
    DIGEST_BYTES,
    HEADER_BYTES,
    Frame,
    OnReceiverEvent,
    OnSenderEvent,
    Source,
    digest_at_once,
    whole_frame,
)
from transfer.errors import BadMessage
from transfer.outbound import Lane, Sender, segments
from transfer.receiver import Receiver
from transfer.rpc import Security

_MAX_TICKS = 10_000  # of one pump_all


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one frame on its way. change: edits the frame's bytes in place."""

    drop: bool = False
    delay_ticks: int = 0
    change: Callable[[bytearray], None] | None = None


NO_FAULT = Fault()


@dataclass(slots=True)
class _Packet:
    link: "_Link"
    to_receiver: bool
    data: bytearray
    ticks: int


class LoopbackNetwork:
    """Everything on its way between the senders and receivers that it connects."""

    def __init__(self) -> None:
        # Called with every frame, in the order in which they are sent.
        self.fault: Callable[[Frame], Fault] | None = None
        self._receivers: dict[str, LoopbackReceiver] = {}
        self._links: list[_Link] = []
        self._packets: list[_Packet] = []
        self._num_addresses = 0

    def pump(self) -> int:
        """One tick. Returns the number of frames that were sent, delivered or held back."""
        for link in list(self._links):
            link.flush()
        packets, self._packets = self._packets, []
        for packet in packets:
            if packet.ticks:
                packet.ticks -= 1
                self._packets.append(packet)
            else:
                packet.link.deliver(packet)
        return len(packets)

    def pump_all(self) -> None:
        """Tick until nothing moves. Raises RuntimeError when that takes more than _MAX_TICKS."""
        for _ in range(_MAX_TICKS):
            if not self.pump():
                return
        raise RuntimeError(f"frames still move after {_MAX_TICKS} ticks")

    def cut(self, address: str, message: str = "the connection was cut") -> None:
        """Break every connection to this receiver; a later call of a sender makes a new one."""
        for link in [link for link in self._links if link.address == address]:
            link.end(message)

    # --- both ends ------------------------------------------------------------------------------

    def attach(self, receiver: "LoopbackReceiver") -> str:
        self._num_addresses += 1
        address = f"loopback://{self._num_addresses}"
        self._receivers[address] = receiver
        return address

    def detach(self, receiver: "LoopbackReceiver") -> None:
        for address in [name for name, known in self._receivers.items() if known is receiver]:
            del self._receivers[address]
            self.cut(address, "connection closed by the peer")

    def connect(self, sender: "LoopbackSender", address: str) -> "_Link":
        link = _Link(self, sender, address, self._receivers.get(address))
        self._links.append(link)
        return link

    def put(self, link: "_Link", to_receiver: bool, frame: Frame, data: bytearray) -> None:
        fault = self.fault(frame) if self.fault is not None else NO_FAULT
        if fault.drop:
            return
        if fault.change is not None:
            fault.change(data)
        self._packets.append(_Packet(link, to_receiver, data, fault.delay_ticks))

    def remove(self, link: "_Link") -> None:
        self._links.remove(link)
        self._packets = [packet for packet in self._packets if packet.link is not link]


class _Link(Lane):
    """One connection: the sender's lane and the receiver's feeder in one."""

    def __init__(
        self,
        network: LoopbackNetwork,
        sender: "LoopbackSender",
        address: str,
        receiver: "LoopbackReceiver | None",
    ) -> None:
        super().__init__(address)
        self._network = network
        self._sender = sender
        self._receiver = receiver
        self.source = Source("prefill-0", sender.node)
        self._ended = False

    def wake(self) -> None:
        """Do nothing: jobs wait for the next tick."""

    def close(self) -> None:
        self.end("connection closed by the peer")

    def reply(self, frame: Frame, meta: bytes = b"") -> None:
        if not self._ended:
            self._network.put(self, False, frame, whole_frame(frame, meta))

    def flush(self) -> None:
        """Send what is queued."""
        if self._receiver is None:
            self.end(f"{self.address}: nobody listens")
            return
        mine, theirs = self._sender.security.token, self._receiver.security.token
        if not hmac.compare_digest(mine.encode(), theirs.encode()):
            self._receiver.count("connections_refused")
            self.end(f"{self.address}: the receiver does not know the cluster token")
            return
        while not self._ended and (job := self._sender.next_job(self)) is not None:
            data = whole_frame(job.frame, job.meta, segments(job.payload))
            self._sender.sent(self, job, self._sender.clock.monotonic_s())
            self._network.put(self, True, job.frame, data)

    def deliver(self, packet: _Packet) -> None:
        """Hand one frame to its end; a frame that cannot be read ends the connection."""
        if self._ended:
            return
        try:
            frame, meta, payload, intact = _parse(packet.data)
            if not packet.to_receiver:
                if not intact:
                    raise BadMessage(f"{frame.kind.name} with a wrong digest")
                self._sender.heard(self, frame, meta)
            elif self._receiver is not None and (self._receiver.admits(self, frame) or not intact):
                self._receiver.take(self, frame, meta, payload, intact)
        except BadMessage as error:
            if packet.to_receiver and self._receiver is not None:
                self._receiver.count("connections_refused")
            self.end(str(error))

    def end(self, message: str) -> None:
        """Both ends learn that the connection is gone."""
        if self._ended:
            return
        self._ended = True
        self._network.remove(self)
        if self._receiver is not None:
            self._receiver.left(self, message)
        self._sender.lost(self, message)


class LoopbackSender(Sender):
    """Prefill's end, see transfer/outbound.py."""

    def __init__(
        self,
        network: LoopbackNetwork,
        security: Security,
        on_event: OnSenderEvent,
        max_frame_bytes: int = 16 << 20,
    ) -> None:
        super().__init__(on_event, max_frame_bytes)
        self.security = security
        self._network = network

    def _open_lane(self, address: str) -> Lane:
        return self._network.connect(self, address)


class LoopbackReceiver(Receiver):
    """Decode's end, see transfer/receiver.py."""

    def __init__(
        self,
        network: LoopbackNetwork,
        security: Security,
        kv: KVSpec,
        tp_size: int,
        on_event: OnReceiverEvent,
    ) -> None:
        super().__init__(kv, tp_size, on_event)
        self.security = security
        self._network = network

    def start(self) -> str:
        return self._network.attach(self)

    def close(self) -> None:
        self._closed = True
        self._network.detach(self)


def _parse(data: bytearray) -> tuple[Frame, bytes, np.ndarray, bool]:
    """(header, meta, payload u8[n], whether the digest is right). Raises BadMessage."""
    header = bytes(data[:HEADER_BYTES])
    frame = Frame.unpack(header)
    end = HEADER_BYTES + frame.meta_len + frame.payload_len
    if len(data) != end + DIGEST_BYTES:
        raise BadMessage(f"a frame of {end + DIGEST_BYTES} bytes came as {len(data)}")
    meta = bytes(data[HEADER_BYTES : HEADER_BYTES + frame.meta_len])
    payload = np.frombuffer(data, np.uint8, frame.payload_len, HEADER_BYTES + frame.meta_len)
    digest = digest_at_once(header + meta, memoryview(payload))
    return frame, meta, payload, digest == bytes(data[end:])
