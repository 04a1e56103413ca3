"""serving/tokenizer against the recorded encodings and conversations, and broken files."""

import json
import os
import re
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from model.tokenizer_reading import TokenizerError
from serving import up
from serving.chat_template import ChatTemplateError
from serving.tokenizer import Tokenizer
from tests.serving.tokenizer_folders import BOS, EOS, GOLDENS, render, set_config


def read(name):
    return json.loads((GOLDENS / name).read_text(encoding="utf-8"))


ENCODINGS = read("encodings.json")["encodings"]
CHATS = read("chats.json")["chats"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(GOLDENS)


def test_a_tokenizer_loads_where_up_finds_its_default_model():
    assert Tokenizer.from_dir(up.demo_model_path()).vocab_size > 0


def test_texts_encode_to_the_recorded_ids(tokenizer):
    for case in ENCODINGS:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        without = tokenizer.encode(case["text"], add_special_tokens=False)
        assert without == case["ids_no_special"], case["text"]


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "b", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"b": {"id": "b", "ids": [BOS], "tokens": ["<|endoftext|>"]}},
}


def of_class(folder, name, flags, adds_bos=False):
    """A tokenizer of that class; adds_bos: its tokenizer.json puts BOS before a text."""
    if adds_bos:
        file = folder / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": TEMPLATE}))
    unsaid = {"add_bos_token": None, "add_eos_token": None}
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return Tokenizer.from_dir(set_config(folder, tokenizer_class=name, **unsaid | named | flags))


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [BOS], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [BOS], [EOS]),
        ({"bos_token": None}, [], []),
        ({"bos_token": "<of another file>"}, [], []),
    ],
)
@pytest.mark.parametrize("adds_bos", [False, True], ids=["as DeepSeek's", "as Llama 2's"])
def test_a_llama_tokenizers_flags_say_what_stands_around_a_text(
    folder, flags, before, after, adds_bos
):
    tokenizer = of_class(folder, "LlamaTokenizerFast", flags, adds_bos)
    for case in ENCODINGS:
        assert tokenizer.encode(case["text"]) == [*before, *case["ids_no_special"], *after]
        without = tokenizer.encode(case["text"], add_special_tokens=False)
        assert without == case["ids_no_special"]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_another_class_has_around_a_text_what_its_file_says(folder, adds_bos):
    flags = {"add_bos_token": not adds_bos, "add_eos_token": True}
    tokenizer = of_class(folder, "Qwen2Tokenizer", flags, adds_bos)
    assert tokenizer.encode("a") == [*[BOS] * adds_bos, *tokenizer.encode("a", False)]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'; accepted: true or false"),
        (
            {"add_eos_token": True, "eos_token": "<end>"},
            "add_eos_token is true, but eos_token is '<end>', which is no token of tokenizer.json",
        ),
        (
            {"add_bos_token": True, "bos_token": None},
            "add_bos_token is true, but bos_token is None",
        ),
    ],
)
def test_flags_that_cannot_be_obeyed_are_refused(folder, flags, said):
    with pytest.raises(TokenizerError, match=re.escape(said)):
        of_class(folder, "LlamaTokenizer", flags)


def test_a_long_text_has_no_fewer_tokens_than_its_parts_tell(tokenizer):
    text = "".join(case["text"] for case in ENCODINGS)
    text *= -(-300_000 // len(text))
    count = len(tokenizer.encode(text, add_special_tokens=False))
    assert 0.9 * count < tokenizer.fewest_tokens(text, enough=count) <= count
    first = len(tokenizer.encode(text[: 1 << 16], add_special_tokens=False))
    assert tokenizer.fewest_tokens(text, enough=10) == first


def test_ids_decode_to_the_recorded_texts(tokenizer):
    for case in ENCODINGS:
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
        assert tokenizer.decode(case["ids"]) == case["decoded_skip_special"]


def test_conversations_render_and_encode_as_recorded(tokenizer):
    for case in CHATS:
        arguments = {
            "tools": case["tools"],
            "add_generation_prompt": case["add_generation_prompt"],
            **case["template_kwargs"],
        }
        if "error" in case:
            with pytest.raises(ChatTemplateError) as caught:
                tokenizer.apply_chat_template(case["messages"], **arguments)
            assert str(caught.value) == case["error"]
        else:
            text = tokenizer.apply_chat_template(case["messages"], **arguments)
            assert text == case["text"]
            assert tokenizer.encode(text, add_special_tokens=False) == case["ids"]


def test_every_token_has_the_bytes_the_library_decodes(tokenizer):
    library = tokenizers.Tokenizer.from_file(str(GOLDENS / "tokenizer.json"))
    for token_id in range(tokenizer.vocab_size):
        want = library.decode([token_id], skip_special_tokens=False)
        assert tokenizer.token_bytes(token_id).decode("utf-8", "replace") == want
        assert tokenizer.token_text(token_id) == want
    assert [tokenizer.token_bytes(i) for i in (126, 254)] == [b"\xc2", b"\xa0"]  # U+00A0


def test_ids_outside_the_vocabulary_add_nothing(tokenizer):
    assert tokenizer.vocab_size == 1024
    assert tokenizer.decode([64, 1024, 10**9, 64]) == "aa"
    assert tokenizer.token_text(1024) == ""
    assert tokenizer.token_bytes(-1) == b""
    with pytest.raises(ValueError, match="expected token ids >= 0, got -1"):
        tokenizer.decode([5, -1])


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("a\ud800b")


def test_named_and_special_ids(tokenizer):
    assert tokenizer.special_ids == {1017, 1018, 1019}
    assert tokenizer.eos_id == tokenizer.token_id("<|im_end|>")
    assert tokenizer.token_id("no such token") is None


def test_truncation_and_padding_left_in_the_file_are_off(folder, tokenizer):
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(3)
    library.enable_padding(length=200)
    (folder / "tokenizer.json").unlink()
    library.save(str(folder / "tokenizer.json"))
    text = "a text of more than three tokens"
    assert Tokenizer.from_dir(folder).encode(text) == tokenizer.encode(text)


def test_a_checkpoint_with_a_tokenizer_of_sentencepiece_alone_says_how_to_make_ours(folder):
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(TokenizerError, match=r"has tokenizer.model alone.*save_pretrained"):
        Tokenizer.from_dir(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_or_malformed_file_is_named_in_one_line(folder, name):
    file = folder / name
    file.unlink()
    with pytest.raises(TokenizerError, match=f"^cannot read .*{name}: "):
        Tokenizer.from_dir(folder)
    for content in (b"{not json", b"[]", b"\xff\xfe", b"", b'{"model": {\n}}'):
        file.write_bytes(content)
        if name == "tokenizer_config.json" and content.startswith(b'{"'):
            continue  # a fine configuration with nothing in it
        with pytest.raises(TokenizerError, match=name) as caught:
            Tokenizer.from_dir(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"continuing_subword_prefix": "AAAA"}, "is no tokenizer: "),  # the library panics
        ({"vocab": {"a": 1 << 22}, "merges": []}, "token 'a' has the id 4194304; accepted: up to"),
        ({"vocab": {"a": (1 << 32) - 1}, "merges": []}, "token 'a' has the id 4294967295"),
    ],
)
def test_a_model_that_cannot_be_is_refused(folder, changes, message):
    file = folder / "tokenizer.json"
    said = json.loads(file.read_text())
    said["model"] |= changes
    file.unlink()
    file.write_text(json.dumps(said))
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json:? .*{message}"):
        Tokenizer.from_dir(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
    ],
)
def test_a_file_with_which_no_text_can_be_encoded_is_refused(folder, changes):
    file = folder / "tokenizer.json"
    said = json.loads(file.read_text()) | {"added_tokens": [], "post_processor": None}
    file.unlink()
    file.write_text(json.dumps(said | changes))
    set_config(folder, added_tokens_decoder=None)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot encode 'Hello!': ") as caught:
        Tokenizer.from_dir(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"chat_template": "{% if %}"},
        {"chat_template": "{% break %}"},
        {"chat_template": "{% for x in y %}" * 30 + "{% endfor %}" * 30},
        {"chat_template": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"},
        {"chat_template": "{{ 2 ** 100000 }}"},
        {"chat_template": 5},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": "\ud800"},
        {"chat_template": [{"name": "tool_use", "template": "{# \udc00 #}"}]},
        {"eos_token": 7},
        {"eos_token": {"text": "</s>"}},
        {"additional_special_tokens": 5},
        {"additional_special_tokens": True},
        {"additional_special_tokens": "<a>"},
        {"additional_special_tokens": {"a": "<a>"}},
        {"additional_special_tokens": ["<a>", 5]},
        {"additional_special_tokens": [None]},
    ],
)
def test_a_malformed_configuration_is_refused(folder, changes):
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(set_config(folder, **changes))


def test_the_template_file_comes_before_the_configuration(folder):
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_dir(folder).apply_chat_template([]) == "from the file"
    (folder / "chat_template.jinja").write_text("{{ unclosed")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        Tokenizer.from_dir(folder)


def test_a_given_template_comes_before_all_of_the_checkpoint(folder, tmp_path):
    templates = [{"name": name, "template": name} for name in ("default", "tool_use")]
    set_config(folder, chat_template=templates)
    (folder / "chat_template.jinja").write_text("from the file")
    given = tmp_path / "given.jinja"
    with pytest.raises(TokenizerError, match=r"cannot read .*given\.jinja"):
        Tokenizer.from_dir(folder, given)
    given.write_text("given {{ eos_token }}")
    tokenizer = Tokenizer.from_dir(folder, given)
    for tools in (None, [{"type": "function"}]):
        assert tokenizer.apply_chat_template([], tools=tools) == "given <|im_end|>"
    given.write_text("{{ unclosed")
    with pytest.raises(TokenizerError, match=r"given\.jinja: chat template does not parse"):
        Tokenizer.from_dir(folder, given)


def test_several_templates_are_chosen_by_name(folder):
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    tokenizer = Tokenizer.from_dir(set_config(folder, chat_template=templates))
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "tools"


def test_templates_in_files_of_their_own_come_before_the_configuration(folder, tmp_path):
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools from a file")
    set_config(folder, chat_template=[{"name": "tool_use", "template": "tools"}])
    tools = [{"type": "function"}]
    assert Tokenizer.from_dir(folder).apply_chat_template([], tools=tools) == "tools from a file"
    (folder / "chat_template.jinja").write_text("plain from a file")
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.apply_chat_template([]) == "plain from a file"
    assert tokenizer.apply_chat_template([], tools=tools) == "tools from a file"
    given = tmp_path / "given.jinja"
    given.write_text("given")
    assert Tokenizer.from_dir(folder, given).apply_chat_template([], tools=tools) == "given"
    (more / "tool_use.jinja").write_text("{{ unclosed")
    with pytest.raises(TokenizerError, match=r"tool_use\.jinja: chat template does not parse"):
        Tokenizer.from_dir(folder)
    (more / "tool_use.jinja").unlink()
    os.mkfifo(more / "tool_use.jinja")
    with pytest.raises(TokenizerError, match=r"tool_use\.jinja: a pipe, socket or device; expect"):
        Tokenizer.from_dir(folder)


def test_of_further_templates_that_of_tools_is_read_unless_its_file_is_empty(folder):
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text("{{ unclosed")
    (more / "default.jinja").write_text("nobody's")
    (more / "tool_use.jinja").write_text("\n")
    tools = [{"type": "function"}]
    unread = {"name": "rag", "template": "{{ unclosed"}
    for said in ("plain", [{"name": "default", "template": "plain"}, unread]):
        set_config(folder, chat_template=said)
        assert Tokenizer.from_dir(folder).apply_chat_template([]) == "plain"
        assert Tokenizer.from_dir(folder).apply_chat_template([], tools=tools) == "plain"


def test_no_template_is_a_chat_error_not_a_refusal_to_load(folder):
    tokenizer = Tokenizer.from_dir(set_config(folder, chat_template=None))
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_templates_have_the_surroundings_they_are_written_for(folder):
    set_config(folder, bos_token={"content": "<s>", "special": True})
    assert render(folder, "{{ bos_token }}|{{ eos_token }}|{{ sep_token }}") == "<s>|<|im_end|>|"
    assert render(folder, "{{ strftime_now('%Y-%m') }}") == "2017-07"
    assert render(folder, "{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}"
                  "{% endfor %}") == "1"  # fmt: skip
    assert render(folder, "  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render(folder, "{% generation %}a{{ 1 + 1 }}{% endgeneration %}b") == "a2b"
    within = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(folder, within) == "21"
    assert render(folder, "{{ {'b': '<é>'} | tojson(indent=1) }}") == '{\n "b": "<é>"\n}'
    assert render(folder, "{{ enable_thinking }}", enable_thinking=False) == "False"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ raise_exception('no') }}",
        r"{{ '\ud800' }}",
    ],
)
def test_whatever_fails_in_a_template_is_a_chat_error(folder, template):
    with pytest.raises(ChatTemplateError):
        render(folder, template, [{"role": "user", "content": "hi"}])


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
PARTS = "{% for m in messages %}{{ m.content[-1].text }}[end]{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content", "want"),
    [
        (PLAIN, "so far ", "[user]a[end][assistant]so far "),
        (TRIMMING, "so far ", "[user]a[end][assistant]so far"),
        (PLAIN, "", "[user]a[end][assistant]"),
        (PLAIN, "a[end]a", "[user]a[end][assistant]a[end]a"),
    ],
)
def test_a_final_message_is_continued_where_it_ends(folder, template, content, want):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    assert render(folder, template, messages, continue_final_message=True) == want
    assert messages[1]["content"] == content


def test_a_final_message_of_parts_is_continued(folder):
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "one two"}]}]
    assert render(folder, PARTS, messages, continue_final_message=True) == "one two"


@pytest.mark.parametrize(
    ("template", "messages", "match"),
    [
        (PLAIN, [], "at least one message"),
        (PLAIN, [{"role": "assistant", "content": None}], "ends in text"),
        ("fixed", [{"role": "assistant", "content": "x"}], "leaves the last message out"),
    ],
)
def test_what_cannot_be_continued_is_refused(folder, template, messages, match):
    with pytest.raises(ChatTemplateError, match=match):
        render(folder, template, messages, continue_final_message=True)


def sentencepiece_like():
    """A vocabulary in the style of Llama 2: spaces as lower blocks, bytes as <0xNN>."""
    pieces = ["<unk>", "<s>", "</s>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,é"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a")]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def test_a_sentencepiece_vocabulary_decodes_and_names_its_bytes(tmp_path):
    sentencepiece_like().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    tokenizer = Tokenizer.from_dir(tmp_path)
    text = "the cat, a 世 the é."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 2, 10**6]) == text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " " + text
    the_id, byte_id = (tokenizer.token_id(name) for name in ("▁the", "<0xE4>"))
    assert the_id is not None
    assert byte_id is not None
    assert tokenizer.token_text(the_id) == " the"
    assert tokenizer.token_bytes(byte_id) == b"\xe4"
    assert tokenizer.eos_id is None


COUNTS_THREADS = """
import os, sys
from serving.tokenizer import Tokenizer

tokenizer = Tokenizer.from_dir(sys.argv[1])
before = len(os.listdir("/proc/self/task"))
assert tokenizer.encode("the cat")
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_text_is_tokenized_without_more_threads():
    argv = [sys.executable, "-c", COUNTS_THREADS, str(up.demo_model_path())]
    env = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "0\n"
