"""Which slots take part in the next step, and what a finished step means for each.

Pure. The host runs one step behind the device: when step n+1 is planned, the tokens of step n
are not known yet. A slot that step n ends by length is known to end, so step n+1 leaves it out; one
that step n ends by a stop id takes part in step n+1 for nothing, and that token is dropped.

A step that tries drafts (decode/drafts.py) gives a slot one token or more, and how many is not
known either: the slot gets pages for all that may come, and a slot that drafts have ended by length
takes part once more for nothing.

One step covers all data-parallel ranks. Slots are counted over all ranks, and pages within their
slot's rank.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from decode.admission import Admission, Seat
from transfer.stops import finish_of_rows
from transfer.wire import MAX_STOP_IDS, RUNNING, SamplingParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Arrays have one row per slot that takes part.

    slots: i64[n]. new_pages: i32[n], a page that this step may be the first to write to, else -1.
    places: i32[n], where it is in the slot's page table. new_in_ring: i32[n], the page that it adds
    to the slot's ring, else -1. width: tokens that each may draw. num_pages: of the longest page
    table.
    """

    slots: np.ndarray
    new_pages: np.ndarray
    places: np.ndarray
    new_in_ring: np.ndarray
    rooms: np.ndarray
    width: int
    num_pages: int

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What goes to the device."""
        return self.slots, self.new_pages, self.places, self.new_in_ring


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of one step that count: n rows, in the order of the plan.

    The first tokens of all slots come first, then their second tokens, and so on. rows: i64[n],
    which rows of the plan they are; columns: i64[n], which of the row's tokens.
    """

    rows: np.ndarray
    columns: np.ndarray
    rooms: np.ndarray
    token_ids: np.ndarray
    token_idx: np.ndarray
    finish: np.ndarray  # u8[n]


class OutOfPages(Exception):
    """A slot of this rank could not grow: finish what is in flight and plan again, or preempt."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has no free page")
        self.rank = rank


class DecodeScheduler:
    """Owner of the batch. Per-slot facts live in arrays, so a step costs no object per token."""

    def __init__(self, admission: Admission, drafts: int = 0) -> None:
        """drafts: of each slot, in a step that tries drafts."""
        assert drafts < admission.page_size, "a step enters one page for each slot"
        slots = admission.num_slots
        self._admission = admission
        self._page_size = admission.page_size
        self._most_width = 1 + drafts
        self._running: dict[int, Seat] = {}  # by slot
        self._room = np.full(slots, -1, np.int64)
        self._num_known = np.zeros(slots, np.int32)  # tokens that were read, the prompt included
        self._in_flight = np.zeros(slots, np.int32)  # steps
        self._ahead = np.zeros(slots, np.int32)  # tokens that steps in flight may bring
        self._last_num = np.zeros(slots, np.int32)  # tokens at which the request ends
        self._num_entered = np.zeros(slots, np.int32)  # pages in its table
        self._prompt_len = np.zeros(slots, np.int32)
        self._max_new = np.zeros(slots, np.int32)
        self._stop_ids = np.full((slots, MAX_STOP_IDS), -1, np.int32)
        self._top = np.full(slots, -1, np.int32)
        self._num_steps = np.zeros(slots, np.int32)  # dispatched
        self._api = np.zeros(slots, np.int64)  # the number of its API process
        self._apis: dict[str, int] = {}  # numbers by id, of all API processes that have a slot
        self._next_api = itertools.count()

    def start(
        self, seat: Seat, api_id: str, params: SamplingParams, num_prompt_tokens: int
    ) -> None:
        """A seat joins the batch: all its pages and its first token are there."""
        slot = seat.slot
        self._api[slot] = self._number_of(api_id)
        self._running[slot] = seat
        self._room[slot] = seat.room
        self._num_known[slot] = seat.num_tokens + 1
        self._in_flight[slot] = 0
        self._ahead[slot] = 0
        self._last_num[slot] = num_prompt_tokens + params.max_new_tokens
        self._num_entered[slot] = len(seat.pages)
        self._prompt_len[slot] = num_prompt_tokens
        self._max_new[slot] = params.max_new_tokens
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        self._top[slot] = params.num_top_logprobs
        self._num_steps[slot] = 0

    def stop(self, slot: int) -> None:
        """The slot leaves the batch; what is in flight for it will be dropped."""
        if self._running.pop(slot, None) is not None:
            self._room[slot] = -1

    def unfinished(self) -> np.ndarray:
        """Slots that may have a token left to draw: i64[n].

        numpy looks up by i64 as it is; i32 it would convert at each of the look-ups of a step.
        """
        slots = np.fromiter(self._running, np.int64, len(self._running))
        left: np.ndarray = self._last_num[slots] - self._num_known[slots] - self._in_flight[slots]
        return slots[left > 0]

    def plan(self, tries: bool = False) -> StepPlan | None:
        """The next step, or None when no slot has a token left to draw. tries: with drafts.

        Raises OutOfPages before anything was changed for the slot that could not grow; slots
        that grew keep their page and will not ask again.
        """
        slots, width = self.unfinished(), self._most_width if tries else 1
        if not len(slots):
            return None
        # Positions before this one may be written: those of all tokens but the last.
        ends = self._num_known[slots] + self._ahead[slots] + width - 1
        ends = np.minimum(ends, self._last_num[slots] - 1)
        entered = self._num_entered[slots]
        lacking = np.flatnonzero(ends > entered * self._page_size)
        new_pages, new_in_ring = np.full((2, len(slots)), -1, np.int32)
        for row in lacking.tolist():
            new_pages[row], new_in_ring[row] = self._pages_at(int(slots[row]), int(entered[row]))
        self._num_entered[slots[lacking]] += 1
        self._in_flight[slots] += 1
        self._ahead[slots] += width
        self._num_steps[slots] += 1
        num_pages = int(self._num_entered[slots].max())
        rooms = self._room[slots]
        return StepPlan(slots, new_pages, entered, new_in_ring, rooms, width, num_pages)

    def finish(self, plan: StepPlan, token_ids: np.ndarray) -> StepResult:
        """Judge a step's tokens. Rows whose slot has changed hands since are dropped.

        token_ids: i32[n, W], a slot's tokens in order; ids below zero are no tokens. Slots that
        ended are still in the batch: the caller stops them and releases their seats.
        """
        running = np.flatnonzero(self._room[plan.slots] == plan.rooms)
        slots, ids = plan.slots[running], token_ids[running]
        idx = (self._num_known[slots] - self._prompt_len[slots])[:, None]
        idx = idx + np.arange(ids.shape[1], dtype=np.int32)
        finish = finish_of_rows(ids, idx, self._stop_ids[slots], self._max_new[slots])
        over = np.cumsum(finish != RUNNING, axis=1) - (finish != RUNNING) > 0  # before this token
        counts = (ids >= 0) & ~over
        self._num_known[slots] += counts.sum(axis=1, dtype=np.int32)
        self._in_flight[slots] -= 1
        self._ahead[slots] -= plan.width
        columns, rows = np.nonzero(counts.T)
        at = rows, columns
        rows = running[rows]
        return StepResult(rows, columns, plan.rooms[rows], ids[at], idx[at], finish[at])

    def running(self, slot: int) -> Seat | None:
        """The seat of a slot that is in the batch."""
        return self._running.get(slot)

    def num_steps(self, slot: int) -> int:
        """Steps dispatched since the slot's request started."""
        return int(self._num_steps[slot])

    def by_api(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """For each API process, where in `slots`, i64[n], those of its requests are: i64[m]."""
        numbers = self._api[slots]
        places = {api_id: np.flatnonzero(numbers == of) for api_id, of in self._apis.items()}
        return {api_id: at for api_id, at in places.items() if len(at)}

    def top_wanted(self, slots: np.ndarray) -> np.ndarray:
        """num_top_logprobs of these slots: i32[n]."""
        wanted: np.ndarray = self._top[slots]
        return wanted

    def _pages_at(self, slot: int, place: int) -> tuple[int, int]:
        """The slot's page at a place, and its ring's page there, -1 once the ring has come round.

        Takes one more page from the pool if the slot has none there yet.
        """
        seat = self._running[slot]
        if place >= len(seat.pages) and self._admission.grow(seat) is None:
            raise OutOfPages(seat.rank)
        return seat.pages[place], seat.ring[place] if place < len(seat.ring) else -1

    def _number_of(self, api_id: str) -> int:
        """The number of an API process. A new one is rare, and those without a slot leave then."""
        number = self._apis.get(api_id)
        if number is None:
            live = {int(self._api[slot]) for slot in self._running}
            self._apis = {each: of for each, of in self._apis.items() if of in live}
            number = self._apis[api_id] = next(self._next_api)
        return number


def ended(result: StepResult) -> np.ndarray:
    """Rows of the result whose request is over: i32[m]."""
    return np.flatnonzero(result.finish != RUNNING)
