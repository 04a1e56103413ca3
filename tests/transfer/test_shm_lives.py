"""Shared memory over its life: nothing leaks, and killed or frozen ends are noticed."""

import contextlib
import os
import signal

import psutil
import pytest

from tests.contract.transfer_ends import ShmEnds
from tests.transfer.children import FROZEN_S, NEVER_S, child, receiving, said, sending, tell
from tests.transfer.samples import KV, a_grant, logical_pages
from tests.transfer.shm_ends import OpenEnds, deliver, mapped
from transfer.backend import FirstToken


@pytest.fixture
def ends(open_shm_ends: OpenEnds) -> ShmEnds:
    return open_shm_ends()


# --- leaks ----------------------------------------------------------------------------------------


def footprint() -> tuple[int, int, int]:
    """(descriptors, mappings, resident bytes) of this process."""
    process = psutil.Process()
    return process.num_fds(), mapped(), process.memory_info().rss


def test_a_thousand_rooms_leave_nothing_behind(ends: ShmEnds) -> None:
    def send(rooms: range) -> None:
        for room in rooms:
            ends.receiver.expect(room, 1, 40)
            ends.send_room(room, pages, runs_of=20)
            ends.until(lambda: bool(ends.diary.finished))
            ends.receiver.ack(room)
            ends.receiver.forget(room)
            ends.diary.finished.clear()
            ends.diary.pages.clear()

    pages = logical_pages(40)
    send(range(200))
    before = footprint()
    send(range(200, 1200))
    ends.until(lambda: len(ends.diary.events) == 1200)
    after = footprint()
    assert all(now <= then for now, then in zip(after[:2], before, strict=False))
    assert after[2] - before[2] < 8 << 20  # leaked payloads would be 20 MB


def test_a_connection_leaves_no_descriptor_and_no_memory(open_shm_ends: OpenEnds) -> None:
    deliver(open_shm_ends())  # loads what is loaded only once
    before = footprint()
    for _ in range(10):
        with contextlib.closing(ShmEnds()) as ends:
            deliver(ends)
        ends.until(lambda: footprint()[:2] <= before[:2])


# --- processes that die or freeze -----------------------------------------------------------------

RECEIVER = receiving("transfer.shm.ShmReceiver", is_demand=True)
SENDER = sending("transfer.shm.ShmSender", is_demand=True)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiving_process_that_is_killed_or_frozen_loses_the_room(
    open_shm_ends: OpenEnds, how: signal.Signals
) -> None:
    ends = open_shm_ends(stall_timeout_s=FROZEN_S if how is signal.SIGSTOP else NEVER_S)
    with child(RECEIVER) as process:
        ends.address = said(process)
        ends.send_room(1, logical_pages(4)[:, :, :2], finish=False)
        assert said(process) == "PagesArrived"
        assert mapped() == 1
        os.kill(process.pid, how)
        ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("lost", 1)]
    ends.until(lambda: mapped() == 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sending_process_that_is_killed_or_frozen_loses_the_room(
    open_shm_ends: OpenEnds, how: signal.Signals
) -> None:
    ends = open_shm_ends(stall_timeout_s=FROZEN_S if how is signal.SIGSTOP else NEVER_S)
    ends.receiver.expect(1, 1, 4)
    with child(SENDER, ends.address) as process:
        ends.until(lambda: bool(ends.diary.pages))
        os.kill(process.pid, how)
        ends.until(lambda: bool(ends.diary.lost))
    assert ends.diary.lost == [(1,)]
    ends.until(lambda: mapped() == 0)


def test_what_a_thawed_sender_still_writes_reaches_nobody(open_shm_ends: OpenEnds) -> None:
    ends = open_shm_ends(stall_timeout_s=FROZEN_S)
    ends.receiver.expect(1, 1, 4)
    with child(SENDER, ends.address) as process:
        ends.until(lambda: bool(ends.diary.pages))
        os.kill(process.pid, signal.SIGSTOP)
        ends.until(lambda: bool(ends.diary.lost))
        # The room goes to another sender, whose pages lie in memory that the first one never had.
        ends.receiver.expect(1, 1, 4)
        ends.diary.pages.clear()
        pages = logical_pages(4, seed=9)
        ends.send_room(1, pages, finish=False)
        ends.until(lambda: ends.diary.page_idx(1) == [0, 1, 2, 3])
        os.kill(process.pid, signal.SIGCONT)
        tell(process)
        assert said(process) == "lost"
        ends.sender.finish(a_grant(1, ends.address, 4), FirstToken(7, 0, 16))
        ends.until(lambda: bool(ends.diary.finished))
    assert (ends.diary.kv_of(1, 4, KV, 1) == pages).all()
    assert len(ends.diary.pages) == 1
