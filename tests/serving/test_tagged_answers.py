"""Tags of their own around answers and thoughts, as ERNIE, Hunyuan and Hy3 write them.

Source of Hunyuan's format: Tencent-Hunyuan/Hunyuan-A13B: agent/README.md. Of ERNIE's:
vllm-project/vllm: vllm/reasoning/ernie45_reasoning_parser.py. Of Hy3's:
vllm-project/vllm: vllm/tool_parsers/hy_v3_tool_parser.py.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.call_grammar import thought_prefix
from serving.parsing import Parsing
from tests.serving.live import MODEL_PATH
from tests.serving.test_grammar import RIGHT, SCHEMA, form_asked, text_of
from tests.serving.test_parsing import (
    CALL,
    OBJECT,
    OTHER,
    OTHER_OBJECT,
    TOOLS,
    Read,
    parts_of,
    told,
)
from tests.serving.texts import Texts, Untried

ERNIE = Parsing("ernie45")
HUNYUAN = Parsing("hunyuan_a13b")
UNTHINKING = Parsing("hunyuan_a13b", prompt="<think>\n\n</think>\n")
CALLING = Parsing("hunyuan_a13b", "hunyuan_a13b", TOOLS)
HY = Parsing("hy_v3", "hy_v3", TOOLS, prompt="<｜hy_Assistant｜><think:opensource>")
HY_PLAIN = Parsing("hy_v3", "hy_v3", TOOLS)
HY_TAGS = "think", "/think", "tool_calls", "tool_sep", "arg_key", "/arg_value", "/tool_call"
BOTH = (CALL, OTHER)
HY_CALLS = """\
<tool_calls>
<tool_call>weather<tool_sep>
<arg_key>city</arg_key>
<arg_value>Zürich</arg_value>
</tool_call>
<tool_call>ferry_times<tool_sep>
</tool_call>
</tool_calls>""".replace(">", ":opensource>")
CALLS = f"<tool_calls>[{OBJECT}, {OTHER_OBJECT}]</tool_calls>"


@pytest.mark.parametrize(
    ("parsing", "text", "expected"),
    [
        (HUNYUAN, "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", Read("Hm.", "Yes.")),
        (HUNYUAN, "<think>\n\n</think>\n<answer>\nYes.\n</answer>\n", Read("", "Yes.")),
        (HUNYUAN, "<answer>Yes.</answer>", Read("", "Yes.")),
        (HUNYUAN, "<think>Hm.</think>Yes.\n", Read("Hm.", "Yes.\n")),
        (HUNYUAN, "<think>Hm.</think><answer>Cut \n", Read("Hm.", "Cut \n")),
        (HUNYUAN, "<think>An <answer>?</think><answer>Yes</ans", Read("An <answer>?", "Yes</ans")),
        (
            HUNYUAN,
            "<answer>\nWrap it as <answer>42</answer> please.\n</answer>",
            Read("", "Wrap it as <answer>42</answer> please."),
        ),
        (HUNYUAN, '<answer>{"a": "use </answer> here"}', Read("", '{"a": "use </answer> here"}')),
        (HUNYUAN, "<answer>One.</answer>\nTwo.", Read("", "One.</answer>\nTwo.")),
        (HUNYUAN, "<answer></answer>", Read()),
        (HUNYUAN, "<answer> </answer> Yes.", Read("", "</answer> Yes.")),
        (Parsing("hunyuan_a13b", begun="<answer>\nYe"), "s.\n</answer>", Read("", "s.")),
        (HUNYUAN, "Say <answer>a</answer>.", Read("", "Say <answer>a</answer>.")),
        (HUNYUAN, "<answer><answer>a</answer></answer>", Read("", "<answer>a</answer>")),
        (UNTHINKING, "<answer>\nYes.\n</answer>", Read("", "Yes.")),
        (ERNIE, "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", Read("Hm.", "Yes.")),
        (ERNIE, "Hm.\n</think>\nYes.", Read("Hm.", "Yes.")),
        (ERNIE, "Hm.", Read("Hm.")),
        (Parsing("ernie45", prompt="<think>\n"), "Hm.</think>Yes.", Read("Hm.", "Yes.")),
        (Parsing("qwen3"), "<answer>a</answer>", Read("", "<answer>a</answer>")),
    ],
)  # fmt: skip
def test_the_tags_around_an_answer_are_no_part_of_it(
    parsing: Parsing, text: str, expected: Read
) -> None:
    assert told(parsing, text) == expected


@pytest.mark.parametrize(
    ("parsing", "text", "expected"),
    [
        (
            CALLING,
            f"<think>\nHm.\n</think>\n<answer>\n{CALLS}\n</answer>",
            Read("Hm.", "", (CALL, OTHER)),
        ),
        (CALLING, f"<think>Hm.</think><answer>{CALLS}</answer>", Read("Hm.", "", (CALL, OTHER))),
        (
            CALLING,
            f"<answer>One moment.\n{CALLS}\n</answer>",
            Read("", "One moment.", (CALL, OTHER)),
        ),
        (CALLING, "<think>Hm.</think>\n<answer>\n助手：Yes.\n</answer>", Read("Hm.", "Yes.")),
        (CALLING, "<answer>Yes. 助手：No.</answer>", Read("", "Yes. 助手：No.")),
        (CALLING, f"<answer>Yes.</answer>\n{CALLS}", Read("", "Yes.", (CALL, OTHER))),
        (CALLING, "<answer>Yes</answer>助手：No", Read("", "Yes</answer>助手：No")),
        (Parsing(tool_calls="hunyuan_a13b", tools=TOOLS), CALLS, Read("", "", (CALL, OTHER))),
        (Parsing(tool_calls="hunyuan_a13b", tools=TOOLS), "助手：Yes.", Read("", "Yes.")),
        (HUNYUAN, "<answer>助手：Yes.</answer>", Read("", "助手：Yes.")),
        (
            Parsing("ernie45", "ernie45", TOOLS),
            f"Hm.\n</think>\n\n\n<tool_call>\n{OBJECT}\n</tool_call>\n",
            Read("Hm.", "", (CALL,)),
        ),
    ],
)
def test_calls_stand_where_the_answer_does(parsing: Parsing, text: str, expected: Read) -> None:
    assert told(parsing, text) == expected


@pytest.mark.parametrize(
    ("parsing", "text", "expected"),
    [
        (HY, "Hm.</think:opensource>Yes.", Read("Hm.", "Yes.")),
        (HY, "A </think>?</think:opensource>Yes.", Read("A </think>?", "Yes.")),
        (HY, f"Hm.</think:opensource>One moment.\n{HY_CALLS}", Read("Hm.", "One moment.", BOTH)),
        (HY_PLAIN, "<think:opensource>Hm.</think:opensource>Yes.", Read("Hm.", "Yes.")),
        (HY_PLAIN, "<think>Hm.</think>Yes.", Read("", "<think>Hm.</think>Yes.")),
        (HY_PLAIN, f"<think:opensource></think:opensource>{HY_CALLS}", Read("", "", BOTH)),
        (HY_PLAIN, HY_CALLS.replace("\n", ""), Read("", "", BOTH)),
        (
            Parsing("hy_v3", prompt="<think:opensource></think:opensource>"),
            "Yes.",
            Read("", "Yes."),
        ),
    ],
)
def test_hy3_has_a_suffix_in_every_tag(parsing: Parsing, text: str, expected: Read) -> None:
    assert told(parsing, text) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        HY_CALLS.replace("<tool_sep:opensource>", ""),
        HY_CALLS.replace("</arg_key:opensource>", "</arg_key>"),
        HY_CALLS.replace("<arg_value:opensource>", ""),
        HY_CALLS.replace("weather", "nobody"),
    ],
)
def test_a_call_of_hy3_that_cannot_be_read_stays_as_it_was_written(wrong: str) -> None:
    read = told(HY_PLAIN, wrong)
    first = wrong.index("<tool_call:"), wrong.index("</tool_call:")
    assert read.content.startswith(wrong[slice(*first)])
    assert read.calls in ((), (OTHER,))


PARTS = st.sampled_from(
    [
        "<think>", "</think>", "<answer>", "</answer>", "<response>", "</response>", "助手：",
        CALLS, "<tool_calls>", "</tool_calls>", HY_CALLS,
        "<think:opensource>", "</think:opensource>", "<tool_call:opensource>",
        "a", " ", "\n", "<", '"', "助手",
    ]
)  # fmt: skip


@given(
    st.sampled_from([ERNIE, HUNYUAN, CALLING, HY, HY_PLAIN]),
    st.lists(PARTS, max_size=12),
    st.data(),
)
def test_cuts_change_nothing(parsing: Parsing, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parts_of(parsing, pieces) == parts_of(parsing, [text])


def test_tags_that_are_special_tokens_are_shown_to_the_parser() -> None:
    assert set(ERNIE.markers) == {"<think>", "</think>", "<response>", "</response>"}
    assert {"<answer>", "</answer>", "<tool_calls>", "</tool_calls>"} < set(CALLING.markers)
    assert {f"<{name}:opensource>" for name in HY_TAGS} < set(HY.markers)


@pytest.mark.parametrize("markers", [(), ("<answer>",)], ids=["text", "token"])
async def test_a_form_may_follow_the_tag_that_begins_an_answer(markers: tuple[str, ...]) -> None:
    texts = Texts(markers)
    prefix = thought_prefix(HUNYUAN, texts.tokenizer)
    grammar = await text_of(form_asked(json_schema=SCHEMA), prefix, Untried(MODEL_PATH))
    for before in ("", "<answer>\n", "<think>\nHm.\n</think>\n", "<think></think>\n<answer>\n"):
        assert texts.takes(grammar, before + RIGHT)
        assert told(HUNYUAN, before + RIGHT).content == RIGHT
    assert not texts.takes(grammar, f"<answer>Yes {RIGHT}")
    prefix = thought_prefix(UNTHINKING, texts.tokenizer)
    grammar = await text_of(form_asked(json_schema=SCHEMA), prefix, Untried(MODEL_PATH))
    assert texts.takes(grammar, f"<answer>\n{RIGHT}")
    assert texts.takes(grammar, RIGHT)


@pytest.mark.parametrize("markers", [(), ("<think:opensource>", "</think:opensource>")])
async def test_a_form_follows_a_thought_of_hy3(markers: tuple[str, ...]) -> None:
    texts = Texts(markers)
    prefix = thought_prefix(HY_PLAIN, texts.tokenizer)
    grammar = await text_of(form_asked(json_schema=SCHEMA), prefix, Untried(MODEL_PATH))
    assert texts.takes(grammar, RIGHT)
    assert texts.takes(grammar, f"<think:opensource>Hm.</think:opensource>{RIGHT}")
    assert not texts.takes(grammar, f"<think>Hm.</think>{RIGHT}")
