"""The routing simulation: what it promises about its prompts, its costs and its answers."""

import io
import math

import numpy as np
import pytest

from bench import routing_registry
from bench.report import Report
from bench.routing import BASELINE, LOADS, run, saturation, ways
from bench.routing_cost import (
    CHUNK_TOKENS,
    CONTEXT,
    LENGTHS,
    MEAN_TOKENS,
    PREFIX_TOKENS,
    Arrival,
    ChunkCost,
    Lengths,
    at_rate,
    pairs_of,
    plan_arrivals,
)
from bench.routing_sim import Simulation, Way
from bench.surroundings import Surroundings
from prefill.balancer import METHODS
from transfer.errors import ConfigError

COST = ChunkCost(call_s=1.0, token_s=0.001, pair_s=0.0)


def a_prompt(num_tokens: int, at_s: float, number: int) -> Arrival:
    return Arrival(at_s, np.full(num_tokens, number, np.int32), 0)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_prompts_have_the_stated_mean_and_fit_the_context(lengths: Lengths) -> None:
    sizes = np.array([len(arrival.token_ids) for arrival in plan_arrivals(lengths, 4000, 3)])
    assert sizes.mean() == pytest.approx(MEAN_TOKENS, rel=0.01)
    assert 1 <= sizes.min() <= sizes.max() < CONTEXT


def test_a_seed_gives_the_same_prompts_and_another_one_others() -> None:
    first, again, other = (plan_arrivals("skewed", 50, seed) for seed in (1, 1, 2))
    assert [a.at_s for a in first] == [a.at_s for a in again]
    assert [len(a.token_ids) for a in first] == [len(a.token_ids) for a in again]
    assert [len(a.token_ids) for a in first] != [len(a.token_ids) for a in other]


def test_only_what_is_said_to_be_shared_is_shared() -> None:
    arrivals = plan_arrivals("shared", 100, 0)
    heads = {arrival.token_ids[:PREFIX_TOKENS].tobytes() for arrival in arrivals}
    rests = {arrival.token_ids[PREFIX_TOKENS : PREFIX_TOKENS + 1].tobytes() for arrival in arrivals}
    assert len(heads) <= 16
    assert len(rests) == 100


def test_a_chunk_costs_what_its_busiest_rank_costs() -> None:
    cost = ChunkCost(call_s=1.0, token_s=0.001, pair_s=0.0001)
    alone = cost.of([(1100, 50)])
    assert alone == pytest.approx(1.0 + 2.048 + 0.005)  # padded to the bucket
    assert cost.of([(1100, 50), (0, 0), (20, 10)]) == alone
    assert cost.of([(1100, 50), (2000, 50)]) == alone
    assert cost.of([(1100, 50), (20, 80)]) == pytest.approx(1.0 + 2.048 + 0.008)
    assert cost.of([(600, 50), (20, 50)]) == pytest.approx(1.0 + 1.024 + 0.005)


def test_pairs_add_up_over_the_runs_of_a_prompt() -> None:
    assert pairs_of(0, 300) == pairs_of(0, 100) + pairs_of(100, 150) + pairs_of(250, 50)


def test_one_prompt_alone_takes_its_chunks_and_nothing_else() -> None:
    arrivals = [a_prompt(2 * CHUNK_TOKENS, 5.0, 0)]
    ttft_s = Simulation(Way("group", "total_tokens"), arrivals, COST, 0).run()
    assert ttft_s == pytest.approx([2 * (1.0 + 2.048)])


def test_in_lock_step_a_prompt_waits_for_the_chunk_of_another_rank() -> None:
    arrivals = [a_prompt(CHUNK_TOKENS, 0.0, 0), a_prompt(CHUNK_TOKENS, 1.0, 1)]
    together = Simulation(Way("group", "total_tokens"), arrivals, COST, 0).run()
    apart = Simulation(Way("groups", policy="least_load"), arrivals, COST, 0).run()
    assert together == pytest.approx([3.048, 2 * 3.048 - 1.0])
    assert apart == pytest.approx([3.048, 3.048])


def test_a_long_prompt_holds_up_those_whose_rooms_follow_it_and_nobody_bound_late() -> None:
    """Rooms count up, so the fifth prompt shares a rank with the first, which is long."""
    arrivals = [a_prompt(10 * CHUNK_TOKENS, 0.0, 0)]
    arrivals += [a_prompt(CHUNK_TOKENS, 0.1 * number, number) for number in range(1, 8)]
    followed = Simulation(Way("group", "follow_bootstrap_room"), arrivals, COST, 0).run()
    bound_late = Simulation(Way("group", "total_tokens"), arrivals, COST, 0).run()
    assert followed[4] > 10 * 3.048
    assert max(bound_late[1:]) < 5 * 3.048
    assert bound_late[0] == followed[0]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_way_answers_every_prompt_and_the_same_each_time(lengths: Lengths) -> None:
    plan = plan_arrivals(lengths, 60, 4)
    arrivals = at_rate(plan, 1.1 * saturation(plan, ChunkCost()))
    for name, way in ways(lengths).items():
        first, again = (Simulation(way, arrivals, ChunkCost(), 4).run() for _ in range(2))
        assert first == again, name
        assert min(first) > 0, name


def test_every_method_and_its_baseline_is_among_the_ways() -> None:
    found = ways("shared")
    assert next(iter(found)) == BASELINE
    assert {way.method for way in found.values()} >= set(METHODS)


def test_saturation_is_the_rate_of_full_chunks() -> None:
    """The first prompt runs alone, then four to a chunk."""
    arrivals = [a_prompt(CHUNK_TOKENS, float(number), number) for number in range(41)]
    assert saturation(arrivals, COST) == pytest.approx(41 / (11 * 3.048))


def test_rows_stand_beside_the_baseline_of_the_same_load() -> None:
    report = Report("routing", Surroundings("abc", "cpu", {}), 7, None, io.StringIO())
    run(report, ("skewed",), num_requests=40, num_seeds=2)
    assert len(report.rows) == len(LOADS) * (4 * len(ways("skewed")) - 1)
    by_key = {(row.case, row.metric): row for row in report.rows}
    row = by_key["skewed 0.95 total_tokens", "ttft mean"]
    beside = by_key[f"skewed 0.95 {BASELINE}", "ttft mean"]
    assert row.baseline == beside.value
    assert beside.baseline is None
    assert row.shapes["seeds"] == [7, 8]
    assert all(math.isfinite(row.value) for row in report.rows)


def test_late_binding_by_tokens_beats_drawn_rooms_near_saturation() -> None:
    """Only the direction of the experiment's result; docs/benchmarks.md has its size."""
    plan = plan_arrivals("skewed", 500, 1)
    arrivals = at_rate(plan, 0.95 * saturation(plan, ChunkCost()))
    drawn, late = (
        np.mean(Simulation(ways("skewed")[name], arrivals, ChunkCost(), 1).run())
        for name in (BASELINE, "total_tokens")
    )
    assert late < 0.8 * drawn


def test_the_registry_tells_every_room_over_real_sockets() -> None:
    report = Report("routing", Surroundings("abc", "cpu", {}), 7, None, io.StringIO())
    routing_registry.run(report, seconds=0.2)
    cases = {row.case for row in report.rows}
    assert len(cases) == len(routing_registry.PER_TURN)
    assert len(report.rows) == 3 * len(cases)
    assert all(row.value > 0 for row in report.rows)


def test_a_registry_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_LOG_LEVEL", "loud")
    report = Report("routing", Surroundings("abc", "cpu", {}), 7, None, io.StringIO())
    with pytest.raises(ConfigError, match="kvferry registry: KVFERRY_LOG_LEVEL is 'loud'"):
        routing_registry.run(report, seconds=0.2)
