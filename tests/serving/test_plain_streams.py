"""Streams that lent to the columns write what they would have written themselves."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import plain_streams
from serving.event_stream import SlowClient
from serving.openai_answers import chat_answer
from tests.serving.live import EOS, FIRST_BYTE, LETTER_A
from tests.serving.stepped import DECODE, FIRST_ROOM, OTHER, PREFILL, TOKENS, Crowd, begun, turns
from tests.serving.streaming import TIMEOUT_S, response_answer
from transfer import wire


@pytest.fixture(autouse=True)
def _any_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_streams, "LEAST_STREAMS", 1)
    monkeypatch.setattr(plain_streams, "RECENT", 2)  # so that it is full now and then


async def test_settled_streams_lend_until_they_end() -> None:
    crowd = await begun()
    assert crowd.num_lent == 3
    rows = [(g.room, 4, LETTER_A + 4, wire.STOP if at == 1 else 0) for at, g in
            enumerate(crowd.generations)]  # fmt: skip
    await crowd.tell(DECODE, rows)
    assert crowd.num_lent == 2
    assert crowd.streams[1].texts() == list("abcde")
    assert crowd.streams[1].choices[0].num_tokens == 5
    assert crowd.streams[1].events[-2]["choices"][0]["finish_reason"] == "stop"
    assert crowd.streams[1].bench.stream.num_writes == 5


@pytest.mark.parametrize("interval", [1, 9])
async def test_lent_streams_close_their_answers_with_all_that_is_left(interval: int) -> None:
    crowd = await begun(4, interval, include_usage=True)
    writes = [len(bodies) for bodies in crowd.bodies()]
    ids = [LETTER_A + 4, FIRST_BYTE, EOS, LETTER_A + 4]
    how = [wire.RUNNING, wire.LENGTH, wire.STOP, wire.LENGTH]
    rooms = [generation.room for generation in crowd.generations]
    await crowd.tell(DECODE, list(zip(rooms, [4] * 4, ids, how, strict=True)))
    assert [*crowd.cluster.rooms.values()] == crowd.generations[:1]
    told = []
    for stream, before in zip(crowd.streams[1:], writes[1:], strict=True):
        assert stream.answer.closed.result() is None
        assert stream.bench.stream.num_writes == len(stream.bench.wire.bodies) == before + 1
        *_, finish, usage, done = stream.events
        assert done == "[DONE]"
        assert usage["usage"]["completion_tokens"] == 5
        reasons = [finish["choices"][0][name] for name in ("finish_reason", "stop_reason")]
        told.append(("".join(stream.texts()), *reasons))
    assert told == [
        ("abcd\ufffd", "length", None),
        ("abcd", "stop", EOS),
        ("abcde", "length", None),
    ]


async def test_an_end_that_a_slow_client_does_not_take_delays_nobody() -> None:
    crowd = await begun()
    slow = crowd.streams[0]
    slow.bench.wire.free.clear()
    await crowd.tell(DECODE, [(g.room, 4, LETTER_A + 4, wire.STOP) for g in crowd.generations])
    assert not crowd.cluster.rooms
    assert [stream.answer.closed.done() for stream in crowd.streams] == [False, True, True]
    slow.bench.wire.free.set()
    await turns(3)
    assert slow.answer.closed.result() is None
    assert slow.texts() == list("abcde")
    assert slow.events[-1] == "[DONE]"


async def test_all_ends_are_written_before_the_server_hears_of_any() -> None:
    crowd = await begun()
    order: list[str] = []
    for stream in crowd.streams:
        wire_of_one = stream.bench.wire

        def written(data: bytes, write: Any = wire_of_one.writer.write) -> None:
            order.append("written")
            write(data)

        async def heard(message: Any, send: Any = wire_of_one.send) -> None:
            order.append("heard")
            await send(message)

        wire_of_one.writer.write = written
        stream.bench.stream._send_body = heard
    await crowd.tell(DECODE, [(g.room, 4, LETTER_A + 4, wire.STOP) for g in crowd.generations])
    assert order == ["written"] * 3 + ["heard"] * 3
    assert [stream.texts() for stream in crowd.streams] == [list("abcde")] * 3


@pytest.mark.parametrize("reads_on", [False, True])
async def test_an_end_that_fills_its_connection_waits_for_the_client(reads_on: bool) -> None:
    crowd = await begun()
    slow, fails, _ = crowd.streams
    wire_of_slow = slow.bench.wire
    write = wire_of_slow.writer.write

    def fill(data: bytes) -> None:
        write(data)
        wire_of_slow.free.clear()

    wire_of_slow.writer.write = fill
    fails.bench.wire.error = RuntimeError("a fault of the server")
    await crowd.tell(DECODE, [(g.room, 4, LETTER_A + 4, wire.STOP) for g in crowd.generations])
    assert not crowd.cluster.rooms
    assert [stream.answer.closed.done() for stream in crowd.streams] == [False, True, True]
    with pytest.raises(RuntimeError, match="a fault of the server"):
        fails.answer.closed.result()
    if reads_on:
        wire_of_slow.free.set()
        await turns(3)
        assert slow.answer.closed.result() is None
        assert slow.texts() == list("abcde")
        assert slow.events[-1] == "[DONE]"
    else:
        slow.bench.timers.advance(TIMEOUT_S + 1)
        with pytest.raises(SlowClient, match=r"left [1-9][0-9]+ bytes unread"):
            slow.answer.closed.result()
        slow.answer.close()


async def test_an_end_that_cannot_be_spelled_ends_its_stream_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = await begun()

    def finish(*_: Any) -> bytes:
        raise RuntimeError("no word for it")

    monkeypatch.setattr(crowd.streams[0].spelling, "finish", finish)
    await crowd.tell(DECODE, [(g.room, 4, LETTER_A + 4, wire.STOP) for g in crowd.generations])
    assert not crowd.cluster.rooms
    with pytest.raises(RuntimeError, match="no word for it"):
        crowd.streams[0].answer.closed.result()
    assert [stream.texts() for stream in crowd.streams[1:]] == [list("abcde")] * 2


async def test_a_row_of_another_worker_or_one_that_is_known_changes_nothing() -> None:
    crowd = await begun()
    before = crowd.bodies()
    await crowd.tell(OTHER, [(g.room, 4, LETTER_A, 0) for g in crowd.generations])
    assert crowd.num_lent == 3
    await crowd.tell(DECODE, [(g.room, 2, LETTER_A, 0) for g in crowd.generations])
    assert crowd.bodies() == before
    await crowd.tell(DECODE, [(g.room, 4, LETTER_A + 4, 0) for g in crowd.generations])
    assert [stream.texts() for stream in crowd.streams] == [list("abcde")] * 3


async def test_a_slow_client_takes_its_stream_back_and_delays_nobody() -> None:
    crowd = await begun()
    slow = crowd.streams[0]
    slow.bench.wire.free.clear()
    for idx in range(4, 8):
        rows = [(g.room, idx, LETTER_A + idx, 0) for g in crowd.generations]
        await crowd.tell(DECODE, rows)
    assert crowd.num_lent == 2
    assert crowd.streams[1].texts() == list("abcdefgh")
    slow.bench.wire.free.set()
    await turns(2)
    assert slow.texts() == list("abcdefgh")
    # What came meanwhile left in one write, and after the next step it lends again.
    assert b"".join(slow.bench.wire.bodies[-1:]).count(b"data: ") == 3
    for idx in (8, 9):
        await crowd.tell(DECODE, [(g.room, idx, LETTER_A + idx, 0) for g in crowd.generations])
    assert crowd.num_lent == 3
    assert slow.texts() == list("abcdefghij")


async def test_a_broken_send_ends_its_stream_only() -> None:
    crowd = await begun()
    crowd.streams[0].bench.wire.error = OSError("gone")
    crowd.streams[1].bench.wire.error = RuntimeError("a fault of the server")
    await crowd.tell(DECODE, [(g.room, 4, LETTER_A + 4, 0) for g in crowd.generations])
    assert crowd.streams[0].answer.closed.result() is None
    with pytest.raises(RuntimeError, match="a fault of the server"):
        crowd.streams[1].answer.closed.result()
    assert crowd.streams[2].texts() == list("abcde")
    assert crowd.num_lent == 1


async def test_a_generation_that_moves_takes_all_its_tokens_along() -> None:
    crowd = await begun(interval=3)
    generation = crowd.generations[0]
    assert generation.lent_to is not None
    crowd.cluster.leave(generation)
    assert list(generation.token_ids) == [LETTER_A + idx for idx in range(4)]
    crowd.attempt(generation, FIRST_ROOM + 99)
    for idx in range(4, 9):
        key = PREFILL if idx == 4 else DECODE
        await crowd.tell(key, [(generation.room, idx, LETTER_A + idx, 0)])
    assert generation.lent_to is not None
    assert crowd.streams[0].texts() == ["a", "bcd", "efg"]


async def test_workers_that_are_gone_leave_nothing_and_no_other_is_taken_for_them() -> None:
    crowd = await begun()
    plain = crowd.steps._plain
    assert list(plain._workers) == [DECODE]
    crowd.steps.keep({DECODE})
    await crowd.tell_only(DECODE, [(crowd.generations[0].room, 4, LETTER_A + 4, 0)])
    assert crowd.streams[0].texts() == list("abcde")
    crowd.steps.keep(())
    assert not plain._workers
    later = "decode-1", 1
    assert plain._workers[later] not in plain._worker[[g.slot for g in crowd.generations]]


async def test_a_generation_that_moved_since_it_was_invited_does_not_lend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = await invited(monkeypatch, interval=3)
    moved = crowd.generations[0]
    crowd.cluster.leave(moved)
    crowd.attempt(moved, FIRST_ROOM + 99)
    await turns(2)
    assert [g.lent_to is not None for g in crowd.generations] == [False, True, True]
    for idx in range(5, 9):
        key = PREFILL if idx == 5 else DECODE
        await crowd.tell(key, [(moved.room, idx, LETTER_A + idx, 0)])
    assert crowd.streams[0].texts() == ["a", "bcd", "efg"]


async def test_a_generation_that_left_since_it_was_invited_does_not_lend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = await invited(monkeypatch)
    crowd.cluster.leave(crowd.generations[0])
    await turns(2)
    assert [g.lent_to is not None for g in crowd.generations] == [False, True, True]


async def invited(monkeypatch: pytest.MonkeyPatch, **asks: Any) -> Crowd:
    """A crowd in which every stream may lend in a moment, and none has lent before."""
    monkeypatch.setattr(plain_streams, "LEAST_STREAMS", 99)
    crowd = await begun(**asks)
    assert not crowd.num_lent
    monkeypatch.setattr(plain_streams, "LEAST_STREAMS", 1)
    await crowd.tell_only(DECODE, [(g.room, 4, LETTER_A + 4, 0) for g in crowd.generations])
    return crowd


async def test_tokens_are_counted_and_their_gaps_measured() -> None:
    crowd = await begun()
    crowd.clock.advance(0.5)
    await crowd.tell(DECODE, [(g.room, 4, LETTER_A, 0) for g in crowd.generations])
    text = crowd.metrics.render().decode()
    assert "kvferry_generation_tokens_total 15.0" in text
    assert "kvferry_inter_token_latency_seconds_sum 1.5" in text


SETTLING = [("step", [1, 1, 1])] * 3
actions = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "double", "gap", "stall", "free", "interval"]),
        st.lists(st.integers(0, 3), min_size=3, max_size=3),  # tokens of each stream
    ),
    min_size=5,
    max_size=25,
)


@settings(max_examples=60)
@given(
    st.randoms(use_true_random=False),
    actions,
    st.sampled_from([1, 2, 3]),
    st.lists(st.sampled_from([None, 1, 4]), min_size=3, max_size=3),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([chat_answer, response_answer]),
)
def test_columns_write_the_bytes_that_each_stream_alone_would_write(
    random: Random,
    plan: list[tuple[str, list[int]]],
    interval: int,
    own: list[int | None],
    group_size: int,
    spell: Any,
) -> None:
    ids = [random.choices(TOKENS, k=90) for _ in range(3)]

    async def written(least_streams: int) -> tuple[list[list[bytes]], int]:
        plain_streams.LEAST_STREAMS = least_streams
        crowd = Crowd(3, interval, own, group_size, spell=spell)
        lent = await _play(crowd, ids, plan)
        return crowd.bodies(), lent

    with mock.patch("serving.responses_answers.secrets.token_hex", lambda size: "0" * size):
        alone, _ = asyncio.run(written(1 << 30))
        lent, num_lent = asyncio.run(written(1))
    assert lent == alone
    assert num_lent


async def _play(crowd: Crowd, ids: list[list[int]], plan: list[tuple[str, list[int]]]) -> int:
    """Play the plan; how often a stream was seen to have lent."""
    told = [0, 0, 0]
    held: list[tuple[int, int, int, int]] = []
    num_lent = 0
    await crowd.tell(
        PREFILL, [(g.room, 0, ids[at][0], 0) for at, g in enumerate(crowd.generations)]
    )
    told = [1, 1, 1]
    for action, counts in [*SETTLING, *plan]:
        rows = []
        for at, generation in enumerate(crowd.generations):
            for _ in range(counts[at]):
                rows.append((generation.room, told[at], ids[at][told[at]], 0))
                told[at] += 1
        if action == "double" and rows:
            rows += rows[:1]
        if action == "gap" and rows:
            held.append(rows.pop(0))
        elif held:
            rows += held
            held = []
        if action == "stall":
            crowd.streams[0].bench.wire.free.clear()
        elif action == "free":
            crowd.streams[0].bench.wire.free.set()
        elif action == "interval":
            crowd.steps.interval.tokens = 1 + sum(counts)
        if rows:
            await crowd.tell(DECODE, rows)
        await turns(3)
        num_lent += crowd.num_lent
    crowd.streams[0].bench.wire.free.set()
    rows = [*held, *((g.room, told[at], LETTER_A, wire.STOP) for at, g in
                     enumerate(crowd.generations))]  # fmt: skip
    await crowd.tell(DECODE, rows)
    await turns(5)
    crowd.flush()
    assert crowd.num_lent == 0
    return num_lent


@pytest.mark.parametrize("finish", [wire.RUNNING, wire.STOP])
async def test_a_fault_in_one_stream_does_not_reach_the_others(
    finish: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = await begun()
    broken = crowd.streams[0].choices[0].detokenizer
    push = type(broken).push_json

    def breaks(detokenizer: Any, token_ids: Sequence[int]) -> bytes:
        return push(detokenizer, cast(Any, None) if detokenizer is broken else token_ids)

    monkeypatch.setattr(type(broken), "push_json", breaks)
    ids = [FIRST_BYTE, LETTER_A + 4, LETTER_A + 4]
    rows = [(g.room, 4, token, finish) for g, token in zip(crowd.generations, ids, strict=True)]
    await crowd.tell(DECODE, rows)
    with pytest.raises(TypeError):
        crowd.streams[0].answer.closed.result()
    assert [stream.texts() for stream in crowd.streams[1:]] == [list("abcde")] * 2
