"""TCP under attack and failure: hostile bytes, dead and frozen processes, silence, TLS."""

import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.transfer_ends import TcpEnds
from tests.transfer.children import FROZEN_S, NEVER_S, STALL_S, child, receiving, said, sending
from tests.transfer.samples import KV, PATIENCE_S, SECURITY, a_grant, logical_pages
from transfer import tcp
from transfer.backend import (
    HEADER_BYTES,
    FirstToken,
    Frame,
    Kind,
    ReceiverEvent,
    Refused,
    whole_frame,
)
from transfer.clock import SYSTEM_CLOCK, ManualClock
from transfer.errors import ConfigError, PeerLost, Unauthenticated
from transfer.framing import Connection
from transfer.handshake import Welcome, greet, introduce, parse_address
from transfer.rpc import Security
from transfer.tcp import TcpReceiver
from transfer.wire import decode, encode


@pytest.fixture
def open_ends() -> Iterator[Callable[..., TcpEnds]]:
    with contextlib.ExitStack() as stack:

        def make(**changes: object) -> TcpEnds:
            return stack.enter_context(contextlib.closing(TcpEnds(**changes)))  # type: ignore[arg-type]

        yield make


@pytest.fixture
def ends(open_ends: Callable[..., TcpEnds]) -> TcpEnds:
    return open_ends()


@contextlib.contextmanager
def raw_peer(address: str, greeted: bool = True) -> Iterator[tuple[socket.socket, Connection]]:
    """A hand-made connection to a receiver, over which the test sends what it likes."""
    sock = socket.create_connection(parse_address(address), PATIENCE_S)
    connection = Connection(sock, PATIENCE_S)
    try:
        if greeted:
            introduce(connection, SECURITY, "by hand")
        yield sock, connection
    finally:
        connection.close()


def pages_frame(room: int = 1, num_pages: int = 2, **changes: int) -> bytearray:
    fields = {"page_start": 0, "dst_shard": 0, "dst_start": 0, "num_heads": 4, "epoch": 1}
    frame = Frame(Kind.PAGES, room, num_pages=num_pages, **(fields | changes))
    payload = logical_pages(num_pages).tobytes()
    return whole_frame(frame, b"", [memoryview(payload)])


def nack_of(connection: Connection) -> Refused:
    frame, meta = connection.receive_small()
    assert frame.kind is Kind.NACK
    return decode(meta, Refused)


def until_lost(connection: Connection) -> None:
    """Read until the receiver ends the connection, whatever it sends first."""
    with pytest.raises(PeerLost, match=r"closed by the peer|receiving failed"):
        [connection.receive_small() for _ in range(10)]


def still_serves(ends: TcpEnds, room: int = 77) -> None:
    """A valid room still arrives."""
    pages = logical_pages(2)
    ends.receiver.expect(room, 1, 2)
    ends.send_room(room, pages)
    ends.until(lambda: any(known == room for known, _ in ends.diary.finished))
    assert (ends.diary.kv_of(room, 2, KV, 1) == pages).all()


# --- hostile bytes ------------------------------------------------------------------------------


def test_a_damaged_frame_that_now_asks_for_a_sign_of_life_ends_the_connection(
    ends: TcpEnds,
) -> None:
    data = whole_frame(Frame(Kind.PING), b"", [])
    data[-1] ^= 1
    with raw_peer(ends.address) as (sock, connection):
        sock.sendall(data)
        with pytest.raises(PeerLost):
            connection.receive_small()
    assert ends.receiver.counters["refused_digest"] == 1
    assert ends.receiver.counters["pings"] == 0
    still_serves(ends)


@pytest.mark.parametrize("at", [HEADER_BYTES, HEADER_BYTES + 100, -9, -1])
def test_a_changed_byte_ends_the_connection_and_is_never_delivered(ends: TcpEnds, at: int) -> None:
    ends.receiver.expect(1, 1, 2)
    data = pages_frame()
    data[at] ^= 1
    with raw_peer(ends.address) as (sock, connection):
        sock.sendall(data)
        with pytest.raises(PeerLost):
            connection.receive_small()
    assert ends.diary.pages == []
    assert ends.receiver.counters["refused_digest"] == 1
    still_serves(ends)


ROOM_AT, EPOCH_AT, KIND_AT = 8, 16, 6


@pytest.mark.parametrize("kind", [Kind.PAGES, Kind.FINISH])
@pytest.mark.parametrize(("at", "bit"), [(ROOM_AT, 2), (EPOCH_AT, 1), (KIND_AT, 2)])
def test_a_frame_whose_header_was_changed_leaves_no_room_waiting(
    ends: TcpEnds, kind: Kind, at: int, bit: int
) -> None:
    """Refused by its changed header alone, the frame would be missing from the room it was for."""
    ends.receiver.expect(1, 1, 2)
    good, data = pages_frame(), pages_frame()
    if kind is Kind.FINISH:
        data = whole_frame(Frame(Kind.FINISH, 1, 1), encode(FirstToken(5, 0, 2, 0)))
    data[at] ^= bit
    with raw_peer(ends.address) as (sock, connection):
        sock.sendall(data if kind is Kind.PAGES else good + data)
        until_lost(connection)
    assert ends.diary.finished == []
    still_serves(ends)


def test_a_refused_payload_is_read_over_and_the_next_frame_understood(ends: TcpEnds) -> None:
    ends.receiver.expect(2, 1, 2)
    with raw_peer(ends.address) as (sock, connection):
        sock.sendall(pages_frame(room=1) + pages_frame(room=2))
        assert nack_of(connection).message.startswith("unknown_room")
        ends.until(lambda: bool(ends.diary.pages))
    assert [room for room, _, _ in ends.diary.pages] == [2]


def test_frames_that_come_byte_by_byte_are_understood(ends: TcpEnds) -> None:
    ends.receiver.expect(1, 1, 1)
    with raw_peer(ends.address) as (sock, _):
        for byte in pages_frame(num_pages=1):
            sock.send(bytes([byte]))
        ends.until(lambda: bool(ends.diary.pages))
    assert (ends.diary.kv_of(1, 1, KV, 1) == logical_pages(1)).all()


@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_foreign_bytes_end_their_connection_only(ends: TcpEnds, data: bytes) -> None:
    for greeted in (False, True):
        with raw_peer(ends.address, greeted) as (sock, _):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
    assert ends.diary.pages == []


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_header_never_delivers_anything(ends: TcpEnds, at: int, xor: int) -> None:
    ends.receiver.forget(1)
    ends.receiver.expect(1, 1, 2)
    data = pages_frame()
    data[at] ^= xor
    with raw_peer(ends.address) as (sock, _):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass
    assert ends.diary.pages == []


def test_the_receiver_serves_on_after_hostile_connections(ends: TcpEnds) -> None:
    with raw_peer(ends.address, greeted=False) as (sock, _):
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        still_serves(ends)
    ends.until(lambda: ends.receiver.counters["connections_refused"] == 1)


def test_pages_before_the_handshake_are_not_taken(ends: TcpEnds) -> None:
    ends.receiver.expect(1, 1, 2)
    with raw_peer(ends.address, greeted=False) as (sock, connection):
        sock.sendall(pages_frame())
        assert connection.receive_small()[0].kind is Kind.CHALLENGE
        with pytest.raises(PeerLost):
            connection.receive_small()
    assert ends.diary.pages == []


def test_a_wrong_token_is_refused_by_both_sides(ends: TcpEnds) -> None:
    stranger = Security("another-token-of-the-tests")
    with raw_peer(ends.address, greeted=False) as (_, connection), pytest.raises(PeerLost):
        introduce(connection, stranger, "stranger")
    # A receiver that does not know the token cannot welcome a sender that knows it.
    left, right = socket.socketpair()
    mine, theirs = Connection(left, PATIENCE_S), Connection(right, PATIENCE_S)
    theirs.send(Frame(Kind.CHALLENGE), bytes(32))
    theirs.send(Frame(Kind.WELCOME), encode(Welcome(bytes(32))))
    with pytest.raises(Unauthenticated, match="receiver"):
        introduce(mine, SECURITY, "prefill-0")
    mine.close()
    theirs.close()


@pytest.mark.parametrize("refusal", [RuntimeError("can't start new thread"), MemoryError()])
def test_the_receiver_serves_on_after_it_could_have_no_more_threads_or_memory(
    ends: TcpEnds, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("pages from"):
            raise refusal
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with raw_peer(ends.address, greeted=False) as (_, connection):
            until_lost(connection)
    still_serves(ends)


def test_a_host_that_is_gone_while_no_room_is_open_is_noticed_by_the_kernel(ends: TcpEnds) -> None:
    with raw_peer(ends.address) as (sock, _):  # the sender uses the same class
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10


# --- silence ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [10, HEADER_BYTES, HEADER_BYTES + 50])
def test_a_frame_that_stops_in_the_middle_loses_its_room(
    open_ends: Callable[..., TcpEnds], cut: int
) -> None:
    ends = open_ends(stall_timeout_s=STALL_S)
    ends.receiver.expect(1, 1, 4)
    with raw_peer(ends.address) as (sock, _):
        sock.sendall(pages_frame() + pages_frame(page_start=2)[:cut])
        ends.until(lambda: bool(ends.diary.lost))
    assert ends.diary.lost == [(1,)]


def test_a_sender_without_a_sign_of_life_loses_its_rooms(
    open_ends: Callable[..., TcpEnds],
) -> None:
    ends = open_ends(stall_timeout_s=STALL_S)
    ends.receiver.expect(1, 1, 4)
    with raw_peer(ends.address) as (sock, _):
        sock.sendall(pages_frame())
        ends.until(lambda: bool(ends.diary.lost))
    assert ends.diary.lost == [(1,)]


def test_a_prefill_that_computes_for_long_is_not_taken_for_dead(
    open_ends: Callable[..., TcpEnds],
) -> None:
    ends = open_ends(stall_timeout_s=FROZEN_S)
    ends.receiver.expect(1, 1, 4)
    ends.send_room(1, logical_pages(4)[:, :, :2], finish=False)
    ends.until(lambda: bool(ends.diary.pages))
    # Three pings are sent per stall timeout, so at twelve, four timeouts have passed.
    ends.until(lambda: ends.receiver.counters["pings"] >= 12)
    assert ends.diary.lost == []
    assert ends.diary.events == []


def test_a_sender_that_was_heard_all_the_time_is_not_taken_for_dead_in_its_first_pause(
    open_ends: Callable[..., TcpEnds], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode reads more slowly than data arrives, so there is always more to read."""
    clock = ManualClock()
    monkeypatch.setattr(tcp, "SYSTEM_CLOCK", clock)
    ends = open_ends(stall_timeout_s=STALL_S)
    ends.receiver.expect(1, 1, 100)
    asked_busy = threading.Semaphore(0)
    assert isinstance(ends.receiver, TcpReceiver)
    is_busy = ends.receiver.busy

    def busy(connection: Any) -> bool:
        asked_busy.release()
        return is_busy(connection)

    def slowly(event: ReceiverEvent) -> None:
        clock.advance(STALL_S / 20)
        ends.diary.on_receiver_event(event)

    monkeypatch.setattr(ends.receiver, "busy", busy)
    monkeypatch.setattr(ends.receiver, "_on_event", slowly)
    with raw_peer(ends.address) as (sock, connection):
        sock.sendall(b"".join(pages_frame(num_pages=1, page_start=page) for page in range(40)))
        ends.until(lambda: len(ends.diary.pages) == 40)
        while asked_busy.acquire(blocking=False):
            pass
        # When a third wait begins, the current one and one more are over.
        assert asked_busy.acquire(timeout=PATIENCE_S)
        assert asked_busy.acquire(timeout=PATIENCE_S)
        connection.send(Frame(Kind.PING))
        assert connection.receive_small()[0].kind is Kind.PONG
        assert ends.diary.lost == []


@contextlib.contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    """A hand-made receiver: its socket and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_a_receiver_that_answers_nothing_loses_the_room(
    open_ends: Callable[..., TcpEnds],
) -> None:
    ends = open_ends(stall_timeout_s=STALL_S)
    with listening() as (_, address):
        ends.sender.finish(a_grant(1, address, 0), FirstToken(0, 0, 0))
        ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("lost", 1)]


def test_a_sender_gives_signs_of_life_as_often_as_its_receiver_expects_them(ends: TcpEnds) -> None:
    """The receiver's --stall-timeout is shorter than the sender's."""
    with listening() as (listener, address):
        ends.sender.finish(a_grant(1, address, 0), FirstToken(0, 0, 0))
        peer = Connection(listener.accept()[0], PATIENCE_S)
        greet(peer, SECURITY, STALL_S)
        until_s = SYSTEM_CLOCK.monotonic_s() + PATIENCE_S
        pings = 0
        while pings < 12:
            pings += peer.receive_small()[0].kind is Kind.PING
            peer.send(Frame(Kind.PONG))
            assert SYSTEM_CLOCK.monotonic_s() < until_s
        peer.close()


def test_a_receiver_that_falls_silent_between_two_rooms_loses_the_second(
    open_ends: Callable[..., TcpEnds],
) -> None:
    """Frames are sent by the threads that bring them, while the connection's own thread sleeps."""
    ends = open_ends(stall_timeout_s=STALL_S)
    with listening() as (listener, address):
        ends.sender.finish(a_grant(1, address, 0), FirstToken(0, 0, 0))
        peer = Connection(listener.accept()[0], PATIENCE_S)
        greet(peer, SECURITY, STALL_S)
        while peer.receive_small()[0].kind is not Kind.FINISH:
            pass
        peer.send(Frame(Kind.ACK, 1))
        ends.until(lambda: bool(ends.diary.events))
        ends.sender.finish(a_grant(2, address, 0), FirstToken(0, 0, 0))
        ends.until(lambda: len(ends.diary.events) == 2)
        peer.close()
    assert ends.diary.kinds() == [("acked", 1), ("lost", 2)]


# --- processes that die or freeze -----------------------------------------------------------------

RECEIVER = receiving("transfer.tcp.TcpReceiver")
SENDER = sending("transfer.tcp.TcpSender")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiving_process_that_is_killed_or_frozen_loses_the_room(
    open_ends: Callable[..., TcpEnds], how: signal.Signals
) -> None:
    ends = open_ends(stall_timeout_s=FROZEN_S if how is signal.SIGSTOP else NEVER_S)
    with child(RECEIVER) as process:
        ends.address = said(process)
        ends.send_room(1, logical_pages(4)[:, :, :2], finish=False)
        assert said(process) == "PagesArrived"
        os.kill(process.pid, how)
        ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("lost", 1)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sending_process_that_is_killed_or_frozen_loses_the_room(
    open_ends: Callable[..., TcpEnds], how: signal.Signals
) -> None:
    ends = open_ends(stall_timeout_s=FROZEN_S if how is signal.SIGSTOP else NEVER_S)
    ends.receiver.expect(1, 1, 4)
    with child(SENDER, ends.address) as process:
        ends.until(lambda: bool(ends.diary.pages))
        os.kill(process.pid, how)
        ends.until(lambda: bool(ends.diary.lost))
    assert ends.diary.lost == [(1,)]


# --- TLS, addresses -------------------------------------------------------------------------------


def test_tls_carries_pages(open_ends: Callable[..., TcpEnds], tls_security: Security) -> None:
    ends = open_ends(sender_security=tls_security, receiver_security=tls_security)
    ends.receiver.expect(1, 1, 300)
    pages = logical_pages(300)  # more than a socket's buffers hold
    ends.send_room(1, pages, runs_of=100)
    ends.until(lambda: bool(ends.diary.finished))
    assert (ends.diary.kv_of(1, 300, KV, 1) == pages).all()
    ends.receiver.ack(1)
    ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("acked", 1)]


@pytest.mark.parametrize("sender_has_it", [True, False])
def test_tls_on_one_side_only_carries_nothing(
    open_ends: Callable[..., TcpEnds], tls_security: Security, sender_has_it: bool
) -> None:
    sides = (tls_security, SECURITY) if sender_has_it else (SECURITY, tls_security)
    ends = open_ends(sender_security=sides[0], receiver_security=sides[1], stall_timeout_s=STALL_S)
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2))
    ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("lost", 1)]
    assert ends.diary.pages == []


def test_a_port_in_use_is_a_config_error_that_names_it(ends: TcpEnds) -> None:
    host, port = parse_address(ends.address)
    second = TcpReceiver(SECURITY, host, port, KV, 1, print)
    with pytest.raises(ConfigError, match=str(port)):
        second.start()


class Exhausted(socket.socket):
    """A listening socket of a process that has run out of open files, for a while."""

    failures = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_connection_that_cannot_be_taken_is_not_the_last(ends: TcpEnds) -> None:
    listener = Exhausted(socket.AF_INET)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    assert isinstance(ends.receiver, TcpReceiver)
    ends.receiver.listen(listener, ends.receiver.feeder)
    with raw_peer(f"tcp://127.0.0.1:{listener.getsockname()[1]}") as (sock, _):
        ends.receiver.expect(1, 1, 2)
        sock.sendall(pages_frame())
        ends.until(lambda: len(ends.diary.pages) == 1)
    assert not listener.failures


def test_an_address_of_another_scheme_loses_the_room(ends: TcpEnds) -> None:
    ends.sender.finish(a_grant(1, "udp://127.0.0.1:1", 0), FirstToken(0, 0, 0))
    ends.until(lambda: bool(ends.diary.events))
    assert ends.diary.kinds() == [("lost", 1)]
    assert "udp://127.0.0.1:1" in ends.diary.events[0].message


def test_a_large_room_passes_buffers_of_every_size(ends: TcpEnds) -> None:
    pages = logical_pages(2000)  # 1 MB: several chunks, and many times the read-ahead
    ends.receiver.expect(1, 1, 2000)
    ends.send_room(1, pages, runs_of=700)
    ends.until(lambda: bool(ends.diary.finished))
    assert (ends.diary.kv_of(1, 2000, KV, 1) == pages).all()
