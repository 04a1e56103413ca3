"""One data connection: frames over a blocking socket, a wake-up for its thread, the handshake."""

import contextlib
import hmac
import os
import selectors
import socket
import ssl
from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from transfer import wire
from transfer.backend import HEADER_BYTES, Frame, Kind
from transfer.errors import BadMessage, PeerLost, Unauthenticated
from transfer.rpc import Security

BUFFER_BYTES = 4 << 20
_NONCE_BYTES = 32
_IOV_MAX = 64


class Hello(wire.Message):
    """Meta of HELLO: who sends, and proof that it knows the token."""

    sender_id: str
    proof: bytes
    nonce: bytes


class Connection:
    """Used by one thread, but for `wake`. Every wait ends after timeout_s with PeerLost."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._closed = False

    def wait(self, timeout_s: float) -> bool:
        """Until there is something to read, `wake` was called, or time is up. True: readable."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        readable = False
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._sock:
                readable = True
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
        return readable

    def wake(self) -> None:
        """End a `wait` of the owning thread (any thread)."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"x")

    def send(self, frame: Frame, meta: bytes = b"", payload: memoryview | bytes = b"") -> None:
        """Seal and send one frame."""
        sealed = frame.sealed(meta, payload)
        buffers = [memoryview(sealed.pack()), memoryview(meta), memoryview(payload)]
        try:
            if isinstance(self._sock, ssl.SSLSocket):
                for buffer in buffers:
                    self._sock.sendall(buffer)
            else:
                self._send_all([buffer for buffer in buffers if len(buffer)])
        except OSError as error:
            raise PeerLost(f"sending failed: {error or type(error).__name__}") from error

    def receive(self) -> tuple[Frame, bytes]:
        """The next header and its meta; the payload, if any, is still to be read.

        Raises PeerLost, or BadMessage when what came is no frame.
        """
        header = bytearray(HEADER_BYTES)
        self.receive_into(memoryview(header))
        frame = Frame.unpack(header)
        meta = bytearray(frame.meta_len)
        self.receive_into(memoryview(meta))
        return frame, bytes(meta)

    def receive_payload(self, frame: Frame) -> np.ndarray:
        """The payload in a fresh buffer: u8[payload_len]."""
        payload = np.empty(frame.payload_len, np.uint8)
        self.receive_into(memoryview(payload))
        return payload

    def skip_payload(self, frame: Frame) -> None:
        """Read the payload and throw it away."""
        scratch = memoryview(bytearray(min(frame.payload_len, BUFFER_BYTES)))
        left = frame.payload_len
        while left:
            part = scratch[: min(left, len(scratch))]
            self.receive_into(part)
            left -= len(part)

    def receive_into(self, view: memoryview) -> None:
        while len(view):
            try:
                count = self._sock.recv_into(view)
            except OSError as error:
                raise PeerLost(f"receiving failed: {error or type(error).__name__}") from error
            if count == 0:
                raise PeerLost("connection closed by the peer")
            view = view[count:]

    def close(self) -> None:
        """Close (the owning thread)."""
        if self._closed:
            return
        self._closed = True
        self._selector.close()
        self._sock.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def shutdown(self) -> None:
        """Make every read and write of the owning thread fail (any thread)."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.wake()

    def _send_all(self, buffers: list[memoryview]) -> None:
        while buffers:
            sent = self._sock.sendmsg(buffers[:_IOV_MAX])
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if sent:
                buffers[0] = buffers[0][sent:]


# --- handshake --------------------------------------------------------------------------------


def greet(connection: Connection, security: Security) -> str:
    """The receiver's part: challenge, check, welcome. Returns the sender's name.

    Raises Unauthenticated, BadMessage or PeerLost.
    """
    nonce = os.urandom(_NONCE_BYTES)
    connection.send(Frame(Kind.CHALLENGE), nonce)
    frame, meta = connection.receive()
    if frame.kind is not Kind.HELLO or frame.payload_len:
        raise BadMessage(f"expected HELLO, got {frame.kind.name}")
    hello = wire.decode(meta, Hello)
    if not hmac.compare_digest(hello.proof, _proof(security, b"sender", nonce)):
        raise Unauthenticated(f"{hello.sender_id!r} does not know the cluster token")
    connection.send(Frame(Kind.WELCOME), _proof(security, b"receiver", hello.nonce))
    return hello.sender_id


def introduce(connection: Connection, security: Security, sender_id: str) -> None:
    """The sender's part. Raises Unauthenticated, BadMessage or PeerLost."""
    frame, challenge = connection.receive()
    if frame.kind is not Kind.CHALLENGE:
        raise BadMessage(f"expected CHALLENGE, got {frame.kind.name}")
    nonce = os.urandom(_NONCE_BYTES)
    hello = Hello(sender_id, _proof(security, b"sender", challenge), nonce)
    connection.send(Frame(Kind.HELLO), wire.encode(hello))
    frame, proof = connection.receive()
    if frame.kind is not Kind.WELCOME:
        raise BadMessage(f"expected WELCOME, got {frame.kind.name}")
    if not hmac.compare_digest(proof, _proof(security, b"receiver", nonce)):
        raise Unauthenticated("the receiver does not know the cluster token")


def _proof(security: Security, side: bytes, nonce: bytes) -> bytes:
    return hmac.new(security.token.encode(), side + nonce, sha256).digest()


def parse_address(address: str) -> tuple[str, int]:
    """`tcp://host:port` -> (host, port). Raises BadMessage."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit():
        raise BadMessage(f"expected tcp://host:port, got {address!r}")
    return host.strip("[]"), int(port)


def client_context(security: Security) -> ssl.SSLContext | None:
    if security.ca_file is None:
        return None
    context = ssl.create_default_context(cafile=str(security.ca_file))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def server_context(security: Security) -> ssl.SSLContext | None:
    if security.cert_file is None or security.key_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(str(security.cert_file), str(security.key_file))
    return context


def set_buffers(sock: socket.socket, options: Sequence[int]) -> None:
    """Ask for large socket buffers; the system gives what it allows."""
    for option in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
