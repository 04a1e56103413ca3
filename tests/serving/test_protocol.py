"""Requests are read as OpenAI's and SGLang's clients send them, and refused by field."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from model.config import ModelConfig
from serving.config import ServeConfig
from serving.errors import ApiError
from serving.openai_api import ChatReader, CompletionReader
from serving.openai_fields import read_chat, read_completion
from serving.protocol import INLINE_CHARACTERS, Request, ServedModel, fit_tokens
from serving.sglang_api import GenerateReader, read_generate
from serving.tokenizer import Tokenizer
from tests.serving.live import EOS, MODEL_NAME, MODEL_PATH, tokenizer_of_tests

TOKENIZER = tokenizer_of_tests()
HELLO = [{"role": "user", "content": "Hello!"}]


def served(
    context_length: int = 512, dp_sizes: dict[str, int] | None = None, **config: Any
) -> ServedModel:
    settings = {"model_path": MODEL_PATH, "served_model_name": MODEL_NAME, **config}
    return ServedModel(
        TOKENIZER,
        ServeConfig(registry_address="127.0.0.1:1", **settings),
        ModelConfig.from_dir(MODEL_PATH),
        lambda: context_length,
        lambda role: None if dp_sizes is None else dp_sizes.get(role),
    )


async def completion(on: ServedModel | None = None, /, **fields: Any) -> Request:
    body = json.dumps({"prompt": "Hi!", **fields}).encode()
    return await CompletionReader(read_completion(body), on or served()).finish(None)


async def chat(on: ServedModel | None = None, /, **fields: Any) -> Request:
    body = json.dumps({"messages": HELLO, **fields}).encode()
    return await ChatReader(read_chat(body), on or served()).finish(None)


async def generate(on: ServedModel | None = None, /, **fields: Any) -> Request:
    body = json.dumps({"text": "Hi!", **fields}).encode()
    return await GenerateReader(read_generate(body), on or served()).finish(None)


# --- what is refused ---

BOTH: list[tuple[str, Any]] = [
    ("model", 3),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 1 << 40),
    ("min_p", -0.1),
    ("min_p", 2),
    ("frequency_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-60),
    ("n", 0),
    ("n", 1000),
    ("n", "two"),
    ("logit_bias", {"1024": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"7": 101}),
    ("logit_bias", {str(i): 1 for i in range(301)}),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", ["a"] * 17),
    ("stop", "x" * 2000),
    ("stop_token_ids", [1024]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", list(range(40))),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", "many"),
    ("max_tokens", 100_000),
    ("min_tokens", -1),
    ("prompt_logprobs", 21),
    ("seed", "s"),
    ("seed", 0.5),
    ("stream", "yes"),
    ("stream_interval", 0),
    ("stream_options", {"include_usage": True}),
    ("best_of", 3),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("guided_json", {"type": "foo"}),
    ("guided_regex", "(a"),
    ("guided_choice", "a"),
    ("structured_outputs", {"json": 3}),
    ("json_schema", "{"),
    ("ebnf", "nothing"),
    ("structural_tag", "{}"),
    ("use_beam_search", True),
    ("logits_processors", ["x"]),
    ("rid", "x" * 300),
]


@pytest.mark.parametrize(("field", "value"), BOTH)
async def test_a_bad_field_is_named_by_both_openai_routes(field: str, value: Any) -> None:
    for read in (completion, chat):
        with pytest.raises(ApiError) as caught:
            await read(**{field: value})
        assert caught.value.status == 400
        assert caught.value.param == field
        assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", ""]),
        ("prompt", ["a", 1]),
        ("prompt", [1, [2]]),
        ("prompt", [1, 1024]),
        ("prompt", [-1]),
        ("prompt", None),
        ("prompt", {"text": "a"}),
        ("prompt", "word " * 2000),
        ("logprobs", 21),
        ("suffix", "end"),
    ],
)
async def test_a_bad_field_of_completions_is_named(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        await completion(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", None),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [{"content": "no role"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": "word " * 2000}]),
        ("top_logprobs", 3),
        ("logprobs", 5),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", 100_000),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template", "{{ messages }}"),
    ],
)
async def test_a_bad_field_of_chat_is_named(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        await chat(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": None}, "text"),
        ({"input_ids": [1]}, "text"),
        ({"text": None, "input_ids": []}, "input_ids"),
        ({"text": None, "input_ids": [1024]}, "input_ids"),
        ({"text": None, "input_ids": [1, [2]]}, "input_ids"),
        ({"text": []}, "text"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 0, "min_new_tokens": 1}}, "min_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 9999}}, "max_new_tokens"),
        ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "min_new_tokens"),
        ({"sampling_params": {"regex": "(a"}}, "regex"),
        ({"sampling_params": {"regex": "a+", "min_new_tokens": 3}}, "min_new_tokens"),
        ({"sampling_params": {"temperature": "x"}}, "sampling_params"),
        ({"sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["one"]}, "rid"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": 4}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": 1 << 70}, "logprob_start_len"),
        ({"image_data": "x"}, "image_data"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob"),
    ],
)
async def test_a_bad_field_of_generate_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        await generate(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_more_generations_than_are_served_at_once_are_refused_untokenized() -> None:
    on = served(max_inflight_requests=4)
    many = ["Hi!"] * 3
    bodies = [
        (read_completion, CompletionReader, {"prompt": many, "n": 2}, "prompt"),
        (read_completion, CompletionReader, {"prompt": "Hi!", "n": 5}, "n"),
        (read_chat, ChatReader, {"messages": HELLO, "n": 5}, "n"),
        (read_generate, GenerateReader, {"text": many, "sampling_params": {"n": 2}}, "text"),
        (read_generate, GenerateReader, {"input_ids": [[1]] * 5}, "input_ids"),
    ]
    for read, reader, body, param in bodies:
        with pytest.raises(ApiError) as caught:
            reader(read(json.dumps(body).encode()), on)
        assert (caught.value.status, caught.value.param) == (400, param)


async def test_a_prompt_that_is_only_scored_must_fit_the_context_too() -> None:
    ids = list(range(1, 12))
    score = {"prompt": ids, "echo": True, "max_tokens": 0}
    assert len((await completion(served(12), **score)).choices) == 1
    with pytest.raises(ApiError) as caught:
        await completion(served(11), **score)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


async def test_a_text_far_past_the_context_is_refused_once_as_much_of_it_is_tokenized() -> None:
    encoded: list[int] = []

    class Counted(Tokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            encoded.append(len(text))
            return super().encode(text, add_special_tokens)

    on = served()
    on.tokenizer = Counted.from_dir(MODEL_PATH)
    text = "a ship " * 2_000_000
    for refused, name in (
        (completion(on, prompt=text), "prompt"),
        (chat(on, messages=[{"role": "user", "content": text}]), "messages"),
        (chat(on, messages=[{"role": "user", "content": ""}] * 513), "messages"),
        (generate(on, text=text), "text"),
    ):
        with pytest.raises(ApiError) as caught:
            await refused
        assert (caught.value.param, caught.value.code) == (name, "context_length_exceeded")
    assert encoded == [1 << 16] * 3


async def test_what_is_nested_without_end_is_refused_like_any_bad_body() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    with pytest.raises(ApiError) as caught:
        read_completion(f'{{"prompt": "Hi!", "unknown": {deep}}}'.encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    call = {"function": {"name": "f", "arguments": deep}}
    with pytest.raises(ApiError) as caught:
        await chat(messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


async def test_too_long_a_request_names_both_numbers() -> None:
    with pytest.raises(ApiError) as caught:
        await completion(served(context_length=20), prompt=list(range(15)), max_tokens=10)
    assert caught.value.param == "max_tokens"
    assert caught.value.code == "context_length_exceeded"
    # Clients look for these words to try another model, or less of the conversation.
    assert "this model's maximum context length is 20 tokens" in caught.value.message
    assert caught.value.message.endswith("; 10 after a prompt of 15 make 25")
    with pytest.raises(ApiError) as caught:
        await completion(served(context_length=20), prompt=list(range(20)))
    assert caught.value.message.startswith("prompt: this model's maximum context length is 20")
    assert caught.value.message.endswith("; the prompt is too long, with 20 tokens")


# --- what is taken ---


async def test_what_is_not_said_comes_from_openai_and_the_context() -> None:
    asked = (await completion()).choices[0]
    assert asked.sampling == msgspec.structs.replace(
        asked.sampling,
        max_new_tokens=16,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop_token_ids=(EOS,),
        num_top_logprobs=-1,
        prompt_logprobs_start=-1,
    )
    asked = (await chat()).choices[0]
    assert asked.sampling.max_new_tokens == 512 - len(asked.prompt.ids)
    assert (await generate()).choices[0].sampling.max_new_tokens == 128


async def test_nulls_and_unknown_fields_are_as_good_as_absent() -> None:
    nulls = [
        "temperature",
        "top_p",
        "max_tokens",
        "stop",
        "seed",
        "n",
        "logit_bias",
        "stream",
        "user",
    ]
    await completion(**dict.fromkeys(nulls), some_future_field={"x": 1})
    await chat(**dict.fromkeys(nulls), tools=None, response_format={"type": "text"})


async def test_every_sampling_field_arrives() -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "presence_penalty": -1.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"5": -100, "6": 2.5},
        "seed": 11,
        "stop_token_ids": [9, EOS],
        "min_tokens": 2,
        "max_tokens": 5,
    }
    for read in (completion, chat):
        sampling = (await read(**fields)).choices[0].sampling
        assert sampling.temperature == 0.0
        assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 7, 0.1)
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (1.0, -1.5)
        assert sampling.repetition_penalty == 1.25
        assert sampling.logit_bias == ((5, -100.0), (6, 2.5))
        assert sampling.stop_token_ids == (EOS, 9)
        assert (sampling.seed, sampling.min_tokens, sampling.max_new_tokens) == (11, 2, 5)


async def test_ignore_eos_leaves_only_the_stop_ids_that_were_named() -> None:
    assert (await completion(ignore_eos=True)).choices[0].sampling.stop_token_ids == ()
    asked = await completion(ignore_eos=True, stop_token_ids=[4])
    assert asked.choices[0].sampling.stop_token_ids == (4,)


@pytest.mark.parametrize("top_k", [-1, 0])
async def test_both_spellings_of_no_top_k_are_taken(top_k: int) -> None:
    assert (await completion(top_k=top_k)).choices[0].sampling.top_k == 0


async def test_choices_draw_from_different_seeds() -> None:
    asked = await completion(prompt=["a", "b"], n=2, seed=(1 << 63) - 1)
    assert [choice.index for choice in asked.choices] == [0, 1, 2, 3]
    assert [choice.prompt_idx for choice in asked.choices] == [0, 0, 1, 1]
    assert [c.sampling.seed for c in asked.choices] == [(1 << 63) - 1, 0, (1 << 63) - 1, 0]
    seeds = {choice.sampling.seed for choice in (await completion(n=8)).choices}
    assert len(seeds) == 8
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert (await completion(seed=-1)).choices[0].sampling.seed == (1 << 63) - 1


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hi!", [[39, 72, 0]]),
        (["Hi!", "Hi"], [[39, 72, 0], [39, 72]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_a_prompt_comes_in_four_kinds(prompt: Any, ids: list[list[int]]) -> None:
    asked = await completion(prompt=prompt)
    assert [choice.prompt.ids for choice in asked.choices] == ids


async def test_content_parts_are_one_text_and_tool_arguments_objects() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    asked = await chat(messages=[{"role": "user", "content": parts}])
    assert "Hello!" in TOKENIZER.decode(asked.choices[0].prompt.ids, False)
    call: dict[str, Any] = {"id": "1", "type": "function"}
    call["function"] = {"name": "f", "arguments": '{"x": 1}'}
    asked = await chat(
        messages=[
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
        ]
    )
    assert asked.choices[0].prompt.ids
    call["function"] = {"name": "f", "arguments": "{"}
    with pytest.raises(ApiError) as caught:
        await chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert caught.value.param == "messages"


async def test_a_conversation_is_rendered_as_the_goldens_have_it() -> None:
    file = Path(__file__).parents[1] / "goldens" / "tokenizer" / "chats.json"
    cases = json.loads(file.read_text(encoding="utf-8"))["chats"]
    for case in cases:
        if not case["messages"] or "text" not in case:
            continue
        asked = await chat(
            messages=case["messages"],
            tools=case["tools"],
            add_generation_prompt=case["add_generation_prompt"],
            chat_template_kwargs=case["template_kwargs"],
        )
        assert asked.choices[0].prompt.ids == case["ids"]


async def test_a_long_text_is_tokenized_beside_the_loop_with_the_same_ids() -> None:
    text = "word " * INLINE_CHARACTERS
    ids = TOKENIZER.encode(text)
    assert await served(len(ids)).encode_prompt("prompt", text, True) == ids


async def test_defaults_are_the_models_or_openais(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(MODEL_PATH)
    generation = {"temperature": 0.6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.05}
    (tmp_path / "config.json").write_text((MODEL_PATH / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = ModelConfig.from_dir(tmp_path)

    def model(which: Any) -> ServedModel:
        settings = ServeConfig(tmp_path, "127.0.0.1:1", sampling_defaults=which)
        return ServedModel(TOKENIZER, settings, config, lambda: 512)

    sampling = (await completion(model("model"))).choices[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.6, 0.9)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.05)
    sampling = (await completion(model("model"), temperature=0.1)).choices[0].sampling
    assert sampling.temperature == 0.1
    sampling = (await completion(model("openai"))).choices[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (1.0, 1.0, 0.0)


def test_the_context_is_shared_by_prompt_and_output() -> None:
    assert fit_tokens(10, None, None, 32, "prompt", "max_tokens") == 22
    assert fit_tokens(10, None, 16, 32, "prompt", "max_tokens") == 16
    assert fit_tokens(30, None, 16, 32, "prompt", "max_tokens") == 2
    assert fit_tokens(10, 22, None, 32, "prompt", "max_tokens") == 22
    for num_prompt, asked, param in ((32, None, "prompt"), (10, 23, "max_tokens")):
        with pytest.raises(ApiError) as caught:
            fit_tokens(num_prompt, asked, None, 32, "prompt", "max_tokens")
        assert caught.value.param == param


async def test_the_request_id_is_the_bodys_then_the_headers_then_ours() -> None:
    fields = read_completion(b'{"prompt": "a", "rid": "mine"}')
    assert (await CompletionReader(fields, served()).finish("header")).request_id == "mine"
    fields = read_completion(b'{"prompt": "a"}')
    assert (await CompletionReader(fields, served()).finish("header")).request_id == "header"
    assert (await CompletionReader(fields, served()).finish(None)).request_id.startswith("cmpl-")
    assert (await chat()).request_id.startswith("chatcmpl-")


@pytest.mark.parametrize("read", [completion, chat, generate])
async def test_dictated_ranks_are_read_and_kept_within_what_the_workers_have(read: Any) -> None:
    sizes = {"prefill": 4, "decode": 2}
    model = served(dp_sizes=sizes)
    assert (await read(model)).ranks == (-1, -1)
    assert (await read(model, routed_dp_rank=1, disagg_prefill_dp_rank=3)).ranks == (3, 1)
    assert (await read(model, data_parallel_rank=1)).ranks == (-1, 1)
    for name, rank, message in (
        ("routed_dp_rank", 2, "decode has data-parallel ranks 0 to 1, got 2"),
        ("disagg_prefill_dp_rank", 4, "prefill has data-parallel ranks 0 to 3, got 4"),
        ("routed_dp_rank", -1, "must be at least 0, got -1"),
        ("data_parallel_rank", 2, "decode has data-parallel ranks 0 to 1, got 2"),
    ):
        with pytest.raises(ApiError) as caught:
            await read(model, **{name: rank})
        assert caught.value.status == 400
        assert caught.value.param == name
        assert message in str(caught.value)
    sizes.clear()  # no worker tells which ranks there are
    assert (await read(model, routed_dp_rank=7)).ranks == (-1, 7)
    sizes["prefill"] = 0  # decode needs none
    with pytest.raises(
        ApiError, match="disagg_prefill_dp_rank: this cluster has no prefill worker"
    ):
        await read(model, disagg_prefill_dp_rank=0)


async def test_a_batch_of_generate_may_say_each_thing_once_or_per_prompt() -> None:
    asked = await generate(
        text=["Hi!", "Hi"],
        sampling_params=[{"max_new_tokens": 3}, {"max_new_tokens": 4, "stop": "x"}],
        return_logprob=[True, False],
        rid=["one", "two"],
    )
    assert [choice.request_id for choice in asked.choices] == ["one", "two"]
    assert [choice.sampling.max_new_tokens for choice in asked.choices] == [3, 4]
    assert [choice.shown.num_logprobs for choice in asked.choices] == [0, -1]
    assert [choice.shown.stops for choice in asked.choices] == [(), ("x",)]
