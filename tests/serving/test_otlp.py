"""Spans of ended requests: what they say, where they go, and that nobody waits for them."""

import asyncio
import contextlib
import gzip
import itertools
import queue
import re
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import serving.otlp
from serving.config import ServeConfig
from serving.otlp import MAX_QUEUED, TraceExporter, check_endpoint
from serving.spans import Spans, stages_of
from tests.fakes import FakeCluster, until
from tests.serving.live import alphabet
from tests.serving.processes import serving as server_of
from tests.serving.processes import step_until, stream
from transfer.errors import ConfigError


class Sender:
    """Sends once `may` is set."""

    def __init__(self, *results: bool | Exception) -> None:
        self.may = threading.Event()
        self.begun = threading.Event()
        self.sent: list[dict[str, Any]] = []
        self._results = list(results)

    def send(self, timelines: Sequence[dict[str, Any]]) -> bool:
        self.begun.set()
        assert self.may.wait(20)
        result = self._results.pop(0) if self._results else True
        if isinstance(result, Exception):
            raise result
        if result:
            self.sent += timelines
        return result


def test_what_cannot_be_queued_is_dropped_and_counted_without_a_wait() -> None:
    sender = Sender()
    dropped: list[int] = []
    exporter = TraceExporter(sender, dropped.append)
    exporter.offer({"number": -1})
    assert sender.begun.wait(20)
    for number in range(MAX_QUEUED + 3):
        exporter.offer({"number": number})
    assert sum(dropped) == 3
    sender.may.set()
    exporter.close()
    assert [timeline["number"] for timeline in sender.sent] == list(range(-1, MAX_QUEUED))


def test_what_is_lost_at_the_end_is_told_in_full(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.otlp, "_STOP_TIMEOUT_S", 0.05)
    begun = [threading.Event(), threading.Event()]
    may = [threading.Event(), threading.Event()]
    batches = itertools.count()

    class Slow(Sender):
        def send(self, timelines: Sequence[dict[str, Any]]) -> bool:
            number = next(batches)
            begun[number].set()
            return may[number].wait(20)

    exporter = TraceExporter(Slow(), lambda count: None)
    exporter.offer({"number": 0})
    assert begun[0].wait(20)
    for number in (1, 2):
        exporter.offer({"number": number})
    may[0].set()
    assert begun[1].wait(20)
    exporter.close()
    may[1].set()
    assert "2 requests were not traced: no time is left" in caplog.text


def test_a_batch_that_fails_is_counted_and_the_next_one_sent() -> None:
    sender = Sender(False, OSError("nobody there"))
    sender.may.set()
    dropped: queue.Queue[int] = queue.Queue()
    exporter = TraceExporter(sender, dropped.put)
    for number in range(2):
        exporter.offer({"number": number})
        assert dropped.get(timeout=20) == 1
    exporter.offer({"number": 2})
    exporter.close()
    assert sender.sent == [{"number": 2}]
    assert dropped.empty()


def test_an_endpoint_is_refused_at_once_when_it_cannot_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_endpoint("")
    check_endpoint("http://collector:4318/v1/traces")
    check_endpoint("http://collector:4318/v1/traces?from=me@here")
    for password in ("secret", "sec/ret"):
        with pytest.raises(ConfigError, match="no user or password") as told:
            check_endpoint(f"http://me:{password}@collector:4318/v1/traces")
        assert password not in str(told.value)
    malformed = ("http://collector:99999/v1/traces", "http://c:http/", "http://[::1/v1/traces")
    for bad in ("collector:4318", "http://", "http:///v1/traces", "ftp://collector", *malformed):
        with pytest.raises(ConfigError, match=f"must be a URL like .* got {re.escape(bad)}"):
            check_endpoint(bad)
    monkeypatch.setattr(serving.otlp, "_PACKAGES", ("no_such_package.inside",))
    check_endpoint("")
    with pytest.raises(ConfigError, match="not installed: the extra otel"):
        check_endpoint("http://collector:4318/v1/traces")
    with pytest.raises(ConfigError, match="--timeline-requests above 0"):
        ServeConfig(Path(), "", otlp_traces_endpoint="http://c", timeline_requests=0)


def a_timeline() -> dict[str, Any]:
    leg = {"worker": "p", "reported": True, "ending": "done", "queued_ms": 1.0}
    prefill = leg | {
        "first_token_ms": 40.0,
        "ended_ms": 60.0,
        "cached_tokens": 0,
        "chunks": [{}, {}],
        "grant_wait_ms": 0.5,
        "transfer": {
            "backend": "shm",
            "bytes": 10,
            "frames": 1,
            "first_byte_ms": 20.0,
            "last_byte_ms": 45.0,
            "acked_ms": 50.0,
        },
    }
    decode = {"worker": "d", "reported": False}
    attempt = {"prefill": prefill, "decode": decode, "moved": {"reason": "peer_lost"}}
    second = attempt | {"prefill": {"worker": "p", "reported": False}, "moved": None}
    second["decode"] = leg | {
        "worker": "d",
        "reserved_ms": 2.0,
        "pages_complete_ms": 70.0,
        "first_step_ms": None,
        "steps": 3,
        "ended_ms": 90.0,
    }
    choice = {
        "index": 0,
        "error": None,
        "prompt_tokens": 5,
        "output_tokens": 4,
        "num_attempts": 2,
        "attempts": [attempt, second],
    }
    return {
        "request_id": "mine",
        "arrival_unix_s": 1000.0,
        "stream": True,
        "prompt_tokens": 5,
        "admitted_ms": 0.5,
        "first_write_ms": 41.0,
        "writes": 4,
        "ended_ms": 100.0,
        "error": None,
        "choices": [choice],
    }


def test_spans_are_the_request_and_the_stages_that_were_told() -> None:
    found = [(name, start, end) for name, start, end, _ in stages_of(a_timeline())]
    assert found == [
        ("queue", 0.0, 0.5),
        ("prefill", 1.0, 40.0),
        ("transfer", 20.0, 50.0),
        ("decode", 1.0, 90.0),
    ]
    root, *children = Spans().of(a_timeline())
    assert (root.name, root.start_time, root.end_time) == ("request", 10**12, 10**12 + 10**8)
    assert root.attributes["kvferry.request_id"] == "mine"
    counted = ("prompt_tokens", "output_tokens", "choices", "moves")
    assert [root.attributes[f"kvferry.{name}"] for name in counted] == [5, 4, 1, 1]
    assert {child.context.trace_id for child in children} == {root.context.trace_id}
    assert {child.parent.span_id for child in children} == {root.context.span_id}
    transfer = children[2]
    assert (transfer.start_time, transfer.end_time) == (10**12 + 2 * 10**7, 10**12 + 5 * 10**7)
    assert transfer.attributes["kvferry.moved"] == "peer_lost"
    failed = a_timeline() | {"admitted_ms": None, "error": {"code": "queue_full", "message": "m"}}
    root, *children = Spans().of(failed)
    assert not root.status.is_ok
    assert root.attributes["kvferry.errors"] == ["queue_full"]
    assert "queue" not in [child.name for child in children]


def test_a_prompt_that_decode_computed_itself_has_no_span_of_prefill() -> None:
    timeline = a_timeline()
    (choice,) = timeline["choices"]
    choice["attempts"] = [choice["attempts"][1] | {"prefill": None}]
    names = [span.name for span in Spans().of(timeline)]
    assert names == ["request", "queue", "decode"]


@contextlib.asynccontextmanager
async def collector(
    got: list[ExportTraceServiceRequest],
) -> AsyncIterator[str]:
    """Takes spans over HTTP."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(fields["content-length"]))
                if fields.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                got.append(ExportTraceServiceRequest.FromString(body))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    listening = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/traces"
    finally:
        listening.close()


async def test_a_server_sends_the_spans_of_each_request(tmp_path: Path) -> None:
    got: list[ExportTraceServiceRequest] = []
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        collector(got) as endpoint,
        server_of(cluster, tmp_path, f"--otlp-traces-endpoint={endpoint}") as server,
        server.connection() as http,
    ):
        read = stream(http, rid="mine")
        await cluster.submitted(1)
        await step_until(cluster, read.task)
        await until(lambda: bool(got))
        (resource,) = got[0].resource_spans
        (scope,) = resource.scope_spans
        assert [span.name for span in scope.spans] == ["request", "queue"]
        values = {item.key: item.value for item in scope.spans[0].attributes}
        assert values["kvferry.request_id"].string_value == "mine"
        assert values["kvferry.output_tokens"].int_value == 8
        metrics = (await http.get("/metrics")).text
        assert "kvferry_traces_dropped_total 0.0" in metrics


async def test_requests_whose_spans_nobody_takes_are_counted(tmp_path: Path) -> None:
    nowhere = "--otlp-traces-endpoint=http://127.0.0.1:9/v1/traces"
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        server_of(cluster, tmp_path, nowhere) as server,
        server.connection() as http,
    ):
        read = stream(http, rid="mine")
        await cluster.submitted(1)
        await step_until(cluster, read.task)
        async with asyncio.timeout(30):
            text = ""
            while "traces_dropped_total 1.0" not in text:
                text = (await http.get("/metrics")).text
