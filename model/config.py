"""What a checkpoint says about its network: config.json, read once into frozen values."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model.errors import ModelError

ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
)
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8: Final = "float8_e4m3fn"  # of pages only
PAGE_DTYPE_BYTES: Final = {**DTYPE_BYTES, FP8: 1}
_REQUIRED: Final = object()
# transformers' theta where a checkpoint says none; every other architecture's is 10000.
_THETA: Final = {"MixtralForCausalLM": 1e6}
# What an object of rotary settings may hold, by its kind. original_max_position_embeddings stands
# beside kinds that have no use for it too.
_ROPE_KEYS: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_ROPE_KINDS: Final = {
    "default": (*_ROPE_KEYS, "original_max_position_embeddings"),
    "linear": (*_ROPE_KEYS, "original_max_position_embeddings", "factor"),
    "llama3": (
        *_ROPE_KEYS,
        "original_max_position_embeddings",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
    ),
}
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
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "compression_config": None,
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. factor matters for kinds "linear" and "llama3", what follows for the last.

    Source: transformers, modeling_rope_utils (default, linear, llama3).
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True)
class KVSpec:
    """The pages of one pool: everything two pools must share to exchange pages.

    num_kv_heads counts heads as stored: replicated ones count each time.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, keys and values, all layers and all heads."""
        row = self.num_kv_heads * self.head_dim * PAGE_DTYPE_BYTES[self.dtype]
        return self.num_layers * 2 * self.page_size * row

    @property
    def stored_dtype(self) -> str:
        """Of the arrays that hold pages: fp8 is kept as bytes, see model/kv.py."""
        return "uint8" if self.dtype == FP8 else self.dtype


@dataclass(frozen=True)
class ModelConfig:
    """One network as features: every architecture served differs only in these fields."""

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
    norm_topk_prob: bool = False
    moe_layers: tuple[bool, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_temperature: float | None = None
    default_top_p: float | None = None
    default_top_k: int | None = None

    @property
    def group(self) -> int:
        """Query heads per key and value head."""
        return self.num_heads // self.num_kv_heads

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
        fields = _Fields.read(folder / "config.json")
        generation = folder / "generation_config.json"
        extra = _Fields.read(generation) if generation.exists() else None
        return _config(fields, extra)


class _Fields:
    """A JSON object whose fields are taken by name and type, or refused in one line."""

    def __init__(self, file: str, values: dict[str, Any]) -> None:
        self.file = file
        self.values = values

    @staticmethod
    def read(file: Path) -> "_Fields":
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelError(f"{file}: no such file; expected a checkpoint's config") from error
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelError(f"{file}: not readable as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{file}: expected a JSON object, got {type(values).__name__}")
        return _Fields(str(file), values)

    def fail(self, name: str, got: object, accepted: str) -> ModelError:
        return ModelError(f"{self.file}: {name} is {got!r}; accepted: {accepted}")

    def sub(self, name: str) -> "_Fields | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, value, "an object or null")
        return _Fields(f"{self.file}: {name}", value)

    def raw(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self.file}: {name} is missing")
            return default
        return value

    def integer(self, name: str, default: Any = _REQUIRED, low: int = 1) -> Any:
        value = self.raw(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.fail(name, value, f"an integer of at least {low}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, low: float = 0.0) -> Any:
        value = self.raw(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, value, "a number")
        if not math.isfinite(value) or value < low:
            raise self.fail(name, value, f"a finite number of at least {low}")
        return float(value)

    def theta(self) -> float | None:
        """rope_theta, where there is one: a base of powers, so zero is none."""
        value: float | None = self.number("rope_theta", None)
        if value == 0.0:
            raise self.fail("rope_theta", value, "a finite number above 0")
        return value

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, value, "true or false")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.raw(name, [])
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in listed):
            raise self.fail(name, value, "a token id, or a list of them")
        return tuple(listed)

    def one_of(self, name: str, value: object, accepted: tuple[str, ...]) -> str:
        if not isinstance(value, str) or value not in accepted:
            raise self.fail(name, value, ", ".join(accepted))
        return value


def _config(fields: _Fields, generation: _Fields | None) -> ModelConfig:
    listed = fields.raw("architectures", _REQUIRED)
    if not isinstance(listed, list) or len(listed) != 1:
        raise fields.fail("architectures", listed, f"a list of one of {', '.join(ARCHITECTURES)}")
    architecture = fields.one_of("architectures", listed[0], ARCHITECTURES)
    _refuse_unsupported(fields, architecture)
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    hidden = fields.integer("hidden_size")
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", kv_heads, f"a divisor of {heads} query heads")
    head_dim = fields.integer("head_dim", None)
    if head_dim is None and hidden % heads:
        raise fields.fail("hidden_size", hidden, f"a multiple of {heads} heads, or head_dim")
    head_dim = hidden // heads if head_dim is None else head_dim
    if head_dim % 2:
        raise fields.fail("head_dim", head_dim, "an even number, halves of it are rotated")
    bias = architecture != "Qwen2ForCausalLM" and fields.flag("attention_bias", False)
    dtype = fields.raw("torch_dtype", None) or fields.raw("dtype", None) or "float32"
    sources = [x for x in (generation, fields) if x is not None]
    eos = [token for source in sources for token in source.ids("eos_token_id")]
    bos = [token for source in sources for token in source.ids("bos_token_id")]
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=_rope(fields, _THETA.get(architecture, 10000.0)),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        torch_dtype=fields.one_of("torch_dtype", dtype, tuple(DTYPE_BYTES)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or bias,
        o_bias=bias,
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=next(iter(bos), None),
        default_temperature=generation.number("temperature", None) if generation else None,
        default_top_p=generation.number("top_p", None) if generation else None,
        default_top_k=_top_k(generation) if generation else None,
        **_experts(fields, architecture),
    )


def _top_k(generation: _Fields) -> int | None:
    """Both ways to say that it is off are taken, as from a client; ours is 0."""
    value: int | None = generation.integer("top_k", None, low=-1)
    return value if value is None else max(value, 0)


def _refuse_unsupported(fields: _Fields, architecture: str) -> None:
    """Refuse what would change the numbers and is not computed."""
    fields.one_of("hidden_act", fields.raw("hidden_act", "silu"), ("silu",))
    if fields.raw("quantization_config", None) is not None:
        got = fields.raw("quantization_config", None)
        method = got.get("quant_method", got) if isinstance(got, dict) else got
        raise fields.fail("quantization_config", method, "none (unquantised weights)")
    for name, neutral in _NEUTRAL.items():
        value = fields.raw(name, neutral)
        if value != neutral:
            raise fields.fail(name, value, json.dumps(neutral))
    layer_types = fields.raw("layer_types", [])
    if not isinstance(layer_types, list) or any(x != "full_attention" for x in layer_types):
        raise fields.fail("layer_types", layer_types, "full_attention in every layer")
    # Qwen writes a window beside a switch that turns it off; Mixtral heeds no switch.
    window = fields.integer("sliding_window", None)
    mixtral = architecture == "MixtralForCausalLM"
    switch = mixtral or fields.flag("use_sliding_window", False)
    if switch and window is not None and window < fields.integer("max_position_embeddings"):
        raise fields.fail("sliding_window", window, "null, or a window as long as the context")


def _rope(fields: _Fields, default_theta: float) -> RopeConfig:
    """Read either form, or both where they say the same; transformers 5 obeys the older then."""
    top = fields.theta()
    found: dict[str, RopeConfig] = {}
    for name in ("rope_scaling", "rope_parameters"):
        settings = fields.sub(name)
        if settings is None or not settings.values:
            continue
        theta = settings.theta() or top or default_theta
        if top is not None and theta != top:
            raise fields.fail("rope_theta", top, f"{theta}, as {name} has it, or one of the two")
        found[name] = _rope_settings(fields, settings, theta)
    if not found:
        return RopeConfig("default", top or default_theta)
    rope, *others = found.values()
    if any(other != rope for other in others):
        got, accepted = fields.values["rope_scaling"], fields.values["rope_parameters"]
        raise fields.fail("rope_scaling", got, f"what rope_parameters says ({accepted}), or null")
    return rope


def _rope_settings(fields: _Fields, settings: _Fields, theta: float) -> RopeConfig:
    """One object of either name. `type` is the older name of `rope_type`."""
    kinds = [x for name in ("rope_type", "type") if (x := settings.raw(name, None)) is not None]
    kind = settings.one_of("rope_type", kinds[0] if kinds else "default", tuple(_ROPE_KINDS))
    if kinds[1:] not in ([], [kind]):
        raise settings.fail("type", kinds[1], f"{kind!r}, as rope_type has it, or one of the two")
    for name, value in settings.values.items():
        # Objects are of layer types, of which each may turn otherwise.
        if value is not None and name not in _ROPE_KINDS[kind]:
            taken = ", ".join(_ROPE_KINDS[kind])
            raise settings.fail(name, value, f"null; fields of rope_type {kind!r}: {taken}")
    partial = settings.number("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise settings.fail("partial_rotary_factor", partial, "1.0")
    if kind == "default":
        return RopeConfig(kind, theta)
    if kind == "linear":
        return RopeConfig(kind, theta, factor=settings.number("factor", low=1.0))
    rope = RopeConfig(
        kind,
        theta,
        factor=settings.number("factor", low=1.0),
        low_freq_factor=settings.number("low_freq_factor"),
        high_freq_factor=settings.number("high_freq_factor"),
        original_max_position=settings.integer("original_max_position_embeddings"),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        accepted = f"more than low_freq_factor {rope.low_freq_factor}"
        raise settings.fail("high_freq_factor", rope.high_freq_factor, accepted)
    # transformers 5 obeys the outer one.
    outer = fields.integer("original_max_position_embeddings", rope.original_max_position)
    if outer != rope.original_max_position:
        accepted = f"{rope.original_max_position}, as {settings.file} has it, or one of the two"
        raise fields.fail("original_max_position_embeddings", outer, accepted)
    return rope


def _experts(fields: _Fields, architecture: str) -> dict[str, Any]:
    num_layers = fields.integer("num_hidden_layers")
    if architecture not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        return {"moe_layers": (False,) * num_layers}
    # Mixtral says num_local_experts, Qwen num_experts; transformers 5 writes the first for both.
    experts = fields.integer("num_experts", None) or fields.integer("num_local_experts")
    chosen = fields.integer("num_experts_per_tok")
    if chosen > experts:
        raise fields.fail("num_experts_per_tok", chosen, f"at most {experts} experts")
    found = {"num_experts": experts, "num_experts_per_tok": chosen}
    if architecture == "MixtralForCausalLM":
        # Softmax over the chosen is softmax over all, renormalised over the chosen.
        width = fields.integer("intermediate_size")
        routed = (True,) * num_layers
        return found | {
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
            "moe_layers": routed,
        }
    step = fields.integer("decoder_sparse_step", 1)
    plain = fields.raw("mlp_only_layers", [])
    if not isinstance(plain, list) or not all(isinstance(x, int) for x in plain):
        raise fields.fail("mlp_only_layers", plain, "a list of layer numbers")
    return found | {
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob", False),
        "moe_layers": tuple(i not in plain and (i + 1) % step == 0 for i in range(num_layers)),
    }
