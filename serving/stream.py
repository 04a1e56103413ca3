"""Turns the tokens of a request's choices into server-sent events, spliced from prepared bytes.

A generation's sink is called inside the wake-up of a step. It detokenizes, and when a piece is due,
puts its text between the two constant halves of the choice's event and writes that to the request's
`EventStream`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import orjson

from serving.body_writer import BodyWriter
from serving.choice import INLINE_LOGPROBS, Choice, Piece, num_prompt_logprobs
from serving.detokenizer import IncrementalDetokenizer
from serving.errors import ApiError, from_request_error
from serving.event_stream import EventStream
from serving.generation import FinishReason, Generation, Tokens
from serving.interval import Interval
from serving.json_bytes import dumps
from transfer import wire
from transfer.errors import RequestError


class Numbers(NamedTuple):
    """How events are numbered, where they are.

    next: the next event's number. written(count, text): to be called when `count` events were
    written elsewhere; text: their text together, as the inside of a JSON string.
    """

    next: int
    written: Callable[[int, bytes], None]


class Frame(NamedTuple):
    """What stands before and after the text, which is a JSON string, in the event of a piece.

    after: has a %d for the event's number if events have numbers.
    """

    before: bytes
    after: bytes
    numbers: Numbers | None = None


class Events(Protocol):
    """How an API spells the events of one answer, as bytes that are whole events."""

    def opening(self, choice: Choice) -> bytes:
        """The events before the first piece of a choice."""
        ...

    def frame(self, choice: Choice) -> Frame | None:
        """The frame of the next piece; None when pieces of this choice differ in more than text.

        A frame without numbers holds for all pieces, and exists from the beginning.
        """
        ...

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """The event of a piece."""
        ...

    def finish(self, choice: Choice, rest: Piece) -> bytes:
        """The last events of a choice. rest: what was not shown yet; may be empty."""
        ...

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """The events after all choices."""
        ...

    def failed(self, choice: Choice, error: ApiError) -> bytes:
        """The last events of an answer that cannot go on because this choice failed."""
        ...


class Spelling(Events, Protocol):
    """How an API spells an answer, whole or in events.

    is_cumulative: each event of a choice repeats all earlier ones, and no event opens a choice.
    """

    @property
    def is_cumulative(self) -> bool: ...

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The body of an answer that is not streamed."""
        ...


@dataclass(slots=True)
class Loan:
    """What a borrower needs to write a stream's events in its place.

    writer: of its connection. frame: of its next events. held: how many of the latest tokens are
    not detokenized yet. waiting: tokens since the last event.
    """

    stream: EventStream
    writer: BodyWriter
    frame: Frame
    detokenizer: IncrementalDetokenizer
    interval: Interval
    held: int
    waiting: int


@dataclass(eq=False, repr=False)
class StreamedAnswer:
    """All choices of one request on their way into one EventStream."""

    choices: Sequence[Choice]
    stream: EventStream
    events: Spelling
    interval: Interval
    abort: Callable[[Generation, FinishReason], None]  # the dispatcher's

    def __post_init__(self) -> None:
        self.sinks = [StreamedChoice(choice, self) for choice in self.choices]
        self._num_running = len(self.choices)

    @property
    def closed(self) -> asyncio.Future[None]:
        """Done when the last byte has left, or the client no longer reads."""
        return self.stream.closed

    def close(self) -> None:
        self.sinks = []
        self.stream.close()

    def end_one(self, data: bytes, repeats: int | None) -> None:
        """Write the last events of a choice; the last choice to end closes the answer.

        repeats: as in EventStream.write.
        """
        data = self.last_of_one(data)
        self.stream.write(data, last=not self._num_running, repeats=repeats)

    def last_of_one(self, data: bytes) -> bytes:
        """These last events of a choice, and after those of the last choice the closing ones."""
        self._num_running -= 1
        return data if self._num_running else data + self.events.closing(self.choices)


class StreamedChoice:
    """The sink of one choice. Its first piece is sent at once, later ones at full intervals."""

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
        self.generation: Generation | None = None  # set by the caller that submits it
        self._choice = choice
        self._answer = answer
        self._stream = answer.stream
        self._interval = answer.interval
        # The choice's index, if its events repeat those before them.
        self._repeats = choice.ask.index if answer.events.is_cumulative else None
        self._frame = answer.events.frame(choice)
        self._opened = False  # the events before the first piece were made
        self._opener: asyncio.Task[None] | None = None
        self._spelled: bytes | None = None  # the opening, once the opener has spelled it
        self._deferred: list[Callable[[], None]] | None = None  # calls to make once it is spelled
        self._begun = False  # the first piece was sent
        # Not shown yet: tokens that the choice has not taken, or text if it has to look at each.
        self._held_ids: list[int] = []
        self._text = ""
        self._waiting = 0  # tokens since the last piece
        self._over = False  # a borrower sends its last events

    def on_prefilled(self, cached_tokens: int, prompt_logprobs: wire.PromptLogprobs | None) -> None:
        self._choice.prefilled(cached_tokens, prompt_logprobs)
        if num_prompt_logprobs(self._choice.ask) > INLINE_LOGPROBS:
            self._deferred = []
            self._opener = asyncio.create_task(self._spell_opening())

    async def _spell_opening(self) -> None:
        """Spell a long opening in a thread, so that other streams go on; calls wait meanwhile."""

        def spell() -> bytes:
            is_gone = self._stream.closed.done()  # the wait for a thread may have been long
            return b"" if is_gone else self._answer.events.opening(self._choice)

        try:
            self._spelled = await asyncio.to_thread(spell)
            deferred, self._deferred = self._deferred or [], None
            for tell in deferred:
                if self._choice.matched is None:  # else it has ended and gets no more calls
                    tell()
        except Exception as fault:  # else nothing would close the stream
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
        """Whether it shows nothing but text, and its answer has no other choice."""
        is_plain = self._choice.text_only and len(self._answer.choices) == 1
        return is_plain and self._next_frame() is not None

    def _next_frame(self) -> Frame | None:
        return self._frame or self._answer.events.frame(self._choice)

    def lend(self) -> Loan | None:
        """Lend what is needed to write its events; None while it has something to write itself.

        It gets no tokens until `take_back`. Called only if `lends` is true.
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
        """Go on from here. token_ids: all so far; the last `held` of them are not detokenized."""
        shown = len(token_ids) - held
        self._held_ids = list(token_ids[shown:])
        self._waiting = waiting
        self._choice.took(shown, token_ids[shown - 1])

    def _show(self, text: str) -> None:
        # Made before the piece: offsets of tokens count from what is shown first.
        opening = b"" if self._opened else self._opening()
        if self._frame is None:
            data = self._piece(text)
        elif text:
            data = self._frame.before + dumps(text) + self._frame.after
        else:
            data = b""
        if data:
            self._waiting = 0  # without data the tokens still wait: the next text is overdue
        if not self._begun:
            self._begun = bool(data)
            data = opening + data
        if data:
            self._stream.write(data, repeats=self._repeats)

    def _end_at_match(self, text: str) -> None:
        """End the generation at a stop string, of which the workers know nothing."""
        self._text = text
        assert self.generation is not None, "whoever submits says so to the sink"
        self._answer.abort(self.generation, "stop")
        self.on_end("stop")

    def last_events(self, text: bytes, finish_reason: FinishReason) -> bytes:
        """All that is still to be sent; the borrower sends it, and on_end will add nothing.

        text: of the last tokens, as the inside of a JSON string.
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
            except Exception as fault:  # else nothing would close the stream
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
        self._deferred = None  # answer at once with a status, rather than after the opening
        answered = from_request_error(error)
        try:
            if self._begun and self._waiting:  # no full interval will come for these tokens
                self._show(self._unshown())
            event = self._answer.events.failed(self._choice, answered)
        except Exception as fault:  # else nothing would close the stream
            self._stream.broke(fault)
        else:
            self._stream.fail(answered, event)

    def _unshown(self) -> str:
        """The text of the tokens that wait to be shown."""
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
        """The event of `text` and of what else waits; b"" if there is nothing to show."""
        piece = self._choice.drain()
        piece.text = text
        if not (text or piece.ids or piece.entries):
            return b""
        return self._answer.events.piece(self._choice, piece)
