"""Which pages hold which prefix: whole pages, found by a chain of digests, evicted by age.

Invariant: the cache holds one reference on each of its pages. A page with no other reference
may be evicted. A page is only found through its whole chain, so within a chain a page is never
older than the pages after it, and evicting the oldest first takes the tail first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from transfer import wire
from transfer.host_pages import HostPages
from transfer.pages import PagePool


def sharing_salt(adapter: str, cache_salt: str) -> str:
    """What requests must have alike to share pages: with an adapter, pages hold other numbers."""
    return f"{adapter}\0{cache_salt}"


def reusable_tokens(num_tokens: int, logprobs_start: int) -> int:
    """Tokens of a prompt that a cached prefix may replace.

    logprobs_start: positions from there on need logprobs; -1 = none.
    """
    reusable = num_tokens - 1  # the last token's logits must be computed
    if logprobs_start >= 0:
        reusable = min(reusable, max(logprobs_start - 1, 0))
    return reusable


@dataclass(slots=True)
class Sharing:
    """A prompt as the prefix caches of all ranks see it.

    Each page is digested once, on demand: one digest is enough to find that nothing of a prompt is
    cached.
    """

    token_ids: np.ndarray  # i32[n]
    salt: str
    num_reusable: int  # tokens that a cached prefix may replace
    _digests: list[bytes] = field(default_factory=list, init=False, repr=False)
    _rest: Iterator[bytes] | None = field(default=None, init=False, repr=False)

    def first(self, cache: "PrefixCache", num_pages: int) -> list[bytes]:
        """Digests of the first num_pages full pages, or of all if there are fewer."""
        self._digests += islice(self._rest_in(cache), max(num_pages - len(self._digests), 0))
        return self._digests[:num_pages]

    def cached(self, cache: "PrefixCache") -> list[bytes]:
        """Digests of the longest cached prefix, within num_reusable tokens."""
        limit = max(self.num_reusable, 0) // cache.page_size
        return self._digests[: cache.cached_pages(islice(self._each(cache), limit))]

    def found(self, cache: "PrefixCache") -> tuple[list[bytes], int]:
        """Digests as of `cached`, then those that the host has after them without a gap.

        With how many are cached.
        """
        cached = self.cached(cache)
        if cache.host is None:
            return cached, len(cached)
        limit = max(self.num_reusable, 0) // cache.page_size
        num_kept = cache.host.num_found(islice(self._each(cache), len(cached), limit))
        return self._digests[: len(cached) + num_kept], len(cached)

    def begins_with(self, chain: Sequence[bytes]) -> bool:
        """Whether its first page is this chain's first; False if no page was digested yet."""
        return bool(chain) and self._digests[:1] == [chain[0]]

    def _rest_in(self, cache: "PrefixCache") -> Iterator[bytes]:
        """The digests still to be made, which are the same for all caches."""
        if self._rest is None:
            self._rest = cache.chain(self.token_ids, self.salt)
        return self._rest

    def _each(self, cache: "PrefixCache") -> Iterator[bytes]:
        yield from self._digests
        for digest in self._rest_in(cache):
            self._digests.append(digest)
            yield digest


class PrefixCache:
    """Prefixes of prompts that are or were computed, page by page.

    A chain is the digests of a prompt's full pages from the first on, see `chain`.

    evicted: pages, with their digests, oldest first, that the host is to keep. restored: pages that
    have to be filled with what the host has. Both are left to the owner of the pool's array, before
    anything else is written to it.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        enabled: bool = True,
        host: HostPages | None = None,
    ) -> None:
        """host: keeps what is evicted."""
        self.page_size = page_size
        self.host = host
        self.evicted: list[tuple[bytes, int]] = []
        self.restored: list[tuple[bytes, int]] = []
        self._pool = pool
        self._enabled = enabled
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # digest -> page, oldest first

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> Collection[int]:
        """All pages that the cache holds a reference on, oldest first."""
        return self._pages.values()

    def chain(self, token_ids: np.ndarray, salt: str) -> Iterator[bytes]:
        """A digest of each full page of these tokens, i32[n], over all tokens up to its end.

        Empty when the cache is disabled.
        """
        if not self._enabled:
            return
        # Hashed first to a fixed length, so that no salt can pass for tokens.
        state = hashlib.sha256(hashlib.sha256(salt.encode()).digest())
        data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
        step = 4 * self.page_size
        for end in range(step, len(data) + 1, step):
            state.update(data[end - step : end])
            yield state.copy().digest()

    def share(self, prefix: Sequence[bytes]) -> tuple[int, ...]:
        """Share the pages of a cached prefix.

        The caller owns one reference on each page returned.
        """
        self._touch(prefix)
        pages = tuple(self._pages[digest] for digest in prefix)
        self._pool.share(pages)
        return pages

    def cached_pages(self, chain: Iterable[bytes]) -> int:
        """Pages of the longest cached prefix. Changes nothing, not even the order of eviction."""
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
        named = zip(chain, pages, strict=False)  # chain is empty when disabled
        new = {digest: page for digest, page in named if digest not in self._pages}
        self._pool.keep(new.values())
        self._pages.update(new)
        self._touch(chain)

    def restore(self, chain: Sequence[bytes], pages: Sequence[int], num_cached: int) -> None:
        """Remember the pages of a prefix of which the host has those from num_cached on."""
        if self.host is not None and num_cached < len(chain):
            self.host.touch(chain)
            self.restored += zip(chain[num_cached:], pages[num_cached:], strict=True)
            self.insert(chain, pages)

    def evict(self, num_pages: int) -> int:
        """Free up to num_pages pages that nobody else holds, oldest first; returns how many."""
        refcount = self._pool.refcount
        alone = (digest for digest, page in self._pages.items() if refcount(page) == 1)
        victims = list(islice(alone, num_pages))
        pages = [self._pages.pop(digest) for digest in victims]
        self._pool.let_go(pages)
        if self.host is not None:
            self.evicted += zip(victims, pages, strict=True)
        return len(victims)

    def can_evict(self, num_pages: int, besides: Collection[bytes] = ()) -> bool:
        """Whether num_pages could be evicted without pages in `besides`, which the cache has."""
        spared = sum(self._pool.refcount(self._pages[digest]) == 1 for digest in besides)
        return num_pages <= self.num_evictable - spared

    def flush(self) -> int:
        """Evict all pages that nobody else holds, for good; returns how many."""
        num_pages = self.evict(len(self._pages))
        self.evicted.clear()
        return num_pages

    @property
    def num_evictable(self) -> int:
        """Cached pages that nobody else holds."""
        return self._pool.num_kept_alone

    def _touch(self, chain: Sequence[bytes]) -> None:
        for digest in reversed(chain):
            self._pages.move_to_end(digest)


def flush_caches(caches: Sequence[PrefixCache]) -> wire.FlushReply:
    """Evict the cached pages that no running request holds. Returns the answer to Flush."""
    flushed = sum(cache.flush() for cache in caches)
    flushed += sum(host.clear() for host in {cache.host for cache in caches} if host is not None)
    left = sum(map(len, caches))
    message = f"{flushed} pages flushed"
    if left:
        message += f", {left} kept: running requests hold them"
    return wire.FlushReply(flushed=left == 0, message=message)
