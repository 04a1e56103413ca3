"""The control groups that this process is in: what a container may use of its host."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[str, Path]]:
    """The group that controls this process's "memory" or "cpu", and every group around it.

    Yields the type of its file system, "cgroup" or "cgroup2", and its folder; nothing where there
    are no groups. root: where /proc and /sys are.
    Source: docs.kernel.org: admin-guide/cgroup-v2, admin-guide/cgroup-v1.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    paths: dict[str, str] = {}
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif controller in controllers.split(","):
            paths["cgroup"] = path
    for mount in mounts:
        fields, _, of = mount.partition(" - ")
        kind, _, options = of.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and controller not in options.split(",")):
            continue
        part, at = fields.split(" ")[3:5]
        # If the path lies outside of what is mounted, only the group at the mount is visible.
        own, seen = PurePosixPath(paths[kind]), PurePosixPath(part)
        inside = own.relative_to(seen) if own.is_relative_to(seen) else PurePosixPath()
        for folder in (inside, *inside.parents):
            yield kind, root / at.lstrip("/") / folder


def number(file: Path) -> int | None:
    """The number in a group's file; None where there is no such file, or no number ("max")."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
