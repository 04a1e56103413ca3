"""As many clients as open files allow: a process opens all that it may, and answers one more."""

import asyncio
import contextlib
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeCluster
from tests.serving.live import live_server
from tests.serving.processes import serving
from tests.transfer.children import ROOT
from transfer import open_files

ASK = {"prompt": "ab", "max_tokens": 3, "temperature": 0}
FEW = 256  # files; more than this process has open already
NUM_CLIENTS = 3


@pytest.fixture
def few_files() -> Iterator[int]:
    """Let processes that this one starts open few files; the most that they may raise that to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    yield open_files.WANTED if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_process_takes_as_many_files_as_it_may_have(tmp_path: Path, few_files: int) -> None:
    async with FakeCluster() as cluster, serving(cluster, tmp_path) as server:
        (pid,) = (await server.pids()).values()
        soft, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft == min(few_files, open_files.WANTED)


def test_a_limit_that_is_high_enough_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    for limits in ((100_000, 200_000), (-1, -1), (65_536, -1), (300, 300)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        open_files.raise_limit()
        assert asked == []
        soft = limits[0] if limits[0] >= 0 else open_files.WANTED
        assert (open_files.limit(), open_files.for_control()) == (soft, soft // 2)
    for limits, wanted in (
        ((1024, 4096), (4096, 4096)),
        ((1024, 524_288), (65_536, 524_288)),
        ((1024, -1), (65_536, -1)),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        open_files.raise_limit()
        assert asked.pop() == wanted


def test_too_few_files_to_serve_at_all_are_told_of_in_a_line() -> None:
    command = ["sh", "-c", 'ulimit -n 32; exec "$0" -m serving.launch registry', sys.executable]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    said = "kvferry registry: 32 files may be open (ulimit -n); expected at least 64\n"
    assert done.stderr == said


async def test_one_client_too_many_is_told_so_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_files, "limit", lambda: 64 + NUM_CLIENTS)
    one = httpx.Limits(max_connections=1)
    async with contextlib.AsyncExitStack() as stack:
        live = await stack.enter_async_context(live_server())

        async def client() -> httpx.AsyncClient:
            own = httpx.AsyncClient(base_url=live.http.base_url, limits=one, timeout=30)
            return await stack.enter_async_context(own)

        assert f"may open {64 + NUM_CLIENTS} files, which is {NUM_CLIENTS} conn" in caplog.text
        address = live.url.removeprefix("http://").split(":")
        clients = [await client() for _ in range(NUM_CLIENTS)]
        for http in clients:
            assert (await http.post("/v1/completions", json=ASK)).status_code == 200
        late = await client()
        for _ in range(2):
            reply = await late.post("/v1/completions", json=ASK)
            assert reply.status_code == 503
            assert reply.headers["retry-after"] == "1"
            assert reply.headers["connection"] == "close"
            assert reply.headers["x-request-id"]
            error = reply.json()["error"]
            assert error["type"] == "service_unavailable_error"
            assert error["code"] == "too_many_connections"
            assert f"{NUM_CLIENTS} connections" in error["message"]
        assert caplog.text.count("connection(s) too many for") == 1  # not each time
        for http in clients:
            assert (await http.post("/v1/completions", json=ASK)).status_code == 200
        text = (await clients[0].get("/metrics")).text
        assert "kvferry_connections_rejected_total 2.0" in text
        # Clients that say nothing must not take what the process needs for itself.
        silent = [await asyncio.open_connection(*address) for _ in range(40)]
        ends = [await asyncio.wait_for(reader.read(), 20) for reader, _ in silent]
        assert ends == [b""] * 40
        for _, writer in silent:
            writer.close()
        await clients[0].aclose()
        # There is no place until the server has read that the other client is gone.
        async with asyncio.timeout(20):
            status = 503
            while status == 503:
                status = (await late.post("/v1/completions", json=ASK)).status_code
        assert status == 200
