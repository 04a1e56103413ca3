"""Workers of several nodes: each sends its own shards to each node of decode that needs them."""

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from model.config import KVSpec
from tests.contract.transfer_ends import Ends, LoopbackEnds, Open
from tests.transfer.samples import KV, a_grant, logical_pages, sharded
from transfer import wire
from transfer.backend import FirstToken
from transfer.layout import Part, plan_heads, plan_parts

FIRST = FirstToken(7, 0, 12)


class Nodes:
    """Nodes of one prefill worker, each with a shard, and nodes of one decode worker."""

    def __init__(self, open_ends: Open, src: int, dst: int, kv: KVSpec = KV, tp: int = 0) -> None:
        """tp: shards of decode, spread evenly; 0: one of each node."""
        self.tp = tp or dst
        self.ends = [open_ends(kv=kv, tp_size=self.tp)]
        reached = {}
        if isinstance(self.ends[0], LoopbackEnds):
            reached = {"network": self.ends[0].network}
        for _ in range(1, max(src, dst)):
            self.ends.append(open_ends(kv=kv, tp_size=self.tp, **reached))
        for node, each in enumerate(self.ends):
            each.sender.node = node
        self.senders = [each.sender for each in self.ends[:src]]
        self.receivers = self.ends[:dst]
        self.addresses = [
            self.receivers[shard * dst // self.tp].address for shard in range(self.tp)
        ]
        runs = plan_heads(4, src, 4, self.tp, kv.num_kv_heads)
        self.parts = plan_parts(runs, range(src), self.addresses)

    def expect(self, room: int, num_pages: int) -> None:
        for each in self.receivers:
            own = [at for at, address in enumerate(self.addresses) if address == each.address]
            each.receiver.expect(room, 1, num_pages, own)

    def grant(self, room: int, part: Part, num_pages: int = 3) -> wire.Grant:
        return a_grant(room, part.address, num_pages, 1, self.tp)

    def send(self, node: int, room: int, pages: np.ndarray, frame_pages: int = 2) -> None:
        shard = sharded(pages, 4, len(self.senders), ml_dtypes.bfloat16)[node]
        for part in self.parts[node]:
            grant = self.grant(room, part, pages.shape[2])
            self.senders[node].send_pages(grant, 0, [shard], part.runs, frame_pages)

    def finish(self, node: int, room: int, num_senders: int = 0) -> None:
        """num_senders: what it says; 0: what is so."""
        for part in self.parts[node]:
            first = FirstToken(7, 0, 12, num_senders=num_senders or part.num_senders)
            self.senders[node].finish(self.grant(room, part), first)

    def until(self, done: Callable[[], bool]) -> None:
        self.ends[0].until(done)

    def ack(self, room: int) -> None:
        for each in self.receivers:
            each.receiver.ack(room)
            each.receiver.forget(room)

    def kinds(self) -> list[tuple[str, int]]:
        return [kind for each in self.ends for kind in each.diary.kinds()]

    def num_finished(self) -> int:
        return sum(len(each.diary.finished) for each in self.receivers)

    def came(self, num_pages: int, kv: KVSpec = KV) -> np.ndarray:
        """All heads that came, in order of the nodes that they came to."""
        heads = kv.num_kv_heads * len(self.receivers[0].diary.pages[0][2]) // self.tp
        part = replace(kv, num_kv_heads=heads)
        found = [
            each.diary.kv_of(1, num_pages, part, heads * self.tp // kv.num_kv_heads)
            for each in self.receivers
        ]
        return np.concatenate(found, axis=4)


@pytest.mark.parametrize(
    ("src", "dst", "tp"), [(2, 2, 0), (2, 1, 0), (1, 2, 0), (4, 2, 4), (2, 4, 0), (2, 2, 4)]
)
def test_every_node_sends_its_shards_and_gets_its_answer_once_all_have(
    open_ends: Open, src: int, dst: int, tp: int
) -> None:
    nodes, pages = Nodes(open_ends, src, dst, tp=tp), logical_pages(3)
    nodes.expect(1, 3)
    for node in reversed(range(src)):
        nodes.send(node, 1, pages)
    for node in range(src):
        nodes.finish(node, 1)
    nodes.until(lambda: nodes.num_finished() == dst)
    assert (nodes.came(3) == pages).all()
    assert nodes.kinds() == []
    nodes.ack(1)
    nodes.until(lambda: len(nodes.kinds()) == src)
    assert nodes.kinds() == [("acked", 1)] * src
    assert [sender.in_flight_bytes for sender in nodes.senders] == [0] * src
    shipped = [event.shipped for each in nodes.ends for event in each.diary.events]
    assert sum(each.num_bytes for each in shipped if each is not None) == pages.nbytes


def one_of_two_has_finished(open_ends: Open) -> Nodes:
    """All pages of a room came from both nodes, and the first has said that these were all."""
    nodes, pages = Nodes(open_ends, 2, 1), logical_pages(3)
    nodes.expect(1, 3)
    nodes.send(0, 1, pages)
    nodes.finish(0, 1)
    nodes.send(1, 1, pages)
    nodes.until(lambda: nodes.receivers[0].diary.page_idx(1) == [0, 1, 2])
    return nodes


def test_a_room_is_not_whole_until_its_last_node_has_finished(open_ends: Open) -> None:
    nodes = one_of_two_has_finished(open_ends)
    assert nodes.num_finished() == 0
    nodes.finish(1, 1)
    nodes.until(lambda: nodes.num_finished() == 1)


def test_the_last_node_is_refused_if_pages_of_any_are_missing(open_ends: Open) -> None:
    nodes, pages = Nodes(open_ends, 2, 1), logical_pages(3)
    nodes.expect(1, 3)
    nodes.send(0, 1, pages[:, :, :2])
    nodes.send(1, 1, pages)
    nodes.finish(0, 1)
    nodes.until(lambda: nodes.receivers[0].receiver.counters["frames"] == 3)
    nodes.finish(1, 1)
    nodes.until(lambda: nodes.kinds() == [("nacked", 1)])
    assert nodes.num_finished() == 0


def serves_another_room(nodes: Nodes) -> None:
    nodes.expect(2, 3)
    for node in range(len(nodes.senders)):
        nodes.send(node, 2, logical_pages(3))
        nodes.finish(node, 2)
    nodes.until(lambda: nodes.num_finished() == 1)
    assert [room for room, _ in nodes.receivers[0].diary.finished] == [2]


@pytest.mark.parametrize(
    ("num_pages", "num_senders", "why"),
    [
        (2, 5, "num_senders 5, expected 1 to 4"),  # more than there are heads
        (2, 1 << 30, "num_senders 1073741824, expected 1 to 4"),
        (3, 2, "num_senders 2, expected 1 to 1"),  # of which one would have sent nothing
    ],
)
def test_a_node_that_tells_of_more_senders_than_there_can_be_is_refused(
    open_ends: Open, num_pages: int, num_senders: int, why: str
) -> None:
    nodes, pages = Nodes(open_ends, 1, 1), logical_pages(3)
    nodes.expect(1, 3)
    nodes.send(0, 1, pages[:, :, :num_pages])
    nodes.finish(0, 1, num_senders)
    nodes.until(lambda: nodes.kinds() == [("nacked", 1)])
    assert why in nodes.ends[0].diary.events[0].message
    assert nodes.receivers[0].receiver.counters["refused_malformed"] == 1
    serves_another_room(nodes)


@pytest.mark.parametrize(
    ("num_pages", "said", "why"),
    [
        # The other node's last page is still to come when the first has finished.
        (2, (3, 2), "num_senders 2, before 3"),
        (2, (3, 3), "num_senders 3, expected 2 to 2"),
        (3, (2, 1), "num_senders 1, expected 2 to 2"),
    ],
)
def test_nodes_that_disagree_about_how_many_they_are_are_refused(
    open_ends: Open, num_pages: int, said: tuple[int, int], why: str
) -> None:
    nodes, pages = Nodes(open_ends, 2, 1), logical_pages(3)
    nodes.expect(1, 3)
    nodes.send(0, 1, pages)
    nodes.send(1, 1, pages[:, :, :num_pages])
    receiver = nodes.receivers[0].receiver
    nodes.until(lambda: receiver.counters["frames"] == 2 + num_pages - 1)
    nodes.finish(0, 1, said[0])
    nodes.until(lambda: receiver._inbound._rooms[1].num_senders == said[0])
    if num_pages < 3:
        rest = sharded(pages[:, :, num_pages:], 4, 2, ml_dtypes.bfloat16)[1]
        (part,) = nodes.parts[1]
        nodes.senders[1].send_pages(nodes.grant(1, part), num_pages, [rest], part.runs, 2)
    nodes.finish(1, 1, said[1])
    nodes.until(lambda: nodes.kinds() == [("nacked", 1)])
    assert any(why in event.message for each in nodes.ends for event in each.diary.events)
    assert receiver.counters["refused_malformed"] == 1
    serves_another_room(nodes)


def test_a_second_connection_of_the_same_node_is_foreign(open_ends: Open) -> None:
    nodes, pages = Nodes(open_ends, 2, 1), logical_pages(3)
    nodes.expect(1, 3)
    nodes.send(0, 1, pages)
    nodes.until(lambda: nodes.receivers[0].receiver.counters["frames"] == 2)
    nodes.senders[1].node = 0
    nodes.send(1, 1, pages)
    nodes.until(lambda: nodes.kinds() == [("nacked", 1)])
    assert nodes.receivers[0].receiver.counters["refused_foreign"] > 0
    assert nodes.receivers[0].diary.pages == []  # none is whole


def test_a_node_that_gives_up_ends_the_room_though_it_had_finished(open_ends: Open) -> None:
    nodes = one_of_two_has_finished(open_ends)
    nodes.senders[0].cancel(1)
    nodes.until(lambda: nodes.receivers[0].diary.lost == [(1,)])
    nodes.finish(1, 1)
    nodes.until(lambda: nodes.kinds() == [("nacked", 1)])


def test_a_node_whose_connection_ends_loses_the_room_that_others_feed_too(open_ends: Open) -> None:
    nodes, pages = Nodes(open_ends, 2, 1), logical_pages(3)
    nodes.expect(1, 3)
    for node in (0, 1):
        nodes.send(node, 1, pages)
    nodes.until(lambda: nodes.receivers[0].diary.page_idx(1) == [0, 1, 2])
    nodes.ends[1].kill_sender()
    nodes.until(lambda: nodes.receivers[0].diary.lost == [(1,)])
    nodes.finish(0, 1)
    nodes.until(lambda: nodes.kinds() == [("nacked", 1)])


def test_what_one_address_refuses_is_over_and_is_cancelled_at_the_others(open_ends: Open) -> None:
    nodes, pages = Nodes(open_ends, 1, 2), logical_pages(3)
    nodes.receivers[0].receiver.expect(1, 1, 3, [0])
    nodes.send(0, 1, pages)
    nodes.until(lambda: nodes.kinds() == [("nacked", 1)])
    nodes.until(lambda: nodes.receivers[0].diary.page_idx(1) == [0, 1, 2])
    nodes.senders[0].cancel(1)
    nodes.until(lambda: nodes.receivers[0].diary.lost == [(1,)])
    assert nodes.kinds() == [("nacked", 1)]


def test_a_shard_that_another_node_takes_is_refused(open_ends: Open) -> None:
    nodes, pages = Nodes(open_ends, 1, 2), logical_pages(3)
    nodes.receivers[0].receiver.expect(1, 1, 3, [1])
    nodes.receivers[1].receiver.expect(1, 1, 3, [1])
    nodes.send(0, 1, pages)
    nodes.until(lambda: nodes.kinds() == [("nacked", 1)])
    assert nodes.receivers[0].receiver.counters["refused_out_of_range"] == 1


def test_frames_wait_for_a_room_that_another_process_expects(open_ends: Open) -> None:
    ends, pages = open_ends(), logical_pages(2)
    if isinstance(ends, LoopbackEnds):
        pytest.skip("no other thread could expect the room meanwhile")
    ends.receiver.room_wait_s = 60.0
    ends.send_room(1, pages, finish=False)
    ends.until(lambda: ends.receiver._changed._waiters != 0)  # type: ignore[attr-defined]
    ends.receiver.expect(1, 1, 2)
    ends.until(lambda: ends.diary.page_idx(1) == [0, 1])
    ends.receiver.forget(1)
    ends.send_room(1, pages)  # a room that is over is refused at once
    ends.until(lambda: ends.diary.kinds() == [("nacked", 1)])


def test_frames_of_a_room_that_nobody_expects_are_refused_after_their_wait(ends: Ends) -> None:
    ends.receiver.room_wait_s = 0.05
    ends.send_room(1, logical_pages(2))
    ends.until(lambda: ends.diary.kinds() == [("nacked", 1)])
    assert ends.receiver.counters["refused_unknown_room"] >= 1


def test_nodes_that_send_in_other_orders_never_wait_for_each_other_for_ever(
    open_ends: Open,
) -> None:
    """Each could fill the memory lent to it with parts of pages whose other parts are at the other,
    which waits for memory as well."""
    nodes, rooms = Nodes(open_ends, 2, 1, tp=2), range(1, 31)
    for room in rooms:
        nodes.expect(room, 2)
    pages = {room: logical_pages(2, seed=room) for room in rooms}
    for node, order in ((0, rooms), (1, reversed(rooms))):
        for room in order:
            nodes.send(node, room, pages[room])
            nodes.finish(node, room)
    nodes.until(lambda: nodes.num_finished() == len(rooms))
    (receiver,) = nodes.receivers
    for room in rooms:
        assert (receiver.diary.kv_of(room, 2, KV, 2) == pages[room]).all()
