"""A tokenizer of tiktoken.model wherever a request meets it: chats, streams, grammars, routes."""

import json
import queue
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import ModelConfig
from serving.chat_template import ChatTemplateError
from serving.grammar import schema_rules
from serving.grammar_trial import GrammarTrial
from serving.tokenizer import Tokenizer
from tests.serving.live import MODEL_PATH, live_server
from transfer import wire
from transfer.grammars import Constraint, Grammars

GOLDENS = Path(__file__).parents[1] / "goldens" / "tiktoken"
RECORDED = json.loads((GOLDENS / "encodings.json").read_text())
ENCODINGS = RECORDED["encodings"]
TOKENIZER = Tokenizer.from_dir(GOLDENS)
NUM_BASE = RECORDED["num_base_tokens"]
BOS, EOS, IM_END, CALL_BEGIN = NUM_BASE, NUM_BASE + 1, NUM_BASE + 2, NUM_BASE + 13
NOBODY = wire.WorkerRef("", 0, "")
SCHEMA = {
    "type": "object",
    "properties": {"port": {"enum": ["北岸", "südlich"]}, "boats": {"type": "boolean"}},
    "required": ["port", "boats"],
    "additionalProperties": False,
}


def test_texts_and_ids_are_those_that_were_recorded():
    for case in ENCODINGS:
        assert TOKENIZER.encode(case["text"]) == case["ids"]
        assert TOKENIZER.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_what_the_configuration_names_is_known():
    assert (TOKENIZER.token_id("[BOS]"), TOKENIZER.eos_id) == (BOS, EOS)
    assert TOKENIZER.vocab_size == RECORDED["vocab_size"]
    assert IM_END in TOKENIZER.special_ids
    assert CALL_BEGIN not in TOKENIZER.special_ids  # a part of the answer, to be read
    assert TOKENIZER.decode([BOS, CALL_BEGIN, IM_END]) == "<|tool_call_begin|>"


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [False, True])
def test_a_stream_of_single_ids_shows_the_recorded_text(skip):
    for case in ENCODINGS:
        stream = TOKENIZER.stream(skip)
        text = "".join([stream.push([token_id]) for token_id in case["ids"]]) + stream.flush()
        assert text == TOKENIZER.decode(case["ids"], skip)


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=40), skip=st.booleans())
def test_pieces_of_any_ids_join_into_their_decoding(ids, skip):
    stream = TOKENIZER.stream(skip)
    text = "".join([stream.push([token_id]) for token_id in ids]) + stream.flush()
    assert text == TOKENIZER.decode(ids, skip)


def test_half_a_character_is_held_until_its_other_half_comes():
    ids = TOKENIZER.encode("𠀀")
    assert len(ids) > 1
    stream = TOKENIZER.stream()
    assert [stream.push([token_id]) for token_id in ids] == [*[""] * (len(ids) - 1), "𠀀"]


# --- chats ----------------------------------------------------------------------------------------


def test_a_conversation_is_printed_by_the_template_and_encodes_to_special_tokens():
    text = TOKENIZER.apply_chat_template([{"role": "user", "content": "渡轮?"}])
    want = "<|im_user|>user<|im_middle|>渡轮?<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert text == want
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert [token_id - NUM_BASE for token_id in ids if token_id >= NUM_BASE] == [3, 17, 2, 4, 17]


def test_keys_of_tools_are_put_in_order_before_the_template_prints_them():
    parameters = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
    parameters["required"] = ["b", "a"]  # a list stays as it is
    function = {"name": "sail", "parameters": parameters, "description": "x"}
    tools = [{"type": "function", "function": function}]
    text = TOKENIZER.apply_chat_template([{"role": "user", "content": "x"}], tools)
    want = (
        '[{"function":{"description":"x","name":"sail","parameters":{"properties":'
        '{"a":{},"b":{"type":"string"}},"required":["b","a"],"type":"object"}},"type":"function"}]'
    )
    assert text.startswith(f"<|im_system|>tool_declare<|im_middle|>{want}<|im_end|><|im_user|>")
    assert [*function] == ["name", "parameters", "description"]  # the caller's is as it was


def test_other_tokenizers_leave_tools_as_they_are():
    folder = GOLDENS.parent / "tokenizer"
    tokenizer = Tokenizer.from_dir(folder, GOLDENS / "chat_template.jinja")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], [{"b": 1, "a": 2}])
    assert '[{"b":1,"a":2}]' in text


# --- grammars -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with this tokenizer, and a configuration with its vocabulary size."""
    folder = tmp_path_factory.mktemp("checkpoint")
    shutil.copytree(GOLDENS, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    config = json.loads((MODEL_PATH / "config.json").read_text())
    ends = {"vocab_size": TOKENIZER.vocab_size, "bos_token_id": BOS, "eos_token_id": IM_END}
    (folder / "config.json").write_text(json.dumps(config | ends))
    return folder


@pytest.fixture(scope="module")
def grammars(checkpoint):
    opened = Grammars(checkpoint, ModelConfig.from_dir(checkpoint))
    yield opened
    opened.close()


def begun(grammars, grammar):
    params = wire.SamplingParams(max_new_tokens=9, grammar=grammar)
    submit = wire.Submit(1, "", "", wire.pack_i32([5]), 1, params, 0.0, 0.0, NOBODY, NOBODY)
    outcomes: queue.SimpleQueue = queue.SimpleQueue()
    grammars.begin(submit, lambda: True, outcomes.put)
    constraint = outcomes.get(timeout=60)
    assert isinstance(constraint, Constraint), constraint
    return constraint


def allowed(mask):
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def test_whatever_is_drawn_within_the_masks_is_a_text_of_the_schema(grammars):
    grammar = json.dumps({"grammars": [schema_rules("a", SCHEMA)]})
    rng = np.random.default_rng(3)
    ports = set()
    for _ in range(12):
        constraint, ids = begun(grammars, grammar), []
        mask = constraint.first_mask
        while not {IM_END, EOS} & {*allowed(mask)}:
            ids.append(int(rng.choice(allowed(mask))))
            assert constraint.take(ids[-1])
            mask = grammars.masks([constraint])[0]
        answer = json.loads(TOKENIZER.decode(ids, skip_special_tokens=False))
        assert {*answer} == {"port", "boats"}
        ports.add(answer["port"])
    assert ports == {"北岸", "südlich"}


def test_a_grammar_may_name_the_markers_of_tool_calls(grammars):
    lark = "start: <|tool_call_begin|> /[a-z.:0-9]+/ <|tool_call_argument_begin|> /[^<]+/"
    constraint = begun(grammars, json.dumps({"grammars": [{"lark_grammar": lark}]}))
    assert allowed(constraint.first_mask) == [CALL_BEGIN]
    text = "<|tool_call_begin|>functions.sail:0<|tool_call_argument_begin|>渡轮"
    for token_id in [*TOKENIZER.encode(text), IM_END]:
        assert token_id in allowed(grammars.masks([constraint])[0])
        constraint.take(token_id)


async def test_grammars_are_tried_with_this_tokenizer(checkpoint):
    trial = GrammarTrial(checkpoint)
    try:
        assert await trial.fault(json.dumps({"grammars": [schema_rules("a", SCHEMA)]})) == ""
        unknown = json.dumps({"grammars": [{"lark_grammar": "start: <|no_such_token|>"}]})
        assert await trial.fault(unknown)
    finally:
        trial.close()


# --- routes ---------------------------------------------------------------------------------------


async def test_texts_and_ids_are_translated_over_http():
    async with live_server(tokenizer=TOKENIZER) as live:
        for case in ENCODINGS[::7]:
            data = (await live.post("/tokenize", {"prompt": case["text"]})).json()
            assert data["tokens"] == case["ids"]
        messages = [{"role": "user", "content": "码头在哪里?"}]
        data = (await live.post("/tokenize", {"messages": messages})).json()
        assert data["tokens"] == TOKENIZER.encode(TOKENIZER.apply_chat_template(messages))
        back = (await live.post("/detokenize", {"tokens": data["tokens"][:4]})).json()
        assert back["text"] == TOKENIZER.decode(data["tokens"][:4], skip_special_tokens=False)


def test_tools_nested_without_end_are_the_requests_fault():
    nested: dict[str, object] = {"type": "string"}
    for _ in range(20_000):
        nested = {"type": "object", "properties": nested}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    with pytest.raises(ChatTemplateError, match="within each other without end"):
        TOKENIZER.apply_chat_template([{"role": "user", "content": "Hi"}], tools=[tool])
