"""Requests as bytes: heads without end, offers of another protocol, and what is no request."""

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from serving.api import http_config
from serving.config import ServeConfig
from serving.connection import MAX_HEAD_BYTES
from serving.metrics import Metrics
from tests.serving.live import Live, letters, live_server
from transfer.errors import ConfigError

ASK = b'{"prompt": "Hi!", "max_tokens": 3}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


async def opened(live: Live) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = live.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answers_to(live: Live, *parts: bytes, count: int = 1) -> list[tuple[int, Any]]:
    """Write the parts one at a time; status and body of so many answers."""
    reader, writer = await opened(live)
    async with asyncio.timeout(20):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        found = [await answer_of(reader) for _ in range(count)]
    writer.close()
    return found


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length) or b"null")


async def send_on(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 100_000)
        await writer.drain()


def request(fields: bytes, body: bytes = ASK) -> bytes:
    return HEAD + fields + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_a_request_that_offers_another_protocol_is_served_with_its_body() -> None:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(ASK), ASK)
    whole = request(H2C)
    async with live_server() as live:
        for parts in (
            [whole],
            [HEAD + H2C + chunked],
            [whole[:70], whole[70:150], whole[150:-5], whole[-5:]],
            [whole[: -len(ASK)], ASK],
        ):
            ((status, body),) = await answers_to(live, *parts)
            assert status == 200
            assert body["choices"][0]["text"] == letters(3)
        found = await answers_to(live, whole * 2 + request(b"") + whole, count=4)
        assert [body["choices"][0]["text"] for _, body in found] == [letters(3)] * 4
        connect = b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100
        ((status, _),) = await answers_to(live, connect)
        assert status >= 400


async def test_a_field_after_the_body_is_none_of_the_head() -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    behind = b"0\r\nAuthorization: Bearer secret\r\n\r\n"
    async with live_server(api_key="secret") as live:
        ((status, _),) = await answers_to(live, head + behind)
        assert status == 401


@pytest.mark.parametrize(
    ("begun", "filling"),
    [
        (HEAD + b"X: ", b"x" * 60_000),
        (HEAD, b"x: y\r\n" * 10_000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"x" * 60_000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;x=", b"x" * 60_000),
    ],
    ids=["one field", "many fields", "after the body", "within the body"],
)
async def test_a_head_without_end_is_refused(begun: bytes, filling: bytes) -> None:
    async with live_server() as live:
        reader, writer = await opened(live)
        writer.write(begun)
        answering = asyncio.create_task(answer_of(reader))
        async with asyncio.timeout(20):
            while not answering.done():
                writer.write(filling)
                await asyncio.sleep(0)
            status, body = await answering
        assert status == 431
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["code"] == "head_too_large"
        writer.close()


@pytest.mark.parametrize(
    ("begun", "status"), [(HEAD + b"X: ", 431), (b"no request\r\n", 400)], ids=["head", "garbage"]
)
async def test_who_sends_all_before_reading_hears_what_was_wrong(begun: bytes, status: int) -> None:
    """A connection closed with bytes unread is reset, and the answer may be lost with it."""
    async with live_server() as live:
        host, port = live.url.removeprefix("http://").split(":")

        def ask() -> bytes:
            with socket.create_connection((host, int(port)), timeout=20) as sock:
                sock.sendall(begun)
                for _ in range(90):
                    sock.sendall(b"x" * 10_000)
                sock.sendall(b"\r\n\r\n")
                with sock.makefile("rb") as answer:
                    return answer.read()  # to the end: the server has no more to say

        for _ in range(5):
            answer = await asyncio.to_thread(ask)
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert answer.endswith(b"}")


async def test_who_is_refused_and_goes_on_sending_is_cut_off() -> None:
    async with live_server() as live:
        reader, writer = await opened(live)
        writer.write(b"no request\r\n\r\n")
        status, _ = await answer_of(reader)
        assert status == 400
        async with asyncio.timeout(20):
            assert await reader.read() == b""
            with pytest.raises(ConnectionError):
                await send_on(writer)
        writer.close()


async def test_a_long_body_in_small_parts_is_no_head_without_end() -> None:
    body = json.dumps({"prompt": "Hi!", "max_tokens": 3, "ignored": "x" * MAX_HEAD_BYTES * 3})
    async with live_server() as live:
        whole = request(b"X: " + b"y" * 4000 + b"\r\n", body.encode())
        parts = [whole[at : at + 3000] for at in range(0, len(whole), 3000)]
        ((status, answer),) = await answers_to(live, *parts)
        assert status == 200
        assert answer["choices"][0]["text"] == letters(3)


async def test_a_head_that_does_not_come_is_given_up() -> None:
    async with live_server(slow_client_timeout_s=0.2) as live:
        whole = request(b"")
        reader, writer = await opened(live)
        async with asyncio.timeout(20):
            assert await reader.read() == b""  # nothing was asked
        writer.close()
        for before in (b"", whole):  # the first, or a later one of its connection
            reader, writer = await opened(live)
            writer.write(before)
            async with asyncio.timeout(20):
                if before:
                    status, _ = await answer_of(reader)
                    assert status == 200
                writer.write(whole[:20])
                status, body = await answer_of(reader)
                assert (status, body["error"]["code"]) == (408, "request_timeout")
                assert await reader.read() == b""
            writer.close()


async def test_an_idle_connection_is_closed_after_its_time_and_not_before() -> None:
    async with live_server(timeout_keep_alive_s=0.2) as live:
        reader, writer = await opened(live)
        async with asyncio.timeout(20):
            for _ in range(2):
                writer.write(request(b""))
                status, _ = await answer_of(reader)
                assert status == 200
            began_s = time.monotonic()
            assert await reader.read() == b""
        assert time.monotonic() - began_s > 0.1
        writer.close()


async def test_line_ends_are_no_request_and_keep_no_connection() -> None:
    async with live_server(timeout_keep_alive_s=0.2) as live:
        reader, writer = await opened(live)
        async with asyncio.timeout(20):
            writer.write(request(b""))
            status, _ = await answer_of(reader)
            assert status == 200
            writer.write(b"\r\n")
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("rest", [b"x" * 9, b"x"], ids=["all of it", "part of it"])
async def test_a_body_that_comes_after_its_answer_keeps_no_connection(rest: bytes) -> None:
    async with live_server(timeout_keep_alive_s=0.2) as live:
        reader, writer = await opened(live)
        async with asyncio.timeout(20):
            writer.write(b"POST /none HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
            status, _ = await answer_of(reader)
            assert status == 404
            writer.write(rest)
            assert await reader.read() == b""
        writer.close()


async def test_half_a_head_behind_a_request_does_not_cut_its_answer() -> None:
    async with live_server(auto_step=False, slow_client_timeout_s=0.5) as live:
        reader, writer = await opened(live)
        body = b'{"prompt": "Hi!", "max_tokens": 9, "stream": true}'
        writer.write(request(b"", body))
        await live.cluster.submitted(1)
        async with asyncio.timeout(20):
            live.cluster.step()
            await reader.readuntil(b"data: ")
            writer.write(request(b"")[:20])
            await asyncio.sleep(1.2)
            assert live.rooms
            while live.rooms:
                live.cluster.step()
                await asyncio.sleep(0)
            assert b"data: [DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")
            status, body_ = await answer_of(reader)
            assert (status, body_["error"]["code"]) == (408, "request_timeout")
        writer.close()


def test_connections_are_kept_for_longer_than_clients_and_proxies_keep_theirs() -> None:
    settings: dict[str, Any] = {"model_path": Path("m"), "registry_address": "127.0.0.1:1"}
    config = http_config(Starlette(), ServeConfig(**settings), Metrics())
    assert config.timeout_keep_alive > 600
    for wrong in (0.0, -1.0):
        with pytest.raises(ConfigError, match="--timeout-keep-alive must be above 0, got"):
            ServeConfig(**settings, timeout_keep_alive_s=wrong)


async def test_an_answer_may_take_longer_than_a_head() -> None:
    async with live_server(auto_step=False, slow_client_timeout_s=0.05) as live:
        asking = asyncio.create_task(answers_to(live, request(b"")[:30], request(b"")[30:]))
        await live.cluster.submitted(1)
        await asyncio.sleep(0.2)
        while not asking.done():
            live.cluster.step()
            await asyncio.sleep(0)
        ((status, _),) = await asking
        assert status == 200


async def test_what_is_no_request_is_told_so_in_the_shape_of_all_errors() -> None:
    async with live_server() as live:
        for wrong in (
            b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
            b"POST /v1/completions HTTP/9.9\r\n\r\n",
            HEAD + b"Content-Length: -1\r\n\r\n",
            HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        ):
            ((status, body),) = await answers_to(live, wrong)
            assert status == 400
            assert body["error"]["code"] == "invalid_http"
            assert body["error"]["type"] == "invalid_request_error"


async def test_an_answer_under_way_ends_whole_and_not_mixed_with_what_is_wrong_behind_it() -> None:
    async with live_server(auto_step=False) as live:
        reader, writer = await opened(live)
        body = b'{"prompt": "Hi!", "max_tokens": 9, "stream": true}'
        writer.write(request(b"", body))
        await live.cluster.submitted(1)
        live.cluster.step()
        async with asyncio.timeout(20):
            await reader.readuntil(b"data: ")
            writer.write(b"\x16\x03\x01\r\n\r\n")
            await writer.drain()
            reading = asyncio.create_task(reader.read())
            while not reading.done():
                live.cluster.step()
                await asyncio.sleep(0)
            told = await reading
        assert told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"invalid_http" not in told
        writer.close()


@pytest.mark.parametrize("wrong", [b"\x16\x03\x01\r\n\r\n", HEAD + b"X: " + b"x" * 200_000])
@pytest.mark.parametrize("count", [1, 2])
async def test_requests_before_what_is_none_have_their_answers(count: int, wrong: bytes) -> None:
    async with live_server() as live:
        reader, writer = await opened(live)
        writer.write(request(b"") * count + wrong)
        async with asyncio.timeout(20):
            for _ in range(count):
                status, body = await answer_of(reader)
                assert (status, body["choices"][0]["text"]) == (200, letters(3))
            assert await reader.read() == b""
        writer.close()


async def test_only_so_many_requests_wait_for_the_answers_before_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each answer lets uvicorn read on, so that without a bound more would wait after each."""
    async with live_server() as live:
        reader, writer = await opened(live)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        async with asyncio.timeout(20):
            answers = (await reader.read()).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert len(answers) == 1 + 32
        assert [b"connection: close" in answer for answer in answers] == [False] * 32 + [True]
        writer.close()
    assert not caplog.records


async def test_a_request_whose_own_body_is_wrong_is_refused_while_it_is_answered() -> None:
    async with live_server() as live:
        wrong = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n"
        ((status, body),) = await answers_to(live, wrong, b"xyz\r\n")
        assert (status, body["error"]["code"]) == (400, "invalid_http")
