"""Paged flash attention for chunks on GPUs: a tile of tokens walks the pages that any of them sees.

Keys and values are read where they lie in their pages, and scores stay in registers. Pages that all
tokens of a tile see entirely come first and are not masked. Source: arXiv:2205.14135.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int32

from model.attention import ChunkBatch
from model.kernels.attention import reference
from model.kernels.codes import in_pairs, keys_and_values, lanes_of
from model.kernels.tiles import (
    Running,
    Softmax,
    add_block,
    begin,
    block_at,
    is_indexed,
    parts_of,
    queries_within,
    values_read,
)
from model.kv import PagePool


@dataclass(frozen=True)
class Cut:
    """How the work is cut, powers of two. rows: tokens times queries; positions: of a block."""

    rows: int = 128
    positions: int = 64
    warps: int = 4
    stages: int = 3

    def shared(self, group: int) -> tuple[int, int, int]:
        """Tokens of a tile, queries of each, and programs that share a group's queries."""
        size = min(self.rows, 2 ** (group - 1).bit_length())
        return self.rows // size, size, -(-group // size)


class Spans(NamedTuple):
    """Of each tile, in pages of the list: those that any token sees, and that all see entirely."""

    firsts: Int32[Array, " tiles"]
    lasts: Int32[Array, " tiles"]
    full_firsts: Int32[Array, " tiles"]
    full_lasts: Int32[Array, " tiles"]


def spans_of(batch: ChunkBatch, page_size: int, tile: int, window: Array | None) -> Spans:
    """The pages that each tile of so many tokens looks at: the first, and the one past the last."""
    num_pages = len(batch.page_ids)
    short = -len(batch.positions) % tile
    positions = jnp.pad(batch.positions, (0, short), mode="edge")[:, None]
    seqs = jnp.pad(batch.seq_idx, (0, short), mode="edge")[:, None]
    at = jnp.arange(num_pages, dtype=jnp.int32)
    own = (batch.page_seq == seqs) & (at < batch.num_pages_used)
    ago = positions - batch.page_pos
    some, whole = own & (ago >= 0), own & (ago >= np.int32(page_size - 1))
    if window is not None:
        some &= ago - np.int32(page_size - 1) < window
        whole &= ago < window
    # Tokens that are padding may see anything.
    nobody = ~jnp.any(own, axis=1, keepdims=True)
    any_ = jnp.any(some.reshape(-1, tile, num_pages), axis=1)
    every = any_ & jnp.all((whole | nobody).reshape(-1, tile, num_pages), axis=1)

    def ends(found: Array) -> tuple[Array, Array]:
        first = jnp.min(jnp.where(found, at, np.int32(num_pages)), axis=1)
        last = jnp.max(jnp.where(found, at + np.int32(1), np.int32(0)), axis=1)
        return jnp.minimum(first, last), last

    firsts, lasts = ends(any_)
    full_firsts, full_lasts = ends(every)
    # All pages between these are seen entirely: a sequence's pages stand together, in order.
    none = full_lasts == 0
    return Spans(
        firsts,
        lasts,
        jnp.where(none, firsts, full_firsts),
        jnp.where(none, firsts, full_lasts),
    )


def _kernel(*refs: Any, cut: Cut, how: Softmax, group: int, given: tuple[bool, bool]) -> None:
    """A tile of tokens, some queries of one kv head. given: whether there are sinks, a window."""
    layer_ref, span_ref, place_ref, page_ref, q_ref, pool_ref, *others, out_ref = refs
    sink_ref = others.pop(0) if given[0] else None
    window = others.pop(0)[0] if given[1] else None
    tokens, size, _ = cut.shared(group)
    num_tokens, num_heads = q_ref.shape[:2]
    # The last tiles see most, so they begin first.
    tile = pl.num_programs(1) - np.int32(1) - pl.program_id(1)
    head, block = pl.program_id(0) % np.int32(num_heads), pl.program_id(0) // np.int32(num_heads)
    row = jnp.arange(cut.rows, dtype=jnp.int32)
    # Tokens and queries past the last repeat the last, in all reads and writes.
    token = jnp.minimum(tile * np.int32(tokens) + row // np.int32(size), np.int32(num_tokens - 1))
    query = jnp.minimum(block * np.int32(size) + row % np.int32(size), np.int32(group - 1))
    layer, lanes = layer_ref[0], lanes_of(pool_ref)
    of_values = parts_of(out_ref.shape[3], lanes)
    parts = of_values + parts_of(q_ref.shape[3], lanes, first=out_ref.shape[3])
    qs = [q_ref[part.of(token, head, query)] for part in parts]
    position, seq = place_ref[0, token], place_ref[1, token]
    page_size = pool_ref.shape[3]
    first, last, full_first, full_last = (span_ref[i, tile] * np.int32(page_size) for i in range(4))
    num_full = (full_last - full_first) // np.int32(cut.positions)
    full_last = full_first + num_full * np.int32(cut.positions)

    def added(at: Any, end: Any, masked: bool, carry: Running) -> Running:
        """Add positions of the list from `at` on and before `end`."""
        page, offsets = block_at(at, cut.positions, page_size)
        page = jnp.minimum(page, np.int32(page_ref.shape[1] - 1))
        where = page_ref[0, page], offsets, head
        kind = q_ref.dtype, how.interpret
        keys, values = keys_and_values(pool_ref, (layer, where), parts, len(of_values), kind)
        seen = None
        if masked:
            listed = at + jnp.arange(cut.positions, dtype=jnp.int32)
            own, start = (page_ref[i, page] + jnp.zeros_like(listed) for i in (1, 2))
            ago = position[:, None] - (start + listed % np.int32(page_size))[None, :]
            seen = (own[None, :] == seq[:, None]) & (ago >= 0) & (listed < end)[None, :]
            if window is not None:
                seen &= ago < window
        return add_block(carry, qs, keys, values, how, seen)

    def full(i: Any, carry: Running) -> Running:
        return added(full_first + i * np.int32(cut.positions), full_last, False, carry)

    before = -(-(full_first - first) // np.int32(cut.positions))
    behind = -(-(last - full_last) // np.int32(cut.positions))

    def partly(i: Any, carry: Running) -> Running:
        ahead = i < before
        nth = jnp.where(ahead, i, i - before) * np.int32(cut.positions)
        at = jnp.where(ahead, first, full_last)
        return added(at + nth, jnp.where(ahead, full_first, last), True, carry)

    own = None if sink_ref is None else sink_ref[head, query]
    carry = lax.fori_loop(np.int32(0), num_full, full, begin(cut.rows, of_values, own))
    _, total, *accs = lax.fori_loop(np.int32(0), before + behind, partly, carry)
    share = jnp.where(total > 0, total, np.float32(1))[:, None]
    for part, acc in zip(of_values, accs, strict=True):
        out_ref[part.of(token, head, query)] = (acc / share).astype(out_ref.dtype)


def cut_of(head_dim: int, itemsize: int, shared_bytes: int = 0) -> Cut:
    """The cut that was fastest on an H200, or that its registers and shared memory take.

    shared_bytes: see `paged_prefill`.
    """
    if itemsize > 2:
        return Cut(32, 16 if head_dim > 128 else 32, 4, 2)
    if head_dim > 256:
        return Cut(queries_within(64, 32, head_dim, itemsize, shared_bytes), 32, 8, 2)
    if head_dim > 128:
        # A block of positions has keys and values, hence twice 64.
        rows = queries_within(128, 2 * 64, head_dim, itemsize, shared_bytes)
        return Cut(rows, warps=8, stages=2)
    return Cut()


def paged_prefill(
    q: Float[Array, "tokens kv_heads group head_dim"],
    pool: PagePool,
    layer: Int32[Array, ""],
    batch: ChunkBatch,
    sinks: Float[Array, "kv_heads group"] | None = None,
    window: Int32[Array, ""] | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    cut: Cut | None = None,
    shared_bytes: int = 0,
    interpret: bool = False,
) -> Float[Array, "tokens kv_heads group value_dim"]:
    """See model.kernels.attention.reference.prefill.

    shared_bytes: shared memory of a program on the device; 0: enough.
    """
    pairs = in_pairs(pool)
    if not is_indexed(pairs):
        args = q, pool, layer, batch, sinks, window, scale, value_dim
        return reference.prefill(*args, accelerator=True)
    num_tokens, heads, group, head_dim = q.shape
    cut = cut or cut_of(head_dim, q.dtype.itemsize, shared_bytes)
    tokens, _, blocks = cut.shared(group)
    read = values_read(head_dim, value_dim, lanes_of(pairs))
    extras = [] if sinks is None else [sinks.astype(jnp.float32)]
    extras += [] if window is None else [window.reshape(1)]
    with jax.named_scope("prefill_attention"):
        spans = jnp.stack(spans_of(batch, pool.shape[3], tokens, window))
        attended: Array = pl.pallas_call(
            partial(
                _kernel,
                cut=cut,
                how=Softmax(head_dim**-0.5 if scale is None else scale, interpret),
                group=group,
                given=(sinks is not None, window is not None),
            ),
            out_shape=jax.ShapeDtypeStruct((*q.shape[:3], read), q.dtype),
            grid=(heads * blocks, -(-num_tokens // tokens)),
            name="prefill_attention",
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        )(
            layer.reshape(1),
            spans,
            jnp.stack([batch.positions, batch.seq_idx]),
            jnp.stack([batch.page_ids, batch.page_seq, batch.page_pos]),
            q,
            pairs,
            *extras,
        )
        return attended[..., :value_dim]
