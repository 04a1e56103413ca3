"""Clients that do not read, over real sockets and on both event loops."""

import asyncio
import gc
import itertools
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from serving.event_stream import EventStream
from tests.recording import until
from tests.serving.live import Live, letters, live_server

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
NUM_TOKENS = 1500  # events of 200 bytes each: more than server and system hold


async def ask(live: Live, num_tokens: int, **more: Any) -> socket.socket:
    """Ask for a streamed completion over a socket that nobody reads yet."""
    fields = {"prompt": "Hi!", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    return await send(live, "/v1/completions", fields | more)


async def send(live: Live, path: str, fields: Any) -> socket.socket:
    """Send a request over a socket that nobody reads yet."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    host, port = live.url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + body)
    return sock


async def read_until(sock: socket.socket, end: bytes, data: bytes = b"") -> bytes:
    """Read on until these bytes come; all that was read."""
    loop = asyncio.get_running_loop()
    while end not in data:
        part = await loop.sock_recv(sock, 1 << 20)
        assert part, "the server closed the connection before the end"
        data += part
    return data


def writes_of(data: bytes) -> list[bytes]:
    """The server's writes of a whole answer: each is a chunk of HTTP's."""
    rest = data.partition(b"\r\n\r\n")[2]
    writes = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        writes.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return writes


def text_of(writes: list[bytes]) -> str:
    """The text of all events."""
    events = [part.removeprefix(b"data: ") for part in b"".join(writes).split(b"\n\n")]
    return "".join(json.loads(e)["choices"][0]["text"] for e in events if e.startswith(b"{"))


def is_end_token(token_idx: int) -> bool:
    """Every 27th token is it; it is ignored and has no text."""
    return token_idx % 27 == 26


def text_after(num_tokens: int) -> str:
    rounds, rest = divmod(num_tokens, 27)
    return letters(26) * rounds + letters(rest)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_client_that_reads_late_misses_nothing(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], lent: list[int]
) -> None:
    async def play() -> None:
        async with live_server(context_length=1 << 20, send_buffer_bytes=4096) as live:
            sock = await ask(live, NUM_TOKENS, stream_interval=1)
            metric = b'kvferry_num_requests_total{finish_reason="length"} 1.0'
            await until(lambda: metric in live.dispatcher.metrics.render())
            with sock:
                data = await read_until(sock, b"[DONE]")
            assert text_of(writes_of(data)) == text_after(NUM_TOKENS)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_client_that_never_reads_is_closed_and_its_generation_aborted(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    lent: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play() -> None:
        async with live_server(
            context_length=1 << 20,
            send_buffer_bytes=4096,
            slow_client_buffer_bytes=1000,
            slow_client_timeout_s=0.05,
        ) as live:
            # However late the server is, as many events as it takes to fill the system's buffers.
            sock = await ask(live, 500_000, stream_interval=1)
            gc.collect()
            gc.disable()
            with sock:
                await until(lambda: "unread" in caplog.text)  # cheap to ask, again and again
                metric = b'kvferry_num_requests_total{finish_reason="abort"} 1.0'
                await until(lambda: metric in live.dispatcher.metrics.render())
                await until(lambda: live.rooms == 0)
            # What is unread is freed at once: a server rarely runs the collector.
            await until(lambda: not any(isinstance(o, EventStream) for o in gc.get_objects()))

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(play())
    finally:
        gc.enable()


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_what_a_slow_client_waits_for_merges_while_others_get_each_piece_at_its_step(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], lent: list[int]
) -> None:
    num_tokens = 1200

    async def play() -> None:
        async with live_server(
            auto_step=False, context_length=1 << 20, send_buffer_bytes=4096
        ) as live:
            slow = await ask(live, num_tokens, stream_interval=1)
            fast = await ask(live, num_tokens, stream_interval=1)
            await live.cluster.submitted(2)
            told = b""
            with slow, fast:
                for token_idx in range(1, num_tokens):
                    live.cluster.step()
                    # The last step's piece must come before the next step.
                    if not is_end_token(token_idx):
                        told = await read_more(fast, told)
                told = await read_until(fast, b"[DONE]", told)
                each = writes_of(told)
                merged = writes_of(await read_until(slow, b"[DONE]"))
            assert text_of(each) == text_of(merged) == text_after(num_tokens)
            assert len(each) > num_tokens * 25 / 27
            assert len(merged) < len(each) / 2
            assert max(map(len, merged)) > 100 * max(map(len, each))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_of_events_that_repeat_all_before_them_only_the_latest_waits(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    num_tokens = 500
    params = {"max_new_tokens": num_tokens, "ignore_eos": True, "n": 2, "stream_interval": 1}
    fields = {"text": "Hi!", "sampling_params": params, "stream": True}
    fields |= {"return_logprob": True, "top_logprobs_num": 5}

    async def play() -> None:
        async with live_server(
            auto_step=False, context_length=1 << 20, send_buffer_bytes=4096
        ) as live:
            sock = await send(live, "/generate", fields)
            await live.cluster.submitted(2)
            (stream,) = (o for o in gc.get_objects() if isinstance(o, EventStream))
            most_unread = 0
            while live.dispatcher.num_running():
                live.cluster.step()
                await asyncio.sleep(0)
                most_unread = max(most_unread, stream._unread_bytes)
            with sock:
                writes = writes_of(await read_until(sock, b"[DONE]\n\n\r\n0\r\n\r\n"))
            parts = b"".join(writes).removesuffix(b"\n\n").split(b"\n\n")
            assert parts.pop() == b"data: [DONE]"
            events = [json.loads(part.removeprefix(b"data: ")) for part in parts]
            assert len(events) < num_tokens
            for index in (0, 1):
                mine = [event for event in events if event["index"] == index]
                for before, after in itertools.pairwise(mine):
                    assert len(before["output_ids"]) < len(after["output_ids"])
                    assert after["text"].startswith(before["text"])
                assert mine[-1]["text"] == text_after(num_tokens)
                assert len(mine[-1]["meta_info"]["output_top_logprobs"]) == num_tokens
                assert mine[-1]["meta_info"]["finish_reason"]["type"] == "length"
            # At most what the client is being sent, and an event of each choice.
            assert most_unread <= 4 * max(map(len, parts)) + (1 << 16)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())


async def read_more(sock: socket.socket, data: bytes) -> bytes:
    """Read at least one event more; all that was read."""
    num_events = data.count(b"data: ")
    loop = asyncio.get_running_loop()
    while data.count(b"data: ") == num_events:
        data += await loop.sock_recv(sock, 1 << 20)
    return data
