"""The parsers of `--reasoning-parser` and `--tool-call-parser`, and how a request uses them.

Names and fields are those of sgl-project/sglang: python/sglang/srt/parser/reasoning_parser.py and
python/sglang/srt/function_call. Those of ERNIE, Hunyuan-A13B and Hy3 are from vllm-project/vllm:
vllm/reasoning and vllm/tool_parsers.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from serving.harmony import MARKERS, HarmonyText
from serving.marked_text import MarkedText
from serving.tagged_text import (
    ANSWER_TAGS,
    CALL_FORMATS,
    THINK,
    THINK_TAGS,
    CallFormat,
    TaggedText,
    Tags,
)
from serving.tool_calls import ToolCall, Tools, parameter_types

ReasoningParser = Literal[
    "none",
    "deepseek-r1",
    "deepseek-v3",
    "ernie45",
    "glm45",
    "gpt-oss",
    "hunyuan_a13b",
    "hy_v3",
    "kimi_k2",
    "minimax",
    "qwen3",
    "qwen3-thinking",
]
ToolCallParser = Literal[
    "none",
    "deepseekv3",
    "deepseekv31",
    "ernie45",
    "glm45",
    "glm47",
    "gpt-oss",
    "hermes",
    "hunyuan_a13b",
    "hy_v3",
    "kimi_k2",
    "llama3",
    "minimax-m2",
    "mistral",
    "qwen",
    "qwen25",
    "qwen3_coder",
]
# Their answers begin inside a thought, even if the prompt does not open one.
_THINK_UNASKED: Final = ("deepseek-r1", "ernie45", "kimi_k2", "qwen3-thinking")


def tools_of(functions: Sequence[Mapping[str, Any]], parser: ToolCallParser) -> Tools:
    """The tools that may be called, with their parameters' types if the parser needs these."""
    found = CALL_FORMATS.get(parser)
    untyped = found is not None and found.untyped
    return {
        function["name"]: parameter_types(function.get("parameters")) if untyped else {}
        for function in functions
    }


def begin_with_markers(parser: ToolCallParser) -> bool:
    """Whether the first token of a call tells it from other JSON."""
    found = CALL_FORMATS.get(parser)
    return found is None or not found.bare


@dataclass(frozen=True, slots=True)
class Parsing:
    """What is parsed out of the answer to one request. tools: empty if calls are not parsed."""

    reasoning: ReasoningParser = "none"
    tool_calls: ToolCallParser = "none"
    tools: Tools = field(default_factory=dict)
    one_call: bool = False  # calls after the first are left out
    must_call: bool = False
    may_call: bool = False  # the answer is calls, or else of a form that the client asked for
    prompt: str = ""
    begun: str = ""  # the beginning of the answer, if the prompt already has it
    sealed: bool = False  # only markers with a TOKEN_SEAL count
    reasoning_field: str = "reasoning_content"  # where a chat shows reasoning
    shows_reasoning: bool = True  # in a chat

    def __bool__(self) -> bool:
        return self.reasoning != "none" or bool(self.tools)

    @property
    def calls_are_formed(self) -> bool:
        """Whether the form of the answer describes its calls, and what precedes them."""
        return self.must_call or self.may_call

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that must be in the text even if they are special tokens of the model.

        Models of one family differ in whether they are. All other special tokens must stay out of
        the text: one that ends an answer, for example, would make a call unreadable.
        """
        if self.reasoning == "gpt-oss":
            return MARKERS
        thoughts = self.think_tags if self.reasoning != "none" else ()
        calls = self._calls.markers if self._calls is not None else ()
        return (*thoughts, *(self.answer_tags or ()), *calls)

    @property
    def _calls(self) -> CallFormat | None:
        if not self.tools:
            return None
        found = CALL_FORMATS[self.tool_calls]
        # Where a grammar describes calls, their arguments are JSON.
        return CALL_FORMATS["hermes"] if self.calls_are_formed and found.untyped else found

    @property
    def think_tags(self) -> Tags:
        """What the model writes around a thought."""
        return THINK_TAGS.get(self.reasoning, THINK)

    @property
    def answer_tags(self) -> Tags | None:
        """What the model writes around an answer that follows a thought."""
        return ANSWER_TAGS.get(self.reasoning)

    def call_id(self, call: ToolCall) -> str:
        """The id of a call: the one that the model gave it, or else a new one each time."""
        if call.call_id:
            return call.call_id
        if self.tool_calls == "mistral":
            return secrets.token_hex(5)[:9]  # its chat templates refuse any other length
        return f"call_{secrets.token_hex(12)}"

    def parser(self) -> MarkedText:
        """A new parser, for one choice."""
        if self.reasoning == "gpt-oss":
            return HarmonyText(self.tools, self.prompt, self.sealed)
        thought = self.thought()
        is_inside = thought in ("open", "unasked")
        tags = self.answer_tags
        in_answer = tags is not None and self.begun.rfind(tags.begin) > self.begun.rfind(tags.end)
        think = None if thought == "none" else self.think_tags
        return TaggedText(think, is_inside, self._calls, self.tools, tags, in_answer)

    def thought(self) -> Literal["none", "open", "unasked", "perhaps", "over"]:
        """Whether an answer with tags begins inside a thought, or may begin with one.

        open: the prompt opened a thought. unasked: the answer begins inside a thought that the
        prompt did not open; the model may still write the opening tag. perhaps: the answer may
        begin with a thought. over: the prompt closed it. none: thoughts are not parsed.
        """
        if self.reasoning == "none":
            return "none"
        begin, end = self.think_tags
        opened = self.begun.rfind(begin) > self.begun.rfind(end)
        is_over = end in self.begun
        if not (opened or is_over):
            # The template itself may write the thought of an answer that the prompt begins.
            prompt = self.prompt.rstrip().removesuffix(self.begun.rstrip()).rstrip()
            opened, is_over = prompt.endswith(begin), prompt.endswith(end)
        if opened or is_over:
            return "open" if opened else "over"
        return "unasked" if self.reasoning in _THINK_UNASKED else "perhaps"
