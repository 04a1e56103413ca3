"""Requests whose pages were needed by older ones, and rooms that one worker found gone."""

import msgspec

from tests.fakes import FakeCluster, RecordingSink, until
from tests.serving.test_dispatch import counted
from tests.serving.test_placement import played, running
from transfer.clock import ManualClock
from transfer.errors import Code


async def test_a_preempted_request_goes_on_with_its_tokens_and_spends_no_retry():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher(max_retries=0)
        spec, sink = cluster.spec(max_new_tokens=12), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        for num_tokens in (3, 7):
            await running(cluster, sink, num_tokens)
            room = generation.room
            cluster.decode[0].preempt(room)
            await until(lambda: generation.room not in (0, room))  # noqa: B023
            await cluster.submitted(1)
            submit = cluster.prefill[0].rooms[generation.room].submit
            assert submit.num_generated == len(sink.token_ids)
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)
        assert sink.calls.count("prefilled") == 1
        assert counted(dispatcher, "preemptions_total") == 2
        assert generation.retries == 0


async def test_a_preempted_request_goes_to_a_worker_that_can_hold_it_though_a_small_one_is_idle():
    async with FakeCluster(auto_step=False, decodes=2) as cluster:
        small, large = cluster.decode
        await small.kill(unlist=True)
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(max_new_tokens=12), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        await running(cluster, sink, 3)
        small.max_request_tokens = 8  # it comes when the request is running
        await small.start()
        large.load = msgspec.structs.replace(large.load, running_requests=60)
        large.announce()
        await until(lambda: cluster.sees_all(dispatcher) and dispatcher.context_length() == 8)
        large.preempt(generation.room)
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)
        assert not small.submit_calls


async def test_a_room_that_is_gone_goes_on_as_the_one_who_gave_it_up_says():
    """After a preemption at decode, prefill, whose pages were refused, may be heard first."""
    async with FakeCluster(auto_step=False, clock=ManualClock(1000.0)) as cluster:
        dispatcher = await cluster.dispatcher(max_retries=0)
        spec, sink = cluster.spec(max_new_tokens=12), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        (room,) = await cluster.submitted(1)
        cluster.prefill[0].fail(room, Code.GONE)
        for _ in range(2):  # prefill has been heard by the second
            await cluster.pass_time(0.1)
        assert generation.room == room
        cluster.decode[0].preempt(room)
        await until(lambda: generation.room not in (0, room))
        await cluster.submitted(1)
        await cluster.pass_time(1.5)  # what was heard is about the old room
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)
        assert counted(dispatcher, "preemptions_total") == 1
        assert generation.retries == 0


async def test_a_room_that_nobody_says_to_have_given_up_is_tried_again():
    async with FakeCluster(auto_step=False, clock=ManualClock(1000.0)) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        (room,) = await cluster.submitted(1)
        cluster.decode[0].fail(room, Code.GONE)
        for _ in range(2):
            await cluster.pass_time(0.1)
        assert generation.room == room
        await cluster.pass_time(1.0)
        assert generation.avoid == {"prefill-0"}
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)
        assert counted(dispatcher, 'retries_total{reason="stale"}') == 1
