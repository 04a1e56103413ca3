"""One generation's tokens: in order, once, whatever order the rows come in."""

import dataclasses
import random
from collections.abc import Sequence

import pytest

from serving.generation import Generation, GenerationSpec, Tokens
from serving.prompt import Prompt
from serving.router import Pair, Ranks
from serving.step_rows import Run
from tests.recording import RecordingSink
from tests.serving.test_router import member
from transfer import wire
from transfer.errors import BadMessage

TOP = [(9, -0.1), (8, -0.2), (7, -0.3)]


def generation(max_new_tokens: int = 8, **sampling) -> Generation:
    params = wire.SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    made = Generation(GenerationSpec(Prompt([1, 2, 3]), params, "r", 0.0, 9.0), RecordingSink())
    made.begin_attempt(77, Pair(member("p", "prefill"), member("d"), 3, 0.0))
    return made


def accept(gen: Generation, idx: int, finish: int = wire.RUNNING) -> list[int]:
    tokens = gen.accept(idx, [100 + idx], finish, None)
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
    assert told == gen.token_ids.tolist() == list(range(100, 140))
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
        return generation(num_top_logprobs=num_top_logprobs).accept(0, [9], 0, Run([-0.1], [TOP]))

    assert told(-1) == Tokens([9])
    assert told(0) == Tokens([9], [-0.1])
    assert told(2) == Tokens([9], [-0.1], [TOP[:2]])


def test_early_tokens_bring_their_logprobs():
    gen = generation(num_top_logprobs=1)
    gen.accept(1, [8], 0, Run([-0.2], [TOP[1:]]))
    assert gen.accept(0, [9], 0, Run([-0.1], [TOP])) == Tokens(
        [9, 8], [-0.1, -0.2], [TOP[:1], TOP[1:2]]
    )


def test_a_row_without_the_logprob_that_was_asked_is_bad():
    with pytest.raises(BadMessage, match="asked for one"):
        generation(num_top_logprobs=0).accept(0, [9], 0, None)


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


def test_decode_may_compute_any_prompt_but_one_for_a_rank_of_prefill():
    gen = generation(prompt_logprobs_start=0)
    assert gen.may_be_local
    gen.spec = dataclasses.replace(gen.spec, ranks=Ranks(decode=1))
    assert gen.may_be_local
    gen.spec = dataclasses.replace(gen.spec, ranks=Ranks(prefill=0))
    assert not gen.may_be_local


def test_a_run_is_taken_whole_and_ends_with_its_last_token():
    gen = generation(num_top_logprobs=1)
    run = Run([-0.1, -0.2, -0.3], [TOP, None, TOP[1:]])
    assert gen.accept(0, [9, 8, 7], wire.LENGTH, run) == Tokens(
        [9, 8, 7], [-0.1, -0.2, -0.3], [TOP[:1], None, TOP[1:2]]
    )
    assert (gen.finish, gen.token_ids.tolist()) == (wire.LENGTH, [9, 8, 7])


def test_of_a_run_that_is_known_in_part_the_rest_is_taken():
    gen = generation()
    accept(gen, 0)
    accept(gen, 1)
    accept(gen, 4)
    tokens = gen.accept(0, [100, 101, 102, 103], wire.RUNNING, None)
    assert tokens == Tokens([102, 103, 104])
    assert gen.finish == wire.RUNNING


def test_a_prompt_of_many_choices_is_packed_and_hashed_once():
    class CountedIds(Sequence[int]):
        def __init__(self) -> None:
            self.reads = 0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index):
            self.reads += 1
            return range(8)[index]

    ids = CountedIds()
    prompt = Prompt(ids)
    params = wire.SamplingParams(max_new_tokens=4)
    chain = prompt.chain(4, "")
    reads = ids.reads
    for room in range(1, 4):
        made = Generation(GenerationSpec(prompt, params, "r", 0.0, 9.0), RecordingSink())
        made.begin_attempt(room, Pair(member("p", "prefill"), member("d"), 8, 0.0))
        for _ in ("prefill", "decode"):
            sent = made.submit_message("api.1")
            assert wire.unpack_i32(sent.token_ids).tolist() == list(range(8))
        assert prompt.chain(4, "") is chain
    assert ids.reads == reads > 0
    assert len(chain) == 2
    assert prompt.chain(4, "tenant") != chain
