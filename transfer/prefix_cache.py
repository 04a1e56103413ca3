"""Which pages hold which prefix: whole pages, found by a chain of digests, evicted by age.

Invariant: the cache holds one reference on each of its pages. A page with no other reference
may be evicted. A page is only found through its whole chain, so within a chain a page is never
older than the pages behind it, and eviction from the old end takes the tail first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Sharing:
    """A prompt as the prefix caches of all ranks see it. Its pages are digested once."""

    token_ids: np.ndarray  # i32[n]
    salt: str
    num_reusable: int  # tokens that a cached prefix may stand for
    _digests: list[bytes] | None = field(default=None, init=False, repr=False)

    def full(self, cache: "PrefixCache") -> Sequence[bytes]:
        """Digests of all its full pages."""
        if self._digests is None:
            self._digests = cache.chain(self.token_ids, self.salt)
        return self._digests

    def reusable(self, cache: "PrefixCache") -> Sequence[bytes]:
        """Digests of those that a cached prefix may stand for."""
        return self.full(cache)[: self.num_reusable // cache.page_size]

    def begins_with(self, chain: Sequence[bytes]) -> bool:
        """Whether its first page is this chain's; of one whose pages nobody has asked for, no."""
        return bool(chain) and self._digests is not None and self._digests[:1] == [chain[0]]


class PrefixCache:
    """Prefixes of prompts that are or were computed, page by page.

    A chain is digests of a prompt's full pages from the first on, see `chain`.
    """

    def __init__(self, pool: PagePool, page_size: int, enabled: bool = True) -> None:
        self.page_size = page_size
        self._pool = pool
        self._enabled = enabled
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # digest -> page, oldest first

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> Collection[int]:
        """All that it holds a reference on, oldest first."""
        return self._pages.values()

    def chain(self, token_ids: np.ndarray, salt: str) -> list[bytes]:
        """Of these tokens, i32[n]. Empty where nothing is kept."""
        return list(self._chain(token_ids, salt)) if self._enabled else []

    def match(self, chain: Sequence[bytes]) -> tuple[int, ...]:
        """Share the pages of the longest cached prefix.

        The caller owns one reference on each page returned.
        """
        found = chain[: self.cached_pages(chain)]
        self._touch(found)
        pages = tuple(self._pages[digest] for digest in found)
        self._pool.share(pages)
        return pages

    def cached_pages(self, chain: Sequence[bytes]) -> int:
        """Pages of the longest cached prefix. Changes nothing, the order of eviction neither."""
        num_pages = 0
        for digest in chain:
            if digest not in self._pages:
                break
            num_pages += 1
        return num_pages

    def insert(self, chain: Sequence[bytes], pages: Sequence[int]) -> None:
        """Remember the pages of this prefix; pages[i] holds its i-th page.

        A prefix that is known already keeps its page: the newcomer's copy stays the caller's.
        """
        for digest, page in zip(chain, pages, strict=False):  # none where nothing is kept
            if digest not in self._pages:
                self._pool.share((page,))
                self._pages[digest] = page
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
        step = 4 * self.page_size
        for end in range(step, len(data) + 1, step):
            state.update(data[end - step : end])
            yield state.copy().digest()
