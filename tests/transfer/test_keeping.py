"""Prefixes that leave the pool for the host's memory: found again, and never another's."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from prefill.config import PrefillConfig
from prefill.scheduler import Prompt
from prefill.worker import Granted
from tests.prefill.test_ranks import PAGE, Bench
from tests.sim.alone import Alone
from tests.sim.workers import SimPrefill
from transfer.backend import SenderEvent
from transfer.errors import ConfigError
from transfer.host_pages import HostPages
from transfer.wire import SamplingParams
from transfer.worker import Aborted


def prefill(**sizes: int) -> tuple[Alone, SimPrefill]:
    alone = Alone("prefill", **{"num_pages": 16, "host_pages": 64, **sizes})
    return alone, cast(SimPrefill, alone.worker)


def run(alone: Alone, room: int, first: int, num_tokens: int = 61, **fields: Any) -> None:
    """A prompt of first, first + 1, ... comes, is computed and leaves."""
    ids = np.arange(first, first + num_tokens, dtype=np.int32).tobytes()
    alone.submit(room, num_tokens=num_tokens, token_ids=ids, **fields)
    alone.worker.handle(Granted((alone.grant(room),)))
    while alone.turn():
        pass
    alone.worker.handle(SenderEvent("acked", room))


def cached_tokens(alone: Alone) -> list[int]:
    """What each prompt so far found in a cache."""
    return [leg.cached_tokens for leg in alone.legs()]


@pytest.mark.parametrize("window", [0, 5])
def test_a_prefix_that_the_pool_had_no_room_for_is_found_on_the_host(window: int) -> None:
    alone, worker = prefill(window=window)
    for room, first in enumerate((0, 100, 0, 100), start=1):
        run(alone, room, first)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 60, 60]
    groups = 2 if window else 1
    assert worker.counters["host_pages_saved"] == groups * 2 * 15
    assert worker.counters["host_pages_restored"] == groups * 2 * 15
    assert worker.state().counters["host_pages"] == 2 * 15


def test_without_memory_on_the_host_it_is_computed_again() -> None:
    alone, worker = prefill(host_pages=0)
    for room, first in enumerate((0, 100, 0), start=1):
        run(alone, room, first)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 0]
    assert "host_pages" not in worker.state().counters


def test_a_host_with_room_for_part_of_a_prefix_keeps_its_beginning() -> None:
    alone, _ = prefill(host_pages=6)
    for room, first in enumerate((0, 100, 0), start=1):
        run(alone, room, first)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 6 * PAGE]


def test_part_of_a_prefix_comes_from_the_pool_and_the_rest_from_the_host() -> None:
    alone, worker = prefill()
    run(alone, 1, 0)
    run(alone, 2, 100, num_tokens=25)  # takes seven pages: six of the first prompt's tail go
    run(alone, 3, 0)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 60]
    assert 0 < worker.counters["host_pages_restored"] < 15


def test_the_last_token_of_a_prompt_is_computed_though_its_page_is_on_the_host() -> None:
    alone, _ = prefill()
    for room, first in enumerate((0, 100, 0), start=1):
        run(alone, room, first, num_tokens=60)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 56]


def test_positions_whose_logprobs_are_asked_for_are_computed() -> None:
    alone, _ = prefill()
    run(alone, 1, 0)
    run(alone, 2, 100)
    run(alone, 3, 0, sampling=SamplingParams(4, prompt_logprobs_start=20))
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 16]


def test_one_salt_finds_nothing_that_another_left() -> None:
    alone, _ = prefill()
    run(alone, 1, 0, cache_salt="one")
    run(alone, 2, 100)
    run(alone, 3, 0, cache_salt="another")
    run(alone, 4, 0, cache_salt="one")
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 0, 60]


def test_what_one_rank_evicted_another_finds() -> None:
    alone, _ = prefill(dp_size=2)
    run(alone, 1, 0, disagg_prefill_dp_rank=0)
    run(alone, 2, 100, disagg_prefill_dp_rank=0)
    run(alone, 3, 0, disagg_prefill_dp_rank=1)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 60]


def test_a_flush_forgets_what_the_host_has() -> None:
    alone, worker = prefill()
    run(alone, 1, 0)
    run(alone, 2, 100)
    reply = worker.flush()
    assert reply.flushed
    assert reply.message == "30 pages flushed"
    run(alone, 3, 0)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 0]
    assert worker.counters["host_pages_restored"] == 0


def test_a_prompt_that_is_aborted_while_its_prefix_comes_back_leaves_all_in_order() -> None:
    alone, worker = prefill()
    run(alone, 1, 0)
    run(alone, 2, 100)
    ids = np.arange(61, dtype=np.int32).tobytes()
    alone.submit(3, num_tokens=61, token_ids=ids)
    worker.handle(Granted((alone.grant(3),)))
    alone.turn()
    worker.handle(Aborted((3,)))
    while alone.turn():
        pass
    assert worker.state().pages_held == 0
    run(alone, 4, 0)
    alone.turn()
    assert cached_tokens(alone)[-1] == 60


def test_a_rank_expects_no_work_of_what_the_host_has_but_takes_pages_for_it() -> None:
    host = HostPages(64, 1, (1, 1, PAGE, 1, 1), "float32")
    bench = Bench(dp_size=2, num_pages=16)
    for rank in bench.ranks.ranks:
        rank.cache.host = host
    ids = np.arange(60, dtype=np.int32)
    for digest in bench.ranks.ranks[0].cache.chain(ids, ""):
        host.put(digest, 0, [np.zeros((1, 1, PAGE, 1, 1), np.float32)])
    prompt = bench.add(1, num_tokens=61, rank=0, first=0)
    assert bench.plan() == [[1], []]
    assert prompt.num_foreseen == prompt.num_cached == 60
    assert prompt.pages_foreseen == 0
    assert bench.ranks.ranks[0].pool.num_free == 0
    waiting = Prompt(2, ids, 2.0)
    assert not bench.ranks.ranks[0].scheduler.can_start(waiting, ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hicache_ratio": 0.0}, "--hicache-ratio must be above 0, got 0.0"),
        ({"hicache_size": -1}, "--hicache-size must be at least 0, got -1"),
        (
            {"enable_hierarchical_cache": True, "disable_radix_cache": True},
            "--enable-hierarchical-cache keeps what the prefix cache evicts",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrefillConfig(Path("model"), "127.0.0.1:1", **fields)
