"""Every kernel backend that serves a shape against the plain reference, on random inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import KernelBench
from bench.report import Report
from model import kernels
from model.kernels import Backend


def compare_backends(report: Report, bench: KernelBench) -> None:
    """Relative distance of each backend to the reference, per operation; refusals are said."""
    network, shape = bench.model, bench.shape
    platform = network.mesh.devices.flat[0].platform
    dims, cfg = network.dims, shape.cfg
    attention = kernels.attention_shape(cfg, dims, platform, shape.dtype, shape.page_size)
    bench.fill_pool()
    slots, chunk = max(shape.slots), max(shape.chunks)
    for name, layer in bench.attention_layers().items():
        inputs = bench.decode_attention_inputs(slots, layer)
        case = f"{shape.name} decode {name} x{slots}"
        _compare(report, case, kernels.DECODE_ATTENTION, attention, inputs)
        inputs = bench.prefill_attention_inputs(chunk, layer)
        case = f"{shape.name} prefill {name} {chunk}"
        _compare(report, case, kernels.PREFILL_ATTENTION, attention, inputs)
    if cfg.num_experts:
        experts = kernels.experts_shape(cfg, dims, platform, shape.dtype)
        for tokens in (slots, chunk):
            inputs = bench.experts_inputs(tokens)
            case = f"{shape.name} experts {tokens} tokens"
            _compare(report, case, kernels.EXPERTS, experts, inputs)


def _compare(
    report: Report,
    case: str,
    backends: Sequence[Backend],
    shape: Any,
    inputs: tuple[Any, ...],
) -> None:
    expected = _run(_reference(backends).build(shape), inputs)
    scale = float(np.abs(expected).max()) or 1.0
    others = [backend for backend in backends if backend.name != "reference"]
    if not others:
        print(f"{case}: no backend but the reference", file=report.out)
    for backend in others:
        try:
            kernel = backend.build(shape)
        except NotImplementedError as refusal:
            print(f"{case}: {backend.name} refuses: {refusal}", file=report.out)
            continue
        error = float(np.abs(_run(kernel, inputs) - expected).max()) / scale
        report.add(case, f"{backend.name} off reference", error, "error")


def _reference(backends: Sequence[Backend]) -> Backend:
    return next(backend for backend in backends if backend.name == "reference")


def _run(kernel: Callable[..., Any], inputs: tuple[Any, ...]) -> np.ndarray:
    return np.asarray(jax.jit(kernel)(*inputs).astype(jnp.float32))
