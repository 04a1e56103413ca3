"""How long a generation waits for a worker when there is none."""

import dataclasses

from tests.fakes import FakeCluster, RecordingSink, until
from tests.serving.test_placement import played, running
from transfer.clock import ManualClock
from transfer.errors import Code


async def test_nobody_waits_longer_for_a_worker_than_in_a_queue_but_who_has_seen_tokens():
    clock = ManualClock()
    async with FakeCluster(auto_step=False, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher(queue_timeout_s=30)
        seen, unseen, late = sinks = [RecordingSink() for _ in range(3)]
        dispatcher.submit(cluster.spec([1], max_new_tokens=10), seen)
        await running(cluster, seen, 3)
        dispatcher.submit(cluster.spec([2]), unseen)
        await cluster.submitted(1)
        await cluster.pass_time(20)  # that it had a place so long does not count
        await cluster.decode[0].kill()
        await until(lambda: not dispatcher.cluster_ready())
        queued = dataclasses.replace(cluster.spec([3]), arrival_s=clock.now_s() - 20)
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
