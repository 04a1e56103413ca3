"""Everything worth knowing about a device in one command, for a machine that is there for minutes.

    python -m bench.gpu_check               all parts, in order
    python -m bench.gpu_check --only steps  one part (repeat for more)

Each part runs in a process of its own with a time limit, so that it has the device's memory to
itself and cannot take the others along. The last three are all that other parts do, for a shape
each, in the time that those have left. Rows are appended as they are measured, by default to
bench/results/gpu_check.jsonl on an accelerator and nowhere on a CPU, where demo shapes stand in for
the large ones. Batches whose pages do not fit beside the weights are left out.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from bench.report import Report
from bench.shapes import SHAPES, Shape
from bench.surroundings import ROOT, describe
from model.errors import ModelError

# Seconds each part may take, and all together. Most take less than they may: what is left is for
# those that come last, which measure what matters most first.
LIMITS_S = {
    "ceilings": 30,
    "goldens": 110,
    "backends": 60,
    "steps": 150,
    "kernels": 60,
    "pages": 30,
    "profile": 60,
    "serving": 100,
    "goldens-bfloat16": 90,
    "qwen3-30b-a3b-fp8": 90,
    "deepseek-v2-lite": 90,
    "gpt-oss-20b": 90,
}
TOTAL_S = 460.0  # under eight minutes with a part that has to be stopped
STOP_TIMEOUT_S = 10.0
PROFILED = (1, 64, 256)  # slots, where a shape has them
# Parts named after their shape, and what stands in for it on a CPU.
OTHER_SHAPES = {
    "qwen3-30b-a3b-fp8": "demo-moe-fp8",
    "deepseek-v2-lite": "demo-latent",
    "gpt-oss-20b": "demo-gpt-oss",
}
RESULTS = ROOT / "bench" / "results" / "gpu_check.jsonl"


def main(argv: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """0 when every part asked for ended well."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--only", action="append", choices=tuple(LIMITS_S), help="may be repeated")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of parts not named after theirs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append rows here")
    parser.add_argument("--budget-s", type=float, default=0.4, help="for each measurement")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    parts = args.only or list(LIMITS_S)
    if args.inside:
        return _run_inside(parts[0], args)
    end_s = clock() + TOTAL_S
    failed = [part for part in parts if not _run_apart(part, args, end_s - clock())]
    print(f"gpu_check: {len(parts) - len(failed)} of {len(parts)} parts ended well")
    if failed:
        print(f"gpu_check: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run_apart(part: str, args: argparse.Namespace, left_s: float) -> bool:
    if left_s <= 0:
        print(f"gpu_check: {part} was not begun: no time is left", file=sys.stderr)
        return False
    limit_s = min(LIMITS_S[part], left_s)
    command = [sys.executable, "-m", "bench.gpu_check", "--inside", "--only", part]
    command += ["--budget-s", str(args.budget_s)]
    if args.shape:
        command += ["--shape", args.shape]
    if args.json:
        command += ["--json", str(args.json)]
    print(f"--- {part} (at most {limit_s:.0f} s)", flush=True)
    start_s = time.monotonic()
    environment = dict(os.environ)
    if part == "serving":  # the workers are processes of their own and share the device
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    code = run_limited(command, environment, limit_s)
    if code is None:
        print(f"gpu_check: {part} was stopped after {limit_s:.0f} s", file=sys.stderr)
        return False
    print(f"--- {part}: {time.monotonic() - start_s:.1f} s, exit {code}", flush=True)
    return code == 0


def run_limited(command: list[str], environment: dict[str, str], limit_s: float) -> int | None:
    """Exit status of a command, or None when it had to be stopped, with all that it started.

    The next one finds the device's memory free: a server's workers have sessions of their own, and
    are waited for.
    """
    process = psutil.Popen(command, env=environment, start_new_session=True)
    try:
        code: int = process.wait(limit_s)
        return code
    except psutil.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            everyone = [*process.children(recursive=True), process]
            process.terminate()
            _, deaf = psutil.wait_procs(everyone, STOP_TIMEOUT_S)
            for one in deaf:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(deaf, STOP_TIMEOUT_S)


def _run_inside(part: str, args: argparse.Namespace) -> int:
    import jax

    on_cpu = jax.devices()[0].platform == "cpu"
    path = args.json or (None if on_cpu else RESULTS)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    if not on_cpu:
        # Programs and what autotuning found are kept for the parts that follow.
        jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
    shape = shape_of(part, args.shape, on_cpu)
    report = Report("gpu_check", describe(with_jax=True), 0, path)
    try:
        good = PARTS[part](report, shape, args.budget_s)
    except ModelError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    return 0 if good else 1


def shape_of(part: str, asked: str | None, on_cpu: bool) -> Shape:
    """What a part measures. asked: heeded by parts that are not named after a shape."""
    if part in OTHER_SHAPES:
        return SHAPES[OTHER_SHAPES[part] if on_cpu else part]
    return SHAPES[asked or ("demo" if on_cpu else "qwen3-30b-a3b")]


def _fitted(report: Report, shape: Shape) -> Shape:
    """The shape with what fits on the device. Raises ModelError when nothing does."""
    import jax

    from bench.kernels import fitting

    stats = jax.devices()[0].memory_stats()
    if not stats:  # a CPU's memory is the host's
        return shape
    fitted = fitting(shape, int(stats["bytes_limit"]))
    if fitted.slots != shape.slots:
        left_out = ", ".join(str(slots) for slots in shape.slots if slots not in fitted.slots)
        print(f"{shape.name}: batches of {left_out} do not fit on the device", file=report.out)
    return fitted


def _ceilings(report: Report, shape: Shape, budget_s: float) -> bool:
    from bench.ceilings import measure_ceilings

    print(report.surroundings)
    measure_ceilings(report, shape.dtype, budget_s)
    return True


def _goldens(dtype: str) -> Callable[[Report, Shape, float], bool]:
    def run(report: Report, shape: Shape, budget_s: float) -> bool:
        from bench.goldens import check_goldens

        return check_goldens(report, dtype=dtype)

    return run


def _backends(report: Report, shape: Shape, budget_s: float) -> bool:
    from bench.backends import compare_backends
    from bench.floors import Ceilings
    from bench.kernels import KernelBench

    shape = _fitted(report, shape)
    return compare_backends(report, KernelBench(report, shape, Ceilings(1.0, 1.0), budget_s))


def _kernels(*parts: str) -> Callable[[Report, Shape, float], bool]:
    def run(report: Report, shape: Shape, budget_s: float) -> bool:
        from bench import kernels

        kernels.run(report, _fitted(report, shape), parts, budget_s)
        return True

    return run


def _profile(report: Report, shape: Shape, budget_s: float) -> bool:
    from bench.floors import Ceilings
    from bench.kernels import KernelBench
    from bench.profile import profile_steps

    shape = _fitted(report, shape)
    bench = KernelBench(report, shape, Ceilings(1.0, 1.0), budget_s)
    slots = [slots for slots in shape.slots if slots in PROFILED] or shape.slots[-1:]
    profile_steps(bench, slots, shape.chunks[-1:])
    return True


def _other_shape(report: Report, shape: Shape, budget_s: float) -> bool:
    """Steps, then what they are made of, then backends: cut short, it has the most telling rows."""
    from bench.backends import compare_backends
    from bench.ceilings import measure_ceilings
    from bench.kernels import KernelBench

    shape = _fitted(report, shape)
    bench = KernelBench(report, shape, measure_ceilings(report, shape.dtype, budget_s), budget_s)
    for measure in (bench.decode, bench.prefill, bench.attention, bench.experts):
        measure()
    return compare_backends(report, bench)


def _serving(report: Report, shape: Shape, budget_s: float) -> bool:
    """Both roles on the one device, in two processes and in one: the demo model over HTTP."""
    from bench.serve import Slo, load, started_server
    from bench.workload import WorkloadConfig

    config = WorkloadConfig(num_requests=32, input_tokens=64, output_tokens=32, concurrency=8)
    traces = []
    for said, arguments in (
        ("", ["--mem-fraction-static", "0.3"]),
        (", colocated", ["--mem-fraction-static", "0.6", "--colocated"]),
    ):
        with started_server([*arguments, "--max-running-requests", "16"]) as server:
            case = f"demo 64/32 x8{said}"
            traces += load(report, server, case, config, Slo(), timeout_s=30, warm_up=2)
    return all(trace.ok for trace in traces)


PARTS: dict[str, Callable[[Report, Shape, float], bool]] = {
    "ceilings": _ceilings,
    "goldens": _goldens("float32"),
    "backends": _backends,
    "steps": _kernels("decode", "prefill"),
    "kernels": _kernels("attention", "experts", "sampling"),
    "pages": _kernels("pages"),
    "profile": _profile,
    "serving": _serving,
    "goldens-bfloat16": _goldens("bfloat16"),
    "qwen3-30b-a3b-fp8": _other_shape,
    "deepseek-v2-lite": _other_shape,
    "gpt-oss-20b": _other_shape,
}
assert PARTS.keys() == LIMITS_S.keys()


if __name__ == "__main__":
    sys.exit(main())
