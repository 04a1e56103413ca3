"""Checks of a config's fields: each raises ConfigError, naming the flag and its value."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from model.fields import is_endless
from transfer.errors import ConfigError
from transfer.flag_names import flag_name

MAX_TIMEOUT_S = 1_000_000  # what poll and timers of threads can wait for, rounded down


class NamedPath(NamedTuple):
    """One of several paths that a flag names: NAME=PATH."""

    name: str
    path: Path

    def __repr__(self) -> str:
        return f"{self.name}={self.path}"


def at_least(config: Any, name: str, least: float) -> None:
    value = getattr(config, name)
    if value < least:
        raise ConfigError(f"{flag_name(name)} must be at least {least}, got {value}")


def at_most(config: Any, name: str, most: float) -> None:
    value = getattr(config, name)
    if value > most:
        raise ConfigError(f"{flag_name(name)} must be at most {most}, got {value}")


def above_zero(config: Any, name: str) -> None:
    value = getattr(config, name)
    if not value > 0:
        raise ConfigError(f"{flag_name(name)} must be above 0, got {value}")


def check_port(config: Any, name: str) -> None:
    """A port, or 0 for any."""
    value = getattr(config, name)
    if not 0 <= value <= 65535:
        raise ConfigError(f"{flag_name(name)} must be 0 to 65535, got {value}")


def is_there(what: str, path: Path, test: Callable[[], bool]) -> bool:
    """The result of a test of the path, such as `path.is_file`; ConfigError if there is none."""
    try:
        return test()
    except OSError as error:  # such as a folder above it that this user may not enter
        raise ConfigError(f"{what}: {path} cannot be reached: {error.strerror}") from error


def is_folder(what: str, path: Path) -> None:
    """The path is a folder."""
    if not is_there(what, path, path.is_dir):
        raise ConfigError(f"{what}: {path} is not a folder")


def has_an_end(what: str, path: Path) -> None:
    """The path is no pipe, socket or device: its reader might wait, or read, without end."""
    if is_endless(path):
        raise ConfigError(f"{what}: {path} is a pipe, socket or device; expected a file")


def reachable(config: Any, name: str) -> None:
    """The address that peers are told is no wildcard."""
    if getattr(config, name) in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{flag_name(name)} is the address by which peers reach this worker, got "
            f"{getattr(config, name)}; give one of this host's own"
        )
