"""Compares every kernel backend that serves a shape with the plain reference, on random inputs.

Expected values come from the reference in its form for a CPU, with float32 queries: its blocks are
smaller, and attention multiplies in float32. On an accelerator the reference takes another form,
which is compared as well.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np

from bench.contexts import mixed_contexts
from bench.kernels import KernelBench
from bench.report import Report
from model import kernels
from model.kernels import Backend
from model.programs import Program, compile_all

# Shares of the largest expected number. Wrong pages or masks give more than a tenth.
TOLERANCES: Final = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 2e-2}

# The longest of the rows of all lengths, because the reference reads whole page tables. Longer
# rows would only have more parts each.
_LONGEST: Final = 1 << 15


def compare_backends(report: Report, bench: KernelBench) -> bool:
    """Report each backend's relative distance to the reference, per operation; print refusals.

    Returns whether every distance is within the tolerance.
    """
    network, shape = bench.model, bench.shape
    dims, cfg = network.dims, shape.cfg
    attention = kernels.attention_shape(dims, network.target, shape.dtype, shape.page_size)
    bench.fill_pool()
    slots, chunk = max(shape.slots), max(shape.chunks)
    compare = _Comparison(report, shape.name, shape.dtype)
    for name, (layer, *_) in bench.attention_layers().items():
        alike = [shape.context] * slots
        mixed = mixed_contexts(shape.page_size, bench.num_pages, _LONGEST)
        for rows, contexts in ((f"x{slots}", alike), ("of all lengths", mixed)):
            inputs = bench.decode_attention_inputs(contexts, layer)
            compare.add(f"decode {name} {rows}", kernels.DECODE_ATTENTION, attention, inputs)
        inputs = bench.prefill_attention_inputs(chunk, layer)
        compare.add(f"prefill {name} {chunk}", kernels.PREFILL_ATTENTION, attention, inputs)
    if cfg.latent:
        latent = cfg.latent
        size = latent.nope_dim + latent.rope_dim
        own = replace(attention, kv_heads=dims.group, group=1, head_dim=size, planes=2)
        own, inputs = replace(own, value_dim=latent.value_dim), _of_heads(bench, chunk, size)
        compare.add(f"prefill attention of heads {chunk}", kernels.PREFILL_ATTENTION, own, inputs)
    if cfg.num_experts:
        experts = kernels.experts_shape(dims, network.target, shape.dtype)
        for tokens in (slots, chunk):
            inputs = bench.experts_inputs(tokens)
            compare.add(f"experts {tokens} tokens", kernels.EXPERTS, experts, inputs)
    return compare.all_near()


def _of_heads(bench: KernelBench, tokens: int, size: int) -> tuple[Any, ...]:
    """As `prefill_attention_inputs`, but with keys and values for each head (model/latent.py)."""
    _, _, _, batch, *others = bench.prefill_attention_inputs(tokens, 0)
    num_pages, heads = len(batch.page_ids), bench.model.dims.group
    batch = batch._replace(page_ids=jnp.arange(num_pages, dtype=jnp.int32))
    pages = bench.random((1, 2, num_pages, bench.shape.page_size, heads, size))
    return (bench.random((tokens, heads, 1, size)), pages, jnp.int32(0), batch, *others)


class _Case(NamedTuple):
    """One operation: its programs by their names in rows, and the program of the plain form."""

    name: str
    inputs: tuple[Any, ...]
    others: dict[str, Program]
    plain_inputs: tuple[Any, ...]
    plain: Program


class _Comparison:
    def __init__(self, report: Report, name: str, dtype: str) -> None:
        self._report = report
        self._shapes = {"shape": name, "dtype": dtype}
        self._tolerance = TOLERANCES[dtype]
        self._cases: list[_Case] = []

    def add(
        self, operation: str, backends: Sequence[Backend], shape: Any, inputs: tuple[Any, ...]
    ) -> None:
        """Queue a comparison, unless there is nothing to compare. Prints refusals at once."""
        case = f"{self._shapes['shape']} {operation}"
        plain = next(backend for backend in backends if backend.name == "reference")
        compared = [backend for backend in backends if backend is not plain]
        if shape.platform != "cpu":
            compared.append(plain)
        if not compared:
            print(f"{case}: no backend but the reference", file=self._report.out)
            return
        others = {}
        for backend in compared:
            try:
                others[backend.name] = Program(backend.name, backend.build(shape), inputs)
            except NotImplementedError as refusal:
                print(f"{case}: {backend.name} refuses: {refusal}", file=self._report.out)
        rows, *rest = inputs
        plain_inputs = (rows.astype(jnp.float32), *rest)
        kernel = plain.build(replace(shape, platform="cpu"))
        expected = Program(plain.name, kernel, plain_inputs)
        self._cases.append(_Case(case, inputs, others, plain_inputs, expected))

    def all_near(self) -> bool:
        """Report every comparison; returns whether all are within the tolerance."""
        compile_all([one for case in self._cases for one in (case.plain, *case.others.values())])
        near = True
        for case in self._cases:
            expected = _run(case.plain, case.plain_inputs)
            scale = float(np.abs(expected).max()) or 1.0
            for name, program in case.others.items():
                error = float(np.abs(_run(program, case.inputs) - expected).max()) / scale
                metric, shapes = f"{name} off reference", self._shapes
                self._report.add(case.name, metric, error, "error", self._tolerance, shapes=shapes)
                near = near and error <= self._tolerance
        return near


def _run(program: Program, inputs: tuple[Any, ...]) -> np.ndarray:
    return np.asarray(program(*inputs).astype(jnp.float32))
