"""The connections that carry routes: both ends prove that they know the token, then send frames.

They are separate from the calls of `transfer/rpc.py` since routes are small and come one by one. A
call costs either end several thread switches; a frame here costs one write and one read of the
loop. A frame is its length (u32, little-endian) followed by that many bytes.
"""

import asyncio
import contextlib
import hmac
import os
import socket
import ssl
import struct
from collections.abc import Callable, Iterator

from transfer import wire
from transfer.errors import BadMessage, ConfigError, Unauthenticated, Unavailable
from transfer.handshake import HANDSHAKE_TIMEOUT_S, NONCE_BYTES, client_context, proof_of
from transfer.rpc import Security

# Bytes that a peer may leave unread before it is cut off, besides the initial table.
MAX_BEHIND_BYTES = 4 << 20
_MAX_FRAME_BYTES = 256 << 20
_MAX_STRANGER_BYTES = 4096  # of a frame from a peer that has not proved anything yet
_LENGTH = struct.Struct("<I")
# A host that is gone goes silent: it is given up after five seconds.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5_000),
)


class RouteHello(wire.Message, frozen=True):
    """Who connects, and what for."""

    peer_id: str
    epoch: int  # of a worker that tells its routes; unused for a follower
    follows: bool
    proof: bytes
    nonce: bytes
    version: int = wire.WIRE_VERSION


class RouteLink:
    """One connection. Used on one loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer  # kept: its collection would close the connection
        self._transport = writer.transport
        self._most_unread = MAX_BEHIND_BYTES
        for option in _KEEPALIVE:
            writer.get_extra_info("socket").setsockopt(*option)

    @property
    def is_over(self) -> bool:
        """Whether this side has closed the connection, or knows that it is closed."""
        return self._transport.is_closing()

    def expect_behind(self, num_bytes: int) -> None:
        """Let the peer leave num_bytes more unread."""
        self._most_unread = MAX_BEHIND_BYTES + num_bytes

    def send(self, data: bytes) -> None:
        """Send a frame without waiting. A peer that is too far behind is cut off."""
        if self.is_over:
            return
        self._transport.write(_LENGTH.pack(len(data)) + data)
        if self._transport.get_write_buffer_size() > self._most_unread:
            self.close()

    async def receive(self, most: int = _MAX_FRAME_BYTES) -> bytes:
        """The next frame. Raises BadMessage above `most` bytes, Unavailable when closed."""
        with _as_unavailable():
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size > most:
                raise BadMessage(f"a frame of {size} bytes, at most {most}")
            return await self._reader.readexactly(size)

    def close(self) -> None:
        """Close at once; a peer that reconnects is told everything anew."""
        self._transport.abort()

    async def closed(self) -> None:
        """Wait until the connection is closed, for whatever reason."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def accept_link(sock: socket.socket, context: ssl.SSLContext | None) -> RouteLink:
    """The registry's end of a socket that it has accepted, after TLS. Raises Unavailable."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    timeout_s = HANDSHAKE_TIMEOUT_S if context else None
    with _as_unavailable():
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=context, ssl_handshake_timeout=timeout_s
        )
        try:
            return RouteLink(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        except OSError:  # the peer is gone already
            transport.abort()
            raise


async def open_link(
    host: str, port: int, security: Security, peer_id: str, epoch: int, follows: bool
) -> RouteLink:
    """Connect to a registry. Raises Unavailable, Unauthenticated or BadMessage."""
    with _as_unavailable(f"routes of the registry at {host}:{port}"):
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            # The CA file is read each time: one that is being replaced fails this attempt only.
            streams = await asyncio.open_connection(host, port, ssl=client_context(security))
            link = RouteLink(*streams)
            try:
                await _introduce(link, security, peer_id, epoch, follows)
            except BaseException:
                link.close()
                raise
    return link


async def _introduce(
    link: RouteLink, security: Security, peer_id: str, epoch: int, follows: bool
) -> None:
    challenge = await link.receive(NONCE_BYTES)
    nonce = os.urandom(NONCE_BYTES)
    proof = proof_of(security, b"routes to registry", challenge)
    link.send(wire.encode(RouteHello(peer_id, epoch, follows, proof, nonce)))
    answer = await link.receive(_MAX_STRANGER_BYTES)
    if not hmac.compare_digest(answer, proof_of(security, b"routes of registry", nonce)):
        raise Unauthenticated("the registry of these routes does not know the cluster token")


async def greet(link: RouteLink, security: Security, on_proved: Callable[[], None]) -> RouteHello:
    """The registry's part. Raises Unauthenticated, BadMessage or Unavailable.

    on_proved: called when the peer has shown the token, before it is told; may raise Unavailable.
    """
    nonce = os.urandom(NONCE_BYTES)
    with _as_unavailable():
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            link.send(nonce)
            hello = wire.decode(await link.receive(_MAX_STRANGER_BYTES), RouteHello)
    if not hmac.compare_digest(hello.proof, proof_of(security, b"routes to registry", nonce)):
        raise Unauthenticated("it does not know the cluster token")
    on_proved()
    link.send(proof_of(security, b"routes of registry", hello.nonce))
    return hello


@contextlib.contextmanager
def _as_unavailable(of: str = "routes") -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise Unavailable(f"{of}: no answer in time") from error
    except ConfigError as error:
        raise Unavailable(f"{of}: {error}") from error
    except asyncio.IncompleteReadError as error:
        raise Unavailable(f"{of}: the connection was closed") from error
    except OSError as error:
        raise Unavailable(f"{of}: {error}") from error
