"""The decode side of the transfer benchmark: a process that puts pages in place and acknowledges.

bench/transfer starts it and talks to it in lines. After `place 0` pages stay where they arrived,
after `place 1` they are put in place again. `digest ROOM` is answered with a digest of that room's
pages, `cpu` with the processor seconds so far, once pages are in place. `quit` ends the process,
whose answer has its processor seconds, the number of lost rooms and the receiver's counters.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.host_limits import PageWork
from bench.transfer_pools import pool_of
from model.config import KVSpec
from transfer.backend import Finished, PagesArrived, ReceiverEvent, SenderLost
from transfer.nixl import NixlReceiver
from transfer.rpc import Security
from transfer.shm import ShmReceiver
from transfer.tcp import TcpReceiver

EPOCH = 1
AHEAD = 64  # rooms that the receiver expects before anything of them arrives
STALL_TIMEOUT_S = 10.0
RECEIVERS: dict[str, Callable[..., TcpReceiver]] = {
    "nixl": NixlReceiver,
    "shm": ShmReceiver,
    "tcp": TcpReceiver,
}

WORKLOADS = {
    work.name: work
    for work in (
        PageWork("small", num_pages=1, layers=1, page_size=16, kv_heads=1, head_dim=64),
        PageWork("a", num_pages=64, layers=4, page_size=16, kv_heads=4, head_dim=64),
        PageWork("b", num_pages=128, layers=16, page_size=16, kv_heads=4, head_dim=64),
        PageWork("c", num_pages=64, layers=32, page_size=64, kv_heads=4, head_dim=64),
    )
}


def page_ids(work: PageWork, room: int) -> np.ndarray:
    """Pages of a room, scattered; both processes compute them for themselves."""
    return np.random.default_rng(room % AHEAD).permutation(work.pool_pages)[: work.num_pages]


def spec_of(work: PageWork) -> KVSpec:
    """The pages of a workload, as backends are told of them."""
    return KVSpec(work.layers, work.kv_heads, work.head_dim, work.page_size, "bfloat16")


class Peer:
    """The decode side; owns the destination pool."""

    def __init__(self, work: PageWork, token: str, backend: str, *devices: str) -> None:
        self._work = work
        self._pool = pool_of(work, 0, on_device=bool(devices))
        self._ids = [page_ids(work, room) for room in range(AHEAD)]
        self._lost = 0
        self.places = True
        self._lock = threading.Lock()
        self._receiver = RECEIVERS[backend](
            Security(token),
            host="127.0.0.1",
            port=0,
            kv=spec_of(work),
            tp_size=1,
            on_event=self._on_event,
            stall_timeout_s=STALL_TIMEOUT_S,
        )

    def start(self) -> str:
        """Listen; returns the address."""
        address: str = self._receiver.start()
        for room in range(1, AHEAD + 1):
            self._receiver.expect(room, EPOCH, self._work.num_pages)
        return address

    def settle(self) -> None:
        """Wait until the pages that arrived are in place."""
        self._pool.settle()

    def digest(self, room: int) -> str:
        """Digest of the pages of a room."""
        return self._pool.digest(self._ids[room % AHEAD])

    def close(self) -> dict[str, Any]:
        """Stop; returns processor seconds, the number of lost rooms and the receiver's counters."""
        self._receiver.close()
        times = os.times()
        counters = dict(self._receiver.counters)
        return {"cpu_s": times.user + times.system, "lost": self._lost, "counters": counters}

    def _on_event(self, event: ReceiverEvent) -> None:
        match event:
            case PagesArrived(room, page_start, [pages]):
                if self.places:
                    ids = self._ids[room % AHEAD][page_start : page_start + pages.shape[2]]
                    self._pool.place(ids, pages)
            case Finished(room):
                self._receiver.ack(room)
                self._receiver.forget(room)
                self._receiver.expect(room + AHEAD, EPOCH, self._work.num_pages)
            case SenderLost(rooms, message):
                with self._lock:
                    self._lost += len(rooms)
                print(f"lost {len(rooms)} rooms: {message}", file=sys.stderr)
            case _:
                raise AssertionError(f"one shard each, got {event!r}")


def main() -> None:
    """Serve one workload until told to quit."""
    peer = Peer(WORKLOADS[sys.argv[1]], *sys.argv[2:])
    print(json.dumps({"address": peer.start()}), flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "digest":
            print(json.dumps({"digest": peer.digest(int(rest))}), flush=True)
        elif word == "place":
            peer.places = bool(int(rest))
            print(json.dumps({}), flush=True)
        elif word == "cpu":
            peer.settle()
            times = os.times()
            print(json.dumps({"cpu_s": times.user + times.system}), flush=True)
        elif word == "quit":
            break
    print(json.dumps(peer.close()), flush=True)


if __name__ == "__main__":
    main()
