"""How many processors this process may use, and how many threads XLA runs its programs with.

XLA splits each operation among its threads. Operations of a small network take less time than
waking a thread for a part of them: there all threads together are no faster than one, and take
processors from other processes (docs/adr/0064).
"""

import importlib.metadata
import os
from pathlib import Path
from typing import Final

from model.control_groups import groups, number

# XLA reads them as it makes its client. Source: openxla/xla: xla/pjrt/utils.cc.
VARIABLES: Final = "PJRT_NPROC", "NPROC"
_SMALL: Final = 256  # hidden size; from 384 on chunks gain by a second thread


def is_small(hidden_size: int) -> bool:
    """Whether a network's operations take a CPU less time than what is around them."""
    return hidden_size <= _SMALL


def take_threads(asked: int, hidden_size: int) -> None:
    """Tell XLA how many threads its client has. Call before it makes one.

    asked: 0 means what XLA's variables say, if they are set; else one for a small network, and one
    per available processor for any other. Where a plugin of JAX may have an accelerator, whose
    client reads the variables too, they are set only if asked is not 0.
    """
    if not asked:
        if any(os.environ.get(name) for name in VARIABLES) or _has_plugins():
            return
        if not is_small(hidden_size) and available() == len(os.sched_getaffinity(0)):
            return  # XLA takes as many by itself
        asked = 1 if is_small(hidden_size) else available()
    os.environ[VARIABLES[0]] = str(asked)


def threads(num_devices: int) -> int:
    """Threads that XLA has on CPU: as told, or one per processor; at least one per device."""
    told = next(filter(None, map(os.environ.get, VARIABLES)), "")
    own = int(told) if told.isdecimal() else len(os.sched_getaffinity(0))
    return max(own, num_devices)


def available(root: Path = Path("/")) -> int:
    """Processors that this process may keep busy: those it may run on, or its container's quota.

    A quota is rounded up. More threads than that use it up early in each period, and then all of
    them stall until the next period begins. root: where /proc and /sys are.
    """
    quotas = [_quota(kind, folder) for kind, folder in groups("cpu", root)]
    return min([len(os.sched_getaffinity(0)), *(quota for quota in quotas if quota is not None)])


def _quota(kind: str, folder: Path) -> int | None:
    """The quota of a control group, in processors; None where it has none."""
    if kind == "cgroup":
        most, period = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
    else:
        try:
            most, period = map(int, (folder / "cpu.max").read_text().split())
        except (OSError, ValueError):  # "max 100000": no quota
            return None
    # Version 1 writes -1 for none.
    return -(-most // period) if most and period and most > 0 else None


def _has_plugins() -> bool:
    return bool(importlib.metadata.entry_points(group="jax_plugins"))
