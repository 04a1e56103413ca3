"""Special tokens, wherever a checkpoint's files name them."""

import json

import pytest

from model.tokenizer_reading import TokenizerError
from serving.tokenizer import Tokenizer
from tests.serving.tokenizer_folders import BOS, EOS, render, set_config


def test_templates_know_the_tokens_that_only_this_model_names(folder):
    image = {"content": "<|im_start|>", "special": True}
    set_config(folder, image_token=image, add_bos_token=False, cut_token=1, add_eos_token=None)
    set_config(folder, extra_special_tokens={"audio_token": "<think>", "odd": "x"})
    template = "{{ image_token }}{{ audio_token }}{{ add_bos_token }}{{ cut_token }}{{ odd }}"
    assert render(folder, template) == "<|im_start|><think>x"
    set_config(folder, extra_special_tokens=None, model_specific_special_tokens={"odd": image})
    assert render(folder, template) == "<|im_start|><|im_start|>"
    reserved = {"messages": "x", "self": "x", "continue_final_message": "x"}
    set_config(folder, extra_special_tokens=reserved, model_specific_special_tokens=None)
    assert render(folder, template) == "<|im_start|>"


def test_an_older_checkpoint_names_its_special_tokens_in_a_file_of_its_own(folder):
    named = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(named | {"pad_token": None}))
    set_config(folder, eos_token="<|endoftext|>", bos_token=None, pad_token="<think>")
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    # A tokenizer_config.json that lists added tokens names the special ones itself.
    assert render(folder, template) == "|<|endoftext|>|<think>"
    set_config(folder, added_tokens_decoder=None)
    assert render(folder, template) == "<|im_start|>|<|im_end|>|<think>"
    assert Tokenizer.from_dir(folder).eos_id == EOS


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"eos_token": 5},
        {"eos_token": {"content": "<|im_end|>", "lstrip": "yes"}},
        {"additional_special_tokens": 5},
        {"additional_special_tokens": [5]},
        {"extra_special_tokens": {"odd": 5}},
        {"eos_token": "\ud800"},
        {"additional_special_tokens": [{"content": "\ud800"}]},
    ],
)
def test_what_is_wrong_in_the_file_of_special_tokens_is_told_of_that_file(folder, wrong):
    set_config(folder, added_tokens_decoder=None)
    (folder / "special_tokens_map.json").write_text(json.dumps(wrong))
    with pytest.raises(TokenizerError, match=r"special_tokens_map\.json: ") as refused:
        Tokenizer.from_dir(folder)
    assert "tokenizer_config" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "accepted"),
    [
        ("additional_special_tokens", "a list of tokens"),
        ("extra_special_tokens", "a list of tokens, or an object of them"),
        ("model_specific_special_tokens", "an object of tokens"),
    ],
)
def test_another_form_of_special_tokens_is_refused_with_what_is_accepted(folder, field, accepted):
    with pytest.raises(TokenizerError, match=f"{field} is 5; accepted: {accepted}$"):
        Tokenizer.from_dir(set_config(folder, **{field: 5}))


START = "<|im_start|>"


def but_entries(folder):
    """The markers of turns are in the vocabulary, and no file says yet that they are special."""
    file = folder / "tokenizer.json"
    read = json.loads(file.read_text())
    read["added_tokens"] = [token for token in read["added_tokens"] if token["id"] == BOS]
    read["model"]["vocab"] |= {"<|endoftext|>": BOS, START: BOS + 1, "<|im_end|>": EOS}
    file.write_text(json.dumps(read))
    return set_config(folder, added_tokens_decoder=None, additional_special_tokens=None)


@pytest.mark.parametrize(
    "said",
    [
        {"additional_special_tokens": [START]},
        {"extra_special_tokens": [START]},
        {"extra_special_tokens": {"odd": START}},
        {"model_specific_special_tokens": {"odd": {"content": START}}},
        {"image_token": START},
    ],
)
def test_special_tokens_that_are_but_entries_of_the_vocabulary_are_found_whole(folder, said):
    said |= {"pad_token": "<|unknown|>"}
    tokenizer = Tokenizer.from_dir(set_config(but_entries(folder), **said))
    ids = tokenizer.encode("<|im_start|>a<|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-1], len(ids)) == (BOS + 1, EOS, 3)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.special_ids == {BOS, BOS + 1, EOS}
    assert tokenizer.token_id("<|unknown|>") is None


@pytest.mark.parametrize("field", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("listed", [[], ["<|im_end|>"], [{"content": START}, "<|im_end|>"]])
def test_lists_of_special_tokens_in_both_files_are_one(folder, field, listed):
    named = {field: [START, "<|im_end|>"], "eos_token": None}
    set_config(but_entries(folder), chat_template="{{ additional_special_tokens }}", **named)
    (folder / "special_tokens_map.json").write_text(json.dumps({field: listed}))
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.encode("<|im_start|><|im_end|>", False) == [BOS + 1, EOS]
    assert tokenizer.apply_chat_template([]) == "['<|im_start|>', '<|im_end|>']"


@pytest.mark.parametrize("field", ["eos_token", "image_token", "additional_special_tokens"])
def test_a_special_token_has_the_flags_that_its_object_says(folder, field):
    end = {"content": "<|im_end|>", "lstrip": True, "special": False, "__type": "AddedToken"}
    named = {"eos_token": None, field: [end] if field.endswith("s") else end}
    tokenizer = Tokenizer.from_dir(set_config(but_entries(folder), **named))
    letter = tokenizer.encode("a", False)
    assert tokenizer.encode("a  <|im_end|>", False) == [*letter, EOS]
    assert EOS in tokenizer.special_ids


def test_added_tokens_are_as_tokenizer_config_has_them(folder):
    listed = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    new = {"content": "<new>", "lstrip": True, "normalized": False, "special": True}
    call = listed["1022"] | {"special": True}
    end = listed["1019"] | {"special": False}  # stays as tokenizer.json has it
    set_config(folder, added_tokens_decoder={"1024": new, "1022": call, "1019": end})
    tokenizer = Tokenizer.from_dir(folder)
    ids = tokenizer.encode("a  <new><tool_call><think><|im_end|>", add_special_tokens=False)
    assert ids[1:] == [1024, 1022, 1020, 1019]
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.vocab_size == 1025
    assert tokenizer.special_ids == {1017, 1018, 1019, 1022, 1024}


@pytest.mark.parametrize(
    ("listed", "match"),
    [
        ({"1030": {"content": "<new>"}}, "'<new>' as 1030, tokenizer.json as 1024"),
        ({"1019": {"content": "<think>"}}, "'<think>' as 1019, tokenizer.json as 1020"),
        ({"x": {"content": "<new>"}}, "expected tokens by their ids"),
        ({"1024": {"content": 7}}, "expected tokens by their ids"),
        ({"1024": {"content": "<new>", "special": "yes"}}, "expected tokens by their ids"),
        ({"1024": {}}, "expected tokens by their ids"),
        ({"1024": "<new>"}, "expected tokens by their ids"),
        (["<new>"], "expected tokens by their ids"),
    ],
)
def test_added_tokens_that_cannot_be_taken_are_refused(folder, listed, match):
    with pytest.raises(TokenizerError, match=match) as refused:
        Tokenizer.from_dir(set_config(folder, added_tokens_decoder=listed))
    assert "\n" not in str(refused.value)
