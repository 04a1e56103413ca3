"""Each step sends one message per API process, with everything in it."""

import numpy as np
import pytest

from model.sampling import SampleOut
from transfer import wire
from transfer.emit import FirstRow, Rows, StepEmitter, first_rows


def rows(*rooms: int) -> Rows:
    n = len(rooms)
    return Rows(
        rooms=np.array(rooms, np.int64),
        token_ids=np.arange(n, dtype=np.int64) + 10,  # becomes i32 in the message
        token_idx=np.arange(n, dtype=np.int32),
        finish=np.full(n, wire.STOP, np.uint8),
    )


def test_nothing_collected_is_no_message_and_no_step() -> None:
    emitter = StepEmitter("decode-0", 7)
    assert emitter.take(1.0) == {}
    emitter.rows("a", rows(1))
    assert emitter.take(2.0)["a"].step == 1
    assert emitter.take(3.0) == {}
    emitter.rows("a", rows(1))
    assert emitter.take(4.0)["a"].step == 2


def test_rows_survive_the_wire() -> None:
    emitter = StepEmitter("decode-0", 7)
    emitter.rows("a", rows(2**40, 5))
    batch = wire.decode(wire.encode(emitter.take(1.5)["a"]), wire.StepBatch)
    assert (batch.worker_id, batch.epoch, batch.emitted_s) == ("decode-0", 7, 1.5)
    assert wire.unpack_i64(batch.rooms).tolist() == [2**40, 5]
    assert wire.unpack_i32(batch.token_ids).tolist() == [10, 11]
    assert wire.unpack_i32(batch.token_idx).tolist() == [0, 1]
    assert wire.unpack_u8(batch.finish).tolist() == [wire.STOP] * 2
    assert batch.logprobs == batch.top_rows == batch.top_ids == batch.top_logprobs == b""


def test_logprobs_go_along_when_asked() -> None:
    emitter = StepEmitter("decode-0", 7)
    asked = rows(1, 2)
    asked.logprobs = np.array([-0.5, -1.5], np.float32)
    asked.top_rows = np.array([1], np.int32)
    asked.top_ids = np.arange(wire.NUM_TOP_LOGPROBS, dtype=np.int32)[None]
    asked.top_logprobs = -np.arange(wire.NUM_TOP_LOGPROBS, dtype=np.float32)[None]
    emitter.rows("a", asked)
    batch = emitter.take(0.0)["a"]
    assert wire.unpack_f32(batch.logprobs).tolist() == [-0.5, -1.5]
    assert wire.unpack_i32(batch.top_rows).tolist() == [1]
    assert wire.unpack_i32(batch.top_ids).tolist() == list(range(wire.NUM_TOP_LOGPROBS))
    assert wire.unpack_f32(batch.top_logprobs)[-1] == 1 - wire.NUM_TOP_LOGPROBS


def test_each_api_process_gets_its_own_and_events_keep_their_order() -> None:
    emitter = StepEmitter("prefill-0", 7)
    emitter.rows("a", rows(1))
    emitter.event("b", wire.RoomEvent(2, "preempted"))
    emitter.event("b", wire.RoomEvent(3, "failed", code="deadline"))
    emitter.event("a", wire.RoomEvent(1, "prefilled"))
    batches = emitter.take(0.0)
    assert sorted(batches) == ["a", "b"]
    assert [event.room for event in batches["b"].events] == [2, 3]
    assert batches["b"].rooms == b""
    assert batches["a"].step == batches["b"].step == 1
    assert len(batches["a"].events) == 1


def test_rows_of_two_steps_are_never_one_message() -> None:
    emitter = StepEmitter("decode-0", 7)
    emitter.event("a", wire.RoomEvent(1, "preempted"))
    emitter.rows("a", rows(1))
    with pytest.raises(AssertionError, match="one set of rows"):
        emitter.rows("a", rows(1))


def first(row: int, room: int, num_generated: int, num_top: int) -> FirstRow:
    """For a request of two prompt tokens, with num_generated tokens drawn by earlier attempts."""
    submit = wire.Submit(
        room=room,
        request_id="r",
        api_id="a",
        token_ids=wire.pack_i32(range(2 + num_generated)),
        num_prompt_tokens=2,
        sampling=wire.SamplingParams(9, num_top_logprobs=num_top),
        age_s=0.0,
        left_s=9.0,
        prefill=wire.WorkerRef("p", 1, "h:1"),
        decode=wire.WorkerRef("d", 1, "h:2"),
    )
    return FirstRow(row, submit, wire.STOP if row == 2 else wire.RUNNING)


def drawn(num_rows: int) -> SampleOut:
    """A draw in which every number identifies its row."""
    row = np.arange(num_rows)
    top = row[:, None] * 100 + np.arange(wire.NUM_TOP_LOGPROBS)
    return SampleOut(
        ids=(row + 50).astype(np.int32),
        logprobs=-row.astype(np.float32),
        top_ids=top.astype(np.int32),
        top_logprobs=-top.astype(np.float32),
    )


def test_first_tokens_are_those_of_their_rows_of_the_draw() -> None:
    told = first_rows([first(3, 7, 0, -1), first(0, 8, 4, -1), first(2, 9, 1, -1)], drawn(4))
    assert told.rooms.tolist() == [7, 8, 9]
    assert told.token_ids.tolist() == [53, 50, 52]
    assert told.token_idx.tolist() == [0, 4, 1]
    assert told.finish.tolist() == [wire.RUNNING, wire.RUNNING, wire.STOP]
    assert told.logprobs is told.top_rows is told.top_ids is told.top_logprobs is None


def test_first_tokens_bring_the_logprobs_that_some_of_them_asked_for() -> None:
    told = first_rows([first(3, 7, 0, -1), first(1, 8, 0, 0)], drawn(4))
    assert told.logprobs is not None
    assert told.logprobs.tolist() == [-3.0, -1.0]
    assert told.top_rows is None
    told = first_rows([first(3, 7, 0, 0), first(1, 8, 0, 5), first(2, 9, 0, 1)], drawn(4))
    assert told.top_rows is not None
    assert told.top_ids is not None
    assert told.top_logprobs is not None
    assert told.top_rows.tolist() == [1, 2]  # indices into these rows, not into the draw's
    assert told.top_ids[:, 1].tolist() == [101, 201]
    assert told.top_logprobs[:, 2].tolist() == [-102.0, -202.0]
