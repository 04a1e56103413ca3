"""Makes tiny checkpoints for tests, and recomputes their logits in plain numpy, in float64."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from model.config import ModelConfig
from model.errors import ModelError

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 30,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "sliding_window": 128,
    "eos_token_id": 7,
}
# With biases on the output projection too, scaled rotary positions, and one kv head.
LLAMA: dict[str, Any] = QWEN2 | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": True,
    "num_key_value_heads": 1,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "tie_word_embeddings": True,
}
# A window in the second layer only, shorter than a page.
QWEN2_WINDOW: dict[str, Any] = QWEN2 | {
    "use_sliding_window": True,
    "sliding_window": 11,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}
# A window in every layer, longer than a page.
MISTRAL: dict[str, Any] = QWEN2 | {
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 19,
    "layer_types": ["sliding_attention"] * 2,
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def golden_config(name: str, file: str = "model/config.json") -> dict[str, Any]:
    """A JSON file of a recorded checkpoint. file: its path within the checkpoint's folder."""
    folder = Path(__file__).resolve().parents[1] / "goldens" / name
    found: dict[str, Any] = json.loads((folder / file).read_text())
    return found


def read_config(folder: Path, config: dict[str, Any]) -> ModelConfig:
    """The configuration read from such a config.json. Raises ModelError."""
    return ModelConfig.from_dir(write_config(folder, config))


def refusal(folder: Path, config: dict[str, Any]) -> str:
    """Why a checkpoint with this config.json is refused; "" if it is read."""
    try:
        read_config(folder, config)
    except ModelError as error:
        return str(error)
    return ""


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a dense checkpoint of this configuration, float32."""
    draw = np.random.default_rng(seed)
    hidden, width = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def vector(size: int, mean: float) -> np.ndarray:
        return (mean + 0.2 * draw.standard_normal(size)).astype(np.float32)

    found = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": vector(hidden, 1.0),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        qwen2 = config["architectures"] == ["Qwen2ForCausalLM"]
        for name, size in (("q", queries), ("k", kv), ("v", kv)):
            found[f"{at}.self_attn.{name}_proj.weight"] = matrix(size, hidden)
            if qwen2 or config.get("attention_bias"):
                found[f"{at}.self_attn.{name}_proj.bias"] = vector(size, 0.0)
        found[f"{at}.self_attn.o_proj.weight"] = matrix(hidden, queries)
        if config.get("attention_bias"):
            found[f"{at}.self_attn.o_proj.bias"] = vector(hidden, 0.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = vector(hidden, 1.0)
        for name in ("gate", "up"):
            found[f"{at}.mlp.{name}_proj.weight"] = matrix(width, hidden)
        found[f"{at}.mlp.down_proj.weight"] = matrix(hidden, width)
    return found


def write_checkpoint(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    tensors = random_tensors(config)
    save_file(tensors, write_config(folder, config) / "model.safetensors")
    return tensors


def forward(config: dict[str, Any], tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits at every position, float64[tokens, vocab]: the whole sequence at once, no cache."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["hidden_size"] // heads
    stretch = (config.get("rope_scaling") or {}).get("factor", 1.0)
    freq = config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim) / stretch
    angles = np.outer(np.arange(len(ids)), freq)
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    types = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    inside = np.triu(causal, 1 - config.get("sliding_window", len(ids)))

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight

    def turn(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : head_dim // 2], x[..., head_dim // 2 :]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", np.zeros(()))

    x = t["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        inner = norm(x, t[f"{at}.input_layernorm.weight"])
        q = turn(project(inner, f"{at}.self_attn.q_proj").reshape(len(ids), heads, head_dim))
        k = turn(project(inner, f"{at}.self_attn.k_proj").reshape(len(ids), kv_heads, head_dim))
        v = project(inner, f"{at}.self_attn.v_proj").reshape(len(ids), kv_heads, head_dim)
        out = np.empty_like(q)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T / np.sqrt(head_dim)
            seen = inside if types[layer] == "sliding_attention" else causal
            scores = np.exp(np.where(seen, scores, -np.inf))
            out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, shared]
        x = x + project(out.reshape(len(ids), -1), f"{at}.self_attn.o_proj")
        inner = norm(x, t[f"{at}.post_attention_layernorm.weight"])
        gate = project(inner, f"{at}.mlp.gate_proj")
        act = gate / (1 + np.exp(-gate)) * project(inner, f"{at}.mlp.up_proj")
        x = x + project(act, f"{at}.mlp.down_proj")
    head_weight = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return norm(x, t["model.norm.weight"]) @ head_weight.T
