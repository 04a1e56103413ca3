"""The `nixl` backend: NIXL writes pages into memory that the receiver registered, over RDMA or UCX.

A sender connects by TCP as always, and everything but the bytes of pages goes that way. After the
handshake the receiver registers slots (transfer/staging.py) and says in MEMORY how to reach them.
The sender copies pages into registered memory of its own, has NIXL write them into a slot, and
then sends the frame that names the slot. Checks, rooms, pings and endings are those of
transfer/tcp.py.

NIXL does not notice a frozen peer, may keep a write under way for ever and cannot cancel one.
So a write has a deadline, after which the connection is lost. The memory that the write reads is
kept until the write is over; memory that it may still change is never used for anything else.
"""

import contextlib
import logging
import mmap
import threading
from collections.abc import Callable

import numpy as np

from model.config import KVSpec
from transfer import wire
from transfer.backend import Frame, Kind, OnReceiverEvent, OnSenderEvent
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import ConfigError, Incompatible, PeerLost
from transfer.framing import Connection
from transfer.handshake import HANDSHAKE_TIMEOUT_S
from transfer.nixl_agent import Agent, Write
from transfer.rpc import Security
from transfer.slots import FRAME_BYTES, SlotFeeder, SlotLane
from transfer.staging import FillableSlots, LentSlots, SlotShape, copy_bytes, slot_shape
from transfer.tcp import TcpFeeder, TcpReceiver, TcpSender

log = logging.getLogger(__name__)

_SPIN_S = 20e-6
_LEAST_PAUSE_S = 50e-6
_MOST_PAUSE_S = 1e-3
_MOST_ABANDONED = 16
_JOIN_S = 2.0


class RemoteMemory(wire.Message, frozen=True):
    """Meta of MEMORY: slots from an address of the receiver on, and how NIXL reaches them."""

    shape: SlotShape
    address: int
    description: bytes


def _anonymous(num_bytes: int) -> mmap.mmap:
    """Private memory; only pages that were written take up RAM. Raises OSError."""
    return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _address(memory: mmap.mmap) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


class Callers:
    """Threads that call NIXL.

    `join` waits for them before the process ends: the interpreter kills its threads at exit, and
    inside a call of a C++ library that can abort the process.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def add(self, thread: threading.Thread) -> None:
        """Add a thread that was started, or is about to be."""
        begun = (known for known in self._threads if known.ident is None or known.is_alive())
        self._threads = [*begun, thread]

    def join(self) -> None:
        """Wait until all of them have ended, for at most _JOIN_S."""
        end_s = SYSTEM_CLOCK.monotonic_s() + _JOIN_S
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, end_s - SYSTEM_CLOCK.monotonic_s()))


# --- the sender's end -----------------------------------------------------------------------------


class RemoteSlots(FillableSlots):
    """Writes pages into the receiver's memory, from registered memory of this end."""

    def __init__(self, agent: Agent, memory: RemoteMemory, wait: Callable[[Write], None]) -> None:
        """wait: waits until a write is done, or raises PeerLost. Raises OSError or PeerLost."""
        super().__init__(memory.shape)
        self._agent = agent
        self._wait = wait
        self._remote = memory.address
        self._staging = _anonymous(memory.shape.slot_bytes)
        self._source = np.frombuffer(self._staging, np.uint8)
        self._registered = agent.register(_address(self._staging), len(self._source))
        self._peer = agent.meet(memory.description)
        self._write: Write | None = None

    def write(self, pages: np.ndarray) -> tuple[int, memoryview]:
        slot = self._next(pages.nbytes)
        source = self._source[: pages.nbytes]
        copy_bytes(pages, source)
        target = self._remote + slot * self._shape.slot_bytes
        self._write = self._agent.write(self._peer, self._source.ctypes.data, target, pages.nbytes)
        self._wait(self._write)
        return slot, memoryview(source)

    @property
    def is_under_way(self) -> bool:
        return self._write is not None and not self._write.is_over

    def move_on(self) -> None:
        """Check whether the write is over by now."""
        if self._write is not None:
            with contextlib.suppress(PeerLost):  # then the write is over, too
                self._write.done()

    def close(self) -> None:
        """Release the memory, now or once the write that reads it is over."""
        super().close()
        if self.is_under_way:
            ABANDONED.add(self)
        else:
            self._agent.part(self._peer)
            self._agent.release(self._registered)


class Abandoned:
    """Memory of lost connections that a write may still read."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: list[RemoteSlots] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, slots: RemoteSlots) -> None:
        with self._lock:
            self._kept.append(slots)

    def clear(self) -> None:
        """Close the slots whose write is over. Raises PeerLost when too many are left."""
        with self._lock:
            for slots in list(self._kept):
                slots.move_on()
                if not slots.is_under_way:
                    self._kept.remove(slots)
                    slots.close()
            left = len(self._kept)
        if left >= self._most:
            raise PeerLost(
                f"{left} lost connections have a NIXL write under way, at most {self._most} may; "
                "restart this worker unless their receivers come back or end"
            )


ABANDONED = Abandoned(_MOST_ABANDONED)


def _probe_sending(sender_id: str) -> None:
    """Raises ConfigError unless NIXL works and registers the memory of one frame."""
    agent = Agent(sender_id, is_target=False)
    staging = _anonymous(FRAME_BYTES)
    try:
        agent.release(agent.register(_address(staging), FRAME_BYTES))
    except OSError as error:
        raise ConfigError(
            f"--disaggregation-transfer-backend nixl: {error}; raise the limit on locked memory "
            "(ulimit -l), or choose tcp"
        ) from error


def _say_what_tls_leaves_out(security: Security) -> None:
    if security.ca_file is not None:
        log.warning("TLS covers only the TCP connection; NIXL moves pages unencrypted")


class NixlSender(TcpSender):
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
        """Raises ConfigError where NIXL is not installed, or does not work."""
        _probe_sending(sender_id)
        _say_what_tls_leaves_out(security)
        super().__init__(
            security,
            sender_id,
            on_event,
            min(max_frame_bytes, FRAME_BYTES),
            stall_timeout_s,
            connections,
        )
        self._callers = Callers()

    def _open_lane(self, address: str) -> "_NixlLane":
        lane = _NixlLane(self, address)
        lane.thread.start()
        self._callers.add(lane.thread)
        return lane

    def close(self) -> None:
        super().close()
        self._callers.join()


class _NixlLane(SlotLane):
    """One connection to a decode worker."""

    elsewhere = "nixl"
    in_one_memory = False
    writes_at_once = False

    def __init__(self, sender: NixlSender, address: str) -> None:
        super().__init__(sender, address)
        self._stop = threading.Event()

    def close(self) -> None:
        self._stop.set()
        super().close()

    def connect(self) -> Connection:
        ABANDONED.clear()
        # First, since decode would lend memory for nothing if no agent can be made.
        agent = Agent(self.sender.sender_id, is_target=False)
        connection, _ = self.dial()
        try:
            memory = self._lent(connection)
            if self._stop.is_set():
                raise PeerLost("closed")
            self.slots = RemoteSlots(agent, memory, lambda write: self._wait(connection, write))
        except BaseException:
            connection.close()
            raise
        self.sender.count("connections_nixl")
        return connection

    def _lent(self, connection: Connection) -> RemoteMemory:
        """Receive the description of the receiver's memory. Raises Incompatible if none comes."""
        try:
            with connection.all_within(HANDSHAKE_TIMEOUT_S):
                meta = connection.receive_only(Kind.MEMORY)
        except PeerLost as error:
            raise Incompatible(
                f"this side sends by nixl, and decode lends it no memory: {error}"
            ) from error
        return wire.decode(meta, RemoteMemory)

    def _wait(self, connection: Connection, write: Write) -> None:
        """Wait until a write is done, and read from the peer meanwhile. Raises PeerLost."""
        stall_s = self.sender.stall_timeout_s
        begun_s = SYSTEM_CLOCK.monotonic_s()
        pause_s = _LEAST_PAUSE_S
        while not write.done():
            waited_s = SYSTEM_CLOCK.monotonic_s() - begun_s
            if waited_s < _SPIN_S:
                continue
            if waited_s > stall_s:
                raise PeerLost(f"NIXL did not end a write within {stall_s:g} s")
            self._ask(connection)
            if connection.wait(0.0):
                self._read(connection)
            if self._stop.wait(pause_s):
                raise PeerLost("closed")
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)


# --- the receiver's end ---------------------------------------------------------------------------

# Memory that a sender was told of stays mapped while this process lives, so that its addresses are
# never reused: with some transports a frozen sender writes to them when it wakes, although they
# were unregistered. The RAM behind them is given back.
_FORMER: list[mmap.mmap] = []


class RegisteredSlots(LentSlots):
    """Slots that one sender may write to by NIXL."""

    def __init__(self, agent: Agent, shape: SlotShape, on_freed: Callable[[], None]) -> None:
        """Raises OSError when memory cannot be allocated or registered."""
        memory = _anonymous(shape.num_bytes)
        super().__init__(shape, memory, on_freed)
        self._agent = agent
        self._registered = agent.register(_address(memory), shape.num_bytes)
        self._is_told = False
        self._former: mmap.mmap | None = None

    def told(self) -> RemoteMemory:
        """What the sender needs to know. Raises OSError when NIXL cannot describe the memory."""
        if not self._is_told:
            self._is_told = True
            _FORMER.append(self._memory)  # kept from now on, however this connection ends
        description = self._agent.describe(self._registered)
        return RemoteMemory(self.shape, _address(self._memory), description)

    def close(self) -> None:
        """End writes to this memory; received pages stay until the last view of them is gone."""
        self._agent.release(self._registered)
        if self._is_told:
            self._former = self._memory
        super().close()
        self._give_back()

    def _free(self, slot: int, view: object) -> None:
        super()._free(slot, view)
        self._give_back()

    def _give_back(self) -> None:
        """Give the RAM back to the kernel once nobody reads it (any thread, repeatable)."""
        former = self._former
        if former is not None and len(self._freed) == sum(self._held):
            former.madvise(mmap.MADV_DONTNEED)


class NixlReceiver(TcpReceiver):
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
    ) -> None:
        """Raises ConfigError where NIXL is not installed, or when staging_bytes is too small."""
        super().__init__(security, host, port, kv, tp_size, on_event, stall_timeout_s)
        self.shape = slot_shape(kv.page_bytes // tp_size, tp_size, FRAME_BYTES, staging_bytes)
        _say_what_tls_leaves_out(security)
        self.agent = Agent("decode", is_target=True)
        self.feeder = _NixlFeeder
        self._callers = Callers()
        self._probe()

    def joined(self, feeder: TcpFeeder) -> bool:
        is_in = super().joined(feeder)
        if is_in:
            self._callers.add(feeder.thread)
        return is_in

    def close(self) -> None:
        super().close()
        self._callers.join()

    def _probe(self) -> None:
        """Raises ConfigError unless memory can be registered."""
        try:
            RegisteredSlots(self.agent, self.shape, lambda: None).close()
        except OSError as error:
            raise ConfigError(
                f"--disaggregation-transfer-backend nixl: {error}; choose a smaller "
                "--transfer-staging-bytes, or raise the limit on locked memory (ulimit -l)"
            ) from error


class _NixlFeeder(SlotFeeder):
    """One sender's connection, and the memory lent to it."""

    receiver: NixlReceiver
    in_one_memory = False

    def greeted(self, connection: Connection) -> None:
        """Register memory and describe it to the sender. Raises OSError when there is none."""
        receiver = self.receiver
        self.slots = slots = RegisteredSlots(receiver.agent, receiver.shape, self.wake)
        connection.send(Frame(Kind.MEMORY), wire.encode(slots.told()))
        self.lent("nixl")
