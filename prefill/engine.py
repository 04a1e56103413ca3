"""Turns chunk plans into device calls; owns the pool and the compiled programs, decides nothing.

Every call is dispatched without waiting; whoever reads a result waits until the device has it.
The device runs calls in order of dispatch.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from model.buckets import PrefillBuckets
from model.calls import Calls
from model.chunks import ChunkInFlight, ChunkPrograms, FirstSample
from model.kv import abstract_pool
from model.opening import OpenedModel, make_pool
from model.page_runs import GatheredRuns, PlacedRuns
from model.pieces import Piece
from model.placement import PlacedExperts
from model.programs import MemoryPlan, Program, abstract_like
from model.sampling import SampleOut
from model.sharding import spans_processes
from prefill.scheduler import Prompt


class PrefillEngine:
    """Owner of the prefill pool array and its programs."""

    _params: Any
    _experts: PlacedExperts
    _chunks: ChunkPrograms[Prompt]

    def __init__(
        self,
        opened: OpenedModel,
        buckets: PrefillBuckets,
        mem_fraction: float,
        max_total_tokens: int,
        natural_pages: int,
        apart: bool | None = None,
        most_saving: int = 0,
    ) -> None:
        """apart: see ChunkPrograms.

        most_saving: pages of each rank that may be gathered for a cache in host memory and not be
        there yet; 0: there is no such cache.
        """
        self._prepare(opened, buckets, apart, most_saving)
        spare_pages = buckets.staged_pages + most_saving
        if self._placed is not None:
            spare_pages += self._placed.spare_pages
        self.plan: MemoryPlan
        self._pool: Array
        self._pool, self.plan, _ = make_pool(
            opened,
            mem_fraction,
            max_total_tokens,
            natural_pages,
            self._programs,
            spare_pages,
            self._chunks.hidden_bytes * len(opened.devices),
        )
        self._params = self._experts.settle(self._params)
        self.calls = Calls()
        self.calls.add("chunk", self._run_chunk)
        self.calls.add("sample", self._chunks.sample_first)
        if self._placed is not None:
            self._placed.settle()
        if spans_processes(opened.model.mesh):
            self._warm_up(opened.dp_size)

    @classmethod
    def programs_of(
        cls, opened: OpenedModel, buckets: PrefillBuckets, num_pages: int, most_saving: int = 0
    ) -> list[Program]:
        """Those of an engine with so many pages, not compiled. Nothing of it need be in memory."""
        engine = cls.__new__(cls)
        engine._prepare(opened, buckets, None, most_saving)
        return engine._programs(num_pages)

    def _prepare(
        self, opened: OpenedModel, buckets: PrefillBuckets, apart: bool | None, most_saving: int
    ) -> None:
        """What all programs follow from."""
        self._opened = opened
        self._model = opened.model
        self._params = opened.params
        self._experts = opened.experts
        self._buckets = buckets
        self._chunks = ChunkPrograms(opened.model, buckets, opened.context_length, apart)
        self._runs = GatheredRuns(opened.kv, opened.model.mesh, buckets.run_pages)
        self._placed: PlacedRuns | None = None
        if most_saving:
            self._placed = PlacedRuns(opened.kv, opened.model.mesh, buckets.run_pages)

    @property
    def num_pages(self) -> int:
        """Pages of each group in a rank's pool."""
        return self.plan.num_pages

    # --- effects ------------------------------------------------------------------------------

    def run_chunk(self, plans: Sequence[tuple[Piece[Prompt], ...]]) -> ChunkInFlight[Prompt]:
        """Dispatch one packed chunk of every rank; plans: pieces by rank."""
        packed = self._chunks.pack(plans)
        return packed.in_flight(self.calls("chunk", packed.bucket, *packed.arrays))

    def sample_first(self, firsts: Sequence[FirstSample]) -> SampleOut:
        """Dispatch the draw of first tokens; row i is drawn from row i of the last chunk."""
        kind, arrays = self._chunks.pack_firsts(firsts)
        out: SampleOut = self.calls("sample", kind, *arrays)
        return out

    def gather_runs(self, page_ids: Sequence[Sequence[int]]) -> list[list[Any]]:
        """Pack pages for the wire, one run of each rank, which may be empty.

        Every node gathers the same: transfer/gathered.py. Returns, by rank, what `numpy.asarray`
        turns into this node's shards: see model.page_runs.GatheredRuns.shards.
        """
        return self._runs.shards(self._runs.gather(self._pool, page_ids), page_ids)

    def place_run(self, rank: int, page_ids: Sequence[int], shards: Sequence[np.ndarray]) -> None:
        """Dispatch the write of pages that come back from the host, into a rank's pool.

        Every node places the same: transfer/keeping.py. shards: see PlacedRuns.place.
        """
        assert self._placed is not None, "the host keeps no pages"
        self._pool = self._placed.place(self._pool, rank, page_ids, shards)

    @property
    def max_run_pages(self) -> int:
        return self._buckets.run_pages[-1]

    # --- calls ---------------------------------------------------------------------------------

    def _run_chunk(self, bucket: int, *arrays: np.ndarray) -> tuple[Array, ...]:
        self._params = self._experts.turn(self._params)
        self._pool, told = self._chunks.run(
            self._params, self._pool, self._experts, bucket, *arrays
        )
        return told

    def _warm_up(self, num_ranks: int) -> None:
        """Make the devices of all members connect now rather than at the first request."""
        packed = self._chunks.pack([()] * num_ranks)
        self.calls.take("chunk", packed.bucket, *packed.arrays)
        kind, arrays = self._chunks.pack_firsts(())
        jax.block_until_ready(self.calls.take("sample", kind, *arrays))

    # --- shapes -------------------------------------------------------------------------------

    def _programs(self, num_pages: int) -> list[Program]:
        """Every program, to be compiled, for a pool of num_pages."""
        kv, mesh = self._opened.kv, self._model.mesh
        params, pool = abstract_like(self._params), abstract_pool(kv, num_pages, mesh)
        return [
            *self._chunks.programs(params, pool, self._experts.shapes),
            *self._experts.programs(params),
            *self._runs.programs(pool),
            *(self._placed.programs(pool) if self._placed is not None else ()),
        ]
