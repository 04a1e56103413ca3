"""Set JAX up for one worker process, before anything runs on a device."""

import os
from pathlib import Path

import jax

_SPARED = "no_grpc_proxy"  # a variable of gRPC's, which reads it in lower case only


def prepare_devices(num_devices: int, meeting_host: str = "") -> None:
    """Give CPU as many virtual devices as the mesh wants, and keep compiled programs on disk.

    Call once, before the first array, and before other threads, which may read the environment. On
    an accelerator the devices are those of the machine.
    meeting_host: node 0's host, where the mesh has several processes. JAX's client would otherwise
    reach it through the proxies of the environment, which are meant for remote hosts.
    The cache folder is JAX_COMPILATION_CACHE_DIR, or kvferry/jax under the user's cache folder; a
    user without a home has none. A mesh over several processes has only our own cache in it.
    """
    jax.config.update("jax_enable_x64", False)  # JAX_ENABLE_X64 would widen what programs index by
    jax.config.update("jax_numpy_rank_promotion", "allow")  # as our programs do
    jax.config.update("jax_disable_jit", False)  # they are compiled before there are any requests
    jax.config.update("jax_num_cpu_devices", num_devices)
    if meeting_host:
        os.environ[_SPARED] = ",".join(filter(None, (os.environ.get(_SPARED, ""), meeting_host)))
        # JAX keeps programs of node 0 alone, which then does not compile them with the others. On a
        # GPU, nodes that compile a program wait for what each of them measures.
        if not jax.config.jax_enable_compilation_cache:
            jax.config.update("jax_compilation_cache_dir", None)
            return
        jax.config.update("jax_enable_compilation_cache", False)
    folder = _cache_folder()
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "kvferry" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _cache_folder() -> Path | None:
    """The user's cache folder; None when JAX's variable names another, or there is none."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # no HOME, and a user id without an account
        return None
