"""Chunk plans to device calls: compiled programs, the pool, and nothing that decides.

Everything here is dispatched without waiting; results are read with `ChunkInFlight` accessors,
which block until the device has them. The device runs calls in order of dispatch.

All data-parallel ranks take each call together, each with its own part, which may be empty. Rows
of arrays are those of rank 0 first; pages are counted within each rank.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from model.buckets import PrefillBuckets, bucket_for
from model.kv import abstract_pages, gather_pages
from model.opening import OpenedModel, make_pool
from model.programs import MemoryPlan, Program, abstract_like, compile_program
from model.sampling import SampleOut, empty_rows, prompt_logprobs, sample, set_row
from model.sharding import (
    POOL_SPEC,
    RANKS,
    abstract_i32,
    abstract_of,
    on_ranks,
    rank_devices,
)
from model.transformer import ChunkBatch, prefill_rows, row_logits
from prefill.scheduler import Piece
from transfer.wire import NUM_TOP_LOGPROBS, SamplingParams

log = logging.getLogger(__name__)

_LOGPROB_BLOCK = 64  # rows of full logits alive at once when prompt logprobs are asked


@dataclass(frozen=True)
class Placed:
    """Where a chunk has one of its pieces."""

    piece: Piece
    row: int  # of the logits, which follow the piece's last token
    token_row: int  # of the piece's first token


@dataclass(frozen=True)
class ChunkInFlight:
    """One dispatched chunk of every rank. R ranks, T padded tokens each."""

    pieces: tuple[Placed, ...]
    logits: Array  # f32[R * seqs, vocab]
    prompt_logprobs: tuple[Array, Array, Array] | None  # f32[R * T], i32[R * T, 20], f32[R * T, 20]


@dataclass(frozen=True)
class FirstSample:
    """What is needed to draw the first token of one finished prompt."""

    row: int  # of the chunk's logits
    params: SamplingParams
    token_ids: np.ndarray
    num_prompt_tokens: int


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
        self._buckets = buckets
        self._dp_size = opened.dp_size
        self._chunk: dict[int, Program] = {}
        self._gather: dict[int, Program] = {}
        self.plan: MemoryPlan
        self._pool: Array
        self._pool, self.plan, _ = make_pool(
            opened, mem_fraction, max_total_tokens, natural_pages, self._compile
        )

    @property
    def num_pages(self) -> int:
        """Pages of each rank."""
        return self.plan.num_pages

    # --- effects ------------------------------------------------------------------------------

    def run_chunk(self, plans: Sequence[tuple[Piece, ...]]) -> ChunkInFlight:
        """Dispatch one packed chunk of every rank; plans: pieces by rank."""
        most = max(sum(piece.num_tokens for piece in pieces) for pieces in plans)
        bucket = bucket_for(most, self._buckets.tokens)
        packed = [self._pack(pieces, bucket) for pieces in plans]
        fields = zip(*(parts for parts, _ in packed), strict=True)
        batch = _chunk_batch([np.concatenate(parts) for parts in fields])
        last_rows = np.concatenate([rows for _, rows in packed])
        targets = np.concatenate([_targets(pieces, bucket) for pieces in plans])
        wants = any(piece.prompt.wants_logprobs for pieces in plans for piece in pieces)
        outs = self._chunk[bucket](
            self._params, self._pool, batch, last_rows, np.bool_(wants), targets
        )
        self._pool, last_logits, *asked = outs
        placed = _placed(plans, bucket, self._buckets.seqs)
        return ChunkInFlight(placed, last_logits, tuple(asked) if wants else None)

    def sample_first(self, chunk: ChunkInFlight, firsts: Sequence[FirstSample]) -> SampleOut:
        """Dispatch the draw of first tokens; row i of the result belongs to row i of the chunk."""
        seqs = self._dp_size * self._buckets.seqs
        rows = empty_rows(seqs)
        lengths = np.zeros((2, seqs), np.int32)
        penalised = any(_penalised(first.params) for first in firsts)
        width = self._opened.context_length if penalised else 1
        history = np.zeros((seqs, width), np.int32)
        for first in firsts:
            set_row(rows, first.row, first.params)
            lengths[:, first.row] = first.num_prompt_tokens, len(first.token_ids)
            if penalised:
                history[first.row, : len(first.token_ids)] = first.token_ids
        program = self._sample_history if penalised else self._sample_plain
        out: SampleOut = program(chunk.logits, rows, history, *lengths)
        for array in out:
            array.copy_to_host_async()
        return out

    def gather_runs(self, page_ids: Sequence[Sequence[int]]) -> list[list[Array]]:
        """Pack pages for the wire, one run of each rank, which may be empty.

        Returns by rank one array per shard, [layers, 2, bucket, page_size, kv, dim], of which the
        first len(page_ids[rank]) pages count. The copy of runs with pages to the host has begun.
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

    def _pack(self, pieces: tuple[Piece, ...], bucket: int) -> tuple[list[np.ndarray], np.ndarray]:
        """A rank's part: the fields of ChunkBatch, and the last row of each piece."""
        seqs, page_size = self._buckets.seqs, self._opened.kv.page_size
        nowhere = self.num_pages * page_size
        tokens = np.zeros((4, bucket), np.int32)  # ids, positions, seq_idx, kv_idx
        tokens[2], tokens[3] = seqs, nowhere
        pages = np.zeros((3, self._buckets.pages), np.int32)  # ids, seq, position of first token
        pages[1] = seqs
        last_rows = np.zeros(seqs, np.int32)
        row = page_row = 0
        for idx, piece in enumerate(pieces):
            span = np.arange(piece.start, piece.end, dtype=np.int32)
            owned = np.asarray(piece.prompt.pages[: -(-piece.end // page_size)], np.int32)
            end = row + piece.num_tokens
            tokens[0, row:end] = piece.prompt.token_ids[piece.start : piece.end]
            tokens[1, row:end] = span
            tokens[2, row:end] = idx
            tokens[3, row:end] = owned[span // page_size] * page_size + span % page_size
            page_end = page_row + len(owned)
            pages[0, page_row:page_end] = owned
            pages[1, page_row:page_end] = idx
            pages[2, page_row:page_end] = np.arange(len(owned), dtype=np.int32) * page_size
            last_rows[idx] = end - 1
            row, page_row = end, page_end
        return [*tokens, *pages, np.array([page_row], np.int32)], last_rows

    def _compile(self, num_pages: int) -> list[Program]:
        """Every program, for a pool of num_pages."""
        buckets, kv, mesh = self._buckets, self._opened.kv, self._model.mesh
        params, pool = abstract_like(self._params), abstract_pages(kv, num_pages, mesh)
        total = len(buckets.tokens) + len(buckets.run_pages) + 2
        done: list[Program] = []

        def built(program: Program) -> Program:
            done.append(program)
            log.info("compiled %d/%d %s", len(done), total, program.name)
            return program

        chunk = on_ranks(
            mesh,
            self._chunk_fn,
            (self._model.param_specs(), POOL_SPEC, RANKS, RANKS, P(), RANKS),
            (POOL_SPEC, RANKS, RANKS, RANKS, RANKS),
        )
        for tokens in buckets.tokens:
            args = (params, pool, *self._chunk_shapes(tokens))
            self._chunk[tokens] = built(
                compile_program(f"chunk[tokens={tokens}]", chunk, args, (1,))
            )
        gather = on_ranks(mesh, gather_pages, (POOL_SPEC, RANKS), POOL_SPEC)
        for pages in buckets.run_pages:
            ids = abstract_i32((self._dp_size * pages,), mesh, RANKS)
            self._gather[pages] = built(
                compile_program(f"gather[pages={pages}]", gather, (pool, ids))
            )
        self._sample_plain = built(self._compile_sample(1))
        self._sample_history = built(self._compile_sample(self._opened.context_length))
        return done

    def _chunk_fn(
        self,
        params: Any,
        pool: Array,
        batch: ChunkBatch,
        last_rows: Array,
        wants: Array,
        targets: Array,
    ) -> tuple[Array, ...]:
        """One rank's chunk. wants is the same on all ranks: what it decides has collectives in it.

        (pool, logits f32[seqs, vocab], logprobs f32[T], top_ids i32[T,20], top f32[T,20]).
        """
        batch = batch._replace(num_pages_used=batch.num_pages_used[0])
        hidden, pool = prefill_rows(self._model, params, pool, batch)
        tokens = hidden.shape[0]

        def rows_to_logits(rows: Array) -> Array:
            return row_logits(self._model, params, rows)

        def compute() -> tuple[Array, Array, Array]:
            block = min(_LOGPROB_BLOCK, tokens)
            return prompt_logprobs(rows_to_logits, hidden, targets, block)

        def nothing() -> tuple[Array, Array, Array]:
            top = (tokens, NUM_TOP_LOGPROBS)
            return (
                jnp.zeros((tokens,), jnp.float32),
                jnp.zeros(top, jnp.int32),
                jnp.zeros(top, jnp.float32),
            )

        asked = jax.lax.cond(wants, compute, nothing)
        return pool, rows_to_logits(hidden[last_rows]), *asked

    def _chunk_shapes(self, tokens: int) -> tuple[Any, ...]:
        mesh, seqs, pages = self._model.mesh, self._buckets.seqs, self._buckets.pages

        def i32(size: int) -> jax.ShapeDtypeStruct:
            return abstract_i32((self._dp_size * size,), mesh, RANKS)

        batch = _chunk_batch([i32(size) for size in (tokens,) * 4 + (pages,) * 3 + (1,)])
        return batch, i32(seqs), abstract_of(np.bool_(False), mesh, P()), i32(tokens)

    def _compile_sample(self, width: int) -> Program:
        mesh, vocab = self._model.mesh, self._model.cfg.vocab_size
        seqs = self._dp_size * self._buckets.seqs
        shapes = (
            jax.ShapeDtypeStruct((seqs, vocab), jnp.float32),
            empty_rows(seqs),
            jax.ShapeDtypeStruct((seqs, width), jnp.int32),
            jax.ShapeDtypeStruct((seqs,), jnp.int32),
            jax.ShapeDtypeStruct((seqs,), jnp.int32),
        )
        sample_ranks = on_ranks(mesh, _sample_fn, (RANKS,) * len(shapes), RANKS)
        args = abstract_of(shapes, mesh, RANKS)
        return compile_program(f"sample[history={width}]", sample_ranks, args)


def _sample_fn(
    last_logits: Array, rows: Any, history: Array, prompt_len: Array, length: Array
) -> SampleOut:
    return sample(last_logits, rows, lambda: (history, prompt_len, length), length - prompt_len)


def _chunk_batch(fields: Sequence[Any]) -> ChunkBatch:
    """The fields in order: host arrays or shapes, which the type does not tell of."""
    return ChunkBatch._make(fields)


def _placed(plans: Sequence[tuple[Piece, ...]], bucket: int, seqs: int) -> tuple[Placed, ...]:
    """Pieces of all ranks, each of which has `bucket` rows of tokens and `seqs` of logits."""
    placed = []
    for rank, pieces in enumerate(plans):
        token_row = rank * bucket
        for idx, piece in enumerate(pieces):
            placed.append(Placed(piece, rank * seqs + idx, token_row))
            token_row += piece.num_tokens
    return tuple(placed)


def _penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def _targets(pieces: tuple[Piece, ...], bucket: int) -> np.ndarray:
    """The token that follows each row, for prompt logprobs: i32[bucket]."""
    targets = np.zeros(bucket, np.int32)
    row = 0
    for piece in pieces:
        follow = piece.prompt.token_ids[piece.start + 1 : piece.end + 1]
        targets[row : row + len(follow)] = follow
        row += piece.num_tokens
    return targets
