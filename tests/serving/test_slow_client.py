"""Clients that do not read, over real sockets and on both event loops."""

import asyncio
import json
import socket
from collections.abc import Callable

import pytest
import uvloop

from tests.recording import until
from tests.serving.live import Live, letters, live_server

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
NUM_TOKENS = 1500  # events of 200 bytes each: more than server and system hold


async def ask(live: Live, num_tokens: int) -> socket.socket:
    """A streamed request over a socket that nobody reads yet."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    host, port = live.url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    fields = {"prompt": "Hi!", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + body)
    return sock


async def read_text(sock: socket.socket) -> str:
    """The text of all events, up to [DONE]."""
    loop = asyncio.get_running_loop()
    data = b""
    while b"[DONE]" not in data:
        part = await loop.sock_recv(sock, 1 << 20)
        assert part, "the server closed the connection before the end"
        data += part
    chunks = data.partition(b"\r\n\r\n")[2]
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        body, chunks = body + chunks[: int(size, 16)], chunks[int(size, 16) + 2 :]
    events = [part.removeprefix(b"data: ") for part in body.split(b"\n\n")]
    return "".join(json.loads(e)["choices"][0]["text"] for e in events if e.startswith(b"{"))


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_client_that_reads_late_misses_nothing(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def play() -> None:
        async with live_server(context_length=1 << 20, send_buffer_bytes=4096) as live:
            sock = await ask(live, NUM_TOKENS)
            metric = b'kvferry_num_requests_total{finish_reason="length"} 1.0'
            await until(lambda: metric in live.dispatcher.metrics.render())
            with sock:
                text = await read_text(sock)
            # Every 27th token is the end token, which is ignored and has no text.
            rounds, rest = divmod(NUM_TOKENS, 27)
            assert text == letters(26) * rounds + letters(rest)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_client_that_never_reads_is_closed_and_its_generation_aborted(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with live_server(
            context_length=1 << 20,
            send_buffer_bytes=4096,
            slow_client_buffer_bytes=1000,
            slow_client_timeout_s=0.05,
        ) as live:
            sock = await ask(live, 500_000)
            with sock:
                metric = b'kvferry_num_requests_total{finish_reason="abort"} 1.0'
                await until(lambda: metric in live.dispatcher.metrics.render())
                await until(lambda: live.rooms == 0)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())
    assert "unread" in caplog.text
