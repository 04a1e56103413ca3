"""The load client against servers whose HTTP differs from ours, and servers that send nonsense."""

import asyncio
import time

import pytest

from bench.client import NoAnswer, Server, get_json, stream_completion
from bench.serve import UNKNOWN, NoServer, devices_of, run_workload, served_model
from bench.timelines import read_timelines
from bench.workload import WorkloadConfig, plan_requests
from tests.bench.test_serve import FRAMES, server_of

WHOLE = b"".join(FRAMES)
CRLF = WHOLE.replace(b"\n", b"\r\n")


def test_an_ipv6_host_has_its_brackets_in_a_request() -> None:
    assert b"\r\nHost: [::1]:80\r\n" in Server("::1", 80).request("GET", "/")
    assert b"\r\nHost: a:80\r\n" in Server("a", 80).request("GET", "/")


@pytest.mark.parametrize(
    "whole",
    [
        CRLF,
        WHOLE.replace(b"\n", b"\r"),
        WHOLE.replace(b"data: ", b"data:"),
        CRLF.replace(b"data: ", b": a comment\r\nid: 7\r\ndata:"),
        CRLF.replace(b'"choices"', b'\r\ndata: "choices"'),  # an event of two lines
    ],
    ids=["crlf", "cr", "no space", "other fields", "lines"],
)
@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
async def test_events_may_be_spelt_in_any_way_and_cut_anywhere(whole, size):
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    async with server_of(pieces) as server:
        trace = await stream_completion(server, {}, timeout_s=10)
    assert trace.ok, trace.error
    assert (len(trace.event_s), trace.output_tokens) == (3, 3)


async def test_an_event_counts_once_its_last_byte_is_there_wherever_it_was_cut():
    cut = CRLF.index(b"\r\n\r\n") + 3
    for at in range(cut - 4, cut + 2):
        async with server_of([CRLF[:at], CRLF[at:]]) as server:
            trace = await stream_completion(server, {}, timeout_s=10)
        assert trace.ok, trace.error
        assert len(trace.event_s) == 3


@pytest.mark.parametrize(
    "event",
    [
        "5",
        "[1]",
        "null",
        '"error"',
        '{"choices":null}',
        '{"choices":["x"]}',
        '{"usage":{"x":1}}',
        '{"usage":{"completion_tokens":Infinity,"prompt_tokens":1}}',
        "[" * 100_000,
        "no json",
    ],
    ids=lambda event: event[:20],
)
async def test_a_malformed_event_is_a_failed_request_among_others(event):
    frames = [f"data: {event}\n\n".encode(), *FRAMES]
    config = WorkloadConfig(num_requests=2, input_tokens=4, output_tokens=3)
    async with server_of(frames) as server:
        traces, _ = await run_workload(server, "m", plan_requests(config), config, 10)
    assert ["ValueError: no event: " in trace.error for trace in traces] == [True, True]


async def answering(data: bytes, ask) -> object:
    """What ask returns when the server answers with these bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        return await ask(Server("127.0.0.1", listening.sockets[0].getsockname()[1]))


NO_HTTP = [
    b"nonsense\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 400_000 + b"\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnone",
    b"",
]


@pytest.mark.parametrize("data", NO_HTTP, ids=["no status", "endless head", "no chunk", "closed"])
async def test_what_is_no_http_is_no_answer(data):
    async def ask(server: Server) -> object:
        with pytest.raises(NoAnswer):
            await get_json(server, "/x", 10)
        with pytest.raises(NoServer, match="does not answer"):
            await asyncio.to_thread(served_model, server)
        assert await read_timelines(server, ["a", "\ud800"]) == []
        return await asyncio.to_thread(devices_of, server)

    assert await answering(data, ask) == UNKNOWN


@pytest.mark.parametrize(
    "body", [b"", b"5", b"[]", b'{"workers": 3}', b'{"workers": ["x"]}', b'{"workers": [{}]}']
)
async def test_a_server_may_tell_nothing_of_its_devices(body):
    async with server_of([body] if body else []) as server:
        assert await asyncio.to_thread(devices_of, server) == UNKNOWN


async def test_the_wait_for_a_connection_is_part_of_ttft(monkeypatch):
    asked_s, plainly = [], asyncio.open_connection

    async def opened(*address, **how):
        asked_s.append(time.perf_counter())
        return await plainly(*address, **how)

    monkeypatch.setattr(asyncio, "open_connection", opened)
    async with server_of(FRAMES) as server:
        trace = await stream_completion(server, {}, timeout_s=10)
    assert trace.ok, trace.error
    assert trace.sent_s <= asked_s[0]


async def test_a_name_is_looked_up_once_for_all_requests(monkeypatch):
    asked, loop = [], asyncio.get_running_loop()
    plainly = loop.getaddrinfo

    async def looked_up(host, *more, **how):
        asked.append(host)
        return await plainly(host, *more, **how)

    monkeypatch.setattr(loop, "getaddrinfo", looked_up)
    config = WorkloadConfig(num_requests=3, input_tokens=4, output_tokens=3)
    async with server_of(FRAMES) as server:
        by_name = Server("localhost", server.port)
        traces, _ = await run_workload(by_name, "m", plan_requests(config), config, 10)
    assert [trace.error for trace in traces] == ["", "", ""]
    assert asked == ["localhost"]


async def test_a_head_of_any_length_that_a_server_may_have_is_read():
    head = b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000 + b"\r\n\r\n"
    assert await answering(head + b"[1]", lambda server: get_json(server, "/", 10)) == (200, [1])


async def test_who_lacks_the_servers_key_is_told_of_the_flag():
    async with server_of([b"{}"], 401) as server:
        with pytest.raises(NoServer, match="401: give the server's key as --api-key"):
            await asyncio.to_thread(served_model, server)


async def test_an_interrupted_workload_says_how_much_of_it_had_ended(capsys):
    waiting = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answered:
            waiting.set()
            await reader.read()  # until the client is gone
        else:
            answered.append(True)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + WHOLE)
        writer.close()

    answered: list[bool] = []
    config = WorkloadConfig(num_requests=3, input_tokens=4, output_tokens=3, concurrency=1)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        server = Server("127.0.0.1", listening.sockets[0].getsockname()[1])
        work = run_workload(server, "m", plan_requests(config), config, 10)
        running = asyncio.create_task(work)
        await waiting.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert capsys.readouterr().err == "1 of 3 requests had ended\n"
