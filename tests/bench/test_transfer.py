"""The transfer benchmark: published sizes, limits that measure something, and pages that arrive."""

import io
import socket
import subprocess
import sys
from subprocess import PIPE

import pytest

from bench import host_limits
from bench.cli import main
from bench.host_limits import (
    HEADER,
    memcpy_cpu_s_per_gb,
    memcpy_gb_s,
    page_copy_gb_s,
    tcp_limits,
    tcp_round_trip_us,
)
from bench.report import Report
from bench.surroundings import Surroundings
from bench.transfer import BACKENDS, WAYS, Way, measure, run, transfer
from bench.transfer_peer import WORKLOADS, page_ids
from bench.transfer_pools import digest, new_pool, pool_of, runs_of

SMALL = WORKLOADS["small"]


@pytest.mark.parametrize(
    ("name", "pages", "kib"), [("small", 1, 4), ("a", 64, 64), ("b", 128, 256), ("c", 64, 2048)]
)
def test_workloads_have_the_sizes_that_others_were_measured_with(name, pages, kib):
    assert WORKLOADS[name].num_pages == pages
    assert WORKLOADS[name].page_bytes == kib << 10


def test_limits_of_the_host_are_measured():
    assert memcpy_gb_s(2, 1 << 20, 0.01) > 0
    assert memcpy_cpu_s_per_gb(1 << 20, 0.01) > 0
    assert page_copy_gb_s(SMALL, 0.01) > 0
    assert min(tcp_limits(2, 1 << 16, 0.02)) > 0
    assert tcp_round_trip_us(64, 0.02) > 0


def test_the_end_of_a_limit_ends_with_a_sender_that_is_killed():
    command = [sys.executable, "-m", "bench.host_limits", "1"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        with socket.create_connection(("127.0.0.1", int(other.stdout.readline()))) as sender:
            sender.sendall(HEADER.pack(1 << 20) + bytes(1000))
        other.stdin.close()
        assert other.wait(20.0) == 0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.said or "host")
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_arrive_and_every_request_is_timed(backend, way):
    taken_s, whole_s, cpu_s = transfer(SMALL, 1, 0.05, backend, way)
    assert taken_s
    assert max(taken_s) <= whole_s
    assert cpu_s >= 0


def test_pages_that_differ_have_another_digest():
    pool = new_pool(SMALL, 1)
    ids = page_ids(SMALL, 3)
    before = digest(pool, ids)
    pool[0, 1, ids[0], 5, 0, 9] = 2
    assert digest(pool, ids) != before


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "devices"])
def test_pages_of_one_pool_are_put_into_another(on_device):
    work = WORKLOADS["a"]
    source, target = (pool_of(work, fill, on_device) for fill in (1, 0))
    ids = page_ids(work, 5)
    assert source.digest(ids) != target.digest(ids)
    runs = runs_of(ids, 1 << 20)  # four pages each
    for run_ids, pages in zip(runs, source.gather(runs), strict=True):
        assert pages.shape[2] == len(run_ids) == 4
        target.place(run_ids, pages)
    assert source.digest(ids) == target.digest(ids)


def test_requests_beside_each_other_that_share_pages_are_no_damage():
    taken_s, _, _ = transfer(WORKLOADS["a"], 8, 0.05, "tcp", Way(gathered=True))
    assert len(taken_s) >= 8


def test_a_measurement_stands_beside_its_baseline():
    report = Report("transfer", Surroundings("c", "d", {}), out=io.StringIO())
    measure(report, SMALL, 1, budget_s=0.02)
    raw, *ours = report.rows
    assert [row.metric for row in ours] == ["shm p50", "tcp p50"]
    assert all(row.baseline == raw.value for row in ours)
    assert all(row.shapes["page_bytes"] == 4096 for row in ours)
    assert {row.shapes["budget_s"] for row in report.rows} == {0.02}


def test_a_receiving_process_that_dies_is_an_error_of_the_measurement(monkeypatch):
    def hung_up(idx: int, counts: list[int]) -> None:
        raise ConnectionResetError(idx)

    with pytest.raises(ConnectionResetError):
        host_limits._threads_gb_s(2, hung_up)
    monkeypatch.setattr(host_limits, "words_of", lambda _: [sys.executable, "-c", ""])
    with pytest.raises(ConnectionError, match="the receiving process ended early"):
        host_limits.tcp_limits(1, 1, 0.001)


def test_an_unknown_workload_is_refused():
    report = Report("transfer", Surroundings("c", "d", {}), out=io.StringIO())
    with pytest.raises(ValueError, match="small, a, b, c"):
        run(report, ["huge"], 0.01)


def test_nixl_that_is_not_here_is_told_in_a_line_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr("transfer.nixl_agent.PACKAGES", ("nixl_of_nowhere",))
    assert main(["transfer", "--only", "small", "--backend", "nixl"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "none of nixl_of_nowhere is installed" in err
    assert len(err.splitlines()) == 1


def test_rows_of_several_rounds_are_medians_beside_those_of_their_baseline(monkeypatch):
    took = iter([30e-6, 50e-6, 10e-6, 20e-6, 40e-6, 20e-6])  # shm and tcp, three rounds
    raw = iter([60.0, 80.0, 70.0])
    monkeypatch.setattr("bench.transfer.tcp_round_trip_us", lambda *_: next(raw))
    monkeypatch.setattr("bench.transfer.transfer", lambda *_: ([next(took)], 1.0, 1.0))
    report = Report("transfer", Surroundings("c", "d", {}), out=io.StringIO())
    measure(report, SMALL, 1, budget_s=0.02, rounds=3)
    told = {row.metric: (row.value, row.baseline) for row in report.rows}
    assert told == {
        "raw loopback p50": (70.0, None),
        "shm p50": (pytest.approx(30.0), 70.0),
        "tcp p50": (pytest.approx(20.0), 70.0),
    }
    assert all(row.shapes["rounds"] == 3 for row in report.rows)


def test_every_way_stands_beside_the_baseline_that_it_is_measured_by(monkeypatch):
    monkeypatch.setattr("bench.transfer.transfer", lambda *_: ([0.5], 1.0, 0.1))
    monkeypatch.setattr("bench.transfer.tcp_limits", lambda *_: (2.0, 0.4))
    monkeypatch.setattr("bench.transfer.memcpy_gb_s", lambda *_: 4.0)
    report = Report("transfer", Surroundings("c", "d", {}), out=io.StringIO())
    work = WORKLOADS["a"]
    measure(report, work, 8, budget_s=0.01)
    rows = {row.metric: row for row in report.rows}
    rate = work.request_bytes / 1e9
    assert rows["shm, gathered"].ratio == pytest.approx(rate / 4.0)
    assert rows["tcp, gathered"].ratio == pytest.approx(rate / 2.0)
    assert rows["tcp, gathered of memcpy"].value == pytest.approx(rate / 4.0)
    assert rows["tcp, gathered of raw loopback"].value == pytest.approx(rate / 2.0)
    assert rows["tcp CPU"].baseline == 0.4


def test_no_round_is_no_measurement():
    with pytest.raises(ValueError, match="rounds"):
        run(Report("transfer", Surroundings("c", "d", {})), ["small"], 0.01, rounds=0)
