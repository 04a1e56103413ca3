"""Whether a step tries drafts: only if it gains more in tokens than it loses in time.

Pure. Every step shows what each slot's drafts are worth: it compares the first draft with the token
drawn, whether that draft was tried or not. How long steps take is measured while serving.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from decode.drafts import NO_DRAFT
from decode.held import StepFlight

_WEIGHT = 0.25  # of the last step, in a slot's share of drafts that were right
_GAIN = 1.05  # the least gain worth trying for: less is noise
_SLACK = 1.02  # the least time grows by this with each step that took longer
_DOUBT = 0.995  # and is assumed shorter by this with each step of the other kind


@dataclass(slots=True)
class _Took:
    """How long steps of one kind take."""

    least_s: float = 0.0  # 0.0: there was none yet
    others: int = 0  # steps of the other kind since the last one

    @property
    def expected_s(self) -> float:
        """The least time, less and less while the kind is unused, so that it is measured again.

        The last measurement may have been made at a bad moment.
        """
        return self.least_s * _DOUBT**self.others


class Speculation:
    """What was learnt about slots' drafts and steps' times."""

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        self._share = np.zeros(num_slots, np.float64)  # of first drafts that were right, lately
        self._powers = np.arange(1, num_drafts + 1)
        self._took: dict[int, tuple[_Took, _Took]] = {}  # without drafts, with; by size class
        self._read_s = 0.0  # when a step was last read

    def start(self, slot: int) -> None:
        """The slot has a new request, of which nothing is known yet."""
        self._share[slot] = 0.0

    def pays(self, slots: np.ndarray) -> bool:
        """Whether a step of these slots, i64[n], is to try drafts.

        A draft counts only if all before it were right, each assumed as likely as the first. Until
        both kinds of step were measured, they are assumed to take the same time.
        """
        if not len(self._powers) or not len(slots):
            return False
        tokens = 1 + float((self._share[slots, None] ** self._powers).sum()) / len(slots)
        plain, tried = self._times(len(slots))
        longer = 1.0
        if plain.least_s and tried.least_s:
            longer = tried.expected_s / plain.expected_s
        return tokens > longer * _GAIN

    def read(
        self, done: StepFlight, token_ids: np.ndarray, is_right: np.ndarray, now_s: float
    ) -> Mapping[str, int]:
        """Learn from a step that was read just now. Returns counters to add.

        token_ids: i32[n, W], of its slots. is_right: see `learn`.
        """
        slots, drafts = done.plan.slots, token_ids[:, 1:]
        self.learn(slots, is_right)
        free_s = max(done.dispatched_s, self._read_s)
        self.took(len(slots), drafts.size > 0, now_s - free_s)
        self._read_s = now_s
        made, accepted = int((drafts != NO_DRAFT).sum()), int((drafts >= 0).sum())
        return {"draft_tokens": made, "accepted_draft_tokens": accepted}

    def learn(self, slots: np.ndarray, is_right: np.ndarray) -> None:
        """Learn whether each slot's first draft was what was drawn: i64[n], bool[n]."""
        self._share[slots] += _WEIGHT * (is_right - self._share[slots])

    def took(self, num_slots: int, tried: bool, seconds: float) -> None:
        """Learn a step's time, from when the device was free for it until it was read.

        The least time counts, since whatever else the device does makes a step longer.
        """
        times = self._times(num_slots)
        times[not tried].others += 1
        own = times[tried]
        own.others = 0
        own.least_s = min(seconds, own.least_s * _SLACK) if own.least_s else seconds

    def _times(self, num_slots: int) -> tuple[_Took, _Took]:
        """Steps whose shapes are padded to the same power of two take about as long."""
        return self._took.setdefault((num_slots - 1).bit_length(), (_Took(), _Took()))
