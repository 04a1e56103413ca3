"""The load client of the front end benchmark: a loop over epoll that stamps and keeps bytes.

It counts events as they come, by their mark alone, and parses them only after the round, so that
the server is the slower end. `python -m bench.frontend_client FD`, driven by lines of JSON; FD is
a socket on which the engine asks to be told when the client holds a number of events.
"""

import contextlib
import gc
import http.client
import math
import os
import re
import select
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import orjson

from bench.frontend_plan import (
    STEER,
    TOKEN_CHARS,
    Cell,
    Dialect,
    inherited_socket,
    request_id,
    say,
    text_of,
    told,
)

_MARK = b"data: "
_EVENT = re.compile(rb"data: (.*)\n\n")
_TAIL_BYTES = len(_MARK) - 1  # too few to hold a mark, so none is counted twice
_LAST_CHUNK = b"0\r\n\r\n"
_READ_BYTES = 1 << 16
_SENDS_A_TURN = 8
_AHEAD = 64  # connections that wait for their requests, if requests are spaced in time
_PATIENCE_S = 60.0
_BETWEEN_ASKS_S = 0.1
_GOOD = b"HTTP/1.1 200 "
_CHAT = Dialect()


class BadStream(ValueError):
    """A stream does not say what it should; the message names the stream."""


@dataclass
class Reads:
    """The bytes of one connection, read by read; times are monotonic seconds."""

    times_s: list[float] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    events: int = 0
    tail: bytes = b""

    @classmethod
    def after(cls, opening: int) -> "Reads":
        """Reads of a stream whose first `opening` events have no text; they count as one event."""
        return cls(events=1 - opening)

    def add(self, now_s: float, data: bytes) -> int:
        """Keep a read; returns how many events begin in it."""
        self.times_s.append(now_s)
        self.data.append(data)
        seen = self.tail + data if self.tail else data
        self.tail = b"" if seen.endswith(b"\n\n\r\n") else seen[-_TAIL_BYTES:]
        events = seen.count(_MARK)
        self.events += events
        return events

    @property
    def ended(self) -> bool:
        """Whether the response is complete."""
        return self.tail == _LAST_CHUNK


@dataclass(frozen=True)
class Heard:
    """One stream, parsed: monotonic seconds of each token, f64[tokens], and its pieces."""

    token_s: np.ndarray
    num_pieces: int
    piece_bytes: int  # of the second piece, as it went over the wire

    @classmethod
    def of(
        cls,
        stream: int,
        reads: Reads,
        num_tokens: int,
        texts: Sequence[str],
        dialect: Dialect = _CHAT,
    ) -> "Heard":
        """Raises BadStream unless every token came once, in order, and then the end."""
        raw = b"".join(reads.data)
        if not raw.startswith(_GOOD):
            raise BadStream(f"stream {stream} was answered {raw[:300]!r}")
        ends = list(accumulate(map(len, reads.data)))
        token_s: list[float] = []
        said: list[str] = []
        piece_ends: list[int] = []
        read = _READERS.get(dialect.path, _read_chat)
        name = dialect.id_prefix + request_id(stream)
        finish = last = None
        for match in _EVENT.finditer(raw):
            last = match[1]
            try:
                text, ends_as = read(last, name)
            except (LookupError, TypeError, ValueError) as error:
                raise BadStream(f"stream {stream} got {last[:300]!r}: {error!r}") from error
            finish = ends_as or finish
            if text:
                said.append(text)
                now_s = reads.times_s[bisect_left(ends, match.end())]
                token_s += [now_s] * (len(text) // TOKEN_CHARS)
                piece_ends.append(match.end())
        if "".join(said) != text_of(stream, 0, num_tokens, texts):
            raise BadStream(
                f"stream {stream} has {len(token_s)} tokens, expected {num_tokens}, or they differ"
            )
        is_over = last == b"[DONE]" or not dialect.is_chat
        if finish != "length" or not is_over or not raw.endswith(_LAST_CHUNK):
            raise BadStream(f"stream {stream} ended with {finish!r} and {raw[-50:]!r}")
        piece_bytes = piece_ends[2] - piece_ends[1] if len(piece_ends) > 2 else 0
        return cls(np.array(token_s), len(said), piece_bytes)


def _read_chat(event: bytes, name: str) -> tuple[str, str]:
    """The text of a chat's event, and how the answer ended. Raises ValueError and LookupError."""
    if event == b"[DONE]":
        return "", ""
    value = orjson.loads(event)
    if value["id"] != name:
        raise ValueError("the id of another request")
    choice = value["choices"][0]
    return choice["delta"].get("content") or "", choice.get("finish_reason") or ""


def _read_response(event: bytes, name: str) -> tuple[str, str]:
    """The same for an event of Responses; only the first and the last ones have the id."""
    value = orjson.loads(event)
    if "response" not in value:
        is_text = value["type"] == "response.output_text.delta"
        return value["delta"] if is_text else "", ""
    if value["response"]["id"] != name:
        raise ValueError("the id of another request")
    return "", "length" if value["type"] == "response.incomplete" else ""


def _read_message(event: bytes, name: str) -> tuple[str, str]:
    """The same for an event of Messages; only the first one has the id."""
    value = orjson.loads(event)
    kind = value["type"]
    if kind == "message_start" and value["message"]["id"] != name:
        raise ValueError("the id of another request")
    if kind == "message_delta":
        return "", "length" if value["delta"]["stop_reason"] == "max_tokens" else "another"
    if kind == "error":
        raise ValueError("an error")
    return value["delta"]["text"] if kind == "content_block_delta" else "", ""


_READERS = {"/v1/responses": _read_response, "/v1/messages": _read_message}


class LoadClient:
    """Connections to the server under test, and rounds of requests over them."""

    def __init__(self, steering: socket.socket, texts: Sequence[str]) -> None:
        self._steering = steering
        self._texts = texts
        self._sockets: list[socket.socket] = []  # by stream
        self._stream_at: dict[int, int] = {}  # by descriptor
        self._address = ("", 0)
        self._epoll = select.epoll()
        self._epoll.register(steering.fileno(), select.EPOLLIN)
        self._threshold: float = math.inf  # events of a round at which to tell the engine
        self._total = 0

    def connect(self, host: str, port: int, cell: Cell) -> None:
        """Open new connections and wait until the server, which closes idle ones, accepted them.

        If requests are spaced in time, their connections are opened a little ahead of them. Raises
        OSError, and BadStream when the server is not ready in time.
        """
        for connection in self._sockets:
            connection.close()  # leaves the epoll with it
        self._sockets = []
        self._stream_at = {}
        self._address = (host, port)
        self._connect(min(cell.num_streams, _AHEAD) if cell.spacing_s else cell.num_streams)
        self._await_health()
        for connection in self._sockets:
            self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _await_health(self) -> None:
        """Wait until /health is 200: workers whose leases ended while the host stalled come back.

        Servers accept connections in order, so an answer on one that was opened last shows that
        all are accepted. It carries no stream: most servers close it within seconds of an answer.
        """
        end_s = time.monotonic() + _PATIENCE_S
        with socket.create_connection(self._address, timeout=_PATIENCE_S) as connection:
            while True:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: bench\r\n\r\n")
                answer = http.client.HTTPResponse(connection)
                try:
                    answer.begin()
                    body = answer.read()  # to its end: the rest would begin the next answer
                except http.client.HTTPException as error:
                    raise BadStream(f"the server was asked for its health: {error!r}") from error
                if answer.status == http.HTTPStatus.OK:
                    return
                if time.monotonic() > end_s:
                    what = f"{answer.status} {body!r}"
                    raise BadStream(f"the server was asked for its health and said {what}")
                time.sleep(_BETWEEN_ASKS_S)  # the server does not say when it changes

    def _connect(self, count: int) -> None:
        """Open connections until there are `count`."""
        while len(self._sockets) < count:
            connection = socket.create_connection(self._address, timeout=_PATIENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stream_at[connection.fileno()] = len(self._sockets)
            self._sockets.append(connection)

    def play(
        self, cell: Cell, payload: dict[str, Any], dialect: Dialect, path: str
    ) -> dict[str, Any]:
        """One round: a request on each connection, read to its end.

        Says `started` when every stream has its first token, `ended` when all are read. Writes
        f64[streams, tokens + 1] to path: when each request left, then when each token came.
        Raises BadStream.
        """
        requests = [
            self._request(dialect.path, payload | {dialect.id_field: request_id(stream)})
            for stream in range(cell.num_streams)
        ]
        reads = [Reads.after(dialect.opening) for _ in requests]
        gc.collect()
        gc.disable()
        sent_s = self._round(cell, requests, reads)
        say(ended=True)
        gc.enable()
        heard = [
            Heard.of(stream, one, cell.output_tokens, self._texts, dialect)
            for stream, one in enumerate(reads)
        ]
        table = np.empty((cell.num_streams, cell.output_tokens + 1))
        table[:, 0] = sent_s
        for stream, one in enumerate(heard):
            table[stream, 1:] = one.token_s
        np.save(path, table)
        return {
            "pieces": sum(one.num_pieces for one in heard),
            "piece_bytes": heard[0].piece_bytes,
            "reads": sum(len(one.data) for one in reads),
            "end_s": max(one.times_s[-1] for one in reads),
        }

    def _request(self, path: str, payload: dict[str, Any]) -> bytes:
        body = orjson.dumps(payload)
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: bench",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + body

    def _round(self, cell: Cell, requests: Sequence[bytes], reads: Sequence[Reads]) -> list[float]:
        """Send and read; returns when each request left."""
        stream_at = self._stream_at
        steering = self._steering.fileno()
        self._total = sum(one.events for one in reads)
        sent_s: list[float] = []
        start_s = heard_s = time.monotonic()
        not_started, not_ended = cell.num_streams, cell.num_streams
        patience_s = _PATIENCE_S + cell.spacing_s + cell.step_s
        while not_ended:
            wait_s = self._send(cell, requests, sent_s, start_s)
            ready = self._epoll.poll(wait_s, 1024)
            for fd, _ in ready:
                if fd == steering:
                    (self._threshold,) = STEER.unpack(self._steering.recv(STEER.size))
                    self._steer()
                    continue
                data = os.read(fd, _READ_BYTES)
                heard_s = time.monotonic()
                one = reads[stream_at[fd]]
                if data and not one.data and not data.startswith(_GOOD):
                    raise BadStream(f"stream {stream_at[fd]} was answered {data[:300]!r}")
                before = one.events
                self._total += one.add(heard_s, data)
                if self._total >= self._threshold:
                    self._steer()
                if before < 2 <= one.events:  # the event with the role, and the first token
                    not_started -= 1
                    if not not_started:
                        say(started=True)
                if one.ended:
                    not_ended -= 1
                elif not data:
                    stream = stream_at[fd]
                    raise BadStream(f"stream {stream} was closed after {one.events} events")
            if not ready and time.monotonic() - max(heard_s, *sent_s[-1:]) > patience_s:
                raise BadStream(f"{not_ended} streams have not ended; {self._total} events came")
        return sent_s

    def _send(
        self, cell: Cell, requests: Sequence[bytes], sent_s: list[float], start_s: float
    ) -> float:
        """Send a few of the requests that are due; returns the seconds until the next one is."""
        for _ in range(_SENDS_A_TURN):
            if len(sent_s) == len(requests):
                return 1.0
            now_s = time.monotonic()
            left_s = start_s + len(sent_s) * cell.spacing_s - now_s
            if left_s > 0:
                return left_s
            self._sockets[len(sent_s)].sendall(requests[len(sent_s)])
            sent_s.append(now_s)
            if len(self._sockets) < min(len(requests), len(sent_s) + _AHEAD):
                self._connect(len(self._sockets) + 1)
                self._epoll.register(self._sockets[-1].fileno(), select.EPOLLIN)
        return 0.0

    def _steer(self) -> None:
        if self._total >= self._threshold:
            self._threshold = math.inf
            self._steering.send(b"k")


def main() -> None:
    """Play rounds until nothing more is asked."""
    steering = inherited_socket(sys.argv[1])
    with contextlib.closing(steering):
        setup = told()
        client = LoadClient(steering, setup["texts"])
        while ask := told():
            try:
                cell = Cell(**ask["cell"])
                client.connect(ask["host"], ask["port"], cell)
                say(**client.play(cell, ask["payload"], Dialect(**ask["dialect"]), ask["path"]))
            except (BadStream, OSError) as error:
                say(error=str(error))


if __name__ == "__main__":
    main()
