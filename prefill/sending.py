"""Sends pages to decode: each node of a worker its own shards, as the leader of all says."""

import dataclasses
from dataclasses import dataclass, field

import msgspec
import numpy as np

from transfer import wire
from transfer.backend import FirstToken, SenderEvent, Shipped
from transfer.gathered import GatheredPages, RunEngine
from transfer.layout import HeadRun, Nodes, Part, plan_heads, plan_parts
from transfer.opened import PoolFacts
from transfer.outbound import Sender
from transfer.slots import FRAME_BYTES

_MOST_PLANS = 1024  # for so many addresses of decode workers, which change when they restart


@dataclass(frozen=True)
class _Plan:
    """How the pages of a rank reach the shards of one decode rank."""

    parts: dict[int, tuple[Part, ...]]  # by sending node
    most_heads: int  # of a run of heads

    @property
    def is_shared(self) -> bool:
        """Whether several nodes send or receive parts of a page, so that all must cut alike."""
        return len(self.parts) > 1 or any(len(parts) > 1 for parts in self.parts.values())


@dataclass(slots=True)
class _Open:
    """What a node knows of a room that it may send to."""

    grant: wire.Grant
    _at: dict[str, wire.Grant] = field(default_factory=dict)

    def grant_at(self, address: str) -> wire.Grant:
        """The grant as if one address took all shards: each node of decode has its own part."""
        if len(self.grant.data_addresses) == 1:
            return self.grant
        if address not in self._at:
            self._at[address] = msgspec.structs.replace(self.grant, data_addresses=(address,))
        return self._at[address]


class Sending:
    """One node's part in sending, and at the leader what all of them have done.

    Each call of the leader is made by every node, in the same order.
    """

    def __init__(
        self,
        sender: Sender,
        engine: RunEngine,
        gathered: GatheredPages,
        facts: PoolFacts,
        nodes: Nodes,
        max_frame_bytes: int,
    ) -> None:
        self.sender = sender
        self._gathered, self._facts, self._nodes = gathered, facts, nodes
        self._max_frame_bytes = max_frame_bytes
        self._plans: dict[tuple[object, ...], _Plan] = {}
        self._rooms: dict[int, _Open] = {}
        self._behind: dict[int, frozenset[str]] = {}  # what other nodes last said, by node
        # Of the leader: the nodes that still wait for an answer of decode, once all has been sent.
        self._unanswered: dict[int, set[int]] = {}
        self._shipped: dict[int, Shipped] = {}  # what nodes with an answer have sent
        self._calls = engine.calls
        self._calls.add("open", self._open)
        self._calls.add("ship", self._ship)
        self._calls.add("finish", self._finish)
        self._calls.add("cancel", self._cancel)

    # --- the leader's calls -----------------------------------------------------------------------

    def open(self, grant: wire.Grant) -> None:
        """Begin to connect: pages of this grant will follow.

        Raises Incompatible if decode's shards do not fit, before any node is told.
        """
        for rank in range(len(self._nodes)):
            self._plan(grant, rank)
        told = msgspec.structs.replace(grant, page_ids=b"")
        self._calls("open", grant.room, _packed(told), grant=grant)

    def ship(self, room: int, rank: int, page_start: int, num_pages: int, ticket: int) -> None:
        """Send gathered pages: num_pages of the room, from page_start of its grant on."""
        self._calls("ship", room, np.array([rank, page_start, num_pages, ticket]))

    def finish(self, room: int, rank: int, first: FirstToken) -> None:
        """End the room behind its pages: an "acked" follows once every node has its answer."""
        self._unanswered[room] = set(self._plan(self._rooms[room].grant, rank).parts)
        self._calls("finish", room, np.array([rank]), _packed(first))

    def cancel(self, room: int) -> Shipped | None:
        """Drop what is queued for a room and tell decode. No event follows.

        Returns what this node had sent; None if it sent nothing.
        """
        self._unanswered.pop(room, None)
        self._shipped.pop(room, None)
        left: Shipped | None = self._calls("cancel", room)
        return left

    # --- what happened at the nodes (leader) ------------------------------------------------------

    def told(self, node: int, event: SenderEvent) -> SenderEvent | None:
        """What an event at one node means for the room; None: other nodes still have to send."""
        room = event.room
        waiting, before = self._unanswered.get(room, set()), self._shipped.pop(room, None)
        waiting.discard(node)
        is_own = node == self.sender.node
        if event.shipped is not None and not (is_own and before is None):
            event.shipped = _merged(before or Shipped(), event.shipped, is_own)
        if event.kind == "acked" and waiting:
            self._shipped[room] = event.shipped or Shipped()
            return None
        self._unanswered.pop(room, None)
        self._rooms.pop(room, None)
        return event

    def told_behind(self, node: int, addresses: frozenset[str]) -> None:
        """For these data addresses, too much is queued at another node."""
        self._behind[node] = addresses

    def behind(self, most_bytes: int) -> frozenset[str]:
        """Data addresses for which more than most_bytes are queued at some node."""
        return self.sender.behind(most_bytes).union(*self._behind.values())

    # --- every node -------------------------------------------------------------------------------

    def ended(self, room: int) -> None:
        """At this node, one that does not lead, the room is over (any thread)."""
        self._rooms.pop(room, None)

    def _open(self, room: int, packed: np.ndarray, grant: wire.Grant | None = None) -> None:
        opened = _Open(grant or wire.decode(packed.tobytes(), wire.Grant))
        self._rooms[room] = opened
        if all(nodes == self._nodes[0] for nodes in self._nodes):  # whatever its rank will be
            for part in self._parts(opened, 0):
                self.sender.open(opened.grant_at(part.address))

    def _ship(self, room: int, which: np.ndarray) -> None:
        rank, page_start, num_pages, ticket = which.tolist()
        opened = self._rooms.get(room)
        if opened is None:
            return
        plan = self._plan(opened.grant, rank)
        parts = plan.parts.get(self.sender.node, ())
        if not parts:
            return
        arrays = self._gathered.of(ticket, rank)
        shards = [np.asarray(array)[:, :, :num_pages] for array in arrays]
        frame_pages = self._frame_pages(shards[0], plan.most_heads) if plan.is_shared else 0
        for part in parts:
            grant = opened.grant_at(part.address)
            self.sender.send_pages(grant, page_start, shards, part.runs, frame_pages)

    def _finish(self, room: int, which: np.ndarray, packed: np.ndarray) -> None:
        opened = self._rooms.get(room)
        if opened is None:
            return
        first = wire.decode(packed.tobytes(), FirstToken)
        parts = self._parts(opened, int(which[0]))
        for part in parts:
            last = msgspec.structs.replace(first, num_senders=part.num_senders)
            self.sender.finish(opened.grant_at(part.address), last)
        if not parts:  # nothing will be heard of it here
            self._rooms.pop(room, None)

    def _cancel(self, room: int) -> Shipped | None:
        self._rooms.pop(room, None)
        return self.sender.cancel(room)

    def _parts(self, opened: _Open, rank: int) -> tuple[Part, ...]:
        return self._plan(opened.grant, rank).parts.get(self.sender.node, ())

    def _plan(self, grant: wire.Grant, rank: int) -> _Plan:
        """Raises Incompatible."""
        nodes, addresses = tuple(self._nodes[rank]), grant.data_addresses
        key = (nodes, addresses, grant.tp_size, grant.stored_kv_heads)
        plan = self._plans.get(key)
        if plan is None:
            runs = self._runs(grant, len(nodes))
            parts = plan_parts(runs, nodes, addresses)
            plan = _Plan(parts, max(run.num_heads for run in runs))
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _runs(self, grant: wire.Grant, tp_size: int) -> tuple[HeadRun, ...]:
        facts = self._facts
        ours = facts.logical_kv_heads, tp_size, facts.stored_kv_heads
        return plan_heads(*ours, grant.tp_size, grant.stored_kv_heads)

    def _frame_pages(self, shard: np.ndarray, most_heads: int) -> int:
        """The most pages of a frame, the same at every node, however its pages travel."""
        layers, planes, _, page_size, _, head_dim = shard.shape
        page_bytes = layers * planes * page_size * most_heads * head_dim * shard.itemsize
        return max(min(self._max_frame_bytes, FRAME_BYTES) // page_bytes, 1)


def _merged(before: Shipped, shipped: Shipped, is_own: bool) -> Shipped:
    """What two nodes sent. Times are the leader's own: clocks of two hosts never meet."""
    timed = shipped if is_own else before
    return dataclasses.replace(
        timed,
        way=timed.way or shipped.way,
        num_bytes=before.num_bytes + shipped.num_bytes,
        num_frames=before.num_frames + shipped.num_frames,
    )


def _packed(message: msgspec.Struct) -> np.ndarray:
    return np.frombuffer(wire.encode(message), np.uint8)
