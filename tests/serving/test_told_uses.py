"""Processes of one server tell each other which prompts go where, so that each can guess caches."""

import asyncio
from collections import Counter

import msgspec

from serving import siblings
from serving.prefix_index import ToldUse, Untold, prefix_chain
from serving.prompt import Prompt
from serving.router import Router, key_of
from serving.siblings import Siblings
from tests.fakes import FakeCluster
from tests.serving.test_router import D, P, member, prompt, served
from transfer import wire

TWO = [member("a", "prefill"), member("b", "prefill")]


def telling() -> tuple[Router, Untold]:
    router, untold = Router("cache_aware"), Untold()
    router.untold = untold
    return router, untold


def test_a_prompt_goes_where_another_process_had_one_with_its_prefix():
    first, untold = telling()
    second = Router("cache_aware")
    assert [served(first, TWO, prompt(n, 4)) for n in (1, 2)] == ["a", "b"]
    for use in untold.take():
        second.told(use)
    assert [served(second, TWO, prompt(n, 4)) for n in (2, 1, 1)] == ["b", "a", "a"]
    assert untold.take() == ()


def test_what_is_sent_to_a_decode_rank_is_told_of_that_rank():
    ranks = (wire.Load(slots_total=16, slots_free=16, pages_total=100, pages_free=100),) * 2
    info = msgspec.structs.replace(member("d", dp_size=2).info, shares_pages=True)
    decode = wire.Member(info, 1, wire.Load(), ranks=ranks)

    def rank_of(router: Router, ids: list[int]) -> int:
        pair = router.pick([P], [decode], len(ids), 0.0, prompt=Prompt(ids))
        assert pair is not None
        return pair.decode_rank

    first, untold = telling()
    second = Router("cache_aware")
    assert [rank_of(first, prompt(n, 3)) for n in (1, 2)] == [0, 1]
    *_, use = (use for use in untold.take() if use.worker_id == "d")
    assert (use.rank, use.most_pages) == (1, 100)
    assert use.chain == prefix_chain(wire.pack_i32(prompt(2, 3)), 16)
    second.told(use)
    assert rank_of(second, prompt(2, 3)) == 1
    third = Router("cache_aware")
    third.told(use)
    third.flushed(("d", 1))  # every rank, though this process picked none yet
    assert rank_of(third, prompt(2, 3)) == 0


def test_what_is_told_of_a_worker_after_it_died_is_forgotten_with_it():
    first, untold = telling()
    second = Router("cache_aware")
    assert [served(first, TWO, prompt(n, 4)) for n in (1, 2)] == ["a", "b"]
    second.forget(("a", 1))
    for use in untold.take():
        second.told(use)
    index = second._index
    assert index is not None
    assert [index.num_pages(((name, 1), -1)) for name in "ab"] == [4, 4]
    second.keep({("b", 1)})
    assert [index.num_pages(((name, 1), -1)) for name in "ab"] == [0, 4]


def test_a_policy_that_looks_at_no_cache_tells_nothing():
    router = Router("least_load")
    router.untold = Untold()
    assert router.pick([P], [D], 49, 0.0, prompt=Prompt(prompt(1, 3))) is not None
    assert router.untold.take() == ()


async def test_a_process_that_hangs_keeps_no_other_from_being_told(monkeypatch):
    told: Counter[str] = Counter()

    class OneHangs(Siblings):
        async def _ask(self, client, name, request, reply):
            told[client] += 1
            if client == "hangs":
                await asyncio.Event().wait()

    monkeypatch.setattr(siblings, "_TELL_EACH_S", 0.001)
    own = OneHangs(None, None, None)  # type: ignore[arg-type]  # it asks nobody
    own._clients = ["hangs", "answers"]  # type: ignore[list-item]
    untold = Untold()
    telling = asyncio.create_task(own._tell_uses(untold))
    while told["answers"] < 3:
        untold.add("a", 1, -1, [1], 0)
        await asyncio.sleep(0.001)
    assert told["hangs"] == 1
    telling.cancel()
    await asyncio.wait({telling})


async def test_a_worker_that_is_gone_is_remembered_by_nobody_who_hears_of_it():
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher(policy="cache_aware")
        links = list(dispatcher._membership.open_links())
        (here,) = (link.key for link in links if link.member.info.role == "prefill")
        packed = bytes(16)
        uses = [
            ToldUse(*here, -1, packed, 0),
            ToldUse(here[0], here[1] - 1, -1, packed, 0),
            ToldUse("another", 1, -1, packed, 0),
        ]
        dispatcher.told_uses(uses)
        index = dispatcher._router._index
        assert index is not None
        assert list(index._pages) == [(here, -1)]
        assert key_of(links[0].member) == links[0].key
