"""Moves: whatever fails under a generation, its client reads the same text, or one error."""

import asyncio
import random

import pytest

from serving.dispatch import Dispatcher
from tests.fakes import FakeCluster, FakeWorker, RecordingSink, until
from tests.serving.test_dispatch import counted
from transfer.clock import ManualClock
from transfer.errors import Code


async def played(cluster: FakeCluster, *sinks: RecordingSink) -> None:
    """Step until every sink has heard the end."""
    async with asyncio.timeout(20):
        while not all(sink.done.is_set() for sink in sinks):
            cluster.step()
            await asyncio.sleep(0)


async def running(cluster: FakeCluster, sink: RecordingSink, num_tokens: int) -> None:
    """Step one request up to that many tokens: prefill gives the first, decode one a step."""
    await cluster.submitted(1)
    cluster.step()
    while len(sink.token_ids) < num_tokens:
        count = len(sink.token_ids)
        cluster.step()
        await sink.received(count + 1)


def holder(workers: list[FakeWorker]) -> FakeWorker:
    """The worker that has a room."""
    return next(worker for worker in workers if worker.rooms)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_that_fails_for_a_reason_that_passes_is_tried_again(role):
    async with FakeCluster(auto_step=False, prefills=2, decodes=2) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        (room,) = await cluster.submitted(1)
        workers = cluster.prefill if role == "prefill" else cluster.decode
        others = cluster.decode if role == "prefill" else cluster.prefill
        failed, peer = holder(workers), holder(others)
        failed.fail(room, Code.SHUTTING_DOWN)
        await until(lambda: generation.retries == 1)
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)
        await until(lambda: peer.aborted == [room])
        assert failed.aborted == []
        assert not failed.rooms
        assert failed.submit_calls == [1]  # the next attempt avoids it
        assert counted(dispatcher, 'retries_total{reason="shutting_down"}') == 1


@pytest.mark.parametrize("tells", ["prefill", "decode"])
async def test_a_peer_that_is_lost_to_its_partner_is_the_one_to_avoid(tells):
    async with FakeCluster(auto_step=False, prefills=2, decodes=2) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        (room,) = await cluster.submitted(1)
        telling, lost = holder(cluster.decode), holder(cluster.prefill)
        if tells == "prefill":
            telling, lost = lost, telling
        telling.fail(room, Code.PEER_LOST)
        await until(lambda: generation.room not in (0, room))
        assert generation.avoid == {lost.worker_id}
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)
        assert lost.submit_calls == [1]


@pytest.mark.parametrize("code", [Code.TOO_LONG, Code.INTERNAL, Code.DEADLINE])
async def test_a_leg_that_fails_for_good_ends_the_request_once_and_the_other_leg(code):
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        sink = RecordingSink()
        dispatcher.submit(cluster.spec(), sink)
        (room,) = await cluster.submitted(1)
        cluster.decode[0].fail(room, code, "no way")
        await sink.finished()
        assert sink.error is not None
        assert (sink.error.code, sink.error.message) == (code, "no way")
        await until(lambda: cluster.prefill[0].aborted == [room])


async def test_a_worker_that_aborts_a_room_ends_it_as_aborted():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        sink = RecordingSink()
        dispatcher.submit(cluster.spec(), sink)
        (room,) = await cluster.submitted(1)
        cluster.decode[0].fail(room, Code.ABORTED)
        await sink.finished()
        assert sink.finish_reason == "abort"


async def test_a_lost_decode_worker_moves_what_ran_there():
    async with FakeCluster(auto_step=False, decodes=2) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(max_new_tokens=10), RecordingSink()
        dispatcher.submit(spec, sink)
        await running(cluster, sink, 4)
        await holder(cluster.decode).kill()
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


async def test_the_only_decode_worker_is_waited_for_until_it_is_back():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher(max_retries=1)
        specs = [cluster.spec([n, 2], max_new_tokens=10) for n in range(5)]
        sinks = [RecordingSink() for _ in specs]
        for spec, sink in zip(specs[:4], sinks[:4], strict=True):
            dispatcher.submit(spec, sink)
        await cluster.submitted(4)
        cluster.step()
        cluster.step()
        await until(lambda: all(len(sink.token_ids) >= 2 for sink in sinks[:4]))
        await cluster.decode[0].kill()
        await until(lambda: not dispatcher.cluster_ready())
        dispatcher.submit(specs[4], sinks[4])
        await cluster.decode[0].start()
        await played(cluster, *sinks)
        assert [sink.token_ids for sink in sinks] == [cluster.expected(spec) for spec in specs]


async def test_tokens_of_one_model_are_not_followed_by_those_of_another():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        begun, sink = cluster.spec(max_new_tokens=10), RecordingSink()
        dispatcher.submit(begun, sink)
        await running(cluster, sink, 4)
        for worker in cluster.workers:
            await worker.kill(unlist=True)
        await until(lambda: not dispatcher.cluster_ready())
        so_far = list(sink.token_ids)
        fresh, other = cluster.spec([8, 9]), RecordingSink()
        dispatcher.submit(fresh, other)
        for worker in cluster.workers:
            worker.model_digest = "another"
            await worker.start()
        await played(cluster, sink, other)
        assert sink.token_ids == so_far == cluster.expected(begun)[: len(so_far)]
        assert sink.error is not None
        assert sink.error.code is Code.PEER_LOST
        assert "another model" in sink.error.message
        assert other.token_ids == cluster.expected(fresh)


async def test_a_prefill_worker_that_dies_while_its_pages_travel_is_replaced():
    async with FakeCluster(auto_step=False, prefills=2) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(max_new_tokens=10), RecordingSink()
        dispatcher.submit(spec, sink)
        (room,) = await cluster.submitted(1)
        doomed = holder(cluster.prefill)
        doomed.step()
        await sink.received(1)
        await doomed.kill()
        await until(lambda: cluster.decode[0].aborted == [room])
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


async def test_a_prefill_worker_that_dies_after_decode_began_is_not_missed():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher(max_retries=0)
        spec, sink = cluster.spec(max_new_tokens=10), RecordingSink()
        dispatcher.submit(spec, sink)
        await running(cluster, sink, 2)
        await cluster.prefill[0].kill()
        await until(lambda: not dispatcher.cluster_ready())
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


async def test_a_prefill_worker_that_dies_with_the_first_token_untold_is_replaced():
    async with FakeCluster(auto_step=False, prefills=2) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(max_new_tokens=10), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        await cluster.submitted(1)
        doomed = holder(cluster.prefill)
        doomed.hold()
        cluster.step()
        cluster.step()
        await until(lambda: bool(generation._early))
        await doomed.kill()
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


async def test_rooms_go_with_a_broken_stream_even_when_the_worker_lives_on():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(max_new_tokens=10), RecordingSink()
        dispatcher.submit(spec, sink)
        await running(cluster, sink, 3)
        await cluster.decode[0].break_streams()
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


async def test_one_leg_refused_takes_the_other_back_and_itself_should_it_be_there_all_the_same():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        cluster.decode[0].refusals.append(Code.TOO_LONG)
        sink = RecordingSink()
        dispatcher.submit(cluster.spec(), sink)
        await sink.finished()
        assert sink.error is not None
        assert sink.error.code is Code.TOO_LONG
        await until(lambda: all(len(worker.aborted) == 1 for worker in cluster.workers))
        assert not cluster.prefill[0].rooms


async def test_retries_end_with_one_error():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher(max_retries=2)
        cluster.decode[0].refusals.extend([Code.STALE] * 10)
        sink = RecordingSink()
        generation = dispatcher.submit(cluster.spec(), sink)
        await sink.finished()
        assert sink.error is not None
        assert sink.error.code is Code.PEER_LOST
        assert "given up after 3 attempts" in sink.error.message
        assert generation.retries == 3
        assert sink.calls == ["error"]


async def test_a_full_worker_is_asked_again_until_it_takes_the_request():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher(max_retries=0)
        cluster.prefill[0].refusals.extend([Code.QUEUE_FULL] * 3)
        spec, sink = cluster.spec(), RecordingSink()
        dispatcher.submit(spec, sink)
        assert await sink.finished() == cluster.expected(spec)
        assert cluster.prefill[0].submit_calls == [1, 1, 1, 1]


async def test_workers_that_stay_full_refuse_a_new_request_in_the_end():
    clock = ManualClock()
    async with FakeCluster(clock=clock) as cluster:
        dispatcher = await cluster.dispatcher(queue_timeout_s=2.0)
        cluster.decode[0].refusals.extend([Code.QUEUE_FULL] * 100)
        sink = RecordingSink()
        generation = dispatcher.submit(cluster.spec(), sink)
        while not sink.done.is_set():
            await until(lambda: generation.ended or generation.retry_timer is not None)
            if not generation.ended:
                assert clock.monotonic_s() - generation.spec.arrival_s < 3.5
                await cluster.pass_time(0.25)
        assert sink.error is not None
        assert sink.error.code is Code.QUEUE_FULL


async def test_workers_that_are_full_keep_a_started_request_waiting():
    clock = ManualClock()
    async with FakeCluster(auto_step=False, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher(queue_timeout_s=1.0)
        spec, sink = cluster.spec(max_new_tokens=6), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        await running(cluster, sink, 2)
        cluster.decode[0].refusals.extend([Code.QUEUE_FULL] * 100)
        cluster.decode[0].preempt(generation.room)
        await until(lambda: generation.retry_timer is not None)
        # How many refusals fit in a span of pretended time depends on real round trips.
        while generation.refusals <= 3:
            await cluster.pass_time(0.5)
        cluster.decode[0].refusals.clear()
        await cluster.pass_time(1.5)
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


class Chaos:
    """Random misfortune for a running cluster, from one seed."""

    def __init__(self, cluster: FakeCluster, seed: int) -> None:
        self.cluster = cluster
        self.rng = random.Random(seed)

    async def turn(self) -> None:
        rng, cluster = self.rng, self.cluster
        for worker in rng.sample(cluster.workers, len(cluster.workers)):
            if rng.random() < 0.7:
                worker.step()
        worker = rng.choice(cluster.workers)
        rooms = sorted(worker.rooms)
        match rng.choice(["fail", *["preempt"] * 4, "refuse", "hold", "break", "kill", *[""] * 24]):
            case "fail" if rooms:
                worker.fail(rng.choice(rooms), rng.choice([Code.PEER_LOST, Code.STALE]))
            case "preempt":
                ready = [room for room in rooms if worker.rooms[room].ready]
                if ready:
                    worker.preempt(rng.choice(ready))
            case "refuse":
                worker.refusals.append(rng.choice([Code.QUEUE_FULL, Code.SHUTTING_DOWN]))
            case "hold":
                worker.hold()
            case "break":
                worker.release()
                await worker.break_streams()
            case "kill":
                worker.release()
                await worker.kill(unlist=rng.random() < 0.5)
                await worker.start()
        if rng.random() < 0.3:
            rng.choice(cluster.workers).release()
        await asyncio.sleep(rng.choice([0, 0, 0.001]))


@pytest.mark.parametrize("seed", range(4))
async def test_under_any_misfortune_every_request_ends_once_with_its_own_tokens(seed):
    async with FakeCluster(auto_step=False, prefills=2, decodes=2) as cluster:
        dispatcher = await cluster.dispatcher(max_retries=1000)
        chaos = Chaos(cluster, seed)
        specs = [cluster.spec([n, seed], max_new_tokens=5 + n % 30) for n in range(60)]
        sinks = [RecordingSink() for _ in specs]
        async with asyncio.timeout(60):
            for spec, sink in zip(specs, sinks, strict=True):
                dispatcher.submit(spec, sink)
                await chaos.turn()
            for _ in range(150):
                await chaos.turn()
        for worker in cluster.workers:
            worker.release()
            worker.refusals.clear()
        await played(cluster, *sinks)
        for spec, sink in zip(specs, sinks, strict=True):
            assert sink.error is None, f"seed {seed}: {sink.error}"
            assert sink.token_ids == cluster.expected(spec), f"seed {seed}"
        assert counted(dispatcher, "num_running_reqs") == 0
        await until(lambda: not any(worker.rooms for worker in cluster.workers))


# --- workers that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_room_handed_on_moves_at_once_and_spends_no_retry(role):
    async with FakeCluster(auto_step=False, prefills=2, decodes=2) as cluster:
        dispatcher = await cluster.dispatcher(max_retries=0)
        spec, sink = cluster.spec(), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        (room,) = await cluster.submitted(1)
        leaver = holder(cluster.prefill if role == "prefill" else cluster.decode)
        leaver.fail(room, Code.DRAINING)
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)
        assert generation.retries == 0
        assert counted(dispatcher, 'retries_total{reason="draining"}') == 1
        for n in range(4):  # it is not chosen any more, though the registry said nothing
            sink = RecordingSink()
            dispatcher.submit(cluster.spec([n, 1]), sink)
            await played(cluster, sink)
        assert leaver.submit_calls == [1]


async def test_a_draining_worker_that_refuses_is_not_asked_again_though_it_is_alone():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher(max_retries=0)
        leaver = cluster.decode[0]
        leaver.refusals.append(Code.DRAINING)
        spec, sink = cluster.spec(), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        await until(lambda: not dispatcher.cluster_ready())
        assert (generation.room, leaver.submit_calls) == (0, [1])
        await leaver.kill()
        await leaver.start()
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)
        assert generation.retries == 0


async def test_a_prefill_worker_that_left_in_order_is_not_missed_after_the_first_token():
    async with FakeCluster(auto_step=False, prefills=2) as cluster:
        dispatcher = await cluster.dispatcher(max_retries=0)
        spec, sink = cluster.spec(), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        (room,) = await cluster.submitted(1)
        leaver = holder(cluster.prefill)
        leaver.step()
        await sink.received(1)
        await leaver.leave()
        await until(lambda: leaver.worker_id not in dispatcher.worker_ids())
        assert generation.room == room
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_a_worker_that_left_in_order_never_took_moves_without_a_retry(role):
    async with FakeCluster(auto_step=False, prefills=2, decodes=2) as cluster:
        dispatcher = await cluster.dispatcher(max_retries=0)
        spec, sink = cluster.spec(), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        await cluster.submitted(1)
        await holder(cluster.prefill if role == "prefill" else cluster.decode).leave()
        await played(cluster, sink)
        assert sink.token_ids == cluster.expected(spec)
        assert generation.retries == 0


async def answered(cluster: FakeCluster, dispatcher: Dispatcher, max_new_tokens: int = 6) -> None:
    """Play one more request to its end, and let a moment pass."""
    sink = RecordingSink()
    dispatcher.submit(cluster.spec(max_new_tokens=max_new_tokens), sink)
    await played(cluster, sink)
    await cluster.pass_time(0.1)


# --- workers that fail or stand still -------------------------------------------------------------


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.STALE])
async def test_a_worker_that_fails_in_a_row_is_passed_over_then_tried_by_one(code):
    clock = ManualClock(1000.0)
    async with FakeCluster(auto_step=False, decodes=2, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher(breaker_failures=2, policy="round_robin")
        bad, good = cluster.decode

        bad.refusals.extend([code] * 2)
        for _ in range(4):
            await answered(cluster, dispatcher)
        assert len(bad.submit_calls) == 2
        before = len(good.submit_calls)
        for _ in range(3):
            await answered(cluster, dispatcher)
        assert (len(bad.submit_calls), len(good.submit_calls)) == (2, before + 3)
        (shown,) = [
            worker["breaker"]
            for worker in (await dispatcher.server_info())["workers"]
            if worker["worker_id"] == bad.worker_id
        ]
        assert shown == "open"
        assert (
            counted(
                dispatcher,
                f'worker_passed_over{{reason="failures",worker="{bad.worker_id}"}}',
            )
            == 1
        )
        await cluster.pass_time(1.0)
        for _ in range(4):
            await answered(cluster, dispatcher)
        assert len(bad.submit_calls) == 4  # the trial closed the breaker


async def test_a_full_queue_and_a_bad_request_do_not_speak_against_a_worker():
    async with FakeCluster(decodes=2) as cluster:
        dispatcher = await cluster.dispatcher(breaker_failures=1, policy="round_robin")
        for code in (Code.QUEUE_FULL, Code.TOO_LONG, Code.DRAINING):
            cluster.decode[0].refusals.append(code)
            sink = RecordingSink()
            dispatcher.submit(cluster.spec(), sink)
            await sink.done.wait()
        breakers = {health.breaker for health in dispatcher._placement.health().values()}
        assert breakers == {"closed"}


async def test_a_worker_that_lives_but_stands_still_is_passed_over_until_it_gets_on():
    clock = ManualClock(1000.0)
    async with FakeCluster(auto_step=False, prefills=2, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher(progress_timeout_s=2.0)
        stuck = cluster.prefill[0]
        stuck.stuck = True
        await cluster.pass_time(3.0)
        assert dispatcher.cluster_ready()
        assert dispatcher.roles_without_progress() == []
        for n in range(4):
            sink = RecordingSink()
            dispatcher.submit(cluster.spec([n, 1]), sink)
            await played(cluster, sink)
        assert stuck.submit_calls == []
        cluster.prefill[1].stuck = True
        await cluster.pass_time(3.0)
        assert dispatcher.roles_without_progress() == ["prefill"]
        stuck.stuck = False
        await cluster.pass_time(0.5)
        assert dispatcher.roles_without_progress() == []
        sink = RecordingSink()
        dispatcher.submit(cluster.spec(), sink)
        await played(cluster, sink)
        assert len(stuck.submit_calls) == 1


async def test_a_request_that_ended_leaves_no_timer_behind():
    async with FakeCluster(auto_step=False, clock=ManualClock(1000.0)) as cluster:
        dispatcher = await cluster.dispatcher()
        before, sink = cluster.timers.num_set, RecordingSink()
        dispatcher.submit(cluster.spec(), sink)
        await played(cluster, sink)
        assert cluster.timers.num_set == before
