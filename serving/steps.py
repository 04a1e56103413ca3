"""Hands the workers' steps to the streams: each token once and in order, a whole step in one go."""

import asyncio
from collections.abc import Collection
from typing import Protocol

import numpy as np

from serving.config import ServeConfig
from serving.generation import Generation
from serving.interval import AutoInterval, Interval, Lag
from serving.metrics import Metrics
from serving.placement import Placement
from serving.plain_streams import PlainStreams
from serving.router import Key
from serving.step_rows import Runs, unpack_runs
from serving.worker_link import WorkerLink
from transfer import wire
from transfer.clock import Clock

_STRAYS_TOLERATED = 3  # rows of an unknown room before its worker is told to drop it
_STRAYS_REMEMBERED = 4096


class StepsOwner(Protocol):
    """Ends generations."""

    def finish(self, generation: Generation) -> None:
        """Its stream has just got its last token."""
        ...

    def stream_failed(self, generation: Generation, error: Exception) -> None:
        """Its sink raised."""
        ...


class Steps:
    """Finds the generation of each row, hands it its tokens, and sets the pace of the streams.

    interval: of streams that did not ask for one of their own. lag_s: how long the last step waited
    to be handled. rows_taken: runs of tokens that came so far.
    """

    def __init__(
        self,
        config: ServeConfig,
        placement: Placement,
        metrics: Metrics,
        clock: Clock,
        owner: StepsOwner,
    ) -> None:
        asked = config.stream_interval
        self.interval = AutoInterval() if asked == "auto" else Interval(asked)
        self.lag_s = 0.0
        self.rows_taken = 0
        self._group_size = config.batch_notify_size  # 0: a whole step
        self._placement = placement
        self._metrics = metrics
        self._clock = clock
        self._owner = owner
        self._lag = Lag()
        self._plain = PlainStreams(self.interval)
        self._strays: dict[tuple[str, int], int] = {}

    async def take(self, link: WorkerLink, batch: wire.StepBatch) -> None:
        """Hand out all rows of a batch at once, or in groups of batch_notify_size streams.

        Raises BadMessage when its arrays disagree.
        """
        self._keep_pace(link, batch)
        runs = unpack_runs(batch)
        self.rows_taken += len(runs)
        group = self._group_size or len(runs)
        for start in range(0, len(runs), group):
            if start:
                await asyncio.sleep(0)
            part = runs.part(start, start + group)
            now_s = self._clock.monotonic_s()
            told = self._plain.tell(link.key, part, now_s)
            self._metrics.step(told.num_tokens, told.gaps_s, told.num_tokens - len(told.gaps_s))
            if len(told.left):
                self._tell_runs(link, part, told.left, now_s)
            for generation in told.ended:
                self._owner.finish(generation)
        # The events are sent in the loop's next turn, and written then or at its end. Settle after
        # that.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._settle)

    def _settle(self) -> None:
        for generation in self._plain.begun():
            self._placement.progressed(generation)
        self._plain.seat_invited(len(self._placement))

    def keep(self, workers: Collection[Key]) -> None:
        """Forget all others: those incarnations are gone."""
        self._lag.keep(workers)
        self._plain.keep(workers)

    def _keep_pace(self, link: WorkerLink, batch: wire.StepBatch) -> None:
        now_s = self._clock.monotonic_s()
        self.lag_s = self._lag.measure(link.key, batch.emitted_s, now_s)
        if isinstance(self.interval, AutoInterval):
            self.interval.observe(self.lag_s, now_s, self._clock.thread_cpu_s())

    def _tell_runs(self, link: WorkerLink, runs: Runs, which: np.ndarray, now_s: float) -> None:
        """Hand each stream the tokens of its run. which: indices of runs."""
        key = link.key
        at = self._placement.at
        rooms, first_idx, finish = (
            column[which].tolist() for column in (runs.rooms, runs.first_idx, runs.finish)
        )
        gaps_s: list[float] = []
        num_tokens = num_together = 0
        rows = zip(rooms, first_idx, runs.ids_of(which), finish, runs.detail_of(which), strict=True)
        for room, *run in rows:
            generation = at(room, key)
            if generation is None:
                self._stray(link, room)
                continue
            generation.reclaim()  # if the columns have it, they could not handle this run
            try:
                tokens = generation.accept(*run)
                if tokens is None:
                    continue
                generation.sink.on_tokens(tokens)
            except Exception as error:  # one stream's fault must not reach the others
                self._owner.stream_failed(generation, error)
                continue
            count = len(tokens.ids)
            if not generation.spec.is_probe:
                num_tokens += count
                num_together += count - 1
                if generation.last_token_s:
                    gaps_s.append(now_s - generation.last_token_s)
                else:
                    self._metrics.first_token(now_s - generation.spec.arrival_s)
            if generation.timeline is not None and not generation.last_token_s:
                generation.timeline.first_token_s = now_s
            generation.last_token_s = now_s
            if len(generation.token_ids) - count - generation.attempt_start < 2:
                self._placement.progressed(generation)
            if generation.finish:
                self._owner.finish(generation)
            else:
                self._plain.invite(generation)
        self._metrics.step(num_tokens, gaps_s, num_together)

    def prefilled(self, link: WorkerLink, event: wire.RoomEvent) -> None:
        """The prompt of a room is computed."""
        generation = self._placement.at(event.room, link.key)
        if generation is None:
            self._stray(link, event.room)
            return
        self._placement.found_cached(generation, event.cached_tokens)
        if generation.prefilled:
            return
        generation.prefilled = True
        num_prompt = len(generation.spec.prompt.ids)
        cached = min(event.cached_tokens, num_prompt)
        if not generation.spec.is_probe:
            self._metrics.prefilled(num_prompt, cached)
        try:
            generation.sink.on_prefilled(cached, event.prompt_logprobs)
        except Exception as error:  # one stream's fault must not reach the others
            self._owner.stream_failed(generation, error)

    def _stray(self, link: WorkerLink, room: int) -> None:
        """Count a row of an unknown room, and abort the room if there are too many.

        A few rows of a room that just ended are always on their way; more mean that the worker
        still has the room.
        """
        self._metrics.dropped(1)
        key = (link.worker_id, room)
        count = self._strays.get(key, 0) + 1
        if count > _STRAYS_TOLERATED:
            self._strays.pop(key, None)
            link.abort(room)
            return
        if len(self._strays) >= _STRAYS_REMEMBERED:
            self._strays.clear()
        self._strays[key] = count
