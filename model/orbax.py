"""The Orbax form of a checkpoint: the tree as trained, restored straight into shardings."""

import itertools
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax import Array

from model.claims import locked
from model.coded import CODE_DTYPES
from model.errors import ModelError
from model.params import Leaf, Params, as_head, param_leaves, segments
from model.quantised import open_checkpoint
from model.sharding import Dims, Stacks
from model.sources import Files, Index, Source, fill
from model.tensors import checked_sources
from model.transformer import Model

_PARAMS: Final = "params"
_MARK: Final = "_METADATA"
# All files besides the weights that serving or people read.
_COPIED: Final = (
    *("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt"),
    *("LICENSE*", "README*"),
)
_NOT_COPIED: Final = "model.safetensors.index.json"
# How the bytes of an array are encoded in a file. The last is a checksum: without it a changed bit
# would go unnoticed.
_CODECS: Final = (
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "zstd", "configuration": {"level": 1}},
    {"name": "crc32c"},
)
# The most of a chunk before compression, where it can be split so. malloc gives memory of more than
# 32 MiB back as soon as it is freed, and would keep most of smaller chunks.
_CHUNK_BYTES: Final = 64 << 20
_MESH_SPLITS: Final = 16  # into so many parts, at most, a mesh is taken to split a parameter
_UNDER_WAY: Final = 4  # chunks that are compressed and written while the next one is read
_MOST_TOLD: Final = 500  # characters of the library's text


def is_orbax(path: str | Path) -> bool:
    """Whether the folder is one that save_orbax wrote, even if it is damaged or unfinished."""
    folder, params = Path(path), Path(path) / _PARAMS
    if (params.is_dir() or _unfinished(folder)) and not any(folder.glob("*.safetensors")):
        return True
    return (params / _MARK).exists()


def _unfinished(folder: Path) -> list[Path]:
    """Parameters that are not whole, under the name that Orbax gives them until they are."""
    return [*folder.glob(f"{_PARAMS}.orbax-*")]


def _orbax() -> Any:
    """Import the library late: most starts read safetensors, and it takes most of a second."""
    import orbax.checkpoint

    return orbax.checkpoint


def save_orbax(
    src: str | Path,
    out: str | Path,
    model: Model,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the safetensors checkpoint `src` to the new folder `out` in Orbax form.

    The tree is stacked by layer, unpadded and of model.dtype, so it fits every mesh. The host
    holds _UNDER_WAY chunks of it at a time. They carry checksums, which load_params compares.
    Config and tokenizer files are copied; the config's dtype becomes model.dtype.
    progress(done_bytes, total_bytes): as chunks are read. Raises ModelError as load_params does, or
    when `out` is the source, has parameters or other files of such names already, or another call
    writes there; OSError when it cannot be written. What was begun is removed when it fails.
    """
    ocp = _orbax()
    source_dir, target = Path(src), Path(out).absolute()
    if target.exists() and source_dir.samefile(target):
        raise ModelError(f"{target}: is the folder of the source; expected a new folder")
    if is_orbax(source_dir):
        raise ModelError(f"{source_dir}: is in Orbax form already; expected safetensors")
    _check_free(target)
    cfg, whole = model.cfg, Dims(model.cfg, 1, 1)
    files = open_checkpoint(source_dir, cfg.quantization, cfg.quantized_block)
    leaves = param_leaves(whole, model.dtype)
    total = sum(_canonical_bytes(leaf) for leaf in jax.tree.leaves(leaves))
    done = 0

    def read(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    sources, copies = checked_sources(files, whole), _copies(source_dir, target, model)
    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    with _reserved(target), ExitStack() as undo:
        undo.callback(_remove_begun, target, is_new)
        # Before parameters are read, which may take minutes: the folder may not be writable.
        for to, content in copies:
            undo.callback(to.unlink, missing_ok=True)
            to.parent.mkdir(exist_ok=True)
            to.write_bytes(content)
        tree = jax.tree.map(lambda source, leaf: _Unread(files, source, leaf), sources, leaves)
        # Parameters come last, and have this name only once whole: it marks a folder as Orbax.
        under_way: deque[Any] = deque()
        undo.callback(_wait_for, under_way)
        with ocp.Checkpointer(_checksumming(under_way, read)) as checkpointer:
            checkpointer.save(target / _PARAMS, args=ocp.args.PyTreeSave(_named(tree)))
        undo.pop_all()


def _check_free(target: Path) -> None:
    """Raises ModelError if the folder has parameters, which would be mixed with those to come."""
    for found in (target / _PARAMS, *sorted(target.glob("*.safetensors"))):
        if found.exists():
            raise ModelError(f"{found}: exists; expected a new folder")


def _copies(source: Path, target: Path, model: Model) -> list[tuple[Path, bytes]]:
    """Files to write, and their content: what a conversion that was cut off has copied need not be.

    Raises ModelError for a file that cannot be read, or that another has the place of.
    """
    found = []
    for file in sorted(path for pattern in _COPIED for path in source.glob(pattern)):
        if file.name == _NOT_COPIED or (file.exists() and not file.is_file()):
            continue
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
        to = target / file.relative_to(source)
        if file.name == "config.json" and model.cfg.torch_dtype != model.dtype.name:
            content = _with_dtype(content, model.dtype.name)
        if not to.is_file():
            found.append((to, content))
        elif to.read_bytes() != content:
            raise ModelError(f"{to}: exists, and is not as {file}; expected a new folder")
    return found


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """config.json that says of which dtype the parameters now are, under the name it has for it."""
    fields = json.loads(config)
    said = [name for name in ("torch_dtype", "dtype") if name in fields]
    fields.update(dict.fromkeys(said or ["torch_dtype"], dtype))
    return json.dumps(fields, indent=2, ensure_ascii=False).encode() + b"\n"


@contextmanager
def _reserved(target: Path) -> Iterator[None]:
    """Hold the folder, and its lock, so that no other conversion writes to it or removes it.

    Raises ModelError if another does, or has filled it meanwhile.
    """
    held = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not locked(held, 0.0):
            raise ModelError(f"{target}: another conversion writes there; expected a new folder")
        _check_free(target)
        yield
    finally:
        os.close(held)


def _wait_for(under_way: deque[Any]) -> None:
    """Wait for all writes, even if one fails: what is begun is removed, and none may add to it."""
    for write in under_way:
        with suppress(Exception):
            write.result()


def _remove_begun(target: Path, is_new: bool) -> None:
    """Remove a new folder; of an older one only the parameters, with Orbax's temporary folders."""
    begun = [target] if is_new else [target / _PARAMS, *_unfinished(target)]
    for path in begun:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class _Unread:
    """A parameter of which chunks are read when they are written; Orbax takes it for an array."""

    files: Files
    source: Source
    leaf: Leaf

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.canonical

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.leaf.dtype)

    @property
    def nbytes(self) -> int:
        return _canonical_bytes(self.leaf)

    def read(self, index: Index) -> np.ndarray:
        values = np.zeros([part.stop - part.start for part in index], self.dtype)
        fill(self.source, self.files, index, values)
        return values


def _chunk_shape(leaf: Leaf, is_stack: bool) -> tuple[int, ...]:
    """Shape of a chunk: what is read, compressed and checked as one.

    An axis is split only where meshes split it, and, of a stack, between layers. The former comes
    first, up to _MESH_SPLITS parts: a device then reads little that others need.
    """
    chunk = list(leaf.canonical)
    shared = [axis for axis, name in enumerate(leaf.spec) if name is not None]

    def split(axis: int, most: int) -> int:
        """Into how many parts the axis is split: by powers of two, as meshes do it."""
        parts, others = 1, math.prod(chunk) // chunk[axis] * leaf.dtype.itemsize
        while chunk[axis] > 1 and chunk[axis] * others > _CHUNK_BYTES and parts < most:
            parts *= 2
            chunk[axis] = -(-leaf.canonical[axis] // parts)
        return parts

    left = _MESH_SPLITS
    for axis in shared:
        left //= split(axis, left)
    for axis in [*([0] if is_stack else []), *shared]:
        split(axis, 2 * leaf.canonical[axis])
    return tuple(chunk)


def _chunks(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[Index]:
    """Where the chunks are, in order."""
    return itertools.product(
        *(
            [slice(first, min(first + step, size)) for first in range(0, size, step)]
            for size, step in zip(shape, chunk, strict=True)
        )
    )


def _checksumming(under_way: deque[Any], read: Callable[[int], None]) -> Any:
    """A handler that writes trees of _Unread with _CODECS, for which Orbax has no option.

    under_way: has whatever is being written. read(num_bytes) is called for each chunk.
    """
    import tensorstore
    from orbax.checkpoint import PyTreeCheckpointHandler
    from orbax.checkpoint import type_handlers as types

    def begin(value: _Unread, info: Any) -> Any:
        chunk = _chunk_shape(value.leaf, is_stack=info.name.startswith("layers"))
        shape, dtype = value.shape, value.dtype
        spec = types.get_json_tspec_write(info, True, shape, chunk, dtype, process_index=0)
        spec["metadata"]["codecs"] = list(_CODECS)
        return tensorstore.open(spec, create=True, open=True, context=info.ts_context)

    def ended() -> Any:
        """What the oldest of them gives; it stays among them until then, whatever happens here.

        Not awaited: nothing else runs in this loop, and what ends after the loop would complain.
        """
        result = under_way[0].result()
        under_way.popleft()
        return result

    async def write(values: Sequence[_Unread], infos: Sequence[Any]) -> None:
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            under_way.append(begin(value, info))
        stores = [ended() for _ in values]
        for value, store in zip(values, stores, strict=True):
            for index in _chunks(value.shape, store.chunk_layout.write_chunk.shape):
                if len(under_way) == _UNDER_WAY:
                    ended()
                part = value.read(index)
                read(part.nbytes)
                # It does not change until it is written, so tensorstore need not copy it.
                to = store[index]
                under_way.append(to.write(part, can_reference_source_data_indefinitely=True))
        while under_way:
            ended()

    class Checksumming(types.NumpyHandler):
        async def serialize(
            self, values: Sequence[_Unread], infos: Sequence[Any], args: Any = None
        ) -> list[Any]:
            try:
                await write(values, infos)
            except (ModelError, MemoryError):
                raise
            except Exception as error:  # the library raises nothing more specific
                raise OSError(_told(error)) from error
            return []

    # There are no jax arrays, but the library warns when nothing handles them.
    handlers = [(_Unread, Checksumming()), (Array, types.get_type_handler(Array))]
    registry = types.create_type_handler_registry(*handlers)
    return PyTreeCheckpointHandler(use_zarr3=True, type_handler_registry=registry)


def load_params(folder: Path, model: Model, arrived: Callable[[int], None]) -> Params:
    """Restore the parameters. arrived(num_bytes) is called for each.

    A parameter that the mesh pads or replicates goes through the host, the others do not.
    Each chunk that is read for any shard is compared with its checksum, in every process that
    reads it; folders that were written without checksums are not checked.
    Raises ModelError, one line, when something is missing, misshapen or not readable.
    """
    ocp = _orbax()
    params = folder.absolute() / _PARAMS
    stacked = replace(model.dims, stacks=Stacks.ALL, tied_as_head=False)
    leaves = _flat(_named(param_leaves(stacked, model.dtype)))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        _check(params, checkpointer, leaves)
        made: dict[tuple[str, ...], Array] = {}
        for name, leaf in leaves.items():
            value = _restore(params, checkpointer, name, leaf, model)
            arrived(sum(shard.data.nbytes for shard in value.addressable_shards))
            made |= _parted(name, value, model)
    flat, tree = jax.tree.flatten_with_path(model.param_leaves())
    return jax.tree.unflatten(tree, [made[_path(path)] for path, _ in flat])


def stored_dtypes(folder: Path) -> dict[str, set[str]]:
    """The dtypes in which the folder has each kind of parameter, by its name within a layer.

    Raises ModelError as load_params does.
    """
    params = folder.absolute() / _PARAMS
    with _orbax().Checkpointer(_orbax().PyTreeCheckpointHandler()) as checkpointer:
        found = _stored(params, checkpointer)
    dtypes: dict[str, set[str]] = {}
    for name, stored in found.items():
        dtypes.setdefault(name[-1], set()).add(str(stored.dtype))
    return dtypes


def refuse_codes(folder: Path, quantization: str) -> None:
    """Raises ModelError if this value of --quantization asks for codes: such a folder has none."""
    if quantization in CODE_DTYPES:
        raise ModelError(
            f"{folder}: in Orbax form; accepted with --quantization {quantization}: safetensors"
        )


def add_to_digest(folder: Path, digest: Any) -> None:
    """Feed names, sizes and first bytes of the files, in order of name."""
    root = folder / _PARAMS
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(root)} {file.stat().st_size};".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(4096))


def _restore(
    params: Path, checkpointer: Any, name: tuple[str, ...], leaf: Leaf, model: Model
) -> Array:
    ocp, sharding = _orbax(), leaf.sharding(model.mesh)
    fits = leaf.shape == leaf.canonical
    how = (
        ocp.ArrayRestoreArgs(sharding=sharding, dtype=leaf.dtype, global_shape=leaf.shape)
        if fits
        else ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    )
    args = ocp.args.PyTreeRestore(
        item=_nested(name, 0), restore_args=_nested(name, how), partial_restore=True
    )
    try:
        value = checkpointer.restore(params, args=args)
    except Exception as error:  # the library raises nothing more specific
        where = ".".join(name)
        raise ModelError(f"{params}: parameter {where} is not readable: {_told(error)}") from error
    for key in name:
        value = value[key]
    if fits:
        return value
    stored = leaf.expand(np.asarray(value).astype(leaf.dtype), np)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: stored[index])


def _parted(name: tuple[str, ...], value: Array, model: Model) -> dict[tuple[str, ...], Array]:
    """A stack split as the model's segments are: whole, or each layer's part under its own name."""
    if name == ("embed",) and model.dims.tied_as_head:
        return {("lm_head",): as_head(value, model.param_leaves()["lm_head"], model.mesh)}
    if name[0] != "layers":
        return {name: value}
    run = segments(replace(model.dims, stacks=Stacks.ALL))[int(name[1])]
    found: dict[tuple[str, ...], Array] = {}
    for idx, part in enumerate(segments(model.dims)):
        at = part.first - run.first
        if part == run:
            found["layers", str(idx), *name[2:]] = value
        elif 0 <= at < run.num_layers:
            found["layers", str(idx), *name[2:]] = _layers(value, at, at + part.num_layers)
    return found


def _layers(stack: Array, first: int, end: int) -> Array:
    """Some layers of a stack, sharded as the stack is, whose axis of layers is not split."""
    parts = [
        jax.device_put(np.asarray(shard.data)[first:end], shard.device)
        for shard in stack.addressable_shards
    ]
    shape = (end - first, *stack.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, stack.sharding, parts)


def _check(params: Path, checkpointer: Any, leaves: dict[tuple[str, ...], Leaf]) -> None:
    """Compare names and shapes before anything is read."""
    found = _stored(params, checkpointer)
    for name, leaf in leaves.items():
        where = f"{params}: parameter {'.'.join(name)}"
        if name not in found:
            raise ModelError(f"{where} is missing")
        if tuple(found[name].shape) != leaf.canonical:
            got, expected = list(found[name].shape), list(leaf.canonical)
            raise ModelError(f"{where}: shape {got}, expected {expected}")
    for name in found:
        if name not in leaves:
            raise ModelError(f"{params}: parameter {'.'.join(name)} is unknown in this model")


def _stored(params: Path, checkpointer: Any) -> dict[tuple[str, ...], Any]:
    """What the folder says of each parameter: shape and dtype."""
    if not params.exists() and _unfinished(params.parent):
        what = "its conversion was cut off; run `kvferry convert` with this --output again"
        raise ModelError(f"{params.parent}: {what}")
    try:
        metadata = checkpointer.metadata(params).item_metadata
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{params}: not a readable Orbax checkpoint: {_told(error)}") from error
    if metadata is None:
        raise ModelError(f"{params}: not a readable Orbax checkpoint: its files are damaged")
    return _flat(metadata.tree)


def _told(error: BaseException) -> str:
    """The cause in one line: Orbax wraps it in a page of text that does not name it."""
    while error.__cause__ is not None:
        error = error.__cause__
    line, *_ = str(error).strip().splitlines() or [type(error).__name__]
    # Cut between the paths at the start and the reason at the end.
    return line if len(line) <= _MOST_TOLD else f"{line[:200]} ... {line[-_MOST_TOLD + 200 :]}"


def _canonical_bytes(leaf: Leaf) -> int:
    return int(np.prod(leaf.canonical)) * leaf.dtype.itemsize


def _path(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)


def _named(tree: Params) -> dict[str, Any]:
    """The parameter tree with the tuple of segments as a dict, which Orbax names plainly."""
    return tree | {"layers": {str(i): run for i, run in enumerate(tree["layers"])}}


def _flat(tree: Any, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(tree, dict):
        return {at: tree}
    return {name: leaf for key in tree for name, leaf in _flat(tree[key], (*at, str(key))).items()}


def _nested(name: tuple[str, ...], leaf: Any) -> Any:
    for key in reversed(name):
        leaf = {key: leaf}
    return leaf
