"""Which tensors of a checkpoint make which parameter, and whether all are there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.config_attention import HUNYUAN
from model.errors import ModelError
from model.params import Params, Segment, segments
from model.sharding import Dims
from model.sources import (
    QKV,
    GateUp,
    Heads,
    Interleaved,
    OfHeads,
    OnFirst,
    OnlyRow,
    OutOfLatent,
    Output,
    Plain,
    Queries,
    Scales,
    Source,
    Stack,
    Turned,
)

_COMPARED_ROWS: Final = 1024
_EMBED: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_NAMED_AS_MIXTRAL: Final = ("MixtralForCausalLM", "MiniMaxM2ForCausalLM")
_NAMES: Final = ("gate_proj", "up_proj", "down_proj")
_SHARED: Final = {
    "Qwen2MoeForCausalLM": "shared_expert",
    "HunYuanMoEV1ForCausalLM": "shared_mlp",
    "HYV3ForCausalLM": "shared_mlp",
}
_GATE: Final = {"HunYuanMoEV1ForCausalLM": "gate.wg", "HYV3ForCausalLM": "router.gate"}
# What predicts tokens further ahead, which is no part of the network here.
_UNREAD: Final = {"Ernie4_5_MoeForCausalLM": ("model.mtp_",)}


def param_sources(dims: Dims) -> Params:
    """The tree of `Source`s that has the structure of the parameters."""
    cfg = dims.cfg
    tree: Params = {}
    if not dims.tied_as_head:
        tree["embed"] = Plain(_EMBED, (cfg.vocab_size, cfg.hidden_size))
    tree["layers"] = tuple(_segment_sources(dims, run) for run in segments(dims))
    tree["norm"] = Plain("model.norm.weight", (cfg.hidden_size,))
    if dims.tied_as_head or not cfg.tie_word_embeddings:
        name = _EMBED if cfg.tie_word_embeddings else _HEAD
        tree["lm_head"] = Turned(name, cfg.hidden_size, cfg.vocab_size)
    return tree


def _segment_sources(dims: Dims, run: Segment) -> dict[str, Source]:
    layers = range(run.first, run.first + run.num_layers)
    each = [_layer_sources(dims, f"model.layers.{i}", run.moe) for i in layers]
    return {name: Stack(tuple(layer[name] for layer in each)) for name in each[0]}


def _layer_sources(dims: Dims, at: str, moe: bool) -> dict[str, Source]:
    cfg, hidden = dims.cfg, dims.cfg.hidden_size
    found = _latent_sources(dims, at) if cfg.latent else _heads_sources(dims, at)
    found["attn_norm"] = Plain(f"{at}.input_layernorm.weight", (hidden,))
    found["mlp_norm"] = Plain(f"{at}.post_attention_layernorm.weight", (hidden,))
    if not moe:
        found |= _gated_sources(dims, cfg.intermediate_size, f"{at}.mlp", ("gate_up", "down"))
    elif cfg.architecture == "GptOssForCausalLM":
        found |= _stacked_expert_sources(dims, at)
    else:
        found |= _expert_sources(dims, at)
    if moe and cfg.shared_intermediate_size:
        found |= _shared_sources(dims, f"{at}.mlp")
    return found


def _with_scales(dims: Dims, name: str, source: Callable[[int], Source]) -> dict[str, Source]:
    """A parameter and, where it is codes, their scales.

    source(n): the source of the parameter, if every n inputs that share a scale counted as one.
    """
    found = {name: source(1)}
    if name in dims.coded:
        found[f"{name}_scale"] = Scales(source(dims.coded_inputs[name].group))
    return found


def _gated_sources(dims: Dims, width: int, at: str, names: tuple[str, str]) -> dict[str, Source]:
    """Sources of a feed-forward that all tokens go through. names: of its two parameters."""
    hidden = dims.cfg.hidden_size

    def gate_up(group: int) -> Source:
        return _products((hidden // group, width), (width, hidden), at, _NAMES)[0]

    def down(group: int) -> Source:
        return _products((hidden, width), (width // group, hidden), at, _NAMES)[1]

    return _with_scales(dims, names[0], gate_up) | _with_scales(dims, names[1], down)


def _shared_sources(dims: Dims, at: str) -> dict[str, Source]:
    """Sources of the experts that all tokens go to; a single one, as Qwen2's, has a gate."""
    cfg = dims.cfg
    at_all = f"{at}.{_SHARED.get(cfg.architecture, 'shared_experts')}"
    names = "shared_gate_up", "shared_down"
    found = _gated_sources(dims, cfg.shared_intermediate_size, at_all, names)
    if cfg.shared_gate:
        found["shared_gate"] = Turned(f"{at}.shared_expert_gate.weight", cfg.hidden_size, 1)
    return found


def _heads_sources(dims: Dims, at: str) -> dict[str, Source]:
    """Sources of attention in which each kv head has its own keys and values."""
    cfg, hidden, heads = dims.cfg, dims.cfg.hidden_size, heads_of(dims)

    def qkv(kind: str) -> tuple[str, str, str]:
        return (
            f"{at}.self_attn.q_proj.{kind}",
            f"{at}.self_attn.k_proj.{kind}",
            f"{at}.self_attn.v_proj.{kind}",
        )

    def output(group: int) -> Source:
        return _output(f"{at}.self_attn.o_proj.weight", heads, hidden, group)

    order = order_of_heads(cfg)

    def first(group: int) -> Source:
        return QKV(qkv("weight"), heads, hidden // group, order)

    found = _with_scales(dims, "qkv", first)
    found |= _with_scales(dims, "o", output)
    if cfg.qkv_bias:
        found["qkv_bias"] = QKV(qkv("bias"), heads, None)
    if cfg.o_bias:
        found["o_bias"] = Plain(f"{at}.self_attn.o_proj.bias", (hidden,))
    if cfg.qk_norm:
        hunyuan = cfg.architecture in HUNYUAN
        names = ("query_layernorm", "key_layernorm") if hunyuan else ("q_norm", "k_norm")
        for norm, name in zip(("q_norm", "k_norm"), names, strict=True):
            found[norm] = Plain(f"{at}.self_attn.{name}.weight", (cfg.head_dim,))
    if cfg.qk_norm_of_all:
        names = f"{at}.self_attn.q_norm.weight", f"{at}.self_attn.k_norm.weight"
        found["qk_norm"] = QKV(names, heads, None)
    if cfg.sinks:
        found["sinks"] = OfHeads(f"{at}.self_attn.sinks", replace(heads, head_dim=1))
    return found


def heads_of(dims: Dims) -> Heads:
    """How the heads of tensors lie in parameters, where each kv head has its own keys."""
    cfg = dims.cfg
    return Heads(cfg.num_kv_heads, cfg.group, cfg.head_dim, dims.replicas, dims.group)


def order_of_heads(cfg: ModelConfig) -> tuple[int, ...]:
    """The row of a query's or key's head for each entry, where the orders differ."""
    return _halves_last(0, cfg.head_dim) if cfg.neighbours_turned else ()


def _latent_sources(dims: Dims, at: str) -> dict[str, Source]:
    """Sources of latent attention. Rotated pairs are neighbours in files, in two halves here."""
    cfg, latent, hidden = dims.cfg, dims.cfg.latent, dims.cfg.hidden_size
    assert latent is not None
    at = f"{at}.self_attn"
    nope, rank, rope = latent.nope_dim, latent.kv_rank, latent.rope_dim
    all_dim = nope + latent.value_dim
    heads = Heads(1, cfg.num_heads, nope + rope, dims.replicas, dims.group)
    of_both = replace(heads, head_dim=all_dim)
    keys, values = slice(0, nope), slice(nope, all_dim)
    kv_b = f"{at}.kv_b_proj.weight"
    kv_order, q_order = _halves_last(rank, rope), _halves_last(nope, rope)
    out = replace(heads, head_dim=latent.value_dim)
    found: dict[str, Source] = {
        "kv_a_norm": Plain(f"{at}.kv_a_layernorm.weight", (rank,)),
        "k_b": OutOfLatent(kv_b, of_both, rank, keys, turned=False),
        "v_b": OutOfLatent(kv_b, of_both, rank, values, turned=True),
    }

    def kv_a(group: int) -> Source:
        name = f"{at}.kv_a_proj_with_mqa.weight"
        return Turned(name, hidden // group, rank + rope, kv_order)

    def queries(name: str, inputs: int) -> Callable[[int], Source]:
        return lambda group: Queries(f"{at}.{name}.weight", heads, inputs // group, q_order)

    def q_a(group: int) -> Source:
        return Turned(f"{at}.q_a_proj.weight", hidden // group, latent.q_rank)

    found |= _with_scales(dims, "kv_a", kv_a)
    found |= _with_scales(dims, "o", lambda g: _output(f"{at}.o_proj.weight", out, hidden, g))
    if not latent.q_rank:
        return found | _with_scales(dims, "q", queries("q_proj", hidden))
    found["q_a_norm"] = Plain(f"{at}.q_a_layernorm.weight", (latent.q_rank,))
    found |= _with_scales(dims, "q_a", q_a)
    return found | _with_scales(dims, "q_b", queries("q_b_proj", latent.q_rank))


def _output(name: str, heads: Heads, hidden: int, group: int) -> Source:
    """The source of the output projection, if every `group` entries of a head counted as one."""
    return Output(name, replace(heads, head_dim=heads.head_dim // group), hidden)


def _halves_last(before: int, size: int) -> tuple[int, ...]:
    """The first entries as they are, then the even ones of the next `size`, then the odd ones."""
    pairs = range(before, before + size)
    return (*range(before), *pairs[::2], *pairs[1::2])


def _expert_sources(dims: Dims, at: str) -> dict[str, Source]:
    cfg = dims.cfg
    mixtral = cfg.architecture in _NAMED_AS_MIXTRAL
    block = f"{at}.block_sparse_moe" if mixtral else f"{at}.mlp"
    names = ("w1", "w3", "w2") if mixtral else _NAMES

    def stacks(hidden: int, width: int) -> tuple[Source, Source]:
        each = [f"{block}.experts.{e}" for e in range(cfg.num_experts)]
        sizes = (hidden, cfg.moe_intermediate_size), (width, cfg.hidden_size)
        pairs = [_products(*sizes, expert, names) for expert in each]
        return Stack(tuple(pair[0] for pair in pairs)), Stack(tuple(pair[1] for pair in pairs))

    found = _expert_products(dims, stacks)
    gate = f"{block}.{_GATE.get(cfg.architecture, 'gate')}.weight"
    found["router"] = Turned(gate, cfg.hidden_size, cfg.num_experts)
    if cfg.architecture == "Ernie4_5_MoeForCausalLM":
        bias = f"{block}.moe_statics.e_score_correction_bias"
        found["router_correction"] = OnlyRow(bias, cfg.num_experts)
    elif cfg.router.correction:
        bias = f"{block}.gate.e_score_correction_bias"
        if mixtral:
            bias = f"{block}.e_score_correction_bias"
        elif cfg.architecture == "HYV3ForCausalLM":
            bias = f"{block}.expert_bias"
        found["router_correction"] = Plain(bias, (cfg.num_experts,))
    return found


def _stacked_expert_sources(dims: Dims, at: str) -> dict[str, Source]:
    """Sources of GPT-OSS, where one tensor has all experts, and they have biases."""
    cfg = dims.cfg
    hidden, width, experts = cfg.hidden_size, cfg.moe_intermediate_size, cfg.num_experts
    block = f"{at}.mlp.experts"

    def stacks(inputs: int, inner: int) -> tuple[Source, Source]:
        return (
            Interleaved(f"{block}.gate_up_proj", (experts, inputs), width),
            Plain(f"{block}.down_proj", (experts, inner, hidden)),
        )

    return _expert_products(dims, stacks) | {
        "router": Turned(f"{at}.mlp.router.weight", hidden, experts),
        "router_bias": Plain(f"{at}.mlp.router.bias", (experts,)),
        "experts_gate_up_bias": Interleaved(f"{block}.gate_up_proj_bias", (experts,), width),
        "experts_down_bias": OnFirst(f"{block}.down_proj_bias", (experts, hidden)),
    }


def _expert_products(
    dims: Dims, stacks: Callable[[int, int], tuple[Source, Source]]
) -> dict[str, Source]:
    """Both products of all experts and, where these are codes, their scales.

    stacks(hidden, width): the sources of both products, if they had so many inputs.
    """
    hidden, width = dims.cfg.hidden_size, dims.cfg.moe_intermediate_size
    first = _with_scales(dims, "experts_gate_up", lambda group: stacks(hidden // group, width)[0])
    last = _with_scales(dims, "experts_down", lambda group: stacks(hidden, width // group)[1])
    return first | last


def _products(
    first: tuple[int, int], last: tuple[int, int], at: str, names: tuple[str, str, str]
) -> tuple[Source, Source]:
    """first, last: inputs and outputs of both."""
    gate, up, down = (f"{at}.{name}.weight" for name in names)
    return GateUp(Turned(gate, *first), Turned(up, *first)), Turned(down, *last)


def checked_sources(files: Checkpoint, dims: Dims) -> Params:
    """param_sources, after a check that every tensor is there, in shape, and none is left over.

    A head beside a tied embedding is compared with it; nothing else is read here.

    Raises ModelError naming the first tensor that does not fit.
    """
    cfg, tree = dims.cfg, param_sources(dims)
    wanted = dict(pair for source in _leaves(tree) for pair in source.expected())
    extra = range(cfg.num_layers, cfg.num_layers + cfg.num_extra_layers)
    unread = (*(f"model.layers.{layer}." for layer in extra), *_UNREAD.get(cfg.architecture, ()))
    for name, shape in wanted.items():
        files.check(name, shape)
    for name in files.names:
        # Older files carry rotary tables; some carry a head that is the embedding again.
        tied_head = cfg.tie_word_embeddings and name == _HEAD
        known = name in wanted or tied_head or name.startswith(unread)
        if not known and not name.endswith(".rotary_emb.inv_freq"):
            raise ModelError(f"{files.folder}: tensor {name} is unknown in {cfg.architecture}")
    if cfg.tie_word_embeddings and _HEAD in files.names:
        _check_tied_head(files, cfg)
    return tree


def _check_tied_head(files: Checkpoint, cfg: ModelConfig) -> None:
    """Check, some rows at a time, that the head a tied model leaves unread is the embedding."""
    files.check(_HEAD, (cfg.vocab_size, cfg.hidden_size))
    for first in range(0, cfg.vocab_size, _COMPARED_ROWS):
        rows = slice(first, min(first + _COMPARED_ROWS, cfg.vocab_size))
        head, embed = (files.read(x, (rows, slice(0, cfg.hidden_size))) for x in (_HEAD, _EMBED))
        if head.dtype != embed.dtype:  # float32 holds every value of what we read
            head, embed = head.astype(np.float32), embed.astype(np.float32)
        if not np.array_equal(head.view(np.uint8), embed.view(np.uint8)):
            raise ModelError(
                f"{files.folder}: tensor {_HEAD} differs from {_EMBED} in rows {first} to "
                f"{rows.stop - 1}, but tie_word_embeddings is true; accepted: equal ones, no "
                f"{_HEAD}, or tie_word_embeddings false"
            )


def _leaves(tree: Params) -> list[Source]:
    alone = [source for name, source in tree.items() if name != "layers"]
    return alone + [source for run in tree["layers"] for source in run.values()]
