"""Every parameter of a network: its sizes as trained and as stored, its sharding, random values."""

import enum
import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from model.adapted import INTO, OUT_OF
from model.coded import CODE_DTYPES, LARGEST
from model.sharding import SHARDS, TENSOR, Dims, Stacks

# {"embed": [V, D], "layers": (segment, ...), "norm": [D], "lm_head": [D, V]}; a segment maps
# the names below to arrays stacked on a leading layer axis. When tied, lm_head is absent, or embed.
# Where there are adapters, "lora" has their segments (`lora_leaves`).
Params = dict[str, Any]

# The axis of inputs (the last of several) in one layer, where it is not the first.
_INPUTS_AT: Final = {"experts_gate_up": 1, "experts_down": 1, "o": 2}
_STEPS: Final = 32.0  # standard deviation of random codes that are integers


class Holds(enum.Enum):
    """What a parameter holds: weights, their codes, or the scales of the codes (model/coded.py)."""

    VALUES = "values"
    CODES = "codes"
    SCALES = "scales"


class Segment(NamedTuple):
    """A run of layers of identical structure."""

    first: int
    num_layers: int
    moe: bool


def segments(dims: Dims) -> tuple[Segment, ...]:
    """The layers in order, in as few runs as possible; a layer that is not stacked is one alone."""
    runs: list[Segment] = []
    for layer, moe in enumerate(dims.cfg.moe_layers):
        stacked = dims.stacks is Stacks.ALL or (moe and dims.stacks is Stacks.EXPERTS)
        if runs and runs[-1].moe == moe and stacked:
            runs[-1] = runs[-1]._replace(num_layers=runs[-1].num_layers + 1)
        else:
            runs.append(Segment(layer, 1, moe))
    return tuple(runs)


@dataclass(frozen=True)
class Leaf:
    """One parameter. canonical: its shape as trained; shape: as stored, padded for the mesh.

    head_axis: the kv head axis where heads may be replicated; the next axis is then the
    group, followed (tail > 0) by `tail` entries per kv head that are copied, not dealt out.
    std: deviation of random values; 0 means ones.
    repeats: an axis that is filled up with its own entries from the first on, not with zeros.
    group: of codes and scales, how many inputs share a scale.
    """

    canonical: tuple[int, ...]
    shape: tuple[int, ...]
    spec: P
    dtype: Any
    std: float
    head_axis: int | None = None
    tail: int = 0
    replicas: int = 1
    repeats: int | None = None
    holds: Holds = Holds.VALUES
    group: int = 1

    def sharding(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        """Where the parameter lives."""
        return NamedSharding(mesh, self.spec)

    def stacked(self, num_layers: int) -> "Leaf":
        """The same parameter of so many layers, on a leading axis that is not split."""
        return replace(
            self,
            canonical=(num_layers, *self.canonical),
            shape=(num_layers, *self.shape),
            spec=P(None, *self.spec) if self.spec else self.spec,
            head_axis=None if self.head_axis is None else self.head_axis + 1,
            repeats=None if self.repeats is None else self.repeats + 1,
        )

    def expand(self, values: Any, xp: Any) -> Any:
        """Values as stored, from values as trained. xp: numpy or jax.numpy."""
        assert values.shape == self.canonical, (values.shape, self.canonical)
        if self.head_axis is not None and self.replicas > 1:
            values = self._replicate(values, xp)
        if self.repeats is not None:
            again = np.arange(self.shape[self.repeats]) % values.shape[self.repeats]
            values = xp.take(values, again, axis=self.repeats)
        widths = [(0, new - old) for old, new in zip(values.shape, self.shape, strict=True)]
        return values if values.shape == self.shape else xp.pad(values, widths)

    def _replicate(self, values: Any, xp: Any) -> Any:
        axis = self.head_axis
        assert axis is not None
        before, after = values.shape[:axis], values.shape[axis + 2 :]
        heads, group = values.shape[axis], values.shape[axis + 1] - self.tail
        stored = self.shape[axis + 1] - self.tail
        own, shared = xp.split(values, [group], axis=axis + 1)
        widths = [(0, 0)] * values.ndim
        widths[axis + 1] = (0, stored * self.replicas - group)
        dealt = xp.pad(own, widths).reshape(*before, heads, self.replicas, stored, *after)
        copies = xp.expand_dims(shared, axis + 1)
        copies = xp.broadcast_to(copies, (*before, heads, self.replicas, self.tail, *after))
        return xp.concatenate([dealt, copies], axis=axis + 2).reshape(
            *before, heads * self.replicas, stored + self.tail, *after
        )


def param_leaves(dims: Dims, dtype: Any) -> Params:
    """The tree of `Leaf`s that has the structure of the parameters."""
    cfg = dims.cfg
    hidden, vocab = cfg.hidden_size, cfg.vocab_size
    std = 1.0 / math.sqrt(hidden)
    tree: Params = {}
    if not dims.tied_as_head:
        table = (vocab, hidden), (dims.vocab, hidden)
        tree["embed"] = Leaf(*table, P(SHARDS, None), dtype, std)
    tree["layers"] = tuple(_segment_leaves(dims, dtype, run) for run in segments(dims))
    tree["norm"] = _plain((hidden,), dtype, 0.0)
    if dims.tied_as_head or not cfg.tie_word_embeddings:
        head = (hidden, vocab), (hidden, dims.vocab)
        tree["lm_head"] = Leaf(*head, P(None, SHARDS), dtype, std)
    return _narrowed(tree, dims)


# Of each parameter that adapters may change, how many matrices it has side by side.
LORA_MATRICES: Final = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}


def lora_leaves(dims: Dims, dtype: Any) -> tuple[dict[str, Leaf], ...]:
    """The adapters' parameters, by segment, see model/adapted.py; nothing where there are none.

    Columns into all ranks are [adapter, matrix, rank], and so are the rows out of them.
    """
    return tuple(
        {
            name: leaf.stacked(run.num_layers)
            for name, leaf in _lora_layer_leaves(dims, dtype, run.moe).items()
        }
        for run in segments(dims)
        if dims.lora is not None
    )


def _lora_layer_leaves(dims: Dims, dtype: Any, moe: bool) -> dict[str, Leaf]:
    cfg, hidden, shape = dims.cfg, dims.cfg.hidden_size, dims.lora
    assert shape is not None
    head, std = (cfg.head_dim,), 1.0 / math.sqrt(hidden)
    old, wide = cfg.intermediate_size, dims.intermediate
    tree: dict[str, Leaf] = {}
    for name in shape.parameters:
        columns = shape.num * LORA_MATRICES[name] * shape.rank
        into = _plain((hidden, columns), dtype, std)
        out_of = _plain((columns, hidden), dtype, std)
        if name == "qkv":
            out_of = _by_head(dims, (columns,), head, dtype, std, tail=2)
        elif name == "o":
            into = _by_head(dims, (), (*head, columns), dtype, std)
        elif moe:
            continue
        elif name == "gate_up":
            sizes = (columns, 2, old), (columns, 2, wide)
            out_of = Leaf(*sizes, P(None, None, SHARDS), dtype, std)
        else:
            into = Leaf((old, columns), (wide, columns), P(SHARDS), dtype, std)
        tree |= {name + INTO: into, name + OUT_OF: out_of}
    return tree


def _narrowed(tree: Params, dims: Dims) -> Params:
    """The same, with matrices in the dtypes in which they are held."""
    held = {name: jnp.dtype(dtype) for name, dtype in dims.narrow if name in tree}
    return tree | {name: replace(tree[name], dtype=dtype) for name, dtype in held.items()}


def dense_layer_bytes(dims: Dims, dtype: Any) -> int:
    """Bytes of one layer without experts, over all shards of a rank; 0 if there is none."""
    if all(dims.cfg.moe_layers):
        return 0
    leaves = _layer_leaves(dims, dtype, moe=False).values()
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _segment_leaves(dims: Dims, dtype: Any, run: Segment) -> dict[str, Leaf]:
    layer = _layer_leaves(dims, dtype, run.moe)
    return {name: leaf.stacked(run.num_layers) for name, leaf in layer.items()}


def _plain(shape: tuple[int, ...], dtype: Any, std: float) -> Leaf:
    return Leaf(shape, shape, P(), dtype, std)


def _layer_leaves(dims: Dims, dtype: Any, moe: bool) -> dict[str, Leaf]:
    cfg, hidden = dims.cfg, dims.cfg.hidden_size
    tree = _latent_leaves(dims, dtype) if cfg.latent else _heads_leaves(dims, dtype)
    tree["attn_norm"] = _plain((hidden,), dtype, 0.0)
    tree["mlp_norm"] = _plain((hidden,), dtype, 0.0)
    if moe:
        tree |= _expert_leaves(dims, dtype)
        if cfg.shared_intermediate_size:
            old, new = cfg.shared_intermediate_size, dims.shared_intermediate
            tree |= _gated_leaves(("shared_gate_up", "shared_down"), hidden, old, new, dtype)
        if cfg.shared_gate:
            tree["shared_gate"] = _plain((hidden, 1), dtype, 1.0 / math.sqrt(hidden))
    else:
        old, new = cfg.intermediate_size, dims.intermediate
        tree |= _gated_leaves(("gate_up", "down"), hidden, old, new, dtype)
    for name in dims.coded:
        if name in tree:
            group, codes = dims.coded_inputs[name].group, CODE_DTYPES[dims.codes]
            tree |= _coded(name, tree[name], group, codes)
    return _narrowed(tree, dims)


def _gated_leaves(
    names: tuple[str, str], hidden: int, width: int, wide: int, dtype: Any
) -> dict[str, Leaf]:
    """Parameters of a feed-forward that all tokens go through. wide: its width as stored."""
    both = (hidden, 2, width), (hidden, 2, wide)
    last = (width, hidden), (wide, hidden)
    std, last_std = 1.0 / math.sqrt(hidden), 1.0 / math.sqrt(width)
    return {
        names[0]: Leaf(*both, P(None, None, SHARDS), dtype, std),
        names[1]: Leaf(*last, P(SHARDS), dtype, last_std),
    }


def _by_head(
    dims: Dims,
    before: tuple[int, ...],
    after: tuple[int, ...],
    dtype: Any,
    std: float,
    tail: int = 0,
) -> Leaf:
    """[*before, kv heads, group + tail, *after]: for each query head, and `tail` for its kv head.

    Sharded by kv head. tail: see Leaf.
    """
    cfg = dims.cfg
    return Leaf(
        (*before, cfg.num_kv_heads, cfg.group + tail, *after),
        (*before, dims.kv_heads, dims.group + tail, *after),
        P(*(None,) * len(before), SHARDS),
        dtype,
        std,
        head_axis=len(before),
        tail=tail,
        replicas=dims.replicas,
    )


def _latent_leaves(dims: Dims, dtype: Any) -> dict[str, Leaf]:
    """Parameters of latent attention: one kv head, whose queries are dealt out over the shards."""
    cfg, latent, hidden = dims.cfg, dims.cfg.latent, dims.cfg.hidden_size
    assert latent is not None
    rank, head_dim = latent.kv_rank, latent.nope_dim + latent.rope_dim

    def by_head(before: tuple[int, ...], after: tuple[int, ...], fan_in: int) -> Leaf:
        return _by_head(dims, before, after, dtype, 1.0 / math.sqrt(fan_in))

    std = 1.0 / math.sqrt(hidden)
    tree = {
        "kv_a": _plain((hidden, rank + latent.rope_dim), dtype, std),
        "kv_a_norm": _plain((rank,), dtype, 0.0),
        "k_b": by_head((), (latent.nope_dim, rank), rank),
        "v_b": by_head((), (rank, latent.value_dim), rank),
        "o": by_head((), (latent.value_dim, hidden), cfg.num_heads * latent.value_dim),
    }
    if not latent.q_rank:
        return tree | {"q": by_head((hidden,), (head_dim,), hidden)}
    return tree | {
        "q_a": _plain((hidden, latent.q_rank), dtype, std),
        "q_a_norm": _plain((latent.q_rank,), dtype, 0.0),
        "q_b": by_head((latent.q_rank,), (head_dim,), latent.q_rank),
    }


def _heads_leaves(dims: Dims, dtype: Any) -> dict[str, Leaf]:
    """Parameters of attention in which each kv head has its own keys and values."""
    cfg, hidden, head_dim = dims.cfg, dims.cfg.hidden_size, dims.cfg.head_dim
    std, std_o = 1.0 / math.sqrt(hidden), 1.0 / math.sqrt(cfg.num_heads * head_dim)
    tree = {
        # Queries of a kv head, then its key, then its value: one product makes all three.
        "qkv": _by_head(dims, (hidden,), (head_dim,), dtype, std, tail=2),
        "o": _by_head(dims, (), (head_dim, hidden), dtype, std_o),
    }
    if cfg.qkv_bias:
        tree["qkv_bias"] = _by_head(dims, (), (head_dim,), dtype, 0.1, tail=2)
    if cfg.o_bias:
        tree["o_bias"] = _plain((hidden,), dtype, 0.1)
    if cfg.qk_norm:
        tree["q_norm"] = _plain((head_dim,), dtype, 0.0)
        tree["k_norm"] = _plain((head_dim,), dtype, 0.0)
    if cfg.qk_norm_of_all:
        tree["qk_norm"] = _by_head(dims, (), (head_dim,), dtype, 0.0, tail=1)
    if cfg.sinks:
        tree["sinks"] = _by_head(dims, (), (), dtype, 1.0)
    return tree


def _expert_leaves(dims: Dims, dtype: Any) -> dict[str, Leaf]:
    cfg, hidden, experts = dims.cfg, dims.cfg.hidden_size, dims.cfg.num_experts
    physical, again = dims.physical_experts, 0 if dims.redundant else None
    width, wide = cfg.moe_intermediate_size, dims.moe_intermediate
    std, float32 = 1.0 / math.sqrt(hidden), jnp.dtype(jnp.float32)
    tree = {
        "router": _plain((hidden, experts), float32, std),
        "experts_gate_up": Leaf(
            (experts, hidden, 2, width),
            (physical, hidden, 2, wide),
            P(dims.expert_axes, None, None, TENSOR),
            dtype,
            std,
            repeats=again,
        ),
        "experts_down": Leaf(
            (experts, width, hidden),
            (physical, wide, hidden),
            P(dims.expert_axes, TENSOR, None),
            dtype,
            1.0 / math.sqrt(width),
            repeats=again,
        ),
    }
    if cfg.router.bias:
        tree["router_bias"] = _plain((experts,), float32, 0.1)
    if cfg.router.correction:
        tree["router_correction"] = _plain((experts,), float32, 0.1)
    if cfg.experts_bias:
        tree["experts_gate_up_bias"] = Leaf(
            (experts, 2, width),
            (physical, 2, wide),
            P(dims.expert_axes, None, TENSOR),
            dtype,
            0.1,
            repeats=again,
        )
        # Each device that shares an expert has one; all but the first are zero, and their sum is
        # what was trained.
        tree["experts_down_bias"] = Leaf(
            (experts, 1, hidden),
            (physical, dims.expert_shards, hidden),
            P(dims.expert_axes, TENSOR, None),
            dtype,
            0.1,
            repeats=again,
        )
    return tree


def _coded(name: str, leaf: Leaf, group: int, dtype: np.dtype) -> dict[str, Leaf]:
    """Codes in place of weights, and their scales, one for each group of inputs."""
    axis = _INPUTS_AT.get(name, 0)

    def fewer(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:axis], shape[axis] // group, *shape[axis + 1 :])

    codes = replace(leaf, dtype=dtype, holds=Holds.CODES, group=group)
    return {
        name: codes,
        f"{name}_scale": replace(
            codes,
            canonical=fewer(leaf.canonical),
            shape=fewer(leaf.shape),
            dtype=np.dtype(np.float32),
            std=leaf.std / (_STEPS if dtype == np.int8 else 1),
            holds=Holds.SCALES,
        ),
    }


def random_leaves(leaves: Params, mesh: Mesh, seed: int) -> Params:
    """Random parameters, made where they live. The same seed gives every mesh the same network."""
    key = jax.random.key(seed)
    made = {
        name: _random_leaf(leaf, mesh, _key_of(key, name))
        for name, leaf in leaves.items()
        if name != "layers"
    }
    if "embed" not in made:  # the same numbers, however a tied table lies
        head = leaves["lm_head"]
        turned = {"canonical": head.canonical[::-1], "shape": head.shape[::-1]}
        table = replace(head, spec=P(*head.spec[::-1]), **turned)
        made["lm_head"] = as_head(_random_leaf(table, mesh, _key_of(key, "embed")), head, mesh)
    layers, first = [], 0
    for run in leaves["layers"]:
        end = first + next(iter(run.values())).canonical[0]
        # One key per layer, since how many layers share arrays depends on the platform.
        numbers = np.arange(first, end)
        layers.append(
            {
                name: _random_leaf(leaf, mesh, _keys_of_layers(_key_of(key, name), numbers))
                for name, leaf in run.items()
            }
        )
        first = end
    return made | {"layers": tuple(layers)}


def as_head(table: Array, head: Leaf, mesh: Mesh) -> Array:
    """A table [vocab, hidden] as the parameter `head`, [hidden, vocab]."""
    turned: Array = jax.jit(jnp.transpose, out_shardings=head.sharding(mesh))(table)
    return turned


_keys_of_layers = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))


def _key_of(key: Array, name: str) -> Array:
    """By name, not by position: parameters that are codes have further ones beside them."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _random_leaf(leaf: Leaf, mesh: Mesh, key: Array) -> Array:
    """key: of the parameter, or one for each layer of a stack."""
    if leaf.std == 0:
        return jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding(mesh))
    if leaf.holds is Holds.SCALES:
        return jnp.full(leaf.shape, leaf.std, leaf.dtype, device=leaf.sharding(mesh))
    return _random_maker(leaf, mesh)(key)


@functools.cache
def _random_maker(leaf: Leaf, mesh: Mesh) -> Callable[[Array], Array]:
    """One program for all leaves that look alike."""

    def draw(key: Array, shape: tuple[int, ...]) -> Array:
        values = jax.random.normal(key, shape, jnp.float32)
        if leaf.holds is Holds.CODES and leaf.dtype == np.int8:
            most = LARGEST[leaf.dtype]
            return jnp.clip(jnp.round(values * np.float32(_STEPS)), -most, most).astype(jnp.int8)
        if leaf.holds is Holds.CODES:
            return lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)
        return (values * np.float32(leaf.std)).astype(leaf.dtype)

    def make(key: Array) -> Array:
        if key.ndim == 0:
            return leaf.expand(draw(key, leaf.canonical), jnp)
        # Layer by layer: the float32 draws of a whole stack would not fit beside it.
        rows = jax.lax.map(lambda row_key: draw(row_key, leaf.canonical[1:]), key)
        return leaf.expand(rows, jnp)

    return jax.jit(make, out_shardings=leaf.sharding(mesh))
