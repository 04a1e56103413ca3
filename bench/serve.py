"""Loads a server over HTTP, a running one or one started for this, and reports TTFT, TPOT and ITL.

All times are stamped at the client: TTFT is from opening the request's connection to the first text
in. goodput is the rate of requests that met every SLO. Percentiles are interpolated, as numpy does
by default. ITL is from event to event, however many tokens an event has.
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from bench.client import MALFORMED, Server, Trace, get_json, stream_completion
from bench.dummy_model import flags_of, write_model
from bench.endings import lifeline, paths, words_of
from bench.report import Report
from bench.shapes import SHAPES
from bench.surroundings import Surroundings
from bench.timelines import read_timelines, report_timelines
from bench.workload import PlannedRequest, WorkloadConfig, plan_requests, plan_warm_up
from transfer.errors import ConfigError
from transfer.exit_codes import EXIT_CONFIG
from transfer.flags import API_KEY_ENV, LIFELINE_ENV

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0

UNKNOWN = "unknown"  # the device of a server of another project, or behind a proxy
_VOCAB_SIZE = 1000  # every model's is larger
_SEEDS_OF_A_CASE = 1 << 16  # between seeds of cases; smaller steps of --seed are for other runs


class NoServer(RuntimeError):
    """The server did not start or does not answer."""


@dataclass(frozen=True)
class Slo:
    """Bounds that a request must meet to count as good; None for no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met_by(self, trace: Trace) -> bool:
        """Whether the request ended well and in time."""
        if not trace.ok:
            return False
        if self.ttft_ms is not None and trace.ttft_s * 1e3 > self.ttft_ms:
            return False
        tpot_s = trace.tpot_s
        return self.tpot_ms is None or tpot_s is None or tpot_s * 1e3 <= self.tpot_ms


async def run_workload(
    server: Server,
    model: str,
    planned: list[PlannedRequest],
    config: WorkloadConfig,
    timeout_s: float,
) -> tuple[list[Trace], float]:
    """Send all planned requests; returns their traces, in order, and the seconds it all took.

    Requests are paced by arrival times when the config has a rate, otherwise by `concurrency` in
    flight. An answer of another length than was asked for counts as failed.
    """
    limit = asyncio.Semaphore(len(planned) if config.rate_per_s else config.concurrency)
    ended = 0

    async def one(request: PlannedRequest) -> Trace:
        nonlocal ended
        async with limit:
            trace = await stream_completion(server, _payload(model, request, config), timeout_s)
        trace.prompt_tokens = trace.prompt_tokens or len(request.prompt_ids)
        if trace.ok and trace.output_tokens != request.output_tokens:
            trace.error = f"{trace.output_tokens} tokens came, {request.output_tokens} were asked"
        ended += 1
        return trace

    with contextlib.suppress(OSError):  # every request will meet it again
        async with asyncio.timeout(timeout_s):
            server = await server.looked_up()
    start_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request in planned:
                # Not all beforehand: that takes time, in which the first are due already.
                left_s = start_s + request.arrival_s - time.perf_counter()
                if config.rate_per_s is not None and left_s > 0:
                    await asyncio.sleep(left_s)
                tasks.append(group.create_task(one(request)))
    except asyncio.CancelledError:
        print(f"{ended} of {len(planned)} requests had ended", file=sys.stderr)
        raise
    return [task.result() for task in tasks], time.perf_counter() - start_s


def _payload(model: str, request: PlannedRequest, config: WorkloadConfig) -> dict[str, Any]:
    """The JSON body of a request."""
    payload: dict[str, Any] = {
        "model": request.adapter or model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    if config.repeat_token is not None:
        payload["logit_bias"] = {str(config.repeat_token): 100}
    return payload


def report_traces(
    report: Report,
    case: str,
    traces: list[Trace],
    taken_s: float,
    slo: Slo,
    shapes: dict[str, Any],
) -> None:
    """Add the rows of one run. Latencies are of requests that ended well; others are counted."""
    good = [trace for trace in traces if trace.ok]

    def row(metric: str, value: float, unit: str) -> None:
        report.add(case, metric, value, unit, shapes=shapes)

    row("requests ok", len(good), "count")
    row("requests failed", len(traces) - len(good), "failed")
    if not good:
        return
    ttft = [trace.ttft_s * 1e3 for trace in good]
    tpot = [trace.tpot_s * 1e3 for trace in good if trace.tpot_s is not None]
    itl = [gap * 1e3 for trace in good for gap in trace.itl_s]
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
        if values:
            row(f"{name} p50", statistics.median(values), "ms")
            row(f"{name} p99", float(np.percentile(values, 99)), "ms")
    row("output", sum(trace.output_tokens for trace in good) / taken_s, "tok/s")
    row("input", sum(trace.prompt_tokens for trace in good) / taken_s, "tok/s")
    cached = [trace.cached_tokens for trace in good if trace.cached_tokens is not None]
    if cached:
        row("prompt tokens out of a cache", sum(cached), "count")
    row("requests", len(good) / taken_s, "req/s")
    row("goodput", sum(slo.met_by(trace) for trace in traces) / taken_s, "req/s")
    ends = max(trace.done_s for trace in good) - min(trace.sent_s for trace in good)
    row("first send to last end", ends, "s")


@contextlib.contextmanager
def started_server(arguments: list[str], api_key: str = "") -> Iterator[Server]:
    """Run `kvferry up` with these arguments on a free port until the block ends.

    api_key: the key that it asks for, whatever key the environment has; empty for none.
    If it exits before, the end of its log is printed. Raises NoServer with that when it is not
    ready in START_TIMEOUT_S, and ConfigError when it refuses the arguments, a file or this machine.
    """
    server = replace(free_address(), api_key=api_key)
    command = [*words_of("serving.launch"), "up", *arguments]
    command += ["--host", server.host, "--port", str(server.port)]
    with tempfile.TemporaryFile() as log, lifeline() as fd:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(fd,),
            env=os.environ | paths() | {LIFELINE_ENV: str(fd), API_KEY_ENV: api_key},
        )
        try:
            if not wait_ready(server, process, START_TIMEOUT_S):
                raise not_ready(" ".join(command), log, process.poll())
            with _quoted_if_it_ends(process, log):
                yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _quoted_if_it_ends(process: subprocess.Popen[bytes], log: IO[bytes]) -> Iterator[None]:
    """Print the end of a server's log if the server ends during the block, but not by Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:  # of which a terminal has told the server, too
        raise
    except BaseException:
        _quote_if_ended(process, log)
        raise
    _quote_if_ended(process, log)


def _quote_if_ended(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    if (code := process.poll()) is not None:
        print(f"the server ended (status {code}):\n{_end_of(log)}", file=sys.stderr)


@contextlib.contextmanager
def started_servers(arguments: Sequence[list[str]]) -> Iterator[list[Server]]:
    """Like `started_server`, for several that start at once. Raises NoServer if one does not."""
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(arguments)) as pool:
            starting = [pool.submit(stack.enter_context, started_server(own)) for own in arguments]
        yield [one.result() for one in starting]


def free_address() -> Server:
    """An address of this host at which nobody listens yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Server(*probe.getsockname())


def not_ready(name: str, log: IO[bytes], code: int | None = None) -> NoServer | ConfigError:
    """The error for a server that is not ready in time, with the end of its log.

    code: the exit status of one of ours that has ended.
    """
    kind = ConfigError if code == EXIT_CONFIG else NoServer
    return kind(f"{name} did not become ready:\n{_end_of(log)}")


def _end_of(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-2000:].decode(errors="replace")


def wait_ready(server: Server, process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Whether /health answers 200 in time; gives up at once when the process has ended."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            return False
        try:
            status, _ = asyncio.run(get_json(server, "/health", timeout_s=5.0))
            if status == 200:
                return True
        except OSError:
            pass  # not there yet
        time.sleep(0.2)
    return False


class ServedModel(NamedTuple):
    """max_tokens: of a prompt and its answer together; None if the server does not say."""

    name: str
    max_tokens: int | None

    def check_takes(self, config: WorkloadConfig) -> None:
        """Raises ValueError if a request of the workload may be longer than that."""
        if self.max_tokens is not None and config.most_tokens > self.max_tokens:
            raise ValueError(
                f"--input-tokens {config.input_tokens}, --output-tokens {config.output_tokens} and "
                f"--spread {config.spread}: up to {config.most_tokens} tokens together, and "
                f"{self.name} takes {self.max_tokens}"
            )


def served_model(server: Server) -> ServedModel:
    """The first model that the server lists. Raises NoServer when it lists none."""
    try:
        status, body = asyncio.run(get_json(server, "/v1/models", timeout_s=10.0))
        if status == HTTPStatus.UNAUTHORIZED:
            raise NoServer(f"/v1/models answered {status}: give the server's key as --api-key")
        found = body["data"][0]
        most = found.get("max_model_len")
        return ServedModel(str(found["id"]), most if isinstance(most, int) else None)
    except OSError as error:
        raise NoServer(f"{server.address} does not answer: {error}") from error
    except MALFORMED as error:
        raise NoServer(f"/v1/models answered {status} without a model") from error


def name_devices(report: Report, server: Server) -> None:
    """Have rows from now on name the server's accelerators, if it has any, or UNKNOWN."""
    devices = devices_of(server)
    if devices:
        report.surroundings = replace(report.surroundings, device=devices)


def name_surroundings(report: Report, server: Server) -> None:
    """Have rows from now on name what a server that runs already says of itself, nothing of here.

    It says neither its commit nor its versions.
    """
    devices = ", ".join(sorted(_told_devices(server))) or UNKNOWN
    report.surroundings = Surroundings(UNKNOWN, devices, {"server": UNKNOWN})


def devices_of(server: Server) -> str:
    """The accelerators that a server's workers report; "" if they have none, UNKNOWN if unsaid."""
    if not (found := _told_devices(server)):
        return UNKNOWN
    return ", ".join(sorted(devices for devices in found if not devices.endswith(" x cpu")))


def _told_devices(server: Server) -> set[str]:
    """What the workers report; empty if the server does not say."""
    try:
        _, body = asyncio.run(get_json(server, "/get_server_info", timeout_s=10.0))
        return {str(worker["devices"]) for worker in body["workers"]}
    except (OSError, *MALFORMED):
        return set()


def parse_url(url: str, api_key: str) -> Server:
    """A server from http://host:port. Raises ValueError for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"--url must be http://host:port, got {url!r}: {error}") from error
    if parts.scheme != "http" or not parts.hostname or port == 0:
        raise ValueError(f"--url must be http://host:port, got {url!r}")
    if parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"--url must be http://host:port and nothing else, got {url!r}")
    return Server(parts.hostname, port or 80, api_key)


def load(
    report: Report,
    server: Server,
    case: str,
    config: WorkloadConfig,
    slo: Slo,
    timeout_s: float,
    warm_up: int,
    server_said: str = "",
) -> list[Trace]:
    """Warm up, then run the workload and report it. server_said: what rows say of the server.

    Raises ValueError for a negative warm_up or requests too long, NoServer when there is no server.
    """
    if warm_up < 0:
        raise ValueError(f"warm_up must be at least 0, got {warm_up}")
    served = served_model(server)
    served.check_takes(config)
    model = served.name
    name_devices(report, server)
    if warm_up:
        first = plan_warm_up(config, warm_up)
        warming, _ = asyncio.run(run_workload(server, model, first, config, timeout_s))
        if errors := [trace.error or "no token came" for trace in warming if not trace.ok]:
            failed = f"{len(errors)} of {warm_up} warm-up requests failed"
            print(f"{failed}: {errors[0]}", file=sys.stderr)
    planned = plan_requests(config)
    traces, taken_s = asyncio.run(run_workload(server, model, planned, config, timeout_s))
    said = {"slo": asdict(slo), "model": model, "server": server_said, "warm_up": warm_up}
    shapes = asdict(config) | said | {"timeout_s": timeout_s}
    report_traces(report, case, traces, taken_s, slo, shapes)
    found = asyncio.run(read_timelines(server, [trace.request_id for trace in traces if trace.ok]))
    report_timelines(report, case, found, shapes)
    for error in sorted({trace.error for trace in traces if trace.error})[:5]:
        print(f"failed: {error}", file=sys.stderr)
    return traces


def configs_of(args: argparse.Namespace) -> list[WorkloadConfig]:
    """A workload for each --concurrency, with prompts of its own. Raises ValueError."""
    several, counts = args.concurrency, args.num_requests
    if args.rate is not None and len(several) > 1:
        raise ValueError(f"--rate takes one --concurrency, of no effect, got {len(several)}")
    if len(counts) not in (1, len(several)):
        raise ValueError(
            f"--num-requests must be one number, or {len(several)} as --concurrency has, "
            f"got {len(counts)}"
        )
    counts = counts * len(several) if len(counts) == 1 else counts
    usual = SHAPES[args.shape].cfg.vocab_size if args.shape else _VOCAB_SIZE
    return [
        WorkloadConfig(
            num_requests=count,
            input_tokens=args.input_tokens,
            output_tokens=args.output_tokens,
            spread=args.spread,
            shared_prefix_tokens=args.shared_prefix_tokens,
            num_prefixes=args.num_prefixes,
            lora_name=tuple(args.lora_name),
            rate_per_s=args.rate,
            concurrency=concurrency,
            vocab_size=usual if args.vocab_size is None else args.vocab_size,
            seed=args.seed + place * _SEEDS_OF_A_CASE,
            repeat_token=args.repeat_token,
        )
        for place, (concurrency, count) in enumerate(zip(several, counts, strict=True))
    ]


def case_of(config: WorkloadConfig, server: str) -> str:
    """The case name in rows of this workload. server: added to it to tell servers apart."""
    paced = f"rate {config.rate_per_s}" if config.rate_per_s else f"x{config.concurrency}"
    repeating = "" if config.repeat_token is None else " repeating"
    prefixes = f" {config.num_prefixes} prefixes" if config.num_prefixes > 1 else ""
    adapters = f" {len(config.lora_name)} adapters" if config.lora_name else ""
    lengths = f"{config.input_tokens}/{config.output_tokens}"
    return f"{lengths} {paced}{repeating}{prefixes}{adapters}{server}"


def run(args: argparse.Namespace, report: Report) -> int:
    """Load the server named or started. 1 when any request failed."""
    configs = configs_of(args)
    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    is_ours = args.url is None  # "", as from a variable that is not set, is refused as a URL
    if args.server_args and not is_ours:
        raise ValueError("--server-args is for a server that is started, and --url names another")
    told = [args.shape, shlex.join(args.server_args)] if is_ours else []
    apart = "".join(f", {text}" for text in told if text)  # tells the case from that without flags
    ok = True
    with contextlib.ExitStack() as stack:
        if is_ours:
            server, said = stack.enter_context(_started(args, report, f"start to ready{apart}"))
        else:
            server, said = parse_url(args.url, args.api_key), args.url
            name_surroundings(report, server)
        for config in configs:
            case = case_of(config, apart)
            traces = load(report, server, case, config, slo, args.timeout_s, args.warm_up, said)
            ok = ok and all(trace.ok for trace in traces)
    return 0 if ok else 1


@contextlib.contextmanager
def _started(args: argparse.Namespace, report: Report, case: str) -> Iterator[tuple[Server, str]]:
    """The server that the arguments ask for, and what rows say of it; reports its time to ready."""
    arguments, more = args.server_args, []
    with tempfile.TemporaryDirectory() as parent:
        if args.shape:
            shape, folder = SHAPES[args.shape], Path(parent) / args.shape  # the model's name
            folder.mkdir()
            write_model(shape, folder)
            more = flags_of(shape, folder)
        elif args.model_path:
            more = ["--model-path", str(args.model_path)]
        said = f"up {shlex.join([*arguments, *more])}".strip().replace(f"{parent}/", "")
        start_s = time.perf_counter()
        with started_server([*arguments, *more], args.api_key) as server:
            ready_s = time.perf_counter() - start_s
            name_devices(report, server)
            report.add(case, "ready", ready_s, "s", shapes={"server": said})
            yield server, said
