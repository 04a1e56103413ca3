"""Drafts: which are proposed and accepted, and that no request draws different tokens with them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decode.admission import Admission
from decode.drafts import NO_DRAFT, REJECTED, num_drawn, propose
from decode.engine import DecodeEngine, SlotStart, StepInFlight
from decode.local import LocalPrompt, local_buckets
from decode.scheduler import DecodeScheduler, OutOfPages, StepPlan, ended
from decode.speculation import Speculation
from model.buckets import Drafting, decode_buckets
from model.chunks import FirstSample
from model.errors import ModelError
from model.pieces import Piece
from model.sampling import NOT_A_TOKEN
from serving.demo import demo_model_path
from serving.tokenizer import Tokenizer
from tests.model.harness import open_plainly
from transfer.pages import PagePool
from transfer.prefix_cache import Sharing
from transfer.wire import LENGTH, RUNNING, STOP, SamplingParams

CAPACITY = 24
MOST_ROWS = 4


def proposed_slowly(how: Drafting, tokens: Sequence[int]) -> list[int] | None:
    """The longest match wins, then the later one."""
    best: tuple[int, int] | None = None
    for end in range(len(tokens) - 1):  # end: the last token of a match
        size = 0
        while (
            size < how.max_match
            and size <= end
            and tokens[end - size] == tokens[len(tokens) - 1 - size]
        ):
            size += 1
        if size >= how.min_match and (best is None or (size, end) > best):
            best = size, end
    if best is None:
        return None
    drafts = list(tokens[best[1] + 1 :])
    return [drafts[at % len(drafts)] for at in range(how.num_tokens)]


@given(
    st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY),
        min_size=1,
        max_size=MOST_ROWS,
    ),
    st.builds(
        lambda num, least, more: Drafting(num, least, least + more),
        st.integers(1, 5),
        st.integers(1, 3),
        st.integers(0, 3),
    ),
)
@example([[1, 2, 3, 9, 1, 2]], Drafting(3, 2, 4))
@example([[7], [7, 7]], Drafting(2, 1, 1))
@settings(max_examples=60)
def test_what_followed_the_longest_and_latest_match_is_proposed(
    rows: list[list[int]], how: Drafting
) -> None:
    rows = [*rows, *[[1]] * (MOST_ROWS - len(rows))]  # each number of rows would compile anew
    history = np.full((MOST_ROWS, CAPACITY), 1, np.int32)  # what follows the end must not count
    for row, tokens in enumerate(rows):
        history[row, : len(tokens)] = tokens
    length = jnp.array([len(tokens) for tokens in rows], jnp.int32)
    drafts, found = propose(how, jnp.asarray(history), length)
    for row, tokens in enumerate(rows):
        expected = proposed_slowly(how, tokens)
        assert bool(found[row]) == (expected is not None)
        if expected is not None:
            assert drafts[row].tolist() == expected


@pytest.mark.parametrize(
    ("drafts", "made", "drawn", "count"),
    [
        ([4, 5, 6], [1, 1, 1], [4, 5, 6, 7], 4),
        ([4, 5, 6], [1, 1, 1], [4, 9, 6, 7], 2),
        ([4, 5, 6], [1, 1, 1], [9, 5, 6, 7], 1),
        ([4, 5, 6], [1, 1, 0], [4, 5, 6, 7], 3),
        ([4, 5, 6], [0, 0, 0], [4, 5, 6, 7], 1),
        ([4, 5, 6], [1, 1, 1], [4, NOT_A_TOKEN, 6, 7], 2),
    ],
)
def test_tokens_count_up_to_the_one_behind_the_last_draft_that_was_right(
    drafts: list[int], made: list[int], drawn: list[int], count: int
) -> None:
    arrays = (jnp.array([row], jnp.int32) for row in (drafts, made, drawn))
    assert num_drawn(*(a.astype(bool) if at == 1 else a for at, a in enumerate(arrays))) == count


# --- the batch ------------------------------------------------------------------------------------

PAGE = 4


def started(num_pages: int, num_tokens: int, max_new: int) -> tuple[DecodeScheduler, Admission]:
    """A scheduler with three drafts a step and one slot."""
    admission = Admission([PagePool(num_pages)], 1, PAGE, 0)
    scheduler = DecodeScheduler(admission, drafts=3)
    admission.add(1, num_tokens, 0.0)
    (seat,) = admission.admit()
    scheduler.start(seat, "api", SamplingParams(max_new, stop_token_ids=(7,)), num_tokens)
    return scheduler, admission


def planned(scheduler: DecodeScheduler, tries: bool = True) -> StepPlan:
    plan = scheduler.plan(tries)
    assert plan is not None
    return plan


def test_pages_are_there_for_all_that_steps_in_flight_may_write() -> None:
    scheduler, admission = started(num_pages=8, num_tokens=3, max_new=100)
    seat = admission._seats[1]
    assert len(seat.pages) == 1
    # Length 4: a step writes positions 3 to 6; with all accepted, the next 7 to 10, then 11 to 14.
    plans = [planned(scheduler) for _ in range(3)]
    assert [plan.new_pages.tolist() for plan in plans] == [[page] for page in seat.pages[1:]]
    assert [plan.places.tolist() for plan in plans] == [[1], [2], [3]]
    # None was, so length is 7: the next steps write positions 6 to 9, 10 to 13, 14 to 17 at most.
    scheduler.finish(plans[0], np.array([[5, REJECTED, REJECTED, REJECTED]], np.int32))
    scheduler.finish(plans[1], np.array([[5, NO_DRAFT, NO_DRAFT, NO_DRAFT]], np.int32))
    scheduler.finish(plans[2], np.array([[5, NO_DRAFT, NO_DRAFT, NO_DRAFT]], np.int32))
    assert [planned(scheduler).new_pages.tolist() for _ in range(3)] == [
        [-1],
        [-1],
        [seat.pages[4]],
    ]


def test_no_page_is_taken_past_the_end_of_the_request() -> None:
    scheduler, admission = started(num_pages=2, num_tokens=3, max_new=6)
    plans = [planned(scheduler) for _ in range(5)]  # its tokens 1 to 5, if no draft is accepted
    assert scheduler.plan(True) is None
    assert len(admission._seats[1].pages) == 2
    result = scheduler.finish(plans[0], np.array([[5, 5, 5, 5]], np.int32))
    assert (result.token_idx.tolist(), result.columns.tolist()) == ([1, 2, 3, 4], [0, 1, 2, 3])
    result = scheduler.finish(plans[1], np.array([[5, 5, 5, NO_DRAFT]], np.int32))
    assert (result.token_idx.tolist(), result.finish.tolist()) == ([5], [LENGTH])


def test_tokens_behind_a_stop_id_are_dropped() -> None:
    scheduler, _ = started(num_pages=8, num_tokens=3, max_new=100)
    result = scheduler.finish(planned(scheduler), np.array([[5, 7, 7, 5]], np.int32))
    assert result.token_ids.tolist() == [5, 7]
    assert result.finish.tolist() == [RUNNING, STOP]
    assert ended(result).tolist() == [1]


def test_a_step_asked_for_again_enters_the_page_that_it_had_got() -> None:
    admission = Admission([PagePool(3)], 2, PAGE, 0)
    scheduler = DecodeScheduler(admission, drafts=3)
    for room in (1, 2):
        admission.add(room, 3, float(room))
    seats = admission.admit()
    for seat in seats:
        scheduler.start(seat, "api", SamplingParams(100), 3)
    for _ in range(2):
        with pytest.raises(OutOfPages):
            scheduler.plan(True)
    assert scheduler.plan(False) is not None  # without drafts there are pages enough
    scheduler.stop(seats[1].slot)
    admission.release(2)
    plan = planned(scheduler)
    assert (plan.new_pages.tolist(), plan.places.tolist()) == ([seats[0].pages[1]], [1])


def test_drafts_that_reach_past_a_page_are_refused() -> None:
    with pytest.raises(ModelError, match="--speculative-num-draft-tokens 16 must be below --page"):
        decode_buckets(4, 256, 16, Drafting(16, 2, 4))


def test_drafts_have_the_rows_that_idle_slots_leave() -> None:
    buckets = decode_buckets(16, 256, 16, Drafting(3, 2, 4))
    assert [slots for slots in buckets.slots if buckets.drafting_of(slots)] == [1, 2, 4]
    assert decode_buckets(1, 256, 16, Drafting(3, 2, 4)).drafting_of(1) == (3, 2, 4)
    assert decode_buckets(16, 256, 16).drafting_of(1) is None


# --- on the device --------------------------------------------------------------------------------

PROMPTS = (
    "Tell me about the ferry. Tell me about the ferry. Tell me about",
    "The ferry leaves. The ferry leaves. The",
    "one two three one two three one two",
)
DEVICE_PAGE, CONTEXT = 16, 256
SLOTS = 16
HOW = Drafting(3, 2, 4)


@functools.cache
def engine_of(dp_size: int) -> DecodeEngine:
    path = demo_model_path()
    opened = open_plainly(path, DEVICE_PAGE, CONTEXT, dp_size=dp_size)
    buckets = decode_buckets(SLOTS, CONTEXT, DEVICE_PAGE, HOW)
    buckets = replace(buckets, slots=(SLOTS // 4, SLOTS))
    local = local_buckets(48, 48, DEVICE_PAGE)
    # With one rank the step draws the tokens, with two a program of its own.
    return DecodeEngine(opened, buckets, 0.0, 4 * CONTEXT, local, apart=dp_size > 1)


class Request:
    """One request and the tokens it draws."""

    def __init__(self, token_ids: np.ndarray, params: SamplingParams) -> None:
        self.token_ids, self.params = token_ids, params
        self.drawn: list[int] = []
        self.finish = RUNNING


def run(
    dp_size: int, requests: Mapping[int, Request], tries: Callable[[int], bool]
) -> tuple[int, int]:
    """Run all requests to their end, one step ahead of reading. Returns drafts made and accepted.

    tries: whether the step of this number makes drafts.
    """
    engine = engine_of(dp_size)
    pools = [PagePool(engine.num_pages) for _ in range(dp_size)]
    admission = Admission(pools, SLOTS, DEVICE_PAGE, 0)
    scheduler = DecodeScheduler(admission, drafts=3)
    for room, request in requests.items():
        admission.add(room, len(request.token_ids), float(room))
    for seat in admission.admit():
        request = requests[seat.room]
        ids, num_tokens = request.token_ids, len(request.token_ids)
        prompt = LocalPrompt(seat, Sharing(ids, "", 0))
        plans: list[list[Piece[LocalPrompt]]] = [[] for _ in pools]
        plans[seat.rank] = [Piece(prompt, 0, num_tokens)]
        (placed,) = engine.run_chunk(plans).pieces
        out = engine.sample_first([FirstSample(placed.row, request.params, ids, num_tokens)])
        request.drawn.append(int(np.asarray(out.ids)[placed.row]))
        tokens = np.append(ids, request.drawn).astype(np.int32)
        start = SlotStart(seat.slot, tokens, num_tokens, seat.pages, request.params)
        engine.start_slots([start])
        scheduler.start(seat, "api", request.params, num_tokens)
    flights: list[tuple[StepPlan, StepInFlight]] = []
    made = accepted = number = 0
    while True:
        number += 1
        plan = scheduler.plan(tries(number))
        if plan is not None:
            flights.append((plan, engine.step(*plan.arrays, plan.width > 1, plan.num_pages)))
        if not flights:
            return made, accepted
        if len(flights) < 2 and plan is not None:
            continue
        plan, flight = flights.pop(0)
        ids, is_right = flight.token_ids()
        assert is_right is not None
        made += int((ids[:, 1:] != NO_DRAFT).sum())
        accepted += int((ids[:, 1:] >= 0).sum())
        result = scheduler.finish(plan, ids)
        for row in result.rows[result.columns == 0].tolist():
            request = requests[int(plan.rooms[row])]
            drafts = proposed_slowly(HOW, [*request.token_ids.tolist(), *request.drawn])
            assert is_right[row] == (drafts is not None and drafts[0] == ids[row, 0])
        for room, token_id, finish in zip(
            result.rooms.tolist(), result.token_ids.tolist(), result.finish.tolist(), strict=True
        ):
            requests[room].drawn.append(token_id)
            requests[room].finish = finish
        for room in {int(result.rooms[at]) for at in ended(result)}:
            seat = admission._seats[room]
            scheduler.stop(seat.slot)
            admission.release(room)


PARAMS = {
    "greedy": SamplingParams(60, temperature=0.0),
    "drawn": SamplingParams(60, temperature=0.4, seed=11),
    "penalised": SamplingParams(60, temperature=0.0, repetition_penalty=1.05, presence_penalty=0.1),
    "biased and late": SamplingParams(
        60, temperature=0.0, logit_bias=((5, 3.0),), min_tokens=20, stop_token_ids=(5, 6)
    ),
}


@pytest.mark.parametrize("how", PARAMS)
@pytest.mark.parametrize("dp_size", [1, 2])
def test_the_same_tokens_are_drawn_as_without_drafts(how: str, dp_size: int) -> None:
    tokenizer = Tokenizer.from_dir(demo_model_path())

    def requests() -> dict[int, Request]:
        return {
            room: Request(np.array(tokenizer.encode(text), np.int32), PARAMS[how])
            for room, text in enumerate(PROMPTS, start=1)
        }

    plain = requests()
    assert run(dp_size, plain, lambda number: False) == (0, 0)
    for tries in (lambda number: True, lambda number: number % 3 > 0):
        drafted = requests()
        made, accepted = run(dp_size, drafted, tries)
        for room, request in plain.items():
            assert drafted[room].drawn == request.drawn
            assert drafted[room].finish == request.finish != RUNNING
        assert 0 < accepted < made


@pytest.mark.parametrize("dp_size", [1, 2])
def test_no_draft_completes_a_sequence_that_must_not_be_drawn(dp_size: int) -> None:
    tokenizer = Tokenizer.from_dir(demo_model_path())

    def drawn(words: tuple[tuple[int, ...], ...], tries: bool) -> list[list[int]]:
        params = msgspec.structs.replace(PARAMS["greedy"], bad_words=words)
        requests = {
            room: Request(np.array(tokenizer.encode(text), np.int32), params)
            for room, text in enumerate(PROMPTS, start=1)
        }
        _, accepted = run(dp_size, requests, lambda number: tries)
        assert (accepted > 0) is tries
        return [request.drawn for request in requests.values()]

    free = drawn((), tries=True)
    # Of each answer what is drawn first, and three tokens behind what was repeated by then.
    words = tuple(tuple(ids[at : at + n]) for ids in free for at, n in ((0, 1), (40, 3)))
    held = drawn(words, tries=True)
    assert held == drawn(words, tries=False)
    for ids, others in zip(held, free, strict=True):
        assert ids != others
        spans = {tuple(ids[at : at + n]) for at in range(len(ids)) for n in (1, 3)}
        assert not spans & {*words}


# --- whether it pays ------------------------------------------------------------------------------

SLOT = np.array([2], np.int32)


def learnt(speculation: Speculation, is_right: bool, times: int = 20) -> None:
    for _ in range(times):
        speculation.learn(SLOT, np.array([is_right]))


def test_nothing_is_tried_for_a_request_of_which_nothing_is_known() -> None:
    speculation = Speculation(4, 3)
    assert not speculation.pays(SLOT)
    learnt(speculation, True, 1)
    assert speculation.pays(SLOT)
    speculation.start(2)
    assert not speculation.pays(SLOT)
    assert not Speculation(4, 0).pays(SLOT)


@pytest.mark.parametrize(("longer", "pays"), [(1.5, True), (3.5, True), (4.0, False)])
def test_drafts_that_are_all_right_pay_for_less_than_as_many_steps(
    longer: float, pays: bool
) -> None:
    speculation = Speculation(4, 3)
    learnt(speculation, True)
    speculation.took(1, False, 0.001)
    speculation.took(1, True, 0.001 * longer)
    assert speculation.pays(SLOT) == pays


def test_drafts_that_are_wrong_are_not_tried_any_more() -> None:
    speculation = Speculation(4, 3)
    learnt(speculation, True)
    speculation.took(1, False, 0.001)
    speculation.took(1, True, 0.002)
    learnt(speculation, False, 3)
    assert not speculation.pays(SLOT)


def test_steps_of_many_slots_are_judged_by_themselves() -> None:
    speculation = Speculation(8, 3)
    slots = np.arange(8, dtype=np.int32)
    speculation.learn(slots, np.ones(8, np.bool_))
    speculation.took(1, False, 0.001)
    speculation.took(1, True, 0.01)
    assert not speculation.pays(slots[:1])
    assert speculation.pays(slots)
    for num_slots in (7, 8):  # both counts are padded to the same shape
        speculation.took(num_slots, num_slots == 8, 0.004 + 0.01 * (num_slots == 8))
    assert not speculation.pays(slots)


def test_a_bad_moment_is_forgotten() -> None:
    speculation = Speculation(4, 3)
    learnt(speculation, True)
    speculation.took(1, False, 0.001)
    speculation.took(1, True, 0.9)
    steps = 0
    while not speculation.pays(SLOT):
        speculation.took(1, False, 0.001)
        steps += 1
    assert 100 < steps < 2000
    speculation.took(1, True, 0.002)
    assert speculation.pays(SLOT)
    speculation.took(1, True, 0.9)  # one bad moment among good ones does not count
    assert speculation.pays(SLOT)
