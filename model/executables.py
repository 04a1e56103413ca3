"""Executables kept on disk: a program that was compiled before is not even traced.

JAX's compilation cache is asked by a program's text, and to make that text, trace and lower, is
most of what a worker does when it starts again. Here a program is asked for by what its text
follows from: our sources, JAX's version and settings, the machine, the function with all that it
holds, and the shapes of what it takes. A program that holds what has no value of its own is
compiled as ever.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.stages
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding

from model.fingerprint import OURS, NoFingerprint, fingerprint

log = logging.getLogger(__name__)

_SOURCES = ".py", ".json"
_FLAGS = "XLA_", "TF_", "NVIDIA_"  # variables that XLA and the libraries below it look at
# Settings that change no program.
_NO_PART = "jax_compilation_cache", "jax_persistent_cache", "jax_log_compiles", "jax_logging_level"
_DIGEST_BYTES = 32


class ExecutableCache:
    """A folder of executables, each under what its text says, and names for them by what is told.

    A change of our sources that does not change a program costs one lowering. What is wrong with
    the folder costs time, and is logged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sources = _digest_of_sources()
        self._machine = _machine()

    @staticmethod
    def beside_compiled() -> "ExecutableCache | None":
        """Where JAX keeps what it compiled; None where it keeps nothing.

        None as well where a mesh spans processes: they may have to compile a program together.
        """
        folder = jax.config.jax_compilation_cache_dir
        if not folder or not jax.config.jax_enable_compilation_cache or jax.process_count() > 1:
            return None
        return ExecutableCache(Path(folder) / "executables")

    def get(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        donate: tuple[int, ...],
        options: Mapping[str, str],
    ) -> tuple[jax.stages.Compiled, bool]:
        """The program as `compile_function` makes it, and whether it was here."""
        try:
            told = fingerprint((function, args, donate, options))
        except NoFingerprint as error:
            log.warning("%s: its executable is not kept", error)
            return compile_function(function, args, donate, options), False
        asked = self._folder / f"asked-{_digest(self._machine, self._sources, told)}"
        named = self._read(asked)
        if named is not None and (found := self._load(named.decode(errors="replace"), args)):
            return found, True
        lowered = _lowered(_renamed(function), args, donate)
        text = lowered.as_text(), str(lowered.out_tree), fingerprint((args, donate, options))
        name = _digest(self._machine, *text)
        found, was_here = self._load(name, args), True
        if found is None:
            before, was_here = _found_by_jax.count, False
            found = lowered.compile(compiler_options=dict(options))
            if _found_by_jax.count != before or not self._save(name, found):
                return found, False
        self._write(asked, name.encode())
        return found, was_here

    def _load(self, name: str, args: Sequence[Any]) -> jax.stages.Compiled | None:
        """None when it is not there, or cannot be read."""
        content = self._read(self._folder / name)
        if content is None:
            return None
        digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        try:
            if hashlib.sha256(body).digest() != digest:
                raise ValueError("its digest is another")
            shape, _, payload = body.partition(b"\n")
            trees = jax.tree.structure((tuple(args), {})), _tree_of(json.loads(shape))
            load = serialize_executable.deserialize_and_load
            return load(payload, *trees, execution_devices=_devices_of(args))
        except Exception as error:  # whatever it is, there is another way
            log.warning("%s is compiled again: %s", self._folder / name, error)
            return None  # and written over

    def _save(self, name: str, compiled: jax.stages.Compiled) -> bool:
        try:
            payload, _, out_tree = serialize_executable.serialize(compiled)
            body = json.dumps(_shape_of(out_tree)).encode() + b"\n" + payload
        except Exception as error:  # some hold what cannot leave the process
            log.info("an executable is not kept: %s", error)
            return False
        return self._write(self._folder / name, hashlib.sha256(body).digest() + body)

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("compiled again: %s", error)
            return None

    def _write(self, path: Path, content: bytes) -> bool:
        """Whoever looks finds all of it, or nothing."""
        try:
            # What lies here is run: nobody else may write.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete_on_close=False) as file:
                file.write(content)
                file.close()
                Path(file.name).replace(path)
        except OSError as error:
            log.warning("executables are not kept: %s", error)
            return False
        return True


def compile_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    donate: tuple[int, ...],
    options: Mapping[str, str],
) -> jax.stages.Compiled:
    """`function` for arguments of these shapes. donate: positions. options: XLA's."""
    return _lowered(function, args, donate).compile(compiler_options=dict(options))


def _lowered(
    function: Callable[..., Any], args: Sequence[Any], donate: tuple[int, ...]
) -> jax.stages.Lowered:
    return jax.jit(function, donate_argnums=donate).lower(*args)


# An executable that JAX found on disk has no code any more that could be saved, and fails when what
# was saved is run (jaxlib 0.11.2, CPU). So these programs have names that none in JAX's cache has,
# JAX writes none there meanwhile, and should it find one all the same, that is not saved.


@contextlib.contextmanager
def nothing_kept_by_jax() -> Iterator[None]:
    """Within, JAX writes nothing into its own cache, in any thread."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """JAX calls a program after its function."""

    def kept(*args: Any) -> Any:
        return function(*args)

    kept.__name__ = f"kept_{getattr(function, '__name__', 'program')}"
    return kept


class _FoundByJax(threading.local):
    """How many programs JAX found on disk, of each thread."""

    count = 0

    def see(self, event: str, **_: str | int) -> None:
        self.count += event == "/jax/compilation_cache/cache_hits"


_found_by_jax = _FoundByJax()
jax.monitoring.register_event_listener(_found_by_jax.see)


def _shape_of(tree: Any) -> Any:
    """A pytree's structure as JSON: of each inner node its type, the keys of a dict, and items."""

    def shape(node: Any) -> Any:
        if node is None or isinstance(node, int):
            return node
        keys = list(node) if isinstance(node, dict) else None
        items = node.values() if isinstance(node, dict) else node
        name = f"{type(node).__module__}:{type(node).__qualname__}"
        return [name, keys, [shape(item) for item in items]]

    return shape(jax.tree.unflatten(tree, range(tree.num_leaves)))


def _tree_of(shape: Any) -> Any:
    """The structure that `_shape_of` told of."""

    def node(shape: Any) -> Any:
        if not isinstance(shape, list):
            return shape
        name, keys, items = shape[0], shape[1], [node(item) for item in shape[2]]
        if keys is not None:
            return dict(zip(keys, items, strict=True))
        module, _, of = name.partition(":")
        kind = getattr(importlib.import_module(module), of)
        return kind._make(items) if hasattr(kind, "_make") else kind(items)

    return jax.tree.structure(node(shape))


def _devices_of(args: Sequence[Any]) -> list[jax.Device]:
    """Of the mesh that a program runs on, in its order."""
    shardings = (leaf.sharding for leaf in jax.tree.leaves(args))
    return list(next(s.mesh for s in shardings if isinstance(s, NamedSharding)).devices.flat)


def _digest(*texts: str) -> str:
    return hashlib.sha256(fingerprint(texts).encode()).hexdigest()


def _machine() -> str:
    """What all programs of this process follow from, beside our sources."""
    client = jax.devices()[0].client
    settings = {
        name: repr(value)
        for name, value in sorted(jax.config.values.items())
        if not name.startswith(_NO_PART)
    }
    flags = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_FLAGS)}
    versions = platform.python_version(), jax.__version__, importlib.metadata.version("jaxlib")
    machine = client.platform_version, jax.device_count(), _processor()
    return fingerprint((versions, machine, settings, flags))


def _processor() -> str:
    """Which instructions there are: code for CPUs holds those of the one that it was made on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _digest_of_sources() -> str:
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    files = (path for package in OURS for path in (root / package).rglob("*"))
    for path in sorted(path for path in files if path.suffix in _SOURCES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
