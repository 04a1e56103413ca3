"""Answers that the product streams, as their clients read them."""

import asyncio

import orjson

from serving.choice import Choice
from serving.dispatch import Dispatcher
from serving.errors import ApiError
from serving.openai_answers import chat_answer
from serving.protocol import ChoiceAsk, Request, Shown
from serving.stream import StreamedAnswer, StreamedChoice
from serving.timers import LoopTimers
from tests.serving.streaming import TOKENIZER, Bench
from transfer import wire
from transfer.errors import Code

_CODES = {
    400: Code.BAD_REQUEST,
    429: Code.QUEUE_FULL,
    500: Code.INTERNAL,
    503: Code.PEER_LOST,
    504: Code.DEADLINE,
}


def text_of(token_ids: list[int], sampling: wire.SamplingParams) -> str:
    """What a client is shown: a character a token, and nothing for a stop token."""
    return "".join(chr(33 + i) for i in token_ids if i not in sampling.stop_token_ids)


class Streamed:
    """One answer and the wire on which it leaves."""

    def __init__(self, ask: ChoiceAsk, dispatcher: Dispatcher) -> None:
        self._bench = Bench(timers=LoopTimers(), max_unread_bytes=1 << 20)  # type: ignore[arg-type]
        request = Request(ask.request_id, [ask], stream=True)
        self.answer = StreamedAnswer(
            [Choice(ask, TOKENIZER)],
            self._bench.stream,
            chat_answer(request, TOKENIZER, "m", 1234),
            dispatcher.interval,
            dispatcher.abort,
        )

    @staticmethod
    def ask(number: int, prompt: object, sampling: wire.SamplingParams) -> ChoiceAsk:
        shown = Shown(stop_ids=frozenset(sampling.stop_token_ids))
        return ChoiceAsk(0, 0, str(number), prompt, sampling, shown)  # type: ignore[arg-type]

    @property
    def sink(self) -> StreamedChoice:
        return self.answer.sinks[0]

    @property
    def is_ready(self) -> bool:
        """Whether the client reads what is sent; it may stop for a while."""
        return self._bench.wire.free.is_set()

    def stop_reading(self) -> None:
        self._bench.wire.free.clear()

    def read_on(self) -> None:
        self._bench.wire.free.set()

    async def ended(self) -> Code | None:
        """Once all is read: why it failed, None if it did not."""
        try:
            await asyncio.shield(self.answer.closed)
        except ApiError as error:
            return _CODES[error.status]
        last = self._events()[-1]
        if isinstance(last, dict):
            return Code(last["error"]["code"])
        return None

    def told(self) -> tuple[str, str | None]:
        """The text so far, and the reason of its end."""
        text, reason = "", None
        for event in self._events():
            if isinstance(event, dict) and "choices" in event:
                (choice,) = event["choices"]
                assert reason is None, "more comes behind the end"
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"]
        return text, reason

    def _events(self) -> list[object]:
        lines = b"".join(self._bench.wire.bodies).decode().split("\n\n")
        assert lines.pop() == ""
        data = [line.removeprefix("data: ") for line in lines]
        return [item if item == "[DONE]" else orjson.loads(item) for item in data]
