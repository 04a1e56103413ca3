"""The HTTP front end alone: a real API process behind workers without a model, beside its floor.

Two cores: the server under test has the first, everything that loads it the last. Each cell is one
fresh API process (`python -m serving`), one synthetic prefill and decode worker and one client;
then the same with bench/frontend_floor in the server's place. Every token of every stream is
accounted for: one that is lost or doubled ends the run.
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.client import Server
from bench.frontend_plan import Cell, tokens_of
from bench.report import Report
from bench.serve import NoServer, parse_url, wait_ready
from bench.timing import percentile
from transfer.flags import LIFELINE_ENV, NOTIFY_ENV, TOKEN_ENV

_TOKEN = "token of a cluster for one benchmark"
_START_TIMEOUT_S = 60.0
_WARM_UP_STREAMS = 64
_PACED_SPACING_S = 1e-3  # requests of paced cells: fewer a second than the server can take in
_PAYLOAD = {
    "messages": [{"role": "user", "content": "Tell me of the harbour."}],
    "stream": True,
    "temperature": 0,
    "ignore_eos": True,
}


class Failed(RuntimeError):
    """A process of the benchmark ended, or a stream was not what it should be."""


class Child:
    """A process of this benchmark that answers lines of JSON with lines of JSON."""

    def __init__(self, module: str, sockets: Sequence[socket.socket], core: int) -> None:
        numbers = [sock.fileno() for sock in sockets]
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=numbers,
        )
        os.sched_setaffinity(self._process.pid, {core})

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, **values: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Its next line. Raises Failed when it has an error to tell, or ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"{self._module} ended")
        values: dict[str, Any] = json.loads(line)
        if "error" in values:
            raise Failed(values["error"])
        return values

    def ask(self, **values: Any) -> dict[str, Any]:
        """Tell and hear."""
        self.tell(**values)
        return self.hear()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Measured:
    """Sums and samples over the rounds of a cell. Times in seconds; cpu of one process each."""

    tokens: int = 0  # after each stream's first
    pieces: int = 0
    taken_s: float = 0.0
    server_cpu_s: float = 0.0
    load_cpu_s: float = 0.0
    reads: int = 0
    ttft_s: list[float] = field(default_factory=list)
    lag_s: list[np.ndarray] = field(default_factory=list)
    piece_bytes: int = 0
    peak_rss_mb: float = 0.0

    def add(self, cell: Cell, heard: dict[str, Any], told: dict[str, Any], path: str) -> None:
        """One round. heard: of the client; told: of the engine."""
        table = np.load(path)
        sent_s, token_s = table[:, 0], table[:, 1:]
        emitted_s = np.empty_like(token_s)
        emitted_s[:, 0] = told["first_s"]
        emitted_s[:, 1:] = told["step_s"]
        self.lag_s.append((token_s - emitted_s)[:, 1:].ravel())
        self.ttft_s += (token_s[:, 0] - sent_s).tolist()
        self.tokens += cell.num_streams * (cell.output_tokens - 1)
        self.pieces += heard["pieces"] - cell.num_streams
        self.taken_s += heard["end_s"] - told["step_s"][0]
        self.reads += heard["reads"]
        self.piece_bytes = heard["piece_bytes"]


@dataclass(frozen=True)
class Bench:
    """One server with what loads it, ready for rounds."""

    server: Server
    server_pid: int
    engine: Child
    client: Child
    floor: Child | None = None

    def measure(self, cell: Cell, rounds: int, folder: Path, piece_bytes: int = 0) -> Measured:
        """So many rounds, after a short one that warms up. piece_bytes: for the floor to write."""
        warm = min(cell.num_streams, _WARM_UP_STREAMS)
        warm_up = replace(cell, num_streams=warm, step_s=0.0)
        self._round(warm_up, folder, piece_bytes, Measured())
        measured = Measured()
        for _ in range(rounds):
            self._round(cell, folder, piece_bytes, measured)
        measured.peak_rss_mb = _peak_rss_mb(self.server_pid)
        return measured

    def _round(self, cell: Cell, folder: Path, piece_bytes: int, into: Measured) -> None:
        path = str(folder / "received.npy")
        if self.floor is not None:
            self.floor.ask(cell=cell.to_json(), piece_bytes=piece_bytes)
        self.engine.ask(cell=cell.to_json())
        payload = _PAYLOAD | {"max_tokens": cell.output_tokens, "stream_interval": cell.interval}
        self.client.ask(
            cell=cell.to_json(),
            host=self.server.host,
            port=self.server.port,
            payload=payload,
            path=path,
        )
        load = (self.engine.pid, self.client.pid)
        server_s, load_s = _cpu_s(self.server_pid), sum(map(_cpu_s, load))
        self.engine.tell(go=True)
        told = self.engine.hear()
        self.client.hear()  # ended; what it read is looked at after the clocks
        into.server_cpu_s += _cpu_s(self.server_pid) - server_s
        into.load_cpu_s += sum(map(_cpu_s, load)) - load_s
        into.add(cell, self.client.hear(), told, path)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _peak_rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return math.nan


def _cores() -> tuple[int, int]:
    """(of the server, of what loads it); the same when there is one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[-1]


@contextmanager
def _children(with_floor: bool) -> Iterator[tuple[Child, Child, Child | None]]:
    """(engine, client, floor), which end with the block."""
    server_core, load_core = _cores()
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(2)]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
        (steers, steered), (to_floor, from_engine) = pairs
        ends = [steers, to_floor] if with_floor else [steers]
        engine = Child("bench.frontend_engine", ends, load_core)
        stack.callback(engine.end)
        client = Child("bench.frontend_client", [steered], load_core)
        stack.callback(client.end)
        floor = None
        if with_floor:
            floor = Child("bench.frontend_floor", [from_engine], server_core)
            stack.callback(floor.end)
        yield engine, client, floor


@contextmanager
def real_bench(
    model_path: Path, ids: list[int], texts: list[str], server_args: list[str]
) -> Iterator[Bench]:
    """The API process as operators run it, ready. Raises NoServer with the end of its log."""
    with ExitStack() as stack:
        engine, client, _ = stack.enter_context(_children(with_floor=False))
        client.tell(texts=texts)
        registry = engine.ask(token=_TOKEN, ids=ids)["registry"]
        log = stack.enter_context(tempfile.TemporaryFile())
        notify_read, notify_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        stack.callback(os.close, lifeline_write)
        arguments = ["--model-path", str(model_path), "--registry-address", registry]
        arguments += ["--port", "0", "--max-inflight-requests", "4096", *server_args]
        process = subprocess.Popen(
            [sys.executable, "-m", "serving", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(notify_write, lifeline_read),
            env=os.environ
            | {
                TOKEN_ENV: _TOKEN,
                NOTIFY_ENV: str(notify_write),
                LIFELINE_ENV: str(lifeline_read),
                "KVFERRY_LOG_LEVEL": "WARNING",
            },
        )
        os.sched_setaffinity(process.pid, {_cores()[0]})
        stack.callback(process.wait)
        stack.callback(process.kill)
        os.close(notify_write)
        os.close(lifeline_read)
        with os.fdopen(notify_read) as pipe:
            ready = pipe.read()  # until it is ready, or has ended
        server = parse_url(json.loads(ready)["url"], "") if ready else None
        if server is None or not wait_ready(server, process, _START_TIMEOUT_S):
            log.seek(0)
            tail = log.read()[-2000:].decode(errors="replace")
            raise NoServer(f"serving {' '.join(arguments)} did not become ready:\n{tail}")
        yield Bench(server, process.pid, engine, client)


@contextmanager
def floor_bench(texts: list[str]) -> Iterator[Bench]:
    """The floor in the API process's place."""
    with _children(with_floor=True) as (engine, client, floor):
        assert floor is not None
        client.tell(texts=texts)
        port = floor.ask(texts=texts)["port"]
        engine.ask()
        yield Bench(Server("127.0.0.1", port), floor.pid, engine, client, floor)


def report_cell(report: Report, cell: Cell, real: Measured, floor: Measured) -> None:
    """Rows of a cell; the baseline is the floor's value of the same run."""
    shapes = cell.to_json() | {
        "piece_bytes": real.piece_bytes,
        "rounds_s": round(real.taken_s, 3),
        "load_average_1m": round(os.getloadavg()[0], 2),
    }

    def row(metric: str, unit: str, values: tuple[float, float]) -> None:
        report.add(cell.name, metric, values[0], unit, baseline=values[1], shapes=shapes)

    both = (real, floor)

    def of(value: Any) -> tuple[float, float]:
        return value(both[0]), value(both[1])

    row("output", "tok/s", of(lambda m: m.tokens / m.taken_s))
    row("chunks", "chunk/s", of(lambda m: m.pieces / m.taken_s))
    row("cpu per token", "us", of(lambda m: m.server_cpu_s / m.tokens * 1e6))
    row("load's cpu per token", "us", of(lambda m: m.load_cpu_s / m.tokens * 1e6))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        row(f"ttft {name}", "ms", of(lambda m, s=share: percentile(m.ttft_s, s) * 1e3))
    lags = [np.concatenate(measured.lag_s) * 1e3 for measured in both]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        found = [float(np.quantile(lag, share, method="inverted_cdf")) for lag in lags]
        row(f"lag {name}", "ms", (found[0], found[1]))
    row("peak rss", "MB", of(lambda m: m.peak_rss_mb))


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """Every combination asked, saturated before paced."""
    paces = {"saturated": (0.0, 0.0), "paced": (args.step_ms / 1e3, _PACED_SPACING_S)}
    return [
        Cell(streams, args.output_tokens, interval, *paces[pace])
        for pace in args.pace or ("saturated", "paced")
        for interval in args.interval or (1, 8)
        for streams in args.streams or (64, 256, 1024, 2048)
    ]


def run(args: argparse.Namespace, report: Report) -> int:
    """Measure all cells. Raises NoServer or Failed."""
    if args.output_tokens < 2:
        raise ValueError(f"--output-tokens must be at least 2, got {args.output_tokens}")
    model_path = Path(args.model_path)
    ids, texts = tokens_of(model_path)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for cell in cells_of(args):
            rounds = max(1, args.tokens // (cell.num_streams * cell.output_tokens))
            rounds = 1 if cell.step_s else rounds
            with real_bench(model_path, ids, texts, args.server_args.split()) as bench:
                real = bench.measure(cell, rounds, folder)
            with floor_bench(texts) as bench:
                floor = bench.measure(cell, rounds, folder, real.piece_bytes)
            report_cell(report, cell, real, floor)
    return 0
