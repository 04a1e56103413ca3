"""Checks and measures a device in one command, for a machine that is available for minutes only.

    python -m bench.gpu_check               all parts, in order
    python -m bench.gpu_check --only steps  one part (repeat for more)

Each part runs in a process of its own with a time limit, so that it has the device's memory to
itself and cannot take down the others. Parts that only check numbers run beside each other; parts
that are timed run alone. The last three parts measure other shapes (steps, then what they are made
of) in the time that is left, and leave out what there is no time for. Rows are appended as they are
measured, by default to bench/results/gpu_check.jsonl on an accelerator and nowhere on a CPU, where
demo shapes stand in for the large ones. The most telling rows are printed again at the end. Batches
whose pages do not fit beside the weights are left out.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.arguments import at_least
from bench.endings import end_with, exit_with, lifeline
from bench.gpu_parts import OTHER_SHAPES, PARTS, shape_of
from bench.gpu_summary import summary
from bench.report import BadRows, Report, Row, read_rows
from bench.shapes import SHAPES
from bench.surroundings import ROOT, describe
from bench.timing import Allowance
from model.errors import ModelError

# Seconds that each part may take, and all together. Most take less than their limit, and leave the
# rest to the last parts, which measure what matters most first.
LIMITS_S = {
    "ceilings": 30,
    "goldens": 150,
    "goldens-bfloat16": 150,
    "backends": 150,
    "steps": 100,
    "kernels": 60,
    "pages": 30,
    "profile": 60,
    "serving": 100,
    "qwen3-30b-a3b-fp8": 90,
    "deepseek-v2-lite": 90,
    "gpt-oss-20b": 90,
}
TOTAL_S = 460.0  # under eight minutes with a part that has to be stopped
LEAST = 2 / 3  # of its limit: a part is not begun with less time left
ENDING_S = 10.0  # this long before its limit a part begins nothing more
STOP_TIMEOUT_S = 10.0
# Parts that run beside each other, with the share of the device's memory that each has then.
BESIDE = {"goldens": 0.04, "goldens-bfloat16": 0.04, "backends": 0.82}
ALONE = 0.92
# The variables with a process's share, of which JAX takes one: where both are set it finds no GPU,
# and computes on the CPU. The second is deprecated.
SHARE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
RESULTS = ROOT / "bench" / "results" / "gpu_check.jsonl"
assert PARTS.keys() == LIMITS_S.keys()


def main(argv: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """Returns 0 when every part that was begun ended well and every part of --only was begun."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=tuple(LIMITS_S), help="may be repeated")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="for parts not named after a shape")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append rows here")
    parser.add_argument(
        "--budget-s",
        type=at_least(0.001, float),
        default=0.4,
        help="seconds per measurement (default: 0.4)",
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=TOTAL_S, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lifeline", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once, even while a program is compiled
        if args.lifeline is not None:
            end_with(args.lifeline)
        return _run_inside(args.only[0], args, Allowance(clock() + args.limit_s, clock))
    path = args.json or RESULTS
    try:
        if args.json is not None:
            args.json.open("a", encoding="utf-8").close()
        known = len(_rows(path))
    except (BadRows, OSError) as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        args.scratch = Path(folder) / "rows.jsonl"
        parts = [part for part in LIMITS_S if part in (args.only or LIMITS_S)]
        codes = _run_all(parts, args, clock)
        rows = [*_rows(path)[known:], *_rows(args.scratch)]
    good = [part for part, code in codes.items() if code == 0]
    print(f"gpu_check: {len(good)} of {len(parts)} parts ended well", flush=True)
    failed = [part for part in parts if part not in good and (part in codes or args.only)]
    if failed:
        print(f"gpu_check: failed: {', '.join(failed)}", file=sys.stderr, flush=True)
    print(summary(rows), flush=True)
    return 1 if failed else 0


def _rows(path: Path) -> list[Row]:
    return read_rows(path) if path.exists() else []


def _run_all(
    parts: Sequence[str], args: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, int | None]:
    """Exit status of every part that was begun; None if it had to be stopped."""
    end_s = clock() + TOTAL_S
    stages = stages_of(parts)
    codes: dict[str, int | None] = {}
    for number, stage in enumerate(stages):
        limit_s = limit_of(stage, end_s - clock(), len(stages) - number)
        if not limit_s:
            for part in stage:
                print(f"gpu_check: {part} was not begun: no time is left", flush=True)
            continue
        print(f"--- {', '.join(stage)} (at most {limit_s:.0f} s)", flush=True)
        alone = len(stage) == 1
        commands = {part: _command(part, args, limit_s - ENDING_S, alone) for part in stage}
        for part, code in run_limited(commands, limit_s).items():
            codes[part] = code
            if code is None:
                said = f"gpu_check: {part} was stopped after {limit_s:.0f} s"
                print(said, file=sys.stderr, flush=True)
    return codes


def stages_of(parts: Sequence[str]) -> list[list[str]]:
    """Parts in the order in which they run; the parts of one list run beside each other."""
    beside = [part for part in parts if part in BESIDE]
    stages = [beside if part in BESIDE else [part] for part in parts]
    return [stage for number, stage in enumerate(stages) if stage not in stages[:number]]


def limit_of(stage: Sequence[str], left_s: float, to_come: int) -> float:
    """Seconds that these parts may take; 0 when too little time is left to begin them.

    to_come: how many stages are left, this one included. Those of other shapes share the time left.
    """
    limit_s = float(max(LIMITS_S[part] for part in stage))
    least_s = LEAST * limit_s
    if stage[0] in OTHER_SHAPES:
        limit_s = min(limit_s, max(least_s, left_s / to_come))
    return min(limit_s, left_s) if left_s >= least_s else 0.0


class Command(NamedTuple):
    """The command that runs a part."""

    argv: list[str]
    environment: dict[str, str]


def _command(part: str, args: argparse.Namespace, limit_s: float, alone: bool) -> Command:
    argv = [sys.executable, "-m", "bench.gpu_check", "--inside", "--only", part]
    argv += ["--budget-s", str(args.budget_s), "--limit-s", str(limit_s)]
    argv += ["--scratch", str(args.scratch)]
    if args.shape:
        argv += ["--shape", args.shape]
    if args.json:
        argv += ["--json", str(args.json)]
    environment = dict(os.environ)
    is_told = any(environment.get(name) for name in SHARE)
    if part == "serving":  # the workers are processes of their own and share the device
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    elif not (alone and is_told):
        for name in SHARE:
            environment.pop(name, None)
        environment[SHARE[0]] = str(ALONE if alone else BESIDE[part])
    return Command(argv, environment)


def run_limited(commands: Mapping[str, Command], limit_s: float) -> dict[str, int | None]:
    """Run commands beside each other; returns exit statuses, None where one had to be stopped."""
    start_s = time.monotonic()

    def ended(process: psutil.Process) -> None:
        name = next(name for name, one in processes.items() if one.pid == process.pid)
        taken_s, code = time.monotonic() - start_s, processes[name].poll()
        print(f"--- {name}: {taken_s:.1f} s, exit {code}", flush=True)

    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(_started(command)) for name, command in commands.items()
        }
        psutil.wait_procs(processes.values(), limit_s, ended)
        return {name: process.poll() for name, process in processes.items()}


@contextlib.contextmanager
def _started(command: Command) -> Iterator[psutil.Popen]:
    """A process that ends, with all that it started, with the block or with this process.

    A server's workers have POSIX sessions of their own, and are waited for too, so that the next
    process finds the device's memory free.
    """
    with lifeline() as fd:
        argv = [*command.argv, "--lifeline", str(fd)]
        process = psutil.Popen(
            argv, env=command.environment, pass_fds=(fd,), start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                _end(process)


def _end(process: psutil.Popen) -> None:
    everyone = [*process.children(recursive=True), process]
    process.terminate()
    _, deaf = psutil.wait_procs(everyone, STOP_TIMEOUT_S)
    for one in deaf:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(deaf, STOP_TIMEOUT_S)


def _run_inside(part: str, args: argparse.Namespace, allowance: Allowance) -> int:
    import jax

    on_cpu = jax.devices()[0].platform == "cpu"
    path = args.json or (args.scratch if on_cpu else RESULTS)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    if not on_cpu and part not in BESIDE:
        # Keep programs, small ones too, and autotuning's choices for the parts that follow. Choices
        # made while other processes use the device are not reliable.
        jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    shape = shape_of(part, args.shape, on_cpu)
    if on_cpu:
        print(f"gpu_check: JAX finds no accelerator: {part} on the CPU, {shape.name}", flush=True)
    report = Report("gpu_check", describe(with_jax=True), 0, path)
    try:
        good = PARTS[part](report, shape, args.budget_s, allowance)
    except ModelError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    # From the start of the process, so with the time to load the interpreter and modules.
    report.add(part, "part", time.time() - psutil.Process().create_time(), "s", shapes={})
    return 0 if good else 1


if __name__ == "__main__":
    exit_with("gpu_check", main)
