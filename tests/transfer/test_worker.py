"""The shell around both roles: what it refuses, whom a step reaches, and how an engine ends."""

import asyncio
import math
import mmap
import threading
from collections.abc import AsyncGenerator
from typing import Any, cast

import jax
import numpy as np
import pytest

import transfer.bootstrap
import transfer.leaving
import transfer.replies
from tests.transfer.samples import a_worker
from tests.transfer.shm_ends import wait_until
from transfer import wire
from transfer.bootstrap import RegistryServer
from transfer.clock import SYSTEM_CLOCK, ManualClock
from transfer.errors import Unavailable
from transfer.rpc import RpcClient, RpcServer, Security
from transfer.staging import LentSlots, SlotShape
from transfer.worker import ApiGone, Drain, Inbox, Submitted, Worker


class PlainWorker(Worker):
    """Records its events; fails when told to."""

    role: wire.Role = "decode"

    def __init__(self) -> None:
        super().__init__(Security(token="test"), ManualClock(100.0, unix_s=100.0), "host", 9)
        self.events: list[Any] = []
        self.turned = threading.Event()
        self.held = 0
        self._ready = True

    def build(self) -> wire.WorkerInfo:
        return a_worker(worker_id=self.worker_id())

    def handle(self, event: Any) -> None:
        if event == "fail":
            raise ValueError("told to")
        self.events.append(event)

    def turn(self) -> bool:
        self.turned.set()
        return False

    def load(self) -> wire.Load:
        return wire.Load()

    def state(self) -> wire.WorkerState:
        return wire.WorkerState("plain", "decode", self.epoch, wire.Load(), 0, 0, 0, 0, {}, {})

    def flush(self) -> wire.FlushReply:
        return wire.FlushReply(True, threading.current_thread().name)

    def close(self) -> None: ...

    def num_held(self) -> int:
        return self.held

    def worker_id(self) -> str:
        return "plain"

    def capacity_refusal(self, submit: wire.Submit) -> wire.Refusal | None:
        if submit.room == 13:
            return wire.Refusal(13, "queue_full", "unlucky")
        return None


def submit(
    room: int = 1,
    epoch: int = 100_000,
    api_id: str = "api",
    token_ids: bytes = b"\0\0\0\0",
    age_s: float = 0.0,
    left_s: float = 9e9,
) -> wire.Submit:
    return wire.Submit(
        room=room,
        request_id="r",
        api_id=api_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) // 4,
        sampling=wire.SamplingParams(1),
        age_s=age_s,
        left_s=left_s,
        prefill=wire.WorkerRef("other", 7, "elsewhere:1"),
        decode=wire.WorkerRef("plain", epoch, "host:9"),
    )


def subscribe(worker: Worker, api_id: str = "api") -> AsyncGenerator[wire.StepBatch, None]:
    stream = worker._subscribe(wire.Subscribe(api_id))
    return cast(AsyncGenerator[wire.StepBatch, None], stream)


def batch(step: int) -> wire.StepBatch:
    return wire.StepBatch(
        "plain",
        100_000,
        step,
        0.0,
        rooms=wire.pack_i64([step]),
        token_ids=wire.pack_i32([7]),
        token_idx=wire.pack_i32([0]),
        finish=wire.pack_u8([wire.RUNNING]),
    )


async def run_engine(worker: PlainWorker) -> tuple[threading.Thread, asyncio.Event]:
    worker._loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=worker._engine_main, args=(stop,), name="engine")
    thread.start()
    return thread, stop


def test_an_inbox_keeps_order_and_is_empty_afterwards() -> None:
    inbox = Inbox()
    assert inbox.drain(0.0) == []
    for event in (1, 2, 3):
        inbox.post(event)
    assert inbox.drain(10.0) == [1, 2, 3]
    assert inbox.drain(0.0) == []


def test_an_inbox_wakes_who_waits_for_it() -> None:
    inbox = Inbox()
    thread = threading.Thread(target=inbox.post, args=("event",))
    thread.start()
    assert inbox.drain(10.0) == ["event"]
    thread.join()


def test_the_epoch_is_the_start_in_milliseconds() -> None:
    assert PlainWorker().epoch == 100_000


@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        ({"epoch": 99}, "stale", "epoch 99, this worker has 100000"),
        ({"api_id": "stranger"}, "stale", "stranger has no reply stream here"),
        ({"token_ids": b"\0\0\0"}, "bad_request", "bytes of token ids"),
        ({"token_ids": b""}, "bad_request", "bytes of token ids"),
        ({"room": -1}, "bad_request", "room -1, at least 1"),  # decode's mark of a free slot
        ({"room": 0}, "bad_request", "room 0, at least 1"),
        # A deadline that never passes, and an age that no other can be compared with.
        ({"left_s": math.nan}, "bad_request", "left_s nan"),
        ({"left_s": math.inf}, "bad_request", "left_s inf"),
        ({"age_s": math.nan}, "bad_request", "age_s nan"),
        ({"room": 13}, "queue_full", "unlucky"),
    ],
)
async def test_a_submit_that_cannot_be_taken_is_refused_with_its_reason(
    wrong: dict[str, Any], code: str, says: str
) -> None:
    worker = PlainWorker()
    stream = subscribe(worker)
    await anext(stream)
    reply = await worker._submit(wire.SubmitBatch((submit(room=2), submit(**wrong))))
    (refusal,) = reply.refused
    assert (refusal.room, refusal.code) == (wrong.get("room", 1), code)
    assert says in refusal.message
    (event,) = worker.inbox.drain(0.0)
    assert [taken.room for taken in event.submits] == [2]
    await stream.aclose()


async def test_nothing_is_taken_before_ready() -> None:
    worker = PlainWorker()
    worker._ready = False
    with pytest.raises(Unavailable, match="decode worker is not ready"):
        await worker._submit(wire.SubmitBatch((submit(),)))
    with pytest.raises(Unavailable):
        await anext(subscribe(worker))


async def test_a_stream_says_hello_then_brings_its_own_steps_in_order() -> None:
    worker = PlainWorker()
    mine, others = subscribe(worker), subscribe(worker, "other")
    assert (await anext(mine)).step == (await anext(others)).step == 0
    worker._deliver({"api": batch(1)})
    assert (await anext(mine)).step == 1
    worker._deliver({"api": batch(2), "other": batch(2), "gone": batch(2)})
    worker._deliver({"api": batch(3)})
    assert (await anext(mine)).step == 3, "what waits leaves together"
    assert (await anext(others)).step == 2
    await mine.aclose()
    await others.aclose()


async def test_a_sign_of_life_tells_whether_the_engine_turns() -> None:
    worker = PlainWorker()
    worker.progress = 7
    stream = subscribe(worker)
    assert (await anext(stream)).step == 7
    await stream.aclose()


async def test_steps_reach_the_loop_from_the_engine_thread() -> None:
    worker = PlainWorker()
    worker._loop = asyncio.get_running_loop()
    stream = subscribe(worker)
    await anext(stream)
    thread = threading.Thread(target=worker.publish, args=({"api": batch(5)},))
    thread.start()
    assert (await asyncio.wait_for(anext(stream), 10.0)).step == 5
    thread.join()
    await stream.aclose()


async def test_an_api_process_that_leaves_is_told_to_the_engine() -> None:
    worker = PlainWorker()
    stream = subscribe(worker)
    await anext(stream)
    await stream.aclose()
    assert worker.inbox.drain(0.0) == [ApiGone("api")]
    assert worker.refusal(submit()) is not None


async def test_a_stream_that_is_opened_again_replaces_the_old_one_and_keeps_its_rooms() -> None:
    worker = PlainWorker()
    old, new = subscribe(worker), subscribe(worker)
    await anext(old)
    await anext(new)
    with pytest.raises(StopAsyncIteration):
        await anext(old)
    assert worker.inbox.drain(0.0) == []
    worker._deliver({"api": batch(1)})
    assert (await anext(new)).step == 1
    await new.aclose()


async def test_an_api_process_that_does_not_read_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer.replies, "MAX_ROWS", 2)
    worker = PlainWorker()
    stream = subscribe(worker)
    await anext(stream)
    for step in (1, 2, 3):
        worker._deliver({"api": batch(step)})
    assert "api does not read its steps" in caplog.text
    assert worker.inbox.drain(0.0) == [ApiGone("api")]
    assert [batch.step async for batch in stream] == []
    assert worker.inbox.drain(0.0) == []  # told only once


async def test_events_are_handled_and_questions_answered_on_the_engine_thread() -> None:
    worker = PlainWorker()
    thread, stop = await run_engine(worker)
    worker.inbox.post(Submitted((), 0.0))
    reply = await asyncio.wait_for(worker._ask(worker.flush), 10.0)
    assert reply.message == "engine"
    assert worker.events == [Submitted((), 0.0)]
    worker._stopping.set()
    await asyncio.wait_for(stop.wait(), 10.0)
    thread.join()
    assert worker.progress > 0
    assert worker._engine_error is None


class PlacingWorker(PlainWorker):
    """Writes arrays that arrive into a pool, queued on the device after the work it already has."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        pool = jax.ShapeDtypeStruct((count, size), np.float32)
        at = jax.ShapeDtypeStruct((), np.int32)
        place = jax.jit(lambda pool, row, i: pool.at[i].set(row), donate_argnums=0)
        self.place = place.lower(pool, jax.ShapeDtypeStruct((size,), np.float32), at).compile()
        slow = jax.jit(lambda pool, n: jax.lax.fori_loop(0, n, lambda _, x: x + 1, pool))
        self.slow = slow.lower(pool, at).compile()
        self.pool = self.slow(np.zeros(pool.shape, np.float32), np.int32(0))

    def handle(self, event: Any) -> None:
        self.pool = self.slow(self.pool, np.int32(500))
        while event:
            i = np.int32(len(event) - 1)
            self.pool = self.place(self.pool, jax.device_put(event.pop()), i)


async def test_an_idle_engine_gives_back_memory_whose_pages_are_placed() -> None:
    count, size = 8, 1 << 18
    worker = PlacingWorker(count, size)
    memory = mmap.mmap(-1, count * 4 * size)
    slots = LentSlots(SlotShape(4 * size, count), memory, lambda: None)
    thread, stop = await run_engine(worker)
    worker.inbox.post([slots.take(slot, 4 * size).view(np.float32) for slot in range(count)])
    await asyncio.to_thread(wait_until, lambda: len(slots._freed) == count)
    worker._stopping.set()
    await asyncio.wait_for(stop.wait(), 10.0)
    thread.join()


async def test_a_failing_engine_stops_the_process_with_its_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = PlainWorker()
    thread, stop = await run_engine(worker)
    worker.inbox.post("fail")
    await asyncio.wait_for(stop.wait(), 10.0)
    thread.join()
    assert isinstance(worker._engine_error, ValueError)
    assert "the engine of this decode worker failed" in caplog.text


async def test_a_call_that_breaks_off_once_the_worker_leaves_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Leaving(PlainWorker):
        def turn(self) -> bool:
            self._stopping.set()  # the leader dismisses its nodes, which ends what they compute
            raise RuntimeError("Connection reset by peer")

    caplog.set_level("INFO")
    worker = Leaving()
    thread, stop = await run_engine(worker)
    await asyncio.wait_for(stop.wait(), 10.0)
    thread.join()
    assert worker._engine_error is None
    assert "the engine ended amid a call: Connection reset by peer" in caplog.text
    assert "Traceback" not in caplog.text


def test_an_engine_that_ends_behind_its_loop_ends_in_peace() -> None:
    worker = PlainWorker()
    thread, _ = asyncio.run(run_engine(worker))
    assert worker._loop is not None
    assert worker._loop.is_closed()
    worker.publish({"api": batch(1)})
    worker._stopping.set()
    with pytest.MonkeyPatch.context() as patch:
        failed: list[Any] = []
        patch.setattr(threading, "excepthook", failed.append)
        thread.join()
    assert failed == []
    assert worker._engine_error is None


# --- leaving -------------------------------------------------------------------------------------


async def test_a_draining_worker_says_so_refuses_and_hands_on_once() -> None:
    worker = PlainWorker()
    stream = subscribe(worker)
    await anext(stream)
    worker.held = 3
    assert await worker._drain(wire.Empty()) == wire.DrainReply(3, 30.0, began=True)
    assert await worker._drain(wire.Empty()) == wire.DrainReply(3, 30.0, began=False)
    reply = await worker._submit(wire.SubmitBatch((submit(),)))
    assert [refusal.code for refusal in reply.refused] == ["draining"]
    assert worker.inbox.drain(0.0) == [Drain()]
    assert not worker.leaving.over.is_set()
    await stream.aclose()


async def test_a_drained_worker_leaves_when_nothing_is_held_and_its_last_words_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer.leaving, "LINGER_S", 0.0)
    worker = PlainWorker()
    worker.held = 1
    stream = subscribe(worker)
    await anext(stream)
    thread, stop = await run_engine(worker)
    worker.drain()
    worker.handing_on = True
    worker.turned.clear()
    await asyncio.to_thread(worker.turned.wait)
    assert not worker.leaving.over.is_set()
    worker._deliver({"api": batch(1)})
    worker.held = 0
    await asyncio.wait_for(worker.leaving.over.wait(), 10.0)
    assert worker.leaving.drained
    worker._end_streams()
    (last,) = [batch async for batch in stream]
    assert wire.unpack_i64(last.rooms).tolist() == [1]
    assert [event.kind for event in last.events] == ["drained"]
    worker._stopping.set()
    await asyncio.wait_for(stop.wait(), 10.0)
    thread.join()


async def test_a_drain_ends_in_time_with_what_is_left() -> None:
    worker = PlainWorker()
    worker.held = 1
    worker.drain_timeout_s = 0.0
    stream = subscribe(worker)
    await anext(stream)
    worker.drain()
    await asyncio.wait_for(worker.leaving.over.wait(), 10.0)
    assert not worker.leaving.drained
    worker._end_streams()
    assert [batch async for batch in stream] == []


async def test_the_first_sigterm_drains_and_the_second_ends_at_once() -> None:
    worker = PlainWorker()
    worker.held = 1
    worker._terminated()
    assert worker.leaving.draining
    assert not worker.leaving.over.is_set()
    worker._terminated()
    assert worker.leaving.over.is_set()
    starting = PlainWorker()
    starting._ready = False
    starting._terminated()
    assert starting.leaving.over.is_set()
    assert not starting.leaving.draining


async def test_a_worker_that_was_asked_to_drain_drains_on_when_it_gets_its_first_sigterm() -> None:
    """As in a pod whose preStop hook asks for the drain."""
    worker = PlainWorker()
    worker.held = 1
    worker.drain()
    worker._terminated()
    assert not worker.leaving.over.is_set()
    worker._terminated()
    assert worker.leaving.over.is_set()


@pytest.mark.usefixtures("own_signals")
async def test_a_worker_that_stops_ends_its_streams_even_while_the_registry_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer.bootstrap, "CALL_TIMEOUT_S", 60.0)
    asked, answered, ready = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def register(_: wire.Register) -> wire.Registered:
        return wire.Registered(3.0)

    async def heartbeat(_: wire.Heartbeat) -> wire.HeartbeatReply:
        return wire.HeartbeatReply(True)

    async def hang(_: wire.Deregister) -> wire.Empty:
        asked.set()
        await answered.wait()
        return wire.Empty()

    worker = PlainWorker()
    registry = RpcServer(worker.security)
    registry.unary("Register", wire.Register, register)
    registry.unary("Heartbeat", wire.Heartbeat, heartbeat)
    registry.unary("Deregister", wire.Deregister, hang)
    worker.host, worker.port = "127.0.0.1", 0
    address = f"127.0.0.1:{await registry.start('127.0.0.1', 0)}"
    running = asyncio.create_task(worker.run(address, lambda _: ready.set()))
    async with asyncio.timeout(20):
        await ready.wait()
        client = RpcClient(f"127.0.0.1:{worker.port}", worker.security)
        stream = client.stream("Subscribe", wire.Subscribe("api"), wire.StepBatch)
        await anext(stream)
        worker.leaving.over.set()
        await asked.wait()
        assert [batch async for batch in stream] == []
        answered.set()
        await running
        await client.close()
        await registry.stop(0.1)


@pytest.mark.usefixtures("own_signals")
async def test_a_worker_that_cannot_say_that_it_is_ready_ends_with_the_reason() -> None:
    """Nobody would know of it, and whoever started it would wait for ever."""
    worker = PlainWorker()
    worker.host, worker.port = "127.0.0.1", 0
    registry = RegistryServer(worker.security, SYSTEM_CLOCK)
    address = f"127.0.0.1:{await registry.start('127.0.0.1', 0)}"

    def announce(worker_id: str) -> None:
        raise OSError(f"nobody listens to {worker_id}")

    try:
        with pytest.raises(OSError, match="nobody listens to plain"):
            await asyncio.wait_for(worker.run(address, announce), 20)
    finally:
        await registry.stop()
