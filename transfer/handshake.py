"""How a data connection begins: both ends prove that they know the token, and may agree on shm."""

import contextlib
import hmac
import os
import socket
import ssl
import threading
from collections.abc import Callable
from hashlib import sha256

from transfer import wire
from transfer.backend import Frame, Kind, Source
from transfer.errors import BadMessage, ConfigError, Unauthenticated
from transfer.framing import Connection, connection_over
from transfer.numbers import Count
from transfer.ports import split_host_port
from transfer.rpc import Security

HANDSHAKE_TIMEOUT_S = 5.0
TLS_TIMEOUT_S = 2.0
NONCE_BYTES = 32


class Hello(wire.Message, frozen=True):
    """Meta of HELLO: the sender's name, and proof that it knows the token."""

    sender_id: str
    proof: bytes
    nonce: bytes
    node: Count = 0  # of the sender's, which one this is


class Offer(wire.Message, frozen=True):
    """Memory to share, for a sender of the same host that reaches this abstract Unix socket."""

    host_identity: str
    socket_name: str
    is_demand: bool = False  # the receiver takes pages this way only


class Welcome(wire.Message, frozen=True):
    """Meta of WELCOME: proof that the receiver knows the token too.

    stall_timeout_s: the receiver gives up a sender that owes frames and is silent for so long.
    """

    proof: bytes
    offer: Offer | None = None
    stall_timeout_s: float = 3.0


class Arrival:
    """A socket that a receiver accepted: its thread greets the sender, any thread may end it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._connection: Connection | None = None
        # Keeps `end` apart from what closes or replaces the socket: a descriptor is used again.
        self._lock = threading.Lock()

    def end(self) -> None:
        """Make every read and write of the socket's thread fail."""
        with self._lock:
            if self._connection is not None:
                self._connection.shutdown()
                return
            with contextlib.suppress(OSError):  # either end has closed it already
                # Not SSLSocket's, which would take TLS from under a handshake.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def greet(
        self,
        context: ssl.SSLContext | None,
        security: Security,
        stall_timeout_s: float,
        offer: Offer | None,
        on_proved: Callable[[], None],
    ) -> tuple[Connection, Source]:
        """As the function below, after TLS. The socket is closed when it raises, OSError too."""
        # No TLS over a Unix socket: nobody can listen in on it.
        if context is not None and self._sock.family != socket.AF_UNIX:
            try:
                self._begin_tls(context)
            except OSError:
                with self._lock:
                    self._sock.close()
                raise
        with contextlib.ExitStack() as stack:
            with self._lock:
                entered = stack.enter_context(connection_over(self._sock, stall_timeout_s))
                self._connection = connection = entered
            return connection, greet(connection, security, stall_timeout_s, offer, on_proved)

    def _begin_tls(self, context: ssl.SSLContext) -> None:
        with self._lock:
            self._sock.settimeout(TLS_TIMEOUT_S)
            self._sock = sock = context.wrap_socket(
                self._sock, server_side=True, do_handshake_on_connect=False
            )
        sock.do_handshake()


def greet(
    connection: Connection,
    security: Security,
    stall_timeout_s: float,
    offer: Offer | None = None,
    on_proved: Callable[[], None] = lambda: None,
) -> Source:
    """The receiver's part: challenge, check, welcome. Returns who the sender is.

    on_proved: called when the sender has shown the token, before it is welcomed; it may raise
    PeerLost. Raises Unauthenticated, BadMessage or PeerLost.
    """
    nonce = os.urandom(NONCE_BYTES)
    connection.send(Frame(Kind.CHALLENGE), nonce)
    with connection.all_within(HANDSHAKE_TIMEOUT_S):
        hello = wire.decode(connection.receive_only(Kind.HELLO), Hello)
    if not hmac.compare_digest(hello.proof, proof_of(security, b"sender", nonce)):
        # Not the name it gave: a stranger must not choose what is logged, or how much.
        raise Unauthenticated("it does not know the cluster token")
    on_proved()
    welcome = Welcome(proof_of(security, b"receiver", hello.nonce), offer, stall_timeout_s)
    connection.send(Frame(Kind.WELCOME), wire.encode(welcome))
    return Source(hello.sender_id, hello.node)


def introduce(connection: Connection, security: Security, sender_id: str, node: int = 0) -> Welcome:
    """The sender's part. Returns the receiver's WELCOME.

    Raises Unauthenticated, BadMessage or PeerLost.
    """
    with connection.all_within(HANDSHAKE_TIMEOUT_S):
        challenge = connection.receive_only(Kind.CHALLENGE)
        nonce = os.urandom(NONCE_BYTES)
        proof = proof_of(security, b"sender", challenge)
        hello = Hello(sender_id, proof, nonce, node)
        connection.send(Frame(Kind.HELLO), wire.encode(hello))
        welcome = wire.decode(connection.receive_only(Kind.WELCOME), Welcome)
    if not hmac.compare_digest(welcome.proof, proof_of(security, b"receiver", nonce)):
        raise Unauthenticated("the receiver does not know the cluster token")
    return welcome


def proof_of(security: Security, side: bytes, nonce: bytes) -> bytes:
    """The answer to a nonce that proves knowledge of the token.

    side: names the end and the kind of connection, so that no answer can be replayed as another.
    """
    return hmac.new(security.token.encode(), side + nonce, sha256).digest()


def parse_address(address: str) -> tuple[str, int]:
    """`tcp://host:port` -> (host, port). Raises BadMessage."""
    if address.startswith("tcp://"):
        with contextlib.suppress(ValueError):
            return split_host_port(address.removeprefix("tcp://"))
    raise BadMessage(f"expected tcp://host:port, got {address!r}")


def client_context(security: Security) -> ssl.SSLContext | None:
    """The sender's TLS context; None when the cluster does without. Raises ConfigError."""
    if security.ca_file is None:
        return None
    try:
        context = ssl.create_default_context(cafile=str(security.ca_file))
    except OSError as error:
        raise ConfigError(f"cannot use {security.ca_file}: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # What a certificate must be does not follow the version of Python, nor differ from what gRPC
    # and transfer.certificates ask: a process that starts and answers calls gets its pages, too.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the CA file may name any of the chain
    return context


def server_context(security: Security) -> ssl.SSLContext | None:
    """The receiver's TLS context; None when the cluster does without. Raises ConfigError."""
    certificate = security.certificate()
    return None if certificate is None else certificate.ssl_context()
