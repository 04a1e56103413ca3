"""`kvferry up`: one of everything on this machine, supervised, from a checkpoint to a URL.

Children get a pipe to say that they are ready and another whose closing tells them that their
parent is gone. Each is in a session of its own, so Ctrl-C reaches only the parent, which stops
them in order; the exit code is 0 then. A worker that dies after ready is started again; its
requests move meanwhile. A child that cannot start ends all with its exit code and last line.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from serving import api
from serving.config import ServeConfig
from serving.demo import demo_model_path
from transfer import flags
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import ConfigError, KvferryError
from transfer.worker_config import WorkerConfig

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 1800.0  # a large checkpoint takes its time
STOP_TIMEOUT_S = 8.0
RESTART_DELAY_S = 1.0
MAX_RESTARTS = 5  # of one child, in a row
FORGIVEN_AFTER_S = 120.0  # a child that lived so long starts a new row

# Flags of `up` without a role in front go to prefill, decode and serve alike.
_SHARED = ("model_path", "served_model_name", "context_length")
_QUEUED = WorkerConfig.max_queued_requests
_FILLED_IN = ("registry_address", "host", "port", "worker_id")


class ChildFailed(KvferryError):
    """A child ended before it was ready, or too often; its own output says why."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ChildSpec:
    """How to start one process."""

    name: str
    argv: tuple[str, ...]


class Child:
    """One running process of ours."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, ready_fd: int) -> None:
        self.spec = spec
        self.process = process
        self.ready: asyncio.Task[dict[str, Any]] = asyncio.create_task(_read_ready(ready_fd))
        self.last_line = ""
        self.output = asyncio.create_task(self._relay())

    async def wait_ready(self) -> dict[str, Any]:
        """What the child says when it is ready. Raises ChildFailed when it ends instead."""
        exited = asyncio.create_task(self.process.wait())
        await asyncio.wait({self.ready, exited}, return_when=asyncio.FIRST_COMPLETED)
        exited.cancel()
        facts = await self.ready  # the pipe closes with the process: {} then
        if facts:
            return facts
        code = await self.process.wait()
        await self.output
        raise self.failed(f"ended with code {code} before it was ready", code)

    def failed(self, what: str, code: int) -> ChildFailed:
        """The error of a child that ended, with the last that it said."""
        said = f": {self.last_line}" if self.last_line else ""
        return ChildFailed(f"{self.spec.name} {what}{said}", code)

    async def _relay(self) -> None:
        """Pass the child's lines on, with its name in front."""
        stream = self.process.stdout
        assert stream is not None
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than asyncio's limit: that much was dropped
                continue
            if not line:
                return
            self.last_line = line.decode(errors="replace").strip()
            sys.stderr.write(f"[{self.spec.name}] {self.last_line}\n")
            sys.stderr.flush()


class Supervisor:
    """Starts, watches, restarts and stops the children."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._children: list[Child] = []
        self._lifeline_read, self._lifeline_write = os.pipe()
        self.stopping = False

    async def start(self, spec: ChildSpec) -> Child:
        """Start a child; it is not ready yet."""
        ready_read, ready_write = os.pipe()
        environment = {
            **os.environ,
            flags.TOKEN_ENV: self._token,
            flags.NOTIFY_ENV: str(ready_write),
            flags.LIFELINE_ENV: str(self._lifeline_read),
            "PYTHONUNBUFFERED": "1",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            pass_fds=(ready_write, self._lifeline_read),
            start_new_session=True,
        )
        os.close(ready_write)
        child = Child(spec, process, ready_read)
        self._children.append(child)
        return child

    async def watch(self, child: Child) -> None:
        """Keep a child alive. Raises ChildFailed when it ends too often or for good reason."""
        restarts = 0
        while True:
            started_s = SYSTEM_CLOCK.monotonic_s()
            code = await child.process.wait()
            if self.stopping:
                return
            name = child.spec.name
            self._children.remove(child)
            lived_s = SYSTEM_CLOCK.monotonic_s() - started_s
            restarts = 1 if lived_s > FORGIVEN_AFTER_S else restarts + 1
            if code == flags.EXIT_CONFIG or restarts > MAX_RESTARTS:
                await child.output
                raise child.failed(f"ended with code {code}, {restarts} time(s) in a row", code)
            log.warning("%s ended with code %d: starting it again", name, code)
            await asyncio.sleep(RESTART_DELAY_S)
            child = await self.start(child.spec)

    async def stop(self) -> None:
        """Stop all, the latest started first; whoever does not is killed."""
        self.stopping = True
        for child in reversed(self._children):
            if child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(signal.SIGTERM)
        waits = [asyncio.create_task(child.process.wait()) for child in self._children]
        if waits:
            await asyncio.wait(waits, timeout=STOP_TIMEOUT_S)
        for child in self._children:
            if child.process.returncode is None:
                log.warning("%s does not stop: killed", child.spec.name)
                child.process.kill()
                await child.process.wait()
        os.close(self._lifeline_write)


Roles = dict[str, type[WorkerConfig]]


def main(argv: Sequence[str], prog: str, roles: Roles) -> None:
    """Start the system, print how to use it, run until Ctrl-C.

    roles: each role's config type, by the name of its package.
    """
    args = _parser(prog, roles).parse_args(argv)
    model_path = args.model_path = Path(args.model_path or demo_model_path())
    # Each process checks its own flags again; here they fail before anything starts.
    for role, config in roles.items():
        _worker_config(config, args, role, "")
    flags.config_from(ServeConfig, args, registry_address="")
    if not model_path.is_dir():
        raise ConfigError(f"--model-path {model_path} is not a folder")
    for count in roles:
        if getattr(args, count) < 1:
            raise ConfigError(f"--{count} must be at least 1, got {getattr(args, count)}")
    flags.listen(args.host, args.port, "--port").close()
    try:
        asyncio.run(_run(args, roles))
    except ChildFailed as error:
        sys.stderr.write(f"kvferry up: {error}\n")
        raise SystemExit(flags.EXIT_CONFIG if error.code == flags.EXIT_CONFIG else 1) from error


def _parser(prog: str, roles: Roles) -> flags.Parser:
    parser = flags.Parser(prog=prog, description="start prefill, decode and the API here")
    flags.add_flags(
        parser, ServeConfig, api.HELP, skip=("registry_address",), optional=("model_path",)
    )
    parser.set_defaults(model_path=None)
    for role in roles:
        parser.add_argument(
            f"--{role}", type=int, default=1, metavar="N", help=f"number of {role} groups"
        )
    both = parser.add_argument_group("both roles")
    flags.add_flags(
        both,
        WorkerConfig,
        flags.WORKER_HELP,
        skip=(*_SHARED, *_FILLED_IN, "max_queued_requests"),
        optional=[field.name for field in fields(WorkerConfig)],
    )
    for role, config in roles.items():
        group = parser.add_argument_group(f"{role} only")
        skip = (*_SHARED, *_FILLED_IN, "data_host", "data_port")
        flags.add_flags(group, config, flags.WORKER_HELP, prefix=role, skip=skip)
        own = {field.name for field in fields(config)} - {f.name for f in fields(WorkerConfig)}
        flags.add_flags(
            group,
            config,
            flags.WORKER_HELP,
            skip=[f.name for f in fields(config) if f.name not in own or f.name in skip],
            optional=list(own),
        )
    return parser


async def _run(args: argparse.Namespace, roles: Roles) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    supervisor = Supervisor(secrets.token_hex(32))
    stopped = asyncio.create_task(stop.wait())
    running = asyncio.create_task(_start_and_watch(supervisor, args, roles))
    try:
        await asyncio.wait({stopped, running}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, ChildFailed):
            await running
        if stopped.done():
            flags.say("kvferry: stopping")
        await supervisor.stop()


async def _start_and_watch(supervisor: Supervisor, args: argparse.Namespace, roles: Roles) -> None:
    flags.say(
        "kvferry: starting "
        + ", ".join(f"{getattr(args, role)} {role}" for role in roles)
        + f" and the API on {args.model_path}"
    )
    port_flag = "--disaggregation-bootstrap-port"
    command = ("serving.launch", "registry", port_flag)
    registry = await supervisor.start(ChildSpec("registry", (*command, "0")))
    address = (await registry.wait_ready())["address"]
    # Started again, it must be where the others look for it.
    registry.spec = ChildSpec("registry", (*command, address.rpartition(":")[2]))
    workers = [
        await supervisor.start(_worker(role, config, number, address, args))
        for role, config in roles.items()
        for number in range(getattr(args, role))
    ]
    front = await supervisor.start(_front(address, args))
    children = [registry, *workers, front]
    facts = await _in_time(asyncio.gather(*(child.wait_ready() for child in children[1:])))
    url, model = facts[-1]["url"], facts[-1]["model"]
    front.spec = replace(front.spec, argv=(*front.spec.argv, f"--port={url.rpartition(':')[2]}"))
    try:
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(supervisor.watch(child))
            await _in_time(_healthy(url))
            _say_ready(url, model, args.api_key)
    except BaseExceptionGroup as errors:
        failed = errors.subgroup(ChildFailed)
        raise (failed.exceptions[0] if failed else errors) from None


def _worker_config(
    config: type[WorkerConfig], args: argparse.Namespace, role: str, registry: str
) -> Any:
    """The role's config. Flags that mean the API process when plain are not taken from there."""
    own: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "max_queued_requests": _QUEUED}
    own = {name: getattr(args, f"{role}_{name}", value) for name, value in own.items()}
    return flags.config_from(config, args, role, registry_address=registry, **own)


def _worker(
    role: str,
    config: type[WorkerConfig],
    number: int,
    registry: str,
    args: argparse.Namespace,
) -> ChildSpec:
    value = _worker_config(config, args, role, registry)
    return ChildSpec(f"{role}-{number}", (role, *_argv(value, skip=())))


def _front(registry: str, args: argparse.Namespace) -> ChildSpec:
    value = flags.config_from(ServeConfig, args, registry_address=registry)
    return ChildSpec("serve", ("serving", *_argv(value, skip=())))


def _argv(config: Any, skip: Sequence[str]) -> list[str]:
    """A config as the flags that make it again; defaults are left out."""
    argv: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in skip or value == field.default:
            continue
        name = flags.flag_name(field.name)
        if isinstance(value, bool):
            argv.append(name if value else name.replace("--", "--no-", 1))
        else:
            argv.append(f"{name}={value}")
    return argv


async def _in_time[T](awaited: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            return await awaited
    except TimeoutError:
        raise ChildFailed(f"not ready after {READY_TIMEOUT_S:.0f} s", 1) from None


async def _healthy(url: str) -> None:
    """Wait until the API process sees its workers."""
    while not await asyncio.to_thread(_probe, f"{url}/health"):  # noqa: ASYNC110  (a peer's state)
        await asyncio.sleep(0.1)


def _probe(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever the shell says
    try:
        with direct.open(url, timeout=2.0) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _say_ready(url: str, model: str, api_key: str) -> None:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if api_key else ""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Tell me about the ferry."}],
            "max_tokens": 64,
            "stream": True,
        }
    )
    flags.say(
        f"\nkvferry is ready: {url}  (model {model})\n\nStream a completion:\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"\\\n    -d '{body}'\n\nCtrl-C stops every process.\n"
    )


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
