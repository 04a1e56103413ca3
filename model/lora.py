"""Low-rank adapters (LoRA) as PEFT writes them: read, checked, and loaded onto a mesh.

An adapter is a folder with adapter_config.json and adapter_model.safetensors. It may change any of
the matrices of attention and of dense feed-forwards; see model/adapted.py for what is computed.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from model.adapted import INTO, OUT_OF
from model.checkpoint import Checkpoint, is_finite
from model.config import ModelConfig
from model.errors import ModelError
from model.fields import Fields, is_endless
from model.params import LORA_MATRICES, segments
from model.sharding import Dims, LoraShape
from model.sources import QKV, Assembled, Index, Output, Part, Source, Stack, Turned
from model.tensors import heads_of, order_of_heads

_CONFIG: Final = "adapter_config.json"
_TENSORS: Final = "adapter_model.safetensors"
_TENSOR: Final = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,5})\.([a-z_]+\.[a-z_]+)\.lora_[AB]\.weight"
)
# Of each parameter: the modules whose matrices it has side by side, see LORA_MATRICES.
_MODULES: Final = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_DENSE: Final = ("gate_up", "down")  # parameters that layers with experts have not
# Fields of the config by which something else is changed, or computed, than what a product with two
# matrices adds to that with a third. Source: huggingface/peft: src/peft/tuners/lora/config.py.
_ONLY: Final[Mapping[str, Any]] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "layer_replication": None,
    "modules_to_save": None,
    "monteclora_config": None,
    "target_parameters": None,
    "trainable_token_indices": None,
}
# Ways to begin that also change the matrices of the base model.
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Adapter:
    """One adapter.

    factors: of each module that it changes, "LAYER.MODULE", what its product is multiplied by.
    ranks: of the same modules.
    """

    name: str
    files: Checkpoint
    factors: Mapping[str, float]
    ranks: Mapping[str, int]

    @property
    def rank(self) -> int:
        """Its largest."""
        return max(self.ranks.values())


def read_adapters(folders: Sequence[tuple[str, Path]], cfg: ModelConfig) -> tuple[Adapter, ...]:
    """Adapters by name and folder; no weights are read yet.

    Raises ModelError, one line, for a folder that is no such adapter, or none of this network.
    """
    if folders and cfg.latent is not None:
        raise ModelError(
            f"{cfg.architecture} has latent attention; adapters (--lora-paths) are accepted for "
            "networks in which each kv head has its own keys and values"
        )
    return tuple(_read(name, folder, cfg) for name, folder in folders)


def lora_shape(adapters: Sequence[Adapter]) -> LoraShape | None:
    """Room for all of them; None without any."""
    if not adapters:
        return None
    changed = {key.partition(".")[2] for adapter in adapters for key in adapter.ranks}
    parameters = tuple(name for name, own in _MODULES.items() if changed.intersection(own))
    rank = max(adapter.rank for adapter in adapters)
    return LoraShape(len(adapters), rank, parameters)


def adapters_digest(adapters: Sequence[Adapter]) -> str:
    """16 hex digits that tell adapters apart by names, order and content."""
    digest = xxhash.xxh3_64()
    for adapter in adapters:
        told = adapter.name, sorted(adapter.factors.items())
        digest.update(repr(told).encode())
        for name in adapter.files.names:
            shape = adapter.files.shape(name)
            digest.update(f"{name} {adapter.files.dtype(name)} {shape};".encode())
            digest.update(adapter.files.read(name, tuple(map(slice, shape))).tobytes())
    return digest.hexdigest()


def lora_sources(
    files: "AdapterFiles", dims: Dims, adapters: Sequence[Adapter]
) -> tuple[dict[str, Source], ...]:
    """The tree of `Source`s that has the structure of model.params.lora_leaves.

    A tensor's name begins with the adapter's place, see AdapterFiles, in which all are looked up.
    Raises ModelError, one line, naming file and tensor: wrong shape or dtype, a missing tensor.
    """
    found: list[dict[str, Source]] = []
    for run in segments(dims):
        layers = range(run.first, run.first + run.num_layers)
        each = [_layer_sources(dims, adapters, layer, run.moe) for layer in layers]
        found.append({name: Stack(tuple(one[name] for one in each)) for name in each[0]})
    for source in (source for part in found for source in part.values()):
        for name, shape in source.expected():
            files.check(name, shape)
    return tuple(found)


class AdapterFiles:
    """The tensors of all adapters, by names that begin with the adapter's place and a colon.

    dtype: that they are loaded in. What lora_B has is multiplied by the module's factor.
    """

    def __init__(self, adapters: Sequence[Adapter], dtype: np.dtype) -> None:
        self._files = [adapter.files for adapter in adapters]
        self._factors = {
            f"{place}:{_tensor(key, 'B')}": factor
            for place, adapter in enumerate(adapters)
            for key, factor in adapter.factors.items()
        }
        self._dtype = dtype

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """See Checkpoint.check."""
        place, _, tensor = name.partition(":")
        self._files[int(place)].check(tensor, shape)

    def read(self, name: str, index: Index) -> np.ndarray:
        """As Checkpoint.read, in the dtype."""
        place, _, tensor = name.partition(":")
        files, factor = self._files[int(place)], self._factors.get(name, 1.0)
        with np.errstate(over="ignore"):
            exact = files.read(tensor, index).astype(np.float32) * np.float32(factor)
            values = exact.astype(self._dtype)
        if not is_finite(values):  # times zero it would be NaN, in rows of other requests too
            what = f"times {factor:g} in {self._dtype.name}, has a number that is not finite"
            raise ModelError(f"{files.folder / _TENSORS}: tensor {tensor}, {what}")
        return values


def _read(name: str, folder: Path, cfg: ModelConfig) -> Adapter:
    for file in (folder / _CONFIG, folder / _TENSORS):
        if is_endless(file):
            raise ModelError(f"{file}: a pipe, socket or device; expected a file")
    expected = "the config of an adapter (--lora-paths), as PEFT saves it"
    fields = Fields.read(folder / _CONFIG, expected)
    fields.only({key: value for key, value in _ONLY.items() if fields.values.get(key)})
    begun = fields.values.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        accepted = "one that leaves the base model as it is; PEFT can convert it"
        raise fields.fail("init_lora_weights", begun, accepted)
    alpha_of = _by_module(fields, fields.number("lora_alpha", 8.0), "alpha_pattern", Fields.number)
    rank_of = _by_module(fields, fields.integer("r", None), "rank_pattern", Fields.integer)
    is_root = fields.flag("use_rslora", False)
    files = Checkpoint(folder, (_TENSORS,))
    ranks: dict[str, int] = {}
    factors: dict[str, float] = {}
    for tensor in files.names:
        found = _TENSOR.fullmatch(tensor)
        if found is None or not _may_change(cfg, int(found[1]), found[2]):
            raise ModelError(
                f"{folder / _TENSORS}: tensor {tensor}; accepted in {cfg.architecture}: "
                f"base_model.model.model.layers.N.MODULE.lora_A.weight and lora_B, of N below "
                f"{cfg.num_layers} and MODULE one of {', '.join(_accepted(cfg))}"
            )
        key = f"{found[1]}.{found[2]}"
        rank = (*files.shape(_tensor(key, "A")), 0)[0]
        if rank < 1:
            raise ModelError(f"{folder / _TENSORS}: tensor {tensor} has no rows")
        if (said := rank_of(f"model.layers.{key}")) not in (None, rank):
            where = f"{folder / _TENSORS}: tensor {_tensor(key, 'A')}"
            raise ModelError(f"{where}: {rank} rows, but {_CONFIG} gives it rank {said}")
        ranks[key] = rank
        factors[key] = alpha_of(f"model.layers.{key}") / (math.sqrt(rank) if is_root else rank)
    if not ranks:
        raise ModelError(f"{folder / _TENSORS}: has no lora_A")
    return Adapter(name, files, factors, ranks)


def _by_module[N: float | None](
    fields: Fields, usual: N, name: str, read: Callable[[Fields, str], N]
) -> Callable[[str], N]:
    """A number of a module, which the field of this name may give by the end of the module's."""
    patterns = fields.sub(name) or Fields(fields.file, {})
    own = []
    for key in patterns.values:
        try:
            own.append((re.compile(rf"(.*\.)?({key})"), read(patterns, key)))
        except re.error as error:
            accepted = f"the ends of modules' names, as regular expressions: {error}"
            raise fields.fail(name, key, accepted) from error

    def number_of(module: str) -> N:
        return next((number for end, number in own if end.fullmatch(module)), usual)

    return number_of


def _tensor(key: str, half: str) -> str:
    """The name of lora_A or lora_B of a key of Adapter.ranks."""
    return f"base_model.model.model.layers.{key}.lora_{half}.weight"


def _may_change(cfg: ModelConfig, layer: int, module: str) -> bool:
    return layer < cfg.num_layers and any(
        module in modules and not (name in _DENSE and cfg.moe_layers[layer])
        for name, modules in _MODULES.items()
    )


def _accepted(cfg: ModelConfig) -> list[str]:
    """Modules that adapters may change in some layer."""
    return [
        module
        for name, modules in _MODULES.items()
        if name not in _DENSE or not all(cfg.moe_layers)
        for module in modules
    ]


def _layer_sources(
    dims: Dims, adapters: Sequence[Adapter], layer: int, moe: bool
) -> dict[str, Source]:
    assert dims.lora is not None
    found: dict[str, Source] = {}
    for name in dims.lora.parameters:
        if moe and name in _DENSE:
            continue
        into: list[Part] = []
        out_of: list[Part] = []
        for place, adapter in enumerate(adapters):
            for part, module in enumerate(_MODULES[name]):
                key = f"{layer}.{module}"
                rank = adapter.ranks.get(key, 0)
                if not rank:
                    continue
                first = (place * LORA_MATRICES[name] + part) * dims.lora.rank
                own = slice(first, first + rank)
                first_half, second_half = (f"{place}:{_tensor(key, half)}" for half in "AB")
                into.append(_into(dims, name, first_half, rank, own))
                out_of.append(_out_of(dims, name, part, second_half, rank, own))
        found |= {name + INTO: Assembled(tuple(into)), name + OUT_OF: Assembled(tuple(out_of))}
    return found


def _into(dims: Dims, name: str, tensor: str, rank: int, own: slice) -> Part:
    """The source of lora_A, [rank, inputs], and where it goes. own: its columns."""
    cfg = dims.cfg
    if name == "o":
        return Output(tensor, heads_of(dims), rank), (None, None, None, own)
    inputs = cfg.intermediate_size if name == "down" else cfg.hidden_size
    return Turned(tensor, inputs, rank), (None, own)


def _out_of(dims: Dims, name: str, part: int, tensor: str, rank: int, own: slice) -> Part:
    """The source of lora_B, [outputs, rank], and where it goes. own: its rows."""
    cfg = dims.cfg
    if name == "qkv":
        names = tuple(tensor if i == part else "" for i in range(3))
        source = QKV(names, heads_of(dims), rank, order_of_heads(cfg))
        return source, (own, None, None, None)
    if name == "gate_up":
        return Turned(tensor, rank, cfg.intermediate_size), (own, part, None)
    return Turned(tensor, rank, cfg.hidden_size), (own, None)
