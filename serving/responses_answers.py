"""Spells answers as OpenAI's Responses do: whole, or as the events of a stream.

Shapes: OpenAI's API reference (response, and responses-streaming). An answer is a list of items:
what was thought, what was said, and each call. Streamed, an item is there from `output_item.added`
to `output_item.done`, and one is open at a time. Every event has a number, and its type twice.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.choice import Choice, Entry, Piece
from serving.errors import ApiError
from serving.json_bytes import dumps
from serving.marked_text import MarkedText, Told
from serving.openai_answers import LogprobShapes, usage_of
from serving.parsing import Parsing
from serving.protocol import Request
from serving.responses_fields import ReasoningOptions, ResponsesFields
from serving.tokenizer import Tokenizer
from serving.tool_calls import ToolCall

_TOOL = {"type": "function", "description": None, "parameters": None, "strict": None}
_ERROR_CODES = {429: "rate_limit_exceeded"}  # clients know few others than server_error


@dataclass(slots=True)
class _Text:
    """An item that is being told: what was thought, or a message."""

    kind: str  # "reasoning" or "message"
    item_id: str
    delta: bytes = b""  # its events of text, up to what differs between them
    texts: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def delta_type(self) -> str:
        return "reasoning_text" if self.kind == "reasoning" else "output_text"


class ResponsesAnswer:
    """The answer of POST /v1/responses, which has one choice (endpoints.Spelling)."""

    is_cumulative = False

    def __init__(
        self,
        request: Request,
        fields: ResponsesFields,
        tokenizer: Tokenizer,
        model_name: str,
        created: int,
        parsing: Parsing,
    ) -> None:
        """created: unix seconds."""
        self._request = request
        self._fields = fields
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._created = created
        self._parsing = parsing
        self._parser: MarkedText | None = parsing.parser() if parsing else None
        self._logprobs = LogprobShapes(tokenizer)
        self._output: list[dict[str, Any]] = []  # items that are over
        self._open: _Text | None = None
        self._entries: list[Entry] = []  # of tokens whose text was not said yet
        self._reasoning: list[str] = []
        self._num_calls = 0
        self._num_events = 0
        self._error: ApiError | None = None

    # --- whole ---

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The body of an answer that is not streamed."""
        (choice,) = choices
        self._tell(choice, choice.drain(), is_last=True)
        return dumps(self._response(choice))

    # --- streamed (serving.stream.Events) ---

    def opening(self, choice: Choice) -> bytes:
        response = self._response(None)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def frame(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return None  # events have numbers

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        return self._tell(choice, piece, is_last=False)

    def finish(self, choice: Choice, rest: Piece) -> bytes:
        return self._tell(choice, rest, is_last=True)

    def closing(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        response = self._response(choice)
        kind = "completed" if response["status"] == "completed" else "incomplete"
        return self._event(f"response.{kind}", response=response)

    def failed(self, error: ApiError) -> bytes:
        self._error = error
        return self._event("response.failed", response=self._response(None))

    # --- items ---

    def _tell(self, choice: Choice, piece: Piece, is_last: bool) -> bytes:
        """The events of a piece; with the last one nothing stays open."""
        self._entries += piece.entries
        parser = self._parser
        told = Told(content=piece.text) if parser is None else parser.feed(piece.text)
        if parser is not None and is_last:
            told += parser.finish()
        events = b""
        if told.reasoning:
            self._reasoning.append(told.reasoning)
            events += self._say(choice, "reasoning", told.reasoning)
        if told.content:
            events += self._say(choice, "message", told.content)
        for call in told.calls:
            if not (self._num_calls and self._parsing.one_call):
                events += self._call(choice, call)
        if is_last:
            if not self._output and self._open is None:
                events += self._say(choice, "message", "")  # an answer without a word is one, too
            events += self._close(choice, choice.finish_reason != "stop")
        return events

    def _say(self, choice: Choice, kind: str, text: str) -> bytes:
        events = b""
        if self._open is None or self._open.kind != kind:
            events += self._close(choice, is_cut=False) + self._begin(choice, kind)
        assert self._open is not None, "it was begun"
        self._open.texts.append(text)
        more = b""
        if kind == "message":
            entries, self._entries = self._entries, []
            self._open.entries += entries
            more = b',"logprobs":' + dumps(self._logprobs_of(choice, entries))
        if not text:
            return events
        return events + b'%b,"sequence_number":%d%b,"delta":%b}\n\n' % (
            self._open.delta, self._next_number(), more, dumps(text),
        )  # fmt: skip

    def _begin(self, choice: Choice, kind: str) -> bytes:
        prefix = "rs" if kind == "reasoning" else "msg"
        self._open = _Text(kind, f"{prefix}_{secrets.token_hex(16)}")
        item = self._item(choice, self._open, "in_progress") | {"content": []}
        added = self._event("response.output_item.added", **self._at(), item=item)
        part = self._part(choice, self._open)
        kind = f"response.{self._open.delta_type}.delta"
        same = dumps({"type": kind, **self._place()})[:-1]
        self._open.delta = b"event: %b\ndata: %b" % (kind.encode(), same)
        return added + self._event("response.content_part.added", **self._place(), part=part)

    def _close(self, choice: Choice, is_cut: bool) -> bytes:
        """The open item is over. is_cut: so is the answer, before its end."""
        told = self._open
        if told is None:
            return b""
        more: dict[str, Any] = {}
        if told.kind == "message":
            told.entries += self._entries
            self._entries = []
            more = {"logprobs": self._logprobs_of(choice, told.entries)}
        text = "".join(told.texts)
        part = self._part(choice, told)
        item = self._item(choice, told, "incomplete" if is_cut else "completed")
        done = f"response.{told.delta_type}.done"
        events = self._event(done, **self._place(), **more, text=text)
        events += self._event("response.content_part.done", **self._place(), part=part)
        events += self._event("response.output_item.done", **self._at(), item=item)
        self._output.append(item)
        self._open = None
        return events

    def _call(self, choice: Choice, call: ToolCall) -> bytes:
        """A call comes as a whole, so its item opens and closes at once."""
        events = self._close(choice, is_cut=False)
        self._num_calls += 1
        item = {
            "id": f"fc_{secrets.token_hex(16)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": self._parsing.new_call_id(),
            "name": call.name,
            "arguments": "",
        }
        done = item | {"status": "completed", "arguments": call.arguments}
        at = self._at()
        where = at | {"item_id": item["id"]}
        kind = "response.function_call_arguments"
        events += self._event("response.output_item.added", **at, item=item)
        events += self._event(f"{kind}.delta", **where, delta=call.arguments)
        events += self._event(f"{kind}.done", **where, name=call.name, arguments=call.arguments)
        events += self._event("response.output_item.done", **at, item=done)
        self._output.append(done)
        return events

    # --- shapes ---

    def _event(self, kind: str, **data: Any) -> bytes:
        told = {"type": kind, "sequence_number": self._next_number(), **data}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), dumps(told))

    def _next_number(self) -> int:
        number, self._num_events = self._num_events, self._num_events + 1
        return number

    def _at(self) -> dict[str, Any]:
        """Where the open item, or the next one, is."""
        return {"output_index": len(self._output)}

    def _place(self) -> dict[str, Any]:
        assert self._open is not None, "only an open item has parts"
        return {**self._at(), "item_id": self._open.item_id, "content_index": 0}

    def _part(self, choice: Choice, told: _Text) -> dict[str, Any]:
        text = "".join(told.texts)
        if told.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs_of(choice, told.entries)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item(self, choice: Choice, told: _Text, status: str) -> dict[str, Any]:
        more: dict[str, Any] = (
            {"summary": []} if told.kind == "reasoning" else {"role": "assistant"}
        )
        content = [self._part(choice, told)]
        return {"id": told.item_id, "type": told.kind, "status": status, **more, "content": content}

    def _logprobs_of(self, choice: Choice, entries: Sequence[Entry]) -> list[dict[str, Any]]:
        shape = self._logprobs.chat(choice, entries)
        items: list[dict[str, Any]] = [] if shape is None else shape["content"]
        return items

    def _response(self, choice: Choice | None) -> dict[str, Any]:
        """choice: of an answer that is over; None while it goes on, or where it failed."""
        fields, sampling = self._fields, self._request.choices[0].sampling
        reasoning = fields.reasoning or ReasoningOptions()
        status, error, incomplete = self._status(choice)
        return {
            "id": self._request.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": incomplete,
            "background": False,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "metadata": fields.metadata or {},
            "model": self._model_name,
            "output": self._output,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": fields.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": fields.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": self._format(), "verbosity": "medium"},
            "tool_choice": fields.tool_choice or "auto",
            "tools": [_TOOL | tool for tool in fields.tools or ()],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if choice is None else self._usage(choice),
            "user": fields.user,
        }

    def _status(
        self, choice: Choice | None
    ) -> tuple[str, dict[str, str] | None, dict[str, str] | None]:
        """(status, error, incomplete_details)."""
        if self._error is not None:
            code = _ERROR_CODES.get(self._error.status, "server_error")
            return "failed", {"code": code, "message": self._error.message}, None
        if choice is None:
            return "in_progress", None, None
        if choice.finish_reason == "length":
            return "incomplete", None, {"reason": "max_output_tokens"}
        return "cancelled" if choice.finish_reason == "abort" else "completed", None, None

    def _format(self) -> dict[str, Any]:
        asked = None if self._fields.text is None else self._fields.text.format
        if asked is None or asked.type != "json_schema":
            return {"type": "text" if asked is None else asked.type}
        return {
            "type": asked.type,
            "name": asked.name or "",
            "description": asked.description,
            "schema": asked.schema,
            "strict": True,  # always
        }

    def _usage(self, choice: Choice) -> dict[str, Any]:
        usage = usage_of([choice])
        thought = "".join(self._reasoning)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,  # none that anybody pays for
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": len(self._tokenizer.encode(thought, False)) if thought else 0
            },
            "total_tokens": usage["total_tokens"],
        }
