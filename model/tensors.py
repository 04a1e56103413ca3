"""Which tensors of a checkpoint make which parameter, and how one shard of it is filled."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

import numpy as np

from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.errors import ModelError
from model.params import Params, Segment, segments
from model.sharding import Dims

_TILE: Final = 64
_COMPARED_ROWS: Final = 1024
_EMBED: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_NAMES: Final = ("gate_proj", "up_proj", "down_proj")

Index = tuple[slice, ...]


@runtime_checkable
class Source(Protocol):
    """Fills one shard of a parameter. What no tensor covers (padding) stays as it is: zero."""

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the tensors that are needed."""
        ...

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        """Write the part `index` (start and stop known) of the stored parameter to `out`."""
        ...


@dataclass(frozen=True)
class Plain:
    """A parameter laid out as its tensor; any axis may be padded."""

    name: str
    shape: tuple[int, ...]

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, self.shape

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        part = tuple(_within(s, size) for s, size in zip(index, self.shape, strict=True))
        if all(map(_length, part)):  # the last shards may be nothing but padding
            out[tuple(slice(0, _length(s)) for s in part)] = files.read(self.name, part)


@dataclass(frozen=True)
class Turned:
    """A parameter [in, out] of a tensor [out, in]; either axis may be padded.

    order: which row of the tensor is which column, where that is not the same.
    """

    name: str
    size_in: int
    size_out: int
    order: tuple[int, ...] = ()

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.size_out, self.size_in)

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        rows, columns = _within(index[1], self.size_out), _within(index[0], self.size_in)
        if _length(rows) and _length(columns):
            values = files.read(self.name, (rows, columns))
            if self.order:
                assert _length(rows) == self.size_out, "rows in another order are read together"
                values = values[list(self.order)]
            _turn(values, out[: _length(columns), : _length(rows)])


@dataclass(frozen=True)
class GateUp:
    """[in, 2, out] of two tensors [out, in]."""

    gate: Turned
    up: Turned

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.gate.expected()
        yield from self.up.expected()

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        assert index[1] == slice(0, 2), index
        for i, half in enumerate((self.gate, self.up)):
            half.fill(files, (index[0], index[2]), out[:, i])


@dataclass(frozen=True)
class Heads:
    """How query heads lie in rows of a tensor: heads of one kv head after each other."""

    kv_heads: int
    group: int
    head_dim: int
    replicas: int
    stored_group: int

    def queries(self, stored: int) -> slice:
        """Rows of the query heads of a stored kv head; fewer than stored_group in the last copy."""
        head, copy = divmod(stored, self.replicas)
        first = min(copy * self.stored_group, self.group)
        last = min(first + self.stored_group, self.group)
        at = head * self.group
        return slice((at + first) * self.head_dim, (at + last) * self.head_dim)

    def shared(self, stored: int) -> slice:
        """Rows of the key, or value, head behind a stored kv head."""
        head = stored // self.replicas
        return slice(head * self.head_dim, (head + 1) * self.head_dim)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows of the query, key and value tensors."""
        kv = self.kv_heads * self.head_dim
        return kv * self.group, kv, kv


@dataclass(frozen=True)
class QKV:
    """[hidden, kv_heads, group + 2, head_dim], or a bias without the first axis."""

    names: tuple[str, str, str]
    heads: Heads
    hidden: int | None

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, size in zip(self.names, self.heads.sizes, strict=True):
            yield name, (size,) if self.hidden is None else (size, self.hidden)

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        first_axis = () if self.hidden is None else (slice(0, self.hidden),)
        stored_heads = index[len(first_axis)]
        group, head_dim = self.heads.stored_group, self.heads.head_dim
        for i, stored in enumerate(range(stored_heads.start, stored_heads.stop)):
            shared = self.heads.shared(stored)
            parts = (0, self.heads.queries(stored)), (group, shared), (group + 1, shared)
            for name, (at, rows) in zip(self.names, parts, strict=True):
                if not _length(rows):
                    continue
                values = files.read(name, (rows, *first_axis))
                to = slice(at, at + _length(rows) // head_dim)
                if self.hidden is None:
                    out[i, to] = values.reshape(-1, head_dim)
                else:
                    turned = np.empty((self.hidden, _length(rows)), out.dtype)
                    _turn(values, turned)
                    out[:, i, to] = turned.reshape(self.hidden, -1, head_dim)


@dataclass(frozen=True)
class Output:
    """[kv_heads, group, head_dim, hidden] of a tensor [hidden, query rows]."""

    name: str
    heads: Heads
    hidden: int

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.hidden, self.heads.sizes[0])

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        head_dim = self.heads.head_dim
        for i, stored in enumerate(range(index[0].start, index[0].stop)):
            columns = self.heads.queries(stored)
            if _length(columns):
                values = files.read(self.name, (slice(0, self.hidden), columns))
                to = out[i, : _length(columns) // head_dim]
                _turn(values, to.reshape(_length(columns), self.hidden))


@dataclass(frozen=True)
class Queries:
    """[in, kv_heads, group, head_dim] of a tensor [query rows, in].

    order: which of a head's rows is which entry, where that is not the same.
    """

    name: str
    heads: Heads
    size_in: int
    order: tuple[int, ...] = ()

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.heads.sizes[0], self.size_in)

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        head_dim = self.heads.head_dim
        order = list(self.order) or slice(None)
        for i, stored in enumerate(range(index[1].start, index[1].stop)):
            rows = self.heads.queries(stored)
            if _length(rows):
                values = files.read(self.name, (rows, slice(0, self.size_in)))
                values = values.reshape(-1, head_dim, self.size_in)[:, order]
                out[:, i, : len(values)] = values.transpose(2, 0, 1)


@dataclass(frozen=True)
class OutOfLatent:
    """What each head makes of a latent vector: [kv_heads, group, part, rank], or the last two
    turned, of a tensor [rows of all heads, rank] in which a head has `part` of its head_dim rows.
    """

    name: str
    heads: Heads
    rank: int
    part: slice
    turned: bool

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.heads.sizes[0], self.rank)

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        for i, stored in enumerate(range(index[0].start, index[0].stop)):
            rows = self.heads.queries(stored)
            if _length(rows):
                values = files.read(self.name, (rows, slice(0, self.rank)))
                values = values.reshape(-1, self.heads.head_dim, self.rank)[:, self.part]
                out[i, : len(values)] = values.transpose(0, 2, 1) if self.turned else values


@dataclass(frozen=True)
class OfHeads:
    """[kv_heads, group] of a tensor [query heads]. heads: of head_dim 1."""

    name: str
    heads: Heads

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.heads.sizes[0],)

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        for i, stored in enumerate(range(index[0].start, index[0].stop)):
            rows = self.heads.queries(stored)
            if _length(rows):
                out[i, : _length(rows)] = files.read(self.name, (rows,))


@dataclass(frozen=True)
class Interleaved:
    """[*lead, 2, size] of a tensor [*lead, 2 * size] with gates in even columns, ups in odd ones.

    The last axis may be padded.
    """

    name: str
    lead: tuple[int, ...]
    size: int

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (*self.lead, 2 * self.size)

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        assert index[-2] == slice(0, 2), index
        columns = _within(index[-1], self.size)
        if not _length(columns):
            return
        both = slice(2 * columns.start, 2 * columns.stop)
        for i, first in enumerate(range(index[0].start, index[0].stop)):
            # One expert at a time: all of them would be as much again as what is filled.
            part = (slice(first, first + 1), *index[1:-2], both)
            pairs = files.read(self.name, part)[0].reshape(*out.shape[1:-2], _length(columns), 2)
            out[i, ..., : _length(columns)] = np.swapaxes(pairs, -1, -2)


@dataclass(frozen=True)
class OnFirst:
    """[experts, devices, size] of a tensor [experts, size]: the first device's, else zero."""

    name: str
    shape: tuple[int, int]

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, self.shape

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        if index[1].start == 0:
            out[:, 0] = files.read(self.name, (index[0], index[2]))


@dataclass(frozen=True)
class Stack:
    """A leading axis of layers or experts, each of its own tensors."""

    parts: tuple[Source, ...]

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for part in self.parts:
            yield from part.expected()

    def fill(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        for i, part in enumerate(self.parts[index[0]]):
            # A one-dimensional part is still an array to write into.
            part.fill(files, index[1:], out[i])


def _within(part: slice, size: int) -> slice:
    return slice(min(part.start, size), min(part.stop, size))


def _length(part: slice) -> int:
    return part.stop - part.start


def _turn(values: np.ndarray, out: np.ndarray) -> None:
    """out[...] = values.T, tile by tile: a plain strided copy is three times slower."""
    for at in range(0, values.shape[0], _TILE):
        out[:, at : at + _TILE] = values[at : at + _TILE].T


def param_sources(cfg: ModelConfig, dims: Dims) -> Params:
    """The tree of `Source`s that has the structure of the parameters."""
    tree: Params = {
        "embed": Plain(_EMBED, (cfg.vocab_size, cfg.hidden_size)),
        "layers": tuple(_segment_sources(cfg, dims, run) for run in segments(dims)),
        "norm": Plain("model.norm.weight", (cfg.hidden_size,)),
    }
    if not cfg.tie_word_embeddings:
        tree["lm_head"] = Turned(_HEAD, cfg.hidden_size, cfg.vocab_size)
    return tree


def _segment_sources(cfg: ModelConfig, dims: Dims, run: Segment) -> dict[str, Source]:
    layers = range(run.first, run.first + run.num_layers)
    each = [_layer_sources(cfg, dims, f"model.layers.{i}", run.moe) for i in layers]
    return {name: Stack(tuple(layer[name] for layer in each)) for name in each[0]}


def _layer_sources(cfg: ModelConfig, dims: Dims, at: str, moe: bool) -> dict[str, Source]:
    hidden = cfg.hidden_size
    found = _latent_sources(cfg, dims, at) if cfg.latent else _heads_sources(cfg, dims, at)
    found["attn_norm"] = Plain(f"{at}.input_layernorm.weight", (hidden,))
    found["mlp_norm"] = Plain(f"{at}.post_attention_layernorm.weight", (hidden,))
    if not moe:
        found["gate_up"], found["down"] = _gated(hidden, cfg.intermediate_size, f"{at}.mlp", _NAMES)
    elif cfg.architecture == "GptOssForCausalLM":
        found |= _stacked_expert_sources(cfg, at)
    else:
        found |= _expert_sources(cfg, at)
    if moe and cfg.num_shared_experts:
        width = cfg.num_shared_experts * cfg.moe_intermediate_size
        shared = _gated(hidden, width, f"{at}.mlp.shared_experts", _NAMES)
        found["shared_gate_up"], found["shared_down"] = shared
    return found


def _heads_sources(cfg: ModelConfig, dims: Dims, at: str) -> dict[str, Source]:
    """Of attention with keys and values of their own."""
    hidden = cfg.hidden_size
    heads = Heads(cfg.num_kv_heads, cfg.group, cfg.head_dim, dims.replicas, dims.group)

    def qkv(kind: str) -> tuple[str, str, str]:
        return (
            f"{at}.self_attn.q_proj.{kind}",
            f"{at}.self_attn.k_proj.{kind}",
            f"{at}.self_attn.v_proj.{kind}",
        )

    found: dict[str, Source] = {
        "qkv": QKV(qkv("weight"), heads, hidden),
        "o": Output(f"{at}.self_attn.o_proj.weight", heads, hidden),
    }
    if cfg.qkv_bias:
        found["qkv_bias"] = QKV(qkv("bias"), heads, None)
    if cfg.o_bias:
        found["o_bias"] = Plain(f"{at}.self_attn.o_proj.bias", (hidden,))
    if cfg.qk_norm:
        found["q_norm"] = Plain(f"{at}.self_attn.q_norm.weight", (cfg.head_dim,))
        found["k_norm"] = Plain(f"{at}.self_attn.k_norm.weight", (cfg.head_dim,))
    if cfg.sinks:
        found["sinks"] = OfHeads(f"{at}.self_attn.sinks", replace(heads, head_dim=1))
    return found


def _latent_sources(cfg: ModelConfig, dims: Dims, at: str) -> dict[str, Source]:
    """Of latent attention. What is rotated goes by neighbours there, and by halves here."""
    latent, hidden = cfg.latent, cfg.hidden_size
    assert latent is not None
    at = f"{at}.self_attn"
    nope, rank, rope = latent.nope_dim, latent.kv_rank, latent.rope_dim
    all_dim = nope + latent.value_dim
    heads = Heads(1, cfg.num_heads, nope + rope, dims.replicas, dims.group)
    of_both = replace(heads, head_dim=all_dim)
    keys, values = slice(0, nope), slice(nope, all_dim)
    kv_b = f"{at}.kv_b_proj.weight"
    kv_order, q_order = _halves_last(rank, rope), _halves_last(nope, rope)
    found: dict[str, Source] = {
        "kv_a": Turned(f"{at}.kv_a_proj_with_mqa.weight", hidden, rank + rope, kv_order),
        "kv_a_norm": Plain(f"{at}.kv_a_layernorm.weight", (rank,)),
        "k_b": OutOfLatent(kv_b, of_both, rank, keys, turned=False),
        "v_b": OutOfLatent(kv_b, of_both, rank, values, turned=True),
        "o": Output(f"{at}.o_proj.weight", replace(heads, head_dim=latent.value_dim), hidden),
    }
    if not latent.q_rank:
        return found | {"q": Queries(f"{at}.q_proj.weight", heads, hidden, q_order)}
    return found | {
        "q_a": Turned(f"{at}.q_a_proj.weight", hidden, latent.q_rank),
        "q_a_norm": Plain(f"{at}.q_a_layernorm.weight", (latent.q_rank,)),
        "q_b": Queries(f"{at}.q_b_proj.weight", heads, latent.q_rank, q_order),
    }


def _halves_last(before: int, size: int) -> tuple[int, ...]:
    """The first entries as they are, and of `size` behind them the even ones, then the odd ones."""
    pairs = range(before, before + size)
    return (*range(before), *pairs[::2], *pairs[1::2])


def _expert_sources(cfg: ModelConfig, at: str) -> dict[str, Source]:
    mixtral = cfg.architecture == "MixtralForCausalLM"
    block = f"{at}.block_sparse_moe" if mixtral else f"{at}.mlp"
    names = ("w1", "w3", "w2") if mixtral else _NAMES
    pairs = [
        _gated(cfg.hidden_size, cfg.moe_intermediate_size, f"{block}.experts.{e}", names)
        for e in range(cfg.num_experts)
    ]
    found: dict[str, Source] = {
        "router": Turned(f"{block}.gate.weight", cfg.hidden_size, cfg.num_experts),
        "experts_gate_up": Stack(tuple(pair[0] for pair in pairs)),
        "experts_down": Stack(tuple(pair[1] for pair in pairs)),
    }
    if cfg.router.correction:
        bias = f"{block}.gate.e_score_correction_bias"
        found["router_correction"] = Plain(bias, (cfg.num_experts,))
    return found


def _stacked_expert_sources(cfg: ModelConfig, at: str) -> dict[str, Source]:
    """Of GPT-OSS, where one tensor has all experts, and they have biases."""
    hidden, width, experts = cfg.hidden_size, cfg.moe_intermediate_size, cfg.num_experts
    block = f"{at}.mlp.experts"
    return {
        "router": Turned(f"{at}.mlp.router.weight", hidden, experts),
        "router_bias": Plain(f"{at}.mlp.router.bias", (experts,)),
        "experts_gate_up": Interleaved(f"{block}.gate_up_proj", (experts, hidden), width),
        "experts_gate_up_bias": Interleaved(f"{block}.gate_up_proj_bias", (experts,), width),
        "experts_down": Plain(f"{block}.down_proj", (experts, width, hidden)),
        "experts_down_bias": OnFirst(f"{block}.down_proj_bias", (experts, hidden)),
    }


def _gated(hidden: int, width: int, at: str, names: tuple[str, str, str]) -> tuple[Source, Source]:
    gate, up, down = (f"{at}.{name}.weight" for name in names)
    both = GateUp(Turned(gate, hidden, width), Turned(up, hidden, width))
    return both, Turned(down, width, hidden)


def checked_sources(files: Checkpoint, cfg: ModelConfig, dims: Dims) -> Params:
    """param_sources, once every tensor is known to be there, in shape, and none is left over.

    A head beside a tied embedding is compared with it, the one thing that is read here.

    Raises ModelError naming the first that is not.
    """
    tree = param_sources(cfg, dims)
    wanted = dict(pair for source in _leaves(tree) for pair in source.expected())
    extra = range(cfg.num_layers, cfg.num_layers + cfg.num_extra_layers)
    unread = tuple(f"model.layers.{layer}." for layer in extra)
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
    """The head that a tied model leaves unread must be the embedding; some rows at a time."""
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
    return [tree["embed"], tree["norm"], *([tree["lm_head"]] if "lm_head" in tree else [])] + [
        source for run in tree["layers"] for source in run.values()
    ]
