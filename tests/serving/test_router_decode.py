"""cache_aware for decode beside prefill: who has a prompt's pages already gets the request."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from serving.prompt import Prompt
from serving.router import Pair, Router
from tests.serving.test_router import PAGE, member, prompt
from transfer import wire

PREFILL = member("p", "prefill")


def sharing(worker_id: str, shares_pages: bool = True, **load: Any) -> wire.Member:
    """A decode worker with eight slots that keeps pages that were sent."""
    plain = member(worker_id, **{"slots_total": 8, **load})
    info = msgspec.structs.replace(plain.info, shares_pages=shares_pages)
    return msgspec.structs.replace(plain, info=info)


TWO = [sharing("a"), sharing("b")]


def pick(router: Router, decodes: list[wire.Member], ids: list[int], salt: str = "") -> Pair:
    pair = router.pick([PREFILL], decodes, len(ids), 0.0, prompt=Prompt(ids), salt=salt)
    assert pair is not None
    assert not pair.is_local
    return pair


def served(router: Router, decodes: list[wire.Member], ids: list[int], salt: str = "") -> str:
    pair = pick(router, decodes, ids, salt)
    router.ended(pair)
    return pair.decode.info.worker_id


def test_a_prompt_goes_where_its_pages_were_sent_and_equals_take_turns() -> None:
    router = Router("cache_aware")
    assert [served(router, TWO, prompt(n, 4)) for n in (1, 2)] == ["a", "b"]
    assert [served(router, TWO, prompt(n, 4)) for n in (2, 1, 1, 2, 2)] == list("baabb")


def test_the_longest_prefix_counts() -> None:
    router = Router("least_load", decode_policy="cache_aware")
    short, long = prompt(1, 2), prompt(1, 6)
    assert served(router, TWO[:1], short) == "a"
    assert served(router, TWO[1:], long) == "b"
    assert served(router, TWO, long) == "b"


def test_one_that_is_much_fuller_gets_nothing_for_its_pages() -> None:
    for running, expected in ((1, "a"), (2, "b")):
        router = Router("cache_aware")
        assert served(router, TWO, prompt(1, 4)) == "a"
        decodes = [sharing("a", running_requests=running), TWO[1]]
        assert served(router, decodes, prompt(1, 4)) == expected


def test_a_prefix_that_all_share_does_not_fill_one_before_the_others() -> None:
    router = Router("cache_aware")
    served(router, TWO, prompt(1, 4))
    picked = Counter(pick(router, TWO, prompt(1, 4)).decode.info.worker_id for _ in range(12))
    assert abs(picked["a"] - picked["b"]) <= 2


def test_another_salt_is_another_prompt() -> None:
    router = Router("cache_aware")
    assert served(router, TWO, prompt(1, 4), "one") == "a"
    assert served(router, TWO, prompt(1, 4), "another") == "b"
    assert served(router, TWO, prompt(1, 4), "one") == "a"


def test_what_was_flushed_has_nothing() -> None:
    router = Router("cache_aware")
    assert served(router, TWO, prompt(1, 4)) == "a"
    router.flushed(("a", 1))
    assert served(router, TWO, prompt(1, 4)) == "b"


def test_a_pool_that_is_too_small_for_a_prompt_is_known_to_have_no_more_than_it_holds() -> None:
    router = Router("cache_aware")
    small = [sharing("a", pages_total=4, pages_free=4), sharing("b", pages_total=64, pages_free=64)]
    assert served(router, small[:1], prompt(1, 3)) == "a"
    assert served(router, small[:1], prompt(2, 4)) == "a"
    assert served(router, small, prompt(1, 3)) == "b"


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_other_policies_do_not_look_for_pages(policy: str) -> None:
    router = Router("cache_aware", decode_policy=policy)  # type: ignore[arg-type]
    assert [served(router, TWO, prompt(1, 4)) for _ in range(4)] == list("abab")


def test_workers_that_keep_no_pages_are_chosen_by_load() -> None:
    router = Router("cache_aware")
    two = [sharing("a", shares_pages=False), sharing("b", shares_pages=False)]
    assert [served(router, two, prompt(1, 4)) for _ in range(4)] == list("abab")
    assert len(prompt(1, 4)) == 4 * PAGE + 1
