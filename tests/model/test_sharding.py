"""Meshes, and the sizes that a model has on them."""

import dataclasses

import jax
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.sharding import Dims, kv_spec, make_mesh, num_ranks, rank_devices
from tests.model.harness import GOLDENS

LLAMA = ModelConfig.from_dir(GOLDENS / "llama" / "model")
MIXTRAL = ModelConfig.from_dir(GOLDENS / "mixtral" / "model")


def test_a_mesh_has_ranks_outside_then_experts_and_tensors_inside() -> None:
    mesh = make_mesh(4, 2, dp_size=2)
    assert mesh.devices.shape == (2, 2, 2)
    assert list(mesh.devices.flat) == jax.devices()
    assert num_ranks(mesh) == 2
    assert rank_devices(mesh, 1) == jax.devices()[4:]
    assert list(make_mesh(2, 1, jax.devices()[4:]).devices.flat) == jax.devices()[4:6]


@pytest.mark.parametrize(
    ("tp", "ep", "dp", "message"),
    [
        (16, 1, 1, "dp_size 1 x tp_size 16 needs 16 devices, got 8"),
        (4, 1, 3, "dp_size 3 x tp_size 4 needs 12 devices, got 8"),
        (4, 3, 1, "ep_size 3 must divide tp_size 4"),
        (2, 4, 1, "ep_size 4 must divide tp_size 2"),
        (2, 3, 2, "ep_size 3 is above tp_size 2: then it must be dp_size 2 times"),
        (2, 8, 2, "ep_size 8 is above tp_size 2: then it must be dp_size 2 times"),
        (0, 1, 1, "tp_size 0, ep_size 1 and dp_size 1: all must be at least 1"),
        (1, 1, 0, "tp_size 1, ep_size 1 and dp_size 0: all must be at least 1"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(tp: int, ep: int, dp: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_mesh(tp, ep, dp_size=dp)


def test_experts_may_be_spread_over_the_ranks() -> None:
    mesh = make_mesh(2, 4, dp_size=2)
    assert mesh.devices.shape == (2, 2, 1)
    dims = Dims.of(MIXTRAL, mesh, share_experts=True)
    assert (dims.tp, dims.ep, dims.ranks_share_experts, dims.expert_shards) == (2, 4, True, 1)
    own = Dims.of(MIXTRAL, mesh)
    assert (own.tp, own.ep, own.ranks_share_experts, own.expert_shards) == (2, 2, False, 1)
    assert make_mesh(2, 2, dp_size=2).devices.shape == (2, 2, 1)
    assert make_mesh(1, 2, dp_size=2).devices.shape == (2, 1, 1)


def test_more_shards_than_kv_heads_replicate_heads_and_pad_their_groups() -> None:
    dims = Dims(LLAMA, 4, 1)
    assert (dims.replicas, dims.kv_heads, dims.group) == (2, 4, 2)
    assert (Dims(LLAMA, 2, 1).kv_heads, Dims(LLAMA, 2, 1).group) == (2, 3)
    assert kv_spec(dims, 16, "bfloat16").num_kv_heads == 4


def test_sizes_are_padded_to_the_mesh() -> None:
    odd = dataclasses.replace(LLAMA, vocab_size=1001, intermediate_size=250)
    assert (Dims(odd, 4, 1).vocab, Dims(odd, 4, 1).intermediate) == (1004, 252)
    routed = dataclasses.replace(MIXTRAL, moe_intermediate_size=97)
    assert Dims(routed, 4, 2).moe_intermediate == 98


@pytest.mark.parametrize(
    ("kv_heads", "tp", "ep", "message"),
    [
        (2, 3, 1, "tp_size 3 and 2 kv heads: one must divide the other"),
        (6, 4, 1, "tp_size 4 and 6 kv heads: one must divide the other"),
        (2, 6, 6, "ep_size 6 must divide 8 experts"),
    ],
)
def test_sizes_that_do_not_divide_are_named(kv_heads: int, tp: int, ep: int, message: str) -> None:
    cfg = dataclasses.replace(MIXTRAL, num_kv_heads=kv_heads, num_heads=kv_heads)
    with pytest.raises(ModelError, match=message):
        Dims(cfg, tp, ep)


def test_pages_of_an_unknown_kind_are_refused() -> None:
    dims = Dims(LLAMA, 1, 1)
    with pytest.raises(ModelError, match="kv cache dtype 'fp4'; accepted: float32"):
        kv_spec(dims, 16, "fp4")
    with pytest.raises(ModelError, match="page_size 0; accepted: at least 1"):
        kv_spec(dims, 0, "float32")
