"""Which layers share ids of pages, and what layers with a window look at of their pages.

Where as many layers have a window as have none, pages hold half of the layers each: positions of
layers without have their pages, those of layers with one have others, of the same pool. So pages
behind a window may go while the rest of the same positions stays. Source: vllm-project/vllm:
vllm/v1/core/kv_cache_utils.py, whose groups may be more than two. Elsewhere there is one group.

By default page p of positions is page p of the pool for the first group, and page N + p for the
second, N pages being a rank's of each. A decode worker that keeps no more than windows takes pages
one by one instead, and has a ring of them for each slot: the page of place j is entry j % len.
"""

from typing import Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from model.buckets import touched_pages
from model.config import ModelConfig

FULL: Final = 0  # the group of layers that see all positions
WINDOWED: Final = 1  # of those with a window, where there are two groups


class Place(NamedTuple):
    """Where a pool has a layer: in pages of which group, and where within them."""

    group: Int32[Array, ""]
    layer: Int32[Array, ""]


class DecodeRows(NamedTuple):
    """What decode attention takes beside queries, for each group."""

    positions: Int32[Array, "groups rows"]  # counted from where the page table begins
    page_table: Int32[Array, "groups rows pages"]
    kv_idx: Int32[Array, "groups rows"]


def place_of(cfg: ModelConfig, layer: Int32[Array, ""]) -> Place:
    """Of one layer, counted over all."""
    if cfg.page_groups == 1:
        return Place(jnp.zeros((), jnp.int32), layer)
    windows = np.asarray(cfg.window_layers)
    ranks = np.where(windows, np.cumsum(windows), np.cumsum(~windows)) - 1
    groups, places = windows.astype(np.int32), ranks.astype(np.int32)
    return Place(jnp.asarray(groups)[layer], jnp.asarray(places)[layer])


def of_groups(cfg: ModelConfig, ids: Array, num_pages: int, page_size: int = 1) -> Array:
    """Pages, or positions in them, of each group: i32[groups, *ids]. Below zero stays so.

    num_pages: of each group in the pool of a rank. page_size: 1 where ids are pages.
    """
    base = np.arange(cfg.page_groups, dtype=np.int32) * np.int32(num_pages * page_size)
    shifted: Array = jnp.asarray(base).reshape(-1, *(1,) * ids.ndim) + ids
    return jnp.where(ids >= 0, shifted, np.int32(-1))


def decode_groups(
    cfg: ModelConfig,
    page_size: int,
    num_pages: int,
    positions: Int32[Array, " rows"],
    page_table: Int32[Array, "rows pages"],
    kv_idx: Int32[Array, " rows"],
    ring: Int32[Array, "rows ring"] | None,
) -> DecodeRows:
    """num_pages: of each group in the pool of a rank. positions, kv_idx: below zero is padding.

    page_table, kv_idx: of the first group. ring: each row's pages of the second; None: by default.
    Of layers with a window each row's table begins with the first page that it sees, so they cost
    what the window does, however long the rows are.
    """
    all_idx = of_groups(cfg, kv_idx, num_pages, page_size)
    if cfg.page_groups == 1:
        return DecodeRows(positions[None], page_table[None], all_idx)
    live, most = positions >= 0, page_table.shape[1]
    first = jnp.maximum(positions - np.int32(cfg.sliding_window - 1), 0) // np.int32(page_size)
    count = min(touched_pages(cfg.sliding_window, page_size), most)
    places = first[:, None] + jnp.arange(count, dtype=jnp.int32)
    if ring is None:
        seen = _at(page_table, jnp.minimum(places, np.int32(most - 1))) + np.int32(num_pages)
    else:
        size = np.int32(ring.shape[1])
        seen = _at(ring, places % size)
        page, offset = jnp.divmod(positions, np.int32(page_size))
        own = _at(ring, (page % size)[:, None])[:, 0] * np.int32(page_size) + offset
        all_idx = all_idx.at[WINDOWED].set(_or_dropped(kv_idx >= 0, own))
    table = jnp.zeros_like(page_table).at[:, :count].set(seen)
    since = _or_dropped(live, positions - first * np.int32(page_size))
    return DecodeRows(jnp.stack([positions, since]), jnp.stack([page_table, table]), all_idx)


def _at(table: Int32[Array, "rows pages"], places: Int32[Array, "rows n"]) -> Array:
    return jnp.take_along_axis(table, places, axis=1, mode="clip")


def _or_dropped(kept: Bool[Array, " rows"], values: Int32[Array, " rows"]) -> Array:
    return jnp.where(kept, values, np.int32(-1))
