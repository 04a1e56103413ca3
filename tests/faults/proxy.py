"""A data-plane proxy that reads frames as they pass, and harms one when told to."""

import asyncio
import contextlib
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tests.faults.plan import Phase
from transfer import wire
from transfer.backend import DIGEST_BYTES, HEADER_BYTES, Frame, Kind
from transfer.handshake import Hello

_ESTABLISHED = 1  # a TCP state of the kernel
_HELD_UP_S = 1.0  # well below the silence after which a sender gives up
Harm = Literal["none", "flip", "cut", "delay", "stall"]


@dataclass
class Trap:
    """What to do at a frame: the trap springs once, at the first frame that fits.

    harm: what is done to the connection. at: where in the frame, 0 to 1.
    spring: called when the part before `at` has been sent; may name another harm for the rest.
    """

    phase: Phase
    harm: Harm = "none"
    at: float = 0.5
    lasts_s: float = 0.0  # of delay and stall
    spring: Callable[["Pair"], Harm] | None = None
    over: bool = False  # nobody waits for it any more
    sprung: asyncio.Event = field(default_factory=asyncio.Event)
    pair: "Pair | None" = None


@dataclass(frozen=True)
class Pair:
    """The two ends of a connection, and when a frame of which room passed there."""

    sender: str  # a node of prefill, named as in System
    decode: str
    room: int
    at_s: float  # monotonic


class Proxy:
    """Stands in front of a decode node's data port. decode: the node, named as in System."""

    def __init__(self, decode: str, target_port: int) -> None:
        self.decode = decode
        self.trap: Trap | None = None
        self.counts: Counter[str] = Counter()
        self.faults: list[BaseException] = []  # errors of the proxy itself
        self.last_finish: Pair | None = None
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Cancelled by `close`, which a stream's server would take for a fault, and log.
            with contextlib.suppress(asyncio.CancelledError):
                await _Passage(self, reader, writer, self._target_port).run()
        finally:
            self._tasks.discard(task)

    def caught(self, frame: Frame, sender: str) -> Trap | None:
        """The trap, if this frame from this sender springs it."""
        trap = self.trap
        if trap is None or trap.pair is not None or trap.over:
            return None
        if frame.kind is not (Kind.FINISH if trap.phase == "last_frame" else Kind.PAGES):
            return None
        trap.pair = Pair(sender, self.decode, frame.room, time.monotonic())
        return trap


class _Passage:
    """One connection through the proxy."""

    def __init__(
        self,
        proxy: Proxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        target_port: int,
    ) -> None:
        self._proxy = proxy
        self._from_sender, self._to_sender = reader, writer
        self._target_port = target_port
        self._sender = ""
        self._flows = asyncio.Event()
        self._flows.set()
        # True once decode has ended its side, or a frame was held up for long: then the sender may
        # have given up the connection, with its FIN still behind all that it sent before. Nobody
        # need notice a fault there.
        self._may_be_over = False

    async def run(self) -> None:
        try:
            opened = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            self._to_sender.close()
            return
        self._from_decode, self._to_decode = opened
        ways = [asyncio.create_task(way) for way in (self._forth(), self._back())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if ways[1].done() and not ways[1].exception():
                # Decode has sent its last, and may wait for the sender to end the connection too.
                self._may_be_over = True
                with contextlib.suppress(OSError):
                    self._to_sender.write_eof()
                await asyncio.wait(ways[:1])
        finally:
            # Whichever side ended, close the other one too.
            for way in ways:
                way.cancel()
            for end in await asyncio.gather(*ways, return_exceptions=True):
                if not isinstance(end, OSError | EOFError | asyncio.CancelledError | None):
                    self._proxy.faults.append(end)
            self._to_decode.close()
            self._to_sender.close()

    async def _back(self) -> None:
        while data := await self._from_decode.read(1 << 16):
            await self._flows.wait()
            self._to_sender.write(data)
            await self._to_sender.drain()

    async def _forth(self) -> None:
        reader = self._from_sender
        while True:
            header = await reader.readexactly(HEADER_BYTES)
            frame = Frame.unpack(header)
            rest = await reader.readexactly(frame.meta_len + frame.payload_len + DIGEST_BYTES)
            begun_s = time.monotonic()
            self._note(frame, rest)
            data = bytearray(header + rest)
            trap = None if self._may_be_over else self._proxy.caught(frame, self._sender)
            if trap is None:
                await self._send(data)
            else:
                await self._harm(trap, data)
            self._may_be_over |= time.monotonic() - begun_s > _HELD_UP_S

    def _note(self, frame: Frame, rest: bytes) -> None:
        self._proxy.counts[frame.kind.name] += 1
        if frame.kind is Kind.HELLO:
            hello = wire.decode(rest[: frame.meta_len], Hello)
            self._sender = hello.sender_id + (f".{hello.node}" if hello.node else "")
        if frame.kind is Kind.FINISH:
            decode = self._proxy.decode
            self._proxy.last_finish = Pair(self._sender, decode, frame.room, time.monotonic())

    async def _harm(self, trap: Trap, data: bytearray) -> None:
        middle = min(int(trap.at * len(data)), len(data) - 1)
        if trap.harm == "flip":
            data[middle] ^= 1 << (middle % 8)
        if trap.phase == "mid_chunk":  # after a whole frame, while the next chunk computes
            middle = len(data)
        try:
            await self._send(data[:middle])
            if _left(self._to_sender):
                raise ConnectionResetError("the sender has given this connection up")
        except (OSError, asyncio.CancelledError):
            trap.pair = None  # this connection was over already: wait for another
            raise
        if trap.spring is not None:
            assert trap.pair is not None
            trap.harm = trap.spring(trap.pair)
        trap.sprung.set()
        if trap.harm == "cut":
            _reset(self._to_decode)
            _reset(self._to_sender)
            raise ConnectionResetError("cut")
        if trap.harm == "stall":
            self._flows.clear()
            asyncio.get_running_loop().call_later(trap.lasts_s, self._flows.set)
            await self._flows.wait()
        elif trap.harm == "delay":
            await asyncio.sleep(trap.lasts_s)
        await self._send(data[middle:])

    async def _send(self, data: bytes | bytearray) -> None:
        self._to_decode.write(data)
        await self._to_decode.drain()


def _left(writer: asyncio.StreamWriter) -> bool:
    """Whether the other end has closed, although data it sent before may still be unread."""
    sock = writer.get_extra_info("socket")
    state: int = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state != _ESTABLISHED


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as if it were cut: with a reset, and without sending what is queued."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
