"""Everything worth knowing about a device in one command, for a machine that is there for minutes.

    python -m bench.gpu_check               all parts, in order
    python -m bench.gpu_check --only steps  one part (repeat for more)

Each part runs in a process of its own with a time limit, so that it has the device's memory to
itself and cannot take the others along. Rows are appended as they are measured, by default to
bench/results/gpu_check.jsonl on an accelerator and nowhere on a CPU, where the demo shape stands
in for the large one.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.report import Report
from bench.shapes import SHAPES, Shape
from bench.surroundings import ROOT, describe

# Seconds each part may take; together under eight minutes.
LIMITS_S = {
    "ceilings": 30,
    "goldens": 80,
    "backends": 60,
    "steps": 150,
    "kernels": 60,
    "pages": 30,
    "serving": 65,
}
STOP_TIMEOUT_S = 10.0
RESULTS = ROOT / "bench" / "results" / "gpu_check.jsonl"


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every part asked for ended well."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--only", action="append", choices=tuple(LIMITS_S), help="may be repeated")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: qwen3-30b-a3b, CPU: demo")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append rows here")
    parser.add_argument("--budget-s", type=float, default=0.4, help="for each measurement")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    parts = args.only or list(LIMITS_S)
    if args.inside:
        return _run_inside(parts[0], args)
    failed = [part for part in parts if not _run_apart(part, args)]
    print(f"gpu_check: {len(parts) - len(failed)} of {len(parts)} parts ended well")
    if failed:
        print(f"gpu_check: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run_apart(part: str, args: argparse.Namespace) -> bool:
    command = [sys.executable, "-m", "bench.gpu_check", "--inside", "--only", part]
    command += ["--budget-s", str(args.budget_s)]
    if args.shape:
        command += ["--shape", args.shape]
    if args.json:
        command += ["--json", str(args.json)]
    print(f"--- {part} (at most {LIMITS_S[part]} s)", flush=True)
    start_s = time.monotonic()
    environment = dict(os.environ)
    if part == "serving":  # the workers are processes of their own and share the device
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    code = run_limited(command, environment, LIMITS_S[part])
    if code is None:
        print(f"gpu_check: {part} was stopped after {LIMITS_S[part]} s", file=sys.stderr)
        return False
    print(f"--- {part}: {time.monotonic() - start_s:.1f} s, exit {code}", flush=True)
    return code == 0


def run_limited(command: list[str], environment: dict[str, str], limit_s: float) -> int | None:
    """Exit status of a command, or None when it had to be stopped, with all that it started."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _run_inside(part: str, args: argparse.Namespace) -> int:
    import jax

    on_cpu = jax.devices()[0].platform == "cpu"
    path = args.json or (None if on_cpu else RESULTS)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    if not on_cpu:
        # Programs and what autotuning found are kept for the parts that follow.
        jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
    shape = SHAPES[args.shape or ("demo" if on_cpu else "qwen3-30b-a3b")]
    report = Report("gpu_check", describe(with_jax=True), 0, path)
    good = PARTS[part](report, shape, args.budget_s)
    return 0 if good else 1


def _ceilings(report: Report, shape: Shape, budget_s: float) -> bool:
    from bench.ceilings import measure_ceilings

    print(report.surroundings)
    measure_ceilings(report, shape.dtype, budget_s)
    return True


def _goldens(report: Report, shape: Shape, budget_s: float) -> bool:
    from bench.goldens import check_goldens

    return check_goldens(report)


def _backends(report: Report, shape: Shape, budget_s: float) -> bool:
    from bench.backends import compare_backends
    from bench.floors import Ceilings
    from bench.kernels import KernelBench

    compare_backends(report, KernelBench(report, shape, Ceilings(1.0, 1.0), budget_s))
    return True


def _kernels(*parts: str) -> Callable[[Report, Shape, float], bool]:
    def run(report: Report, shape: Shape, budget_s: float) -> bool:
        from bench import kernels

        kernels.run(report, shape, parts, budget_s)
        return True

    return run


def _serving(report: Report, shape: Shape, budget_s: float) -> bool:
    """Both roles on the one device, the demo model end to end over HTTP."""
    from bench.serve import Slo, load, started_server
    from bench.workload import WorkloadConfig

    arguments = ["--mem-fraction-static", "0.3", "--max-running-requests", "16"]
    config = WorkloadConfig(num_requests=32, input_tokens=64, output_tokens=32, concurrency=8)
    with started_server(arguments) as server:
        traces = load(report, server, "demo 64/32 x8", config, Slo(), timeout_s=30, warm_up=2)
    return all(trace.ok for trace in traces)


PARTS: dict[str, Callable[[Report, Shape, float], bool]] = {
    "ceilings": _ceilings,
    "goldens": _goldens,
    "backends": _backends,
    "steps": _kernels("decode", "prefill"),
    "kernels": _kernels("attention", "experts", "sampling"),
    "pages": _kernels("pages"),
    "serving": _serving,
}
assert PARTS.keys() == LIMITS_S.keys()


if __name__ == "__main__":
    sys.exit(main())
