"""Parts of a real system, then all of it, are told to leave under load: no request is lost."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.cluster import STOP_TIMEOUT_S, Cluster, up, wait_until
from tests.served import FEW_SLOTS

SAMPLING = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with up("--prefill=2", "--decode=2", "--max-retries=0", *FEW_SLOTS) as system:
        yield system


def jobs() -> list[list[int]]:
    """Prompts of different lengths, more than both decode workers have slots for."""
    return [[n + 5] * (20 * n + 9) for n in range(12)]


def generate(cluster: Cluster, ids: list[int]) -> list[int]:
    answer = cluster.generate(ids, **SAMPLING)
    tokens: list[int] = answer["output_ids"]
    return tokens


def process_of(cluster: Cluster, role: str, number: int) -> psutil.Process:
    """The n-th child of that role, in order of their start."""
    family = psutil.Process(cluster.process.pid).children()
    found = [child for child in family if role in child.cmdline()]
    return sorted(found, key=lambda child: child.create_time())[number]


def left(cluster: Cluster, name: str) -> bool:
    return f"{name} has left, as it was told" in cluster.log.read_text()


def drained(cluster: Cluster, worker_id: str) -> dict[str, Any]:
    reply: dict[str, Any] = cluster.post("/drain", {"worker_id": worker_id})
    return reply


def test_workers_leave_under_load_then_all_of_it_and_no_request_notices(cluster: Cluster) -> None:
    want = [generate(cluster, ids) for ids in jobs()]
    stop = threading.Event()

    def keep_asking(job: int) -> int:
        rounds = 0
        while not stop.is_set() or rounds == 0:
            assert generate(cluster, jobs()[job]) == want[job]
            rounds += 1
        return rounds

    with ThreadPoolExecutor(len(want)) as pool:
        asked = [pool.submit(keep_asking, job) for job in range(len(want))]
        try:
            busy = next(w for w in cluster.workers() if w["role"] == "decode")
            wait_until(lambda: _rooms(cluster, busy["worker_id"]) > 0)
            reply = drained(cluster, busy["worker_id"])
            assert (reply["draining"], reply["began"]) == (True, True)
            assert not drained(cluster, busy["worker_id"])["began"]
            process_of(cluster, "prefill", 0).terminate()
            wait_until(lambda: left(cluster, "prefill-0"))
            wait_until(lambda: left(cluster, "decode-0") or left(cluster, "decode-1"))
        finally:
            stop.set()
        assert sum(future.result() for future in asked) >= len(want)
    assert cluster.log.read_text().count("drained: 0 rooms, 0 pages held") == 2
    assert "up has no other" not in cluster.log.read_text()
    assert sorted(worker["role"] for worker in cluster.settled()) == ["decode", "prefill"]
    assert 'kvferry_retries_total{reason="peer_lost"}' not in cluster.http.get("/metrics").text
    # Those that are left serve on, until all are told to leave.
    assert generate(cluster, jobs()[3]) == want[3]
    leaves_under_load(cluster, want)


def leaves_under_load(cluster: Cluster, want: list[list[int]]) -> None:
    """SIGTERM the whole system: what has come is finished, also what waits."""
    with ThreadPoolExecutor(len(want)) as pool:
        long = {**SAMPLING, "max_new_tokens": 240}
        asked = [pool.submit(cluster.generate, ids, **long) for ids in jobs()]

        def all_have_come() -> bool:
            done = sum(future.done() for future in asked)
            running: int = cluster.http.get("/get_server_info").json()["running"]
            return running > 0 and done + running == len(asked)

        wait_until(all_have_come)
        cluster.process.terminate()
        answers = [future.result()["output_ids"] for future in asked]
    assert [len(ids) for ids in answers] == [long["max_new_tokens"]] * len(want)
    assert [ids[: len(same)] for ids, same in zip(answers, want, strict=True)] == want
    assert cluster.process.wait(STOP_TIMEOUT_S) == 0
    said = cluster.log.read_text()
    draining, drained = said.index("kvferry up: draining"), said.index("kvferry up: stopping")
    assert re.search(r"\[serve\] .* draining: [1-9]\d* requests ", said[draining:drained])
    assert "starting it again" not in said


def _rooms(cluster: Cluster, worker_id: str) -> int:
    rooms: int = next(w["rooms"] for w in cluster.workers() if w["worker_id"] == worker_id)
    return rooms
