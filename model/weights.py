"""Load a checkpoint onto the devices, each parameter into its sharding; digests of checkpoints."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import xxhash
from jax import Array

from model import orbax
from model.checkpoint import Checkpoint
from model.coded import CODE_DTYPES
from model.coded_tensors import codes_to_keep, shown
from model.config import ModelConfig
from model.lora import Adapter, AdapterFiles, lora_sources
from model.orbax import is_orbax
from model.params import Leaf, Params
from model.quantised import open_checkpoint
from model.sharding import Dims
from model.sources import Files, Source, fill
from model.tensors import checked_sources, param_sources
from model.transformer import Model

Progress = Callable[[int, int], None]

# What a digest reads: tensors of up to _WHOLE entries whole; of any other a number of pieces in
# _PIECES, each of up to _PIECE entries; of all together about _ALL_PIECES, which take a second or
# two where files are cached.
_WHOLE: Final = 32_768
_PIECE: Final = 256
_PIECES: Final = range(3, 33)
_ALL_PIECES: Final = 40_000

# The dtypes of two bytes, by their names in safetensors.
_NARROW: Final = {"BF16": "bfloat16", "F16": "float16"}

_ALIGNED: Final = 64  # bytes: what XLA wants of a CPU's arrays


def load_params(path: str | Path, model: Model, progress: Progress | None = None) -> Params:
    """Read a checkpoint folder (safetensors, or what save_orbax wrote) into the model's parameters.

    progress(done_bytes, total_bytes): called as parameters arrive; bytes as stored on devices.
    The host holds one shard of one parameter at a time. Raises ModelError, one line, naming file
    and tensor: truncated or missing file, missing or unknown tensor, wrong shape or dtype.
    """
    folder = Path(path)
    leaves, tree = jax.tree.flatten(model.param_leaves())
    done, total = 0, _bytes_of(leaves, model)

    def arrived(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    if is_orbax(folder):
        return orbax.load_params(folder, model, arrived)
    files = open_checkpoint(folder, model.cfg.quantization, model.cfg.quantized_block)
    sources = jax.tree.leaves(checked_sources(files, model.dims))
    codes = CODE_DTYPES[model.dims.codes]
    made = [
        _place(shown(files, leaf, codes), source, leaf, model, arrived)
        for source, leaf in zip(sources, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, made)


def load_adapters(adapters: Sequence[Adapter], model: Model) -> Params:
    """The parameters of adapters that the model was made for, to be added to its own.

    Raises ModelError, see lora_sources.
    """
    files, leaves = AdapterFiles(adapters, model.dtype), model.lora_leaves()
    sources = jax.tree.leaves(lora_sources(files, model.dims, adapters) if leaves else ())
    flat, tree = jax.tree.flatten(leaves)
    made = [
        _place(files, source, leaf, model, lambda _: None)
        for source, leaf in zip(sources, flat, strict=True)
    ]
    added: Params = jax.tree.unflatten(tree, made)
    return added


def coded_parameters(
    path: str | Path,
    dims: Dims,
    quantization: str,
    by_default: bool,
    dummy: bool = False,
) -> tuple[str, ...]:
    """`Dims.coded` for a checkpoint folder and a value of --quantization; see codes_to_keep.

    "fp8" and "int8" ask for codes, "none" for none, and "auto" for those of a quantised checkpoint
    if by_default; dims says which codes, see codes_of. An Orbax folder has none. dummy: there are
    no tensors to look at; the parameters are those that are codes in such a model as published.
    Raises ModelError where codes are asked for but not to be had, and as load_params does.
    """
    cfg, folder, asked = dims.cfg, Path(path), quantization in CODE_DTYPES
    if not asked and not (quantization == "auto" and by_default and cfg.quantization):
        return ()
    if dummy:
        return dims.coded_as_published(dims.codes)
    if is_orbax(folder):
        orbax.refuse_codes(folder, quantization)
        return ()
    files = open_checkpoint(folder, cfg.quantization, cfg.quantized_block)
    return codes_to_keep(files, dims, asked)


def narrow_parameters(
    path: str | Path, dims: Dims, dummy: bool = False
) -> tuple[tuple[str, str], ...]:
    """`Dims.narrow` for a checkpoint folder: the matrices that it has in one dtype of two bytes.

    dims says which are codes. dummy: as config.json says. Raises ModelError as load_params does.
    """
    cfg, folder = dims.cfg, Path(path)
    names = [x for x in ("embed", "lm_head", *dims.coded_inputs) if x not in dims.coded]
    if dummy:
        return _narrow({name: {cfg.torch_dtype} for name in names})
    if is_orbax(folder):
        dtypes = orbax.stored_dtypes(folder)
        if cfg.tie_word_embeddings and "embed" in dtypes:
            dtypes["lm_head"] = dtypes["embed"]
        return _narrow({name: dtypes.get(name, set()) for name in names})
    files = open_checkpoint(folder, cfg.quantization, cfg.quantized_block)
    tree, present = param_sources(replace(dims, coded=(), tied_as_head=False)), set(files.names)
    if cfg.tie_word_embeddings:
        tree["lm_head"] = tree["embed"]
    found: dict[str, set[str]] = {}
    for name in names:
        sources = [part[name] for part in (tree, *tree["layers"]) if name in part]
        tensors = {tensor for source in sources for tensor, _ in source.expected()} & present
        stored = {files.dtype(tensor) for tensor in tensors}
        found[name] = {_NARROW.get(dtype, dtype) for dtype in stored}
    return _narrow(found)


def _narrow(stored: Mapping[str, set[str]]) -> tuple[tuple[str, str], ...]:
    """Those of the parameters that are stored in one dtype of two bytes, with that dtype."""
    alone = {name: next(iter(dtypes)) for name, dtypes in stored.items() if len(dtypes) == 1}
    return tuple(item for item in alone.items() if item[1] in _NARROW.values())


def stored_bytes(model: Model) -> int:
    """Bytes of the parameters on this process's devices, replicas counted each time."""
    return _bytes_of(jax.tree.leaves((model.param_leaves(), model.lora_leaves())), model)


def _bytes_of(leaves: Sequence[Leaf], model: Model) -> int:
    shardings = [(leaf, leaf.sharding(model.mesh)) for leaf in leaves]
    return sum(
        int(np.prod(sharding.shard_shape(leaf.shape)))
        * leaf.dtype.itemsize
        * len(sharding.addressable_devices)
        for leaf, sharding in shardings
    )


def _place(
    files: Files, source: Source, leaf: Leaf, model: Model, arrived: Callable[[int], None]
) -> Array:
    """One parameter, shard by shard; a shard that several devices hold is read once."""
    sharding = leaf.sharding(model.mesh)
    homes: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index, leaf.shape, strict=True))
        homes.setdefault(bounds, []).append(device)
    shards: list[Array] = []
    # Where experts may move, they are donated, and XLA overwrites only memory of its own.
    zeros = _zeros if model.dims.ep == 1 else np.zeros
    for bounds, devices in homes.items():
        out = zeros([stop - start for start, stop in bounds], leaf.dtype)
        _fill(files, source, leaf, tuple(slice(*b) for b in bounds), out)
        for device in devices:
            shards.append(jax.device_put(out, device))
            arrived(out.nbytes)
        jax.block_until_ready(shards)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def _zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """As numpy.zeros, but at an address that lets JAX on CPU take the array as it is.

    It copies any other, and then has a stack of all layers in memory twice for a while.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNED, np.uint8)
    first = -memory.ctypes.data % _ALIGNED
    return memory[first : first + num_bytes].view(dtype).reshape(shape)


def _fill(
    files: Files, source: Source, leaf: Leaf, index: tuple[slice, ...], out: np.ndarray
) -> None:
    """Fill a part of a parameter; what is stored repeatedly is read repeatedly."""
    axis = leaf.repeats
    if axis is None:
        fill(source, files, index, out)
        return
    size, part = leaf.canonical[axis], index[axis]
    at = part.start
    while at < part.stop:
        first = at % size
        count = min(size - first, part.stop - at)
        piece = (*index[:axis], slice(first, first + count), *index[axis + 1 :])
        into = (slice(None),) * axis + (slice(at - part.start, at - part.start + count),)
        fill(source, files, piece, out[into])
        at += count


def model_digest(path: str | Path) -> str:
    """16 hex digits that tell two checkpoints apart without reading them whole.

    It covers the configuration as workers have it, the names, shapes and dtypes of all tensors and
    samples of each one's bytes; of an Orbax folder its files' names, sizes and first bytes.
    Copies of one folder agree; the two forms of one model do not. Raises ModelError as load_params
    does.
    """
    folder = Path(path)
    cfg = ModelConfig.from_dir(folder)
    digest = xxhash.xxh3_64(repr(_computed(cfg)).encode())
    if is_orbax(folder):
        orbax.add_to_digest(folder, digest)
        return digest.hexdigest()
    files = open_checkpoint(folder, cfg.quantization, cfg.quantized_block)
    names = files.names
    pieces = min(max(_ALL_PIECES // max(len(names), 1), _PIECES[0]), _PIECES[-1])
    for name in names:
        shape = files.shape(name)
        digest.update(f"{name} {files.dtype(name)} {shape};".encode())
        if shape and min(shape) > 0:
            digest.update(_sample(files, name, shape, pieces))
    return digest.hexdigest()


def dummy_digest(
    path: str | Path,
    coded: tuple[str, ...] = (),
    codes: str = "",
    narrow: tuple[tuple[str, str], ...] = (),
) -> str:
    """Takes the place of model_digest where parameters are random: of the configuration alone.

    coded: parameters that are codes. codes: which codes. narrow: see Dims. Random codes, and
    random values of two bytes, differ from random values in the model's dtype, so two workers that
    differ in them must not pair. No checkpoint has such a digest.
    """
    told = repr((_computed(ModelConfig.from_dir(path)), coded, codes if coded else "", narrow))
    return xxhash.xxh3_64(told.encode()).hexdigest() + "-dummy"


def _computed(cfg: ModelConfig) -> ModelConfig:
    """The configuration without the defaults of clients' requests, which no worker reads."""
    return replace(cfg, default_temperature=None, default_top_p=None, default_top_k=None)


def _sample(files: Checkpoint, name: str, shape: tuple[int, ...], pieces: int) -> bytes:
    """A small tensor whole; of another, pieces of rows spread evenly from its start to its end.

    A row runs along the last axis. In most rows the piece begins at a different column.
    """
    size = math.prod(shape)
    if size <= _WHOLE:
        return files.read(name, tuple(slice(0, length) for length in shape)).tobytes()
    *outer, columns = shape
    width = min(columns, _PIECE)
    found: list[bytes] = []
    for i in range(pieces):
        row, column = divmod(i * (size - width) // (pieces - 1), columns)
        first = min(column, columns - width)
        rows = (slice(at, at + 1) for at in map(int, np.unravel_index(row, outer)))
        found.append(files.read(name, (*rows, slice(first, first + width))).tobytes())
    return b"".join(found)
