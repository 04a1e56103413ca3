"""Roofs: the bytes and products that a step cannot do without, and the time they take at best.

time >= max(bytes / measured copy rate, products / measured matmul rate). A decode step with B
slots reads every dense weight once, of E experts E * (1 - (1 - k/E)**B) on average when the router
is even, and the keys and values of its context.
"""

from dataclasses import dataclass

from bench.shapes import Shape
from model.config import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """What the device was measured to do, in this run."""

    copy_gb_s: float  # bytes read plus bytes written
    matmul_tflop_s: float


@dataclass(frozen=True)
class Cost:
    """The least work of one call: bytes moved to or from device memory, floating operations."""

    num_bytes: float
    flops: float

    def floor_s(self, ceilings: Ceilings) -> float:
        """Seconds below which this device cannot do it."""
        return max(
            self.num_bytes / (ceilings.copy_gb_s * 1e9),
            self.flops / (ceilings.matmul_tflop_s * 1e12),
        )

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.num_bytes + other.num_bytes, self.flops + other.flops)


def attention_params(cfg: ModelConfig) -> int:
    """Weights of one layer's four projections."""
    heads = 2 * cfg.num_heads + 2 * cfg.num_kv_heads
    return cfg.hidden_size * heads * cfg.head_dim


def expert_params(cfg: ModelConfig) -> int:
    """Weights of one expert: gate, up, down."""
    return 3 * cfg.hidden_size * cfg.moe_intermediate_size


def dense_params(cfg: ModelConfig) -> int:
    """Weights of one dense layer's gate, up, down."""
    return 3 * cfg.hidden_size * cfg.intermediate_size


def experts_touched(cfg: ModelConfig, tokens: int) -> float:
    """Distinct experts that `tokens` tokens choose in one layer, expected, router even."""
    return cfg.num_experts * (1.0 - (1.0 - cfg.num_experts_per_tok / cfg.num_experts) ** tokens)


def kv_bytes_per_token(shape: Shape) -> int:
    """Keys and values of one token, all layers."""
    cfg = shape.cfg
    return cfg.num_layers * 2 * cfg.num_kv_heads * cfg.head_dim * shape.dtype_bytes


def moe_cost(shape: Shape, tokens: int) -> Cost:
    """One layer of experts with its router."""
    cfg, size = shape.cfg, shape.dtype_bytes
    router = cfg.hidden_size * cfg.num_experts
    params = experts_touched(cfg, tokens) * expert_params(cfg) + router
    active = cfg.num_experts_per_tok * expert_params(cfg) + router
    return Cost(params * size + 2 * tokens * cfg.hidden_size * size, 2.0 * tokens * active)


def attention_cost(shape: Shape, queries: int, keys_per_query: float, keys_read: float) -> Cost:
    """One layer's attention proper (no projections).

    keys_per_query: mean context of a query. keys_read: keys fetched, over all sequences.
    """
    cfg, size = shape.cfg, shape.dtype_bytes
    kv = 2 * cfg.num_kv_heads * cfg.head_dim * size
    width = cfg.num_heads * cfg.head_dim
    return Cost(
        keys_read * kv + 2 * queries * width * size,
        4.0 * queries * keys_per_query * width,
    )


def _weights_cost(shape: Shape, tokens: int, logits_rows: int) -> Cost:
    cfg, size = shape.cfg, shape.dtype_bytes
    total = Cost(0.0, 0.0)
    for routed in cfg.moe_layers:
        params = attention_params(cfg) + (0 if routed else dense_params(cfg))
        total += Cost(params * size, 2.0 * tokens * params)
        if routed:
            total += moe_cost(shape, tokens)
    head = cfg.hidden_size * cfg.vocab_size
    return total + Cost(head * size, 2.0 * logits_rows * head)


def decode_step_cost(shape: Shape, slots: int, context: int) -> Cost:
    """One token for each slot, each with `context` tokens behind it."""
    attention = attention_cost(shape, slots, context, slots * context)
    layers = shape.cfg.num_layers
    return _weights_cost(shape, slots, slots) + Cost(
        attention.num_bytes * layers, attention.flops * layers
    )


def prefill_chunk_cost(shape: Shape, tokens: int) -> Cost:
    """One prompt of `tokens` tokens in one chunk, logits for its last token only."""
    attention = attention_cost(shape, tokens, (tokens + 1) / 2, tokens)
    layers = shape.cfg.num_layers
    written = Cost(tokens * kv_bytes_per_token(shape), 0.0)
    return (
        _weights_cost(shape, tokens, 1)
        + Cost(attention.num_bytes * layers, attention.flops * layers)
        + written
    )
