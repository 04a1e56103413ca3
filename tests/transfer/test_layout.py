"""The reshard plan against a naive one, and pairs of workers that cannot work."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer.samples import a_worker
from transfer import wire
from transfer.errors import Incompatible
from transfer.layout import HeadRun, Part, check_pair, plan_heads, plan_parts


@st.composite
def shardings(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """(kv heads, source shards, source stored, destination shards, destination stored)."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))

    def side() -> tuple[int, int]:
        shards = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
        copies = draw(st.integers(1, 4))
        stored = heads * copies
        while stored % shards:
            stored += heads
        return shards, stored

    return heads, *side(), *side()


def stored_logical(heads: int, shards: int, stored: int) -> dict[tuple[int, int], int]:
    """(shard, head on it) -> the logical head it holds; the naive model."""
    local = stored // shards
    return {(j // local, j % local): j * heads // stored for j in range(stored)}


def spread(runs: tuple[HeadRun, ...]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Each head of each run as a pair (source, destination)."""
    return [
        ((run.src_shard, run.src_start + i), (run.dst_shard, run.dst_start + i))
        for run in runs
        for i in range(run.num_heads)
    ]


@given(shardings())
@settings(max_examples=300)
def test_each_stored_head_is_written_once_with_the_logical_head_it_stands_for(
    numbers: tuple[int, int, int, int, int],
) -> None:
    heads, src_shards, src_stored, dst_shards, dst_stored = numbers
    source = stored_logical(heads, src_shards, src_stored)
    wanted = stored_logical(heads, dst_shards, dst_stored)
    moves = spread(plan_heads(*numbers))
    assert Counter(dst for _, dst in moves) == Counter(wanted.keys())
    assert all(source[src] == wanted[dst] for src, dst in moves)


@given(shardings())
@settings(max_examples=200)
def test_no_two_neighbouring_runs_could_be_one(numbers: tuple[int, int, int, int, int]) -> None:
    runs = plan_heads(*numbers)
    for left, right in itertools.pairwise(runs):
        assert (
            left.src_shard != right.src_shard
            or left.dst_shard != right.dst_shard
            or left.src_start + left.num_heads != right.src_start
            or left.dst_start + left.num_heads != right.dst_start
        )


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_equal_sides_send_each_shard_to_its_twin_in_one_run(shards: int) -> None:
    local = 8 // shards
    assert plan_heads(8, shards, 8, shards, 8) == tuple(
        HeadRun(shard, 0, shard, 0, local) for shard in range(shards)
    )


def test_sources_that_hold_copies_share_the_work() -> None:
    runs = plan_heads(2, 4, 4, 4, 4)  # each head lies on two shards on both sides
    work = Counter(run.src_shard for run in runs)
    assert set(work.values()) == {1}


@pytest.mark.parametrize(
    ("numbers", "side", "values"),
    [
        ((4, 3, 4, 1, 4), "prefill", ("4 kv heads", "3 shards")),
        ((4, 1, 6, 1, 4), "prefill", ("6 kv heads", "has 4")),
        ((4, 1, 4, 8, 4), "decode", ("4 kv heads", "8 shards")),
        ((4, 1, 4, 1, 2), "decode", ("2 kv heads", "has 4")),
    ],
)
def test_numbers_that_do_not_divide_are_refused_by_name(
    numbers: tuple[int, int, int, int, int], side: str, values: tuple[str, ...]
) -> None:
    with pytest.raises(Incompatible, match=side) as caught:
        plan_heads(*numbers)
    assert all(value in str(caught.value) for value in values)


def test_a_pair_of_different_shardings_fits() -> None:
    check_pair(a_worker("prefill", tp_size=4), a_worker("decode", tp_size=8, stored_kv_heads=8))


def test_a_pair_with_one_latent_head_fits_whatever_the_copies() -> None:
    spec = msgspec.structs.replace(SPEC, num_kv_heads=1, planes=1)
    check_pair(
        a_worker("prefill", kv_spec=spec, tp_size=4),
        a_worker("decode", kv_spec=spec, tp_size=1, stored_kv_heads=1),
    )


def backends(prefill: tuple[str, str], decode: tuple[str, str]) -> list[wire.WorkerInfo]:
    """A pair of workers, each given as (transfer backend, host identity)."""
    return [
        a_worker("prefill", transfer_backend=prefill[0], host_identity=prefill[1]),
        a_worker("decode", transfer_backend=decode[0], host_identity=decode[1]),
    ]


@pytest.mark.parametrize("prefill", [("auto", "h1"), ("tcp", "h2"), ("auto", "")])
@pytest.mark.parametrize("decode", [("auto", "h1"), ("tcp", "h1")])
def test_whatever_demands_nothing_fits(prefill: tuple[str, str], decode: tuple[str, str]) -> None:
    check_pair(*backends(prefill, decode))


def test_shared_memory_is_demanded_within_a_host() -> None:
    check_pair(*backends(("shm", "h1"), ("auto", "h1")))
    check_pair(*backends(("auto", "h1"), ("shm", "h1")))
    check_pair(*backends(("shm", "h1"), ("shm", "h1")))


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        (("shm", "h1"), ("auto", "h2"), ("host identity", "h1", "h2")),
        (("auto", "h1"), ("shm", "h2"), ("host identity", "h1", "h2")),
        (("shm", "h1"), ("tcp", "h1"), ("transfer backend", "prefill-0 has shm", "has tcp")),
        (("tcp", "h1"), ("shm", "h1"), ("transfer backend", "prefill-0 has tcp", "has shm")),
    ],
)
def test_a_demand_for_shared_memory_that_cannot_be_met_is_refused(
    prefill: tuple[str, str], decode: tuple[str, str], named: tuple[str, ...]
) -> None:
    with pytest.raises(Incompatible) as caught:
        check_pair(*backends(prefill, decode))
    assert all(word in str(caught.value) for word in named)


def test_nixl_goes_with_nixl_only() -> None:
    check_pair(*backends(("nixl", "h1"), ("nixl", "h2")))
    for other in ("auto", "tcp", "shm"):
        with pytest.raises(Incompatible, match=f"prefill-0 has nixl, decode-0 has {other}"):
            check_pair(*backends(("nixl", "h1"), (other, "h1")))
        with pytest.raises(Incompatible, match=f"prefill-0 has {other}, decode-0 has nixl"):
            check_pair(*backends((other, "h1"), ("nixl", "h1")))


SPEC = a_worker().kv_spec


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_digest": "d2"}, ("digest", "d1", "d2")),
        ({"wire_version": 99}, ("version", str(wire.WIRE_VERSION), "99")),
        ({"kv_spec": msgspec.structs.replace(SPEC, page_size=16)}, ("page_size", "4", "16")),
        ({"kv_spec": msgspec.structs.replace(SPEC, num_layers=3)}, ("num_layers", "2", "3")),
        ({"kv_spec": msgspec.structs.replace(SPEC, head_dim=16)}, ("head_dim", "8", "16")),
        ({"kv_spec": msgspec.structs.replace(SPEC, num_kv_heads=2)}, ("num_kv_heads", "4", "2")),
        (
            {"kv_spec": msgspec.structs.replace(SPEC, planes=1)},
            ("kv planes", "prefill-0 has 2", "decode-0 has 1"),
        ),
        (
            {"kv_spec": msgspec.structs.replace(SPEC, dtype="float32")},
            ("dtype", "bfloat16", "float32"),
        ),
        ({"dtype": "float16"}, ("dtype", "float16")),
        ({"tp_size": 3}, ("3 shards",)),
    ],
)
def test_a_pair_that_cannot_work_is_refused_with_field_and_both_values(
    changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(Incompatible) as caught:
        check_pair(a_worker("prefill"), a_worker("decode", **changes))
    assert all(word in str(caught.value) for word in named), str(caught.value)


@given(shardings(), st.data())
@settings(max_examples=200)
def test_nodes_send_every_run_of_heads_once_to_the_node_that_takes_it(
    numbers: tuple[int, int, int, int, int], data: st.DataObject
) -> None:
    _, src_shards, _, dst_shards, _ = numbers
    runs = plan_heads(*numbers)
    src_nodes, dst_nodes = (
        sorted(data.draw(st.lists(st.integers(0, 3), min_size=shards, max_size=shards)))
        for shards in (src_shards, dst_shards)
    )
    addresses = [f"tcp://{node}:1" for node in dst_nodes]
    parts = plan_parts(runs, src_nodes, addresses)
    sent = []
    for node, of_node in parts.items():
        own = [shard for shard, at in enumerate(src_nodes) if at == node]
        assert len({part.address for part in of_node}) == len(of_node)
        for part in of_node:
            for run in part.runs:
                assert addresses[run.dst_shard] == part.address
                sent.append(replace(run, src_shard=own[run.src_shard]))
    assert Counter(sent) == Counter(runs)
    to = Counter(part.address for of_node in parts.values() for part in of_node)
    for of_node in parts.values():
        assert all(part.num_senders == to[part.address] for part in of_node)


def test_one_address_may_take_all_shards() -> None:
    runs = plan_heads(4, 1, 4, 2, 4)
    assert plan_parts(runs, [0], ["a"]) == {0: (Part("a", runs, 1),)}
    with pytest.raises(Incompatible, match="3 data addresses for 2 shards of decode"):
        plan_parts(runs, [0], ["a", "b", "c"])
