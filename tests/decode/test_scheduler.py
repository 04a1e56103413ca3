"""The batch, read one step behind the device: what joins a step, and what its tokens mean."""

import numpy as np
import pytest

from decode.admission import Admission, Seat
from decode.scheduler import DecodeScheduler, OutOfPages, StepPlan, StepResult, ended
from transfer.pages import PagePool
from transfer.wire import LENGTH, RUNNING, STOP, SamplingParams

PAGE = 4
EOS = 7


class Bench:
    """A scheduler that seats rooms as needed."""

    def __init__(self, num_pages: int = 16, num_slots: int = 4) -> None:
        self.pool = PagePool(num_pages)
        self.admission = Admission([self.pool], num_slots, PAGE, 0)
        self.scheduler = DecodeScheduler(self.admission)

    def start(
        self,
        room: int,
        num_tokens: int = 3,
        max_new: int = 100,
        num_generated: int = 0,
        stop_ids: tuple[int, ...] = (EOS,),
    ) -> Seat:
        """Start a room whose pages and first token have arrived.

        num_tokens: those from prefill, of which earlier attempts drew num_generated.
        """
        self.admission.add(room, num_tokens, float(room))
        (seat,) = self.admission.admit()
        params = SamplingParams(max_new, stop_token_ids=stop_ids, num_top_logprobs=room % 3 - 1)
        self.scheduler.start(seat, f"api-{room}", params, num_tokens - num_generated)
        return seat

    def end(self, room: int, slot: int) -> None:
        self.scheduler.stop(slot)
        self.admission.release(room)

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

    def read(self, plan: StepPlan) -> StepResult:
        """Read a step that drew a token for each slot."""
        return self.scheduler.finish(plan, np.full((len(plan.slots), 1), 5, np.int32))


def test_an_empty_batch_has_no_step() -> None:
    bench = Bench()
    assert bench.scheduler.plan() is None
    seat = bench.start(1)
    assert bench.scheduler.running(seat.slot) is not None
    bench.end(1, seat.slot)
    assert bench.scheduler.plan() is None


def test_a_step_enters_a_page_when_it_first_writes_to_it() -> None:
    bench = Bench()
    seat = bench.start(1, num_tokens=3)  # the first step writes at position 3, the next at 4
    entered = [int(bench.plan().new_pages[0]) for _ in range(6)]
    assert entered == [-1, seat.pages[1], -1, -1, -1, seat.pages[2]]


def test_a_prompt_that_fills_its_pages_starts_on_a_page_of_its_own() -> None:
    bench = Bench()
    seat = bench.start(1, num_tokens=8)
    assert len(seat.pages) == 3
    assert bench.plan().new_pages.tolist() == [-1]  # the page has been in the table from the start


def test_tokens_are_counted_over_all_attempts() -> None:
    bench = Bench()
    bench.start(1, num_tokens=9, num_generated=4)
    # Prefill drew the token with index 4.
    assert [bench.read(bench.plan()).token_idx.tolist() for _ in range(3)] == [[5], [6], [7]]


def test_the_next_step_is_planned_before_the_last_one_is_known() -> None:
    bench = Bench()
    bench.start(1)
    first, second = bench.plan(), bench.plan()
    result = bench.scheduler.finish(first, np.array([[5]], np.int32))
    assert (result.token_idx.tolist(), result.finish.tolist()) == ([1], [RUNNING])
    result = bench.scheduler.finish(second, np.array([[5]], np.int32))
    assert result.token_idx.tolist() == [2]


def test_the_token_after_a_stop_is_dropped() -> None:
    bench = Bench()
    seat = bench.start(1)
    first, second = bench.plan(), bench.plan()
    result = bench.scheduler.finish(first, np.array([[EOS]], np.int32))
    assert result.finish.tolist() == [STOP]
    assert ended(result).tolist() == [0]
    bench.end(1, seat.slot)
    result = bench.scheduler.finish(second, np.array([[5]], np.int32))
    assert result.rows.tolist() == result.rooms.tolist() == []


def test_an_end_by_length_is_known_ahead_and_never_run_over() -> None:
    bench = Bench()
    bench.start(1, max_new=3)
    bench.start(2, max_new=100)
    first, second = bench.plan(), bench.plan()
    assert (first.rooms.tolist(), second.rooms.tolist()) == ([1, 2], [1, 2])
    assert bench.plan().rooms.tolist() == [2]
    assert bench.scheduler.finish(first, np.array([[5], [5]])).finish.tolist() == [RUNNING, RUNNING]
    assert bench.scheduler.finish(second, np.array([[5], [5]])).finish.tolist() == [LENGTH, RUNNING]


def test_a_batch_of_those_that_end_by_length_has_no_further_step() -> None:
    bench = Bench()
    bench.start(1, max_new=2)
    bench.plan()
    assert bench.scheduler.plan() is None


def test_rows_whose_slot_changed_hands_are_dropped_and_the_others_stay_in_line() -> None:
    bench = Bench(num_slots=2)
    old = bench.start(1)
    bench.start(2)
    plan = bench.plan()
    bench.end(1, old.slot)
    new = bench.start(3)
    assert new.slot == old.slot
    result = bench.scheduler.finish(plan, np.array([[5], [6]], np.int32))
    at = plan.rooms.tolist().index(2)
    assert result.rooms.tolist() == [2]
    assert result.rows.tolist() == [at]
    assert result.token_ids.tolist() == [[5, 6][at]]


def test_a_slot_that_only_stopped_is_dropped_too() -> None:
    bench = Bench()
    seat = bench.start(1)
    plan = bench.plan()
    bench.end(1, seat.slot)
    bench.scheduler.stop(seat.slot)  # stopping twice does no harm
    assert bench.scheduler.finish(plan, np.array([[5]])).rows.tolist() == []


def test_out_of_pages_leaves_nothing_half_done() -> None:
    bench = Bench(num_pages=3)
    first = bench.start(1, num_tokens=3)  # both have one page and need another within two steps
    second = bench.start(2, num_tokens=3)
    before = bench.plan()
    assert before.rooms.tolist() == [1, 2]
    for _ in range(2):  # the second try takes nothing more
        with pytest.raises(OutOfPages):
            bench.scheduler.plan()
        assert (len(first.pages), len(second.pages)) == (2, 1)
        bench.admission.check()
    bench.end(2, second.slot)
    after = bench.plan()
    assert after.rooms.tolist() == [1]
    assert (after.new_pages.tolist(), after.places.tolist()) == ([first.pages[1]], [1])
    assert [bench.read(plan).token_idx.tolist() for plan in (before, after)] == [[1], [2]]


def test_a_slot_forgets_the_stop_ids_of_its_last_owner() -> None:
    bench = Bench(num_slots=1)
    seat = bench.start(1, stop_ids=(5, 6))
    bench.end(1, seat.slot)
    bench.start(2, stop_ids=(EOS,))
    result = bench.scheduler.finish(bench.plan(), np.array([[6]], np.int32))
    assert result.finish.tolist() == [RUNNING]


def test_wanted_logprobs_are_told_by_slot() -> None:
    bench = Bench()
    for room in (1, 2, 3):
        bench.start(room)
    plan = bench.plan()
    wanted = dict(zip(plan.rooms.tolist(), bench.scheduler.top_wanted(plan.slots), strict=True))
    assert wanted == {1: 0, 2: 1, 3: -1}


def test_rows_are_told_to_the_api_processes_that_have_slots_now() -> None:
    bench = Bench(num_slots=2)
    for room in range(1, 6):
        seat = bench.start(room)
        assert list(bench.scheduler.by_api(bench.plan().slots)) == [f"api-{room}"]
        bench.end(room, seat.slot)
    for room in (6, 7):
        bench.start(room)
    plan = bench.plan()
    told = bench.scheduler.by_api(plan.slots)
    assert {api_id: plan.rooms[at].tolist() for api_id, at in told.items()} == {
        "api-6": [6],
        "api-7": [7],
    }
    assert len(bench.scheduler._apis) == 2  # those of the former requests are forgotten


def test_the_steps_of_a_slot_are_those_of_its_request() -> None:
    bench = Bench(num_slots=1)
    for room, num_steps in ((1, 3), (2, 1)):
        seat = bench.start(room)
        for _ in range(num_steps):
            bench.plan()
        assert bench.scheduler.num_steps(seat.slot) == num_steps
        bench.end(room, seat.slot)


def test_a_slot_forgets_the_steps_in_flight_of_its_last_owner() -> None:
    bench = Bench(num_slots=1)
    seat = bench.start(1, num_tokens=3)
    first = bench.plan()  # planned for a room that ends before the step is read
    second = bench.plan()
    bench.end(1, seat.slot)
    bench.start(2, num_tokens=3)
    for plan in (first, second):
        bench.read(plan)
    entered = [int(bench.plan().new_pages[0]) >= 0 for _ in range(6)]
    assert entered == [False, True, False, False, False, True]
