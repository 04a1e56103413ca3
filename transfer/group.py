"""A group of several processes with one mesh: the leader tells the other members every call.

To other processes the leader is a worker like any other. The other members (transfer/member.py)
hold their parts of the weights and pages, and make the calls that the leader tells them, in order.
Each ships its own shards of pages, and tells the leader what became of them; otherwise nobody else
talks to them. The group lives and dies as one: when a member is lost, the leader ends,
which looks like a worker that died; when the leader is gone, its members end.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from model import members
from transfer import wire
from transfer.backend import Arrived, Finished, ReceivedEvent, SenderEvent, SenderLost
from transfer.clock import SYSTEM_CLOCK, Clock
from transfer.errors import BadMessage, ConfigError, Unavailable
from transfer.handshake import parse_address
from transfer.meeting import settings_of
from transfer.ports import is_loopback
from transfer.worker_config import WorkerConfig

log = logging.getLogger(__name__)

FOLLOW_TIMEOUT_S = 60.0  # from the leader's last compiled program to the last member's
SIGN_OF_LIFE_S = 0.5  # from either end
# After which a peer counts as lost: a killed one breaks the stream, a hung one does not.
SILENCE_S = 3.0
# A node that is gone breaks the calls of all others, which may see that before they learn why.
CAUSE_S = 1.0
# Of arrays in one message: a member that fell behind may have more waiting than one may have.
_MOST_BYTES = 16 << 20
_FAREWELL_S = 3.0  # for members to leave before their leader
# JAX's service ends with the leader and aborts members that still run: the time that a member may
# take from its last message to its exit.
_ENDING_S = 0.5

AllCame = Callable[[Mapping[str, str]], Coroutine[Any, Any, str]]


class Joined(wire.Message, frozen=True):
    """What each node tells all others once it is built."""

    worker_id: str = ""  # the leader's
    address: str = ""  # where the leader takes control messages
    data_address: str = ""  # where this node takes pages; prefill: ""


class NodeState(wire.Message, frozen=True):
    """What a node counts itself: see wire.WorkerState."""

    counters: dict[str, float] = msgspec.field(default_factory=dict)
    transfers: tuple[wire.TransferPair, ...] = ()
    in_flight_bytes: int = 0


class Follow(wire.Message, frozen=True):
    """From a member other than the leader: it is ready for calls, or still alive."""

    node_rank: int
    compiles_after_ready: int = 0
    state: NodeState = NodeState()


class Told(wire.Message, frozen=True):
    """From a member: what its data plane says, in order of each kind."""

    node_rank: int
    sent: tuple[SenderEvent, ...] = ()
    came: tuple[Arrived, ...] = ()
    finished: tuple[Finished, ...] = ()
    lost: tuple[SenderLost, ...] = ()
    behind: tuple[str, ...] | None = None  # data addresses with too much queued; None: as before

    @property
    def received(self) -> tuple[ReceivedEvent, ...]:
        return (*self.came, *self.finished, *self.lost)


class HostArray(wire.Message, frozen=True):
    """A small array in host memory."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class NodeCall(wire.Message, frozen=True):
    """One call of model.calls.Calls."""

    name: str
    key: int
    arrays: tuple[HostArray, ...]


class NodeCalls(wire.Message, frozen=True):
    """Calls in order; an empty message is a sign of life."""

    calls: tuple[NodeCall, ...] = ()
    is_last: bool = False  # the group leaves well


def packed_call(name: str, key: int, arrays: Sequence[np.ndarray]) -> NodeCall:
    return NodeCall(name, key, tuple(HostArray(a.dtype.str, a.shape, a.tobytes()) for a in arrays))


def arrays_of(call: NodeCall) -> list[np.ndarray]:
    """The arrays of a call. Raises BadMessage when they are malformed."""
    try:
        return [np.frombuffer(a.data, a.dtype).reshape(a.shape) for a in call.arrays]
    except (ValueError, TypeError) as error:
        raise BadMessage(f"arrays of {call.name}: {error}") from error


def join(
    config: WorkerConfig, role: wire.Role, all_came: AllCame, loop: asyncio.AbstractEventLoop
) -> None:
    """Join this process's group into one mesh. Once, before the first array (build thread).

    all_came(settings): this process's end of transfer/meeting.py; runs on the loop. Raises what it
    raises, ModelError when the nodes cannot form a mesh, NodeLost when another does not join it.
    """
    log.info("node %d of %d joins %s", config.node_rank, config.nnodes, config.dist_init_addr)
    met = asyncio.run_coroutine_threadsafe(all_came(settings_of(config, role)), loop)
    crosses_hosts = not is_loopback(config.meeting_host)
    members.join(met.result(), config.nnodes, config.node_rank, crosses_hosts)


def meet_all(own: Joined) -> list[Joined]:
    """What each node says, the leader first; they wait for each other (build thread).

    Raises NodeLost when one is gone, ConfigError when only some of them take pages from other
    hosts.
    """
    texts = members.texts_of_all(msgspec.json.encode(own).decode())
    met = [msgspec.json.decode(text, type=Joined) for text in texts]
    addresses = [joined.data_address for joined in met]
    local = [is_loopback(parse_address(address)[0]) for address in addresses if address]
    if any(local) and not all(local):
        node = local.index(True)
        raise ConfigError(
            f"node {node} takes pages at {addresses[node]}, which other hosts cannot reach, and "
            f"node {local.index(False)} at {addresses[local.index(False)]}: give node {node} a "
            "--host or --data-host"
        )
    return met


class Leader:
    """The leader's end. Used on the loop, except where a method says otherwise."""

    def __init__(
        self,
        num_members: int,
        on_lost: Callable[[int], None],
        on_told: Callable[[Told], None] = lambda _: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """num_members: includes the leader. on_lost(node_rank): a member is gone. on_told: a
        member's data plane says something."""
        self._num_members = num_members
        self._on_lost = on_lost
        self._on_told = on_told
        self._clock = clock
        self._feeds: dict[int, _Feed] = {}
        self._all_follow = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = False
        self._none_follows = asyncio.Event()

    def wait_for_all(self) -> None:
        """Wait until every member follows (build thread). Raises Unavailable when one does not."""
        log.info("all is compiled; waiting until %d other nodes follow", self._num_members - 1)
        if not self._all_follow.wait(FOLLOW_TIMEOUT_S):
            missing = sorted(set(range(1, self._num_members)) - set(self._feeds))
            raise Unavailable(f"nodes {missing} did not follow within {FOLLOW_TIMEOUT_S:g} s")

    def tell(self, name: str, key: int, arrays: Sequence[np.ndarray]) -> None:
        """Tell every member to make this call (engine thread)."""
        assert self._loop is not None, "members follow first"
        self._loop.call_soon_threadsafe(self._offer, packed_call(name, key, arrays))

    async def feed(self, request: Follow) -> AsyncIterator[NodeCalls]:
        """The stream of calls to one member. Raises BadMessage for a node that cannot follow."""
        rank = request.node_rank
        if not 0 < rank < self._num_members or rank in self._feeds or self._leaving:
            raise BadMessage(f"node {rank} of {self._num_members} cannot follow now")
        feed = self._feeds[rank] = _Feed()
        self._loop = asyncio.get_running_loop()
        feed.heard_s = self._clock.monotonic_s()
        if len(self._feeds) == self._num_members - 1:
            self._all_follow.set()
        listening = asyncio.create_task(self._listen(rank, feed))
        try:
            while not feed.is_over and rank in self._feeds:
                yield await feed.take()
            if feed.is_over and feed.is_well:  # the member closes the stream when it ends
                await asyncio.sleep(_FAREWELL_S)
        finally:
            listening.cancel()
            self._gone(rank, feed)

    async def _listen(self, rank: int, feed: "_Feed") -> None:
        """Watch a member until it is silent for too long. A task apart, since a feed may stall."""
        looked_s = self._clock.monotonic_s()
        while True:
            await asyncio.sleep(SIGN_OF_LIFE_S)
            before_s, looked_s = looked_s, self._clock.monotonic_s()
            if looked_s - before_s > 2 * SIGN_OF_LIFE_S:  # this process stood still itself
                feed.heard_s = looked_s
            if looked_s - feed.heard_s > SILENCE_S:
                log.error("node %d said nothing for %g s", rank, SILENCE_S)
                self._gone(rank, feed)
                return

    def _gone(self, rank: int, feed: "_Feed") -> None:
        """A member left, or is lost."""
        if self._feeds.get(rank) is not feed:
            return
        del self._feeds[rank]
        if not self._feeds:
            self._none_follows.set()
        if not self._leaving:
            log.error("node %d is lost", rank)
            self._on_lost(rank)

    async def still_there(self, request: Follow) -> wire.Empty:
        """A member's sign of life."""
        feed = self._feeds.get(request.node_rank)
        if feed is None:
            raise BadMessage(f"node {request.node_rank} does not follow")
        feed.heard_s = self._clock.monotonic_s()
        so_far = feed.compiles_after_ready
        feed.compiles_after_ready = max(so_far, request.compiles_after_ready)
        feed.state = request.state
        return wire.Empty()

    async def told(self, told: Told) -> wire.Empty:
        """What a member's data plane says."""
        if told.node_rank not in self._feeds:
            raise BadMessage(f"node {told.node_rank} does not follow")
        self._on_told(told)
        return wire.Empty()

    @property
    def states(self) -> list[NodeState]:
        """What all other members last reported (any thread)."""
        return [feed.state for feed in list(self._feeds.values())]

    @property
    def compiles_after_ready(self) -> int:
        """Summed over all other members, as last reported (any thread)."""
        return sum(feed.compiles_after_ready for feed in list(self._feeds.values()))

    async def dismiss(self, is_well: bool = True) -> None:
        """Tell all members to leave, and wait until they have.

        is_well: this process leaves because it was told to. Otherwise the members end with an error
        as it does, so that whatever starts them starts all of them again.
        """
        self._leaving = True
        for feed in self._feeds.values():
            feed.end(is_well)
        if self._feeds:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._none_follows.wait(), _FAREWELL_S)
            await asyncio.sleep(_ENDING_S)

    def _offer(self, call: NodeCall) -> None:
        for feed in self._feeds.values():
            feed.offer(call)


class _Feed:
    """The calls that wait to be sent to one member."""

    def __init__(self) -> None:
        self.is_over = False  # the last message was taken
        self.heard_s = 0.0  # when its member was last heard, monotonic
        self.compiles_after_ready = 0  # in its member
        self.state = NodeState()
        self._calls: deque[NodeCall] = deque()
        self._ending = False
        self.is_well = False  # is_last of the last message
        self._changed = asyncio.Event()

    def offer(self, call: NodeCall) -> None:
        self._calls.append(call)
        self._changed.set()

    def end(self, is_well: bool) -> None:
        self._ending, self.is_well = True, is_well
        self._changed.set()

    async def take(self) -> NodeCalls:
        """The next waiting calls; an empty message every SIGN_OF_LIFE_S while none waits."""
        try:
            await asyncio.wait_for(self._changed.wait(), SIGN_OF_LIFE_S)
        except TimeoutError:
            return NodeCalls()
        calls, num_bytes = [], 0
        while self._calls and num_bytes < _MOST_BYTES:
            calls.append(self._calls.popleft())
            num_bytes += sum([len(array.data) for array in calls[-1].arrays])
        if self._calls:
            return NodeCalls(tuple(calls))
        self._changed.clear()
        self.is_over = self._ending
        return NodeCalls(tuple(calls), self.is_well)
