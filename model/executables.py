"""Executables kept on disk: a program that was compiled before is not even traced.

JAX's compilation cache is keyed by a program's text, and making that text, by tracing and lowering,
is most of what a worker does when it starts again. Here the key is what determines the text: our
sources, JAX's version and settings, the machine, the function with all that it holds, and the
shapes of its arguments. A program that holds something without a fingerprint is compiled as usual.
"""

import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.monitoring
import jax.stages
import psutil
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding

from model import processors
from model.claims import claimed
from model.fingerprint import NoFingerprint, fingerprint

log = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = "model", "transfer", "prefill", "decode"  # all that programs may come from or use
_SOURCES = ".py", ".json"
# Variables that XLA and the libraries below it look at.
_FLAGS = "XLA_FLAGS", "TF_XLA", "TF_CU", "CUBLAS", "CUDNN", "NVIDIA_TF32"
# Settings that change no program: where they are kept, what is told of them, which GPUs are seen.
_KEPT = "jax_compilation_cache", "jax_persistent_cache"
_ASIDE = *_KEPT, "jax_log", "jax_dump", "jax_traceback", "jax_cuda_visible", "jax_rocm_visible"
_VERSIONS = "jax", "jaxlib", "numpy", "ml_dtypes"
_DAY_S: Final = 86400.0
_MOST_PARTS: Final = 4  # of one program
_FORGOTTEN_S: Final = 30 * _DAY_S
_NAME = re.compile(rb"[0-9a-f]{64}")
_DIGEST_BYTES = 32
# For another process that compiles the same program. If it takes longer, it is taken to hang.
_LONGEST_WAIT_S: Final = 300.0


class Recipe(NamedTuple):
    """What a program is compiled from."""

    function: Callable[..., Any]
    args: Sequence[Any]  # shapes, with a sharding
    donate: tuple[int, ...]  # positions
    options: Mapping[str, str]  # XLA's

    def compile(self) -> jax.stages.Compiled:
        """Compile it with JAX and its cache alone."""
        lowered = _lowered(self)
        return self.compiled(lowered, lowered.as_text())

    def compiled(self, lowered: jax.stages.Lowered, text: str) -> jax.stages.Compiled:
        """Compile what lowering gave. text: its `as_text`."""
        with _in_turn(text):
            return lowered.compile(compiler_options=dict(self.options))


class Sought(NamedTuple):
    """A program that a cache may have."""

    recipe: Recipe
    digest: str  # of all that its text follows from; "" if that has no fingerprint


_compiling: Final[set[str]] = set()  # the texts of programs
_compiled_one: Final = threading.Condition()


@contextmanager
def _in_turn(text: str) -> Iterator[None]:
    """Keep other threads from compiling the same text.

    JAX writes its files in place: a thread would read what another has half written.
    """
    with _compiled_one:
        _compiled_one.wait_for(lambda: text not in _compiling)
        _compiling.add(text)
    try:
        yield
    finally:
        with _compiled_one:
            _compiling.remove(text)
            _compiled_one.notify_all()


class Busy(Exception):
    """Another process is compiling this program."""


class ExecutableCache:
    """A folder of executables, filed by their programs' text, with an index by fingerprint.

    A mesh over several processes compiles a program in all of them at the same time. Each such
    *compilation* has a name, and each process keeps its own *part* of what came of it.

    After a change to our sources, a program that stays the same costs one lowering. Trouble with
    the folder costs only time, and is logged.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError where there is no such folder, and none can be made."""
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._folder = folder
        self._writes = os.access(folder, os.W_OK | os.X_OK)  # until that fails
        if not self._writes:
            log.warning("executables are not kept: %s may not be written to", folder)
        self._sources = digest_of_sources()
        self._machine = _digest(_machine())

    @staticmethod
    def beside_compiled() -> "ExecutableCache | None":
        """A cache in the folder where JAX keeps what it compiled; None where JAX keeps nothing.

        Also None where sources or flags may differ from those that this process has read.
        """
        folder = jax.config.jax_compilation_cache_dir
        # Of a mesh over several processes, this cache has the folder to itself: prepare_devices.
        is_used = jax.config.jax_enable_compilation_cache or jax.process_count() > 1
        if not folder or not is_used or "://" in folder:
            return None
        if not os.environ.get("XLA_FLAGS", "-").lstrip().startswith("-"):
            return None
        began_s = psutil.Process().create_time()
        try:
            if _changed_since(began_s):
                log.warning("executables are not kept: sources are newer than this process")
                return None
            kept = ExecutableCache(Path(folder) / "executables")
            kept.check_owner()
            # A folder that the user names may hold what other programs compiled.
            is_ours = not os.environ.get("JAX_COMPILATION_CACHE_DIR")
            kept.remove_forgotten(began_s, Path(folder).glob("*-cache") if is_ours else ())
            return kept
        except OSError as error:
            log.warning("executables are not kept: %s", error)
            return None

    def check_owner(self) -> None:
        """Raises PermissionError where others may write to the folder: its files are run unchecked.

        It may belong to root, as in an image that root has made. Also where it cannot be read.
        """
        if not os.access(self._folder, os.R_OK | os.X_OK):
            raise PermissionError(f"{self._folder} may not be read")
        found = self._folder.stat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"another user owns {self._folder}, or may write to it")

    def remove_forgotten(self, now_s: float, beside: Iterable[Path] = ()) -> None:
        """Remove files last read a month before the latest: of former sources, or of killed writes.

        A folder that was not used, or came with an image, stays whole: reads within the last day do
        not make a file the latest, since workers that start together each read their own files.
        now_s: on the clock of file times.
        beside: JAX's own files, which tell when they were written. Those of programs that are kept
        here are not read again; what else is still used is written once more. Those that a full
        disk left empty go, too: JAX would complain of them at every start.
        """
        if not self._writes:
            return
        try:
            read_s = {path: path.stat().st_mtime for path in self._folder.iterdir()}
            latest_s = max((at for at in read_s.values() if at < now_s - _DAY_S), default=0.0)
            others = {path: path.stat() for path in beside}
            told_s = read_s | {path: found.st_mtime for path, found in others.items()}
            useless = [path for path in told_s if told_s[path] < latest_s - _FORGOTTEN_S]
            # One that was begun just now may be another process's.
            useless += [
                p for p, at in others.items() if not at.st_size and at.st_mtime < now_s - 60
            ]
            for path in useless:
                path.unlink(missing_ok=True)
        except OSError as error:  # another worker removed it, or it is another user's
            log.info("executables no longer used are not all removed: %s", error)

    def seek(self, recipe: Recipe) -> Sought:
        """Call it for all programs before any is traced, which may add to what functions hold."""
        try:
            _devices_of(recipe.args)
            digest = _digest(self._machine, self._sources, fingerprint(recipe))
        except NoFingerprint as error:
            log.warning("%s: its executable is not kept", error)
            digest = ""
        return Sought(recipe, digest)

    def get(self, sought: Sought, wait: bool = True) -> tuple[jax.stages.Compiled, bool]:
        """The program as `Recipe.compile` makes it, and whether the folder had it.

        Workers that start together compile each program once: what another one compiles is waited
        for, or without `wait`, raises Busy.
        """
        recipe, digest = sought
        if not digest:
            return recipe.compile(), False
        asked = self._folder / f"asked-{digest}"
        if found := self._found(asked, recipe):
            return found, True
        if not self._writes:
            return self._compiled(asked, recipe)
        with claimed(self._folder / f"claim-{digest}", _LONGEST_WAIT_S if wait else 0.0) as mine:
            if not (mine or wait):
                raise Busy
            if found := self._found(asked, recipe):
                return found, True
            return self._compiled(asked, recipe)

    def compilations(self, sought: Sought) -> list[str]:
        """Of a mesh over several processes: those compilations whose part is here.

        Parts of a program, one for each process, work together only if they are of one compilation.
        """
        start = f"part-{sought.digest}-"
        here = self._folder.glob(f"{start}*") if sought.digest else ()
        return [path.name.removeprefix(start) for path in here]

    def load_part(self, sought: Sought, compilation: str) -> jax.stages.Compiled | None:
        """The program by that compilation; None if it cannot be loaded, and then it is removed."""
        name = f"part-{sought.digest}-{compilation}"
        found = self._load(name, sought.recipe.args)
        if found is None and self._writes:
            with suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)
        return found

    def compile_part(self, sought: Sought, compilation: str) -> jax.stages.Compiled:
        """Compile, as the other processes do at the same time, and keep what came of it."""
        lowered = _lowered(sought.recipe)
        compiled = sought.recipe.compiled(lowered, lowered.as_text())
        gives = _told(lowered) if sought.digest and self._writes else ""
        if gives and self._save(f"part-{sought.digest}-{compilation}", compiled, gives):
            self._remove_parts(sought.digest)
        return compiled

    def _remove_parts(self, digest: str) -> None:
        """Remove parts of a program but the last few: a node that keeps none has all compile."""
        try:
            parts = self._folder.glob(f"part-{digest}-*")
            for path in sorted(parts, key=lambda part: part.stat().st_mtime)[:-_MOST_PARTS]:
                path.unlink(missing_ok=True)
        except OSError as error:  # a node that shares the folder removed it
            log.info("parts of earlier compilations are not all removed: %s", error)

    def _found(self, asked: Path, recipe: Recipe) -> jax.stages.Compiled | None:
        named = self._read(asked) or b""
        if _NAME.fullmatch(named) is None:
            return None
        return self._load(named.decode(), recipe.args)

    def _compiled(self, asked: Path, recipe: Recipe) -> tuple[jax.stages.Compiled, bool]:
        """The program by its text, and whether the folder had it by that."""
        args = recipe.args
        lowered = _lowered(recipe)
        gives = _told(lowered)
        if not gives:
            return recipe.compile(), False
        text = lowered.as_text()
        name = _digest(self._machine, text, gives, fingerprint(recipe[1:]))
        found, was_here = self._load(name, args), True
        if found is None:
            before, was_here = _found_by_jax.count, False
            found = recipe.compiled(lowered, text)
            if _found_by_jax.count != before and self._writes:
                # JAX loaded it without the code that saving needs: what we save would load, but
                # fail when it runs (jaxlib 0.11.2, CPU). Compile again, by a name new to JAX.
                again = _lowered(recipe._replace(function=_renamed(recipe.function)))
                found = recipe.compiled(again, again.as_text())
            if not self._writes or not self._save(name, found, gives):
                return found, False
        if self._writes:
            self._write(asked, name.encode())
        return found, was_here

    def _load(self, name: str, args: Sequence[Any]) -> jax.stages.Compiled | None:
        """The executable of that name; None when it is not there, or cannot be loaded."""
        content = self._read(self._folder / name)
        if content is None:
            return None
        digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        try:
            if hashlib.sha256(body).digest() != digest:
                raise ValueError("its digest does not match")
            shape, _, payload = body.partition(b"\n")
            trees = jax.tree.structure((tuple(args), {})), _tree_of(json.loads(shape))
            load = serialize_executable.deserialize_and_load
            return load(payload, *trees, execution_devices=_devices_of(args))
        except Exception as error:  # whatever it is, the program can be compiled
            log.warning("%s is compiled again: %r", self._folder / name, error)
            return None

    def _save(self, name: str, compiled: jax.stages.Compiled, gives: str) -> bool:
        try:
            payload, _, _ = serialize_executable.serialize(compiled)
            body = gives.encode() + b"\n" + payload
        except Exception as error:  # some hold what cannot leave the process
            log.info("an executable is not kept: %r", error)
            return False
        return self._write(self._folder / name, hashlib.sha256(body).digest() + body)

    def _read(self, path: Path) -> bytes | None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("an executable cannot be read and is compiled again: %s", error)
            return None
        try:
            if self._writes:
                os.utime(path)
        except OSError as error:  # then it may be removed as forgotten
            log.info("an executable's time of last use cannot be updated: %s", error)
        return content

    def _write(self, path: Path, content: bytes) -> bool:
        """Write a file that readers see whole or not at all; whether that succeeded."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, delete_on_close=False) as file:
                file.write(content)
                os.fchmod(file.fileno(), 0o644)  # an image's user need not be the one who made it
                file.close()
                Path(file.name).replace(path)
        except OSError as error:
            self._writes_no_more(error)
            return False
        return True

    def _writes_no_more(self, error: OSError) -> None:
        writes, self._writes = self._writes, False  # first: other threads fail meanwhile, too
        if writes:
            log.warning("executables are not kept: %s", error)


def _lowered(recipe: Recipe) -> jax.stages.Lowered:
    # Unused arguments are kept: else the text would not tell which arguments are used.
    jitted = jax.jit(recipe.function, donate_argnums=recipe.donate, keep_unused=True)
    return jitted.lower(*recipe.args)


def _renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a new name: JAX names a program after it, and the name is in JAX's key."""

    def kept(*args: Any) -> Any:
        return function(*args)

    kept.__name__ = f"kept_{secrets.token_hex(4)}"
    return kept


class _FoundByJax(threading.local):
    """Counts the programs that JAX found on disk, for each thread."""

    count = 0

    def see(self, event: str, **_: str | int) -> None:
        self.count += event == "/jax/compilation_cache/cache_hits"


_found_by_jax = _FoundByJax()
jax.monitoring.register_event_listener(_found_by_jax.see)


def _told(lowered: jax.stages.Lowered) -> str:
    """What a program returns, as text; "" if it returns what cannot be told."""
    try:
        return json.dumps(_shape_of(lowered.out_tree))
    except NoFingerprint as error:
        log.warning("%s: its executable is not kept", error)
        return ""


def _shape_of(tree: Any) -> Any:
    """A pytree's structure as JSON: of each inner node the type, a dict's keys, and the items."""

    def shape(node: Any) -> Any:
        if node is None or isinstance(node, int):
            return node
        if not isinstance(node, dict | list | tuple):
            raise NoFingerprint(f"a program that returns a {type(node).__qualname__}")
        keys = list(node) if isinstance(node, dict) else None
        items = node.values() if isinstance(node, dict) else node
        name = f"{type(node).__module__}:{type(node).__qualname__}"
        return [name, keys, [shape(item) for item in items]]

    return shape(jax.tree.unflatten(tree, range(tree.num_leaves)))


def _tree_of(shape: Any) -> Any:
    """The structure that `_shape_of` described."""

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
    """The devices of the mesh that a program runs on, in the mesh's order."""
    for leaf in jax.tree.leaves(args):
        if isinstance(leaf.sharding, NamedSharding):
            return list(leaf.sharding.mesh.devices.flat)
    raise NoFingerprint("no argument has a mesh")


def _digest(*texts: str) -> str:
    return hashlib.sha256(fingerprint(texts).encode()).hexdigest()


def settings_of_programs() -> dict[str, str]:
    """What JAX and XLA are told that may change a program, by the variables that tell them."""
    settings = {
        name.upper(): repr(value)
        for name, value in sorted(jax.config.values.items())
        if not name.startswith(_ASIDE)
    }
    flags = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_FLAGS)}
    return settings | flags


def _machine() -> str:
    """What all programs of this process depend on, besides our sources."""
    client = jax.devices()[0].client
    versions = [importlib.metadata.version(name) for name in _VERSIONS]
    if client.platform != "cpu":
        versions += _libraries()
    processes = jax.process_index(), jax.process_count()
    machine: list[Any] = [client.platform_version, jax.device_count(), *processes, _processor()]
    machine += [os.environ.get(name) for name in processors.VARIABLES]
    if client.platform == "cpu":  # programs are cut for so many threads
        machine.append(processors.threads(jax.local_device_count()))
    return fingerprint((platform.python_version(), versions, machine, settings_of_programs()))


def _libraries() -> list[str]:
    """JAX's plugins and NVIDIA's libraries that are installed, with their versions."""
    found = []
    for installed in importlib.metadata.distributions():
        name = installed.metadata.get("Name", "")  # none where pip left part of a library behind
        if name.startswith(("jax", "nvidia")):
            found.append(f"{name}=={installed.version}")
    return sorted(found)


def _processor() -> str:
    """Which instructions the CPU has: compiled code may use all of those it was compiled on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def digest_of_sources() -> str:
    """64 hex digits: a digest of the code that all members of a mesh run."""
    digest = hashlib.sha256()
    for path in sorted(_sources()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _changed_since(time_s: float) -> bool:
    """Whether a source changed after time_s, so that this process may have read another version."""
    return any(path.stat().st_ctime > time_s for path in _sources())


def _sources() -> Iterator[Path]:
    files = (path for package in _PACKAGES for path in (_ROOT / package).rglob("*"))
    return (path for path in files if path.suffix in _SOURCES and path.is_file())
