"""What TCP ends keep account of: rooms owed, connections open, and silence."""

import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.transfer_ends import TcpEnds
from tests.transfer.samples import PATIENCE_S, SECURITY, logical_pages
from tests.transfer.test_tcp import raw_peer, still_serves
from transfer import handshake, open_files, tcp
from transfer.backend import Frame, Kind
from transfer.clock import ManualClock
from transfer.complaint import Complaints
from transfer.errors import PeerLost
from transfer.framing import FILES, Connection
from transfer.handshake import introduce, parse_address
from transfer.rpc import Security
from transfer.tcp import TcpLane, TcpReceiver


@pytest.fixture
def ends() -> Iterator[TcpEnds]:
    made = TcpEnds()
    yield made
    made.close()


def test_what_keeps_a_peer_out_is_told_once_at_either_end_until_it_is_let_in(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = TcpEnds(sender_security=Security("another-token-of-the-tests"))
    try:
        for room in (1, 2, 3):
            stranger.receiver.expect(room, 1, 2)
            stranger.send_room(room, logical_pages(2))
            stranger.until(lambda: len(stranger.diary.events) == room)  # noqa: B023
            counters = stranger.receiver.counters
            stranger.until(lambda: counters["connections_refused"] == room)  # noqa: B023
    finally:
        stranger.close()
    assert caplog.text.count("page connection refused: 127.0.0.1: ") == 1
    assert caplog.text.count(f"no page connection: {stranger.address}: ") == 1
    complaint = Complaints(tcp.log, "refused").of("10.0.0.3")
    clock = ManualClock()
    monkeypatch.setattr("transfer.complaint.SYSTEM_CLOCK", clock)
    for _ in range(2):
        complaint.tell("the token is wrong")
        complaint.settle()
        clock.advance(1.0)
    assert caplog.text.count("refused: 10.0.0.3: the token is wrong") == 2
    for number in range(100):  # a different message each time: at most one line per second
        complaint.tell(f"a frame begins with {number}")
        clock.advance(0.1)
    assert caplog.text.count("refused: 10.0.0.3: a frame begins with") == 10


def test_a_connection_owes_nothing_once_its_rooms_are_over(ends: TcpEnds) -> None:
    ends.receiver.expect(1, 1, 2)
    ends.send_room(1, logical_pages(2))
    ends.until(lambda: bool(ends.diary.finished))
    receiver = ends.receiver
    assert isinstance(receiver, TcpReceiver)
    (feeder,) = receiver._connections
    assert not receiver.busy(feeder)
    ends.receiver.expect(2, 1, 4)
    ends.send_room(2, logical_pages(4)[:, :, :2], finish=False)
    ends.until(lambda: len(ends.diary.pages) == 2)
    assert receiver.busy(feeder)
    ends.receiver.forget(2)
    assert not receiver.busy(feeder)


LONG_S = 1000.0  # nothing ends within it by itself


@pytest.fixture
def long_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", LONG_S)
    monkeypatch.setattr(handshake, "TLS_TIMEOUT_S", LONG_S)


@pytest.fixture
def patient(long_handshakes: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpEnds]:
    """Ends that let a silent peer stay, and eight of a host."""
    monkeypatch.setattr(tcp, "MAX_STRANGERS_OF_HOST", 8)
    made = TcpEnds(stall_timeout_s=LONG_S)
    yield made
    made.close()


def knock(stack: contextlib.ExitStack, ends: TcpEnds, host: str = "127.0.0.2") -> socket.socket:
    """A connection from this host that has said nothing yet."""
    sock = socket.create_connection(
        parse_address(ends.address), PATIENCE_S, source_address=(host, 0)
    )
    return stack.enter_context(contextlib.closing(sock))


def ended(sock: socket.socket) -> bool:
    """Read until the receiver ends the connection."""
    while sock.recv(4096):
        pass
    return True


def test_the_oldest_silent_stranger_of_a_host_gives_way_to_whoever_comes_from_there(
    patient: TcpEnds,
) -> None:
    ends, counters = patient, patient.receiver.counters
    with contextlib.ExitStack() as stack:
        silent = [knock(stack, ends) for _ in range(8)]
        assert all(sock.recv(1) for sock in silent), "each is asked for the token"
        with raw_peer(ends.address):  # from another host
            assert counters["connections_over_limit"] == 0
        honest = Connection(knock(stack, ends), PATIENCE_S)
        introduce(honest, SECURITY, "prefill-0")
        assert ended(silent[0])
        assert counters["connections_over_limit"] == 1
        assert counters["connections_refused"] == 0
        honest.close()
    still_serves(ends)


def test_a_stranger_that_is_silent_where_tls_begins_gives_way_too(
    tls_security: Security, long_handshakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "MAX_STRANGERS_OF_HOST", 2)
    with contextlib.ExitStack() as stack:
        ends = stack.enter_context(
            contextlib.closing(
                TcpEnds(sender_security=tls_security, receiver_security=tls_security)
            )
        )
        silent = [knock(stack, ends, "127.0.0.1") for _ in range(3)]
        assert ended(silent[0])
        still_serves(ends)
        assert ended(silent[1])
        assert ends.receiver.counters["connections_refused"] == 0


def test_a_receiver_that_closes_lets_go_of_strangers_too(patient: TcpEnds) -> None:
    with contextlib.ExitStack() as stack:
        silent = knock(stack, patient)
        assert silent.recv(1), "it is asked for the token"
        patient.receiver.close()
        assert ended(silent)


@pytest.mark.parametrize("few", ["threads", "files"])
def test_there_are_no_more_connections_than_threads_are_wanted_or_files_there(
    few: str, long_handshakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few == "threads":
        monkeypatch.setattr(tcp, "MAX_CONNECTIONS", 2)
    else:
        monkeypatch.setattr(open_files, "limit", lambda: 4 * 2 * FILES)
    with contextlib.ExitStack() as stack:
        ends = stack.enter_context(contextlib.closing(TcpEnds(stall_timeout_s=LONG_S)))
        silent = knock(stack, ends)
        with raw_peer(ends.address) as (_, first):
            with raw_peer(ends.address):
                assert ended(silent)
                with pytest.raises(PeerLost), raw_peer(ends.address):
                    pass
            first.send(Frame(Kind.PING))
            assert first.receive_small()[0].kind is Kind.PONG
        assert ends.receiver.counters["connections_over_limit"] == 2
        receiver: Any = ends.receiver
        ends.until(lambda: not receiver._connections)
        with raw_peer(ends.address):
            pass


def test_a_process_that_stood_still_does_not_take_its_sender_for_dead(
    ends: TcpEnds, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender may have stood still too, as in a paused machine, with its PING on the way."""
    receiver: Any = ends.receiver
    monkeypatch.setattr(receiver, "busy", lambda _: True)
    with socket.socket() as unused:
        feeder = tcp.TcpFeeder(receiver, unused, "prefill-0")

        def waits(took_s: float) -> bool:
            def wait(_: float) -> bool:
                clock.advance(took_s)
                return False

            return feeder._awaited(SimpleNamespace(wait=wait))  # type: ignore[arg-type]

        stall_s = receiver.stall_timeout_s
        for pause_s in (0.9 * stall_s, 10 * stall_s):
            feeder._heard_s = clock.monotonic_s()  # a PING arrives
            assert not waits(0.3 * stall_s)
            assert not waits(pause_s)
        feeder._heard_s = clock.monotonic_s()
        for _ in range(3):
            assert not waits(0.3 * stall_s)
        with pytest.raises(PeerLost):
            waits(0.3 * stall_s)


def test_connections_that_ended_are_not_counted_against_the_most(ends: TcpEnds) -> None:
    receiver = ends.receiver
    assert isinstance(receiver, TcpReceiver)
    with raw_peer(ends.address):
        ends.until(lambda: len(receiver._connections) == 1)
    ends.until(lambda: not receiver._connections)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    made = ManualClock()
    monkeypatch.setattr(tcp, "SYSTEM_CLOCK", made)
    return made


def test_a_sign_of_life_that_was_asked_for_is_owed_even_if_the_room_ends_meanwhile(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next room would be the one to find the connection dead, and be lost."""
    asked: list[Any] = []
    is_answered = False
    connection: Any = SimpleNamespace(
        wait=lambda _: is_answered,
        send=asked.append,
        receive_small=lambda: (Frame(Kind.PONG), b""),
    )
    sender: Any = SimpleNamespace(stall_timeout_s=3.0, clock=clock)
    lane = TcpLane(sender, "tcp://127.0.0.1:1")
    monkeypatch.setattr(lane, "_send_next", lambda _: None)

    def room_that_ends() -> None:
        lane.rooms[1] = 1
        lane._turn(connection)
        del lane.rooms[1]

    room_that_ends()
    is_answered = True
    lane._turn(connection)
    is_answered = False
    clock.advance(10.0)
    lane._turn(connection)  # nothing is owed, and none is asked for without a room
    assert len(asked) == 1
    room_that_ends()
    for _ in range(2):
        clock.advance(1.0)
        lane._turn(connection)
    clock.advance(1.0)
    with pytest.raises(PeerLost):
        lane._turn(connection)
    assert len(asked) == 2


@pytest.mark.parametrize("sent_s", [0.0, 5.0])
def test_a_silent_receiver_is_lost_within_its_time_and_the_time_it_took_bytes_is_no_silence(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, sent_s: float
) -> None:
    asked: list[Any] = []
    connection: Any = SimpleNamespace(wait=lambda _: False, send=asked.append)
    sender: Any = SimpleNamespace(stall_timeout_s=3.0, clock=clock)
    lane = TcpLane(sender, "tcp://127.0.0.1:1")
    lane.rooms[1] = 1
    monkeypatch.setattr(lane, "_send_next", lambda _: sent_s or None)
    for _ in range(3 if not sent_s else 20):
        lane._turn(connection)
        clock.advance(sent_s or 1.0)
    assert asked
    if sent_s:  # it takes the bytes, however slowly
        return
    with pytest.raises(PeerLost):
        lane._turn(connection)
