"""Collects the results of one step and packs them into one StepBatch for each API process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from model.pieces import ChunkPrompt
from model.sampling import SampleOut
from transfer import wire
from transfer.prompt_logprobs import CollectedLogprobs


@dataclass(slots=True)
class Rows:
    """Tokens of one step, one row each. Arrays have n rows; top_* have m rows."""

    rooms: np.ndarray  # i64[n]
    token_ids: np.ndarray  # i32[n]
    token_idx: np.ndarray  # i32[n]
    finish: np.ndarray  # u8[n]
    logprobs: np.ndarray | None = None  # f32[n]
    top_rows: np.ndarray | None = None  # i32[m], rows of this batch
    top_ids: np.ndarray | None = None  # i32[m, 20]
    top_logprobs: np.ndarray | None = None  # f32[m, 20]

    def add_logprobs(
        self,
        at: np.ndarray,
        wanted: np.ndarray,
        logprobs: np.ndarray,
        tops: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        """Add the logprobs with which the tokens were drawn.

        at: i32[n], the tokens' rows in the draw. wanted: i32[n], num_top_logprobs of each.
        logprobs, tops: of the draw, on the host; tops may be None if nobody wants any.
        """
        self.logprobs = logprobs[at]
        if tops is not None:
            self.top_rows = np.flatnonzero(wanted > 0).astype(np.int32)
            self.top_ids, self.top_logprobs = (top[at][self.top_rows] for top in tops)


class ToldPrompt(ChunkPrompt, Protocol):
    """What the worker that computed a prompt tells of it."""

    @property
    def room(self) -> int: ...

    @property
    def num_cached(self) -> int:
        """Tokens found in the prefix cache."""
        ...


def prefilled(prompt: ToldPrompt, logprobs: CollectedLogprobs | None) -> wire.RoomEvent:
    """The event that comes with a prompt's first token. logprobs: None when nobody asked."""
    return wire.RoomEvent(
        prompt.room,
        "prefilled",
        cached_tokens=prompt.num_cached,
        prompt_logprobs=None if logprobs is None else logprobs.told(prompt.token_ids),
    )


class FirstRow(NamedTuple):
    """An attempt's first token, drawn by the worker that computed its prompt."""

    row: int  # of the draw
    submit: wire.Submit
    finish: int


def first_rows(firsts: Sequence[FirstRow], out: SampleOut) -> Rows:
    """The rows of first tokens. out: of the draw, on the host."""
    at = np.array([first.row for first in firsts], np.int32)
    submits = [first.submit for first in firsts]
    wants = np.array([submit.sampling.num_top_logprobs for submit in submits], np.int32)
    packed = Rows(
        rooms=np.array([submit.room for submit in submits], np.int64),
        token_ids=out.ids[at],
        token_idx=np.array([submit.num_generated for submit in submits], np.int32),
        finish=np.array([first.finish for first in firsts], np.uint8),
    )
    if (wants >= 0).any():
        tops = (out.top_ids, out.top_logprobs) if (wants > 0).any() else None
        packed.add_logprobs(at, wants, out.logprobs, tops)
    return packed


@dataclass(slots=True)
class _Pending:
    rows: Rows | None = None
    events: list[wire.RoomEvent] = field(default_factory=list)
    legs: list[wire.LegRecord] = field(default_factory=list)


class StepEmitter:
    """Rows, events and ended legs since the last `take`, by API process. Used by one thread."""

    def __init__(self, worker_id: str, epoch: int) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._step = 0
        self._pending: dict[str, _Pending] = {}

    def rows(self, api_id: str, rows: Rows) -> None:
        """The step's rows for this API process; at most once between two takes."""
        pending = self._pending.setdefault(api_id, _Pending())
        assert pending.rows is None, "one set of rows a step"
        pending.rows = rows

    def event(self, api_id: str, event: wire.RoomEvent) -> None:
        self._pending.setdefault(api_id, _Pending()).events.append(event)

    def leg(self, api_id: str, leg: wire.LegRecord) -> None:
        """Add the record of a leg that is over."""
        self._pending.setdefault(api_id, _Pending()).legs.append(leg)

    def take(self, now_s: float) -> dict[str, wire.StepBatch]:
        """Everything collected, packed; the step number grows by one when there is anything."""
        if not self._pending:
            return {}
        self._step += 1
        batches = {api_id: self._pack(pending, now_s) for api_id, pending in self._pending.items()}
        self._pending = {}
        return batches

    def _pack(self, pending: _Pending, now_s: float) -> wire.StepBatch:
        rows = pending.rows
        head = (self._worker_id, self._epoch, self._step, now_s)
        if rows is None:
            return wire.StepBatch(*head, events=tuple(pending.events), legs=tuple(pending.legs))
        return wire.StepBatch(
            *head,
            rooms=wire.pack_i64(rows.rooms),
            token_ids=wire.pack_i32(rows.token_ids),
            token_idx=wire.pack_i32(rows.token_idx),
            finish=wire.pack_u8(rows.finish),
            logprobs=b"" if rows.logprobs is None else wire.pack_f32(rows.logprobs),
            top_rows=b"" if rows.top_rows is None else wire.pack_i32(rows.top_rows),
            top_ids=b"" if rows.top_ids is None else wire.pack_i32(rows.top_ids),
            top_logprobs=b"" if rows.top_logprobs is None else wire.pack_f32(rows.top_logprobs),
            events=tuple(pending.events),
            legs=tuple(pending.legs),
        )
