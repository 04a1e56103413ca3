"""Set JAX up for one worker process, before anything runs on a device."""

import os
from pathlib import Path

import jax


def prepare_devices(num_devices: int) -> None:
    """Give CPU as many virtual devices as the mesh wants, and keep compiled programs on disk.

    Call once, before the first array. On an accelerator the devices are those of the machine.
    The cache folder is JAX_COMPILATION_CACHE_DIR, or kvferry/jax under the user's cache folder.
    """
    jax.config.update("jax_num_cpu_devices", num_devices)
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(base / "kvferry" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
