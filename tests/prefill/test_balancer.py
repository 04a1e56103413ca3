"""Each method's choice of a rank for a prompt; ranks that are equal take turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill.balancer import METHODS, Balancer, Method, RankLoad
from transfer.errors import ConfigError

IDLE = RankLoad(queued_requests=0, queued_tokens=0, pages_free=64)


def a_load(requests: int = 0, tokens: int = 0, pages_free: int = 64) -> RankLoad:
    return RankLoad(requests, tokens, pages_free)


PICKING = [method for method in METHODS if method != "follow_bootstrap_room"]


def pick(
    balancer: Balancer, num_tokens: int, loads: list[RankLoad], cached: list[int] | None = None
) -> int:
    """The choice among all ranks."""
    return balancer.pick(num_tokens, loads, cached or [0] * len(loads), range(len(loads)))


def picks(balancer: Balancer, loads: list[RankLoad], num: int) -> list[int]:
    """Ranks picked for `num` prompts of 100 tokens, with unchanging loads."""
    return [pick(balancer, 100, loads) for _ in range(num)]


@pytest.mark.parametrize("method", PICKING)
def test_idle_ranks_get_equal_shares_in_turn(method: Method) -> None:
    assert picks(Balancer(method, 4), [IDLE] * 4, 8) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_round_robin_looks_at_no_load() -> None:
    loads = [a_load(requests=9, tokens=9000, pages_free=0), IDLE, IDLE]
    assert picks(Balancer("round_robin", 3), loads, 6) == [0, 1, 2, 0, 1, 2]


def test_shortest_queue_counts_requests_and_then_tokens() -> None:
    loads = [a_load(3, 10), a_load(1, 9000), a_load(1, 5000)]
    assert picks(Balancer("shortest_queue", 3), loads, 2) == [2, 2]


def test_total_tokens_counts_tokens_and_then_requests() -> None:
    loads = [a_load(1, 9000), a_load(8, 700), a_load(7, 700)]
    assert picks(Balancer("total_tokens", 3), loads, 2) == [2, 2]


@pytest.mark.parametrize("room", [0, 5, (7 << 32) + 6])
def test_follow_bootstrap_room_needs_nothing_but_the_room(room: int) -> None:
    assert Balancer("follow_bootstrap_room", 4).rank_of(room) == room % 4


@pytest.mark.parametrize("method", PICKING)
def test_no_other_method_looks_at_the_room(method: Method) -> None:
    assert Balancer(method, 4).rank_of(5) == -1


def test_a_cached_prefix_outweighs_a_queue_shorter_than_itself() -> None:
    balancer = Balancer("prefix_aware", 2)
    assert pick(balancer, 1000, [a_load(2, 700), IDLE], [800, 0]) == 0


def test_a_queue_longer_than_the_cached_prefix_outweighs_it() -> None:
    balancer = Balancer("prefix_aware", 2)
    assert pick(balancer, 1000, [a_load(2, 900), IDLE], [800, 0]) == 1


def test_without_a_cached_prefix_prefix_aware_is_total_tokens() -> None:
    loads = [a_load(1, 9000), a_load(8, 700), a_load(7, 700)]
    assert picks(Balancer("prefix_aware", 3), loads, 2) == [2, 2]


@pytest.mark.parametrize("method", ["shortest_queue", "total_tokens", "prefix_aware"])
def test_among_equals_a_rank_without_pages_comes_last(method: Method) -> None:
    loads = [a_load(1, 500, pages_free=0), a_load(1, 500), a_load(1, 500)]
    assert picks(Balancer(method, 3), loads, 4) == [1, 2, 1, 2]


@pytest.mark.parametrize("method", ["shortest_queue", "total_tokens", "prefix_aware"])
def test_equals_take_turns_beside_a_busier_rank(method: Method) -> None:
    loads = [IDLE, a_load(1, 500), IDLE, IDLE]
    assert picks(Balancer(method, 4), loads, 6) == [0, 2, 3, 0, 2, 3]


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=200), st.integers(1, 8))
def test_total_tokens_keeps_ranks_within_the_longest_prompt_of_each_other(
    lengths: list[int], dp_size: int
) -> None:
    """The promise of greedy balancing, whatever prompts arrive in whatever order."""
    balancer = Balancer("total_tokens", dp_size)
    loads = [IDLE] * dp_size
    for length in lengths:
        rank = pick(balancer, length, loads)
        old = loads[rank]
        loads[rank] = a_load(old.queued_requests + 1, old.queued_tokens + length)
    tokens = [load.queued_tokens for load in loads]
    assert max(tokens) - min(tokens) <= max(lengths)


@given(st.sampled_from(PICKING), st.sets(st.integers(0, 7), min_size=1), st.integers(1, 50))
def test_every_pick_is_one_of_the_ranks_to_choose_from(
    method: Method, among: set[int], num: int
) -> None:
    balancer = Balancer(method, 8)
    assert {balancer.pick(1, [IDLE] * 8, [0] * 8, among) for _ in range(num)} <= among


def test_an_unknown_method_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"total_tokens.*'least'"):
        Balancer("least", 2)  # type: ignore[arg-type]


def test_fewer_ranks_than_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 0"):
        Balancer("round_robin", 0)
