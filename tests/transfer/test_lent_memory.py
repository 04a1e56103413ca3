"""Slots and cached pages at their bounds: the last that fits, one too many, and none at all."""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from tests.transfer.samples import KV, PATIENCE_S, SECURITY, logical_pages
from tests.transfer.shm_ends import OpenEnds, deliver, wait_until
from tests.transfer.test_prefix_cache import cached_prompt, filled, ids
from transfer.backend import Finished, Frame, Kind, PagesArrived, ReceiverEvent, Source
from transfer.errors import BadMessage
from transfer.inbound import Feeder, Inbound
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache
from transfer.shm import ShmReceiver
from transfer.slots import FRAME_BYTES
from transfer.staging import _SEALS, BorrowedSlots, SharedSlots, SlotShape, slot_shape

SHAPE = SlotShape(slot_bytes=4096, num_slots=4)
LONG_S = 1000 * PATIENCE_S  # so long that a test cannot be rescued by a sign of life


class Connected:
    """A connection of which nothing is heard but frames."""

    source = Source("prefill-0")

    def reply(self, frame: Frame, meta: bytes = b"") -> None:
        raise AssertionError("no frame is refused")


def open_memory() -> int:
    """The number of memory files to lend that this process has open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # another thread has closed it
            count += "memfd:kvferry-pages" in str(link.readlink())
    return count


# --- slots ----------------------------------------------------------------------------------------


def test_a_slot_may_be_filled_to_its_last_byte() -> None:
    lent = SharedSlots(SHAPE, lambda: None)
    borrowed = BorrowedSlots(lent.fd, SHAPE)
    slot, _ = borrowed.write(np.full(4096, 7, np.uint8))
    assert lent.take(slot, 4096).tolist() == [7] * 4096
    with pytest.raises(BadMessage, match="4097 bytes in a slot of 4096"):
        lent.take(slot + 1, 4097)


def test_lent_memory_is_pinned_until_its_last_view_is_gone() -> None:
    pinned: list[int] = []
    ended: list[int] = []

    def pin(memory: np.ndarray) -> None:
        pinned.append(memory.nbytes)
        weakref.finalize(memory, ended.append, memory.nbytes)

    lent = SharedSlots(SHAPE, lambda: None, pin)
    slot, _ = BorrowedSlots(lent.fd, SHAPE).write(np.full(9, 7, np.uint8))
    view = lent.take(slot, 9)[3:]
    lent.close()
    assert (pinned, ended) == ([4 * 4096], [])
    assert view.tolist() == [7] * 6
    del view
    assert ended == [4 * 4096]


def test_memory_without_a_slot_is_not_mapped() -> None:
    fd = os.memfd_create("kvferry-pages", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    with pytest.raises(BadMessage, match="0 bytes of shared memory"):
        BorrowedSlots(fd, SlotShape(4096, 0))


def test_memory_that_cannot_be_had_leaves_no_file_open() -> None:
    before = open_memory()
    with pytest.raises(OSError, match="memory"):
        SharedSlots(SlotShape(1 << 40, 1 << 10), lambda: None)
    assert open_memory() == before


def test_a_connection_that_is_over_has_no_slot_to_fill() -> None:
    borrowed = BorrowedSlots(SharedSlots(SHAPE, lambda: None).fd, SHAPE)
    borrowed.close()
    assert borrowed.num_free == 0
    assert not borrowed.fits(1)


def test_enough_memory_is_enough_for_pages_of_any_size() -> None:
    shape = slot_shape(64 << 20, 2, FRAME_BYTES, 0)
    assert shape == SlotShape(64 << 20, 8)  # two runs are read while two are written


@pytest.mark.parametrize("by_its_own", [False, True])
def test_memory_that_any_thread_gives_back_is_told_at_once(
    open_shm_ends: OpenEnds, monkeypatch: pytest.MonkeyPatch, by_its_own: bool
) -> None:
    """A garbage collection, in which jaxlib gives it back, comes in the connection's thread too."""
    kept: list[list[np.ndarray]] = []
    done: list[int] = []
    ends = open_shm_ends(stall_timeout_s=LONG_S)

    def take(event: ReceiverEvent) -> None:
        match event:
            case PagesArrived():
                kept.append(event.shards)
            case Finished():
                done.append(event.room)

    receiver = ShmReceiver(
        SECURITY,
        "127.0.0.1",
        0,
        KV,
        1,
        take,
        LONG_S,
        2 * FRAME_BYTES,
    )
    ends.address = receiver.start()
    is_busy = receiver.busy

    def about_to_wait(feeder: Feeder) -> bool:
        if len(kept) == 2:
            kept.clear()
        return is_busy(feeder)

    with contextlib.closing(receiver):
        receiver.expect(1, 1, 3)
        if by_its_own:
            monkeypatch.setattr(receiver, "busy", about_to_wait)
        ends.send_room(1, logical_pages(3), runs_of=1)
        if not by_its_own:
            wait_until(lambda: len(kept) == 2)
            assert not done
            kept.clear()
        wait_until(lambda: len(kept) == 1 and done == [1])


@pytest.mark.parametrize("shards_sent", [(0, 1), (0,)])
def test_memory_of_a_run_that_is_placed_or_given_up_is_given_back(
    shards_sent: tuple[int, ...],
) -> None:
    inbound, feeder = Inbound(KV, 2), Connected()
    inbound.expect(1, 1, 2)
    ended: list[int] = []
    for shard in shards_sent:
        payload = np.zeros(KV.page_bytes, np.uint8)  # half of two pages
        frame = Frame(Kind.PAGES, 1, 1, 0, 2, shard, 0, 2, 0, payload.nbytes)
        weakref.finalize(payload, ended.append, shard)
        inbound.check(frame, feeder)
        arrived = inbound.pages(frame, feeder, payload)
        del payload
    assert ended == []
    assert (arrived is None) == (len(shards_sent) == 1)
    del arrived
    inbound.forget(1)
    assert sorted(ended) == list(shards_sent)


def test_a_frame_that_no_slot_holds_costs_its_room_and_not_who_sends_it(
    open_shm_ends: OpenEnds,
) -> None:
    ends = open_shm_ends()
    ends.receiver.shape = SlotShape(4096, 8)  # type: ignore[attr-defined]
    deliver(ends)
    ends.receiver.expect(2, 1, 8)
    ends.send_room(2, logical_pages(8))  # 8192 bytes, small enough to be sent at once
    ends.until(lambda: ("lost", 2) in ends.diary.kinds())
    assert "8192" in ends.diary.events[-1].message


@pytest.mark.parametrize(("hosts", "way"), [((None, None), "shm"), (("here", "there"), "tcp")])
def test_the_way_that_pages_took_is_told(
    open_shm_ends: OpenEnds, hosts: tuple[str | None, str | None], way: str
) -> None:
    ends = open_shm_ends(hosts=hosts)
    deliver(ends)
    ends.receiver.ack(1)
    ends.until(lambda: bool(ends.diary.events))
    shipped = ends.diary.events[0].shipped
    assert shipped is not None
    assert shipped.way == way
    assert [(pair.backend, pair.num_bytes) for pair in ends.sender.transfers] == [
        (way, 3 * KV.page_bytes)
    ]


# --- cached pages ---------------------------------------------------------------------------------


def test_what_is_cached_behind_a_gap_does_not_count() -> None:
    pool, cache = filled()
    cached_prompt(pool, cache, [1, 2, 3, 4, 5, 6])
    chain = [*cache.chain(ids([1, 2, 3, 4, 5, 6]), "")]
    assert cache.cached_pages(chain) == 3
    assert cache.cached_pages([chain[0], b"unknown", chain[2]]) == 1
    assert cache.cached_pages([b"unknown", *chain]) == 0


def test_a_chain_is_of_whole_pages_and_of_none_below_the_first() -> None:
    _, cache = filled()
    tokens = ids([1, 2, 3, 4])
    assert [len([*cache.chain(tokens[:count], "")]) for count in range(5)] == [0, 0, 1, 1, 2]


def test_a_disabled_cache_has_no_chain_to_look_for() -> None:
    cache = PrefixCache(PagePool(4), 2, enabled=False)
    assert [*cache.chain(ids([1, 2, 3, 4]), "")] == []
