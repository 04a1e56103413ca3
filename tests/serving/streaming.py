"""Streams on a wire that a test controls: it sets the wire full or free, and moves time."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import orjson

from serving.body_writer import BodyWriter, chunk_head
from serving.choice import Choice
from serving.event_stream import EventStream, Outbox
from serving.generation import FinishReason, Generation, GenerationSpec
from serving.interval import Interval
from serving.openai_answers import chat_answer, completion_answer
from serving.parsing import Parsing
from serving.prompt import Prompt
from serving.protocol import ChoiceAsk, Request, Shown
from serving.responses_answers import ResponsesAnswer
from serving.responses_fields import ResponsesFields
from serving.stream import Spelling, StreamedAnswer
from serving.tokenizer import Tokenizer
from tests.recording import ManualTimers
from tests.serving.live import EOS, LETTER_A, tokenizer_of_tests
from transfer import wire
from transfer.clock import ManualClock

TOKENIZER = tokenizer_of_tests()
TIMEOUT_S = 30.0
_END = b"0\r\n\r\n"  # of a body in chunks


class _Free(asyncio.Event):
    """Whether a wire takes more; its body writer is told, as a server's protocol tells it."""

    def __init__(self, writer: BodyWriter) -> None:
        super().__init__()
        self._writer = writer

    def set(self) -> None:
        super().set()
        self._writer.ready = True

    def clear(self) -> None:
        super().clear()
        self._writer.hinder()


@dataclasses.dataclass
class _Transport:
    """All of a transport that a body writer needs."""

    write: Callable[[bytes], None]
    abort: Callable[[], None]


class Wire:
    """The server's side of one response; while it is not `free`, send waits as on a full socket."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.num_chunks = 0  # messages that bypassed `send`
        self.writer = BodyWriter(cast(asyncio.Transport, _Transport(self._write, self._abort)), 0.0)
        self.free = _Free(self.writer)
        self.free.set()
        self.error: Exception | None = None
        self._ended = False  # the body's end bypassed `send`
        self.was_aborted = False
        self.takes_one = False  # one message each time that it is set free

    def _write(self, chunk: bytes) -> None:
        assert self.free.is_set(), "only written to while ready"
        if self.error is not None:
            raise self.error
        self._ended = chunk.endswith(_END)
        chunk = chunk.removesuffix(_END)
        data = chunk[chunk.index(b"\r\n") + 2 : -2]
        assert chunk == chunk_head(len(data)) + data + b"\r\n"
        self.num_chunks += 1
        self.messages.append(
            {"type": "http.response.body", "body": data, "more_body": not self._ended}
        )

    def _abort(self) -> None:
        self.was_aborted = True

    async def send(self, message: Any) -> None:
        if not self.free.is_set():
            await self.free.wait()
        if self.error is not None:
            raise self.error
        if self._ended:  # it bypassed this, which is told so and adds nothing
            assert message == {"type": "http.response.body", "body": b"", "more_body": False}
            self.writer.server.write(_END)
            return
        self.messages.append(message)
        if self.takes_one:
            self.free.clear()

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.messages if m["type"] == "http.response.body"]


@dataclasses.dataclass
class Bench:
    """A stream on a wire, with timers that a test moves."""

    wire: Wire = dataclasses.field(default_factory=Wire)
    timers: ManualTimers = dataclasses.field(default_factory=lambda: ManualTimers(ManualClock()))
    max_unread_bytes: int = 100
    outbox: Outbox = dataclasses.field(default_factory=Outbox)

    def __post_init__(self) -> None:
        self.stream = EventStream(
            self.wire.send,
            self.wire.send,
            self.wire.writer,
            [(b"content-type", b"text/event-stream")],
            self.outbox,
            self.timers,
            self.max_unread_bytes,
            TIMEOUT_S,
        )

    def write(self, data: bytes, last: bool = False, repeats: int | None = None) -> None:
        """Write in a turn of its own."""
        self.stream.write(data, last, repeats)
        self.outbox.send()


def asked(index: int = 0, prompt: Prompt | None = None, **shown: Any) -> ChoiceAsk:
    sampling = wire.SamplingParams(max_new_tokens=99, stop_token_ids=(EOS, 5))
    prompt = prompt or Prompt([1, 2, 3])
    return ChoiceAsk(index, 0, "id", prompt, sampling, Shown(**shown))


def response_answer(
    request: Request, tokenizer: Tokenizer, model_name: str, created: int
) -> ResponsesAnswer:
    """The answer to a request without tools, from a model that does not think."""
    fields = ResponsesFields(input="Hi")
    return ResponsesAnswer(request, fields, tokenizer, model_name, created, Parsing())


class Streaming:
    """One streamed answer whose tokens come by hand."""

    def __init__(
        self,
        asks: Sequence[ChoiceAsk],
        *,
        tokenizer: Tokenizer = TOKENIZER,
        interval: int | Interval = 1,
        is_chat: bool = True,
        model_name: str = 'model "m"\u00e9',
        request_id: str = "id",
        prompt_logprobs: wire.PromptLogprobs | None = None,
        spell: Callable[..., Spelling] | None = None,
        **request: Any,
    ) -> None:
        """spell: makes what spells the answer; None: a chat, or a completion."""
        self.bench = Bench(max_unread_bytes=1 << 20)
        shared = Interval(interval) if isinstance(interval, int) else interval
        self.request = Request(request_id, list(asks), stream=True, **request)
        spell = spell or (chat_answer if is_chat else completion_answer)
        self.spelling = spell(self.request, tokenizer, model_name, 1234)
        self.choices = [Choice(ask, tokenizer) for ask in asks]
        self.aborted: list[tuple[Generation, FinishReason]] = []
        self.answer = StreamedAnswer(
            self.choices,
            self.bench.stream,
            self.spelling,
            shared,
            lambda generation, reason: self.aborted.append((generation, reason)),
        )
        for sink, ask in zip(self.answer.sinks, asks, strict=True):
            spec = GenerationSpec(ask.prompt, ask.sampling, "id", 0.0, 1.0)
            sink.generation = Generation(spec, sink)
            sink.on_prefilled(2, prompt_logprobs)

    @property
    def events(self) -> list[Any]:
        self.bench.outbox.send()
        lines = b"".join(self.bench.wire.bodies).decode().split("\n\n")
        assert lines.pop() == ""
        data = [line.partition("data: ")[2] for line in lines]  # event names before it add nothing
        return [item if item == "[DONE]" else orjson.loads(item) for item in data]

    def texts(self, index: int = 0) -> list[str]:
        events = [event for event in self.events if event != "[DONE]"]
        items = [item for event in events for item in event["choices"] if item["index"] == index]
        found = [item.get("text", item.get("delta", {}).get("content")) for item in items]
        return [text for text in found if text]


LETTERS = [LETTER_A + i for i in range(26)]
