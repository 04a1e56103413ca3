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
from model.page_runs import GatheredRuns
from model.pieces import Piece
from model.programs import MemoryPlan, Program, abstract_like
from model.sampling import SampleOut
from model.sharding import spans_processes
from prefill.scheduler import Prompt


class PrefillEngine:
    """Owner of the prefill pool array and its programs."""

    def __init__(
        self,
        opened: OpenedModel,
        buckets: PrefillBuckets,
        mem_fraction: float,
        max_total_tokens: int,
        natural_pages: int,
        apart: bool | None = None,
    ) -> None:
        """apart: see ChunkPrograms."""
        self._opened = opened
        self._model = opened.model
        self._params = opened.params
        self._experts = opened.experts
        self._buckets = buckets
        self._chunks = ChunkPrograms[Prompt](opened.model, buckets, opened.context_length, apart)
        self._runs = GatheredRuns(opened.kv, opened.model.mesh, buckets.run_pages)
        self.plan: MemoryPlan
        self._pool: Array
        self._pool, self.plan, _ = make_pool(
            opened,
            mem_fraction,
            max_total_tokens,
            natural_pages,
            self._programs,
            buckets.staged_pages * self._runs.copies,
            self._chunks.hidden_bytes * len(opened.devices),
        )
        self._params = self._experts.settle(self._params)
        self.calls = Calls()
        self.calls.add("chunk", self._run_chunk)
        self.calls.add("sample", self._chunks.sample_first)
        self.calls.add("gather", self._gather)
        if spans_processes(opened.model.mesh):
            self._warm_up(opened.dp_size)

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

        Returns, by rank, what `numpy.asarray` turns into shards: see
        model.page_runs.GatheredRuns.shards.
        """
        bucket, ids = self._runs.ids_of(page_ids)
        return self._runs.shards(self.calls("gather", bucket, ids), page_ids)

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

    def _gather(self, bucket: int, ids: np.ndarray) -> Array:
        return self._runs.gather(self._pool, bucket, ids)

    def _warm_up(self, num_ranks: int) -> None:
        """Make the devices of all members connect now rather than at the first request."""
        packed = self._chunks.pack([()] * num_ranks)
        self.calls.take("chunk", packed.bucket, *packed.arrays)
        kind, arrays = self._chunks.pack_firsts(())
        self.calls.take("sample", kind, *arrays)
        jax.block_until_ready(self.calls.take("gather", *self._runs.ids_of([()] * num_ranks)))

    # --- shapes -------------------------------------------------------------------------------

    def _programs(self, num_pages: int) -> list[Program]:
        """Every program, to be compiled, for a pool of num_pages."""
        kv, mesh = self._opened.kv, self._model.mesh
        params, pool = abstract_like(self._params), abstract_pool(kv, num_pages, mesh)
        return [
            *self._chunks.programs(params, pool, self._experts.shapes),
            *self._experts.programs(params),
            *self._runs.programs(pool),
        ]
