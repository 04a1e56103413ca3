"""What both roles do alike; the rest of it is in the tests of each role and in tests/sim."""

import pytest

from transfer.role import PoolFacts


@pytest.mark.parametrize(("num_pages", "limit"), [(100, 64), (3, 48)])
def test_a_request_is_limited_by_context_and_pool(num_pages: int, limit: int) -> None:
    facts = PoolFacts(page_size=16, context_length=64, logical_kv_heads=2, stored_kv_heads=2)
    assert facts.request_limit(num_pages) == limit
