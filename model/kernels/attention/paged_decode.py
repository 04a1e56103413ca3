"""Paged decode attention for GPUs: keys and values are read once, where they lie in their pages.

How the positions of a row are cut into parts depends only on its own length and on sizes that are
compiled in, so a row is computed the same way whatever the other rows are. As many programs as a
device runs at once take the parts of all rows in turn, each with all queries of one key and value
head: rows of 1 and of 100,000 positions can share a step. A second kernel joins the parts, always
in the same order. Source: arXiv:2205.14135 for the running maximum and sum.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

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

_JOINED: Final = 16  # parts that are joined at a time
_ROOM_BYTES: Final = 1 << 27  # for parts' results, more only where the fewest parts need more
_BEGINNING: Final = 1 / 16  # a part's fixed time, over the time of a whole row's positions


@dataclass(frozen=True)
class Cut:
    """How the work is cut. positions: looked at together, a power of two.

    least, most: positions of a part, which has more where there is no memory for so many parts.
    """

    positions: int = 64
    least: int = 64
    most: int = 1088
    programs: int = 528  # that a device runs at once: four on each of 132 processors
    most_queries: int = 64  # of a program
    warps: int = 4
    stages: int = 3
    part: int = 512  # numbers of a key in one product; a longer key takes one after the other


def cut_of(head_dim: int, group: int, itemsize: int, shared_bytes: int = 0) -> Cut:
    """The cut that was fastest on an H200, or that its registers and shared memory take.

    shared_bytes: see `paged_decode`.
    """
    if itemsize > 2:
        return Cut(positions=16 if head_dim > 256 else 32, most_queries=LEAST, stages=2)
    if head_dim > 256:
        if group <= LEAST:
            return Cut(64, part=128, stages=2, programs=264)
        most = queries_within(64, 32, head_dim, itemsize, shared_bytes)
        return Cut(32, most_queries=most, warps=8, stages=2, programs=132)
    return Cut()


def splits_of(rows: int, heads: int, capacity: int, cut: Cut) -> int:
    """Parts of a row; a short row has fewer, a long one a multiple.

    The number with which rows that are all alike end first: where there are more parts than
    programs, some parts wait. capacity: positions that a page table has room for.
    """

    def taken(splits: int) -> float:
        turns = -(-rows * heads * splits // cut.programs)
        return turns * (1 / splits + _BEGINNING)

    most = min(-(-capacity // cut.least), cut.programs)
    return min(range(1, most + 1), key=taken, default=1)


class _How(NamedTuple):
    """splits: see `splits_of`. most: parts of a row. programs: for each head and its queries.

    given: whether there are sinks, and a window.
    """

    cut: Cut
    splits: int
    most: int
    programs: int
    given: tuple[bool, bool]


def _reach(position: Any, window: Any, how: _How) -> tuple[Any, Any, Any]:
    """A row's first position that is looked at, the positions of a part, and the number of parts.

    A row with nothing to look at has one part, too, without positions.
    """
    cut, end = how.cut, position + np.int32(1)
    first = jnp.zeros_like(end)
    if window is not None:
        first = jnp.maximum(end - window, first) & np.int32(-cut.positions)
    count = jnp.maximum(end - first, np.int32(0))
    # Where all rows are long, a multiple of splits leaves no program without a part at the end.
    times = -(-count // np.int32(how.splits * cut.most))
    times = jnp.clip(times, np.int32(1), np.int32(how.most // how.splits))
    each = jnp.maximum(-(-count // (np.int32(how.splits) * times)), np.int32(cut.least))
    each = -(-each // np.int32(cut.positions)) * np.int32(cut.positions)
    return first, each, jnp.clip(-(-count // each), np.int32(1), np.int32(how.most))


class _Parts(NamedTuple):
    """The parts of all rows, one row's after the other's; entries past the last mean nothing.

    begins: each row's first part, and at the end the number of parts. rows: the row of each part.
    firsts, ends: its positions.
    """

    begins: Int32[Array, " rows_and_one"]
    rows: Int32[Array, " parts"]
    firsts: Int32[Array, " parts"]
    ends: Int32[Array, " parts"]


def _parts(positions: Int32[Array, " rows"], window: Int32[Array, ""] | None, how: _How) -> _Parts:
    """The parts of a step: the same in all layers with the same window, so XLA makes them once."""
    first, size, used = _reach(positions, window, how)
    begins = jnp.pad(jnp.cumsum(used, dtype=jnp.int32), (1, 0))
    each = jnp.arange(len(positions) * how.most, dtype=jnp.int32)
    before = jnp.sum(begins[1:, None] <= each, axis=0, dtype=jnp.int32)
    rows = jnp.minimum(before, np.int32(len(positions) - 1))
    firsts = first[rows] + (each - begins[rows]) * size[rows]
    ends = jnp.minimum(firsts + size[rows], positions[rows] + np.int32(1))
    return _Parts(begins, rows, firsts, ends)


def _attend_kernel(*refs: Any, how: _How, softmax: Softmax, group: int) -> None:
    """Queries of one head, over each part that is this program's turn."""
    layer_ref, position_ref, *parts_refs, table_ref, q_ref, pool_ref = refs[:9]
    others, part_of = list(refs[9:]), _Parts(*parts_refs)
    sink_ref = others.pop(0) if how.given[0] else None
    window = others.pop(0)[0] if how.given[1] else None
    out_ref, *part_refs = others
    cut, head, program = how.cut, pl.program_id(0), pl.program_id(1)
    size = max(LEAST, min(cut.most_queries, 2 ** (group - 1).bit_length()))
    # Queries past the group's last repeat the last, in all reads and writes.
    queries = pl.program_id(2) * np.int32(size) + jnp.arange(size, dtype=jnp.int32)
    queries = jnp.minimum(queries, np.int32(group - 1))
    lanes, value_dim, page_size = lanes_of(pool_ref), out_ref.shape[3], pool_ref.shape[3]
    of_values = parts_of(value_dim, lanes, cut.part)
    parts = of_values + parts_of(q_ref.shape[3], lanes, cut.part, first=value_dim)
    layer, total_parts = layer_ref[0], part_of.begins[part_of.begins.shape[0] - 1]

    def attend(turn: Any, done: Any) -> Any:
        nth = program + turn * np.int32(how.programs)
        row, first, end = part_of.rows[nth], part_of.firsts[nth], part_of.ends[nth]
        position = position_ref[row]
        qs = [q_ref[part.of(row, head, queries)] for part in parts]

        def step(i: Any, carry: Running) -> Running:
            at = first + i * np.int32(cut.positions)
            slot, offsets = block_at(at, cut.positions, page_size)
            slot = jnp.minimum(slot, np.int32(table_ref.shape[1] - 1))
            where = table_ref[row, slot], offsets, head
            kind = q_ref.dtype, softmax.interpret
            keys, values = keys_and_values(pool_ref, (layer, where), parts, len(of_values), kind)
            at += jnp.arange(cut.positions, dtype=jnp.int32)
            seen = at < end
            if window is not None:
                seen &= position - at < window
            return add_block(carry, qs, keys, values, softmax, seen[None, :])

        alone = part_of.begins[row + np.int32(1)] - part_of.begins[row] == 1
        start = begin(size, of_values, None)
        if sink_ref is not None:
            # Where parts are joined, the join begins with the sinks.
            with_sinks = begin(size, of_values, sink_ref[head, queries])
            pairs = zip(with_sinks[:2], start[:2], strict=True)
            start = *(jnp.where(alone, sink, none) for sink, none in pairs), *start[2:]
        steps = -(-jnp.maximum(end - first, np.int32(0)) // np.int32(cut.positions))
        top, total, *accs = lax.fori_loop(np.int32(0), steps, step, start)

        @pl.when(alone)
        def give() -> None:
            shares = jnp.where(total > 0, total, np.float32(1))[:, None]
            for own_part, acc in zip(of_values, accs, strict=True):
                out_ref[own_part.of(row, head, queries)] = (acc / shares).astype(out_ref.dtype)

        if how.most > 1:
            acc_ref, top_ref, total_ref = part_refs

            @pl.when(~alone)
            def leave() -> None:
                top_ref[head, nth, queries] = top
                total_ref[head, nth, queries] = total
                for own_part, acc in zip(of_values, accs, strict=True):
                    acc_ref[own_part.of(head, nth, queries)] = acc

        return done

    left = jnp.maximum(total_parts - program, np.int32(0))
    turns = -(-left // np.int32(how.programs))
    lax.fori_loop(np.int32(0), turns, attend, np.int32(0))


def _join_kernel(*refs: Any, how: _How) -> None:
    """Join all parts of what one query looks at, where there are several."""
    begin_ref, _, acc_ref, top_ref, total_ref, *sink_refs, out_ref = refs
    query, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    first_part = begin_ref[row]
    used = begin_ref[row + np.int32(1)] - first_part
    size = min(_JOINED, 1 << (how.most - 1).bit_length())
    parts = parts_of(out_ref.shape[3])

    def step(i: Any, carry: Running) -> Running:
        top, total, *accs = carry
        each = i * np.int32(size) + jnp.arange(size, dtype=jnp.int32)
        there = each < used
        each = first_part + jnp.minimum(each, used - np.int32(1))
        tops = jnp.where(there, top_ref[head, each, query], LOW)
        new_top = jnp.maximum(top, jnp.max(tops))
        # Where nothing was seen so far, the maximum is LOW, and its power would be one.
        keeps = jnp.where(there, jnp.exp2(tops - new_top), np.float32(0))
        keep = jnp.exp2(top - new_top)
        joined = []
        for part, acc in zip(parts, accs, strict=True):
            own = acc_ref[head, each, query, pl.ds(part.at, part.size)]
            joined.append(acc * keep + jnp.sum(own * keeps[:, None], axis=0))
        own_totals = total_ref[head, each, query]
        return (new_top, total * keep + jnp.sum(own_totals * keeps), *joined)

    @pl.when(used > 1)
    def join() -> None:
        top, total = jnp.float32(LOW), jnp.float32(0)
        if sink_refs:
            top, total = sink_refs[0][head, query] * np.float32(to_bits(1.0)), jnp.float32(1)
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

    shared_bytes: shared memory of a program on the device; 0: enough.
    """
    pairs = in_pairs(pool)
    if not is_indexed(pairs):
        args = q, pool, layer, positions, page_table, sinks, window, scale, value_dim
        return reference.decode(*args, accelerator=True)
    rows, heads, group, head_dim = q.shape
    cut = cut or cut_of(head_dim, group, q.dtype.itemsize, shared_bytes)
    blocks, capacity = -(-group // cut.most_queries), page_table.shape[1] * pool.shape[3]
    splits = splits_of(rows, heads * blocks, capacity, cut)
    read = values_read(head_dim, value_dim, lanes_of(pairs))
    room = _ROOM_BYTES // (rows * heads * group * read * 4)
    most = splits * max(1, min(room // splits, -(-capacity // (splits * cut.most))))
    # Where rows are alike, each program has one part only.
    programs = min(max(cut.programs // (heads * blocks), rows * splits), rows * most)
    how = _How(cut, splits, most, programs, (sinks is not None, window is not None))
    of_sinks = [] if sinks is None else [sinks.astype(jnp.float32)]
    extras = of_sinks if window is None else [*of_sinks, window.reshape(1)]
    softmax = Softmax(head_dim**-0.5 if scale is None else scale, interpret, apart=True)
    out = jax.ShapeDtypeStruct((rows, heads, group, read), q.dtype)
    sizes = heads, rows * most, group
    of_parts = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*sizes, read), sizes, sizes)
    ]
    with jax.named_scope("decode_attention"):
        parts = _parts(positions, window, how)
        attended: Any = pl.pallas_call(
            partial(_attend_kernel, how=how, softmax=softmax, group=group),
            out_shape=[out, *(of_parts if most > 1 else [])],
            grid=(heads, programs, blocks),
            name="decode_attention",
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        )(layer.reshape(1), positions, *parts, page_table, q, pairs, *extras)
        whole: Array = attended[0]
        if most > 1:
            whole = pl.pallas_call(
                partial(_join_kernel, how=how),
                out_shape=out,
                grid=(group, heads, rows),
                input_output_aliases={1: 0},
                name="decode_attention_join",
                interpret=interpret,
                compiler_params=plt.CompilerParams(num_warps=1, num_stages=3),
            )(parts.begins, *attended, *of_sinks)
        return whole[..., :value_dim]
