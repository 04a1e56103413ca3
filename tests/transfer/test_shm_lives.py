"""Shared memory over its life: nothing leaks, and ends that are killed or frozen are noticed."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.contract.transfer_ends import ShmEnds
from tests.transfer.samples import KV, a_grant, logical_pages
from tests.transfer.shm_ends import OpenEnds, deliver, mapped
from transfer.backend import FirstToken

ROOT = Path(__file__).resolve().parents[2]
STALL_S = 0.3
NEVER_S = 60.0


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
    descriptors, mappings, resident = footprint()
    send(range(200, 1200))
    ends.until(lambda: len(ends.diary.events) == 1200)
    after = footprint()
    assert after[:2] == (descriptors, mappings)
    assert after[2] - resident < 8 << 20  # payloads that leaked were 20 MB


def test_a_connection_leaves_no_descriptor_and_no_memory(open_shm_ends: OpenEnds) -> None:
    deliver(open_shm_ends())  # what is loaded once is loaded
    before = footprint()
    for _ in range(10):
        with contextlib.closing(ShmEnds()) as ends:
            deliver(ends)
        ends.until(lambda: footprint()[:2] <= before[:2])


# --- processes that die or freeze -----------------------------------------------------------------

RECEIVER = """
import sys
from tests.transfer.samples import KV, SECURITY
from transfer.shm import ShmReceiver
receiver = ShmReceiver(SECURITY, "127.0.0.1", 0, KV, 1, lambda *a: print("pages", flush=True),
                       lambda *a: print("finish", flush=True), lambda *a: None, 60.0,
                       is_demand=True)
address = receiver.start()
receiver.expect(1, 1, 4)
print(address, flush=True)
sys.stdin.read()
"""

SENDER = """
import sys
import ml_dtypes
from tests.transfer.samples import SECURITY, a_grant, logical_pages, sharded
from transfer.layout import plan_heads
from transfer.shm import ShmSender
sender = ShmSender(SECURITY, "child", lambda event: print(event.kind, flush=True), 16 << 20, 0.3,
                   is_demand=True)
shards = sharded(logical_pages(4), 4, 1, ml_dtypes.bfloat16)
grant = a_grant(1, sys.argv[1], 4)
for start in (0, 2):
    part = [shard[:, :, start : start + 2] for shard in shards]
    sender.send_pages(grant, start, part, plan_heads(4, 1, 4, 1, 4))
    sys.stdin.readline()
"""


@contextlib.contextmanager
def child(program: str, *args: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", program, *args]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiving_process_that_is_killed_or_frozen_loses_the_room(
    open_shm_ends: OpenEnds, how: signal.Signals
) -> None:
    ends = open_shm_ends(stall_timeout_s=STALL_S if how is signal.SIGSTOP else NEVER_S)
    with child(RECEIVER) as process:
        ends.address = said(process)
        ends.send_room(1, logical_pages(4)[:, :, :2], finish=False)
        assert said(process) == "pages"
        assert mapped() == 1
        os.kill(process.pid, how)
        ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("lost", 1)]
    ends.until(lambda: mapped() == 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sending_process_that_is_killed_or_frozen_loses_the_room(
    open_shm_ends: OpenEnds, how: signal.Signals
) -> None:
    ends = open_shm_ends(stall_timeout_s=STALL_S if how is signal.SIGSTOP else NEVER_S)
    ends.receiver.expect(1, 1, 4)
    with child(SENDER, ends.address) as process:
        ends.until(lambda: bool(ends.diary.pages))
        os.kill(process.pid, how)
        ends.until(lambda: bool(ends.diary.lost))
    assert ends.diary.lost == [(1,)]
    ends.until(lambda: mapped() == 0)


def test_what_a_thawed_sender_still_writes_reaches_nobody(open_shm_ends: OpenEnds) -> None:
    ends = open_shm_ends(stall_timeout_s=STALL_S)
    ends.receiver.expect(1, 1, 4)
    with child(SENDER, ends.address) as process:
        ends.until(lambda: bool(ends.diary.pages))
        os.kill(process.pid, signal.SIGSTOP)
        ends.until(lambda: bool(ends.diary.lost))
        # The room goes to another sender; its pages lie in memory that the first one never had.
        ends.receiver.expect(1, 1, 4)
        ends.diary.pages.clear()
        pages = logical_pages(4, seed=9)
        ends.send_room(1, pages, finish=False)
        ends.until(lambda: ends.diary.page_idx(1) == [0, 1, 2, 3])
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert said(process) == "lost"
        ends.sender.finish(a_grant(1, ends.address, 4), FirstToken(7, 0, 16))
        ends.until(lambda: bool(ends.diary.finished))
    assert (ends.diary.kv_of(1, 4, KV, 1) == pages).all()
    assert len(ends.diary.pages) == 1
