"""What API processes are told: the tokens of a finished step, and the record of a leg."""

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
    """Tell API processes their rows of a step. slots: i64[n], of the result's rows, all running."""
    out = flight.out
    wanted = scheduler.top_wanted(slots)
    logprobs = np.asarray(out.logprobs) if (wanted >= 0).any() else None
    tops = (np.asarray(out.top_ids), np.asarray(out.top_logprobs)) if (wanted > 0).any() else None
    for api_id, at in scheduler.by_api(slots).items():
        rows = Rows(result.rooms[at], result.token_ids[at], result.token_idx[at], result.finish[at])
        if logprobs is not None:
            device_rows = flight.rows[result.rows[at]] * flight.width + result.columns[at]
            rows.add_logprobs(device_rows, wanted[at], logprobs, tops)
        emitter.rows(api_id, rows)
