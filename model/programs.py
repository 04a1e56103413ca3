"""Ahead-of-time compilation: programs with names, their memory, and a count of late compiles."""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import jax.monitoring
import jax.stages

from model import processors
from model.errors import MemoryShortage, ModelError
from model.executables import Busy, ExecutableCache, Recipe, Sought
from model.host_memory import available_bytes
from model.members import texts_of_all
from model.promises import PROMISES
from model.threads import in_daemon_thread

log = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
# Programs compiled at once. Each takes a processor, and half a GB for 48 layers on CUDA.
_MOST_COMPILING = 16


class CompileCounter:
    """Counts what XLA compiles after `arm` was called: each is a broken promise."""

    def __init__(self) -> None:
        self._armed = False
        self._lock = threading.Lock()
        self.after_ready = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def arm(self) -> None:
        """Traffic may come: from here on nothing should compile. Late shapes get logged."""
        self._armed = True
        jax.config.update("jax_log_compiles", True)

    def disarm(self) -> None:
        """Stop counting; this process's engine is gone."""
        self._armed = False
        jax.config.update("jax_log_compiles", False)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if self._armed and event == _COMPILE_EVENT:
            with self._lock:
                self.after_ready += 1
            log.error("compiled after ready (%.3f s): %s", duration_secs, kwargs)


class Program:
    """One function, once compiled. Calling it never traces."""

    compiled: jax.stages.Compiled
    was_kept = False

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        donate: tuple[int, ...] = (),
    ) -> None:
        """`function` for arguments of these shapes, dtypes and shardings.

        args: arrays, or `jax.ShapeDtypeStruct`s with a sharding. donate: positions whose buffers
        die.
        """
        self.name = name
        self._function, self._donate = function, donate
        self._args = abstract_like(args)
        # On CPU two concurrent programs that talk to another process, each on several devices of
        # this one, may deadlock (jaxlib 0.11.2, gloo).
        self._waits = jax.process_count() > 1 and jax.default_backend() == "cpu"

    def compile(self) -> "Program":
        """Compile it with JAX and its cache alone."""
        self.compiled = self.recipe(None).compile()
        return self

    def recipe(self, more: Mapping[str, str] | None) -> Recipe:
        """more: XLA's options besides our own."""
        # The pool is given all memory that is left. To XLA for CUDA that looks like too little, and
        # it recomputes the same products over and over rather than keep them.
        options = {"xla_disable_hlo_passes": "rematerialization", **(more or {})}
        return Recipe(self._function, self._args, self._donate, options)

    def __call__(self, *args: Any) -> Any:
        result = self.compiled(*args)
        return jax.block_until_ready(result) if self._waits else result

    @property
    def temp_bytes(self) -> int:
        """Scratch memory of one device while the program runs, its fresh outputs included."""
        memory = self.compiled.memory_analysis()
        if memory is None:
            return 0
        fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return int(memory.temp_size_in_bytes + max(fresh, 0))


def compile_all(
    programs: Sequence[Program],
    more: Mapping[str, str] | None = None,
    kept: ExecutableCache | None = None,
) -> None:
    """Compile them, several at once: XLA uses one processor for most of what it does.

    A mesh over several processes compiles them one by one, at the same time in each. Those that
    another worker is compiling come last. Raises what the first one that failed raised; those not
    yet begun are left.
    more: XLA's options besides our own. kept: a cache that may have executables.
    """
    recipes = [program.recipe(more) for program in programs]
    sought = [kept.seek(recipe) if kept else Sought(recipe, "") for recipe in recipes]
    if jax.process_count() > 1:
        _compile_together(programs, sought, kept)
        return
    left = deque((*both, False) for both in zip(programs, sought, strict=True))
    numbers = count(1)

    def work() -> None:
        while True:
            try:
                program, wanted, wait = left.popleft()
            except IndexError:
                return
            try:
                if kept is None:
                    program.compiled = wanted.recipe.compile()
                else:
                    program.compiled, program.was_kept = kept.get(wanted, wait)
            except Busy:
                left.append((program, wanted, True))
                continue
            except BaseException:
                left.clear()
                raise
            _log(program, next(numbers), len(programs))

    num_threads = min(processors.available(), _MOST_COMPILING, len(programs))
    for done in [in_daemon_thread(work, "compile") for _ in range(num_threads)]:
        done.result()


def _compile_together(
    programs: Sequence[Program], sought: Sequence[Sought], kept: ExecutableCache | None
) -> None:
    """Load, in each process of the mesh, what all have of one compilation; compile the rest.

    Processes may talk to each other while they compile a program, so none may leave it out alone.
    """
    here = [" ".join(kept.compilations(wanted)) if kept else "" for wanted in sought]
    told = texts_of_all("\n".join([secrets.token_hex(8), *here]))
    rows = [text.split("\n") for text in told]
    failed = []
    for i, (program, wanted) in enumerate(zip(programs, sought, strict=True)):
        common = set.intersection(*(set(row[i + 1].split()) for row in rows))
        found = kept.load_part(wanted, max(common)) if kept and common else None
        if found is None:
            failed.append(str(i))
        else:
            program.compiled, program.was_kept = found, True
    to_compile = {int(i) for text in texts_of_all(" ".join(failed)) for i in text.split()}
    name = rows[0][0]
    for i, (program, wanted) in enumerate(zip(programs, sought, strict=True)):
        if i in to_compile:
            program.was_kept = False
            program.compiled = kept.compile_part(wanted, name) if kept else wanted.recipe.compile()
        _log(program, i + 1, len(programs))


def _log(program: Program, number: int, count: int) -> None:
    done = "loaded" if program.was_kept else "compiled"
    log.info("%s %d/%d %s", done, number, count, program.name)


def abstract_like(tree: Any) -> Any:
    """ShapeDtypeStructs (shape, dtype, sharding) of a pytree of arrays."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def tree_bytes(tree: Any) -> int:
    """Bytes over all devices, replicas counted as often as they are stored."""
    return sum(
        shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards
    )


def memory_budget_bytes(fraction: float, devices: Sequence[jax.Device]) -> int:
    """Memory that this process may fill with weights, pages and scratch, over all its devices.

    On CPU the virtual devices share what is free in the host or the container, less what other
    workers there have promised to take (model/promises.py): call in a turn.
    """
    if not 0.0 < fraction <= 1.0:
        raise ModelError(f"--mem-fraction-static must be in (0, 1], got {fraction}")
    if devices[0].platform == "cpu":
        free, promised = available_bytes(), PROMISES.outstanding_bytes()
        if promised > free // 2:
            log.info("other workers of this host will take %s of %s", mib(promised), mib(free))
        return int(max(free - promised, 0) * fraction)
    stats = [device.memory_stats() or {} for device in devices]
    return int(min(s.get("bytes_limit", 0) for s in stats) * fraction) * len(devices)


def steady(number: int) -> int:
    """The number, or up to a ninth less: the same result for numbers that are nearly the same.

    Programs are compiled for a pool's size, and those of an earlier start can be used for no other.
    """
    step = 1 << max(number.bit_length() - 4, 0)
    return number // step * step


@dataclass(frozen=True)
class MemoryPlan:
    """How memory is divided, over all devices of the mesh that this process has."""

    budget_bytes: int
    weights_bytes: int
    scratch_bytes: int
    page_bytes: int  # of one page of every group and data-parallel rank
    num_pages: int  # of each rank
    num_ranks: int = 1
    num_groups: int = 1

    def __str__(self) -> str:
        pages = _pages(self.num_pages, self.page_bytes, self.num_ranks, self.num_groups)
        return (
            f"weights {mib(self.weights_bytes)}, scratch {mib(self.scratch_bytes)}, "
            f"{pages}, of a budget of {mib(self.budget_bytes)}"
        )


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _pages(num_pages: int, page_bytes: int, num_ranks: int, num_groups: int) -> str:
    of_groups = f" of each of {num_groups} groups of layers" if num_groups > 1 else ""
    each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
    return f"{num_pages} pages{of_groups}{each} {mib(num_pages * page_bytes)}"


_SMALLER = "lower --max-total-tokens, --context-length or --max-running-requests"
_LIGHTER = "choose a smaller --dtype or --quantization or more devices (--tp-size)"


def plan_memory(
    budget_bytes: int,
    weights_bytes: int,
    scratch_bytes: int,
    page_bytes: int,
    wanted_pages: int,
    exact: bool,
    least_pages: int,
    num_ranks: int = 1,
    num_groups: int = 1,
    most_bytes: int = 0,
) -> MemoryPlan:
    """Give the pool what is left, up to wanted_pages.

    Pages are those of each rank and group; page_bytes has one of every rank and group.
    exact: the operator named the number, so less is an error. most_bytes: the budget if nothing
    else took memory. Raises ModelError when fewer than least_pages fit, and MemoryShortage where
    they would fit in most_bytes: the message has the figures and what would help.
    """
    if exact and wanted_pages < least_pages:
        raise ModelError(
            f"--max-total-tokens gives {wanted_pages} pages, one request of full context "
            f"needs {least_pages}; raise it or lower --context-length"
        )
    left = budget_bytes - weights_bytes - scratch_bytes
    fit, need = max(left // page_bytes, 0), wanted_pages if exact else least_pages
    if fit < need:
        whole = weights_bytes + scratch_bytes + need * page_bytes
        kind = MemoryShortage if whole <= most_bytes else ModelError
        raise kind(
            f"too little memory: weights {mib(weights_bytes)} + scratch {mib(scratch_bytes)} + "
            f"{_pages(need, page_bytes, num_ranks, num_groups)} do not fit in "
            f"{mib(budget_bytes)}; {_SMALLER if weights_bytes < budget_bytes else _LIGHTER}, or "
            "raise --mem-fraction-static"
        )
    return MemoryPlan(
        budget_bytes,
        weights_bytes,
        scratch_bytes,
        page_bytes,
        min(fit, wanted_pages),
        num_ranks,
        num_groups,
    )
