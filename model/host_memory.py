"""How much memory this process may still take: of the host, and of the container it is in."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import psutil


class _Files(NamedTuple):
    """Of a control group: of either version, what its files for memory are called."""

    limits: tuple[str, ...]
    used: str
    idle: str  # in memory.stat: of files that nobody has read lately, which the kernel gives up


# By the type of file system. Source: docs.kernel.org: admin-guide/cgroup-v2, cgroup-v1/memory.
_FILES: Final = {
    "cgroup2": _Files(("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes(root: Path = Path("/")) -> int:
    """What the host has free, or a control group that this process is in, whichever is less.

    Beyond either the kernel kills somebody, and with it goes what was being served. root: where
    /proc and /sys are.
    """
    lefts = [_left(folder, _FILES[kind]) for kind, folder in _groups(root)]
    return min([psutil.virtual_memory().available, *(left for left in lefts if left is not None)])


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Of each group this process is in: the type of its file system, and its folder."""
    try:
        memberships = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:  # no Linux
        return
    paths: dict[str, str] = {}
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for mount in mounts:
        fields, _, of = mount.partition(" - ")
        kind, _, options = of.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        part, at = fields.split(" ")[3:5]
        # Of a path outside of what is mounted only the mount's own group is to be seen.
        own, seen = PurePosixPath(paths[kind]), PurePosixPath(part)
        inside = own.relative_to(seen) if own.is_relative_to(seen) else PurePosixPath()
        for folder in (inside, *inside.parents):
            yield kind, root / at.lstrip("/") / folder


def _left(folder: Path, files: _Files) -> int | None:
    """None where there is no limit, as in the root of all groups."""
    limits = [_number(folder / name) for name in files.limits]
    found, used = [limit for limit in limits if limit is not None], _number(folder / files.used)
    if not found or used is None:
        return None
    try:
        told = dict(line.split(" ") for line in (folder / "memory.stat").read_text().splitlines())
        idle = int(told.get(files.idle, "0"))
    except (OSError, ValueError):
        idle = 0
    return max(min(found) - used + idle, 0)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there; "max"
        return None
