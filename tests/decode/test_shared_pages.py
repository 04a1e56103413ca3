"""Prompts that begin alike share decode's pages: prefill sends each page of them once."""

from typing import Any

import numpy as np
import pytest

from tests.decode.test_worker import decode
from tests.sim.alone import PAGE, Alone
from tests.sim.network import chain, draw, kv_of
from tests.sim.workers import SimDecode
from transfer import wire
from transfer.backend import Finished, FirstToken, PagesArrived
from transfer.worker import Aborted

LENGTH = 4 * PAGE + 1


def submit(alone: Alone, room: int, num_tokens: int = LENGTH, **fields: Any) -> wire.Grant:
    """A prompt of 0, 1, ...; returns decode's grant."""
    alone.submit(room, num_tokens, token_ids=wire.pack_i32(range(num_tokens)), **fields)
    alone.turn()
    grant = alone.grants[-1]
    assert grant.room == room
    return grant


def send(alone: Alone, grant: wire.Grant, num_tokens: int = LENGTH, *, whole: bool = True) -> None:
    """Prefill sends the granted pages of the prompt, and the first token if whole."""
    states = chain(range(num_tokens))
    num_pages = -(-num_tokens // PAGE)
    pages = np.zeros((2, num_pages * PAGE, 2), np.float32)
    pages[:, :num_tokens] = kv_of(states, 0, 2, 2)
    shard = pages.reshape(1, 2, num_pages, PAGE, 2, 1)[:, :, grant.first_page :]
    assert shard.shape[2] == len(grant.page_ids) // 4
    alone.worker.handle(PagesArrived(grant.room, 0, [shard]))
    if whole:
        first = FirstToken(draw(states[-1], 0, 0), 0, num_tokens)
        alone.worker.handle(Finished(grant.room, first))


def finish(alone: Alone) -> None:
    while alone.turn():
        pass


def held(worker: SimDecode, room: int) -> list[int]:
    seat = worker._held[room].seat
    assert seat is not None
    return seat.pages


@pytest.mark.parametrize("still_decoding", [False, True])
def test_pages_that_came_are_shared_by_the_next_prompt(still_decoding: bool) -> None:
    alone, worker = decode(num_pages=32)
    first = submit(alone, 1)
    assert first.first_page == 0
    send(alone, first)
    if not still_decoding:
        finish(alone)
    second = submit(alone, 2)
    assert second.first_page == 4
    assert len(wire.unpack_i32(second.page_ids)) == 1
    send(alone, second)
    finish(alone)  # the engine checks what each step reads
    assert worker.counters["pages_shared"] == 4
    assert worker.counters["pages_received"] == 6
    assert sorted(alone.tokens()) == [(room, idx) for room in (1, 2) for idx in range(1, 4)]
    worker.check_idle()


def test_one_page_at_least_comes_from_prefill() -> None:
    alone, _ = decode(num_pages=32)
    send(alone, submit(alone, 1, 4 * PAGE), 4 * PAGE)
    finish(alone)
    again = submit(alone, 2, 4 * PAGE)
    assert again.first_page == 3
    send(alone, again, 4 * PAGE)
    finish(alone)


def test_pages_on_their_way_are_nobody_elses_yet() -> None:
    alone, worker = decode(num_pages=32)
    first = submit(alone, 1)
    send(alone, first, whole=False)
    second = submit(alone, 2)
    assert second.first_page == 0
    worker.handle(Aborted((1,)))
    alone.turn()
    assert submit(alone, 3).first_page == 0


def test_requests_that_share_a_prefix_need_few_pages_each() -> None:
    alone, worker = decode(num_pages=9)
    send(alone, submit(alone, 1, max_new=12))
    alone.turn()
    grants = [submit(alone, room) for room in (2, 3)]
    assert [grant.first_page for grant in grants] == [4, 4]
    assert held(worker, 2)[:4] == held(worker, 3)[:4] == held(worker, 1)[:4]
    for grant in grants:
        send(alone, grant)
    finish(alone)
    assert worker.counters["preemptions"] == 0
    worker.check_idle()


def test_other_salts_share_nothing() -> None:
    alone, _ = decode(num_pages=32)
    send(alone, submit(alone, 1, cache_salt="one"))
    finish(alone)
    assert submit(alone, 2, cache_salt="another").first_page == 0
    assert submit(alone, 3, cache_salt="one").first_page == 4


def test_prompt_logprobs_are_prefills_so_its_pages_are_shared_all_the_same() -> None:
    alone, _ = decode(num_pages=32)
    send(alone, submit(alone, 1))
    finish(alone)
    asking = wire.SamplingParams(4, prompt_logprobs_start=0)
    assert submit(alone, 2, sampling=asking).first_page == 4


def test_a_flush_forgets_the_pages_that_came() -> None:
    alone, worker = decode(num_pages=32)
    send(alone, submit(alone, 1))
    finish(alone)
    assert worker.state().pages_cached == 4
    assert worker.flush().flushed
    assert submit(alone, 2).first_page == 0


def test_pages_for_windows_are_sent_for_the_end_of_a_prompt_so_nothing_is_shared() -> None:
    alone, worker = decode(num_pages=32, window=5)
    alone.submit(1, LENGTH)
    alone.turn()
    assert worker._held[1].seat is not None
    assert worker._held[1].seat.sharing is None
    assert alone.grants[-1].first_page == 0
