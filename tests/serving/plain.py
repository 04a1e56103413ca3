"""The events of a streamed answer as plain code spells them, with openai's own types, for tests.

Nothing here comes from serving/: texts are made of the tokens' bytes, chunks of pydantic models.
Slow and simple on purpose; tests compare what the server writes with it.
"""

import codecs
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletionChunk, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_chunk import Choice, ChoiceDelta, ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import CompletionUsage, PromptTokensDetails

Top = list[tuple[int, float]]
Reason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Token:
    """One token as a worker tells it. top: best first."""

    token_id: int
    logprob: float = 0.0
    top: Top = field(default_factory=list)


@dataclass(frozen=True)
class PromptToken:
    """A position of the prompt. logprob: None where the worker told nothing."""

    token_id: int
    logprob: float | None
    top: Top


@dataclass(frozen=True)
class Asked:
    """What the request asked for, as far as it shows. Counts of logprobs are -1 for none."""

    is_chat: bool
    raw: Sequence[bytes]  # of each token of the vocabulary
    request_id: str = "id"
    model: str = "m"
    created: int = 1234
    prompt_ids: Sequence[int] = (1, 2, 3)
    prompt_text: str = ""
    cached_tokens: int = 2
    interval: int = 1
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    num_own_prompt_logprobs: int = -1
    echo: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    skipped: frozenset[int] = frozenset()  # ids that add no text

    @property
    def is_text_only(self) -> bool:
        return self.num_logprobs < 0 and not self.token_ids

    def bytes_of(self, token_id: int) -> bytes:
        return self.raw[token_id] if token_id < len(self.raw) else b""

    def text_of(self, ids: Sequence[int]) -> str:
        """The whole text, as it is when no more tokens come."""
        return self._joined(ids).decode("utf-8", "replace")

    def shown_of(self, ids: Sequence[int]) -> str:
        """The part of the text that no further token can change."""
        data = self._joined(ids)
        held = next((n for n in (3, 2, 1) if len(data) >= n and data[-n:] in _BEGUN), 0)
        return data[: len(data) - held].decode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        """The token's name in logprobs."""
        if self.tokens_as_ids:
            return f"token_id:{token_id}"
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _joined(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.bytes_of(i) for i in ids if i not in self.skipped)


# Every incomplete start of a character in UTF-8; each run of 64 characters shares its starts.
_BEGUN = {
    chr(code).encode()[:size]
    for code in range(0x80, 0x110000, 0x40)
    if not 0xD800 <= code < 0xE000
    for size in range(1, len(chr(code).encode()))
}


def cleaned(text: str) -> str:
    """Text that UTF-8 can hold: halves of pairs join, lone ones become U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", json.loads(json.dumps(text)))


class PlainChoice:
    """What was told of one choice, and what of it is still to be sent."""

    def __init__(self, asked: Asked, index: int, prompt: Sequence[PromptToken]) -> None:
        self.asked = asked
        self.index = index
        self.prompt = prompt
        self.told: list[Token] = []
        self.unsent: list[Token] = []
        self.sent_text = ""
        self.is_open = False
        self.has_begun = False

    def take(self, run: Sequence[Token]) -> list[dict[str, Any]]:
        """Take tokens; the chunks that leave now."""
        self.told += run
        self.unsent += run
        if self.has_begun and len(self.unsent) < self.asked.interval:
            return []
        opening = self._opening()
        shown = self.asked.shown_of([token.token_id for token in self.told])
        piece = self._piece(shown[len(self.sent_text) :])
        self.has_begun |= bool(piece)
        return opening + piece

    def end(self, reason: Reason) -> list[dict[str, Any]]:
        """The chunks of all that is left."""
        opening = self._opening()
        text = self.asked.text_of([token.token_id for token in self.told])
        piece = self._piece(text[len(self.sent_text) :])
        last: dict[str, Any] = {"finish_reason": reason, "stop_reason": None}
        if self.asked.token_ids:
            last["token_ids"] = []
        delta = {"delta": ChoiceDelta()} if self.asked.is_chat else {"text": ""}
        return [*opening, *piece, self._chunk(**delta, **last)]

    def _opening(self) -> list[dict[str, Any]]:
        if self.is_open:
            return []
        self.is_open = True
        asked = self.asked
        text = cleaned(asked.prompt_text) if asked.echo else ""
        of_prompt: dict[str, Any] = {}
        if asked.token_ids:
            of_prompt["prompt_token_ids"] = list(asked.prompt_ids)
        if asked.num_own_prompt_logprobs >= 0:
            of_prompt["prompt_logprobs"] = [self._position(token) for token in self.prompt]
        ids: dict[str, Any] = {"token_ids": []} if asked.token_ids else {}
        if asked.is_chat:
            delta = ChoiceDelta(role="assistant", content=text)
            return [self._chunk(delta=delta, **ids) | of_prompt]
        if not asked.echo and not of_prompt:
            return []
        logprobs = self._logprobs(self.prompt, self._prompt_offsets()) if asked.echo else None
        return [self._chunk(text=text, logprobs=logprobs, **of_prompt, **ids)]

    def _piece(self, text: str) -> list[dict[str, Any]]:
        asked = self.asked
        if not text and (asked.is_text_only or not self.unsent):
            return []
        self.sent_text += text
        tokens, self.unsent = self.unsent, []
        fields: dict[str, Any] = {"token_ids": [t.token_id for t in tokens]}
        if not asked.token_ids:
            fields = {}
        told = [PromptToken(t.token_id, _finite(t.logprob), t.top) for t in tokens]
        fields["logprobs"] = self._logprobs(told, self._offsets(len(tokens)))
        content = {"delta": ChoiceDelta(content=text)} if asked.is_chat else {"text": text}
        return [self._chunk(**content, **fields)]

    def _offsets(self, count: int) -> list[int]:
        """Where the last `count` tokens begin in the text: behind all that was complete before."""
        asked, ids = self.asked, [token.token_id for token in self.told]
        begin = len(asked.prompt_text) if asked.echo else 0
        places = range(len(ids) - count, len(ids))
        return [begin + len(asked.shown_of(ids[:place])) for place in places]

    def _prompt_offsets(self) -> list[int]:
        """Where the prompt's tokens begin in its text, which may lack special ones."""
        asked, data, at, offsets = self.asked, b"", 0, []
        for token in self.prompt:
            offsets.append(at)
            name = asked.bytes_of(token.token_id)
            is_special = token.token_id == len(asked.raw) - 1
            if not is_special or asked.prompt_text.startswith(name.decode(), at):
                data += name
                at = len(codecs.getincrementaldecoder("utf-8")("replace").decode(data))
        return offsets

    def _logprobs(self, tokens: Sequence[PromptToken], offsets: list[int]) -> Any:
        if self.asked.num_logprobs < 0 or not tokens:
            return None
        return self._of_chat(tokens) if self.asked.is_chat else self._of_completion(tokens, offsets)

    def _of_chat(self, tokens: Sequence[PromptToken]) -> ChoiceLogprobs:
        def fields(token_id: int, logprob: float | None) -> dict[str, Any]:
            data = list(self.asked.bytes_of(token_id))
            return {"token": self.asked.name_of(token_id), "logprob": logprob, "bytes": data}

        content = [
            ChatCompletionTokenLogprob(
                **fields(token.token_id, token.logprob),
                top_logprobs=[
                    TopLogprob(**fields(token_id, _finite(logprob)))
                    for token_id, logprob in token.top[: self.asked.num_logprobs]
                ],
            )
            for token in tokens
        ]
        return ChoiceLogprobs(content=content, refusal=None)

    def _of_completion(self, tokens: Sequence[PromptToken], offsets: list[int]) -> Logprobs:
        asked = self.asked
        tops = []
        for token in tokens:
            best: dict[str, float] | None = None
            if token.logprob is not None:
                best = {}
                own = (token.token_id, token.logprob)
                for token_id, logprob in [*token.top[: asked.num_logprobs], own]:
                    if asked.name_of(token_id) not in best:
                        best[asked.name_of(token_id)] = _finite(logprob)
            tops.append(best)
        return Logprobs.model_construct(
            tokens=[asked.name_of(token.token_id) for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=tops,
            text_offset=offsets,
        )

    def _position(self, token: PromptToken) -> dict[str, Any] | None:
        if token.logprob is None:
            return None
        best = token.top[: self.asked.num_own_prompt_logprobs]
        ids = dict.fromkeys([token.token_id, *(token_id for token_id, _ in best)])
        values = {token.token_id: token.logprob} | {i: _finite(value) for i, value in best}
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(best, 1)}
        return {
            str(token_id): {
                "logprob": values[token_id],
                "rank": ranks.get(token_id),
                "decoded_token": self.asked.bytes_of(token_id).decode("utf-8", "replace"),
            }
            for token_id in ids
        }

    def _chunk(self, **fields: Any) -> dict[str, Any]:
        # Constructed without a check, as openai's client does: its types have no reason "abort",
        # and a completion has no reason until the end.
        choice_type = Choice if self.asked.is_chat else CompletionChoice
        values = {"index": self.index, "logprobs": None, "finish_reason": None} | fields
        choice = choice_type.model_construct(None, **values)
        more: dict[str, Any] = {"usage": None} if self.asked.include_usage else {}
        if self.asked.continuous_usage:
            more = {"usage": usage_of(self.asked, len(self.told))}
        return chunk_of(self.asked, [choice], **more)


def usage_of(asked: Asked, num_tokens: int) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=len(asked.prompt_ids),
        completion_tokens=num_tokens,
        total_tokens=len(asked.prompt_ids) + num_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=asked.cached_tokens),
    )


def chunk_of(asked: Asked, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
    """The chunk as JSON has it."""
    chunk_type = ChatCompletionChunk if asked.is_chat else Completion
    chunk = chunk_type.model_construct(
        None,
        id=cleaned(asked.request_id),
        object="chat.completion.chunk" if asked.is_chat else "text_completion",
        created=asked.created,
        model=cleaned(asked.model),
        choices=list(choices),
        **more,
    )
    return chunk.model_dump(exclude_unset=True, warnings=False)


def _finite(logprob: float) -> float:
    """The logprob as JSON can hold it, which has no infinity."""
    return -9999.0 if math.isnan(logprob) or logprob < -9999.0 else logprob


class PlainAnswer:
    """The events of an answer of several choices, in the order in which their tokens were told."""

    def __init__(self, asked: Asked, num_choices: int, prompt: Sequence[PromptToken]) -> None:
        self.asked = asked
        self.choices = [PlainChoice(asked, index, prompt) for index in range(num_choices)]
        self.events: list[Any] = []
        self._num_running = num_choices

    def take(self, index: int, run: Sequence[Token]) -> None:
        self.events += self.choices[index].take(run)

    def end(self, index: int, reason: Reason) -> None:
        self.events += self.choices[index].end(reason)
        self._num_running -= 1
        if self._num_running:
            return
        if self.asked.include_usage:
            num_tokens = sum(len(choice.told) for choice in self.choices)
            self.events.append(chunk_of(self.asked, [], usage=usage_of(self.asked, num_tokens)))
        self.events.append("[DONE]")
