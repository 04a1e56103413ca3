"""Which pages are sent after a chunk, under which numbers, and what is kept until they are.

Pages travel under numbers: a prompt's pages are 0 to n - 1, of those that decode does not have yet.
Where layers with a window have pages of their own (model/page_groups.py), numbers from n on are the
last of those pages, the ones that decode still looks at. Decode says how many of them it wants by
the number of pages that it grants. Such a prompt is always sent from its first page on.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from model.buckets import pages_for
from model.chunks import ChunkInFlight
from model.pieces import Piece
from model.sampling import SampleOut
from prefill.scheduler import Prompt
from transfer.chunk_times import ChunkTimes


class Run(NamedTuple):
    """Pages of one room to gather at once."""

    room: int
    first_page: int  # the number under which it travels
    page_ids: Sequence[int]


NO_RUN = Run(0, 0, ())


@dataclass(slots=True)
class Staged:
    """Runs gathered in one call, one of each rank; they take num_pages staged pages per rank."""

    num_pages: int
    ticket: int  # see transfer/gathered.py
    runs: Sequence[Run]


@dataclass(slots=True)
class InFlight:
    """A dispatched chunk and everything that waits for it."""

    chunk: ChunkInFlight[Prompt]
    times: list[ChunkTimes]  # one a piece
    staged: deque[Staged] = field(default_factory=deque)
    sampled: SampleOut | None = None


@dataclass(frozen=True)
class Shipping:
    """Numbers pages and cuts them into runs.

    num_pages: of each group in a rank's pool. most: pages of a run. groups: see KVSpec.
    """

    page_size: int
    num_pages: int
    most: int
    groups: int = 1

    def first_windowed(self, num_tokens: int, num_granted: int, first_page: int = 0) -> int | None:
        """The first of a prompt's pages that also travels for layers with a window.

        num_granted: pages that decode reserved for those of the prompt from first_page on. Returns
        None if no prompt of num_tokens can have so many, or none that is to be sent.
        """
        num_pages = pages_for(num_tokens, self.page_size)
        behind = num_granted - (num_pages - first_page)
        most = num_pages if self.groups > 1 else 0
        starts = first_page == 0 if self.groups > 1 else first_page < num_pages
        return num_pages - behind if starts and 0 <= behind <= most else None

    def runs_of(
        self, piece: Piece[Prompt], pages: range, first_windowed: int, first_page: int = 0
    ) -> list[Run]:
        """These pages of the piece's prompt, in runs that fit a compiled gather."""
        prompt = piece.prompt
        behind = [self.num_pages + prompt.pages[i] for i in pages if i >= first_windowed]
        number = pages_for(prompt.num_tokens, self.page_size) + max(pages.start - first_windowed, 0)
        # Windowed pages first: once the last of the others has left, the whole chunk has.
        runs = self._cut(prompt.room, number, behind)
        page_ids = [prompt.pages[i] for i in pages]
        return runs + self._cut(prompt.room, pages.start - first_page, page_ids)

    def _cut(self, room: int, number: int, page_ids: Sequence[int]) -> list[Run]:
        cuts = range(0, len(page_ids), self.most)
        return [Run(room, number + at, page_ids[at : at + self.most]) for at in cuts]


def pages_to_ship(piece: Piece[Prompt], page_size: int, already: int) -> range:
    """Indices, within the prompt, of pages that are complete after this piece and not shipped."""
    if piece.is_last:
        end = pages_for(piece.end, page_size)
    else:
        end = piece.end // page_size
    return range(already, max(end, already))
