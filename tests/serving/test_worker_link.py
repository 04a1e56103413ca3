"""What is sent to one worker: in order, together, and never after its stream is gone."""

from collections.abc import Callable

import msgspec

from serving import worker_link
from tests.fakes import FakeCluster, FakeWorker, RecordingSink, until
from tests.names import NAME, addresses_by_name
from tests.serving.test_placement import played
from transfer import wire
from transfer.clock import ManualClock
from transfer.errors import Code, Unavailable


def holds(worker: FakeWorker, num_rooms: int) -> Callable[[], bool]:
    """Whether the worker has that many rooms."""
    return lambda: len(worker.rooms) == num_rooms


async def test_an_abort_does_not_overtake_its_submit():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        slow = cluster.decode[0]
        slow.gate.clear()
        generation = dispatcher.submit(cluster.spec(), RecordingSink())
        room = generation.room
        await until(lambda: room in cluster.prefill[0].rooms)
        dispatcher.abort(generation)
        await until(lambda: cluster.prefill[0].aborted == [room])
        assert slow.aborted == []
        slow.gate.set()
        await until(lambda: slow.aborted == [room])
        assert slow.submit_calls == [1]
        assert not slow.rooms


async def test_submits_gather_while_one_call_is_under_way():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        slow = cluster.prefill[0]
        slow.gate.clear()
        sinks = [RecordingSink() for _ in range(6)]
        specs = [cluster.spec([n]) for n in range(6)]
        for count, (spec, sink) in enumerate(zip(specs, sinks, strict=True), 1):
            dispatcher.submit(spec, sink)
            await until(holds(cluster.decode[0], count))
        slow.gate.set()
        await played(cluster, *sinks)
        assert slow.submit_calls == [1, 5]
        assert [sink.token_ids for sink in sinks] == [cluster.expected(spec) for spec in specs]


async def test_long_prompts_that_leave_together_are_shared_out_over_calls(monkeypatch):
    """gRPC would carry none of them if they were too long for one message."""
    monkeypatch.setattr(worker_link, "MAX_BATCH_BYTES", 40)
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        specs = [cluster.spec([n] * length) for n, length in enumerate((4, 5, 2, 11, 1), 1)]
        sinks = [RecordingSink() for _ in specs]
        for spec, sink in zip(specs, sinks, strict=True):
            dispatcher.submit(spec, sink)
        await cluster.submitted(5)
        assert cluster.prefill[0].submit_calls == cluster.decode[0].submit_calls == [2, 1, 1, 1]
        await played(cluster, *sinks)
        assert [sink.token_ids for sink in sinks] == [cluster.expected(spec) for spec in specs]


async def test_a_worker_is_told_how_old_a_request_is_and_what_is_left_to_it_as_its_submit_leaves():
    clock = ManualClock()
    async with FakeCluster(auto_step=False, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher()
        slow = cluster.prefill[0]
        slow.gate.clear()
        dispatcher.submit(cluster.spec([1], timeout_s=60.0), RecordingSink())
        await until(holds(cluster.decode[0], 1))
        dispatcher.submit(cluster.spec([2], timeout_s=60.0), RecordingSink())
        await until(holds(cluster.decode[0], 2))
        clock.set_ahead(600.0)
        clock.advance(2.0)
        slow.gate.set()
        await until(holds(slow, 2))
        told = [
            [(room.submit.age_s, room.submit.left_s) for room in worker.rooms.values()]
            for worker in (cluster.decode[0], slow)
        ]
        assert told == [[(0.0, 60.0), (0.0, 60.0)], [(0.0, 60.0), (2.0, 58.0)]]


async def test_a_request_that_moves_keeps_its_age_and_its_deadline():
    clock = ManualClock()
    async with FakeCluster(auto_step=False, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher()
        generation = dispatcher.submit(cluster.spec(timeout_s=60.0), RecordingSink())
        await cluster.submitted(1)
        clock.set_ahead(-600.0)
        clock.advance(2.0)
        cluster.decode[0].preempt(generation.room)
        await until(lambda: len(cluster.decode[0].submit_calls) == 2)
        submit = cluster.decode[0].rooms[generation.room].submit
        assert (submit.age_s, submit.left_s) == (2.0, 58.0)


async def test_what_waits_to_be_sent_to_a_lost_worker_goes_to_another():
    async with FakeCluster(auto_step=False, decodes=2) as cluster:
        dispatcher = await cluster.dispatcher()
        sinks = [RecordingSink() for _ in range(8)]
        specs = [cluster.spec([n]) for n in range(8)]
        for worker in cluster.decode:
            worker.gate.clear()
        for spec, sink in zip(specs, sinks, strict=True):
            dispatcher.submit(spec, sink)
        await until(lambda: len(cluster.prefill[0].rooms) == 8)
        lost, other = cluster.decode
        await lost.kill(unlist=True)
        other.gate.set()
        await played(cluster, *sinks)
        assert sum(other.submit_calls) == 8
        assert [sink.token_ids for sink in sinks] == [cluster.expected(spec) for spec in specs]


async def test_a_request_that_cannot_be_sent_ends_at_once_and_blocks_nobody():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        too_large = cluster.spec(prompt_logprobs_start=1 << 70)
        sink, other = RecordingSink(), RecordingSink()
        dispatcher.submit(too_large, sink)
        await sink.finished()
        assert sink.error is not None
        assert sink.error.code is Code.INTERNAL
        spec = cluster.spec()
        dispatcher.submit(spec, other)
        await played(cluster, other)
        assert other.token_ids == cluster.expected(spec)


async def test_a_broken_stream_is_opened_again_under_another_name():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        sink, spec = RecordingSink(), cluster.spec()
        generation = dispatcher.submit(spec, sink)
        await cluster.submitted(1)
        before = cluster.decode[0].rooms[generation.room].submit.api_id
        await cluster.decode[0].break_streams()
        await until(lambda: generation.room in cluster.decode[0].rooms)
        assert cluster.decode[0].rooms[generation.room].submit.api_id != before
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


async def test_an_abort_that_did_not_get_there_is_sent_again(monkeypatch):
    real = FakeWorker._abort
    failed: list[FakeWorker] = []

    async def abort(worker: FakeWorker, batch: wire.AbortBatch) -> wire.Empty:
        if not failed:
            failed.append(worker)
            raise Unavailable("busy")
        return await real(worker, batch)

    monkeypatch.setattr(FakeWorker, "_abort", abort)
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        generation = dispatcher.submit(cluster.spec(), RecordingSink())
        await cluster.submitted(1)
        dispatcher.abort(generation)
        await until(lambda: not any(worker.rooms for worker in cluster.workers))
        assert failed


async def test_a_registered_worker_that_cannot_be_opened_is_told_of_once(caplog):
    clock = ManualClock(1000.0)
    async with FakeCluster(auto_step=False, clock=clock) as cluster:
        for worker in cluster.decode:
            await worker.kill()  # still listed
        dispatcher = await cluster.dispatcher(wait=False)
        await until(lambda: len(dispatcher._membership.open_links()) == 1)
        links = dispatcher._membership._links.values()
        (shut,) = (link for link in links if link.role == "decode")
        for _ in range(40):
            await until(lambda: shut._attempt is None)  # between two attempts
            told = caplog.text.count("worker decode-0 cannot be opened, trying again: decode-0 is")
            if not 1005.0 < clock.monotonic_s() < 1007.0:
                assert told == (clock.monotonic_s() > 1006.0)
            await cluster.pass_time(0.5)


async def test_a_worker_whose_name_had_no_address_is_opened_once_it_has(monkeypatch, caplog):
    monkeypatch.setattr(worker_link, "_COMPLAIN_AFTER_S", 0.1)
    addresses = addresses_by_name(monkeypatch)
    async with FakeCluster() as cluster:
        (worker,) = cluster.decode
        listed = cluster.registry.members[worker.worker_id]
        info = msgspec.structs.replace(listed.info, address=NAME)
        cluster.registry.set(msgspec.structs.replace(listed, info=info))
        dispatcher = await cluster.dispatcher(wait=False)
        await until(lambda: "worker decode-0 cannot be opened" in caplog.text)
        addresses[NAME] = worker.address
        await until(lambda: cluster.sees_all(dispatcher))
