"""Prompts that decode computes itself: what a chunk takes, and which states a room goes through."""

from typing import cast

import numpy as np

from decode.admission import Admission, Seat
from decode.config import ANY_PROMPT
from decode.local import MAX_SEQS, LocalPrompt, LocalQueue, local_buckets
from tests.sim.alone import PAGE, Alone
from tests.sim.engines import prompt_logprob
from tests.sim.workers import SimDecode
from transfer import wire
from transfer.errors import Code
from transfer.pages import PagePool
from transfer.prefix_cache import Sharing
from transfer.room import State
from transfer.worker import Aborted, Drain


class Desk:
    """Seats of prompts that share nothing, and the queue of those prompts."""

    def __init__(
        self,
        ranks: int = 1,
        chunk_tokens: int = 10,
        chunk_pages: int = 1000,
        sizes: tuple[int, ...] = (),
    ) -> None:
        self.admission = Admission([PagePool(100) for _ in range(ranks)], 100, PAGE, 0, True)
        self.queue = LocalQueue(self.admission, chunk_tokens, chunk_pages, sizes)

    def seat(self, room: int, num_tokens: int, rank: int = 0, first: int = 0) -> Seat:
        """first: the prompt's first token; 0: one that no other prompt has."""
        token_ids = np.full(num_tokens, first or 1000 + room, np.int32)
        sharing = Sharing(token_ids, "", num_tokens - 1)
        self.admission.add(room, num_tokens, float(room), rank, sharing)
        (seat,) = self.admission.admit()
        self.queue.add(LocalPrompt(seat, sharing))
        return seat


def rooms(queue: LocalQueue) -> list[list[int]]:
    return [[piece.prompt.room for piece in pieces] for pieces in queue.plan()]


def spans(queue: LocalQueue) -> list[list[tuple[int, int, int]]]:
    """Room, start and end of each piece, by rank."""
    return [[(p.prompt.room, p.start, p.end) for p in pieces] for pieces in queue.plan()]


def test_a_chunk_is_filled_in_order_by_rank_and_a_long_prompt_goes_on_in_the_next() -> None:
    desk = Desk(ranks=2)
    queue = desk.queue
    for room, num_tokens, rank in ((1, 6, 0), (2, 25, 0), (3, 12, 0), (4, 10, 1), (5, 1, 1)):
        desk.seat(room, num_tokens, rank)
    assert spans(queue) == [[(1, 0, 6), (2, 0, 4)], [(4, 0, 10)]]
    assert len(queue) == 3
    assert spans(queue) == [[(2, 4, 14)], [(5, 0, 1)]]
    queue.remove(3)
    assert spans(queue) == [[(2, 14, 24)], []]
    assert spans(queue) == [[(2, 24, 25)], []]
    assert len(queue) == 0


def test_where_padding_costs_a_rank_that_is_alone_chooses_shorter_chunks() -> None:
    alone, two = (Desk(ranks, 512, sizes=(32, 128, 512)) for ranks in (1, 2))
    for desk in (alone, two):
        desk.seat(1, 150)
    assert spans(alone.queue) == [[(1, 0, 128)]]
    assert spans(alone.queue) == [[(1, 128, 150)]]
    assert spans(two.queue) == [[(1, 0, 150)], []]


def test_what_others_have_computed_by_then_is_not_computed_again() -> None:
    desk = Desk()
    seats = [desk.seat(room, 14, first=7) for room in (1, 2, 3)]
    pages = {page for seat in seats for page in seat.pages}
    assert spans(desk.queue) == [[(1, 0, 10)]]
    assert spans(desk.queue) == [[(1, 10, 14), (2, 12, 14), (3, 12, 14)]]  # also within the chunk
    assert seats[1].pages[:3] == seats[0].pages[:3]
    assert [seat.num_cached for seat in seats] == [0, 12, 12]
    assert len({page for seat in seats for page in seat.pages}) == len(pages) - 6
    desk.admission.check()


def test_a_prompt_that_waits_for_its_turn_shares_all_that_was_computed_meanwhile() -> None:
    desk = Desk(chunk_tokens=16)
    seats = [desk.seat(room, 64, first=7) for room in (1, 2)]
    desk.seat(3, 4)  # the first prompt leaves a part of its chunk for it
    computed = 0
    while any(pieces := desk.queue.plan()):
        computed += sum(piece.num_tokens for piece in pieces[0])
    assert computed == 64 + 4 + 4
    assert seats[1].num_cached == 60
    desk.admission.check()


def test_a_room_that_ends_between_two_chunks_leaves_the_second_to_others() -> None:
    desk = Desk(chunk_tokens=10)
    for room in (1, 2):
        desk.seat(room, 30, first=7)
    assert spans(desk.queue) == [[(1, 0, 10)]]
    desk.queue.remove(1)
    desk.admission.release(1)
    assert spans(desk.queue) == [[(2, 8, 18)]]  # after the two pages that the first one filled
    desk.admission.check()


def test_a_prompt_of_several_chunks_leaves_a_quarter_of_each_to_shorter_ones() -> None:
    desk = Desk(chunk_tokens=8)
    for room, num_tokens in ((1, 20), (2, 12), (3, 3)):
        desk.seat(room, num_tokens)
    assert spans(desk.queue) == [[(1, 0, 6), (3, 0, 2)]]
    assert spans(desk.queue) == [[(1, 6, 13), (3, 2, 3)]]
    assert spans(desk.queue) == [[(1, 13, 20), (2, 0, 1)]]
    desk = Desk(chunk_tokens=8)
    desk.seat(1, 20)
    desk.seat(2, 8)  # one chunk would do for it
    assert spans(desk.queue) == [[(1, 0, 6), (2, 0, 2)]]


def test_what_short_prompts_do_not_take_of_their_quarter_goes_to_the_long_one() -> None:
    desk = Desk(chunk_tokens=64)
    for room, num_tokens in ((1, 90), *((room, 1) for room in range(2, 20))):
        desk.seat(room, num_tokens)  # sixteen tokens are reserved for eighteen prompts; seven fit
    (chunk,) = spans(desk.queue)
    assert chunk[0] == (1, 0, 64 - (MAX_SEQS - 1))
    assert len(chunk) == MAX_SEQS
    assert spans(desk.queue)[0][0] == (1, 57, 90)


def test_a_chunk_has_at_most_so_many_prompts() -> None:
    desk = Desk(chunk_tokens=100)
    for room in range(1, MAX_SEQS + 2):
        desk.seat(room, 1)
    assert rooms(desk.queue) == [list(range(1, MAX_SEQS + 1))]
    assert rooms(desk.queue) == [[MAX_SEQS + 1]]


def test_a_chunk_has_at_most_so_many_pages_of_context() -> None:
    desk = Desk(chunk_tokens=100, chunk_pages=4)
    for room, num_tokens in ((1, 12), (2, 12), (3, 4)):
        desk.seat(room, num_tokens)
    assert rooms(desk.queue) == [[1]]  # nobody overtakes
    assert desk.queue.left(0) == (2, 16)
    assert rooms(desk.queue) == [[2, 3]]  # all four pages
    assert desk.queue.left(0) == (0, 0)


def test_chunks_are_as_long_as_the_longest_prompt_or_as_asked() -> None:
    assert local_buckets(40, 512, 16).tokens[-1] == 48
    assert local_buckets(4096, 512, 16).tokens[-1] == 512
    # The context of a whole prompt fits one chunk, whatever is packed before it.
    assert local_buckets(4096, 512, 16).pages >= 4096 // 16 + MAX_SEQS


def local(local_tokens: int = 8, **sizes: int) -> tuple[Alone, SimDecode]:
    alone = Alone("decode", local_tokens=local_tokens, **sizes)
    return alone, cast(SimDecode, alone.worker)


def test_decode_tells_every_token_of_a_prompt_it_computes_and_grants_nothing() -> None:
    alone, worker = local()
    alone.submit(1, num_tokens=8, max_new=3, prefill=alone.ref())
    alone.submit(2, num_tokens=3, max_new=1, prefill=alone.ref())
    while alone.turn():
        pass
    assert alone.grants == []
    assert sorted(alone.tokens()) == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert sorted(alone.events()) == [("prefilled", 1, ""), ("prefilled", 2, "")]
    worker.check_idle()


def test_a_room_that_ends_while_its_chunk_runs_is_passed_over() -> None:
    alone, worker = local(num_slots=1)
    for room in (1, 2):
        alone.submit(room, num_tokens=4, prefill=alone.ref())
    worker._seat()
    worker._dispatch_local()
    worker.handle(Aborted((1,)))
    while alone.turn():
        pass
    assert {room for room, _ in alone.tokens()} == {2}
    worker.check_idle()


def test_a_prompt_too_long_to_compute_here_is_refused_and_placed_elsewhere() -> None:
    alone, worker = local()
    refusal = worker.refusal(alone.leg(1, num_tokens=9, prefill=alone.ref()))
    assert refusal is not None
    assert refusal.code == Code.STALE.value
    assert "9 tokens" in refusal.message
    assert "8" in refusal.message
    assert worker.refusal(alone.leg(1, num_tokens=9)) is None


def test_a_decode_worker_that_computes_nothing_refuses_any() -> None:
    alone = Alone("decode")
    leg = alone.leg(1, num_tokens=1, prefill=alone.ref())
    refusal = alone.worker.refusal(leg)
    assert isinstance(refusal, wire.Refusal)
    assert refusal.code == Code.STALE.value


def test_any_prompt_is_computed_in_chunks_between_which_others_decode() -> None:
    alone, worker = local(ANY_PROMPT)
    alone.submit(1, num_tokens=3, max_new=8, prefill=alone.ref())
    alone.turn()
    alone.submit(2, num_tokens=20, max_new=2, prefill=alone.ref())  # three chunks of eight
    before = len(alone.tokens())
    for _ in range(2):
        alone.turn()
    assert {room for room, _ in alone.tokens()[before:]} == {1}
    while alone.turn():
        pass
    assert [pair for pair in alone.tokens() if pair[0] == 2] == [(2, 0), (2, 1)]
    worker.check_idle()


def test_a_prefix_that_was_computed_here_is_shared_and_told() -> None:
    alone, worker = local(ANY_PROMPT, num_pages=8)
    for room in (1, 2):
        # The helper's tokens begin at the room's number, so shared ones are given here.
        tokens = wire.pack_i32(range(100, 113))
        alone.submit(room, 13, max_new=2, prefill=alone.ref(), token_ids=tokens)
        while alone.turn():
            pass
    told = [event.cached_tokens for batch in alone.batches for event in batch.events]
    assert told == [0, 12]
    assert worker.counters["tokens_computed"] == 13 + 1
    assert [leg.cached_tokens for leg in alone.legs()] == [0, 12]
    state = worker.state()
    assert (state.pages_held, state.pages_cached) == (0, 3)
    assert state.load.pages_free == 8
    assert worker.flush().flushed
    assert worker.state().pages_cached == 0


def test_cached_pages_make_room_for_a_prompt_and_for_its_growth() -> None:
    alone, worker = local(ANY_PROMPT, num_pages=8)
    for room in range(1, 5):  # 24 positions each: six of the eight pages, none of them shared
        tokens = wire.pack_i32(range(100 * room, 100 * room + 16))
        alone.submit(room, 16, max_new=8, prefill=alone.ref(), token_ids=tokens)
        while alone.turn():
            pass
    assert worker.counters["preemptions"] == 0
    assert len(alone.tokens()) == 4 * 8
    worker.check_idle()


def test_logprobs_of_a_prompt_come_with_its_first_token() -> None:
    alone, worker = local(ANY_PROMPT)
    sampling = wire.SamplingParams(2, prompt_logprobs_start=5)
    alone.submit(1, 20, prefill=alone.ref(), sampling=sampling)
    while alone.turn():
        pass
    (event,) = (event for batch in alone.batches for event in batch.events)
    told = event.prompt_logprobs
    assert told is not None
    assert told.start == 5
    assert wire.unpack_i32(told.token_ids).tolist() == list(range(6, 21))
    wanted = [prompt_logprob(position) for position in range(5, 20)]
    assert wire.unpack_f32(told.logprobs).tolist() == wanted
    worker.check_idle()


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    alone, worker = local(ANY_PROMPT, num_pages=40)
    for room in range(1, 5):
        tokens = wire.pack_i32([*range(100, 124), room])
        alone.submit(room, 25, max_new=1, prefill=alone.ref(), token_ids=tokens)
    while alone.turn():
        pass
    assert worker.counters["tokens_computed"] == 25 + 3
    assert worker.counters["cached_tokens"] == 3 * 24
    worker.check_idle()


def test_a_chunk_is_ahead_of_the_host_while_nobody_decodes() -> None:
    alone, worker = local(ANY_PROMPT, num_pages=16)
    alone.submit(1, 40, max_new=1, prefill=alone.ref())
    for _ in range(5):
        assert alone.turn()
        assert len(worker._inflight) == 1
    assert not alone.turn()
    worker.check_idle()


def test_a_worker_that_drains_hands_on_prompts_that_wait_for_their_first_chunk() -> None:
    alone, worker = local(ANY_PROMPT, num_pages=40)
    for room in (1, 2, 3):
        alone.submit(room, 25, max_new=1, prefill=alone.ref())
    alone.turn()
    assert worker._held[2].room.state is State.RESERVED
    worker.handle(Drain())
    assert worker.handing_on
    while alone.turn():
        pass
    handed_on = [("failed", room, Code.DRAINING.value) for room in (2, 3)]
    assert sorted(alone.events()) == [*handed_on, ("prefilled", 1, "")]
    assert alone.tokens() == [(1, 0)]
    worker.check_idle()


def test_ranks_tell_of_prompts_that_wait_there() -> None:
    alone, worker = local(ANY_PROMPT, num_pages=40, dp_size=2)
    for room in (1, 2, 3):
        alone.submit(room, 20, max_new=1, prefill=alone.ref(), routed_dp_rank=1)
    alone.turn()
    none, some = worker.rank_loads()
    assert (none.queued_requests, none.queued_tokens, none.running_requests) == (0, 0, 0)
    assert (some.queued_requests, some.queued_tokens, some.running_requests) == (3, 52, 0)
    assert worker.load().queued_tokens == 52
