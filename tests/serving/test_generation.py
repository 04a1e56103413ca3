"""One generation's tokens: in order, once, whatever order the rows come in."""

import random
from typing import Any

import pytest

from serving.generation import Generation, GenerationSpec, Tokens, unpack_rows
from serving.router import Pair
from tests.recording import RecordingSink
from tests.serving.test_router import member
from transfer import wire
from transfer.errors import BadMessage

TOP = [(9, -0.1), (8, -0.2), (7, -0.3)]


def generation(max_new_tokens: int = 8, **sampling) -> Generation:
    params = wire.SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    made = Generation(GenerationSpec([1, 2, 3], params, "r", 0.0, 9.0), RecordingSink())
    made.begin_attempt(77, Pair(member("p", "prefill"), member("d"), 3, 0.0))
    return made


def accept(gen: Generation, idx: int, finish: int = wire.RUNNING) -> list[int]:
    tokens = gen.accept(idx, 100 + idx, finish, None, None)
    return [] if tokens is None else tokens.ids


def test_a_token_past_a_gap_waits_and_a_double_is_dropped():
    gen = generation()
    assert accept(gen, 2) == []
    assert accept(gen, 1) == []
    assert accept(gen, 0) == [100, 101, 102]
    assert accept(gen, 1) == []
    assert accept(gen, 3) == [103]


@pytest.mark.parametrize("seed", range(5))
def test_any_order_with_doubles_gives_each_token_once_in_order(seed):
    rng = random.Random(seed)
    gen, told = generation(40), []
    rows = [idx for idx in range(40) for _ in range(rng.randint(1, 3))]
    rng.shuffle(rows)
    for idx in rows:
        told += accept(gen, idx, wire.LENGTH if idx == 39 else wire.RUNNING)
    assert told == gen.token_ids == list(range(100, 140))
    assert gen.finish == wire.LENGTH


def test_an_early_last_token_ends_it_only_in_its_turn():
    gen = generation()
    accept(gen, 1, wire.STOP)
    assert gen.finish == wire.RUNNING
    assert accept(gen, 0) == [100, 101]
    assert gen.finish == wire.STOP
    assert accept(gen, 2) == []


def test_indices_no_request_could_reach_are_not_kept():
    gen = generation(max_new_tokens=4)
    assert accept(gen, 4) == []
    assert accept(gen, 3) == []
    assert accept(gen, 0) == [100]


def test_logprobs_are_cut_to_what_was_asked():
    def told(num_top_logprobs: int) -> Tokens | None:
        return generation(num_top_logprobs=num_top_logprobs).accept(0, 9, 0, -0.1, TOP)

    assert told(-1) == Tokens([9])
    assert told(0) == Tokens([9], [-0.1])
    assert told(2) == Tokens([9], [-0.1], [TOP[:2]])


def test_early_tokens_bring_their_logprobs():
    gen = generation(num_top_logprobs=1)
    gen.accept(1, 8, 0, -0.2, TOP[1:])
    assert gen.accept(0, 9, 0, -0.1, TOP) == Tokens([9, 8], [-0.1, -0.2], [TOP[:1], TOP[1:2]])


def test_a_row_without_the_logprob_that_was_asked_is_bad():
    with pytest.raises(BadMessage, match="asked for one"):
        generation(num_top_logprobs=0).accept(0, 9, 0, None, None)


def test_the_next_attempt_goes_on_after_the_tokens_told_and_forgets_early_ones():
    gen = generation(prompt_logprobs_start=0)
    first = gen.submit_message("api.1")
    assert wire.unpack_i32(first.token_ids).tolist() == [1, 2, 3]
    gen.prefilled = True
    accept(gen, 0)
    assert not gen.decoding
    accept(gen, 3)
    gen.leave_attempt()
    assert gen.room == 0
    gen.begin_attempt(78, Pair(member("p", "prefill"), member("e"), 4, 0.0))
    second = gen.submit_message("api.2")
    assert (second.room, second.decode.worker_id, second.api_id) == (78, "e", "api.2")
    assert wire.unpack_i32(second.token_ids).tolist() == [1, 2, 3, 100]
    assert (second.num_prompt_tokens, second.num_generated) == (3, 1)
    assert not gen.decoding
    # The client has the prompt's logprobs; asking again would only bypass the prefix cache.
    assert second.sampling.prompt_logprobs_start == -1
    assert accept(gen, 1) == [101]
    assert accept(gen, 2) == [102]
    assert accept(gen, 3) == [103]


def batch(**arrays: bytes) -> wire.StepBatch:
    rows: dict[str, Any] = {
        "rooms": wire.pack_i64([5, 6]),
        "token_ids": wire.pack_i32([50, 60]),
        "token_idx": wire.pack_i32([0, 4]),
        "finish": wire.pack_u8([0, 2]),
    }
    return wire.StepBatch("d", 1, 1, 0.0, **{**rows, **arrays})


def test_rows_are_unpacked_with_top_logprobs_at_the_rows_that_have_them():
    top_ids, top_logprobs = list(range(20)), [-float(i) for i in range(20)]
    rows = unpack_rows(
        batch(
            logprobs=wire.pack_f32([-1.0, -2.0]),
            top_rows=wire.pack_i32([1]),
            top_ids=wire.pack_i32(top_ids),
            top_logprobs=wire.pack_f32(top_logprobs),
        )
    )
    assert (rows.rooms, rows.token_ids, rows.token_idx) == ([5, 6], [50, 60], [0, 4])
    assert (rows.finish, rows.logprobs) == ([0, 2], [-1.0, -2.0])
    assert rows.top == {1: list(zip(top_ids, top_logprobs, strict=True))}


@pytest.mark.parametrize(
    "arrays",
    [
        {"token_ids": wire.pack_i32([1])},
        {"finish": b"\0\0\0"},
        {"logprobs": wire.pack_f32([0.5])},
        {"rooms": b"12345"},
        {"top_rows": wire.pack_i32([0]), "top_ids": wire.pack_i32([1])},
        {
            "top_rows": wire.pack_i32([2]),
            "top_ids": wire.pack_i32([0] * 20),
            "top_logprobs": wire.pack_f32([0] * 20),
        },
    ],
)
def test_rows_whose_arrays_disagree_are_refused(arrays):
    with pytest.raises(BadMessage):
        unpack_rows(batch(**arrays))
