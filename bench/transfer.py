"""Times KV pages between two processes of a host, beside memcpy and raw loopback of the same run.

A request copies scattered pages of this process's pool into scattered pages of the other's, and is
done when this process holds the acknowledgement. Digests of the pages are compared afterwards.
"""

import itertools
import json
import os
import queue
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from bench.endings import child, words_of
from bench.host_limits import (
    PageWork,
    memcpy_cpu_s_per_gb,
    memcpy_gb_s,
    page_copy_gb_s,
    tcp_limits,
    tcp_round_trip_us,
)
from bench.report import Report
from bench.transfer_peer import AHEAD, EPOCH, STALL_TIMEOUT_S, WORKLOADS, page_ids
from bench.transfer_pools import pool_of, runs_of
from transfer import nixl_agent, wire
from transfer.backend import FirstToken
from transfer.choice import default_connections
from transfer.layout import plan_heads
from transfer.nixl import NixlSender
from transfer.rpc import Security
from transfer.shm import ShmSender
from transfer.tcp import TcpSender

TOKEN = "bench"
OUTSTANDING = (1, 8)
BACKENDS = ("shm", "tcp")  # nixl on demand, where it is installed
MAX_FRAME_BYTES = 16 << 20
WARM_UPS = 4
CPU = "CPU s/GB"


@dataclass(frozen=True)
class Way:
    """What a request consists of. said: its words in names of rows."""

    said: str = ""
    on_device: bool = False  # pools are JAX arrays, and programs are those of the workers
    gathered: bool = False  # pages are gathered beforehand, as if by a device beside the processor
    placed: bool = True  # else a request is done when pages lie where a device would fetch them


HOST = Way()
WAYS = (
    Way(", devices", on_device=True),
    HOST,
    Way(", gathered", gathered=True),
    Way(", gathered, not placed", gathered=True, placed=False),
)


def connections_of(outstanding: int) -> int:
    """Data connections that a worker has by default for `outstanding` requests at a time."""
    return min(outstanding, default_connections())


class TransferFailed(RuntimeError):
    """Pages did not arrive, or arrived changed."""


class Peer:
    """The other process, seen from here: its address, and questions and answers in lines."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.address = str(self._answer()["address"])

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and parse the answer."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TransferFailed("the receiving process ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def receiving_process(work: PageWork, backend: str, on_device: bool = False) -> Iterator[Peer]:
    """A peer for one workload, ended with the block."""
    command = [*words_of("bench.transfer_peer"), work.name, TOKEN, backend]
    command += ["devices"] if on_device else []
    with child(command) as process:
        yield Peer(process)


class Sender:
    """The prefill side: gathers pages, sends them, waits for acknowledgements."""

    def __init__(
        self, work: PageWork, address: str, outstanding: int, backend: str, way: Way = HOST
    ) -> None:
        """Uses the connections that a prefill worker has by default for `outstanding` requests."""
        self._work = work
        self._address = address
        self.pool = pool_of(work, 1, way.on_device)
        self._ids = [page_ids(work, room) for room in range(AHEAD)]
        # Cut and packed beforehand, as this time between requests is not the transfer's.
        self._cut = [(runs_of(ids, work.page_bytes), wire.pack_i32(ids)) for ids in self._ids]
        heads = work.kv_heads
        self._runs = plan_heads(heads, 1, heads, 1, heads)
        self._gathered: list[list[np.ndarray]] = []  # for each request in flight
        if way.gathered:
            for idx in range(outstanding):
                self._gathered.append(list(self.pool.gather(self._cut[idx][0])))
        self._outstanding = outstanding
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for idx in range(outstanding):
            self._free.put(idx)
        self._sent: dict[int, tuple[float, int]] = {}  # room -> when sent, index in flight
        self.taken_s: list[float] = []
        self.ids: np.ndarray  # pages of the last request
        self.failures: list[str] = []
        self._rooms = itertools.count(1)
        self._chained_until_s = 0.0
        common: dict[str, Any] = {
            "security": Security(TOKEN),
            "sender_id": "bench",
            "on_event": self._on_event,
            "max_frame_bytes": MAX_FRAME_BYTES,
            "stall_timeout_s": STALL_TIMEOUT_S,
            "connections": connections_of(outstanding),
        }
        self._sender: TcpSender
        if backend == "shm":
            self._sender = ShmSender(**common, is_demand=True)
        elif backend == "nixl":
            self._sender = NixlSender(**common)
        else:
            self._sender = TcpSender(**common)

    def send_one(self) -> int:
        """Start a request as soon as fewer than the allowed number are outstanding."""
        return self._start(self._take())

    def _start(self, idx: int) -> int:
        room = next(self._rooms)
        number = idx if self._gathered else room % AHEAD
        self.ids = self._ids[number]
        runs, packed_ids = self._cut[number]
        grant = wire.Grant(
            room=room,
            epoch=EPOCH,
            data_addresses=(self._address,),
            page_ids=packed_ids,
            tp_size=1,
            stored_kv_heads=self._work.kv_heads,
        )
        self._sent[room] = (time.perf_counter(), idx)
        # A run is sent while the next one is gathered.
        page_start = 0
        for pages in self._gathered[idx] if self._gathered else self.pool.gather(runs):
            self._sender.send_pages(grant, page_start, [pages], self._runs)
            page_start += pages.shape[2]
        num_tokens = self._work.num_pages * self._work.page_size
        self._sender.finish(grant, FirstToken(0, 0, num_tokens, wire.RUNNING))
        return room

    def send_for(self, budget_s: float) -> None:
        """Send requests for `budget_s` seconds.

        If pages are gathered beforehand, the thread that hears an acknowledgement starts the next
        request: the turns that two threads take in one interpreter would be measured too.
        """
        end_s = time.perf_counter() + budget_s
        if self._gathered:
            self._chained_until_s = end_s
            for _ in range(self._outstanding):
                self.send_one()
            time.sleep(max(0.0, end_s - time.perf_counter()))
            return
        self.send_one()
        while time.perf_counter() < end_s:
            self.send_one()

    def drain(self) -> None:
        """Wait until nothing is outstanding."""
        for idx in [self._take() for _ in range(self._outstanding)]:
            self._free.put(idx)

    def close(self) -> None:
        """Close connections."""
        self._sender.close()

    def _take(self) -> int:
        """Wait until one more may be in flight. Raises TransferFailed when a request failed."""
        try:
            idx = self._free.get(timeout=2 * STALL_TIMEOUT_S)
        except queue.Empty as error:
            raise TransferFailed("no acknowledgement in time") from error
        if self.failures:
            raise TransferFailed(self.failures[0])
        return idx

    def _on_event(self, event: Any) -> None:
        now_s = time.perf_counter()
        if event.kind == "lost":
            self.failures.append(f"lost: {event.message}")
            self._free.put(0)  # wakes the waiting thread, which sees the failure
            return
        sent_s, idx = self._sent.pop(event.room)
        if event.kind == "acked":
            self.taken_s.append(now_s - sent_s)
        else:
            self.failures.append(f"refused: {event.message}")
        if now_s < self._chained_until_s and not self.failures:
            self._start(idx)
        else:
            self._free.put(idx)


def run(
    report: Report,
    names: Sequence[str],
    budget_s: float,
    backends: Sequence[str] = BACKENDS,
    rounds: int = 1,
) -> None:
    """Measure the named workloads.

    Raises ValueError for an unknown workload or for rounds below 1, ConfigError if nixl is asked
    for and not installed.
    """
    if rounds < 1:
        raise ValueError(f"rounds: at least 1, got {rounds}")
    for name in names:
        if name not in WORKLOADS:
            raise ValueError(f"workload {name!r}; known: {', '.join(WORKLOADS)}")
    if "nixl" in backends:
        nixl_agent.bindings()  # fails here in one line, as the other process would not
    for name in names:
        for outstanding in (1,) if name == "small" else OUTSTANDING:
            measure(report, WORKLOADS[name], outstanding, budget_s, backends, rounds)


class Metric(NamedTuple):
    """The name of a row, and of the row that it is compared with."""

    name: str
    unit: str
    baseline: str = ""


def measure(
    report: Report,
    work: PageWork,
    outstanding: int,
    budget_s: float,
    backends: Sequence[str] = BACKENDS,
    rounds: int = 1,
) -> None:
    """Measure one workload with `outstanding` requests, and its baselines: medians over rounds.

    A round measures everything in turn, so that whatever else the host does affects all alike.
    """
    case = f"{work.name} x{outstanding}"
    shapes = asdict(work) | {
        "page_bytes": work.page_bytes,
        "outstanding": outstanding,
        "connections": connections_of(outstanding),
        "rounds": rounds,
        "budget_s": budget_s,
    }
    one_round = _round_of_one_page if work.num_pages == 1 else _round
    found: dict[Metric, list[float]] = {}
    for _ in range(rounds):
        for metric, value in one_round(work, outstanding, budget_s, backends):
            found.setdefault(metric, []).append(value)
    medians = {metric.name: statistics.median(values) for metric, values in found.items()}
    for metric in found:
        base = medians.get(metric.baseline)
        report.add(case, metric.name, medians[metric.name], metric.unit, base, shapes=shapes)


def _round_of_one_page(
    work: PageWork, outstanding: int, budget_s: float, backends: Sequence[str]
) -> Iterator[tuple[Metric, float]]:
    raw = Metric("raw loopback p50", "us")
    yield raw, tcp_round_trip_us(work.request_bytes, budget_s)
    for backend in backends:
        taken_s, _, _ = transfer(work, outstanding, budget_s, backend, WAYS[-1])
        yield Metric(f"{_named(backend)} p50", "us", raw.name), statistics.median(taken_s) * 1e6


def _round(
    work: PageWork, outstanding: int, budget_s: float, backends: Sequence[str]
) -> Iterator[tuple[Metric, float]]:
    threads = min(outstanding, os.cpu_count() or 1)
    memcpy, memcpy_cpu = Metric(f"memcpy, {threads} threads", "GB/s"), Metric("memcpy CPU", CPU)
    memcpy_rate = memcpy_gb_s(threads, 128 << 20, budget_s)
    yield memcpy, memcpy_rate
    yield memcpy_cpu, memcpy_cpu_s_per_gb(128 << 20, budget_s)
    if outstanding == 1:
        yield Metric("page copy", "GB/s", memcpy.name), page_copy_gb_s(work, budget_s)
    loopback = Metric("raw loopback", "GB/s", memcpy.name)
    loopback_cpu = Metric("raw loopback CPU", CPU, memcpy_cpu.name)
    loopback_rate, loopback_cpu_s = tcp_limits(outstanding, work.request_bytes, budget_s)
    yield loopback, loopback_rate
    yield loopback_cpu, loopback_cpu_s
    for backend in backends:
        base, base_cpu = (loopback, loopback_cpu) if backend == "tcp" else (memcpy, memcpy_cpu)
        for way in WAYS:
            name = f"{_named(backend)}{way.said}"
            taken_s, whole_s, cpu_s = transfer(work, outstanding, budget_s, backend, way)
            gigabytes = len(taken_s) * work.request_bytes / 1e9
            rate = gigabytes / whole_s
            yield Metric(name, "GB/s", base.name), rate
            yield Metric(f"{name} of memcpy", "share"), rate / memcpy_rate
            if backend == "tcp":
                yield Metric(f"{name} of raw loopback", "share"), rate / loopback_rate
            yield Metric(f"{name} CPU", CPU, base_cpu.name), cpu_s / gigabytes
            if outstanding == 1 and not way.on_device:
                yield Metric(f"{name} p50", "us"), statistics.median(taken_s) * 1e6


def _named(backend: str) -> str:
    """A backend's name in rows. NIXL's has UCX_TLS, which decides how NIXL moves pages."""
    transports = os.environ.get("UCX_TLS")
    return f"{backend} (UCX_TLS={transports})" if backend == "nixl" and transports else backend


def transfer(
    work: PageWork, outstanding: int, budget_s: float, backend: str, way: Way = HOST
) -> tuple[list[float], float, float]:
    """(seconds of each request, seconds of all, processor seconds of both sides).

    Raises TransferFailed when pages were lost or arrived changed.
    """
    with receiving_process(work, backend, way.on_device) as peer:
        sender = Sender(work, peer.address, outstanding, backend, way)
        try:
            for _ in range(WARM_UPS):
                sender.send_one()
            sender.drain()
            sender.taken_s.clear()
            peer.ask(f"place {int(way.placed)}")
            cpu_s = time.process_time() + peer.ask("cpu")["cpu_s"]
            start_s = time.perf_counter()
            sender.send_for(budget_s)
            sender.drain()
            peer_cpu_s = peer.ask("cpu")["cpu_s"]  # answered once pages are in place
            whole_s = time.perf_counter() - start_s
            cpu_s = time.process_time() + peer_cpu_s - cpu_s
            taken_s = list(sender.taken_s)
            # One more request, alone: if requests that run side by side share destination pages,
            # those hold what the last to end wrote.
            peer.ask("place 1")
            room = sender.send_one()
            sender.drain()
            expected = sender.pool.digest(sender.ids)
            found = peer.ask(f"digest {room}")["digest"]
        finally:
            sender.close()
        told = peer.ask("quit")
    if found != expected:
        raise TransferFailed(f"pages arrived changed: digest {found}, expected {expected}")
    if told["lost"]:
        raise TransferFailed(f"{told['lost']} rooms lost: {told['counters']}")
    return taken_s, whole_s, cpu_s
