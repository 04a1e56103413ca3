"""cache_aware on a real system: prompts go to the worker with their prefix, unless it is busy."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster import Cluster, up, wait_until
from tests.served import CROWD

PAGE = 16  # as CROWD's
PREFIX_PAGES = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with up("--prefill=2", "--policy=cache_aware", "--decode-policy=round_robin", *CROWD) as system:
        wait_until(lambda: len(system.workers()) == 3)  # it is ready with one of each role
        yield system


def prompt(prefix: int, end: int, num_pages: int = PREFIX_PAGES) -> list[int]:
    return [prefix + 5] * (num_pages * PAGE) + [end + 300, 7]


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["meta_info"]["cached_tokens"]
    return tokens


def ask(cluster: Cluster, ids: list[int]) -> Any:
    """Generate once the router has heard that nothing is queued."""
    steps = {worker["worker_id"]: worker["load"]["steps"] for worker in cluster.settled()}

    def heard() -> bool:
        loads = cluster.http.get("/get_load").json()
        return all(load["steps"] >= steps[load["worker_id"]] for load in loads)

    wait_until(heard)
    return cluster.generate(ids, max_new_tokens=2)


def computed(cluster: Cluster) -> dict[str, float]:
    """Prompt tokens that each prefill worker has computed."""
    return {
        worker["worker_id"]: worker["counters"].get("tokens_computed", 0.0)
        for worker in cluster.settled()
        if worker["role"] == "prefill"
    }


def test_shared_prefixes_are_computed_once_and_found_by_those_behind(cluster: Cluster) -> None:
    before = computed(cluster)
    for prefix in range(3):
        assert cached(ask(cluster, prompt(prefix, 0))) == 0
    first = computed(cluster)
    assert all(first[name] > before[name] for name in before), "both have some of the prefixes"
    for end in range(1, 3):
        for prefix in range(3):
            assert cached(ask(cluster, prompt(prefix, end))) == PREFIX_PAGES * PAGE
    after = computed(cluster)
    assert sum(after.values()) - sum(first.values()) == 6 * 2  # what is behind the prefixes


def test_a_flushed_cache_is_known_to_be_empty(cluster: Cluster) -> None:
    ask(cluster, prompt(9, 0))
    cluster.settled()
    assert cluster.http.post("/flush_cache").status_code == 200
    assert cached(ask(cluster, prompt(9, 1))) == 0
    assert cached(ask(cluster, prompt(9, 2))) == PREFIX_PAGES * PAGE


def test_a_worker_with_too_much_to_do_shares_its_prefix(cluster: Cluster) -> None:
    """Sixteen at once, whose ends cost more than the prefix: both workers compute the prefix."""
    shared, ends = 2, [[300 + n] * (8 * PAGE) for n in range(16)]
    prefix = [11] * (shared * PAGE)
    cluster.generate([*prefix, 7], max_new_tokens=1)
    before = computed(cluster)
    with ThreadPoolExecutor(len(ends)) as pool:
        asked = [[*prefix, *end] for end in ends]
        answers = list(pool.map(lambda ids: cluster.generate(ids, max_new_tokens=1), asked))
    after = computed(cluster)
    assert all(after[name] > before[name] for name in before)
    assert sum(cached(answer) > 0 for answer in answers) > len(ends) // 2
