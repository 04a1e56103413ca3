"""Prompts that decode computes itself: what a chunk takes, and what a room goes through."""

from typing import cast

import numpy as np

from decode.local import MAX_SEQS, LocalPrompt, LocalQueue
from tests.sim.alone import Alone
from tests.sim.workers import SimDecode
from transfer import wire
from transfer.errors import Code
from transfer.worker import Aborted


def prompt(room: int, num_tokens: int, rank: int = 0) -> LocalPrompt:
    return LocalPrompt(room, rank, np.zeros(num_tokens, np.int32), list(range(num_tokens)))


def rooms(queue: LocalQueue) -> list[list[int]]:
    return [[piece.prompt.room for piece in pieces] for pieces in queue.plan()]


def test_a_chunk_takes_whole_prompts_in_order_by_rank() -> None:
    queue = LocalQueue(2, 10)
    for room, num_tokens, rank in ((1, 6, 0), (2, 5, 0), (3, 1, 0), (4, 10, 1), (5, 1, 1)):
        queue.add(prompt(room, num_tokens, rank))
    assert rooms(queue) == [[1], [4]]
    queue.remove(3)
    assert len(queue) == 2
    assert rooms(queue) == [[2], [5]]
    assert len(queue) == 0


def test_a_chunk_has_at_most_so_many_prompts() -> None:
    queue = LocalQueue(1, 100)
    for room in range(MAX_SEQS + 1):
        queue.add(prompt(room, 1))
    assert rooms(queue) == [list(range(MAX_SEQS))]
    assert rooms(queue) == [[MAX_SEQS]]


def local(**sizes: int) -> tuple[Alone, SimDecode]:
    alone = Alone("decode", local_tokens=8, **sizes)
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
    worker.handle(Aborted((1,), "api"))
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
