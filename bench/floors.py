"""Floors: the bytes and products that a step cannot do without, and the time they take at best.

time >= max(bytes / measured copy rate, products / measured matmul rate). A decode step with B
slots reads every dense weight once. Of E experts it reads E * (1 - (1 - k/E)**B) on average when
the router is even. It reads the keys and values of its context, in a layer with a window only
those in the window. Biases and sinks are read, so they count as bytes; adding them is no product.
Norms are left out.
"""

from collections.abc import Sequence
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

    def times(self, count: int) -> "Cost":
        """The work of `count` such calls."""
        return Cost(self.num_bytes * count, self.flops * count)


# Number of weights in each of some parameters of a layer, by the parameter's name.
Weights = dict[str, int]


def attention_weights(cfg: ModelConfig) -> Weights:
    """Weights of one layer's projections; latent attention has those of its latent space too."""
    if cfg.latent is None:
        queries = cfg.hidden_size * cfg.num_heads * cfg.head_dim
        keys = cfg.hidden_size * cfg.num_kv_heads * cfg.head_dim
        return {"qkv": queries + 2 * keys, "o": queries}
    latent, hidden = cfg.latent, cfg.hidden_size
    query = cfg.num_heads * (latent.nope_dim + latent.rope_dim)
    q_b = {"q_a": latent.q_rank * hidden, "q_b": latent.q_rank * query}
    return (q_b if latent.q_rank else {"q": hidden * query}) | {
        "kv_a": hidden * (latent.kv_rank + latent.rope_dim),
        "k_b": cfg.num_heads * latent.kv_rank * latent.nope_dim,
        "v_b": cfg.num_heads * latent.kv_rank * latent.value_dim,
        "o": cfg.num_heads * latent.value_dim * hidden,
    }


def attention_biases(cfg: ModelConfig) -> int:
    """What one layer's attention adds: biases of its projections, and sinks."""
    qkv = (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim * cfg.qkv_bias
    return qkv + cfg.hidden_size * cfg.o_bias + cfg.num_heads * cfg.sinks


def expert_weights(cfg: ModelConfig) -> Weights:
    """Weights of one expert: gate and up, down."""
    one = cfg.hidden_size * cfg.moe_intermediate_size
    return {"experts_gate_up": 2 * one, "experts_down": one}


def expert_biases(cfg: ModelConfig) -> int:
    """Biases of one expert: gate, up, down."""
    return (2 * cfg.moe_intermediate_size + cfg.hidden_size) * cfg.experts_bias


def router_biases(cfg: ModelConfig) -> int:
    """What one layer's router adds to its logits or scores."""
    return cfg.num_experts * (cfg.router.bias + cfg.router.correction)


def shared_weights(cfg: ModelConfig) -> Weights:
    """Weights of one layer's shared experts, which all tokens go to, and of their gate."""
    one = cfg.hidden_size * cfg.shared_intermediate_size
    gate = cfg.hidden_size * cfg.shared_gate
    return {"shared_gate_up": 2 * one, "shared_down": one, "shared_gate": gate}


def dense_weights(cfg: ModelConfig) -> Weights:
    """Weights of one dense layer: gate and up, down."""
    one = cfg.hidden_size * cfg.intermediate_size
    return {"gate_up": 2 * one, "down": one}


def weights_cost(shape: Shape, weights: Weights, rows: int = 0) -> Cost:
    """The cost of reading the weights once and multiplying `rows` rows with them."""
    num_bytes = sum(count * shape.weight_bytes(name) for name, count in weights.items())
    return Cost(num_bytes, 2.0 * rows * sum(weights.values()))


def experts_touched(cfg: ModelConfig, tokens: int) -> float:
    """Expected number of distinct experts that `tokens` tokens choose in a layer; router even."""
    return cfg.num_experts * (1.0 - (1.0 - cfg.num_experts_per_tok / cfg.num_experts) ** tokens)


def kv_bytes_per_token(shape: Shape) -> int:
    """Bytes of the keys and values of one token, all layers."""
    return shape.cfg.num_layers * _kv_bytes(shape)


def step_key_bytes(shape: Shape, slots: int, context: int) -> float:
    """Bytes of the keys and values that a decode step reads, all layers."""
    windowed = sum(shape.cfg.window_layers)
    keys = (shape.cfg.num_layers - windowed) * context
    keys += windowed * min(context, shape.cfg.sliding_window)
    return slots * keys * _kv_bytes(shape)


def chunk_key_bytes(shape: Shape, tokens: int, prompts: int = 1) -> float:
    """Bytes of the keys and values that a chunk of prompts writes and reads, all layers."""
    return 2 * prompts * tokens * kv_bytes_per_token(shape)


def moe_cost(shape: Shape, tokens: int) -> Cost:
    """One layer of routed experts with its router."""
    cfg, size = shape.cfg, shape.dtype_bytes
    router = cfg.hidden_size * cfg.num_experts
    expert = weights_cost(shape, expert_weights(cfg), tokens)
    one = expert.num_bytes + expert_biases(cfg) * size
    weights = experts_touched(cfg, tokens) * one + (router + router_biases(cfg)) * size
    flops = cfg.num_experts_per_tok * expert.flops + 2.0 * tokens * router
    return Cost(weights + 2 * tokens * cfg.hidden_size * size, flops)


def decode_attention_cost(shape: Shape, contexts: Sequence[int], windowed: bool = False) -> Cost:
    """One layer's attention proper (no projections) in a decode step.

    contexts: tokens of each row. windowed: whether the layer has a window. A latent query is
    multiplied with a whole latent key, and its weight with the part of that key that is the value.
    """
    most = shape.cfg.sliding_window if windowed else max(contexts)
    keys = sum(min(tokens, most) for tokens in contexts)
    latent = shape.cfg.latent
    value_dim = latent.kv_rank if latent else shape.cfg.head_dim
    width = shape.cfg.head_dim + value_dim
    return _attention_cost(shape, len(contexts), keys / len(contexts), keys, width)


def prefill_attention_cost(shape: Shape, tokens: int, windowed: bool = False) -> Cost:
    """One layer's attention proper for one prompt in one chunk.

    Latent keys and values may be expanded for each head, once per token, by the products that
    otherwise lead queries into the latent space and results out of it. They are then narrower than
    latent ones, so the cheaper way counts.
    """
    window = min(tokens, shape.cfg.sliding_window) if windowed else tokens
    # The first tokens see one key more each, until the window is full.
    keys = ((window + 1) / 2 * window + (tokens - window) * window) / tokens
    latent, head_dim = shape.cfg.latent, shape.cfg.head_dim
    width = 2 * head_dim
    if latent:
        own = latent.nope_dim + latent.rope_dim + latent.value_dim
        width = min(head_dim + latent.kv_rank, own)
    return _attention_cost(shape, tokens, keys, tokens, width)


def _attention_cost(
    shape: Shape, queries: int, keys_per_query: float, keys_read: float, head_width: int
) -> Cost:
    """One layer's attention proper.

    keys_per_query: mean over the queries. keys_read: keys fetched, over all sequences. head_width:
    numbers in a head's query and in its result together.
    """
    size = shape.dtype_bytes
    width = shape.cfg.num_heads * head_width
    return Cost(
        keys_read * _kv_bytes(shape) + queries * width * size,
        2.0 * queries * keys_per_query * width,
    )


def _kv_bytes(shape: Shape) -> int:
    """Bytes of the keys and values of one token, one layer."""
    cfg = shape.cfg
    return cfg.kv_planes * cfg.num_kv_heads * cfg.head_dim * shape.page_dtype_bytes


def _weights_cost(shape: Shape, tokens: int, logits_rows: int) -> Cost:
    cfg, size = shape.cfg, shape.dtype_bytes
    total = Cost(0.0, 0.0)
    for routed in cfg.moe_layers:
        each = attention_weights(cfg) | (shared_weights(cfg) if routed else dense_weights(cfg))
        total += weights_cost(shape, each, tokens) + Cost(attention_biases(cfg) * size, 0.0)
        if routed:
            total += moe_cost(shape, tokens)
    head = cfg.hidden_size * cfg.vocab_size
    held = head * shape.weight_bytes("lm_head")
    return total + Cost(held, 2.0 * logits_rows * head)


def decode_step_cost(shape: Shape, slots: int, context: int) -> Cost:
    """One token for each slot, each with `context` tokens behind it."""
    windowed, contexts = sum(shape.cfg.window_layers), [context] * slots
    return (
        _weights_cost(shape, slots, slots)
        + decode_attention_cost(shape, contexts).times(shape.cfg.num_layers - windowed)
        + decode_attention_cost(shape, contexts, windowed=True).times(windowed)
    )


def prefill_chunk_cost(shape: Shape, tokens: int, prompts: int = 1) -> Cost:
    """Prompts of `tokens` tokens each in one chunk, logits for their last tokens only."""
    windowed = sum(shape.cfg.window_layers)
    each = (
        prefill_attention_cost(shape, tokens).times(shape.cfg.num_layers - windowed)
        + prefill_attention_cost(shape, tokens, windowed=True).times(windowed)
        + Cost(tokens * kv_bytes_per_token(shape), 0.0)
    )
    return _weights_cost(shape, tokens * prompts, prompts) + each.times(prompts)
