"""Steps that wait for a slow reader leave together, in order, and in bounded number."""

import asyncio

import msgspec
import numpy as np
import pytest

import transfer.replies
from transfer import wire
from transfer.emit import Rows, StepEmitter
from transfer.replies import Replies, merge

EMITTER = StepEmitter("d", 3)


def step(idx: int, rooms: list[int], top: list[int] | None = None) -> wire.StepBatch:
    """Token idx of some rooms. top: the rows with top logprobs."""
    n = len(rooms)
    has = top is not None
    EMITTER.rows(
        "api",
        Rows(
            np.array(rooms),
            np.array(rooms) * 100 + idx,
            np.full(n, idx),
            np.zeros(n),
            np.full(n, -float(idx)) if has else None,
            np.array(top) if has else None,
            np.full((len(top or ()), wire.NUM_TOP_LOGPROBS), idx) if has else None,
            np.full((len(top or ()), wire.NUM_TOP_LOGPROBS), -0.5) if has else None,
        ),
    )
    return EMITTER.take(float(idx))["api"]


async def test_a_reader_that_keeps_up_gets_each_step_as_it_is():
    replies = Replies()
    for idx in range(3):
        batch = step(idx, [1, 2])
        assert replies.offer(batch)
        assert await replies.take(1.0) is batch


async def test_steps_that_waited_leave_as_one_with_the_first_ones_time():
    replies = Replies()
    batches = [step(0, [1, 2]), step(1, [2]), step(2, [1, 2])]
    for batch in batches:
        assert replies.offer(batch)
    merged = await replies.take(1.0)
    assert merged is not None
    assert wire.unpack_i64(merged.rooms).tolist() == [1, 1, 2]
    assert wire.unpack_i32(merged.token_idx).tolist() == [0, 2, 0]
    assert wire.unpack_i32(merged.counts).tolist() == [1, 1, 3]
    assert wire.unpack_u8(merged.finish).tolist() == [0, 0, 0]
    assert wire.unpack_i32(merged.token_ids).tolist() == [100, 102, 200, 201, 202]
    assert (merged.emitted_s, merged.step, merged.num_rows) == (0.0, batches[-1].step, 5)
    assert merged.logprobs == b""


def test_logprobs_stay_with_their_rows():
    merged = merge([step(1, [1, 2]), step(2, [1, 2], top=[1]), step(3, [3], top=[0])])
    assert wire.unpack_f32(merged.logprobs).tolist() == [0.0, 0.0, -2.0, -2.0, -3.0]
    assert wire.unpack_i32(merged.top_rows).tolist() == [3, 4]
    assert wire.unpack_i32(merged.top_ids).reshape(2, -1)[:, 0].tolist() == [2, 3]


def test_a_token_that_ends_a_run_is_its_last():
    batches = [step(idx, [1, 2]) for idx in range(4)]
    batches[1] = msgspec.structs.replace(batches[1], finish=wire.pack_u8([0, wire.STOP]))
    merged = merge(batches)
    assert wire.unpack_i64(merged.rooms).tolist() == [1, 2, 2]
    assert wire.unpack_i32(merged.counts).tolist() == [4, 2, 2]
    assert wire.unpack_u8(merged.finish).tolist() == [0, wire.STOP, 0]


def test_events_of_all_steps_come_in_order():
    EMITTER.event("api", wire.RoomEvent(1, "prefilled"))
    first = EMITTER.take(0.0)["api"]
    EMITTER.event("api", wire.RoomEvent(2, "preempted"))
    second = EMITTER.take(0.0)["api"]
    assert merge([first, step(0, [1]), second]).events == first.events + second.events


async def test_legs_of_all_steps_come_in_order_and_count_as_events(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(transfer.replies, "MAX_EVENTS", 2)
    replies = Replies()
    for room in (1, 2):
        EMITTER.leg("api", wire.LegRecord(room, {"queued": room}))
        assert replies.offer(EMITTER.take(0.0)["api"])
    EMITTER.leg("api", wire.LegRecord(3, {}))
    late = EMITTER.take(0.0)["api"]
    assert not replies.offer(late)
    merged = await replies.take(1.0)
    assert merged is not None
    assert [leg.room for leg in merged.legs] == [1, 2]
    assert replies.offer(late)


async def test_a_message_has_a_bound_and_what_is_left_leaves_next(monkeypatch: pytest.MonkeyPatch):
    row_bytes = transfer.replies._ROW_BYTES_IN_RUNS
    monkeypatch.setattr(transfer.replies, "_ROW_BYTES_PER_MESSAGE", 4 * row_bytes)
    replies = Replies()
    for idx in range(5):
        replies.offer(step(idx, [1, 2]))
    sizes = []
    for _ in range(3):
        merged = await replies.take(1.0)
        assert merged is not None
        sizes.append(merged.num_rows)
    assert sizes == [4, 4, 2]
    for idx in range(2):  # each of these rows takes as much as several without logprobs
        replies.offer(step(idx, [1, 2], top=[0, 1]))
    merged = await replies.take(1.0)
    assert merged is not None
    assert merged.num_rows == 2
    assert await replies.take(1.0) is not None
    with pytest.raises(TimeoutError):
        await replies.take(0.0)


def prefilled(room: int, num_bytes: int) -> wire.RoomEvent:
    told = wire.PromptLogprobs(0, b"", b"", bytes(num_bytes // 2), bytes(num_bytes // 2))
    return wire.RoomEvent(room, "prefilled", prompt_logprobs=told)


async def test_logprobs_of_prompts_leave_in_messages_that_grpc_takes(
    monkeypatch: pytest.MonkeyPatch,
):
    """For one step and for steps that waited: a message that is too long would end the stream."""
    monkeypatch.setattr(transfer.replies, "_EVENT_BYTES_PER_MESSAGE", 100)
    replies = Replies()
    for room in (1, 2):
        EMITTER.event("api", prefilled(room, 60))
    EMITTER.event("api", wire.RoomEvent(3, "preempted"))
    assert replies.offer(step(0, [1, 2]))
    for room in (4, 5, 6):
        EMITTER.event("api", prefilled(room, 50))
        assert replies.offer(step(0, [room]))
    messages = [await replies.take(1.0) for _ in range(4)]
    events = [[event.room for event in message.events] for message in messages if message]
    assert events == [[1], [2, 3], [4, 5], [6]]
    assert [message.num_rows for message in messages if message] == [0, 2, 2, 1]
    with pytest.raises(TimeoutError):
        await replies.take(0.0)


async def test_only_so_many_bytes_of_prompts_logprobs_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transfer.replies, "MAX_EVENT_BYTES", 100)
    replies = Replies()
    EMITTER.event("api", prefilled(1, 80))
    assert replies.offer(EMITTER.take(0.0)["api"])
    EMITTER.event("api", prefilled(2, 80))
    late = EMITTER.take(0.0)["api"]
    assert not replies.offer(late)
    await replies.take(1.0)
    assert replies.offer(late)


async def test_more_than_may_wait_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transfer.replies, "MAX_ROWS", 4)
    replies = Replies()
    assert replies.offer(step(0, [1, 2, 3]))
    assert not replies.offer(step(1, [1, 2]))
    assert replies.offer(step(1, [1]))
    await replies.take(1.0)
    assert replies.offer(step(2, [1, 2, 3, 4]))


async def test_the_end_wakes_a_reader_and_drops_what_waits():
    replies = Replies()
    waiting = asyncio.create_task(replies.take(10.0))
    await asyncio.sleep(0)
    replies.end()
    assert await waiting is None
    replies.offer(step(0, [1]))
    assert await replies.take(1.0) is None


async def test_a_reader_that_has_taken_all_waits_for_more_or_for_the_end():
    replies = Replies()
    replies.offer(step(0, [1]))
    assert await replies.take(1.0) is not None
    with pytest.raises(TimeoutError):
        await replies.take(0.01)
    waiting = asyncio.create_task(replies.take(20.0))
    await asyncio.sleep(0)
    replies.finish()
    async with asyncio.timeout(10.0):
        assert await waiting is None
