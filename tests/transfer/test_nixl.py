"""NIXL between processes: dead and frozen ends, late writes, bounds, and changed bytes."""

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from tests.contract.transfer_ends import NixlEnds, TcpEnds
from tests.transfer.children import (
    FROZEN_S,
    NEVER_S,
    STALL_S,
    child,
    receiving,
    said,
    sending,
    tell,
)
from tests.transfer.samples import KV, NEEDS_NIXL, SECURITY, a_grant, logical_pages
from tests.transfer.shm_ends import deliver, wait_until
from transfer import nixl
from transfer.backend import FirstToken, PagesArrived, ReceiverEvent
from transfer.errors import ConfigError, PeerLost
from transfer.nixl import ABANDONED, Abandoned, NixlReceiver, RegisteredSlots, RemoteSlots
from transfer.nixl_agent import Agent, Write
from transfer.slots import FRAME_BYTES
from transfer.staging import SlotShape

pytestmark = NEEDS_NIXL
RECEIVER = receiving("transfer.nixl.NixlReceiver", num_pages=4096)
SENDER = sending("transfer.nixl.NixlSender")
SHAPE = SlotShape(slot_bytes=1 << 16, num_slots=4)
Open = Callable[..., NixlEnds]


@pytest.fixture(params=["", "tcp"], ids=["any transport", "tcp only"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transports UCX may use: on one host it writes into the peer's memory, unless limited."""
    if request.param:
        monkeypatch.setenv("UCX_TLS", request.param)


@pytest.fixture
def open_ends() -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def make(**changes: Any) -> NixlEnds:
            return stack.enter_context(contextlib.closing(NixlEnds(**changes)))

        yield make


def test_pages_travel_by_nixl_and_both_ends_say_so(open_ends: Open, transport: None) -> None:
    ends = open_ends()
    deliver(ends)
    deliver(ends, room=2)
    assert ends.sender.counters == {"connections_nixl": 1}
    assert ends.receiver.counters["connections_nixl"] == 1
    assert ends.receiver.counters["connections_tcp"] == 0
    assert [pair.backend for pair in ends.sender.transfers] == ["nixl"]


# --- ends that do not fit -------------------------------------------------------------------------


def test_staging_that_holds_too_little_refuses_to_start() -> None:
    with pytest.raises(ConfigError, match=rf"--transfer-staging-bytes .*{4 * FRAME_BYTES}.*4096"):
        NixlReceiver(SECURITY, "127.0.0.1", 0, KV, 2, print, staging_bytes=4096)


def test_memory_that_cannot_be_registered_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("no more locked memory")

    monkeypatch.setattr(Agent, "register", refuse)
    with pytest.raises(ConfigError, match=r"no more locked memory.*--transfer-staging-bytes"):
        NixlReceiver(SECURITY, "127.0.0.1", 0, KV, 1, print)


@pytest.mark.parametrize("sends", [NixlEnds, TcpEnds])
def test_an_end_that_goes_by_tcp_moves_nothing(sends: type[TcpEnds]) -> None:
    """The registry refuses such a pair; if they meet all the same, the room is lost."""
    takes = TcpEnds if sends is NixlEnds else NixlEnds
    with (
        contextlib.closing(sends(stall_timeout_s=STALL_S)) as here,
        contextlib.closing(takes(stall_timeout_s=STALL_S)) as there,
    ):
        there.receiver.expect(1, 1, 2)
        here.address = there.address
        here.send_room(1, logical_pages(2))
        here.until(lambda: bool(here.diary.events))
        assert here.diary.kinds() == [("lost", 1)]
        assert there.diary.pages == []
        assert sends is TcpEnds or "lends it no memory" in here.diary.events[0].message


# --- bytes and memory -----------------------------------------------------------------------------


def test_a_byte_that_changed_on_the_way_ends_the_connection(
    open_ends: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that sampling would miss: the digest covers all bytes."""
    written = RemoteSlots.write

    def write(slots: RemoteSlots, pages: np.ndarray) -> tuple[int, memoryview]:
        slot, payload = written(slots, pages)
        payload[4096 + 200] ^= 1
        return slot, payload

    monkeypatch.setattr(RemoteSlots, "write", write)
    ends = open_ends()
    ends.receiver.expect(1, 1, 100)
    ends.send_room(1, logical_pages(100))
    ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("lost", 1)]
    assert ends.receiver.counters["refused_digest"] == 1
    assert ends.diary.pages == []


def test_no_more_is_in_flight_than_the_staging_holds_and_a_cancel_passes(open_ends: Open) -> None:
    kept: list[list[np.ndarray]] = []
    ends = open_ends()
    on_event = ends.diary.on_receiver_event

    def keep(event: ReceiverEvent) -> None:
        if isinstance(event, PagesArrived):
            kept.append(event.shards)
        else:
            on_event(event)

    ends.receiver._on_event = keep
    for room in (1, 2):
        ends.receiver.expect(room, 1, 6)
    ends.send_room(1, logical_pages(6), runs_of=1)
    ends.until(lambda: len(kept) == 4)
    assert ends.sender.in_flight_bytes == 2 * KV.page_bytes
    ends.sender.cancel(1)
    ends.until(lambda: ends.sender.in_flight_bytes == 0 and ends.diary.lost == [(1,)])
    kept.clear()
    ends.send_room(2, logical_pages(3), finish=False)
    ends.until(lambda: bool(kept))


def never_waits(write: Write) -> None:
    while not write.done():
        os.sched_yield()


def test_a_late_write_reaches_nothing_that_is_in_use(transport: None) -> None:
    """Where a transport checks only addresses, the old ones must not be used for anything else."""
    target, source = Agent("decode", is_target=True), Agent("prefill", is_target=False)
    former = RegisteredSlots(target, SHAPE, lambda: None)
    told = former.told()
    sender = RemoteSlots(source, told, never_waits)
    sender.write(np.full(4096, 7, np.uint8))
    former.close()
    del former
    others = [RegisteredSlots(target, SHAPE, lambda: None) for _ in range(8)]
    ranges = [
        range(slots.told().address, slots.told().address + SHAPE.num_bytes) for slots in others
    ]
    assert all(told.address not in taken for taken in ranges)
    with contextlib.suppress(PeerLost):  # hardware may refuse it
        sender.write(np.full(4096, 8, np.uint8))
    for slots in others:
        assert not slots.take(0, SHAPE.slot_bytes).any()
        slots.close()


def test_memory_of_an_ended_connection_takes_up_nothing_once_it_was_read() -> None:
    agent = Agent("decode", is_target=True)
    shape = SlotShape(slot_bytes=16 << 20, num_slots=2)
    slots = RegisteredSlots(agent, shape, lambda: None)
    slots.told()
    view = slots.take(1, 16 << 20)
    view[:] = 1
    slots.close()
    assert view.all()
    before = psutil.Process().memory_info().rss
    del view
    assert before - psutil.Process().memory_info().rss > 12 << 20


# --- writes that do not end -----------------------------------------------------------------------


class Stuck:
    """Slots with a write under way until the test ends it."""

    is_under_way = True
    closed = 0

    def move_on(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


def test_what_a_write_may_read_from_is_kept_until_it_is_over() -> None:
    abandoned = Abandoned(most=2)
    first, second = Stuck(), Stuck()
    abandoned.add(first)  # type: ignore[arg-type]
    abandoned.clear()
    abandoned.add(second)  # type: ignore[arg-type]
    with pytest.raises(PeerLost, match=r"2 lost connections .* at most 2 may"):
        abandoned.clear()
    first.is_under_way = False
    abandoned.clear()
    assert (first.closed, second.closed, len(abandoned)) == (1, 0, 1)


def cleared() -> bool:
    ABANDONED.clear()
    return not len(ABANDONED)


def test_a_write_to_a_frozen_receiver_has_a_deadline_and_its_memory_is_kept(
    open_ends: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    ends = open_ends(stall_timeout_s=STALL_S)
    with child(RECEIVER) as process:
        ends.address = said(process)
        ends.send_room(1, logical_pages(4), finish=False)
        assert said(process) == "PagesArrived"
        os.kill(process.pid, signal.SIGSTOP)
        # More than the sockets hold, so the write cannot end.
        pages = np.broadcast_to(logical_pages(1), (2, 2, 4096, *logical_pages(1).shape[3:]))
        ends.send_room(1, np.ascontiguousarray(pages)[:, :, 4:], finish=False)
        ends.until(lambda: bool(ends.diary.events))
        assert ends.diary.kinds() == [("lost", 1)]
        ends.until(lambda: len(ABANDONED) == 1)
        ABANDONED.clear()
        assert len(ABANDONED) == 1
        process.kill()
        process.wait()
        ends.until(cleared)


# --- processes that die or freeze -----------------------------------------------------------------


@pytest.mark.parametrize(("how", "transports"), [(signal.SIGKILL, "tcp"), (signal.SIGSTOP, "all")])
def test_a_receiving_process_that_is_killed_or_frozen_loses_the_room(
    open_ends: Open, monkeypatch: pytest.MonkeyPatch, how: signal.Signals, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    ends = open_ends(stall_timeout_s=FROZEN_S if how is signal.SIGSTOP else NEVER_S)
    with child(RECEIVER) as process:
        ends.address = said(process)
        ends.send_room(1, logical_pages(4)[:, :, :2], finish=False)
        assert said(process) == "PagesArrived"
        os.kill(process.pid, how)
        ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("lost", 1)]


@pytest.mark.parametrize(("how", "transports"), [(signal.SIGKILL, "all"), (signal.SIGSTOP, "tcp")])
def test_a_sending_process_that_is_killed_or_frozen_loses_the_room(
    open_ends: Open, monkeypatch: pytest.MonkeyPatch, how: signal.Signals, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    ends = open_ends(stall_timeout_s=FROZEN_S if how is signal.SIGSTOP else NEVER_S)
    ends.receiver.expect(1, 1, 4)
    with child(SENDER, ends.address) as process:
        ends.until(lambda: bool(ends.diary.pages))
        os.kill(process.pid, how)
        ends.until(lambda: bool(ends.diary.lost))
    assert ends.diary.lost == [(1,)]


def test_what_a_thawed_sender_still_writes_reaches_nobody(open_ends: Open) -> None:
    ends = open_ends(stall_timeout_s=FROZEN_S)
    ends.receiver.expect(1, 1, 4)
    with child(SENDER, ends.address) as process:
        ends.until(lambda: bool(ends.diary.pages))
        os.kill(process.pid, signal.SIGSTOP)
        ends.until(lambda: bool(ends.diary.lost))
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


# --- leaks ----------------------------------------------------------------------------------------


def test_connections_leave_no_descriptor_and_no_thread(open_ends: Open) -> None:
    process = psutil.Process()

    def has_more() -> bool:
        gc.collect()
        return process.num_fds() > num_fds or process.num_threads() > num_threads

    deliver(open_ends())  # loads what is loaded only once
    gc.collect()
    num_fds, num_threads = process.num_fds(), process.num_threads()
    former = len(nixl._FORMER)
    for room in range(5):
        with contextlib.closing(NixlEnds()) as ends:
            deliver(ends, room=room)
        del ends
        wait_until(lambda: not has_more())
    wait_until(lambda: len(nixl._FORMER) == former + 5)
