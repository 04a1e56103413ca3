"""How processes reach each other: over loopback, or each from its own network namespace."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Protocol


class Network(Protocol):
    """Where each process lives."""

    async def open(self, names: Sequence[str]) -> None: ...

    async def close(self) -> None: ...

    def host_of(self, name: str) -> str: ...

    def inside(self, name: str) -> tuple[str, ...]:
        """A command prefix that runs a command there."""
        ...


class Loopback:
    """All processes on one host."""

    async def open(self, names: Sequence[str]) -> None:
        """There is nothing to set up."""

    async def close(self) -> None:
        """There is nothing to tear down."""

    def host_of(self, name: str) -> str:
        return "127.0.0.1"

    def inside(self, name: str) -> tuple[str, ...]:
        return ()


class Namespaces:
    """Workers in namespaces of their own, behind cables (veth) that can be unplugged.

    The registry and the API processes share the namespace of the bridge.
    """

    def __init__(self) -> None:
        self._prefix = f"kvf{os.getpid()}"
        self._workers: dict[str, int] = {}  # name -> last byte of its address

    def host_of(self, name: str) -> str:
        return f"10.231.0.{self._number(name)}"

    def inside(self, name: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._space(name))

    async def open(self, names: Sequence[str]) -> None:
        await asyncio.to_thread(self._open)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def unplug(self, worker: str) -> None:
        """Nothing reaches it any more, and no process is told."""
        self._in_hub("link", "set", "dev", self._cable(worker), "down")

    def plug(self, worker: str) -> None:
        self._in_hub("link", "set", "dev", self._cable(worker), "up")

    def loses(self, worker: str, percent: float, delay_ms: float) -> None:
        """Let the cable lose and delay packets, both ways; 0 and 0 ends that."""
        for space, device in ((self._hub, self._cable(worker)), (self._space(worker), "eth0")):
            words = ["tc", "qdisc", "replace" if percent or delay_ms else "del", "dev", device]
            words += ["root"]
            if percent or delay_ms:
                words += ["netem", "delay", f"{delay_ms}ms", f"{delay_ms / 4}ms"]
                words += ["loss", f"{percent}%"]
            _run("ip", "netns", "exec", space, *words)

    @property
    def _hub(self) -> str:
        return f"{self._prefix}-hub"

    def _number(self, name: str) -> int:
        if not name.startswith(("prefill", "decode")):
            return 1
        return self._workers.setdefault(name, 2 + len(self._workers))

    def _space(self, name: str) -> str:
        return self._hub if self._number(name) == 1 else f"{self._prefix}-{name}"

    def _cable(self, worker: str) -> str:
        return f"to{self._number(worker)}"

    def _in_hub(self, *words: str) -> None:
        _run("ip", "-n", self._hub, *words)

    def _open(self) -> None:
        _run("ip", "netns", "add", self._hub)
        self._in_hub("link", "set", "lo", "up")
        self._in_hub("link", "add", "name", "bridge0", "type", "bridge")
        self._in_hub("addr", "add", "10.231.0.1/24", "dev", "bridge0")
        self._in_hub("link", "set", "bridge0", "up")
        for worker in self._workers:
            self._lay_cable(worker)

    def _lay_cable(self, worker: str) -> None:
        space, cable = self._space(worker), self._cable(worker)
        _run("ip", "netns", "add", space)
        self._in_hub(
            *("link", "add", "name", cable, "type", "veth"),
            *("peer", "name", "eth0", "netns", space),
        )
        self._in_hub("link", "set", cable, "master", "bridge0")
        self._in_hub("link", "set", cable, "up")
        _run("ip", "-n", space, "addr", "add", f"{self.host_of(worker)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", space, "link", "set", device, "up")

    def _close(self) -> None:
        for space in (self._hub, *(self._space(worker) for worker in self._workers)):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def why_no_namespaces() -> str:
    """What this machine lacks for `Namespaces`; "" = nothing."""
    return _why_not(["link", "add", "name", "kvf0", "type", "veth", "peer", "name", "kvf1"])


def why_no_netem() -> str:
    """What this machine lacks for `Namespaces.loses`; "" = nothing."""
    if shutil.which("tc") is None:
        return "there is no tc"
    words = ["qdisc", "add", "dev", "lo", "root", "netem", "loss", "1%"]
    return _why_not(words, program="tc")


def _why_not(words: Sequence[str], program: str = "ip") -> str:
    """Try a command in a temporary namespace."""
    if shutil.which("ip") is None:
        return "there is no ip"
    space = f"kvf{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", space)
    except RuntimeError as error:
        return str(error)
    try:
        _run(program, "-n", space, *words)
    except RuntimeError as error:
        return str(error)
    finally:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
    return ""


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
