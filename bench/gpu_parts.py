"""The parts of gpu_check: what each measures, with which shape. A part imports jax when it runs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bench.report import Report
from bench.shapes import SHAPES, Shape
from bench.timing import Allowance

PROFILED = (1, 64, 256)  # slots, where a shape has them
# Parts named after their shape, each with the shape that stands in for it on a CPU.
OTHER_SHAPES = {
    "qwen3-30b-a3b-fp8": "demo-moe-fp8",
    "deepseek-v2-lite": "demo-latent",
    "gpt-oss-20b": "demo-gpt-oss",
}
Measure = Callable[[Report, Shape, float, Allowance], bool]


def shape_of(part: str, asked: str | None, on_cpu: bool) -> Shape:
    """The shape that a part measures. asked: for parts that are not named after a shape."""
    if part in OTHER_SHAPES:
        return SHAPES[OTHER_SHAPES[part] if on_cpu else part]
    return SHAPES[asked or ("demo" if on_cpu else "qwen3-30b-a3b")]


def _fitted(report: Report, shape: Shape) -> Shape:
    """The shape with the batches that fit on the device. Raises ModelError when none does."""
    import jax

    from bench.fitting import fitting

    stats = jax.devices()[0].memory_stats()
    if not stats:  # a CPU's memory is the host's
        return shape
    fitted = fitting(shape, int(stats["bytes_limit"]))
    if fitted.slots != shape.slots:
        left_out = ", ".join(str(slots) for slots in shape.slots if slots not in fitted.slots)
        print(f"{shape.name}: batches of {left_out} do not fit on the device", file=report.out)
    return fitted


def _ceilings(report: Report, shape: Shape, budget_s: float, allowance: Allowance) -> bool:
    from bench.ceilings import measure_ceilings

    print(report.surroundings)
    measure_ceilings(report, shape.dtype, budget_s)
    return True


def _goldens(dtype: str) -> Measure:
    def run(report: Report, shape: Shape, budget_s: float, allowance: Allowance) -> bool:
        from bench.goldens import check_goldens

        return check_goldens(report, dtype=dtype)

    return run


def _backends(report: Report, shape: Shape, budget_s: float, allowance: Allowance) -> bool:
    from bench.backends import compare_backends
    from bench.floors import Ceilings
    from bench.kernels import KernelBench

    shape = _fitted(report, shape)
    return compare_backends(report, KernelBench(report, shape, Ceilings(1.0, 1.0), budget_s))


def _kernels(*parts: str) -> Measure:
    def run(report: Report, shape: Shape, budget_s: float, allowance: Allowance) -> bool:
        from bench import kernels

        kernels.run(report, _fitted(report, shape), parts, budget_s, allowance)
        return True

    return run


def _profile(report: Report, shape: Shape, budget_s: float, allowance: Allowance) -> bool:
    from bench.floors import Ceilings
    from bench.kernels import KernelBench
    from bench.profile import profile_steps

    shape = _fitted(report, shape)
    bench = KernelBench(report, shape, Ceilings(1.0, 1.0), budget_s)
    slots = [slots for slots in shape.slots if slots in PROFILED] or shape.slots[-1:]
    profile_steps(bench, slots, shape.chunks[-1:])
    return True


def _other_shape(report: Report, shape: Shape, budget_s: float, allowance: Allowance) -> bool:
    """Measure the longest chunk alone, and what tells most first, as time may be short."""
    from bench.backends import compare_backends
    from bench.ceilings import measure_ceilings
    from bench.kernels import STEPS, KernelBench

    shape = replace(_fitted(report, shape), chunks=shape.chunks[-1:])
    ceilings = measure_ceilings(report, shape.dtype, budget_s)
    bench = KernelBench(report, shape, ceilings, budget_s, allowance)
    tasks: dict[str, Callable[[], bool | None]] = {
        "steps and chunk": partial(bench.measure, STEPS),
        "attention and experts": partial(bench.measure, ("attention", "experts")),
        "backends": partial(compare_backends, report, bench),
    }
    return False not in allowance.spend(tasks, report.out, lambda: bench.compiling_s)


def _serving(report: Report, shape: Shape, budget_s: float, allowance: Allowance) -> bool:
    """Serve the demo model over HTTP, with both roles on one device, in two processes and in one.

    Both servers start at once, which is mostly compiling; one is idle while the other is timed.
    """
    from bench.serve import Slo, load, started_servers
    from bench.workload import WorkloadConfig

    config = WorkloadConfig(num_requests=32, input_tokens=64, output_tokens=32, concurrency=8)
    cases = {
        "demo 64/32 x8": ["--mem-fraction-static", "0.15"],
        "demo 64/32 x8, colocated": ["--mem-fraction-static", "0.3", "--colocated"],
    }
    arguments = [[*own, "--max-running-requests", "16"] for own in cases.values()]
    traces = []
    with started_servers(arguments) as servers:
        for case, server in zip(cases, servers, strict=True):
            traces += load(report, server, case, config, Slo(), timeout_s=30, warm_up=2)
    return all(trace.ok for trace in traces)


# Parts in the order in which they run.
PARTS: dict[str, Measure] = {
    "ceilings": _ceilings,
    "goldens": _goldens("float32"),
    "goldens-bfloat16": _goldens("bfloat16"),
    "backends": _backends,
    "steps": _kernels("decode", "prefill"),
    "kernels": _kernels("attention", "experts", "sampling"),
    "pages": _kernels("pages"),
    "profile": _profile,
    "serving": _serving,
    "qwen3-30b-a3b-fp8": _other_shape,
    "deepseek-v2-lite": _other_shape,
    "gpt-oss-20b": _other_shape,
}
