"""The `tcp` backend: a few connections per pair of workers, one thread for each end of each.

Signs of life: while rooms are open, the sender pings three times per stall_timeout_s (the shorter
of the two ends' values), so that each end hears from the other whatever prefill is doing. An end
that hears nothing, or can move no bytes, for its own stall_timeout_s gives up the connection and
the rooms on it; the API process sends them elsewhere. A PING is owed its answer even when the last
room has ended: otherwise the next room would be lost with a dead connection. Nothing is resent.
"""

import contextlib
import logging
import socket
import threading
from collections import deque

import numpy as np

from model.config import KVSpec
from transfer import open_files, ports
from transfer.backend import (
    NO_PAYLOAD,
    Frame,
    Kind,
    OnReceiverEvent,
    OnSenderEvent,
    Source,
    whole_frame,
    without_payload,
)
from transfer.buffers import BufferPool, PinMemory
from transfer.clock import SYSTEM_CLOCK
from transfer.complaint import Complaint, Complaints
from transfer.errors import Incompatible, KvferryError, PeerLost
from transfer.framing import FILES, Connection, Incoming, connection_over
from transfer.handshake import (
    Arrival,
    Offer,
    client_context,
    introduce,
    parse_address,
    server_context,
)
from transfer.outbound import Job, Lane, Sender, segments
from transfer.places import Places
from transfer.receiver import Receiver
from transfer.rpc import Security

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
DATA_FLAGS = "--data-port, --data-host"  # that say where pages are taken
MAX_CONNECTIONS = 1024  # or fewer, where files are short
MAX_STRANGERS_OF_HOST = 64  # connections that have not shown the token yet, see transfer.places
_IDLE_WAIT_S = 60.0
_ACCEPT_AGAIN_S = 0.1  # after a failed accept
IDLE_BUFFER_BYTES = 256 << 20  # kept for pages that are still to come
_NO_BYTES = np.empty(0, np.uint8)


class TcpSender(Sender):
    """Prefill's end, see transfer/outbound.py."""

    def __init__(
        self,
        security: Security,
        sender_id: str,
        on_event: OnSenderEvent,
        max_frame_bytes: int = 16 << 20,
        stall_timeout_s: float = 3.0,
        connections: int = 1,
    ) -> None:
        super().__init__(on_event, max_frame_bytes, connections)
        self.security = security
        self.sender_id = sender_id
        self.stall_timeout_s = stall_timeout_s
        self.context = client_context(security)
        self.unreached = Complaints(log, "no page connection")  # by address

    def _open_lane(self, address: str) -> Lane:
        lane = TcpLane(self, address)
        lane.thread.start()
        return lane


class TcpLane(Lane):
    """One connection to a decode worker."""

    def __init__(self, sender: TcpSender, address: str) -> None:
        super().__init__(address)
        self.thread = threading.Thread(target=self._run, name=f"pages to {address}", daemon=True)
        self.sender = sender
        self._connection: Connection | None = None
        self._closing = False
        self._asked_s: float | None = None  # when the oldest unanswered PING left
        self._ask_next_s = 0.0
        self._beat_s = sender.stall_timeout_s / 3  # between two PINGs

    @property
    def is_over(self) -> bool:
        connection = self._connection
        return connection is not None and connection.is_over

    def wake(self) -> None:
        connection = self._connection
        if connection is not None and threading.current_thread() is not self.thread:
            connection.wake()

    def close(self) -> None:
        self._closing = True
        connection = self._connection
        if connection is not None:
            connection.shutdown()

    # --- its own thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        message = "closed"
        unreached = self.sender.unreached.of(self.address)
        try:
            connection = self._connection = self.connect()
            unreached.settle()
            while not self._closing:
                self._turn(connection)
        except (KvferryError, OSError) as error:
            message = f"{self.address}: {error}"
            if not self._closing:
                if self._connection is None:
                    unreached.tell(error)
                else:  # without rooms, a peer has merely left
                    count = len(self.rooms)
                    level = logging.WARNING if count else logging.INFO
                    log.log(level, "page connection closed with %d rooms: %s", count, message)
        finally:
            try:
                self.sender.lost(self, message)
            finally:
                if self._connection is not None:
                    self._connection.close()
                self.ended()

    def connect(self) -> Connection:
        """A connection that the receiver has welcomed."""
        connection, _ = self.dial()
        self.sender.count("connections_tcp")
        return connection

    def dial(self) -> tuple[Connection, Offer | None]:
        """A TCP connection to the address, and what the receiver offers beside it."""
        host, port = parse_address(self.address)
        sender = self.sender
        sock = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        try:
            if sender.context is not None:
                sock = sender.context.wrap_socket(sock, server_hostname=host)
        except (KvferryError, OSError):
            sock.close()
            raise
        return self.introduced(sock)

    def introduced(
        self, sock: socket.socket, takes_fd: bool = False
    ) -> tuple[Connection, Offer | None]:
        """Shake hands over a socket, which is closed when that fails."""
        sender = self.sender
        with connection_over(sock, sender.stall_timeout_s, takes_fd) as connection:
            welcome = introduce(connection, sender.security, sender.sender_id, sender.node)
            self._beat_s = min(sender.stall_timeout_s, welcome.stall_timeout_s) / 3
            return connection, welcome.offer

    def _turn(self, connection: Connection) -> None:
        """Send a job and read any answer; with no job, wait, and check that the peer is alive."""
        took_s = self._send_next(connection)
        if took_s is None:
            if connection.wait(self._ask(connection)):
                self._read(connection)
            return
        if self._asked_s is not None:
            # While the peer takes bytes it is not silent; it answers a PING only after them.
            self._asked_s += took_s
        if connection.wait(0.0):
            self._read(connection)
        self._ask(connection)

    def _send_next(self, connection: Connection) -> float | None:
        """Send the next job. Returns the seconds it took; None when there was nothing to send."""
        with self.leaving:
            connection.flush()
            job = self.sender.next_job(self, self.takes_pages)
            if job is None:
                return None
            begun_s = self.sender.clock.monotonic_s()
            try:
                self.send(connection, job)
            finally:
                took_s = self.sender.sent(self, job, begun_s)
        return took_s

    def _ask(self, connection: Connection) -> float:
        """Send a PING if one is due. Returns the seconds to wait. Raises PeerLost on silence."""
        if not self.rooms and self._asked_s is None:
            return _IDLE_WAIT_S
        now_s = self.sender.clock.monotonic_s()
        stall_s = self.sender.stall_timeout_s
        if self._asked_s is not None and now_s - self._asked_s > stall_s - self._beat_s:
            if not connection.wait(0.0):  # if this process was paused, the answer may be here
                raise PeerLost(f"no sign of life for {stall_s:g} s")
        elif self.rooms and now_s >= self._ask_next_s:
            connection.send(Frame(Kind.PING))
            self._ask_next_s = now_s + self._beat_s
            if self._asked_s is None:
                self._asked_s = now_s
        return self._beat_s

    def _read(self, connection: Connection) -> None:
        frame, meta = connection.receive_small()
        self._asked_s = None
        if frame.kind is not Kind.PONG:
            self.heard(frame, meta)

    # --- overridden in transfer.slots -------------------------------------------------------------

    @property
    def takes_pages(self) -> bool:
        """Whether pages can be sent now."""
        return True

    def send(self, connection: Connection, job: Job) -> None:
        connection.send(job.frame, job.meta, segments(job.payload))

    def try_send(self, job: Job) -> bool:
        connection = self._connection
        if connection is None:
            return False
        return connection.try_send(whole_frame(job.frame, job.meta, segments(job.payload)))

    def heard(self, frame: Frame, meta: bytes) -> None:
        self.sender.heard(self, frame, meta)

    def ended(self) -> None:
        """The connection is closed."""


class TcpReceiver(Receiver):
    """Decode's end, see transfer/receiver.py."""

    def __init__(
        self,
        security: Security,
        host: str,
        port: int,
        kv: KVSpec,
        tp_size: int,
        on_event: OnReceiverEvent,
        stall_timeout_s: float = 3.0,
        pin: PinMemory | None = None,
    ) -> None:
        """pin: called for memory that receives pages."""
        super().__init__(kv, tp_size, on_event)
        self.security = security
        self.stall_timeout_s = stall_timeout_s
        self.context = server_context(security)
        self.buffers = BufferPool(IDLE_BUFFER_BYTES, pin)
        self.offer: Offer | None = None
        self.refused = Complaints(log, "page connection refused")  # by host
        self.feeder: type[TcpFeeder] = TcpFeeder  # of connections by TCP
        self._host, self._port = host, port
        most = min(MAX_CONNECTIONS, open_files.beside_control() // FILES)
        self._connections = Places(most, MAX_STRANGERS_OF_HOST, self._send_away)
        self._listeners: list[socket.socket] = []
        self._closing = threading.Event()

    def start(self) -> str:
        """Raises ConfigError when the address cannot be listened on."""
        at = self._host, self._port, DATA_FLAGS
        listener = ports.listen(ports.bind(*at), *at, backlog=128)
        self.listen(listener, self.feeder)
        return f"tcp://{ports.host_port(self._host, listener.getsockname()[1])}"

    def close(self) -> None:
        self._closed = True
        self._closing.set()
        for listener in self._listeners:
            # Wakes the accepting thread, which closing alone would not.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            connections = list(self._connections)
        for feeder in connections:
            feeder.close()

    def listen(self, listener: socket.socket, feeder: "type[TcpFeeder]") -> None:
        """Accept connections on a listening socket, which this receiver owns from now on."""
        self._listeners.append(listener)
        threading.Thread(
            target=self._accept, args=(listener, feeder), name="page listener", daemon=True
        ).start()

    def joined(self, feeder: "TcpFeeder") -> bool:
        """Add a connection; False when there are too many, or the receiver is closed."""
        with self._lock:
            return not self._closed and self._connections.enter(feeder, feeder.name)

    def proved(self, feeder: "TcpFeeder") -> None:
        """The sender has shown the token. Raises PeerLost if it had to go before that."""
        with self._lock:
            if not self._connections.know(feeder):
                raise PeerLost("it gave way to a newcomer")

    def _send_away(self, feeder: "TcpFeeder", _host: str) -> None:
        self.counters["connections_over_limit"] += 1  # _lock is held
        feeder.close()

    def left(self, feeder: "TcpFeeder", message: str) -> None:  # type: ignore[override]
        with self._lock:
            self._connections.leave(feeder)
        super().left(feeder, message)

    def _accept(self, listener: socket.socket, kind: "type[TcpFeeder]") -> None:
        complaint = Complaint(log, "a page connection cannot be accepted")
        while not self._closed:
            try:
                sock, address = listener.accept()
            except OSError as error:
                # This connection failed, or files ran out: a later accept may succeed.
                if not self._closing.is_set():
                    complaint.tell(error)
                self._closing.wait(_ACCEPT_AGAIN_S)
                continue
            name = address[0] if isinstance(address, tuple) else "this host"
            try:
                self._take(sock, name, kind)
            except Exception as error:  # out of threads or memory: the next one may be taken
                sock.close()
                complaint.tell(f"{type(error).__name__}: {error}")

    def _take(self, sock: socket.socket, name: str, kind: "type[TcpFeeder]") -> None:
        """Give a connection a thread of its own. Raises what the system refuses."""
        feeder = kind(self, sock, name)
        if not self.joined(feeder):
            self.count("connections_over_limit")
            sock.close()
            return
        try:
            feeder.thread.start()
        except Exception as error:
            self.left(feeder, f"{name}: {error}")
            raise


class TcpFeeder:
    """One sender's connection."""

    def __init__(self, receiver: TcpReceiver, sock: socket.socket, name: str) -> None:
        self.thread = threading.Thread(target=self._run, name=f"pages from {name}", daemon=True)
        self.receiver = receiver
        self._arrival = Arrival(sock)
        self.name = name
        self.source = Source(name)
        self._complaint = receiver.refused.of(name)
        self.replies: deque[tuple[Frame, bytes]] = deque()
        self.connection: Connection | None = None
        self._closing = False
        self._heard_s = 0.0
        self._reads = False  # a frame: then it looks what there is to send before it waits
        self.in_use = False

    def reply(self, frame: Frame, meta: bytes = b"") -> None:
        connection = self.connection
        if connection is None or not connection.try_send(without_payload(frame, meta)):
            self.replies.append((frame, meta))
            self.wake()

    def wake(self) -> None:
        """Have the thread send what there is to send (any thread).

        The thread itself, too: a garbage collection may free slots when it is about to wait.
        """
        connection, is_own = self.connection, threading.current_thread() is self.thread
        if connection is not None and not (is_own and self._reads):
            connection.wake()

    def close(self) -> None:
        """End the connection, and the handshake that comes before it (any thread)."""
        self._closing = True
        self._arrival.end()

    def _run(self) -> None:
        message, parting_s = "closed", 0.0
        try:
            connection = self.connection = self._greet()
            self.greeted(connection)
            self._complaint.settle()
            while not self._closing:
                self._turn(connection)
        except (KvferryError, OSError) as error:
            message = f"{self.name}: {error}"
            if not isinstance(error, PeerLost) and not (self._closing and self.connection is None):
                self.receiver.count("connections_refused")
                self._complaint.tell(error)
                if self.receiver.busy(self):
                    parting_s = self.receiver.stall_timeout_s
        finally:
            try:
                if self.connection is not None:
                    # Before its rooms are told lost: tried again, none must get it once more.
                    self.connection.hang_up(parting_s)
                self.receiver.left(self, message)
            finally:
                if self.connection is not None:
                    self.connection.close()
                self.ended()

    def _greet(self) -> Connection:
        receiver = self.receiver
        connection, self.source = self._arrival.greet(
            receiver.context,
            receiver.security,
            receiver.stall_timeout_s,
            receiver.offer,
            lambda: receiver.proved(self),
        )
        self.name = self.source.sender_id
        return connection

    def _turn(self, connection: Connection) -> None:
        connection.flush()
        while self.replies:
            connection.send(*self.replies.popleft())
        self.before_waiting(connection)
        if connection.has_more or self._awaited(connection):
            self._reads = True
            self._read(connection)
            self._reads = False

    def _awaited(self, connection: Connection) -> bool:
        """Wait for a frame; whether one is there. Raises PeerLost if one is owed for too long."""
        stall_s = self.receiver.stall_timeout_s
        busy = self.receiver.busy(self)
        wait_s = stall_s / 3 if busy else _IDLE_WAIT_S
        until_s = SYSTEM_CLOCK.monotonic_s() + wait_s
        if connection.wait(wait_s):
            return True
        now_s = SYSTEM_CLOCK.monotonic_s()
        # Time for which this process, and perhaps the peer too, stood still does not count.
        self._heard_s += max(0.0, now_s - until_s)
        if busy and now_s - self._heard_s > stall_s:
            raise PeerLost(f"no sign of life for {stall_s:g} s")
        return False

    def _read(self, connection: Connection) -> None:
        incoming = connection.receive()
        self._heard_s = SYSTEM_CLOCK.monotonic_s()
        frame = incoming.frame
        if frame.kind is Kind.PING and not frame.payload_len:
            if not connection.receive_elsewhere(incoming, NO_PAYLOAD):
                self.receiver.damaged()  # it may have been a frame of another kind
            self.receiver.count("pings")
            self.replies.append((Frame(Kind.PONG), b""))
            return
        self.take(connection, incoming)

    # --- overridden in transfer.slots -------------------------------------------------------------

    def greeted(self, connection: Connection) -> None:
        """The sender has proved that it knows the token."""

    def before_waiting(self, connection: Connection) -> None:
        """All queued replies are sent, and the thread is about to wait."""

    def ended(self) -> None:
        """The connection is closed."""

    def take(self, connection: Connection, incoming: Incoming) -> None:
        """Judge a frame, read its payload and deliver it."""
        if not self.in_use:
            self._begin()
        receiver, num_bytes = self.receiver, incoming.frame.payload_len
        if not num_bytes:
            intact = connection.receive_elsewhere(incoming, NO_PAYLOAD)
            receiver.take(self, incoming.frame, incoming.meta, _NO_BYTES, intact)
            return
        if not receiver.admits(self, incoming.frame):
            if not connection.skip_payload(incoming):
                receiver.damaged()
            return
        payload = receiver.buffers.take(num_bytes)
        intact = connection.receive_payload(incoming, memoryview(payload))
        receiver.take(self, incoming.frame, incoming.meta, payload, intact)

    def _begin(self) -> None:
        """Mark that pages come on this TCP connection. Raises Incompatible if shm is required."""
        offer = self.receiver.offer
        if offer is not None and offer.is_demand:
            raise Incompatible(f"{self.name} sends by tcp, this side takes pages by shm only")
        self.in_use = True
        self.receiver.count("connections_tcp")
        log.info("pages from %s travel by tcp", self.name)
