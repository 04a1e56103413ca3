"""The programs that are compiled for a GPU which is not here are those that workers have."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import pytest

from bench.absent import absent_model
from bench.decode_programs import decode_programs
from bench.prefill_programs import prefill_programs
from bench.shapes import SHAPES
from decode.engine import DecodeEngine
from model.buckets import prefill_buckets
from model.programs import Program
from prefill.engine import PrefillEngine
from tests.model.harness import GOLDENS, full_steps, open_plainly


def test_an_engine_has_the_programs_that_are_told_without_its_memory() -> None:
    opened = open_plainly(GOLDENS / "qwen3_moe" / "model", 16, 128)
    absent = replace(
        opened,
        params=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), opened.params
        ),
    )
    steps, chunks = full_steps(2, 128, 16), prefill_buckets(16, 2, 128, 16)
    decode = DecodeEngine(opened, steps, 0.0, 256, most_saving=2)
    told = DecodeEngine.programs_of(absent, steps, decode.num_pages, most_saving=2)
    assert _shapes(told) == _shapes(decode.programs)
    prefill = PrefillEngine(opened, chunks, 0.0, 256, 1, most_saving=2)
    told = PrefillEngine.programs_of(absent, chunks, prefill.num_pages, most_saving=2)
    assert _shapes(told) == _shapes(prefill._programs(prefill.num_pages))


def _shapes(programs: Sequence[Program]) -> dict[str, Any]:
    return {program.name: (program._args, program._donate) for program in programs}


@pytest.mark.parametrize("name", ["demo", "demo-latent"])
def test_workers_of_a_shape_have_programs_for_all_that_they_do(name: str) -> None:
    rank = 0 if SHAPES[name].cfg.latent else 4
    opened = absent_model(SHAPES[name], jax.devices()[0], rank)
    steps, chunks = decode_programs(opened, 2, drafts=3), prefill_programs(opened, 64)
    for programs, own in ((steps, {"step", "admit", "mask"}), (chunks, {"chunk", "sample"})):
        names = {program.name.partition("[")[0] for program in programs}
        assert names == own | {"gather", "place"}
        assert ("lora" in programs[0]._args[0]) == bool(rank)
    assert any(program.name.startswith("step[slots=1, drafts") for program in steps)
