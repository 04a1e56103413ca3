"""One process of the system under faults: started, hurt, restarted, and read line by line."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Literal

from tests.cluster import environment
from transfer.flags import LIFELINE_ENV

KEPT_LINES = 400
TOKEN = "a-token-for-the-faults"
ODD_ENDS_S = 30.0  # after a fault, until which nodes of its worker may end by themselves
READY = {
    "registry": "registry is ready on",
    "prefill": "is ready",
    "decode": "is ready",
    "api": "HTTP server listens on",
}


@dataclass(frozen=True)
class Line:
    """A line that a process wrote, and when it was read (monotonic seconds)."""

    member: str
    life: int  # 1 for its first start
    at_s: float
    text: str


@dataclass
class Trouble:
    """A period in which a process was ending, gone or frozen. Monotonic seconds."""

    kind: Literal["kill", "term", "freeze"]
    start_s: float
    end_s: float = math.inf

    def touches(self, start_s: float, end_s: float) -> bool:
        return self.start_s <= end_s and start_s <= self.end_s


class Member:
    """A `kvferry` command that may be started any number of times.

    A worker of several nodes has a member for each; what is done to one is felt by all of them.

    hear: called for each line, from the member's reader thread.
    """

    def __init__(
        self,
        name: str,
        role: str,
        command: Sequence[str],
        hear: Callable[[Line], None],
        lifeline_fd: int,
        inside: Sequence[str] = (),
        leader: "Member | None" = None,
        few_steps: bool = False,
    ) -> None:
        """command: what follows `python -m`. inside: its prefix, such as `ip netns exec NAME`.

        lifeline_fd: it ends when the other end of this pipe is closed.
        leader: node 0 of the same worker, if this is another of its nodes.
        few_steps: see tests/compiling.py.
        """
        self.name = name
        self.role = role
        self.life = 0
        self.lines: deque[Line] = deque(maxlen=KEPT_LINES)
        self.ready = False
        self.frozen = False
        self.troubles: list[Trouble] = []
        self.leader = leader or self
        self.nodes: list[Member] = [] if leader is None else leader.nodes
        self.nodes.append(self)
        self._started_s = 0.0
        self._argv = (*inside, sys.executable, "-m", *command)
        self._hear = hear
        self._lifeline_fd = lifeline_fd
        self._few_steps = few_steps
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def up(self) -> bool:
        """Whether it, and every other node of its worker, is working now."""
        return all(node.alive and node.ready and not node.frozen for node in self.nodes)

    def start(self) -> None:
        assert not self.alive, f"{self.name} runs already"
        self.life += 1
        self._started_s = time.monotonic()
        self.ready = self.frozen = False
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **environment(few_steps=self._few_steps),
                "KVFERRY_CLUSTER_TOKEN": TOKEN,
                LIFELINE_ENV: str(self._lifeline_fd),
            },
            pass_fds=(self._lifeline_fd,),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout, self.life), daemon=True
        )
        self._reader.start()

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self._begin("kill")
        self._signal(signal.SIGKILL)
        self.ready = self.frozen = False
        if self._process is not None:
            self._process.wait()

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Tell it to end, which it does in its own time."""
        self._begin("term")
        self._signal(number)
        self.ready = False

    def freeze(self) -> None:
        self._begin("freeze")
        self._signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)
        self.frozen = False
        if self.troubles and self.troubles[-1].kind == "freeze":
            self.troubles[-1].end_s = time.monotonic()

    def hurt(self, start_s: float, end_s: float = math.inf) -> list[Trouble]:
        """What happened to it, or to another node of its worker, between these times."""
        told = [trouble for node in self.nodes for trouble in node.troubles]
        return [trouble for trouble in told if trouble.touches(start_s, end_s)]

    def odd_end(self) -> list[str]:
        """What is wrong with how it ended; if told to end, it must exit with code 0.

        A node may end by itself when one of its worker was hurt, or was not back yet. JAX then ends
        some by SIGABRT.
        """
        last = self.troubles[-1] if self.troubles else None
        told = last.kind if last is not None and last.end_s == math.inf else ""
        code = self.exit_code()
        if code is None or told == "kill" or (told == "term" and code == 0):
            return []
        since_s = time.monotonic() if self.ready else self._started_s
        others = self.hurt(since_s - ODD_ENDS_S) if len(self.nodes) > 1 else []
        if others and code in (0, 1, -signal.SIGABRT):
            return []
        said = self.lines[-1].text if self.lines else ""
        return [f"{self.name} ended with {code}, told to: {told or 'nothing'}; at last: {said}"]

    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def close(self) -> None:
        """End it and its reader."""
        self.kill()
        if self._reader is not None:
            self._reader.join(5.0)

    def _begin(self, kind: Literal["kill", "term", "freeze"]) -> None:
        self.troubles.append(Trouble(kind, time.monotonic()))

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _read(self, stream: IO[bytes], life: int) -> None:
        with stream:
            for data in stream:
                text = data.decode(errors="replace").rstrip("\n")
                line = Line(self.name, life, time.monotonic(), text)
                self.lines.append(line)
                if life == self.life and READY[self.role] in text:
                    self.ready = True
                    for trouble in self.troubles:
                        trouble.end_s = min(trouble.end_s, line.at_s)
                self._hear(line)
