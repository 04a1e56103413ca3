"""One data connection: frames over a blocking socket, and a wake-up for its thread."""

import array
import contextlib
import math
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence

import msgspec

from transfer.backend import (
    DIGEST_BYTES,
    HEADER_BYTES,
    NO_PAYLOAD,
    Digest,
    Frame,
    Kind,
    digest_at_once,
    without_payload,
)
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import BadMessage, PeerLost

# Large enough that the cost of calls vanishes, small enough to be digested while in cache.
_CHUNK_BYTES = 512 << 10
_READ_AHEAD_BYTES = 4096
_IOV_MAX = 64
# After a wait shorter than _SHORT_WAIT_S, the next wait begins with _LOOK_S of polling: waking up
# from sleep takes longer, and a peer that answered at once tends to do so again. Both are longer
# than the answer of a peer that has to wake up itself. Otherwise one pause would leave both ends
# sleeping, each late to answer because the other had slept (docs/adr/0046).
_LOOK_S = 50e-6
_SHORT_WAIT_S = 150e-6
FILES = 3  # of a connection: its socket, and both ends of the pipe that wakes its thread
# While no room is open there are no PINGs: the kernel detects a host that is gone.
_TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


class Incoming(msgspec.Struct, frozen=True, gc=False):
    """A frame whose payload (if any) and digest are still to be read."""

    frame: Frame
    meta: bytes
    head: bytes  # header and meta, as they came


class Connection:
    """Frames over one socket. Used by one thread, except for what is said to be for any thread.

    A read or write that moves nothing for timeout_s raises PeerLost, as does the end of the
    connection.
    """

    def __init__(self, sock: socket.socket, timeout_s: float, takes_fd: bool = False) -> None:
        """takes_fd: accept one file descriptor; otherwise the kernel drops any that is passed."""
        with contextlib.suppress(OSError):  # a Unix socket has no such options
            for option in _TCP_OPTIONS:
                sock.setsockopt(*option)
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._takes_fd = takes_fd
        self._passed_fd: int | None = None
        self._all_at_once = 0 if self._is_tls else socket.MSG_WAITALL
        _set_timeout(sock, timeout_s, self._is_tls)
        self._timeout_s = timeout_s
        self._deadline_s: float | None = None
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES + (1 << 17)))
        self._low = self._high = 0  # bytes of _ahead that were read and not yet used
        # Keeps `wake` and `close` apart: a closed descriptor's number may be reused. Reentrant,
        # since a garbage collection inside `wake` may free lent memory, which wakes again.
        self._lock = threading.RLock()
        self._sending = threading.Lock()
        self._rest: list[memoryview] = []  # of a frame that the kernel took only in part
        self._looks = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        self._end = select.poll()  # reports an error of the socket as well, without being asked
        self._end.register(sock, select.POLLRDHUP)
        self._closed = False

    # --- any thread -----------------------------------------------------------------------------

    def wake(self) -> None:
        """End a `wait` of the owning thread."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups
                    os.write(self._wake_write, b"x")

    @property
    def is_over(self) -> bool:
        """Whether either end has ended the connection, even if its last bytes are still unread."""
        with self._lock:
            return self._closed or bool(self._end.poll(0))

    def shutdown(self) -> None:
        """Make every read and write of the owning thread fail."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):  # the peer has closed it already
                    # Not SSLSocket's: the owning thread would go on without TLS, and take what
                    # has come by then for frames.
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def try_send(self, data: bytes | bytearray) -> bool:
        """Send a small frame if that needs no waiting. False: nothing was sent.

        A failure of the socket is left for the owning thread to see.
        """
        if self._is_tls or not self._sending.acquire(blocking=False):
            return False
        try:
            if self._rest:
                return False
            sent = self._sock.send(data, socket.MSG_DONTWAIT)
            if sent < len(data):
                self._rest = [memoryview(data)[sent:]]
                self.wake()
        except OSError:
            return False
        finally:
            self._sending.release()
        return True

    # --- the owning thread ------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Whether bytes were read that are not used yet."""
        return self._high > self._low

    def wait(self, timeout_s: float) -> bool:
        """Wait for bytes to read, for `wake`, or for timeout_s. True: there are bytes to read."""
        if self._high > self._low:
            return True
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        begun_s = SYSTEM_CLOCK.monotonic_s()
        if self._looks and timeout_s:
            while SYSTEM_CLOCK.monotonic_s() - begun_s < _LOOK_S:
                ready = self._poll.poll(0)
                if ready:
                    return self._is_readable(ready)
        ready = self._poll.poll(math.ceil(timeout_s * 1000))
        self._looks = bool(ready) and SYSTEM_CLOCK.monotonic_s() - begun_s < _SHORT_WAIT_S
        return self._is_readable(ready)

    def _is_readable(self, ready: list[tuple[int, int]]) -> bool:
        readable = False
        for fd, _ in ready:
            if fd == self._wake_read:
                os.read(self._wake_read, 4096)
            else:
                readable = True
        return readable

    def flush(self) -> None:
        """Send what `try_send` could not."""
        if self._rest:
            with self._sending:
                self._send_all([])

    def send_whole(self, data: bytes) -> None:
        """Send a frame that is complete in memory."""
        with self._sending:
            self._send_all([memoryview(data)])

    def send(self, frame: Frame, meta: bytes = b"", payload: Sequence[memoryview] = ()) -> None:
        """Send one frame; its lengths and digest are computed here."""
        head = frame.pack(len(meta), sum(len(part) for part in payload)) + meta
        digest = Digest(head)
        batch, batch_bytes = [memoryview(head)], 0
        with self._sending:
            for part in payload:
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

    def send_fd(self, frame: Frame, meta: bytes, fd: int) -> None:
        """Send one small frame with a file descriptor (Unix sockets only)."""
        data = without_payload(frame, meta)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        try:
            sent = self._sock.sendmsg([data], [rights])
        except OSError as error:
            raise PeerLost(f"sending failed: {error}") from error
        if sent < len(data):
            self._send_all([memoryview(data)[sent:]])

    def take_fd(self) -> int:
        """The file descriptor that came along; the caller owns it. Raises BadMessage if none."""
        fd, self._passed_fd = self._passed_fd, None
        if fd is None:
            raise BadMessage("no file descriptor came along")
        return fd

    def receive(self) -> Incoming:
        """The next header and its meta. Raises BadMessage for bytes that are no frame."""
        low = self._ahead_by(HEADER_BYTES)
        frame = Frame.unpack_from(self._ahead, low)
        head_bytes = HEADER_BYTES + frame.meta_len
        low = self._ahead_by(head_bytes)
        head = self._ahead[low : low + head_bytes].tobytes()
        self._low = low + head_bytes
        return Incoming(frame, head[HEADER_BYTES:], head)

    def receive_small(self) -> tuple[Frame, bytes]:
        """A whole frame without payload. Raises BadMessage for a payload or a wrong digest."""
        incoming = self.receive()
        if incoming.frame.payload_len:
            raise BadMessage(f"{incoming.frame.kind.name} with a payload")
        if not self.receive_elsewhere(incoming, NO_PAYLOAD):
            raise BadMessage(f"{incoming.frame.kind.name} with a wrong digest")
        return incoming.frame, incoming.meta

    def receive_only(self, kind: Kind) -> bytes:
        """The meta of a small frame, which must be of this kind. Raises BadMessage as well."""
        frame, meta = self.receive_small()
        if frame.kind is not kind:
            raise BadMessage(f"expected {kind.name}, got {frame.kind.name}")
        return meta

    def receive_payload(self, incoming: Incoming, payload: memoryview) -> bool:
        """Read payload (u8[payload_len]) and digest. Returns whether the digest is right."""
        digest = Digest(incoming.head)
        for at in range(0, len(payload), _CHUNK_BYTES):
            chunk = payload[at : at + _CHUNK_BYTES]
            self._read_into(chunk)
            digest.update(chunk)
        return self._ends_with(digest.pack())

    def receive_elsewhere(
        self, incoming: Incoming, payload: memoryview, is_sampled: bool = False
    ) -> bool:
        """Read the digest of a frame whose payload is here. Returns whether it is right."""
        return self._ends_with(digest_at_once(incoming.head, payload, is_sampled))

    def skip_payload(self, incoming: Incoming) -> bool:
        """Read and discard the payload, and read the digest. Returns whether it is right."""
        left = incoming.frame.payload_len
        digest = Digest(incoming.head)
        scratch = memoryview(bytearray(min(left, _CHUNK_BYTES)))
        while left:
            part = scratch[: min(left, len(scratch))]
            self._read_into(part)
            digest.update(part)
            left -= len(part)
        return self._ends_with(digest.pack())

    @contextlib.contextmanager
    def all_within(self, timeout_s: float) -> Iterator[None]:
        """Reads inside raise PeerLost once timeout_s have passed, even if bytes trickle in."""
        self._deadline_s = SYSTEM_CLOCK.monotonic_s() + timeout_s
        yield
        self._deadline_s = None

    def hang_up(self, timeout_s: float) -> None:
        """End the connection, and wait up to timeout_s for the peer to end it as well.

        What the peer still sends is discarded. If that trickles in, the last read may take as long
        again as any read may.
        """
        if timeout_s:
            with contextlib.suppress(OSError, PeerLost), self.all_within(timeout_s):
                self._sock.shutdown(socket.SHUT_WR)
                while True:
                    self._receive(self._ahead, 0)
        self.shutdown()

    def close(self) -> None:
        # No other thread may be sending: a closed descriptor's number may be reused.
        with self._sending, self._lock:
            if self._closed:
                return
            self._closed = True
            self._sock.close()
            if self._passed_fd is not None:
                os.close(self._passed_fd)
            os.close(self._wake_read)
            os.close(self._wake_write)

    # --- bytes ----------------------------------------------------------------------------------

    def _ends_with(self, digest: bytes) -> bool:
        """Read a digest. Returns whether it is this one."""
        low = self._ahead_by(DIGEST_BYTES)
        self._low = low + DIGEST_BYTES
        return self._ahead[low : self._low] == digest

    def _ahead_by(self, count: int) -> int:
        """Read ahead until count bytes are in _ahead. Returns where they begin."""
        low, high = self._low, self._high
        if high - low >= count:
            return low
        if low == high:
            self._low = low = high = 0
        elif low + count > len(self._ahead) - _READ_AHEAD_BYTES:
            self._ahead[: high - low] = bytes(self._ahead[low:high])
            self._low, low, high = 0, 0, high - low
        while high - low < count:
            room = self._ahead[high : high + max(count - (high - low), _READ_AHEAD_BYTES)]
            self._high = high = high + self._receive(room, 0)
        return low

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
        """As recv_into, and keep a file descriptor that comes along; one per connection."""
        room = socket.CMSG_LEN(array.array("i").itemsize)  # CMSG_SPACE, padded, would hold two
        count, rights, _, _ = self._sock.recvmsg_into([view], room, flags)
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._passed_fd = array.array("i", data)[0]
                self._takes_fd = False
        return count

    def _send_all(self, buffers: list[memoryview]) -> None:
        buffers, self._rest = self._rest + buffers, []
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
def connection_over(
    sock: socket.socket, timeout_s: float, takes_fd: bool = False
) -> Iterator[Connection]:
    """A connection over a socket, which is closed if the body of the `with` raises."""
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        connection = Connection(sock, timeout_s, takes_fd)
        stack.callback(connection.close)
        yield connection
        stack.pop_all()


def _set_timeout(sock: socket.socket, timeout_s: float, is_tls: bool) -> None:
    """Set the timeout of reads and writes that move nothing.

    The kernel's timeouts leave the socket blocking, so one call can read a whole chunk. Python's
    timeouts make it non-blocking underneath, which TLS needs.
    """
    if is_tls:
        sock.settimeout(timeout_s)
        return
    sock.settimeout(None)
    whole_s = int(timeout_s)
    timeval = struct.pack("@ll", whole_s, int((timeout_s - whole_s) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
