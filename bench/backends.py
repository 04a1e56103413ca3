"""Every kernel backend that serves a shape against the plain reference, on random inputs.

What it is compared with is the reference as for a processor, of float32 queries: smaller blocks,
and products of attention in float32. On an accelerator the reference itself takes another form,
which is compared, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import KernelBench
from bench.report import Report
from model import kernels
from model.kernels import Backend

# Of the largest number that comes out. Wrong pages or masks give more than a tenth.
TOLERANCES: Final = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 2e-2}


def compare_backends(report: Report, bench: KernelBench) -> bool:
    """Relative distance of each backend to the reference, per operation; refusals are said.

    Returns whether none is too far from it.
    """
    network, shape = bench.model, bench.shape
    dims, cfg = network.dims, shape.cfg
    attention = kernels.attention_shape(cfg, dims, network.target, shape.dtype, shape.page_size)
    bench.fill_pool()
    slots, chunk = max(shape.slots), max(shape.chunks)
    compare = _Comparison(report, shape.name, shape.dtype)
    for name, (layer, *_) in bench.attention_layers().items():
        inputs = bench.decode_attention_inputs(slots, layer)
        compare(f"decode {name} x{slots}", kernels.DECODE_ATTENTION, attention, inputs)
        inputs = bench.prefill_attention_inputs(chunk, layer)
        compare(f"prefill {name} {chunk}", kernels.PREFILL_ATTENTION, attention, inputs)
    if cfg.num_experts:
        experts = kernels.experts_shape(cfg, dims, network.target, shape.dtype)
        for tokens in (slots, chunk):
            inputs = bench.experts_inputs(tokens)
            compare(f"experts {tokens} tokens", kernels.EXPERTS, experts, inputs)
    return compare.all_near


class _Comparison:
    def __init__(self, report: Report, name: str, dtype: str) -> None:
        self._report = report
        self._shapes = {"shape": name, "dtype": dtype}
        self._tolerance = TOLERANCES[dtype]
        self.all_near = True

    def __call__(
        self, operation: str, backends: Sequence[Backend], shape: Any, inputs: tuple[Any, ...]
    ) -> None:
        case = f"{self._shapes['shape']} {operation}"
        plain = next(backend for backend in backends if backend.name == "reference")
        compared = [backend for backend in backends if backend is not plain]
        if shape.platform != "cpu":
            compared.append(plain)
        if not compared:
            print(f"{case}: no backend but the reference", file=self._report.out)
            return
        rows, *others = inputs
        kernel = plain.build(replace(shape, platform="cpu"))
        expected = _run(kernel, (rows.astype(jnp.float32), *others))
        scale = float(np.abs(expected).max()) or 1.0
        for backend in compared:
            try:
                kernel = backend.build(shape)
            except NotImplementedError as refusal:
                print(f"{case}: {backend.name} refuses: {refusal}", file=self._report.out)
                continue
            error = float(np.abs(_run(kernel, inputs) - expected).max()) / scale
            metric = f"{backend.name} off reference"
            self._report.add(case, metric, error, "error", self._tolerance, shapes=self._shapes)
            self.all_near = self.all_near and error <= self._tolerance


def _run(kernel: Callable[..., Any], inputs: tuple[Any, ...]) -> np.ndarray:
    return np.asarray(jax.jit(kernel)(*inputs).astype(jnp.float32))
