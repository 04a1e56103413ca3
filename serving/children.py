"""Supervises child processes: starts them, waits until they are ready, restarts and stops them.

A child gets a pipe to say that it is ready, and another whose closing tells it that its parent is
gone. Each child has a session of its own, so Ctrl-C reaches only the parent, which stops the
children in order. A child that dies after it was ready is started again, up to MAX_RESTARTS times
in a row, after pauses that double; one that cannot start ends the parent with its exit code and
last error.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from transfer import flags, logs, terminal
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import KvferryError
from transfer.exit_codes import EXIT_CONFIG
from transfer.signals import DRAIN, draining_first, on_signals

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 1800.0  # a large checkpoint takes long to load
STOP_TIMEOUT_S = 8.0
RESTART_DELAY_S = 1.0  # twice as long each time in a row: memory that it lacked may need a while
MAX_RESTARTS = 5  # of one child, in a row
FORGIVEN_AFTER_S = 120.0  # a child that was ready for so long starts a new row
_HINTS = {  # by exit code
    -signal.SIGKILL: "killed, as the kernel does where memory runs out",
    -signal.SIGBUS: "a file in its memory became shorter, or its disk or shared memory is full",
}


class ChildFailed(KvferryError):
    """A child ended before it was ready, or too often; its own output says why."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ChildSpec:
    """How to start one process: `python -P -m argv`.

    environment: variables beside the parent's own. fds: open files that the child inherits.
    is_worker, is_front: on SIGTERM the child finishes its work first, so it is stopped by SIGINT.
    A worker that ends with code 0 was told to leave, and is not started again. Children in front
    take requests from outside, so a parent that drains has them finish theirs first.
    group: name shared by children that are useless without each other. When one dies, all are
    started again; when one leaves, all leave.
    """

    name: str
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    fds: tuple[int, ...] = ()
    is_worker: bool = False
    is_front: bool = False
    group: str = ""


class Child:
    """One running process of ours."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, ready_fd: int) -> None:
        self.spec = spec
        self.process = process
        self.ready_s: float | None = None  # monotonic, when it said that it is ready
        self.ready: asyncio.Task[dict[str, Any]] = asyncio.create_task(self._hear_ready(ready_fd))
        self.last_trouble = ""  # the last line that tells of something wrong
        self.followed = False  # killed as another of its group died: it must not kill others, too
        self.was_late = False  # killed as it was not ready in time
        self.output = asyncio.create_task(self._relay())

    @property
    def stop_signal(self) -> signal.Signals:
        """The signal that ends it soonest; before it is ready, Python itself handles SIGINT."""
        drains = self.spec.is_worker or self.spec.is_front
        return signal.SIGINT if drains and self.ready.done() else signal.SIGTERM

    async def wait_ready(self) -> dict[str, Any]:
        """The facts that the child sends when ready. Raises ChildFailed when it ends instead."""
        exited = asyncio.create_task(self.process.wait())
        await asyncio.wait({self.ready, exited}, return_when=asyncio.FIRST_COMPLETED)
        exited.cancel()
        facts = await self.ready  # {} if the process ended, which closes the pipe
        if facts:
            return facts
        code = await self.process.wait()
        await self.output
        raise self.failed(f"{self.ended_with(code)} before it was ready", code)

    async def ended(self) -> int:
        """The code with which it ends. If it is not ready in time, it is killed."""
        await asyncio.wait({self.ready}, timeout=READY_TIMEOUT_S)
        if not self.ready.done():
            self.was_late = True
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        return await self.process.wait()

    def ended_with(self, code: int) -> str:
        """How messages tell that it ended with this code."""
        if self.was_late:
            return f"was not ready after {READY_TIMEOUT_S:g} s and was killed"
        hint = _HINTS.get(code)
        return f"ended with code {code} ({hint})" if hint else f"ended with code {code}"

    def failed(self, what: str, code: int) -> ChildFailed:
        """The error of a child that ended, with the last that it said of anything wrong."""
        said = f": {self.last_trouble}" if self.last_trouble else "; it said of nothing wrong"
        return ChildFailed(f"{self.spec.name} {what}{said}", code)

    @property
    def served_s(self) -> float:
        """For how long it has been ready; 0.0 if it never was, however long it took to start."""
        return 0.0 if self.ready_s is None else SYSTEM_CLOCK.monotonic_s() - self.ready_s

    async def _hear_ready(self, fd: int) -> dict[str, Any]:
        facts = await _read_ready(fd)
        if facts:
            self.ready_s = SYSTEM_CLOCK.monotonic_s()
        return facts

    async def _relay(self) -> None:
        """Pass the child's lines on, with its name in front."""
        stream = self.process.stdout
        assert stream is not None
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than asyncio's limit; readline dropped that much
                continue
            if not line:
                return
            text = line.decode(errors="replace").strip()
            if not logs.is_calm(text):
                self.last_trouble = text
            terminal.complain(f"[{self.spec.name}] {text}")


class Supervisor:
    """Starts, watches, restarts and stops the children."""

    def __init__(
        self, token: str, stop_timeout_s: float = STOP_TIMEOUT_S, drain_timeout_s: float = 0.0
    ) -> None:
        """token: the cluster's; every child gets it in its environment.

        drain_timeout_s: how long the children in front may take to drain.
        """
        self._token = token
        self._stop_timeout_s = stop_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._children: list[Child] = []
        self._left: set[str] = set()  # groups of which a member was told to leave, and has left
        self._lifeline_read, self._lifeline_write = os.pipe()
        self.is_ready = False  # all first children are; set by the body of `supervise`
        self.draining = False  # no child in front is started again
        self.stopping = False

    async def start(self, spec: ChildSpec) -> Child:
        """Start a child; it is not ready yet. Raises ChildFailed if there is no room for it."""
        try:
            child = await self._start(spec)
        except OSError as error:  # out of processes, files or memory
            raise ChildFailed(f"{spec.name} cannot be started: {error}", 1) from error
        self._children.append(child)
        return child

    async def _start(self, spec: ChildSpec) -> Child:
        ready_read, ready_write = os.pipe()
        environment = {
            **os.environ,
            **dict(spec.environment),
            flags.TOKEN_ENV: self._token,
            flags.NOTIFY_ENV: str(ready_write),
            flags.LIFELINE_ENV: str(self._lifeline_read),
            "PYTHONUNBUFFERED": "1",
        }
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the current folder may have a model.py of its own
                "-m",
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                pass_fds=(ready_write, self._lifeline_read, *spec.fds),
                start_new_session=True,
            )
        except BaseException:
            os.close(ready_read)
            raise
        finally:
            os.close(ready_write)
        return Child(spec, process, ready_read)

    async def watch(self, child: Child) -> None:
        """Keep a child alive. Raises ChildFailed when it ends too often, or with EXIT_CONFIG."""
        restarts = 0
        while True:
            code = await child.ended()
            served_s = child.served_s
            if self.stopping:
                return
            name = child.spec.name
            self._children.remove(child)
            if self.draining and child.spec.is_front:
                return
            if child.spec.is_worker and code == 0:
                told = f"{name} has left, as it was told: it is not started again"
                role, mates = child.spec.argv[0], self._group_of(child)
                others = [other for other in self._children if other.spec.argv[0] == role]
                if len(others) > len(mates):
                    log.info("%s", told)
                else:
                    log.warning("%s, and up has no other %s worker", told, role)
                self._left.add(child.spec.group)
                for other in mates:  # they would wait for it
                    with contextlib.suppress(ProcessLookupError):
                        other.process.terminate()
                return
            restarts = 1 if served_s > FORGIVEN_AFTER_S else restarts + 1
            if code == EXIT_CONFIG or restarts > MAX_RESTARTS:
                await child.output
                raise child.failed(f"{child.ended_with(code)}, {restarts} time(s) in a row", code)
            log.warning("%s %s: starting it again", name, child.ended_with(code))
            again = await self._start_again(child, restarts)
            if again is None:
                return
            child, restarts = again

    async def _start_again(self, ended: Child, restarts: int) -> tuple[Child, int] | None:
        """Start it again: the new child and its restarts in a row; None when none is needed.

        None is needed once its group has left, or if it is in front and those in front drain.
        Raises ChildFailed after too many restarts.
        """
        others = [] if ended.followed else self._group_of(ended)
        while True:
            await asyncio.sleep(RESTART_DELAY_S * 2 ** (restarts - 1))
            if ended.spec.group and ended.spec.group in self._left:
                log.info("%s is not started: its group has left", ended.spec.name)
                return None
            if self.draining and ended.spec.is_front:
                return None
            for other in others:  # a member still alive hangs: healthy ones left without the child
                if other.process.returncode is None:
                    other.followed = True
                    other.process.kill()
            try:
                return await self.start(ended.spec), restarts
            except ChildFailed as error:  # what it lacks may be there later
                restarts += 1
                if restarts > MAX_RESTARTS:
                    what = f"cannot be started again, {restarts} time(s) in a row ({error})"
                    raise ended.failed(what, 1) from error
                log.warning("%s; trying again", error)

    def _group_of(self, ended: Child) -> list[Child]:
        """The running members of its group, which are useless without it."""
        group = ended.spec.group
        return [child for child in self._children if group and child.spec.group == group]

    async def watch_all(
        self, children: Sequence[Child], beside: Coroutine[Any, Any, None] | None = None
    ) -> None:
        """Keep the children alive and run `beside`. Raises the first error of either."""
        try:
            async with asyncio.TaskGroup() as group:
                for child in children:
                    group.create_task(self.watch(child))
                if beside is not None:
                    group.create_task(beside)
        except BaseExceptionGroup as errors:
            raise (errors.subgroup(ChildFailed) or errors).exceptions[0] from None

    async def drain(self) -> None:
        """Have the children in front finish their requests; the others are kept alive meanwhile.

        Kills those that take longer than they may and, after that, than to stop: told once more by
        `stop`, they would only take the others' time.
        """
        self.draining = True
        fronts = [child for child in self._children if child.spec.is_front]
        waits = [asyncio.create_task(child.process.wait()) for child in fronts]
        for child in fronts:
            with contextlib.suppress(ProcessLookupError):  # one that is not ready has no work
                child.process.send_signal(DRAIN if child.ready.done() else signal.SIGTERM)
        if waits:
            await asyncio.wait(waits, timeout=self._drain_timeout_s + self._stop_timeout_s)
        for child in fronts:
            if child.process.returncode is None:
                log.warning("%s does not drain: killed", child.spec.name)
                child.process.kill()

    async def stop(self) -> None:
        """Stop all children; kill those that do not stop in time.

        Those in front first, then workers, then what both need: told all at once, one would warn
        that another is lost. What hangs delays those behind it, by a quarter of the time each.
        """
        self.stopping = True
        fronts = [child for child in self._children if child.spec.is_front]
        workers = [child for child in self._children if child.spec.is_worker]
        others = [child for child in self._children if child not in (*fronts, *workers)]
        waits: list[asyncio.Task[int]] = []
        for told in (fronts, workers, others, []):
            for child in told:
                if child.process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        child.process.send_signal(child.stop_signal)
                waits.append(asyncio.create_task(child.process.wait()))
            if waits:
                await asyncio.wait(waits, timeout=self._stop_timeout_s / 4)
        left = [child for child in self._children if child.process.returncode is None]
        for child in left:
            log.warning("%s does not stop: killed", child.spec.name)
            child.process.kill()
        ends = [asyncio.create_task(child.process.wait()) for child in left]
        if ends:  # one that waits for a disk or a driver does not even end then
            await asyncio.wait(ends, timeout=self._stop_timeout_s)
        os.close(self._lifeline_write)


Body = Callable[[Supervisor], Coroutine[Any, Any, None]]


def supervise(command: str, supervisor: Supervisor, body: Body) -> None:
    """Run the body, which starts and watches children, until told to leave; then stop them.

    SIGTERM drains first. SIGINT, a second SIGTERM, or a SIGTERM before all is ready stops all at
    once. A child that failed for good ends this process too, whose last line quotes its last error:
    raises SystemExit, with code 2 when that was the child's, else 1.
    """
    try:
        asyncio.run(_until_told(command, supervisor, body))
    except ChildFailed as error:
        terminal.complain(f"kvferry {command}: {error}")
        raise SystemExit(EXIT_CONFIG if error.code == EXIT_CONFIG else 1) from error


async def _until_told(command: str, supervisor: Supervisor, body: Body) -> None:
    drain, stop = asyncio.Event(), asyncio.Event()

    async def drained() -> None:
        await drain.wait()
        terminal.say(f"kvferry {command}: draining")
        await supervisor.drain()
        stop.set()

    told = draining_first(drain.set, stop.set, lambda: supervisor.is_ready, drain.is_set)
    with on_signals(told):
        stopped = asyncio.create_task(stop.wait())
        running = asyncio.create_task(body(supervisor))
        draining = asyncio.create_task(drained())
        try:
            await asyncio.wait({stopped, running}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            draining.cancel()
            running.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError, ChildFailed):
                    await running
            finally:  # whatever the body raised, the children have to be stopped
                if stopped.done():
                    terminal.say(f"kvferry {command}: stopping")
                await supervisor.stop()


async def all_ready(children: Sequence[Child]) -> list[dict[str, Any]]:
    """The facts that each child sends when ready. Raises ChildFailed if one ends, or is late."""

    def late() -> str:
        return ", ".join(child.spec.name for child in children if not child.ready.done())

    return await in_time(asyncio.gather(*(child.wait_ready() for child in children)), late)


async def in_time[T](awaited: Awaitable[T], late: Callable[[], str]) -> T:
    """The result, if it comes within READY_TIMEOUT_S. Otherwise ChildFailed about late()."""
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            return await awaited
    except TimeoutError:
        raise ChildFailed(f"{late()} not ready after {READY_TIMEOUT_S:g} s", 1) from None


async def _read_ready(fd: int) -> dict[str, Any]:
    """The one JSON line a child writes when ready; {} when it closes the pipe without."""
    with os.fdopen(fd) as pipe:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            data = await reader.read()
        finally:
            transport.close()
    facts: dict[str, Any] = json.loads(data) if data else {}
    return facts
