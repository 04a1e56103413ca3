"""The kernel benchmark runs on any device, with the smallest network that has every part."""

import io
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from bench import ceilings, kernels
from bench.backends import compare_backends
from bench.fitting import fitting, model_of
from bench.floors import Ceilings, Cost
from bench.report import Report
from bench.shapes import DEMO_GPT_OSS, DEMO_LATENT, DEMO_MOE, KERNEL_PARTS, Shape
from bench.surroundings import Surroundings
from model import kernels as backends
from model import page_runs
from model.errors import ModelError
from model.kernels import Backend, Target
from model.programs import tree_bytes
from model.transformer import random_params


def tiny(shape: Shape, moe_layers: tuple[bool, ...]) -> Shape:
    cfg = replace(
        shape.cfg,
        vocab_size=64,
        hidden_size=32,
        num_layers=len(moe_layers),
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_layers=moe_layers,
        window_layers=shape.cfg.window_layers[: len(moe_layers)],
        sliding_window=min(shape.cfg.sliding_window, 3),
    )
    return replace(shape, name="tiny", cfg=cfg, page_size=4, slots=(2,), context=6, chunks=(8,))


TINY_GPT_OSS = tiny(DEMO_GPT_OSS, (True, True))
OF_NETWORKS = [part for part in KERNEL_PARTS if part != "sampling"]
COMMON = ("decode step x2", "prefill chunk 8", "decode attention x2", "experts 8 tokens")
WINDOWED = ("decode windowed attention x2", "prefill windowed attention 8")


@pytest.mark.parametrize(
    ("shape", "parts", "expected"),
    [
        (tiny(DEMO_MOE, (True,)), KERNEL_PARTS, COMMON),
        (tiny(DEMO_LATENT, (False, True)), OF_NETWORKS, COMMON),
        (TINY_GPT_OSS, OF_NETWORKS, (*COMMON, *WINDOWED)),
    ],
    ids=("moe", "latent", "gpt-oss"),
)
def test_every_part_reports_a_time_beside_its_floor(shape, parts, expected, monkeypatch):
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    report = Report("kernels", Surroundings("c", "d", {}), out=io.StringIO())
    kernels.run(report, shape, parts, budget_s=0.01)
    timed = {row.case: row for row in report.rows if row.metric == "time"}
    for part in expected:
        row = timed[f"tiny {part}"]
        assert row.value > 0
        assert row.baseline is not None
        assert row.shapes["shape"] == "tiny"
    assert {row.shapes["budget_s"] for row in report.rows} == {0.01}
    assert {"gather", "scatter"} <= {row.metric for row in report.rows}
    assert any("windowed" in case for case in timed) == (expected != COMMON)


def test_backends_are_compared_in_every_kind_of_layer_and_refusals_are_said(monkeypatch):
    def refuse(shape: object) -> Callable[..., object]:
        raise NotImplementedError("no such shape")

    for name in ("DECODE_ATTENTION", "PREFILL_ATTENTION", "EXPERTS"):
        *_, reference = getattr(backends, name)
        others = (Backend("same", reference.build), Backend("other", refuse))
        monkeypatch.setattr(backends, name, (*others, reference))
    out = io.StringIO()
    report = Report("gpu_check", Surroundings("c", "d", {}), out=out)
    bench = kernels.KernelBench(report, TINY_GPT_OSS, Ceilings(1.0, 1.0), 0.01)
    assert compare_backends(report, bench)
    errors = {row.case: row.value for row in report.rows if row.metric == "same off reference"}
    cases = ("decode attention x2", "decode attention of all lengths", "prefill attention 8")
    assert errors.keys() >= {f"tiny {case}" for case in (*cases, *WINDOWED)}
    assert not any(errors.values())
    assert out.getvalue().count("other refuses: no such shape") == len(errors) == 8


@pytest.mark.parametrize("name", ["DECODE_ATTENTION", "PREFILL_ATTENTION", "EXPERTS"])
def test_a_backend_that_is_wrong_fails_the_comparison(name, monkeypatch):
    *_, reference = getattr(backends, name)

    def shifted(shape: object) -> Callable[..., object]:
        kernel = reference.build(shape)
        return lambda *args: kernel(*args) + 0.01

    monkeypatch.setattr(backends, name, (Backend("wrong", shifted), reference))
    report = Report("gpu_check", Surroundings("c", "d", {}), out=io.StringIO())
    bench = kernels.KernelBench(report, TINY_GPT_OSS, Ceilings(1.0, 1.0), 0.01)
    assert not compare_backends(report, bench)


def test_on_an_accelerator_the_form_of_the_reference_that_it_takes_is_compared(monkeypatch):
    report = Report("gpu_check", Surroundings("c", "d", {}), out=io.StringIO())
    bench = kernels.KernelBench(report, TINY_GPT_OSS, Ceilings(1.0, 1.0), 0.01)
    bench.model = replace(bench.model, target=Target("gpu", interpreted=True))
    assert compare_backends(report, bench)
    errors = {row.case: row.value for row in report.rows if row.metric == "reference off reference"}
    cases = ("decode attention x2", "prefill attention 8", *WINDOWED)
    assert errors.keys() >= {f"tiny {case}" for case in cases}


def test_on_an_accelerator_pages_are_timed_on_their_way_to_the_host_and_back(monkeypatch):
    report = Report("kernels", Surroundings("c", "d", {}), out=io.StringIO())
    bench = kernels.KernelBench(report, TINY_GPT_OSS, Ceilings(1.0, 1.0), 0.0)
    monkeypatch.setattr(page_runs, "_ON_THE_HOST", ())
    monkeypatch.setattr(kernels.jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    bench.pages()
    assert [row.metric for row in report.rows] == ["gather", "to host", "to device", "scatter"]


def test_batches_whose_pages_do_not_fit_are_left_out_and_a_shape_of_which_nothing_fits_refused():
    shape = replace(TINY_GPT_OSS, slots=(1, 64, 1024))
    assert fitting(shape, 1 << 30) == shape
    model = model_of(shape)
    needed = tree_bytes(random_params(model, 0)) + 64 * 2 * model.kv_spec().all_layers_bytes
    assert fitting(shape, -(-needed * 16 // 15)).slots == (1, 64)
    assert fitting(shape, needed).slots == (1,)
    with pytest.raises(ModelError, match=r"tiny does not fit: weights of 0\.\d MiB.* --shape"):
        fitting(shape, 1 << 12)


def test_layers_take_turns(monkeypatch):
    report = Report("kernels", Surroundings("c", "d", {}), out=io.StringIO())
    bench = kernels.KernelBench(report, TINY_GPT_OSS, Ceilings(1.0, 1.0), 0.001)
    seen: list[int] = []

    def measure(call: Callable[[], int]) -> float:
        seen.extend(int(call()) for _ in range(6))
        return 1.0

    monkeypatch.setattr(bench, "_measure", measure)
    layers = [(jnp.int32(layer),) for layer in range(3)]
    case = bench._piece("name", lambda layer: layer + 0, layers, Cost(1.0, 1.0), {})
    case.program.compile()
    bench._time(case)
    assert seen == [0, 1, 2, 0, 1, 2]
