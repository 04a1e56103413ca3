"""Both ends of a transfer backend, with every event recorded; the same for every backend."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from model.config import KVSpec
from tests.contract.loopback import LoopbackNetwork, LoopbackReceiver, LoopbackSender
from tests.transfer.samples import KV, PATIENCE_S, SECURITY, a_grant, bits_of, sharded
from transfer import wire
from transfer.backend import (
    Finished,
    FirstToken,
    PagesArrived,
    ReceiverEvent,
    SenderEvent,
    SenderLost,
)
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import Code
from transfer.layout import plan_heads
from transfer.nixl import NixlReceiver, NixlSender
from transfer.outbound import Sender
from transfer.receiver import Receiver
from transfer.rpc import Security
from transfer.shm import ShmReceiver, ShmSender
from transfer.slots import FRAME_BYTES
from transfer.tcp import TcpReceiver, TcpSender


class Diary:
    """Events of both ends, in the order in which they were told."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.events: list[SenderEvent] = []
        self.pages: list[tuple[int, int, list[np.ndarray]]] = []
        self.finished: list[tuple[int, FirstToken]] = []
        self.lost: list[tuple[int, ...]] = []
        self.order: list[str] = []

    def on_sender_event(self, event: SenderEvent) -> None:
        self._write(self.events, event, event.kind)

    def on_receiver_event(self, event: ReceiverEvent) -> None:
        match event:
            case PagesArrived(room, page_start, shards):
                # A copy, since keeping a view would keep the backend's memory.
                kept = [np.array(shard) for shard in shards]
                self._write(self.pages, (room, page_start, kept), "pages")
            case Finished(room, first):
                self._write(self.finished, (room, first), "finish")
            case SenderLost(rooms, message, code):
                assert message
                assert code is (Code.GONE if "cancelled" in message else Code.PEER_LOST)
                self._write(self.lost, rooms, "receiver lost")

    def _write(self, where: list[Any], what: Any, word: str) -> None:
        with self.changed:
            where.append(what)
            self.order.append(word)
            self.changed.notify_all()

    def kinds(self) -> list[tuple[str, int]]:
        return [(event.kind, event.room) for event in self.events]

    def page_idx(self, room: int) -> list[int]:
        """Pages of a room that were delivered, in order of delivery."""
        return [
            start + at
            for number, start, shards in self.pages
            if number == room
            for at in range(shards[0].shape[2])
        ]

    def kv_of(self, room: int, num_pages: int, kv: KVSpec, tp_size: int) -> np.ndarray:
        """Bits delivered to a room: [layers, planes, n, page_size, stored heads, head_dim]."""
        shape = (kv.num_layers, kv.planes, num_pages, kv.page_size, kv.num_kv_heads, kv.head_dim)
        bits = bits_of(kv)
        found = np.zeros(shape, bits)
        for number, start, shards in self.pages:
            if number == room:
                assert len(shards) == tp_size
                whole = np.concatenate([shard.view(bits) for shard in shards], axis=4)
                found[:, :, start : start + whole.shape[2]] = whole
        return found


class Ends(ABC):
    """A sender and a receiver of one backend. The caller closes them."""

    sender: Sender
    receiver: Receiver
    address: str

    def __init__(self) -> None:
        self.diary = Diary()

    @abstractmethod
    def until(self, done: Callable[[], bool]) -> None:
        """Let frames move until done() is true; AssertionError if that never happens."""

    @abstractmethod
    def settle(self) -> None:
        """Let everything sent so far arrive, and every callback about it."""

    @abstractmethod
    def kill_sender(self) -> None:
        """The sending process dies."""

    @abstractmethod
    def kill_receiver(self) -> None:
        """The receiving process dies."""

    def send_room(
        self,
        room: int,
        pages: np.ndarray,
        *,
        epoch: int = 1,
        src: tuple[int, int] = (1, 4),
        dst: tuple[int, int] = (1, 4),
        runs_of: int = 0,
        finish: bool = True,
    ) -> FirstToken:
        """Send logical pages as a prefill worker would. src, dst: (shards, stored heads).

        runs_of: pages for each call of send_pages, 0 = all.
        """
        num_pages, num_heads = pages.shape[2], pages.shape[4]
        grant = a_grant(room, self.address, num_pages, epoch, *dst)
        stored = {1: np.uint8, 2: ml_dtypes.bfloat16, 4: np.float32}[pages.itemsize]
        shards = sharded(pages, src[1], src[0], stored)
        runs = plan_heads(num_heads, *src, *dst)
        step = runs_of or num_pages
        for at in range(0, num_pages, step):
            part = [shard[:, :, at : at + step] for shard in shards]
            self.sender.send_pages(grant, at, part, runs)
        first = FirstToken(7, 0, num_pages * pages.shape[3], wire.RUNNING)
        if finish:
            self.sender.finish(grant, first)
        return first

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


class TcpEnds(Ends):
    def __init__(
        self,
        kv: KVSpec = KV,
        tp_size: int = 1,
        max_frame_bytes: int = 16 << 20,
        sender_security: Security = SECURITY,
        receiver_security: Security = SECURITY,
        stall_timeout_s: float = PATIENCE_S,
        connections: int = 1,
    ) -> None:
        super().__init__()
        diary = self.diary
        self.receiver = TcpReceiver(
            receiver_security,
            "127.0.0.1",
            0,
            kv,
            tp_size,
            diary.on_receiver_event,
            stall_timeout_s,
        )
        self.address = self.receiver.start()
        self.sender = TcpSender(
            sender_security,
            "prefill-0",
            diary.on_sender_event,
            max_frame_bytes,
            stall_timeout_s,
            connections,
        )

    def until(self, done: Callable[[], bool]) -> None:
        end_s = SYSTEM_CLOCK.monotonic_s() + PATIENCE_S
        with self.diary.changed:
            while not done():
                assert SYSTEM_CLOCK.monotonic_s() < end_s, self.diary.order
                self.diary.changed.wait(0.05)  # counters change without a callback

    def settle(self) -> None:
        """Send one more room on the same connection: it arrives after all others."""
        room = 1 << 40
        while any(known == room for known, _ in self.diary.finished):
            room += 1
        self.receiver.expect(room, 1, 1)
        grant = a_grant(room, self.address, 1)
        self.sender.finish(grant, FirstToken(0, 0, 0))
        self.until(lambda: ("nacked", room) in self.diary.kinds())
        self.receiver.forget(room)
        self.diary.events = [event for event in self.diary.events if event.room != room]

    def kill_sender(self) -> None:
        self.sender.close()

    def kill_receiver(self) -> None:
        self.receiver.close()


class ShmEnds(TcpEnds):
    """As TcpEnds, with settings of transfer.shm; staging_bytes 0 is room for a few frames."""

    def __init__(
        self,
        kv: KVSpec = KV,
        tp_size: int = 1,
        max_frame_bytes: int = 16 << 20,
        sender_security: Security = SECURITY,
        receiver_security: Security = SECURITY,
        stall_timeout_s: float = PATIENCE_S,
        staging_bytes: int = 0,
        demands: tuple[bool, bool] = (False, False),
        hosts: tuple[str | None, str | None] = (None, None),
        connections: int = 1,
    ) -> None:
        """demands, hosts: (sender's, receiver's)."""
        Ends.__init__(self)
        diary = self.diary
        self.receiver = ShmReceiver(
            receiver_security,
            "127.0.0.1",
            0,
            kv,
            tp_size,
            diary.on_receiver_event,
            stall_timeout_s,
            staging_bytes or max(4, 2 * tp_size) * FRAME_BYTES,
            demands[1],
            hosts[1],
        )
        self.address = self.receiver.start()
        self.sender = ShmSender(
            sender_security,
            "prefill-0",
            diary.on_sender_event,
            max_frame_bytes,
            stall_timeout_s,
            demands[0],
            hosts[0],
            connections,
        )


class NixlEnds(TcpEnds):
    """As TcpEnds, with staging_bytes of transfer.nixl; 0 is room for a few frames."""

    def __init__(
        self,
        kv: KVSpec = KV,
        tp_size: int = 1,
        max_frame_bytes: int = 16 << 20,
        sender_security: Security = SECURITY,
        receiver_security: Security = SECURITY,
        stall_timeout_s: float = PATIENCE_S,
        staging_bytes: int = 0,
        connections: int = 1,
    ) -> None:
        Ends.__init__(self)
        diary = self.diary
        self.receiver = NixlReceiver(
            receiver_security,
            "127.0.0.1",
            0,
            kv,
            tp_size,
            diary.on_receiver_event,
            stall_timeout_s,
            staging_bytes or max(4, 2 * tp_size) * FRAME_BYTES,
        )
        self.address = self.receiver.start()
        self.sender = NixlSender(
            sender_security,
            "prefill-0",
            diary.on_sender_event,
            max_frame_bytes,
            stall_timeout_s,
            connections,
        )


class LoopbackEnds(Ends):
    def __init__(
        self,
        kv: KVSpec = KV,
        tp_size: int = 1,
        max_frame_bytes: int = 16 << 20,
        sender_security: Security = SECURITY,
        receiver_security: Security = SECURITY,
        network: LoopbackNetwork | None = None,
    ) -> None:
        """network: of other ends, which these can reach."""
        super().__init__()
        diary = self.diary
        self.network = network or LoopbackNetwork()
        self.receiver = LoopbackReceiver(
            self.network,
            receiver_security,
            kv,
            tp_size,
            diary.on_receiver_event,
        )
        self.address = self.receiver.start()
        self.sender = LoopbackSender(
            self.network, sender_security, diary.on_sender_event, max_frame_bytes
        )

    def until(self, done: Callable[[], bool]) -> None:
        self.network.pump_all()
        assert done(), self.diary.order

    def settle(self) -> None:
        self.network.pump_all()

    def kill_sender(self) -> None:
        self.sender.close()

    def kill_receiver(self) -> None:
        self.receiver.close()


Open = Callable[..., Ends]  # makes ends of one backend, which its fixture closes
