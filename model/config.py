"""What a checkpoint says about its network: config.json, read once into frozen values."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from model.config_attention import ERNIE, HUNYUAN, LATENT, LatentConfig, read_attention
from model.config_experts import RouterConfig, read_experts
from model.config_quantised import read_quantization
from model.errors import ModelError
from model.fields import REQUIRED, Fields, is_endless
from model.rope import RopeConfig, read_rope

ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "HYV3ForCausalLM",
    "SolarOpenForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
_MOST_LAYERS: Final = 10_000  # more is a mistake, and work for each of them would never end
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8: Final = "float8_e4m3fn"  # of pages only
PAGE_DTYPE_BYTES: Final = {**DTYPE_BYTES, FP8: 1}
# What transformers takes where a checkpoint gives none; every other architecture's theta is 10000.
_THETA: Final = {
    "MixtralForCausalLM": 1e6,
    "GptOssForCausalLM": 150000.0,
    "MiniMaxM2ForCausalLM": 5e6,
    "Ernie4_5ForCausalLM": 500000.0,
    "Ernie4_5_MoeForCausalLM": 500000.0,
    "HYV3ForCausalLM": 11158840.0,
    "SolarOpenForCausalLM": 1e6,
}
# Architectures that may rotate only a part of each head; the part where a checkpoint gives none.
_PARTLY_TURNED: Final = {"Glm4MoeForCausalLM": 0.5, "MiniMaxM2ForCausalLM": 1.0}
_GPT_OSS_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Fields of these architectures and of networks derived from them, each with the one value besides
# null for which we compute what the field asks for.
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
    "rotary_pct": 1.0,
    "no_rope_layers": None,
    "compression_config": None,
    "clip_qkv": None,
    "use_bias": False,
    "use_rmsnorm": True,
    "compression_ratio": 1.0,
}


@dataclass(frozen=True)
class KVSpec:
    """The pages of one pool: everything two pools must share to exchange pages.

    num_layers: of one page. num_kv_heads counts heads as stored: replicated ones count each time.
    planes: 2, keys and values; 1 where a position has one latent vector for both. groups: how many
    pages a position is in, each with its part of the layers (model/page_groups.py).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    planes: int = 2
    groups: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all its planes, layers and heads."""
        row = self.num_kv_heads * self.head_dim * PAGE_DTYPE_BYTES[self.dtype]
        return self.num_layers * self.planes * self.page_size * row

    @property
    def all_layers_bytes(self) -> int:
        """Bytes of one page of each group: all layers of a page's positions."""
        return self.groups * self.page_bytes

    @property
    def stored_dtype(self) -> str:
        """Dtype of the arrays that hold pages: fp8 is kept as bytes, see model/kv.py."""
        return "uint8" if self.dtype == FP8 else self.dtype


@dataclass(frozen=True)
class ModelConfig:
    """One network as features: every architecture served differs only in these fields.

    num_kv_heads, head_dim: of the pages. With latent attention there is one head for all queries,
    as wide as the latent vector and the rotated key together.
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
    neighbours_turned: bool = False  # in the checkpoint; here pairs are rotated half a head apart
    qk_norm: bool = False  # of each head
    turned_before_norm: bool = False  # each head, where qk_norm
    qk_norm_of_all: bool = False  # of all heads of a row together
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    router: RouterConfig = field(default_factory=RouterConfig)
    moe_layers: tuple[bool, ...] = ()
    shared_intermediate_size: int = 0  # of the experts that all tokens go to, side by side
    shared_gate: bool = False  # their output is weighted by a sigmoid of its own
    experts_bias: bool = False
    swiglu_limit: float = 0.0  # 0: SiLU; else the clamped form with swiglu_alpha
    swiglu_alpha: float = 1.0
    sinks: bool = False  # each head has a logit that takes weight and adds no value
    sliding_window: int = 0
    window_layers: tuple[bool, ...] = ()  # which see only so many positions, their own included
    latent: LatentConfig | None = None
    num_extra_layers: int = 0  # of the checkpoint, after the last that is used; left unread
    quantization: str = ""  # of the checkpoint's tensors: "", fp8, int4, int8, ...
    quantized_block: tuple[int, int] = (128, 128)  # rows, columns that share a scale
    eos_token_ids: tuple[int, ...] = ()
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
    def scale_inputs(self) -> int:
        """Inputs of a quantised weight that share a scale in the checkpoint; 0: all or none do."""
        return self.quantized_block[1] if self.quantization else 0

    @property
    def page_groups(self) -> int:
        """How many pages a position is in: 2 where half of the layers have a window, else 1."""
        return 2 if 0 < 2 * sum(self.window_layers) == self.num_layers else 1

    @property
    def softmax_scale(self) -> float:
        """What a query's product with a key is multiplied by."""
        latent = self.latent
        size = latent.nope_dim + latent.rope_dim if latent else self.head_dim
        return float(size**-0.5 * self.rope.softmax_factor)

    @property
    def rope_dim(self) -> int:
        """How many entries of a query or key are rotated."""
        return self.latent.rope_dim if self.latent else self.rope.turned_of(self.head_dim)

    @staticmethod
    def from_dir(path: str | Path) -> "ModelConfig":
        """Read config.json and, where there is one, generation_config.json of a checkpoint folder.

        Both forms are read: rope_theta, rope_scaling and torch_dtype at the top level, and
        rope_parameters and dtype as transformers 5 writes them. What a file says twice must agree.
        Raises ModelError naming file, field, value got and values accepted.
        """
        folder = Path(path)
        check_folder(folder)
        fields = Fields.read(folder / "config.json")
        generation = folder / "generation_config.json"
        extra = Fields.read(generation) if generation.exists() else None
        return _config(fields, extra)


def check_folder(path: Path) -> None:
    """Raises ModelError unless the path is a folder whose files can be read to an end.

    It is no folder if it names a model on a hub. Opening a pipe would wait for a writer for ever.
    """
    try:
        is_folder = path.is_dir()
        endless = [x for x in sorted(path.iterdir()) if is_endless(x)] if is_folder else []
    except OSError as error:  # such as a folder above it that this user may not enter
        raise ModelError(f"--model-path {path} cannot be reached: {error.strerror}") from error
    if not is_folder:
        raise ModelError(
            f"--model-path {path} is not a folder; it takes a checkpoint on this machine, "
            "such as `hf download` makes"
        )
    if endless:
        raise ModelError(f"{endless[0]}: a pipe, socket or device; expected a file")


def _config(fields: Fields, generation: Fields | None) -> ModelConfig:
    listed = fields.raw("architectures", REQUIRED)
    if not isinstance(listed, list) or len(listed) != 1:
        raise fields.fail("architectures", listed, f"a list with one of {', '.join(ARCHITECTURES)}")
    architecture = fields.one_of("architectures", listed[0], ARCHITECTURES)
    _refuse_unsupported(fields)
    quantization = read_quantization(fields, architecture)
    dtype = fields.said_once("torch_dtype", "dtype")
    dtype = dtype or ("bfloat16" if quantization else "float32")
    sources = [x for x in (generation, fields) if x is not None]
    eos = [token for source in sources for token in source.ids("eos_token_id")]
    attention = read_attention(fields, architecture)
    # Without a dense layer, Solar Open need not say how wide one is.
    dense = architecture != "SolarOpenForCausalLM"
    unsaid = REQUIRED if dense else fields.integer("moe_intermediate_size")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        intermediate_size=fields.integer("intermediate_size", unsaid),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=_rope(fields, architecture, attention["head_dim"]),
        tie_word_embeddings=fields.flag("tie_word_embeddings", architecture in ERNIE),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        torch_dtype=fields.one_of("torch_dtype", dtype, tuple(DTYPE_BYTES)),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        default_temperature=generation.number("temperature", None) if generation else None,
        default_top_p=generation.number("top_p", None) if generation else None,
        default_top_k=_top_k(generation) if generation else None,
        **attention,
        **read_experts(fields, architecture),
        **quantization,
    )


def _rope(fields: Fields, architecture: str, head_dim: int) -> RopeConfig:
    """head_dim: bounds the part that is rotated, in the families that may rotate only a part."""
    theta = _THETA.get(architecture, 10000.0)
    latent = architecture in LATENT
    if architecture not in _PARTLY_TURNED:
        usual = _GPT_OSS_ROPE if architecture == "GptOssForCausalLM" else {}
        return read_rope(fields, theta, latent, usual, raises_theta=architecture in HUNYUAN)
    # MiniMax gives the part as a number of entries.
    size = fields.integer("rotary_dim", None) if architecture == "MiniMaxM2ForCausalLM" else None
    if size is not None and size > head_dim:
        raise fields.fail("rotary_dim", size, f"at most head_dim, which is {head_dim}")
    share = _PARTLY_TURNED[architecture] if size is None else size / head_dim
    rope = read_rope(fields, theta, usual_share=share)
    turned = rope.turned_of(head_dim)
    if turned % 2 or not turned:
        accepted = f"a part of head_dim {head_dim} that is an even number above 0"
        raise fields.fail("partial_rotary_factor", rope.share, accepted)
    if size not in (None, turned):
        raise fields.fail("rotary_dim", size, f"{turned}, as in partial_rotary_factor, or null")
    return rope


def _top_k(generation: Fields) -> int | None:
    """top_k, 0 for off. -1 and 0 are both accepted for off, as from a client."""
    value: int | None = generation.integer("top_k", None, low=-1)
    return value if value is None else max(value, 0)


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse settings that would change the numbers and are not implemented."""
    fields.one_of("hidden_act", fields.raw("hidden_act", "silu"), ("silu",))
    layers = fields.integer("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise fields.fail("num_hidden_layers", layers, f"at most {_MOST_LAYERS}")
    fields.only(_NEUTRAL)
