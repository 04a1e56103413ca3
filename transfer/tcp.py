"""The `tcp` backend: one connection per pair of workers, one thread for each end of it.

A connection that moves nothing for stall_timeout_s while rooms are open is lost, and with it
its rooms; the API process sends them elsewhere. Nothing is resent here.
"""

import logging
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model.config import KVSpec
from transfer import wire
from transfer.backend import (
    FirstToken,
    Frame,
    Inbound,
    Kind,
    Refused,
    SenderEvent,
    as_bytes,
    cut_frames,
)
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import (
    BadMessage,
    Code,
    ConfigError,
    FrameRefused,
    KvferryError,
    PeerLost,
)
from transfer.framing import (
    Connection,
    client_context,
    greet,
    introduce,
    parse_address,
    server_context,
    set_buffers,
)
from transfer.layout import HeadRun
from transfer.rpc import Security

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Job:
    """A frame to send. payload is None but for PAGES."""

    frame: Frame
    meta: bytes = b""
    payload: np.ndarray | None = None


class TcpSender:
    """Prefill's end: see transfer.backend.PageSender."""

    def __init__(
        self,
        security: Security,
        sender_id: str,
        on_event: Callable[[SenderEvent], None],
        max_frame_bytes: int = 16 << 20,
        stall_timeout_s: float = 3.0,
    ) -> None:
        self.security = security
        self.sender_id = sender_id
        self.stall_timeout_s = stall_timeout_s
        self._on_event = on_event
        self._max_frame_bytes = max_frame_bytes
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._closed = False

    def send_pages(
        self,
        grant: wire.Grant,
        page_start: int,
        shards: Sequence[np.ndarray],
        runs: Sequence[HeadRun],
    ) -> None:
        frames = cut_frames(grant, page_start, shards, runs, self._max_frame_bytes)
        jobs = [_Job(frame, payload=payload) for frame, payload in frames]
        self._link(grant.data_address).queue(grant.room, jobs)

    def finish(self, grant: wire.Grant, first: FirstToken) -> None:
        frame = Frame(Kind.FINISH, grant.room, grant.epoch)
        self._link(grant.data_address).queue(grant.room, [_Job(frame, wire.encode(first))])

    def cancel(self, room: int) -> None:
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.cancel(room)

    @property
    def in_flight_bytes(self) -> int:
        with self._lock:
            return sum(link.queued_bytes for link in self._links.values())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            link.close()

    def _link(self, address: str) -> "_Link":
        with self._lock:
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = _Link(self, address)
                link.start()
            return link

    def lost(self, link: "_Link", rooms: Sequence[int], message: str) -> None:
        """A link has ended; its open rooms with it (the link's thread)."""
        with self._lock:
            if self._links.get(link.address) is link:
                del self._links[link.address]
            closed = self._closed
        if not closed:
            for room in rooms:
                self._on_event(SenderEvent("lost", room, message))

    def ended(self, event: SenderEvent) -> None:
        self._on_event(event)


class _Link(threading.Thread):
    """One connection to one decode worker, and the rooms that are open on it."""

    def __init__(self, sender: TcpSender, address: str) -> None:
        super().__init__(name=f"pages to {address}", daemon=True)
        self.address = address
        self.queued_bytes = 0
        self._sender = sender
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._rooms: dict[int, int] = {}  # open room -> epoch
        self._connection: Connection | None = None
        self._closing = False
        self._dead = ""

    # --- any thread -----------------------------------------------------------------------------

    def queue(self, room: int, jobs: list[_Job]) -> None:
        with self._lock:
            dead = self._dead
            if not dead:
                self._rooms[room] = jobs[0].frame.epoch
                self._jobs.extend(jobs)
                self.queued_bytes += sum(_size(job) for job in jobs)
        if dead:
            self._sender.lost(self, [room], dead)
        else:
            self._wake()

    def cancel(self, room: int) -> None:
        with self._lock:
            epoch = self._rooms.pop(room, None)
            if epoch is None:
                return
            kept = [job for job in self._jobs if job.frame.room != room]
            self._jobs = deque(kept)
            self.queued_bytes = sum(_size(job) for job in kept)
            self._jobs.append(_Job(Frame(Kind.CANCEL, room, epoch)))
        self._wake()

    def close(self) -> None:
        self._closing = True
        connection = self._connection
        if connection is not None:
            connection.shutdown()

    def _wake(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.wake()

    # --- its own thread ---------------------------------------------------------------------------

    def run(self) -> None:
        message = "closed"
        try:
            self._connection = self._connect()
            while not self._closing:
                self._turn(self._connection)
        except (KvferryError, OSError) as error:
            message = f"{self.address}: {error}"
            if not self._closing:
                log.warning("page link lost: %s", message)
        finally:
            with self._lock:
                self._dead = message
                rooms = list(self._rooms)
                self._rooms.clear()
                self._jobs.clear()
                self.queued_bytes = 0
            self._sender.lost(self, rooms, message)
            if self._connection is not None:
                self._connection.close()

    def _connect(self) -> Connection:
        host, port = parse_address(self.address)
        sock = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        set_buffers(sock, (socket.SO_SNDBUF,))
        context = client_context(self._sender.security)
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=host)
        connection = Connection(sock, self._sender.stall_timeout_s)
        introduce(connection, self._sender.security, self._sender.sender_id)
        return connection

    def _turn(self, connection: Connection) -> None:
        """Send a job, read what came; when idle, wait and see that the peer lives."""
        with self._lock:
            job = self._jobs.popleft() if self._jobs else None
            waiting = bool(self._rooms)
        if job is not None:
            payload = b"" if job.payload is None else as_bytes(job.payload)
            connection.send(job.frame, job.meta, payload)
            with self._lock:
                self.queued_bytes = max(0, self.queued_bytes - _size(job))
            while connection.wait(0.0):
                self._read(connection)
            return
        patience_s = self._sender.stall_timeout_s
        if connection.wait(patience_s / 2 if waiting else 60.0):
            self._read(connection)
        elif waiting and not self._jobs:
            self._probe(connection, patience_s / 2)

    def _probe(self, connection: Connection, patience_s: float) -> None:
        """Nothing came for a while and rooms wait for their ACK: is anyone there?"""
        connection.send(Frame(Kind.PING))
        deadline_s = SYSTEM_CLOCK.monotonic_s() + patience_s
        while (left_s := deadline_s - SYSTEM_CLOCK.monotonic_s()) > 0:
            if connection.wait(left_s):
                self._read(connection)
                return
            if self._jobs or self._closing:
                return
        raise PeerLost("the peer gives no sign of life")

    def _read(self, connection: Connection) -> None:
        frame, meta = connection.receive()
        if frame.kind is Kind.PONG:
            return
        if frame.kind not in (Kind.ACK, Kind.NACK) or frame.payload_len:
            raise BadMessage(f"unexpected {frame.kind.name} frame")
        with self._lock:
            known = self._rooms.pop(frame.room, None) is not None
            if known and frame.kind is Kind.NACK:
                self._jobs = deque(job for job in self._jobs if job.frame.room != frame.room)
        if not known:
            return
        if frame.kind is Kind.ACK:
            self._sender.ended(SenderEvent("acked", frame.room))
        else:
            refused = wire.decode(meta, Refused)
            self._sender.ended(SenderEvent("nacked", frame.room, refused.message))


def _size(job: _Job) -> int:
    return 0 if job.payload is None else job.payload.nbytes


class TcpReceiver:
    """Decode's end: see transfer.backend.PageReceiver."""

    def __init__(
        self,
        security: Security,
        host: str,
        port: int,
        kv: KVSpec,
        tp_size: int,
        on_pages: Callable[[int, int, list[np.ndarray]], None],
        on_finish: Callable[[int, FirstToken], None],
        on_lost: Callable[[tuple[int, ...], str], None],
        stall_timeout_s: float = 3.0,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.security = security
        self.stall_timeout_s = stall_timeout_s
        self._host, self._port = host, port
        self._on_pages = on_pages
        self._on_finish = on_finish
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._inbound = Inbound(kv, tp_size)
        self._peers: dict[int, _Peer] = {}  # room -> where its frames come from
        self._connections: set[_Peer] = set()
        self._listener: socket.socket | None = None
        self._closed = False

    def start(self) -> str:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        set_buffers(listener, (socket.SO_RCVBUF,))
        try:
            listener.bind((self._host, self._port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot take pages on {self._host}:{self._port}: {error.strerror}; "
                "choose another --data-port"
            ) from error
        self._listener = listener
        threading.Thread(target=self._accept, name="page listener", daemon=True).start()
        host = f"[{self._host}]" if family == socket.AF_INET6 else self._host
        return f"tcp://{host}:{listener.getsockname()[1]}"

    def expect(self, room: int, epoch: int, num_pages: int) -> None:
        with self._lock:
            self._inbound.expect(room, epoch, num_pages)

    def forget(self, room: int) -> None:
        with self._lock:
            self._inbound.forget(room)
            self._peers.pop(room, None)

    def ack(self, room: int) -> None:
        with self._lock:
            peer = self._peers.pop(room, None)
        if peer is not None:
            peer.reply(_Job(Frame(Kind.ACK, room)))

    def close(self) -> None:
        self._closed = True
        if self._listener is not None:
            # Wakes the accepting thread, which closing alone would not.
            _shutdown(self._listener)
            self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for peer in connections:
            peer.close()

    # --- connection threads -----------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closed:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.error("page listener failed: %s", error)
                return
            _Peer(self, sock, f"{address[0]}:{address[1]}").start()

    def joined(self, peer: "_Peer") -> None:
        with self._lock:
            self._connections.add(peer)

    def left(self, peer: "_Peer", message: str) -> None:
        """A connection ended: its rooms will get no more pages."""
        with self._lock:
            self._connections.discard(peer)
            rooms = tuple(room for room, owner in self._peers.items() if owner is peer)
            for room in rooms:
                del self._peers[room]
        if rooms and not self._closed:
            self._on_lost(rooms, message)

    def count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self.counters[what] += amount

    def check(self, peer: "_Peer", frame: Frame) -> None:
        """Raises FrameRefused; else the room's frames belong to this peer."""
        with self._lock:
            self._inbound.check(frame)
            owner = self._peers.setdefault(frame.room, peer)
        if owner is not peer:
            raise FrameRefused(f"foreign: room {frame.room} is fed by another connection")

    def take(self, frame: Frame, meta: bytes, payload: np.ndarray) -> None:
        """A checked frame with its contents. Raises FrameRefused or BadMessage."""
        frame.check_digest(meta, memoryview(payload))
        match frame.kind:
            case Kind.PAGES:
                with self._lock:
                    arrived = self._inbound.pages(frame, payload)
                    self.counters["frames"] += 1
                    self.counters["bytes"] += payload.nbytes
                if arrived is not None:
                    self._on_pages(frame.room, arrived.page_start, arrived.shards)
            case Kind.FINISH:
                first = wire.decode(meta, FirstToken)
                with self._lock:
                    finished = self._inbound.finish(frame, first)
                if finished:
                    self._on_finish(frame.room, first)
            case Kind.CANCEL:
                self.forget(frame.room)
                self._on_lost((frame.room,), "cancelled by prefill")


class _Peer(threading.Thread):
    """One sender's connection."""

    def __init__(self, receiver: TcpReceiver, sock: socket.socket, name: str) -> None:
        super().__init__(name=f"pages from {name}", daemon=True)
        self._receiver = receiver
        self._sock = sock
        self._peer_name = name
        self._replies: deque[_Job] = deque()
        self._connection: Connection | None = None
        self._closing = False

    def reply(self, job: _Job) -> None:
        """Queue a small frame for the sender (any thread)."""
        self._replies.append(job)
        connection = self._connection
        if connection is not None:
            connection.wake()

    def close(self) -> None:
        self._closing = True
        connection = self._connection
        if connection is not None:
            connection.shutdown()

    def run(self) -> None:
        message = "closed"
        try:
            context = server_context(self._receiver.security)
            self._sock.settimeout(CONNECT_TIMEOUT_S)
            if context is not None:
                self._sock = context.wrap_socket(self._sock, server_side=True)
            self._connection = Connection(self._sock, self._receiver.stall_timeout_s)
            self._peer_name = greet(self._connection, self._receiver.security)
            self._receiver.joined(self)
            while not self._closing:
                while self._replies:
                    job = self._replies.popleft()
                    self._connection.send(job.frame, job.meta)
                if self._connection.wait(60.0):
                    self._read(self._connection)
        except (KvferryError, OSError) as error:
            message = f"{self._peer_name}: {error}"
            if not isinstance(error, PeerLost):
                self._receiver.count("connections_refused")
                log.warning("page connection refused: %s", message)
        finally:
            self._receiver.left(self, message)
            if self._connection is not None:
                self._connection.close()
            else:
                self._sock.close()

    def _read(self, connection: Connection) -> None:
        frame, meta = connection.receive()
        if frame.kind is Kind.PING and not frame.payload_len:
            connection.send(Frame(Kind.PONG))
            return
        if frame.kind not in (Kind.PAGES, Kind.FINISH, Kind.CANCEL):
            raise BadMessage(f"unexpected {frame.kind.name} frame")
        try:
            self._receiver.check(self, frame)
        except FrameRefused as error:
            connection.skip_payload(frame)
            self._refuse(frame, error)
            return
        payload = connection.receive_payload(frame)
        try:
            self._receiver.take(frame, meta, payload)
        except (FrameRefused, BadMessage) as error:
            self._refuse(frame, error)

    def _refuse(self, frame: Frame, error: KvferryError) -> None:
        """Count it and tell the sender, whose room is over; ours ends by its own rules."""
        reason = str(error).partition(":")[0].replace(" ", "_")
        self._receiver.count(f"refused_{reason}")
        if frame.kind is Kind.CANCEL:
            return
        log.warning("frame of room %d refused: %s", frame.room, error)
        refused = Refused(Code.STALE.value, str(error))
        self._replies.append(_Job(Frame(Kind.NACK, frame.room), wire.encode(refused)))


def _shutdown(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("listener: %s", error)
