"""What counts against a worker, or a request, and what does not."""

import pytest

from tests.fakes import FakeCluster, RecordingSink, until
from tests.serving.test_placement import answered, holder, played
from transfer import wire
from transfer.clock import ManualClock
from transfer.errors import Code


async def test_what_prefill_says_of_a_room_that_decode_already_steps_moves_nothing():
    """Prefill's connection to decode may end while the last acknowledgement is on its way."""
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher(max_retries=0)
        spec, sink = cluster.spec(max_new_tokens=10), RecordingSink()
        dispatcher.submit(spec, sink)
        (room,) = await cluster.submitted(1)
        leg = cluster.prefill[0].rooms[room]
        cluster.step()
        while len(sink.token_ids) < 3:
            count = len(sink.token_ids)
            cluster.step()
            await sink.received(count + 1)
        lost = wire.RoomEvent(room, "failed", code=Code.PEER_LOST.value, message="decode lost")
        cluster.prefill[0]._event(leg, lost)
        await played(cluster, sink)
        assert sink.error is None
        assert sink.token_ids == cluster.expected(spec)


async def test_a_decode_worker_that_serves_single_tokens_is_tried_and_taken_again():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher(breaker_failures=1, max_retries=9)
        (decode,) = cluster.decode
        for failing in (True, False):
            sink = RecordingSink()
            dispatcher.submit(cluster.spec(max_new_tokens=1), sink)
            (room,) = await cluster.submitted(1)
            if failing:
                decode.fail(room, Code.STALE)
            await played(cluster, sink)
        (link,) = (each for each in dispatcher._membership.open_links() if each.role == "decode")
        assert dispatcher._placement.health_of(link).breaker == "closed"


async def test_single_tokens_do_not_speak_for_a_decode_worker_that_pages_do_not_reach():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher(breaker_failures=1, max_retries=9)
        for failing in (True, False):
            sink = RecordingSink()
            generation = dispatcher.submit(cluster.spec(max_new_tokens=1), sink)
            (room,) = await cluster.submitted(1)
            if failing:
                leg = cluster.prefill[0].rooms[room]
                lost = wire.RoomEvent(room, "failed", code=Code.PEER_LOST.value, message="lost")
                cluster.prefill[0]._event(leg, lost)
                await until(lambda: generation.room != room)  # noqa: B023  (awaited here)
            await played(cluster, sink)
        (link,) = (each for each in dispatcher._membership.open_links() if each.role == "decode")
        assert dispatcher._placement.health_of(link).breaker != "closed"


async def test_a_request_that_a_worker_took_is_not_refused_for_what_came_before():
    clock = ManualClock(1000.0)
    async with FakeCluster(auto_step=False, decodes=2, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher(queue_timeout_s=30.0)
        cluster.decode[0].refusals.append(Code.QUEUE_FULL)
        sink = RecordingSink()
        generation = dispatcher.submit(cluster.spec(), sink)
        await until(lambda: generation.retry_timer is not None)
        await cluster.pass_time(2.0)
        await until(lambda: any(worker.rooms for worker in cluster.decode))
        for _ in range(160):  # it waits in that worker's own queue
            await cluster.pass_time(0.25)
        taker = holder(cluster.decode)
        (other,) = (worker for worker in cluster.decode if worker is not taker)
        other.refusals.append(Code.QUEUE_FULL)
        taker.fail(generation.room, Code.DRAINING)
        await until(lambda: generation.ended or generation.retry_timer is not None)
        assert not generation.ended
        await cluster.pass_time(2.0)
        await played(cluster, sink)
        assert sink.error is None


async def test_a_trial_whose_client_leaves_makes_way_for_another():
    async with FakeCluster(auto_step=False, decodes=2, clock=ManualClock(1000.0)) as cluster:
        dispatcher = await cluster.dispatcher(breaker_failures=1, policy="round_robin")
        bad, _ = cluster.decode

        bad.refusals.append(Code.INTERNAL)
        for _ in range(2):
            await answered(cluster, dispatcher)
        assert len(bad.submit_calls) == 1
        await cluster.pass_time(1.0)
        trials = [dispatcher.submit(cluster.spec(), RecordingSink()) for _ in range(2)]
        await cluster.submitted(2)
        assert len(bad.submit_calls) == 2
        for trial in trials:
            dispatcher.abort(trial)
        for _ in range(4):
            await answered(cluster, dispatcher)
        assert len(bad.submit_calls) >= 4


@pytest.mark.parametrize("max_new_tokens", [1, 6])
async def test_a_trial_that_goes_well_closes_the_breaker(max_new_tokens):
    async with FakeCluster(auto_step=False, decodes=2, clock=ManualClock(1000.0)) as cluster:
        dispatcher = await cluster.dispatcher(breaker_failures=1, policy="round_robin")
        bad = cluster.decode[0]

        bad.refusals.append(Code.INTERNAL)
        for _ in range(2):
            await answered(cluster, dispatcher, max_new_tokens)
        await cluster.pass_time(1.0)
        for _ in range(2):
            await answered(cluster, dispatcher, max_new_tokens)
        assert len(bad.submit_calls) == 2
        assert dispatcher._placement.health()[bad.worker_id].breaker == "closed"
