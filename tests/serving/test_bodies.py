"""Bodies that are too large or do not come, over a real socket."""

import asyncio
import gzip
import json
import socket
from itertools import product
from typing import Any

import pytest

from serving import admin
from serving.bodies import ALWAYS_BYTES, AT_ONCE, MAX_JSON_COMMAS, MAX_JSON_PARTS, Bodies, Body
from serving.errors import ApiError
from serving.front import Front
from tests.serving.live import live_server
from transfer.clock import ManualClock


@pytest.mark.parametrize("chunked", [False, True])
async def test_who_reads_nothing_before_all_is_sent_is_told_that_it_was_too_much(
    chunked: bool,
) -> None:
    body = b"x" * (12 << 20)  # more than sockets hold
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    if chunked:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with live_server(max_request_bytes=4 << 20) as live:
        host, port = live.url.removeprefix("http://").split(":")

        def ask() -> bytes:
            with socket.create_connection((host, int(port)), timeout=20) as sock:
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n"
                sock.sendall(head + body)
                with sock.makefile("rb") as answer:
                    return answer.read()  # to the end: the server closes

        answer = await asyncio.to_thread(ask)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"code":"request_too_large"' in answer


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        (b"/v1/completions", b"wrong", b"401"),
        (b"/v1/embeddings", b"secret", b"404"),
        (b"/v1/models", b"secret", b"405"),
    ],
)
async def test_an_answer_that_needs_no_body_reaches_who_sends_all_of_it_first(
    version: bytes, path: bytes, key: bytes, status: bytes
) -> None:
    body = b"x" * (12 << 20)  # more than sockets hold
    head = b"POST %b HTTP/%b\r\nHost: x\r\nAuthorization: Bearer %b\r\n" % (path, version, key)
    head += b"Connection: close\r\n" if version == b"1.1" else b""
    async with live_server(max_request_bytes=4 << 20, api_key="secret") as live:
        host, port = live.url.removeprefix("http://").split(":")

        def ask(rest: bytes) -> bytes:
            with socket.create_connection((host, int(port)), timeout=20) as sock:
                sock.sendall(head + rest)
                with sock.makefile("rb") as answer:
                    return answer.read()  # to the end: the server closes

        for rest in (
            b"Content-Length: %d\r\n\r\n" % len(body) + body,
            b"Content-Length: 99\r\nExpect: 100-continue\r\n\r\n",
            b"\r\n",
        ):
            answer = await asyncio.to_thread(ask, rest)
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert answer.endswith(b"}")


async def test_a_body_larger_than_anyone_waits_for_is_refused_by_its_length() -> None:
    async with live_server(max_request_bytes=1000) as live:
        host, port = live.url.removeprefix("http://").split(":")
        for length, more in ((4001, b""), (2000, b"Expect: 100-continue\r\n")):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n"
            writer.write(head % (more, length))
            async with asyncio.timeout(10):
                assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
            writer.close()
            await writer.wait_closed()


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi!", "max_tokens": 1},
    "/v1/responses": {"input": "Hi!", "max_output_tokens": 1},
    "/generate": {"text": "Hi!", "sampling_params": {"max_new_tokens": 1}},
    "/tokenize": {"prompt": "Hi!"},
    "/detokenize": {"tokens": [1]},
    "/abort_request": {"rid": "none"},
    "/drain": {"worker_id": "none"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_that_is_encoded_is_refused_by_its_header(path: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    async with live_server(api_key="secret") as live:
        key = {"Authorization": "Bearer secret"}
        for coding in ("gzip", "GZIP", "br", "identity, gzip", "x" * 500):
            # Whatever the body is: here it would be JSON.
            for content in (body, gzip.compress(body)):
                headers = key | {"Content-Encoding": coding}
                response = await live.http.post(path, content=content, headers=headers)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (415, "unsupported_encoding")
                assert error["type"] == "invalid_request_error"
                named = f"Content-Encoding: expected a body as it is (identity), got '{coding[:99]}"
                assert error["message"].startswith(named)
                assert response.headers["accept-encoding"] == "identity"
                assert response.headers["x-request-id"]
        for coding in ("identity", "Identity", ""):
            headers = key | {"Content-Encoding": coding}
            response = await live.http.post(path, content=body, headers=headers)
            assert response.status_code == (404 if path == "/drain" else 200), response.text
        response = await live.http.post(path, content=body, headers={"Content-Encoding": "gzip"})
        assert response.status_code == 401  # first


async def test_an_encoded_body_is_read_to_its_end_or_not_asked_for() -> None:
    async with live_server(max_request_bytes=4 << 20) as live:
        host, port = live.url.removeprefix("http://").split(":")
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"

        def ask(rest: bytes) -> bytes:
            with socket.create_connection((host, int(port)), timeout=20) as sock:
                sock.sendall(head + rest)
                with sock.makefile("rb") as answer:
                    return answer.read()  # to the end: the server closes

        body = b"x" * (12 << 20)  # more than sockets hold
        for rest in (
            b"Content-Length: %d\r\n\r\n" % len(body) + body,
            b"Content-Length: 99\r\nExpect: 100-continue\r\n\r\n",
        ):
            answer = await asyncio.to_thread(ask, rest)
            assert answer.startswith(b"HTTP/1.1 415 ")
            assert b'"code":"unsupported_encoding"' in answer


async def test_a_body_that_does_not_come_is_given_up() -> None:
    async with live_server(slow_client_timeout_s=0.05) as live:
        host, port = live.url.removeprefix("http://").split(":")
        for path in ("/v1/completions", "/tokenize"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
            writer.write(head.encode() + b'{"prompt": ')
            answer = await reader.read()  # to the end: the server closes
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"request_timeout"' in answer
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/tokenize"])
async def test_a_body_of_very_many_small_things_is_refused_before_it_is_read(path: str) -> None:
    """Reading ten million took three seconds, in which no other stream got a token."""
    message = {"role": "user", "content": "Hi!"}
    asked: dict[str, Any] = {"messages": [message], "max_tokens": 1}
    if path == "/generate":
        asked = {"text": "Hi!", "sampling_params": {"max_new_tokens": 1}}
    parts = f"the body has more than {MAX_JSON_PARTS} opening brackets, or colons", MAX_JSON_PARTS
    commas = f"the body has more than {MAX_JSON_COMMAS} commas", MAX_JSON_COMMAS
    for_each = (
        (b"[", b"[]", b"]", *parts),
        (b"{", b'"":0', b"}", *parts),
        (b"[", b"0", b"]", *commas),
    )
    async with live_server() as live:
        for (begin, one, end, told, most), (fewer, status) in product(
            for_each, ((100, 200), (0, 400))
        ):
            count = most - fewer
            many = b'{"somebodys": ' + begin + b",".join([one] * count) + end + b","
            body = many + json.dumps(asked).encode()[1:]
            response = await live.http.post(path, content=body)
            assert response.status_code == status, response.text
            assert (told in response.text) == (status == 400)


async def test_large_bodies_that_do_not_end_take_no_more_than_their_memory() -> None:
    most_bytes = 3 << 20
    each = most_bytes - ALWAYS_BYTES  # the part of a body that counts
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % most_bytes
    large = json.dumps({"prompt": "Hi!", "somebodys": "x" * (2 << 20)}).encode()
    async with live_server(max_request_bytes=most_bytes) as live:
        host, port = live.url.removeprefix("http://").split(":")
        writers = []
        for _ in range(AT_ONCE * most_bytes // each):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head + b" " * (most_bytes - 1))
            await writer.drain()
            writers.append(writer)

        async def status() -> int:
            response = await live.http.post("/tokenize", content=large)
            if response.status_code == 429:
                assert response.json()["error"]["code"] == "queue_full"
                assert "other large bodies are being received" in response.text
                assert response.headers["retry-after"]
            return response.status_code

        async def until(expected: int) -> None:
            async with asyncio.timeout(20):
                while await status() != expected:  # noqa: ASYNC110  (the server reads meanwhile)
                    await asyncio.sleep(0.01)

        await until(429)
        for path, body in BODIES.items():
            expected = 404 if path == "/drain" else 200
            assert (await live.post(path, body)).status_code == expected
        # One that comes to its end, and one whose client leaves, make room again.
        writers[0].write(b" ")
        writers[1].close()
        await until(200)
        for writer in writers:
            writer.close()
            await writer.wait_closed()


async def test_what_is_held_of_bodies_is_given_back_however_they_end() -> None:
    bodies = Bodies(2 << 20, 0.05)
    scope: dict[str, Any] = {"headers": []}
    part = {"type": "http.request", "body": b" " * (3 << 19), "more_body": True}
    last = {"type": "http.request", "body": b"", "more_body": False}
    gone = {"type": "http.disconnect"}

    async def read(*messages: dict[str, Any]) -> bytes | None:
        left = list(messages)

        async def receive() -> dict[str, Any]:
            if not left:
                await asyncio.sleep(60)
            return left.pop(0)

        with Body(bodies) as body:
            return await body.read(scope, receive)

    whole = await read(part, last)
    assert whole is not None
    assert len(whole) == 3 << 19
    assert await read(part, gone) is None
    for messages, status in (((part,), 408), ((part, part, last), 413)):
        with pytest.raises(ApiError) as told:
            await read(*messages)
        assert told.value.status == status
    reading = asyncio.create_task(read(part))
    await asyncio.sleep(0)
    assert bodies.held_bytes == (3 << 19) - ALWAYS_BYTES
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert bodies.held_bytes == 0


async def test_a_large_body_that_comes_drop_by_drop_is_given_up_and_a_small_one_is_not() -> None:
    clock = ManualClock()
    bodies = Bodies(4 << 20, 1.0, clock)

    async def read(first: int) -> bytes | None:
        left, end_s = first, clock.monotonic_s() + 200

        async def receive() -> dict[str, Any]:
            nonlocal left
            clock.advance(0.9)  # within the time allowed for the next part
            part, left = left or 1, 0
            more = clock.monotonic_s() < end_s
            return {"type": "http.request", "body": b" " * part, "more_body": more}

        with Body(bodies) as body:
            return await body.read({"headers": []}, receive)

    began_s = clock.monotonic_s()
    with pytest.raises(ApiError, match="bytes of the body came in over 1 s") as told:
        await read(3 << 20)
    assert told.value.status == 408
    assert 96 < clock.monotonic_s() - began_s < 100  # 3 MiB at 32 KiB a second
    assert bodies.held_bytes == 0
    assert await read(1000) is not None


async def test_a_conversation_that_is_tokenized_counts_until_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []
    render = admin.render_prompt
    front: list[Front] = []
    made = Front.__init__

    def kept(self: Front, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        front.append(self)

    async def rendered(*args: Any) -> str:
        held.append(front[0].bodies.held_bytes)
        return await render(*args)

    monkeypatch.setattr(Front, "__init__", kept)
    monkeypatch.setattr(admin, "render_prompt", rendered)
    asked = BODIES["/v1/chat/completions"] | {"chat_template_kwargs": {"a": "x" * (2 << 20)}}
    async with live_server() as live:
        assert (await live.post("/tokenize", asked)).status_code == 200
        assert held[0] > 1 << 20
        assert front[0].bodies.held_bytes == 0
