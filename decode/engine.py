"""Batch plans to device calls: compiled programs, the pool, the slots' state on the device.

Tokens feed the next step on the device: a step reads each slot's last token from `SlotState`
and writes the new one there, so the host may dispatch step n+1 before it has seen step n.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model.buckets import DecodeBuckets, bucket_for
from model.kv import write_pages
from model.opening import OpenedModel, make_pool
from model.programs import MemoryPlan, Program, abstract_like, compile_program
from model.sampling import SampleOut, SamplingRows, empty_rows, sample, set_row
from model.sharding import pool_sharding
from model.transformer import Model, decode_hidden, logits
from transfer.wire import SamplingParams

log = logging.getLogger(__name__)


class SlotState(NamedTuple):
    """Everything a step knows of the slots; S slots, C context tokens, P pages a slot."""

    history: Any  # i32[S, C]: prompt and generated tokens
    length: Any  # i32[S]: tokens in history
    prompt_len: Any  # i32[S]
    page_table: Any  # i32[S, P]
    rows: SamplingRows  # leading axis S


@dataclass(frozen=True)
class SlotStart:
    """What a slot starts with."""

    slot: int
    token_ids: np.ndarray  # i32[n]: prompt and tokens so far, the first one from prefill included
    num_prompt_tokens: int
    pages: Sequence[int]
    params: SamplingParams


class DecodeEngine:
    """Owner of the decode pool array, the slot state and the programs."""

    def __init__(
        self,
        opened: OpenedModel,
        buckets: DecodeBuckets,
        mem_fraction: float,
        max_total_tokens: int,
    ) -> None:
        self._opened = opened
        self._model = opened.model
        self._params = opened.params
        self._buckets = buckets
        self._num_slots = buckets.slots[-1]
        self._replicated = NamedSharding(opened.model.mesh, P())
        self._step: dict[int, Program] = {}
        self._place: dict[int, Program] = {}
        self.plan: MemoryPlan
        self._pool: Array
        natural = self._num_slots * buckets.pages_per_slot
        self._pool, self.plan, self.programs = make_pool(
            opened, mem_fraction, max_total_tokens, natural, self._compile
        )
        self._state: SlotState = jax.device_put(
            _empty_state(self._num_slots, buckets, opened.context_length), self._replicated
        )

    @property
    def num_pages(self) -> int:
        return self.plan.num_pages

    # --- effects ------------------------------------------------------------------------------

    def place_run(self, page_ids: Sequence[int], shards: Sequence[np.ndarray]) -> None:
        """Dispatch the write of pages that arrived.

        shards: one per device of the mesh, [layers, 2, n, page_size, kv heads, head_dim] with
        n = len(page_ids).
        """
        longest = self._buckets.run_pages[-1]
        for at in range(0, len(page_ids), longest):
            ids = page_ids[at : at + longest]
            self._place_bucket(ids, [shard[:, :, at : at + len(ids)] for shard in shards])

    def start_slots(self, starts: Sequence[SlotStart]) -> None:
        """Dispatch the set-up of slots that join the batch."""
        per_call = self._buckets.admit_rows
        for at in range(0, len(starts), per_call):
            group = starts[at : at + per_call]
            fresh = _empty_state(per_call, self._buckets, self._opened.context_length)
            slots = np.full(per_call, self._num_slots, np.int32)
            for row, start in enumerate(group):
                slots[row] = start.slot
                fresh.history[row, : len(start.token_ids)] = start.token_ids
                fresh.length[row] = len(start.token_ids)
                fresh.prompt_len[row] = start.num_prompt_tokens
                fresh.page_table[row, : len(start.pages)] = start.pages
                set_row(fresh.rows, row, start.params)
            self._state = self._admit(self._state, slots, fresh)

    def step(self, slots: np.ndarray, new_pages: np.ndarray) -> SampleOut:
        """Dispatch one step for these slots; row i of the result belongs to slots[i].

        slots, new_pages: i32[n], see decode.scheduler.StepPlan. The copy of the ids to the
        host has begun when this returns.
        """
        bucket = bucket_for(len(slots), self._buckets.slots)
        plan = np.full((2, bucket), self._num_slots, np.int32)
        plan[0, : len(slots)] = slots
        plan[1] = -1
        plan[1, : len(slots)] = new_pages
        out: SampleOut
        self._pool, self._state, out = self._step[bucket](
            self._params, self._pool, self._state, plan
        )
        out.ids.copy_to_host_async()
        return out

    # --- shapes -------------------------------------------------------------------------------

    def _place_bucket(self, page_ids: Sequence[int], shards: list[np.ndarray]) -> None:
        bucket = bucket_for(len(page_ids), self._buckets.run_pages)
        ids = np.full(bucket, self.num_pages, np.int32)  # past the pool: dropped
        ids[: len(page_ids)] = page_ids
        kv = self._opened.kv
        shape = (kv.num_layers, 2, bucket, kv.page_size, kv.num_kv_heads, kv.head_dim)
        sharding = pool_sharding(self._model.mesh)
        starts = {
            device: index[4].start or 0
            for device, index in sharding.addressable_devices_indices_map(shape).items()
            if index is not None
        }
        devices = sorted(starts, key=lambda device: starts[device])
        local = [
            jax.device_put(_padded(shard, bucket), device)
            for shard, device in zip(shards, devices, strict=True)
        ]
        staged = jax.make_array_from_single_device_arrays(shape, sharding, local)
        self._pool = self._place[bucket](self._pool, staged, ids)

    def _compile(self, num_pages: int) -> list[Program]:
        """Every program, for a pool of num_pages."""
        buckets, kv = self._buckets, self._opened.kv
        sharding = pool_sharding(self._model.mesh)

        def pages(count: int) -> jax.ShapeDtypeStruct:
            shape = (kv.num_layers, 2, count, kv.page_size, kv.num_kv_heads, kv.head_dim)
            return jax.ShapeDtypeStruct(shape, jnp.dtype(kv.stored_dtype), sharding=sharding)

        pool, params = pages(num_pages), abstract_like(self._params)
        state = self._abstract(_empty_state(self._num_slots, buckets, self._opened.context_length))
        total = len(buckets.slots) + len(buckets.run_pages) + 1
        done: list[Program] = []

        def built(program: Program) -> Program:
            done.append(program)
            log.info("compiled %d/%d %s", len(done), total, program.name)
            return program

        for slots in buckets.slots:
            plan = jax.ShapeDtypeStruct((2, slots), jnp.int32, sharding=self._replicated)
            self._step[slots] = built(
                compile_program(
                    f"step[slots={slots}]", self._step_fn, (params, pool, state, plan), (1, 2)
                )
            )
        for count in buckets.run_pages:
            ids = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=self._replicated)
            self._place[count] = built(
                compile_program(
                    f"place[pages={count}]", write_pages, (pool, pages(count), ids), (0,)
                )
            )
        fresh = self._abstract(
            _empty_state(buckets.admit_rows, buckets, self._opened.context_length)
        )
        rows = jax.ShapeDtypeStruct((buckets.admit_rows,), jnp.int32, sharding=self._replicated)
        self._admit = built(
            compile_program(f"admit[{buckets.admit_rows}]", _admit_fn, (state, rows, fresh), (0,))
        )
        return done

    def _step_fn(
        self, params: Any, pool: Array, state: SlotState, plan: Array
    ) -> tuple[Array, SlotState, SampleOut]:
        return decode_step(self._model, params, pool, state, plan)

    def _abstract(self, tree: Any) -> Any:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._replicated), tree
        )


def decode_step(
    model: Model, params: Any, pool: Array, state: SlotState, plan: Array
) -> tuple[Array, SlotState, SampleOut]:
    """One token for each slot of the plan.

    pool: see model/kv, donated. plan: i32[2, B]: slots (S = padding row), and pages to enter in
    the page table at the position this step writes (-1 = none). Returns pool, state and
    SampleOut with B rows; padding rows mean nothing.
    """
    slots, new_pages = plan
    num_slots = state.history.shape[0]
    real = slots < num_slots
    safe = jnp.minimum(slots, num_slots - 1)
    length = state.length[safe]
    position = jnp.where(real, length - 1, -1)
    token_ids = state.history[safe, jnp.maximum(position, 0)]
    page_size = model.page_size
    page_idx = jnp.maximum(position, 0) // page_size

    enter = jnp.where(new_pages >= 0, slots, num_slots)
    page_table = state.page_table.at[enter, page_idx].set(new_pages, mode="drop")
    table = page_table[safe]
    page = jnp.take_along_axis(table, page_idx[:, None], axis=1)[:, 0]
    nowhere = pool.shape[2] * page_size
    kv_idx = jnp.where(real, page * page_size + position % page_size, nowhere)

    hidden, pool = decode_hidden(model, params, pool, token_ids, position, table, kv_idx)
    rows = jax.tree.map(partial(_rows_at, safe, real), state.rows, empty_rows(1))
    prompt_len = state.prompt_len[safe]

    def history() -> tuple[Array, Array, Array]:
        return state.history[safe], prompt_len, length

    out = sample(logits(model, params, hidden), rows, history, length - prompt_len)
    state = SlotState(
        history=state.history.at[slots, length].set(out.ids, mode="drop"),
        length=state.length.at[slots].add(1, mode="drop"),
        prompt_len=state.prompt_len,
        page_table=page_table,
        rows=state.rows,
    )
    return pool, state, out


def _rows_at(slots: Array, real: Array, values: Array, blank: np.ndarray) -> Array:
    """Rows of a per-slot array; padding rows ask for nothing."""
    taken = values[slots]
    mask = real.reshape((-1,) + (1,) * (taken.ndim - 1))
    return jnp.where(mask, taken, jnp.asarray(blank, taken.dtype))


def _admit_fn(state: SlotState, slots: Array, fresh: SlotState) -> SlotState:
    """Write rows of `fresh` at `slots` (S = padding, dropped)."""
    merged: SlotState = jax.tree.map(
        lambda old, new: old.at[slots].set(new, mode="drop"), state, fresh
    )
    return merged


def _empty_state(num_slots: int, buckets: DecodeBuckets, context: int) -> SlotState:
    return SlotState(
        history=np.zeros((num_slots, context), np.int32),
        length=np.zeros(num_slots, np.int32),
        prompt_len=np.zeros(num_slots, np.int32),
        page_table=np.zeros((num_slots, buckets.pages_per_slot), np.int32),
        rows=empty_rows(num_slots),
    )


def _padded(shard: np.ndarray, num_pages: int) -> np.ndarray:
    if shard.shape[2] == num_pages:
        return shard
    padded = np.zeros((*shard.shape[:2], num_pages, *shard.shape[3:]), shard.dtype)
    padded[:, :, : shard.shape[2]] = shard
    return padded
