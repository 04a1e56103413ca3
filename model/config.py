"""What a checkpoint says about its network: config.json, read once into frozen values."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model.errors import ModelError
from model.fields import REQUIRED, Fields
from model.rope import RopeConfig, read_rope

ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
_LATENT: Final = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
_WINDOW_EVERYWHERE: Final = ("MistralForCausalLM", "MixtralForCausalLM")
_MOST_LAYERS: Final = 10_000  # more is a slip, and what is made for each of them would not end
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_V2_METHODS: Final = ("greedy", "group_limited_greedy")
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8: Final = "float8_e4m3fn"  # of pages only
PAGE_DTYPE_BYTES: Final = {**DTYPE_BYTES, FP8: 1}
# What transformers takes where a checkpoint says none; every other architecture's theta is 10000.
_THETA: Final = {"MixtralForCausalLM": 1e6, "GptOssForCausalLM": 150000.0}
_GPT_OSS_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_USUAL_WINDOW: Final = 4096  # of those below, which have none only where the file says null
_WINDOW_UNSAID: Final = ("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Fields of these architectures and of networks derived from them, each with the one value beside
# null at which what we compute is what they say.
_NEUTRAL: Final[dict[str, Any]] = {
    "mlp_bias": False,
    "is_causal": True,
    "dual_chunk_attention_config": None,
    "attention_chunk_size": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "scale_emb": 1.0,
    "scale_depth": None,
    "dim_model_base": None,
    "partial_rotary_factor": 1.0,
    "rotary_pct": 1.0,
    "no_rope_layers": None,
    "compression_config": None,
}
# Of all but DeepSeek, which says them.
_NEUTRAL_ROUTING: Final[dict[str, Any]] = {"scoring_func": "softmax", "routed_scaling_factor": 1.0}


@dataclass(frozen=True)
class KVSpec:
    """The pages of one pool: everything two pools must share to exchange pages.

    num_kv_heads counts heads as stored: replicated ones count each time. planes: 2, keys and
    values; 1 where a position has one latent vector for both.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    planes: int = 2

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all planes, layers and heads."""
        row = self.num_kv_heads * self.head_dim * PAGE_DTYPE_BYTES[self.dtype]
        return self.num_layers * self.planes * self.page_size * row

    @property
    def stored_dtype(self) -> str:
        """Of the arrays that hold pages: fp8 is kept as bytes, see model/kv.py."""
        return "uint8" if self.dtype == FP8 else self.dtype


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of latent attention. Keys and values of all heads come of one vector a position.

    Source: arXiv:2405.04434, section 2.1.
    """

    q_rank: int  # 0: queries come straight of the hidden state
    kv_rank: int
    nope_dim: int  # of a head's query and key without rotation
    rope_dim: int  # ... and with it; the rotated key is one for all heads
    value_dim: int


@dataclass(frozen=True)
class RouterConfig:
    """How a router's logits become experts and weights.

    num_groups > 1: only experts of the best groups_per_tok groups are chosen from; a group is as
    good as its best expert, or the sum of its best two. Source: arXiv:2405.04434, section 2.2;
    arXiv:2412.19437, section 2.1.2.
    """

    sigmoid: bool = False  # of each logit, instead of the softmax over all
    normalise: bool = False  # the weights of those chosen to a sum of one
    scale: float = 1.0  # of the weights
    bias: bool = False  # of the logits
    correction: bool = False  # added to the scores when choosing, and not to the weights
    num_groups: int = 1
    groups_per_tok: int = 1
    best_two: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """One network as features: every architecture served differs only in these fields.

    num_kv_heads, head_dim: of the pages. With latent attention that is one head for all queries,
    as wide as the latent vector and the rotated key.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    max_position_embeddings: int
    torch_dtype: str = "bfloat16"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    router: RouterConfig = RouterConfig()
    moe_layers: tuple[bool, ...] = ()
    num_shared_experts: int = 0  # each as wide as a routed one; all tokens go to them
    experts_bias: bool = False
    swiglu_limit: float = 0.0  # 0: SiLU; else the clamped form with swiglu_alpha
    swiglu_alpha: float = 1.0
    sinks: bool = False  # a logit of each head that takes weight and gives no value
    sliding_window: int = 0
    window_layers: tuple[bool, ...] = ()  # that see so many positions, their own included
    latent: LatentConfig | None = None
    num_extra_layers: int = 0  # of the checkpoint behind the last, left unread
    quantization: str = ""  # of the checkpoint's tensors: "", fp8, mxfp4
    quantized_block: tuple[int, int] = (128, 128)  # of fp8: rows, columns that share a scale
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_temperature: float | None = None
    default_top_p: float | None = None
    default_top_k: int | None = None

    @property
    def group(self) -> int:
        """Query heads per key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_planes(self) -> int:
        """Vectors of head_dim that a position has for each kv head."""
        return 1 if self.latent else 2

    @property
    def softmax_scale(self) -> float:
        """Of a query's product with a key."""
        latent = self.latent
        size = latent.nope_dim + latent.rope_dim if latent else self.head_dim
        return float(size**-0.5 * self.rope.softmax_factor)

    @property
    def rope_dim(self) -> int:
        """Of what is rotated of a query or key."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @staticmethod
    def from_dir(path: str | Path) -> "ModelConfig":
        """Read config.json and, where there is one, generation_config.json of a checkpoint folder.

        Both forms are read: rope_theta, rope_scaling and torch_dtype at the top level, and
        rope_parameters and dtype as transformers 5 writes them. What a file says twice must agree.
        Raises ModelError naming file, field, value got and values accepted.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(
                f"--model-path {folder} is not a folder; it takes a checkpoint on this machine, "
                "such as `hf download` makes"
            )
        fields = Fields.read(folder / "config.json")
        generation = folder / "generation_config.json"
        extra = Fields.read(generation) if generation.exists() else None
        return _config(fields, extra)


def _config(fields: Fields, generation: Fields | None) -> ModelConfig:
    listed = fields.raw("architectures", REQUIRED)
    if not isinstance(listed, list) or len(listed) != 1:
        raise fields.fail("architectures", listed, f"a list of one of {', '.join(ARCHITECTURES)}")
    architecture = fields.one_of("architectures", listed[0], ARCHITECTURES)
    _refuse_unsupported(fields, architecture)
    quantization = _quantization(fields, architecture)
    dtype = _said_once(fields, "torch_dtype", "dtype")
    dtype = dtype or ("bfloat16" if quantization else "float32")
    sources = [x for x in (generation, fields) if x is not None]
    eos = [token for source in sources for token in source.ids("eos_token_id")]
    bos = [token for source in sources for token in source.ids("bos_token_id")]
    latent = architecture in _LATENT
    usual_rope = _GPT_OSS_ROPE if architecture == "GptOssForCausalLM" else {}
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields, _THETA.get(architecture, 10000.0), latent, usual_rope),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        torch_dtype=fields.one_of("torch_dtype", dtype, tuple(DTYPE_BYTES)),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=next(iter(bos), None),
        default_temperature=generation.number("temperature", None) if generation else None,
        default_top_p=generation.number("top_p", None) if generation else None,
        default_top_k=_top_k(generation) if generation else None,
        **(_latent_heads(fields) if latent else _heads(fields, architecture)),
        **_experts(fields, architecture),
        **_windows(fields, architecture),
        **quantization,
    )


def _said_once(fields: Fields, name: str, other: str) -> Any:
    """The value of two names of one thing, or None. Raises ModelError where they differ."""
    value, same = fields.raw(name, None), fields.raw(other, None)
    if value is not None and same is not None and value != same:
        raise fields.fail(name, value, f"{same!r}, as {other} has it, or one of the two")
    return same if value is None else value


def _top_k(generation: Fields) -> int | None:
    """Both ways to say that it is off are taken, as from a client; ours is 0."""
    value: int | None = generation.integer("top_k", None, low=-1)
    return value if value is None else max(value, 0)


def _refuse_unsupported(fields: Fields, architecture: str) -> None:
    """Refuse what would change the numbers and is not computed."""
    fields.one_of("hidden_act", fields.raw("hidden_act", "silu"), ("silu",))
    layers = fields.integer("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise fields.fail("num_hidden_layers", layers, f"at most {_MOST_LAYERS}")
    neutrals = _NEUTRAL if architecture in _LATENT else _NEUTRAL | _NEUTRAL_ROUTING
    for name, neutral in neutrals.items():
        value = fields.raw(name, neutral)
        if value != neutral:
            raise fields.fail(name, value, json.dumps(neutral))


def _heads(fields: Fields, architecture: str) -> dict[str, Any]:
    """Of attention with keys and values of their own."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", kv_heads, f"a divisor of {heads} query heads")
    head_dim = fields.integer("head_dim", None)
    if head_dim is None and hidden % heads:
        raise fields.fail("hidden_size", hidden, f"a multiple of {heads} heads, or head_dim")
    head_dim = hidden // heads if head_dim is None else head_dim
    if head_dim % 2:
        raise fields.fail("head_dim", head_dim, "an even number, halves of it are rotated")
    gpt_oss = architecture == "GptOssForCausalLM"
    bias = architecture != "Qwen2ForCausalLM" and fields.flag("attention_bias", gpt_oss)
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "qkv_bias": architecture == "Qwen2ForCausalLM" or bias,
        "o_bias": bias,
        "qk_norm": architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        "sinks": gpt_oss,
    }


def _latent_heads(fields: Fields) -> dict[str, Any]:
    """Of DeepSeek's attention. Fields that say the same again must agree."""
    heads = fields.integer("num_attention_heads")
    latent = LatentConfig(
        q_rank=fields.integer("q_lora_rank", None) or 0,
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
    )
    if latent.rope_dim % 2:
        raise fields.fail("qk_rope_head_dim", latent.rope_dim, "an even number, of rotated pairs")
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
        "num_extra_layers": fields.integer("num_nextn_predict_layers", 0, low=0),
    }


def _windows(fields: Fields, architecture: str) -> dict[str, Any]:
    """Layers that see but the last positions.

    GPT-OSS has them everywhere or at every other layer, Mistral and Mixtral everywhere, and Qwen's
    dense models beside a switch, from max_window_layers on.
    """
    num_layers = fields.integer("num_hidden_layers")
    unsaid = "sliding_window" not in fields.values and architecture in _WINDOW_UNSAID
    window = _USUAL_WINDOW if unsaid else fields.integer("sliding_window", None)
    usual = [_FULL] * num_layers
    if architecture == "GptOssForCausalLM":
        window = fields.integer("sliding_window")
        usual = [_FULL if i % 2 else _SLIDING for i in range(num_layers)]
    elif architecture in _WINDOW_EVERYWHERE:
        usual = [_SLIDING if window else _FULL] * num_layers
    elif fields.flag("use_sliding_window", False):
        if architecture not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
            raise fields.fail("use_sliding_window", True, f"false in {architecture}")
        first = fields.integer("max_window_layers", 28, low=0)
        usual = [_SLIDING if window and i >= first else _FULL for i in range(num_layers)]
    else:
        window = None
    types = fields.raw("layer_types", usual)
    accepted = (_FULL,) if window is None else (_FULL, _SLIDING)
    listed = isinstance(types, list) and len(types) == num_layers
    if not listed or any(x not in accepted for x in types):
        known = f"{' or '.join(accepted)} for each of {num_layers} layers"
        raise fields.fail("layer_types", types, known)
    layers = tuple(x == _SLIDING for x in types)
    if not any(layers) or window >= fields.integer("max_position_embeddings"):
        return {}
    return {"sliding_window": window, "window_layers": layers}


def _quantization(fields: Fields, architecture: str) -> dict[str, Any]:
    """How tensors are stored; they are computed with as the dtype of the weights says."""
    settings = fields.sub("quantization_config")
    if settings is None:
        return {}
    mxfp4 = ("mxfp4",) if architecture == "GptOssForCausalLM" else ()
    accepted = ("fp8", *mxfp4)
    method = settings.raw("quant_method", REQUIRED)
    if method not in accepted:
        raise fields.fail("quantization_config", method, f"{', '.join(accepted)}, or null")
    if method == "mxfp4":
        return {"quantization": method}
    block = settings.raw("weight_block_size", None)
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
        raise settings.fail("weight_block_size", block, "rows and columns of a block: two integers")
    return {"quantization": method, "quantized_block": (block[0], block[1])}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _experts(fields: Fields, architecture: str) -> dict[str, Any]:
    num_layers = fields.integer("num_hidden_layers")
    if architecture in _LATENT:
        return _deepseek_experts(fields, architecture)
    if architecture not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"):
        return {"moe_layers": (False,) * num_layers}
    # Mixtral says num_local_experts, Qwen num_experts; transformers 5 writes the first for both.
    _said_once(fields, "num_experts", "num_local_experts")
    experts = fields.integer("num_experts", None) or fields.integer("num_local_experts")
    found = {"num_experts": experts, "num_experts_per_tok": _chosen(fields, experts)}
    if architecture != "Qwen3MoeForCausalLM":
        # Softmax over the chosen is softmax over all, renormalised over the chosen.
        gpt_oss = architecture == "GptOssForCausalLM"
        return found | {
            "moe_intermediate_size": fields.integer("intermediate_size"),
            "router": RouterConfig(normalise=True, bias=gpt_oss),
            "moe_layers": (True,) * num_layers,
            **(_clamped(fields) if gpt_oss else {}),
        }
    step = fields.integer("decoder_sparse_step", 1)
    plain = fields.raw("mlp_only_layers", [])
    if not isinstance(plain, list) or not all(isinstance(x, int) for x in plain):
        raise fields.fail("mlp_only_layers", plain, "a list of layer numbers")
    return found | {
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "router": RouterConfig(normalise=fields.flag("norm_topk_prob", False)),
        "moe_layers": tuple(i not in plain and (i + 1) % step == 0 for i in range(num_layers)),
    }


def _chosen(fields: Fields, experts: int) -> int:
    chosen: int = fields.integer("num_experts_per_tok")
    if chosen > experts:
        raise fields.fail("num_experts_per_tok", chosen, f"at most {experts} experts")
    return chosen


def _clamped(fields: Fields) -> dict[str, Any]:
    """GPT-OSS's experts, which have biases and a clamped activation."""
    limit = fields.number("swiglu_limit", 7.0)
    if limit <= 0.0:
        raise fields.fail("swiglu_limit", limit, "a number above 0")
    chosen = fields.integer("num_experts_per_tok")
    if fields.integer("experts_per_token", chosen) != chosen:
        got = fields.raw("experts_per_token", None)
        raise fields.fail("experts_per_token", got, f"{chosen}, as num_experts_per_tok, or null")
    return {
        "experts_bias": True,
        "swiglu_limit": limit,
        "swiglu_alpha": fields.number("swiglu_alpha", 1.702),
    }


def _deepseek_experts(fields: Fields, architecture: str) -> dict[str, Any]:
    num_layers = fields.integer("num_hidden_layers")
    experts = fields.integer("n_routed_experts")
    chosen = _chosen(fields, experts)
    third = architecture == "DeepseekV3ForCausalLM"
    num_dense = fields.integer("first_k_dense_replace", REQUIRED if third else 0, low=0)
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.fail("moe_layer_freq", fields.raw("moe_layer_freq", 1), "1")
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "num_shared_experts": fields.integer("n_shared_experts", 0, low=0),
        "router": _deepseek_router(fields, architecture, experts, chosen),
        "moe_layers": tuple(i >= num_dense for i in range(num_layers)),
    }


def _deepseek_router(fields: Fields, architecture: str, experts: int, chosen: int) -> RouterConfig:
    third = architecture == "DeepseekV3ForCausalLM"
    scoring, methods = ("sigmoid", ("noaux_tc",)) if third else ("softmax", _V2_METHODS)
    fields.one_of("scoring_func", fields.raw("scoring_func", scoring), (scoring,))
    method = fields.one_of("topk_method", fields.raw("topk_method", methods[0]), methods)
    # What transformers takes where V3's config is silent is V3's own, and no other model's.
    one = REQUIRED if third else 1
    normalise = fields.flag("norm_topk_prob", third)
    scale = float(fields.number("routed_scaling_factor", one))
    if normalise and scale != 1.0 and not third:
        # DeepSeek's own code scales or normalises there, others do both.
        raise fields.fail("routed_scaling_factor", scale, "1.0 beside norm_topk_prob")
    groups, best = 1, 1
    if method != "greedy":
        groups, best = fields.integer("n_group", one), fields.integer("topk_group", one)
        if experts % groups:
            raise fields.fail("n_group", groups, f"a divisor of {experts} experts")
        if best > groups or chosen > best * (experts // groups):
            accepted = f"at most {groups} groups, with at least {chosen} experts together"
            raise fields.fail("topk_group", best, accepted)
        if third and experts // groups < 2:
            raise fields.fail("n_group", groups, "groups of two experts or more")
    return RouterConfig(
        sigmoid=third,
        normalise=normalise,
        scale=scale,
        correction=third,
        num_groups=groups,
        groups_per_tok=best,
        best_two=third,
    )
