"""Which tokens go into the next chunk, and which pages they fill.

Pure: state and events in, a plan out. Requests are taken in order of arrival once decode has
granted them pages; prompts are packed into one chunk until a budget (tokens, prompts, context
pages) is used up. A prompt longer than a chunk leaves part of the chunk to shorter ones behind it.
A request holds all pages of its prompt from its first chunk until `release`, so a started prompt
always finishes. Before its first chunk it holds none, and when it starts, it shares what other
prompts have computed by then. One that is kept back in the middle gives its pages up to a prompt
that finds too few, and starts again later, from what the cache then still has.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from model.buckets import pages_for
from model.pieces import NO_ADAPTER, ChunkLimits, Piece, pack
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache, Sharing, reusable_tokens


@dataclass(slots=True, eq=False)
class Prompt:
    """One request as prefill sees it."""

    room: int
    token_ids: np.ndarray  # i32[n]
    arrival_s: float
    salt: str = ""
    logprobs_start: int = -1  # positions >= start need logits; -1 = none
    adapter: int = NO_ADAPTER
    rank: int = -1  # data-parallel rank, dictated or chosen; -1: not yet
    num_foreseen: int = 0  # tokens that its rank's cache and the host had when it was bound
    pages_foreseen: int = 0  # those of its pages that the cache had
    granted: bool = False
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0  # tokens found in the prefix cache, when it first started
    was_started: bool = False
    num_planned: int = 0  # tokens computed or in a chunk that was dispatched
    sharing: Sharing = field(init=False)

    def __post_init__(self) -> None:
        num_reusable = reusable_tokens(self.num_tokens, self.logprobs_start)
        self.sharing = Sharing(self.token_ids, self.salt, num_reusable)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs_start >= 0


def arrival_of(prompt: Prompt) -> float:
    return prompt.arrival_s


class PrefillScheduler:
    """Owns the queue; takes pages from the pool and the prefix cache, and gives them back."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        chunk_tokens: int,
        chunk_seqs: int,
        chunk_pages: int,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """sizes: see ChunkLimits."""
        self._pool = pool
        self._cache = cache
        self._page_size = cache.page_size
        self._limits = ChunkLimits(chunk_tokens, chunk_seqs, chunk_pages, cache.page_size, sizes)
        self._prompts: dict[int, Prompt] = {}
        self._ready: list[Prompt] = []  # granted, with tokens left to plan; oldest first
        self._is_dry = False  # the last plan left out a prompt that found no pages

    def add(self, prompt: Prompt) -> None:
        """Queue a prompt. It waits for `grant`."""
        assert prompt.room not in self._prompts, f"room {prompt.room} twice"
        assert prompt.num_tokens > 0
        self._prompts[prompt.room] = prompt

    def grant(self, room: int) -> None:
        """Decode has pages for the prompt: it may be computed."""
        prompt = self._prompts[room]
        if prompt.granted:
            return
        prompt.granted = True
        insort(self._ready, prompt, key=arrival_of)

    def keep_back(self, room: int) -> None:
        """Compute nothing more of the prompt until it is granted again."""
        prompt = self._prompts[room]
        if prompt in self._ready:
            self._leave(prompt)
            prompt.granted = False

    def release(self, room: int) -> None:
        """The room is over, well or badly: its pages go back. Unknown rooms are ignored.

        Chunks already dispatched may still write to these pages; a later owner's writes are
        dispatched later and the device runs in order, so they win.
        """
        prompt = self._prompts.pop(room, None)
        if prompt is None:
            return
        if prompt in self._ready:
            self._leave(prompt)
        self._pool.release(tuple(prompt.pages))
        prompt.pages = []

    def plan(self) -> tuple[Piece[Prompt], ...]:
        """The next chunk; empty when nothing can run. Its tokens count as planned at once.

        Oldest first, but a prompt longer than a chunk leaves part of it to shorter ones.
        """
        short = [self._if_short(prompt) for prompt in self._ready]
        self._is_dry = False
        return pack(tuple(self._ready), short, self._limits, self._begin, self._planned)

    @property
    def has_room(self) -> bool:
        """Whether the next chunk could take more than the prompts that wait for it."""
        requests, tokens = self.pending()
        is_full = requests >= self._limits.seqs or tokens >= self._limits.tokens
        return not is_full and not self._is_dry

    @property
    def room_beside(self) -> int:
        """Where there is no room: tokens that the next chunk still takes of short prompts.

        A prompt that needs several chunks leaves part of each to prompts that need one. 0 if no
        prompt needs several, or if short ones have taken their part already.
        """
        if self._is_dry or len(self._ready) >= self._limits.seqs:
            return 0
        short = sum(self._if_short(prompt) for prompt in self._ready)
        return max(self._limits.part_of_shorter - short, 0)

    def pending(self) -> tuple[int, int]:
        """Requests that may be computed but are not yet, and their tokens left to compute.

        A cached prefix is no work: if it counted, a rank would seem busy with chunks half empty.
        """
        left = (p.num_tokens - (p.num_planned or p.num_foreseen) for p in self._ready)
        return len(self._ready), sum(left)

    def can_start(self, prompt: Prompt, chain: Sequence[bytes]) -> bool:
        """Whether there are pages for the prompt after those that older ones here wait for.

        chain: digests of its pages that the cache has.
        """
        awaited = sum(self._pages_to_come(p) for p in self._ready if not p.pages)
        need = awaited + self.pages_of(prompt.num_tokens) - len(chain)
        short = need - self._pool.num_free
        if short <= 0 or self._cache.can_evict(short, frozenset(chain)):
            return True
        short -= sum(len(prompt.pages) for prompt in self._kept_back())
        return short <= 0 or self._cache.can_evict(short, frozenset(chain))

    def pages_of(self, num_tokens: int) -> int:
        return pages_for(num_tokens, self._page_size)

    def queued(self) -> tuple[int, int]:
        """Requests and tokens not yet planned."""
        left = [p.num_tokens - p.num_planned for p in self._prompts.values()]
        return sum(n > 0 for n in left), sum(left)

    def __len__(self) -> int:
        return len(self._prompts)

    def _pages_to_come(self, prompt: Prompt) -> int:
        return self.pages_of(prompt.num_tokens) - prompt.pages_foreseen

    def _if_short(self, prompt: Prompt) -> int:
        """Tokens left of a prompt, if one chunk would do and it may have pages; else 0."""
        left = prompt.num_tokens - prompt.num_planned
        waits_for_pages = self._is_dry and not prompt.pages
        return 0 if left > self._limits.tokens or waits_for_pages else left

    def _leave(self, prompt: Prompt) -> None:
        """Take a prompt out of those that may be computed, before all of it was planned."""
        self._ready.remove(prompt)
        if not prompt.pages:
            self._is_dry = False  # it may have been the one that found no pages

    def _begin(self, prompt: Prompt, tokens_left: int, shorter: int) -> bool:
        """Whether the next piece may be of the prompt; see `pack`. One not begun is started."""
        if prompt.pages:
            return True
        if not self._has_turn(prompt, tokens_left, shorter):
            return False
        # First come, first served: once one finds too few pages, no younger prompt starts.
        # Prompts that hold pages go on: they must finish to free what an older one needs.
        self._is_dry = self._is_dry or not self._start(prompt)
        return not self._is_dry

    def _has_turn(self, prompt: Prompt, tokens_left: int, shorter: int) -> bool:
        """Whether the chunk has tokens for a prompt that is not begun."""
        left = prompt.num_tokens
        if self._limits.tokens_of(left, tokens_left, shorter):
            return True
        found, _ = prompt.sharing.found(self._cache)
        left -= len(found) * self._page_size
        return self._limits.tokens_of(left, tokens_left, shorter) > 0

    def _start(self, prompt: Prompt) -> bool:
        """Share cached pages and reserve the rest; False while there are too few free pages.

        The first pages reserved are those that the host fills.
        """
        found, num_cached = prompt.sharing.found(self._cache)
        shared = self._cache.share(found[:num_cached])
        need = self.pages_of(prompt.num_tokens) - len(shared)
        fresh = self._reserve(need)
        if fresh is None and (kept_back := self._kept_back()):
            for other in kept_back:
                self._give_up(other)
            fresh = self._reserve(need)
        if fresh is None:
            self._pool.release(shared)
            return False
        prompt.pages = [*shared, *fresh]
        self._cache.restore(found, prompt.pages[: len(found)], num_cached)
        prompt.num_planned = len(found) * self._page_size
        if not prompt.was_started:
            prompt.was_started, prompt.num_cached = True, prompt.num_planned
        return True

    def _reserve(self, num_pages: int) -> tuple[int, ...] | None:
        """Free pages, of the cache if there are too few others; None if there are not so many."""
        short = num_pages - self._pool.num_free
        if short > 0:
            self._cache.evict(short)
        return self._pool.reserve(num_pages)

    def _kept_back(self) -> list[Prompt]:
        """Those in the middle of their prompt. Logprobs are collected once, so such ones stay."""
        return [
            prompt
            for prompt in self._prompts.values()
            if prompt.pages and not prompt.granted and not prompt.wants_logprobs
        ]

    def _give_up(self, prompt: Prompt) -> None:
        """Take the pages of a prompt that is kept back; the cache keeps those that are full."""
        self._pool.release(tuple(prompt.pages))
        prompt.pages = []
        prompt.num_planned = 0

    def _planned(self, piece: Piece[Prompt]) -> None:
        prompt = piece.prompt
        prompt.num_planned = piece.end
        if piece.is_last:
            self._ready.remove(prompt)
        # The device runs in order: any later chunk that reads these pages finds them written.
        full = piece.end // self._page_size
        self._cache.insert(prompt.sharing.first(self._cache, full), prompt.pages[:full])
