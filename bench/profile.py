"""Shows where the time of a step or a chunk goes, by named scope: a trace and the program's text.

Steps and chunks are compiled without CUDA graphs, because a trace shows no single kernels in those.
On a CPU the events are those of threads, which run side by side, so their times overlap.
"""

import tempfile
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
from jax.profiler import ProfileData

from bench.hlo import parse
from bench.kernels import KernelBench, greedy_step, last_logits
from model.programs import Program, compile_all

STEPS: Final = 2  # calls that are traced
_LAYER: Final = "jit(block)/"
_AROUND: Final = {"while", "conditional", "call"}
_LOOPS: Final = {"while", "body", "cond", "closed_call"}
# No CUDA graphs: a graph of kernels would be one launch and one event.
_OPTIONS: Final = {"xla_gpu_enable_command_buffer": ""}


class Spent(NamedTuple):
    """What one scope took in one call."""

    launches: float
    seconds: float


def profile_steps(bench: KernelBench, slots: Iterable[int], chunks: Iterable[int] = ()) -> None:
    """Add rows with every scope's time and launches, for greedy steps and for chunks.

    slots: of the steps. chunks: tokens of the chunks.
    """
    cases: list[tuple[str, Program, tuple[Any, ...], dict[str, int]]] = []
    for count in slots:
        args, sizes = bench.step_args(count), {"slots": count}
        cases.append((f"step x{count}", bench.program("step", greedy_step, args), args, sizes))
    for tokens in chunks:
        args, sizes = bench.chunk_args(tokens), {"tokens": tokens}
        cases.append((f"chunk {tokens}", bench.program("chunk", last_logits, args), args, sizes))
    compile_all([program for _, program, _, _ in cases], _OPTIONS)
    for case, program, args, sizes in cases:
        for scope, (launches, seconds) in _traced(bench, program, args).items():
            shapes = {"shape": bench.shape.name, "dtype": bench.shape.dtype, **sizes}
            name = f"{bench.shape.name} {case}: {scope}"
            bench.report.add(name, "time", seconds * 1e3, "ms", shapes=shapes)
            bench.report.add(name, "launches", launches, "count", shapes=shapes)


def _traced(bench: KernelBench, program: Program, args: tuple[Any, ...]) -> dict[str, Spent]:
    """What each scope took in one call."""
    scopes = scopes_of(str(program.compiled.as_text()))

    def call() -> None:
        out, bench.pool = program(bench.params, bench.pool, *args)
        jax.block_until_ready(out)

    call()  # the first run also loads things, so it is not traced
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                call()
        return by_scope(_operations(Path(folder), scopes), scopes, STEPS)


def scopes_of(text: str) -> dict[str, str]:
    """The named scope of each instruction of a compiled program, by the instruction's name.

    "" for an instruction that only runs others: those have their own times.
    """
    computations, _ = parse(text)
    return {
        name: "" if op.kind in _AROUND else _scope(op.scope)
        for ops in computations.values()
        for name, op in ops.items()
    }


def _scope(traced: str) -> str:
    """The scope within a layer, the same for all layers, or "beside layers".

    traced: the `op_name` of the instruction.
    """
    _, within_layer, inside = traced.partition(_LAYER)
    if not within_layer:
        return "beside layers"
    # The last name is an operation; names of JAX's own functions and loops are not ours.
    names = inside.split("/")[:-1]
    own = [name for name in names if name not in _LOOPS and not name.startswith("jit(")]
    return "/".join(own) or "norms and sums"


def by_scope(
    operations: Iterable[tuple[str, float]], scopes: Mapping[str, str], steps: int
) -> dict[str, Spent]:
    """What each scope took in one step, longest first. operations: names and seconds."""
    total: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, seconds in operations:
        scope = scopes.get(name, "unknown")
        if not scope:
            continue
        of_scope = total[scope]
        of_scope[0] += 1 / steps
        of_scope[1] += seconds / steps
    found = {scope: Spent(*both) for scope, both in total.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def _operations(folder: Path, names: Container[str]) -> Iterator[tuple[str, float]]:
    """The instructions that ran, with seconds; those of accelerators, if there are any.

    names: of all instructions of the program.
    """
    # Hold the profiles: planes lie in their memory, but do not keep it alive.
    profiles = [ProfileData.from_file(str(path)) for path in folder.rglob("*.xplane.pb")]
    planes = [plane for profile in profiles for plane in profile.planes]
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in devices or planes:
        for line in plane.lines:
            for event in line.events:
                # On a device an event has the kernel's name. On a CPU most events are not
                # instructions, and to read the stats of some ends the process (jaxlib 0.11.2).
                op = dict(event.stats).get("hlo_op") if devices else event.name
                if op is not None and (devices or op in names):
                    yield str(op), event.duration_ns / 1e9
