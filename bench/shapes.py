"""Named shapes: the networks and batch sizes that benchmarks and tests use, each defined once."""

import math
from dataclasses import dataclass, replace
from typing import Any

from model.config import DTYPE_BYTES, PAGE_DTYPE_BYTES, ModelConfig
from model.config_attention import LatentConfig
from model.config_experts import RouterConfig
from model.rope import RopeConfig


@dataclass(frozen=True)
class Shape:
    """A network without weights, and the sizes at which it is measured.

    slots: decode batch sizes. context: tokens already in each slot. chunks: prefill chunk lengths.
    """

    name: str
    cfg: ModelConfig
    dtype: str
    page_size: int
    slots: tuple[int, ...]
    context: int
    chunks: tuple[int, ...]
    page_dtype: str = ""  # "": as dtype
    codes: str = ""  # "fp8" or "int8" if layers' weights are kept as codes (model/coded.py)
    widened: bool = False  # matrices are held in bfloat16 for products in float32 (docs/adr/0068)

    @property
    def coded(self) -> tuple[str, ...]:
        """The layers' parameters whose weights are kept as codes."""
        return self._dims.coded_as_published(self.codes)

    def weight_bytes(self, name: str) -> float:
        """Bytes of one weight of a layers' parameter, with its share of a scale on one device."""
        if name in dict(self.narrow):
            return 2.0
        if name not in self.coded:
            return float(self.dtype_bytes)
        return 1 + 4 / float(self._dims.coded_inputs[name].group)

    @property
    def narrow(self) -> tuple[tuple[str, str], ...]:
        """See model.sharding.Dims."""
        names = ("embed", "lm_head", *self._dims.coded_inputs) if self.widened else ()
        return tuple((name, "bfloat16") for name in names)

    @property
    def _dims(self) -> Any:
        from model.sharding import Dims  # imports JAX

        return Dims(self.cfg, 1, 1)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one parameter."""
        return DTYPE_BYTES[self.dtype]

    @property
    def page_dtype_bytes(self) -> int:
        """Bytes of one number in the page pool."""
        return PAGE_DTYPE_BYTES[self.page_dtype or self.dtype]


def _on_cpu(name: str, cfg: ModelConfig, chunk: int = 64) -> Shape:
    return Shape(name, cfg, "float32", 16, slots=(1, 8), context=128, chunks=(chunk,))


def _on_gpu(name: str, cfg: ModelConfig) -> Shape:
    slots = (1, 16, 64, 256)
    return Shape(name, cfg, "bfloat16", 64, slots, context=1024, chunks=(2048, 8192))


def deepseek_yarn(mscale: float) -> RopeConfig:
    """DeepSeek's rotary settings. mscale: also for mscale_all_dim, so cosines keep their size."""
    grown = 0.1 * mscale * math.log(40.0) + 1.0
    return RopeConfig("yarn", 1e4, 40.0, original_max_position=4096, softmax_factor=grown**2)


GPT_OSS_YARN = RopeConfig(
    "yarn",
    150000.0,
    32.0,
    original_max_position=4096,
    truncate=False,
    attention_factor=0.1 * math.log(32.0) + 1.0,
)

DEMO = _on_cpu(
    "demo",
    ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=4096,
        hidden_size=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        intermediate_size=768,
        rms_norm_eps=1e-6,
        rope=RopeConfig("default", 1e6),
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        torch_dtype="float32",
        qk_norm=True,
        moe_layers=(False,) * 4,
    ),
)

DEMO_MOE = _on_cpu(
    "demo-moe",
    replace(
        DEMO.cfg,
        architecture="Qwen3MoeForCausalLM",
        tie_word_embeddings=False,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=192,
        router=RouterConfig(normalise=True),
        moe_layers=(True,) * 4,
    ),
)

# As DeepSeek V3 is built: latent attention, experts of the best groups and one that all share.
DEMO_LATENT = replace(
    DEMO_MOE,
    name="demo-latent",
    cfg=replace(
        DEMO_MOE.cfg,
        architecture="DeepseekV3ForCausalLM",
        num_kv_heads=1,
        head_dim=80,
        latent=LatentConfig(q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32),
        rope=deepseek_yarn(1.0),
        qk_norm=False,
        shared_intermediate_size=192,
        router=RouterConfig(
            sigmoid=True,
            normalise=True,
            scale=2.5,
            correction=True,
            num_groups=4,
            groups_per_tok=2,
            best_two=True,
        ),
        moe_layers=(False, True, True, True),
    ),
)

# As GPT-OSS is built: windows in every other layer, sinks, biases, the clamped activation.
DEMO_GPT_OSS = replace(
    DEMO_MOE,
    name="demo-gpt-oss",
    cfg=replace(
        DEMO_MOE.cfg,
        architecture="GptOssForCausalLM",
        intermediate_size=192,
        rms_norm_eps=1e-5,
        rope=GPT_OSS_YARN,
        qk_norm=False,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        sliding_window=32,
        window_layers=(True, False) * 2,
        router=RouterConfig(normalise=True, bias=True),
        experts_bias=True,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
    ),
)

# Between the demos, which fit into a CPU's caches, and models that need a GPU: 663 MB and 1.1 GB in
# float32, so that a CPU reads the weights from memory at every step.
MIDDLE = _on_cpu(
    "middle",
    replace(
        DEMO.cfg,
        vocab_size=8192,
        hidden_size=1024,
        num_layers=10,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        moe_layers=(False,) * 10,
    ),
    chunk=128,
)

MIDDLE_MOE = _on_cpu(
    "middle-moe",
    replace(
        DEMO_MOE.cfg,
        vocab_size=8192,
        hidden_size=1024,
        num_layers=6,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        moe_intermediate_size=768,
        moe_layers=(True,) * 6,
    ),
    chunk=128,
)

QWEN3_8B = _on_gpu(
    "qwen3-8b",
    ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
        rms_norm_eps=1e-6,
        rope=RopeConfig("default", 1e6),
        tie_word_embeddings=False,
        max_position_embeddings=40960,
        qk_norm=True,
        moe_layers=(False,) * 36,
    ),
)

QWEN3_30B_A3B = _on_gpu(
    "qwen3-30b-a3b",
    replace(
        QWEN3_8B.cfg,
        architecture="Qwen3MoeForCausalLM",
        hidden_size=2048,
        num_layers=48,
        num_kv_heads=4,
        intermediate_size=6144,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        router=RouterConfig(normalise=True),
        moe_layers=(True,) * 48,
    ),
)

DEEPSEEK_V2_LITE = _on_gpu(
    "deepseek-v2-lite",
    ModelConfig(
        architecture="DeepseekV2ForCausalLM",
        vocab_size=102400,
        hidden_size=2048,
        num_layers=27,
        num_heads=16,
        num_kv_heads=1,
        head_dim=576,
        latent=LatentConfig(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        intermediate_size=10944,
        rms_norm_eps=1e-6,
        rope=deepseek_yarn(0.707),
        tie_word_embeddings=False,
        max_position_embeddings=163840,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        shared_intermediate_size=2 * 1408,
        moe_layers=(False,) + (True,) * 26,
    ),
)

# With the weights as they are once read; in the checkpoint the experts are MXFP4.
GPT_OSS_20B = _on_gpu(
    "gpt-oss-20b",
    ModelConfig(
        architecture="GptOssForCausalLM",
        vocab_size=201088,
        hidden_size=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=2880,
        rms_norm_eps=1e-5,
        rope=GPT_OSS_YARN,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        sliding_window=128,
        window_layers=(True, False) * 12,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=2880,
        router=RouterConfig(normalise=True, bias=True),
        experts_bias=True,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        moe_layers=(True,) * 24,
    ),
)


def with_codes(shape: Shape, codes: str = "fp8") -> Shape:
    """The same shape with its layers' weights kept as codes of one byte (model/coded.py)."""
    return replace(shape, name=f"{shape.name}-{codes}", codes=codes)


def with_bfloat16(shape: Shape) -> Shape:
    """The same shape as a CPU holds it if the checkpoint is in bfloat16."""
    cfg = replace(shape.cfg, torch_dtype="bfloat16")
    return replace(shape, name=f"{shape.name}-bfloat16", cfg=cfg, widened=True)


SHAPES = {
    shape.name: shape
    for shape in (
        DEMO,
        DEMO_MOE,
        with_codes(DEMO_MOE),
        DEMO_LATENT,
        DEMO_GPT_OSS,
        MIDDLE,
        with_bfloat16(MIDDLE),
        with_codes(MIDDLE),
        MIDDLE_MOE,
        with_bfloat16(MIDDLE_MOE),
        with_codes(MIDDLE_MOE),
        with_codes(MIDDLE_MOE, "int8"),
        QWEN3_8B,
        with_codes(QWEN3_8B),
        QWEN3_30B_A3B,
        with_codes(QWEN3_30B_A3B),
        with_codes(QWEN3_30B_A3B, "int8"),
        DEEPSEEK_V2_LITE,
        GPT_OSS_20B,
    )
}

# Parts of `kvferry bench kernels`, in the order they run.
KERNEL_PARTS = ("decode", "prefill", "attention", "experts", "sampling", "pages")
