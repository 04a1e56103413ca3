"""Chunk plans to device calls: compiled programs, the pool, and nothing that decides.

Everything here is dispatched without waiting; results are read with `ChunkInFlight` accessors,
which block until the device has them. The device runs calls in order of dispatch.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model.buckets import PrefillBuckets, bucket_for
from model.kv import gather_pages
from model.opening import OpenedModel, make_pool
from model.programs import MemoryPlan, Program, abstract_like, compile_program
from model.sampling import SampleOut, empty_rows, prompt_logprobs, sample, set_row
from model.sharding import pool_sharding
from model.transformer import ChunkBatch, logits, prefill_hidden
from prefill.scheduler import Piece
from transfer.wire import NUM_TOP_LOGPROBS, SamplingParams

log = logging.getLogger(__name__)

_LOGPROB_BLOCK = 64  # rows of full logits alive at once when prompt logprobs are asked


@dataclass(frozen=True)
class ChunkInFlight:
    """One dispatched chunk. Token rows of the pieces follow each other from row 0."""

    pieces: tuple[Piece, ...]
    logits: Array  # f32[seqs, vocab]: row i follows the last token of piece i
    prompt_logprobs: tuple[Array, Array, Array] | None  # f32[T], i32[T, 20], f32[T, 20]


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
        self._replicated = NamedSharding(opened.model.mesh, P())
        self._chunk: dict[int, Program] = {}
        self._gather: dict[int, Program] = {}
        self.plan: MemoryPlan
        self._pool: Array
        self._pool, self.plan, _ = make_pool(
            opened, mem_fraction, max_total_tokens, natural_pages, self._compile
        )

    @property
    def num_pages(self) -> int:
        return self.plan.num_pages

    # --- effects ------------------------------------------------------------------------------

    def run_chunk(self, pieces: tuple[Piece, ...]) -> ChunkInFlight:
        """Dispatch one packed chunk."""
        num_tokens = sum(piece.num_tokens for piece in pieces)
        bucket = bucket_for(num_tokens, self._buckets.tokens)
        batch, last_rows = self._pack(pieces, bucket)
        targets = _targets(pieces, bucket)
        wants = any(piece.prompt.wants_logprobs for piece in pieces)
        outs = self._chunk[bucket](
            self._params, self._pool, batch, last_rows, np.bool_(wants), targets
        )
        self._pool, last_logits, *asked = outs
        return ChunkInFlight(pieces, last_logits, tuple(asked) if wants else None)

    def sample_first(self, chunk: ChunkInFlight, firsts: Sequence[FirstSample]) -> SampleOut:
        """Dispatch the draw of first tokens; row i of the result belongs to row i of the chunk."""
        seqs = self._buckets.seqs
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

    def gather_run(self, page_ids: Sequence[int]) -> list[Array]:
        """Pack pages for the wire: one array per shard, [layers, 2, bucket, page_size, kv, dim].

        The first len(page_ids) pages of each count. The copy to the host has begun.
        """
        bucket = bucket_for(len(page_ids), self._buckets.run_pages)
        ids = np.zeros(bucket, np.int32)
        ids[: len(page_ids)] = page_ids
        staged: Array = self._gather[bucket](self._pool, ids)
        shards = sorted(staged.addressable_shards, key=lambda s: s.index[4].start or 0)
        arrays = [shard.data for shard in shards]
        for array in arrays:
            array.copy_to_host_async()
        return arrays

    @property
    def max_run_pages(self) -> int:
        return self._buckets.run_pages[-1]

    # --- shapes -------------------------------------------------------------------------------

    def _pack(self, pieces: tuple[Piece, ...], bucket: int) -> tuple[ChunkBatch, np.ndarray]:
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
        return _chunk_batch([*tokens, *pages, np.int32(page_row)]), last_rows

    def _compile(self, num_pages: int) -> list[Program]:
        """Every program, for a pool of num_pages."""
        buckets, kv = self._buckets, self._opened.kv
        pool = jax.ShapeDtypeStruct(
            (kv.num_layers, 2, num_pages, kv.page_size, kv.num_kv_heads, kv.head_dim),
            jnp.dtype(kv.stored_dtype),
            sharding=pool_sharding(self._model.mesh),
        )
        params = abstract_like(self._params)
        total = len(buckets.tokens) + len(buckets.run_pages) + 2
        done: list[Program] = []

        def built(program: Program) -> Program:
            done.append(program)
            log.info("compiled %d/%d %s", len(done), total, program.name)
            return program

        for tokens in buckets.tokens:
            shapes = self._chunk_shapes(tokens)
            self._chunk[tokens] = built(
                compile_program(
                    f"chunk[tokens={tokens}]", self._chunk_fn, (params, pool, *shapes), (1,)
                )
            )
        for pages in buckets.run_pages:
            ids = self._shape((pages,), jnp.int32)
            self._gather[pages] = built(
                compile_program(f"gather[pages={pages}]", gather_pages, (pool, ids))
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
        """(pool, logits f32[seqs, vocab], logprobs f32[T], top_ids i32[T,20], top f32[T,20])."""
        hidden, pool = prefill_hidden(self._model, params, pool, batch)
        tokens = hidden.shape[0]

        def rows_to_logits(rows: Array) -> Array:
            return logits(self._model, params, rows)

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
        seqs, pages = self._buckets.seqs, self._buckets.pages
        i32 = jnp.int32
        batch = _chunk_batch(
            [self._shape((size,), i32) for size in (tokens,) * 4 + (pages,) * 3]
            + [self._shape((), i32)]
        )
        return (
            batch,
            self._shape((seqs,), i32),
            self._shape((), jnp.bool_),
            self._shape((tokens,), i32),
        )

    def _compile_sample(self, width: int) -> Program:
        seqs, vocab = self._buckets.seqs, self._model.cfg.vocab_size
        rows = jax.tree.map(lambda a: self._shape(a.shape, a.dtype), empty_rows(seqs))
        return compile_program(
            f"sample[history={width}]",
            _sample_fn,
            (
                self._shape((seqs, vocab), jnp.float32),
                rows,
                self._shape((seqs, width), jnp.int32),
                self._shape((seqs,), jnp.int32),
                self._shape((seqs,), jnp.int32),
            ),
        )

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)


def _sample_fn(
    last_logits: Array, rows: Any, history: Array, prompt_len: Array, length: Array
) -> SampleOut:
    return sample(last_logits, rows, lambda: (history, prompt_len, length), length - prompt_len)


def _chunk_batch(fields: Sequence[Any]) -> ChunkBatch:
    """The fields in order: host arrays or shapes, which the type does not tell of."""
    return ChunkBatch._make(fields)


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
