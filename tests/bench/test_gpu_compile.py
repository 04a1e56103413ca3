"""Counting the work in a compiled program, and compiling for a GPU without its packages."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.hlo import count, size

ROOT = Path(__file__).resolve().parents[2]
TEXT = """HloModule jit_step, is_scheduled=true

%taken (param_0: bf16[8,4,16], param_1: s32[]) -> bf16[4,16] {
  %param_0 = bf16[8,4,16]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,4,16]{2,1,0} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,4,16}
  ROOT %whole = bf16[4,16]{1,0} bitcast(%slice)
}

%put (param_0.1: f32[100,4], param_1.1: f32[1,4], param_2: s32[]) -> f32[100,4] {
  %param_0.1 = f32[100,4]{1,0} parameter(0)
  %param_1.1 = f32[1,4]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %update = f32[100,4]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, %param_2, %zero.1)
}

%turn (at: (s32[], bf16[8,4,16])) -> (s32[], bf16[8,4,16]) {
  %at = (s32[], bf16[8,4,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%at), index=0
  %stack = bf16[8,4,16]{2,1,0} get-tuple-element(%at), index=1
  %layer = bf16[4,16]{1,0} fusion(%stack, %i), kind=kLoop, calls=%taken, metadata={op_name="jit(step)/layers/take"}
  ROOT %next = (s32[], bf16[8,4,16]{2,1,0}) tuple(%i, %stack)
}

%goes_on (at.1: (s32[], bf16[8,4,16])) -> pred[] {
  %at.1 = (s32[], bf16[8,4,16]{2,1,0}) parameter(0)
  %yes = pred[] constant(true)
  ROOT %no = pred[] not(%yes)
}

%nothing (n: f32[4]) -> f32[4] {
  ROOT %n = f32[4]{0} parameter(0)
}

%more (m: f32[4]) -> f32[4] {
  %m = f32[4]{0} parameter(0)
  ROOT %negated = f32[4]{0} negate(%m), metadata={op_name="jit(step)/branch"}
}

ENTRY %main (stack.1: bf16[8,4,16], pool: f32[100,4], row: f32[1,4], x: f32[4], p: pred[]) -> f32[100,4] {
  %stack.1 = bf16[8,4,16]{2,1,0} parameter(0)
  %pool = f32[100,4]{1,0} parameter(1)
  %row = f32[1,4]{1,0} parameter(2)
  %x = f32[4]{0} parameter(3)
  %p = pred[] parameter(4)
  %none = s32[] constant(0)
  %start = (s32[], bf16[8,4,16]{2,1,0}) tuple(%none, %stack.1)
  %while.1 = (s32[], bf16[8,4,16]{2,1,0}) while(%start), condition=%goes_on, body=%turn, metadata={op_name="jit(step)/layers/while"}, backend_config={"known_trip_count":{"n":"8"}}
  %while.2 = (s32[], bf16[8,4,16]{2,1,0}) while(%start), condition=%goes_on, body=%turn, metadata={op_name="jit(step)/experts/while"}
  %chosen = f32[4]{0} conditional(%p, %x, %x), true_computation=%more, false_computation=%nothing
  %attended = f32[4]{0} custom-call(%stack.1, %x), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/kernel"}
  ROOT %written = f32[100,4]{1,0} fusion(%pool, %row, %none), kind=kLoop, calls=%put, metadata={op_name="jit(step)/put"}
}
"""  # noqa: E501


def test_loops_count_as_often_as_they_turn_and_parts_as_what_they_are() -> None:
    work = count(TEXT)
    # A loop of unknown length evaluates its condition before its turn, and once more at the end.
    assert work.launches == 8 + (1 + 2) + 1 + 1 + 1
    assert work.kernels == 1
    assert work.waits == 1 + 1 + 1  # for the loop of unknown length, and for the conditional
    taken = 2 * 4 * 16 * 2 + 4  # one layer read and written, and its index
    condition, branch = 1 + 1, 2 * 4 * 4
    put = 2 * 4 * 4 + 4  # not the pool
    # Nothing of the kernel: its text does not show what it reads.
    assert work.num_bytes == (8 + 1) * taken + 2 * condition + branch + put


def test_shapes_have_the_bytes_of_their_types_and_tuples_of_all_parts() -> None:
    assert size("(bf16[2,3]{1,0}, f8e4m3fn[5], s4[4], pred[])") == 12 + 5 + 2 + 1
    assert size("f32[]") == 4


def test_what_is_not_a_compiled_module_is_refused() -> None:
    with pytest.raises(ValueError, match="no entry computation"):
        count("HloModule nothing")


@pytest.mark.skipif(find_spec("jax_plugins") is not None, reason="the packages are here")
def test_without_the_packages_for_cuda_it_says_what_it_needs() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "bench.gpu_compile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 2
    assert "needs the packages of requirements-cuda.lock" in ran.stderr
