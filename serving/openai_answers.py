"""Spells answers as OpenAI does: whole, or as the events of a stream.

Shapes: OpenAI's API reference (chat.completion, chat.completion.chunk, text_completion). Added to
them, as in vLLM: stop_reason, prompt_logprobs, and token ids where asked.
"""

import codecs
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.choice import Choice, Entry, Piece
from serving.errors import ApiError, error_event
from serving.json_bytes import dumps
from serving.marked_text import MarkedText, Told
from serving.meta_info import meta_of, token_logprobs, top_logprobs
from serving.parsing import Parsing
from serving.protocol import Request
from serving.stream import Frame
from serving.tokenizer import Tokenizer
from serving.usage import Thoughts, usage_of

DONE = b"data: [DONE]\n\n"
# Stands for the text while a frame is made. It is random, so no client can send it, and it occurs
# only once in the event.
_MARK = secrets.token_hex(16)


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(data) + b"\n\n"


class LogprobShapes:
    """Logprobs in OpenAI's two shapes, and in vLLM's shape for prompts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, choice: Choice, entries: Sequence[Entry]) -> dict[str, Any] | None:
        """{"content": [{token, logprob, bytes, top_logprobs}]}; None when not asked."""
        if choice.ask.shown.num_logprobs < 0:
            return None
        as_ids = choice.ask.shown.tokens_as_ids
        content = []
        for entry in entries:
            item = self._item(entry.token_id, entry.logprob or 0.0, as_ids)
            top = [self._item(token_id, logprob, as_ids) for token_id, logprob in entry.top]
            content.append({**item, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(
        self, choice: Choice, entries: Sequence[Entry], offset: int
    ) -> tuple[dict[str, Any] | None, int]:
        """({tokens, token_logprobs, top_logprobs, text_offset}, the offset after them)."""
        shown = choice.ask.shown
        if shown.num_logprobs < 0:
            return None, offset
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            token = self.text(entry.token_id, shown.tokens_as_ids)
            tokens.append(token)
            logprobs.append(entry.logprob)
            offsets.append(offset)
            offset += entry.num_decoded
            if entry.logprob is None:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for token_id, value in [
                *entry.top[: shown.num_logprobs],
                (entry.token_id, entry.logprob),
            ]:
                # Tokens may share a text, as halves of characters do: the more probable one shows.
                top.setdefault(self.text(token_id, shown.tokens_as_ids), value)
            tops.append(top)
        shape = {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        return shape, offset

    def meta_info(self, choice: Choice, entries: Sequence[Entry]) -> dict[str, Any]:
        """What /generate tells of a choice, but for how long it took."""
        meta, shown = meta_of(choice), choice.ask.shown
        if shown.num_logprobs >= 0:
            meta["output_token_logprobs"] = token_logprobs(entries, self._tokenizer.token_text)
        if shown.num_logprobs > 0:
            meta["output_top_logprobs"] = top_logprobs(entries, self._tokenizer.token_text)
        return meta

    def prompt(self, choice: Choice) -> list[dict[str, Any] | None] | None:
        """For each position a map from token id to logprob, rank and text; None when not asked."""
        count = choice.ask.shown.num_own_prompt_logprobs
        return None if count < 0 else [self._position(e, count) for e in choice.prompt_entries]

    def _position(self, entry: Entry, count: int) -> dict[str, Any] | None:
        if entry.logprob is None:
            return None
        top = entry.top[:count]  # an echo may have more
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, 1)}
        values = {entry.token_id: entry.logprob, **dict(top)}
        return {
            str(token_id): {
                "logprob": value,
                "rank": ranks.get(token_id),
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, value in values.items()
        }

    def echoed(self, choice: Choice) -> list[Entry]:
        """The entries of a prompt that is echoed, each with its share of the prompt's text."""
        entries, text, tokenizer = choice.prompt_entries, choice.ask.prompt.text, self._tokenizer
        at, is_first = 0, True
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for entry in entries:
            own = tokenizer.token_text(entry.token_id)
            if entry.token_id in tokenizer.special_ids and not text.startswith(own, at):
                continue  # the tokenizer added it
            piece = decoder.decode(tokenizer.token_bytes(entry.token_id))
            if is_first and not tokenizer.decode([entry.token_id], False).startswith(piece):
                piece = piece.removeprefix(" ")  # SentencePiece puts one before the first word
            is_first = False
            entry.num_decoded = len(piece)
            at += len(piece)
        if entries:  # what follows is at the end, even if the tokenizer changed the text
            entries[-1].num_decoded += len(text) - at
        return entries

    def text(self, token_id: int, as_id: bool) -> str:
        return f"token_id:{token_id}" if as_id else self._tokenizer.token_text(token_id)

    def _item(self, token_id: int, logprob: float, as_id: bool) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": self.text(token_id, as_id), "logprob": logprob, "bytes": list(data)}


class _Answer:
    """What answers to chats and to completions share; their differences are in a `Shape`."""

    is_cumulative = False

    def __init__(self, request: Request, shape: "Shape", model_name: str, created: int) -> None:
        """created: unix seconds."""
        self._request = request
        self._shape = shape
        self._head = {
            "id": request.request_id,
            "object": "",
            "created": created,
            "model": model_name,
        }
        # What stands before and after the choice in every chunk.
        head = self._head | {"object": shape.chunk_object}
        self._before = b"data: " + dumps(head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"

    # --- whole ---

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The body of an answer that is not streamed."""
        items = [self._shape.whole(choice, choice.drain()) for choice in choices]
        data = {**self._head, "object": self._shape.whole_object, "choices": items}
        data |= self._shape.extras(choices)
        return dumps({**data, "usage": usage_of(choices, self._shape.num_thought(choices))})

    # --- streamed (serving.stream.Events) ---

    def opening(self, choice: Choice) -> bytes:
        items = self._shape.opening(choice)
        extras = self._shape.extras([choice]) if items else {}
        return b"".join([self._chunk(choice, item, extras) for item in items])

    def frame(self, choice: Choice) -> Frame | None:
        if not (self._shape.splices and choice.plain) or self._request.continuous_usage:
            return None
        before, after = self.piece(choice, Piece(_MARK)).split(f'"{_MARK}"'.encode())
        return Frame(before, after)

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        item = self._shape.piece(choice, piece)
        return b"" if item is None else self._chunk(choice, item)

    def finish(self, choice: Choice, rest: Piece) -> bytes:
        item = self._shape.rest(choice, rest)
        data = b"" if item is None else self._chunk(choice, item)
        return data + self._chunk(choice, self._shape.end(choice))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        if not self._request.include_usage:
            return DONE
        head = {**self._head, "object": self._shape.chunk_object, "choices": []}
        return event({**head, "usage": usage_of(choices, self._shape.num_thought(choices))}) + DONE

    def failed(self, choice: Choice, error: ApiError) -> bytes:
        return error_event(error)

    def _chunk(
        self, choice: Choice, item: dict[str, Any], extras: dict[str, Any] | None = None
    ) -> bytes:
        if not (extras or self._request.continuous_usage):
            return self._before + dumps(item) + self._after
        data = {**self._head, "object": self._shape.chunk_object, "choices": [item]}
        if self._request.continuous_usage:
            data["usage"] = usage_of([choice])
        elif self._request.include_usage:
            data["usage"] = None
        return event(data | (extras or {}))


class Shape(ABC):
    """One endpoint's spelling of a choice."""

    whole_object: str
    chunk_object: str
    splices = True  # events of pieces differ in nothing but the text

    def __init__(self, logprobs: LogprobShapes) -> None:
        self._logprobs = logprobs

    @abstractmethod
    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]: ...

    @abstractmethod
    def opening(self, choice: Choice) -> list[dict[str, Any]]: ...

    @abstractmethod
    def piece(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """None: there is nothing to send yet."""

    def rest(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """The last piece, which may be empty."""
        return self.piece(choice, piece) if piece.text or piece.ids or piece.entries else None

    @abstractmethod
    def end(self, choice: Choice) -> dict[str, Any]:
        """The finish reason, without text."""

    def extras(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Further fields, beside `choices`."""
        return {}

    def num_thought(self, choices: Sequence[Choice]) -> int | None:
        """Tokens of reasoning; None where reasoning is not told apart from the answer."""
        return None

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """What was asked of the prompt: its text, its ids, its logprobs."""
        fields: dict[str, Any] = {}
        if rendered := choice.ask.prompt.rendered:
            fields["prompt_text"] = rendered
        if choice.ask.shown.token_ids:
            fields["prompt_token_ids"] = choice.ask.prompt.ids
        if (prompt_logprobs := self._logprobs.prompt(choice)) is not None:
            fields["prompt_logprobs"] = prompt_logprobs
        return fields


class ChatShape(Shape):
    """chat.completion and its chunks."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        shown = choice.ask.shown
        echoed = choice.ask.prompt.text if shown.echo else ""
        message = self._message(choice, echoed, piece.text)
        item = {
            "index": choice.ask.index,
            "message": {"role": "assistant", **message, "refusal": None},
            "logprobs": self._logprobs.chat(choice, piece.entries),
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }
        if shown.token_ids:
            item["token_ids"] = piece.ids
        if shown.prompt_ids:
            item["prompt_token_ids"] = choice.ask.prompt.ids
        if shown.meta_info:
            item["meta_info"] = self._logprobs.meta_info(choice, piece.entries)
        return item

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        content = choice.ask.prompt.text if choice.ask.shown.echo else ""
        item = self._delta(choice, {"role": "assistant", "content": content})
        if choice.ask.shown.token_ids:
            item["token_ids"] = []
        return [item]

    def piece(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        return self._item(choice, piece, {"content": piece.text})

    def end(self, choice: Choice) -> dict[str, Any]:
        item = self._item(choice, Piece(), {})
        reason = self._finish_reason(choice)
        return item | {"finish_reason": reason, "stop_reason": choice.stop_reason}

    def extras(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._of_prompt(choices[0])

    def _message(self, choice: Choice, echoed: str, text: str) -> dict[str, Any]:
        return {"content": echoed + text}

    def _finish_reason(self, choice: Choice) -> str | None:
        return choice.finish_reason

    def _item(self, choice: Choice, piece: Piece, delta: dict[str, Any]) -> dict[str, Any]:
        item = self._delta(choice, delta)
        if piece.entries:
            item["logprobs"] = self._logprobs.chat(choice, piece.entries)
        if choice.ask.shown.token_ids:
            item["token_ids"] = piece.ids
        return item

    def _delta(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": choice.ask.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }


class ParsedChatShape(ChatShape):
    """A chat whose reasoning and tool calls have fields of their own, as SGLang names them.

    A call comes in one delta, once it is complete.
    """

    splices = False

    def __init__(self, logprobs: LogprobShapes, parsing: Parsing, tokenizer: Tokenizer) -> None:
        super().__init__(logprobs)
        self._parsing = parsing
        self._tokenizer = tokenizer
        self._parsed: dict[int, _Parsed] = {}  # by the choice's index

    def piece(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        return self._told(choice, piece, self._of(choice).parser.feed(piece.text))

    def rest(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        parser = self._of(choice).parser
        return self._told(choice, piece, parser.feed(piece.text) + parser.finish())

    def _message(self, choice: Choice, echoed: str, text: str) -> dict[str, Any]:
        parsed = self._of(choice)
        told = parsed.parser.feed(text) + parsed.parser.finish()
        parsed.thoughts.add(told.reasoning)
        calls = self._calls(parsed, told)
        content = echoed + told.content
        message: dict[str, Any] = {"content": content or (None if calls else "")}
        if self._parsing.reasoning != "none":
            shown = told.reasoning if self._parsing.shows_reasoning else None
            message[self._parsing.reasoning_field] = shown or None
        if calls:
            message["tool_calls"] = calls
        return message

    def num_thought(self, choices: Sequence[Choice]) -> int | None:
        if self._parsing.reasoning == "none":
            return None
        return sum(self._of(choice).thoughts.num_tokens(choice) for choice in choices)

    def _finish_reason(self, choice: Choice) -> str | None:
        called = self._of(choice).num_calls and choice.finish_reason == "stop"
        return "tool_calls" if called else choice.finish_reason

    def _told(self, choice: Choice, piece: Piece, told: Told) -> dict[str, Any] | None:
        parsed = self._of(choice)
        first = parsed.num_calls
        calls = self._calls(parsed, told)
        delta: dict[str, Any] = {}
        if told.reasoning:
            parsed.thoughts.add(told.reasoning)
            if self._parsing.shows_reasoning:
                delta[self._parsing.reasoning_field] = told.reasoning
        if told.content:
            delta["content"] = told.content
        if calls:
            delta["tool_calls"] = [{"index": idx, **call} for idx, call in enumerate(calls, first)]
        return self._item(choice, piece, delta) if delta or piece.ids or piece.entries else None

    def _calls(self, parsed: "_Parsed", told: Told) -> list[dict[str, Any]]:
        calls = told.calls
        if self._parsing.one_call:
            calls = [] if parsed.num_calls else calls[:1]
        parsed.num_calls += len(calls)
        return [
            {
                "id": self._parsing.call_id(call),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]

    def _of(self, choice: Choice) -> "_Parsed":
        index = choice.ask.index
        if index not in self._parsed:
            self._parsed[index] = _Parsed(self._parsing.parser(), Thoughts(self._tokenizer))
        return self._parsed[index]


@dataclass(slots=True)
class _Parsed:
    """What is known of one choice's answer so far."""

    parser: MarkedText
    thoughts: Thoughts
    num_calls: int = 0


class CompletionShape(Shape):
    """text_completion, whole and in chunks."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, logprobs: LogprobShapes) -> None:
        super().__init__(logprobs)
        self._offsets: dict[int, int] = {}  # of each choice's next token in its text

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        text = piece.text
        entries = piece.entries
        if choice.ask.shown.echo:
            text = choice.ask.prompt.text + text
            entries = self._logprobs.echoed(choice) + entries
        item = self._item(choice, text, entries, piece.ids)
        item |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return item | self._of_prompt(choice)

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        of_prompt = self._of_prompt(choice)
        if not choice.ask.shown.echo:
            return [self._item(choice) | of_prompt] if of_prompt else []
        item = self._item(choice, choice.ask.prompt.text, self._logprobs.echoed(choice))
        return [item | of_prompt]

    def piece(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        return self._item(choice, piece.text, piece.entries, piece.ids)

    def end(self, choice: Choice) -> dict[str, Any]:
        reasons = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return self._item(choice) | reasons

    def _item(
        self,
        choice: Choice,
        text: str = "",
        entries: Sequence[Entry] = (),
        token_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        index = choice.ask.index
        logprobs = None
        if entries:
            offset = self._offsets.get(index, 0)
            logprobs, self._offsets[index] = self._logprobs.completion(choice, entries, offset)
        item = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return item | {"token_ids": token_ids} if choice.ask.shown.token_ids else item


def chat_answer(
    request: Request,
    tokenizer: Tokenizer,
    model_name: str,
    created: int,
    parsing: Parsing | None = None,
) -> _Answer:
    """Spells the answer of POST /v1/chat/completions."""
    logprobs = LogprobShapes(tokenizer)
    shape = ParsedChatShape(logprobs, parsing, tokenizer) if parsing else ChatShape(logprobs)
    return _Answer(request, shape, model_name, created)


def completion_answer(
    request: Request, tokenizer: Tokenizer, model_name: str, created: int
) -> _Answer:
    """Spells the answer of POST /v1/completions."""
    return _Answer(request, CompletionShape(LogprobShapes(tokenizer)), model_name, created)
