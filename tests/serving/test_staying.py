"""What speaks against a worker, or a request, and what does not."""

from tests.fakes import FakeCluster, RecordingSink, until
from tests.serving.test_placement import holder, played, running
from transfer.clock import ManualClock
from transfer.errors import Code


async def test_of_prefill_nothing_is_missed_once_decode_decodes():
    """Its connection to decode may end with the last acknowledgement on its way."""
    async with FakeCluster(auto_step=False, decodes=2) as cluster:
        dispatcher = await cluster.dispatcher(max_retries=0)
        spec, sink = cluster.spec(max_new_tokens=10), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        await until(lambda: bool(cluster.prefill[0].rooms))
        rooms = dict(cluster.prefill[0].rooms)
        await running(cluster, sink, 4)
        cluster.prefill[0].rooms |= rooms
        cluster.prefill[0].fail(generation.room, Code.PEER_LOST)
        await played(cluster, sink)
        assert (sink.token_ids, sink.error) == (cluster.expected(spec), None)
        assert generation.retries == 0


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
        for _ in range(160):  # in that worker's own queue
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
