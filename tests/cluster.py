"""A real system for tests: `kvferry up` as separate processes, reached over HTTP."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from model import processors
from tests import compiling

READY = re.compile(r"kvferry is ready: (http://\S+)  \(model (.+)\)")
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0


@dataclass
class Cluster:
    """A running `kvferry up`."""

    url: str
    model: str
    process: subprocess.Popen[str]
    log: Path
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=120.0)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, (reply.status_code, reply.text)
        return reply.json()

    def generate(self, input_ids: list[int], **sampling: Any) -> Any:
        """POST /generate with these ids and return its answer."""
        more = {k: sampling.pop(k) for k in list(sampling) if k.startswith(("return_", "logprob_"))}
        more |= {k: sampling.pop(k) for k in list(sampling) if k.startswith("top_logprobs")}
        body = {"input_ids": input_ids, "sampling_params": sampling, **more}
        return self.post("/generate", body)

    def stream(
        self, input_ids: list[int], began: Callable[[], object], **sampling: Any
    ) -> list[int]:
        """The ids that POST /generate streams. began: called at the first event."""
        ids: list[int] = []
        for event in self.events("/generate", input_ids=input_ids, sampling_params=sampling):
            if not ids:
                began()
            ids = event["output_ids"]
        return ids

    def events(self, path: str, **body: Any) -> Iterator[Any]:
        """The events of a streamed answer, none of which is an error."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    yield event

    def workers(self) -> list[dict[str, Any]]:
        """Each worker's state from /get_server_info, once all workers answer.

        A worker that was just killed is listed without a state until its lease expires.
        """
        found: list[dict[str, Any]] = []

        def all_answer() -> bool:
            reply = self.http.get("/get_server_info")
            assert reply.status_code == 200, reply.text
            found[:] = reply.json()["workers"]
            return all("role" in worker for worker in found)

        wait_until(all_answer)
        return found

    def worker(self, role: str) -> dict[str, Any]:
        return next(worker for worker in self.workers() if worker["role"] == role)

    def settled(self) -> list[dict[str, Any]]:
        """The workers' states once no worker holds a room."""
        wait_until(lambda: all(worker["rooms"] == 0 for worker in self.workers()))
        return self.workers()

    def children(self) -> dict[str, psutil.Process]:
        """The system's processes by role."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            words = child.cmdline()
            if "-m" in words:
                name = words[words.index("-m") + 1]
                found["registry" if name == "serving.launch" else name] = child
        return found


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or a zombie, which is what remains where init does not reap."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Poll until the condition, which depends on another process, holds."""
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)


def environment(as_users: bool = False, few_steps: bool = False) -> dict[str, str]:
    """A user's environment, plus the flags for quick compilation if this process has them.

    as_users: without quick compilation. few_steps: see tests/compiling.py.
    """
    own = "XLA_FLAGS", *processors.VARIABLES
    kept = {k: v for k, v in os.environ.items() if k not in own}
    quick = {} if as_users else compiling.of_systems(few_steps)
    return {**kept, **quick, "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def up(*flags: str, as_users: bool = False, few_steps: bool = False) -> Iterator[Cluster]:
    """`kvferry up` with these flags on a free port; ended with Ctrl-C, after which nothing is left.

    as_users, few_steps: see `environment`.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "serving.launch", "up", "--port", "0", *flags],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment(as_users, few_steps),
                text=True,
                start_new_session=True,
            )
        cluster = None
        try:
            cluster = _wait_ready(process, log)
            yield cluster
        finally:
            if cluster is not None:
                cluster.http.close()
            family = _family(process)
            process.send_signal(signal.SIGINT)
            code = process.wait(STOP_TIMEOUT_S)
        left = [child for child in family if child.is_running()]
        assert not left, f"still running: {left}"
        text = log.read_text()
        assert code == 0, text[-2000:]
        assert "executable is not kept" not in text


def _family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def _wait_ready(process: subprocess.Popen[str], log: Path) -> Cluster:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        found = READY.search(log.read_text())
        if found:
            return Cluster(found[1], found[2], process, log)
        if process.poll() is not None:
            raise AssertionError(f"up ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        time.sleep(0.05)
    raise AssertionError(f"not ready in time:\n{log.read_text()[-4000:]}")
