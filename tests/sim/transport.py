"""The network of a simulation: delays, order, broken connections, and the data plane on it.

A channel is one direction of one connection: its messages keep their order, and those under way
are lost when it breaks. Messages on different channels overtake each other at random. The data
plane is a backend like any other: both ends have the real bookkeeping (transfer/receiver,
transfer/outbound); only sockets and threads are missing.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec
import numpy as np

from model.config import KVSpec
from transfer.backend import Frame, Kind, OnReceiverEvent, OnSenderEvent, Source
from transfer.errors import BadMessage
from transfer.outbound import Job, Lane, Sender, segments
from transfer.receiver import Receiver

Action = Callable[[], object]

LONGEST_DELAY = 40  # ticks; every message takes less


def delay(rng: Random) -> int:
    """Ticks that a message takes; sometimes many."""
    return rng.randrange(LONGEST_DELAY) if rng.random() < 0.05 else rng.randrange(3)


class Net:
    """Everything that is under way, by the tick at which it arrives."""

    def __init__(self, rng: Random, stats: Counter[str]) -> None:
        self.rng = rng
        self.stats = stats
        self.tick = 0
        self._due: list[tuple[int, str, int, Action]] = []
        self._number = 0

    def after(self, ticks: int, action: Action, key: str = "") -> None:
        self.at(self.tick + ticks, action, key)

    def at(self, tick: int, action: Action, key: str = "") -> None:
        """What is due at one tick is done in order of key, then as it was given."""
        self._number += 1
        heapq.heappush(self._due, (tick, key, self._number, action))

    def delay(self) -> int:
        return delay(self.rng)

    def deliver(self) -> None:
        """Advance by one tick, and do what is due."""
        self.tick += 1
        while self._due and self._due[0][0] <= self.tick:
            heapq.heappop(self._due)[3]()

    @property
    def idle(self) -> bool:
        return not self._due


class Channel:
    """One direction of a connection."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._last = 0
        self.open = True

    def send(self, action: Action) -> None:
        self._last = max(self._last, self._net.tick + self._net.delay())
        self._net.at(self._last, lambda: self._arrive(action))

    def close(self) -> None:
        self.open = False

    def _arrive(self, action: Action) -> None:
        if self.open:
            action()


class Fabric:
    """The data plane: who listens at which address, and the links between them."""

    def __init__(self, net: Net, corrupt: float) -> None:
        self.net = net
        self.corrupt = corrupt
        self.receivers: dict[str, SimReceiver] = {}
        self.links: list[Link] = []

    def break_one(self) -> None:
        """Break a random connection."""
        if self.links:
            self.net.stats["data_links_broken"] += 1
            self.net.rng.choice(self.links).break_("reset")


class Link(Lane):
    """One data connection: the sender's lane, and the feeder of the receiver's rooms."""

    def __init__(self, fabric: Fabric, sender: "SimSender", address: str) -> None:
        super().__init__(address)
        self._fabric = fabric
        self._net = fabric.net
        self._sender = sender
        self._forward = Channel(fabric.net)
        self._back = Channel(fabric.net)
        self._pumping = False
        self.source = Source("prefill")
        self.receiver = fabric.receivers.get(address)
        fabric.net.stats["data_links"] += 1
        fabric.links.append(self)
        if self.receiver is None:
            fabric.net.after(fabric.net.delay(), lambda: self.break_("connection refused"))

    # --- the sender's end -------------------------------------------------------------------------

    def wake(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._net.after(self._net.delay(), self._pump)

    def close(self) -> None:
        self.break_("closed")

    def _pump(self) -> None:
        """Send some of what is queued; the rest may still be cancelled."""
        self._pumping = False
        if not self._forward.open:
            return
        for _ in range(self._net.rng.randrange(1, 8)):
            job = self._sender.next_job(self)
            if job is None:
                return
            self._send(job)
            self._sender.sent(self, job, self._sender.clock.monotonic_s())
        self.wake()

    def _send(self, job: Job) -> None:
        pieces = segments(job.payload)
        payload = np.frombuffer(b"".join(pieces), np.uint8).copy()
        intact = self._net.rng.random() >= self._fabric.corrupt
        if not intact and len(payload):
            payload[self._net.rng.randrange(len(payload))] ^= 1
        frame = msgspec.structs.replace(job.frame, meta_len=len(job.meta), payload_len=len(payload))
        self._forward.send(lambda: self._arrive(frame, job.meta, payload, intact))

    # --- the receiver's end -----------------------------------------------------------------------

    def _arrive(self, frame: Frame, meta: bytes, payload: np.ndarray, intact: bool) -> None:
        receiver = self.receiver
        if receiver is None or not (receiver.admits(self, frame) or not intact):
            return
        try:
            receiver.take(self, frame, meta, payload, intact)
        except BadMessage as error:
            self.break_(str(error))

    def reply(self, frame: Frame, meta: bytes = b"") -> None:
        """See transfer.inbound.Feeder."""
        self._net.stats[f"replies_{frame.kind.name}"] += frame.kind in (Kind.ACK, Kind.NACK)
        self._back.send(lambda: self._sender.heard(self, frame, meta))

    def break_(self, message: str) -> None:
        """Both ends notice, each after a while; nothing more arrives."""
        if not self._forward.open:
            return
        self._forward.close()
        self._back.close()
        self._fabric.links.remove(self)
        self._net.after(self._net.delay(), lambda: self._sender.lost(self, message))
        if self.receiver is not None:
            receiver = self.receiver
            self._net.after(self._net.delay(), lambda: receiver.left(self, message))


class SimSender(Sender):
    """Prefill's end."""

    def __init__(self, fabric: Fabric, on_event: OnSenderEvent, max_frame_bytes: int) -> None:
        super().__init__(on_event, max_frame_bytes)
        self._fabric = fabric

    def _open_lane(self, address: str) -> Lane:
        return Link(self._fabric, self, address)

    @property
    def open_rooms(self) -> list[int]:
        """Rooms still waiting for their one event."""
        return [room for lane in self._all_lanes() for room in lane.rooms]


class SimReceiver(Receiver):
    """Decode's end."""

    def __init__(
        self,
        fabric: Fabric,
        address: str,
        kv: KVSpec,
        tp_size: int,
        on_event: OnReceiverEvent,
    ) -> None:
        super().__init__(kv, tp_size, on_event)
        self._fabric = fabric
        self._address = address

    def start(self) -> str:
        self._fabric.receivers[self._address] = self
        return self._address

    def close(self) -> None:
        """The process is gone, and its connections with it."""
        self._closed = True
        if self._fabric.receivers.get(self._address) is self:
            del self._fabric.receivers[self._address]
        for link in [link for link in self._fabric.links if link.receiver is self]:
            link.break_("decode died")

    @property
    def expected(self) -> set[int]:
        """Rooms whose frames would be accepted."""
        return set(self._inbound._rooms)
