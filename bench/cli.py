"""`kvferry bench ...`: one subcommand per benchmark; rows go to the screen and to --json FILE.

jax is imported only by the benchmarks that need it, so that the load client starts at once.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from bench.arguments import (
    INT32_MAX,
    INT64_MAX,
    api_key,
    at_least,
    moderate,
    numbers,
    server_args,
    up_to,
)
from bench.dummy_model import WRITABLE
from bench.report import BadRows, Report, Row, compare, differences, format_changes, read_rows
from bench.routing_cost import LENGTHS
from bench.shapes import KERNEL_PARTS, SHAPES
from bench.surroundings import describe
from model.processors import take_threads
from serving.demo import demo_model_path
from transfer import flags, open_files
from transfer.errors import ConfigError

ROUTING_PARTS = (*LENGTHS, "registry", "processes")


class _HelpWithDefaults(argparse.HelpFormatter):
    """Adds defaults to help texts that do not say them, except those that mean nothing given."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help
        if not text or "default:" in text or isinstance(default, bool | None):
            return text
        if default in ("", (), argparse.SUPPRESS):
            return text
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        return f"{text} (default: {str(default).replace('%', '%%')})"


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    """Add every benchmark, `compare` and `plot`. The choice lands in `bench_command`."""
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    add = partial(commands.add_parser, formatter_class=_HelpWithDefaults)
    kernels = add("kernels", help="time device work against its lower bound, with random weights")
    transfer = add("transfer", help="time the transfer of pages between two processes")
    serve = add("serve", help="load a server over HTTP: TTFT, TPOT, ITL, goodput")
    frontend = add("frontend", help="measure the HTTP front end with many streams and no model")
    routing = add("routing", help="simulate how prompts are given to workers and ranks")
    comparing = add("compare", help="say what is better or worse in a second file of rows")
    plotting = add("plot", help="draw rows as an SVG")
    for command in (kernels, transfer, serve, frontend, routing):
        command.add_argument("--json", type=Path, metavar="FILE", help="append rows to FILE")
    for command in (kernels, serve, routing):  # the others draw no random numbers
        command.add_argument(
            "--seed", type=up_to(INT64_MAX), default=0, help="seed of random numbers"
        )
    _add_kernels(kernels)
    _add_transfer(transfer)
    _add_serve(serve)
    _add_frontend(frontend)
    _add_routing(routing)
    comparing.add_argument("before", type=Path, help="file of rows to compare with")
    comparing.add_argument("after", type=Path, help="file of rows that may be better or worse")
    comparing.add_argument(
        "--tolerance",
        type=at_least(0, float),
        default=0.05,
        help="relative change that counts as noise",
    )
    comparing.add_argument(
        "--fail-on-worse", action="store_true", help="exit 1 if a row is worse or missing"
    )
    plotting.add_argument(
        "what", choices=("frontend",), metavar="BENCHMARK", help="the benchmark to draw: frontend"
    )
    plotting.add_argument("rows", type=Path, metavar="RESULTS.jsonl", help="its rows")
    plotting.add_argument(
        "--out", type=Path, required=True, metavar="FILE.svg", help="where to write the picture"
    )


_BUDGET_S = at_least(0.001, float)
_REPEATED = "may be repeated; default: all"


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        default="demo",
        choices=sorted(SHAPES),
        metavar="SHAPE",
        help=f"shape of the model: {', '.join(sorted(SHAPES))}",
    )
    parser.add_argument(
        "--only", action="append", choices=KERNEL_PARTS, help=f"part to time; {_REPEATED}"
    )
    parser.add_argument("--budget-s", type=_BUDGET_S, default=0.5, help="seconds per measurement")


def _add_transfer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", action="append", metavar="WORKLOAD", help=f"small, a, b or c; {_REPEATED}"
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=("shm", "tcp", "nixl"),
        help="may be repeated; default: shm and tcp",
    )
    parser.add_argument("--budget-s", type=_BUDGET_S, default=1.0, help="seconds per measurement")
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        default=1,
        help="times to measure everything; rows are medians over them",
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    served = parser.add_mutually_exclusive_group()
    served.add_argument("--url", help="URL of the server to load; without it one is started")
    served.add_argument(
        "--model-path", type=flags.path, help="checkpoint folder of the server to start"
    )
    served.add_argument(
        "--shape",
        choices=sorted(WRITABLE),
        metavar="SHAPE",
        help=f"serve this shape with random weights: {', '.join(WRITABLE)}",
    )
    parser.add_argument(
        "--api-key",
        type=api_key,
        default=os.environ.get(flags.API_KEY_ENV, ""),
        help=f"key to send as a bearer token; default: ${flags.API_KEY_ENV}",
    )
    parser.add_argument(
        "--server-args", type=server_args, default="", help="more flags of `kvferry up`, quoted"
    )
    _add_requests(parser)
    parser.add_argument(
        "--slo-ttft-ms", type=moderate, help="longest TTFT of requests that goodput counts"
    )
    parser.add_argument(
        "--slo-tpot-ms", type=moderate, help="longest TPOT of requests that goodput counts"
    )
    parser.add_argument(
        "--timeout-s", type=moderate, default=600.0, help="seconds a request may take"
    )
    parser.add_argument(
        "--warm-up",
        type=up_to(INT32_MAX),
        default=2,
        help="requests with other tokens to send first",
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-requests",
        type=numbers,
        default=(64,),
        metavar="N[,N...]",
        help="requests of each case: one number, or one for each --concurrency",
    )
    parser.add_argument("--input-tokens", "--isl", type=int, default=512, help="tokens of a prompt")
    parser.add_argument(
        "--output-tokens", "--osl", type=int, default=128, help="tokens of an answer"
    )
    parser.add_argument(
        "--spread", type=float, default=0.0, help="0.5: lengths are 0.5 to 1.5 times those given"
    )
    parser.add_argument(
        "--shared-prefix-tokens", type=int, default=0, help="first tokens that prompts share"
    )
    parser.add_argument("--num-prefixes", type=int, default=1, help="number of them, used in turn")
    parser.add_argument(
        "--lora-name",
        nargs="+",
        default=(),
        metavar="NAME",
        help="adapters that requests name, in turn; none: the server's first model",
    )
    parser.add_argument("--rate", type=moderate, help="requests per second, as Poisson arrivals")
    parser.add_argument(
        "--concurrency",
        type=numbers,
        default=(8,),
        metavar="N[,N...]",
        help="requests in flight if there is no --rate; several numbers are cases that run one "
        "after the other on one server",
    )
    parser.add_argument(
        "--vocab-size", type=int, help="prompts have ids below it; default: the shape's, or 1000"
    )
    parser.add_argument(
        "--repeat-token",
        type=int,
        metavar="ID",
        help="bias answers to this token, so that every draft is right",
    )


def _add_frontend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-path", type=flags.path, default=demo_model_path(), help="folder of the tokenizer"
    )
    parser.add_argument(
        "--server-args",
        type=server_args,
        default="",
        help="more flags of `kvferry serve`, quoted, where it is measured",
    )
    parser.add_argument("--design", action="append", help="naive, all, ...; repeatable")
    parser.add_argument("--sglang-python", metavar="PATH", help="a Python that has SGLang")
    parser.add_argument("--vllm-python", metavar="PATH", help="a Python that has vLLM")
    parser.add_argument("--streams", type=int, action="append", help="streams at once; repeatable")
    parser.add_argument(
        "--interval",
        type=int,
        action="append",
        help="tokens per event of the design `all`; repeatable",
    )
    parser.add_argument("--pace", action="append", help="saturated, paced, ...; repeatable")
    parser.add_argument(
        "--step-ms",
        type=moderate,
        default=50.0,
        help="milliseconds from step to step at the pace `paced`",
    )
    parser.add_argument(
        "--overload-step-ms", type=moderate, default=12.0, help="the same at the pace `overload`"
    )
    parser.add_argument(
        "--output-tokens", "--osl", type=int, default=128, help="tokens of a stream"
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds of each cell; default: 3 at `saturated`, else 1"
    )
    parser.add_argument(
        "--tokens", type=int, default=1 << 16, help="tokens, about, of each round that is not paced"
    )


def _add_routing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=ROUTING_PARTS, help=_REPEATED)
    parser.add_argument(
        "--seconds",
        type=at_least(1, float),
        default=10.0,
        help="seconds that each load of the registry lasts",
    )
    parser.add_argument(
        "--num-requests", type=at_least(1), default=2000, help="requests of a simulated run"
    )
    parser.add_argument("--seeds", type=at_least(1), default=5, help="runs of each, from --seed on")


def run(args: argparse.Namespace) -> int:
    """Run what the arguments of `add_subcommands` chose; returns the exit status."""
    try:
        return _run(args)
    except (ValueError, OSError, RuntimeError, ConfigError) as error:
        named = isinstance(error, BadRows | OSError | ConfigError)
        if args.bench_command == "kernels" and not named:
            raise  # an error of the device needs its traceback
        print(f"kvferry bench {args.bench_command}: {error}", file=sys.stderr)
        if isinstance(error, BrokenPipeError):
            _let_go(sys.stdout)
        return 2 if isinstance(error, ValueError | ConfigError) else 1


def _run(args: argparse.Namespace) -> int:
    """As `run`, but raises. Errors of arguments are ValueError and ConfigError."""
    if args.bench_command == "compare":
        return _compare(args)
    if args.bench_command == "plot":
        from bench.plot_frontend import draw

        with _named_by_an_argument():
            draw(read_rows(args.rows), args.out)
        return 0
    needs_jax = args.bench_command == "kernels"
    if needs_jax:  # as many as a worker would take
        take_threads(0, SHAPES[args.shape].cfg.hidden_size)
    surroundings = describe(needs_jax)
    with _named_by_an_argument():
        report = Report(args.bench_command, surroundings, getattr(args, "seed", 0), args.json)
    if args.bench_command == "kernels":
        from bench import kernels

        kernels.run(report, SHAPES[args.shape], args.only or KERNEL_PARTS, args.budget_s)
        return 0
    if args.bench_command == "transfer":
        from bench import transfer

        names, backends = args.only or transfer.WORKLOADS, args.backend or transfer.BACKENDS
        transfer.run(report, [*names], args.budget_s, backends, args.rounds)
        return 0
    if args.bench_command == "frontend":
        from bench import frontend

        return frontend.run(args, report)
    if args.bench_command == "routing":
        return _routing(args, report)
    from bench import serve

    return serve.run(args, report)


@contextlib.contextmanager
def _named_by_an_argument() -> Iterator[None]:
    """Have a file that cannot be opened count as an argument that cannot be used."""
    try:
        yield
    except OSError as error:
        raise ConfigError(str(error)) from error


def _routing(args: argparse.Namespace, report: Report) -> int:
    from bench import routing, routing_processes, routing_registry

    only = args.only or ROUTING_PARTS
    simulated = [lengths for lengths in LENGTHS if lengths in only]
    routing.run(report, simulated, args.num_requests, args.seeds)
    if "registry" in only:
        routing_registry.run(report, args.seconds)
    if "processes" in only:
        routing_processes.run(report, args.seeds)
    return 0


def _compare(args: argparse.Namespace) -> int:
    before, after = (_some_rows(path) for path in (args.before, args.after))
    changes = compare(before, after, args.tolerance)
    _show(format_changes(changes), sys.stdout)
    for said in differences(before, after):
        _show(f"not alike: {said}", sys.stderr)
    worse = any(change.verdict in ("worse", "only before") for change in changes)
    return 1 if worse and args.fail_on_worse else 0


def _show(text: str, stream: TextIO) -> None:
    """Print to somebody who may stop reading, as `head` does: the verdict stays the exit status."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        _let_go(stream)


def _let_go(stream: TextIO) -> None:
    """If nobody reads a stream any more, write to nowhere: the interpreter flushes it at exit."""
    try:
        stream.flush()
    except BrokenPipeError:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _some_rows(path: Path) -> list[Row]:
    """The rows of a file. Raises BadRows if it has none: an empty comparison would always pass."""
    with _named_by_an_argument():
        rows = read_rows(path)
    if not rows:
        raise BadRows(f"{path} has no rows")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m bench ...`."""
    parser = flags.Parser(prog="kvferry bench", description="Measure and compare.")
    add_subcommands(parser)
    args = parser.parse_args(argv)
    open_files.raise_limit()
    return run(args)
