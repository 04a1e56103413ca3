"""Paged attention in plain XLA: online softmax over blocks of pages, as many as are in use.

The trip count is data, so one program serves every context length. Scores, softmax and sums are
float32. Source: arXiv:2205.14135 for the running maximum and sum; arXiv:2309.06180.

On an accelerator, products take operands of the model's dtype, which is what its matrix units are
for, and decode's blocks are larger: each costs a few launches, and the host waits for the device
to say whether there is another (docs/adr/0045). A short page table is one block, without a loop.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from model.attention import ChunkBatch
from model.kv import PagePool, read_pages
from model.products import contract, zeros_after

_PREFILL_TILES: Final = (256, 1024)  # tokens at once: on a processor, on an accelerator
_PREFILL_BLOCKS: Final = (256, 1024)  # positions at once
_DECODE_BLOCK: Final = 128
_LARGE_BLOCK: Final = 8192  # most positions of a row in a block of decode,
_LARGE_BLOCKS: Final = 1 << 16  # and of all rows together
_SHORT_CONTEXT: Final = 2048  # most positions of a row where page tables are one block,
_SHORT_CONTEXTS: Final = 1 << 18  # and of all rows together
_LOW: Final = np.float32(-1e30)


class Running(NamedTuple):
    """Softmax so far: maximum and sum of the scores, weighted sum of the values."""

    top: Array
    total: Array
    acc: Array

    def add(self, scores: Array, allowed: Array, weighed: Callable[[Array], Array]) -> "Running":
        """Add one more block: scores [*b, q, s], to which allowed broadcasts.

        weighed(weights [*b, q, s]): the sum of the block's values, [*b, q, h].
        """
        scores = jnp.where(allowed, scores, _LOW)
        top = jnp.maximum(self.top, jnp.max(scores, axis=-1))
        # A row with nothing allowed so far has top == _LOW, where exp would be one.
        weights = jnp.where(allowed, jnp.exp(scores - top[..., None]), np.float32(0))
        keep = jnp.exp(self.top - top)
        total = self.total * keep + jnp.sum(weights, axis=-1)
        acc = self.acc * keep[..., None] + weighed(weights)
        return Running(top, total, acc)

    def value(self) -> Array:
        """The softmax-weighted mean; zero where nothing was allowed."""
        return self.acc / jnp.where(self.total > 0, self.total, np.float32(1))[..., None]


def _batched(a: Array, b: Array, transposed: bool) -> Array:
    """a [*batch, q, x] times b [*batch, x, y], or b [*batch, y, x] when transposed; float32."""
    batch = tuple(range(a.ndim - 2))
    return contract(
        a, b, ((a.ndim - 1,), (b.ndim - 1 if transposed else b.ndim - 2,)), (batch, batch)
    )


def _start(queries: Array, sinks: Array | None) -> Running:
    """The state before the first block. sinks: f32, scores without a value; broadcast to rows."""
    rows, acc = queries.shape[:-1], zeros_after(queries)
    if sinks is None:
        return Running(jnp.full(rows, _LOW), jnp.zeros(rows, jnp.float32), acc)
    top = jnp.broadcast_to(sinks.astype(jnp.float32), rows)
    return Running(top, jnp.ones(rows, jnp.float32), acc)


def _operand(q: Array, accelerator: bool) -> Array:
    """Queries in the dtype of products' operands."""
    return q if accelerator else q.astype(jnp.float32)


def _scale(q: Array, scale: float | None) -> np.float32:
    return np.float32(q.shape[-1] ** -0.5 if scale is None else scale)


def prefill_tile(tokens: int, accelerator: bool) -> tuple[int, int]:
    """Tokens in a tile, with tiles as even as possible, and positions in a block."""
    num_tiles = -(-tokens // _PREFILL_TILES[accelerator])
    return -(-tokens // num_tiles), _PREFILL_BLOCKS[accelerator]


def short_context(rows: int, accelerator: bool) -> int:
    """Most positions that each row's page table may have to be taken as one block; 0: none is.

    Taking all of them costs less than waiting for the device once, in every layer.
    """
    return _SHORT_CONTEXT if accelerator and rows * _SHORT_CONTEXT <= _SHORT_CONTEXTS else 0


def decode_block(rows: int, capacity: int, accelerator: bool) -> int:
    """Positions of each row in a block. capacity: those of its page table."""
    if not accelerator:
        return _DECODE_BLOCK
    if capacity <= short_context(rows, accelerator):
        return capacity
    return max(min(_LARGE_BLOCKS // rows, _LARGE_BLOCK), _DECODE_BLOCK)


def _pad(list_: Array, multiple: int, value: int) -> Array:
    short = -list_.shape[-1] % multiple
    return jnp.pad(list_, [(0, 0)] * (list_.ndim - 1) + [(0, short)], constant_values=value)


def _by_tiles(attended: Callable[..., Array], tile: int, q: Array, *of_rows: Array) -> Array:
    """attended(q, *of_rows) for `tile` rows at a time. The last tile is padded with -1."""
    rows = len(q)
    num_tiles = -(-rows // tile)
    if num_tiles == 1:
        return attended(q, *of_rows)

    def tiled(values: Array) -> Array:
        padding = [(0, num_tiles * tile - rows)] + [(0, 0)] * (values.ndim - 1)
        return jnp.pad(values, padding, constant_values=-1).reshape(-1, tile, *values.shape[1:])

    parts = [tiled(values) for values in of_rows]
    # The output overwrites the input: see zeros_after for what that saves.
    out = lax.fori_loop(
        np.int32(0),
        np.int32(num_tiles),
        lambda i, out: out.at[i].set(attended(out[i], *(part[i] for part in parts))),
        tiled(q),
    )
    return out.reshape(-1, *q.shape[1:])[:rows]


def prefill(
    q: Float[Array, "tokens kv_heads group head_dim"],
    pool: PagePool,
    layer: Int32[Array, ""],
    batch: ChunkBatch,
    sinks: Float[Array, "kv_heads group"] | None = None,
    window: Int32[Array, ""] | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    accelerator: bool = False,
) -> Float[Array, "tokens kv_heads group value_dim"]:
    """Every token attends to its own sequence's positions up to its own. Padding yields anything.

    A pool of one plane has keys that are values too. sinks: a score of each head that takes weight
    and gives no value. window: positions that a token sees, its own included. scale: of scores;
    None: head_dim ** -0.5. value_dim: how many of a value's first numbers are wanted; None: all.
    accelerator: see above. The cost of a tile of tokens follows the pages that any of them sees.
    """
    tokens, heads, group, head_dim = q.shape
    page_size = pool.shape[3]
    tile, block = prefill_tile(tokens, accelerator)
    per_block = max(1, block // page_size)
    span = per_block * page_size
    num_listed = len(batch.page_ids)
    offsets = jnp.arange(page_size, dtype=jnp.int32)
    in_use = jnp.arange(num_listed, dtype=jnp.int32) < batch.num_pages_used

    def attended(q: Array, positions: Array, seq_idx: Array) -> Array:
        """A tile of tokens, by the pages that any of them sees."""
        queries = _operand(q, accelerator).transpose(1, 2, 0, 3).reshape(heads, -1, head_dim)
        ago = positions[:, None] - batch.page_pos
        seen = (batch.page_seq == seq_idx[:, None]) & (ago >= 0)
        if window is not None:
            seen &= ago - np.int32(page_size - 1) < window
        seen_by_any = jnp.any(seen, axis=0) & in_use
        size = num_listed + -num_listed % per_block
        (listed,) = jnp.nonzero(seen_by_any, size=size, fill_value=num_listed)
        ids = batch.page_ids.at[listed].get(mode="fill", fill_value=0)
        seqs = batch.page_seq.at[listed].get(mode="fill", fill_value=-1)
        starts = batch.page_pos.at[listed].get(mode="fill", fill_value=0)

        def block(b: Array, running: Running) -> Running:
            at = b * np.int32(per_block)
            kv = read_pages(pool, layer, lax.dynamic_slice(ids, (at,), (per_block,)))
            kv = kv.astype(queries.dtype).transpose(1, 3, 0, 2, 4)
            kv = kv.reshape(-1, heads, span, head_dim)
            pos = lax.dynamic_slice(starts, (at,), (per_block,))[:, None] + offsets
            seq = lax.dynamic_slice(seqs, (at,), (per_block,))[:, None] + jnp.zeros_like(offsets)
            ago = positions[:, None] - pos.reshape(span)
            allowed = (seq.reshape(span) == seq_idx[:, None]) & (ago >= 0)
            if window is not None:
                allowed &= ago < window
            # XLA on CPU would compute the mask again wherever it is used, for every head, and all
            # of it would take two to three times as long.
            allowed = lax.optimization_barrier(allowed)
            allowed = jnp.broadcast_to(allowed, (group, *allowed.shape)).reshape(-1, span)
            scores = _batched(queries, kv[0], True) * _scale(q, scale)
            return running.add(scores, allowed, lambda weights: _batched(weights, kv[-1], False))

        own = None if sinks is None else jnp.repeat(sinks, len(positions), axis=1)
        trips = -(-jnp.sum(seen_by_any, dtype=jnp.int32) // np.int32(per_block))
        out = lax.fori_loop(np.int32(0), trips, block, _start(queries, own)).value()
        return out.reshape(heads, group, -1, head_dim).transpose(2, 0, 1, 3).astype(q.dtype)

    with jax.named_scope("prefill_attention"):
        # A token that pads a tile belongs to no sequence: the list numbers sequences from zero.
        return _by_tiles(attended, tile, q, batch.positions, batch.seq_idx)[..., :value_dim]


def add_by_products(
    queries: Float[Array, "rows kv_heads group head_dim"],
    pool: PagePool,
    layer: Int32[Array, ""],
    ids: Int32[Array, "rows pages_per_block"],
    allowed: Bool[Array, "rows 1 1 span"],
    running: Running,
    scale: np.float32,
) -> Running:
    """Add one block of pages of every row. queries: in the dtype of products. scale: of scores."""
    rows, heads, _, head_dim = queries.shape
    kv = read_pages(pool, layer, ids).astype(queries.dtype)
    kv = kv.transpose(2, 0, 4, 1, 3, 5).reshape(-1, rows, heads, allowed.shape[-1], head_dim)
    scores = _batched(queries, kv[0], True) * scale
    return running.add(scores, allowed, lambda weights: _batched(weights, kv[-1], False))


# As `add_by_products`.
AddBlock = Callable[[Array, PagePool, Array, Array, Array, Running, np.float32], Running]


def decode(
    q: Float[Array, "rows kv_heads group head_dim"],
    pool: PagePool,
    layer: Int32[Array, ""],
    positions: Int32[Array, " rows"],
    page_table: Int32[Array, "rows pages_per_row"],
    sinks: Float[Array, "kv_heads group"] | None = None,
    window: Int32[Array, ""] | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    add: AddBlock = add_by_products,
    accelerator: bool = False,
) -> Float[Array, "rows kv_heads group value_dim"]:
    """Row b attends to positions 0 to positions[b] of the pages page_table[b]; below zero: zeros.

    sinks, window, scale, value_dim, accelerator: see `prefill`. add: how a block is computed. On a
    processor each row is computed by itself, and cost follows the positions that all rows see. On
    an accelerator rows are computed together, and cost follows rows times the longest, or with a
    window, rows times what lies between the earliest position that any row sees and the last.
    """
    page_size = pool.shape[3]
    capacity = page_table.shape[1] * page_size
    per_block = max(1, decode_block(len(positions), capacity, accelerator) // page_size)
    span = per_block * page_size
    offsets = jnp.arange(span, dtype=jnp.int32)

    def attended(q: Array, positions: Array, table: Array) -> Array:
        """Rows that go together, by the positions that any of them sees."""
        queries = _operand(q, accelerator)
        earliest = None if window is None else positions - window + np.int32(1)

        def allowed_in(b: Array) -> Bool[Array, "rows 1 1 span"]:
            pos = b * np.int32(span) + offsets
            allowed = pos <= positions[:, None]
            if earliest is not None:
                allowed &= pos >= earliest[:, None]
            return allowed[:, None, None, :]

        def block(b: Array, running: Running) -> Running:
            ids = lax.dynamic_slice_in_dim(table, b * np.int32(per_block), per_block, axis=1)
            return add(queries, pool, layer, ids, allowed_in(b), running, _scale(q, scale))

        first = jnp.zeros((), jnp.int32)
        if earliest is not None:
            of_live = jnp.where(positions >= 0, earliest, np.iinfo(np.int32).max)
            first = jnp.maximum(jnp.min(of_live), first) // np.int32(span)
        trips = jnp.max(positions) // np.int32(span) + np.int32(1)
        running = _start(q, sinks)
        if table.shape[1] == per_block:
            running = block(jnp.zeros((), jnp.int32), running)
        else:
            running = lax.fori_loop(first, trips, block, running)
        return running.value().astype(q.dtype)

    with jax.named_scope("decode_attention"):
        together = len(q) if accelerator else 1
        table = _pad(page_table, per_block, 0)
        return _by_tiles(attended, together, q, positions, table)[..., :value_dim]
