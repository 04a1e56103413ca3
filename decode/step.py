"""What a step does on the device: from the slots' state to their next tokens and next state."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decode.drafts import NO_DRAFT, REJECTED, num_drawn, propose
from model.buckets import Drafting
from model.moe import ExpertMap
from model.sampling import Asks, SampleOut, SamplingRows, empty_rows, sample
from model.sharding import rank_idx, tell_host
from model.transformer import Model, decode_rows, row_logits


class SlotState(NamedTuple):
    """Everything a step knows of a rank's slots; S slots, C context tokens, P pages a slot."""

    history: Any  # i32[S, C]: prompt and generated tokens
    length: Any  # i32[S]: tokens in history
    prompt_len: Any  # i32[S]
    max_length: Any  # i32[S]: of history once the request has its last token
    page_table: Any  # i32[S, P]
    ring: Any  # i32[S, R]: pages of layers with a window, see model/page_groups.py; None: none
    masks: Any  # u32[S, W]: the tokens that may come next, of slots that have a mask
    bad_words: Any  # i32[S, N, L]: see model.sampling.set_bad_words
    adapters: Any  # i32[S], see model/adapted.py; None: the model has none
    rows: SamplingRows  # leading axis S


class Tried(NamedTuple):
    """Rows of a step: each slot's last token and the drafts behind it. W = 1 + drafts."""

    token_ids: Array  # i32[B, W]
    positions: Array  # i32[B, W]; below zero: nothing is computed
    # bool[B, W]; the first column is never one. Without it, W = 1 would leave an empty argument
    # split over devices, and XLA ends the process when it compiles for that (jaxlib 0.11.2).
    is_draft: Array
    expected: Array  # i32[B]: the first draft, tried or not; NO_DRAFT: there is none


def decode_step(
    model: Model,
    drafting: Drafting | None,
    tries: bool,
    num_pages: int,
    params: Any,
    pool: Array,
    state: SlotState,
    plan: Array,
    expert_map: ExpertMap | None,
    loads: Array | None,
) -> tuple[Array, SlotState, Array | None, SampleOut]:
    """The next tokens of each slot of the plan, of one rank: `try_tokens`, then `draw_tokens`."""
    sizes = drafting, tries, num_pages
    pool, state, loads, logits, tried = try_tokens(
        model, *sizes, params, pool, state, plan, expert_map, loads
    )
    state, out = draw_tokens(model, drafting, Asks.ANYTHING, state, plan, logits, tried)
    return pool, state, loads, out


def try_tokens(
    model: Model,
    drafting: Drafting | None,
    tries: bool,
    num_pages: int,
    params: Any,
    pool: Array,
    state: SlotState,
    plan: Array,
    expert_map: ExpertMap | None,
    loads: Array | None,
) -> tuple[Array, SlotState, Array | None, Array, Tried]:
    """Logits of each slot's last token, and of drafts behind it.

    drafting: how drafts are made; None: none are. tries: whether drafts are tried, or only compared
    with what is drawn. num_pages: how many pages of each page table are looked at: no slot of the
    plan has positions behind them. pool: see model/kv, donated. plan: i32[4, B]: slots (S = padding
    row), pages to enter in their page tables (-1 = none), the places where they are entered, and
    pages to enter at the same places of their rings. expert_map, loads: see
    model.transformer.decode_rows; the loads are donated. Returns pool, state with those pages,
    loads, logits f32[B * W, vocab] and what was tried.
    """
    slots, new_pages, places, new_in_ring = plan
    real, safe = _slots_of(state, slots)
    page_size = model.page_size

    page_table = _entered(state.page_table, slots, new_pages, places)
    table = page_table[safe, :num_pages]
    # Pages are new in a ring before it is whole, and until then places are the same there.
    ring = state.ring if state.ring is None else _entered(state.ring, slots, new_in_ring, places)
    tried = _tried(drafting, tries, state, safe, real)
    width = tried.token_ids.shape[1]
    at = jnp.maximum(tried.positions, 0)
    page = jnp.take_along_axis(table, at // page_size, axis=1)
    nowhere = pool.shape[2] * page_size
    kv_idx = jnp.where(tried.positions >= 0, page * page_size + at % page_size, nowhere)

    hidden, pool, loads = decode_rows(
        model,
        params,
        pool,
        tried.token_ids.ravel(),
        tried.positions.ravel(),
        _repeated(table, width),
        kv_idx.ravel(),
        expert_map,
        loads,
        _repeated(ring[safe], width) if ring is not None else None,
        _repeated(state.adapters[safe], width) if state.adapters is not None else None,
    )
    state = state._replace(page_table=page_table, ring=ring)
    return pool, state, loads, row_logits(model, params, hidden), tried


def draw_tokens(
    model: Model,
    drafting: Drafting | None,
    asks: Asks,
    state: SlotState,
    plan: Array,
    logits: Array,
    tried: Tried,
) -> tuple[SlotState, SampleOut]:
    """The next tokens of each slot from the logits of what was tried.

    asks: the most that slots of the plan ask of sampling. state: donated. plan: see `try_tokens`.
    Returns state and SampleOut: B * W rows, a slot's rows one behind the other, in which rows of
    padding mean nothing. Its ids are i32[B * W], or i32[B * (W + 1)] where drafts are made: a
    slot's last entry then says whether its first draft, tried or not, is what was drawn. Ids that
    do not count are REJECTED or NO_DRAFT.
    """
    slots, capacity = plan[0], state.history.shape[1]
    real, safe = _slots_of(state, slots)
    rows = jax.tree.map(partial(_rows_at, safe, real), state.rows, empty_rows(1))
    length, prompt_len = state.length[safe], state.prompt_len[safe]
    width = tried.token_ids.shape[1]
    lengths = length[:, None] + jnp.arange(width, dtype=jnp.int32)

    def history() -> tuple[Array, Array, Array]:
        row = jnp.arange(len(slots), dtype=jnp.int32)[:, None]
        taken = state.history[safe].at[row, lengths[:, :-1]].set(tried.token_ids[:, 1:])
        return _repeated(taken, width), _repeated(prompt_len, width), lengths.ravel()

    def masks() -> Array:
        return _repeated(state.masks[safe], width)

    def bad_words() -> Array:
        return _repeated(state.bad_words[safe], width)

    all_rows = jax.tree.map(partial(_repeated, width=width), rows)
    token_idx = (lengths - prompt_len[:, None]).ravel()
    looked_at = history, token_idx, masks, bad_words
    out = sample(logits, all_rows, *looked_at, asks, model.on_cpu)
    drawn = out.ids.reshape(-1, width)
    count = num_drawn(tried.token_ids[:, 1:], tried.is_draft[:, 1:], drawn)
    counts = jnp.arange(width, dtype=jnp.int32) < count[:, None]
    state = state._replace(
        history=state.history.at[slots[:, None], jnp.where(counts, lengths, capacity)].set(
            drawn, mode="drop"
        ),
        length=state.length.at[slots].add(count, mode="drop"),
    )
    ids = jnp.where(counts, drawn, jnp.where(tried.is_draft, REJECTED, NO_DRAFT))
    if drafting is not None:
        is_right = (tried.expected == drawn[:, 0]).astype(jnp.int32)
        ids = jnp.concatenate([ids, is_right[:, None]], axis=1)
    return state, tell_host(model.mesh, out._replace(ids=ids.ravel()))


def mask_slots(state: SlotState, slots: Array, masks: Array) -> SlotState:
    """Write rows of masks at `slots`, which count over all ranks."""
    mine = _own_slots(state, slots)
    return state._replace(masks=state.masks.at[mine].set(masks, mode="drop"))


def admit_slots(state: SlotState, slots: Array, fresh: SlotState) -> SlotState:
    """Write rows of `fresh` at `slots`, which count over all ranks; those of others are dropped."""
    mine = _own_slots(state, slots)
    merged: SlotState = jax.tree.map(
        lambda old, new: old.at[mine].set(new, mode="drop"), state, fresh
    )
    return merged


def _tried(
    drafting: Drafting | None,
    tries: bool,
    state: SlotState,
    safe: Array,
    real: Array,
) -> Tried:
    """The rows of a step. safe: i32[B], slots; real: bool[B], whether a row is no padding.

    Nothing is computed from a request's end on, where it may have no page of its own.
    """
    length = state.length[safe]
    last = state.history[safe, jnp.maximum(length - 1, 0)][:, None]
    drafts = jnp.zeros((len(safe), 0), jnp.int32)
    may_draft = jnp.zeros(len(safe), jnp.bool_)
    expected = jnp.full(len(safe), NO_DRAFT, jnp.int32)
    if drafting is not None:
        drafts, found = propose(drafting, state.history[safe], length)
        may_draft = real & found & ~state.rows.has_mask[safe]  # which covers the next token alone
        expected = jnp.where(may_draft, drafts[:, 0], NO_DRAFT)
        drafts = drafts if tries else drafts[:, :0]
    token_ids = jnp.concatenate([last, drafts], axis=1)
    ahead = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
    positions = (length - 1)[:, None] + ahead
    is_live = jnp.where(ahead == 0, real[:, None], may_draft[:, None])
    is_live &= positions < state.max_length[safe][:, None] - 1
    return Tried(token_ids, jnp.where(is_live, positions, -1), is_live & (ahead > 0), expected)


def _slots_of(state: SlotState, slots: Array) -> tuple[Array, Array]:
    """Which rows have a slot, and a valid slot for every row: bool[B], i32[B]."""
    num_slots = state.length.shape[0]
    return slots < num_slots, jnp.minimum(slots, num_slots - 1)


def _entered(table: Array, slots: Array, pages: Array, places: Array) -> Array:
    """The table of all slots, with one more page for each of `slots` that has one; -1: none."""
    rows = jnp.where(pages >= 0, slots, table.shape[0])
    return table.at[rows, places].set(pages, mode="drop")


def _repeated(values: Array, width: int) -> Array:
    """Each row as often as a slot has rows in a step."""
    return values if width == 1 else jnp.repeat(values, width, axis=0)


def _rows_at(slots: Array, real: Array, values: Array, blank: np.ndarray) -> Array:
    """Rows of a per-slot array; padding rows ask for nothing."""
    taken = values[slots]
    mask = real.reshape((-1,) + (1,) * (taken.ndim - 1))
    return jnp.where(mask, taken, jnp.asarray(blank, taken.dtype))


def _own_slots(state: SlotState, slots: Array) -> Array:
    """Slots counted over all ranks, as this rank counts them; past the end for other ranks'."""
    num_slots = np.int32(state.length.shape[0])
    rank, slot = jnp.divmod(slots, num_slots)
    return jnp.where(rank == rank_idx(), slot, num_slots)
