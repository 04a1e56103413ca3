"""What decode knows of one room, what other threads tell it, and what runs on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

from decode.admission import Seat
from decode.engine import StepInFlight
from decode.local import LocalPrompt
from decode.scheduler import StepPlan
from model.chunks import ChunkInFlight
from model.sampling import SampleOut
from transfer import wire
from transfer.backend import FirstToken
from transfer.chunk_times import ChunkTimes
from transfer.held import HeldRoom


@dataclass(frozen=True)
class GrantFailed:
    rooms: tuple[int, ...]
    message: str


@dataclass(slots=True)
class Held(HeldRoom):
    """What decode knows of one room."""

    seat: Seat | None = None
    first_step_s: float = 0.0  # monotonic, when its first step's token was read; 0.0: not yet
    num_steps: int = 0  # known once it is over
    rank: int = -1  # of its seat
    to_fill: Sequence[int] = ()  # by the number of a page that prefill sends: the page it fills
    prefill_rank: int = -1  # as the registry told
    num_cached: int = 0  # tokens of its prompt that were in the prefix cache
    first: FirstToken | None = None  # while it waits for its grammar


@dataclass(frozen=True)
class StepFlight:
    """A dispatched step. started: the rooms whose first step it is."""

    plan: StepPlan
    step: StepInFlight
    started: list[Held]
    dispatched_s: float  # monotonic


@dataclass(frozen=True)
class LocalFlight:
    """A dispatched chunk of prompts, and the draw of first tokens of those that end in it."""

    chunk: ChunkInFlight[LocalPrompt]
    sampled: SampleOut | None
    times: list[ChunkTimes]  # one a piece


def is_local(submit: wire.Submit) -> bool:
    """Whether both legs are one worker's: decode computes the prompt itself."""
    return submit.prefill.worker_id == submit.decode.worker_id
