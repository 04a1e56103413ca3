"""Several nodes receive the pages of one worker: placed, and acknowledged, once all have them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from decode.receiving import Receiving
from model.calls import Calls
from model.config import KVSpec
from transfer.backend import Arrived, PagesArrived
from transfer.errors import TransferError
from transfer.receiver import Receiver

KV = KVSpec(num_layers=1, num_kv_heads=4, head_dim=2, page_size=4, dtype="float32")


class Wire(Receiver):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__(KV, 2, lambda event: None)
        self.expected: dict[int, Sequence[int]] = {}
        self.acked: list[int] = []

    def start(self) -> str:
        return ""

    def close(self) -> None:
        pass

    def expect(
        self, room: int, epoch: int, num_pages: int, shards: Sequence[int] | None = None
    ) -> None:
        assert (epoch, num_pages) == (5, 4)
        assert shards is not None
        self.expected[room] = list(shards)

    def forget(self, room: int) -> None:
        self.expected.pop(room, None)

    def ack(self, room: int) -> None:
        self.acked.append(room)


class Pool:
    """The devices of one node: notes what is placed."""

    num_pages, max_run_pages = 64, 8

    def __init__(self) -> None:
        self.calls = Calls()
        self.placed: list[tuple[int, list[int], list[float]]] = []

    def gather_runs(self, page_ids: Sequence[Sequence[int]]) -> list[list[Any]]:
        raise AssertionError("decode gathers nothing here")

    def place_run(self, rank: int, page_ids: Sequence[int], shards: Sequence[np.ndarray]) -> None:
        self.placed.append((rank, list(page_ids), [float(shard.flat[0]) for shard in shards]))


class Worker:
    """All nodes of a worker; the first leads."""

    def __init__(self, nodes: Sequence[Sequence[int]]) -> None:
        self.pools = [Pool() for _ in range(max(map(max, nodes)) + 1)]
        self.wires = [Wire() for _ in self.pools]
        self.nodes = [
            Receiving(wire, pool, nodes, node)
            for node, (wire, pool) in enumerate(zip(self.wires, self.pools, strict=True))
        ]
        self.leader = self.nodes[0]
        self.pools[0].calls.tell = self._tell

    def _tell(self, name: str, key: int, arrays: Sequence[np.ndarray]) -> None:
        for pool in self.pools[1:]:
            pool.calls.take(name, key, *arrays)

    def came(self, node: int, page_start: int, num_shards: int = 1, room: int = 1) -> bool:
        """Two pages come to a node: whether the leader may place them."""
        shards = [np.full((1, 2, 2, 4, 2, 2), 10.0 * node + at) for at in range(num_shards)]
        event = PagesArrived(room, page_start, shards)
        if node == 0:
            return self.leader.came(0, event)
        is_kept = self.nodes[node].keep(event)
        return is_kept and self.leader.came(node, Arrived(room, page_start, 2))


def test_pages_are_placed_by_all_nodes_once_all_have_their_shards_of_them() -> None:
    worker = Worker([(0, 1)])
    worker.leader.expect(1, 0, 5, 4)
    assert [wire.expected for wire in worker.wires] == [{1: [0]}, {1: [1]}]
    assert not worker.came(1, 0)
    assert not worker.came(1, 2)
    assert worker.came(0, 2)
    worker.leader.place(1, 2, [8, 9])
    assert worker.came(0, 0)
    worker.leader.place(1, 0, [3, 4])
    assert worker.pools[0].placed == [(0, [8, 9], [0.0]), (0, [3, 4], [0.0])]
    assert worker.pools[1].placed == [(0, [8, 9], [10.0]), (0, [3, 4], [10.0])]
    assert not worker.leader.finished(0, 1)
    assert worker.leader.finished(1, 1)
    worker.leader.ack(1)
    worker.leader.forget(1)
    assert [wire.acked for wire in worker.wires] == [[1], [1]]
    assert [wire.expected for wire in worker.wires] == [{}, {}]


def test_a_node_without_shards_of_the_rank_joins_in_with_nothing() -> None:
    worker = Worker([(0, 0), (1, 1)])
    worker.leader.expect(1, 1, 5, 4)
    assert [wire.expected for wire in worker.wires] == [{}, {1: [0, 1]}]
    assert worker.came(1, 0, num_shards=2)
    worker.leader.place(1, 0, [3, 4])
    assert [pool.placed for pool in worker.pools] == [
        [(1, [3, 4], [])],
        [(1, [3, 4], [10.0, 11.0])],
    ]
    assert worker.leader.finished(1, 1)


def test_a_rank_may_lie_across_nodes_unevenly() -> None:
    worker = Worker([(0, 0, 1), (1, 2, 2)])
    worker.leader.expect(1, 1, 5, 4)
    assert [wire.expected for wire in worker.wires] == [{}, {1: [0]}, {1: [1, 2]}]
    assert not worker.came(2, 0, num_shards=2)
    assert worker.came(1, 0)
    worker.leader.place(1, 0, [3, 4])
    assert [shards for pool in worker.pools for *_, shards in pool.placed] == [
        [],
        [10.0],
        [20.0, 21.0],
    ]


@pytest.mark.parametrize("node", [0, 1])
def test_pages_of_a_room_that_is_over_are_kept_nowhere(node: int) -> None:
    worker = Worker([(0, 1)])
    worker.leader.expect(1, 0, 5, 4)
    worker.came(node, 0)
    worker.leader.forget(1)
    assert not worker.came(node, 2)
    assert not worker.leader.finished(node, 1)
    assert [each._came for each in worker.nodes] == [{}, {}]
    worker.leader.forget(1)  # unknown by now


@pytest.mark.parametrize(("before", "last"), [((0, 0), 1), ((1,), 0), ((1, 1), 0)])
def test_pages_that_two_nodes_got_cut_differently_are_told_before_both_have_all(
    before: Sequence[int], last: int
) -> None:
    """Whichever comes first, runs that differ first begin alike: here with page 1."""
    worker = Worker([(0, 1)])
    worker.leader.expect(1, 0, 5, 4)
    cuts = {0: iter([(0, 1), (1, 2), (3, 1)]), 1: iter([(0, 1), (1, 1), (2, 2)])}
    for node in (0, 1):
        assert worker.leader.came(node, Arrived(1, *next(cuts[node]))) == bool(node)
    for node in before:
        assert not worker.leader.came(node, Arrived(1, *next(cuts[node])))
    with pytest.raises(TransferError, match=r"pages from 1 on .* prefill cut them differently"):
        worker.leader.came(last, Arrived(1, *next(cuts[last])))
    worker.leader.forget(1)
    for node in (0, 1):
        assert not worker.leader.finished(node, 1)


def test_where_the_shards_of_each_rank_are_taken_is_one_address_or_one_for_each() -> None:
    worker = Worker([(0, 0, 1), (1, 1, 1)])
    assert worker.leader.addresses(["a", "b"]) == [("a", "a", "b"), ("b",)]


@pytest.mark.parametrize("node", [0, 1])
def test_of_pages_that_wait_for_other_nodes_only_the_first_stay_in_memory_that_is_lent(
    node: int,
) -> None:
    worker = Worker([(0, 1)])
    lent = [np.full((1, 2, 2, 4, 2, 2), float(at)) for at in range(3)]
    for room in (1, 2, 3):
        worker.leader.expect(room, 0, 5, 4)
        assert worker.nodes[node].keep(PagesArrived(room, 0, [lent[room - 1]]))
    kept = [worker.nodes[node]._came[room][0][0] for room in (1, 2, 3)]
    assert [np.shares_memory(*both) for both in zip(kept, lent, strict=True)] == [
        True,
        False,
        False,
    ]
    assert all((np.asarray(one) == other).all() for one, other in zip(kept, lent, strict=True))
    for room in (1, 2, 3):
        worker.leader.forget(room)
    assert [each._num_waiting for each in worker.nodes] == [0, 0]
