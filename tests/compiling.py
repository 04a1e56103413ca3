"""How XLA compiles in tests, and runs: in half the time, for programs that take longer.

Programs as they are compiled for whoever starts a server are those of three networks in
tests/serving/test_cluster_goldens.py, of every benchmark, and of a campaign of faults outside of
pytest. CI optimizes none of those that tests of model/ and bench/ compile in their own process.
"""

import os

from model import processors

QUICKLY = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters,xla_cpu_disable_loop_unrolling"
)
# In half of that again, for steps that take three times as long.
NOT_OPTIMIZED = "--xla_backend_optimization_level=0"
_DEVICES = "--xla_force_host_platform_device_count"


def prepare() -> None:
    """Before jax is imported: what this process compiles, and on how many devices.

    Whoever has set one of the flags is left it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    for flag in (f"{_DEVICES}=8", QUICKLY):
        if flag.split("=")[0] not in flags:
            flags = f"{flags} {flag}".strip()
    os.environ["XLA_FLAGS"] = flags
    # As small networks have it: all threads of eight devices together took twice the time of tests.
    os.environ.setdefault(processors.VARIABLES[0], "1")
    # Which line asked for each operation is in no program, and a seventh of the time to compile it.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


def of_systems(few_steps: bool = False) -> dict[str, str]:
    """The part of that which processes under test are given, too.

    few_steps: to those that make so few that compiling takes longer.
    """
    if QUICKLY not in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {"XLA_FLAGS": f"{QUICKLY} {NOT_OPTIMIZED}" if few_steps else QUICKLY}
