"""Loopback's faults: loss, delay, reordering, corruption, cuts; and no wrong page ever."""

import random

import pytest

from tests.contract.loopback import NO_FAULT, Fault
from tests.contract.transfer_ends import LoopbackEnds
from tests.transfer.samples import KV, logical_pages
from transfer.backend import HEADER_BYTES, Frame, Kind


def flip(at: int) -> Fault:
    """Flip a bit of the frame's byte at this position."""

    def change(data: bytearray) -> None:
        data[at] ^= 1

    return Fault(change=change)


@pytest.fixture
def ends() -> LoopbackEnds:
    return LoopbackEnds()


def test_nothing_moves_without_a_pump(ends: LoopbackEnds) -> None:
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2))
    assert ends.diary.order == []
    assert ends.sender.in_flight_bytes == 2 * KV.page_bytes
    ends.network.pump()
    assert ends.diary.order == ["pages", "finish"]
    assert ends.sender.in_flight_bytes == 0


@pytest.mark.parametrize(
    "at", [-9, HEADER_BYTES, -1, 8], ids=["last byte", "first byte", "digest", "room"]
)
def test_changed_pages_end_the_connection_undelivered(ends: LoopbackEnds, at: int) -> None:
    ends.network.fault = lambda frame: flip(at) if frame.kind is Kind.PAGES else NO_FAULT
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2))
    ends.settle()
    assert ends.diary.kinds() == [("lost", 1)]
    assert ends.receiver.counters["refused_digest"] == 1
    assert ends.diary.pages == []


def test_a_changed_reply_ends_the_connection(ends: LoopbackEnds) -> None:
    ends.network.fault = lambda frame: flip(-1) if frame.kind is Kind.ACK else NO_FAULT
    ends.receiver.expect(1, 1, 1)
    ends.send_room(1, logical_pages(1))
    ends.settle()
    ends.receiver.ack(1)
    ends.settle()
    assert ends.diary.kinds() == [("lost", 1)]


def test_a_lost_frame_keeps_the_room_from_finishing(ends: LoopbackEnds) -> None:
    ends.network.fault = lambda frame: Fault(
        drop=frame.kind is Kind.PAGES and frame.page_start == 1
    )
    ends.receiver.expect(1, 1, 3)
    ends.send_room(1, logical_pages(3), runs_of=1)
    ends.settle()
    assert ends.diary.page_idx(1) == [0, 2]
    assert ends.diary.kinds() == [("nacked", 1)]
    assert ends.diary.finished == []


def test_delayed_pages_are_reordered_and_still_land_in_place(ends: LoopbackEnds) -> None:
    pages = logical_pages(4)
    ends.network.fault = lambda frame: Fault(
        delay_ticks=4 - frame.page_start if frame.kind is Kind.PAGES else 9
    )
    ends.receiver.expect(1, 1, 4)
    ends.send_room(1, pages, runs_of=1)
    ends.settle()
    assert ends.diary.page_idx(1) == [3, 2, 1, 0]
    assert (ends.diary.kv_of(1, 4, KV, 1) == pages).all()
    assert [room for room, _ in ends.diary.finished] == [1]


def test_a_cut_connection_tells_both_ends_and_the_next_room_gets_a_new_one(
    ends: LoopbackEnds,
) -> None:
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2), finish=False)
    ends.settle()
    ends.network.cut(ends.address)
    assert ends.diary.kinds() == [("lost", 1)]
    assert ends.diary.lost == [(1,)]
    ends.receiver.expect(2, 1, 2)
    ends.send_room(2, logical_pages(2))
    ends.settle()
    assert [room for room, _ in ends.diary.finished] == [2]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_wrong_page_is_delivered_and_rooms_end_once(seed: int) -> None:
    rng = random.Random(seed)
    ends = LoopbackEnds(max_frame_bytes=rng.choice([1, 3000, 1 << 20]))

    def fault(frame: Frame) -> Fault:
        match rng.randrange(12):
            case 0:
                return Fault(drop=True)
            case 1:
                return flip(rng.randrange(HEADER_BYTES))
            case 2:
                return Fault(delay_ticks=rng.randrange(4))
        return NO_FAULT

    ends.network.fault = fault
    contents = {room: logical_pages(rng.randint(1, 4), seed=room) for room in range(1, 9)}
    for room, pages in contents.items():
        ends.receiver.expect(room, 1, pages.shape[2])
    for room, pages in contents.items():
        ends.send_room(room, pages, runs_of=rng.randint(1, 3))
        if rng.random() < 0.2:
            ends.sender.cancel(room)
        for _ in range(rng.randrange(3)):
            ends.network.pump()
        if rng.random() < 0.05:
            ends.network.cut(ends.address)
    ends.settle()
    for room, first in list(ends.diary.finished):
        pages = contents[room]
        assert first.num_tokens == pages.shape[2] * KV.page_size
        assert (ends.diary.kv_of(room, pages.shape[2], KV, 1) == pages).all()
        ends.receiver.ack(room)
        ends.receiver.forget(room)
    ends.settle()
    for room in contents:
        delivered = ends.diary.page_idx(room)
        assert len(delivered) == len(set(delivered))
        for number, start, shards in ends.diary.pages:
            if number == room:
                expected = contents[room][:, :, start : start + shards[0].shape[2]]
                assert (shards[0].view("u2") == expected).all()
        assert [number for _, number in ends.diary.kinds()].count(room) <= 1
    assert ends.sender.in_flight_bytes == 0
    finished = [room for room, _ in ends.diary.finished]
    assert len(finished) == len(set(finished))
