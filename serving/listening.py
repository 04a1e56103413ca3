"""Claims the HTTP API's address, a port or a Unix socket, before anything is started."""

import ctypes
import logging
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from serving.config import ServeConfig
from serving.connection import Bound
from serving.folders import lock_of
from transfer import open_files, ports
from transfer.errors import ConfigError

log = logging.getLogger(__name__)

BACKLOG = 4096
_OWN_FILES = 64  # kept at least for workers, other API processes, certificates and the like
_PROBE_TIMEOUT_S = 1.0
_SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h
# A filter that drops requests for a connection: byte 13 of a TCP header has the flags, 2 is SYN.
_NO_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 2), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
_LOCK_TRIES, _LOCK_EACH_S = 100, 0.02  # longer than a probe of another server's takes


def bound_of(config: ServeConfig, on_surplus: Callable[[str], object]) -> Bound:
    """How many clients may be connected to this process, by the files that it may open.

    Logs a warning when that is less than the requests that are admitted. on_surplus: see Bound.
    """
    files = open_files.limit()
    own = max(_OWN_FILES, files // 8)
    most = max(1, files - own)
    admitted = config.max_inflight_requests + config.max_queued_requests
    if most < admitted:
        log.warning(
            "this process may open %d files, which is %d connections; %d requests are admitted "
            "(--max-inflight-requests, --max-queued-requests): raise the limit (ulimit -n)",
            files, most, admitted,
        )  # fmt: skip
    return Bound(most, own // 2, on_surplus)


@dataclass(frozen=True)
class Address:
    """How a client reaches the server. uds: the socket's absolute path; "" for a port."""

    url: str
    uds: str = ""

    def __str__(self) -> str:
        return f"unix:{self.uds}" if self.uds else self.url


def address_of(sock: socket.socket) -> Address:
    """The address of a bound socket."""
    if sock.family == socket.AF_UNIX:
        return Address("http://localhost", sock.getsockname())
    place = ports.host_port(*ports.bound_to(sock))
    return Address(f"http://{place.replace('%', '%25')}")  # as RFC 6874 writes a scope


def refuse_two_addresses(argv: Sequence[str]) -> None:
    """Raises ConfigError for --uds beside --host or --port, even if these have the defaults."""
    given = {word.partition("=")[0] for word in argv}
    for flag in ("--host", "--port"):
        if "--uds" in given and flag in given:
            raise ConfigError(f"--uds and {flag} exclude each other: give one address")


@contextmanager
def claimed(config: ServeConfig) -> Iterator[socket.socket]:
    """A socket that listens where no other does; a Unix socket is removed at the end.

    A client that connects before the server serves waits. Raises ConfigError, saying why, when the
    address cannot be had.
    """
    if not config.uds:
        with _bound(config) as sock:
            yield _listening(sock, config)
        return
    path = Path(config.uds).absolute()
    with socket.socket(socket.AF_UNIX) as sock:
        # Another server sees it either listen or not be there, unless somebody keeps the folder's
        # lock for reasons of theirs. If the folder cannot be opened, binding there says why.
        with lock_of(path.parent, _LOCK_TRIES, _LOCK_EACH_S):
            _clear(path)
            try:
                sock.bind(str(path))
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on --uds {path}: {error.strerror or error}"
                ) from error
            sock.listen(BACKLOG)
            own = _identity(path)
        try:
            yield sock
        finally:
            if _identity(path) == own:  # otherwise another process has put its own there
                path.unlink()


@contextmanager
def claimed_for_children(config: ServeConfig) -> Iterator[socket.socket]:
    """As `claimed`, for children: a Unix socket that listens, or a port held without listening.

    The holder of a port must not listen while its children do (`beside`): the kernel would hand it
    connections.
    """
    if config.uds:
        with claimed(config) as sock:
            yield sock
        return
    with _bound(config) as sock:
        if config.port:  # otherwise the kernel picked one that was free
            # Of servers that start at the same time, the first to listen gets the port. It keeps
            # the port after it stops listening, as no other socket may bind beside this one.
            _listening(sock, config)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            sock.shutdown(socket.SHUT_RDWR)
        # From now on the children, and no other server, may bind beside it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield sock


def beside(config: ServeConfig) -> socket.socket:
    """A child's own socket on the port that its parent holds; it does not listen yet.

    Raises ConfigError when another has the port.
    """
    return ports.bind(config.host, config.port, "--port", reuse_port=True)


def ensure_listening(sock: socket.socket, config: ServeConfig) -> None:
    """Listen just before the server serves. Raises ConfigError when another has the port."""
    if sock.family != socket.AF_UNIX:
        _listening(sock, config)


def take_no_more(sock: socket.socket) -> None:
    """Have the kernel give no new connection to a listening port, which keeps those that it has.

    To close the port alone would reset connections that are complete but not accepted, or nearly
    complete. Now it can be closed once these are accepted. A client that connects meanwhile tries
    again after a second, as its packet seems lost: then another process has the port, or none.
    A Unix socket has no such half-way states, and its queue may be that of other processes too.
    """
    if sock.family == socket.AF_UNIX:
        return
    steps = b"".join(struct.pack("HBBI", *step) for step in _NO_SYN)
    buffer = ctypes.create_string_buffer(steps)
    with suppress(OSError):  # a sandbox may not have it
        filter_ = struct.pack("@HP", len(_NO_SYN), ctypes.addressof(buffer))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)


def _bound(config: ServeConfig) -> socket.socket:
    return ports.bind(config.host, config.port, "--port")


def _listening(sock: socket.socket, config: ServeConfig) -> socket.socket:
    return ports.listen(sock, config.host, config.port, "--port", BACKLOG)


def _clear(path: Path) -> None:
    """Remove the socket of a server that is gone. Raises ConfigError for anything else there."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(kind):
        raise ConfigError(f"--uds {path}: expected no file, or a socket, got another kind of file")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except (TimeoutError, BlockingIOError):
            pass  # its backlog is full: somebody listens
        except OSError as error:
            raise ConfigError(f"--uds {path} cannot be reached: {error.strerror}") from error
    raise ConfigError(f"--uds {path} is in use: a server listens there; choose another path")


def _identity(path: Path) -> tuple[int, int] | None:
    """Identifies the file that is there now; None when there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
