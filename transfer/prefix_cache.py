"""Which pages hold which prefix: whole pages, found by a chain of digests, evicted by age.

Invariant: the cache holds one reference on each of its pages. A page with no other reference
may be evicted. A page is only found through its whole chain, so within a chain a page is never
older than the pages behind it, and eviction from the old end takes the tail first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from transfer.pages import PagePool


def reusable_tokens(num_tokens: int, logprobs_start: int) -> int:
    """Tokens of a prompt that a cached prefix may stand for.

    logprobs_start: positions from there on need logits; -1 = none.
    """
    reusable = num_tokens - 1  # the last token's logits must be computed
    if logprobs_start >= 0:
        reusable = min(reusable, max(logprobs_start - 1, 0))
    return reusable


class PrefixCache:
    """Prefixes of prompts that are or were computed, page by page."""

    def __init__(self, pool: PagePool, page_size: int, enabled: bool = True) -> None:
        self._pool = pool
        self._page_size = page_size
        self._enabled = enabled
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # digest -> page, oldest first

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> Collection[int]:
        """All that it holds a reference on, oldest first."""
        return self._pages.values()

    def match(self, token_ids: np.ndarray, salt: str, limit_tokens: int) -> tuple[int, ...]:
        """Share the pages of the longest cached prefix of at most limit_tokens tokens.

        token_ids: i32[n]. The caller owns one reference on each page returned.
        """
        if not self._enabled:
            return ()
        found: list[tuple[bytes, int]] = []
        for digest in self._chain(token_ids[: max(limit_tokens, 0)], salt):
            page = self._pages.get(digest)
            if page is None:
                break
            found.append((digest, page))
        self._touch([digest for digest, _ in found])
        pages = tuple(page for _, page in found)
        self._pool.share(pages)
        return pages

    def chain(self, token_ids: np.ndarray, salt: str, limit_tokens: int) -> list[bytes]:
        """Digests of the full pages of at most limit_tokens tokens, for `cached_tokens`."""
        return list(self._chain(token_ids[: max(limit_tokens, 0)], salt)) if self._enabled else []

    def cached_tokens(self, chain: Sequence[bytes]) -> int:
        """Tokens of the longest cached prefix. Changes nothing, the order of eviction neither."""
        num_pages = 0
        for digest in chain:
            if digest not in self._pages:
                break
            num_pages += 1
        return num_pages * self._page_size

    def insert(self, token_ids: np.ndarray, salt: str, pages: Sequence[int]) -> None:
        """Remember the full pages of this prefix; pages[i] holds its i-th page.

        A prefix that is known already keeps its page: the newcomer's copy stays the caller's.
        """
        if not self._enabled:
            return
        chain: list[bytes] = []
        for digest, page in zip(self._chain(token_ids, salt), pages, strict=False):
            if digest not in self._pages:
                self._pool.share((page,))
                self._pages[digest] = page
            chain.append(digest)
        self._touch(chain)

    def evict(self, num_pages: int) -> int:
        """Free up to num_pages pages that nobody else holds, oldest first; returns how many."""
        victims: list[bytes] = []
        for digest, page in self._pages.items():
            if len(victims) == num_pages:
                break
            if self._pool.refcount(page) == 1:
                victims.append(digest)
        for digest in victims:
            self._pool.release((self._pages.pop(digest),))
        return len(victims)

    def can_evict(self, num_pages: int, besides: Collection[bytes] = ()) -> bool:
        """Whether so many pages could be freed that are not of this chain. Changes nothing."""
        if num_pages > len(self._pages):
            return False
        for digest, page in self._pages.items():
            if num_pages <= 0:
                break
            num_pages -= self._pool.refcount(page) == 1 and digest not in besides
        return num_pages <= 0

    def flush(self) -> int:
        """Evict all that nobody holds."""
        return self.evict(len(self._pages))

    def num_evictable(self) -> int:
        """Cached pages that nobody else holds."""
        return sum(self._pool.refcount(page) == 1 for page in self._pages.values())

    def _touch(self, chain: Sequence[bytes]) -> None:
        for digest in reversed(chain):
            self._pages.move_to_end(digest)

    def _chain(self, token_ids: np.ndarray, salt: str) -> Iterator[bytes]:
        """One digest per full page, each over all tokens up to its end."""
        # A salt of any length counts for as many bytes, so none passes for tokens.
        state = hashlib.sha256(hashlib.sha256(salt.encode()).digest())
        data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
        step = 4 * self._page_size
        for end in range(step, len(data) + 1, step):
            state.update(data[end - step : end])
            yield state.copy().digest()
