"""Takes the pages of granted rooms: each node of a worker its own shards, as their leader says."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from transfer.backend import Arrived, PagesArrived
from transfer.errors import TransferError
from transfer.gathered import RunEngine
from transfer.layout import Nodes
from transfer.receiver import Receiver

# Runs that wait for other nodes' shards in memory lent to the connection on which they came. More
# are copied: otherwise each node could fill such memory with runs of which another's parts wait for
# memory there.
_MOST_LENT = 1


@dataclass(slots=True)
class _Room:
    """What the leader knows of a room."""

    rank: int
    nodes: frozenset[int]  # that have shards of the rank
    # Where several have, by first page: the number of pages, and which of the nodes have them.
    arrived: dict[int, tuple[int, set[int]]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)


class Receiving:
    """One node's part in receiving, and at the leader what has come to all of them.

    Each call of the leader is made by every node, in the same order.
    """

    def __init__(self, receiver: Receiver, engine: RunEngine, nodes: Nodes, node: int = 0) -> None:
        self.receiver = receiver
        self._engine, self._nodes, self._node = engine, nodes, node
        self._lock = threading.Lock()  # pages come on other threads, at nodes that do not lead
        self._came: dict[int, dict[int, list[np.ndarray]]] = {}  # by room and first page: shards
        self._num_waiting = 0  # runs in it
        self._rooms: dict[int, _Room] = {}  # of the leader
        self._calls = engine.calls
        self._calls.add("expect", self._expect, at_once=True)  # frames may come any moment
        self._calls.add("forget", self._forget)
        self._calls.add("ack", self._ack)
        self._calls.add("place", self._place)

    # --- the leader's calls -----------------------------------------------------------------------

    def expect(self, room: int, rank: int, epoch: int, num_pages: int) -> None:
        """Take pages of this room, which is at this rank, from now on."""
        self._rooms[room] = _Room(rank, frozenset(self._nodes[rank]))
        self._calls("expect", room, np.array([rank, epoch, num_pages]))

    def forget(self, room: int) -> None:
        """Take no more pages of this room. Unknown rooms are ignored."""
        if self._rooms.pop(room, None) is not None:
            self._calls("forget", room)

    def ack(self, room: int) -> None:
        """Tell prefill that all pages arrived. Call before forget."""
        self._calls("ack", room)

    def place(self, room: int, page_start: int, page_ids: Sequence[int]) -> None:
        """Dispatch the write of pages that have come to all nodes of the room's rank."""
        which = np.array([self._rooms[room].rank, page_start])
        self._calls("place", room, which, np.array(page_ids, np.int32))

    # --- what has come (leader) -------------------------------------------------------------------

    def addresses(self, by_node: Sequence[str]) -> list[tuple[str, ...]]:
        """Where the shards of each rank are taken: see wire.Grant."""
        found = [tuple(by_node[node] for node in nodes) for nodes in self._nodes]
        return [each[:1] if len(set(each)) == 1 else each for each in found]

    def came(self, node: int, event: PagesArrived | Arrived) -> bool:
        """Pages came to a node; whether they have come to all, and can be placed.

        Raises TransferError if another node got them cut differently: they could not be written in
        one call. Each node gets every page once, so if two are cut differently anywhere, the first
        runs in which they differ begin with the same page.
        """
        known = self._rooms.get(event.room)
        if known is None:
            return False
        if isinstance(event, PagesArrived):  # at this node
            self.keep(event)
        if len(known.nodes) == 1:
            return node in known.nodes
        first, here = event.page_start, event.num_pages
        before, nodes = known.arrived.setdefault(first, (here, set()))
        if here != before:
            run = f"{here} pages from {first} on came to node {node}"
            raise TransferError(f"{run}, to another {before}: prefill cut them differently")
        nodes.add(node)
        return nodes == known.nodes

    def finished(self, node: int, room: int) -> bool:
        """All pages came to a node; whether they have come to all, cut alike."""
        known = self._rooms.get(room)
        if known is None:
            return False
        known.finished.add(node)
        if known.finished != known.nodes:
            return False
        return all(nodes == known.nodes for _, nodes in known.arrived.values())

    # --- every node -------------------------------------------------------------------------------

    def keep(self, event: PagesArrived) -> bool:
        """Hold shards that came here until they are placed. False: their room is over."""
        shards = event.shards
        if self._num_waiting >= _MOST_LENT and event.room in self._came:
            shards = [shard.copy() for shard in shards]
        with self._lock:
            held = self._came.get(event.room)
            if held is None:
                return False
            held[event.page_start] = shards
            self._num_waiting += 1
            return True

    def _expect(self, room: int, which: np.ndarray) -> None:
        rank, epoch, num_pages = which.tolist()
        own = self._own_shards(rank)
        if own:
            with self._lock:
                self._came[room] = {}
            self.receiver.expect(room, epoch, num_pages, own)

    def _forget(self, room: int) -> None:
        self.receiver.forget(room)
        with self._lock:
            self._num_waiting -= len(self._came.pop(room, ()))

    def _ack(self, room: int) -> None:
        self.receiver.ack(room)

    def _place(self, room: int, which: np.ndarray, page_ids: np.ndarray) -> None:
        rank, page_start = which.tolist()
        shards: list[np.ndarray] = []
        if self._own_shards(rank):
            with self._lock:
                shards = self._came[room].pop(page_start)
                self._num_waiting -= 1
        self._engine.place_run(rank, page_ids.tolist(), shards)

    def _own_shards(self, rank: int) -> Sequence[int]:
        nodes = self._nodes[rank]
        if nodes[0] == nodes[-1] == self._node:  # the nodes of a rank are in order
            return range(len(nodes))
        return [shard for shard, node in enumerate(nodes) if node == self._node]
