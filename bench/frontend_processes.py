"""Starts the front end benchmark's processes, pins them to cores, talks to them and ends them."""

import json
import math
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from bench.client import Server
from bench.endings import deaf_children, lifeline, words_of
from bench.frontend_cases import Design
from bench.frontend_peers import PeerServer, environment
from bench.frontend_plan import HOST, MOST_STREAMS
from bench.serve import NoServer, not_ready, parse_url, wait_ready
from transfer.flags import API_KEY_ENV, LIFELINE_ENV, NOTIFY_ENV, TOKEN_ENV

_TOKEN = "token of a cluster for one benchmark"
_START_TIMEOUT_S = 60.0
_END_S = 5.0


class Failed(RuntimeError):
    """A process of the benchmark ended, or a stream was wrong."""


class Child:
    """A process of this benchmark that answers lines of JSON with lines of JSON."""

    def __init__(
        self,
        module: str,
        sockets: Sequence[socket.socket],
        core: int,
        more: Sequence[str] = (),
        peer_python: str = "",
    ) -> None:
        """more: arguments after the numbers of the sockets. peer_python: if given, this Python runs
        the module as the engine of its project's server."""
        numbers = [sock.fileno() for sock in sockets]
        self._module = module
        ours = words_of(module)
        words = [peer_python, "-m", module, "engine"] if peer_python else ours
        with deaf_children():
            self._process = subprocess.Popen(
                [*words, *map(str, numbers), *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=numbers,
                env=environment() if peer_python else None,
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
        """Its next line. Raises Failed when that is an error, or when the process ended."""
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

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True)
class Load:
    """The processes that load servers, on their own core."""

    engine: Child
    client: Child


@dataclass(frozen=True)
class Target:
    """A server under test with what loads it. floor: the floor's process, if that is the server."""

    server: Server
    pid: int
    load: Load
    floor: Child | None = None

    def who_ended(self) -> str:
        """Text to add to a failure: which of the processes are gone."""
        gone = [name for name in ("engine", "client") if getattr(self.load, name).has_ended]
        if not psutil.pid_exists(self.pid) or _is_zombie(self.pid):
            gone.append("server")
        return f" (ended: {', '.join(gone)})" if gone else ""


def _is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def cpu_s(pid: int) -> float:
    """Seconds of processor time so far of a process and its living descendants.

    It is read from the clock that Linux has for each process, to the nanosecond
    (clock_getcpuclockid(3)): psutil counts hundredths of a second, and a cell may last only a few.
    """
    return sum(time.clock_gettime((~each.pid << 3) | 2) for each in _family(pid))


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def peak_rss_mib(pid: int) -> float:
    """Peak resident memory since `forget_peak_rss`, summed over a process and its descendants."""
    return sum(_peak_rss_mib(each.pid) for each in _family(pid))


def _peak_rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return math.nan


def forget_peak_rss(pid: int) -> None:
    """Reset the peak to what is resident now, where the kernel can."""
    for each in _family(pid):
        with suppress(OSError):
            Path(f"/proc/{each.pid}/clear_refs").write_text("5", encoding="ascii")


@contextmanager
def targets(
    designs: Sequence[Design],
    model_path: Path,
    ids: list[int],
    texts: list[str],
    more_args: Sequence[str],
    pythons: Mapping[str, str],
) -> Iterator[dict[Design, Target]]:
    """A ready server for each design; designs with the same command share a process.

    ids, texts: tokens of the model's vocabulary. more_args: for the product's servers.
    pythons: the Python that runs a peer, by the peer's name.
    Raises NoServer with the end of a log.
    """
    with ExitStack() as stack:
        found: dict[Design, Target] = {}
        for design in designs:
            if design.is_floor:
                binary = stack.enter_context(_compiled()) if design.is_native else None
                found[design] = stack.enter_context(_floor(texts, binary))
            elif design.is_peer:
                python = pythons[design.name]
                peer = _peer(design, python, model_path, ids, texts)
                found[design] = stack.enter_context(peer)
        served = [design for design in designs if not (design.is_floor or design.is_peer)]
        if served:
            load = stack.enter_context(_load(texts))
            registry = load.engine.ask(token=_TOKEN, ids=ids)["registry"]
            commands = {
                design: _command(design, model_path, registry, more_args) for design in served
            }
            starting = {
                command: stack.enter_context(_Starting(command))
                for command in dict.fromkeys(commands.values())
            }
            ready = {command: each.wait(load) for command, each in starting.items()}
            found |= {design: ready[commands[design]] for design in served}
        yield found


def _cores() -> tuple[int, int]:
    """(core of the servers, core of what loads them); the same if there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[-1]


@contextmanager
def _socket_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@contextmanager
def _load(
    texts: list[str],
    module: str = "bench.frontend_engine",
    sockets: Sequence[socket.socket] = (),
    peer_python: str = "",
) -> Iterator[Load]:
    """An engine, and a client that it steers. module, sockets, peer_python: of the engine."""
    _, core = _cores()
    with (
        _socket_pair() as (steers, steered),
        closing(Child(module, [steers, *sockets], core, peer_python=peer_python)) as engine,
        closing(Child("bench.frontend_client", [steered], core)) as client,
    ):
        client.tell(texts=texts)
        yield Load(engine, client)


@contextmanager
def _compiled() -> Iterator[str]:
    """The path of the compiled frontend_floor.rs. Raises NoServer if it cannot be compiled."""
    if (compiler := shutil.which("rustc")) is None:
        raise NoServer("the native floor needs rustc on the PATH, got none")
    with tempfile.TemporaryDirectory() as name:
        binary = str(Path(name) / "floor")
        source = str(Path(__file__).with_name("frontend_floor.rs"))
        words = [compiler, "--edition", "2021", "-O", source, "-o", binary]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoServer(f"frontend_floor.rs does not compile:\n{done.stderr[-2000:]}")
        yield binary


@contextmanager
def _floor(texts: list[str], binary: str | None) -> Iterator[Target]:
    """The floor with an engine for it, and a client. binary: the native floor, if that serves."""
    core, _ = _cores()
    more = () if binary is None else (binary,)
    with (
        _socket_pair() as (to_floor, from_engine),
        _load(texts, sockets=[to_floor]) as load,
        closing(Child("bench.frontend_floor", [from_engine], core, more)) as floor,
    ):
        served = floor.ask(texts=texts)
        load.engine.ask()
        yield Target(Server(HOST, served["port"]), served["pid"], load, floor)


@contextmanager
def _peer(
    design: Design, python: str, model_path: Path, ids: list[int], texts: list[str]
) -> Iterator[Target]:
    """Another project's front end with an engine that speaks to it, and a client."""
    core, _ = _cores()
    with (
        PeerServer(design, python, model_path, core) as peer,
        _load(texts, design.module, peer_python=python) as load,
    ):
        load.engine.ask(ids=ids, **peer.addresses())
        peer.wait()
        yield Target(peer.server, peer.pid, load)


def _command(
    design: Design, model_path: Path, registry: str, more_args: Sequence[str]
) -> tuple[str, ...]:
    """The arguments of `python -m` for a server."""
    shared = ["--model-path", str(model_path), "--registry-address", registry]
    shared += ["--port", "0", "--max-inflight-requests", str(MOST_STREAMS)]
    more = more_args if design.is_product else []
    return (design.module, *shared, *more, *design.server_args)


class _Starting:
    """A server's process, from start to end."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self._log = self._stack.enter_context(tempfile.TemporaryFile())
            notify_read, notify_write = os.pipe()
            lifeline_fd = self._stack.enter_context(lifeline())
            self._notified = self._stack.enter_context(os.fdopen(notify_read))
            told = {
                TOKEN_ENV: _TOKEN,
                NOTIFY_ENV: str(notify_write),
                LIFELINE_ENV: str(lifeline_fd),
                "KVFERRY_LOG_LEVEL": "WARNING",
            }
            with deaf_children():
                self._process = subprocess.Popen(
                    [*words_of(self._command[0]), *self._command[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(notify_write, lifeline_fd),
                    env={name: os.environ[name] for name in os.environ if name != API_KEY_ENV}
                    | told,  # its client has no key
                )
            os.sched_setaffinity(self._process.pid, {_cores()[0]})
            self._stack.callback(self._process.wait)
            self._stack.callback(self._process.kill)
            os.close(notify_write)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait(self, load: Load) -> Target:
        """Wait until it is ready. Raises NoServer, or ConfigError for flags that it refuses."""
        ready = self._notified.read()  # until it is ready, or has ended
        server = parse_url(json.loads(ready)["url"], "") if ready else None
        if server is None or not wait_ready(server, self._process, _START_TIMEOUT_S):
            with suppress(subprocess.TimeoutExpired):  # if it ends, it does so after its last word
                self._process.wait(0.0 if ready else _END_S)
            raise not_ready(" ".join(self._command), self._log, self._process.returncode)
        return Target(server, self._process.pid, load)
