"""Draws tokens apart from the step that computed their logits, by programs without predicates.

On a GPU the host waits for every predicate, so predicates at the end of a step would keep the next
step from being launched while it runs. The host knows what each slot may ask for, and picks the
program by that.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from decode.step import SlotState, Tried, draw_tokens
from model.buckets import DecodeBuckets, Drafting
from model.programs import Program
from model.sampling import Asks, SampleOut, SamplingLike, asks_of
from model.sharding import COLUMNS_OF_RANKS, RANKS, abstract_i32, abstract_of, on_ranks, told_spec
from model.transformer import Model


def width_of(drafting: Drafting | None, tries: bool) -> int:
    """Rows that each slot has in a step."""
    return 1 + drafting.num_tokens if drafting is not None and tries else 1


class Draws:
    """The programs, and what each slot's request asks for."""

    def __init__(self, model: Model, buckets: DecodeBuckets, dp_size: int) -> None:
        self._model, self._buckets, self._dp_size = model, buckets, dp_size
        self._asks = np.zeros(dp_size * buckets.slots[-1], np.int8)
        self._programs: dict[tuple[int, int, Asks], Program] = {}

    def start(self, slot: int, params: SamplingLike) -> None:
        """A request takes the slot."""
        self._asks[slot] = asks_of(params)

    def asked(self, slots: np.ndarray) -> Asks:
        """The most that one of these slots asks for."""
        return Asks(self._asks[slots].max(initial=Asks.GREEDY))

    def __call__(
        self, width: int, asks: Asks, state: SlotState, plan: np.ndarray, *tried: Any
    ) -> tuple[SlotState, SampleOut]:
        """Dispatch a draw. tried: the logits and the Tried that `try_tokens` returned."""
        rows = plan.shape[1] // self._dp_size
        drawn: tuple[SlotState, SampleOut] = self._programs[rows, width, asks](state, plan, *tried)
        return drawn

    @property
    def logits_bytes(self) -> int:
        """Bytes of the longest step's logits on one device: no program's scratch includes them."""
        rows = max(slots * width for slots, width, _ in self._sizes())
        return 4 * rows * self._model.cfg.vocab_size

    def programs(self, state: SlotState) -> Sequence[Program]:
        """All draw programs, to be compiled. state: its shapes."""
        self._programs = {
            (slots, width, asks): self._program(slots, width, drafting, asks, state)
            for slots, width, drafting in self._sizes()
            for asks in Asks
        }
        return list(self._programs.values())

    def _sizes(self) -> Iterator[tuple[int, int, Drafting | None]]:
        for slots in self._buckets.slots:
            drafting = self._buckets.drafting_of(slots)
            for width in sorted({width_of(drafting, tries) for tries in (False, True)}):
                yield slots, width, drafting

    def _program(
        self, slots: int, width: int, drafting: Drafting | None, asks: Asks, state: SlotState
    ) -> Program:
        mesh, rows = self._model.mesh, self._dp_size * slots

        def array(dtype: Any, *shape: int) -> np.ndarray:
            return np.broadcast_to(np.zeros((), dtype), shape)  # takes no memory

        logits: jax.ShapeDtypeStruct
        tried: Sequence[Array]
        logits, *tried = abstract_of(
            (
                array(np.float32, rows * width, self._model.cfg.vocab_size),
                array(np.int32, rows, width),
                array(np.int32, rows, width),
                array(np.bool_, rows, width),
                array(np.int32, rows),
            ),
            mesh,
            RANKS,
        )
        draw = on_ranks(
            mesh,
            partial(draw_tokens, self._model, drafting, asks),
            (RANKS, COLUMNS_OF_RANKS, RANKS, RANKS),
            (RANKS, told_spec(mesh)),
        )
        plan = abstract_i32((4, rows), mesh, COLUMNS_OF_RANKS)
        of = f"slots={slots}{', drafts' if width > 1 else ''}, {asks.name.lower()}"
        return Program(f"draw[{of}]", draw, (state, plan, logits, Tried(*tried)), (0,))
