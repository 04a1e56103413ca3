"""Pairs of ends that share memory, and a count of the memory this process has mapped."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

from tests.contract.transfer_ends import ShmEnds, TcpEnds
from tests.transfer.samples import KV, PATIENCE_S, logical_pages
from transfer.clock import SYSTEM_CLOCK

OpenEnds = Callable[..., ShmEnds]


def wait_until(done: Callable[[], bool]) -> None:
    end_s = SYSTEM_CLOCK.monotonic_s() + PATIENCE_S
    while not done():
        assert SYSTEM_CLOCK.monotonic_s() < end_s
        os.sched_yield()


def deliver(ends: TcpEnds, room: int = 1) -> None:
    """Send a valid room and check what arrives."""
    pages = logical_pages(3, seed=room)
    ends.receiver.expect(room, 1, 3)
    ends.send_room(room, pages)
    ends.until(lambda: any(known == room for known, _ in ends.diary.finished))
    assert (ends.diary.kv_of(room, 3, KV, 1) == pages).all()


def mapped() -> int:
    """How many mappings of lent memory this process has."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvferry-pages")
