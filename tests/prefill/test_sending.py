"""Several nodes send the pages of one worker: each its own shards, and all as their leader says."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from model.calls import Calls
from prefill.sending import Sending
from tests.transfer.samples import a_grant
from transfer import wire
from transfer.backend import FirstToken, SenderEvent, Shipped
from transfer.errors import Incompatible
from transfer.gathered import GatheredPages
from transfer.layout import HeadRun
from transfer.opened import PoolFacts
from transfer.outbound import Sender

FACTS = PoolFacts(page_size=4, context_length=64, logical_kv_heads=4, stored_kv_heads=4)
FIRST = FirstToken(7, 0, 12)
HEAD_BYTES = 2 * 2 * 4 * 8 * 4  # of a page: layers, planes, page_size, head_dim, float32


class Pool:
    """The devices of one node: a page holds its rank, its number and its shard."""

    num_pages, max_run_pages = 64, 8

    def __init__(self, node: int, nodes: Sequence[Sequence[int]]) -> None:
        self.node, self.nodes, self.calls = node, nodes, Calls()

    def gather_runs(self, page_ids: Sequence[Sequence[int]]) -> list[list[Any]]:
        return [
            [
                np.full((2, 2, len(run), 4, 4 // len(of_rank), 8), shard, np.float32)
                for shard, node in enumerate(of_rank)
                if node == self.node
            ]
            for run, of_rank in zip(page_ids, self.nodes, strict=True)
        ]

    def place_run(self, rank: int, page_ids: Sequence[int], shards: Sequence[np.ndarray]) -> None:
        raise AssertionError("prefill places nothing here")


class Wire(Sender):
    """Notes what it is asked for."""

    def __init__(self, node: int) -> None:
        super().__init__(lambda event: None, 1 << 20)
        self.node = node
        self.opened: list[str] = []
        self.pages: list[tuple[str, list[float], list[HeadRun], int]] = []
        self.finished: list[tuple[str, int]] = []
        self.cancelled: list[int] = []
        self.queued: frozenset[str] = frozenset()

    def _open_lane(self, address: str) -> Any:
        raise AssertionError("nothing connects")

    def open(self, grant: wire.Grant) -> None:
        self.opened += grant.data_addresses

    def send_pages(
        self,
        grant: wire.Grant,
        page_start: int,
        shards: Sequence[np.ndarray],
        runs: Sequence[HeadRun],
        frame_pages: int = 0,
    ) -> None:
        (address,) = grant.data_addresses
        held = [float(shards[run.src_shard].flat[0]) for run in runs]
        self.pages.append((address, held, list(runs), frame_pages))

    def finish(self, grant: wire.Grant, first: FirstToken) -> None:
        assert msgspec.structs.replace(first, num_senders=1) == FIRST
        (address,) = grant.data_addresses
        self.finished.append((address, first.num_senders))

    def cancel(self, room: int) -> Shipped | None:
        self.cancelled.append(room)
        return None

    def behind(self, most_bytes: int) -> frozenset[str]:
        return self.queued


class Worker:
    """All nodes of a worker; the first leads."""

    def __init__(self, nodes: Sequence[Sequence[int]]) -> None:
        self.wires, self.sendings = [], []
        pools = []
        for node in range(max(map(max, nodes)) + 1):
            pool, wire_ = Pool(node, nodes), Wire(node)
            gathered = GatheredPages(pool)
            self.wires.append(wire_)
            self.sendings.append(Sending(wire_, pool, gathered, FACTS, nodes, 1 << 20))
            pools.append(pool)
            if node == 0:
                self.gathered = gathered
        self.leader, self.others = self.sendings[0], pools[1:]
        pools[0].calls.tell = self._tell

    def _tell(self, name: str, key: int, arrays: Sequence[np.ndarray]) -> None:
        for pool in self.others:
            pool.calls.take(name, key, *arrays)

    def ship(self, room: int, rank: int, num_ranks: int = 1) -> None:
        ticket = self.gathered.gather([range(3) if at == rank else () for at in range(num_ranks)])
        self.leader.ship(room, rank, 0, 3, ticket)
        self.gathered.drop(ticket)


def spread(room: int, *addresses: str) -> wire.Grant:
    """A grant of as many shards as addresses."""
    grant = a_grant(room, addresses[0], 3, tp_size=len(addresses))
    return msgspec.structs.replace(grant, data_addresses=addresses)


def test_each_node_sends_its_shards_to_the_node_that_has_them_in_decode() -> None:
    worker = Worker([(0, 1)])
    worker.leader.open(spread(1, "a", "b"))
    worker.ship(1, 0)
    worker.leader.finish(1, 0, FIRST)
    runs = [HeadRun(0, 0, shard, 0, 2) for shard in (0, 1)]
    assert [wire_.opened for wire_ in worker.wires] == [["a"], ["b"]]
    assert [(to, held, told) for wire_ in worker.wires for to, held, told, _ in wire_.pages] == [
        ("a", [0.0], runs[:1]),
        ("b", [1.0], runs[1:]),
    ]
    assert [wire_.finished for wire_ in worker.wires] == [[("a", 1)], [("b", 1)]]


def test_an_address_learns_how_many_nodes_send_to_it_and_all_cut_their_pages_alike() -> None:
    worker = Worker([(0, 1)])
    worker.leader.open(spread(1, "a"))
    worker.ship(1, 0)
    worker.leader.finish(1, 0, FIRST)
    assert [wire_.finished for wire_ in worker.wires] == [[("a", 2)], [("a", 2)]]
    fitting = (1 << 20) // (2 * HEAD_BYTES)
    assert [most for wire_ in worker.wires for *_, most in wire_.pages] == [fitting] * 2


def test_one_node_sends_to_each_node_of_decode() -> None:
    worker = Worker([(0, 0)])
    worker.leader.open(spread(1, "a", "b", "c", "d"))
    worker.ship(1, 0)
    worker.leader.finish(1, 0, FIRST)
    (only,) = worker.wires
    assert [(to, held) for to, held, _, _ in only.pages] == [
        ("a", [0.0]),
        ("b", [0.0]),
        ("c", [1.0]),
        ("d", [1.0]),
    ]
    assert only.finished == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]


def test_a_rank_that_lies_on_one_node_is_sent_by_that_node_alone() -> None:
    worker = Worker([(0,), (1,)])
    worker.leader.open(spread(1, "a"))
    assert [wire_.opened for wire_ in worker.wires] == [[], []]  # its rank is not known yet
    worker.ship(1, 1, num_ranks=2)
    worker.leader.finish(1, 1, FIRST)
    assert [len(wire_.pages) for wire_ in worker.wires] == [0, 1]
    assert worker.wires[1].pages[0][3] == 0  # what fits
    assert worker.leader.told(1, SenderEvent("acked", 1)) is not None
    assert [list(sending._rooms) for sending in worker.sendings] == [[], [1]]
    worker.sendings[1].ended(1)
    assert worker.sendings[1]._rooms == {}


def test_a_room_is_acknowledged_once_every_node_has_its_answer_and_all_bytes_are_counted() -> None:
    worker = Worker([(0, 1)])
    worker.leader.open(spread(1, "a", "b"))
    worker.leader.finish(1, 0, FIRST)
    own = Shipped("shm", 100, 2, first_s=1.0, last_s=2.0, acked_s=3.0, page_ends={3: 2.0})
    other = Shipped("tcp", 50, 1, first_s=70.0, last_s=80.0, acked_s=90.0)
    assert worker.leader.told(1, SenderEvent("acked", 1, shipped=other)) is None
    said = worker.leader.told(0, SenderEvent("acked", 1, shipped=own))
    assert said is not None
    assert said.kind == "acked"
    # Of times, the leader knows its own: clocks of two hosts never meet.
    assert said.shipped == Shipped("shm", 150, 3, 1.0, 2.0, 3.0, {3: 2.0})


@pytest.mark.parametrize("kind", ["nacked", "lost", "unsent"])
def test_a_room_that_ends_badly_at_one_node_has_ended(kind: Any) -> None:
    worker = Worker([(0, 1)])
    worker.leader.open(spread(1, "a", "b"))
    worker.leader.finish(1, 0, FIRST)
    assert worker.leader.told(0, SenderEvent("acked", 1)) is None
    event = SenderEvent(kind, 1, "gone")
    assert worker.leader.told(1, event) is event
    worker.leader.cancel(1)
    assert [wire_.cancelled for wire_ in worker.wires] == [[1], [1]]
    assert [sending._rooms for sending in worker.sendings] == [{}, {}]
    assert not worker.leader._unanswered
    assert not worker.leader._shipped


def test_an_answer_before_all_was_sent_is_told_as_it_is() -> None:
    worker = Worker([(0, 1)])
    worker.leader.open(spread(1, "a", "b"))
    event = SenderEvent("acked", 1)
    assert worker.leader.told(1, event) is event


def test_a_room_that_is_over_at_a_node_is_sent_no_more_there() -> None:
    worker = Worker([(0, 1)])
    worker.leader.open(spread(1, "a", "b"))
    worker.sendings[1].ended(1)
    worker.ship(1, 0)
    worker.leader.finish(1, 0, FIRST)
    assert [len(wire_.pages) for wire_ in worker.wires] == [1, 0]
    assert [len(wire_.finished) for wire_ in worker.wires] == [1, 0]


def test_shards_that_do_not_fit_are_refused_before_any_node_is_told() -> None:
    worker = Worker([(0, 1)])
    with pytest.raises(Incompatible, match="3 data addresses for 2 shards"):
        worker.leader.open(
            msgspec.structs.replace(spread(1, "a", "b"), data_addresses=("a", "b", "c"))
        )
    with pytest.raises(Incompatible, match="decode stores 4 kv heads in 3 shards"):
        worker.leader.open(a_grant(1, "a", 3, tp_size=3))
    assert [sending._rooms for sending in worker.sendings] == [{}, {}]


def test_an_address_for_which_any_node_has_too_much_is_behind() -> None:
    worker = Worker([(0, 1)])
    worker.wires[0].queued = frozenset({"a"})
    worker.leader.told_behind(1, frozenset({"b"}))
    assert worker.leader.behind(1) == {"a", "b"}
    worker.leader.told_behind(1, frozenset())
    assert worker.leader.behind(1) == {"a"}
