"""The load client against a minimal server: what it timestamps, counts and calls a failure."""

import asyncio
import contextlib
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest

from bench import serve, timelines
from bench.arguments import API_KEY_ENV
from bench.client import Server, Trace, get_json, stream_completion
from bench.report import Report
from bench.serve import (
    UNKNOWN,
    NoServer,
    Slo,
    devices_of,
    load,
    parse_url,
    report_traces,
    run_workload,
)
from bench.surroundings import Surroundings
from bench.timelines import read_timelines, report_timelines
from bench.timing import seconds_per_call
from bench.workload import PlannedRequest, WorkloadConfig, plan_requests


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    },
}
_SHOWS_ITS_KEY = "import os; print('the key is', repr(os.environ['KVFERRY_API_KEY']))"
FRAMES = [
    event("a"),
    event("b"),
    event("c", "length"),
    b"data: " + json.dumps(USAGE).encode() + b"\n\n",
    b"data: [DONE]\n\n",
]


@contextlib.asynccontextmanager
async def server_of(
    pieces: list[bytes],
    status: int = 200,
    bodies: list[bytes] | None = None,
    paths: Mapping[str, object] | None = None,
) -> AsyncIterator[Server]:
    """Answer every request with these pieces, each sent as its own chunk.

    bodies: receives the request bodies. paths: answers to requests for these paths.
    """
    seen: list[asyncio.Task[None] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                body = await reader.readexactly(int(line.split(b":")[1]))
                if bodies is not None:
                    bodies.append(body)
        writer.write(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % status)
        path = head.split(b" ")[1].decode()
        found = (paths or {}).get(path)
        for piece in pieces if found is None else [json.dumps(found).encode()]:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield Server("127.0.0.1", listening.sockets[0].getsockname()[1])
    finally:
        listening.close()
        await listening.wait_closed()


async def test_a_stream_is_stamped_event_by_event():
    async with server_of(FRAMES) as server:
        trace = await stream_completion(server, {"prompt": [1]}, timeout_s=10)
    assert trace.ok, trace.error
    assert len(trace.event_s) == 3
    assert (trace.prompt_tokens, trace.output_tokens, trace.cached_tokens) == (4, 3, 2)
    assert trace.finish_reason == "length"
    assert trace.sent_s <= trace.event_s[0] <= trace.done_s


async def test_an_answer_that_ends_with_a_token_of_no_text_has_that_token():
    end = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    async with server_of([end, FRAMES[-1]]) as server:
        trace = await stream_completion(server, {"max_tokens": 1}, timeout_s=10)
    assert trace.ok, trace.error
    assert (len(trace.event_s), trace.output_tokens) == (1, 1)


async def test_frames_cut_anywhere_are_put_together():
    whole = b"".join(FRAMES)
    async with server_of([whole[i : i + 7] for i in range(0, len(whole), 7)]) as server:
        trace = await stream_completion(server, {}, timeout_s=10)
    assert trace.ok
    assert len(trace.event_s) == 3


@pytest.mark.parametrize(
    ("pieces", "status", "expected"),
    [
        (FRAMES[:2], 200, "without [DONE]"),
        ([b"too busy"], 429, "HTTP 429: too busy"),
        ([b'data: {"error": {"message": "gone"}}\n\n', FRAMES[-1]], 200, "gone"),
    ],
)
async def test_a_stream_that_ends_badly_is_a_failure_with_a_reason(pieces, status, expected):
    async with server_of(pieces, status) as server:
        trace = await stream_completion(server, {}, timeout_s=10)
    assert not trace.ok
    assert expected in trace.error


async def test_a_server_that_is_not_there_is_a_failure_not_an_exception():
    async with server_of([]) as server:
        pass
    assert not (await stream_completion(server, {}, timeout_s=5)).ok


async def test_get_json_reads_status_and_body():
    async with server_of([b'{"data": [1]}']) as server:
        assert await get_json(server, "/v1/models", 5) == (200, {"data": [1]})


async def test_a_workload_gets_a_trace_for_each_request_and_a_row_for_each_metric():
    config = WorkloadConfig(num_requests=6, input_tokens=4, output_tokens=3, concurrency=2)
    async with server_of(FRAMES) as server:
        traces, taken_s = await run_workload(server, "m", plan_requests(config), config, 10)
    report = Report("serve", Surroundings("c", "d", {}), out=io.StringIO())
    report_traces(report, "4/3 x2", traces, taken_s, Slo(ttft_ms=1e9), {"m": 1})
    values = {row.metric: row.value for row in report.rows}
    assert values["requests ok"] == 6
    assert values["requests failed"] == 0
    assert values["output"] == pytest.approx(18 / taken_s)
    assert values["prompt tokens out of a cache"] == 12
    assert {row.shapes["m"] for row in report.rows} == {1}
    assert values["goodput"] == pytest.approx(values["requests"])
    assert {"ttft p50", "ttft p99", "tpot p50", "itl p99"} <= values.keys()


@pytest.mark.parametrize("usage", [[], [{"prompt_tokens": 4, "completion_tokens": 3}]])
async def test_what_a_server_does_not_tell_of_its_usage_is_counted_or_left_out(usage):
    config = WorkloadConfig(num_requests=2, input_tokens=4, output_tokens=3)
    told = [b"data: " + json.dumps({"usage": one}).encode() + b"\n\n" for one in usage]
    async with server_of([*FRAMES[:3], *told, FRAMES[-1]]) as server:
        traces, taken_s = await run_workload(server, "m", plan_requests(config), config, 10)
    report = Report("serve", Surroundings("c", "d", {}), out=io.StringIO())
    report_traces(report, "4/3 x2", traces, taken_s, Slo(), {})
    values = {row.metric: row.value for row in report.rows}
    assert values["input"] == pytest.approx(8 / taken_s)
    assert "prompt tokens out of a cache" not in values


async def test_a_paced_request_is_made_when_it_is_due(monkeypatch):
    made: list[int] = []
    sent: list[tuple[int, ...]] = []

    class Ids(tuple[int, ...]):
        def __iter__(self):
            made.append(len(self))
            return super().__iter__()

    async def answered(server, payload, timeout_s):
        sent.append(tuple(made))
        return Trace()

    monkeypatch.setattr(serve, "stream_completion", answered)
    config = WorkloadConfig(rate_per_s=100.0)
    planned = [PlannedRequest(0.01 * at, Ids(range(at)), 1) for at in (1, 2, 3)]
    await run_workload(Server("127.0.0.1", 1), "m", planned, config, 10)
    assert sent == [(1,), (1, 2), (1, 2, 3)]


async def test_an_answer_of_another_length_than_was_asked_for_has_failed():
    config = WorkloadConfig(num_requests=1, input_tokens=4, output_tokens=4)
    async with server_of(FRAMES) as server:
        (trace,), _ = await run_workload(server, "m", plan_requests(config), config, 10)
    assert not trace.ok
    assert trace.error == "3 tokens came, 4 were asked"


async def test_requests_longer_than_the_server_takes_are_refused_before_any_is_sent():
    config = WorkloadConfig(num_requests=1, input_tokens=10, output_tokens=10, spread=0.5)
    report = Report("serve", Surroundings("c", "d", {}), out=io.StringIO())
    bodies: list[bytes] = []
    paths = {"/v1/models": {"data": [{"id": "m", "max_model_len": 29}]}}
    async with server_of(FRAMES, bodies=bodies, paths=paths) as server:
        with pytest.raises(ValueError, match="up to 30 tokens together, and m takes 29"):
            await asyncio.to_thread(load, report, server, "case", config, Slo(), 10.0, 2)
    assert not bodies


async def test_a_load_warms_up_with_prompts_that_it_does_not_measure():
    config = WorkloadConfig(num_requests=3, input_tokens=4, output_tokens=3, concurrency=1)
    report = Report("serve", Surroundings("c", "d", {}), out=io.StringIO())
    bodies: list[bytes] = []
    paths = {
        "/v1/models": {"data": [{"id": "m"}]},
        "/get_server_info": {"workers": [{"devices": "1 x NVIDIA H200"}]},
    }
    async with server_of(FRAMES, bodies=bodies, paths=paths) as server:
        await asyncio.to_thread(load, report, server, "case", config, Slo(), 10.0, 2, "up --x")
    prompts = [tuple(json.loads(body)["prompt"]) for body in bodies]
    assert len(set(prompts)) == len(prompts) == 5
    assert prompts[2:] == [request.prompt_ids for request in plan_requests(config)]
    said = report.rows[0].shapes
    assert (said["model"], said["warm_up"], said["server"]) == ("m", 2, "up --x")
    assert {row.device for row in report.rows} == {"1 x NVIDIA H200"}


async def test_requests_of_the_warm_up_that_fail_are_told(capsys):
    config = WorkloadConfig(num_requests=1, input_tokens=4, output_tokens=4)
    report = Report("serve", Surroundings("c", "d", {}), out=io.StringIO())
    async with server_of(FRAMES, paths={"/v1/models": {"data": [{"id": "m"}]}}) as server:
        await asyncio.to_thread(load, report, server, "case", config, Slo(), 10.0, 2)
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == "2 of 2 warm-up requests failed: 3 tokens came, 4 were asked"


async def test_rows_of_a_server_that_tells_nothing_do_not_name_the_clients_processor():
    config = WorkloadConfig(num_requests=1, input_tokens=4, output_tokens=3)
    report = Report("serve", Surroundings("c", "2 x processor", {}), out=io.StringIO())
    paths = {"/v1/models": {"data": [{"id": "m"}]}, "/get_server_info": {"version": "0"}}
    async with server_of(FRAMES, paths=paths) as server:
        await asyncio.to_thread(load, report, server, "case", config, Slo(), 10.0, 0)
    assert {row.device for row in report.rows} == {UNKNOWN}


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([{"devices": "2 x cpu"}, {"devices": "2 x cpu"}], ""),
        ([{"devices": "8 x NVIDIA H200"}, {"devices": "8 x NVIDIA H200"}], "8 x NVIDIA H200"),
        ([{"error": "gone"}], UNKNOWN),
    ],
)
async def test_the_server_says_which_accelerators_it_has(workers, expected):
    async with server_of([json.dumps({"workers": workers}).encode()]) as server:
        assert await asyncio.to_thread(devices_of, server) == expected


@pytest.mark.parametrize(("token", "bias"), [(7, {"7": 100}), (None, None)])
async def test_answers_may_be_biased_to_repeat_one_token(token, bias):
    config = WorkloadConfig(num_requests=2, input_tokens=4, repeat_token=token)
    bodies: list[bytes] = []
    async with server_of(FRAMES, bodies=bodies) as server:
        await run_workload(server, "m", plan_requests(config), config, 10)
    assert [json.loads(body).get("logit_bias") for body in bodies] == [bias, bias]


def test_tpot_is_over_tokens_after_the_first_and_none_for_one_token():
    trace = Trace(sent_s=0.0, event_s=[1.0, 2.0, 4.0], output_tokens=7)
    assert trace.ttft_s == 1.0
    assert trace.tpot_s == pytest.approx(0.5)
    assert trace.itl_s == [1.0, 2.0]
    assert Trace(event_s=[1.0], output_tokens=1).tpot_s is None


def test_an_slo_counts_only_requests_that_met_all_of_it():
    trace = Trace(sent_s=0.0, event_s=[0.1, 0.3], output_tokens=2)
    assert Slo(ttft_ms=101, tpot_ms=201).met_by(trace)
    assert not Slo(ttft_ms=99).met_by(trace)
    assert not Slo(tpot_ms=199).met_by(trace)
    assert not Slo().met_by(Trace(error="gone"))


def test_timing_waits_for_what_was_started():
    waited: list[int] = []
    taken_s = seconds_per_call(lambda: 1, waited.append, budget_s=0.001)
    assert taken_s > 0
    assert len(waited) >= 5


def test_servers_start_at_once_and_end_when_one_of_them_does_not_start(monkeypatch):
    together = threading.Barrier(2, timeout=30)
    ended: list[str] = []

    @contextlib.contextmanager
    def start(arguments: list[str]) -> Iterator[Server]:
        together.wait()
        if arguments == ["bad"]:
            raise NoServer("bad")
        yield Server(arguments[0], 1)
        ended.append(arguments[0])

    monkeypatch.setattr(serve, "started_server", start)
    with serve.started_servers([["a"], ["b"]]) as servers:
        assert [server.host for server in servers] == ["a", "b"]
        assert not ended
    assert sorted(ended) == ["a", "b"]
    with pytest.raises(NoServer, match="bad"), serve.started_servers([["c"], ["bad"]]):
        pass


@pytest.mark.parametrize("key", ["", "told"])
def test_a_server_that_was_started_has_the_key_that_the_load_sends(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(API_KEY_ENV, "of-the-environment")
    monkeypatch.setattr(serve, "words_of", lambda _: [sys.executable, "-c", _SHOWS_ITS_KEY])
    with pytest.raises(NoServer, match=f"the key is {key!r}"), serve.started_server([], key):
        pass
    monkeypatch.setattr(serve, "wait_ready", lambda *_: True)
    with serve.started_server([], key) as server:
        assert server.api_key == key


def test_a_server_that_ends_during_the_load_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dies = "import sys; print('out of luck', flush=True); sys.exit(7)"
    monkeypatch.setattr(serve, "words_of", lambda _: [sys.executable, "-c", dies])
    running: list[subprocess.Popen[bytes]] = []

    def ready(_: Server, process: subprocess.Popen[bytes], __: float) -> bool:
        running.append(process)
        return True

    monkeypatch.setattr(serve, "wait_ready", ready)
    for error in (None, ValueError(), KeyboardInterrupt()):
        with contextlib.suppress(ValueError, KeyboardInterrupt), serve.started_server([]):
            running[-1].wait()
            if error is not None:
                raise error
        is_told = not isinstance(error, KeyboardInterrupt)
        told = "the server ended (status 7):\nout of luck\n\n"
        assert capsys.readouterr().err == told * is_told


def test_only_plain_http_addresses_are_taken():
    assert parse_url("http://localhost:8000", "k") == Server("localhost", 8000, "k")
    assert parse_url("http://localhost/", "") == Server("localhost", 80)


@pytest.mark.parametrize("url", ["localhost:8000", "http://a:0", "http://a:70000", "http://[::1"])
def test_an_address_that_is_none_is_refused_with_what_came(url: str) -> None:
    with pytest.raises(
        ValueError, match=f"--url must be http://host:port, got {re.escape(repr(url))}"
    ):
        parse_url(url, "")


@pytest.mark.parametrize("rest", ["/v1", "/v1/", "?a=b", "#a"])
def test_an_address_with_more_than_host_and_port_is_refused(rest):
    with pytest.raises(ValueError, match="http://host:port and nothing else, got 'http://a:1"):
        parse_url(f"http://a:1{rest}", "")


def a_timeline(**prefill: object) -> dict[str, object]:
    """Two chunks; the first byte leaves after 100 ms."""
    known = {
        "reported": True,
        "grant_wait_ms": 5.0,
        "chunks": [
            {"start_ms": 10.0, "end_ms": 40.0, "handed_over_ms": 41.0},
            {"start_ms": 20.0, "end_ms": 90.0, "handed_over_ms": 92.0},
        ],
        "transfer": {"first_byte_ms": 50.0, "acked_ms": 100.0},
    }
    attempt = {"prefill": known | prefill}
    return {"first_write_ms": 100.0, "choices": [{"attempts": [attempt]}]}


def test_timelines_say_what_grant_and_transfer_add_to_the_first_token():
    report = Report("serve", Surroundings("c", "d", {}), out=io.StringIO())
    others = [a_timeline(reported=False), a_timeline(transfer=None), a_timeline()]
    others[2]["first_write_ms"] = None
    others.append({"first_write_ms": 1.0, "choices": [{"attempts": [{"prefill": None}]}]})
    others += [{"a": 1}, {"first_write_ms": 1.0, "choices": []}, a_timeline(chunks="x")]
    others += [a_timeline(grant_wait_ms=float("nan"))]
    report_timelines(report, "case", [a_timeline(), *others], {})
    assert [(row.metric, row.value, row.unit) for row in report.rows] == [
        ("chunks a prompt", 2.0, "count"),
        ("grant wait", 5.0, "% TTFT"),
        ("transfer", 3.0, "% TTFT"),
        ("transfer behind computing", 0.8, "share"),
        ("transfer after last chunk", 10.0, "ms"),
    ]
    report_timelines(report, "case", [], {})
    assert len(report.rows) == 5


async def test_a_server_that_hangs_is_not_asked_for_every_timeline(monkeypatch):
    monkeypatch.setattr(timelines, "_TIMEOUT_S", 0.1)
    asked: list[asyncio.StreamWriter] = []
    answer = await asyncio.start_server(lambda _, writer: asked.append(writer), "127.0.0.1", 0)
    async with answer:
        server = Server("127.0.0.1", answer.sockets[0].getsockname()[1])
        found = await read_timelines(server, [*map(str, range(100))])
        for writer in asked:
            writer.close()
    assert not found
    assert len(asked) <= timelines._AT_ONCE


async def test_a_server_without_timelines_gives_no_rows():
    async with server_of([b'{"detail": "no such path"}'], 404) as server:
        assert await read_timelines(server, ["a", "", "b"]) == []
    async with server_of([b'{"request_id": "a"}']) as server:
        assert await read_timelines(server, ["a", ""]) == [{"request_id": "a"}]
