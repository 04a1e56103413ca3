"""Paged decode attention for GPUs: keys and values are read once, where they lie in their pages.

The positions of a row are split among programs, each of which has all queries of one key and value
head; a second kernel puts their parts together, always in the same order. What a row costs follows
what it sees, whatever the others do. Source: arXiv:2205.14135 for the running maximum and sum.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int32

from model.kernels.attention import reference
from model.kernels.codes import in_pairs, keys_and_values, lanes_of
from model.kernels.tiles import (
    LEAST,
    LOW,
    Running,
    Softmax,
    add_block,
    begin,
    block_at,
    is_indexed,
    parts_of,
    queries_within,
    to_bits,
    values_read,
)
from model.kv import PagePool

_JOINED: Final = 16  # splits that are joined at a time


@dataclass(frozen=True)
class Cut:
    """How the work is cut. positions: looked at together, a power of two. least: of a split."""

    positions: int = 64
    least: int = 64
    programs: int = 264  # that there are at least, where rows have enough positions
    most_queries: int = 64  # of a program
    warps: int = 4
    stages: int = 3
    part: int = 512  # numbers of a key that are multiplied with one another, each after the other


def cut_of(head_dim: int, group: int, itemsize: int, shared_bytes: int = 0) -> Cut:
    """What was fastest on an H200, or what its registers and shared memory take.

    shared_bytes: see `paged_decode`.
    """
    if itemsize > 2:
        return Cut(positions=16 if head_dim > 256 else 32, most_queries=LEAST, stages=2)
    if head_dim > 256:
        if group <= LEAST:
            return Cut(64, part=128, stages=2)
        most = queries_within(64, 32, head_dim, itemsize, shared_bytes)
        return Cut(32, most_queries=most, warps=8, stages=2)
    return Cut()


def splits_of(rows: int, heads: int, capacity: int, cut: Cut) -> int:
    """Programs that share one row's positions. capacity: positions of a page table."""
    wanted = -(-cut.programs // (rows * heads))
    return int(max(1, min(wanted, -(-capacity // cut.least))))


def _reach(position: Any, window: Any, splits: int, cut: Cut) -> tuple[Any, Any, Any]:
    """Of a row: its first position looked at, those of each split, and splits that have any."""
    end = position + np.int32(1)
    first = jnp.zeros_like(end)
    if window is not None:
        first = jnp.maximum(end - window, first) & np.int32(-cut.positions)
    count = jnp.maximum(end - first, np.int32(0))
    each = jnp.maximum(-(-count // np.int32(splits)), np.int32(cut.least))
    each = -(-each // np.int32(cut.positions)) * np.int32(cut.positions)
    return first, each, -(-count // each)


def _attend_kernel(
    *refs: Any, cut: Cut, splits: int, how: Softmax, group: int, given: tuple[bool, bool]
) -> None:
    """Queries of one head of a row over a part of its positions. given: sinks, a window."""
    layer_ref, position_ref, table_ref, q_ref, pool_ref, *others = refs
    sink_ref = others.pop(0) if given[0] else None
    window = others.pop(0)[0] if given[1] else None
    head, part, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    blocks = -(-group // cut.most_queries)
    split, block = part // np.int32(blocks), part % np.int32(blocks)
    size = max(LEAST, min(cut.most_queries, 2 ** (group - 1).bit_length()))
    # What is more than the group is its last once more, in all that is read and written.
    queries = block * np.int32(size) + jnp.arange(size, dtype=jnp.int32)
    queries = jnp.minimum(queries, np.int32(group - 1))
    layer, position = layer_ref[0], position_ref[row]
    lanes, value_dim = lanes_of(pool_ref), others[0].shape[-1]
    of_values = parts_of(value_dim, lanes, cut.part)
    parts = of_values + parts_of(q_ref.shape[3], lanes, cut.part, first=value_dim)
    qs = [q_ref[part.of(row, head, queries)] for part in parts]
    first, each, _ = _reach(position, window, splits, cut)
    first += split * each
    end = jnp.minimum(first + each, position + np.int32(1))
    page_size = pool_ref.shape[3]

    def step(i: Any, carry: Running) -> Running:
        at = first + i * np.int32(cut.positions)
        slot, offsets = block_at(at, cut.positions, page_size)
        slot = jnp.minimum(slot, np.int32(table_ref.shape[1] - 1))
        where = table_ref[row, slot], offsets, head
        kind = q_ref.dtype, how.interpret
        keys, values = keys_and_values(pool_ref, (layer, where), parts, len(of_values), kind)
        at += jnp.arange(cut.positions, dtype=jnp.int32)
        seen = at < end
        if window is not None:
            seen &= position - at < window
        return add_block(carry, qs, keys, values, how, seen[None, :])

    own = sink_ref[head, queries] if splits == 1 and sink_ref is not None else None
    steps = -(-jnp.maximum(end - first, np.int32(0)) // np.int32(cut.positions))
    top, total, *accs = lax.fori_loop(np.int32(0), steps, step, begin(size, of_values, own))
    if splits == 1:
        (out_ref,) = others
        shares = jnp.where(total > 0, total, np.float32(1))[:, None]
        for own_part, acc in zip(of_values, accs, strict=True):
            done = (acc / shares).astype(out_ref.dtype)
            out_ref[own_part.of(row, head, queries)] = done
        return
    acc_ref, top_ref, total_ref = others
    top_ref[row, head, split, queries] = top
    total_ref[row, head, split, queries] = total
    for own_part, acc in zip(of_values, accs, strict=True):
        acc_ref[own_part.of(row, head, split, queries)] = acc


def _join_kernel(*refs: Any, cut: Cut, splits: int, given: tuple[bool, bool]) -> None:
    """All parts of one query's positions."""
    position_ref, acc_ref, top_ref, total_ref, *others, out_ref = refs
    sink_ref = others.pop(0) if given[0] else None
    window = others.pop(0)[0] if given[1] else None
    query, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, _, used = _reach(position_ref[row], window, splits, cut)
    size = min(_JOINED, 1 << (splits - 1).bit_length())
    parts = parts_of(out_ref.shape[3])

    def step(i: Any, carry: Running) -> Running:
        top, total, *accs = carry
        each = i * np.int32(size) + jnp.arange(size, dtype=jnp.int32)
        there, each = each < used, jnp.minimum(each, np.int32(splits - 1))
        tops = jnp.where(there, top_ref[row, head, each, query], LOW)
        new_top = jnp.maximum(top, jnp.max(tops))
        # Where nothing was seen so far, nothing is as high as the highest.
        keeps = jnp.where(there, jnp.exp2(tops - new_top), np.float32(0))
        keep = jnp.exp2(top - new_top)
        joined = []
        for part, acc in zip(parts, accs, strict=True):
            own = acc_ref[row, head, each, query, pl.ds(part.at, part.size)]
            joined.append(acc * keep + jnp.sum(own * keeps[:, None], axis=0))
        own_totals = total_ref[row, head, each, query]
        return (new_top, total * keep + jnp.sum(own_totals * keeps), *joined)

    top, total = jnp.float32(LOW), jnp.float32(0)
    if sink_ref is not None:
        top, total = sink_ref[head, query] * np.float32(to_bits(1.0)), jnp.float32(1)
    zeros = [jnp.zeros(part.size, jnp.float32) for part in parts]
    steps = -(-used // np.int32(size))
    _, total, *accs = lax.fori_loop(np.int32(0), steps, step, (top, total, *zeros))
    share = jnp.where(total > 0, total, np.float32(1))
    for part, acc in zip(parts, accs, strict=True):
        out_ref[part.of(row, head, query)] = (acc / share).astype(out_ref.dtype)


def paged_decode(
    q: Float[Array, "rows kv_heads group head_dim"],
    pool: PagePool,
    layer: Int32[Array, ""],
    positions: Int32[Array, " rows"],
    page_table: Int32[Array, "rows pages_per_row"],
    sinks: Float[Array, "kv_heads group"] | None = None,
    window: Int32[Array, ""] | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    cut: Cut | None = None,
    shared_bytes: int = 0,
    interpret: bool = False,
) -> Float[Array, "rows kv_heads group value_dim"]:
    """See model.kernels.attention.reference.decode.

    shared_bytes: memory of a program's own that the device has; 0: enough.
    """
    pairs = in_pairs(pool)
    if not is_indexed(pairs):
        args = q, pool, layer, positions, page_table, sinks, window, scale, value_dim
        return reference.decode(*args, accelerator=True)
    rows, heads, group, head_dim = q.shape
    cut = cut or cut_of(head_dim, group, q.dtype.itemsize, shared_bytes)
    blocks = -(-group // cut.most_queries)
    splits = splits_of(rows, heads * blocks, page_table.shape[1] * pool.shape[3], cut)
    given = sinks is not None, window is not None
    extras = [] if sinks is None else [sinks.astype(jnp.float32)]
    extras += [] if window is None else [window.reshape(1)]
    how = Softmax(head_dim**-0.5 if scale is None else scale, interpret, apart=True)
    read = values_read(head_dim, value_dim, lanes_of(pairs))
    out = jax.ShapeDtypeStruct((rows, heads, group, read), q.dtype)
    sizes = rows, heads, splits, group
    partial_out = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*sizes, read), sizes, sizes)
    ]
    with jax.named_scope("decode_attention"):
        attended: Any = pl.pallas_call(
            partial(_attend_kernel, cut=cut, splits=splits, how=how, group=group, given=given),
            out_shape=out if splits == 1 else partial_out,
            grid=(heads, splits * blocks, rows),
            name="decode_attention",
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        )(layer.reshape(1), positions, page_table, q, pairs, *extras)
        if splits == 1:
            whole: Array = attended
            return whole[..., :value_dim]
        joined: Array = pl.pallas_call(
            partial(_join_kernel, cut=cut, splits=splits, given=given),
            out_shape=out,
            grid=(group, heads, rows),
            name="decode_attention_join",
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=1, num_stages=3),
        )(positions, *attended, *extras)
        return joined[..., :value_dim]
