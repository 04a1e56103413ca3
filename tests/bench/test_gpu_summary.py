"""gpu_check's summary: steps beside their floor, checks counted together, other figures by name."""

import io

from bench.gpu_summary import summary
from bench.report import Report
from bench.surroundings import Surroundings


def test_a_run_is_told_on_one_screen():
    report = Report("gpu_check", Surroundings("c", "d", {}), out=io.StringIO())
    for value in (4000.0, 4100.0):
        report.add("ceiling", "device copy", value, "GB/s", shapes={})
    report.add("big decode step x1", "time", 4.0, "ms", 1.0, shapes={})
    report.add("big decode step x1", "rate", 250.0, "tok/s", 1000.0, shapes={})
    report.add("big prefill chunk 8192", "time", 160.0, "ms", 104.0, shapes={})
    report.add("big decode attention x1", "time", 0.05, "ms", 0.01, shapes={})
    report.add("big 32 pages", "to host", 45.0, "GB/s", shapes={})
    for name, error, different in (("a", 1e-5, 0), ("b", 1e-5, 1), ("c", 1e-3, 0), ("d", 1e-5, 0)):
        shapes = {"golden": name, "dtype": "float32"}
        report.add(name, "largest logit error", error, "error", 2e-4, shapes=shapes)
        report.add(name, "greedy texts that differ", different, "failed", shapes=shapes)
    for name, error in (("paged", 1e-3), ("other", 1.0)):
        shapes = {"shape": "big", "dtype": "bfloat16"}
        report.add(
            "big decode attention", f"{name} off reference", error, "error", 0.02, shapes=shapes
        )
    report.add("demo 64/32 x8", "output", 500.0, "tok/s", shapes={})
    report.add("steps", "part", 41.0, "s", shapes={})
    lines = [" ".join(line.split()) for line in summary(report.rows).splitlines()[1:]]
    assert lines == [
        "ceiling: device copy 4,000 GB/s",
        "big decode step x1 4.000 ms 0.2500",
        "big prefill chunk 8192 160.0 ms 0.6500",
        "big 32 pages: to host 45.00 GB/s",
        "demo 64/32 x8: output 500.0 tok/s",
        "goldens float32 2 of 4",
        "big backends 1 of 2",
        "steps: part 41.00 s",
    ]
