"""The kernel benchmark runs on any device, with the smallest network that has every part."""

import dataclasses
import io

from bench import ceilings, kernels
from bench.report import Report
from bench.shapes import DEMO_MOE, KERNEL_PARTS
from bench.surroundings import Surroundings

CFG = dataclasses.replace(
    DEMO_MOE.cfg,
    vocab_size=64,
    hidden_size=32,
    num_layers=1,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    moe_layers=(True,),
)
TINY = dataclasses.replace(
    DEMO_MOE, name="tiny", cfg=CFG, page_size=4, slots=(2,), context=6, chunks=(8,)
)


def test_every_part_reports_a_time_beside_its_floor(monkeypatch):
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    report = Report("kernels", Surroundings("c", "d", {}), out=io.StringIO())
    kernels.run(report, TINY, KERNEL_PARTS, budget_s=0.01)
    timed = {row.case: row for row in report.rows if row.metric == "time"}
    for part in ("decode step x2", "prefill chunk 8", "decode attention x2", "experts 8 tokens"):
        row = timed[f"tiny {part}"]
        assert row.value > 0
        assert row.baseline is not None
        assert row.shapes["shape"] == "tiny"
    assert {"gather", "scatter"} <= {row.metric for row in report.rows}
