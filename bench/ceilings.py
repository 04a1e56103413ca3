"""The two ceilings of a device, measured: how fast it copies and how fast it multiplies."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.floors import Ceilings
from bench.report import Report
from bench.timing import seconds_per_call

# Large enough to leave every cache, small enough for a laptop.
COPY_BYTES = {"cpu": 256 << 20, "gpu": 4 << 30}
MATMUL_SIZE = {"cpu": 1536, "gpu": 8192}


def measure_ceilings(report: Report, dtype: str, budget_s: float = 1.0) -> Ceilings:
    """Measure both on jax's first device and report them. dtype: of the product's operands."""
    platform = "cpu" if jax.devices()[0].platform == "cpu" else "gpu"
    ceilings = Ceilings(
        copy_gb_s=copy_gb_s(COPY_BYTES[platform], budget_s),
        matmul_tflop_s=matmul_tflop_s(MATMUL_SIZE[platform], dtype, budget_s),
    )
    shapes = {
        "copy_bytes": COPY_BYTES[platform],
        "matmul": MATMUL_SIZE[platform],
        "dtype": dtype,
        "budget_s": budget_s,
    }
    report.add("ceiling", "device copy", ceilings.copy_gb_s, "GB/s", shapes=shapes)
    report.add("ceiling", f"matmul {dtype}", ceilings.matmul_tflop_s, "TFLOP/s", shapes=shapes)
    return ceilings


def copy_gb_s(num_bytes: int, budget_s: float) -> float:
    """GB read plus GB written a second, by passes over num_bytes."""
    held = jnp.ones(num_bytes // 4, jnp.float32)
    # An addition, since a plain copy may be elided; in place, since on a CPU fresh memory costs
    # more than the pass itself.
    bump = jax.jit(lambda x: x + np.float32(1.0), donate_argnums=0)

    def call() -> jax.Array:
        nonlocal held
        held = bump(held)
        return held

    return 2 * num_bytes / seconds_per_call(call, jax.block_until_ready, budget_s) / 1e9


def matmul_tflop_s(size: int, dtype: str, budget_s: float) -> float:
    """Rate of square products of this size, with a result in the dtype of the operands.

    XLA for CUDA accumulates in float32 all the same.
    """
    # Equal numbers would be faster: a GPU's clock falls with the bits that flip.
    left = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
    product = jax.jit(
        lambda x: lax.dot_general(x, x, (((1,), (0,)), ((), ())), preferred_element_type=x.dtype)
    )
    taken_s = seconds_per_call(lambda: product(left), jax.block_until_ready, budget_s)
    return 2.0 * size**3 / taken_s / 1e12
