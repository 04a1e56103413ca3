"""Hands a step's tokens to all settled text-only streams at once, in array operations.

A stream's own objects (generation, choice, sink, event stream) lie on some two dozen cache lines,
which other streams have evicted by the time its next token comes. Once a stream has settled, it
lends what is needed to write its events. From then on a token touches little else: order, pace and
gaps are arrays over all streams. The last token is written here too, with the events that close the
answer. A stream gets everything back at once when a row is anything but its next tokens, when its
client is slow, and whenever something ends or moves it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from serving.body_writer import chunk_head
from serving.event_stream import EventStream
from serving.generation import Generation
from serving.interval import Interval
from serving.router import Key
from serving.step_rows import Runs
from serving.stream import Loan, StreamedChoice
from transfer import wire

LEAST_STREAMS = 16  # with fewer, the fixed cost of the arrays is more than they save
RECENT = 64  # tokens of a slot that wait to be appended to its generation's token_ids
_FIRST_CAPACITY = 256
_FEW = 8  # tokens of a run; longer runs are not kept in arrays, which would be large
_TOGETHER = 256  # streams whose tokens are Python objects at a time: these take 8 times the memory
_UNKNOWN: list[bytes | None] = []
_CRLF = b"\r\n"


@dataclass(slots=True)
class _Seating:
    """The slots of a step's rooms. Arrays have one entry a run."""

    rooms: np.ndarray  # i64
    slots: np.ndarray  # i64; where the room has no slot, that of some other room
    seated: np.ndarray  # bool: the room has a slot
    once: np.ndarray  # bool: the room has no other run in the step


@dataclass(slots=True)
class Told:
    """What became of the runs of a step.

    left: the indices of the runs that were not handled here, i64[n]; their streams may have to be
    given back first. num_tokens: tokens of the other runs. gaps_s: for each of the other runs the
    seconds since the stream's previous token, f64[m]. ended: the generations that a run handled
    here completed; their last events are already with the server, but they are not accounted for
    yet.
    """

    left: np.ndarray
    num_tokens: int
    gaps_s: np.ndarray
    ended: list[Generation]


class PlainStreams:
    """Borrows settled streams and hands them their tokens."""

    def __init__(self, interval: Interval) -> None:
        """interval: for streams that did not ask for one of their own."""
        self._interval = interval
        self._invited: list[Generation] = []
        self._just_begun: list[Generation] = []
        self._workers = defaultdict[Key, int](count().__next__)  # each has another number
        self._free: list[int] = []
        self._seating: _Seating | None = None  # of the last step; None once a stream came or left
        # One entry a slot.
        self._room = np.zeros(0, np.int64)  # 0: the slot is free
        self._worker = np.zeros(0, np.int32)
        self._next_idx = np.zeros(0, np.int32)
        self._last_s = np.zeros(0, np.float64)
        self._begun = np.zeros(0, bool)  # decode's first token has come
        self._own_interval = np.zeros(0, np.int32)  # 0: the shared one
        self._waiting = np.zeros(0, np.int64)  # tokens since the last event
        self._held = np.zeros(0, np.int64)  # how many of these are not detokenized yet
        self._num_writes = np.zeros(0, np.int64)
        self._recent = np.zeros((0, RECENT), np.int32)  # tokens that _token_ids does not have yet
        self._num_recent = np.zeros(0, np.int64)
        self._seats: list[tuple[Generation, Loan] | None] = []
        # What every token needs of its seat, in lists of their own.
        self._token_ids: list[Any] = []
        self._json: list[list[bytes | None]] = []  # empty: only the detokenizer knows the text
        self._before: list[bytes] = []
        self._after: list[bytes] = []  # empty where events have numbers
        self._said: list[list[bytes]] = []  # where events have numbers: the text of each event
        self._write_chunk: list[Callable[[bytes], None]] = []

    def invite(self, generation: Generation) -> None:
        """It has got tokens of its attempt. It may lend its stream once they are written."""
        sink = generation.sink
        if isinstance(sink, StreamedChoice) and sink.lends:
            self._invited.append(generation)

    def seat_invited(self, num_streams: int) -> None:
        """Seat the invited streams that have settled. num_streams: all live streams."""
        invited, self._invited = self._invited, []
        if num_streams < LEAST_STREAMS:
            return
        rows: list[tuple[int | float, ...]] = []
        for generation in invited:
            # A generation that ended meanwhile has no room; one that moved gets prefill's token
            # first.
            settled = generation.room and generation.computed and generation.in_order
            if settled and generation.lent_to is None:
                sink = generation.sink
                assert isinstance(sink, StreamedChoice), "only those are invited"
                if (loan := sink.lend()) is not None:
                    rows.append(self._seat(generation, loan))
        if rows:
            self._fill(rows)

    def begun(self) -> list[Generation]:
        """Generations that got decode's first token since the last call and did not move since."""
        begun, self._just_begun = self._just_begun, []
        for generation in begun:
            if generation.lent_to is self:
                self._fold(generation.slot)
        return [generation for generation in begun if generation.decoding]

    def give_back(self, generation: Generation) -> None:
        """Return what the stream lent; it handles its own tokens again."""
        self._give_back(np.array([generation.slot]))

    def _give_back(self, slots: np.ndarray) -> list[tuple[Generation, Loan]]:
        """Give several streams back, each listed once; what was in their seats."""
        recent = self._recent[slots].tobytes()
        ends = (4 * (RECENT * np.arange(len(slots)) + self._num_recent[slots])).tolist()
        columns = self._last_s, self._num_writes, self._held, self._waiting
        values = (column[slots].tolist() for column in columns)
        rows = zip(slots.tolist(), ends, *values, strict=True)
        given: list[tuple[Generation, Loan]] = []
        for nth, (slot, end, last_s, num_writes, held, waiting) in enumerate(rows):
            seat = self._seats[slot]
            assert seat is not None, f"nobody sits at {slot}"
            given.append(seat)
            generation, loan = seat
            generation.token_ids.frombytes(recent[4 * RECENT * nth : end])
            generation.lent_to = None
            generation.slot = -1
            generation.last_token_s = last_s
            loan.stream.num_writes += num_writes
            if loan.frame.numbers is not None:
                said = self._said[slot]
                loan.frame.numbers.written(len(said), b"".join(said))
            assert isinstance(generation.sink, StreamedChoice), "others lend nothing"
            generation.sink.take_back(generation.token_ids, held, waiting)
            loan.writer.take_back()
            self._vacate(slot)
        self._room[slots] = 0
        self._seating = None
        return given

    def keep(self, workers: Collection[Key]) -> None:
        """Forget all others: those incarnations are gone."""
        for worker in self._workers.keys() - workers:
            del self._workers[worker]

    def tell(self, worker: Key, runs: Runs, now_s: float) -> Told:
        """Handle the runs that are the next tokens of seated streams; now_s is monotonic."""
        known = self._workers.get(worker)
        if known is None:  # prefill, mostly
            return _none_of(runs)
        seating = self._seating_of(runs.rooms)
        slots = seating.slots
        if not seating.seated.any():
            return _none_of(runs)
        fit = seating.seated & (self._worker[slots] == known)
        fit &= seating.once & (self._next_idx[slots] == runs.first_idx)
        last = runs.finish != wire.RUNNING
        if last.any():
            # A stream's first token of decode must be noted, so it cannot be its last one here.
            fit &= ~last | self._begun[slots]
        told = np.flatnonzero(fit)
        gaps_s, ended = self._tell(runs, told, slots[told], now_s)
        return Told(np.flatnonzero(~fit), int(runs.counts[told].sum()), gaps_s, ended)

    def _tell(
        self, runs: Runs, told: np.ndarray, slots: np.ndarray, now_s: float
    ) -> tuple[np.ndarray, list[Generation]]:
        """Handle these runs, and return the gaps and the generations that ended."""
        counts = runs.counts[told]
        self._next_idx[slots] += counts
        gaps_s = now_s - self._last_s[slots]
        self._last_s[slots] = now_s
        waiting = self._waiting[slots] + counts
        held = self._held[slots] + counts
        own = self._own_interval[slots]
        due = waiting >= np.where(own > 0, own, self._interval.tokens)
        last = runs.finish[told] != wire.RUNNING
        due |= last
        self._waiting[slots] = np.where(due, 0, waiting)
        self._held[slots] = np.where(due, 0, held)
        self._keep(runs, told, slots)
        if not self._begun[slots].all():
            self._begin(slots)
        due &= ~last
        if due.any():
            self._show(runs, told[due], slots[due], held[due], waiting[due])
        if last.any():
            return gaps_s, self._end(runs, told[last], slots[last], held[last])
        return gaps_s, []

    def _show(
        self,
        runs: Runs,
        which: np.ndarray,
        slots: np.ndarray,
        held: np.ndarray,
        waiting: np.ndarray,
    ) -> None:
        """Send each stream an event with the text of its held tokens. which: indices of runs."""
        self._num_writes[slots] += 1
        texts = self._texts(runs, which, slots, held)
        silent = self._write(slots.tolist(), texts)
        if silent:  # their tokens still wait, so an event is due as soon as there is text
            slots = slots[silent]
            self._waiting[slots] = waiting[silent]
            self._num_writes[slots] -= 1

    def _end(
        self, runs: Runs, which: np.ndarray, slots: np.ndarray, held: np.ndarray
    ) -> list[Generation]:
        """Handle the last tokens of these streams, close their answers, and give them back.

        All last events are made first, then written in one burst, like those of the step's other
        streams. Only then is the server told that any of them ended.
        """
        texts = self._texts(runs, which, slots, held)
        alive = [place for place, slot in enumerate(slots.tolist()) if self._seats[slot]]
        finish = runs.finish[which[alive]].tolist()
        ended: list[Generation] = []
        last_events: list[tuple[EventStream, bytes]] = []
        seats = self._give_back(slots[alive])
        for (generation, loan), place, how in zip(seats, alive, finish, strict=True):
            generation.finish = how
            ended.append(generation)
            assert isinstance(generation.sink, StreamedChoice), "others lend nothing"
            try:
                data = generation.sink.last_events(texts[place], generation.finish_reason)
            except Exception as error:  # one stream's fault must not reach the others
                loan.stream.broke(error)
            else:
                last_events.append((loan.stream, data))
        for stream, data in last_events:
            stream.write_last(data)
        for stream, _ in last_events:
            stream.send()
        return ended

    def _begin(self, slots: np.ndarray) -> None:
        """Note the streams for which this is decode's first token."""
        slots = slots[~self._begun[slots]]
        self._begun[slots] = True
        self._just_begun += [seat[0] for slot in slots.tolist() if (seat := self._seats[slot])]

    def _keep(self, runs: Runs, told: np.ndarray, slots: np.ndarray) -> None:
        """Store the tokens in _recent, from where they are appended to token_ids later."""
        counts, starts = runs.counts[told], runs.starts[told]
        if counts.max(initial=0) > min(_FEW, RECENT):
            self._keep_many(runs.token_ids, slots, starts, starts + counts)
            return
        for slot in slots[self._num_recent[slots] + counts > RECENT].tolist():
            self._fold(slot)
        places = self._num_recent[slots]
        self._num_recent[slots] = places + counts
        if len(runs.token_ids) > len(runs):
            nth = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
            slots, places, starts = (np.repeat(each, counts) for each in (slots, places, starts))
            places, starts = places + nth, starts + nth
        self._recent[slots, places] = runs.token_ids[starts]

    def _keep_many(
        self, token_ids: np.ndarray, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> None:
        """Store the tokens of runs that are too long for _recent directly in token_ids."""
        ids = memoryview(np.ascontiguousarray(token_ids)).cast("B")
        bounds = (4 * starts).tolist(), (4 * ends).tolist()
        for slot, start, end in zip(slots.tolist(), *bounds, strict=True):
            self._fold(slot)
            self._token_ids[slot].frombytes(ids[start:end])

    def _fold(self, slot: int) -> None:
        """Append the slot's recent tokens to its generation's token_ids."""
        self._token_ids[slot].frombytes(self._recent[slot, : self._num_recent[slot]].tobytes())
        self._num_recent[slot] = 0

    def _unshown(
        self, runs: Runs, which: np.ndarray, slots: np.ndarray, held: np.ndarray
    ) -> list[list[int]]:
        """The tokens that each stream holds, the last of which are those of its run in `which`."""
        earlier = held - runs.counts[which]
        if not earlier.any():
            return runs.ids_of(which)
        most = int(held.max())
        places = self._num_recent[slots]
        if (held == most).all() and (places >= most).all():
            columns = (places - most)[:, None] + np.arange(most)
            return self._recent[slots[:, None], columns].tolist()
        ids = runs.ids_of(which)
        for place in np.flatnonzero(earlier).tolist():
            slot = int(slots[place])
            self._fold(slot)
            before = self._token_ids[slot][-int(held[place]) : -len(ids[place])]
            ids[place] = before.tolist() + ids[place]
        return ids

    def _texts(
        self, runs: Runs, which: np.ndarray, slots: np.ndarray, held: np.ndarray
    ) -> list[bytes]:
        """The text that each stream can show of its held tokens, as the inside of a JSON string."""
        texts: list[bytes] = []
        for start in range(0, len(slots), _TOGETHER):
            some = slice(start, start + _TOGETHER)
            ids = self._unshown(runs, which[some], slots[some], held[some])
            texts += self._texts_of(slots[some].tolist(), ids)
        return texts

    def _texts_of(self, slots: list[int], ids: list[list[int]]) -> list[bytes]:
        """The texts of these tokens, as `_texts`."""
        json = self._json
        texts: list[bytes] = []
        for slot, some in zip(slots, ids, strict=True):
            known: list[Any] = json[slot]
            try:
                if len(some) == 1:
                    text = known[some[0]]
                else:
                    text = b"".join([known[token_id] for token_id in some])
            except (IndexError, TypeError):  # past the vocabulary; part of a character, or unknown
                text = None
            texts.append(self._pushed(slot, some) if text is None else text)
        return texts

    def _pushed(self, slot: int, ids: list[int]) -> bytes:
        seat = self._seats[slot]
        assert seat is not None, "only seated streams are told"
        detokenizer = seat[1].detokenizer
        try:
            text = detokenizer.push_json(ids)
        except Exception as error:  # one stream's fault must not reach the others
            self._give_back_slot(slot).stream.broke(error)
            return b""
        self._json[slot] = detokenizer.whole_json or _UNKNOWN
        return text

    def _write(self, slots: list[int], texts: list[bytes]) -> list[int]:
        """Send each stream its event. Returns the places of those that have no text to show.

        All events are made before any is written: the process that reads them is more often still
        awake when the writes follow each other closely.
        """
        before, after, write = self._before, self._after, self._write_chunk
        silent: list[int] = []
        events: list[tuple[int, bytes]] = []
        for place, (slot, text) in enumerate(zip(slots, texts, strict=True)):
            if text:
                start, end = before[slot], after[slot] or self._numbered(slot, text)
                num_bytes = len(start) + len(text) + len(end) - len(_CRLF)
                events.append((slot, b"".join((chunk_head(num_bytes), start, text, end))))
            else:
                silent.append(place)
        for slot, chunk in events:
            try:
                write[slot](chunk)
            except Exception as error:  # one stream's fault must not reach the others
                self._give_back_slot(slot).stream.broke(error)
        return silent

    def _numbered(self, slot: int, text: bytes) -> bytes:
        """The bytes after the text of a numbered event. Takes the next number, notes the text."""
        seat, said = self._seats[slot], self._said[slot]
        assert seat is not None, "only seated streams are told"
        frame = seat[1].frame
        assert frame.numbers is not None, "else what stands there is known"
        number = frame.numbers.next + len(said)
        said.append(text)
        return b'"' + frame.after % number + _CRLF

    def hindered(self, slot: int) -> None:
        """Give the stream back: its client reads too slowly, or left."""
        self._give_back_slot(slot)

    def _seating_of(self, rooms: np.ndarray) -> "_Seating":
        """The slots of `rooms`, i64[n]. Mostly they are the rooms of the step before."""
        if self._seating is None or not np.array_equal(self._seating.rooms, rooms):
            self._seating = self._seating_now(rooms)
        return self._seating

    def _seating_now(self, rooms: np.ndarray) -> "_Seating":
        taken = np.flatnonzero(self._room)
        taken = taken[np.argsort(self._room[taken])]
        known = self._room[taken]
        once = np.ones(len(rooms), bool)
        if not len(known):
            return _Seating(rooms, np.zeros(len(rooms), np.int64), ~once, once)
        at = np.searchsorted(known, rooms)
        at[at == len(known)] = 0
        again = rooms[1:] == rooms[:-1]  # rooms are sorted whenever one comes twice
        once[1:] &= ~again
        once[:-1] &= ~again
        return _Seating(rooms, taken[at], known[at] == rooms, once)

    def _fill(self, rows: list[tuple[int | float, ...]]) -> None:
        """Put what `_seat` returned into the columns."""
        columns = zip(*rows, strict=True)
        slot, room, worker, next_idx, last_s, begun, own_interval, waiting, held = columns
        slots = np.array(slot)
        self._room[slots] = room
        self._worker[slots] = worker
        self._next_idx[slots] = next_idx
        self._last_s[slots] = last_s
        self._begun[slots] = begun
        self._own_interval[slots] = own_interval
        self._waiting[slots] = waiting
        self._held[slots] = held
        self._num_writes[slots] = self._num_recent[slots] = 0
        self._seating = None

    def _seat(self, generation: Generation, loan: Loan) -> tuple[int | float, ...]:
        """Take a free slot for it; returns its entries in the columns, the slot first."""
        key = generation.decode_key
        assert key is not None, "a room has a pair"
        if not self._free:
            self._grow()
        slot = self._free.pop()
        generation.lent_to, generation.slot = self, slot
        self._seats[slot] = generation, loan
        self._token_ids[slot] = generation.token_ids
        self._json[slot] = loan.detokenizer.whole_json or _UNKNOWN
        before, after, numbers = loan.frame
        self._before[slot] = before + b'"'
        self._after[slot] = _same(b'"' + after + _CRLF) if numbers is None else b""
        self._said[slot] = []
        self._write_chunk[slot] = loan.writer.write
        loan.writer.lend(self, slot)
        return (
            slot,
            generation.room,
            self._workers[key],
            len(generation.token_ids),
            generation.last_token_s,
            generation.decoding,
            0 if loan.interval is self._interval else loan.interval.tokens,
            loan.waiting,
            loan.held,
        )

    def _give_back_slot(self, slot: int) -> Loan:
        return self._give_back(np.array([slot]))[0][1]

    def _vacate(self, slot: int) -> None:
        self._seats[slot] = self._token_ids[slot] = None
        self._json[slot] = _UNKNOWN
        self._before[slot] = self._after[slot] = b""
        self._said[slot] = []
        self._write_chunk[slot] = _nobody
        self._free.append(slot)

    def _grow(self) -> None:
        """Double the slots."""
        old = len(self._room)
        new = max(_FIRST_CAPACITY, old)
        for name in (
            "_room", "_worker", "_next_idx", "_last_s", "_begun", "_own_interval", "_waiting",
            "_held", "_num_writes", "_recent", "_num_recent",
        ):  # fmt: skip
            column = getattr(self, name)
            more = np.zeros((new, *column.shape[1:]), column.dtype)
            setattr(self, name, np.concatenate((column, more)))
        self._seats += [None] * new
        self._token_ids += [None] * new
        self._json += [_UNKNOWN] * new
        self._before += [b""] * new
        self._after += [b""] * new
        self._said += [[] for _ in range(new)]
        self._write_chunk += [_nobody] * new
        self._free += range(old + new - 1, old - 1, -1)


def _none_of(runs: Runs) -> Told:
    return Told(np.arange(len(runs)), 0, np.zeros(0), [])


@lru_cache(maxsize=256)
def _same(data: bytes) -> bytes:
    """One object for equal bytes: what ends an event is the same for most streams."""
    return data


def _nobody(data: bytes) -> None:
    raise AssertionError(f"nobody sits here: {data!r}")
