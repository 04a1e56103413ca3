"""Which layers share page ids, and which of their pages layers with a window look at.

Where as many layers have a window as have none, each page holds half of the layers: a position is
in one page for the layers without a window, and in another, of the same pool, for those with one.
So pages behind a window can be freed while the other half of the same positions stays. Source:
vllm-project/vllm: vllm/v1/core/kv_cache_utils.py, which allows more than two groups. All other
models have one group.

By default an id p in a page table is page p of the pool for the first group and page N + p for the
second, where each group has N pages in a rank. A decode worker that keeps no more than windows
takes pages one by one instead, and has a ring of them for each slot: the slot's j-th page is entry
j % len.
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
    """Where a layer is in a pool: in the pages of which group, and at which index within them.

    group: an int if known while tracing; an array in a loop over layers of both groups.
    """

    group: Int32[Array, ""] | int
    layer: Int32[Array, ""]


class DecodeRows(NamedTuple):
    """What decode attention takes besides queries, for each group."""

    positions: Int32[Array, "groups rows"]  # counted from where the page table begins
    page_tables: tuple[Int32[Array, "rows pages"], ...]  # one a group, no wider than it sees
    any_table: Int32[Array, "groups rows most"]  # the same, of one width
    kv_idx: Int32[Array, "groups rows"]

    def of(
        self, group: Int32[Array, ""] | int
    ) -> tuple[Int32[Array, " rows"], Int32[Array, "rows pages"]]:
        """Positions and page table of one group."""
        table = self.page_tables[group] if isinstance(group, int) else self.any_table[group]
        return self.positions[group], table


def group_of_layer(cfg: ModelConfig, layer: int) -> int:
    """The group of a layer, which is counted over all layers."""
    return WINDOWED if cfg.page_groups > 1 and cfg.window_layers[layer] else FULL


def place_of(cfg: ModelConfig, layer: Int32[Array, ""], group: int | None) -> Place:
    """The place of a layer, counted over all layers. group: the layer's; None: not known yet."""
    if cfg.page_groups == 1:
        return Place(FULL, layer)
    windows = np.asarray(cfg.window_layers)
    within = np.where(windows, np.cumsum(windows), np.cumsum(~windows)) - 1
    own = jnp.asarray(windows.astype(np.int32))[layer] if group is None else group
    return Place(own, jnp.asarray(within.astype(np.int32))[layer])


def of_groups(cfg: ModelConfig, ids: Array, num_pages: int, page_size: int = 1) -> Array:
    """Pages, or positions in them, of each group: i32[groups, *ids]. Ids below zero become -1.

    num_pages: of each group in the pool of a rank. page_size: 1 where ids are pages.
    """
    base = np.arange(cfg.page_groups, dtype=np.int32) * np.int32(num_pages * page_size)
    shifted: Array = jnp.asarray(base).reshape(-1, *(1,) * ids.ndim) + ids
    return or_dropped(ids >= 0, shifted)


def decode_groups(
    cfg: ModelConfig,
    page_size: int,
    num_pages: int,
    positions: Int32[Array, " rows"],
    page_table: Int32[Array, "rows pages"],
    kv_idx: Int32[Array, " rows"],
    ring: Int32[Array, "rows ring"] | None,
) -> DecodeRows:
    """What decode attention takes for each group, from what it takes for the first.

    num_pages: of each group in the pool of a rank. positions, kv_idx: below zero is padding.
    page_table, kv_idx: of the first group. ring: each row's pages of the second; None: the default.
    For layers with a window a row's table begins with the first page that the row sees, so their
    cost follows the window, however long the rows are.
    """
    all_idx = of_groups(cfg, kv_idx, num_pages, page_size)
    if cfg.page_groups == 1:
        return DecodeRows(positions[None], (page_table,), page_table[None], all_idx)
    most = page_table.shape[1]
    first = jnp.maximum(positions - np.int32(cfg.sliding_window - 1), 0) // np.int32(page_size)
    count = min(touched_pages(cfg.sliding_window, page_size), most)
    places = first[:, None] + jnp.arange(count, dtype=jnp.int32)
    if ring is None:
        seen = _at(page_table, places) + np.int32(num_pages)
    else:
        size = np.int32(ring.shape[1])
        seen = _at(ring, places % size)
        page, offset = jnp.divmod(positions, np.int32(page_size))
        own = _at(ring, (page % size)[:, None])[:, 0] * np.int32(page_size) + offset
        all_idx = all_idx.at[WINDOWED].set(or_dropped(kv_idx >= 0, own))
    since = or_dropped(positions >= 0, positions - first * np.int32(page_size))
    wide = jnp.stack([page_table, jnp.pad(seen, ((0, 0), (0, most - count)))])
    return DecodeRows(jnp.stack([positions, since]), (page_table, seen), wide, all_idx)


def _at(table: Int32[Array, "rows pages"], places: Int32[Array, "rows n"]) -> Array:
    return jnp.take_along_axis(table, places, axis=1, mode="clip")


def or_dropped(kept: Bool[Array, "..."], values: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Where a token's key and value go, or -1: nowhere."""
    return jnp.where(kept, values, np.int32(-1))
