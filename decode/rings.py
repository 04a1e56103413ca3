"""Rings: a slot's pages for layers with a window, where these have pages of their own. Pure.

A ring has as many pages as the window touches: the page of place j in a page table is entry
j % size, so that new positions overwrite those that no token looks at any more. Prefill sends the
last pages of a prompt, those into which the window of the next token reaches.

A worker that computes prompts has no rings: it keeps all pages of both groups, since a prefix that
another prompt shares needs them. There, page N + p of the second group goes with page p of the
first, N being the pages that the pool has of each group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from decode.admission import Seat
from model.buckets import pages_for
from transfer.opened import PoolFacts


def ringed_window(facts: PoolFacts, local_tokens: int) -> int:
    """Positions for which a decode worker keeps windowed pages; 0: all of them, without rings.

    local_tokens: of the longest prompt that it computes itself.
    """
    return 0 if local_tokens else facts.window


def first_seen(num_tokens: int, window: int, page_size: int) -> int:
    """The first page into which the window of the token after num_tokens reaches."""
    return max(num_tokens + 1 - window, 0) // page_size


@dataclass(frozen=True)
class Rings:
    """How a decode worker uses its pages. num_pages: of each group in a rank's pool.

    ring_pages: of a whole ring; 0: there are no rings.
    """

    facts: PoolFacts
    num_pages: int
    ring_pages: int = 0

    @property
    def pool_pages(self) -> int:
        """Pages of a rank that are handed out: with rings, those of both groups from one pool."""
        return self.num_pages * (self.facts.groups if self.ring_pages else 1)

    def to_fill(self, seat: Seat) -> Sequence[int]:
        """Where the pages that prefill sends of a prompt go, in the order of their numbers."""
        facts = self.facts
        own = seat.pages[: pages_for(seat.num_tokens, facts.page_size)]
        if not facts.window:
            return own
        if not self.ring_pages:
            return [*own, *(page + self.num_pages for page in own)]
        first = first_seen(seat.num_tokens, facts.window, facts.page_size)
        return [*own, *(seat.ring[place % self.ring_pages] for place in range(first, len(own)))]
