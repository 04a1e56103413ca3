"""Spells answers as Anthropic's Messages API does: whole, or as the events of a stream.

Shapes: Anthropic's API reference (messages, and streaming messages). An answer is a message of
blocks: thinking, text, and one for each call. In a stream a block is open from
`content_block_start` to `content_block_stop`, one block at a time.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import orjson

from serving.choice import Choice, Piece
from serving.errors import ApiError, messages_error_event
from serving.json_bytes import dumps
from serving.marked_text import MarkedText, Said, Thought, Told
from serving.messages_fields import MessagesFields
from serving.parsing import Parsing
from serving.protocol import Request
from serving.stream import Frame
from serving.tokenizer import Tokenizer
from serving.tool_calls import ToolCall
from serving.usage import Thoughts, usage_of

# Clients drop a thinking block without a signature when they send a conversation back. Nothing here
# reads it.
_SIGNATURE: Final = "unsigned"
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens"}


class MessagesAnswer:
    """Spells the answer of POST /v1/messages, which has one choice (stream.Spelling)."""

    is_cumulative = False

    def __init__(
        self,
        request: Request,
        fields: MessagesFields,
        tokenizer: Tokenizer,
        model_name: str,
        parsing: Parsing,
    ) -> None:
        self._request_id = request.request_id
        self._model_name = model_name
        self._parsing = parsing
        thinking = fields.thinking
        self._max_tokens = fields.max_tokens or 0
        self._hides_thoughts = thinking is not None and thinking.display == "omitted"
        self._parser: MarkedText | None = parsing.parser() if parsing else None
        self._thoughts = Thoughts(tokenizer)
        self._content: list[dict[str, Any]] = []  # closed blocks, where the answer is whole
        self._open: type[Thought | Said] | None = None
        self._texts: list[str] = []  # of the open block, where the answer is whole
        self._num_blocks = 0  # closed ones
        self._num_calls = 0
        self._kinds: set[type[Thought | Said]] = set()  # of all blocks of text so far
        self._is_whole = False
        self._events: list[bytes] = []  # not sent yet

    # --- whole ---

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The body of an answer that is not streamed."""
        (choice,) = choices
        self._is_whole = True
        self._tell(choice.drain().text, is_last=True)
        return dumps(self._message(choice) | self._ending(choice))

    # --- streamed (serving.stream.Events) ---

    def opening(self, choice: Choice) -> bytes:
        self._event("message_start", message=self._message(choice))
        if self._parser is None:
            self._begin(Said)
        return self._sent()

    def frame(self, choice: Choice) -> Frame | None:
        if self._parser is not None:
            return None
        # Without a parser there is one block of text, from the beginning to the end.
        data = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta"}}
        before = b"event: content_block_delta\ndata: %b" % dumps(data).removesuffix(b"}}")
        return Frame(before + b',"text":', b"}}\n\n")

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        self._tell(piece.text, is_last=False)
        return self._sent()

    def finish(self, choice: Choice, rest: Piece) -> bytes:
        self._tell(rest.text, is_last=True)
        return self._sent()

    def closing(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        ending = self._ending(choice)
        usage = ending.pop("usage")
        self._event("message_delta", delta=ending, usage=usage)
        self._event("message_stop")
        return self._sent()

    def failed(self, choice: Choice, error: ApiError) -> bytes:
        return messages_error_event(error)

    # --- blocks ---

    def _tell(self, text: str, is_last: bool) -> None:
        """Handle a piece of the text. After the last one no block stays open."""
        parser = self._parser
        told = Told([Said(text)]) if parser is None else parser.feed(text)
        if parser is not None and is_last:
            told += parser.finish()
        for part in _joined(told):
            if isinstance(part, ToolCall):
                self._call(part)
            else:
                self._say(type(part), part.text)
        if is_last:
            if not self._num_blocks and self._open is None:
                self._begin(Said)  # an empty answer is an empty text
            self._close()

    def _say(self, kind: type[Thought | Said], text: str) -> None:
        """Add text to the open block, or begin a new block if it is of another kind."""
        if self._open is not kind:
            self._close()
            if kind in self._kinds:  # parsers put a line break between two parts of a kind
                text = text.removeprefix("\n")
            self._begin(kind)
        if kind is Thought:
            self._thoughts.add(text)
            if self._hides_thoughts:
                return
        if self._is_whole:
            self._texts.append(text)
        elif text:
            name = "thinking" if kind is Thought else "text"
            self._delta(f"{name}_delta", **{name: text})

    def _begin(self, kind: type[Thought | Said]) -> None:
        self._kinds.add(kind)
        self._open = kind
        self._event("content_block_start", index=self._num_blocks, content_block=_block(kind))

    def _close(self) -> None:
        """Close the open block, if there is one."""
        kind, self._open = self._open, None
        if kind is None:
            return
        if kind is Thought:
            self._delta("signature_delta", signature=_SIGNATURE)
        self._end(_block(kind, "".join(self._texts), _SIGNATURE))
        self._texts = []

    def _call(self, call: ToolCall) -> None:
        """Add a call. It comes as a whole, so its block opens and closes at once."""
        if self._num_calls and self._parsing.one_call:
            return
        self._close()
        self._num_calls += 1
        block: dict[str, Any] = {
            "type": "tool_use",
            "id": self._parsing.call_id(call),
            "name": call.name,
            "input": {},
        }
        self._event("content_block_start", index=self._num_blocks, content_block=block)
        self._delta("input_json_delta", partial_json=call.arguments)
        self._end(block | {"input": orjson.Fragment(call.arguments)})

    def _end(self, block: dict[str, Any]) -> None:
        self._event("content_block_stop", index=self._num_blocks)
        self._num_blocks += 1
        if self._is_whole:
            self._content.append(block)

    # --- shapes ---

    def _delta(self, kind: str, **data: str) -> None:
        delta = {"type": kind, **data}
        self._event("content_block_delta", index=self._num_blocks, delta=delta)

    def _event(self, kind: str, **data: Any) -> None:
        if not self._is_whole:
            told = dumps({"type": kind, **data})
            self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), told))

    def _sent(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)

    def _message(self, choice: Choice) -> dict[str, Any]:
        return {
            "id": self._request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(choice),
        }

    def _ending(self, choice: Choice) -> dict[str, Any]:
        reason: str = choice.finish_reason or ""
        if choice.matched is not None:
            reason = "stop_sequence"
        elif reason == "stop" and self._num_calls:
            reason = "tool_use"
        elif reason == "length" and choice.num_tokens < self._max_tokens:
            reason = "model_context_window_exceeded"
        details = {"thinking_tokens": self._thoughts.num_tokens(choice)}
        return {
            "stop_reason": _STOP_REASONS.get(reason, reason),
            "stop_sequence": choice.matched,
            "usage": self._usage(choice) | {"output_tokens_details": details},
        }

    def _usage(self, choice: Choice) -> dict[str, Any]:
        """input_tokens are, as in Anthropic's API, those that no cache had."""
        usage = usage_of([choice])
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _block(kind: type[Thought | Said], text: str = "", signature: str = "") -> dict[str, Any]:
    if kind is Thought:
        return {"type": "thinking", "thinking": text, "signature": signature}
    return {"type": "text", "text": text}


def _joined(told: Told) -> Iterator[Thought | Said | ToolCall]:
    """The parts, with adjacent texts of one kind as one."""
    for kind, parts in itertools.groupby(told.parts, type):
        if kind is ToolCall:
            yield from parts
        else:
            yield kind("".join(part.text for part in parts if not isinstance(part, ToolCall)))
