"""Chunk plans to device calls: compiled programs, the pool, and nothing that decides.

Everything here is dispatched without waiting; who reads a result waits until the device has it.
The device runs calls in order of dispatch.
"""

import logging
from collections.abc import Sequence

import numpy as np
from jax import Array

from model.buckets import PrefillBuckets, bucket_for
from model.chunks import ChunkInFlight, ChunkPrograms, FirstSample
from model.kv import abstract_pages, gather_pages
from model.opening import OpenedModel, make_pool
from model.programs import MemoryPlan, Program, abstract_like, compile_program
from model.sampling import SampleOut
from model.sharding import POOL_SPEC, RANKS, abstract_i32, on_ranks, rank_devices
from prefill.scheduler import Piece, Prompt

log = logging.getLogger(__name__)


class PrefillEngine:
    """Owner of the prefill pool array and its programs."""

    def __init__(
        self,
        opened: OpenedModel,
        buckets: PrefillBuckets,
        mem_fraction: float,
        max_total_tokens: int,
        natural_pages: int,
    ) -> None:
        self._opened = opened
        self._model = opened.model
        self._params = opened.params
        self._experts = opened.experts
        self._buckets = buckets
        self._dp_size = opened.dp_size
        self._chunks = ChunkPrograms[Prompt](opened.model, buckets, opened.context_length)
        self._gather: dict[int, Program] = {}
        self.plan: MemoryPlan
        self._pool: Array
        self._pool, self.plan, _ = make_pool(
            opened,
            mem_fraction,
            max_total_tokens,
            natural_pages,
            self._compile,
            buckets.staged_pages,
        )
        self._params = self._experts.settle(self._params)

    @property
    def num_pages(self) -> int:
        """Pages of each rank."""
        return self.plan.num_pages

    # --- effects ------------------------------------------------------------------------------

    def run_chunk(self, plans: Sequence[tuple[Piece, ...]]) -> ChunkInFlight[Prompt]:
        """Dispatch one packed chunk of every rank; plans: pieces by rank."""
        self._params = self._experts.turn(self._params)
        self._pool, chunk = self._chunks.run(self._params, self._pool, self._experts, plans)
        return chunk

    def sample_first(
        self, chunk: ChunkInFlight[Prompt], firsts: Sequence[FirstSample]
    ) -> SampleOut:
        """Dispatch the draw of first tokens; row i of the result belongs to row i of the chunk."""
        return self._chunks.sample_first(chunk, firsts)

    def gather_runs(self, page_ids: Sequence[Sequence[int]]) -> list[list[Array]]:
        """Pack pages for the wire, one run of each rank, which may be empty.

        Returns by rank one array per shard, [layers, planes, bucket, page_size, kv, dim], of which
        the first len(page_ids[rank]) pages count. The copy of runs with pages to the host begins.
        """
        bucket = bucket_for(max(map(len, page_ids)), self._buckets.run_pages)
        ids = np.zeros((self._dp_size, bucket), np.int32)
        for rank, run in enumerate(page_ids):
            ids[rank, : len(run)] = run
        staged: Array = self._gather[bucket](self._pool, ids.ravel())
        found = {shard.device: shard.data for shard in staged.addressable_shards}
        runs = []
        for rank, run in enumerate(page_ids):
            arrays = [found[device] for device in rank_devices(self._model.mesh, rank)]
            for array in arrays if run else ():
                array.copy_to_host_async()
            runs.append(arrays)
        return runs

    @property
    def max_run_pages(self) -> int:
        return self._buckets.run_pages[-1]

    # --- shapes -------------------------------------------------------------------------------

    def _compile(self, num_pages: int) -> list[Program]:
        """Every program, for a pool of num_pages."""
        buckets, kv, mesh = self._buckets, self._opened.kv, self._model.mesh
        params, pool = abstract_like(self._params), abstract_pages(kv, num_pages, mesh)
        total = self._chunks.num_programs + len(buckets.run_pages) + self._experts.num_programs
        done: list[Program] = []

        def built(program: Program) -> Program:
            done.append(program)
            log.info("compiled %d/%d %s", len(done), total, program.name)
            return program

        self._chunks.compile(params, pool, self._experts.shapes, num_pages, built)
        self._experts.compile(params, built)
        gather = on_ranks(mesh, gather_pages, (POOL_SPEC, RANKS), POOL_SPEC)
        for pages in buckets.run_pages:
            ids = abstract_i32((self._dp_size * pages,), mesh, RANKS)
            self._gather[pages] = built(
                compile_program(f"gather[pages={pages}]", gather, (pool, ids))
            )
        return done
