"""The demo checkpoint: complete, small, readable by our tokenizer, and made by its script."""

import json
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open

from serving.demo import demo_model_path
from serving.tokenizer import Tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_demo_model.py"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_the_files_are_there_and_small():
    files = {file.name: file.stat().st_size for file in demo_model_path().iterdir()}
    assert set(files) == FILES
    assert sum(files.values()) <= 12 << 20


def test_the_script_writes_the_same_bytes_again(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    assert {file.name for file in tmp_path.iterdir()} == FILES
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (demo_model_path() / name).read_bytes(), name


def test_the_tensors_are_those_of_the_configuration():
    config = json.loads((demo_model_path() / "config.json").read_text())
    hidden, experts = config["hidden_size"], config["num_experts"]
    with safe_open(demo_model_path() / "model.safetensors", "np") as tensors:
        names = set(tensors.keys())
        kinds = {tensors.get_slice(name).get_dtype() for name in names}
        down = tensors.get_slice("model.layers.3.mlp.experts.15.down_proj.weight").get_shape()
        embed = tensors.get_slice("model.embed_tokens.weight").get_shape()
    assert kinds == {"BF16"}
    assert len(names) == 3 + config["num_hidden_layers"] * (9 + 3 * experts)
    assert down == [hidden, config["moe_intermediate_size"]]
    assert embed == [config["vocab_size"], hidden]


def test_the_tokenizer_round_trips_any_text_and_renders_a_chat():
    tokenizer = Tokenizer.from_dir(demo_model_path())
    assert tokenizer.vocab_size == 2048
    text = "The ferry, naïve 世界 🚢\n\tend"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": "Hello!"}]
    prompt = tokenizer.apply_chat_template(messages)
    assert prompt == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    settings = json.loads((demo_model_path() / "generation_config.json").read_text())
    assert tokenizer.eos_id in settings["eos_token_id"]
