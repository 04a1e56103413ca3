"""Writes the body of a response to its connection, past the server's `send`.

A `BodyWriter` knows only what asyncio tells a protocol: its transport, and when to pause. The
server itself gets a `ServerTransport`, which can hold or drop what the server writes.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

_CRLF = b"\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_HEADS = [b"%x\r\n" % num_bytes for num_bytes in range(4096)]  # for all but huge chunks


class Borrower(Protocol):
    """Writes in a stream's place."""

    def hindered(self, slot: int) -> None:
        """The stream that has this slot must write for itself again, from its next event on."""
        ...


class ServerTransport:
    """The transport that the server sees: it can hold writes, or drop a body's last chunk.

    Once closed, it waits for its client only while the client reads. All else is asyncio's.
    """

    __slots__ = ("_held", "_linger_s", "_lingering", "_transport", "write")

    def __init__(self, transport: asyncio.Transport, linger_s: float) -> None:
        """linger_s: after a close, how long the client may read nothing of the rest."""
        self._transport = transport
        self._linger_s = linger_s
        self._lingering: asyncio.TimerHandle | None = None
        self._held: list[bytes] | None = None
        self.write: Callable[[bytes], None] = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Close once what is held or unsent has left."""
        self.release()
        self._transport.close()
        if self._lingering is None:
            self._linger(self._transport.get_write_buffer_size())

    def lost(self) -> None:
        """The connection is gone."""
        self.write = _dropped
        self._held = None
        if self._lingering is not None:
            self._lingering.cancel()

    def hold(self) -> None:
        """Keep what is written until `release`."""
        self._held = []
        self.write = self._held.append

    def release(self) -> None:
        """Write what was kept, at once."""
        held, self._held = self._held, None
        if held is not None:
            self.write = self._transport.write
            if held:
                self.write(b"".join(held))

    def drop_last_chunk(self) -> None:
        """Drop the server's next end of a chunked body."""
        self.write = self._drop_last_chunk

    def _drop_last_chunk(self, data: bytes) -> None:
        if data == _LAST_CHUNK:
            self.write = self._transport.write
        else:  # part of the response to the client's next request
            self._transport.write(data)

    def _linger(self, num_unsent: int) -> None:
        """Cut a closed connection unless some of its unsent bytes leave in time."""
        if num_unsent:
            loop = asyncio.get_running_loop()
            self._lingering = loop.call_later(self._linger_s, self._cut_unless_read, num_unsent)

    def _cut_unless_read(self, num_unsent: int) -> None:
        left = self._transport.get_write_buffer_size()
        if left < num_unsent:
            self._linger(left)
        else:
            self._transport.abort()


class BodyWriter:
    """Puts chunks of a response's body on its connection, past the server's `send`.

    The caller may write only while `ready`, and while the server's response is between two messages
    of a chunked body. server: what the server writes to. stream: the response that is written now,
    if it is an EventStream, which decides for itself how long its client may read nothing.
    """

    __slots__ = ("_borrower", "_slot", "ready", "server", "stream", "write")

    def __init__(self, transport: asyncio.Transport, linger_s: float) -> None:
        """linger_s: as of ServerTransport."""
        self.write: Callable[[bytes], None] = transport.write  # takes whole chunks (chunk_head)
        self.server = ServerTransport(transport, linger_s)
        self.ready = True  # the client is connected, and no write waits for it
        self.stream: object = None
        self._borrower: Borrower | None = None
        self._slot = -1

    def lend(self, borrower: Borrower, slot: int) -> None:
        """Lend it to a borrower, which is told at once when it is no longer ready."""
        self._borrower = borrower
        self._slot = slot

    def take_back(self) -> None:
        """End the loan: no borrower is told any more."""
        self._borrower = None

    def write_last(self, data: bytes) -> None:
        """Write the body's last data and its end; the server's own end of it is then dropped."""
        self.server.drop_last_chunk()
        self.write(b"".join((chunk_head(len(data)), data, _CRLF, _LAST_CHUNK)))

    def hinder(self) -> None:
        """Not ready from now on: what is written would wait for the client, or be lost."""
        self.ready = False
        if self._borrower is not None:
            self._borrower.hindered(self._slot)

    def close(self) -> None:
        """The connection is gone. Drops the transport, which refers to the protocol."""
        self.server.lost()
        self.hinder()
        self.write = _dropped


def chunk_head(num_bytes: int) -> bytes:
    """The line before a chunk's data; CRLF follows the data (RFC 9112, 7.1). num_bytes: >= 1."""
    return _HEADS[num_bytes] if num_bytes < len(_HEADS) else b"%x\r\n" % num_bytes


def _dropped(data: bytes) -> None:
    """Drop the data: the connection is gone."""
