"""The floor of the front end benchmark: the same bytes from a uvloop Protocol, without HTTP.

Of HTTP it knows only how to find the end of a request; it writes prepared events. The engine tells
it steps over a socket instead of gRPC. `python -m bench.frontend_floor FD [BINARY]`: with BINARY,
compiled from frontend_floor.rs, that serves, and this process only prepares its bytes.
"""

import asyncio
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import cast

import numpy as np
import orjson
import uvloop

from bench.frontend_plan import (
    HOST,
    REQUESTED,
    STEP,
    TOKEN_CHARS,
    Cell,
    inherited_socket,
    request_id,
    say,
    stream_of,
    text_of,
    token_at,
    told,
)

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Spelling:
    """Encodes a stream's events, each as an HTTP chunk; whole pieces have exactly a given size."""

    def __init__(self, cell: Cell, piece_bytes: int, texts: list[str]) -> None:
        """piece_bytes: of a whole piece in its HTTP chunk; ignored if below the least possible."""
        self._cell = cell
        self._texts = texts
        self._encoded = [text.encode() for text in texts]
        self._model = ""
        short = piece_bytes - len(self._piece(0, "x" * TOKEN_CHARS * cell.interval))
        self._model = "m" * max(0, short)
        self._frames = [self._frame(stream) for stream in range(cell.num_streams)]

    def opening(self, stream: int) -> bytes:
        """The bytes before the first token."""
        return _HEAD + _chunk(self._event(stream, {"role": "assistant", "content": ""}))

    def around(self, stream: int) -> tuple[bytes, bytes]:
        """The bytes before and after a token's text, where each token has an event of its own."""
        return self._frames[stream]

    def closing(self, stream: int) -> bytes:
        """The bytes after the last token."""
        return _chunk(self._event(stream, {}, "length")) + _END

    def write(self, stream: int, token_idx: int) -> bytes:
        """The bytes to write when that token comes; there may be none."""
        cell = self._cell
        if cell.interval == 1:
            before, after = self.around(stream)
            data = before + self._encoded[token_at(stream, token_idx, len(self._texts))] + after
        elif token_idx % cell.interval == 0:
            start = max(0, token_idx - cell.interval + 1)
            data = self._piece(stream, text_of(stream, start, token_idx + 1, self._texts))
        else:
            data = b""
        if token_idx == cell.output_tokens - 1:
            if left := token_idx % cell.interval:
                start = token_idx - left + 1
                data += self._piece(stream, text_of(stream, start, token_idx + 1, self._texts))
            data += self.closing(stream)
        return self.opening(stream) + data if token_idx == 0 else data

    def _piece(self, stream: int, text: str) -> bytes:
        return _chunk(self._event(stream, {"content": text}))

    def _frame(self, stream: int) -> tuple[bytes, bytes]:
        before, after = self._piece(stream, "x" * TOKEN_CHARS).split(b"x" * TOKEN_CHARS)
        return before, after

    def _event(self, stream: int, delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        event = {"id": request_id(stream), "model": self._model, "choices": [choice]}
        return b"data: " + orjson.dumps(event) + b"\n\n"


class Floor:
    """All connections of the client, by the stream that each carries now, and the engine's one."""

    def __init__(self) -> None:
        self.transports: dict[int, asyncio.Transport] = {}
        self.engine: asyncio.Transport | None = None
        self.spelling: Spelling | None = None

    def requested(self, stream: int, transport: asyncio.Transport) -> None:
        """A request is complete."""
        assert self.engine is not None
        self.transports[stream] = transport
        self.engine.write(REQUESTED.pack(stream))

    def step(self, token_idx: int, streams: list[int]) -> None:
        """One token for each of these streams."""
        assert self.spelling is not None, "a round begins with its cell"
        for stream in streams:
            if data := self.spelling.write(stream, token_idx):
                self.transports[stream].write(data)


class _Request(asyncio.Protocol):
    """One connection of the client."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._transport: asyncio.Transport | None = None
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.partition(b"Content-Length: ")[2] or b"0"):
            return
        self._data = b""
        assert self._transport is not None
        if not body:
            self._transport.write(_HEALTHY)
            return
        self._floor.requested(stream_of(orjson.loads(body)["rid"]), self._transport)


class _Engine(asyncio.Protocol):
    """The engine's socket."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._floor.engine = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= STEP.size:
            token_idx, count = STEP.unpack_from(self._data)
            end = STEP.size + 4 * count
            if len(self._data) < end:
                return
            streams = np.frombuffer(self._data, "<i4", count, STEP.size).tolist()
            self._data = self._data[end:]
            self._floor.step(token_idx, streams)


async def serve(engine: socket.socket) -> None:
    """Serve rounds until nothing more is asked."""
    loop = asyncio.get_running_loop()
    floor = Floor()
    await loop.create_connection(lambda: _Engine(floor), sock=engine)
    server = await loop.create_server(lambda: _Request(floor), HOST, 0, backlog=4096)
    setup = await asyncio.to_thread(told)
    say(port=server.sockets[0].getsockname()[1], pid=os.getpid())
    while ask := await asyncio.to_thread(told):
        floor.spelling = Spelling(Cell(**ask["cell"]), ask["piece_bytes"], setup["texts"])
        say(ready=True)
    server.close()


def native_round(cell: Cell, piece_bytes: int, texts: Sequence[str]) -> bytes:
    """The round that frontend_floor.rs serves next. Raises ValueError if the interval is not 1.

    u32 numbers of streams, output tokens and texts. Then come byte strings, each behind its u32
    length: the texts, and for each stream those before its first token, before every token, after
    every token, and after its last.
    """
    if cell.interval != 1:
        raise ValueError(f"the native floor writes an event a token, got interval {cell.interval}")
    spelling = Spelling(cell, piece_bytes, list(texts))
    parts = [text.encode() for text in texts]
    for stream in range(cell.num_streams):
        parts += [spelling.opening(stream), *spelling.around(stream), spelling.closing(stream)]
    packed = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return struct.pack("<III", cell.num_streams, cell.output_tokens, len(texts)) + packed


def serve_native(engine_fd: int, binary: str) -> None:
    """Prepare rounds for the binary until nothing more is asked."""
    command = [binary, str(engine_fd)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[engine_fd]) as native:
        os.close(engine_fd)
        assert native.stdin is not None
        assert native.stdout is not None
        texts = told()["texts"]
        say(port=int(native.stdout.readline()), pid=native.pid)
        while ask := told():
            data = native_round(Cell(**ask["cell"]), ask["piece_bytes"], texts)
            native.stdin.write(struct.pack("<I", len(data)) + data)
            native.stdin.flush()
            say(**{native.stdout.readline().decode().strip(): True})
        native.kill()


def main() -> None:
    """`python -m bench.frontend_floor FD [BINARY]`."""
    if len(sys.argv) > 2:
        serve_native(int(sys.argv[1]), sys.argv[2])
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(inherited_socket(sys.argv[1])))


if __name__ == "__main__":
    main()
