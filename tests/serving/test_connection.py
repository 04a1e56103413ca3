"""Chunks that bypass the server's `send` arrive whole, in order, and nowhere else."""

import asyncio
import gc
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
import uvloop
from uvicorn import Config
from uvicorn.server import ServerState

from serving.body_writer import BodyWriter, ServerTransport, chunk_head
from serving.connection import Bound, Connection, body_writer_of
from serving.event_stream import EventStream, Outbox
from serving.timers import LoopTimers
from tests.recording import until
from tests.serving.live import live_server
from tests.serving.test_slow_client import (
    ask,
    read_until,
    send,
    text_after,
    text_of,
    writes_of,
)

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
NUM_TOKENS = 60
UNBOUND = Bound(1 << 30, 0, lambda _: None)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Columns:
    """A borrower of body writers, and what it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def hindered(self, slot: int) -> None:
        self.told.append(slot)


class Transport:
    """What a connection needs of a transport; notes what was written, in order, and b"closed"."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.write = self.told.append

    def close(self) -> None:
        self.told.append(b"closed")

    def is_closing(self) -> bool:
        return b"closed" in self.told

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return None

    def resume_reading(self) -> None:
        pass


def server_of(transport: Transport) -> ServerTransport:
    return ServerTransport(cast(asyncio.Transport, transport), 0.0)


def test_a_borrower_is_told_of_what_hinders_while_it_has_the_writer() -> None:
    transport, columns = Transport(), Columns()
    writer = BodyWriter(cast(asyncio.Transport, transport), 0.0)
    writer.hinder()
    assert not writer.ready
    writer.ready = True
    writer.lend(columns, 7)
    writer.write(b"1")
    writer.hinder()
    assert columns.told == [7]
    assert not writer.ready
    writer.take_back()
    writer.close()
    assert columns.told == [7]
    writer.write(b"2")
    assert transport.told == [b"1"]
    assert not writer.ready


def test_what_is_held_leaves_at_once_and_before_an_end() -> None:
    transport = Transport()
    server = server_of(transport)
    server.write(b"0")
    server.hold()
    server.write(b"1")
    server.write(b"2")
    assert transport.told == [b"0"]
    server.release()
    server.release()
    server.write(b"3")
    server.hold()
    server.write(b"4")
    server.close()
    assert transport.told == [b"0", b"12", b"3", b"4", b"closed"]
    assert server.is_closing(), "all else is the transport's"


def test_a_connection_that_closes_takes_what_is_held_and_a_lost_one_nothing() -> None:
    """A transport that closes because its client did still sends."""
    transport = Transport()
    server = server_of(transport)
    transport.close()
    server.hold()
    server.write(b"1")
    server.release()
    server.hold()
    server.write(b"nobody is there")
    server.lost()
    server.release()
    server.write(b"nobody is there")
    assert transport.told == [b"closed", b"1"]


def test_only_the_end_of_a_body_is_dropped_and_once() -> None:
    transport = Transport()
    writer = BodyWriter(cast(asyncio.Transport, transport), 0.0)
    writer.write_last(b"bye")
    writer.server.write(b"of the next request")
    writer.server.write(b"0\r\n\r\n")
    writer.server.write(b"0\r\n\r\n")
    end = b"0\r\n\r\n"
    assert transport.told == [b"3\r\nbye\r\n" + end, b"of the next request", end]


async def test_the_head_of_a_stream_and_its_first_event_leave_in_one_write() -> None:
    transport = Transport()
    streams: list[EventStream] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        outbox, timers = Outbox(), LoopTimers()
        stream = EventStream(send, send, body_writer_of(scope), [], outbox, timers, 999, 9.0)
        streams.append(stream)
        stream.write(b"first")
        await asyncio.sleep(0)
        stream.write(b"last", last=True)
        await stream.closed

    config = Config(app, lifespan="off", log_config=None, log_level="warning")
    config.load()
    connection = Connection(config, ServerState(), {}, linger_s=0.0, bound=UNBOUND)
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: bool(streams) and streams[0].closed.done())
    first, last = transport.told
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.endswith(b"\r\n\r\n5\r\nfirst\r\n")
    assert last == b"4\r\nlast\r\n0\r\n\r\n"


async def test_what_is_held_leaves_even_if_the_first_event_fails() -> None:
    transport = Transport()
    writer = BodyWriter(cast(asyncio.Transport, transport), 0.0)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise RuntimeError("a fault of the server")
        writer.server.write(b"head")

    stream = EventStream(send, send, writer, [], Outbox(), LoopTimers(), 999, 9.0)
    stream.write(b"first")
    with pytest.raises(RuntimeError, match="a fault of the server"):
        await stream.closed
    assert transport.told == [b"head"]
    writer.server.write(b"more")
    assert transport.told == [b"head", b"more"]


@pytest.mark.parametrize("num_bytes", [1, 15, 16, 4095, 4096, 1 << 20])
def test_a_chunk_says_its_length_in_hexadecimal(num_bytes: int) -> None:
    assert chunk_head(num_bytes) == f"{num_bytes:x}\r\n".encode()


def test_there_is_no_writer_without_chunks_or_without_our_connections() -> None:
    writer = BodyWriter(cast(asyncio.Transport, Transport()), 0.0)
    state = {"kvferry.body_writer": writer}
    assert body_writer_of({"http_version": "1.1", "state": state}) is writer
    assert body_writer_of({"http_version": "1.0", "state": state}) is None
    assert body_writer_of({"http_version": "1.1", "state": {}}) is None
    assert body_writer_of({"http_version": "1.1"}) is None


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_answers_of_one_connection_are_whole_and_follow_each_other(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], lent: list[int]
) -> None:
    """One after the other, and two that were asked for at once."""

    async def play() -> None:
        async with live_server() as live:
            sock = await ask(live, NUM_TOKENS)
            with sock:
                data = await read_until(sock, b"\r\n0\r\n\r\n")
                assert text_of(writes_of(data)[:-1]) == text_after(NUM_TOKENS)
                # The same request again, twice in one write.
                again = await ask_again(sock, live.url, 2)
                first, _, second = again.partition(b"\r\n0\r\n\r\n")
                for answer in (first + b"\r\n0\r\n\r\n", second):
                    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
                    assert text_of(writes_of(answer)[:-1]) == text_after(NUM_TOKENS)
            await until(lambda: live.rooms == 0)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())
    assert len(lent) in (0, 3)


async def ask_again(sock: socket.socket, url: str, count: int) -> bytes:
    """Send so many requests in one write; all that comes back."""
    body = b'{"prompt": "Hi!", "max_tokens": %d, "ignore_eos": true, "stream": true}' % NUM_TOKENS
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(sock, (head.encode() + body) * count)
    data = b""
    while data.count(b"\r\n0\r\n\r\n") < count:
        part = await asyncio.get_running_loop().sock_recv(sock, 1 << 20)
        assert part, "the server closed the connection before the end"
        data += part
    return data


@asynccontextmanager
async def served(app: Any, linger_s: float = 600.0) -> AsyncIterator[tuple[ServerState, Any]]:
    """Serve an application on our connections: the server's state, and where it listens."""
    config = Config(app, lifespan="off", log_config=None, log_level="warning")
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(config, state, {}, linger_s=linger_s, bound=UNBOUND), "127.0.0.1", 0
    )
    try:
        yield state, server.sockets[0].getsockname()
    finally:
        server.close()


@pytest.mark.parametrize("is_half_closed", [False, True])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_closed_connection_waits_for_a_client_only_while_that_reads(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], reads: bool, is_half_closed: bool
) -> None:
    num_bytes = 16 << 20  # more than sockets hold
    linger_s = 1.0  # long enough for a busy host, which may stop all of this for a while

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % num_bytes)]
        if not is_half_closed:  # by the client
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * num_bytes})

    async def play() -> None:
        loop = asyncio.get_running_loop()
        async with served(app, linger_s) as (state, address):
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                sock.connect(address)
                sock.setblocking(False)
                await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await until(lambda: state.total_requests == 1 and not state.tasks)
                if is_half_closed:
                    sock.shutdown(socket.SHUT_WR)
                assert len(state.connections) == 1
                if reads:  # for longer than it may pause
                    body = (await read_until(sock, b"x" * 99)).partition(b"\r\n\r\n")[2]
                    for megabytes in range(1, 6):
                        await asyncio.sleep(linger_s / 3)
                        while len(body) < megabytes << 20:
                            more = await loop.sock_recv(sock, 1 << 16)
                            assert more, "cut, though it reads"
                            body += more
                    while more := await loop.sock_recv(sock, 1 << 20):
                        body += more
                    assert len(body) == num_bytes
                await until(lambda: not state.connections)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())


@pytest.mark.parametrize("path", ["/small", "/big"])
@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_client_that_asks_again_and_reads_nothing_is_cut(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], path: str
) -> None:
    """The second answer waits until the first was read, and nothing else bounds that wait."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        num_bytes = 16 << 20 if scope["path"] == "/big" else 1  # more than sockets hold
        headers = [(b"content-length", b"%d" % num_bytes)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * num_bytes})

    async def play() -> None:
        async with served(app, linger_s=0.2) as (state, address):
            with socket.create_connection(address) as sock:
                for each in ("/big", path):
                    sock.sendall(f"GET {each} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                await until(lambda: state.total_requests == 1)
                await until(lambda: not state.connections and not state.tasks)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_client_that_asks_again_and_reads_slowly_gets_both_answers(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def play() -> None:
        fields = {"prompt": [5] * 300, "max_tokens": 1, "prompt_logprobs": 20, "n": 9}
        async with live_server(send_buffer_bytes=4096, slow_client_timeout_s=0.5) as live:
            sock = await send(live, "/v1/completions", fields)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            data = b""
            with sock:
                for _ in range(10):  # in all for longer than it may pause
                    await asyncio.sleep(0.1)
                    data += await loop.sock_recv(sock, 1 << 15)
                data = await read_until(sock, b'{"version":', data)
            assert data.count(b"HTTP/1.1 200 OK") == 2

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_lost_connection_is_told_before_anybody_can_write_to_it(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    columns = Columns()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        writer = body_writer_of(scope)
        assert writer is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        writer.lend(columns, 7)
        while (await receive())["type"] != "http.disconnect":
            writer.write(chunk_head(2) + b"hi\r\n")
        assert columns.told == [7]
        for _ in range(9):
            writer.write(b"too late")

    async def play() -> None:
        async with served(app) as (state, address):
            with socket.create_connection(address) as sock:
                sock.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await read_until(sock, b"\r\n\r\n2\r\nhi\r\n")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            await until(lambda: bool(columns.told))
            await until(lambda: not state.tasks)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())
    assert not caplog.records


async def answer_to(url: str, first_lines: str, num_tokens: int) -> bytes:
    """All that comes until the server closes the connection."""
    body = b'{"prompt": "Hi!", "max_tokens": %d, "ignore_eos": true, "stream": true}' % num_tokens
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{first_lines}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    data = await reader.read()
    writer.close()
    return data


@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
@pytest.mark.parametrize("loop_factory", LOOPS)
def test_an_answer_is_whole_before_its_connection_closes(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], num_tokens: int, lent: list[int]
) -> None:
    async def play() -> None:
        asked = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close"
        async with live_server() as live:
            data = await answer_to(live.url, asked, num_tokens)
        assert data.endswith(b"\r\n0\r\n\r\n")
        assert text_of(writes_of(data)[:-1]) == text_after(num_tokens)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_an_answer_by_an_older_http_is_whole_and_lends_nothing(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], lent: list[int]
) -> None:
    async def play() -> None:
        async with live_server() as live:
            data = await answer_to(live.url, "POST /v1/completions HTTP/1.0", NUM_TOKENS)
            refused = await answer_to(live.url, "POST /v1/nothing HTTP/1.0", NUM_TOKENS)
        head, _, body = data.partition(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        assert b"transfer-encoding" not in head.lower()  # HTTP/1.0 has none
        assert body.startswith(b"data: ")
        assert body.endswith(b"data: [DONE]\n\n")
        assert text_of([body]) == text_after(NUM_TOKENS)
        assert not lent
        head, _, body = refused.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 ")
        assert b"content-length: %d\r\n" % len(body) in head.lower() + b"\r\n"

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_client_that_leaves_costs_nothing_more_and_nothing_is_left_of_it(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    is_reset: bool,
    lent: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play() -> None:
        async with live_server(auto_step=False, context_length=1 << 20) as live:
            leaves, stays = await ask(live, NUM_TOKENS), await ask(live, NUM_TOKENS)
            await live.cluster.submitted(2)
            gc.collect()
            gc.disable()
            for _ in range(20):
                live.cluster.step()
                await asyncio.sleep(0.001)
            if is_reset:
                leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            leaves.close()
            for _ in range(20):  # some of these steps come before anyone knows
                live.cluster.step()
            await until(lambda: live.rooms == 1)
            for _ in range(40):
                live.cluster.step()
            with stays:
                data = await read_until(stays, b"\r\n0\r\n\r\n")
            assert text_of(writes_of(data)[:-1]) == text_after(NUM_TOKENS)
            # At once: a server rarely runs the collector.
            await until(lambda: not any(isinstance(o, Connection) for o in gc.get_objects()))

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(play())
    finally:
        gc.enable()
    assert not caplog.records


async def test_a_client_that_leaves_with_two_requests_sent_frees_what_both_held() -> None:
    async with live_server(auto_step=False) as live:
        body = json.dumps(
            {"prompt": "Hi!", "max_tokens": 400, "stream": True, "ignore_eos": True}
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        port = httpx.URL(live.url).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(2 * (head % len(body) + body))
        await live.cluster.submitted(1)
        live.cluster.step()
        live.cluster.step()
        await reader.readuntil(b"data: ")
        gc.collect()
        gc.disable()
        try:
            writer.transport.abort()
            steps = 0
            while live.rooms:
                live.cluster.step()
                steps += 1
                await asyncio.sleep(0.01)
            assert steps < 100
            await until(lambda: not any(isinstance(o, Connection) for o in gc.get_objects()))
        finally:
            gc.enable()
