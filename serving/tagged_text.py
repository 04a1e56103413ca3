"""Parses thoughts between `<think>` tags and tool calls between markers, as most models write them.

Formats: the models' own chat templates. Their names: sgl-project/sglang:
python/sglang/srt/function_call.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from serving.marked_text import MarkedText, Said, Thought
from serving.tool_calls import (
    HY_SUFFIX,
    ToolCall,
    Tools,
    deepseek_call,
    glm_call,
    hy_call,
    json_calls,
    kimi_call,
    minimax_calls,
    mistral_calls,
    qwen_coder_calls,
)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes tool calls."""

    begin: str
    end: str  # "": a call ends where the next begins, or with the text
    read: Callable[[str, Tools], list[ToolCall]]  # parses what is between; ValueError: not a call
    around: tuple[str, ...] = ()  # markers around calls, which mean nothing by themselves
    within: tuple[str, ...] = ()  # markers inside a call, which `read` parses
    also: str = ""  # how the text of a call begins; starts a call even if the model omits `begin`
    bare: bool = False  # an answer that begins with a brace is a call, too
    untyped: bool = False  # arguments are not JSON: the tool's schema says which types they have
    ends_thought: bool = False  # before a call a model may omit the end of its thought
    needs_end: bool = False  # only its end tells a whole call from one that was cut off
    opening: str = ""  # what the model, told of tools, writes before an answer without calls

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the format."""
        return (self.begin, self.end, *self.around, *self.within)


class Tags(NamedTuple):
    """What a family of models writes around a thought, or around the answer that follows it."""

    begin: str
    end: str


THINK: Final = Tags("<think>", "</think>")
# Of families that write others, by the names of `--reasoning-parser`.
THINK_TAGS: Final = {"hy_v3": Tags(f"<think{HY_SUFFIX}>", f"</think{HY_SUFFIX}>")}
ANSWER_TAGS: Final = {
    "ernie45": Tags("<response>", "</response>"),
    "hunyuan_a13b": Tags("<answer>", "</answer>"),
}


def _json(read: Callable[[str], list[ToolCall]]) -> Callable[[str, Tools], list[ToolCall]]:
    return lambda text, _: read(text)


_HERMES = CallFormat("<tool_call>", "</tool_call>", _json(json_calls))
_DEEPSEEK = CallFormat(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    _json(deepseek_call),
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    within=("<｜tool▁sep｜>",),
)
_GLM = CallFormat(
    "<tool_call>",
    "</tool_call>",
    glm_call,
    within=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    untyped=True,
    needs_end=True,
)
_HY = CallFormat(
    f"<tool_call{HY_SUFFIX}>",
    f"</tool_call{HY_SUFFIX}>",
    hy_call,
    around=(f"<tool_calls{HY_SUFFIX}>", f"</tool_calls{HY_SUFFIX}>"),
    within=(
        f"<tool_sep{HY_SUFFIX}>",
        *(f"<{end}{name}{HY_SUFFIX}>" for name in ("arg_key", "arg_value") for end in ("", "/")),
    ),
    untyped=True,
    needs_end=True,
)
CALL_FORMATS: Final = {
    "deepseekv3": _DEEPSEEK,
    "deepseekv31": _DEEPSEEK,
    "ernie45": _HERMES,
    "glm45": _GLM,
    "glm47": _GLM,
    "hermes": _HERMES,
    "hunyuan_a13b": CallFormat(
        "<tool_calls>", "</tool_calls>", _json(json_calls), opening="助手："
    ),
    "hy_v3": _HY,
    "kimi_k2": CallFormat(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _json(kimi_call),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        within=("<|tool_call_argument_begin|>",),
        ends_thought=True,
    ),
    "llama3": CallFormat("<|python_tag|>", "", _json(json_calls), bare=True),
    "minimax-m2": CallFormat(
        "<minimax:tool_call>", "</minimax:tool_call>", minimax_calls, untyped=True
    ),
    "mistral": CallFormat("[TOOL_CALLS]", "", _json(mistral_calls), within=("[CALL_ID]", "[ARGS]")),
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3_coder": CallFormat(
        "<tool_call>", "</tool_call>", qwen_coder_calls, also="<function=", untyped=True
    ),
}


# What tells where JSON's strings begin and end: quotes, what a backslash quotes, and line breaks.
_TELLING: Final = re.compile(r'\\[^\n]?|["\n]')


class _JsonStrings:
    """Follows a text, to tell whether it is inside one of JSON's strings.

    No string holds a line break as it is. A text with one in a string is no JSON, and from there on
    nothing tells where its strings are.
    """

    def __init__(self) -> None:
        self.inside = False
        self.is_broken = False
        self._escapes = False  # the text so far ends with a backslash

    def feed(self, text: str) -> None:
        if self.is_broken or not text:
            return
        at = 1 if self._escapes and text[0] != "\n" else 0
        self._escapes = False
        for found in _TELLING.finditer(text, at):
            if found[0] == '"':
                self.inside = not self.inside
            elif found[0] == "\n":
                self.is_broken = self.inside
                if self.is_broken:
                    self.inside = False
                    return
            else:
                self._escapes = len(found[0]) == 1 and found.end() == len(text)


class _Where(Enum):
    BEGIN = auto()  # nothing but space so far
    THOUGHT = auto()
    CONTENT = auto()
    CALL = auto()


class TaggedText(MarkedText):
    """Parses thoughts between tags at the beginning, and calls in the format `calls`.

    Space around thoughts, calls and tags is dropped; a text without them is returned as it is. But
    texts with calls between them are on lines of their own, as in HarmonyText: a chat shows them as
    one.
    """

    def __init__(
        self,
        think: Tags | None,
        in_thought: bool,
        calls: CallFormat | None,
        tools: Tools,
        tags: Tags | None = None,
        in_answer: bool = False,
    ) -> None:
        """think: the tags of thoughts, if these are parsed.

        in_thought: the prompt opened a thought, or the model does so unasked.

        in_answer: the prompt already has the tag that begins the answer.
        """
        super().__init__(tools)
        self._thinks = think is not None
        self._think_begin, self._think_end = think or THINK
        self._calls = calls
        self._tags = None if in_answer else tags  # None once the answer has begun
        self._answer_end = tags.end if in_answer and tags is not None else ""
        self._opening = calls.opening if calls is not None else ""  # "" once seen
        self._where = _Where.THOUGHT if in_thought else _Where.BEGIN
        self._trims = in_thought  # drop the space that comes next
        self._has_said = False
        self._left_open = False  # a call interrupted a thought, whose end may still come
        self._space: list[str] = []  # trailing space, and what may end the answer
        self._begun = ""  # of the current call: the space before it, and its marker
        self._call: list[str] = []
        self._strings = _JsonStrings()  # of the current call
        self._quotes_end = False  # a string of the call has the marker at which calls end

    def _markers(self) -> tuple[str, ...]:
        calls = self._calls
        if self._where is _Where.THOUGHT:
            # A thought may repeat the opening tag at its very beginning; later the tag is text.
            end = self._think_end
            tags = (end, self._think_begin) if self._trims else (end,)
            return tags + ((calls.begin, *calls.around) if calls and calls.ends_thought else ())
        if self._where is _Where.CALL:
            assert calls is not None
            end = calls.end or calls.begin
            # A line break may show that it was no string after all.
            return (end, "\n") if self._quotes_end else (end,)
        found = (calls.begin, *calls.around) if calls is not None else ()
        if calls is not None and calls.also:
            found += (calls.also,)
        if self._left_open:
            found += (self._think_end,)
        if self._answer_end:
            found += (self._answer_end,)
        return found + self._beginnings() if self._where is _Where.BEGIN else found

    def _beginnings(self) -> tuple[str, ...]:
        """Markers that are text once the answer has begun."""
        found = (self._opening,) if self._opening else ()
        if self._tags is not None:
            found = (self._tags.begin, *found)
        return (self._think_begin, *found) if self._thinks else found

    def _passed(self, text: str) -> None:
        if self._where is _Where.CALL:
            self._add_to_call(text)
            return
        if self._trims:
            text = text.lstrip()
        if not text:
            return
        kept = text.rstrip()
        if not kept:
            self._space.append(text)
            return
        self._space.append(kept)
        shown, self._space = "".join(self._space), [text[len(kept) :]]
        if self._where is _Where.THOUGHT:
            self._trims = False
            self._parts.append(Thought(shown))
            return
        if self._where is _Where.BEGIN:
            self._where = _Where.CONTENT
            if self._calls is not None and self._calls.bare and kept.lstrip().startswith("{"):
                after, self._space = self._space, []
                self._begin_call("")
                self._add_to_call("".join((shown, *after)))
                return
        self._say(shown)
        self._trims = False

    def _say(self, text: str) -> None:
        super()._say("\n" + text if self._trims and self._has_said else text)
        self._has_said = True

    def _found(self, marker: str) -> None:
        if marker == self._answer_end and self._where is not _Where.CALL:
            # It ends the answer if no more text comes.
            self._where, self._trims = _Where.CONTENT, False
            self._space.append(marker)
            return
        if self._where is _Where.CALL:
            if marker == "\n" or self._strings.inside:
                self._quotes_end = True
                self._add_to_call(marker)
                if marker == "\n" and self._strings.is_broken:
                    self._end_call("")
                return
            self._end_call(marker)
        if marker == self._think_end:
            self._left_open = False
        elif self._tags is not None and marker == self._tags.begin:
            self._answer_end, self._tags = self._tags.end, None
        elif marker == self._opening:
            self._opening = ""
        elif self._where is _Where.THOUGHT and marker != self._think_begin:
            self._left_open = True
        if self._calls is not None and marker == self._calls.begin:
            self._begin_call(marker)
        elif self._calls is not None and marker == self._calls.also:
            self._begin_call("")
            self._add_to_call(marker)
        elif self._calls is None or marker != self._calls.end:
            # After a thought the answer begins, in which another opening tag would be text.
            self._thinks = marker == self._think_begin
            self._where = _Where.THOUGHT if self._thinks else _Where.BEGIN
            self._space = []
            self._trims = True

    def _over(self) -> None:
        if self._where is _Where.CALL:
            self._end_call("")
        elif self._where is not _Where.THOUGHT:
            held = "".join(self._space)
            if self._answer_end and self._answer_end in held:
                held = held[: held.rindex(self._answer_end)].rstrip()
            if held:
                self._parts.append(Said(held))

    def _begin_call(self, marker: str) -> None:
        self._where = _Where.CALL
        self._begun = "".join(self._space) + marker
        self._call = []
        self._space = []
        self._strings = _JsonStrings()
        self._quotes_end = False

    def _add_to_call(self, text: str) -> None:
        self._call.append(text)
        if self._calls is not None and not self._calls.untyped:
            self._strings.feed(text)

    def _end_call(self, marker: str) -> None:
        assert self._calls is not None
        read, call = self._calls.read, "".join(self._call)
        self._where = _Where.CONTENT
        written = self._begun + call + (marker if self._calls.end else "")
        if self._calls.needs_end and not marker:
            self._say(written)
            return
        self._trims = self._called(written, lambda: read(call, self._tools))
