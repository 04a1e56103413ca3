"""What Prometheus reads: the names users expect, and a histogram that takes a step at once."""

import re
from functools import partial
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import BulkHistogram, Metrics, of_processes
from tests.serving.live import live_server
from transfer import wire

ROOT = Path(__file__).resolve().parents[2]


def samples(metrics: Metrics) -> dict[tuple, float]:
    """(name, label values in order of the labels' names...) -> value."""
    return parsed(metrics.render())


def parsed(text: bytes) -> dict[tuple, float]:
    found = [
        ((sample.name, *(value for _, value in sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    ]
    assert len(dict(found)) == len(found), "a sample is there twice"
    return dict(found)


def test_counters_have_the_names_and_values_that_dashboards_read():
    metrics = Metrics()
    metrics.prefilled(12, 8)
    metrics.first_token(0.03)
    metrics.step(4, [0.004, 0.02], 1)
    metrics.ended("stop", 1.25)
    metrics.rejected()
    metrics.retried("peer_lost")
    metrics.preempted()
    metrics.gauge("num_running_reqs", "now", lambda: 5)
    read = samples(metrics)
    assert read["kvferry_prompt_tokens_total",] == 12
    assert read["kvferry_cached_tokens_total",] == 8
    assert read["kvferry_generation_tokens_total",] == 4
    assert read["kvferry_num_requests_total", "stop"] == 1
    assert read["kvferry_requests_rejected_total",] == 1
    assert read["kvferry_retries_total", "peer_lost"] == 1
    assert read["kvferry_preemptions_total",] == 1
    assert read["kvferry_num_running_reqs",] == 5
    assert read["kvferry_time_to_first_token_seconds_bucket", "0.04"] == 1
    assert read["kvferry_time_to_first_token_seconds_count",] == 1
    assert read["kvferry_e2e_request_latency_seconds_sum",] == 1.25
    assert read["kvferry_inter_token_latency_seconds_bucket", "0.001"] == 1
    assert read["kvferry_inter_token_latency_seconds_count",] == 3
    assert read["kvferry_inter_token_latency_seconds_sum",] == pytest.approx(0.024)


def test_the_bulk_histogram_counts_a_value_on_a_bound_below_it():
    histogram = BulkHistogram("h", "doc", [0.1, 0.2])
    histogram.observe([0.05, 0.1, 0.15, 7.0])
    histogram.observe([])
    (family,) = histogram.collect()
    buckets = [s.value for s in family.samples if s.name == "h_bucket"]
    assert buckets == [2, 3, 4]


def test_several_processes_are_told_apart_and_the_cluster_is_shown_once():
    first, second = Metrics(), Metrics()
    for count, metrics in ((1, first), (2, second)):
        metrics.gauge("num_running_reqs", "now", partial(float, count))
        for _ in range(count):
            metrics.first_token(0.03)
            metrics.ended("stop", 1.25)
        metrics.step(count, [0.01] * count, 0)
        metrics.set_states([wire.WorkerState("d0", "decode", 1, wire.Load(), 3, 0, 1, 0, {}, {})])
    text = first.render(of_processes({0: first.own_text(), 1: second.own_text()}))
    read = parsed(text)
    for name, *labels in (
        ("num_running_reqs",),
        ("generation_tokens_total",),
        ("time_to_first_token_seconds_count",),
        ("time_to_first_token_seconds_bucket", "0.04"),
        ("inter_token_latency_seconds_bucket", "+Inf"),
    ):
        assert [read[f"kvferry_{name}", *labels, str(process)] for process in (0, 1)] == [1, 2]
    assert read["kvferry_num_requests_total", "stop", "1"] == 2
    assert read["kvferry_pages_held", "decode", "d0"] == 3
    lines = text.decode().splitlines()
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(set(types)) == len(types)
    assert "# TYPE kvferry_generation_tokens_total counter" in types
    assert "# TYPE kvferry_e2e_request_latency_seconds histogram" in types


def test_transfers_are_shown_by_pair_and_failures_by_reason():
    metrics = Metrics()
    pair = wire.TransferPair("shm", "tcp://10.0.0.3:9002", 3_000_000_000, 1.5, 4e9)
    metrics.set_states(
        [
            wire.WorkerState(
                *("p0", "prefill", 1, wire.Load(), 0, 0, 1, 0),
                counters={"transfers_lost": 2.0, "chunks": 9.0},
                config={},
                transfers=(pair,),
                in_flight_bytes=4096,
                grants_waiting=3,
            ),
            wire.WorkerState(
                *("d0", "decode", 1, wire.Load(), 0, 0, 1, 0),
                counters={"refused_stale_epoch": 1.0, "transfers": 7.0},
                config={},
                grants_waiting=5,
            ),
        ]
    )
    read = {key: value for key, value in samples(metrics).items() if "_transfer_" in key[0]}
    who = ("shm", "tcp://10.0.0.3:9002", "p0")
    assert read == {
        ("kvferry_transfer_bytes_total", *who): 3e9,
        ("kvferry_transfer_seconds_total", *who): 1.5,
        ("kvferry_transfer_bytes_per_second", *who): 4e9,
        ("kvferry_transfer_in_flight_bytes", "p0"): 4096,
        ("kvferry_transfer_grants_waiting", "prefill", "p0"): 3,
        ("kvferry_transfer_grants_waiting", "decode", "d0"): 5,
        ("kvferry_transfer_failures_total", "lost", "p0"): 2,
        ("kvferry_transfer_failures_total", "digest", "d0"): 0,
        ("kvferry_transfer_failures_total", "stale_epoch", "d0"): 1,
    }


def test_what_workers_report_is_shown_as_it_came():
    metrics = Metrics()
    load = wire.Load(pages_total=64, pages_free=40)
    state = wire.WorkerState("p0", "prefill", 1, load, 20, 4, 2, 1, {"chunks": 9.0}, {})
    info = wire.WorkerInfo(
        "p0", "prefill", "", "", "m", "d", wire.KVSpecMessage(1, 1, 8, 16, "f"), 1, 1, 64, 64, 1
    )
    metrics.set_members((wire.Member(info, 1, load),))
    metrics.set_states([state])
    read = samples(metrics)
    assert read["kvferry_pages_capacity", "prefill", "p0"] == 64
    assert read["kvferry_pages_free", "prefill", "p0"] == 40
    assert read["kvferry_pages_held", "prefill", "p0"] == 20
    assert read["kvferry_pages_cached", "prefill", "p0"] == 4
    assert read["kvferry_compiles_after_ready_total", "p0"] == 1
    assert read["kvferry_worker_stat", "chunks", "p0"] == 9


def test_pages_are_those_of_one_moment_while_the_registry_is_away():
    metrics = Metrics()
    kv = wire.KVSpecMessage(1, 1, 8, 16, "f")
    members = [
        wire.Member(
            wire.WorkerInfo(name, "decode", "", "", "m", "d", kv, 1, 1, 64, 64, 1),
            1,
            wire.Load(pages_total=64, pages_free=64),
        )
        for name in ("answers", "silent")
    ]
    metrics.set_members(tuple(members))
    load = wire.Load(pages_total=64, pages_free=40)
    metrics.set_states([wire.WorkerState("answers", "decode", 1, load, 20, 4, 2, 1, {}, {})])
    read = samples(metrics)
    assert read["kvferry_pages_free", "decode", "answers"] == 40
    assert read["kvferry_pages_held", "decode", "answers"] == 20
    assert read["kvferry_pages_free", "decode", "silent"] == 64


async def test_every_metric_is_in_the_operators_guide():
    guide = (ROOT / "docs" / "operating.md").read_text()
    for prefix, names in re.findall(r"`(kvferry_\w*){([\w,]+)}`", guide):
        guide += "".join(f"`{prefix}{name}`" for name in names.split(","))
    async with live_server() as live:
        text = (await live.http.get("/metrics")).text
    shown = re.findall(r"^# TYPE (\w+)(?<!_created) ", text, re.MULTILINE)
    assert len(shown) > 20
    assert set(shown) - set(re.findall(r"kvferry_\w+", guide)) == set()


async def test_every_metric_and_label_of_the_alerting_rules_is_one_that_there_is():
    rules = (ROOT / "docs" / "alerts.yml").read_text()
    states = [
        wire.WorkerState(role, role, 1, wire.Load(pages_total=64), 0, 0, 0, 0, {}, {})
        for role in ("prefill", "decode")
    ]
    async with live_server() as live:
        metrics = live.dispatcher.metrics
        metrics.set_states(states)
        metrics.ended("error", 1.0)
        metrics.retried("peer_lost")
        families = text_string_to_metric_families(metrics.render().decode())
    there: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        there.setdefault(sample.name, set()).update(sample.labels)
    asked = re.findall(r"(kvferry_\w+)(?:{(\w+)!?=\"\w+\"})?", rules)
    assert len(asked) > 12
    for name, label in asked:
        assert name in there, name
        assert not label or label in there[name], (name, label)
    for labels, name in re.findall(r"by \(([\w, ]+)\) \((?:rate\(|increase\()?(\w+)", rules):
        assert set(labels.split(", ")) <= there[name], (name, labels)


def test_no_name_holds_a_type_or_ends_like_a_part_of_another_type():
    """promtool's rules for names, which operators may check: `promtool check metrics`."""
    metrics = Metrics()
    load = wire.Load(pages_total=64, pages_free=40)
    state = wire.WorkerState("d0", "decode", 1, load, 0, 0, 0, 1, {"steps": 1.0}, {})
    pair = wire.TransferPair("shm", "tcp://10.0.0.3:9002", 1, 1.0, 1.0)
    metrics.set_states([msgspec.structs.replace(state, transfers=(pair,))])
    for family in text_string_to_metric_families(metrics.render().decode()):
        words = family.name.split("_")
        assert not {"counter", "gauge", "histogram", "summary"} & set(words), family.name
        # In seconds and bytes themselves, not in thousands or millions of them.
        assert not [x for x in words if re.fullmatch("(milli|micro|kilo|mega|giga).*", x)], words
        assert words[-1] not in ("bucket", "count", "sum", "total"), family.name
        assert family.documentation
