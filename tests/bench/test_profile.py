"""Where a step spends its time: scopes of instructions, and a real trace of a small step."""

import io

import pytest

from bench import kernels
from bench.floors import Ceilings
from bench.profile import by_scope, profile_steps, scopes_of
from bench.report import Report
from bench.surroundings import Surroundings
from tests.bench.test_kernels import TINY_GPT_OSS

TEXT = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %dot.1 = f32[4]{0} negate(%x), metadata={op_name="jit(step)/layers_0_to_0/while/body/jit(block)/moe/router/dot_general"}
  %where.1 = f32[4]{0} negate(%dot.1), metadata={op_name="jit(step)/layers_1_to_1/while/body/jit(block)/moe/experts/while/body/jit(_where)/select_n"}
  %add.1 = f32[4]{0} negate(%where.1), metadata={op_name="jit(step)/layers_1_to_1/while/body/jit(block)/add"}
  %inside = f32[4]{0} call(%add.1), to_apply=%other, metadata={op_name="jit(step)/layers_1_to_1/jit(block)/attention/call"}
  ROOT %logits = f32[4]{0} negate(%inside), metadata={op_name="jit(step)/logits/dot_general"}
}
"""  # noqa: E501


def test_layers_are_alike_and_what_only_runs_others_has_no_time() -> None:
    scopes = scopes_of(TEXT)
    assert scopes["dot.1"] == "moe/router"
    assert scopes["where.1"] == "moe/experts"
    assert scopes["add.1"] == "norms and sums"
    assert scopes["logits"] == "beside layers"
    ran = [("dot.1", 2e-6), ("inside", 9.0), ("where.1", 8e-6), ("dot.1", 4e-6), ("else", 1e-6)]
    spent = by_scope(ran, scopes, steps=2)
    assert list(spent) == ["moe/experts", "moe/router", "unknown"]
    assert spent["moe/router"].launches == 1
    assert spent["moe/router"].seconds == pytest.approx(3e-6)


def test_a_step_and_a_chunk_are_traced_and_their_scopes_are_rows() -> None:
    report = Report("gpu_check", Surroundings("c", "d", {}), out=io.StringIO())
    bench = kernels.KernelBench(report, TINY_GPT_OSS, Ceilings(1.0, 1.0), 0.01)
    profile_steps(bench, [2], TINY_GPT_OSS.chunks[:1])
    times = {row.case: row.value for row in report.rows if row.metric == "time"}
    for case in ("step x2", f"chunk {TINY_GPT_OSS.chunks[0]}"):
        wanted = {f"tiny {case}: {scope}" for scope in ("attention", "moe/experts")}
        assert wanted <= times.keys()
        assert f"tiny {case}: unknown" not in times
    assert min(times.values()) > 0
