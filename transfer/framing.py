"""One data connection: frames over a blocking socket, a wake-up for its thread."""

import array
import contextlib
import math
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transfer.backend import (
    DIGEST_BYTES,
    HEADER_BYTES,
    Digest,
    Frame,
    whole_frame,
)
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import BadMessage, PeerLost

# Large enough that calls cost nothing, small enough to be digested while in the core's cache.
_CHUNK_BYTES = 512 << 10
_READ_AHEAD_BYTES = 4096
_IOV_MAX = 64
_NO_PAYLOAD = memoryview(b"")
# While no room is open nobody asks for signs of life: the kernel gives up a host that is gone.
_TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A frame whose payload, if any, and digest are still to be read."""

    frame: Frame
    meta: bytes
    digest: Digest


class Connection:
    """Used by one thread, but for `wake` and `shutdown`.

    A read or write that moves nothing for timeout_s raises PeerLost, as does the end of the
    connection.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        with contextlib.suppress(OSError):  # a socket of this host has no such options
            for option in _TCP_OPTIONS:
                sock.setsockopt(*option)
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._takes_fd = sock.family == socket.AF_UNIX
        self._passed_fd: int | None = None
        self._all_at_once = 0 if self._is_tls else socket.MSG_WAITALL
        _set_timeout(sock, timeout_s, self._is_tls)
        self._timeout_s = timeout_s
        self._deadline_s: float | None = None
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES + (1 << 17)))
        self._low = self._high = 0  # bytes of _ahead that were read and not used
        # Between wake and close: a closed number may be reused. A collection inside `wake` may
        # free memory that was lent, which wakes again.
        self._lock = threading.RLock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        self._closed = False

    # --- any thread -----------------------------------------------------------------------------

    def wake(self) -> None:
        """End a `wait` of the owning thread."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # it is full of wake-ups
                    os.write(self._wake_write, b"x")

    def shutdown(self) -> None:
        """Make every read and write of the owning thread fail."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):  # the peer was faster
                    self._sock.shutdown(socket.SHUT_RDWR)

    # --- the owning thread ------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> bool:
        """Until there is something to read, `wake` was called, or time is up. True: readable."""
        if self._high > self._low:
            return True
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        readable = False
        for fd, _ in self._poll.poll(math.ceil(timeout_s * 1000)):
            if fd == self._wake_read:
                os.read(self._wake_read, 4096)
            else:
                readable = True
        return readable

    def send(self, frame: Frame, meta: bytes = b"", payload: Iterable[memoryview] = ()) -> None:
        """Send one frame; its lengths and digest are worked out here."""
        parts = list(payload)
        if not parts:
            self.send_elsewhere(frame, meta, _NO_PAYLOAD)
            return
        header = frame.pack(len(meta), sum(len(part) for part in parts))
        digest = Digest(header, meta)
        batch = [memoryview(header), memoryview(meta)]
        batch_bytes = 0
        for part in parts:
            for at in range(0, len(part), _CHUNK_BYTES):
                chunk = part[at : at + _CHUNK_BYTES]
                digest.update(chunk)
                batch.append(chunk)
                batch_bytes += len(chunk)
                if batch_bytes >= _CHUNK_BYTES:
                    self._send_all(batch)
                    batch, batch_bytes = [], 0
        batch.append(memoryview(digest.pack()))
        self._send_all(batch)

    def send_elsewhere(
        self, frame: Frame, meta: bytes, payload: memoryview, in_one_memory: bool = True
    ) -> None:
        """Send one frame without its payload, which the peer finds as meta says.

        in_one_memory: nothing carries the bytes, so the digest is over samples of them.
        """
        header = frame.pack(len(meta), len(payload))
        digest = Digest(header, meta)
        (digest.sample if in_one_memory else digest.update)(payload)
        self._send_all([memoryview(b"".join((header, meta, digest.pack())))])

    def send_fd(self, frame: Frame, meta: bytes, fd: int) -> None:
        """Send one small frame with a file descriptor (Unix sockets only)."""
        data = whole_frame(frame, meta)
        self._takes_fd = False
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        try:
            sent = self._sock.sendmsg([data], [rights])
        except OSError as error:
            raise PeerLost(f"sending failed: {error}") from error
        self._send_all([memoryview(data)[sent:]])

    def take_fd(self) -> int:
        """The descriptor that came with what was read; the caller's. Raises BadMessage."""
        fd, self._passed_fd = self._passed_fd, None
        if fd is None:
            raise BadMessage("no file descriptor came along")
        return fd

    def receive(self) -> Incoming:
        """The next header and its meta. Raises BadMessage when what came is no frame."""
        header = bytes(self._read_ahead(HEADER_BYTES))
        frame = Frame.unpack(header)
        meta = bytes(self._read_ahead(frame.meta_len))
        return Incoming(frame, meta, Digest(header, meta))

    def receive_small(self) -> tuple[Frame, bytes]:
        """A whole frame without payload. Raises BadMessage when it has one, or came changed."""
        incoming = self.receive()
        if incoming.frame.payload_len:
            raise BadMessage(f"{incoming.frame.kind.name} with a payload")
        if not self.receive_payload(incoming, memoryview(b"")):
            raise BadMessage(f"{incoming.frame.kind.name} with a wrong digest")
        return incoming.frame, incoming.meta

    def receive_payload(self, incoming: Incoming, payload: memoryview) -> bool:
        """Read the payload into this (u8[payload_len]) and the digest: whether it is right."""
        for at in range(0, len(payload), _CHUNK_BYTES):
            chunk = payload[at : at + _CHUNK_BYTES]
            self._read_into(chunk)
            incoming.digest.update(chunk)
        return bytes(self._read_ahead(DIGEST_BYTES)) == incoming.digest.pack()

    def receive_elsewhere(
        self, incoming: Incoming, payload: memoryview, in_one_memory: bool = True
    ) -> bool:
        """Read the digest of a frame whose payload is here already: whether it is right."""
        (incoming.digest.sample if in_one_memory else incoming.digest.update)(payload)
        return bytes(self._read_ahead(DIGEST_BYTES)) == incoming.digest.pack()

    def skip_payload(self, incoming: Incoming) -> bool:
        """Read the payload, which nobody wants, and the digest: whether it is right."""
        left = incoming.frame.payload_len
        scratch = memoryview(bytearray(min(left, _CHUNK_BYTES)))
        while left:
            part = scratch[: min(left, len(scratch))]
            self._read_into(part)
            incoming.digest.update(part)
            left -= len(part)
        return bytes(self._read_ahead(DIGEST_BYTES)) == incoming.digest.pack()

    @contextlib.contextmanager
    def all_within(self, timeout_s: float) -> Iterator[None]:
        """Reads inside raise PeerLost once timeout_s have passed, even if bytes trickle in."""
        self._deadline_s = SYSTEM_CLOCK.monotonic_s() + timeout_s
        yield
        self._deadline_s = None

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._sock.close()
            if self._passed_fd is not None:
                os.close(self._passed_fd)
            os.close(self._wake_read)
            os.close(self._wake_write)

    # --- bytes ----------------------------------------------------------------------------------

    def _read_ahead(self, count: int) -> memoryview:
        """The next bytes, valid until the next read; what comes with them is kept."""
        if count <= self._high - self._low:
            self._low += count
            return self._ahead[self._low - count : self._low]
        if self._low + count > len(self._ahead) - _READ_AHEAD_BYTES or self._low == self._high:
            left = self._high - self._low
            self._ahead[:left] = bytes(self._ahead[self._low : self._high])
            self._low, self._high = 0, left
        while self._high - self._low < count:
            missing = count - (self._high - self._low)
            room = self._ahead[self._high : self._high + max(missing, _READ_AHEAD_BYTES)]
            self._high += self._receive(room, 0)
        self._low += count
        return self._ahead[self._low - count : self._low]

    def _read_into(self, view: memoryview) -> None:
        kept = min(self._high - self._low, len(view))
        view[:kept] = self._ahead[self._low : self._low + kept]
        self._low += kept
        view = view[kept:]
        while len(view):
            view = view[self._receive(view, self._all_at_once) :]

    def _receive(self, view: memoryview, flags: int) -> int:
        if self._deadline_s is not None and SYSTEM_CLOCK.monotonic_s() > self._deadline_s:
            raise PeerLost("the handshake takes too long")
        try:
            if self._takes_fd:
                count = self._receive_fd(view, flags)
            else:
                count = self._sock.recv_into(view, 0, flags)
        except (BlockingIOError, TimeoutError) as error:
            raise PeerLost(f"nothing came for {self._timeout_s:g} s") from error
        except OSError as error:
            raise PeerLost(f"receiving failed: {error}") from error
        if count == 0:
            raise PeerLost("connection closed by the peer")
        return count

    def _receive_fd(self, view: memoryview, flags: int) -> int:
        """As recv_into, and keep a descriptor that comes along; one in a connection's life."""
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        count, rights, _, _ = self._sock.recvmsg_into([view], room, flags)
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._passed_fd = array.array("i", data)[0]
                self._takes_fd = False
        return count

    def _send_all(self, buffers: list[memoryview]) -> None:
        buffers = [buffer for buffer in buffers if len(buffer)]
        try:
            if self._is_tls or len(buffers) == 1:
                self._sock.sendall(b"".join(buffers) if len(buffers) > 1 else buffers[0])
                return
            while buffers:
                sent = self._sock.sendmsg(buffers[:_IOV_MAX])
                while buffers and sent >= len(buffers[0]):
                    sent -= len(buffers.pop(0))
                if sent:
                    buffers[0] = buffers[0][sent:]
        except (BlockingIOError, TimeoutError) as error:
            raise PeerLost(f"the peer took nothing for {self._timeout_s:g} s") from error
        except OSError as error:
            raise PeerLost(f"sending failed: {error}") from error


@contextlib.contextmanager
def connection_over(sock: socket.socket, timeout_s: float) -> Iterator[Connection]:
    """A connection over a socket, for a block in which it begins; closed when that fails."""
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        connection = Connection(sock, timeout_s)
        stack.callback(connection.close)
        yield connection
        stack.pop_all()


def _set_timeout(sock: socket.socket, timeout_s: float, is_tls: bool) -> None:
    """For reads and writes that move nothing.

    The kernel's own timeouts leave the socket blocking, so one call can bring a whole chunk;
    Python's make it non-blocking underneath, which TLS needs.
    """
    if is_tls:
        sock.settimeout(timeout_s)
        return
    sock.settimeout(None)
    whole_s = int(timeout_s)
    timeval = struct.pack("@ll", whole_s, int((timeout_s - whole_s) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
