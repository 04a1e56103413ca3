"""What `--reasoning-parser` and `--tool-call-parser` take out of a chat's answer.

Names and fields are those of sgl-project/sglang: python/sglang/srt/parser/reasoning_parser.py and
python/sglang/srt/function_call.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from serving.harmony import MARKERS, HarmonyText
from serving.marked_text import MarkedText
from serving.tagged_text import CALL_FORMATS, THINK_BEGIN, THINK_END, CallFormat, TaggedText
from serving.tool_calls import ToolCall, Tools, parameter_types

ReasoningParser = Literal[
    "none",
    "deepseek-r1",
    "deepseek-v3",
    "glm45",
    "gpt-oss",
    "kimi_k2",
    "minimax",
    "qwen3",
    "qwen3-thinking",
]
ToolCallParser = Literal[
    "none",
    "deepseekv3",
    "deepseekv31",
    "glm45",
    "glm47",
    "gpt-oss",
    "hermes",
    "kimi_k2",
    "llama3",
    "minimax-m2",
    "mistral",
    "qwen",
    "qwen25",
    "qwen3_coder",
]
# Of which the answer begins inside of a thought, even where its prompt does not begin one.
_THINK_UNASKED: Final = ("deepseek-r1", "kimi_k2", "qwen3-thinking")


def tools_of(functions: Sequence[Mapping[str, Any]], parser: ToolCallParser) -> Tools:
    """What may be called. Types of parameters are looked for where the parser needs them."""
    found = CALL_FORMATS.get(parser)
    untyped = found is not None and found.untyped
    return {
        function["name"]: parameter_types(function.get("parameters")) if untyped else {}
        for function in functions
    }


@dataclass(frozen=True, slots=True)
class Parsing:
    """What is taken out of the answer of one request. tools: none unless calls are."""

    reasoning: ReasoningParser = "none"
    tool_calls: ToolCallParser = "none"
    tools: Tools = field(default_factory=dict)
    one_call: bool = False  # calls after the first are left out
    must_call: bool = False
    prompt: str = ""
    begun: str = ""  # of the answer, where the prompt has its beginning

    def __bool__(self) -> bool:
        return self.reasoning != "none" or bool(self.tools)

    @property
    def markers(self) -> tuple[str, ...]:
        """What must be in the text, also where a model has it as special tokens.

        One family's models differ in that. Other special tokens, such as the one that ends an
        answer, would make a call none.
        """
        if self.reasoning == "gpt-oss":
            return MARKERS
        thoughts = (THINK_BEGIN, THINK_END) if self.reasoning != "none" else ()
        calls = self._calls
        return thoughts + (calls.markers if calls is not None else ())

    @property
    def _calls(self) -> CallFormat | None:
        if not self.tools:
            return None
        found = CALL_FORMATS[self.tool_calls]
        # A model that must call is held to a grammar, which knows schemas of JSON.
        return CALL_FORMATS["hermes"] if self.must_call and found.untyped else found

    def call_id(self, call: ToolCall) -> str:
        """For a call that was told, each time a new one but where the model has named it."""
        if call.call_id:
            return call.call_id
        if self.tool_calls == "mistral":
            return secrets.token_hex(5)[:9]  # its chat templates refuse any other length
        return f"call_{secrets.token_hex(12)}"

    def parser(self) -> MarkedText:
        """For one choice."""
        if self.reasoning == "gpt-oss":
            return HarmonyText(self.tools, self.prompt)
        thought = self.thought()
        is_inside = thought in ("open", "unasked")
        return TaggedText(thought != "none", is_inside, self._calls, self.tools)

    def thought(self) -> Literal["none", "open", "unasked", "perhaps", "over"]:
        """Whether an answer with tags begins inside of a thought, or may begin with one.

        unasked: it begins inside of one that nothing opened, and the model may say so.
        """
        if self.reasoning == "none":
            return "none"
        opened = self.begun.rfind(THINK_BEGIN) > self.begun.rfind(THINK_END)
        is_over = THINK_END in self.begun
        if not (opened or is_over):
            # Templates write the thought of an answer that they begin themselves.
            prompt = self.prompt.rstrip().removesuffix(self.begun.rstrip()).rstrip()
            opened, is_over = prompt.endswith(THINK_BEGIN), prompt.endswith(THINK_END)
        if opened or is_over:
            return "open" if opened else "over"
        return "unasked" if self.reasoning in _THINK_UNASKED else "perhaps"
