"""Generations through a cluster of fakes: order, ends, aborts, deadlines, and what is shown."""

import asyncio
import logging

import pytest

from tests.fakes import FakeCluster, RecordingSink, logprob_of, top_of, until
from transfer.clock import ManualClock
from transfer.errors import Code, RequestError


def counted(dispatcher, name: str) -> float:
    """Value of a metric without labels, or with the labels written out."""
    for line in dispatcher.metrics.render().decode().splitlines():
        if line.startswith(f"kvferry_{name} "):
            return float(line.split()[-1])
    return 0.0


async def test_tokens_are_those_of_the_network_in_order_and_then_the_end():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(max_new_tokens=9), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        assert sink.calls == []
        assert await sink.finished() == cluster.expected(spec) == generation.token_ids.tolist()
        assert sink.finish_reason == "length"
        assert (sink.calls[0], sink.calls[-1]) == ("prefilled", "end")
        assert generation.ended
        assert counted(dispatcher, "generation_tokens_total") == 9
        assert counted(dispatcher, "prompt_tokens_total") == 3
        assert counted(dispatcher, "num_running_reqs") == 0
        await dispatcher.server_info()
        assert not any(worker.aborted for worker in cluster.workers)  # they ended it themselves


async def test_a_stop_id_is_told_and_ends_it():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher()
        free = cluster.expected(cluster.spec(max_new_tokens=8))
        spec, sink = cluster.spec(max_new_tokens=8, stop_token_ids=(free[4],)), RecordingSink()
        dispatcher.submit(spec, sink)
        assert await sink.finished() == free[:5]
        assert sink.finish_reason == "stop"


async def test_one_token_ends_at_prefill():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(max_new_tokens=1), RecordingSink()
        dispatcher.submit(spec, sink)
        assert await sink.finished() == cluster.expected(spec)
        assert sink.finish_reason == "length"
        await until(lambda: not any(worker.rooms for worker in cluster.workers))


async def test_a_request_that_its_first_token_ends_leaves_nothing_waiting_for_pages():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        sink = RecordingSink()
        dispatcher.submit(cluster.spec(max_new_tokens=1), sink)
        (room,) = await cluster.submitted(1)
        cluster.prefill[0].step()
        await sink.finished()
        await until(lambda: cluster.decode[0].aborted == [room])


async def test_decode_tokens_that_overtake_the_first_wait_for_it():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher()
        cluster.prefill[0].hold()
        spec, sink = cluster.spec(), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        await until(lambda: len(generation._early or ()) == 5)
        assert sink.calls == []
        cluster.prefill[0].release()
        assert await sink.finished() == cluster.expected(spec)
        assert sink.calls == ["prefilled", "tokens", "end"]


async def test_logprobs_and_cached_tokens_reach_the_sink():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher()
        prompt = list(range(10, 20))
        plain, asking = RecordingSink(), RecordingSink()
        dispatcher.submit(cluster.spec(prompt), plain)
        await plain.finished()
        assert plain.cached_tokens == 0
        assert plain.logprobs == []
        dispatcher.submit(cluster.spec(prompt, num_top_logprobs=3), asking)
        ids = await asking.finished()
        assert asking.cached_tokens == 8
        assert asking.logprobs == [logprob_of(token_id) for token_id in ids]
        assert asking.top == [top_of(token_id)[:3] for token_id in ids]
        assert counted(dispatcher, "cached_tokens_total") == 8


async def test_prompt_logprobs_come_with_prefilled():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher()
        sink = RecordingSink()
        dispatcher.submit(cluster.spec([4, 5, 6, 7], prompt_logprobs_start=0), sink)
        await sink.finished()
        assert sink.prompt_logprobs is not None
        assert sink.prompt_logprobs.start == 1


async def test_submits_of_one_turn_travel_together():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher()
        sinks = [RecordingSink() for _ in range(20)]
        specs = [cluster.spec([n, n + 1]) for n in range(20)]
        for spec, sink in zip(specs, sinks, strict=True):
            dispatcher.submit(spec, sink)
        for spec, sink in zip(specs, sinks, strict=True):
            assert await sink.finished() == cluster.expected(spec)
        assert [worker.submit_calls for worker in cluster.workers] == [[20], [20]]


async def test_groups_of_streams_keep_each_stream_in_order():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher(batch_notify_size=3)
        sinks = [RecordingSink() for _ in range(10)]
        specs = [cluster.spec([n, 7], max_new_tokens=12) for n in range(10)]
        for spec, sink in zip(specs, sinks, strict=True):
            dispatcher.submit(spec, sink)
        for spec, sink in zip(specs, sinks, strict=True):
            assert await sink.finished() == cluster.expected(spec)


async def test_abort_drops_both_legs_and_silences_the_sink():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        sink = RecordingSink()
        generation = dispatcher.submit(cluster.spec(), sink)
        (room,) = await cluster.submitted(1)
        cluster.step()
        await sink.received(1)
        dispatcher.abort(generation, "stop")
        dispatcher.abort(generation)
        told = list(sink.calls)
        await until(lambda: all(worker.aborted == [room] for worker in cluster.workers))
        cluster.step()
        assert sink.calls == told
        assert not sink.done.is_set()
        assert counted(dispatcher, 'num_requests_total{finish_reason="stop"}') == 1


async def test_an_abort_in_the_turn_of_its_submit_sends_nothing():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher()
        dispatcher.abort(dispatcher.submit(cluster.spec(), RecordingSink()))
        sink = RecordingSink()
        dispatcher.submit(cluster.spec(), sink)
        await sink.finished()
        assert [worker.submit_calls for worker in cluster.workers] == [[1], [1]]
        assert [worker.aborted for worker in cluster.workers] == [[], []]


async def test_a_sink_may_abort_its_own_generation_while_it_is_told():
    class Stopping(RecordingSink):
        def on_tokens(self, tokens):
            super().on_tokens(tokens)
            if len(self.token_ids) >= 2:
                dispatcher.abort(generation, "stop")

    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher()
        sink = Stopping()
        generation = dispatcher.submit(cluster.spec(max_new_tokens=400), sink)
        await until(lambda: all(worker.aborted for worker in cluster.workers))
        await until(lambda: not any(worker.rooms for worker in cluster.workers))
        assert sink.calls[-1] == "tokens"
        assert not sink.done.is_set()


async def test_a_request_is_aborted_by_its_id_and_its_streams_hear_of_it():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        sinks = [RecordingSink() for _ in range(3)]
        for sink, request_id in zip(sinks, ["a", "a", "b"], strict=True):
            dispatcher.submit(cluster.spec(request_id=request_id), sink)
        await cluster.submitted(3)
        assert len(dispatcher.find("a")) == 2
        assert dispatcher.abort_request("a") == 2
        assert dispatcher.abort_request("a") == 0
        assert [sink.finish_reason for sink in sinks] == ["abort", "abort", None]
        assert dispatcher.abort_request(None) == 1
        assert sinks[2].finish_reason == "abort"
        await until(lambda: not any(worker.rooms for worker in cluster.workers))


@pytest.mark.parametrize("started", [False, True])
async def test_the_deadline_ends_it_once_wherever_it_is(started):
    clock = ManualClock()
    async with FakeCluster(auto_step=False, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher()
        if not started:
            cluster.decode[0].draining = True
            cluster.decode[0].announce()
            await until(lambda: not dispatcher.cluster_ready())
        sink = RecordingSink()
        dispatcher.submit(cluster.spec(timeout_s=2.0), sink)
        if started:
            await cluster.submitted(1)
        cluster.timers.advance(1.9)
        assert not sink.done.is_set()
        cluster.timers.advance(0.2)
        assert sink.error is not None
        assert sink.error.code is Code.DEADLINE
        assert "not done within 2 s" in sink.error.message
        await until(lambda: not any(worker.rooms for worker in cluster.workers))


async def test_a_sink_that_fails_ends_only_its_own_stream(caplog):
    class Failing(RecordingSink):
        def on_tokens(self, tokens):
            raise ZeroDivisionError("a bug of the stream")

    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher()
        bad, good = Failing(), RecordingSink()
        spec = cluster.spec()
        with caplog.at_level(logging.CRITICAL):
            dispatcher.submit(spec, bad)
            dispatcher.submit(spec, good)
            assert await good.finished() == cluster.expected(spec)
            await bad.finished()
        assert bad.error is not None
        assert bad.error.code is Code.INTERNAL


async def test_rows_of_a_room_nobody_expects_are_dropped_and_a_leak_is_aborted():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        for _ in range(3):
            cluster.decode[0].send_rows(99, 0, 5)
        await until(lambda: counted(dispatcher, "stale_rows_total") == 3)
        assert cluster.decode[0].aborted == []
        cluster.decode[0].send_rows(99, 0, 5)
        await until(lambda: cluster.decode[0].aborted == [99])


async def test_rows_from_another_epoch_or_another_worker_are_dropped():
    async with FakeCluster(auto_step=False, decodes=2) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(), RecordingSink()
        generation = dispatcher.submit(spec, sink)
        (room,) = await cluster.submitted(1)
        assert generation.pair is not None
        mine = next(w for w in cluster.decode if w.rooms)
        other = next(w for w in cluster.decode if not w.rooms)
        mine.send_rows(room, 0, 5, epoch=mine.epoch + 1)
        other.send_rows(room, 0, 5)
        await until(lambda: counted(dispatcher, "stale_rows_total") == 2)
        assert sink.calls == []
        while not sink.done.is_set():
            cluster.step()
            await asyncio.sleep(0)
        assert sink.token_ids == cluster.expected(spec)


async def test_admission_counts_what_is_running_and_refuses_past_the_queue():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher(max_inflight_requests=2, max_queued_requests=0)
        ticket = await dispatcher.admit(2)
        with pytest.raises(RequestError) as refused:
            await dispatcher.admit()
        assert refused.value.code is Code.QUEUE_FULL
        ticket.release()
        (await dispatcher.admit()).release()


async def test_stop_tells_every_stream_and_takes_nothing_more():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        sinks = [RecordingSink(), RecordingSink()]
        dispatcher.submit(cluster.spec(), sinks[0])
        await cluster.submitted(1)
        await dispatcher.stop()
        with pytest.raises(RequestError) as refused:
            await dispatcher.admit()
        assert refused.value.code is Code.SHUTTING_DOWN
        dispatcher.submit(cluster.spec(), sinks[1])
        for sink in sinks:
            await sink.finished()
            assert sink.error is not None
            assert sink.error.code is Code.SHUTTING_DOWN
        await until(lambda: not any(w.rooms or w.num_streams for w in cluster.workers))


async def test_what_is_known_of_the_cluster_is_shown():
    async with FakeCluster(auto_step=False) as cluster:
        dispatcher = await cluster.dispatcher()
        cluster.decode[0].counters = {"steps": 5.0}
        assert dispatcher.cluster_ready()
        assert dispatcher.context_length() == cluster.context_length
        assert [m.info.worker_id for m in dispatcher.members()] == ["prefill-0", "decode-0"]
        info = await dispatcher.server_info()
        assert info["model_digest"] == "fake-digest"
        assert [w["worker_id"] for w in info["workers"]] == ["decode-0", "prefill-0"]
        assert info["workers"][0]["load"]["pages_total"] == 256
        assert await dispatcher.flush_cache() == (True, "decode-0: flushed; prefill-0: flushed")
        text = (await dispatcher.metrics_text()).decode()
        assert 'kvferry_worker_stat{name="steps",worker="decode-0"} 5.0' in text
        assert 'kvferry_pages_free{role="prefill",worker="prefill-0"} 256.0' in text


async def test_the_context_is_the_least_of_config_and_workers():
    async with FakeCluster(context_length=128) as cluster:
        assert (await cluster.dispatcher(context_length=64)).context_length() == 64
        assert (await cluster.dispatcher(context_length=4096)).context_length() == 128


async def test_two_api_processes_share_workers_and_see_only_their_own():
    async with FakeCluster() as cluster:
        dispatchers = [await cluster.dispatcher() for _ in range(2)]
        sinks = [RecordingSink() for _ in range(8)]
        specs = [cluster.spec([n, 3]) for n in range(8)]
        for n, (spec, sink) in enumerate(zip(specs, sinks, strict=True)):
            dispatchers[n % 2].submit(spec, sink)
        for spec, sink in zip(specs, sinks, strict=True):
            assert await sink.finished() == cluster.expected(spec)
        assert [counted(d, "stale_rows_total") for d in dispatchers] == [0, 0]
