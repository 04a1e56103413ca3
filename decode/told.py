"""What API processes are told: the tokens of a finished step, and the record of a leg."""

from collections.abc import Sequence

import numpy as np

from decode.engine import StepInFlight
from decode.held import Held
from decode.scheduler import DecodeScheduler, StepResult
from transfer import wire
from transfer.chunk_times import micros, told_times
from transfer.emit import Rows, StepEmitter


def told_leg(held: Held, stages: dict[str, int], ending: str) -> wire.LegRecord:
    """A room that is over, as seen from decode. stages: see wire.LegRecord."""
    first_step_s = held.first_step_s
    return wire.LegRecord(
        held.submit.room,
        stages,
        ending,
        held.num_cached,
        told_times(held.chunks, None, held.received_s),
        num_steps=held.num_steps,
        first_step_us=micros(first_step_s - held.received_s) if first_step_s else -1,
        dp_rank=held.rank,
        prefill_dp_rank=held.prefill_rank,
    )


def tell_step(
    emitter: StepEmitter,
    scheduler: DecodeScheduler,
    slots: np.ndarray,
    result: StepResult,
    flight: StepInFlight,
) -> None:
    """Tell API processes their rows of a step. slots: i32[n], of the result's rows, all running."""
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
