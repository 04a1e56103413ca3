"""Pairs of workers: picked by policy from reported loads and own recent choices."""

from collections import Counter

import msgspec
import pytest

from serving.prompt import Prompt
from serving.router import ACKNOWLEDGED_AFTER_S, Pair, Ranks, Router, computes_all, key_of
from transfer import wire


def member(
    worker_id: str,
    role: wire.Role = "decode",
    *,
    draining: bool = False,
    dp_size: int = 1,
    ranks: tuple[wire.Load, ...] = (),
    local_prefill_tokens: int = 0,
    **load: int,
):
    info = wire.WorkerInfo(
        worker_id=worker_id,
        role=role,
        address="",
        data_address="",
        model_name="m",
        model_digest="d",
        kv_spec=wire.KVSpecMessage(1, 1, 8, 16, "float32"),
        tp_size=1,
        dp_size=dp_size,
        context_length=64,
        max_request_tokens=64,
        stored_kv_heads=1,
        local_prefill_tokens=local_prefill_tokens,
    )
    return wire.Member(info, 1, wire.Load(**load), draining, ranks)


P = member("p", "prefill")
D = member("d")


def pick(router: Router, prefills, decodes, num_tokens, now_s, avoid=frozenset()) -> Pair:
    """A pair, where one must be found."""
    pair = router.pick(prefills, decodes, num_tokens, now_s, avoid)
    assert pair is not None
    return pair


def picked_prefills(router: Router, prefills, num_picks: int, now_s: float = 0.0, tokens: int = 10):
    pairs = [pick(router, prefills, [D], tokens, now_s) for _ in range(num_picks)]
    return [pair.prefill.info.worker_id for pair in pairs]


def test_no_pair_while_a_role_is_missing_or_draining():
    router = Router("least_load")
    assert router.pick([], [D], 1, 0.0) is None
    assert router.pick([P], [], 1, 0.0) is None
    assert router.pick([P], [member("d", draining=True)], 1, 0.0) is None
    assert router.pick([P], [D], 1, 0.0) is not None


def test_decode_is_both_workers_of_a_prompt_that_it_computes_itself():
    router = Router("least_load")
    decode = member("d", local_prefill_tokens=8)
    pair = router.pick([P], [decode], 8, 0.0, may_be_local=True)
    assert pair is not None
    assert pair.is_local
    assert pair.keys == (("d", 1),)
    assert router.charged_requests(key_of(P)) == 0
    assert router.charged_requests(key_of(decode)) == 1
    router.prefilled(pair)
    assert router.charged_requests(key_of(decode)) == 1
    router.ended(pair)
    assert router.charged_requests(key_of(decode)) == 0
    for num_tokens, may_be_local in ((9, True), (8, False)):
        other = router.pick([P], [decode], num_tokens, 0.0, may_be_local=may_be_local)
        assert other is not None
        assert not other.is_local
        assert other.keys == (("d", 1), ("p", 1))


def test_only_decode_that_holds_no_prompt_it_cannot_compute_needs_no_prefill():
    assert computes_all(member("d", local_prefill_tokens=64).info)
    assert not computes_all(member("d", local_prefill_tokens=63).info)
    assert not computes_all(member("p", "prefill", local_prefill_tokens=64).info)


def test_without_prefill_only_decode_that_computes_the_prompt_itself_is_picked():
    router = Router("least_load")
    decodes = [member("a"), member("b", local_prefill_tokens=8, running_requests=9)]
    drains = member("p", "prefill", draining=True)
    for prefills in ([], [drains]):
        pair = router.pick(prefills, decodes, 8, 0.0, may_be_local=True)
        assert pair is not None
        assert pair.keys == (("b", 1),)
    # A worker to avoid is passed over only for one that takes the prompt, too.
    pair = router.pick([], decodes, 8, 0.0, frozenset("b"), stalled=[("b", 1)], may_be_local=True)
    assert pair is not None
    assert pair.keys == (("b", 1),)
    assert router.pick([], decodes, 9, 0.0, may_be_local=True) is None
    assert router.pick([], decodes, 8, 0.0, ranks=Ranks(prefill=0)) is None


def test_least_load_takes_the_prefill_with_fewer_queued_tokens():
    busy, idle = member("a", "prefill", queued_tokens=500), member("b", "prefill")
    assert picked_prefills(Router("least_load"), [busy, idle], 3) == ["b", "b", "b"]


def test_own_choices_count_before_the_workers_report_them():
    busy, idle = member("a", "prefill", queued_tokens=25), member("b", "prefill")
    assert picked_prefills(Router("least_load"), [busy, idle], 5) == ["b", "b", "b", "a", "b"]


def test_equal_workers_take_turns():
    prefills = [member(name, "prefill") for name in "cab"]
    router = Router("least_load")
    picked = []
    for _ in range(6):
        pair = pick(router, prefills, [D], 10, 0.0)
        router.ended(pair)
        picked.append(pair.prefill.info.worker_id)
    assert picked == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"slots_total": 4, "running_requests": 3}, {"slots_total": 8, "running_requests": 3}),
        ({"pages_total": 10, "pages_free": 2}, {"pages_total": 10, "pages_free": 5}),
        ({"slots_total": 8, "queued_requests": 9}, {"slots_total": 8, "running_requests": 8}),
    ],
)
def test_least_load_looks_at_what_decode_runs_out_of(worse, better):
    decodes = [member("a", **worse), member("b", **better)]
    pair = pick(Router("least_load"), [P], decodes, 1, 0.0)
    assert pair.decode.info.worker_id == "b"


def test_round_robin_takes_turns_whatever_the_load():
    prefills = [member("a", "prefill", queued_tokens=500), member("b", "prefill")]
    assert picked_prefills(Router("round_robin"), prefills, 4) == ["a", "b", "a", "b"]


def test_random_is_the_same_for_the_same_seed_and_reaches_everybody():
    prefills = [member(name, "prefill") for name in "abc"]
    first = picked_prefills(Router("random", seed=5), prefills, 60)
    assert first == picked_prefills(Router("random", seed=5), prefills, 60)
    assert set(Counter(first)) == {"a", "b", "c"}


def test_power_of_two_never_takes_the_worst_of_all():
    prefills = [member(name, "prefill", queued_tokens=1000 * i) for i, name in enumerate("abc")]
    picked = Counter(picked_prefills(Router("power_of_two", seed=1), prefills, 60, tokens=1))
    assert picked["c"] == 0
    assert picked["a"] > picked["b"] > 0
    assert picked_prefills(Router("power_of_two"), [P], 2) == ["p", "p"]


def test_workers_to_avoid_are_taken_only_when_there_is_no_other():
    prefills = [member("a", "prefill"), member("b", "prefill", queued_tokens=500)]
    router = Router("least_load")
    pair = pick(router, prefills, [D], 1, 0.0, frozenset({"a", "d"}))
    assert (pair.prefill.info.worker_id, pair.decode.info.worker_id) == ("b", "d")


def test_charges_end_with_the_request_or_when_reports_must_show_them():
    router = Router("least_load")
    pair, other = (pick(router, [P], [D], 7, 0.0) for _ in range(2))
    router.prefilled(pair)
    router.prefilled(pair)
    assert (router.charged_requests(key_of(P)), router.charged_requests(key_of(D))) == (1, 2)
    router.ended(pair)
    router.ended(pair)
    assert (router.charged_requests(key_of(P)), router.charged_requests(key_of(D))) == (1, 1)
    router.pick([P], [D], 7, ACKNOWLEDGED_AFTER_S)
    assert (router.charged_requests(key_of(P)), router.charged_requests(key_of(D))) == (1, 1)
    router.ended(other)
    assert (router.charged_requests(key_of(P)), router.charged_requests(key_of(D))) == (1, 1)


def test_while_no_loads_are_told_what_was_picked_since_goes_on_to_count():
    router = Router("least_load")
    decodes = [member("a", running_requests=1), member("b", running_requests=3)]
    router.reported(10.0)
    pairs = [pick(router, [P], decodes, 7, 10.0 + at) for at in range(40)]
    counts = Counter(pair.decode.info.worker_id for pair in pairs)
    assert counts == {"a": 21, "b": 19}
    for pair in pairs:
        router.ended(pair)
    for at in range(5000):  # one goes on, the others end
        pair = pick(router, [P], decodes, 7, 50.0 + at)
        if at:
            router.ended(pair)
    assert len(router._unacknowledged) < 2000
    router.reported(6000.0)
    router.pick([P], [D], 7, 6000.0)
    assert router.charged_requests(key_of(P)) == 1


def test_a_forgotten_worker_is_not_discharged_again():
    router = Router("least_load")
    pair = pick(router, [P], [D], 7, 0.0)
    router.forget(key_of(D))
    router.ended(pair)
    assert router.charged_requests(key_of(D)) == 0


# --- cache_aware ---------------------------------------------------------------------------------

PAGE = 16  # of `member`


def prompt(first: int, num_pages: int) -> list[int]:
    return [first] * (num_pages * PAGE) + [0]


def pick_prompt(router: Router, prefills, ids, now_s: float = 0.0) -> Pair:
    pair = router.pick(prefills, [D], len(ids), now_s, prompt=Prompt(ids))
    assert pair is not None
    return pair


def served(router: Router, prefills, ids, cached_tokens: int | None = None) -> str:
    """Serve a prompt; the prefill worker that it went to."""
    pair = pick_prompt(router, prefills, ids)
    router.found_cached(pair, cached_tokens)
    router.ended(pair)
    return pair.prefill.info.worker_id


TWO = [member("a", "prefill"), member("b", "prefill")]


def test_cache_aware_takes_who_has_the_prefix_and_equals_in_turn():
    router = Router("cache_aware")
    assert [served(router, TWO, prompt(n, 4)) for n in (1, 2)] == ["a", "b"]
    assert [served(router, TWO, prompt(n, 4)) for n in (2, 1, 1, 2, 2)] == list("baabb")


def test_cache_aware_leaves_the_prefix_when_its_worker_has_more_to_do_than_the_prompt_costs():
    router = Router("cache_aware")
    assert served(router, TWO, prompt(1, 4)) == "a"
    for queued, expected in ((4 * PAGE - 1, "a"), (4 * PAGE + 1, "b")):
        prefills = [member("a", "prefill", queued_tokens=queued), TWO[1]]
        assert served(router, prefills, prompt(1, 4)) == expected


def test_cache_aware_charges_what_will_be_computed_and_no_more():
    router = Router("cache_aware")
    assert served(router, TWO, prompt(1, 4)) == "a"
    picked = [pick_prompt(router, TWO, prompt(1, 4)) for _ in range(6)]
    # Each computes one token beside the cached ones: cheaper than all of it once at b.
    assert {pair.prefill.info.worker_id for pair in picked} == {"a"}
    assert {pair.num_uncached for pair in picked} == {1}
    for pair in picked:
        router.ended(pair)


def test_cache_aware_forgets_what_was_flushed_died_or_was_found_evicted():
    router = Router("cache_aware")
    served(router, TWO, prompt(1, 4))
    for forget in (router.flushed, router.forget):
        pair = pick_prompt(router, TWO, prompt(1, 4))
        forget(pair.prefill_key)
        router.ended(pair)
        assert pick_prompt(router, TWO, prompt(1, 4)).num_uncached == 4 * PAGE + 1
    router = Router("cache_aware")
    for n in (1, 2, 3):
        served(router, TWO[:1], prompt(n, 4))
    served(router, TWO[:1], prompt(2, 4), cached_tokens=0)
    uncached = [pick_prompt(router, TWO[:1], prompt(n, 4)).num_uncached for n in (1, 2, 3)]
    assert uncached == [4 * PAGE + 1, 1, 1]


def test_a_prompt_found_in_full_computes_its_last_page_and_that_is_no_miss():
    router = Router("cache_aware")
    ids = [7] * (4 * PAGE)
    served(router, TWO[:1], [5] * PAGE)
    served(router, TWO[:1], ids)
    assert pick_prompt(router, TWO[:1], ids).num_uncached == PAGE
    served(router, TWO[:1], ids, cached_tokens=3 * PAGE)
    assert pick_prompt(router, TWO[:1], [*[5] * PAGE, 0]).num_uncached == 1


def alone(worker_id: str, queued_tokens: int = 0, running_requests: int = 0):
    """A decode worker that computes every prompt."""
    return member(
        worker_id,
        local_prefill_tokens=1 << 20,
        slots_total=8,
        queued_tokens=queued_tokens,
        running_requests=running_requests,
    )


def pick_alone(router: Router, decodes, ids) -> Pair:
    pair = router.pick([], decodes, len(ids), 0.0, prompt=Prompt(ids), may_be_local=True)
    assert pair is not None
    assert pair.is_local
    return pair


def served_alone(router: Router, decodes, ids, cached_tokens: int | None = None) -> str:
    pair = pick_alone(router, decodes, ids)
    router.found_cached(pair, cached_tokens)
    router.ended(pair)
    return pair.decode.info.worker_id


def test_cache_aware_takes_the_decode_that_has_the_prefix_where_there_is_no_prefill():
    two = [alone("a"), alone("b")]
    router = Router("cache_aware")
    assert [served_alone(router, two, prompt(n, 4)) for n in (1, 2)] == ["a", "b"]
    assert [served_alone(router, two, prompt(n, 4)) for n in (2, 1, 1, 2, 2)] == list("baabb")
    assert served_alone(router, two, prompt(1, 4), cached_tokens=0) == "a"
    assert pick_alone(router, two, prompt(1, 4)).num_uncached == 1, "it has computed it now"
    router.flushed(("a", 1))
    assert {pick_alone(router, two, prompt(2, 4)).num_uncached for _ in range(3)} == {1}
    assert pick_alone(router, two, prompt(1, 4)).num_uncached == 4 * PAGE + 1


def test_cache_aware_leaves_decode_that_has_more_to_compute_or_is_much_fuller():
    for busy, expected in (
        ({"queued_tokens": 4 * PAGE - 1}, "a"),
        ({"queued_tokens": 4 * PAGE + 1}, "b"),
        ({"running_requests": 1}, "a"),
        ({"running_requests": 2}, "b"),
    ):
        router = Router("cache_aware")
        assert served_alone(router, [alone("a"), alone("b")], prompt(1, 4)) == "a"
        assert served_alone(router, [alone("a", **busy), alone("b")], prompt(1, 4)) == expected
    two = [alone("a", running_requests=8), alone("b", running_requests=8)]
    assert served_alone(router, two, prompt(1, 4)) == "a", "both are full: what is cached counts"


def test_a_prefix_that_all_share_does_not_fill_one_decode_before_the_others():
    router = Router("cache_aware")
    two = [alone("a"), alone("b")]
    served_alone(router, two, prompt(1, 4))
    picked: Counter[str] = Counter()
    for _ in range(12):
        pair = pick_alone(router, two, prompt(1, 4))
        router.prefilled(pair)  # they go on decoding
        picked[pair.decode.info.worker_id] += 1
    assert abs(picked["a"] - picked["b"]) <= 2


def test_decode_is_charged_with_a_prompt_until_it_is_computed_and_with_the_request_longer():
    router = Router("cache_aware")
    two = [alone("a"), alone("b")]
    pair = pick_alone(router, two, prompt(1, 4))
    assert pair.decode.info.worker_id == "a"
    assert pick_alone(router, two, prompt(1, 4)).decode.info.worker_id == "b"
    for _ in range(2):
        router.prefilled(pair)
    assert router.charged_requests(("a", 1)) == 1
    assert pick_alone(router, two, prompt(1, 4)).decode.info.worker_id == "a"
    for _ in range(2):
        router.ended(pair)
    assert router.charged_requests(("a", 1)) == 1


def test_every_rank_of_decode_has_a_cache_of_its_own():
    ranks = (wire.Load(slots_total=8),) * 2
    decodes = [member("a", local_prefill_tokens=1 << 20, dp_size=2, ranks=ranks)]
    router = Router("least_load", decode_policy="cache_aware")

    def rank_of(ids) -> int:
        pair = pick_alone(router, decodes, ids)
        router.ended(pair)
        return pair.decode_rank

    assert [rank_of(prompt(n, 4)) for n in (1, 2, 2, 1, 1)] == [0, 1, 1, 0, 0]
    router.flushed(("a", 1))
    assert pick_alone(router, decodes, prompt(1, 4)).num_uncached == 4 * PAGE + 1


def test_each_role_may_have_a_policy_of_its_own():
    prefills = [member("a", "prefill", queued_tokens=500), member("b", "prefill")]
    decodes = [member("c", slots_total=4, running_requests=3), member("d", slots_total=4)]
    router = Router("round_robin", decode_policy="least_load")
    pairs = [pick(router, prefills, decodes, 1, 0.0) for _ in range(3)]
    assert [pair.prefill.info.worker_id for pair in pairs] == ["a", "b", "a"]
    assert [pair.decode.info.worker_id for pair in pairs] == ["d", "d", "d"]
    router = Router("random", seed=1, prefill_policy="cache_aware")
    assert {served(router, TWO, prompt(1, 4)) for _ in range(8)} == {"a"}


# --- ranks ----------------------------------------------------------------------------------------


def with_ranks(worker_id: str, *running: int, role: wire.Role = "decode", slots: int = 8):
    """A worker whose ranks run so many requests each, or have so many tokens queued."""
    name = "running_requests" if role == "decode" else "queued_tokens"
    ranks = tuple(wire.Load(**{name: count}, slots_total=slots) for count in running)
    whole = wire.Load(**{name: sum(running)}, slots_total=slots * len(running))
    worker = member(worker_id, role, dp_size=len(running), ranks=ranks)
    return msgspec.structs.replace(worker, load=whole)


def picked_ranks(router: Router, decodes, num_picks: int) -> list[tuple[str, int]]:
    pairs = [pick(router, [P], decodes, 1, 0.0) for _ in range(num_picks)]
    return [(pair.decode.info.worker_id, pair.decode_rank) for pair in pairs]


def test_requests_for_a_lone_rank_count_as_all_others_of_its_worker():
    router, two = Router("least_load"), [member("a"), member("b")]
    for ranks, expected in ((Ranks(0, 0), "a"), (Ranks(), "b"), (Ranks(0, 0), "a")):
        pair = router.pick([P], two, 1, 0.0, ranks=ranks)
        assert pair is not None
        assert (pair.prefill_rank, pair.decode_rank) == (-1, -1)
        assert pair.decode.info.worker_id == expected


def test_least_load_takes_the_freest_rank_of_all_workers():
    decodes = [with_ranks("a", 3, 1), with_ranks("b", 2, 0, 4), member("c", slots_total=8)]
    router = Router("least_load")
    # b's rank 1 and c are idle; once each has one of ours, they tie with a's rank 1.
    assert picked_ranks(router, decodes, 3) == [("b", 1), ("c", -1), ("a", 1)]


def test_own_choices_count_on_the_rank_that_they_went_to():
    decodes = [with_ranks("a", 0, 0, 0)]
    router = Router("least_load")
    pairs = [pick(router, [P], decodes, 1, 0.0) for _ in range(3)]
    assert [pair.decode_rank for pair in pairs] == [0, 1, 2]
    assert router.charged_requests(key_of(decodes[0])) == 3
    router.ended(pairs[1])
    assert pick(router, [P], decodes, 1, 0.0).decode_rank == 1
    router.forget(key_of(decodes[0]))
    assert router.charged_requests(key_of(decodes[0])) == 0
    router.ended(pairs[0])
    assert router.charged_requests(key_of(decodes[0])) == 0


def test_a_choice_is_counted_once_when_reports_show_it():
    decodes = [with_ranks("a", 0, 0)]
    router = Router("least_load")
    first = pick(router, [P], decodes, 1, 0.0)
    pick(router, [P], decodes, 1, ACKNOWLEDGED_AFTER_S)
    assert router.charged_requests(key_of(decodes[0])) == 1
    router.ended(first)
    assert router.charged_requests(key_of(decodes[0])) == 1


@pytest.mark.parametrize("policy", ["round_robin", "power_of_two", "random", "cache_aware"])
def test_every_policy_reaches_every_rank(policy):
    decodes = [with_ranks("a", 0, 0), member("b", slots_total=8)]
    picked = Counter(picked_ranks(Router(policy, seed=3), decodes, 60))
    assert set(picked) == {("a", 0), ("a", 1), ("b", -1)}


def test_prefill_chooses_its_rank_itself_and_shares_what_is_queued():
    """400 tokens over four ranks are done before 150 on one."""
    four = with_ranks("a", 100, 100, 100, 100, role="prefill")
    one = member("b", "prefill", queued_tokens=150)
    pair = pick(Router("least_load"), [one, four], [D], 1, 0.0)
    assert (pair.prefill.info.worker_id, pair.prefill_rank) == ("a", -1)


def test_a_dictated_rank_goes_to_a_worker_that_has_it():
    router = Router("least_load")
    prefills = [member("a", "prefill"), with_ranks("b", 500, 900, role="prefill")]
    decodes = [member("c"), with_ranks("d", 7, 0, 7), with_ranks("e", 0, 0)]
    for _ in range(3):
        pair = router.pick(prefills, decodes, 1, 0.0, ranks=Ranks(prefill=1, decode=2))
        assert pair is not None
        assert (pair.prefill.info.worker_id, pair.prefill_rank) == ("b", 1)
        assert (pair.decode.info.worker_id, pair.decode_rank) == ("d", 2)
    pair = router.pick(prefills, decodes, 1, 0.0, ranks=Ranks(prefill=0))
    assert pair is not None
    assert (pair.prefill.info.worker_id, pair.prefill_rank) == ("a", -1)  # its only one


def test_a_dictated_rank_is_waited_for_while_no_worker_has_it():
    router = Router("least_load")
    assert router.pick([P], [D], 1, 0.0, ranks=Ranks(decode=1)) is None
    assert router.pick([P], [D], 1, 0.0, ranks=Ranks(prefill=1)) is None
    drains = msgspec.structs.replace(with_ranks("d", 0, 0), draining=True)
    assert router.pick([P], [D, drains], 1, 0.0, ranks=Ranks(decode=1)) is None


def test_what_was_considered_names_ranks():
    pair = pick(Router("least_load"), [P], [with_ranks("a", 3, 1), member("b")], 1, 0.0)
    assert set(pair.considered["decode"]) == {"a/0", "a/1", "b"}
    assert set(pair.considered["prefill"]) == {"p"}


def test_a_worker_that_has_not_told_of_its_ranks_yet_is_taken_in_turn():
    decodes = [member("a", dp_size=2, slots_total=8)]
    assert picked_ranks(Router("least_load"), decodes, 4) == [
        ("a", 0),
        ("a", 1),
        ("a", 0),
        ("a", 1),
    ]
