"""Tokens of a request's choices -> server-sent events, spliced from bytes that were made once.

A generation's sink is called inside the wake-up of a step. It detokenizes, and once a piece is due
puts its text between the two unchanging halves of the choice's event and writes that to the
request's `EventStream`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import orjson

from serving.choice import INLINE_LOGPROBS, Choice, Piece, num_prompt_logprobs
from serving.connection import BodyWriter
from serving.detokenizer import IncrementalDetokenizer
from serving.errors import ApiError, from_request_error
from serving.event_stream import EventStream
from serving.generation import FinishReason, Generation, Tokens
from serving.interval import Interval
from serving.json_bytes import dumps
from transfer import wire
from transfer.errors import RequestError


class Numbers(NamedTuple):
    """Of events that have numbers. next: the one that comes next. written(count, text): so many
    events were written elsewhere, with this text in them, inside of a JSON string.
    """

    next: int
    written: Callable[[int, bytes], None]


class Frame(NamedTuple):
    """What stands before and after the text, as a JSON string, in the event of a piece.

    after: with %d for the event's number, where it has one.
    """

    before: bytes
    after: bytes
    numbers: Numbers | None = None


class Events(Protocol):
    """How an API spells the events of one answer, as bytes that are whole events."""

    def opening(self, choice: Choice) -> bytes:
        """What goes before the first piece of a choice."""
        ...

    def frame(self, choice: Choice) -> Frame | None:
        """Of the next piece; None when pieces of this choice differ in more than their text.

        One without numbers holds for all pieces, and is there from the beginning.
        """
        ...

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """The event of a piece."""
        ...

    def finish(self, choice: Choice, rest: Piece) -> bytes:
        """The last events of a choice. rest: not shown yet, may be empty."""
        ...

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """What goes after all choices."""
        ...

    def failed(self, choice: Choice, error: ApiError) -> bytes:
        """The last events where the answer cannot go on, for what became of this choice."""
        ...


@dataclass(slots=True)
class Loan:
    """What it takes to write a stream's events in its place.

    writer: of its connection. frame: of its next events. held: tokens, the latest ones, that were
    not detokenized yet. waiting: tokens since the last event.
    """

    stream: EventStream
    writer: BodyWriter
    frame: Frame
    detokenizer: IncrementalDetokenizer
    interval: Interval
    held: int
    waiting: int


class StreamedAnswer:
    """All choices of one request on their way into one EventStream."""

    def __init__(
        self,
        choices: Sequence[Choice],
        stream: EventStream,
        events: Events,
        interval: Interval,
        abort: Callable[[Generation, FinishReason], None],
        is_cumulative: bool = False,
    ) -> None:
        """abort: the dispatcher's. is_cumulative: an event repeats all before it of its choice."""
        self.choices = choices
        self.stream = stream
        self.events = events
        self.interval = interval
        self.abort = abort
        self.is_cumulative = is_cumulative
        self.sinks = [StreamedChoice(choice, self) for choice in choices]
        self._num_running = len(choices)

    @property
    def closed(self) -> asyncio.Future[None]:
        """Done when the last byte left, or nobody reads any more."""
        return self.stream.closed

    def close(self) -> None:
        self.sinks = []
        self.stream.close()

    def end_one(self, data: bytes, repeats: int | None) -> None:
        """A choice ended with these events; the last one closes the answer.

        repeats: as of EventStream.write.
        """
        data = self.last_of_one(data)
        self.stream.write(data, last=not self._num_running, repeats=repeats)

    def last_of_one(self, data: bytes) -> bytes:
        """The same events, and after those of the last choice what closes the answer."""
        self._num_running -= 1
        return data if self._num_running else data + self.events.closing(self.choices)


class StreamedChoice:
    """The sink of one choice. Its first piece leaves at once, later ones at full intervals."""

    __slots__ = (
        "_answer",
        "_begun",
        "_choice",
        "_deferred",
        "_frame",
        "_held_ids",
        "_interval",
        "_opened",
        "_opener",
        "_over",
        "_repeats",
        "_spelled",
        "_stream",
        "_text",
        "_waiting",
        "generation",
    )

    def __init__(self, choice: Choice, answer: StreamedAnswer) -> None:
        self.generation: Generation | None = None  # set by who submits
        self._choice = choice
        self._answer = answer
        self._stream = answer.stream
        self._interval = answer.interval
        # Itself, if its events repeat those before them.
        self._repeats = choice.ask.index if answer.is_cumulative else None
        self._frame = answer.events.frame(choice)
        self._opened = False  # what comes before the first piece left
        self._opener: asyncio.Task[None] | None = None
        self._spelled: bytes | None = None  # by the opener: the opening
        self._deferred: list[Callable[[], None]] | None = None  # while it spells
        self._begun = False  # the first piece left
        # Not shown yet: tokens that the choice did not take, or text if each must be looked at.
        self._held_ids: list[int] = []
        self._text = ""
        self._waiting = 0  # tokens since the last piece
        self._over = False  # its last events are with somebody else

    def on_prefilled(self, cached_tokens: int, prompt_logprobs: wire.PromptLogprobs | None) -> None:
        self._choice.prefilled(cached_tokens, prompt_logprobs)
        if num_prompt_logprobs(self._choice.ask) > INLINE_LOGPROBS:
            self._deferred = []
            self._opener = asyncio.create_task(self._spell_opening())

    async def _spell_opening(self) -> None:
        """Beside the streams of others; what is told meanwhile waits."""

        def spell() -> bytes:
            is_gone = self._stream.closed.done()  # in the queue of threads, maybe long
            return b"" if is_gone else self._answer.events.opening(self._choice)

        try:
            self._spelled = await asyncio.to_thread(spell)
            deferred, self._deferred = self._deferred or [], None
            for tell in deferred:
                if self._choice.matched is None:  # else it has ended, and is told no more
                    tell()
        except Exception as fault:  # else nothing would close it
            self._stream.broke(fault)

    def on_tokens(self, tokens: Tokens) -> None:
        if self._deferred is not None:
            self._deferred.append(partial(self.on_tokens, tokens))
            return
        waiting = self._waiting + len(tokens.ids)
        is_due = waiting >= self._interval.tokens or not self._begun
        if self._choice.text_only:
            if not is_due:
                self._held_ids += tokens.ids
                self._waiting = waiting
                return
            if self._held_ids:
                tokens = Tokens(self._held_ids + tokens.ids)
                self._held_ids = []
            text = self._choice.take(tokens)
        else:
            text = self._text + self._choice.take(tokens)
            if self._choice.matched is not None:
                self._end_at_match(text)
                return
            if not is_due:
                self._text = text
                self._waiting = waiting
                return
            self._text = ""
        self._waiting = waiting
        self._show(text)

    @property
    def lends(self) -> bool:
        """Whether text is all that it shows, and its answer has no other choice."""
        is_plain = self._choice.text_only and len(self._answer.choices) == 1
        return is_plain and self._next_frame() is not None

    def _next_frame(self) -> Frame | None:
        return self._frame or self._answer.events.frame(self._choice)

    def lend(self) -> Loan | None:
        """What it takes to write its events; None while it has something to write itself.

        Nobody tells it tokens until `take_back`. Asked only where it lends.
        """
        if not (self._begun and self._stream.lends):
            return None
        frame = self._next_frame()
        assert frame is not None, "it lends"
        assert self._stream.body_writer is not None, "likewise"
        detokenizer = self._choice.detokenizer
        held = len(self._held_ids)
        self._held_ids = []
        return Loan(
            self._stream,
            self._stream.body_writer,
            frame,
            detokenizer,
            self._interval,
            held,
            self._waiting,
        )

    def take_back(self, token_ids: Sequence[int], held: int, waiting: int) -> None:
        """token_ids: all there are; of these the last `held` are not detokenized."""
        shown = len(token_ids) - held
        self._held_ids = list(token_ids[shown:])
        self._waiting = waiting
        self._choice.took(shown, token_ids[shown - 1])

    def _show(self, text: str) -> None:
        # Before the piece: offsets of tokens count from what was shown first.
        opening = b"" if self._opened else self._opening()
        if self._frame is None:
            data = self._piece(text)
        elif text:
            data = self._frame.before + dumps(text) + self._frame.after
        else:
            data = b""
        if data:
            self._waiting = 0  # or they are still unsent: text that comes next is overdue
        if not self._begun:
            self._begun = bool(data)
            data = opening + data
        if data:
            self._stream.write(data, repeats=self._repeats)

    def _end_at_match(self, text: str) -> None:
        """A stop string was found, which the workers know nothing of."""
        self._text = text
        assert self.generation is not None, "whoever submits says so to the sink"
        self._answer.abort(self.generation, "stop")
        self.on_end("stop")

    def last_events(self, text: bytes, finish_reason: FinishReason) -> bytes:
        """All that is still to be sent, by whoever had borrowed what it takes; on_end adds nothing.

        text: of the last tokens, inside of a JSON string.
        """
        self._over = True
        if not text:
            piece = b""
        elif self._frame is not None:
            piece = b'%b"%b"%b' % (self._frame.before, text, self._frame.after)
        else:
            piece = self._piece(orjson.loads(b'"%b"' % text))
        return piece + self._answer.last_of_one(self._finish(finish_reason))

    def on_end(self, finish_reason: FinishReason) -> None:
        if self._deferred is not None:
            self._deferred.append(partial(self.on_end, finish_reason))
        elif not self._over:
            try:
                self._answer.end_one(self._finish(finish_reason), self._repeats)
            except Exception as fault:  # else nothing would close it
                self._stream.broke(fault)

    def _finish(self, finish_reason: FinishReason) -> bytes:
        """The last events of the choice."""
        text = self._unshown()
        rest = self._choice.finish(finish_reason)
        piece = self._choice.drain()
        piece.text = text + rest
        opening = b"" if self._opened else self._opening()
        return opening + self._answer.events.finish(self._choice, piece)

    def on_error(self, error: RequestError) -> None:
        self._deferred = None  # as a status, at once, rather than after the opening
        answered = from_request_error(error)
        try:
            if self._begun and self._waiting:  # it waited for a full interval, which will not be
                self._show(self._unshown())
            event = self._answer.events.failed(self._choice, answered)
        except Exception as fault:  # else nothing would close it
            self._stream.broke(fault)
        else:
            self._stream.fail(answered, event)

    def _unshown(self) -> str:
        """Text of the tokens that wait."""
        text, self._text = self._text, ""
        if self._held_ids:
            text += self._choice.take(Tokens(self._held_ids))
            self._held_ids = []
        return text

    def _opening(self) -> bytes:
        self._opened = True
        if self._spelled is not None:
            return self._spelled
        return self._answer.events.opening(self._choice)

    def _piece(self, text: str) -> bytes:
        """The event of what waits, if there is anything to show."""
        piece = self._choice.drain()
        piece.text = text
        if not (text or piece.ids or piece.entries):
            return b""
        return self._answer.events.piece(self._choice, piece)
