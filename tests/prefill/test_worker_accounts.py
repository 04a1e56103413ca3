"""What prefill reports of itself: early grants, failed transfers, loads, pages and shipments."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from model.sampling import NOT_A_TOKEN, NOTHING_LEFT, SampleOut
from prefill.worker import EARLY_GRANT_S, LOAD_REFRESH_S, Granted
from tests.prefill.test_worker import prefill
from tests.sim.alone import Alone
from tests.sim.workers import run_now
from transfer import wire
from transfer.backend import FirstToken, SenderEvent, Shipped
from transfer.errors import Unavailable
from transfer.layout import HeadRun
from transfer.outbound import Lane
from transfer.worker import Aborted


def run_dry(alone: Alone) -> None:
    """Run turns until there is nothing to compute."""
    while alone.turn():
        pass


def granted(alone: Alone, room: int, num_tokens: int = 3, **fields: Any) -> None:
    alone.submit(room, num_tokens, **fields)
    alone.worker.handle(Granted((alone.grant(room),)))


# --- grants ---------------------------------------------------------------------------------------


def test_a_grant_waits_for_its_submit_nearly_as_long_as_it_is_kept() -> None:
    alone, worker = prefill()
    worker.handle(Granted((alone.grant(1),)))
    alone.clock.advance(EARLY_GRANT_S - 1.0)
    alone.turn()
    alone.submit(1)
    assert alone.turn()
    assert worker.counters["grants_expired"] == 0


def test_a_submit_that_comes_long_after_its_grant_fails_at_once() -> None:
    alone, worker = prefill()
    worker.handle(Granted((alone.grant(1),)))
    alone.clock.advance(EARLY_GRANT_S + 1.0)
    alone.turn()
    alone.submit(1)
    run_dry(alone)
    assert alone.events() == [("failed", 1, "stale")]
    worker.check_idle()


def test_a_grant_that_was_claimed_does_not_expire() -> None:
    alone, worker = prefill()
    worker.handle(Granted((alone.grant(1),)))
    alone.submit(1)
    run_dry(alone)
    worker.handle(SenderEvent("acked", 1))
    alone.clock.advance(EARLY_GRANT_S + 1.0)
    alone.turn()
    assert worker.counters["grants_expired"] == 0


def test_a_grant_goes_with_an_abort_that_comes_before_the_submit() -> None:
    alone, worker = prefill()
    worker.handle(Granted((alone.grant(1),)))
    worker.handle(Aborted((1,)))
    worker.check_idle()


def test_a_grant_that_is_told_twice_is_taken_once() -> None:
    alone, worker = prefill()
    granted(alone, 1)
    worker.handle(Granted((alone.grant(1),)))
    alone.turn()
    worker.handle(Granted((alone.grant(1),)))
    run_dry(alone)
    assert alone.tokens() == [(1, 0)]
    assert worker.counters["grants_stale"] == 0


def test_no_grant_is_taken_before_the_worker_is_ready() -> None:
    alone, worker = prefill()
    worker._ready = False
    with pytest.raises(Unavailable, match="not ready"):
        run_now(worker._granted(wire.GrantBatch((alone.grant(1),))))


# --- transfers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code", "counted"),
    [
        ("nacked", "stale", {"transfers_refused": 1}),
        ("nacked", "gone", {}),  # decode counts why the room was gone
        ("lost", "peer_lost", {"transfers_lost": 1}),
        ("unsent", "stale", {"transfers_unsent": 1}),
    ],
)
def test_every_failed_transfer_is_counted_by_its_cause(
    kind: str, code: str, counted: dict[str, int]
) -> None:
    alone, worker = prefill()
    granted(alone, 1)
    alone.turn()
    worker.handle(SenderEvent(kind, 1, "why", code))  # type: ignore[arg-type]
    found = {name: n for name, n in worker.counters.items() if name.startswith("transfers_")}
    assert found == counted


def test_an_acknowledgement_of_pages_that_were_not_sent_ends_its_room_and_not_the_worker() -> None:
    alone, worker = prefill()
    granted(alone, 1, num_tokens=16)
    alone.turn()  # the first of two chunks
    worker.handle(SenderEvent("acked", 1, shipped=Shipped()))
    run_dry(alone)
    assert alone.events() == [("failed", 1, "stale")]
    assert worker.counters["transfers_refused"] == 1
    worker.check_idle()


def test_the_leg_of_an_aborted_room_tells_what_had_left() -> None:
    alone, worker = prefill()
    granted(alone, 1, num_tokens=16)
    alone.turn()
    alone.turn()
    (lane,) = worker.sender._all_lanes()
    sent = _send_one(alone, lane)
    worker.handle(Aborted((1,)))
    run_dry(alone)
    (leg,) = alone.legs()
    assert leg.shipment is not None
    assert (leg.shipment.num_frames, leg.shipment.num_bytes) == (1, sent)


def _send_one(alone: Alone, lane: Lane) -> int:
    """Let the next frame leave; returns its number of bytes."""
    sender: Any = alone.worker._sending.sender  # type: ignore[union-attr]
    job = sender.next_job(lane)
    assert job.payload is not None
    sender.sent(lane, job, alone.clock.monotonic_s())
    return job.num_bytes


def test_pages_in_flight_and_where_they_went_are_in_the_state() -> None:
    alone, worker = prefill()
    granted(alone, 1, num_tokens=8)
    run_dry(alone)
    (lane,) = worker.sender._all_lanes()
    in_flight = worker.state().in_flight_bytes
    assert in_flight == lane.queued_bytes > 0
    sent = _send_one(alone, lane)
    worker.sender.count("connections_shm")
    state = worker.state()
    assert state.in_flight_bytes == in_flight - sent
    assert state.counters["connections_shm"] == 1.0
    assert [pair.num_bytes for pair in state.transfers] == [sent]


def test_heads_are_cut_as_each_decode_group_stores_them() -> None:
    alone, worker = prefill()
    seen: list[tuple[int, Sequence[HeadRun]]] = []

    def send_pages(
        grant: wire.Grant, start: int, shards: Any, runs: Sequence[HeadRun], frame_pages: int
    ) -> None:
        assert frame_pages == 0  # what fits: no other node sends parts of these pages
        seen.append((grant.stored_kv_heads, runs))

    worker.sender.send_pages = send_pages  # type: ignore[method-assign,assignment]
    for room, stored in ((1, 2), (20, 4)):
        alone.submit(room)
        grant = msgspec.structs.replace(alone.grant(room), stored_kv_heads=stored)
        worker.handle(Granted((grant,)))
        run_dry(alone)
    assert [stored for stored, _ in seen] == [2, 4]
    assert [sum(run.num_heads for run in runs) for _, runs in seen] == [2, 4]


def test_a_worker_that_closes_closes_its_connections() -> None:
    alone, worker = prefill()
    granted(alone, 1)
    run_dry(alone)
    worker.close()
    worker.sender.open(alone.grant(2))
    assert alone.fabric.links == []


# --- what others may know -------------------------------------------------------------------------


def test_who_waits_for_a_grant_is_counted_and_who_has_one_is_running() -> None:
    alone, worker = prefill()
    for room in (1, 2, 3):
        alone.submit(room)
    assert (worker.state().grants_waiting, worker.state().load.queued_requests) == (3, 3)
    worker.handle(Granted((alone.grant(1),)))
    alone.turn()
    state = worker.state()
    assert state.grants_waiting == 2
    assert (state.load.queued_requests, state.load.running_requests) == (2, 1)


def test_prompts_that_wait_for_a_rank_are_in_its_load_before_they_are_bound_to_it() -> None:
    alone, worker = prefill(dp_size=2)
    for room, rank in ((1, 1), (2, 1), (3, -1)):
        alone.submit(room, num_tokens=8, disagg_prefill_dp_rank=rank)
    worker.state()
    loads = worker.rank_loads()
    assert [(load.queued_requests, load.queued_tokens) for load in loads] == [(0, 0), (2, 16)]
    worker.handle(Granted((alone.grant(1),)))
    alone.turn()
    worker.state()
    loads = worker.rank_loads()
    assert [(load.queued_requests, load.running_requests) for load in loads] == [(0, 0), (1, 1)]


def test_the_load_of_a_busy_loop_is_counted_anew_now_and_then() -> None:
    alone, worker = prefill()
    alone.turn()
    alone.submit(1)
    alone.turn()
    assert worker._load.queued_requests == 0
    alone.clock.advance(LOAD_REFRESH_S)
    alone.turn()
    assert worker._load.queued_requests == 1


def test_tokens_and_rooms_are_counted_once_however_many_chunks_they_took() -> None:
    alone, worker = prefill(dp_size=2)
    granted(alone, 1, num_tokens=20, disagg_prefill_dp_rank=1)  # chunks of 8, 8 and 4
    run_dry(alone)
    counters = Counter(worker.counters)
    assert counters["tokens_computed"] == 20
    assert (counters["rank_1_rooms"], counters["rank_0_rooms"]) == (1, 0)


def test_cached_pages_of_every_rank_are_counted_as_free_until_they_are_flushed() -> None:
    alone, worker = prefill(dp_size=2)
    for room, rank in ((1, 0), (20, 1)):
        granted(alone, room, num_tokens=8, disagg_prefill_dp_rank=rank)
        run_dry(alone)
        worker.handle(SenderEvent("acked", room))
    state = worker.state()
    assert (state.pages_cached, state.pages_held) == (4, 0)
    assert state.load.pages_free == state.load.pages_total == 16
    assert [load.pages_free for load in worker.rank_loads()] == [8, 8]
    assert worker.flush().flushed
    assert worker.state().pages_cached == 0


# --- what a submit says ---------------------------------------------------------------------------


@pytest.mark.parametrize(("max_new", "finish"), [(3, wire.LENGTH), (4, wire.RUNNING)])
def test_the_first_token_of_a_request_that_moved_counts_those_before_it(
    max_new: int, finish: int
) -> None:
    alone, worker = prefill()
    firsts: list[FirstToken] = []
    worker.sender.finish = lambda grant, first: firsts.append(first)  # type: ignore[method-assign]
    granted(alone, 1, num_tokens=5, max_new=max_new, num_prompt_tokens=3)
    run_dry(alone)
    assert alone.tokens() == [(1, 2)]
    assert [(first.token_idx, first.finished) for first in firsts] == [(2, finish)]


@pytest.mark.parametrize(("salt", "cached"), [("", 0), ("tenant", 4)])
def test_a_prompt_finds_what_was_computed_with_its_salt_only(salt: str, cached: int) -> None:
    alone, worker = prefill()
    tokens = wire.pack_i32(np.arange(8))
    for room, its_salt in ((1, "tenant"), (2, salt)):
        granted(alone, room, num_tokens=8, token_ids=tokens, cache_salt=its_salt)
        run_dry(alone)
        worker.handle(SenderEvent("acked", room))
    alone.turn()
    assert [leg.cached_tokens for leg in alone.legs()] == [0, cached]


@pytest.mark.parametrize("is_early", [False, True])
def test_nothing_is_computed_before_grant_and_grammar_are_there(is_early: bool) -> None:
    alone, worker = prefill()
    grant = Granted((alone.grant(1),))
    if is_early:
        worker.handle(grant)
    alone.submit(1, sampling=wire.SamplingParams(4, grammar="1"))
    if not is_early:
        worker.handle(grant)
    assert not alone.turn()
    while not alone.net.idle:
        alone.net.deliver()
    for event in worker.inbox.drain(0.0):
        worker.handle(event)
    assert alone.turn()


@pytest.mark.parametrize(
    ("drawn", "code"), [(NOT_A_TOKEN, "internal"), (NOTHING_LEFT, "bad_request")]
)
def test_a_room_whose_token_cannot_be_drawn_fails_and_sends_nothing_more(
    drawn: int, code: str
) -> None:
    alone, worker = prefill()
    sample = worker._engine.sample_first

    def undrawn(firsts: Any) -> SampleOut:
        out = sample(firsts)
        return out._replace(ids=np.full_like(out.ids, drawn))

    worker._engine.sample_first = undrawn  # type: ignore[method-assign]
    granted(alone, 1)
    run_dry(alone)
    assert alone.events() == [("failed", 1, code)]
    assert alone.tokens() == []
    assert [leg.ending for leg in alone.legs()] == [code]
    assert not worker.sender.open_rooms


def test_the_connection_to_decode_is_made_while_the_first_chunk_is_computed() -> None:
    alone, _ = prefill()
    granted(alone, 1)
    assert len(alone.fabric.links) == 1


def test_a_decode_worker_that_is_slow_holds_no_pages_that_others_need() -> None:
    alone, worker = prefill(num_pages=16)
    for room, address in ((1, "sim://slow"), (2, "sim://slow"), (3, "sim://quick")):
        alone.submit(room, num_tokens=32)  # half of the pool
        worker.handle(Granted((alone.grant(room, address=address),)))
    alone.turn()
    assert worker.state().pages_held > 0
    while alone.turn():
        pass
    assert alone.tokens() == [(1, 0), (2, 0), (3, 0)]
    assert worker.sender.in_flight_bytes > 0
    assert worker.state().pages_held == 0
    assert worker.state().pages_cached > 0
    for room in (1, 2, 3):
        worker.handle(SenderEvent("acked", room))
    assert worker.flush().flushed
