"""Front ends of other projects: the requests they get, and the tokens they return."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.frontend_cases import PEERS, all_of
from bench.frontend_peer_steps import PeerSteps
from bench.frontend_peers import version_in
from bench.frontend_plan import Cell, request_id
from bench.frontend_processes import cpu_s, peak_rss_mib

IDS = [70, 71, 72]


class FakeMessages:
    """Requests are names; keeps what was sent."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[list[str]] = asyncio.Queue()
        self.sent: list[tuple[list[str], list[int], int, bool]] = []

    async def take(self) -> list[str]:
        return await self.came.get()

    def name(self, request: Any) -> str:
        return str(request)

    def send(self, requests: Sequence[Any], token_ids: Sequence[int], idx: int, last: bool) -> None:
        self.sent.append(([*requests], [*token_ids], idx, last))


async def test_first_tokens_leave_as_requests_come_and_steps_are_of_all_streams_in_order():
    messages = FakeMessages()
    way = PeerSteps(messages, IDS)
    await way.start()
    names = [request_id(stream) for stream in range(3)]
    for _ in range(2):  # a round knows nothing of the previous one
        messages.sent.clear()
        current = way.begin(Cell(3, 2, 1))
        await messages.came.put([names[2], names[0]])
        await asyncio.sleep(0)
        assert not current.complete.is_set()
        await messages.came.put([names[1]])
        await asyncio.wait_for(current.complete.wait(), 5.0)
        way.emit(1)
        assert messages.sent == [
            ([names[2], names[0]], [72, 70], 0, False),
            ([names[1]], [71], 0, False),
            (names, [71, 72, 70], 1, True),
        ]


def test_peers_are_asked_for_the_same_without_options_of_ours():
    cell = Cell(8, 128, 1)
    ours = all_of(1).payload(cell)
    for peer in PEERS:
        assert peer.payload(cell) == {k: v for k, v in ours.items() if k != "stream_interval"}


def test_the_version_is_that_of_the_python_that_was_named():
    assert version_in(sys.executable, "numpy") == np.__version__


def test_a_server_is_measured_with_the_processes_it_started():
    alone_mib, alone_s = peak_rss_mib(os.getpid()), cpu_s(os.getpid())
    words = [sys.executable, "-c", "print(sum(range(10**6)), flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert peak_rss_mib(os.getpid()) > alone_mib + 1
        assert cpu_s(os.getpid()) >= alone_s + cpu_s(child.pid) > alone_s
        child.communicate(b"end")


def test_a_server_of_another_project_ends_with_the_bench_however_that_ends():
    program = "import sys; from bench.endings import end_with; "
    program += "end_with(int(sys.argv[1])); print(1, flush=True); sys.stdin.read()"
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(read)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(read,),
        start_new_session=True,
    ) as server:
        os.close(read)
        assert server.stdout is not None
        assert server.stdout.readline() == b"1\n"
        assert server.poll() is None
        os.close(write)
        assert server.wait(20.0) == -signal.SIGKILL
