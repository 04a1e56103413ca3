"""Which worker has seen which prefix: what the router guesses of caches it cannot see.

A prompt is a chain of keys, one for each full page, each over all tokens up to its end, as in
the caches themselves. The guess errs both ways: other API processes fill the caches too, and a
cache evicts without telling. A wrong guess costs a worse choice of worker, never a wrong token,
so 64 bits a key are enough.

Invariant: a worker's pages are in order of their last use, and within a chain a page is never
older than those behind it. So what is dropped from the old end takes the tails first, and the
pages known of a prompt are always its first ones.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MAX_PAGES = 1 << 16  # known of one worker; some 10 MiB
_NEVER = -1  # before every use


def prefix_chain(tokens: bytes, page_size: int, salt: str = "") -> list[int]:
    """One key for each full page. Equal keys: equal tokens up to there, and an equal salt.

    tokens: i32, as messages have them.
    """
    step = 4 * page_size
    key = hash(salt)
    chain = []
    for end in range(step, len(tokens) + 1, step):
        key = hash((key, tokens[end - step : end]))
        chain.append(key)
    return chain


@dataclass(frozen=True, slots=True)
class Use:
    """One prompt's use of a worker's cache, as foreseen."""

    number: int  # uses count up, over all workers
    num_found: int  # pages thought to be there already, the prompt's first ones
    last_found: int  # the number of the use by which the last of them was known


class PrefixIndex[K: Hashable]:
    """The prefixes that each worker is thought to have, of at most max_pages pages each."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        assert max_pages > 0
        self._max_pages = max_pages
        self._pages: dict[K, OrderedDict[int, int]] = {}  # key -> last use, oldest first
        self._open: set[int] = set()  # uses that are not settled yet
        self._uses = 0

    def num_pages(self, worker: K) -> int:
        """Pages thought to be there."""
        return len(self._pages.get(worker, ()))

    def match(self, worker: K, chain: Sequence[int]) -> int:
        """How many of the first pages of a prompt the worker is thought to have."""
        pages = self._pages.get(worker)
        if not pages:
            return 0
        for num_found, key in enumerate(chain):
            if key not in pages:
                return num_found
        return len(chain)

    def use(self, worker: K, chain: Sequence[int], num_reusable: int, pages_total: int = 0) -> Use:
        """The worker finds or computes this prompt's pages; to be settled.

        num_reusable: of its first pages, those that it would not compute again if it has them.
        pages_total: of the worker's pool, which bounds what it can have; 0 = not known.
        """
        most = min(self._max_pages, pages_total or self._max_pages)
        pages = self._pages.setdefault(worker, OrderedDict())
        chain = chain[:most]
        num_found = self.match(worker, chain[:num_reusable])
        last_found = pages[chain[num_found - 1]] if num_found else _NEVER
        self._uses += 1
        for key in reversed(chain):
            pages[key] = self._uses
            pages.move_to_end(key)
        while len(pages) > most:
            pages.popitem(last=False)
        self._open.add(self._uses)
        return Use(self._uses, num_found, last_found)

    def settle(self, worker: K, use: Use, num_cached: int | None) -> None:
        """What came of it. num_cached: pages that were there indeed; None = nobody can tell.

        A page that was not there has been evicted, and with it all that was used no later. Unless
        those who were to compute it had not begun: they are not settled.
        """
        self._open.discard(use.number)
        pages = self._pages.get(worker)
        if pages is None or num_cached is None or num_cached >= use.num_found:
            return
        if use.last_found not in self._open:
            while pages and next(iter(pages.values())) <= use.last_found:
                pages.popitem(last=False)

    def forget(self, worker: K) -> None:
        """The worker's cache is empty, or the worker is gone."""
        self._pages.pop(worker, None)
