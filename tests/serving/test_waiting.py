"""How long a generation waits for a worker when there is none."""

import asyncio
import dataclasses

import pytest

from serving.answer import Runner
from serving.prompt import Prompt
from serving.protocol import ChoiceAsk, Request, Shown
from tests.fakes import FakeCluster, RecordingSink, until
from tests.serving.test_placement import played, running
from transfer import wire
from transfer.clock import ManualClock
from transfer.errors import Code, RequestError


async def test_a_request_aborted_as_it_gets_its_place_gives_it_back():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher(max_inflight_requests=1, max_queued_requests=1)
        runner = Runner(dispatcher, 60.0)
        held = await dispatcher.admit()
        ask = ChoiceAsk(0, 0, "waits", Prompt([1]), wire.SamplingParams(4), Shown())
        stays = asyncio.create_task(asyncio.sleep(3600))
        admission = asyncio.create_task(runner._admit(Request("waits", [ask]), stays, 0.0))
        await until(lambda: dispatcher.num_queued() == 1)
        held.release()
        (waiting,) = runner._queued
        while not waiting.done():  # noqa: ASYNC110  (the turn before its request hears of it)
            await asyncio.sleep(0)
        assert runner.abort("waits") == 1
        with pytest.raises(RequestError) as refused:
            await admission
        assert refused.value.code is Code.ABORTED
        assert dispatcher.admit_now() is not None
        stays.cancel()


async def test_nobody_waits_longer_for_a_worker_than_in_a_queue_but_who_has_seen_tokens():
    clock = ManualClock()
    async with FakeCluster(auto_step=False, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher(queue_timeout_s=30)
        seen, unseen, late = sinks = [RecordingSink() for _ in range(3)]
        dispatcher.submit(cluster.spec([1], max_new_tokens=10), seen)
        await running(cluster, seen, 3)
        dispatcher.submit(cluster.spec([2]), unseen)
        await cluster.submitted(1)
        await cluster.pass_time(20)  # its time at a worker does not count
        await cluster.decode[0].kill()
        await until(lambda: not dispatcher.cluster_ready())
        queued = dataclasses.replace(cluster.spec([3]), arrival_s=clock.monotonic_s() - 20)
        dispatcher.submit(queued, late)
        await cluster.pass_time(9.5)
        assert not late.done.is_set()
        await cluster.pass_time(1)
        assert late.error is not None
        assert late.error.code is Code.PEER_LOST
        await cluster.pass_time(19)
        assert not unseen.done.is_set()
        await cluster.pass_time(1)
        assert unseen.error is not None
        await cluster.pass_time(100)
        await cluster.decode[0].start()
        await played(cluster, seen)
        assert [len(sink.token_ids) for sink in sinks] == [10, 0, 0]


async def test_a_request_that_waited_for_a_worker_is_not_given_up_once_it_has_one():
    async with FakeCluster(auto_step=False, clock=ManualClock()) as cluster:
        dispatcher = await cluster.dispatcher(queue_timeout_s=30)
        await cluster.decode[0].kill()
        await until(lambda: not dispatcher.cluster_ready())
        spec, sink = cluster.spec(), RecordingSink()
        dispatcher.submit(spec, sink)
        await cluster.pass_time(20)
        await cluster.decode[0].start()
        await cluster.submitted(1)
        await cluster.pass_time(20)
        assert not sink.done.is_set()
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


async def test_a_request_aborted_while_it_backs_off_is_never_placed_again():
    async with FakeCluster(auto_step=False, clock=ManualClock(1000.0)) as cluster:
        dispatcher = await cluster.dispatcher()
        cluster.decode[0].refusals.append(Code.QUEUE_FULL)
        generation = dispatcher.submit(cluster.spec(), RecordingSink())
        await until(lambda: generation.retry_timer is not None)
        dispatcher.abort(generation)
        await cluster.pass_time(2.0)
        assert dispatcher.num_running() == 0
        assert not generation.room


async def test_workers_whose_queues_fill_behind_the_door_refuse_a_request_in_the_end():
    async with FakeCluster(auto_step=False, clock=ManualClock(1000.0)) as cluster:
        dispatcher = await cluster.dispatcher(queue_timeout_s=2.0)
        sink = RecordingSink()
        generation = dispatcher.submit(cluster.spec(), sink)
        for _ in range(50):
            room = generation.room
            if room:
                await cluster.submitted(1)
                cluster.decode[0].fail(room, Code.QUEUE_FULL)
                await until(lambda: generation.room != room)  # noqa: B023
            if sink.done.is_set():
                break
            await cluster.pass_time(0.5)
        assert sink.error is not None
        assert sink.error.code is Code.QUEUE_FULL
