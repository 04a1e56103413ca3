"""XLA flags for tests: programs compile in half the time, and run more slowly.

Programs compiled as for users are those of three networks in
tests/serving/test_cluster_goldens.py, those of all benchmarks, and those of a fault campaign run
outside pytest. CI turns off optimization for the programs that tests of model/ and bench/ compile
in their own process.
"""

import os

from model import processors

QUICKLY = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters,xla_cpu_disable_loop_unrolling"
)
# Halves that time again, for steps that take three times as long.
NOT_OPTIMIZED = "--xla_backend_optimization_level=0"
_DEVICES = "--xla_force_host_platform_device_count"


def prepare() -> None:
    """Set, before jax is imported, the flags of this process and its number of devices.

    Flags that are already set stay as they are.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for flag in (f"{_DEVICES}=8", QUICKLY):
        if flag.split("=")[0] not in flags:
            flags = f"{flags} {flag}".strip()
    os.environ["XLA_FLAGS"] = flags
    # One thread, enough for small networks: all threads of eight devices doubled the time of tests.
    os.environ.setdefault(processors.VARIABLES[0], "1")
    # Source locations are not part of a program, and recording them took a seventh of compile time.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


def of_systems(few_steps: bool = False) -> dict[str, str]:
    """The compiler flags that processes under test get as well.

    few_steps: for processes that make so few steps that compiling takes longer than running.
    """
    if QUICKLY not in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {"XLA_FLAGS": f"{QUICKLY} {NOT_OPTIMIZED}" if few_steps else QUICKLY}
