"""Which slots take part in the next step, and what a finished step means for each.

Pure. The host runs one step behind the device: when step n+1 is planned, the tokens of step n
are not known yet. A slot that step n ends by length is known to end and left out; one that it
ends by a stop id takes part in step n+1 for nothing, and that token is dropped.

A step is of all data-parallel ranks at once; slots are counted over all of them, and a page is one
of its slot's rank.
"""

from dataclasses import dataclass

import numpy as np

from decode.admission import Admission, Seat
from transfer.stops import finish_of_rows
from transfer.wire import MAX_STOP_IDS, RUNNING, SamplingParams


@dataclass(slots=True)
class Running:
    """A seat that produces tokens."""

    seat: Seat
    api_id: str
    num_tokens: int  # tokens known or in flight, the prompt included: grows when dispatched
    last_num_tokens: int  # num_tokens at which its last token is in flight


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Arrays have one row per slot that takes part.

    slots: i32[n]. new_pages: i32[n], the page that holds this step's position where a fresh one
    begins, else -1. token_idx: i32[n], index of the token that this step draws.
    """

    slots: np.ndarray
    new_pages: np.ndarray
    rooms: np.ndarray
    token_idx: np.ndarray


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of one step that count: n rows, in the order of the plan.

    rows: i32[n], which rows of the plan they are.
    """

    rows: np.ndarray
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

    def __init__(self, admission: Admission, page_size: int) -> None:
        slots = admission.num_slots
        self._admission = admission
        self._page_size = page_size
        self._running: dict[int, Running] = {}  # by slot
        self._room = np.full(slots, -1, np.int64)
        self._prompt_len = np.zeros(slots, np.int32)
        self._max_new = np.zeros(slots, np.int32)
        self._stop_ids = np.full((slots, MAX_STOP_IDS), -1, np.int32)
        self._top = np.full(slots, -1, np.int32)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(
        self, seat: Seat, api_id: str, params: SamplingParams, num_prompt_tokens: int
    ) -> None:
        """A seat's pages are all there, and its first token: it joins the batch."""
        slot = seat.slot
        self._running[slot] = Running(
            seat=seat,
            api_id=api_id,
            num_tokens=seat.num_tokens + 1,
            last_num_tokens=num_prompt_tokens + params.max_new_tokens,
        )
        self._room[slot] = seat.room
        self._prompt_len[slot] = num_prompt_tokens
        self._max_new[slot] = params.max_new_tokens
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        self._top[slot] = params.num_top_logprobs

    def stop(self, slot: int) -> None:
        """The slot leaves the batch; what is in flight for it will be dropped."""
        if self._running.pop(slot, None) is not None:
            self._room[slot] = -1

    def plan(self) -> StepPlan | None:
        """The next step, or None when no slot has a token left to draw.

        Raises OutOfPages before anything was changed for the slot that could not grow; slots
        that grew keep their page and will not ask again.
        """
        rows: list[tuple[int, int]] = []
        for slot, running in self._running.items():
            if running.num_tokens >= running.last_num_tokens:
                continue
            rows.append((slot, self._page_for(running)))
        if not rows:
            return None
        slots = np.array([slot for slot, _ in rows], np.int32)
        lengths = np.array([self._running[slot].num_tokens for slot, _ in rows], np.int32)
        for slot, _ in rows:
            self._running[slot].num_tokens += 1
        return StepPlan(
            slots=slots,
            new_pages=np.array([page for _, page in rows], np.int32),
            rooms=self._room[slots],
            token_idx=lengths - self._prompt_len[slots],
        )

    def finish(self, plan: StepPlan, token_ids: np.ndarray) -> StepResult:
        """Judge a step's tokens. Rows whose slot has changed hands since are dropped.

        token_ids: i32[at least n]. Slots that ended are still in the batch: the caller stops
        them and releases their seats.
        """
        rows = np.flatnonzero(self._room[plan.slots] == plan.rooms).astype(np.int32)
        slots, ids, idx = plan.slots[rows], token_ids[rows], plan.token_idx[rows]
        finish = finish_of_rows(ids, idx, self._stop_ids[slots], self._max_new[slots])
        return StepResult(rows, plan.rooms[rows], ids, idx, finish)

    def running(self, slot: int) -> Running | None:
        return self._running.get(slot)

    def top_wanted(self, slots: np.ndarray) -> np.ndarray:
        """num_top_logprobs of these slots: i32[n]."""
        wanted: np.ndarray = self._top[slots]
        return wanted

    def _page_for(self, running: Running) -> int:
        """The page to enter in the table for the position that this step writes, or -1."""
        position = running.num_tokens - 1
        page_idx, offset = divmod(position, self._page_size)
        seat = running.seat
        if page_idx >= len(seat.pages) and self._admission.grow(seat) is None:
            raise OutOfPages(seat.rank)
        # Entered in the table by the step that first writes to it.
        return seat.pages[page_idx] if offset == 0 else -1


def ended(result: StepResult) -> np.ndarray:
    """Rows of the result whose request is over: i32[m]."""
    return np.flatnonzero(result.finish != RUNNING)
