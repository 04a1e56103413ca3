"""Guesses which prefixes each worker's cache holds, as the router cannot see the caches.

A prompt is a chain of keys, one for each full page, each over all tokens up to its end, as in
the caches themselves, and the same in all processes of a server. The guess errs both ways: other
servers fill the caches too, and a cache evicts without telling. A wrong guess costs a worse choice
of worker, never a wrong token, so 64 bits a key are enough.

Invariant: a worker's pages are in order of their last use, and within a chain a page's last use is
never older than that of the pages after it. So dropping the oldest pages drops the tails of chains
first, and the pages known of a prompt are always its first ones.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import xxhash

from transfer import wire

MOST_UNTOLD_BYTES = 1 << 20
MAX_PAGES = 1 << 16  # known of one worker; some 10 MiB
_NEVER = -1  # earlier than every use


def prefix_chain(tokens: bytes, page_size: int, salt: str = "") -> list[int]:
    """One key for each full page. Equal keys mean equal tokens up to there and an equal salt.

    tokens: i32, as messages have them.
    """
    step = 4 * page_size
    key = xxhash.xxh3_64_intdigest(salt.encode())
    chain = []
    for end in range(step, len(tokens) + 1, step):
        key = xxhash.xxh3_64_intdigest(tokens[end - step : end], key)
        chain.append(key)
    return chain


class ToldUse(wire.Message, frozen=True):
    """A prompt that another process of this server sends to a worker."""

    worker_id: str
    epoch: int
    rank: int  # -1: any, or its only one
    packed: bytes  # u64[pages]: the keys of its pages
    most_pages: int  # of the worker's cache; 0: not known

    @property
    def chain(self) -> list[int]:
        return array("Q", self.packed).tolist()


@dataclass
class Untold:
    """Uses that other processes are still to be told, as many as fit into a message."""

    uses: list[ToldUse] = field(default_factory=list)
    _num_bytes: int = 0

    def add(
        self, worker_id: str, epoch: int, rank: int, chain: Sequence[int], most_pages: int
    ) -> None:
        """Add a use, unless there are too many: they only help others to guess."""
        packed = array("Q", chain).tobytes()
        if chain and self._num_bytes + len(packed) <= MOST_UNTOLD_BYTES:
            self.uses.append(ToldUse(worker_id, epoch, rank, packed, most_pages))
            self._num_bytes += len(packed)

    def take(self) -> tuple[ToldUse, ...]:
        uses, self.uses, self._num_bytes = tuple(self.uses), [], 0
        return uses


@dataclass(frozen=True, slots=True)
class Use:
    """One prompt's expected use of a worker's cache."""

    number: int  # counts up, over all workers
    num_found: int  # of the prompt's first pages, how many are thought to be cached
    last_found: int  # number of the latest use, before this one, of the last of them


class PrefixIndex[K: Hashable]:
    """The prefixes that each worker is thought to have, of at most max_pages pages each."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        assert max_pages > 0
        self._max_pages = max_pages
        self._pages: dict[K, OrderedDict[int, int]] = {}  # key -> last use, oldest first
        self._open: set[int] = set()  # uses that are not settled yet
        self._uses = 0

    def num_pages(self, worker: K) -> int:
        """Pages that the worker is thought to have."""
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
        """Note that the worker will find or compute this prompt's pages; to be settled later.

        num_reusable: how many of the first pages it would not compute again if it has them.
        pages_total: of the worker's pool and its host's memory, which bound what it can have; 0 =
        not known.
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
        """Correct the guess after a use. num_cached: pages that were cached; None = not known.

        A page that was expected but not cached has been evicted, and so have all pages last used no
        later. The exception: the use that was to compute it is not settled yet, so it may not have
        been computed at all.
        """
        self._open.discard(use.number)
        pages = self._pages.get(worker)
        if pages is None or num_cached is None or num_cached >= use.num_found:
            return
        if use.last_found not in self._open:
            while pages and next(iter(pages.values())) <= use.last_found:
                pages.popitem(last=False)

    def forget(self, is_empty: Callable[[K], bool]) -> None:
        """The caches of these workers are empty, or the workers are gone."""
        for worker in [worker for worker in self._pages if is_empty(worker)]:
            del self._pages[worker]
