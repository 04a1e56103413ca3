"""Spells answers as OpenAI's Responses API does: whole, or as the events of a stream.

Shapes: OpenAI's API reference (response, and responses-streaming). An answer is a list of items:
reasoning, messages, and one for each call. In a stream an item is open from `output_item.added` to
`output_item.done`, one item at a time. Every event has a number, and states its type twice.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from serving.choice import Choice, Entry, Piece
from serving.errors import ApiError, bad_field
from serving.json_bytes import dumps, spelled
from serving.marked_text import MarkedText, Said, Thought, Told
from serving.openai_answers import LogprobShapes
from serving.parsing import Parsing
from serving.protocol import Request
from serving.responses_fields import ReasoningOptions, ResponsesFields, functions_of
from serving.stream import Frame, Numbers
from serving.tokenizer import Tokenizer
from serving.tool_calls import ToolCall
from serving.usage import Thoughts, usage_of

_TOOL = {"type": "function", "description": None, "parameters": None, "strict": None}
_NUMBERED = b',"sequence_number":%d}\n\n'  # the end of an event, after its text
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # else server_error


@dataclass(slots=True)
class _Item:
    """The open item of text. delta: its delta events, up to where they differ.

    is_summary: a thought, whose text is the item's summary and not its content.
    """

    kind: type[Thought | Said]
    item_id: str
    is_summary: bool
    delta: bytes = b""
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)  # JSON, one entry an event

    @property
    def type(self) -> str:
        return "reasoning" if self.kind is Thought else "message"

    @property
    def list_name(self) -> str:
        """The field of the item that has its part."""
        return "summary" if self.is_summary else "content"

    @property
    def part_type(self) -> str:
        if self.is_summary:
            return "summary_text"
        return "reasoning_text" if self.kind is Thought else "output_text"

    @property
    def text_event(self) -> str:
        return f"response.{'reasoning_' if self.is_summary else ''}{self.part_type}"

    @property
    def part_event(self) -> str:
        return f"response.{'reasoning_summary' if self.is_summary else 'content'}_part"

    @property
    def all_logprobs(self) -> orjson.Fragment:
        """The logprobs of all events, as one JSON list."""
        return orjson.Fragment(b"[%b]" % b",".join(self.logprobs))


class ResponsesAnswer:
    """Spells the answer of POST /v1/responses, which has one choice (stream.Spelling)."""

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
        """created: unix seconds. Raises ApiError for a field that the answer cannot repeat."""
        self._request = request
        self._model_name = model_name
        self._created = created
        self._parsing = parsing
        self._shown_again = _shown_again(fields)
        self._summarizes = fields.reasoning is not None and fields.reasoning.any_summary is not None
        self._namespaces = {tool["name"]: space for tool, space in functions_of(fields) if space}
        self._parser: MarkedText | None = parsing.parser() if parsing else None
        self._logprobs = LogprobShapes(tokenizer)
        self._output: list[dict[str, Any]] = []  # closed items
        self._open: _Item | None = None
        self._kinds: set[type[Thought | Said]] = set()  # of all items of text so far
        self._entries: list[Entry] = []  # of the tokens since the last text or call
        self._thoughts = Thoughts(tokenizer)
        self._num_calls = 0
        self._is_whole = False
        self._events: list[bytes] = []  # not sent yet
        self._num_events = 0
        self._error: ApiError | None = None

    # --- whole ---

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The body of an answer that is not streamed."""
        (choice,) = choices
        self._is_whole = True
        self._tell(choice, choice.drain(), is_last=True)
        return dumps(self._response(choice))

    # --- streamed (serving.stream.Events) ---

    def opening(self, choice: Choice) -> bytes:
        response = spelled(self._response(None))
        self._event("response.created", response=response)
        self._event("response.in_progress", response=response)
        return self._sent()

    def frame(self, choice: Choice) -> Frame | None:
        item = self._open
        if self._parser is not None or not choice.plain or item is None:
            return None
        before = item.delta + b',"logprobs":[],"delta":'
        return Frame(before, _NUMBERED, Numbers(self._num_events, self._written))

    def _written(self, count: int, text: bytes) -> None:
        """Note events of the open item that were written elsewhere: serving.stream.Numbers."""
        self._num_events += count
        assert self._open is not None, "it had a frame"
        self._open.texts.append(orjson.loads(b'"%b"' % text))

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        self._tell(choice, piece, is_last=False)
        return self._sent()

    def finish(self, choice: Choice, rest: Piece) -> bytes:
        self._tell(choice, rest, is_last=True)
        return self._sent()

    def closing(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        response = self._response(choice)
        kind = "completed" if response["status"] == "completed" else "incomplete"
        self._event(f"response.{kind}", response=response)
        return self._sent()

    def failed(self, choice: Choice, error: ApiError) -> bytes:
        self._error = error
        self._close(is_cut=True)
        self._event("response.failed", response=self._response(None))
        return self._sent()

    # --- items ---

    def _tell(self, choice: Choice, piece: Piece, is_last: bool) -> None:
        """Handle a piece of the text. After the last one no item stays open."""
        if self._parser is None and not (piece.entries or is_last):
            self._say(choice, Said, [piece.text], [])
            return
        parts = _Parts()
        at = 0
        # With logprobs token by token, so that each logprob goes with its token's text.
        for entry in piece.entries:
            end = at + entry.num_chars
            self._entries.append(entry)
            self._divide(piece.text[at:end], parts)
            at = end
        self._divide(piece.text[at:], parts)
        if is_last and self._parser is not None:
            self._sort(self._parser.finish(), parts)
        for part in parts.found:
            if isinstance(part, ToolCall):
                self._call(part)
            else:
                self._say(choice, *part)
        if not is_last:
            return
        if not self._output and self._open is None:
            self._begin(Said)  # an empty answer is a message, too
        if self._open is not None and self._open.kind is Said and self._entries:
            self._say(choice, Said, [], self._entries)  # tokens without text, such as the last one
        self._close(is_cut=choice.finish_reason != "stop")

    def _divide(self, text: str, parts: "_Parts") -> None:
        if text:
            read = Told([Said(text)]) if self._parser is None else self._parser.feed(text)
            self._sort(read, parts)

    def _sort(self, told: Told, parts: "_Parts") -> None:
        """Add the parsed parts, each with the logprobs of the tokens since the part before it."""
        for part in told.parts:
            if isinstance(part, ToolCall):
                if not (self._num_calls and self._parsing.one_call):
                    self._num_calls += 1
                    parts.found.append(part)
            else:
                entries = self._entries if isinstance(part, Said) else []
                parts.add(type(part), part.text, entries)
            self._entries = []

    def _say(
        self, choice: Choice, kind: type[Thought | Said], texts: list[str], entries: list[Entry]
    ) -> None:
        """Add text and logprobs to the open item, or begin a new item if it is of another kind."""
        text = "".join(texts)
        if self._open is None or self._open.kind is not kind:
            self._close(is_cut=False)
            if kind in self._kinds:  # parsers put a line break between two parts of a kind
                text = text.removeprefix("\n")
            self._begin(kind)
        item = self._open
        assert item is not None, "it was begun"
        item.texts.append(text)
        if kind is Thought:
            self._thoughts.add(text)
        logprobs = self._logprobs_of(choice, entries) if entries else b""
        if logprobs:
            item.logprobs.append(logprobs)
        if self._is_whole or not (text or logprobs):
            return
        more = b',"logprobs":[%b]' % logprobs if kind is Said else b""
        end = _NUMBERED % self._next_number()
        self._events.append(b'%b%b,"delta":%b%b' % (item.delta, more, dumps(text), end))

    def _begin(self, kind: type[Thought | Said]) -> None:
        self._kinds.add(kind)
        item_id = f"{'rs' if kind is Thought else 'msg'}_{secrets.token_hex(16)}"
        self._open = item = _Item(kind, item_id, self._summarizes and kind is Thought)
        delta = f"{item.text_event}.delta"
        same = dumps({"type": delta, **self._place(item)})[:-1]
        item.delta = b"event: %b\ndata: %b" % (delta.encode(), same)
        shape = _shape(item, "in_progress", [])
        self._event("response.output_item.added", **self._at(), item=shape)
        self._event(f"{item.part_event}.added", **self._place(item), part=_part(item, ""))

    def _close(self, is_cut: bool) -> None:
        """Close the open item, if there is one. is_cut: the answer was cut before its end."""
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(item.texts)
        part = _part(item, text)
        more = {"logprobs": part["logprobs"]} if item.kind is Said else {}
        cut = {"status": "incomplete"} if is_cut and item.is_summary else {}
        shape = _shape(item, "incomplete" if is_cut else "completed", [part])
        self._event(f"{item.text_event}.done", **self._place(item), **more, text=text)
        self._event(f"{item.part_event}.done", **self._place(item), part=part, **cut)
        self._event("response.output_item.done", **self._at(), item=shape)
        self._output.append(shape)

    def _call(self, call: ToolCall) -> None:
        """Add a call. It comes as a whole, so its item opens and closes at once."""
        self._close(is_cut=False)
        item = {
            "id": f"fc_{secrets.token_hex(16)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": self._parsing.call_id(call),
            "name": call.name,
            "arguments": "",
        }
        if (namespace := self._namespaces.get(call.name)) is not None:
            item["namespace"] = namespace
        done = item | {"status": "completed", "arguments": call.arguments}
        at = self._at()
        where = at | {"item_id": item["id"]}
        kind = "response.function_call_arguments"
        self._event("response.output_item.added", **at, item=item)
        self._event(f"{kind}.delta", **where, delta=call.arguments)
        self._event(f"{kind}.done", **where, name=call.name, arguments=call.arguments)
        self._event("response.output_item.done", **at, item=done)
        self._output.append(done)

    # --- shapes ---

    def _event(self, kind: str, **data: Any) -> None:
        if not self._is_whole:
            told = {"type": kind, "sequence_number": self._next_number(), **data}
            self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), dumps(told)))

    def _sent(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)

    def _next_number(self) -> int:
        number, self._num_events = self._num_events, self._num_events + 1
        return number

    def _at(self) -> dict[str, Any]:
        """The index of the open item, or of the next one."""
        return {"output_index": len(self._output)}

    def _place(self, item: _Item) -> dict[str, Any]:
        return {**self._at(), "item_id": item.item_id, f"{item.list_name}_index": 0}

    def _logprobs_of(self, choice: Choice, entries: Sequence[Entry]) -> bytes:
        """The entries' logprobs as JSON, without the brackets of the list."""
        shape = self._logprobs.chat(choice, entries)
        return b"" if shape is None else dumps(shape["content"])[1:-1]

    def _response(self, choice: Choice | None) -> dict[str, Any]:
        """The `response` object. choice: the finished one; None while it runs, or if it failed."""
        sampling = self._request.choices[0].sampling
        status, error, incomplete = self._status(choice)
        return {
            "id": self._request.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": incomplete,
            "background": False,
            "model": self._model_name,
            "output": self._output,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "usage": None if choice is None else self._usage(choice),
            **self._shown_again,
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

    def _usage(self, choice: Choice) -> dict[str, Any]:
        usage = usage_of([choice])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,  # writing to the cache is not billed
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._thoughts.num_tokens(choice)},
            "total_tokens": usage["total_tokens"],
        }


class _Parts:
    """The parts of a piece: calls, and texts. Adjacent texts of one kind become one event."""

    def __init__(self) -> None:
        self.found: list[ToolCall | tuple[type[Thought | Said], list[str], list[Entry]]] = []

    def add(self, kind: type[Thought | Said], text: str, entries: list[Entry]) -> None:
        """Add text, and the logprobs of its tokens."""
        last = self.found[-1] if self.found else None
        if last is None or isinstance(last, ToolCall) or last[0] is not kind:
            self.found.append((kind, [text], entries))
        else:
            last[1].append(text)
            last[2].extend(entries)


def _part(item: _Item, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": item.part_type, "text": text}
    if item.kind is Said:
        part |= {"annotations": [], "logprobs": item.all_logprobs}
    return part


def _shape(item: _Item, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    more: dict[str, Any] = {"summary": []} if item.kind is Thought else {"role": "assistant"}
    shape = {"id": item.item_id, "type": item.type, "status": status, **more, "content": []}
    return shape | {item.list_name: parts}


def _shown_again(fields: ResponsesFields) -> dict[str, orjson.Fragment]:
    """The fields of the request that the answer repeats, as JSON."""
    reasoning = fields.reasoning or ReasoningOptions()
    values = {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.any_summary},
        "safety_identifier": fields.safety_identifier,
        "text": {"format": _format_of(fields), "verbosity": "medium"},
        "tool_choice": fields.tool_choice or "auto",
        "truncation": fields.truncation or "disabled",
        "tools": [_TOOL | function for function, _ in functions_of(fields)],
        "top_logprobs": fields.top_logprobs or 0,
        "user": fields.user,
    }
    shown = {}
    for name, value in values.items():
        try:
            shown[name] = spelled(value)
        except RecursionError as error:
            raise bad_field(name, "nested too deeply") from error
    return shown


def _format_of(fields: ResponsesFields) -> dict[str, Any]:
    asked = None if fields.text is None else fields.text.format
    if asked is None or asked.type != "json_schema":
        return {"type": "text" if asked is None else asked.type}
    return {
        "type": asked.type,
        "name": asked.name or "",
        "description": asked.description,
        "schema": asked.schema,
        "strict": asked.strict is True,  # otherwise the schema was read leniently
    }
