"""What a checkpoint says about its attention: heads, biases, norms, windows, latent vectors."""

import json
from dataclasses import dataclass
from typing import Any, Final

from model.fields import Fields

LATENT: Final = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
ERNIE: Final = ("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM")
HUNYUAN: Final = ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM")
_WINDOW_EVERYWHERE: Final = ("MistralForCausalLM", "MixtralForCausalLM")
# By the architecture, from which layer on there is a window, where a checkpoint does not say.
_WINDOW_FROM: Final = {"Qwen2ForCausalLM": 28, "Qwen3ForCausalLM": 28, "Dots1ForCausalLM": 62}
_USUAL_WINDOW: Final = 4096  # of those below, which have no window only where the file says null
_WINDOW_UNSAID: Final = ("MistralForCausalLM", *_WINDOW_FROM)
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
# Here attention_bias means queries, keys and values only.
_O_UNBIASED: Final = (
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "SolarOpenForCausalLM",
    "MiniMaxM2ForCausalLM",
)
# What transformers takes where a checkpoint has no such field; null is something else.
_KV_HEADS: Final = {
    "MistralForCausalLM": 8,
    "Qwen2ForCausalLM": 32,
    "Qwen3ForCausalLM": 32,
    "MixtralForCausalLM": 8,
    "Qwen2MoeForCausalLM": 16,
    "Qwen3MoeForCausalLM": 4,
    "Dots1ForCausalLM": 32,
    "Ernie4_5ForCausalLM": 2,
    "Ernie4_5_MoeForCausalLM": 4,
    "MiniMaxM2ForCausalLM": 8,
    "HYV3ForCausalLM": 8,
    "SolarOpenForCausalLM": 8,
    "Glm4MoeForCausalLM": 8,
    "GptOssForCausalLM": 8,
}
_HEAD_DIM: Final = {
    "Qwen3ForCausalLM": 128,
    "Ernie4_5ForCausalLM": 128,
    "MiniMaxM2ForCausalLM": 128,
    "HYV3ForCausalLM": 128,
    "SolarOpenForCausalLM": 128,
    "GptOssForCausalLM": 64,
}
_NORM_OF_HEADS: Final = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Dots1ForCausalLM",
    "HYV3ForCausalLM",
    *HUNYUAN,
)
_NORM_OF_ALL: Final = ("OlmoeForCausalLM", "MiniMaxM2ForCausalLM")
# The only values served for MiniMax-M2: other members of its family differ in these fields.
_MINIMAX_ONLY: Final = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
}
# The same for Hunyuan; its members with latent or shared keys are others.
_HUNYUAN_ONLY: Final = {
    "use_qk_norm": True,
    "use_cla": False,
    "use_mla": False,
    "use_rotary_pos_emb": True,
    "position_embedding_xdrope": False,
}


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of latent attention: one vector per position gives the keys and values of all heads.

    Source: arXiv:2405.04434, section 2.1.
    """

    q_rank: int  # 0: queries come straight from the hidden state
    kv_rank: int
    nope_dim: int  # of a head's query and key, the part that is not rotated
    rope_dim: int  # ... and the part that is; all heads share one rotated key
    value_dim: int


def read_attention(fields: Fields, architecture: str) -> dict[str, Any]:
    """The fields of ModelConfig about attention. Raises ModelError."""
    windows = _windows(fields, architecture)
    if architecture in LATENT:
        return _latent_heads(fields) | windows
    return _heads(fields, architecture) | windows


def _heads(fields: Fields, architecture: str) -> dict[str, Any]:
    """Fields of attention in which each kv head has its own keys and values."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = _integer(fields, "num_key_value_heads", _KV_HEADS.get(architecture, heads), heads)
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", kv_heads, f"a divisor of {heads} query heads")
    head_dim = _integer(fields, "head_dim", _HEAD_DIM.get(architecture), None)
    if head_dim is None and hidden % heads:
        raise fields.fail("hidden_size", hidden, f"a multiple of {heads} heads, or head_dim")
    head_dim = hidden // heads if head_dim is None else head_dim
    if head_dim % 2:
        raise fields.fail("head_dim", head_dim, "an even number: halves of it are rotated")
    if architecture == "MiniMaxM2ForCausalLM":
        _check_minimax(fields)
    hunyuan = architecture in HUNYUAN
    if hunyuan:
        fields.only(_HUNYUAN_ONLY | {"attention_head_dim": head_dim})
        fields.one_of("norm_type", fields.raw("norm_type", "rms"), ("rms", "hf_rms"))
    if architecture == "HYV3ForCausalLM":
        fields.only({"qk_norm": True})
    if architecture == "SolarOpenForCausalLM":
        fields.only({"use_qk_norm": False})
    qkv_bias = _qkv_bias(fields, architecture)
    glm = architecture == "Glm4MoeForCausalLM"
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "qkv_bias": qkv_bias,
        "o_bias": qkv_bias and architecture not in _O_UNBIASED,
        "neighbours_turned": architecture in ERNIE,
        "qk_norm": architecture in _NORM_OF_HEADS or (glm and fields.flag("use_qk_norm", False)),
        "turned_before_norm": hunyuan,
        "qk_norm_of_all": architecture in _NORM_OF_ALL,
        "sinks": architecture == "GptOssForCausalLM",
    }


def _integer(fields: Fields, name: str, unsaid: int | None, null: int | None) -> Any:
    """An integer; `unsaid` where the file has no such field, `null` where it says null."""
    return fields.integer(name, null if name in fields.values else unsaid)


def _qkv_bias(fields: Fields, architecture: str) -> bool:
    if architecture == "Qwen2ForCausalLM":
        return True
    if architecture in ("MiniMaxM2ForCausalLM", *ERNIE):
        return False
    if architecture == "Qwen2MoeForCausalLM":
        return bool(fields.flag("qkv_bias", True))
    return bool(fields.flag("attention_bias", architecture == "GptOssForCausalLM"))


def _check_minimax(fields: Fields) -> None:
    fields.only(_MINIMAX_ONLY)
    kinds = fields.raw("attn_type_list", [])
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise fields.fail("attn_type_list", kinds, "1, which is full attention, for every layer")


def _latent_heads(fields: Fields) -> dict[str, Any]:
    """Fields of DeepSeek's attention. Those that repeat others must agree with them."""
    heads = fields.integer("num_attention_heads")
    latent = LatentConfig(
        q_rank=fields.integer("q_lora_rank", None) or 0,
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
    )
    if latent.rope_dim % 2:
        raise fields.fail("qk_rope_head_dim", latent.rope_dim, "an even number: pairs are rotated")
    same = {
        "num_key_value_heads": heads,
        "head_dim": latent.rope_dim,
        "qk_head_dim": latent.nope_dim + latent.rope_dim,
    }
    for name, only in same.items():
        value = fields.integer(name, only)
        if value != only:
            raise fields.fail(name, value, f"{only}, or null")
    for name, only in (("attention_bias", False), ("rope_interleave", True)):
        if fields.flag(name, only) is not only:
            raise fields.fail(name, not only, json.dumps(only))
    return {
        "num_heads": heads,
        "num_kv_heads": 1,
        "head_dim": latent.kv_rank + latent.rope_dim,
        "latent": latent,
    }


def _windows(fields: Fields, architecture: str) -> dict[str, Any]:
    """Which layers see only the last positions.

    In GPT-OSS every other layer has a window, in Mistral and Mixtral every layer, in dots.llm1 the
    layers from max_window_layers on, and so in Qwen's dense models, behind a switch. layer_types
    may say otherwise, except for Mixtral, where transformers never reads it: there it has to agree,
    unless there is no window shorter than the context.
    """
    num_layers = fields.integer("num_hidden_layers")
    unsaid = "sliding_window" not in fields.values and architecture in _WINDOW_UNSAID
    least = 0 if architecture == "Qwen2MoeForCausalLM" else 1  # transformers 5 writes 0 for none
    window = _USUAL_WINDOW if unsaid else fields.integer("sliding_window", None, low=least) or None
    usual = [_FULL] * num_layers
    if architecture == "GptOssForCausalLM":
        window = fields.integer("sliding_window")
        usual = [_FULL if i % 2 else _SLIDING for i in range(num_layers)]
    elif architecture in _WINDOW_EVERYWHERE:
        usual = [_SLIDING if window else _FULL] * num_layers
    elif architecture == "Dots1ForCausalLM" or fields.flag("use_sliding_window", False):
        if architecture not in _WINDOW_FROM:
            raise fields.fail("use_sliding_window", True, f"false in {architecture}")
        first = fields.integer("max_window_layers", _WINDOW_FROM[architecture], low=0)
        usual = [_SLIDING if window and i >= first else _FULL for i in range(num_layers)]
    else:
        window = None
    types = fields.raw("layer_types", usual)
    accepted = (_FULL,) if window is None else (_FULL, _SLIDING)
    listed = isinstance(types, list) and len(types) == num_layers
    if not listed or any(x not in accepted for x in types):
        known = f"{' or '.join(accepted)} for each of {num_layers} layers"
        raise fields.fail("layer_types", types, known)
    if window is None or window >= fields.integer("max_position_embeddings"):
        return {}
    if architecture == "MixtralForCausalLM" and types != usual:
        raise fields.fail("layer_types", types, f"{usual[0]} for each layer, or null")
    layers = tuple(x == _SLIDING for x in types)
    return {"sliding_window": window, "window_layers": layers} if any(layers) else {}
