"""A workload is a function of its config: lengths, arrivals and prefixes are as configured."""

import math
import statistics
from itertools import pairwise

import pytest

from bench.workload import WorkloadConfig, plan_requests


def test_the_same_config_plans_the_same_requests():
    config = WorkloadConfig(num_requests=20, spread=0.5, rate_per_s=3.0, seed=4)
    assert plan_requests(config) == plan_requests(config)
    assert plan_requests(config) != plan_requests(WorkloadConfig(20, spread=0.5, seed=5))


def test_without_spread_every_length_is_exact():
    for planned in plan_requests(WorkloadConfig(10, input_tokens=33, output_tokens=7)):
        assert (len(planned.prompt_ids), planned.output_tokens) == (33, 7)
        assert planned.arrival_s == 0.0


def test_spread_keeps_lengths_within_bounds_and_ids_within_the_vocabulary():
    config = WorkloadConfig(200, input_tokens=100, spread=0.5, vocab_size=50, seed=1)
    planned = plan_requests(config)
    lengths = [len(p.prompt_ids) for p in planned]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(set(lengths)) > 20
    assert all(0 <= token < 50 for p in planned for token in p.prompt_ids)


def test_shared_prefixes_are_shared_and_the_rest_is_not():
    planned = plan_requests(WorkloadConfig(5, input_tokens=40, shared_prefix_tokens=30))
    assert len({p.prompt_ids[:30] for p in planned}) == 1
    assert len({p.prompt_ids for p in planned}) == 5


def test_of_several_prefixes_each_comes_in_its_turn():
    planned = plan_requests(
        WorkloadConfig(7, input_tokens=40, shared_prefix_tokens=30, num_prefixes=3)
    )
    heads = [p.prompt_ids[:30] for p in planned]
    assert len(set(heads)) == 3
    assert heads == (heads[:3] * 3)[:7]
    assert len({p.prompt_ids for p in planned}) == 7


def test_requests_name_adapters_in_turn():
    names = [p.adapter for p in plan_requests(WorkloadConfig(5, lora_name=("a", "b")))]
    assert names == ["a", "b", "a", "b", "a"]
    assert {p.adapter for p in plan_requests(WorkloadConfig(2))} == {""}


def test_poisson_arrivals_start_at_zero_and_keep_their_rate():
    planned = plan_requests(WorkloadConfig(2000, input_tokens=1, rate_per_s=10.0))
    arrivals = [p.arrival_s for p in planned]
    assert arrivals[0] == 0.0
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert min(gaps) >= 0.0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"num_requests": 0}, "--num-requests must be at least 1, got 0"),
        ({"spread": 1.0}, "--spread must be in"),
        ({"rate_per_s": 0.0}, "--rate must be above 0 and finite, got 0.0"),
        ({"rate_per_s": math.nan}, "--rate must be above 0 and finite, got nan"),
        ({"shared_prefix_tokens": 513}, "--shared-prefix-tokens must be in"),
        ({"num_prefixes": 0}, "--num-prefixes must be at least 1, got 0"),
        ({"vocab_size": 1}, "--vocab-size must be at least 2, got 1"),
        ({"num_requests": 10**20}, "--num-requests must be at most 2147483647, got 1000"),
        ({"input_tokens": 10**20}, "--input-tokens must be at most 2147483647, got 1000"),
        ({"vocab_size": 1 << 31}, "--vocab-size must be at most 2147483647, got 2147483648"),
        (
            {"num_prefixes": 2 * 10**9, "shared_prefix_tokens": 500},
            "--num-prefixes times --shared-prefix-tokens must be at most 134217728, got 2000000000",
        ),
        ({"repeat_token": -5}, r"--repeat-token must be in \[0, 2147483647\], got -5"),
    ],
)
def test_a_config_that_makes_no_sense_names_its_flag(bad, message):
    with pytest.raises(ValueError, match=message):
        WorkloadConfig(**bad)
