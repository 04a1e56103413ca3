"""Shared memory between processes: who may use it, hostile frames, dead and frozen ends, leaks."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import transfer.shm
from tests.contract.transfer_ends import ShmEnds
from tests.transfer.samples import KV, PATIENCE_S, SECURITY, a_grant, logical_pages, sharded
from tests.transfer.shm_ends import OpenEnds, deliver, mapped
from transfer import wire
from transfer.backend import (
    Finished,
    FirstToken,
    Frame,
    Kind,
    PagesArrived,
    ReceiverEvent,
    SenderLost,
    without_payload,
)
from transfer.errors import ConfigError, PeerLost
from transfer.framing import Connection
from transfer.handshake import Offer, greet, introduce
from transfer.layout import plan_heads
from transfer.outbound import Job
from transfer.rpc import Security
from transfer.shm import ShmReceiver, ShmSender, host_identity
from transfer.slots import FRAME_BYTES, SlotLane
from transfer.staging import FillableSlots, InSlot, SlotShape


@pytest.fixture
def ends(open_shm_ends: OpenEnds) -> ShmEnds:
    return open_shm_ends()


# --- the way that pages take ----------------------------------------------------------------------


def test_two_ends_of_one_host_share_memory_and_say_so(ends: ShmEnds) -> None:
    deliver(ends)
    assert mapped() == 2
    assert ends.sender.counters == {"connections_shm": 1}
    assert ends.receiver.counters["connections_shm"] == 1
    assert ends.receiver.counters["connections_tcp"] == 0


@pytest.mark.parametrize("hosts", [(None, None), ("here", "there")])
def test_with_tls_pages_go_the_way_that_they_go_without(
    open_shm_ends: OpenEnds, tls_security: Security, hosts: tuple[str | None, str | None]
) -> None:
    ends = open_shm_ends(sender_security=tls_security, receiver_security=tls_security, hosts=hosts)
    deliver(ends)
    deliver(ends, room=2)
    way = "tcp" if any(hosts) else "shm"
    assert ends.sender.counters == {f"connections_{way}": 1}
    assert ends.diary.lost == []


def test_a_page_that_comes_while_its_connection_is_made_waits_for_a_slot(
    ends: ShmEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(transfer.shm._ShmLane):
        """A thread that finds no slots goes on only once there are some."""

        @property
        def slots(self) -> FillableSlots | None:
            found = self.__dict__.get("slots")
            if threading.current_thread() is not self.thread and found is None:
                ends.until(lambda: self._connection is not None)
            return found

        @slots.setter
        def slots(self, slots: FillableSlots | None) -> None:
            self.__dict__["slots"] = slots

    monkeypatch.setattr(transfer.shm, "_ShmLane", Interrupted)
    deliver(ends)
    assert ends.diary.lost == []


@pytest.mark.parametrize("hosts", [("here", "there"), ("", "there"), ("here", "")])
def test_ends_on_different_hosts_go_by_tcp(
    open_shm_ends: OpenEnds, hosts: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ends = open_shm_ends(hosts=hosts)
    deliver(ends)
    deliver(ends, room=2)
    assert mapped() == 0
    assert ends.sender.counters == {"connections_tcp": 1}
    assert ends.receiver.counters["connections_tcp"] == 1
    assert caplog.text.count("travel by tcp; shared memory: ") == 1
    assert all(host in caplog.text for host in hosts)


def test_a_socket_that_cannot_be_reached_means_tcp(
    open_shm_ends: OpenEnds, caplog: pytest.LogCaptureFixture
) -> None:
    """As between two containers on one host that have separate network namespaces."""
    caplog.set_level("INFO")
    ends = open_shm_ends()
    ends.receiver.offer = Offer(host_identity(), "kvferry-nobody-listens-here")  # type: ignore[attr-defined]
    deliver(ends)
    assert ends.sender.counters == {"connections_tcp": 1}
    assert "kvferry-nobody-listens-here is not reached" in caplog.text


@pytest.mark.parametrize("demands", [(True, False), (False, True), (True, True)])
def test_a_demand_that_cannot_be_met_loses_the_room_and_names_both_hosts(
    open_shm_ends: OpenEnds, demands: tuple[bool, bool]
) -> None:
    ends = open_shm_ends(demands=demands, hosts=("here", "there"))
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2))
    ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("lost", 1)]
    message = ends.diary.events[0].message
    assert "this side is on host here, decode on there" in message
    assert "takes shm only" in message
    assert ends.diary.pages == []


def test_a_demand_that_is_met_is_silent(open_shm_ends: OpenEnds) -> None:
    deliver(open_shm_ends(demands=(True, True)))


def test_a_receiver_that_demands_memory_takes_no_pages_by_tcp(open_shm_ends: OpenEnds) -> None:
    ends = open_shm_ends(demands=(False, True))
    ends.receiver.expect(1, 1, 0)
    host, _, port = ends.address.removeprefix("tcp://").rpartition(":")
    connection = Connection(socket.create_connection((host, int(port))), PATIENCE_S)
    with contextlib.closing(connection):
        assert introduce(connection, SECURITY, "by hand") is not None
        connection.send(Frame(Kind.FINISH, 1, 1), wire.encode(FirstToken(1, 0, 0)))
        with pytest.raises(PeerLost):
            connection.receive_small()
    assert ends.diary.finished == []
    assert ends.receiver.counters["connections_refused"] == 1


def test_a_demand_where_memory_cannot_be_shared_refuses_to_start() -> None:
    with pytest.raises(ConfigError, match="shm"):
        ShmSender(SECURITY, "prefill-0", print, is_demand=True, host="")
    with pytest.raises(ConfigError, match="shm"):
        ShmReceiver(SECURITY, "127.0.0.1", 0, KV, 1, print, is_demand=True, identity="")


def refuse(*args: object) -> None:
    raise PermissionError("not in this sandbox")


def test_a_sandbox_without_such_memory_means_tcp_or_no_start(
    monkeypatch: pytest.MonkeyPatch, open_shm_ends: OpenEnds
) -> None:
    monkeypatch.setattr("os.memfd_create", refuse)
    ends = open_shm_ends()
    deliver(ends)
    assert ends.sender.counters == {"connections_tcp": 1}
    with pytest.raises(ConfigError, match=r"cannot share memory.*not in this sandbox"):
        open_shm_ends(demands=(False, True))


def test_a_socket_that_cannot_be_had_means_tcp_or_no_start(
    monkeypatch: pytest.MonkeyPatch, open_shm_ends: OpenEnds
) -> None:
    monkeypatch.setattr("transfer.shm.secrets.token_hex", lambda num_bytes: f"taken-{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(f"\0kvferry-taken-{os.getpid()}")
        ends = open_shm_ends()
        deliver(ends)
        assert ends.sender.counters == {"connections_tcp": 1}
        with pytest.raises(ConfigError, match=r"cannot share memory.*in use"):
            open_shm_ends(demands=(False, True))


def test_staging_that_holds_too_little_refuses_to_start() -> None:
    with pytest.raises(ConfigError, match=rf"--transfer-staging-bytes .*{4 * FRAME_BYTES}.*4096"):
        ShmReceiver(SECURITY, "127.0.0.1", 0, KV, 2, print, staging_bytes=4096)


# --- the Unix socket ------------------------------------------------------------------------------


@contextlib.contextmanager
def by_hand(ends: ShmEnds) -> Iterator[tuple[Connection, np.ndarray]]:
    """A sender's connection, and the memory lent to it, for a test to misuse."""
    offer = ends.receiver.offer  # type: ignore[attr-defined]
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"\0{offer.socket_name}")
    with contextlib.closing(Connection(sock, PATIENCE_S, takes_fd=True)) as connection:
        introduce(connection, SECURITY, "by hand")
        frame, meta = connection.receive_small()
        assert frame.kind is Kind.MEMORY
        shape = wire.decode(meta, SlotShape)
        fd = connection.take_fd()
        memory = np.memmap(f"/proc/self/fd/{fd}", np.uint8, "r+", shape=(shape.num_bytes,))
        os.close(fd)
        yield connection, memory


def put(memory: np.ndarray, slot: int, num_pages: int = 2) -> memoryview:
    data = np.frombuffer(logical_pages(num_pages).tobytes(), np.uint8)
    memory[slot * FRAME_BYTES :][: len(data)] = data
    return memoryview(data)


def naming(frame: Frame, meta: bytes, payload: memoryview) -> bytes:
    """A frame whose payload lies in a slot."""
    return without_payload(frame, meta, payload, is_sampled=True)


def pages_frame(room: int = 1, num_pages: int = 2, page_start: int = 0) -> Frame:
    return Frame(Kind.PAGES, room, 1, page_start, num_pages, num_heads=4)


def in_slot(slot: int) -> bytes:
    return wire.encode(InSlot(slot))


def test_descriptors_of_strangers_stay_with_them(ends: ShmEnds, tmp_path: Path) -> None:
    name = ends.receiver.offer.socket_name  # type: ignore[attr-defined]
    theirs = tmp_path / "theirs"
    theirs.touch()

    def times_open() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
        return sum(1 for link in links if link.resolve() == theirs)

    with theirs.open() as passed:
        for _ in range(4):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(f"\0{name}")
                socket.send_fds(sock, [bytes(200)], [passed.fileno()] * 2)
                with contextlib.suppress(ConnectionResetError):
                    while sock.recv(1 << 16):  # until it is closed
                        pass
        ends.until(lambda: times_open() == 1)


def test_a_wrong_token_is_lent_nothing(ends: ShmEnds) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"\0{ends.receiver.offer.socket_name}")  # type: ignore[attr-defined]
    with contextlib.closing(Connection(sock, PATIENCE_S)) as connection, pytest.raises(PeerLost):
        introduce(connection, Security("another-token-of-the-tests"), "stranger")
    ends.until(lambda: ends.receiver.counters["connections_refused"] == 1)
    assert mapped() == 0


def test_what_was_changed_in_memory_ends_the_connection_undelivered(
    ends: ShmEnds,
) -> None:
    ends.receiver.expect(1, 1, 2)
    with by_hand(ends) as (connection, memory):
        payload = put(memory, 0)
        memory[5] ^= 1
        connection.send_whole(naming(pages_frame(), in_slot(0), payload))
        with pytest.raises(PeerLost):
            connection.receive_small()
    assert ends.diary.pages == []
    assert ends.receiver.counters["refused_digest"] == 1


@pytest.mark.parametrize("slot", [-1, 4, 1 << 40])
def test_a_slot_that_is_not_there_ends_the_connection(ends: ShmEnds, slot: int) -> None:
    ends.receiver.expect(1, 1, 2)
    with by_hand(ends) as (connection, memory):
        connection.send_whole(naming(pages_frame(), in_slot(slot), put(memory, 0)))
        with pytest.raises(PeerLost):
            connection.receive_small()
    ends.until(lambda: ends.receiver.counters["connections_refused"] == 1)
    assert ends.diary.pages == []


def test_a_frame_that_is_longer_than_a_slot_ends_the_connection(ends: ShmEnds) -> None:
    num_pages = FRAME_BYTES // KV.page_bytes + 1
    ends.receiver.expect(1, 1, num_pages)
    with by_hand(ends) as (connection, memory):
        payload = put(memory, 0, num_pages)
        connection.send_whole(naming(pages_frame(num_pages=num_pages), in_slot(0), payload))
        with pytest.raises(PeerLost):
            connection.receive_small()
    assert ends.diary.pages == []


class Holder:
    """A decode end that keeps the views it is given."""

    def __init__(self, num_slots: int, tp_size: int = 1) -> None:
        self.kept: list[list[np.ndarray]] = []
        self.done: list[int] = []
        self.lost: list[tuple[int, ...]] = []
        self.receiver = ShmReceiver(
            SECURITY,
            "127.0.0.1",
            0,
            KV,
            tp_size,
            self._take,
            PATIENCE_S,
            num_slots * FRAME_BYTES,
        )
        self.address = self.receiver.start()

    def _take(self, event: ReceiverEvent) -> None:
        match event:
            case PagesArrived():
                self.kept.append(event.shards)
            case Finished():
                self.done.append(event.room)
            case SenderLost():
                self.lost.append(event.rooms)


@pytest.fixture
def holder(ends: ShmEnds) -> Iterator[Holder]:
    """Replaces the receiver that `ends` came with."""
    holder = Holder(num_slots=4)
    ends.address = holder.address
    with contextlib.closing(holder.receiver):
        yield holder


def test_a_slot_that_is_still_read_cannot_be_named_again(ends: ShmEnds, holder: Holder) -> None:
    ends.receiver, shown = holder.receiver, logical_pages(2)
    holder.receiver.expect(1, 1, 4)
    with by_hand(ends) as (connection, memory):
        connection.send_whole(naming(pages_frame(), in_slot(1), put(memory, 1)))
        ends.until(lambda: bool(holder.kept))
        connection.send_whole(naming(pages_frame(page_start=2), in_slot(1), put(memory, 1)))
        with pytest.raises(PeerLost):
            connection.receive_small()
    assert len(holder.kept) == 1
    assert (holder.kept[0][0].view(np.uint16) == shown).all()


def test_no_more_is_in_flight_than_the_staging_holds(ends: ShmEnds, holder: Holder) -> None:
    holder.receiver.expect(1, 1, 7)
    pages = logical_pages(7)
    ends.send_room(1, pages, runs_of=1)
    in_flight = 3 * KV.page_bytes  # counted once a page was written, which its reader may see first
    ends.until(lambda: len(holder.kept) == 4 and ends.sender.in_flight_bytes == in_flight)
    assert holder.done == []
    assert (
        np.concatenate([kept[0] for kept in holder.kept], 2).view(np.uint16) == pages[:, :, :4]
    ).all()
    holder.kept.clear()
    ends.until(lambda: len(holder.kept) == 3 and bool(holder.done))
    assert (
        np.concatenate([kept[0] for kept in holder.kept], 2).view(np.uint16) == pages[:, :, 4:]
    ).all()


def test_a_room_is_cancelled_while_it_waits_for_memory(ends: ShmEnds, holder: Holder) -> None:
    for room in (1, 2):
        holder.receiver.expect(room, 1, 6)
    ends.send_room(1, logical_pages(6), runs_of=1)
    ends.until(lambda: len(holder.kept) == 4)
    ends.sender.cancel(1)
    ends.until(lambda: ends.sender.in_flight_bytes == 0 and holder.lost == [(1,)])
    holder.kept.clear()
    ends.send_room(2, logical_pages(3), finish=False)
    ends.until(lambda: bool(holder.kept) and ends.sender.in_flight_bytes == 0)


def test_parts_of_a_refused_room_give_their_memory_back(open_shm_ends: OpenEnds) -> None:
    """Two shards, the second of which never comes: the first one's part must not stay for ever."""
    ends = open_shm_ends(tp_size=2)
    for room in range(20):
        ends.receiver.expect(room, 1, 2)
        shards = sharded(logical_pages(2), 4, 2, ml_dtypes.bfloat16)
        grant = a_grant(room, ends.address, 2, 1, 2)
        first_shard = [run for run in plan_heads(4, 2, 4, 2, 4) if run.dst_shard == 0]
        ends.sender.send_pages(grant, 0, shards, first_shard)
        ends.sender.finish(grant, FirstToken(0, 0, 8))
    ends.until(lambda: len(ends.diary.events) == 20)
    assert {kind for kind, _ in ends.diary.kinds()} == {"nacked"}


# --- a receiver that misbehaves -------------------------------------------------------------------


@contextlib.contextmanager
def receiver_by_hand(fd: int | None, meta: bytes) -> Iterator[str]:
    """Listens on TCP and on a Unix socket, and lends what the test says; yields its address."""
    name = f"kvferry-test-{os.getpid()}-{os.urandom(4).hex()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{name}")
        unix.listen()

        def serve() -> None:
            first = Connection(tcp.accept()[0], PATIENCE_S)
            greet(first, SECURITY, PATIENCE_S, Offer(host_identity(), name))
            second = Connection(unix.accept()[0], PATIENCE_S)
            greet(second, SECURITY, PATIENCE_S)
            if fd is None:
                second.send(Frame(Kind.MEMORY), meta)
            else:
                second.send_fd(Frame(Kind.MEMORY), meta, fd)
            with contextlib.suppress(PeerLost):
                second.receive()
            first.close()
            second.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{tcp.getsockname()[1]}"
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("with_fd", [False, True])
def test_a_receiver_that_lends_nothing_usable_loses_the_room(ends: ShmEnds, with_fd: bool) -> None:
    read_end, write_end = os.pipe()  # a descriptor that is not memory
    try:
        with receiver_by_hand(
            read_end if with_fd else None, wire.encode(SlotShape(4096, 4))
        ) as address:
            ends.sender.finish(a_grant(1, address, 0), FirstToken(0, 0, 0))
            ends.until(lambda: bool(ends.diary.events))
    finally:
        os.close(read_end)
        os.close(write_end)
    assert ends.diary.kinds() == [("lost", 1)]
    assert ("memory" if with_fd else "descriptor") in ends.diary.events[0].message


def test_a_frame_that_cannot_leave_at_once_keeps_no_slot(
    ends: ShmEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(ends)
    assert isinstance(ends.sender, ShmSender)
    (lane,) = ends.sender._all_lanes()
    assert isinstance(lane, SlotLane)
    monkeypatch.setattr(Connection, "try_send", lambda self, data: False)
    payload = logical_pages(1)
    job = Job(Frame(Kind.PAGES, 2, 1, 0, 1, num_heads=4), b"", payload, payload.nbytes)
    kept: list[int] = []
    assert lane.slots is not None
    monkeypatch.setattr(lane.slots, "keep", kept.append)  # other slots come back meanwhile
    with lane.leaving:
        assert not lane.try_send(job)
    assert len(kept) == 1
