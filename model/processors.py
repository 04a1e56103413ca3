"""With how many threads programs run on a processor.

XLA splits each operation among its threads. Those of a small network take less time than waking
somebody for a part of them: all threads together are no faster than one there, and take the
processor from whoever shares it (docs/adr/0064).
"""

import importlib.metadata
import os
from typing import Final

# XLA reads them as it makes its client. Source: openxla/xla: xla/pjrt/utils.cc.
VARIABLES: Final = "PJRT_NPROC", "NPROC"
_SMALL: Final = 256  # hidden size; from 384 on chunks gain by a second thread


def take_threads(asked: int, hidden_size: int) -> None:
    """Tell XLA how many threads its client has. Call before it makes one.

    asked: 0 leaves it to whoever set XLA's variables; else one for a small network, and XLA's own
    choice, all processors, for any other. Where a plugin of JAX may have an accelerator, whose
    client reads them too, only what is asked is told.
    """
    if not asked:
        told = any(os.environ.get(name) for name in VARIABLES)
        if told or hidden_size > _SMALL or _has_plugins():
            return
    os.environ[VARIABLES[0]] = str(asked or 1)


def threads(num_devices: int) -> int:
    """How many XLA has on CPU: what it was told, or one a processor; at least one a device."""
    told = next(filter(None, map(os.environ.get, VARIABLES)), "")
    own = int(told) if told.isdecimal() else len(os.sched_getaffinity(0))
    return max(own, num_devices)


def _has_plugins() -> bool:
    return bool(importlib.metadata.entry_points(group="jax_plugins"))
