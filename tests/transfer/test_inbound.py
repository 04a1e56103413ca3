"""What a room's connections still owe, and heads that several threads put together."""

import numpy as np
import pytest

from tests.transfer.samples import KV
from transfer.backend import Frame, Kind, PagesArrived, Source
from transfer.errors import FrameRefused
from transfer.inbound import HeadCopy, Inbound


class Connection:
    """Of a sender's node, which gets no answers."""

    def __init__(self, node: int = 0) -> None:
        self.source = Source("prefill-0", node)

    def reply(self, frame: Frame, meta: bytes = b"") -> None:
        raise AssertionError("rooms answer, not their rules")


def pages_frame(first_head: int, num_heads: int = 2) -> Frame:
    """Some heads of the only two pages of room 1."""
    num_bytes = 2 * KV.page_bytes * num_heads // KV.num_kv_heads
    return Frame(Kind.PAGES, 1, 1, 0, 2, 0, first_head, num_heads, 0, num_bytes)


def begun(inbound: Inbound, connection: Connection, first_head: int) -> HeadCopy:
    frame = pages_frame(first_head)
    inbound.check(frame, connection)
    copy = inbound.pages(frame, connection, np.full(frame.payload_len, first_head, np.uint8))
    assert isinstance(copy, HeadCopy)
    return copy


@pytest.mark.parametrize("came_before", [True, False])
def test_a_connection_owes_nothing_of_a_room_that_was_refused(came_before: bool) -> None:
    inbound, connection = Inbound(KV, 1), Connection()
    inbound.expect(1, 1, 2)
    if came_before:
        begun(inbound, connection, 0)
        assert inbound.owes(connection)
    inbound.spoil(pages_frame(0), connection)
    inbound.spoil(pages_frame(0), connection)
    assert not inbound.owes(connection)
    with pytest.raises(FrameRefused, match="order: the room was refused before"):
        inbound.check(pages_frame(2), connection)
    inbound.check(Frame(Kind.CANCEL, 1, 1), connection)  # as its sender does
    assert not inbound.owes(connection)
    inbound.expect(2, 1, 1)
    inbound.check(Frame(Kind.FINISH, 2, 1), connection)
    inbound.forget(1)
    assert inbound.owes(connection), "of the other room"


def test_a_run_is_whole_when_its_last_copy_is_made() -> None:
    inbound, one, other = Inbound(KV, 1), Connection(0), Connection(1)
    inbound.expect(1, 1, 2)
    copies = [begun(inbound, one, 0), begun(inbound, other, 2)]
    with pytest.raises(FrameRefused, match="replayed"):
        inbound.check(pages_frame(0), one)
    copies[1].make()
    assert inbound.copied(copies[1]) is None, "the other one is not made"
    copies[0].make()
    arrived = inbound.copied(copies[0])
    assert isinstance(arrived, PagesArrived)
    heads = arrived.shards[0].view(np.uint8).reshape(-1, 4, 16)
    assert (heads[:, :2] == 0).all()
    assert (heads[:, 2:] == 2).all()


@pytest.mark.parametrize("how", ["forgotten", "refused", "lost"])
def test_a_copy_into_a_room_that_ends_meanwhile_brings_nothing(how: str) -> None:
    inbound, connection = Inbound(KV, 1), Connection()
    inbound.expect(1, 1, 2)
    first = begun(inbound, connection, 0)
    first.make()
    assert inbound.copied(first) is None
    last = begun(inbound, connection, 2)
    match how:
        case "forgotten":
            inbound.forget(1)
        case "refused":
            inbound.spoil(pages_frame(0), connection)
        case "lost":
            assert inbound.left(connection) == (1,)
    last.make()
    assert inbound.copied(last) is None
    assert not inbound.owes(connection)
