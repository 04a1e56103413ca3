"""A model folder for a named shape, without weights: what `--load-format dummy` is served from."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.shapes import SHAPES, Shape
from model.byte_level import spelled
from model.config import ModelConfig

_MODEL_TYPES: Final = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
WRITABLE: Final = tuple(
    name for name, shape in SHAPES.items() if shape.cfg.architecture in _MODEL_TYPES
)
EOS: Final = "<|endoftext|>"


def write_model(shape: Shape, folder: Path) -> None:
    """Write config.json and the tokenizer's files into an existing folder.

    Raises ValueError for a shape that is not in WRITABLE.
    """
    if shape.name not in WRITABLE:
        raise ValueError(f"shape {shape.name}; accepted: {', '.join(WRITABLE)}")
    (folder / "config.json").write_text(json.dumps(_config(shape.cfg), indent=2))
    written = ModelConfig.from_dir(folder)
    assert written == shape.cfg, (written, shape.cfg)
    _tokenizer(shape.cfg.vocab_size).save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "eos_token": EOS,
        "model_max_length": shape.cfg.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def flags_of(shape: Shape, folder: Path) -> list[str]:
    """Arguments with which `kvferry up` serves the folder that was written."""
    flags = ["--model-path", str(folder), "--load-format", "dummy"]
    return [*flags, "--quantization", shape.codes] if shape.codes else flags


def _config(cfg: ModelConfig) -> dict[str, Any]:
    """As transformers writes it; no eos_token_id, which the tokenizer has."""
    config: dict[str, Any] = {
        "architectures": [cfg.architecture],
        "model_type": _MODEL_TYPES[cfg.architecture],
        "attention_bias": cfg.qkv_bias,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "max_position_embeddings": cfg.max_position_embeddings,
        "num_attention_heads": cfg.num_heads,
        "num_hidden_layers": cfg.num_layers,
        "num_key_value_heads": cfg.num_kv_heads,
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": cfg.rope.theta,
        "sliding_window": None,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "torch_dtype": cfg.torch_dtype,
        "use_sliding_window": False,
        "vocab_size": cfg.vocab_size,
    }
    if cfg.num_experts:
        config |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, sparse in enumerate(cfg.moe_layers) if not sparse],
            "moe_intermediate_size": cfg.moe_intermediate_size,
            "norm_topk_prob": cfg.router.normalise,
            "num_experts": cfg.num_experts,
            "num_experts_per_tok": cfg.num_experts_per_tok,
        }
    return config


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE of vocab_size tokens: all bytes, then words of letters, and last EOS."""
    vocab = {spelled(bytes([byte])): byte for byte in range(256)}
    merges = list(islice(_merges(), vocab_size - len(vocab) - 1))
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Endless pairs (word, letter), joined: all words of two letters, then of three, and so on."""
    words = list(ascii_lowercase)
    while True:
        longer = []
        for word in words:
            for letter in ascii_lowercase:
                yield word, letter
                longer.append(word + letter)
        words = longer
