"""The network over a whole mesh, all but parameters and pool replicated: to measure and compare.

Roles split rows over ranks themselves, within programs of their own.
"""

from functools import partial

from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int32

from model.attention import ChunkBatch
from model.kv import PagePool
from model.params import Params
from model.sharding import POOL_SPEC, on_ranks
from model.transformer import Model, decode_rows, prefill_rows, row_logits


def prefill_hidden(
    model: Model, params: Params, pool: PagePool, batch: ChunkBatch
) -> tuple[Float[Array, "tokens hidden"], PagePool]:
    """`prefill_rows` over a mesh; all ranks do the same, each in its own pages.

    pool: sharded by rank and kv head, donated by the caller's jit.
    """
    run = on_ranks(
        model.mesh,
        lambda *args: prefill_rows(model, *args)[:2],
        (model.param_specs(), POOL_SPEC, P()),
        (P(), POOL_SPEC),
    )
    hidden, pool = run(params, pool, batch)
    return hidden, pool


def decode_hidden(
    model: Model,
    params: Params,
    pool: PagePool,
    token_ids: Int32[Array, " rows"],
    positions: Int32[Array, " rows"],
    page_table: Int32[Array, "rows pages_per_row"],
    kv_idx: Int32[Array, " rows"],
    adapters: Int32[Array, " rows"] | None = None,
) -> tuple[Float[Array, "rows hidden"], PagePool]:
    """`decode_rows`; see prefill_hidden."""

    def rows(
        params: Params, pool: Array, adapters: Array | None, *of: Array
    ) -> tuple[Array, Array]:
        ids, at, table, kv_idx = of
        return decode_rows(model, params, pool, ids, at, table, kv_idx, adapters=adapters)[:2]

    given = model.param_specs(), POOL_SPEC, P(), P(), P(), P(), P()
    run = on_ranks(model.mesh, rows, given, (P(), POOL_SPEC))
    hidden, pool = run(params, pool, adapters, token_ids, positions, page_table, kv_idx)
    return hidden, pool


def logits(
    model: Model, params: Params, hidden: Float[Array, "rows hidden"]
) -> Float[Array, "rows vocab"]:
    """`row_logits`; see prefill_hidden."""
    run = on_ranks(model.mesh, partial(row_logits, model), (model.param_specs(), P()), P())
    found: Array = run(params, hidden)
    return found
