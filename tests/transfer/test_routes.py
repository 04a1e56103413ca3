"""Rooms and ranks: news that arrives twice, late or never, and a table that stays small."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer import wire
from transfer.errors import BadMessage
from transfer.routes import RouteNews, RouteTable


def news(
    worker_id: str = "prefill-0",
    epoch: int = 1,
    number: int = 1,
    bound: dict[int, int] | None = None,
    ended: tuple[int, ...] = (),
    whole: bool = False,
) -> wire.Routes:
    bound = bound or {}
    rooms, ranks = wire.pack_i64(list(bound)), wire.pack_i32(list(bound.values()))
    return wire.Routes(worker_id, epoch, number, rooms, ranks, wire.pack_i64(ended), whole)


def found(table: RouteTable, *rooms: int, epoch: int = 1) -> list[int | None]:
    return [table.get("prefill-0", epoch, room) for room in rooms]


def test_a_room_is_found_by_the_life_that_bound_it_until_it_ends() -> None:
    table = RouteTable()
    assert table.apply(news(bound={7: 2, 8: 0}), 0.0)
    assert found(table, 7, 8, 9) == [2, 0, None]
    assert found(table, 7, epoch=2) == [None]
    assert table.get("prefill-1", 1, 7) is None
    table.apply(news(number=2, ended=(7,)), 0.0)
    assert found(table, 7, 8) == [None, 0]
    assert len(table) == 1


def test_a_route_that_nobody_ends_is_forgotten_in_time() -> None:
    table = RouteTable(ttl_s=10.0)
    table.apply(news(bound={7: 2}), 0.0)
    table.apply(news(number=2, bound={8: 2}), 5.0)
    assert table.expire(9.9) == 0
    assert table.expire(10.0) == 1
    assert found(table, 7, 8) == [None, 2]
    table.apply(news(number=3, ended=(8,)), 8.0)
    table.expire(17.9)
    assert [told.worker_id for told in table.snapshot()] == ["prefill-0"]
    table.expire(18.0)  # nobody says when a worker is gone for good
    assert table.snapshot() == []
    assert table.apply(news(number=4, bound={9: 1}), 18.0)
    assert found(table, 9) == [1]


def test_a_full_table_forgets_the_oldest_whoever_has_it() -> None:
    table = RouteTable(max_rooms=3)
    table.apply(news(bound={1: 0, 2: 0}), 0.0)
    table.apply(news("prefill-1", bound={3: 1}), 1.0)
    table.apply(news(number=2, bound={4: 0}), 2.0)
    assert found(table, 1, 2, 4) == [None, 0, 0]
    table.apply(news("prefill-1", number=2, bound={5: 1, 6: 1}), 3.0)
    assert found(table, 2, 4) == [None, 0]
    assert [table.get("prefill-1", 1, room) for room in (3, 5, 6)] == [None, 1, 1]
    assert len(table) == 3


def test_a_later_life_takes_all_of_the_earlier_one_away() -> None:
    table = RouteTable()
    table.apply(news(bound={7: 2}), 0.0)
    table.apply(news(epoch=2, bound={8: 1}), 0.0)
    assert found(table, 7, 8, epoch=2) == [None, 1]
    assert not table.apply(news(epoch=1, number=9, bound={9: 0}), 0.0)
    assert len(table) == 1


def test_news_that_was_overtaken_or_comes_twice_changes_nothing() -> None:
    table = RouteTable()
    table.apply(news(number=2, bound={7: 2}), 0.0)
    assert not table.apply(news(number=2, ended=(7,)), 0.0)
    assert not table.apply(news(number=1, bound={8: 0}), 0.0)
    assert found(table, 7, 8) == [2, None]


def test_a_whole_message_replaces_and_never_adds() -> None:
    table = RouteTable()
    table.apply(news(bound={7: 2, 8: 0}), 0.0)
    table.apply(news(number=2, bound={8: 1}, whole=True), 0.0)
    assert found(table, 7, 8) == [None, 1]
    assert not table.apply(news(number=1, bound={7: 2, 8: 0}, whole=True), 0.0)
    assert len(table) == 1


def test_a_copy_made_of_a_snapshot_and_what_follows_is_alike() -> None:
    table, copy = RouteTable(), RouteTable()
    table.apply(news(number=4, bound={7: 2, 8: 0}), 0.0)
    table.apply(news("prefill-1", bound={3: 1}), 0.0)
    for message in table.snapshot():
        assert copy.apply(message, 0.0)
    last = news(number=5, bound={9: 3}, ended=(7,))
    assert table.apply(last, 0.0)
    assert copy.apply(last, 0.0)
    assert copy.snapshot() == table.snapshot()


def test_a_dropped_worker_leaves_nothing() -> None:
    table = RouteTable()
    table.apply(news(bound={7: 2}), 0.0)
    table.drop_others("prefill-0", 1)
    assert len(table) == 1
    table.drop_others("prefill-0", 2)
    assert len(table) == 0
    table.apply(news(epoch=2, bound={7: 2}), 0.0)
    table.drop("prefill-0")
    table.drop("prefill-9")
    assert len(table) == 0
    assert table.snapshot() == []


@pytest.mark.parametrize(
    ("rooms", "ranks", "named"),
    [
        (wire.pack_i64([1, 2]), wire.pack_i32([0]), "2 rooms to 1 ranks"),
        (b"1234", b"", "multiple of 8"),
        (wire.pack_i64([1]), wire.pack_i32([-1]), "rank -1"),
    ],
)
def test_malformed_news_is_refused_and_changes_nothing(
    rooms: bytes, ranks: bytes, named: str
) -> None:
    table = RouteTable()
    table.apply(news(bound={7: 2}), 0.0)
    with pytest.raises(BadMessage, match=named):
        table.apply(wire.Routes("prefill-0", 1, 2, rooms, ranks), 0.0)
    with pytest.raises(BadMessage, match="multiple of 8"):
        table.apply(wire.Routes("prefill-0", 1, 2, ended=b"123", whole=True), 0.0)
    assert found(table, 7) == [2]


def test_a_million_rooms_stay_within_the_bound_and_the_time() -> None:
    """Half of them are never ended. A room lives for ten of the thousand seconds."""
    most = 20_000
    table = RouteTable(max_rooms=most, ttl_s=10.0)
    counts = []
    for second in range(1000):
        rooms = range(second * 1000, (second + 1) * 1000)
        for worker in range(4):
            mine = {room: room % 8 for room in rooms[worker::4]}
            ended = tuple(room - 2000 for room in mine if room % 2)
            table.apply(
                news(f"prefill-{worker}", number=second + 1, bound=mine, ended=ended), float(second)
            )
        table.expire(float(second))
        counts.append(len(table))
    assert max(counts) <= most
    # Ten seconds of rooms that are never ended, and two seconds of those that end.
    assert counts[-1] == 10 * 500 + 2 * 500
    table.expire(1010.0)
    assert len(table) == 0


def test_a_table_that_nothing_expires_keeps_its_bound() -> None:
    table = RouteTable(max_rooms=1000, ttl_s=1e9)
    for number in range(1, 101):
        rooms = dict.fromkeys(range(number * 100, (number + 1) * 100), 0)
        table.apply(news(f"prefill-{number % 3}", number=number, bound=rooms), float(number))
    assert len(table) == 1000
    assert table.get("prefill-1", 1, 10_099) == 0


# --- what a worker sends ------------------------------------------------------------------------


def test_the_first_news_is_whole_and_then_only_what_is_new() -> None:
    told = RouteNews("prefill-0", 1)
    assert told.take() == news(whole=True)
    assert told.take() is None
    told.add([(7, 2)], [])
    told.add([(8, 0)], [7, 99])
    assert told.take() == news(number=2, bound={8: 0})
    told.add([], [8])
    assert told.take() == news(number=3, ended=(8,))
    assert told.take() is None


def test_all_that_is_live_is_told_again_and_nothing_that_ended() -> None:
    told = RouteNews("prefill-0", 1)
    told.take()
    told.add([(7, 2), (8, 0)], [])
    told.take()
    told.add([(9, 1)], [7])
    told.tell_all()
    assert told.take() == news(number=3, bound={8: 0, 9: 1}, whole=True)
    assert told.take() is None


events = st.lists(
    st.one_of(
        st.tuples(st.just("bind"), st.integers(0, 3)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("send"), st.booleans()),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("late"), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(events)
@settings(max_examples=200)
def test_however_messages_are_lost_doubled_or_late_the_end_is_what_is_live(
    played: list[tuple[str, int | bool | None]],
) -> None:
    """A publisher as in transfer.route_feeds, against a registry that may restart empty."""
    told, table = RouteNews("prefill-0", 1), RouteTable()
    sent: list[wire.Routes] = []
    next_room = 0
    for what, value in played:
        if what == "bind":
            told.add([(next_room, int(value or 0))], [])
            next_room += 1
        elif what == "end" and told.live:
            told.add([], [list(told.live)[int(value or 0) % len(told.live)]])
        elif what == "send":
            message = told.take()
            if message is not None:
                sent.append(message)
                if value:
                    table.apply(message, 0.0)
                else:  # the message or its reply was lost
                    told.tell_all()
        elif what == "restart":
            table.clear()
            told.tell_all()
        elif what == "late" and sent:
            table.apply(sent[int(value or 0) % len(sent)], 0.0)
    last = told.take()
    if last is not None:
        table.apply(last, 0.0)
    assert {room: found(table, room)[0] for room in told.live} == told.live
    if last is not None and last.whole:
        assert len(table) == len(told.live)
