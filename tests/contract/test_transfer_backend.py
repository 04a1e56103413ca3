"""What every transfer backend promises. Backends: loopback, tcp, shm, nixl if installed."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from model.config import PAGE_DTYPE_BYTES
from tests.contract.transfer_ends import Ends, LoopbackEnds, Open, TcpEnds
from tests.transfer.samples import KV, a_grant, logical_pages, sharded
from transfer import wire
from transfer.backend import FirstToken
from transfer.errors import Code
from transfer.layout import HeadRun, plan_heads
from transfer.rpc import Security

# --- the good case ------------------------------------------------------------------------------


def test_pages_arrive_bit_for_bit_and_end_in_one_ack(ends: Ends) -> None:
    pages = logical_pages(5)
    ends.receiver.expect(1, 1, 5)
    first = ends.send_room(1, pages)
    ends.until(lambda: bool(ends.diary.finished))
    assert ends.diary.finished == [(1, first)]
    assert (ends.diary.kv_of(1, 5, KV, 1) == pages).all()
    assert ends.diary.pages[0][2][0].dtype == ml_dtypes.bfloat16
    assert ends.diary.events == []
    ends.receiver.ack(1)
    ends.receiver.forget(1)
    ends.until(lambda: bool(ends.diary.events))
    ends.settle()
    assert ends.diary.kinds() == [("acked", 1)]
    assert ends.sender.in_flight_bytes == 0


@pytest.mark.parametrize("runs_of", [0, 1, 2])
@pytest.mark.parametrize("max_frame_bytes", [1, 3000, 1 << 20])
def test_pages_arrive_however_they_are_cut(
    open_ends: Open, runs_of: int, max_frame_bytes: int
) -> None:
    ends = open_ends(max_frame_bytes=max_frame_bytes)
    pages = logical_pages(5)
    ends.receiver.expect(1, 1, 5)
    ends.send_room(1, pages, runs_of=runs_of)
    ends.until(lambda: bool(ends.diary.finished))
    assert ends.diary.page_idx(1) == list(range(5))
    assert (ends.diary.kv_of(1, 5, KV, 1) == pages).all()


@pytest.mark.parametrize("dtype", PAGE_DTYPE_BYTES)
def test_pages_of_every_type_arrive_bit_by_bit(open_ends: Open, dtype: str) -> None:
    kv = replace(KV, dtype=dtype)
    ends = open_ends(kv=kv, tp_size=2, max_frame_bytes=3000)
    pages = logical_pages(5, kv=kv)
    ends.receiver.expect(1, 1, 5)
    ends.send_room(1, pages, dst=(2, 4))
    ends.until(lambda: bool(ends.diary.finished))
    assert (ends.diary.kv_of(1, 5, kv, 2) == pages).all()


@pytest.mark.parametrize(("src", "dst"), [((1, 1), (2, 2)), ((4, 4), (1, 1))])
def test_pages_of_one_latent_head_arrive_once_for_each_copy(
    open_ends: Open, src: tuple[int, int], dst: tuple[int, int]
) -> None:
    kv = replace(KV, num_kv_heads=dst[1], planes=1)
    ends = open_ends(kv=kv, tp_size=dst[0], max_frame_bytes=300)
    pages = logical_pages(5, kv=replace(kv, num_kv_heads=1))
    assert pages.shape[1] == 1
    ends.receiver.expect(1, 1, 5)
    ends.send_room(1, pages, src=src, dst=dst, runs_of=2)
    ends.until(lambda: bool(ends.diary.finished))
    assert sorted(ends.diary.page_idx(1)) == list(range(5))
    assert (ends.diary.kv_of(1, 5, kv, dst[0]) == np.repeat(pages, dst[1], axis=4)).all()


def test_pages_of_another_number_of_planes_are_refused(open_ends: Open) -> None:
    ends = open_ends(kv=replace(KV, planes=1))
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2))
    refused(ends, 1, "size")
    assert ends.diary.pages == []


@pytest.mark.parametrize("src", [(1, 4), (2, 4), (4, 4), (8, 8)])
@pytest.mark.parametrize("dst", [(1, 4), (2, 4), (4, 4), (8, 8)])
def test_any_sharding_reaches_any_other(
    open_ends: Open, src: tuple[int, int], dst: tuple[int, int]
) -> None:
    kv = replace(KV, num_kv_heads=dst[1])
    ends = open_ends(kv=kv, tp_size=dst[0], max_frame_bytes=3000)
    pages = logical_pages(3)
    ends.receiver.expect(1, 1, 3)
    ends.send_room(1, pages, src=src, dst=dst)
    ends.until(lambda: bool(ends.diary.finished))
    stored = np.repeat(pages, dst[1] // 4, axis=4)
    assert (ends.diary.kv_of(1, 3, kv, dst[0]) == stored).all()
    assert sorted(ends.diary.page_idx(1)) == [0, 1, 2]


def test_padding_behind_the_pages_of_a_shard_is_not_sent(ends: Ends) -> None:
    pages = logical_pages(8)
    padded = sharded(pages, 4, 1, ml_dtypes.bfloat16)
    grant = a_grant(1, ends.address, 3)
    ends.receiver.expect(1, 1, 3)
    ends.sender.send_pages(
        grant, 0, [shard[:, :, :3] for shard in padded], plan_heads(4, 1, 4, 1, 4)
    )
    ends.sender.finish(grant, FirstToken(1, 0, 12))
    ends.until(lambda: bool(ends.diary.finished))
    assert (ends.diary.kv_of(1, 3, KV, 1) == pages[:, :, :3]).all()


def test_more_rooms_than_there_is_memory_for_end_on_all_shards(open_ends: Open) -> None:
    ends = open_ends(kv=KV, tp_size=4)
    contents = {room: logical_pages(3, seed=room) for room in range(12)}
    for room in contents:
        ends.receiver.expect(room, 1, 3)
    for room, pages in contents.items():  # faster than the first connection is made
        ends.send_room(room, pages, dst=(4, 4), runs_of=1)
    ends.until(lambda: len(ends.diary.finished) == len(contents))
    for room, pages in contents.items():
        assert (ends.diary.kv_of(room, 3, KV, 4) == pages).all()


def test_rooms_side_by_side_do_not_mix(ends: Ends) -> None:
    contents = {room: logical_pages(2 + room, seed=room) for room in range(8)}
    for room, pages in contents.items():
        ends.receiver.expect(room, 1, pages.shape[2])
    for room, pages in contents.items():
        ends.send_room(room, pages, runs_of=1)
    ends.until(lambda: len(ends.diary.finished) == len(contents))
    for room, pages in contents.items():
        assert (ends.diary.kv_of(room, pages.shape[2], KV, 1) == pages).all()
        ends.receiver.ack(room)
        ends.receiver.forget(room)
    ends.until(lambda: len(ends.diary.events) == len(contents))
    assert sorted(ends.diary.kinds()) == [("acked", room) for room in contents]


def test_the_first_token_is_told_after_every_page(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 4)
    first = ends.send_room(1, logical_pages(4), runs_of=1)
    ends.until(lambda: bool(ends.diary.finished))
    assert ends.diary.order == ["pages"] * 4 + ["finish"]
    assert first.finished == wire.RUNNING


def test_a_room_without_pages_to_send_ends_too(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 0)
    ends.sender.finish(a_grant(1, ends.address, 0), FirstToken(9, 3, 0, wire.STOP))
    ends.until(lambda: bool(ends.diary.finished))
    assert ends.diary.finished == [(1, FirstToken(9, 3, 0, wire.STOP))]


# --- refusals -----------------------------------------------------------------------------------


def refused(ends: Ends, room: int, reason: str) -> None:
    """The room ended in one NACK, counted under its reason, and never finished."""
    ends.until(lambda: ("nacked", room) in ends.diary.kinds())
    ends.settle()
    assert ends.diary.kinds() == [("nacked", room)]
    assert reason in ends.diary.events[0].message
    assert ends.receiver.counters[f"refused_{reason}"] >= 1
    assert room not in [known for known, _ in ends.diary.finished]


def test_an_unknown_room_is_refused(ends: Ends) -> None:
    ends.send_room(1, logical_pages(2))
    refused(ends, 1, "unknown_room")
    assert ends.diary.pages == []


def test_a_forgotten_room_is_refused(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 2)
    ends.receiver.forget(1)
    ends.send_room(1, logical_pages(2))
    refused(ends, 1, "unknown_room")
    assert ends.diary.pages == []


@pytest.mark.parametrize("epoch", [0, 2])
def test_another_epoch_is_refused(ends: Ends, epoch: int) -> None:
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2), epoch=epoch)
    refused(ends, 1, "stale_epoch")
    assert ends.diary.pages == []


def test_pages_past_the_grant_are_refused(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(3))
    refused(ends, 1, "out_of_range")
    assert ends.diary.pages == []


@pytest.mark.parametrize(
    "run", [HeadRun(0, 0, 1, 0, 4), HeadRun(0, 0, 0, 1, 4), HeadRun(0, 0, 0, 4, 1)]
)
def test_heads_that_are_not_there_are_refused(ends: Ends, run: HeadRun) -> None:
    ends.receiver.expect(1, 1, 2)
    shards = sharded(logical_pages(2), 4, 1, ml_dtypes.bfloat16)
    ends.sender.send_pages(a_grant(1, ends.address, 2), 0, shards, [run])
    refused(ends, 1, "out_of_range")
    assert ends.diary.pages == []


def test_a_payload_of_another_size_is_refused(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 2)
    wrong = logical_pages(2, kv=replace(KV, page_size=8))
    ends.send_room(1, wrong)
    refused(ends, 1, "size")
    assert ends.diary.pages == []


def test_pages_that_came_before_are_refused_and_not_delivered_again(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2), finish=False)
    ends.send_room(1, logical_pages(2))
    refused(ends, 1, "replayed")
    assert ends.diary.page_idx(1) == [0, 1]


def test_a_first_token_before_all_pages_is_refused(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 3)
    ends.send_room(1, logical_pages(2))
    refused(ends, 1, "order")


def test_pages_behind_the_first_token_are_refused(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2))
    ends.send_room(1, logical_pages(2), finish=False)
    ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("nacked", 1)]
    assert ends.receiver.counters["refused_order"] == 1
    assert ends.diary.page_idx(1) == [0, 1]


def test_a_room_is_fed_by_one_connection_only(open_ends: Open) -> None:
    ends, other = open_ends(), open_ends()
    if isinstance(ends, LoopbackEnds) and isinstance(other, LoopbackEnds):
        other.sender._network = ends.network  # type: ignore[attr-defined]
    ends.receiver.expect(1, 1, 4)
    ends.send_room(1, logical_pages(4), finish=False)
    ends.until(lambda: bool(ends.diary.pages))
    thief = a_grant(1, ends.address, 4)
    other.sender.finish(thief, FirstToken(1, 0, 16))
    if isinstance(ends, LoopbackEnds):
        ends.settle()
    other.until(lambda: bool(other.diary.events))
    assert other.diary.kinds() == [("nacked", 1)]
    assert ends.receiver.counters["refused_foreign"] == 1
    ends.sender.finish(a_grant(1, ends.address, 4), FirstToken(2, 0, 16))
    ends.until(lambda: bool(ends.diary.finished))
    assert ends.diary.finished == [(1, FirstToken(2, 0, 16))]


def test_decode_can_refuse_a_room_in_the_middle(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 4)
    ends.send_room(1, logical_pages(4)[:, :, :2], finish=False)
    ends.until(lambda: bool(ends.diary.pages))
    ends.receiver.forget(1)
    ends.sender.finish(a_grant(1, ends.address, 4), FirstToken(7, 0, 16))
    refused(ends, 1, "unknown_room")
    assert ends.diary.events[0].code == Code.GONE
    assert ends.diary.page_idx(1) == [0, 1]


def test_after_a_refusal_other_rooms_go_on(ends: Ends) -> None:
    pages = logical_pages(3)
    ends.receiver.expect(2, 1, 3)
    ends.send_room(1, pages)
    ends.send_room(2, pages)
    ends.until(lambda: bool(ends.diary.finished))
    assert (ends.diary.kv_of(2, 3, KV, 1) == pages).all()


# --- endings ------------------------------------------------------------------------------------


def test_a_cancelled_room_is_lost_to_the_receiver_and_silent_at_the_sender(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 4)
    ends.send_room(1, logical_pages(4)[:, :, :2], finish=False)
    ends.until(lambda: bool(ends.diary.pages))
    ends.sender.cancel(1)
    ends.until(lambda: bool(ends.diary.lost))
    ends.settle()
    assert ends.diary.lost == [(1,)]
    assert ends.diary.events == []
    assert ends.sender.in_flight_bytes == 0


def test_nothing_of_a_cancelled_room_is_sent_any_more(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 2)
    ends.receiver.expect(2, 1, 2)
    ends.sender.cancel(1)
    ends.send_room(1, logical_pages(2))
    ends.send_room(2, logical_pages(2))
    ends.until(lambda: bool(ends.diary.finished))
    assert ends.diary.page_idx(1) == []
    assert [room for room, _ in ends.diary.finished] == [2]


def test_cancelling_a_finished_room_does_not_take_it_back(ends: Ends) -> None:
    """It does not count as a refusal either: it came too late to mean anything."""
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2))
    ends.until(lambda: bool(ends.diary.finished))
    ends.sender.cancel(1)
    ends.settle()
    assert ends.diary.lost == []
    refused = sum(n for name, n in ends.receiver.counters.items() if name.startswith("refused"))
    assert refused == isinstance(ends, TcpEnds)  # TCP's settle() causes one refusal


def test_a_dead_receiver_loses_every_open_room_once(ends: Ends) -> None:
    for room in (1, 2):
        ends.receiver.expect(room, 1, 4)
        ends.send_room(room, logical_pages(4)[:, :, :2], finish=False)
    ends.until(lambda: len(ends.diary.pages) == 2)
    ends.kill_receiver()
    ends.until(lambda: len(ends.diary.events) == 2)
    assert sorted(ends.diary.kinds()) == [("lost", 1), ("lost", 2)]
    assert all(event.message for event in ends.diary.events)
    ends.send_room(1, logical_pages(4))  # prefill did not know yet that the room was over
    assert ends.sender.in_flight_bytes == 0
    assert len(ends.diary.events) == 2


def test_opening_says_nothing_even_when_nobody_listens(ends: Ends) -> None:
    ends.sender.open(a_grant(1, ends.address, 2))
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2))
    ends.until(lambda: bool(ends.diary.finished))
    ends.kill_receiver()
    ends.until(lambda: bool(ends.diary.events))
    ends.sender.open(a_grant(2, ends.address, 2))
    ends.send_room(2, logical_pages(2))
    ends.until(lambda: len(ends.diary.events) == 2)
    assert ends.diary.kinds() == [("lost", 1), ("lost", 2)]


def test_a_dead_sender_loses_every_unfinished_room_once(ends: Ends) -> None:
    for room in (1, 2, 3):
        ends.receiver.expect(room, 1, 4)
    ends.send_room(1, logical_pages(4))
    ends.send_room(2, logical_pages(4), finish=False)
    ends.until(lambda: len(ends.diary.pages) == 2 and bool(ends.diary.finished))
    ends.kill_sender()
    ends.until(lambda: bool(ends.diary.lost))
    assert ends.diary.lost == [(2,)]
    ends.receiver.ack(1)  # nobody hears it, and nothing breaks
    ends.receiver.forget(1)


def test_an_address_where_nobody_listens_loses_the_room(ends: Ends) -> None:
    ends.receiver.close()
    ends.send_room(1, logical_pages(2))
    ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("lost", 1)]
    assert ends.sender.in_flight_bytes == 0


def test_a_wrong_token_carries_nothing(open_ends: Open) -> None:
    ends = open_ends(sender_security=Security("another-token-of-the-tests"))
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2))
    ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("lost", 1)]
    assert ends.diary.pages == []
    ends.until(lambda: ends.receiver.counters["connections_refused"] == 1)


def test_closing_tells_no_events(ends: Ends) -> None:
    ends.receiver.expect(1, 1, 4)
    ends.send_room(1, logical_pages(4), finish=False)
    ends.until(lambda: bool(ends.diary.pages))
    ends.close()
    assert ends.diary.events == []
