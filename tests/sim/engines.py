"""Engines without a device: pages are real arrays, and every read checks what it finds in them.

A device runs calls in order of dispatch, so running each call at its dispatch gives the same
contents. Reads that come after later dispatches are counted, to show that the loops overlap.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decode.drafts import NO_DRAFT, REJECTED
from decode.engine import SlotStart, StepInFlight
from decode.local import LocalPrompt
from model.calls import Calls
from model.chunks import ChunkInFlight, FirstSample, Placed
from model.pieces import Piece
from model.sampling import NOT_A_TOKEN, NUM_TOP, SampleOut
from prefill.scheduler import Prompt
from tests.sim.network import FIRST_ID, chain, draw, extend, kv_of, start_of
from transfer.opened import PoolFacts
from transfer.wire import SamplingParams


class Pool:
    """f32[1, 2, pages of all groups, page_size, stored heads, 1], with checks of its contents."""

    def __init__(self, num_pages: int, facts: PoolFacts, tp_size: int) -> None:
        """num_pages: pages in each group."""
        self.facts = facts
        self.tp_size = tp_size
        self._num_pages = num_pages
        shape = (1, 2, facts.groups * num_pages, facts.page_size, facts.stored_kv_heads, 1)
        self.kv = np.full(shape, -1, np.float32)
        # page -> salt of the prompt last computed into it; None: it came from elsewhere
        self.salts: dict[int, str | None] = {}

    def write(
        self, pages: Sequence[int], start: int, states: Sequence[int], ring: Sequence[int] = ()
    ) -> None:
        """Write positions start .. start+len(states)-1 of the request that has these pages."""
        at = np.arange(start, start + len(states))
        for group, table in enumerate(self._tables(pages, ring)):
            kv = self._kv_of(states, start, group)
            page = table[at // self.facts.page_size]
            self.kv[0, :, page, at % self.facts.page_size, :, 0] = kv.swapaxes(0, 1)

    def expect(
        self, pages: Sequence[int], states: Sequence[int], what: str, ring: Sequence[int] = ()
    ) -> None:
        """The pages' first positions must hold exactly this; of a ring, those in the window."""
        for group, table in enumerate(self._tables(pages, ring)):
            first = max(len(states) + 1 - self.facts.window, 0) if group and ring else 0
            at = np.arange(first, len(states))
            page = table[at // self.facts.page_size]
            found = self.kv[0, :, page, at % self.facts.page_size, :, 0].swapaxes(0, 1)
            wanted = self._kv_of(states[first:], first, group)
            if not np.array_equal(found, wanted):
                wrong = int(np.flatnonzero((found != wanted).any(axis=(0, 2)))[0])
                raise AssertionError(
                    f"{what}: position {at[wrong]} of {len(states)} in page {page[wrong]} of group "
                    f"{group} holds {found[:, wrong].tolist()}, expected "
                    f"{wanted[:, wrong].tolist()}"
                )

    def _tables(self, pages: Sequence[int], ring: Sequence[int]) -> list[np.ndarray]:
        """For each group, the page at each place of the table."""
        own = np.asarray(pages, np.int32)
        if self.facts.groups == 1:
            return [own]
        if ring:
            return [own, np.asarray(ring, np.int32)[np.arange(len(own)) % len(ring)]]
        return [own, own + self._num_pages]

    def _kv_of(self, states: Sequence[int], start: int, group: int) -> np.ndarray:
        heads = self.facts.logical_kv_heads, self.facts.stored_kv_heads
        return kv_of(states, start, *heads, group)

    def shards(self, pages: Sequence[int], padded: int) -> list[np.ndarray]:
        """A copy of these pages, one array per shard, padded as a compiled gather pads."""
        ids = np.zeros(padded, np.int32)
        ids[: len(pages)] = pages
        return [part.copy() for part in np.split(self.kv[:, :, ids], self.tp_size, axis=4)]


class Late:
    """An array on the device: reading it counts how many later calls had been dispatched."""

    def __init__(self, values: np.ndarray, engine: "ChunkEngine | StepEngine") -> None:
        self._values = values
        self._engine = engine
        self._number = engine.dispatched

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        behind = min(self._engine.dispatched - self._number, 2)
        self._engine.stats[f"{self._engine.name}_read_{behind}_behind"] += 1
        return np.array(self._values, dtype)


class ChunkEngine:
    """Prefill's engine."""

    name = "chunk"

    def __init__(
        self,
        num_pages: int,
        facts: PoolFacts,
        tp_size: int,
        run_pages: int,
        chunk_tokens: int,
        seqs: int,
        stats: Counter[str],
        dp_size: int,
    ) -> None:
        self.num_pages = num_pages
        self.max_run_pages = run_pages
        self.stats = stats
        self.dispatched = 0
        self._facts = facts
        self.calls = Calls()
        self._pools = [Pool(num_pages, facts, tp_size) for _ in range(dp_size)]
        self._chunk_tokens = chunk_tokens
        self._seqs = seqs

    def run_chunk(self, plans: Sequence[tuple[Piece[Prompt], ...]]) -> ChunkInFlight:
        self.dispatched += 1
        assert len(plans) == len(self._pools)
        assert any(plans)
        states: Any = np.zeros(len(plans) * self._seqs, np.int64)  # in place of logits
        asked = [(0.0, 0)] * (len(plans) * self._chunk_tokens)  # a row per token, padding included
        placed = []
        for rank, pieces in enumerate(plans):
            assert len(pieces) <= self._seqs
            assert sum(piece.num_tokens for piece in pieces) <= self._chunk_tokens
            token_row = rank * self._chunk_tokens
            for row, piece in enumerate(pieces, start=rank * self._seqs):
                assert piece.prompt.rank == rank
                states[row] = _compute(self._pools[rank], piece, f"prefill of rank {rank}")
                asked[token_row : token_row + piece.num_tokens] = _told(piece)
                placed.append(Placed(piece, row, token_row))
                token_row += piece.num_tokens
        wants = any(piece.prompt.wants_logprobs for pieces in plans for piece in pieces)
        self._last = ChunkInFlight(tuple(placed), states, _asked(asked) if wants else None)
        return self._last

    def sample_first(self, firsts: Sequence[FirstSample]) -> SampleOut:
        return _drawn_first(firsts, self._last, self)

    def place_run(self, rank: int, page_ids: Sequence[int], shards: Sequence[np.ndarray]) -> None:
        _place(self._pools[rank], page_ids, shards)

    def gather_runs(self, page_ids: Sequence[Sequence[int]]) -> list[list[Any]]:
        assert 0 < max(map(len, page_ids)) <= self.max_run_pages
        return _gathered(self._pools, page_ids, self.max_run_pages)


@dataclass
class _Slot:
    token_ids: list[int]
    states: list[int]  # one for each token but the last, whose kv is not written yet
    pages: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    ring: list[int]
    mask: np.ndarray | None = None  # for one step


class StepEngine:
    """Decode's engine."""

    name = "step"

    def __init__(
        self,
        num_pages: int,
        facts: PoolFacts,
        tp_size: int,
        rank_slots: int,
        stats: Counter[str],
        dp_size: int,
        local_chunk: int,
        drafts: int,
        ring_pages: int,
    ) -> None:
        self.num_pages = num_pages
        self._ring_pages = ring_pages
        self.stats = stats
        self.dispatched = 0
        self._facts = facts
        self.calls = Calls()
        self._pools = [Pool(num_pages, facts, tp_size) for _ in range(dp_size)]
        self._local_chunk = local_chunk
        self._drafts = drafts
        self._rooms: set[int] = set()  # rooms whose prompts were computed here, in part or in whole
        self._rank_slots = rank_slots
        self._num_slots = dp_size * rank_slots
        self._slots: dict[int, _Slot] = {}

    def place_run(self, rank: int, page_ids: Sequence[int], shards: Sequence[np.ndarray]) -> None:
        _place(self._pools[rank], page_ids, shards)

    @property
    def max_run_pages(self) -> int:
        return 3

    def gather_runs(self, page_ids: Sequence[Sequence[int]]) -> list[list[Any]]:
        assert 0 < max(map(len, page_ids)) <= self.max_run_pages
        return _gathered(self._pools, page_ids, self.max_run_pages)

    def start_slots(self, starts: Sequence[SlotStart]) -> None:
        for start in starts:
            assert 0 <= start.slot < self._num_slots
            tokens = start.token_ids.tolist()
            states = chain(tokens[:-1], start_of(start.adapter))
            slot = self._slots[start.slot] = _Slot(
                tokens,
                states,
                list(start.pages),
                start.num_prompt_tokens,
                start.params,
                list(start.ring),
            )
            assert len(slot.ring) == min(self._ring_pages, len(slot.pages))
            self._expect(start.slot, slot, "starts")

    def set_masks(self, slots: np.ndarray, masks: np.ndarray) -> None:
        assert len(slots) == len(masks)
        for number, mask in zip(slots.tolist(), masks, strict=True):
            assert self._slots[number].params.grammar
            self._slots[number].mask = mask

    def run_chunk(
        self, plans: Sequence[Sequence[Piece[LocalPrompt]]]
    ) -> ChunkInFlight[LocalPrompt]:
        self.dispatched += 1
        assert all(sum(p.num_tokens for p in pieces) <= self._local_chunk for pieces in plans)
        pieces = [piece for rank_pieces in plans for piece in rank_pieces]
        states: Any = np.zeros(len(pieces), np.int64)  # in place of logits
        placed: list[Placed[LocalPrompt]] = []
        told: list[tuple[float, int]] = []
        # Rows are not in the pieces' order, so that code which does not look them up is found out.
        for row, piece in zip(reversed(range(len(pieces))), pieces, strict=True):
            prompt = piece.prompt
            states[row] = _compute(self._pools[prompt.rank], piece, f"chunk of room {prompt.room}")
            placed.append(Placed(piece, row, len(told)))
            told += _told(piece)
            if piece.start and prompt.room not in self._rooms:
                self.stats["local_prefixes_shared"] += 1
            self.stats["local_logprobs"] += prompt.wants_logprobs
            self.stats["local_prefills" if piece.is_last else "local_chunks_left"] += 1
            self._rooms.add(prompt.room)
        wants = any(piece.prompt.wants_logprobs for piece in pieces)
        self._last = ChunkInFlight(tuple(placed), states, _asked(told) if wants else None)
        return self._last

    def sample_first(self, firsts: Sequence[FirstSample]) -> SampleOut:
        ends = {placed.row for placed in self._last.pieces if placed.piece.is_last}
        assert {first.row for first in firsts} == ends
        return _drawn_first(firsts, self._last, self)

    def can_draft(self, slots: np.ndarray) -> bool:
        """A step with many slots has no rows left for drafts."""
        return self._drafts > 0 and len(slots) <= max(1, self._rank_slots // 2)

    def step(
        self,
        slots: np.ndarray,
        new_pages: np.ndarray,
        places: np.ndarray,
        new_in_ring: np.ndarray,
        tries: bool = False,
        num_pages: int | None = None,
    ) -> StepInFlight:
        self.dispatched += 1
        assert 0 < len(set(slots.tolist())) == len(slots) <= self._num_slots
        can_draft = self.can_draft(slots)
        assert can_draft or not tries, "pages are reserved for drafts that no step makes"
        width = 1 + self._drafts if tries else 1
        made = int(can_draft)  # an extra column then says whether the drafts were right
        ids = np.zeros((self._num_slots, width + made), np.int32)  # the compiled step pads
        # Rows are not in the plan's order: code that does not look them up gets other tokens.
        rows = slots[::-1].copy()
        plan = np.stack([rows, slots, new_pages, places, new_in_ring], axis=1)
        for row, number, new_page, place, in_ring in plan.tolist():
            slot = self._slots[number]
            if new_page >= 0:
                assert place == len(slot.pages), f"slot {number}: place {place} of {slot.pages}"
                slot.pages.append(new_page)
            if in_ring >= 0:
                assert place == len(slot.ring), f"slot {number}: place {place} of {slot.ring}"
                slot.ring.append(in_ring)
            assert len(slot.ring) == min(self._ring_pages, len(slot.pages))
            self.stats["rings_round"] += 0 < len(slot.ring) < len(slot.pages)
            self._expect(number, slot, "steps")
            assert (slot.mask is not None) == bool(slot.params.grammar)
            ids[row, -1] = slot.states[-1] % 2  # pseudo-random, like the tokens drawn
            ids[row, :width] = self._drawn(number, slot, width)
            slot.mask = None
        assert num_pages == max(len(self._slots[number].pages) for number in slots.tolist())
        self.stats["steps_with_drafts"] += width > 1
        out = _sampled(ids[:, :width].ravel(), self)._replace(ids=Late(ids.ravel(), self))
        return StepInFlight(out, rows, width, bool(made))

    def _drawn(self, number: int, slot: _Slot, width: int) -> list[int]:
        """What one step draws for a slot; the slot's state decides how many drafts are right."""
        pool, params, mask = self._pool_of(number), slot.params, slot.mask
        most = slot.num_prompt_tokens + params.max_new_tokens - 1  # positions that may be written
        drawn: list[int] = []
        right = 0 if params.grammar else slot.states[-1] % width
        for ahead in range(width):
            if len(slot.token_ids) > most or (ahead and params.grammar):
                break
            position = len(slot.token_ids) - 1
            if ahead > right:  # what wrong drafts leave behind
                position += ahead - right - 1
                if position >= most:
                    break
                pool.write(slot.pages, position, [-ahead], slot.ring)
                drawn.append(REJECTED)
                continue
            state = extend(slot.states[-1], slot.token_ids[-1])
            pool.write(slot.pages, position, [state], slot.ring)
            slot.states.append(state)
            token_idx = len(slot.token_ids) - slot.num_prompt_tokens
            drawn.append(draw(state, token_idx, params.seed, mask))
            slot.token_ids.append(drawn[-1])
            if drawn[-1] == NOT_A_TOKEN:  # it is no draft, so nothing behind it counts
                break
            self.stats["drafts_accepted"] += ahead > 0
        # Past its end a slot goes on drawing; the scheduler must skip these tokens.
        return drawn + [NO_DRAFT] * (width - len(drawn)) if drawn else [FIRST_ID] * width

    def _expect(self, number: int, slot: _Slot, what: str) -> None:
        pool = self._pool_of(number)
        pool.expect(slot.pages, slot.states, f"slot {number} {what}", slot.ring)

    def _pool_of(self, slot: int) -> Pool:
        return self._pools[slot // self._rank_slots]


def _gathered(
    pools: Sequence[Pool], page_ids: Sequence[Sequence[int]], padded: int
) -> list[list[Any]]:
    return [pool.shards(run, padded) for pool, run in zip(pools, page_ids, strict=True)]


def _place(pool: Pool, page_ids: Sequence[int], shards: Sequence[np.ndarray]) -> None:
    assert all(shard.shape[2] == len(page_ids) for shard in shards)
    assert len(shards) == pool.tp_size
    pool.kv[:, :, list(page_ids)] = np.concatenate(shards, axis=4)
    pool.salts.update(dict.fromkeys(page_ids))


def _compute(pool: Pool, piece: Piece[Any], what: str) -> int:
    """Write the piece's pages; returns the state after its last token."""
    prompt, page_size = piece.prompt, pool.facts.page_size
    salt = prompt.sharing.salt if isinstance(prompt, LocalPrompt) else prompt.salt
    tokens = prompt.token_ids.tolist()
    start = start_of(prompt.adapter)
    before = chain(tokens[: piece.start], start)
    pool.expect(prompt.pages, before, what)
    for page in prompt.pages[: piece.start // page_size]:
        assert pool.salts[page] in (salt, None), f"page {page} crossed salts"
    fresh = chain(tokens[piece.start : piece.end], before[-1] if before else start)
    pool.write(prompt.pages, piece.start, fresh)
    for page in prompt.pages[piece.start // page_size : -(-piece.end // page_size)]:
        pool.salts[page] = salt
    return fresh[-1]


def _told(piece: Piece[Any]) -> list[tuple[float, int]]:
    """Logprob and id of the token that follows each of the piece's tokens."""
    follow = [*piece.prompt.token_ids[piece.start + 1 : piece.end + 1].tolist(), 0]
    spots = range(piece.start + 1, piece.end + 1)
    return list(zip(map(prompt_logprob, spots), follow, strict=False))


def prompt_logprob(position: int) -> float:
    """The fake network's logprob of the prompt's token at this position."""
    return -position / 8


def _asked(rows: list[tuple[float, int]]) -> tuple[Any, Any, Any]:
    logprobs = np.array([logprob for logprob, _ in rows], np.float32)
    top_ids = np.array([[token_id] * NUM_TOP for _, token_id in rows], np.int32)
    return logprobs, top_ids, np.repeat(logprobs[:, None], NUM_TOP, axis=1)


def _drawn_first(
    firsts: Sequence[FirstSample], chunk: ChunkInFlight, engine: ChunkEngine | StepEngine
) -> SampleOut:
    ids = np.zeros(len(chunk.logits), np.int32)
    for first in firsts:
        token_idx = len(first.token_ids) - first.num_prompt_tokens
        state = int(chunk.logits[first.row])
        ids[first.row] = draw(state, token_idx, first.params.seed, first.mask)
    return _sampled(ids, engine)


def _sampled(ids: np.ndarray, engine: ChunkEngine | StepEngine) -> SampleOut:
    rows = len(ids)
    top = np.repeat(ids[:, None], NUM_TOP, axis=1)
    logprobs = -ids.astype(np.float32) / 8
    tops = np.zeros((rows, NUM_TOP), np.float32)
    return SampleOut(Late(ids, engine), Late(logprobs, engine), Late(top, engine), tops)
