"""What prefill does with grants, ends and deadlines, event by event; tests/sim covers the rest."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from prefill.worker import EARLY_GRANT_S, Granted, PrefillWorker
from tests.sim.alone import Alone
from tests.sim.engines import prompt_logprob
from tests.sim.workers import SimPrefill
from transfer import wire
from transfer.backend import SenderEvent, Shipped
from transfer.chunk_times import MAX_CHUNKS, ChunkTimes, next_chunk
from transfer.worker import Aborted, ApiGone, Submitted


def prefill(**sizes: int) -> tuple[Alone, SimPrefill]:
    alone = Alone("prefill", **sizes)
    return alone, cast(SimPrefill, alone.worker)


def test_nothing_is_computed_before_decode_has_pages() -> None:
    alone, worker = prefill()
    alone.submit(1)
    assert not alone.turn()
    assert alone.tokens() == []
    worker.handle(Granted((alone.grant(1),)))
    assert alone.turn()
    assert not alone.turn()
    assert alone.tokens() == [(1, 0)]
    assert alone.events() == [("prefilled", 1, "")]


def test_a_grant_may_come_before_its_submit() -> None:
    alone, worker = prefill()
    worker.handle(Granted((alone.grant(1),)))
    alone.turn()
    alone.submit(1)
    assert alone.turn()


def test_a_grant_that_nobody_claims_is_forgotten() -> None:
    alone, worker = prefill()
    worker.handle(Granted((alone.grant(1),)))
    alone.clock.advance(EARLY_GRANT_S + 1.0)
    alone.turn()
    assert worker.counters["grants_expired"] == 1
    worker.check_idle()


def test_a_wall_clock_that_is_set_ends_no_room_and_forgets_no_grant() -> None:
    alone, worker = prefill()
    worker.handle(Granted((alone.grant(1),)))
    alone.submit(2, left_s=20.0)
    alone.clock.set_ahead(3600.0)
    alone.turn()
    alone.submit(1, left_s=40.0)
    assert alone.turn()
    assert alone.events() == []
    worker.handle(Granted((alone.grant(3),)))
    alone.clock.set_ahead(-86_400.0)
    alone.clock.advance(21.0)
    alone.turn()
    assert ("failed", 2, "deadline") in alone.events()
    assert worker.counters["grants_expired"] == 1


def test_prompts_are_computed_by_age() -> None:
    alone, worker = prefill()
    for room, age_s in ((1, 1.0), (2, 7.0), (3, 4.0)):
        alone.submit(room, num_tokens=8, age_s=age_s)
    worker.handle(Granted(tuple(map(alone.grant, (1, 2, 3)))))
    while alone.turn():
        pass
    assert [room for room, _ in alone.tokens()] == [2, 3, 1]


def test_a_grant_of_an_earlier_incarnation_is_not_taken() -> None:
    alone, worker = prefill()
    alone.submit(1)
    worker.handle(Granted((alone.grant(1, epoch=7),)))
    assert not alone.turn()
    assert worker.counters["grants_stale"] == 1


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("window", "num_pages"), [(0, 1), (0, 3), (4, 1), (4, 5)])
def test_a_grant_of_a_number_of_pages_that_its_prompt_cannot_have_ends_the_room(
    early: bool, window: int, num_pages: int
) -> None:
    alone, worker = prefill(window=window)
    grant = msgspec.structs.replace(alone.grant(1), page_ids=wire.pack_i32(range(num_pages)))
    if early:
        worker.handle(Granted((grant,)))
    alone.submit(1, num_tokens=8)
    if not early:
        worker.handle(Granted((grant,)))
    while alone.turn():
        pass
    assert alone.events() == [("failed", 1, "stale")]
    worker.check_idle()


@pytest.mark.parametrize(("window", "num_pages", "first_page"), [(0, 2, 1), (0, 0, 2), (4, 1, 1)])
def test_a_refusal_of_a_grant_says_from_which_page_on_it_was(
    window: int, num_pages: int, first_page: int
) -> None:
    alone, worker = prefill(window=window)
    pages = wire.pack_i32(range(num_pages))
    grant = msgspec.structs.replace(alone.grant(1), page_ids=pages, first_page=first_page)
    alone.submit(1, num_tokens=8)
    worker.handle(Granted((grant,)))
    alone.turn()
    (event,) = (event for batch in alone.batches for event in batch.events)
    granted = f"decode granted {num_pages} pages, from page {first_page} of the prompt on"
    assert (event.code, event.message) == ("stale", f"{granted}, for 8 tokens")
    worker.check_idle()


def _send_what_waits(worker: SimPrefill) -> None:
    for lane in list(worker.sender._all_lanes()):
        while (job := worker.sender.next_job(lane)) is not None:
            worker.sender.sent(lane, job, 0.0)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_prompts_wait_while_too_many_pages_wait_for_their_decode_worker(dp_size: int) -> None:
    alone, worker = prefill(num_pages=32, dp_size=dp_size, queue_bytes=64)
    for room in (1, 2):
        alone.submit(room, num_tokens=48)
        worker.handle(Granted((alone.grant(room),)))
    while alone.turn():
        pass
    assert worker.counters["decodes_behind"] == 1
    assert alone.tokens() == []
    queued = worker.sender.in_flight_bytes
    alone.submit(3)
    worker.handle(Granted((alone.grant(3),)))  # it comes later, and waits as well
    alone.submit(4)
    worker.handle(Granted((alone.grant(4, address="sim://another"),)))
    while alone.turn():
        pass
    assert alone.tokens() == [(4, 0)]
    page_bytes = queued // (worker.counters["pages_sent"] - 1)
    assert worker.sender.in_flight_bytes == queued + page_bytes
    for _ in range(12):
        _send_what_waits(worker)
        while alone.turn():
            pass
    assert sorted(alone.tokens()) == [(1, 0), (2, 0), (3, 0), (4, 0)]
    _send_what_waits(worker)
    assert worker.sender.in_flight_bytes == 0


def test_a_prompt_that_is_kept_back_may_end() -> None:
    alone, worker = prefill(num_pages=32, queue_bytes=0)
    alone.submit(1, num_tokens=48)
    worker.handle(Granted((alone.grant(1),)))
    while alone.turn():
        pass
    assert worker.counters["decodes_behind"] == 1
    worker.handle(Aborted((1,)))
    while alone.turn():
        pass
    worker.check_idle()
    assert worker.sender.in_flight_bytes == 0


@pytest.mark.parametrize("heads", [{"tp_size": 3}, {"stored_kv_heads": 3}])
def test_a_grant_of_heads_that_nothing_divides_ends_the_room(heads: dict[str, int]) -> None:
    alone, worker = prefill()
    alone.submit(1)
    worker.handle(Granted((msgspec.structs.replace(alone.grant(1), **heads),)))
    while alone.turn():
        pass
    assert alone.events() == [("failed", 1, "stale")]
    worker.check_idle()


def test_first_tokens_of_a_chunk_are_read_while_the_next_one_computes() -> None:
    alone, worker = prefill()
    for room in (1, 20):
        alone.submit(room, num_tokens=8)
        worker.handle(Granted((alone.grant(room),)))
    alone.turn()
    assert alone.tokens() == []
    alone.turn()
    assert alone.tokens() == [(1, 0)]
    alone.turn()
    assert alone.tokens() == [(1, 0), (20, 0)]
    assert alone.net.stats["chunk_read_1_behind"] > 0


class OnDevice:
    """Staged pages that are freed once the host has them."""

    alive = 0

    def __init__(self, pages: np.ndarray) -> None:
        self._pages = pages
        OnDevice.alive += 1

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._pages.copy()

    def __del__(self) -> None:
        OnDevice.alive -= 1


def test_the_pages_of_a_long_cached_prefix_pass_through_memory_that_was_planned() -> None:
    alone, worker = prefill(num_pages=40)
    gather, seen = worker._engine.gather_runs, []

    def staged(page_ids: Any) -> list[list[Any]]:
        found = [[OnDevice(shard) for shard in shards] for shards in gather(page_ids)]
        seen.append(OnDevice.alive)
        return found

    worker._engine.gather_runs = staged  # type: ignore[method-assign]
    tokens = wire.pack_i32(range(60))  # 15 pages, runs of 4
    for room in (1, 2, 3):
        alone.submit(room, token_ids=tokens, num_prompt_tokens=60)
        worker.handle(Granted((alone.grant(room),)))
        while alone.turn():
            pass
    assert alone.tokens() == [(1, 0), (2, 0), (3, 0)]
    assert worker.counters["cached_tokens"] == 2 * 56
    assert worker.counters["pages_sent"] == 3 * 15
    assert len(seen) == 8 + 2 * 4  # two pages per chunk, then four runs at once
    most = worker._buckets.staged_pages // worker._buckets.run_pages[-1]
    assert max(seen) == most == 2
    assert OnDevice.alive == worker._staged_pages == 0


@pytest.mark.parametrize("turns", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "code"),
    [("nacked", "stale"), ("nacked", "gone"), ("lost", "peer_lost"), ("unsent", "stale")],
)
def test_a_failed_transfer_is_told_and_frees_its_pages(turns: int, kind: str, code: str) -> None:
    alone, worker = prefill()
    alone.submit(1, num_tokens=16)
    worker.handle(Granted((alone.grant(1),)))
    for _ in range(turns):
        alone.turn()
    worker.handle(SenderEvent(kind, 1, "why", code))  # type: ignore[arg-type]
    while alone.turn():
        pass
    assert ("failed", 1, code) in alone.events()
    assert worker.state().pages_held == 0


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_an_abort_at_any_time_frees_every_page_and_says_nothing_but_how_it_went(turns: int) -> None:
    alone, worker = prefill()
    alone.submit(1, num_tokens=16)
    worker.handle(Granted((alone.grant(1),)))
    for _ in range(turns):
        alone.turn()
    before = len(alone.batches)
    worker.handle(Aborted((1,)))
    while alone.turn():
        pass
    assert worker.state().pages_held == 0
    said = alone.batches[before:]
    assert [(leg.room, leg.ending) for batch in said for leg in batch.legs] == [(1, "aborted")]
    assert not any(batch.num_rows or batch.events for batch in said)
    worker.check_idle()


def test_a_room_that_comes_again_is_not_told_what_was_drawn_before_it_ended() -> None:
    alone, worker = prefill()
    alone.submit(1)
    worker.handle(Granted((alone.grant(1),)))
    worker.turn()
    worker.handle(Aborted((1,)))
    alone.submit(1)
    while alone.turn():
        pass
    assert (alone.tokens(), worker.num_held()) == ([], 0)


def test_rooms_of_an_api_process_that_is_gone_are_dropped() -> None:
    alone, worker = prefill()
    alone.submit(1)
    alone.submit(2)
    worker.handle(ApiGone("somebody else"))
    assert worker.state().rooms == 2
    worker.handle(ApiGone("api"))
    worker.check_idle()


def test_a_deadline_ends_a_room_that_waits() -> None:
    alone, worker = prefill()
    alone.submit(1)
    alone.clock.advance(61.0)
    alone.turn()
    assert alone.events() == [("failed", 1, "deadline")]
    worker.check_idle()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"token_ids": b"12345"}, "5 bytes"),
        ({"token_ids": b""}, "0 bytes"),
        ({"num_prompt_tokens": 0}, "0 of prompt"),
        ({"num_prompt_tokens": 9}, "9 of prompt"),
        ({"sampling": wire.SamplingParams(0)}, "max_new_tokens"),
        ({"sampling": wire.SamplingParams(2), "num_prompt_tokens": 1}, "max_new_tokens: 2, 2 gen"),
        ({"sampling": wire.SamplingParams(1, stop_token_ids=(1,) * 17)}, "stop_token_ids"),
        ({"sampling": wire.SamplingParams(1, logit_bias=((1, 1.0),) * 301)}, "logit_bias"),
        ({"sampling": wire.SamplingParams(1, num_top_logprobs=21)}, "num_top_logprobs"),
        ({"disagg_prefill_dp_rank": 1}, "rank 1, prefill has dp size 1"),
        ({"disagg_prefill_dp_rank": -2}, "rank -2, prefill has dp size 1"),
    ],
)
def test_a_leg_that_would_end_the_engine_is_refused(fields: dict[str, Any], named: str) -> None:
    alone, worker = prefill()
    refusal = worker.refusal(alone.leg(1, **fields))
    assert refusal is not None
    assert refusal.code == "bad_request"
    assert named in refusal.message


def test_two_ranks_compute_in_one_turn_and_each_tells_its_load() -> None:
    alone, worker = prefill(dp_size=2)
    for room, rank in ((1, 1), (20, -1)):
        alone.submit(room, num_tokens=8, disagg_prefill_dp_rank=rank)
        worker.handle(Granted((alone.grant(room),)))
    alone.turn()
    state = worker.state()
    assert [load.running_requests for load in worker.rank_loads()] == [1, 1]
    assert [load.pages_free for load in worker.rank_loads()] == [6, 6]
    assert (state.load.pages_total, state.load.pages_free, state.pages_held) == (16, 12, 4)
    assert worker.counters["chunks"] == 1
    assert {held.prompt.rank for held in worker._held.values()} == {0, 1}
    while alone.turn():
        pass
    assert sorted(alone.tokens()) == [(1, 0), (20, 0)]


def test_prompt_logprobs_are_cut_from_the_rows_of_their_rank() -> None:
    alone, worker = prefill(dp_size=2)
    asks = wire.SamplingParams(2, prompt_logprobs_start=0)
    for room, rank in ((1, 0), (20, 1)):
        alone.submit(room, num_tokens=3, disagg_prefill_dp_rank=rank, sampling=asks)
        worker.handle(Granted((alone.grant(room),)))
    while alone.turn():
        pass
    told = {e.room: e.prompt_logprobs for batch in alone.batches for e in batch.events}
    for room in (1, 20):
        logprobs = told[room]
        assert logprobs is not None
        assert wire.unpack_i32(logprobs.token_ids).tolist() == [room + 1, room + 2]
        assert wire.unpack_f32(logprobs.logprobs).tolist() == [prompt_logprob(1), prompt_logprob(2)]


def test_too_long_and_too_many_are_refused_at_the_door() -> None:
    alone, worker = prefill(num_pages=2)
    long = worker.refusal(alone.leg(1, num_tokens=9))
    assert long is not None
    assert (long.code, long.message) == (
        "too_long",
        "9 tokens, this prefill worker takes at most 8",
    )
    for room in (1, 2, 3, 4):
        alone.submit(room)
    many = worker.refusal(alone.leg(5))
    assert many is not None
    assert (many.code, many.message) == ("queue_full", "4 requests held, at most 4")
    # One leg that comes twice, and some that were admitted at the same time.
    together = tuple(alone.leg(room) for room in (4, 5, 6))
    worker.handle(Submitted(together, alone.clock.monotonic_s()))
    alone.turn()
    assert alone.events() == [("failed", 5, "queue_full"), ("failed", 6, "queue_full")]
    assert alone.batches[-1].events[-1].message == "4 requests held, at most 4"
    assert worker.num_held() == 4


@pytest.mark.parametrize("start", [0, 1, 5, 8, 13])
def test_prompt_logprobs_begin_where_asked_over_chunks_and_cached_pages(start: int) -> None:
    alone, worker = prefill(num_pages=16)
    for room in (1, 1001):
        tokens = np.arange(14)
        sampling = wire.SamplingParams(4, prompt_logprobs_start=start)
        alone.submit(
            room, 14, token_ids=wire.pack_i32(tokens), num_prompt_tokens=14, sampling=sampling
        )
        worker.handle(Granted((alone.grant(room),)))
        while alone.turn():
            pass
    events = [event for batch in alone.batches for event in batch.events]
    assert len(events) == 2
    for event in events:
        told = event.prompt_logprobs
        assert told is not None
        first = max(start, 1)
        assert told.start == first
        assert wire.unpack_i32(told.token_ids).tolist() == list(range(first, 14))
        expected = [prompt_logprob(position) for position in range(first, 14)]
        assert wire.unpack_f32(told.logprobs).tolist() == expected
        assert len(wire.unpack_i32(told.top_ids)) == len(expected) * wire.NUM_TOP_LOGPROBS


def test_a_leg_tells_when_each_stage_and_chunk_was_from_its_receipt_on() -> None:
    alone, worker = prefill()
    alone.submit(1, num_tokens=20)  # chunks of 8, 8 and 4
    alone.clock.advance(1.0)
    worker.handle(Granted((alone.grant(1),)))
    for _ in range(4):
        alone.clock.advance(1.0)
        alone.turn()
    now_s = alone.clock.monotonic_s()
    shipped = Shipped("shm", 500, 3, now_s + 1.0, now_s + 2.0, now_s + 3.0)
    shipped.page_ends = {2: shipped.first_s, 5: shipped.last_s}
    alone.clock.advance(4.0)
    worker.handle(SenderEvent("acked", 1, shipped=shipped))
    alone.turn()
    (leg,) = alone.legs()
    assert (leg.room, leg.ending, leg.cached_tokens) == (1, "", 0)
    second = 1_000_000
    assert leg.stages == {
        "queued": 0,
        "granted": 1 * second,
        "computing": 2 * second,
        "sending": 5 * second,
        "done": 9 * second,
    }
    assert wire.unpack_i64(leg.chunks).reshape(-1, 5).tolist() == [
        [8, 2 * second, 3 * second, 3 * second, 6 * second],
        [8, 3 * second, 4 * second, 4 * second, -1],
        [4, 4 * second, 5 * second, 5 * second, 7 * second],
    ]
    assert leg.shipment == wire.Shipment("shm", 500, 3, 6 * second, 7 * second, 8 * second)


def test_a_leg_that_fails_tells_what_had_left() -> None:
    alone, worker = prefill()
    alone.submit(1, num_tokens=16)
    worker.handle(Granted((alone.grant(1),)))
    alone.turn()
    alone.turn()
    worker.handle(SenderEvent("lost", 1, "reset", shipped=Shipped("tcp", 9, 1, 5.0)))
    alone.turn()
    (leg,) = alone.legs()
    assert leg.ending == "peer_lost"
    assert leg.shipment is not None
    assert (leg.shipment.num_bytes, leg.shipment.acked_us) == (9, -1)


def test_a_prompt_of_very_many_chunks_is_told_in_a_bounded_number() -> None:
    chunks: list[ChunkTimes] = []
    for number in range(3 * MAX_CHUNKS):
        next_chunk(chunks, 8, float(number), 2 * number + 2).computed_s = number + 1.0
    assert len(chunks) == MAX_CHUNKS
    assert sum(chunk.num_tokens for chunk in chunks) == 3 * MAX_CHUNKS * 8
    assert (chunks[-1].dispatched_s, chunks[-1].computed_s) == (MAX_CHUNKS - 1.0, 3.0 * MAX_CHUNKS)
    assert chunks[-1].page_end == 6 * MAX_CHUNKS


def test_a_route_is_taken_back_when_its_room_is_over() -> None:
    alone, worker = prefill(dp_size=2)
    live: dict[int, int] = {}

    def feed(bound: dict[int, int], ended: list[int]) -> None:
        live.update(bound)
        for room in ended:
            live.pop(room, None)

    as_any: Any = worker
    as_any._publisher = SimpleNamespace(feed=feed)
    as_any.on_loop = lambda function, *args: function(*args)
    as_any.publish = lambda batches: PrefillWorker.publish(worker, batches)
    for room in (1, 2):
        alone.submit(room)
    worker.handle(Granted(tuple(map(alone.grant, (1, 2)))))
    while alone.turn():
        pass
    assert sorted(live) == [1, 2]
    worker.handle(SenderEvent("acked", 1, shipped=Shipped()))
    worker.handle(Aborted((2,)))
    alone.turn()
    assert not live
