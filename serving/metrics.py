"""The API process's metrics and their Prometheus text: the only user of prometheus_client."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from serving.health import WorkerHealth
from transfer import wire

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)  # fmt: skip
_ITL_BOUNDS_S = (
    0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
_E2E_BOUNDS_S = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960
)  # fmt: skip
_MOST_SINGLE = 4096  # values from observe_one that may wait to be counted


class BulkHistogram(Collector):
    """A histogram that counts many values at once: one numpy pass, no lock, one thread."""

    def __init__(self, name: str, documentation: str, bounds_s: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = np.asarray(bounds_s, dtype=np.float64)
        self._counts = np.zeros(len(bounds_s) + 1, dtype=np.int64)  # the last: above all bounds
        self._sum_s = 0.0
        self._single_s: list[float] = []  # not counted yet

    def observe_one(self, value_s: float) -> None:
        """Count one value later, with others: for values that come one by one."""
        self._single_s.append(value_s)
        if len(self._single_s) == _MOST_SINGLE:
            self._count_single()

    def _count_single(self) -> None:
        values_s, self._single_s = self._single_s, []
        self.observe(values_s)

    def observe(self, values_s: Sequence[float] | np.ndarray, num_zeros: int = 0) -> None:
        """Count each value in the first bucket whose bound is >= the value; add num_zeros zeros."""
        self._counts[0] += num_zeros
        if not len(values_s):
            return
        values = np.asarray(values_s, dtype=np.float64)
        buckets = np.searchsorted(self._bounds, values, side="left")
        self._counts += np.bincount(buckets, minlength=len(self._counts))
        self._sum_s += float(values.sum())

    def collect(self) -> Iterable[Metric]:
        self._count_single()
        family = HistogramMetricFamily(self._name, self._documentation)
        cumulative = np.cumsum(self._counts).tolist()
        bounds = [*map(str, self._bounds.tolist()), "+Inf"]
        family.add_metric([], list(zip(bounds, cumulative, strict=True)), self._sum_s)
        yield family


class _ClusterCollector(Collector):
    """What the workers report. The values are absolute, so they are shown as they came."""

    def __init__(self) -> None:
        self.members: tuple[wire.Member, ...] = ()
        self.states: dict[str, wire.WorkerState] = {}

    def collect(self) -> Iterable[Metric]:
        yield from self._collect_pages()
        yield from _transfers(sorted(self.states.items()))
        labels = ["worker"]
        compiles = CounterMetricFamily(
            "kvferry_compiles_after_ready",
            "Programs compiled after ready; each is a bug",
            labels=labels,
        )
        counters = GaugeMetricFamily(
            "kvferry_worker_stat", "Statistics of a worker, by name", labels=["worker", "name"]
        )
        for worker_id, state in sorted(self.states.items()):
            compiles.add_metric([worker_id], state.compiles_after_ready)
            for name, value in sorted(state.counters.items()):
                counters.add_metric([worker_id, name], value)
        yield compiles
        yield counters

    def _collect_pages(self) -> Iterable[Metric]:
        labels = ["worker", "role"]
        values: dict[str, list[tuple[list[str], float]]] = {
            name: [] for name in ("capacity", "free", "held", "cached")
        }
        for member in self.members:
            who = [member.info.worker_id, member.info.role]
            answer = self.states.get(member.info.worker_id)
            load = member.load if answer is None else answer.load  # the registry's may be older
            values["capacity"].append((who, load.pages_total))
            values["free"].append((who, load.pages_free))
        for state in self.states.values():
            who = [state.worker_id, state.role]
            values["held"].append((who, state.pages_held))
            values["cached"].append((who, state.pages_cached))
        for name, rows in values.items():
            family = GaugeMetricFamily(f"kvferry_pages_{name}", f"KV pages {name}", labels=labels)
            for who, value in sorted(rows):
                family.add_metric(who, value)
            yield family


def _transfers(states: Sequence[tuple[str, wire.WorkerState]]) -> Iterable[Metric]:
    """Metrics of page transfers.

    Their labels are bounded: a worker reports a bounded number of peers, and our code alone names
    the reasons.
    """
    pair = ["worker", "backend", "peer"]
    moved = CounterMetricFamily(
        "kvferry_transfer_bytes", "Bytes of pages that prefill wrote to decode", labels=pair
    )
    took = CounterMetricFamily(
        "kvferry_transfer_seconds",
        "Seconds spent writing pages, summed over connections, without waits",
        labels=pair,
    )
    rate = GaugeMetricFamily(
        "kvferry_transfer_bytes_per_second",
        "Bytes over seconds of writing pages, over the last 64 frames",
        labels=pair,
    )
    in_flight = GaugeMetricFamily(
        "kvferry_transfer_in_flight_bytes",
        "Bytes of pages that wait for writing",
        labels=["worker"],
    )
    waiting = GaugeMetricFamily(
        "kvferry_transfer_grants_waiting",
        "Rooms for which decode has not reserved pages yet, as seen by the worker",
        labels=["worker", "role"],
    )
    failures = CounterMetricFamily(
        "kvferry_transfer_failures",
        "Frames that decode refused, and rooms whose transfer failed, by reason",
        labels=["worker", "reason"],
    )
    for worker, state in states:
        for told in state.transfers:
            who = [worker, told.backend, told.peer]
            moved.add_metric(who, told.num_bytes)
            took.add_metric(who, told.seconds)
            rate.add_metric(who, told.recent_bytes_per_s)
        if state.role == "prefill":
            in_flight.add_metric([worker], state.in_flight_bytes)
        waiting.add_metric([worker, state.role], state.grants_waiting)
        for reason, count in _failures(state):
            failures.add_metric([worker, reason], count)
    return moved, took, rate, in_flight, waiting, failures


def _failures(state: wire.WorkerState) -> Iterable[tuple[str, float]]:
    """(reason, count): decode's by what was wrong with a frame, prefill's by how a room ended."""
    counted = dict(state.counters)
    if state.role == "decode":
        counted.setdefault("refused_digest", 0.0)  # shown before it first happens, for alerts
    for name, count in sorted(counted.items()):
        kind, _, reason = name.partition("_")
        if (state.role, kind) in (("decode", "refused"), ("prefill", "transfers")):
            yield reason, count


class _Gauges(Collector):
    """This process's own gauges, read at each scrape."""

    def __init__(self) -> None:
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def collect(self) -> Iterable[Metric]:
        for name, (documentation, read) in self.gauges.items():
            yield GaugeMetricFamily(name, documentation, value=read())


class _Health(Collector):
    """Why this process passes workers over, read at each scrape."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[str, WorkerHealth]] = dict

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "kvferry_worker_passed_over",
            "1 while a worker is passed over, by reason; 0.5 while its breaker is half open",
            labels=["worker", "reason"],
        )
        open_share = {"closed": 0.0, "half_open": 0.5, "open": 1.0}
        for worker, health in sorted(self.read().items()):
            family.add_metric([worker, "draining"], health.draining)
            family.add_metric([worker, "failures"], open_share[health.breaker])
            family.add_metric([worker, "stalled"], health.stalled)
        yield family


class _Processes(Collector):
    """The own metrics of several API processes, told apart by a label.

    They are not added up: a process that restarts, or misses one scrape, would make the sum drop,
    and a rate computed from it would then count everything in the other processes as new.
    """

    def __init__(self, texts: Mapping[int, bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for process, text in sorted(self._texts.items()):
            for found in text_string_to_metric_families(text.decode()):
                family = families.setdefault(
                    found.name, Metric(found.name, found.documentation, found.type)
                )
                for sample in found.samples:
                    labels = sample.labels | {"process": str(process)}
                    family.add_sample(sample.name, labels, sample.value)
        return families.values()


class Metrics:
    """All metrics of one API process, in a registry of their own. Used by the event loop only."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._ttft = BulkHistogram(
            "kvferry_time_to_first_token_seconds",
            "From request received to first token written",
            _TTFT_BOUNDS_S,
        )
        self._itl = BulkHistogram(
            "kvferry_inter_token_latency_seconds", "Gap between tokens of a stream", _ITL_BOUNDS_S
        )
        self._e2e = BulkHistogram(
            "kvferry_e2e_request_latency_seconds",
            "From request received to its end, however it ended",
            _E2E_BOUNDS_S,
        )
        for histogram in (self._ttft, self._itl, self._e2e):
            registry.register(histogram)
        self._prompt_tokens = _counter(
            registry, "prompt_tokens", "Prompt tokens, those found in a cache too"
        )
        self._cached_tokens = _counter(registry, "cached_tokens", "Prompt tokens found in a cache")
        self._generation_tokens = _counter(registry, "generation_tokens", "Tokens generated")
        self._requests = _counter(
            registry, "num_requests", "Generations that ended, by finish reason", "finish_reason"
        )
        self._ended: dict[str, Counter] = {}
        self._rejected = _counter(registry, "requests_rejected", "Requests answered with 429")
        self._surplus = _counter(
            registry, "connections_rejected", "HTTP connections beyond what open files allow"
        )
        self._retries = _counter(registry, "retries", "Generations placed again", "reason")
        self._preemptions = _counter(registry, "preemptions", "Generations preempted")
        self._stale = _counter(registry, "stale_rows", "Unexpected rows and batches dropped")
        self._silent = _counter(
            registry, "sibling_silent", "Questions that another API process did not answer in time"
        )
        self._untraced = _counter(
            registry, "traces_dropped", "Requests whose spans did not reach the OTLP endpoint"
        )
        self._gauges = _Gauges()
        registry.register(self._gauges)
        self._health = _Health()
        registry.register(self._health)
        self._cluster = _ClusterCollector()

    def gauge(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Export what `read` returns at each scrape as kvferry_<name>."""
        self._gauges.gauges[f"kvferry_{name}"] = (documentation, read)

    def watch_health(self, read: Callable[[], Mapping[str, WorkerHealth]]) -> None:
        """Export what `read` returns, by worker, at each scrape."""
        self._health.read = read

    def prefilled(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe_one(ttft_s)

    def step(
        self, num_tokens: int, gaps_s: Sequence[float] | np.ndarray, num_together: int
    ) -> None:
        """Count the tokens of one step, and each stream's gap since its previous token.

        num_together: how many of the tokens came together with the one before them, without a gap.
        """
        self._generation_tokens.inc(num_tokens)
        self._itl.observe(gaps_s, num_together)

    def ended(self, finish_reason: str, e2e_s: float) -> None:
        """A generation ended. finish_reason: stop, length, abort, or error."""
        counter = self._ended.get(finish_reason)
        if counter is None:  # the look-up by label takes longer than everything else here
            counter = self._ended[finish_reason] = self._requests.labels(finish_reason)
        counter.inc()
        self._e2e.observe_one(e2e_s)

    def traces_dropped(self, num_requests: int) -> None:
        """Count requests whose spans were lost. Called from any thread."""
        self._untraced.inc(num_requests)

    def rejected(self) -> None:
        self._rejected.inc()

    def connection_rejected(self) -> None:
        self._surplus.inc()

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()

    def preempted(self) -> None:
        self._preemptions.inc()

    def dropped(self, count: int) -> None:
        """Count rows or batches of an incarnation or a room that is no longer expected."""
        self._stale.inc(count)

    def sibling_silent(self) -> None:
        """Another API process of this server did not answer in time."""
        self._silent.inc()

    def set_members(self, members: tuple[wire.Member, ...]) -> None:
        self._cluster.members = members

    def set_states(self, states: Iterable[wire.WorkerState]) -> None:
        self._cluster.states = {state.worker_id: state for state in states}

    def own_text(self) -> bytes:
        """This process's own metrics, without what the workers report (CONTENT_TYPE)."""
        return generate_latest(self._registry)

    def render(self, own: bytes | None = None) -> bytes:
        """Everything in Prometheus' text format (CONTENT_TYPE).

        own: of all processes, see `of_processes`. None: there is only this one.
        """
        return (self.own_text() if own is None else own) + generate_latest(self._cluster)


def of_processes(texts: Mapping[int, bytes]) -> bytes:
    """The own_text of every API process of this server, by number, as one (any thread).

    Each sample gets its process as a label.
    """
    return generate_latest(_Processes(texts))


def _counter(registry: CollectorRegistry, name: str, documentation: str, *labels: str) -> Counter:
    return Counter(f"kvferry_{name}", documentation, labels, registry=registry)
