"""Runs one request from admission to its last byte, and cleans up however that ends."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from starlette.types import Receive

from serving.choice import Choice
from serving.dispatch import Dispatcher
from serving.errors import ApiError, from_request_error
from serving.event_stream import SlowClient, until_disconnected
from serving.generation import FinishReason, Generation, GenerationSpec, Sink, Tokens
from serving.limits import Ticket
from serving.protocol import ChoiceAsk, Request
from serving.timeline import RequestTimeline
from transfer import wire
from transfer.errors import Code, RequestError

logger = logging.getLogger(__name__)


class ChoiceSink(Sink, Protocol):
    """A sink that is told its generation before the generation tells it anything."""

    generation: Generation | None


class Answer(Protocol):
    """Where the choices of one request go. closed: done when nothing more will happen."""

    @property
    def closed(self) -> asyncio.Future[None]: ...

    @property
    def sinks(self) -> Sequence[ChoiceSink]: ...

    def close(self) -> None:
        """Nobody waits for the answer any more; it drops its sinks, which refer to it."""
        ...


class WholeAnswer:
    """All choices of one request, kept until the last has ended."""

    def __init__(self, choices: Sequence[Choice], dispatcher: Dispatcher) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.dispatcher = dispatcher
        self.sinks = [WholeChoice(choice, self) for choice in choices]
        self._num_running = len(choices)

    def end_one(self) -> None:
        self._num_running -= 1
        if not self._num_running and not self.closed.done():
            self.closed.set_result(None)

    def close(self) -> None:
        self.sinks = []
        if not self.closed.done():
            self.closed.set_result(None)

    def fail(self, error: Exception) -> None:
        """One choice failed, so the whole answer fails."""
        if not self.closed.done():
            self.closed.set_exception(error)


class WholeChoice:
    """The sink of one choice; at the end it puts the text into the choice's pending piece."""

    __slots__ = ("_answer", "_choice", "_texts", "generation")

    def __init__(self, choice: Choice, answer: WholeAnswer) -> None:
        self.generation: Generation | None = None
        self._choice = choice
        self._answer = answer
        self._texts: list[str] = []

    def on_prefilled(self, cached_tokens: int, prompt_logprobs: wire.PromptLogprobs | None) -> None:
        self._choice.prefilled(cached_tokens, prompt_logprobs)

    def on_tokens(self, tokens: Tokens) -> None:
        self._texts.append(self._choice.take(tokens))
        if self._choice.matched is not None:
            assert self.generation is not None, "whoever submits says so to the sink"
            self._answer.dispatcher.abort(self.generation, "stop")
            self.on_end("stop")

    def on_end(self, finish_reason: FinishReason) -> None:
        try:
            self._texts.append(self._choice.finish(finish_reason))
        except Exception as fault:  # otherwise nothing would close the answer
            self._answer.fail(fault)
            return
        self._choice.pending.text = "".join(self._texts)
        self._answer.end_one()

    def on_error(self, error: RequestError) -> None:
        self._answer.fail(from_request_error(error))


class Runner:
    """Runs requests on one dispatcher."""

    def __init__(self, dispatcher: Dispatcher, request_timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._request_timeout_s = request_timeout_s
        self._queued: dict[asyncio.Task[Ticket], frozenset[str]] = {}  # with their request ids
        self._overtaken: set[asyncio.Task[Ticket]] = set()  # those aborted after they got a place

    async def run(
        self,
        request: Request,
        answer: Answer,
        arrival_s: float,
        receive: Receive,
        *,
        is_probe: bool = False,
        timeline: RequestTimeline | None = None,
    ) -> bool:
        """Run until the answer is closed (True) or the client leaves (False). arrival_s: monotonic.

        is_probe: skip the queue, as a full server is not stuck, and leave all metrics alone. Raises
        ApiError when the request is not admitted, or fails before anything was sent.
        """
        gone = asyncio.ensure_future(until_disconnected(receive))
        ticket: Ticket | None = None
        generations: list[Generation] = []
        now_s = self._dispatcher.timelines.now_s
        try:
            if not is_probe:
                ticket = await self._admit(request, gone, arrival_s)
                if ticket is None:
                    return False
            if timeline is not None:
                timeline.admitted_s = now_s()
            for place, (ask, sink) in enumerate(zip(request.choices, answer.sinks, strict=True)):
                spec = self._spec(request, ask, arrival_s, is_probe)
                told = None if timeline is None else timeline.choices[place]
                sink.generation = self._dispatcher.submit(spec, sink, told)
                generations.append(sink.generation)
            await asyncio.wait((answer.closed, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.closed.done():
                return False
            answer.closed.result()
            return True
        except SlowClient as error:
            logger.warning("%s: %s", request.request_id, error)
            # The traceback refers to this frame, the frame to the answer, and the answer to the
            # error: a cycle that would keep all unread data until the garbage collector runs.
            error.__traceback__ = None
            return False
        except RequestError as error:
            if timeline is not None:
                timeline.error = (error.code.value, error.message)
            raise self.counted(from_request_error(error)) from error
        except ApiError as error:
            self.counted(error)
            raise
        finally:
            # A generation that has ended is left as it is; nobody listens to the others any more.
            for generation in generations:
                self._dispatcher.abort(generation)
            if ticket is not None:
                ticket.release()
            gone.cancel()
            for sink in answer.sinks:
                sink.generation = None  # the generation refers to the sink: a cycle
            if timeline is not None:
                self._dispatcher.timelines.close(timeline)
            answer.close()

    def counted(self, answered: ApiError) -> ApiError:
        """Return the error; a 429 is counted as rejected."""
        # Counted here and not where the limiter refuses: workers that stay full cause 429s too.
        if answered.status == 429:
            self._dispatcher.metrics.rejected()
        return answered

    def abort(self, request_id: str | None) -> int:
        """Abort one request, or all (None). Returns how many generations and waiting requests."""
        waiting = [
            task for task, ids in self._queued.items() if request_id is None or request_id in ids
        ]
        for task in waiting:
            if not task.cancel():  # it has its place, but its request has not resumed yet
                self._overtaken.add(task)
        return len(waiting) + self._dispatcher.abort_request(request_id)

    def _spec(
        self, request: Request, ask: ChoiceAsk, arrival_s: float, is_probe: bool
    ) -> GenerationSpec:
        return GenerationSpec(
            ask.prompt,
            ask.sampling,
            ask.request_id,
            arrival_s,
            arrival_s + self._request_timeout_s,
            request.cache_salt,
            request.ranks,
            request.adapter,
            is_probe,
        )

    async def _admit(
        self, request: Request, gone: asyncio.Task[None], arrival_s: float
    ) -> Ticket | None:
        """Wait for a place; None when the client leaves meanwhile."""
        ticket = self._dispatcher.admit_now(len(request.choices))
        if ticket is not None:  # the usual case: no task is needed
            return ticket
        admitting = asyncio.ensure_future(self._dispatcher.admit(len(request.choices)))
        self._queued[admitting] = frozenset(ask.request_id for ask in request.choices)
        try:
            await asyncio.wait((admitting, gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            admitting.add_done_callback(_give_back)
            admitting.cancel()
            raise
        finally:
            del self._queued[admitting]
            is_overtaken = admitting in self._overtaken
            self._overtaken.discard(admitting)
        if is_overtaken:
            _give_back(admitting)
        if is_overtaken or admitting.cancelled():
            self._left_queue(request, arrival_s)
            raise RequestError(Code.ABORTED, "the request was aborted while it waited")
        if admitting.done():
            return admitting.result()
        admitting.cancel()
        self._left_queue(request, arrival_s)
        return None

    def _left_queue(self, request: Request, arrival_s: float) -> None:
        """Count the request's generations, which never started, as ended."""
        for _ in request.choices:
            self._dispatcher.observe_left_queue(arrival_s)


def _give_back(admitting: asyncio.Task[Ticket]) -> None:
    if not admitting.cancelled() and admitting.exception() is None:
        admitting.result().release()
