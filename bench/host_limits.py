"""Measures what this host can do at best: copy memory, and move bytes between processes by TCP.

These are the baselines of transfers, measured in the same run. `python -m bench.host_limits` is the
receiving process of the TCP measurement; this module starts it.
"""

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from bench.endings import child, words_of

HEADER = struct.Struct("<Q")
_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True)
class PageWork:
    """One request copies num_pages scattered pages of page_bytes each."""

    name: str
    num_pages: int
    layers: int
    page_size: int
    kv_heads: int
    head_dim: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page; a number has two."""
        return self.layers * 2 * self.page_size * self.kv_heads * self.head_dim * 2

    @property
    def request_bytes(self) -> int:
        """Payload of one request."""
        return self.num_pages * self.page_bytes

    @property
    def pool_pages(self) -> int:
        """Pages of either pool: enough that requests in flight touch different ones."""
        return max(4 * self.num_pages, 64)


def memcpy_gb_s(threads: int, num_bytes: int, budget_s: float) -> float:
    """GB copied a second by `threads` threads, each of which copies an array of its own."""
    share = num_bytes // threads

    # Written in full first: fresh pages cost more than the copy.
    blocks = [(np.full(share, 1, np.uint8), np.full(share, 2, np.uint8)) for _ in range(threads)]

    def work(idx: int, counts: list[int]) -> None:
        source, target = blocks[idx]
        for _ in _rounds(budget_s):
            np.copyto(target, source)
            counts.append(source.nbytes)

    return _threads_gb_s(threads, work)


def memcpy_cpu_s_per_gb(num_bytes: int, budget_s: float) -> float:
    """Processor seconds per GB that one thread copies, whatever else uses the processor."""
    source, target = np.full(num_bytes, 1, np.uint8), np.full(num_bytes, 2, np.uint8)
    moved, start_s = 0, time.thread_time()
    for _ in _rounds(budget_s):
        np.copyto(target, source)
        moved += num_bytes
    return (time.thread_time() - start_s) / (moved / 1e9)


def page_copy_gb_s(work: PageWork, budget_s: float) -> float:
    """GB a second of copying scattered pages of one pool to scattered places of another."""
    rng = np.random.default_rng(0)
    shape = (work.pool_pages, work.page_bytes)
    source, target = np.full(shape, 1, np.uint8), np.full(shape, 2, np.uint8)
    moved, start_s = 0, time.perf_counter()
    for _ in _rounds(budget_s):
        read = rng.permutation(work.pool_pages)[: work.num_pages]
        write = rng.permutation(work.pool_pages)[: work.num_pages]
        for here, there in zip(read, write, strict=True):
            target[there] = source[here]
        moved += work.request_bytes
    return moved / (time.perf_counter() - start_s) / 1e9


def tcp_limits(streams: int, request_bytes: int, budget_s: float) -> tuple[float, float]:
    """(GB a second over `streams` connections, processor seconds per GB at both ends together).

    Each request is answered by one byte. Each connection sends memory of its own, as outstanding
    requests do: memory that all connections share would stay in the caches.
    """
    payloads = [np.ones(request_bytes, np.uint8).data for _ in range(streams)]
    moved: list[int] = []  # of all threads

    with _connections(streams) as (connections, peer_cpu_s):

        def work(idx: int, counts: list[int]) -> None:
            for _ in _rounds(budget_s):
                _request(connections[idx], payloads[idx])
                counts.append(request_bytes)
            moved.extend(counts)

        cpu_s = time.process_time() + peer_cpu_s()
        rate = _threads_gb_s(streams, work)
        cpu_s = time.process_time() + peer_cpu_s() - cpu_s
    return rate, cpu_s / (sum(moved) / 1e9)


def tcp_round_trip_us(request_bytes: int, budget_s: float) -> float:
    """Median microseconds from one request to its answer."""
    payload, found = bytes(request_bytes), []
    with _connections(1) as ((connection,), _):
        for _ in _rounds(budget_s):
            start_s = time.perf_counter()
            _request(connection, payload)
            found.append(time.perf_counter() - start_s)
    return float(np.median(found)) * 1e6


def _rounds(budget_s: float) -> Iterator[None]:
    """Yields once at least, then again until the time is up."""
    end_s = time.perf_counter() + budget_s
    yield
    while time.perf_counter() < end_s:
        yield


def _request(connection: socket.socket, payload: bytes | memoryview) -> None:
    # Header and payload in one call: otherwise the kernel waits for an acknowledgement in between.
    sent = connection.sendmsg([HEADER.pack(len(payload)), payload]) - HEADER.size
    connection.sendall(memoryview(payload)[sent:])
    if not connection.recv(1):
        raise ConnectionError("the receiving process closed its connection")


def _threads_gb_s(num: int, work: Callable[[int, list[int]], None]) -> float:
    """GB a second of `num` threads. work(idx, counts) runs in each and appends the bytes moved."""
    counts: list[list[int]] = [[] for _ in range(num)]
    pool = ThreadPoolExecutor(num)
    start_s = time.perf_counter()
    try:
        for done in [pool.submit(work, idx, counts[idx]) for idx in range(num)]:
            done.result()  # raises what the thread raised
    finally:
        pool.shutdown(wait=False)  # after an error, the caller closes what the others wait for
    return sum(map(sum, counts)) / (time.perf_counter() - start_s) / 1e9


@contextmanager
def _connections(streams: int) -> Iterator[tuple[list[socket.socket], Callable[[], float]]]:
    """Connections to a receiving process, which ends with them, and a reader of its CPU seconds."""
    command = [*words_of("bench.host_limits"), str(streams)]
    with child(command) as process, ExitStack() as stack:
        asked, told = process.stdin, process.stdout
        assert asked is not None
        assert told is not None

        def heard() -> str:
            if not (line := told.readline()):
                raise ConnectionError("the receiving process ended early")
            return line

        port = int(heard())

        def cpu_s() -> float:
            print(file=asked, flush=True)
            return float(heard())

        found = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            for _ in range(streams)
        ]
        for connection in found:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield found, cpu_s


def _receive(connection: socket.socket) -> None:
    """Take requests and answer each with a byte, until the peer closes."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with connection, suppress(ConnectionError):  # the peer was killed with an answer unread
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := connection.recv(HEADER.size, socket.MSG_WAITALL):
            (left,) = HEADER.unpack(head)
            while left:
                if not (count := connection.recv_into(buffer, min(left, _BUFFER_BYTES))):
                    return  # the peer was killed in the middle
                left -= count
            connection.sendall(b"k")


def _serve(streams: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        threads = []
        for _ in range(streams):
            threads.append(threading.Thread(target=_receive, args=(listening.accept()[0],)))
            threads[-1].start()
        for _ in sys.stdin:  # each line asks for the processor time
            times = os.times()
            print(times.user + times.system, flush=True)
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
