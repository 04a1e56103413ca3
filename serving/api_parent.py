"""The parent of several API processes: claims their address, starts them and keeps them alive."""

import logging
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from serving.children import ChildSpec, Supervisor, all_ready, supervise
from serving.config import ServeConfig
from serving.folders import private_folder
from serving.listening import address_of, claimed_for_children
from serving.seat import Seat
from transfer import flags
from transfer.errors import ConfigError
from transfer.rpc import Security

log = logging.getLogger(__name__)

# Less than `up` gives this process. A child ends its streams, then its connections within 2 s.
_STOP_TIMEOUT_S = 6.0
_MAX_PATH_BYTES = 107  # of a Unix socket's path, on Linux


def run(config: ServeConfig, security: Security) -> None:
    """Serve with config.api_workers processes until told to stop, or until one fails for good."""
    flags.log_config(config)
    with claimed_for_children(config) as sock, _private_folder() as folder:
        # A process that dies with its supervisor does not leave the `with` block, and its children
        # may not know of the folder yet.
        flags.when_orphaned(partial(shutil.rmtree, folder, ignore_errors=True))
        # Only its owner can enter the folder. Each socket in it is named by a process's number.
        if len(f"{folder}/{config.api_workers}".encode()) > _MAX_PATH_BYTES:
            raise ConfigError(f"{folder} is too long for the path of a Unix socket: set TMPDIR")
        body = partial(_run, config, security, sock, folder)
        supervisor = Supervisor(security.token, _STOP_TIMEOUT_S, config.drain_timeout_s)
        supervise("serve", supervisor, body)


@contextmanager
def _private_folder() -> Iterator[str]:
    """A new folder that only this user can enter, removed at the end. Raises ConfigError."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(private_folder())
        except OSError as error:  # as in a container whose file system may only be read
            raise ConfigError(
                f"--api-workers needs a folder for sockets, and none can be made: {error}; set "
                "TMPDIR to a folder that may be written to"
            ) from error
        yield folder


async def _run(
    config: ServeConfig,
    security: Security,
    sock: socket.socket,
    folder: str,
    supervisor: Supervisor,
) -> None:
    specs = _specs(config, security, sock, folder)
    children = [await supervisor.start(spec) for spec in specs]
    await all_ready(children)
    address = address_of(sock)
    log.info("%d HTTP processes listen on %s", len(children), address)
    supervisor.is_ready = True
    flags.notify_ready(url=address.url, uds=address.uds, model=config.model_name)
    await supervisor.watch_all(children)


def _specs(
    config: ServeConfig, security: Security, sock: socket.socket, folder: str
) -> list[ChildSpec]:
    """Each child gets the server's whole config, and takes its share of it by its seat."""
    is_unix = sock.family == socket.AF_UNIX
    if not is_unix:
        config = replace(config, port=sock.getsockname()[1])
    argv = ("serving", *flags.argv_of(config), *flags.tls_argv_of(security))
    fds = (sock.fileno(),) if is_unix else ()
    seats = [
        Seat(process, config.api_workers, folder, fds[0] if fds else -1)
        for process in range(config.api_workers)
    ]
    secrets = flags.secrets_of(config)
    return [
        ChildSpec(f"api-{seat.process}", argv, (*seat.environment(), *secrets), fds, is_front=True)
        for seat in seats
    ]
