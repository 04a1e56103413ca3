"""Tries a grammar before any worker gets it, so that none costs a worker more than it may.

A new grammar goes through up to two lanes. In the first each gets a twentieth of a second, which is
enough for nearly all honest ones; so a costly one holds up the next no longer than that. Those that
did not end in time go to the second lane, which gives them all the time that a grammar may take. In
a lane grammars take turns, and a limited number may wait.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from serving.timers import Timers
from serving.trial_process import OVER_TIME, TrialProcess, Word
from serving.turns import Turns


@dataclass(frozen=True)
class LaneLimits:
    """cpu_s: processor time to compile and for the first mask. max_waiting: grammars."""

    cpu_s: float
    max_waiting: int


# A schema of 200 properties, three deep: 0.03 s. One of 1,500 URIs, as many as fit: 0.45 s.
LANES: Final = (LaneLimits(0.05, max_waiting=128), LaneLimits(1.0, max_waiting=16))
TOO_MUCH: Final = "it takes too much time or memory to compile"
_MAX_GOOD: Final = 1024
_MAX_BAD: Final = 256


class GrammarTrial:
    """The verdicts on grammars, and the lanes that reach them. Used by one event loop."""

    def __init__(
        self,
        model_path: Path,
        queue_timeout_s: float = 30.0,
        timers: Timers | None = None,
        lanes: Sequence[LaneLimits] = LANES,
    ) -> None:
        """queue_timeout_s: longest wait for a turn, in either lane."""
        self._lanes = [
            (
                TrialProcess(model_path, limits.cpu_s),
                Turns("grammar trial", limits.max_waiting, queue_timeout_s, timers),
            )
            for limits in lanes
        ]
        self._verdicts = _Verdicts()
        self._shared: dict[bytes, _Shared] = {}

    @property
    def num_waiting(self) -> int:
        """Grammars that wait for their turn."""
        return sum(turns.num_waiting for _, turns in self._lanes)

    async def fault(self, grammar: str) -> str:
        """Why a grammar cannot be followed, in a line; "" when it can.

        Callers with the same grammar share one trial, which is dropped once none waits for it.
        Raises RequestError: QUEUE_FULL when too many wait or this one waited too long, and what
        TrialProcess.word raises.
        """
        key = hashlib.sha256(grammar.encode()).digest()
        known = self._verdicts.get(key)
        if known is not None:
            return known
        shared = self._shared.get(key)
        if shared is None:
            task = asyncio.ensure_future(self._judge(key, grammar))
            shared = self._shared[key] = _Shared(task)
        shared.num_clients += 1
        try:
            await asyncio.wait((shared.task,))
            return shared.task.result()
        finally:
            shared.num_clients -= 1
            if not shared.num_clients:
                shared.task.cancel()
                del self._shared[key]

    def close(self) -> None:
        """End the processes; from now on new grammars are refused (SHUTTING_DOWN)."""
        for process, _ in self._lanes:
            process.close()  # those that wait are refused, one after the other

    async def _judge(self, key: bytes, grammar: str) -> str:
        word: Word = OVER_TIME
        for process, turns in self._lanes:
            if word == OVER_TIME:
                word = await turns.run(partial(process.word, grammar))
        fault = word if isinstance(word, str) else TOO_MUCH
        self._verdicts.add(key, fault)
        return fault


@dataclass(eq=False, slots=True)
class _Shared:
    """A trial, and how many clients wait for it."""

    task: asyncio.Task[str]
    num_clients: int = 0


class _Verdicts:
    """The latest verdicts, by digest; bad ones are kept apart, or many would evict the good."""

    def __init__(self) -> None:
        self._good: OrderedDict[bytes, str] = OrderedDict()
        self._bad: OrderedDict[bytes, str] = OrderedDict()

    def get(self, key: bytes) -> str | None:
        for kept in (self._good, self._bad):
            if key in kept:
                kept.move_to_end(key)
                return kept[key]
        return None

    def add(self, key: bytes, fault: str) -> None:
        kept, most = (self._bad, _MAX_BAD) if fault else (self._good, _MAX_GOOD)
        kept[key] = fault
        while len(kept) > most:
            kept.popitem(last=False)
