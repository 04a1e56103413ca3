"""How much memory this process may still take: of the host, and of the container it is in."""

import ctypes
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from model.control_groups import groups, number


class _Files(NamedTuple):
    """How one version of control groups names its files about memory."""

    limits: tuple[str, ...]
    used: str
    prefix: str  # of the fields of memory.stat that count the groups within, too


# By the type of file system. Source: docs.kernel.org: admin-guide/cgroup-v2, cgroup-v1/memory.
_FILES: Final = {
    "cgroup2": _Files(("memory.max", "memory.high"), "memory.current", ""),
    "cgroup": _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
}
# Cached files, whose memory the kernel reclaims. Active ones were read twice, no more: a checkpoint
# is active as soon as two workers have read it. The host's figure has both kinds as free, too.
_CACHED: Final = ("inactive_file", "active_file")


def available_bytes(root: Path = Path("/")) -> int:
    """What is free in the host, or in a control group that this process is in: the least of all.

    Beyond that the kernel kills a process, and what it was serving is lost. root: where /proc and
    /sys are.
    """
    lefts = [_left(folder, _FILES[kind]) for kind, folder in groups("memory", root)]
    return min([psutil.virtual_memory().available, *(left for left in lefts if left is not None)])


def total_bytes(root: Path = Path("/")) -> int:
    """What would be free at most, with nothing else running."""
    limits = [_limit(folder, _FILES[kind]) for kind, folder in groups("memory", root)]
    return min([psutil.virtual_memory().total, *(limit for limit in limits if limit is not None)])


def give_back_freed() -> None:
    """Return to the host what this process has freed: malloc keeps hundreds of MB of a compiler's.

    Nothing happens where the C library is not glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _limit(folder: Path, files: _Files) -> int | None:
    """What a group may use; None where it has no limit, as the root of all groups."""
    limits = [number(folder / name) for name in files.limits]
    return min([limit for limit in limits if limit is not None], default=None)


def _left(folder: Path, files: _Files) -> int | None:
    """Free memory of a group; None where it has no limit."""
    limit, used = _limit(folder, files), number(folder / files.used)
    if limit is None or used is None:
        return None
    try:
        told = dict(line.split(" ") for line in (folder / "memory.stat").read_text().splitlines())
        cached = sum(int(told.get(files.prefix + name, "0")) for name in _CACHED)
    except (OSError, ValueError):
        cached = 0
    return max(limit - used + cached, 0)
