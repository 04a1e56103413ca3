"""Seats in the columns: which streams have one, what the placement hears, when each token came."""

import re
from collections.abc import Iterable
from typing import Any, cast

import pytest

from serving import plain_streams
from serving.generation import Generation
from serving.router import Pair
from tests.serving.live import FIRST_BYTE, LETTER_A, SECOND_BYTE
from tests.serving.stepped import DECODE, OTHER, PREFILL, Crowd, turns
from transfer import wire

LATER_ROOM = 1 << 41


@pytest.fixture(autouse=True)
def _any_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_streams, "LEAST_STREAMS", 1)


class Told(Crowd):
    """Notes what its placement hears of each generation, as it is at that moment."""

    def __init__(self, num_streams: int, **more: Any) -> None:
        self.heard: list[tuple[str, int, int]] = []  # (what, which stream, its number of tokens)
        super().__init__(num_streams, 1, [None] * num_streams, **more)
        self.cluster.progressed = self._progressed  # type: ignore[method-assign]
        finish = self.cluster.finish

        def finished(generation: Generation) -> None:
            self._hear("finished", generation)
            finish(generation)

        self.cluster.finish = finished  # type: ignore[method-assign]

    def _progressed(self, generation: Generation) -> None:
        self._hear("progressed", generation)

    def _hear(self, what: str, generation: Generation) -> None:
        self.heard.append((what, self.generations.index(generation), len(generation.token_ids)))

    def rows(self, idx: int, which: Iterable[int] = (0,), finish: int = 0) -> Any:
        return [(self.generations[at].room, idx, LETTER_A + idx, finish) for at in which]

    def gaps(self) -> tuple[float, float]:
        """How many gaps between tokens were noted, and their sum in seconds."""
        text = self.metrics.own_text().decode()
        name = "kvferry_inter_token_latency_seconds"
        count, total_s = (
            float(re.search(rf"^{name}_{which} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]
            for which in ("count", "sum")
        )
        return count, total_s


async def test_gaps_are_those_between_tokens_however_they_were_told() -> None:
    told = Told(1)
    stream = told.streams[0]
    await told.tell(PREFILL, told.rows(0))
    # Told by its own stream; seated; in the columns twice; given back, and told by its own again.
    for idx, pause_s in ((1, 1.0), (2, 2.0), (3, 4.0)):
        told.clock.advance(pause_s)
        await told.tell(DECODE, told.rows(idx))
        assert told.num_lent == 1
    assert told.gaps() == (3, 7.0)
    stream.bench.wire.free.clear()
    told.clock.advance(8.0)
    await told.tell(DECODE, told.rows(4))
    assert told.num_lent == 0
    stream.bench.wire.free.set()
    await turns(2)
    told.clock.advance(16.0)
    await told.tell(DECODE, told.rows(5))
    assert told.gaps() == (5, 31.0)
    assert stream.texts() == list("abcdef")


async def test_decodes_first_token_is_told_of_once_it_is_there() -> None:
    told = Told(2)
    await told.tell(PREFILL, told.rows(0, (0, 1)))
    assert told.heard == [("progressed", 0, 1), ("progressed", 1, 1)]
    assert told.num_lent == 2
    told.heard.clear()
    await told.tell(DECODE, told.rows(1, (0, 1)))
    assert told.heard == [("progressed", 0, 2), ("progressed", 1, 2)]
    await told.tell(DECODE, told.rows(2, (0, 1)))
    assert len(told.heard) == 2


async def test_decodes_first_token_is_told_of_before_the_end_that_it_is() -> None:
    told = Told(1)
    await told.tell(PREFILL, told.rows(0))
    told.heard.clear()
    await told.tell(DECODE, told.rows(1, finish=wire.STOP))
    assert told.heard == [("progressed", 0, 2), ("finished", 0, 2)]
    assert told.streams[0].texts() == list("ab")


async def test_who_moved_in_the_same_turn_is_not_told_of() -> None:
    told = Told(1)
    (generation,) = told.generations
    await told.tell(PREFILL, told.rows(0))
    told.heard.clear()
    await told.tell_only(DECODE, told.rows(1))
    told.cluster.leave(generation)
    told.attempt(generation, LATER_ROOM)
    await turns(2)
    assert told.heard == []
    await told.tell(PREFILL, told.rows(2))
    await told.tell(DECODE, told.rows(3))
    assert told.streams[0].texts() == list("abcd")


async def test_who_sits_down_is_found_though_the_same_rooms_were_looked_for_before() -> None:
    told = Told(2)
    first, second = told.generations
    for idx in range(3):
        await told.tell(DECODE if idx else PREFILL, told.rows(idx))
    await told.tell(PREFILL, told.rows(0, (1,)))
    told.streams[1].bench.wire.free.clear()  # it has to wait for its seat
    await told.tell(DECODE, [*told.rows(3), *told.rows(1, (1,))])
    assert (first.lent_to is None, second.lent_to is None) == (False, True)
    told.streams[1].bench.wire.free.set()
    await turns(2)
    await told.tell(DECODE, [*told.rows(4), *told.rows(2, (1,))])
    assert told.num_lent == 2
    columns = first.lent_to
    await told.tell_only(DECODE, [*told.rows(5), *told.rows(3, (1,))])
    assert first.lent_to is second.lent_to is columns  # neither told its own


async def test_a_row_of_a_worker_that_has_another_stream_changes_nothing() -> None:
    told = Told(2)
    _, second = told.generations
    told.cluster.leave(second)
    pair = cast(Pair, type("_Pair", (), {"decode_key": OTHER, "prefill_key": PREFILL})())
    second.begin_attempt(LATER_ROOM, pair)
    told.cluster.rooms[LATER_ROOM] = second
    await told.tell(PREFILL, told.rows(0, (0, 1)))
    for idx in (1, 2):
        await told.tell(DECODE, told.rows(idx))
        await told.tell(OTHER, told.rows(idx, (1,)))
    assert told.num_lent == 2
    await told.tell(OTHER, told.rows(3))
    await told.tell(DECODE, told.rows(3, (1,)))
    assert [stream.texts() for stream in told.streams] == [list("abc")] * 2
    await told.tell(DECODE, told.rows(3))
    await told.tell(OTHER, told.rows(3, (1,)))
    assert [stream.texts() for stream in told.streams] == [list("abcd")] * 2


async def test_who_waits_for_a_token_in_between_has_no_seat_yet() -> None:
    told = Told(1)
    await told.tell_only(PREFILL, told.rows(0))
    await told.tell_only(DECODE, told.rows(2))
    await turns(2)
    assert told.num_lent == 0
    for idx in (1, 3, 4):
        await told.tell(DECODE, told.rows(idx))
    assert "".join(told.streams[0].texts()) == "abcde"
    assert told.num_lent == 1


async def test_who_is_invited_twice_sits_once() -> None:
    told = Told(1)
    for idx in range(3):
        await told.tell_only(DECODE if idx else PREFILL, told.rows(idx))
    await turns(3)
    assert told.num_lent == 1
    columns = told.steps._plain
    assert (columns._room != 0).sum() == 1
    for idx in range(3, 6):
        await told.tell(DECODE, told.rows(idx))
    assert "".join(told.streams[0].texts()) == "abcdef"


async def test_writes_are_counted_as_they_are_made_in_a_seat_that_another_had() -> None:
    told = Told(2)
    first, second = told.streams
    for idx in range(5):
        await told.tell(DECODE if idx else PREFILL, told.rows(idx))
    await told.tell(DECODE, told.rows(5, finish=wire.STOP))
    assert first.bench.stream.num_writes == 6
    room = told.generations[1].room
    await told.tell(PREFILL, told.rows(0, (1,)))
    # Half a character has no text, so it is not written.
    for idx, token_id in enumerate((LETTER_A, FIRST_BYTE, SECOND_BYTE, LETTER_A), 1):
        await told.tell(DECODE, [(room, idx, token_id, 0)])
    assert told.num_lent == 1
    told.generations[1].reclaim()
    assert second.bench.stream.num_writes == len(second.bench.wire.bodies) == 4
