"""What decode does with pages, steps and ends, event by event; tests/sim covers the rest."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from decode.engine import StepInFlight
from decode.held import GrantFailed
from decode.speculation import Speculation
from model.sampling import NOT_A_TOKEN, NOTHING_LEFT
from tests.sim.alone import PAGE, Alone
from tests.sim.network import chain, draw, kv_of
from tests.sim.workers import SimDecode
from transfer import wire
from transfer.backend import Arrived, Finished, FirstToken, PagesArrived, SenderLost
from transfer.errors import Code
from transfer.group import Told
from transfer.pages import PagePool
from transfer.worker import Aborted, ApiGone, Submitted


def decode(**sizes: int) -> tuple[Alone, SimDecode]:
    alone = Alone("decode", **sizes)
    return alone, cast(SimDecode, alone.worker)


def arrive(alone: Alone, room: int, num_tokens: int = 3, finished: int = wire.RUNNING) -> None:
    """Prefill ships what `Alone.submit` asked for."""
    states = chain(range(room, room + num_tokens))
    num_pages = -(-num_tokens // PAGE)
    pages = np.zeros((2, num_pages * PAGE, 2), np.float32)
    pages[:, :num_tokens] = kv_of(states, 0, 2, 2)
    shard = pages.reshape(1, 2, num_pages, PAGE, 2, 1)
    alone.worker.handle(PagesArrived(room, 0, [shard]))
    first = FirstToken(draw(states[-1], 0, 0), 0, num_tokens, finished)
    alone.worker.handle(Finished(room, first))


def start(alone: Alone, room: int, num_tokens: int = 3, max_new: int = 4) -> None:
    alone.submit(room, num_tokens, max_new)
    alone.turn()
    arrive(alone, room, num_tokens)


def test_a_room_is_granted_the_pages_of_its_prompt() -> None:
    alone, worker = decode()
    alone.submit(1, num_tokens=8)
    alone.turn()
    (grant,) = alone.grants
    assert (grant.room, grant.epoch) == (1, worker.epoch)
    assert len(wire.unpack_i32(grant.page_ids)) == 2
    assert worker.state().pages_held == 3  # one for the first token
    assert worker.receiver.expected == {1}


def test_a_report_amid_requests_counts_pages_and_looks_at_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, worker = decode(num_pages=32)
    start(alone, 1, num_tokens=4 * PAGE)
    alone.turn()
    with monkeypatch.context() as patch:
        patch.setattr(PagePool, "refcount", None)
        assert worker.state().pages_held == 5
    (pool,) = worker._admission._pools
    assert pool.reserve(1) is not None  # and nobody has it
    with pytest.raises(AssertionError):
        worker.state()


def test_a_report_between_requests_looks_at_each_page() -> None:
    alone, worker = decode(num_pages=32)
    start(alone, 1, num_tokens=4 * PAGE)
    while alone.turn():
        pass
    assert worker.state().pages_cached == 4
    (pool,) = worker._admission._pools
    first, second, *_ = worker._admission.caches[0].pages
    pool.share((first,))
    pool.release((second,))
    with pytest.raises(AssertionError):
        worker.state()


def test_a_request_runs_to_its_length_and_gives_everything_back() -> None:
    alone, worker = decode()
    start(alone, 1, max_new=6)
    while alone.turn():
        pass
    assert alone.tokens() == [(1, idx) for idx in range(1, 6)]  # index 0 came from prefill
    worker.check_idle()


def test_a_deadline_is_counted_from_receipt_however_the_wall_clock_is_set() -> None:
    alone, _ = decode()
    start(alone, 1, max_new=20)
    alone.submit(2, left_s=20.0)
    alone.clock.set_ahead(3600.0)
    alone.turn()
    assert alone.events() == []
    alone.clock.set_ahead(-86_400.0)
    alone.clock.advance(21.0)
    alone.turn()
    assert alone.events() == [("failed", 2, "deadline")]
    alone.clock.advance(40.0)
    alone.turn()
    assert alone.events()[1:] == [("failed", 1, "deadline")]


def test_submits_that_came_together_do_not_exceed_the_bound_on_rooms() -> None:
    alone, worker = decode()
    legs = tuple(alone.leg(room) for room in range(1, 8))
    assert all(worker.refusal(leg) is None for leg in legs)  # none of them is held yet
    worker.handle(Submitted(legs, alone.clock.monotonic_s()))
    alone.turn()
    assert worker.num_held() == worker.config.max_queued_requests == 4
    assert alone.events() == [("failed", room, "queue_full") for room in (5, 6, 7)]


def test_the_request_that_has_waited_longest_goes_first_wherever_it_came_in() -> None:
    """A submit carries the request's age, since hosts' wall clocks need not agree."""
    alone, _ = decode(num_slots=1)
    start(alone, 1, max_new=2)
    alone.submit(2, age_s=1.0)
    alone.clock.advance(3.0)
    alone.submit(3, age_s=2.5)
    alone.submit(4, age_s=5.0)  # it waited elsewhere before
    for room in (4, 2, 3):
        while alone.turn():
            pass
        assert alone.grants[-1].room == room
        alone.worker.handle(Aborted((room,)))


def test_who_waits_is_seated_as_soon_as_an_end_leaves_a_seat() -> None:
    """The turn in which a request ends must ask for another: no message would wake the worker."""
    alone, _ = decode(num_slots=1)
    start(alone, 1, max_new=3)
    alone.submit(2)
    while alone.turn():
        pass
    assert [grant.room for grant in alone.grants] == [1, 2]


def test_a_request_that_its_first_token_ended_takes_no_step() -> None:
    alone, worker = decode()
    alone.submit(1, max_new=1)
    alone.turn()
    arrive(alone, 1, finished=wire.LENGTH)
    assert not alone.turn()
    assert [leg.ending for leg in alone.legs()] == [""]
    assert not any(batch.num_rows or batch.events for batch in alone.batches)
    worker.check_idle()


@pytest.mark.parametrize(
    ("drawn", "code"), [(NOT_A_TOKEN, "internal"), (NOTHING_LEFT, "bad_request")]
)
def test_a_slot_that_can_draw_nothing_fails_and_its_neighbours_go_on(
    drawn: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, worker = decode()
    for room in (1, 2):
        start(alone, room, max_new=4)
    step, seat = worker._engine.step, worker._held[2].seat
    assert seat is not None

    def undrawn(slots: np.ndarray, *args: Any) -> StepInFlight:
        flight = step(slots, *args)
        ids = np.array(flight.out.ids)
        ids[flight.rows[slots == seat.slot]] = drawn
        return replace(flight, out=flight.out._replace(ids=ids))

    monkeypatch.setattr(worker._engine, "step", undrawn)
    while alone.turn():
        pass
    assert alone.events() == [("failed", 2, code)]
    assert {leg.room: leg.ending for leg in alone.legs()} == {1: "", 2: code}


@pytest.mark.parametrize("drawn", [NOT_A_TOKEN, NOTHING_LEFT])
def test_a_request_ends_well_whatever_is_drawn_behind_a_draft_of_its_end(
    drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speculation, "pays", lambda self, slots: True)
    alone, worker = decode(drafts=1)
    end = 5
    alone.submit(1, sampling=wire.SamplingParams(9, stop_token_ids=(end,)))
    alone.turn()
    arrive(alone, 1)
    step = worker._engine.step

    def ending(*args: Any) -> StepInFlight:
        flight = step(*args)
        ids = np.array(flight.out.ids).reshape(-1, flight.width + flight.has_drafts)
        ids[flight.rows, :2] = end, drawn
        return replace(flight, out=flight.out._replace(ids=ids.ravel()))

    monkeypatch.setattr(worker._engine, "step", ending)
    while alone.turn():
        pass
    assert (alone.tokens(), alone.events()) == ([(1, 1)], [])
    assert [leg.ending for leg in alone.legs()] == [""]
    worker.check_idle()


@pytest.mark.parametrize(
    ("words", "named"),
    [(((1,),) * 129, "129, at most 128"), (((2,), (1,) * 17), "17, at most 16")],
)
def test_sequences_that_no_slot_holds_are_refused(
    words: tuple[tuple[int, ...], ...], named: str
) -> None:
    alone, worker = decode()
    refusal = worker.refusal(alone.leg(1, sampling=wire.SamplingParams(9, bad_words=words)))
    assert refusal is not None
    assert (refusal.code, refusal.message) == ("bad_request", f"bad_words: {named}")


def test_a_dry_pool_sends_the_youngest_away_and_the_oldest_goes_on() -> None:
    alone, worker = decode(num_pages=4)
    for room in (1, 2):
        start(alone, room, num_tokens=7, max_new=8)
    while alone.turn():
        pass
    assert alone.events() == [("preempted", 2, "")]
    assert worker.counters["preemptions"] == 1
    assert [token for token in alone.tokens() if token[0] == 1] == [(1, i) for i in range(1, 8)]
    indices = [idx for room, idx in alone.tokens() if room == 2]
    assert indices == list(range(1, len(indices) + 1))
    worker.check_idle()


def test_nobody_is_preempted_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "pays", lambda self, slots: True)
    alone, worker = decode(num_pages=4, drafts=3)
    alone.submit(1, num_tokens=7, max_new=3)  # its drafts would need a third page at once
    alone.submit(2, num_tokens=7, max_new=2)  # this one leaves two pages after one step
    alone.turn()
    for room in (1, 2):
        arrive(alone, room, num_tokens=7)
    while alone.turn():
        pass
    assert sorted(alone.tokens()) == [(1, 1), (1, 2), (2, 1)]
    assert not alone.events()
    worker.check_idle()


def test_a_dry_rank_sends_its_own_youngest_away_and_steps_are_of_both_ranks() -> None:
    alone, worker = decode(num_pages=4, dp_size=2)
    for room, rank in ((1, 0), (2, 0), (3, 1)):
        alone.submit(room, num_tokens=7, max_new=8, routed_dp_rank=rank)
    alone.turn()
    assert [load.slots_free for load in worker.rank_loads()] == [2, 3]
    assert [load.pages_free for load in worker.rank_loads()] == [0, 2]
    for room in (1, 2, 3):
        arrive(alone, room, num_tokens=7)
    while alone.turn():
        pass
    assert alone.events() == [("preempted", 2, "")]
    for room in (1, 3):
        assert [idx for number, idx in alone.tokens() if number == room] == list(range(1, 8))
    assert worker.counters["steps"] < 10  # one room after the other, it would take 14 or more
    worker.check_idle()


def test_two_steps_read_in_one_turn_are_two_messages() -> None:
    alone, _ = decode(num_pages=4)
    for room in (1, 2):
        start(alone, room, num_tokens=7, max_new=8)
    while alone.turn():
        pass
    for batch in alone.batches:
        rooms = wire.unpack_i64(batch.rooms).tolist()
        assert len(rooms) == len(set(rooms))
    steps = [batch.step for batch in alone.batches]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("phase", ["queued", "reserved", "receiving", "ready", "decoding"])
@pytest.mark.parametrize("how", ["abort", "api_gone", "deadline"])
def test_an_end_in_every_phase_frees_slot_and_pages(phase: str, how: str) -> None:
    alone, worker = decode()
    alone.submit(1, max_new=20)
    phases = ["queued", "reserved", "receiving", "ready", "decoding"]
    steps = [
        alone.turn,
        lambda: worker.handle(PagesArrived(1, 0, [np.zeros((1, 2, 0, PAGE, 2, 1), np.float32)])),
        lambda: arrive(alone, 1),
        lambda: [alone.turn() for _ in range(3)],
    ]
    for step in steps[: phases.index(phase)]:
        step()
    assert worker._held[1].room.state.value == phase
    if how == "abort":
        worker.handle(Aborted((1,)))
    elif how == "api_gone":
        worker.handle(ApiGone("api"))
    else:
        alone.clock.advance(61.0)
    while alone.turn():
        pass
    told = [event for event in alone.events() if event[1] == 1]
    assert told == ([("failed", 1, "deadline")] if how == "deadline" else [])
    worker.check_idle()


def test_a_room_whose_pages_prefill_cut_differently_for_two_nodes_ends_at_once_and_alone() -> None:
    alone, worker = decode()
    worker._receiving._nodes = [(0, 1)]
    for room in (1, 2):
        alone.submit(room)
        alone.turn()
        worker.handle(PagesArrived(room, 0, [np.zeros((1, 2, 1, PAGE, 2, 1), np.float32)]))
    worker.handle(Told(1, came=(Arrived(1, 0, 2),)))
    alone.turn()
    assert alone.events() == [("failed", 1, "peer_lost")]
    assert worker.receiver.expected == {2}
    worker.handle(Told(1, came=(Arrived(2, 0, 1),)))
    assert worker.counters["pages_received"] == 1


def test_pages_that_come_after_the_end_are_counted_and_not_placed() -> None:
    alone, worker = decode()
    alone.submit(1)
    alone.turn()
    worker.handle(Aborted((1,)))
    arrive(alone, 1)
    assert worker.counters["pages_late"] == 1
    assert worker.counters["pages_received"] == 0
    worker.check_idle()


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (SenderLost((1,), "died", Code.PEER_LOST), "peer_lost"),
        (SenderLost((1,), "cancelled", Code.GONE), "gone"),
        (GrantFailed((1,), "not there"), "peer_lost"),
    ],
)
def test_a_lost_prefill_is_told_as_such(event: object, code: str) -> None:
    alone, worker = decode()
    alone.submit(1)
    alone.turn()
    worker.handle(event)
    alone.turn()
    assert alone.events() == [("failed", 1, code)]
    worker.check_idle()


def test_a_grant_whose_answer_alone_was_lost_ends_nothing() -> None:
    alone, worker = decode()
    start(alone, 1, max_new=8)
    worker.handle(GrantFailed((1,), "no answer"))
    for _ in range(4):
        alone.turn()
    worker.handle(GrantFailed((1,), "no answer"))
    while alone.turn():
        pass
    assert not alone.events()
    assert alone.tokens() == [(1, idx) for idx in range(1, 8)]
    worker.check_idle()


def test_a_request_that_could_never_fit_is_refused_at_the_door() -> None:
    alone, worker = decode(num_pages=3)
    assert worker.refusal(alone.leg(1, num_tokens=4, max_new=8)) is None
    refused = worker.refusal(alone.leg(1, num_tokens=4, max_new=9))
    assert refused is not None
    assert refused.code == "too_long"
    assert refused.message == "13 tokens, this decode worker takes at most 12"


def test_a_full_queue_is_refused_at_the_door() -> None:
    alone, worker = decode()
    for room in (1, 2, 3, 4):
        alone.submit(room)
    refused = worker.refusal(alone.leg(5))
    assert refused is not None
    assert refused.code == "queue_full"


def test_a_rank_that_there_is_not_is_refused_at_the_door() -> None:
    alone, worker = decode()
    assert worker.refusal(alone.leg(1, routed_dp_rank=0, disagg_prefill_dp_rank=9)) is None
    refused = worker.refusal(alone.leg(1, routed_dp_rank=1))
    assert refused is not None
    assert refused.code == "bad_request"
    assert refused.message == "data-parallel rank 1, decode has dp size 1"


def test_an_adapter_that_there_is_not_is_refused_at_the_door() -> None:
    alone, worker = decode()
    assert worker.refusal(alone.leg(1, adapter="sql")) is None
    refused = worker.refusal(alone.leg(1, adapter="legal"))
    assert refused is not None
    assert refused.code == "bad_request"
    assert refused.message == "adapter 'legal'; this decode worker has: sql"


def test_a_leg_tells_when_each_stage_was_and_how_many_steps_it_took() -> None:
    alone, worker = decode()
    alone.submit(1, max_new=4)
    alone.clock.advance(1.0)
    alone.turn()
    alone.clock.advance(1.0)
    arrive(alone, 1)
    more = True
    while more:
        alone.clock.advance(1.0)
        more = alone.turn()
    (leg,) = alone.legs()
    second = 1_000_000
    assert (leg.room, leg.ending, leg.num_steps) == (1, "", 3)
    assert leg.stages == {
        "queued": 0,
        "reserved": 1 * second,
        "receiving": 2 * second,
        "ready": 2 * second,
        "decoding": 3 * second,
        "done": 6 * second,
    }
    assert leg.first_step_us == 4 * second
    worker.check_idle()


def test_a_preempted_leg_says_so() -> None:
    alone, _ = decode(num_pages=4)
    for room in (1, 2):
        start(alone, room, num_tokens=7, max_new=8)
    while alone.turn():
        pass
    assert {leg.room: leg.ending for leg in alone.legs()} == {1: "", 2: "preempted"}


def test_nobody_is_told_of_legs_of_an_api_process_that_is_gone() -> None:
    alone, worker = decode()
    alone.submit(1)
    worker.handle(ApiGone("api"))
    alone.turn()
    assert alone.legs() == []
