"""Spells a timeline as JSON: milliseconds since arrival, `null` for what has not happened.

A worker's offsets are counted from when the submit was sent to it. Its actions really happened
later, by at most the time that the call with the submit took.
"""

from collections.abc import Callable
from typing import Any

import orjson

from serving.router import Burden
from serving.timeline import Attempt, ChoiceTimeline, RequestTimeline
from transfer import wire
from transfer.room import State

Policies = dict[wire.Role, str]

_Since = Callable[[float | None], float | None]  # monotonic seconds to milliseconds
_Offset = Callable[[int], float | None]  # a worker's offset to the same milliseconds
_BURDENS = {"prefill": ("queued_tokens", "requests"), "decode": ("used_share", "requests")}


def spell(request: RequestTimeline, policies: Policies) -> bytes:
    """The answer to /requests/ID/timeline."""
    return orjson.dumps(timeline_of(request, policies))


def timeline_of(request: RequestTimeline, policies: Policies) -> dict[str, Any]:
    """The answer before it is JSON. policies: those by which each role's worker is picked."""
    since = _counting_from(request.arrival_s)
    return {
        "request_id": request.request_id,
        "arrival_unix_s": request.arrival_unix_s,
        "state": _state(request),
        "stream": request.streamed,
        "prompt_tokens": request.num_prompt_tokens,
        "admitted_ms": since(request.admitted_s),  # after the wait in the limiter's queue
        "first_write_ms": since(request.first_write_s),
        "writes": request.all_writes,
        "ended_ms": since(request.ended_s),
        "error": _error(request.error),
        "choices": [_choice(choice, policies, since) for choice in request.choices],
    }


def _counting_from(start_s: float) -> _Since:
    return lambda time_s: None if time_s is None else round((time_s - start_s) * 1e3, 3)


def _state(request: RequestTimeline) -> str:
    if request.ended_s is not None:
        return "ended"
    return "waiting" if request.admitted_s is None else "running"


def _error(error: tuple[str, str] | None) -> dict[str, str] | None:
    return None if error is None else {"code": error[0], "message": error[1]}


def _choice(choice: ChoiceTimeline, policies: Policies, since: _Since) -> dict[str, Any]:
    return {
        "index": choice.index,
        "request_id": choice.request_id,
        "prompt_tokens": choice.num_prompt_tokens,
        "first_token_ms": since(choice.first_token_s),
        "ended_ms": since(choice.ended_s),
        "ending": choice.ending or None,
        "output_tokens": choice.num_tokens if choice.ended_s is not None else None,
        "error": _error(choice.error),
        "num_attempts": choice.num_attempts,
        "attempts": [_attempt(attempt, policies, since) for attempt in choice.attempts],
    }


def _attempt(attempt: Attempt, policies: Policies, since: _Since) -> dict[str, Any]:
    left = None
    if attempt.left_s is not None:
        left = {
            "ms": since(attempt.left_s),
            "reason": attempt.reason,
            "message": attempt.message,
        }
    return {
        "room": attempt.room,
        "routed_ms": since(attempt.began_s),
        "routing": {
            role: {"policy": policies[role], "considered": _burdens(role, burdens)}
            for role, burdens in attempt.considered.items()
        }
        | {"uncached_tokens": attempt.num_uncached},
        "prefill": _leg(attempt, "prefill", since),
        "decode": _leg(attempt, "decode", since),
        "moved": left,
    }


def _burdens(role: str, burdens: dict[str, Burden]) -> dict[str, dict[str, float]]:
    return {
        worker_id: {
            name: round(value, 4) for name, value in zip(_BURDENS[role], burden, strict=True)
        }
        for worker_id, burden in burdens.items()
    }


def _leg(attempt: Attempt, role: wire.Role, since: _Since) -> dict[str, Any] | None:
    """The attempt's leg of that role; None for prefill if decode computed the prompt itself."""
    leg = attempt.legs.get(role)
    if leg is None:
        return None
    told: dict[str, Any] = {
        "worker": leg.worker_id,
        "submit_sent_ms": since(leg.sent_s),
        "submit_answered_ms": since(leg.answered_s),
        "reported": leg.record is not None,
    }
    if leg.record is not None:
        sent_s = attempt.began_s if leg.sent_s is None else leg.sent_s

        def offset(offset_us: int) -> float | None:
            return None if offset_us < 0 else since(sent_s + offset_us * 1e-6)

        told |= _prefill(leg.record, offset) if role == "prefill" else _decode(leg.record, offset)
        told["cached_tokens"] = leg.record.cached_tokens
        if "prefill" not in attempt.legs:
            told["chunks"] = _chunks(leg.record, offset)
    return told


def _prefill(record: wire.LegRecord, offset: _Offset) -> dict[str, Any]:
    queued_us, granted_us = (record.stages.get(s.value, -1) for s in (State.QUEUED, State.GRANTED))
    return {
        "queued_ms": _entered(record, State.QUEUED, offset),
        "granted_ms": _entered(record, State.GRANTED, offset),
        "grant_wait_ms": round((granted_us - queued_us) / 1e3, 3) if granted_us >= 0 else None,
        "dp_rank": _rank(record.dp_rank),
        "chunks": _chunks(record, offset),
        "first_token_ms": _entered(record, State.SENDING, offset),
        "transfer": _shipment(record.shipment, offset),
        **_over(record, offset),
    }


def _decode(record: wire.LegRecord, offset: _Offset) -> dict[str, Any]:
    return {
        "queued_ms": _entered(record, State.QUEUED, offset),
        "reserved_ms": _entered(record, State.RESERVED, offset),
        "first_pages_ms": _entered(record, State.RECEIVING, offset),
        "pages_complete_ms": _entered(record, State.READY, offset),
        "started_ms": _entered(record, State.DECODING, offset),
        "first_step_ms": offset(record.first_step_us),
        "dp_rank": _rank(record.dp_rank),
        "prefill_dp_rank": _rank(record.prefill_dp_rank),
        "steps": record.num_steps,
        **_over(record, offset),
    }


def _rank(rank: int) -> int | None:
    return None if rank < 0 else rank


def _entered(record: wire.LegRecord, state: State, offset: _Offset) -> float | None:
    """When the leg entered the state."""
    return offset(record.stages.get(state.value, -1))


def _over(record: wire.LegRecord, offset: _Offset) -> dict[str, Any]:
    done_ms, failed_ms = (_entered(record, at, offset) for at in (State.DONE, State.FAILED))
    return {
        "ended_ms": failed_ms if done_ms is None else done_ms,
        "ending": record.ending or "done",
    }


def _chunks(record: wire.LegRecord, offset: _Offset) -> list[dict[str, Any]]:
    names = ("start_ms", "end_ms", "handed_over_ms", "sent_ms")
    return [
        {"tokens": tokens, **dict(zip(names, map(offset, times), strict=True))}
        for tokens, *times in wire.unpack_i64(record.chunks).reshape(-1, 5).tolist()
    ]


def _shipment(shipment: wire.Shipment | None, offset: _Offset) -> dict[str, Any] | None:
    if shipment is None:
        return None
    acked = shipment.acked_us >= 0
    return {
        "backend": shipment.way,
        "bytes": shipment.num_bytes,
        "frames": shipment.num_frames,
        "first_byte_ms": offset(shipment.first_us),
        "last_byte_ms": offset(shipment.last_us),
        "acked_ms": offset(shipment.acked_us),
        "seconds": (shipment.acked_us - shipment.first_us) / 1e6 if acked else None,
    }
