"""Turns batch plans into device calls; owns the programs, the pool and the slots' device state.

Tokens feed the next step on the device: a step reads each slot's last token from `SlotState`
and writes the new ones there, so the host may dispatch step n+1 before it has seen step n.

The host counts slots over all data-parallel ranks, those of rank 0 first, and pages within each
rank. On the device every rank counts its own slots and pages, and all ranks take each step
together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from decode.draws import Draws, width_of
from decode.local import LocalPrompt
from decode.step import SlotState, admit_slots, decode_step, mask_slots, try_tokens
from model.buckets import DecodeBuckets, PrefillBuckets, bucket_for, geometric, mask_words
from model.calls import Calls
from model.chunks import ChunkInFlight, ChunkPrograms, FirstSample
from model.kv import abstract_pool
from model.opening import OpenedModel, make_pool, on_cpu
from model.page_runs import GatheredRuns, PlacedRuns
from model.pieces import NO_ADAPTER, Piece
from model.placement import ExpertArgs, PlacedExperts
from model.programs import MemoryPlan, Program, abstract_like
from model.sampling import (
    Asks,
    SampleOut,
    allowed_mask,
    empty_rows,
    no_bad_words,
    set_bad_words,
    set_row,
)
from model.sharding import (
    COLUMNS_OF_RANKS,
    POOL_SPEC,
    RANKS,
    abstract_i32,
    abstract_of,
    on_ranks,
    spans_processes,
    told_spec,
)
from transfer.keeping import RunEngine
from transfer.wire import SamplingParams


@dataclass(frozen=True)
class SlotStart:
    """What a slot starts with."""

    slot: int
    token_ids: np.ndarray  # i32[n]: prompt and tokens so far, the first one from prefill included
    num_prompt_tokens: int
    pages: Sequence[int]
    params: SamplingParams
    ring: Sequence[int] = ()
    adapter: int = NO_ADAPTER


@dataclass(frozen=True)
class StepInFlight:
    """One dispatched step."""

    out: SampleOut  # see decode.step.decode_step
    rows: np.ndarray  # i64[n]: which row of the step belongs to each slot of the plan
    width: int = 1  # tokens of a slot
    has_drafts: bool = False  # drafts are made, and tried if width is above 1

    def token_ids(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Wait for the tokens, i32[n, W], and for whether first drafts were right, bool[n]."""
        columns = self.width + self.has_drafts
        ids = np.asarray(self.out.ids).reshape(-1, columns)[self.rows]
        return ids[:, : self.width], ids[:, -1] != 0 if self.has_drafts else None


class StepEngine(RunEngine, Protocol):
    """What the loop needs of `DecodeEngine`."""

    def start_slots(self, starts: Sequence[SlotStart]) -> None: ...
    def set_masks(self, slots: np.ndarray, masks: np.ndarray) -> None: ...
    def step(
        self,
        slots: np.ndarray,
        new_pages: np.ndarray,
        places: np.ndarray,
        new_in_ring: np.ndarray,
        tries: bool = False,
        num_pages: int | None = None,
    ) -> StepInFlight: ...
    def can_draft(self, slots: np.ndarray) -> bool: ...
    def run_chunk(
        self, plans: Sequence[Sequence[Piece[LocalPrompt]]]
    ) -> ChunkInFlight[LocalPrompt]: ...
    def sample_first(self, firsts: Sequence[FirstSample]) -> SampleOut: ...


class _StepKind(NamedTuple):
    """What a step program is compiled for."""

    slots: int
    tries: bool  # drafts
    num_pages: int  # of each page table that the step looks at


class DecodeEngine:
    """Owner of the decode pool array, the slot state and the programs.

    A step is one program, or two where tokens are drawn apart: the second then has what the step's
    slots ask for, and nothing that the host would have to wait for.
    """

    _params: Any
    _experts: PlacedExperts
    _runs: PlacedRuns
    _dp_size: int
    _rank_slots: int

    def __init__(
        self,
        opened: OpenedModel,
        buckets: DecodeBuckets,
        mem_fraction: float,
        max_total_tokens: int,
        local: PrefillBuckets | None = None,
        apart: bool | None = None,
        most_saving: int = 0,
    ) -> None:
        """local: shapes of chunks of prompts that decode computes itself; None: it computes none.

        apart: whether a step is two programs, see also ChunkPrograms; None: on an accelerator.
        most_saving: pages of each rank that may be gathered for a cache in host memory and not be
        there yet; 0: there is no such cache.
        """
        self._prepare(opened, buckets, local, apart, most_saving)
        self.plan: MemoryPlan
        self._pool: Array
        empty = self._empty_state(self._dp_size * self._rank_slots)
        self._pool, self.plan, self.programs = make_pool(
            opened,
            mem_fraction,
            max_total_tokens,
            self._natural_pages(),
            self._programs,
            self._runs.spare_pages + most_saving,
            self._state_bytes(empty),
        )
        self._params = self._experts.settle(self._params)
        self._runs.settle()
        self._state: SlotState = jax.device_put(empty, NamedSharding(opened.model.mesh, RANKS))
        self._state_tree = jax.tree.structure(empty)
        self.calls = Calls()
        self.calls.add("admit", self._start)
        self.calls.add("mask", self._mask)
        self.calls.add("step", self._run_step)
        if self._chunks is not None:
            self.calls.add("chunk", self._run_chunk)
            self.calls.add("sample", self._chunks.sample_first)
        if spans_processes(opened.model.mesh):
            self._warm_up()

    @classmethod
    def programs_of(
        cls,
        opened: OpenedModel,
        buckets: DecodeBuckets,
        num_pages: int,
        local: PrefillBuckets | None = None,
        most_saving: int = 0,
    ) -> list[Program]:
        """Those of an engine with so many pages, not compiled. Nothing of it need be in memory."""
        engine = cls.__new__(cls)
        engine._prepare(opened, buckets, local, None, most_saving)
        return engine._programs(num_pages)

    def _prepare(
        self,
        opened: OpenedModel,
        buckets: DecodeBuckets,
        local: PrefillBuckets | None,
        apart: bool | None,
        most_saving: int,
    ) -> None:
        """What all programs follow from."""
        draws_apart = not opened.model.on_cpu if apart is None else apart
        self._opened = opened
        self._model = opened.model
        self._params = opened.params
        self._experts = opened.experts
        self._buckets = buckets
        self._dp_size = opened.dp_size
        self._rank_slots = buckets.slots[-1]
        self._chunks: ChunkPrograms[LocalPrompt] | None = None
        if local is not None:
            self._chunks = ChunkPrograms(opened.model, local, opened.context_length, apart)
        self._step: dict[_StepKind, Program] = {}
        self._step_kinds: list[_StepKind] = []
        self._draws = Draws(opened.model, buckets, self._dp_size) if draws_apart else None
        all_slots = self._dp_size * self._rank_slots
        self._mask_rows = geometric(buckets.admit_rows, all_slots, 4)
        self._set_mask: dict[int, Program] = {}
        self._runs = PlacedRuns(opened.kv, opened.model.mesh, buckets.run_pages)
        self._gathered: GatheredRuns | None = None
        if most_saving:
            self._gathered = GatheredRuns(opened.kv, opened.model.mesh, buckets.run_pages)

    @property
    def num_pages(self) -> int:
        """Pages of each group in a rank's pool."""
        return self.plan.num_pages

    # --- effects ------------------------------------------------------------------------------

    def place_run(self, rank: int, page_ids: Sequence[int], shards: Sequence[np.ndarray]) -> None:
        """Dispatch the write of pages that arrived for a rank.

        Every node places the same: decode/receiving.py. shards: see PlacedRuns.place.
        """
        self._pool = self._runs.place(self._pool, rank, page_ids, shards)

    def gather_runs(self, page_ids: Sequence[Sequence[int]]) -> list[list[Any]]:
        """Pack pages for the host, one run of each rank: see GatheredRuns.shards."""
        assert self._gathered is not None, "the host keeps no pages"
        return self._gathered.shards(self._gathered.gather(self._pool, page_ids), page_ids)

    @property
    def max_run_pages(self) -> int:
        return self._buckets.run_pages[-1]

    def start_slots(self, starts: Sequence[SlotStart]) -> None:
        """Dispatch the set-up of slots that join the batch."""
        per_call = self._buckets.admit_rows
        for at in range(0, len(starts), per_call):
            group = starts[at : at + per_call]
            fresh = self._empty_state(per_call)
            slots = np.full(per_call, self._dp_size * self._rank_slots, np.int32)
            for row, start in enumerate(group):
                slots[row] = start.slot
                fresh.history[row, : len(start.token_ids)] = start.token_ids
                fresh.length[row] = len(start.token_ids)
                fresh.prompt_len[row] = start.num_prompt_tokens
                fresh.max_length[row] = start.num_prompt_tokens + start.params.max_new_tokens
                fresh.page_table[row, : len(start.pages)] = start.pages
                if fresh.ring is not None:
                    fresh.ring[row, : len(start.ring)] = start.ring
                if fresh.adapters is not None:
                    fresh.adapters[row] = start.adapter
                set_row(fresh.rows, row, start.params)
                mask = allowed_mask(start.params, fresh.masks.shape[1])
                if mask is not None:
                    fresh.masks[row] = mask
                set_bad_words(fresh.bad_words[row], start.params)
                if self._draws is not None:
                    self._draws.start(start.slot, start.params)
            self.calls("admit", per_call, slots, *jax.tree.leaves(fresh))

    def set_masks(self, slots: np.ndarray, masks: np.ndarray) -> None:
        """Dispatch the masks of what these slots may draw next: i32[n], u32[n, W]."""
        num_rows = bucket_for(len(slots), self._mask_rows)
        where = np.full(num_rows, self._dp_size * self._rank_slots, np.int32)
        rows = np.zeros((num_rows, masks.shape[1]), np.uint32)
        where[: len(slots)], rows[: len(slots)] = slots, masks
        self.calls("mask", num_rows, where, rows)

    def step(
        self,
        slots: np.ndarray,
        new_pages: np.ndarray,
        places: np.ndarray,
        new_in_ring: np.ndarray,
        tries: bool = False,
        num_pages: int | None = None,
    ) -> StepInFlight:
        """Dispatch one step for these slots.

        slots: i64[n]; new_pages, places, new_in_ring: i32[n]; see decode.scheduler.StepPlan. tries:
        try drafts, if steps of so many slots can. num_pages: of the longest page table; None: any
        number. The copy of the ids to the host has begun when this returns.
        """
        ranks, rank_slots = np.divmod(slots, np.int32(self._rank_slots))
        within, most = _places(ranks, self._dp_size)
        bucket = bucket_for(most, self._buckets.slots)
        rows = ranks * np.int32(bucket) + within
        plan = self._no_slots(bucket)
        plan[:, rows] = rank_slots, new_pages, places, new_in_ring
        drafting = self._buckets.drafting_of(bucket)
        width = width_of(drafting, tries)
        reach = self._buckets.pages_per_slot if num_pages is None else num_pages
        kind = _StepKind(bucket, width > 1, bucket_for(reach, self._reaches(bucket, width)))
        asks = Asks.ANYTHING if self._draws is None else self._draws.asked(slots)
        out = self.calls("step", self._step_kinds.index(kind) * len(Asks) + asks, plan)
        return StepInFlight(out, rows, width, drafting is not None)

    def can_draft(self, slots: np.ndarray) -> bool:
        """Whether a step of these slots, i64[n], has rows for drafts."""
        _, most = _places(slots // np.int32(self._rank_slots), self._dp_size)
        return self._buckets.drafting_of(bucket_for(most, self._buckets.slots)) is not None

    def run_chunk(
        self, plans: Sequence[Sequence[Piece[LocalPrompt]]]
    ) -> ChunkInFlight[LocalPrompt]:
        """Dispatch one packed chunk of every rank; plans: pieces by rank."""
        assert self._chunks is not None, "no chunk was compiled"
        packed = self._chunks.pack(plans)
        return packed.in_flight(self.calls("chunk", packed.bucket, *packed.arrays))

    def sample_first(self, firsts: Sequence[FirstSample]) -> SampleOut:
        """Dispatch the draw of first tokens; row i is drawn from row i of the last chunk."""
        assert self._chunks is not None, "no chunk was compiled"
        kind, arrays = self._chunks.pack_firsts(firsts)
        out: SampleOut = self.calls("sample", kind, *arrays)
        return out

    # --- calls --------------------------------------------------------------------------------

    def _start(self, _: int, slots: np.ndarray, *leaves: np.ndarray) -> None:
        fresh = jax.tree.unflatten(self._state_tree, leaves)
        self._state = self._admit(self._state, slots, fresh)

    def _mask(self, num_rows: int, slots: np.ndarray, masks: np.ndarray) -> None:
        self._state = self._set_mask[num_rows](self._state, slots, masks)

    def _run_step(self, key: int, plan: np.ndarray) -> SampleOut:
        """key: the index of the step's kind, times len(Asks), plus what its slots ask for."""
        out: SampleOut
        of_kind, asks = divmod(key, len(Asks))
        kind = self._step_kinds[of_kind]
        self._params = self._experts.turn(self._params)
        self._pool, self._state, loads, *rest = self._step[kind](
            self._params, self._pool, self._state, plan, *self._experts.args
        )
        self._experts.counted(loads)
        if self._draws is None:
            (out,) = rest
        else:
            width = width_of(self._buckets.drafting_of(kind.slots), kind.tries)
            self._state, out = self._draws(width, Asks(asks), self._state, plan, *rest)
        out.ids.copy_to_host_async()
        return out

    def _run_chunk(self, bucket: int, *arrays: np.ndarray) -> tuple[Array, ...]:
        assert self._chunks is not None
        self._params = self._experts.turn(self._params)
        self._pool, told = self._chunks.run(
            self._params, self._pool, self._experts, bucket, *arrays
        )
        return told

    def _warm_up(self) -> None:
        """Make the devices of all members connect now rather than at the first request."""
        if self._chunks is not None:
            packed = self._chunks.pack([()] * self._dp_size)
            self.calls.take("chunk", packed.bucket, *packed.arrays)
            kind, arrays = self._chunks.pack_firsts(())
            self.calls.take("sample", kind, *arrays)
        no_slots = self._no_slots(self._step_kinds[0].slots)
        jax.block_until_ready(self.calls.take("step", 0, no_slots))

    # --- shapes -------------------------------------------------------------------------------

    def _state_bytes(self, empty: SlotState) -> int:
        """What all devices keep between two calls, besides weights and pages."""
        # Every device of a rank has the state of all its slots.
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(empty))
        num_bytes *= len(self._opened.devices) // self._dp_size
        if self._draws is not None:
            num_bytes += self._draws.logits_bytes * len(self._opened.devices)
        if self._chunks is not None:
            num_bytes += self._chunks.hidden_bytes * len(self._opened.devices)
        return num_bytes

    def _natural_pages(self) -> int:
        """The most pages of each group that are of use; rings need fewer of the second."""
        buckets, groups = self._buckets, self._opened.kv.groups
        # On an accelerator, all memory that is left caches prefixes; on a CPU, the host keeps it.
        # Pages for windows are kept only of prompts that are computed here.
        caches = self._chunks is not None or groups == 1
        contexts = 1 << 20 if caches and not on_cpu() else self._rank_slots
        each = buckets.pages_per_slot * groups
        if buckets.ring_pages:
            each = buckets.pages_per_slot + buckets.ring_pages
        return -(-contexts * each // groups)

    def _programs(self, num_pages: int) -> list[Program]:
        """Every program, to be compiled, for a pool of num_pages."""
        kv, mesh = self._opened.kv, self._model.mesh
        params, pool = abstract_like(self._params), abstract_pool(kv, num_pages, mesh)
        experts = self._experts.shapes
        state = abstract_of(self._empty_state(self._dp_size * self._rank_slots), mesh, RANKS)
        programs = self._step_programs(params, pool, state, experts)
        if self._chunks is not None:
            programs += self._chunks.programs(params, pool, experts)
        programs += self._experts.programs(params)
        programs += self._runs.programs(pool)
        if self._gathered is not None:
            programs += self._gathered.programs(pool)
        return programs + self._slot_programs(state)

    def _step_programs(
        self, params: Any, pool: jax.ShapeDtypeStruct, state: SlotState, experts: ExpertArgs
    ) -> list[Program]:
        """One per bucket of slots, more where there may be drafts or page tables are short."""
        buckets, mesh, dp_size = self._buckets, self._model.mesh, self._dp_size
        specs = (self._model.param_specs(), POOL_SPEC, RANKS, COLUMNS_OF_RANKS, P(), RANKS)
        self._step_kinds = list(self._kinds())
        for kind in self._step_kinds:
            drafting = buckets.drafting_of(kind.slots)
            whole: Callable[..., Any] = decode_step if self._draws is None else try_tokens
            function = partial(whole, self._model, drafting, kind.tries, kind.num_pages)
            rest = (told_spec(mesh),) if self._draws is None else (RANKS, RANKS)
            step = on_ranks(mesh, function, specs, (POOL_SPEC, RANKS, RANKS, *rest))
            plan = abstract_i32((4, dp_size * kind.slots), mesh, COLUMNS_OF_RANKS)
            args = (params, pool, state, plan, *experts)
            of = f"slots={kind.slots}{', drafts' if kind.tries else ''}"
            if kind.num_pages < buckets.pages_per_slot:
                of += f", pages={kind.num_pages}"
            self._step[kind] = Program(f"step[{of}]", step, args, (1, 2, 5))
        draws = self._draws.programs(state) if self._draws is not None else ()
        return [*self._step.values(), *draws]

    def _kinds(self) -> Iterator[_StepKind]:
        for slots in self._buckets.slots:
            drafting = self._buckets.drafting_of(slots)
            for width in (1, 1 + drafting.num_tokens) if drafting is not None else (1,):
                for num_pages in self._reaches(slots, width):
                    yield _StepKind(slots, width > 1, num_pages)

    def _reaches(self, slots: int, width: int) -> tuple[int, ...]:
        """Buckets of pages per page table, for steps of so many slots with so many rows each."""
        most = self._buckets.pages_per_slot
        short = self._model.short_context(slots * width) // self._model.page_size
        return (short, most) if 0 < short < most else (most,)

    def _slot_programs(self, state: SlotState) -> list[Program]:
        """The programs that set up slots, and those that set their masks."""
        mesh, num_rows = self._model.mesh, self._buckets.admit_rows
        admit = on_ranks(mesh, admit_slots, (RANKS, P(), P()), RANKS)
        fresh = abstract_of(self._empty_state(num_rows), mesh, P())
        rows = abstract_i32((num_rows,), mesh, P())
        self._admit = Program(f"admit[{num_rows}]", admit, (state, rows, fresh), (0,))
        mask = on_ranks(mesh, mask_slots, (RANKS, P(), P()), RANKS)
        for num_rows in self._mask_rows:
            shapes = np.zeros(num_rows, np.int32), self._empty_state(num_rows).masks
            args = (state, *abstract_of(shapes, mesh, P()))
            self._set_mask[num_rows] = Program(f"mask[slots={num_rows}]", mask, args, (0,))
        return [self._admit, *self._set_mask.values()]

    def _no_slots(self, bucket: int) -> np.ndarray:
        """A step's plan without any slot: i32[4, ranks * bucket]."""
        plan = np.full((4, self._dp_size * bucket), self._rank_slots, np.int32)
        plan[1] = plan[3] = -1
        return plan

    def _empty_state(self, num_slots: int) -> SlotState:
        ring = self._buckets.ring_pages
        return SlotState(
            history=np.zeros((num_slots, self._opened.context_length), np.int32),
            length=np.zeros(num_slots, np.int32),
            prompt_len=np.zeros(num_slots, np.int32),
            max_length=np.zeros(num_slots, np.int32),
            page_table=np.zeros((num_slots, self._buckets.pages_per_slot), np.int32),
            ring=np.zeros((num_slots, ring), np.int32) if ring else None,
            masks=np.zeros((num_slots, mask_words(self._model.cfg.vocab_size)), np.uint32),
            bad_words=no_bad_words(num_slots),
            adapters=np.full(num_slots, NO_ADAPTER, np.int32) if self._model.dims.lora else None,
            rows=empty_rows(num_slots),
        )


def _places(ranks: np.ndarray, dp_size: int) -> tuple[np.ndarray, int]:
    """The place of each among those of its rank, and how many the fullest rank has.

    ranks: i32[n]. Returns i32[n] and a count of at least 1.
    """
    if dp_size == 1:
        return np.arange(len(ranks), dtype=np.int32), len(ranks)
    order = np.argsort(ranks, kind="stable")
    counts = np.bincount(ranks, minlength=dp_size)
    first = np.cumsum(counts) - counts
    within = np.empty(len(ranks), np.int32)
    within[order] = np.arange(len(ranks)) - first[ranks[order]]
    return within, int(counts.max())
