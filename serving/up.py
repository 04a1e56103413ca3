"""`kvferry up`: starts and supervises a whole system on this machine, from a checkpoint to a URL.

Ctrl-C stops the children in order; SIGTERM does so once all requests that have arrived are
finished. The exit code is then 0. A worker that dies after it was ready is started again, and its
requests move meanwhile. If a child cannot start, everything ends with its exit code and last error
(serving/children.py).
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import secrets
import shlex
import socket
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from model.config import check_folder
from serving import api
from serving.children import ChildSpec, Supervisor, all_ready, in_time, supervise
from serving.config import ServeConfig
from serving.demo import demo_model_path
from serving.listening import Address, claimed, refuse_two_addresses
from transfer import flags, terminal
from transfer.errors import ConfigError
from transfer.flag_names import flag_name
from transfer.worker_config import ANY_PROMPT, WORKER_HELP, WorkerConfig

_PROBE_TIMEOUT_S = 5.0

# These flags of `up` take no role as a prefix: they go to prefill, decode and serve alike.
_REGISTRY_PORT = "--disaggregation-bootstrap-port"
_SHARED = ("model_path", "served_model_name", "context_length")
# Nor do these: workers of both roles must agree in them, or no page could pass between them.
_ALIKE = ("load_format", "lora_paths", "dtype", "page_size", "kv_cache_dtype")
# Their plain form is among the flags of `serve`; the last two then go to the workers as well.
_ALSO_OF_SERVE = ("max_queued_requests", "drain_timeout_s", "watchdog_timeout_s")
_MEETING_PORTS = range(20_000, 32_000)
_QUEUED = WorkerConfig.max_queued_requests
_MOST_GROUPS = 256  # of one role on one machine
_FILLED_IN = ("registry_address", "host", "port", "worker_id", "node_rank", "dist_init_addr")

Roles = dict[str, type[WorkerConfig]]


def main(argv: Sequence[str], prog: str, roles: Roles) -> None:
    """Start the system, print how to use it, and run until Ctrl-C.

    roles: each role's config type, by the name of its package.
    """
    args = _parser(prog, roles).parse_args(argv)
    refuse_two_addresses(argv)
    _settle_prefill(args, roles)
    model_path = args.model_path = Path(args.model_path or demo_model_path())
    # Each process checks its own flags again; checked here, they fail before anything starts.
    started = _started(args, roles)
    _refuse_one_file_for_several(
        args, {role: _worker_config(config, args, role, "") for role, config in started.items()}
    )
    front = flags.config_from(ServeConfig, args, registry_address="")
    check_folder(model_path)
    if front.chat_template:
        try:
            Path(front.chat_template).open("rb").close()
        except OSError as error:
            raise ConfigError(f"cannot read {front.chat_template}: {error}") from error
    for role in roles:
        count = getattr(args, role)
        if not 1 <= count <= _MOST_GROUPS and (role, count) != ("prefill", 0):
            raise ConfigError(f"--{role} must be 1 to {_MOST_GROUPS}, got {count}")
    if not 0 <= args.registry_port <= 65535:
        raise ConfigError(f"{_REGISTRY_PORT} must be 0 to 65535, got {args.registry_port}")
    with claimed(front):
        pass  # the address is free; the child claims it again
    given = flags.token_of_environment()
    token = flags.checked_token(given) if given else secrets.token_hex(32)
    supervisor = Supervisor(token, drain_timeout_s=front.drain_timeout_s)
    supervise("up", supervisor, partial(_start_and_watch, args=args, roles=roles))


def _parser(prog: str, roles: Roles) -> flags.Parser:
    parser = flags.Parser(prog=prog, description="start prefill, decode and the API on this host")
    texts = api.HELP | {"model_path": f"{api.HELP['model_path']}; default: the demo model"}
    texts |= {"context_length": WORKER_HELP["context_length"]}
    flags.add_flags(
        parser, ServeConfig, texts, skip=("registry_address",), optional=("model_path",)
    )
    for role in roles:
        parser.add_argument(
            f"--{role}",
            type=int,
            default=1,
            metavar="N",
            help=f"number of {role} workers to start (default: 1)",
        )
    parser.add_argument(
        "--colocated",
        action="store_true",
        help="run both roles in one process: no prefill worker; decode computes every prompt",
    )
    parser.add_argument(
        _REGISTRY_PORT,
        type=int,
        default=0,
        dest="registry_port",
        metavar="N",
        help="port of the registry on 127.0.0.1, for workers beside these; default: any free one",
    )
    parser.set_defaults(model_path=None, prefill=None)
    both = parser.add_argument_group("both roles")
    flags.add_flags(
        both,
        WorkerConfig,
        WORKER_HELP,
        skip=(*_SHARED, *_FILLED_IN, *_ALSO_OF_SERVE),
        optional=[field.name for field in fields(WorkerConfig)],
    )
    for role, config in roles.items():
        group = parser.add_argument_group(
            f"{role} only",
            f"--{role}-X sets X for {role} alone, whatever --X says to both roles. Both must agree "
            f"in {', '.join(map(flag_name, _ALIKE))}, which have no such form.",
        )
        skip = (*_SHARED, *_ALIKE, *_FILLED_IN, "data_host", "data_port")
        flags.add_flags(group, config, WORKER_HELP, prefix=role, skip=skip)
        own = {field.name for field in fields(config)} - {f.name for f in fields(WorkerConfig)}
        flags.add_flags(
            group,
            config,
            WORKER_HELP,
            skip=[f.name for f in fields(config) if f.name not in own or f.name in skip],
            optional=list(own),
        )
    return parser


def _settle_prefill(args: argparse.Namespace, roles: Roles) -> None:
    """Set the number of prefill groups; with none, decode computes every prompt.

    Raises ConfigError for flags that contradict this.
    """
    flag, local = "", 0
    for name in ("local_prefill_tokens", "decode_local_prefill_tokens"):  # the last one wins
        if name in args:
            flag, local = flag_name(name), getattr(args, name)
    if args.colocated:
        if args.prefill:
            raise ConfigError(f"--colocated starts no prefill group, got --prefill {args.prefill}")
        if flag and local != ANY_PROMPT:
            raise ConfigError(f"--colocated lets decode compute every prompt, got {flag} {local}")
        args.prefill, args.decode_local_prefill_tokens = 0, ANY_PROMPT
    if args.prefill is None:
        args.prefill = 1
    if args.prefill:
        return
    if not args.colocated and local != ANY_PROMPT:
        raise ConfigError(
            "with --prefill 0 nobody computes long prompts: give --local-prefill-tokens "
            f"{ANY_PROMPT} too, or --colocated instead; got {local}"
        )
    shared = {field.name for field in fields(WorkerConfig)}
    names = [name for x in fields(roles["prefill"]) for name in (x.name, f"prefill_{x.name}")]
    given = [name for name in names if name in args and name not in shared]
    if args.prefill_policy != ServeConfig.prefill_policy:
        given.append("prefill_policy")
    if given:
        asked = "--colocated" if args.colocated else "--prefill 0"
        raise ConfigError(
            f"{flag_name(given[0])} is for prefill, and {asked} starts no prefill group"
        )


def _refuse_one_file_for_several(
    args: argparse.Namespace, configs: dict[str, WorkerConfig]
) -> None:
    """Raises ConfigError if several groups would write one file: each counts its own rows."""
    writers: dict[str, list[str]] = {}
    for role, config in configs.items():
        if config.expert_distribution_file:
            groups = [f"{role}-{number}" for number in range(getattr(args, role))]
            writers.setdefault(config.expert_distribution_file, []).extend(groups)
    for file, groups in writers.items():
        if len(groups) > 1:
            raise ConfigError(
                f"--expert-distribution-file {file} would be written by {', '.join(groups)}: "
                "name it for one role that has one group, as --decode-expert-distribution-file"
            )


def _started(args: argparse.Namespace, roles: Roles) -> Roles:
    """The roles with at least one group."""
    return {role: config for role, config in roles.items() if getattr(args, role)}


def _starting(args: argparse.Namespace, roles: Roles) -> str:
    """The first line that is printed."""
    groups = [f"{getattr(args, role)} {role}" for role in _started(args, roles)]
    return f"kvferry: starting {', '.join(groups)} and the API on {args.model_path}"


async def _start_and_watch(supervisor: Supervisor, args: argparse.Namespace, roles: Roles) -> None:
    terminal.say(_starting(args, roles))
    watchdog = f"--watchdog-timeout={args.watchdog_timeout_s}"
    command, port = ("serving.launch", "registry", watchdog, _REGISTRY_PORT), args.registry_port
    registry = await supervisor.start(ChildSpec("registry", (*command, str(port))))
    address = (await all_ready([registry]))[0]["address"]
    # If it is started again, it must listen where the others look for it.
    registry.spec = ChildSpec("registry", (*command, address.rpartition(":")[2]))
    # Watched from here on: if the registry died unwatched, workers that are still loading would
    # look for it until the start times out.
    await supervisor.watch_all([registry], beside=_start_others(supervisor, address, args, roles))


async def _start_others(
    supervisor: Supervisor, address: str, args: argparse.Namespace, roles: Roles
) -> None:
    """Start the workers and the API; watch them once all are ready."""
    workers = [
        await supervisor.start(spec)
        for role, config in roles.items()
        for number in range(getattr(args, role))
        for spec in _group(role, config, number, address, args)
    ]
    front = await supervisor.start(_front(address, args))
    children = [*workers, front]
    facts = await all_ready(children)
    where, model = Address(facts[-1]["url"], facts[-1]["uds"]), facts[-1]["model"]
    if not where.uds:
        port = where.url.rpartition(":")[2]
        front.spec = replace(front.spec, argv=(*front.spec.argv, f"--port={port}"))

    async def tell() -> None:
        seeing = _all_see_workers(where, args.api_workers, args.api_key)
        await in_time(seeing, lambda: f"{where}, which does not see its workers,")
        supervisor.is_ready = True
        _say_ready(where, model, args.api_key)

    await supervisor.watch_all(children, beside=tell())


def _worker_config(
    config: type[WorkerConfig], args: argparse.Namespace, role: str, registry: str
) -> Any:
    """The role's config. Plain flags that are meant for the API process do not go into it."""
    own: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "max_queued_requests": _QUEUED}
    own = {name: getattr(args, f"{role}_{name}", value) for name, value in own.items()}
    if getattr(args, f"{role}_nnodes", getattr(args, "nnodes", 1)) > 1:
        own["dist_init_addr"] = "127.0.0.1:1"  # a placeholder: each group gets its own
    try:
        return flags.config_from(config, args, role, registry_address=registry, **own)
    except ConfigError as error:  # it names --dp-size where --decode-dp-size was given
        raise ConfigError(f"{role}: {error}") from error


def _group(
    role: str,
    config: type[WorkerConfig],
    number: int,
    registry: str,
    args: argparse.Namespace,
) -> Iterator[ChildSpec]:
    """The processes of one group, the leader first."""
    value, name = _worker_config(config, args, role, registry), f"{role}-{number}"
    if value.nnodes > 1:
        value = replace(value, dist_init_addr=f"127.0.0.1:{_free_port()}")
    for node in range(value.nnodes):
        argv = flags.argv_of(replace(value, node_rank=node))
        group = name if value.nnodes > 1 else ""
        child = f"{name}.{node}" if node else name
        yield ChildSpec(child, (role, *argv), is_worker=True, group=group)


def _free_port() -> int:
    """A port that is free now. The other nodes are told it before node 0 listens on it.

    It is below the ports that systems give to outgoing connections: many of those are opened before
    node 0 takes it.
    """
    while True:
        port = secrets.choice(_MEETING_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _front(registry: str, args: argparse.Namespace) -> ChildSpec:
    value = flags.config_from(ServeConfig, args, registry_address=registry)
    argv, secret = ("serving", *flags.argv_of(value)), flags.secrets_of(value)
    return ChildSpec("serve", argv, secret, is_front=True)


async def _all_see_workers(address: Address, num_processes: int, api_key: str) -> None:
    """Wait until every API process sees its workers."""

    def do() -> bool:
        info = _server_info(address, api_key)
        return bool(info) and info["ready"] and len(info["processes"]) == num_processes

    while not await asyncio.to_thread(do):  # noqa: ASYNC110  (a peer's state)
        await asyncio.sleep(0.1)


def _server_info(address: Address, api_key: str) -> dict[str, Any]:
    """What /get_server_info answers; {} while it does not. Ignores the shell's proxy settings."""
    if address.uds:
        connection: http.client.HTTPConnection = _UnixConnection(address.uds)
    else:
        place = unquote(address.url.removeprefix("http://"))
        connection = http.client.HTTPConnection(place, timeout=_PROBE_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
    try:
        connection.request("GET", "/get_server_info", headers=headers)
        reply = connection.getresponse()
        info: dict[str, Any] = json.load(reply) if reply.status == 200 else {}
        return info
    except (OSError, http.client.HTTPException):
        return {}
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_PROBE_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _say_ready(address: Address, model: str, api_key: str) -> None:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if api_key else ""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Tell me about the ferry."}],
            "max_tokens": 64,
            "stream": True,
        }
    )
    url = shlex.quote(f"{address.url}/v1/chat/completions")  # zsh expands the brackets of IPv6
    by = f"--unix-socket {shlex.quote(address.uds)} " if address.uds else ""
    terminal.say(
        f"\nkvferry is ready: {address}  (model {model})\n\nStream a completion:\n\n"
        f"  curl -N {by}{url} -H 'Content-Type: application/json'{key} "
        f"\\\n    -d {shlex.quote(body)}\n\nCtrl-C stops every process.\n"
    )
