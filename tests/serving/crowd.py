"""Workers without a model that keep a ledger of rooms, and clients that read, stop, leave or stall.

Both ends are in the test's process, on its loop; between them is a real API process. Token k of
the stream with number s is as bench/frontend_plan has it, so that each stream's text tells it from
its neighbours and a token that is lost, doubled or out of place shows.
"""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from bench.frontend_engine import Workers
from bench.frontend_plan import text_of, token_at, tokens_of
from tests.fakes import SECURITY
from tests.serving.commands import MODEL
from transfer import wire
from transfer.emit import Rows

IDS, TEXTS = tokens_of(MODEL)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_NARROW_BYTES = 4096  # receive buffer of a client that will stop reading
_NARROW_SEGMENT_BYTES = 512
_LONG_TAIL = "\N{SHIP}" * 240

# What a client does after a few events: read on, leave by FIN or by RST, have itself aborted,
# stop reading for some steps, or for ever.
Manner = Literal["reads", "fin", "rst", "aborted", "pauses", "stalls"]


def rid_of(stream: int, is_long: bool = False) -> str:
    """The stream's request id. is_long: makes each event, which carries the id, large."""
    return f"s-{stream:06d}-" + (_LONG_TAIL if is_long else "")


def stream_of(rid: str) -> int:
    return int(rid.split("-")[1])


@dataclass
class Room:
    """A stream at decode."""

    stream: int
    num_tokens: int
    next_idx: int = 1


class Crowd(Workers):
    """Both workers: first tokens leave as requests come, the others when a test says so."""

    def __init__(self) -> None:
        super().__init__(SECURITY, IDS)
        self.held_back = False  # no first token leaves
        self.seen: dict[str, float] = {}  # by request id: age when its Submit left for prefill
        self.address = ""
        self._running: dict[int, Room] = {}
        self._held: list[wire.Submit] = []

    @property
    def rooms(self) -> int:
        """Rooms held at both roles."""
        return len(self._prefill.rooms) + len(self._decode.rooms)

    async def start(self) -> dict[str, Any]:
        told = await super().start()
        self.address = told["registry"]
        return told

    async def stop(self) -> None:
        for lease in self._leases:
            lease.cancel()
        await asyncio.gather(*self._leases, return_exceptions=True)
        for server in (self._prefill, self._decode, self._registry):
            await server.stop()

    def submitted(self, role: wire.Role, submits: Sequence[wire.Submit]) -> None:
        if role == "decode":
            self._api_id = submits[0].api_id
            for submit in submits:
                num_tokens = submit.sampling.max_new_tokens
                if num_tokens > 1:
                    self._running[submit.room] = Room(stream_of(submit.request_id), num_tokens)
            return
        self.seen |= {submit.request_id: submit.age_s for submit in submits}
        self._held += submits
        if not self.held_back:
            self.first_tokens()

    def first_tokens(self) -> None:
        """Send the first token of every room at prefill, whose leg that ends."""
        submits = [submit for submit in self._held if submit.room in self._prefill.rooms]
        self._held.clear()
        if not submits:
            return
        api_id = submits[0].api_id
        for submit in submits:
            self._prefill.emitter.event(api_id, wire.RoomEvent(submit.room, "prefilled"))
        rooms = [Room(stream_of(s.request_id), s.sampling.max_new_tokens, 0) for s in submits]
        self._prefill.emitter.rows(api_id, _rows([s.room for s in submits], rooms))
        self._prefill.send()
        self._prefill.over([submit.room for submit in submits])
        self._decode.over([s.room for s in submits if s.sampling.max_new_tokens == 1])

    def step(self) -> None:
        """Send a token for each stream at decode."""
        held = self._decode.rooms
        self._running = {room: one for room, one in self._running.items() if room in held}
        # Decode's first token needs prefill's, which may be held back.
        waiting = {submit.room for submit in self._held}
        numbers = [room for room in self._running if room not in waiting]
        if not numbers:
            return
        rooms = [self._running[number] for number in numbers]
        self._decode.emitter.rows(self._api_id, _rows(numbers, rooms))
        self._decode.send()
        for one in rooms:
            one.next_idx += 1
        self._decode.over(
            [n for n in numbers if self._running[n].next_idx == self._running[n].num_tokens]
        )

    async def taken(self) -> None:
        """Wait until the pipe to the API process took every step, so that no two merge."""
        streams = self._decode._streams.values()
        while any(replies._waiting for replies in streams):  # noqa: ASYNC110  (gRPC takes them)
            await asyncio.sleep(0.001)


def _rows(numbers: Sequence[int], rooms: Sequence[Room]) -> Rows:
    last = [one.next_idx == one.num_tokens - 1 for one in rooms]
    return Rows(
        rooms=np.array(numbers),
        token_ids=np.array([IDS[token_at(one.stream, one.next_idx, len(IDS))] for one in rooms]),
        token_idx=np.array([one.next_idx for one in rooms]),
        finish=np.where(last, wire.LENGTH, wire.RUNNING),
    )


@contextlib.asynccontextmanager
async def crowd() -> AsyncIterator[Crowd]:
    workers = Crowd()
    await workers.start()
    try:
        yield workers
    finally:
        await workers.stop()


@dataclass(eq=False)
class Client(asyncio.Protocol):
    """One request on a connection of its own. turns_at: events before its manner shows."""

    stream: int
    num_tokens: int
    manner: Manner = "reads"
    turns_at: int = 0
    is_long: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    on_data: Callable[["Client"], None] = lambda client: None
    on_turn: Callable[["Client"], None] = lambda client: None

    def __post_init__(self) -> None:
        self.data = b""
        self.num_reads = 0
        self.error: Exception | None = None
        self.turned = False
        self.closed = asyncio.Event()
        self.answered = asyncio.Event()
        self.transport: asyncio.Transport | None = None

    @property
    def rid(self) -> str:
        return rid_of(self.stream, self.is_long)

    async def connect(self, host: str, port: int) -> None:
        """Connect, and ask."""
        sock = socket.socket()
        if self.manner in ("pauses", "stalls"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NARROW_BYTES)
            # The kernel's send buffers are a multiple of this, which is large on a loopback.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _NARROW_SEGMENT_BYTES)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (host, port))
        await loop.create_connection(lambda: self, sock=sock)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        asked = {"prompt": [1, 2, 3], "max_tokens": self.num_tokens, "rid": self.rid}
        asked |= {"stream": True, "ignore_eos": True} | self.fields
        path = "/v1/completions"
        if "messages" in asked:
            del asked["prompt"]
            path = "/v1/chat/completions"
        body = json.dumps(asked).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.num_reads += 1
        self.answered.set()
        self.on_data(self)
        if not self.turned and self.data.count(b"data: ") > self.turns_at:
            self.turned = True
            self._turn()
        if self.is_answered:
            self.leave()

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error
        self.closed.set()

    def leave(self, *, reset: bool = False) -> None:
        assert self.transport is not None, "it connected"
        if reset:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.transport.abort()
        else:
            self.transport.close()

    def abort(self) -> None:
        """Drop the connection, if there is one."""
        if self.transport is not None:
            self.transport.abort()

    def read_on(self) -> None:
        assert self.transport is not None, "it connected"
        self.transport.resume_reading()

    def _turn(self) -> None:
        assert self.transport is not None, "data came"
        if self.manner in ("fin", "rst"):
            self.leave(reset=self.manner == "rst")
        elif self.manner in ("pauses", "stalls"):
            self.transport.pause_reading()
        self.on_turn(self)

    # --- what it got ---

    @property
    def is_done(self) -> bool:
        """Whether it hears nothing more."""
        return self.closed.is_set() or (self.manner == "stalls" and self.turned)

    @property
    def is_answered(self) -> bool:
        """Whether the whole response came: the end of a stream, or a refusal."""
        head, _, body = self.data.partition(b"\r\n\r\n")
        if b"\r\ntransfer-encoding: chunked" in head:
            return self.is_whole
        length = self.head.get("content-length")
        return length is not None and len(body) >= int(length)

    @property
    def status(self) -> int:
        return int(self.data.split(b" ", 2)[1])

    @property
    def head(self) -> dict[str, str]:
        lines = self.data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    @property
    def is_whole(self) -> bool:
        """Whether the response came to its end."""
        return self.data.endswith(b"\r\n0\r\n\r\n")

    @property
    def chunks(self) -> list[bytes]:
        """The body as the server wrote it; the last one may be cut."""
        found, rest = [], self.data.partition(b"\r\n\r\n")[2]
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            found.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        return [chunk for chunk in found if chunk]

    @property
    def events(self) -> list[Any]:
        """The events that came whole, parsed; [DONE] as it is."""
        parts = b"".join(self.chunks).split(b"\n\n")[:-1]
        data = [part.removeprefix(b"data: ") for part in parts]
        return [item.decode() if item == b"[DONE]" else json.loads(item) for item in data]

    def text_and_reason(self) -> tuple[str, str | None]:
        texts, reason = [], None
        for event in self.events:
            if event == "[DONE]":
                continue
            assert event["id"] == self.rid
            assert reason is None, "nothing comes after the reason"
            item = event["choices"][0]
            texts.append(item["text"] if "text" in item else item["delta"].get("content", ""))
            reason = item["finish_reason"]
        return "".join(texts), reason

    def check(self, was_aborted: bool = False) -> None:
        """Check that it got what a client of its manner should."""
        text, reason = self.text_and_reason()
        want = text_of(self.stream, 0, self.num_tokens, TEXTS)
        where = f"stream {self.stream}, which {self.manner}: {text!r}, {self.data[-300:]!r}"
        if self.manner in ("fin", "rst", "stalls"):
            assert want.startswith(text), where
            assert self.manner != "stalls" or not self.is_whole, where
            return
        assert self.is_whole, where
        assert self.events[-1] == "[DONE]", where
        assert reason == ("abort" if was_aborted else "length"), where
        assert want.startswith(text) if was_aborted else text == want, where
