"""Which workers take work: the registry's view, open streams, silence, restarts of either side."""

import asyncio

import msgspec

from tests.fakes import (
    CONTEXT_LENGTH,
    FakeCluster,
    FakeWorker,
    RecordingSink,
    open_workers,
    until,
)
from tests.serving.test_placement import played, running
from transfer import wire
from transfer.bootstrap import RegistryClient, RegistryServer
from transfer.clock import SYSTEM_CLOCK, ManualClock


async def test_a_cluster_is_ready_with_one_worker_of_each_role():
    async with FakeCluster() as cluster:
        for worker in cluster.workers:
            await worker.kill(unlist=True)
        dispatcher = await cluster.dispatcher()
        assert not dispatcher.cluster_ready()
        assert dispatcher.missing_roles() == ["prefill", "decode"]
        await cluster.prefill[0].start()
        await until(lambda: dispatcher.missing_roles() == ["decode"])
        await cluster.decode[0].start()
        await until(dispatcher.cluster_ready)
        await cluster.prefill[0].kill(unlist=True)
        await until(lambda: dispatcher.missing_roles() == ["prefill"])


async def test_workers_that_are_there_are_met_before_clients_are_taken():
    async with FakeCluster(decodes=2) as cluster:
        dispatcher = await cluster.dispatcher(wait=False)
        assert not cluster.sees_all(dispatcher)
        assert await dispatcher.meet(60.0)
        assert cluster.sees_all(dispatcher)


async def test_a_worker_that_is_listed_and_gone_is_not_waited_for():
    async with FakeCluster() as cluster:
        await cluster.decode[0].kill()
        dispatcher = await cluster.dispatcher(wait=False)
        assert not await dispatcher.meet(0.2)
        meeting = asyncio.create_task(dispatcher.meet(60.0))
        await asyncio.sleep(0)
        await dispatcher.stop()
        await asyncio.wait_for(meeting, 20.0)


async def test_nor_is_a_registry_that_does_not_answer_and_one_without_workers_is_enough():
    async with FakeCluster(prefills=0, decodes=0) as cluster:
        await cluster.registry.stop()
        dispatcher = await cluster.dispatcher(wait=False)
        assert not await dispatcher.meet(0.2)
        await cluster.registry.start(int(cluster.registry.address.rpartition(":")[2]))
        assert await dispatcher.meet(60.0)


def announce(worker: FakeWorker, local_prefill_tokens: int, draining: bool = False) -> None:
    """Register the worker as it is, except that it computes prompts of so many tokens."""
    info = msgspec.structs.replace(worker.info(), local_prefill_tokens=local_prefill_tokens)
    worker.cluster.registry.set(wire.Member(info, worker.epoch, worker.load, draining))


async def test_a_decode_worker_that_computes_every_prompt_is_a_cluster():
    async with FakeCluster(auto_step=False, prefills=0, decodes=2) as cluster:
        dispatcher = await cluster.dispatcher()
        alone, other = cluster.decode
        announce(alone, CONTEXT_LENGTH - 1)
        await until(lambda: dispatcher.members()[0].info.local_prefill_tokens > 0)
        assert not dispatcher.cluster_ready()
        assert dispatcher.dp_size("prefill") is None
        announce(alone, CONTEXT_LENGTH)
        await until(dispatcher.cluster_ready)
        assert dispatcher.dp_size("prefill") is None, "the other one waits for prefill"
        dispatcher.submit(cluster.spec(prompt_logprobs_start=0), RecordingSink())
        await until(lambda: len(alone.rooms) == 1)
        (room,) = alone.rooms.values()
        assert room.submit.prefill == room.submit.decode
        announce(other, CONTEXT_LENGTH)
        await until(lambda: dispatcher.dp_size("prefill") == 0)
        assert dispatcher.dp_size("decode") == 1
        for worker in cluster.decode:
            announce(worker, CONTEXT_LENGTH, draining=True)
        await until(lambda: not dispatcher.cluster_ready())
        assert dispatcher.missing_roles() == ["decode"], "nobody waits for prefill here"
        assert dispatcher.was_ready()
        assert len(alone.rooms) == 1
        assert not other.rooms


async def test_prefill_may_stand_still_while_decode_computes_every_prompt():
    clock = ManualClock(1000.0)
    async with FakeCluster(auto_step=False, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher(progress_timeout_s=2.0)
        cluster.prefill[0].stuck = True
        await cluster.pass_time(3.0)
        assert dispatcher.roles_without_progress() == ["prefill"]
        announce(cluster.decode[0], CONTEXT_LENGTH)
        await until(lambda: not dispatcher.roles_without_progress())
        cluster.decode[0].stuck = True
        await cluster.pass_time(3.0)
        assert dispatcher.roles_without_progress() == ["decode"]


async def test_a_draining_worker_finishes_its_work_and_gets_no_new():
    async with FakeCluster(auto_step=False, decodes=2) as cluster:
        dispatcher = await cluster.dispatcher()
        specs = [cluster.spec([n, 1]) for n in range(5)]
        sinks = [RecordingSink() for _ in specs]
        dispatcher.submit(specs[0], sinks[0])
        await cluster.submitted(1)
        draining = next(worker for worker in cluster.decode if worker.rooms)
        draining.draining = True
        draining.announce()
        await until(lambda: any(member.draining for member in dispatcher.members()))
        for spec, sink in zip(specs[1:], sinks[1:], strict=True):
            dispatcher.submit(spec, sink)
        await cluster.submitted(5)
        assert len(draining.rooms) == 1
        await played(cluster, *sinks)
        assert [sink.token_ids for sink in sinks] == [cluster.expected(spec) for spec in specs]


async def test_a_worker_that_hangs_is_given_up_after_three_silent_seconds():
    clock = ManualClock()
    async with FakeCluster(auto_step=False, decodes=2, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(max_new_tokens=8), RecordingSink()
        dispatcher.submit(spec, sink)
        await running(cluster, sink, 3)
        hung = next(worker for worker in cluster.decode if worker.rooms)
        hung.silent = True
        await cluster.pass_time(2.5)
        assert (hung.worker_id, 1) in open_workers(dispatcher)
        await cluster.pass_time(1.5)
        await until(lambda: (hung.worker_id, 1) not in open_workers(dispatcher))
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


async def test_a_process_that_slept_itself_gives_nobody_up():
    clock = ManualClock()
    async with FakeCluster(auto_step=False, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher()
        clock.advance(60.0)
        cluster.timers.advance(0.0)
        await dispatcher.flush_cache()
        assert cluster.sees_all(dispatcher)
        assert all(worker.num_streams == 1 for worker in cluster.workers)


async def test_a_new_incarnation_takes_the_place_of_the_old_at_once():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(max_new_tokens=8), RecordingSink()
        dispatcher.submit(spec, sink)
        await running(cluster, sink, 3)
        await cluster.decode[0].kill()
        await cluster.decode[0].start()
        await until(lambda: ("decode-0", 2) in open_workers(dispatcher))
        assert ("decode-0", 1) not in open_workers(dispatcher)
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


async def test_leaving_the_registry_ends_no_stream_but_takes_no_new_work():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(), RecordingSink()
        dispatcher.submit(spec, sink)
        await running(cluster, sink, 2)
        cluster.registry.remove("decode-0")
        await until(lambda: len(dispatcher.members()) == 1)
        assert not dispatcher.cluster_ready()
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


async def test_a_registry_that_dies_and_comes_back_empty_stops_nobody():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher()
        port = int(cluster.registry.address.rpartition(":")[2])
        await cluster.registry.stop()
        spec, while_dead, while_empty = cluster.spec(), RecordingSink(), RecordingSink()
        dispatcher.submit(spec, while_dead)
        assert await while_dead.finished() == cluster.expected(spec)
        cluster.registry.members.clear()
        await cluster.registry.start(port)
        await until(lambda: dispatcher.members() == ())
        assert dispatcher.cluster_ready()
        dispatcher.submit(spec, while_empty)
        assert await while_empty.finished() == cluster.expected(spec)


async def test_workers_that_stay_away_from_a_restarted_registry_lose_their_place():
    clock = ManualClock()
    async with FakeCluster(clock=clock) as cluster:
        dispatcher = await cluster.dispatcher()
        await cluster.registry.restart()
        await until(lambda: dispatcher.members() == ())
        assert dispatcher.cluster_ready()
        clock.advance(3.5)
        assert not dispatcher.cluster_ready()


async def test_a_registry_that_dies_again_before_anyone_registers_stops_nobody_either():
    clock = ManualClock()
    async with FakeCluster(clock=clock) as cluster:
        dispatcher = await cluster.dispatcher()
        await cluster.registry.restart()
        await until(lambda: dispatcher.members() == ())
        clock.advance(3.5)
        assert not dispatcher.cluster_ready()
        await cluster.registry.restart()
        await until(dispatcher.cluster_ready)
        clock.advance(3.5)
        assert not dispatcher.cluster_ready()


async def test_another_worker_at_a_known_address_is_not_taken_for_it():
    async with FakeCluster(auto_step=False, decodes=2) as cluster:
        impostor, victim = cluster.decode
        await victim.kill(unlist=True)
        victim.address = impostor.address
        victim.announce()
        dispatcher = await cluster.dispatcher()
        await until(lambda: len(dispatcher.members()) == 3)
        spec, sink = cluster.spec(), RecordingSink()
        dispatcher.submit(spec, sink)
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)
        assert ("decode-1", 1) not in open_workers(dispatcher)


async def test_the_real_registry_tells_of_workers_as_they_register():
    registry = RegistryServer(FakeCluster.security, SYSTEM_CLOCK)
    port = await registry.start("127.0.0.1", 0)
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher(registry_address=f"127.0.0.1:{port}", wait=False)
        clients = []
        leases = []
        for worker in cluster.workers:
            client = RegistryClient(f"127.0.0.1:{port}", cluster.security, SYSTEM_CLOCK)
            clients.append(client)
            run = client.run_worker(worker.info(), worker.epoch, lambda: (wire.Load(), False))
            leases.append(asyncio.create_task(run))
        await until(dispatcher.cluster_ready)
        spec, sink = cluster.spec(), RecordingSink()
        dispatcher.submit(spec, sink)
        assert await sink.finished() == cluster.expected(spec)
        for lease in leases:
            lease.cancel()
        await asyncio.gather(*leases, return_exceptions=True)
        for client in clients:
            await client.deregister()
    await registry.stop()
