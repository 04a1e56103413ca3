"""Packed chunks of prompts as compiled programs: pieces in, pages written, logits and tokens out.

Both roles run them: prefill for its prompts, decode for those that it computes itself. All
data-parallel ranks make each call together, each with its own part, which may be empty. The rows of
arrays begin with rank 0's; pages are counted within each rank. Nothing here waits for the device,
except `Asks.ANYTHING` on a GPU, where the host waits for every predicate. So on a GPU each thing
that a chunk may be asked for has programs of its own; on CPU one program serves all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from model.buckets import PrefillBuckets, bucket_for, list_sizes, mask_words, pages_for
from model.latent import is_expanded
from model.moe import ExpertMap
from model.pieces import NO_ADAPTER, ChunkPrompt, Piece
from model.placement import ExpertArgs, PlacedExperts
from model.programs import Program
from model.sampling import (
    NUM_BAD_WORDS,
    Asks,
    SampleOut,
    SamplingLike,
    allowed_mask,
    asks_of,
    empty_rows,
    looks_back,
    no_bad_words,
    prompt_logprobs,
    sample,
    set_bad_words,
    set_row,
)
from model.sharding import (
    POOL_SPEC,
    RANKS,
    abstract_i32,
    abstract_of,
    num_ranks,
    on_ranks,
    tell_host,
    told_spec,
)
from model.transformer import ChunkBatch, Model, prefill_rows, row_logits

_LOGPROB_BLOCK = 64  # rows of full logits alive at once when prompt logprobs are asked


@dataclass(frozen=True)
class Placed[Q: ChunkPrompt]:
    """Where one of a chunk's pieces lies in it."""

    piece: Piece[Q]
    row: int  # of the logits, which follow the piece's last token
    token_row: int  # of the piece's first token


@dataclass(frozen=True)
class ChunkInFlight[Q: ChunkPrompt]:
    """One dispatched chunk of every rank. R ranks, T padded tokens each."""

    pieces: tuple[Placed[Q], ...]
    logits: Any  # f32[R * seqs, vocab]
    prompt_logprobs: Any  # f32[R * T], i32[R * T, 20], f32[R * T, 20]; None unless asked


@dataclass(frozen=True)
class PackedChunk[Q: ChunkPrompt]:
    """A chunk on the host: the program, its arguments, and which prompt has which rows."""

    bucket: int
    arrays: tuple[np.ndarray, ...]
    pieces: tuple[Placed[Q], ...]
    wants: bool  # prompt logprobs

    def in_flight(self, told: tuple[Array, ...]) -> ChunkInFlight[Q]:
        """told: what the call returned, the logits first."""
        logits, *asked = told
        return ChunkInFlight(self.pieces, logits, tuple(asked) if self.wants else None)


@dataclass(frozen=True)
class FirstSample:
    """What is needed to draw the first token of one finished prompt."""

    row: int  # of the chunk's logits
    params: SamplingLike
    token_ids: np.ndarray
    num_prompt_tokens: int
    mask: np.ndarray | None = None  # u32[words], where params have a grammar


class ChunkPrograms[Q: ChunkPrompt]:
    """Every chunk program of one model, and the draws of first tokens after them."""

    def __init__(
        self,
        model: Model,
        buckets: PrefillBuckets,
        context_length: int,
        apart: bool | None = None,
    ) -> None:
        """apart: whether what may be asked for has separate programs; None: on an accelerator."""
        self.buckets = buckets
        self._apart = not model.on_cpu if apart is None else apart
        self._model = model
        self._context_length = context_length
        self._dp_size = num_ranks(model.mesh)
        self._of_adapters = int(model.dims.lora is not None)  # arrays of a chunk
        self._nowhere = 0  # a position past the pool of a rank
        self._chunk: dict[tuple[int, int], Program] = {}  # by tokens and pages of the list
        self._logprobs: dict[int, Program] = {}  # where they are apart
        # By what rows may ask for, and how many tokens so far a draw may look at.
        sampled = list(Asks) if self._apart else [Asks.ANYTHING]
        self._kinds = [(asks, 1) for asks in sampled] + [(Asks.ANYTHING, context_length)]
        self._sample: list[Program] = []
        self._rows_tree = jax.tree.structure(empty_rows(1))
        self._logits: Array  # of the last chunk

    def pack(self, plans: Sequence[Sequence[Piece[Q]]]) -> "PackedChunk[Q]":
        """One chunk of every rank, as `run` takes it; plans: pieces by rank."""
        most = max(sum(piece.num_tokens for piece in pieces) for pieces in plans)
        bucket = bucket_for(most, self.buckets.tokens)
        most_pages = max(sum(len(self._owned(piece)) for piece in pieces) for pieces in plans)
        num_pages = bucket_for(most_pages, self._lists(bucket))
        packed = [self._pack(pieces, bucket, num_pages) for pieces in plans]
        fields = zip(*(parts for parts, _ in packed), strict=True)
        last_rows = np.concatenate([rows for _, rows in packed])
        targets = np.concatenate([_targets(pieces, bucket) for pieces in plans])
        wants = any(piece.prompt.wants_logprobs for pieces in plans for piece in pieces)
        arrays = [np.concatenate(parts) for parts in fields]
        return PackedChunk(
            bucket,
            (*arrays, last_rows, np.array(wants), targets),
            _placed(plans, bucket, self.buckets.seqs),
            wants,
        )

    def run(
        self, params: Any, pool: Array, experts: PlacedExperts, bucket: int, *arrays: np.ndarray
    ) -> tuple[Array, tuple[Array, ...]]:
        """Dispatch a packed chunk. Returns the donated pool, and what `in_flight` takes."""
        *fields, last_rows, wants, targets = arrays
        batch, asked = _chunk_batch(fields), () if self._apart else (wants, targets)
        pool, loads, logits, *rest = self._chunk[bucket, len(batch.page_ids) // self._dp_size](
            params, pool, batch, last_rows, *asked, *experts.args
        )
        experts.counted(loads)
        self._logits = logits
        if self._apart:
            (hidden,) = rest
            rest = self._logprobs[bucket](params, hidden, targets) if wants else ()
        return pool, (logits, *rest)

    @property
    def hidden_bytes(self) -> int:
        """Bytes on one device of the longest chunk's hidden states, if they outlive its program."""
        dtype = np.dtype(self._model.dtype)
        tokens = self.buckets.tokens[-1] if self._apart else 0
        return tokens * self._model.cfg.hidden_size * int(dtype.itemsize)

    def pack_firsts(self, firsts: Sequence[FirstSample]) -> tuple[int, tuple[np.ndarray, ...]]:
        """Draws of first tokens, as `sample_first` takes them."""
        seqs = self._dp_size * self.buckets.seqs
        rows = empty_rows(seqs)
        lengths = np.zeros((2, seqs), np.int32)
        look_back = any(looks_back(first.params) for first in firsts)
        width = self._context_length if look_back else 1
        asks = max((asks_of(first.params) for first in firsts), default=Asks.GREEDY)
        kind = self._kinds.index((asks if self._apart else Asks.ANYTHING, width))
        history = np.zeros((seqs, width), np.int32)
        masks = np.zeros((seqs, self._mask_words(width)), np.uint32)
        bad_words = no_bad_words(seqs, self._bad_words(width))
        for first in firsts:
            set_row(rows, first.row, first.params)
            lengths[:, first.row] = first.num_prompt_tokens, len(first.token_ids)
            if look_back:
                history[first.row, : len(first.token_ids)] = first.token_ids
                set_bad_words(bad_words[first.row], first.params)
            mask = first.mask
            if mask is None:
                mask = allowed_mask(first.params, masks.shape[1])
            if mask is not None:
                masks[first.row] = mask
        return kind, (*jax.tree.leaves(rows), history, *lengths, masks, bad_words)

    def sample_first(self, kind: int, *arrays: np.ndarray) -> SampleOut:
        """Dispatch draws from the last chunk; row i belongs to row i of its logits."""
        *leaves, history, prompt_len, length, masks, bad_words = arrays
        rows = jax.tree.unflatten(self._rows_tree, leaves)
        looked_at = history, prompt_len, length, masks, bad_words
        out: SampleOut = self._sample[kind](self._logits, rows, *looked_at)
        for array in out:
            array.copy_to_host_async()
        return out

    # --- shapes -------------------------------------------------------------------------------

    def _mask_words(self, width: int) -> int:
        return 0 if width == 1 else mask_words(self._model.cfg.vocab_size)

    def _bad_words(self, width: int) -> int:
        return 0 if width == 1 else NUM_BAD_WORDS

    def _lists(self, tokens: int) -> tuple[int, ...]:
        """Lengths of the list of pages: one, except where keys are made for all of its pages."""
        model, latent = self._model, self._model.cfg.latent
        *shorter, longest = list_sizes(self.buckets, tokens, model.page_size)
        if model.on_cpu or latent is None:
            return (longest,)
        of = latent, model.dims.group, model.dtype.itemsize, tokens
        return *(size for size in shorter if is_expanded(*of, size * model.page_size)), longest

    def _owned(self, piece: Piece[Q]) -> Sequence[int]:
        """The prompt's pages up to the end of a piece."""
        return piece.prompt.pages[: pages_for(piece.end, self._model.page_size)]

    def _pack(
        self, pieces: Sequence[Piece[Q]], bucket: int, num_pages: int
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """A rank's part: the fields of ChunkBatch, and the last row of each piece."""
        seqs, page_size = self.buckets.seqs, self._model.page_size
        tokens = np.zeros((4, bucket), np.int32)  # ids, positions, seq_idx, kv_idx
        tokens[2], tokens[3] = seqs, self._nowhere
        adapters = np.full((self._of_adapters, bucket), NO_ADAPTER, np.int32)
        pages = np.zeros((3, num_pages), np.int32)  # ids, seq, position of first token
        pages[1] = seqs
        last_rows = np.zeros(seqs, np.int32)
        row = page_row = 0
        for idx, piece in enumerate(pieces):
            span = np.arange(piece.start, piece.end, dtype=np.int32)
            owned = np.asarray(self._owned(piece), np.int32)
            end = row + piece.num_tokens
            tokens[0, row:end] = piece.prompt.token_ids[piece.start : piece.end]
            tokens[1, row:end] = span
            tokens[2, row:end] = idx
            adapters[:, row:end] = piece.prompt.adapter
            tokens[3, row:end] = owned[span // page_size] * page_size + span % page_size
            page_end = page_row + len(owned)
            pages[0, page_row:page_end] = owned
            pages[1, page_row:page_end] = idx
            pages[2, page_row:page_end] = np.arange(len(owned), dtype=np.int32) * page_size
            last_rows[idx] = end - 1
            row, page_row = end, page_end
        return [*tokens, *pages, np.array([page_row], np.int32), *adapters], last_rows

    def programs(
        self, params: Any, pool: jax.ShapeDtypeStruct, experts: ExpertArgs
    ) -> list[Program]:
        """All programs, to be compiled.

        params, pool, experts: their shapes.
        """
        self._nowhere = pool.shape[2] // self._dp_size * self._model.page_size
        model = self._model
        mesh, of_params = model.mesh, model.param_specs()
        told = (told_spec(mesh),) * 3
        given, gives = (of_params, POOL_SPEC, RANKS, RANKS), (POOL_SPEC, RANKS, RANKS)
        if self._apart:
            chunk = on_ranks(
                mesh, partial(_chunk_alone, model), (*given, P(), RANKS), (*gives, RANKS)
            )
        else:
            asked = (*given, P(), RANKS, P(), RANKS)
            chunk = on_ranks(mesh, partial(_chunk_whole, model), asked, (*gives, *told))
        for tokens in self.buckets.tokens:
            for num_pages in self._lists(tokens):
                batch, last_rows, wants, targets = self._chunk_shapes(tokens, num_pages)
                own = () if self._apart else (wants, targets)
                args = (params, pool, batch, last_rows, *own, *experts)
                name = f"chunk[tokens={tokens}, pages={num_pages}]"
                self._chunk[tokens, num_pages] = Program(name, chunk, args, (1, len(args) - 1))
        if self._apart:
            logprobs = on_ranks(
                mesh, partial(_prompt_logprobs, model), (of_params, RANKS, RANKS), told
            )
            for tokens in self.buckets.tokens:
                *_, targets = self._chunk_shapes(tokens, self.buckets.pages)
                args = (params, self._hidden_shape(tokens), targets)
                self._logprobs[tokens] = Program(f"logprobs[tokens={tokens}]", logprobs, args)
        self._sample = [self._sample_program(asks, width) for asks, width in self._kinds]
        return [*self._chunk.values(), *self._logprobs.values(), *self._sample]

    def _chunk_shapes(self, tokens: int, pages: int) -> tuple[Any, ...]:
        mesh, seqs = self._model.mesh, self.buckets.seqs

        def i32(size: int) -> jax.ShapeDtypeStruct:
            return abstract_i32((self._dp_size * size,), mesh, RANKS)

        sizes = (tokens,) * 4 + (pages,) * 3 + (1,) + (tokens,) * self._of_adapters
        batch = _chunk_batch([i32(size) for size in sizes])
        return batch, i32(seqs), abstract_of(np.bool_(False), mesh, P()), i32(tokens)

    def _hidden_shape(self, tokens: int) -> Any:
        sizes = self._dp_size * tokens, self._model.cfg.hidden_size
        return abstract_of(jax.ShapeDtypeStruct(sizes, self._model.dtype), self._model.mesh, RANKS)

    def _sample_program(self, asks: Asks, width: int) -> Program:
        mesh, vocab = self._model.mesh, self._model.cfg.vocab_size
        seqs = self._dp_size * self.buckets.seqs
        shapes = (
            jax.ShapeDtypeStruct((seqs, vocab), jnp.float32),
            empty_rows(seqs),
            jax.ShapeDtypeStruct((seqs, width), jnp.int32),
            jax.ShapeDtypeStruct((seqs,), jnp.int32),
            jax.ShapeDtypeStruct((seqs,), jnp.int32),
            jax.ShapeDtypeStruct((seqs, self._mask_words(width)), jnp.uint32),
            no_bad_words(seqs, self._bad_words(width)),
        )
        function = partial(_sample_fn, self._model, asks)
        sample_ranks = on_ranks(mesh, function, (RANKS,) * len(shapes), told_spec(mesh))
        args = abstract_of(shapes, mesh, RANKS)
        return Program(f"sample[{asks.name.lower()}, history={width}]", sample_ranks, args)


def _chunk_alone(
    model: Model,
    params: Any,
    pool: Array,
    batch: ChunkBatch,
    last_rows: Array,
    expert_map: ExpertMap | None,
    loads: Array | None,
) -> tuple[Array | None, ...]:
    """One rank's chunk: pool, loads, logits f32[seqs, vocab], hidden states [T, hidden]."""
    batch = batch._replace(num_pages_used=batch.num_pages_used[0])
    hidden, pool, loads = prefill_rows(model, params, pool, batch, expert_map, loads)
    return pool, loads, row_logits(model, params, hidden[last_rows]), hidden


def _chunk_whole(
    model: Model,
    params: Any,
    pool: Array,
    batch: ChunkBatch,
    last_rows: Array,
    wants: Array,
    targets: Array,
    expert_map: ExpertMap | None,
    loads: Array | None,
) -> tuple[Array | None, ...]:
    """As `_chunk_alone`, but with prompt logprobs for hidden states; zeros unless wanted.

    wants is the same on all ranks, since the branch that it selects has collectives in it.
    """
    args = params, pool, batch, last_rows, expert_map, loads
    pool_, loads, logits, hidden = _chunk_alone(model, *args)
    assert hidden is not None
    shapes = jax.eval_shape(partial(_logprobs_of, model), params, hidden, targets)
    asked = jax.lax.cond(
        wants,
        lambda: _logprobs_of(model, params, hidden, targets),
        lambda: jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes),
    )
    return pool_, loads, logits, *tell_host(model.mesh, asked)


def _prompt_logprobs(model: Model, params: Any, hidden: Array, targets: Array) -> Any:
    return tell_host(model.mesh, _logprobs_of(model, params, hidden, targets))


def _logprobs_of(
    model: Model, params: Any, hidden: Array, targets: Array
) -> tuple[Array, Array, Array]:
    """Logprobs f32[T]; ids i32[T, 20] and logprobs f32[T, 20] of the best tokens."""
    block = min(_LOGPROB_BLOCK, hidden.shape[0])
    logits = partial(row_logits, model, params)
    return prompt_logprobs(logits, hidden, targets, block)


def _sample_fn(
    model: Model,
    asks: Asks,
    last_logits: Array,
    rows: Any,
    history: Array,
    prompt_len: Array,
    length: Array,
    masks: Array,
    bad_words: Array,
) -> SampleOut:
    out = sample(
        last_logits,
        rows,
        lambda: (history, prompt_len, length),
        length - prompt_len,
        (lambda: masks) if masks.size else None,
        (lambda: bad_words) if bad_words.size else None,
        asks,
        model.on_cpu,
    )
    told: SampleOut = tell_host(model.mesh, out)
    return told


def _chunk_batch(fields: Sequence[Any]) -> ChunkBatch:
    """A batch of these fields, in order: host arrays or shapes, which its type does not mention."""
    return ChunkBatch(*fields)


def _placed[Q: ChunkPrompt](
    plans: Sequence[Sequence[Piece[Q]]], bucket: int, seqs: int
) -> tuple[Placed[Q], ...]:
    """Pieces of all ranks, each of which has `bucket` rows of tokens and `seqs` of logits."""
    placed = []
    for rank, pieces in enumerate(plans):
        token_row = rank * bucket
        for idx, piece in enumerate(pieces):
            placed.append(Placed(piece, rank * seqs + idx, token_row))
            token_row += piece.num_tokens
    return tuple(placed)


def _targets[Q: ChunkPrompt](pieces: Sequence[Piece[Q]], bucket: int) -> np.ndarray:
    """The token that follows each row, for prompt logprobs: i32[bucket]."""
    targets = np.zeros(bucket, np.int32)
    row = 0
    for piece in pieces:
        follow = piece.prompt.token_ids[piece.start + 1 : piece.end + 1]
        targets[row : row + len(follow)] = follow
        row += piece.num_tokens
    return targets
