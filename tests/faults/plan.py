"""What a seed draws: faults, each drawn independently, so that any one can be drawn again."""

from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal[
    "kill",  # SIGKILL
    "term",  # SIGTERM: workers and API processes drain
    "int",  # SIGINT: the process ends at once
    "hang",  # SIGSTOP for a while, then SIGCONT
    "hang_kill",  # SIGSTOP for a while, then SIGKILL
    "flip",  # one bit of a frame of pages
    "cut",  # a data connection is reset
    "delay",  # a frame is delayed, by less than the stall timeout
    "stall",  # a data connection moves nothing for longer than the stall timeout
    "part",  # a worker's host cannot be reached for a while (needs namespaces)
    "lossy",  # a worker's host loses and delays packets for a while (needs netem)
]
Phase = Literal[
    "queued", "granted", "mid_chunk", "mid_frame", "last_frame", "first_token", "mid_decode"
]
Role = Literal["prefill", "decode", "api", "registry", "link"]

ON_PROCESS: tuple[Kind, ...] = ("kill", "term", "int", "hang", "hang_kill")
ON_FRAMES: tuple[Kind, ...] = ("flip", "cut", "delay", "stall")
PHASES: tuple[Phase, ...] = (
    "queued",
    "granted",
    "mid_chunk",
    "mid_frame",
    "last_frame",
    "first_token",
    "mid_decode",
)
FRAME_PHASES: tuple[Phase, ...] = ("mid_chunk", "mid_frame", "last_frame")
# Longer than every deadline for a silent peer.
LONG_HANG_S = (4.5, 6.0)
SHORT_HANG_S = (0.1, 1.2)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. number: from 1, in its campaign."""

    number: int
    kind: Kind
    role: Role
    phase: Phase
    index: int  # which of the role's processes, modulo their number
    at: float  # where in the phase, 0 to 1
    lasts_s: float  # of a hang, a delay, a cut-off
    pause_s: float  # before the next fault

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"fault {self.number}: {self.kind} {self.role} at {self.phase}{lasts}"


@dataclass(frozen=True)
class Means:
    """What can be done to this system."""

    frames: bool  # a proxy stands between the data ports
    namespaces: bool  # workers have networks of their own
    netem: bool
    long_share: float = 0.3  # share of hangs and stalls that outlast the deadlines


def draw_fault(seed: int, number: int, means: Means) -> Fault:
    """The fault with this number in this seed's campaign."""
    rng = Random(f"{seed}:{number}")
    kinds: list[Kind] = ["kill", "kill", "kill", "hang", "hang", "hang", "hang_kill", "term", "int"]
    if means.frames:
        kinds += ["flip", "flip", "cut", "delay", "stall"]
    if means.namespaces:
        kinds += ["part", "part", "part", "part"]
    if means.netem:
        kinds += ["lossy", "lossy", "lossy"]
    kind = rng.choice(kinds)
    role: Role = "link"
    if kind in ON_PROCESS:
        role = rng.choice(("prefill", "prefill", "prefill", "decode", "decode", "decode", "api"))
        role = "registry" if rng.random() < 0.12 else role
    elif kind in ("part", "lossy"):
        role = rng.choice(("prefill", "decode"))
    phase = rng.choice(PHASES)
    if kind in ON_FRAMES:
        phase = rng.choice(FRAME_PHASES[1:] if kind == "flip" else FRAME_PHASES)
    return Fault(
        number,
        kind,
        role,
        phase,
        rng.randrange(4),
        rng.random(),
        _lasting(rng, kind, means.long_share),
        rng.choice((0.0, 0.05, 0.3)) * rng.random(),
    )


def _lasting(rng: Random, kind: Kind, long_share: float) -> float:
    is_long = rng.random() < long_share
    short_s, long_s = rng.uniform(*SHORT_HANG_S), rng.uniform(*LONG_HANG_S)
    if kind in ("kill", "term", "int", "flip", "cut"):
        return 0.0
    if kind in ("delay", "hang_kill"):
        return short_s
    if kind == "stall":
        return long_s
    return long_s if is_long else short_s
