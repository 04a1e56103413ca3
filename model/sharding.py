"""Where arrays live: the only file that names mesh axes, and the sizes padding makes of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from model.config import PAGE_DTYPE_BYTES, KVSpec, ModelConfig
from model.errors import ModelError

# Experts are spread over EXPERT and each one's intermediate over TENSOR; attention, dense
# layers and the vocabulary are spread over both. Data-parallel ranks have a mesh each.
EXPERT: Final = "expert"
TENSOR: Final = "tensor"
SHARDS: Final = (EXPERT, TENSOR)

# [layers, 2, pages, page_size, kv_heads, head_dim], and a page list of the same rank.
POOL_SPEC: Final = P(None, None, None, None, SHARDS, None)


def make_mesh(tp_size: int, ep_size: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of tp_size devices, shaped (expert ep_size, tensor tp_size / ep_size).

    devices: the first tp_size of them are used; None means jax.devices().
    Raises ModelError when there are too few devices or ep_size does not divide tp_size.
    """
    found = list(jax.devices() if devices is None else devices)
    if tp_size < 1 or ep_size < 1:
        raise ModelError(f"tp_size {tp_size} and ep_size {ep_size}: both must be at least 1")
    if tp_size % ep_size:
        raise ModelError(f"ep_size {ep_size} must divide tp_size {tp_size}")
    if len(found) < tp_size:
        raise ModelError(f"tp_size {tp_size} needs as many devices, got {len(found)}")
    grid = np.array(found[:tp_size]).reshape(ep_size, tp_size // ep_size)
    return Mesh(grid, SHARDS)


@dataclass(frozen=True)
class Dims:
    """The sizes one mesh makes of a configuration. Padding is with zeros and changes no result.

    Query heads are [kv head, group]. Where tp exceeds the kv heads each is stored
    `replicas` times and its query heads are dealt out over the copies, the last ones zero.
    Raises ModelError when a size cannot be divided; both numbers are named.
    """

    cfg: ModelConfig
    tp: int
    ep: int

    def __post_init__(self) -> None:
        heads = self.cfg.num_kv_heads
        if max(self.tp, heads) % min(self.tp, heads):
            raise ModelError(f"tp_size {self.tp} and {heads} kv heads: one must divide the other")
        if self.cfg.num_experts % self.ep:
            raise ModelError(f"ep_size {self.ep} must divide {self.cfg.num_experts} experts")

    @staticmethod
    def of(cfg: ModelConfig, mesh: Mesh) -> "Dims":
        """The sizes on this mesh."""
        return Dims(cfg, mesh.shape[EXPERT] * mesh.shape[TENSOR], mesh.shape[EXPERT])

    @property
    def replicas(self) -> int:
        """Times each kv head is stored."""
        return max(1, self.tp // self.cfg.num_kv_heads)

    @property
    def kv_heads(self) -> int:
        """Stored kv heads, over all shards."""
        return self.cfg.num_kv_heads * self.replicas

    @property
    def group(self) -> int:
        """Query heads per stored kv head."""
        return -(-self.cfg.group // self.replicas)

    @property
    def intermediate(self) -> int:
        """Width of a dense layer."""
        return _up(self.cfg.intermediate_size, self.tp)

    @property
    def moe_intermediate(self) -> int:
        """Width of one expert."""
        return _up(self.cfg.moe_intermediate_size, self.tp // self.ep)

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return _up(self.cfg.vocab_size, self.tp)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def kv_spec(cfg: ModelConfig, dims: Dims, page_size: int, dtype: str) -> KVSpec:
    """The pages of this model on this mesh. Raises ModelError for an unknown dtype or page size."""
    if dtype not in PAGE_DTYPE_BYTES:
        raise ModelError(f"kv cache dtype {dtype!r}; accepted: {', '.join(PAGE_DTYPE_BYTES)}")
    if page_size < 1:
        raise ModelError(f"page_size {page_size}; accepted: at least 1")
    return KVSpec(cfg.num_layers, dims.kv_heads, cfg.head_dim, page_size, dtype)


def pool_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a page pool, and of pages gathered from one: kv heads over every device."""
    return NamedSharding(mesh, POOL_SPEC)


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of what every device holds whole."""
    return NamedSharding(mesh, P())


def sum_shards(x: Array) -> Array:
    """Sum over every shard of the mesh; inside `jax.shard_map`."""
    return lax.psum(x, SHARDS)


def gather_shards(x: Array) -> Array:
    """Join the last axis over every shard of the mesh; inside `jax.shard_map`."""
    return lax.all_gather(x, SHARDS, axis=x.ndim - 1, tiled=True)


def shard_idx() -> Array:
    """Which shard of the mesh this is, i32; inside `jax.shard_map`."""
    return lax.axis_index(SHARDS)


def expert_shard_idx() -> Array:
    """Which run of experts this shard has, i32; inside `jax.shard_map`."""
    return lax.axis_index(EXPERT)
