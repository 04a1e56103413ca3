"""Turns an ended request's timeline into OpenTelemetry spans: the request and its stages."""

from collections.abc import Iterator
from typing import Any

Stage = tuple[str, float | None, float | None, dict[str, Any]]  # name, start ms, end ms, attributes


def stages_of(timeline: dict[str, Any]) -> Iterator[Stage]:
    """queue, and for each attempt prefill, transfer and decode. Milliseconds since arrival.

    timeline: as serving.timeline_answer.timeline_of makes it. A leg that was not reported has no
    span, nor has prefill's where decode computed the prompt itself.
    """
    yield "queue", 0.0, timeline["admitted_ms"], {}
    for choice in timeline["choices"]:
        for number, attempt in enumerate(choice["attempts"]):
            where = {"choice": choice["index"], "attempt": number}
            if attempt["moved"] is not None:
                where["moved"] = attempt["moved"]["reason"]
            for role in ("prefill", "decode"):
                leg = attempt[role]
                if leg is None or not leg["reported"]:
                    continue
                facts = {"worker": leg["worker"], "ending": leg["ending"], **where}
                if role == "prefill":
                    yield from _prefill(leg, facts, where)
                else:
                    yield "decode", leg["queued_ms"], leg["ended_ms"], facts | _decode(leg)


def _prefill(leg: dict[str, Any], facts: dict[str, Any], where: dict[str, Any]) -> Iterator[Stage]:
    known = {
        "cached_tokens": leg["cached_tokens"],
        "chunks": len(leg["chunks"]),
        "grant_wait_ms": leg["grant_wait_ms"],
    }
    yield "prefill", leg["queued_ms"], leg["first_token_ms"] or leg["ended_ms"], facts | known
    moved = leg["transfer"]
    if moved is not None:
        sizes = {name: moved[name] for name in ("backend", "bytes", "frames")}
        end_ms = moved["last_byte_ms"] if moved["acked_ms"] is None else moved["acked_ms"]
        yield "transfer", moved["first_byte_ms"], end_ms, sizes | where


def _decode(leg: dict[str, Any]) -> dict[str, Any]:
    names = ("reserved_ms", "pages_complete_ms", "first_step_ms", "steps")
    return {name: leg[name] for name in names}


class Spans:
    """Makes the spans of requests."""

    def __init__(self) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        self._ids = RandomIdGenerator()
        self._resource = Resource.create({"service.name": "kvferry"})

    def of(self, timeline: dict[str, Any]) -> list[Any]:
        """The request's span, then those of its stages, which are its children."""
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        trace_id = self._ids.generate_trace_id()
        flags = TraceFlags(TraceFlags.SAMPLED)
        failed = any(part["error"] for part in (timeline, *timeline["choices"]))
        root = SpanContext(trace_id, self._ids.generate_span_id(), False, flags)
        spans = [
            self._span(
                timeline,
                ("request", 0.0, timeline["ended_ms"], _request(timeline)),
                context=root,
                kind=SpanKind.SERVER,
                status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
            )
        ]
        for stage in stages_of(timeline):
            if stage[1] is None or stage[2] is None:
                continue
            context = SpanContext(trace_id, self._ids.generate_span_id(), False, flags)
            spans.append(self._span(timeline, stage, context=context, parent=root))
        return spans

    def _span(self, timeline: dict[str, Any], stage: Stage, **more: Any) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan

        name, start_ms, end_ms, facts = stage
        arrival_ns = round(timeline["arrival_unix_s"] * 1e9)
        times = (arrival_ns + round((ms or 0.0) * 1e6) for ms in (start_ms, end_ms))
        start_ns, end_ns = times
        attributes = {f"kvferry.{key}": value for key, value in facts.items() if value is not None}
        return ReadableSpan(
            name,
            resource=self._resource,
            attributes=attributes,
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            **more,
        )


def _request(timeline: dict[str, Any]) -> dict[str, Any]:
    choices = timeline["choices"]
    errors = [part["error"]["code"] for part in (timeline, *choices) if part["error"]]
    return {
        "request_id": timeline["request_id"],
        "stream": timeline["stream"],
        "writes": timeline["writes"],
        "first_write_ms": timeline["first_write_ms"],
        "prompt_tokens": timeline["prompt_tokens"],
        "output_tokens": sum(choice["output_tokens"] or 0 for choice in choices),
        "choices": len(choices),
        "moves": sum(max(choice["num_attempts"] - 1, 0) for choice in choices),
        "errors": errors or None,
    }
