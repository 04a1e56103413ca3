"""After a damaged frame: both ends have ended the connection before its rooms are tried again."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificate import made_security
from tests.contract.transfer_ends import TcpEnds
from tests.transfer.children import STALL_S
from tests.transfer.samples import PATIENCE_S, SECURITY
from tests.transfer.test_tcp import pages_frame, until_lost
from transfer.framing import Connection, connection_over
from transfer.handshake import client_context, introduce, parse_address
from transfer.rpc import Security
from transfer.tcp import TcpReceiver

_MORE_BYTES = 16 << 20  # more than the sockets hold, so all of it leaves only if it is read


@contextlib.contextmanager
def a_damaged_room(
    security: Security = SECURITY, stall_timeout_s: float = PATIENCE_S
) -> Iterator[tuple[TcpEnds, socket.socket, Connection]]:
    """A sender made by hand, whose second page of room 1 has come with a wrong digest."""
    ends = TcpEnds(receiver_security=security, stall_timeout_s=stall_timeout_s)
    damaged = pages_frame(num_pages=1, page_start=1)
    damaged[-1] ^= 1
    with contextlib.closing(ends):
        ends.receiver.expect(1, 1, 2)
        sock = socket.create_connection(parse_address(ends.address), PATIENCE_S)
        context = client_context(security)
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname="127.0.0.1")
        with connection_over(sock, PATIENCE_S) as connection:
            introduce(connection, security, "by hand")
            sock.sendall(pages_frame(num_pages=1) + damaged)
            until_lost(connection)
            yield ends, sock, connection
            connection.close()


@pytest.mark.parametrize("has_tls", [False, True])
def test_the_rooms_of_a_damaged_frame_are_told_lost_only_once_its_sender_ended_the_connection(
    tmp_path: Path, has_tls: bool
) -> None:
    """Tried again at once, a room would otherwise come by the connection that is about to end."""
    security = made_security(SECURITY.token, tmp_path) if has_tls else SECURITY
    with a_damaged_room(security) as (ends, sock, connection):
        if not has_tls:  # over TLS nothing more can be sent
            sock.sendall(bytes(_MORE_BYTES))
        ends.diary.order.append("the sender ends it")
        connection.shutdown()
        ends.until(lambda: ends.diary.lost == [(1,)])
    assert ends.diary.order == ["pages", "the sender ends it", "receiver lost"]


@pytest.mark.parametrize("sends_on", [False, True])
def test_a_sender_that_does_not_end_it_is_waited_for_as_long_as_one_that_hangs(
    sends_on: bool,
) -> None:
    with a_damaged_room(stall_timeout_s=STALL_S) as (ends, sock, _):
        while sends_on and ends.diary.lost == []:
            with contextlib.suppress(OSError):  # the receiver has had enough
                sock.sendall(b"x")
        ends.until(lambda: ends.diary.lost == [(1,)])


def test_a_receiver_that_is_closed_does_not_wait_for_senders() -> None:
    with a_damaged_room() as (ends, _, _):
        assert isinstance(ends.receiver, TcpReceiver)
        (feeder,) = ends.receiver._connections
        ends.receiver.close()
        feeder.thread.join(PATIENCE_S / 2)
        assert not feeder.thread.is_alive()
        assert ends.diary.lost == []
