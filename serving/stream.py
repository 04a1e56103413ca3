"""Server-sent events written from the step that made them: no task, event or queue per token.

A generation's sink calls `EventStream.write` on the event loop, and `write` runs the server's own
`send` in line, by one `send(None)` on its coroutine. That nearly always finishes at once. When it
does not, the client reads slower than it is written to: the coroutine goes on in a task, later
events of this stream queue up and leave merged in one write, and a timer bounds how long a client
may leave more than a buffer unread.

The response starts with its first event, so whatever fails before that is still an HTTP status.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Protocol, cast

import orjson
from starlette.types import Message, Receive, Send

from serving.choice import Choice, Piece
from serving.errors import ApiError, error_event, from_request_error
from serving.generation import FinishReason, Generation, Tokens
from serving.timers import Timer, Timers
from transfer import wire
from transfer.errors import RequestError

# ASGI lets `send` return any awaitable; servers and middlewares write coroutine functions, which
# can be driven by hand.
DrivenSend = Callable[[Message], Coroutine[Any, Any, None]]


class SlowClient(Exception):
    """A client left more than a buffer unread for too long; its connection is closed."""


class EventStream:
    """One response of events. `closed` is done when the last byte left or nobody reads any more.

    closed raises ApiError when it failed before its first byte, SlowClient, or what `send` raised.
    """

    def __init__(
        self,
        send_start: Send,
        send_body: Send,
        headers: list[tuple[bytes, bytes]],
        timers: Timers,
        max_unread_bytes: int,
        slow_client_timeout_s: float,
    ) -> None:
        """send_start: takes the status and headers; send_body, which may be the same: the rest."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started = False
        self._send_start = send_start
        self._send_body = cast(DrivenSend, send_body)
        self._headers = headers
        self._timers = timers
        self._max_unread_bytes = max_unread_bytes
        self._slow_client_timeout_s = slow_client_timeout_s
        # Invariant: the queue is empty unless _sender runs, which empties it before it ends.
        self._sender: asyncio.Task[None] | None = None
        self._queue: list[bytes] = []
        self._unread_bytes = 0  # queued and in _sender's hands
        self._last_queued = False
        self._timer: Timer | None = None

    def write(self, data: bytes, last: bool = False) -> None:
        """Send events; the last ones end the response. Does nothing once it is closed."""
        if self.closed.done():
            return
        if self._sender is not None:
            self._queue.append(data)
            self._unread_bytes += len(data)
            self._last_queued = last
            self._watch_slowness()
            return
        if self.started:
            coroutine = self._send_body(
                {"type": "http.response.body", "body": data, "more_body": not last}
            )
        else:
            self.started = True
            coroutine = self._start(data, last)
        try:
            awaited = coroutine.send(None)
        except StopIteration:
            if last:
                self.closed.set_result(None)
        except OSError:  # the connection is gone
            self.closed.set_result(None)
        except Exception as error:  # it reaches the request's own task
            self._fail(error)
        else:
            self._last_queued = last
            self._unread_bytes = len(data)
            sending = self._send_rest(_resumed(coroutine, awaited), last)
            self._sender = asyncio.ensure_future(sending)
            self._watch_slowness()

    def fail(self, error: ApiError) -> None:
        """End with an error: as a status before the first byte, as the last event after it."""
        if self.started:
            self.write(error_event(error), last=True)
        else:
            self._fail(error)

    def close(self) -> None:
        """Nobody reads any more. What is queued is dropped."""
        if not self.closed.done():
            self.closed.set_result(None)
        self._disarm()
        if self._sender is not None:
            self._sender.cancel()

    async def _start(self, data: bytes, last: bool) -> None:
        await self._send_start(
            {"type": "http.response.start", "status": 200, "headers": self._headers}
        )
        await self._send_body({"type": "http.response.body", "body": data, "more_body": not last})

    async def _send_rest(self, sending: Awaitable[None], last: bool) -> None:
        """Finish a send that waits for the client, then send what queued up meanwhile."""
        try:
            await sending
            while True:
                self._disarm()
                if not self._queue:
                    break
                data = b"".join(self._queue)
                last = self._last_queued
                self._queue.clear()
                self._unread_bytes = len(data)
                self._watch_slowness()
                await self._send_body(
                    {"type": "http.response.body", "body": data, "more_body": not last}
                )
        except OSError:  # the connection is gone
            last = True
        except Exception as error:  # it reaches the request's own task
            self._fail(error)
        finally:
            self._sender = None
        if last and not self.closed.done():
            self.closed.set_result(None)

    def _watch_slowness(self) -> None:
        """The timer runs while too much is unread, or while only the client is waited for."""
        if self._timer is None and (
            self._last_queued or self._unread_bytes > self._max_unread_bytes
        ):
            self._timer = self._timers.call_later(self._slow_client_timeout_s, self._give_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._fail(
            SlowClient(
                f"a client left {self._unread_bytes} bytes unread for "
                f"{self._slow_client_timeout_s:g} s"
            )
        )

    def _fail(self, error: Exception) -> None:
        if not self.closed.done():
            self.closed.set_exception(error)


@types.coroutine
def _resumed(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that was run by hand until it waited for `awaited`."""
    try:
        while True:
            try:
                value = yield awaited
            except BaseException as error:  # a cancel, mostly: the coroutine decides
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(value)
    except StopIteration:
        return


async def until_disconnected(receive: Receive) -> None:
    """Returns when the client left, or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


# --- tokens -> events -----------------------------------------------------------------------------


class Events(Protocol):
    """How an API spells the events of one answer, as bytes that are whole events."""

    def opening(self, choice: Choice) -> bytes:
        """What goes before the first piece of a choice."""
        ...

    def frame(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """What stands before and after the text, as a JSON string, in the event of a piece.

        None when pieces of this choice differ in more than their text.
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


class StreamedAnswer:
    """All choices of one request on their way into one EventStream."""

    def __init__(
        self,
        choices: Sequence[Choice],
        stream: EventStream,
        events: Events,
        interval: int,
        abort: Callable[[Generation, FinishReason], None],
    ) -> None:
        """interval: tokens of a piece after the first. abort: the dispatcher's."""
        self.choices = choices
        self.stream = stream
        self.events = events
        self.interval = interval
        self.abort = abort
        self.sinks = [StreamedChoice(choice, self) for choice in choices]
        self._num_running = len(choices)

    @property
    def closed(self) -> asyncio.Future[None]:
        """Done when the last byte left, or nobody reads any more."""
        return self.stream.closed

    def close(self) -> None:
        self.stream.close()

    def end_one(self, data: bytes) -> None:
        """A choice ended with these events; the last one closes the answer."""
        self._num_running -= 1
        last = not self._num_running
        self.stream.write(data + self.events.closing(self.choices) if last else data, last)


class StreamedChoice:
    """The sink of one choice. Its first piece leaves at once, later ones at full intervals."""

    __slots__ = (
        "_answer",
        "_choice",
        "_due",
        "_frame",
        "_opened",
        "_text",
        "_waiting",
        "generation",
    )

    def __init__(self, choice: Choice, answer: StreamedAnswer) -> None:
        self.generation: Generation | None = None  # set by who submits
        self._choice = choice
        self._answer = answer
        self._frame = answer.events.frame(choice)
        self._opened = False
        self._due = 1  # tokens that make a piece
        self._waiting = 0  # tokens since the last one
        self._text = ""

    def on_prefilled(self, cached_tokens: int, prompt_logprobs: wire.PromptLogprobs | None) -> None:
        self._choice.prefilled(cached_tokens, prompt_logprobs)

    def on_tokens(self, tokens: Tokens) -> None:
        text = self._choice.take(tokens)
        self._text = self._text + text if self._text else text
        if self._choice.matched is not None:
            assert self.generation is not None, "whoever submits says so to the sink"
            self._answer.abort(self.generation, "stop")
            self.on_end("stop")
            return
        self._waiting += len(tokens.ids)
        if self._waiting < self._due:
            return
        self._waiting = 0
        if data := self._piece() if self._opened else self._opening() + self._piece():
            self._due = self._answer.interval
            self._answer.stream.write(data)

    def on_end(self, finish_reason: FinishReason) -> None:
        rest = self._choice.finish(finish_reason)
        piece = self._choice.drain()
        piece.text = self._text + rest
        opening = b"" if self._opened else self._opening()
        self._answer.end_one(opening + self._answer.events.finish(self._choice, piece))

    def on_error(self, error: RequestError) -> None:
        self._answer.stream.fail(from_request_error(error))

    def _opening(self) -> bytes:
        self._opened = True
        return self._answer.events.opening(self._choice)

    def _piece(self) -> bytes:
        """The event of what waits, if there is anything to show."""
        text, self._text = self._text, ""
        if self._frame is not None:
            return self._frame[0] + orjson.dumps(text) + self._frame[1] if text else b""
        piece = self._choice.drain()
        piece.text = text
        if not (text or piece.ids or piece.entries):
            return b""
        return self._answer.events.piece(self._choice, piece)
