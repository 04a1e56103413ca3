"""Sends ended requests as OpenTelemetry spans, from a thread that no request waits for.

The packages are those of the extra `otel`; they are imported only if an endpoint is given.
"""

import importlib.util
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from serving.spans import Spans
from transfer.errors import ConfigError

log = logging.getLogger(__name__)

MAX_QUEUED = 1024  # requests; while so many wait, further ones are dropped
_MAX_BATCH = 64  # requests in one call
_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 2.0
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class SpanSender(Protocol):
    """What this module needs of an OTLP exporter."""

    def send(self, timelines: Sequence[dict[str, Any]]) -> bool:
        """Send the spans of these requests; whether they arrived. Blocks."""
        ...


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError if spans cannot be sent to `endpoint`; "" turns them off."""
    if not endpoint:
        return
    if "@" in endpoint.partition("?")[0]:  # also behind a slash, which a password may have
        raise ConfigError(
            "--otlp-traces-endpoint must have no user or password, which anybody could read on the "
            "command line; $OTEL_EXPORTER_OTLP_HEADERS may hold an Authorization"
        )
    if not _is_url(endpoint):
        raise ConfigError(
            f"--otlp-traces-endpoint must be a URL like http://HOST:4318/v1/traces, got {endpoint}"
        )
    if not all(map(_is_there, _PACKAGES)):
        raise ConfigError(
            "--otlp-traces-endpoint needs packages that are not installed: the extra otel of "
            "kvferry (opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http)"
        )


def _is_url(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half of the brackets of IPv6
        return False


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing too
        return False


class TraceExporter:
    """A bounded queue of ended requests, and the thread that empties it."""

    def __init__(self, sender: SpanSender, on_dropped: Callable[[int], None]) -> None:
        """on_dropped: called with the number of requests that are lost, from any thread."""
        self._sender = sender
        self._on_dropped = on_dropped
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_QUEUED)
        self._closing = False
        self._num_offered = self._num_settled = 0
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def offer(self, timeline: dict[str, Any]) -> None:
        """Queue an ended request, so that its spans are sent later; never waits."""
        try:
            self._queue.put_nowait(timeline)
        except queue.Full:
            self._on_dropped(1)
        else:
            self._num_offered += 1

    def close(self) -> None:
        """Send what is queued, for at most _STOP_TIMEOUT_S."""
        self._closing = True
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the thread takes what is queued, and looks at `_closing` after it
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            left = self._num_offered - self._num_settled
            log.warning("%d requests were not traced: no time is left", left)

    def _run(self) -> None:
        while True:
            batch = self._take()
            timelines = [timeline for timeline in batch if timeline is not None]
            if timelines and not self._sent(timelines):
                self._on_dropped(len(timelines))
            self._num_settled += len(timelines)
            if self._closing and self._queue.empty():
                return

    def _take(self) -> list[dict[str, Any] | None]:
        batch = [self._queue.get()]
        while len(batch) < _MAX_BATCH:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return batch

    def _sent(self, timelines: Sequence[dict[str, Any]]) -> bool:
        try:
            return self._sender.send(timelines)
        except Exception as error:  # one bad batch must not end the thread
            log.warning("traces of %d requests are lost: %s", len(timelines), error)
            return False


class OtlpSender:
    """Spans over HTTP, in protobuf."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: as check_endpoint takes it."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._spans = Spans()
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)

    def send(self, timelines: Sequence[dict[str, Any]]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = [span for timeline in timelines for span in self._spans.of(timeline)]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS
