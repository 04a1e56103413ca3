"""One data connection: who may send when, and what happens to bytes the kernel does not take."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from decode.config import DecodeConfig
from tests.transfer.samples import PATIENCE_S
from transfer import framing
from transfer.backend import Frame, Kind, without_payload
from transfer.checks import MAX_TIMEOUT_S
from transfer.clock import ManualClock
from transfer.errors import ConfigError, PeerLost
from transfer.framing import Connection
from transfer.handshake import client_context, server_context
from transfer.rpc import Security

Pair = tuple[Connection, Connection]


@pytest.fixture(params=[socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both ends of a connection."""
    if request.param == socket.AF_UNIX:
        left, right = socket.socketpair(socket.AF_UNIX)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            left = socket.create_connection(listener.getsockname(), PATIENCE_S)
            right = listener.accept()[0]
    mine, theirs = Connection(left, PATIENCE_S), Connection(right, PATIENCE_S)
    with contextlib.closing(mine), contextlib.closing(theirs):
        yield mine, theirs


def a_frame(room: int, meta_bytes: int = 100) -> bytes:
    return without_payload(Frame(Kind.FINISH, room), bytes([room % 251]) * meta_bytes)


def rooms_of(connection: Connection, num: int) -> list[int]:
    """The rooms of the next frames, each checked to be whole and to have its own meta."""
    found = []
    for _ in range(num):
        frame, meta = connection.receive_small()
        assert set(meta) == {frame.room % 251}
        found.append(frame.room)
    return found


def fill(connection: Connection) -> int:
    """Send until nothing more is taken at once. Returns the number of frames."""
    num = 0
    while connection.try_send(a_frame(num, 60_000)):
        num += 1
    return num


def test_a_full_connection_takes_nothing_and_loses_nothing(pair: Pair) -> None:
    mine, theirs = pair
    num = fill(mine)
    assert num > 1
    assert not mine.try_send(a_frame(num))
    waiting = threading.Thread(target=mine.send_whole, args=(a_frame(num),))
    waiting.start()  # it queues after the frame that was taken in part
    assert rooms_of(theirs, num + 1) == list(range(num + 1))
    waiting.join(PATIENCE_S)
    assert mine.try_send(a_frame(1))
    assert rooms_of(theirs, 1) == [1]


def test_the_owner_is_woken_for_what_was_taken_in_part_and_flushes_it(pair: Pair) -> None:
    mine, theirs = pair
    num = fill(mine)

    def own() -> None:
        # Longer than the test's patience: the owner must be woken.
        if not mine.wait(3 * PATIENCE_S):
            mine.flush()

    owner = threading.Thread(target=own, daemon=True)
    owner.start()
    assert rooms_of(theirs, num) == list(range(num))
    owner.join(PATIENCE_S)
    assert not owner.is_alive()


def test_frames_stay_whole_whichever_threads_send_them(pair: Pair) -> None:
    mine, theirs = pair
    num, threads = 300, 3

    def send(first: int) -> None:
        for room in range(first, first + num):
            data = a_frame(room)
            if not mine.try_send(data):
                mine.send_whole(data)

    senders = [threading.Thread(target=send, args=(at * num,)) for at in range(threads)]
    for thread in senders:
        thread.start()
    found = rooms_of(theirs, num * threads)
    for thread in senders:
        thread.join(PATIENCE_S)
    assert sorted(found) == list(range(num * threads))
    for at in range(threads):  # each thread's frames keep their order
        mine_of = [room for room in found if at * num <= room < (at + 1) * num]
        assert mine_of == sorted(mine_of)


def test_nothing_can_be_sent_on_a_connection_that_is_closed_or_lost(pair: Pair) -> None:
    mine, theirs = pair
    theirs.close()
    while mine.try_send(a_frame(1)):  # until this end notices
        pass
    with pytest.raises(PeerLost):
        mine.receive()
    mine.close()
    assert not mine.try_send(a_frame(1))


def test_what_came_by_tls_before_a_shutdown_is_still_read_by_tls(tls_security: Security) -> None:
    """Otherwise a receiver that closes amid pages would call its sender's bytes damaged."""
    context = server_context(tls_security), client_context(tls_security)
    assert context[0] is not None
    assert context[1] is not None
    left, right = socket.socketpair()
    right = context[0].wrap_socket(right, server_side=True, do_handshake_on_connect=False)
    shaking = threading.Thread(target=right.do_handshake)
    shaking.start()
    left = context[1].wrap_socket(left, server_hostname="localhost")
    shaking.join(PATIENCE_S)
    mine, theirs = Connection(right, PATIENCE_S), Connection(left, PATIENCE_S)
    with contextlib.closing(mine), contextlib.closing(theirs):
        theirs.send_whole(a_frame(1))
        assert mine.wait(PATIENCE_S)
        mine.shutdown()
        assert rooms_of(mine, 1) == [1]
        with pytest.raises(PeerLost):
            mine.receive()


def test_frames_that_follow_at_once_are_waited_for_as_others(pair: Pair) -> None:
    """The wait after a short one begins by polling; neither polling nor sleeping misses a frame."""
    mine, theirs = pair
    rounds = 200

    def answer() -> None:
        for _ in range(rounds):
            assert theirs.wait(PATIENCE_S)
            theirs.send_whole(a_frame(rooms_of(theirs, 1)[0]))

    answering = threading.Thread(target=answer)
    answering.start()
    for room in range(rounds):
        mine.send_whole(a_frame(room))
        assert mine.wait(PATIENCE_S)
        assert rooms_of(mine, 1) == [room]
    answering.join(PATIENCE_S)
    assert not mine.wait(0.001)
    mine.wake()
    assert not mine.wait(PATIENCE_S)


def test_nothing_overtakes_the_rest_of_a_frame(pair: Pair) -> None:
    mine, theirs = pair
    num = fill(mine)
    assert mine._rest
    assert rooms_of(theirs, num - 1) == list(range(num - 1))  # the kernel has room again
    assert not mine.try_send(a_frame(num))
    mine.flush()
    assert mine.try_send(a_frame(num))
    assert rooms_of(theirs, 2) == [num - 1, num]


def test_a_handshakes_deadline_ends_with_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(framing, "SYSTEM_CLOCK", clock)
    mine, theirs = pair
    with mine.all_within(5.0):
        theirs.send_whole(a_frame(1))
        assert rooms_of(mine, 1) == [1]
    clock.advance(6.0)
    theirs.send_whole(a_frame(2))
    assert rooms_of(mine, 1) == [2]


def test_a_stall_timeout_is_refused_unless_a_connection_can_wait_for_so_long() -> None:
    with pytest.raises(ConfigError, match="--stall-timeout must be at most 1000000, got"):
        DecodeConfig(Path("model"), "127.0.0.1:1", stall_timeout_s=1e7)
    mine, theirs = (Connection(sock, MAX_TIMEOUT_S) for sock in socket.socketpair())
    with contextlib.closing(mine), contextlib.closing(theirs):
        mine.wake()
        assert not mine.wait(MAX_TIMEOUT_S)
