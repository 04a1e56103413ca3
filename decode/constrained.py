"""Slots whose next token a grammar limits. Each of their steps waits for the previous token."""

from collections.abc import Sequence

import numpy as np

from decode.engine import StepEngine
from transfer.errors import RequestError
from transfer.grammars import Constraint, Grammars


class ConstrainedSlots:
    """The constrained slots, and where each is in its grammar."""

    def __init__(self) -> None:
        self._constraints: dict[int, Constraint] = {}  # by slot

    def __len__(self) -> int:
        return len(self._constraints)

    def start(self, slot: int, constraint: Constraint, first_id: int) -> RequestError | None:
        """A slot joins the batch behind its first token. Returns why it cannot go on, or None."""
        self._constraints[slot] = constraint
        return None if constraint.take(first_id) else constraint.failure

    def stop(self, slot: int) -> None:
        """The slot has left the batch. Slots without a grammar are ignored."""
        self._constraints.pop(slot, None)

    def take(self, slots: np.ndarray, token_ids: np.ndarray) -> Sequence[tuple[int, RequestError]]:
        """Advance slots by the tokens they drew. Returns places of those that cannot, and why."""
        if not self._constraints:
            return ()
        wrong = []
        for place, (slot, token_id) in enumerate(
            zip(slots.tolist(), token_ids.tolist(), strict=True)
        ):
            constraint = self._constraints.get(slot)
            if constraint is not None and not constraint.take(token_id):
                wrong.append((place, constraint.failure))
        return wrong

    def mask(
        self, slots: np.ndarray, grammars: Grammars | None, engine: StepEngine
    ) -> Sequence[tuple[int, RequestError]]:
        """Mask the constrained slots among these. Returns which can draw nothing, and why."""
        ours = [slot for slot in slots.tolist() if slot in self._constraints]
        if not ours:
            return ()
        assert grammars is not None
        masks = grammars.masks([self._constraints[slot] for slot in ours])
        engine.set_masks(np.array(ours, np.int32), masks)
        stuck = np.flatnonzero(~masks.any(axis=1)).tolist()
        return [(ours[row], self._constraints[ours[row]].failure) for row in stuck]
