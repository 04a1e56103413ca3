"""Where arrays live: mesh axes, which only this file names, and a model's sizes once padded."""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from model.coded import CODE_DTYPES, LEAST_GROUP
from model.config import PAGE_DTYPE_BYTES, KVSpec, ModelConfig
from model.config_quantised import SCALE_INPUTS, codes_of
from model.errors import ModelError
from model.members import first_devices

# Each data-parallel rank, an index on DATA, has rows and pages of its own. Within a rank experts
# are spread over EXPERT and each one's intermediate over TENSOR; attention, dense layers and the
# vocabulary are spread over both. Experts may be spread over DATA and EXPERT instead, and are then
# shared by the ranks.
DATA: Final = "data"
EXPERT: Final = "expert"
TENSOR: Final = "tensor"
SHARDS: Final = (EXPERT, TENSOR)
ALL_EXPERTS: Final = (DATA, EXPERT)
EXPERT_WEIGHTS: Final = ("experts_gate_up", "experts_down")

# [layers, planes, pages, page_size, kv_heads, head_dim], and a page list of the same rank. The
# pages of rank 0 stand first; each rank counts its own from 0.
POOL_SPEC: Final = P(None, None, DATA, None, SHARDS, None)
# Arrays whose first axis (second axis) has a part for each rank, rank 0's first.
RANKS: Final = P(DATA)
COLUMNS_OF_RANKS: Final = P(None, DATA)


def make_mesh(
    tp_size: int, ep_size: int, devices: Sequence[jax.Device] | None = None, dp_size: int = 1
) -> Mesh:
    """A mesh of dp_size * tp_size devices, shaped (data, expert, tensor).

    ep_size: the number of parts of the experts. Up to tp_size every rank has all parts; above it
    the ranks share the experts, and a rank has ep_size / dp_size parts.
    devices: the first of them are used; None means model.members.first_devices.
    Raises ModelError when there are too few devices or the parts in a rank do not divide tp_size.
    """
    if tp_size < 1 or ep_size < 1 or dp_size < 1:
        raise ModelError(
            f"tp_size {tp_size}, ep_size {ep_size} and dp_size {dp_size}: all must be at least 1"
        )
    parts = experts_in_rank(tp_size, ep_size, dp_size)
    needed = dp_size * tp_size
    found = list(first_devices(needed) if devices is None else devices)
    if len(found) < needed:
        raise ModelError(
            f"dp_size {dp_size} x tp_size {tp_size} needs {needed} devices, got {len(found)}"
        )
    grid = np.array(found[:needed]).reshape(dp_size, parts, tp_size // parts)
    return Mesh(grid, (DATA, *SHARDS))


def abstract_mesh(tp_size: int, ep_size: int, dp_size: int = 1) -> AbstractMesh:
    """The mesh that make_mesh would make, without devices: sizes and shardings can be asked of it.

    Raises ModelError as make_mesh does.
    """
    parts = experts_in_rank(tp_size, ep_size, dp_size)
    return AbstractMesh((dp_size, parts, tp_size // parts), (DATA, *SHARDS))


def experts_in_rank(tp_size: int, ep_size: int, dp_size: int) -> int:
    """How many parts of the experts one rank has. Raises ModelError if the sizes do not fit."""
    if ep_size <= tp_size or dp_size == 1:
        if tp_size % ep_size:
            raise ModelError(f"ep_size {ep_size} must divide tp_size {tp_size}")
        return ep_size
    if ep_size % dp_size or tp_size % (ep_size // dp_size):
        raise ModelError(
            f"ep_size {ep_size} is above tp_size {tp_size}: then it must be dp_size {dp_size} "
            "times a divisor of tp_size"
        )
    return ep_size // dp_size


def num_ranks(mesh: Mesh) -> int:
    """Data-parallel ranks of a mesh."""
    return mesh.shape[DATA]


def spans_processes(mesh: Mesh) -> bool:
    """Whether other processes have devices of the mesh, too."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def own_devices(mesh: Mesh) -> list[jax.Device]:
    """The devices of this process, in the order of the mesh."""
    return [d for d in mesh.devices.flat if d.process_index == jax.process_index()]


def rank_devices(mesh: Mesh, rank: int) -> list[jax.Device]:
    """Devices of one rank, in the order in which they share kv heads."""
    return list(mesh.devices[rank].flat)


def on_ranks(mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """`function` on every device: each rank sees its own part of what is split over ranks.

    Inside, collectives of this file may be used and everything is counted from 0 in each rank.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


class Stacks(enum.Enum):
    """Which layers of one structure share arrays; the others have arrays of their own."""

    ALL = "all"
    EXPERTS = "those with experts"
    NONE = "none"


class CodedInputs(NamedTuple):
    """Inputs of a parameter that codes could stand for.

    inputs: on a device. group: how many of them share a scale; it divides the number that do in the
    checkpoint, so that no scale spans devices. on_any: how many would if no axis were split.
    """

    inputs: int
    group: int
    on_any: int


class LoraShape(NamedTuple):
    """What all adapters of a model take: room for the largest of them (model/lora.py).

    num: adapters. rank: columns of one, for each matrix that it changes. parameters: those that
    some adapter changes.
    """

    num: int
    rank: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Dims:
    """The sizes of a configuration on one mesh. Padding is with zeros and changes no result.

    Query heads are [kv head, group]. Where tp exceeds the kv heads, each kv head is stored
    `replicas` times and its query heads are dealt out over the copies, the last ones zero.
    Raises ModelError when a size cannot be divided; both numbers are named.
    """

    cfg: ModelConfig
    tp: int  # devices of a rank
    ep: int  # parts of the experts; above tp they are spread over all ranks
    dp: int = 1
    stacks: Stacks = Stacks.ALL
    redundant: int = 0  # physical experts of a layer beyond the logical ones
    coded: tuple[str, ...] = ()  # parameters of layers that are codes (model/coded.py)
    codes: str = "fp8"  # which codes: "fp8" or "int8"
    narrow: tuple[tuple[str, str], ...] = ()  # matrices of two bytes for products in float32
    tied_as_head: bool = False  # a tied table is held once, as a head is: [hidden, vocab]
    lora: LoraShape | None = None  # of adapters that rows may ask for

    def __post_init__(self) -> None:
        heads = self.cfg.num_kv_heads
        if max(self.tp, heads) % min(self.tp, heads):
            raise ModelError(f"tp_size {self.tp} and {heads} kv heads: one must divide the other")
        self._check_experts()
        self._check_codes()

    @staticmethod
    def of(
        cfg: ModelConfig,
        mesh: Mesh | AbstractMesh,
        share_experts: bool = False,
        redundant: int = 0,
        coded: tuple[str, ...] = (),
        codes: str = "fp8",
    ) -> "Dims":
        """The sizes on this mesh. share_experts: whether ranks share them, each with a part."""
        dp, ep = mesh.shape[DATA], mesh.shape[EXPERT]
        parts, tp = dp * ep if share_experts else ep, ep * mesh.shape[TENSOR]
        return Dims(cfg, tp, parts, dp, redundant=redundant, coded=coded, codes=codes)

    def _check_experts(self) -> None:
        experts, redundant = self.cfg.num_experts, self.redundant
        if redundant and not experts:
            raise ModelError(f"{redundant} redundant experts: {self.cfg.architecture} has none")
        most = experts * (self.ep - 1)
        if redundant > most:
            raise ModelError(
                f"{redundant} redundant experts: {experts} experts in {self.ep} parts take at most "
                f"{most}, since a second copy in the same part is of no use"
            )
        if self.physical_experts % self.ep:
            extra = f" + {redundant} redundant" if redundant else ""
            raise ModelError(f"ep_size {self.ep} must divide {experts}{extra} experts")

    def _check_codes(self) -> None:
        if self.coded:
            codes_of(self.cfg.quantization, self.codes)
        for name in self.coded:
            inputs, group, _ = self.coded_inputs[name]
            if group < LEAST_GROUP:
                raise ModelError(
                    f"{name}, with {inputs} inputs on a device, is not kept as codes: only {group} "
                    f"of them could share a scale; accepted: {LEAST_GROUP} or more; use fewer "
                    "devices (--tp-size) or --quantization none"
                )

    @property
    def coded_inputs(self) -> dict[str, CodedInputs]:
        """The inputs of each parameter that codes could stand for."""
        cfg, share = self.cfg, self.cfg.scale_inputs or SCALE_INPUTS

        def of(whole: int, on_device: int = 0) -> CodedInputs:
            own, group = on_device or whole, math.gcd(whole, share)
            return CodedInputs(own, math.gcd(own, group), group)

        hidden = of(cfg.hidden_size)
        if cfg.latent:
            found = {"kv_a": hidden, "o": of(cfg.latent.value_dim)}
            rank = cfg.latent.q_rank
            found |= {"q_a": hidden, "q_b": of(rank)} if rank else {"q": hidden}
        else:
            found = {"qkv": hidden, "o": of(cfg.head_dim)}
        if not all(cfg.moe_layers):
            found["gate_up"] = hidden
            found["down"] = of(cfg.intermediate_size, self.intermediate // self.tp)
        if cfg.num_experts:
            width = self.moe_intermediate // self.expert_shards
            found["experts_gate_up"] = hidden
            found["experts_down"] = of(cfg.moe_intermediate_size, width)
        if cfg.shared_intermediate_size:
            found["shared_gate_up"] = hidden
            width = self.shared_intermediate // self.tp
            found["shared_down"] = of(cfg.shared_intermediate_size, width)
        return found

    @property
    def codable(self) -> tuple[str, ...]:
        """The parameters of `coded_inputs` whose scales are few enough.

        For a quantised checkpoint, whose numbers are the same if they are expanded, that is judged
        on this mesh. Others are rounded, and must be the same on every mesh: for them the
        parameters' own sizes decide.
        """
        quantised = bool(self.cfg.quantization)
        return tuple(
            name
            for name, (_, group, on_any) in self.coded_inputs.items()
            if (group if quantised else on_any) >= LEAST_GROUP
        )

    def coded_as_published(self, quantization: str) -> tuple[str, ...]:
        """`coded` for a value of --quantization, if the checkpoint is as its kind is published.

        Where config.json says int4 or mxfp4 for a mixture of experts, only experts are quantised.
        """
        if quantization not in CODE_DTYPES:
            return ()
        only_experts = self.cfg.num_experts > 0 and self.cfg.quantization in ("int4", "mxfp4")
        return tuple(x for x in self.codable if x in EXPERT_WEIGHTS or not only_experts)

    @property
    def ranks_share_experts(self) -> bool:
        """Whether rows go to other ranks for their experts."""
        return self.ep > self.tp

    @property
    def expert_axes(self) -> str | tuple[str, ...]:
        """Over which axes the experts are spread."""
        return ALL_EXPERTS if self.ranks_share_experts else EXPERT

    @property
    def physical_experts(self) -> int:
        """Experts of a layer as placed: each logical one, and copies."""
        return self.cfg.num_experts + self.redundant

    @property
    def most_copies(self) -> int:
        """The most copies of one expert: no more than one in each part."""
        return min(self.redundant + 1, self.ep)

    @property
    def expert_shards(self) -> int:
        """Devices that share the width of one expert."""
        return self.tp // experts_in_rank(self.tp, self.ep, self.dp)

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
        return _up(self.cfg.moe_intermediate_size, self.expert_shards)

    @property
    def shared_intermediate(self) -> int:
        """Width of the shared experts of a layer, side by side."""
        return _up(self.cfg.shared_intermediate_size, self.tp)

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return _up(self.cfg.vocab_size, self.tp)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def kv_spec(dims: Dims, page_size: int, dtype: str) -> KVSpec:
    """The pages of this model on this mesh. Raises ModelError for an unknown dtype or page size."""
    if dtype not in PAGE_DTYPE_BYTES:
        raise ModelError(f"kv cache dtype {dtype!r}; accepted: {', '.join(PAGE_DTYPE_BYTES)}")
    if page_size < 1:
        raise ModelError(f"page_size {page_size}; accepted: at least 1")
    cfg = dims.cfg
    return KVSpec(
        cfg.num_layers // cfg.page_groups,
        dims.kv_heads,
        cfg.head_dim,
        page_size,
        dtype,
        cfg.kv_planes,
        cfg.page_groups,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of what every device holds whole."""
    return NamedSharding(mesh, P())


def abstract_of(tree: Any, mesh: Mesh, spec: P) -> Any:
    """ShapeDtypeStructs of a pytree of arrays, all split alike."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def abstract_i32(shape: tuple[int, ...], mesh: Mesh, spec: P) -> jax.ShapeDtypeStruct:
    """The shape and sharding of an i32 array."""
    return jax.ShapeDtypeStruct(shape, np.dtype(np.int32), sharding=NamedSharding(mesh, spec))


def sum_shards(x: Array) -> Array:
    """Sum over every shard of the rank; inside `jax.shard_map`."""
    return lax.psum(x, SHARDS)


def gather_shards(x: Array) -> Array:
    """Join the last axis over every shard of the rank; inside `jax.shard_map`."""
    return lax.all_gather(x, SHARDS, axis=x.ndim - 1, tiled=True)


def shard_idx() -> Array:
    """Which shard of its rank this is, i32; inside `jax.shard_map`."""
    return lax.axis_index(SHARDS)


def num_shards() -> int:
    """Shards of a rank; inside `jax.shard_map`."""
    return lax.axis_size(SHARDS)


def rank_idx() -> Array:
    """Which data-parallel rank this is, i32; inside `jax.shard_map`."""
    return lax.axis_index(DATA)


def expert_shard_idx(share_experts: bool) -> Array:
    """Which run of experts this shard has, i32; inside `jax.shard_map`."""
    return lax.axis_index(ALL_EXPERTS if share_experts else EXPERT)


def gather_ranks(x: Array) -> Array:
    """Rows of every rank, rank 0's first; inside `jax.shard_map`."""
    return lax.all_gather(x, DATA, axis=0, tiled=True)


def sum_to_ranks(x: Array) -> Array:
    """The way back: sum over ranks, each of which keeps its own rows; inside `jax.shard_map`."""
    return lax.psum_scatter(x, DATA, scatter_dimension=0, tiled=True)


def told_spec(mesh: Mesh) -> P:
    """How the result of `tell_host` is split: by rank where one process has all ranks."""
    return P() if _tells_others(mesh) else RANKS


def tell_host(mesh: Mesh, tree: Any) -> Any:
    """Arrays with rows of each rank, so that one process can read all; inside `jax.shard_map`."""
    return jax.tree.map(gather_ranks, tree) if _tells_others(mesh) else tree


def _tells_others(mesh: Mesh) -> bool:
    """Whether some process lacks a rank; with one rank, each device has all rows."""
    return num_ranks(mesh) > 1 and spans_processes(mesh)


def swap_experts(x: Array, share_experts: bool) -> Array:
    """Row p goes to the shard that has part p of the experts; row q of the result came from q's.

    x: [parts, ...]; inside `jax.shard_map`.
    """
    return lax.all_to_all(x, ALL_EXPERTS if share_experts else EXPERT, 0, 0, tiled=True)
