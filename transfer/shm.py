"""The `shm` backend: pages through memory that two processes of one host share, or else by TCP.

A sender connects by TCP as always. The receiver's WELCOME names its host and an abstract Unix
socket. A sender on the same host that reaches that socket continues there: both ends repeat the
handshake, and the receiver passes memory (transfer/staging.py). The sender writes pages into slots,
and frames on the Unix socket name the slots. Checks, rooms, pings and endings are those of
transfer/tcp.py.

Between hosts, or containers without a common network namespace, pages travel by TCP, unless either
side demands shared memory.
"""

import logging
import secrets
import socket
from pathlib import Path

from model.config import KVSpec
from transfer import wire
from transfer.backend import Frame, Kind, OnReceiverEvent, OnSenderEvent
from transfer.buffers import PinMemory
from transfer.errors import ConfigError, Incompatible, KvferryError
from transfer.framing import Connection
from transfer.handshake import HANDSHAKE_TIMEOUT_S, Offer
from transfer.rpc import Security
from transfer.slots import FRAME_BYTES, SlotFeeder, SlotLane
from transfer.staging import BorrowedSlots, SharedSlots, SlotShape, can_share_memory, slot_shape
from transfer.tcp import CONNECT_TIMEOUT_S, TcpReceiver, TcpSender

log = logging.getLogger(__name__)

_NO_SHARING = "--disaggregation-transfer-backend shm: this platform cannot share memory"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """An id that processes share if they run on one kernel; "" where memory cannot be shared."""
    if not can_share_memory():
        return ""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class ShmSender(TcpSender):
    """Prefill's end, see transfer/outbound.py."""

    def __init__(
        self,
        security: Security,
        sender_id: str,
        on_event: OnSenderEvent,
        max_frame_bytes: int = 16 << 20,
        stall_timeout_s: float = 3.0,
        is_demand: bool = False,
        host: str | None = None,
        connections: int = 1,
    ) -> None:
        """is_demand: never fall back to TCP. host: this host's identity.

        Raises ConfigError when shared memory is demanded where there is none.
        """
        super().__init__(
            security, sender_id, on_event, max_frame_bytes, stall_timeout_s, connections
        )
        self.is_demand = is_demand
        self.host = host_identity() if host is None else host
        if is_demand and not self.host:
            raise ConfigError(_NO_SHARING)

    def _open_lane(self, address: str) -> "_ShmLane":
        lane = _ShmLane(self, address)
        lane.max_frame_bytes = min(self._max_frame_bytes, FRAME_BYTES)
        lane.thread.start()
        return lane


class _ShmLane(SlotLane):
    """One connection to a decode worker, by shared memory or TCP."""

    sender: ShmSender

    elsewhere = "shm"

    def connect(self) -> Connection:
        connection, offer = self.dial()
        try:
            shared = self._reach(offer) if offer is not None and self._is_here(offer) else None
        except (KvferryError, OSError):
            connection.close()
            raise
        if shared is None:
            return self._stay(connection, offer)
        connection.close()
        self.sender.count("connections_shm")
        log.info("pages to %s travel by shm", self.address)
        return shared

    def _is_here(self, offer: Offer) -> bool:
        return bool(self.sender.host) and offer.host_identity == self.sender.host

    def _why_not(self, offer: Offer | None) -> str:
        """Why shared memory is not used, with both sides' values."""
        mine = self.sender.host or "unknown"
        if offer is None:
            return f"this side is on host {mine}, decode offers no shared memory"
        if not self._is_here(offer):
            return f"this side is on host {mine}, decode on {offer.host_identity}"
        return (
            f"both sides are on host {mine}, but decode's abstract socket {offer.socket_name} "
            "is not reached from this network namespace"
        )

    def _reach(self, offer: Offer) -> Connection | None:
        """Connect to the receiver's Unix socket and map its memory; None when nobody listens there.

        The socket's name is visible only within one network namespace.
        """
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(CONNECT_TIMEOUT_S)
        try:
            sock.connect(f"\0{offer.socket_name}")
        except OSError:
            sock.close()
            return None
        connection, _ = self.introduced(sock, takes_fd=True)
        try:
            with connection.all_within(HANDSHAKE_TIMEOUT_S):
                shape = wire.decode(connection.receive_only(Kind.MEMORY), SlotShape)
            self.slots = BorrowedSlots(connection.take_fd(), shape)
        except KvferryError:
            connection.close()
            raise
        return connection

    def _stay(self, connection: Connection, offer: Offer | None) -> Connection:
        """Stay with TCP. Raises Incompatible when either side demands shared memory."""
        why_not = self._why_not(offer)
        if self.sender.is_demand or (offer is not None and offer.is_demand):
            connection.close()
            side = "prefill" if self.sender.is_demand else "decode"
            self.sender.count("connections_refused")
            raise Incompatible(f"{side} takes shm only, and it cannot be used: {why_not}")
        self.max_frame_bytes = 0  # the sender's
        self.sender.count("connections_tcp")
        log.info("pages to %s travel by tcp; shared memory: %s", self.address, why_not)
        return connection


class ShmReceiver(TcpReceiver):
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
        staging_bytes: int = 0,
        is_demand: bool = False,
        identity: str | None = None,
        pin: PinMemory | None = None,
    ) -> None:
        """is_demand: never fall back to TCP. identity: this host's. pin: called for page memory.

        Raises ConfigError when staging_bytes is too small, or shared memory is demanded where
        there is none.
        """
        super().__init__(security, host, port, kv, tp_size, on_event, stall_timeout_s, pin)
        self.pin = pin
        self.shape = slot_shape(kv.page_bytes // tp_size, tp_size, FRAME_BYTES, staging_bytes)
        self._identity = host_identity() if identity is None else identity
        self._is_demand = is_demand
        if is_demand and not self._identity:
            raise ConfigError(_NO_SHARING)

    def start(self) -> str:
        """Raises ConfigError when the address cannot be listened on."""
        if self._identity:
            try:
                self._begin_to_offer()
            except OSError as error:  # a sandbox may forbid the memory or the socket
                if self._is_demand:
                    raise ConfigError(f"{_NO_SHARING}: {error}") from error
                log.warning("shared memory cannot be offered, pages come by tcp: %s", error)
        return super().start()

    def _begin_to_offer(self) -> None:
        """Check that memory can be allocated, then listen on a Unix socket. Raises OSError."""
        probe = SharedSlots(self.shape, lambda: None)
        probe.close_fd()
        probe.close()
        name = f"kvferry-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(f"\0{name}")
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        self.listen(listener, _ShmFeeder)
        self.offer = Offer(self._identity, name, self._is_demand)


class _ShmFeeder(SlotFeeder):
    """One sender's connection by Unix socket, and the memory lent to it."""

    receiver: ShmReceiver

    def greeted(self, connection: Connection) -> None:
        """Allocate the memory and pass it. Raises OSError when there is none."""
        receiver = self.receiver
        self.slots = slots = SharedSlots(receiver.shape, self.wake, receiver.pin)
        try:
            connection.send_fd(Frame(Kind.MEMORY), wire.encode(slots.shape), slots.fd)
        finally:
            slots.close_fd()
        self.lent("shm")
