"""Named shapes: the networks and batch sizes that benchmarks and tests speak of, each once."""

from dataclasses import dataclass, replace

from model.config import DTYPE_BYTES, ModelConfig, RouterConfig
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

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one parameter and of one number in the page pool."""
        return DTYPE_BYTES[self.dtype]


DEMO = Shape(
    name="demo",
    cfg=ModelConfig(
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
    dtype="float32",
    page_size=16,
    slots=(1, 8),
    context=128,
    chunks=(64,),
)

DEMO_MOE = Shape(
    name="demo-moe",
    cfg=ModelConfig(
        architecture="Qwen3MoeForCausalLM",
        vocab_size=4096,
        hidden_size=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        intermediate_size=768,
        rms_norm_eps=1e-6,
        rope=RopeConfig("default", 1e6),
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        torch_dtype="float32",
        qk_norm=True,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=192,
        router=RouterConfig(normalise=True),
        moe_layers=(True,) * 4,
    ),
    dtype="float32",
    page_size=16,
    slots=(1, 8),
    context=128,
    chunks=(64,),
)

# Between the demos, which lie in a processor's caches, and models that want a GPU: 663 MB and
# 1.1 GB in float32, whose weights a CPU reads from memory at every step.
MIDDLE = Shape(
    name="middle",
    cfg=replace(
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
    dtype="float32",
    page_size=16,
    slots=(1, 8),
    context=128,
    chunks=(128,),
)

MIDDLE_MOE = Shape(
    name="middle-moe",
    cfg=replace(
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
    dtype="float32",
    page_size=16,
    slots=(1, 8),
    context=128,
    chunks=(128,),
)

QWEN3_8B = Shape(
    name="qwen3-8b",
    cfg=ModelConfig(
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
    dtype="bfloat16",
    page_size=64,
    slots=(1, 16, 64, 256),
    context=1024,
    chunks=(2048, 8192),
)

QWEN3_30B_A3B = Shape(
    name="qwen3-30b-a3b",
    cfg=ModelConfig(
        architecture="Qwen3MoeForCausalLM",
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        rms_norm_eps=1e-6,
        rope=RopeConfig("default", 1e6),
        tie_word_embeddings=False,
        max_position_embeddings=40960,
        qk_norm=True,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        router=RouterConfig(normalise=True),
        moe_layers=(True,) * 48,
    ),
    dtype="bfloat16",
    page_size=64,
    slots=(1, 16, 64, 256),
    context=1024,
    chunks=(2048, 8192),
)

SHAPES = {
    shape.name: shape for shape in (DEMO, DEMO_MOE, MIDDLE, MIDDLE_MOE, QWEN3_8B, QWEN3_30B_A3B)
}

# Parts of `kvferry bench kernels`, in the order they run.
KERNEL_PARTS = ("decode", "prefill", "attention", "experts", "sampling", "pages")
