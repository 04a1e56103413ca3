"""A finished step, as API processes are told of it."""

from collections.abc import Sequence

import numpy as np

from decode.engine import StepInFlight
from decode.scheduler import DecodeScheduler, StepResult
from transfer.emit import Rows, StepEmitter


def tell_step(
    emitter: StepEmitter,
    scheduler: DecodeScheduler,
    slots: np.ndarray,
    result: StepResult,
    flight: StepInFlight,
) -> None:
    """Each API process's rows of a step. slots: i32[n], of the result's rows, all still running."""
    out = flight.out
    by_api: dict[str, list[int]] = {}
    for at, slot in enumerate(slots.tolist()):
        running = scheduler.running(slot)
        assert running is not None
        by_api.setdefault(running.api_id, []).append(at)
    wanted = scheduler.top_wanted(slots)
    logprobs = np.asarray(out.logprobs) if (wanted >= 0).any() else None
    tops = (np.asarray(out.top_ids), np.asarray(out.top_logprobs)) if (wanted > 0).any() else None
    for api_id, ats in by_api.items():
        at_rows = np.array(ats, np.int32)
        device_rows = flight.rows[result.rows[at_rows]] * flight.width + result.columns[at_rows]
        emitter.rows(api_id, _rows_of(result, at_rows, device_rows, wanted, logprobs, tops))


def _rows_of(
    result: StepResult,
    at: np.ndarray,
    device_rows: np.ndarray,
    wanted: np.ndarray,
    logprobs: np.ndarray | None,
    tops: Sequence[np.ndarray] | None,
) -> Rows:
    """One API process's part of a step.

    at, device_rows: i32[n], into the result and into the arrays of the device.
    """
    rows = Rows(result.rooms[at], result.token_ids[at], result.token_idx[at], result.finish[at])
    if logprobs is not None:
        rows.logprobs = logprobs[device_rows]
    if tops is not None:
        rows.top_rows = np.flatnonzero(wanted[at] > 0).astype(np.int32)
        rows.top_ids = tops[0][device_rows][rows.top_rows]
        rows.top_logprobs = tops[1][device_rows][rows.top_rows]
    return rows
