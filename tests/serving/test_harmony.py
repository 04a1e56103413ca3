"""GPT-OSS's markers are tokens of their own, and only these divide an answer."""

import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from serving.harmony import MARKERS
from serving.marked_text import TOKEN_SEAL
from serving.parsing import Parsing
from serving.tokenizer import Tokenizer
from serving.tool_calls import ToolCall
from tests.serving.live import EOS, MODEL_NAME, MODEL_PATH, Live, live_server
from tests.serving.test_parsing import Read, pieces_told

PARSERS = {"reasoning_parser": "gpt-oss", "tool_call_parser": "gpt-oss"}
FUNCTION = {"name": "write", "parameters": {"type": "object"}}
HELLO = [{"role": "user", "content": "Hello?"}]
CHAT = {
    "model": MODEL_NAME,
    "messages": HELLO,
    "tools": [{"type": "function", "function": FUNCTION}],
}
RESPONSE = {"model": MODEL_NAME, "input": HELLO, "tools": [{"type": "function", **FUNCTION}]}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '\\n' }}"
PROMPTS_END = 198  # the line break, which no answer has
QUOTED = " ".join(MARKERS)  # as text, which the model spells in other tokens
# What a model writes: texts, and in lists the markers, each of which is one token.
Written = Sequence[str | list[str]]
CHANNEL, MESSAGE = ["<|channel|>"], ["<|message|>"]
NEXT: Written = [["<|end|>", "<|start|>"], "assistant"]
THOUGHT: Written = [CHANNEL, "analysis", MESSAGE, QUOTED, *NEXT]
TO_TOOL: Written = [CHANNEL, "commentary to=functions.write ", ["<|constrain|>"], "json", MESSAGE]


@asynccontextmanager
async def model_that_writes(
    parts: Written, folder: Path, interval: int = 1, ends: str = "<|call|>"
) -> AsyncIterator[Live]:
    """ends: the marker that is the model's end of an answer, which it writes after the parts."""
    shutil.copytree(MODEL_PATH, folder, dirs_exist_ok=True)
    said = json.loads((folder / "tokenizer.json").read_text())
    others = iter([marker for marker in MARKERS if marker != ends])
    for token in said["added_tokens"]:
        token |= {"content": ends if token["id"] == EOS else next(others), "special": True}
    (folder / "tokenizer.json").write_text(json.dumps(said))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tokenizer = Tokenizer.from_dir(folder)
    script = [*(token_id for part in parts for token_id in _ids(tokenizer, part)), EOS]

    def network(token_ids: Sequence[int]) -> int:
        begin = max(at for at, token_id in enumerate(token_ids) if token_id == PROMPTS_END) + 1
        return script[len(token_ids) - begin]

    config: dict[str, Any] = {"stream_interval": interval, **PARSERS}
    async with live_server(network, tokenizer=tokenizer, context_length=1024, **config) as live:
        yield live


def _ids(tokenizer: Tokenizer, part: str | list[str]) -> list[int]:
    if isinstance(part, list):
        return tokenizer.encode("".join(part), False)
    return [token_id for character in part for token_id in tokenizer.encode(character, False)]


async def both_chats(live: Live, **asked: Any) -> Any:
    """(thought, content, calls, finish reason), the same whole and streamed."""
    (whole,) = (await live.post("/v1/chat/completions", CHAT | asked)).json()["choices"]
    events = await live.events("/v1/chat/completions", CHAT | asked | {"stream": True})
    assert events.pop() == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in events]
    thought, content = (
        "".join(delta.get(name) or "" for delta in deltas)
        for name in ("reasoning_content", "content")
    )
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    said = whole["message"]
    assert thought == (said["reasoning_content"] or "")
    assert content == (said["content"] or "")
    assert calls == [call["function"] for call in said.get("tool_calls", ())]
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    return thought, content, calls, whole["finish_reason"]


async def both_responses(live: Live) -> Any:
    """The items, the same whole and streamed but for their ids."""
    whole = (await live.post("/v1/responses", RESPONSE)).json()["output"]
    async with live.http.stream("POST", "/v1/responses", json=RESPONSE | {"stream": True}) as sent:
        lines = [line async for line in sent.aiter_lines() if line.startswith("data: ")]
    streamed = json.loads(lines[-1].removeprefix("data: "))["response"]["output"]
    ids = {"id": "", "call_id": ""}
    assert [item | ids for item in streamed] == [item | ids for item in whole]
    return whole


WRITE = Read(QUOTED, QUOTED, (ToolCall("write", "{}"),))


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ([QUOTED], Read(QUOTED, QUOTED * 2)),
        ([["<|constrain|>"]], Read(QUOTED, QUOTED + "<|constrain|>")),
        ([["<|end|>"], QUOTED], Read(QUOTED, QUOTED * 2)),
        ([["<|end|>"], QUOTED, CHANNEL], Read(QUOTED, QUOTED)),
        ([["<|end|>"], QUOTED, ["<|return|>"]], Read(QUOTED, QUOTED * 2)),
        ([["<|end|>"], " ", ["<|return|>"]], Read(QUOTED, QUOTED)),
        ([["<|start|>"], "assistant"], Read(QUOTED, QUOTED)),
        ([*NEXT, *TO_TOOL, "{}", ["<|call|>"]], WRITE),
        ([*NEXT, *TO_TOOL, " ", ["<|call|>"]], WRITE),
        ([*NEXT, *TO_TOOL, ["<|call|>"]], WRITE),
        ([*NEXT, *TO_TOOL, " "], Read(QUOTED, QUOTED + " ")),
        ([*NEXT, *TO_TOOL], Read(QUOTED, QUOTED)),
    ],
)
def test_cuts_change_nothing(last: Written, expected: Read) -> None:
    text = "".join(
        part if isinstance(part, str) else "".join(marker + TOKEN_SEAL for marker in part)
        for part in [*THOUGHT, CHANNEL, "final", MESSAGE, QUOTED, *last]
    )
    parsing = Parsing("gpt-oss", "gpt-oss", {"write": {}}, sealed=True)
    assert pieces_told(parsing, list(text)) == expected
    for cut in range(len(text)):
        assert pieces_told(parsing, [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize("interval", [1, 7, 1000])
async def test_a_marker_s_text_is_text_where_the_model_spells_it_out(
    interval: int, tmp_path: Path
) -> None:
    arguments = json.dumps({"text": QUOTED})
    call = {"name": "write", "arguments": arguments}
    async with model_that_writes([*THOUGHT, *TO_TOOL, arguments], tmp_path, interval) as live:
        assert await both_chats(live) == (QUOTED, "", [call], "tool_calls")
        thought, called = await both_responses(live)
        assert thought["content"][0]["text"] == QUOTED
        assert called["arguments"] == arguments
    final: Written = [*THOUGHT, CHANNEL, "final", MESSAGE, QUOTED]
    async with model_that_writes(final, tmp_path, interval, ends="<|return|>") as live:
        assert await both_chats(live) == (QUOTED, QUOTED, [], "stop")
        assert await both_chats(live, skip_special_tokens=False) == (QUOTED, QUOTED, [], "stop")
        thought, said = await both_responses(live)
        assert (thought["content"][0]["text"], said["content"][0]["text"]) == (QUOTED, QUOTED)


async def test_an_answer_without_channels_is_text(tmp_path: Path) -> None:
    async with model_that_writes(["Yes. ", QUOTED], tmp_path, ends="<|return|>") as live:
        assert await both_chats(live) == ("", f"Yes. {QUOTED}", [], "stop")


@pytest.mark.parametrize("interval", [1, 1000])
async def test_a_stop_string_may_have_markers_anywhere(interval: int, tmp_path: Path) -> None:
    final: Written = [*THOUGHT, CHANNEL, "final", MESSAGE, "Yes."]
    async with model_that_writes(final, tmp_path, interval, ends="<|return|>") as live:
        assert await both_chats(live, stop="final<|message|>No") == (QUOTED, "Yes.", [], "stop")
        assert await both_chats(live, stop="final<|message|>Y") == (QUOTED, "", [], "stop")
        assert await both_chats(live, stop="<|end|><|start|>") == (QUOTED, "", [], "stop")


async def test_a_call_without_text_has_no_arguments(tmp_path: Path) -> None:
    call = {"name": "write", "arguments": "{}"}
    async with model_that_writes([*THOUGHT, *TO_TOOL], tmp_path) as live:
        assert await both_chats(live) == (QUOTED, "", [call], "tool_calls")
        _, called = await both_responses(live)
        assert called["arguments"] == "{}"


async def test_a_call_that_is_cut_off_before_its_text_is_no_call(tmp_path: Path) -> None:
    cut = [*THOUGHT, *TO_TOOL]
    async with model_that_writes([*cut, "{}"], tmp_path) as live:
        length = sum(len(_ids(live.tokenizer, part)) for part in cut)
        assert await both_chats(live, max_tokens=length) == (QUOTED, "", [], "length")
        assert await both_chats(live, stop="{") == (QUOTED, "", [], "stop")
