"""A cluster in this process: a registry, prefill and decode workers with real sockets, no model.

    async with FakeCluster() as cluster:                    # one prefill, one decode, auto-stepping
        dispatcher = await cluster.dispatcher()             # started, and ready
        ...
    async with FakeCluster(auto_step=False, decodes=2) as cluster:
        await cluster.submitted(1)                          # both legs of one room are there
        cluster.step()                                      # prefill, then decode, one step each

The next token is `next_token(all tokens so far)`, so every output can be computed by hand
(`expected_tokens`), wherever the request was moved.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from serving.config import ServeConfig
from serving.dispatch import Dispatcher
from serving.generation import GenerationSpec
from serving.prompt import Prompt
from serving.router import Key
from serving.worker_link import WorkerLink
from tests.fake_network import expected_tokens, logprob_of, next_token, top_of
from tests.fake_worker import PAGE_SIZE, FakeRegistry, FakeRoom, FakeWorker
from tests.recording import ManualTimers, RecordingSink, until
from transfer import wire
from transfer.clock import SYSTEM_CLOCK, Clock, ManualClock
from transfer.rpc import Security

__all__ = [
    "CONTEXT_LENGTH",
    "PAGE_SIZE",
    "SECURITY",
    "FakeCluster",
    "FakeRegistry",
    "FakeRoom",
    "FakeWorker",
    "ManualTimers",
    "RecordingSink",
    "expected_tokens",
    "logprob_of",
    "next_token",
    "open_workers",
    "top_of",
    "until",
]

CONTEXT_LENGTH = 512
SECURITY = Security(token="fake-cluster-token")


def open_workers(dispatcher: Dispatcher) -> dict[Key, float]:
    """(id, epoch) of the workers whose streams are open -> monotonic time of the last message."""
    return {link.key: link.heard_s for link in dispatcher._membership.open_links()}


class _Listening(Dispatcher):
    """Counts the batches that it has taken: (worker, stream) -> how many."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heard = Counter[tuple[str, str]]()

    async def on_batch(self, link: WorkerLink, batch: wire.StepBatch) -> None:
        await super().on_batch(link, batch)
        self.heard[link.worker_id, link.api_id] += 1

    def on_stale(self, link: WorkerLink, batch: wire.StepBatch) -> None:
        super().on_stale(link, batch)
        self.heard[link.worker_id, link.api_id] += 1


@dataclass
class FakeCluster:
    """Everything behind the API process. Start it with `async with`.

    network: all token ids so far -> the next one. auto_step: steps by itself while there is work;
    otherwise tests call step(). clock and timers are given to dispatcher(); with a ManualClock,
    `timers` is a ManualTimers over it.
    """

    prefills: int = 1
    decodes: int = 1
    auto_step: bool = True
    network: Callable[[Sequence[int]], int] = next_token
    context_length: int = CONTEXT_LENGTH
    security: Security = SECURITY
    clock: Clock = SYSTEM_CLOCK
    prefill: list[FakeWorker] = field(default_factory=list, init=False)
    decode: list[FakeWorker] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.registry = FakeRegistry(self.security)
        self._timers = ManualTimers(self.clock) if isinstance(self.clock, ManualClock) else None
        self._work = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None
        self._dispatchers: list[_Listening] = []
        self.prefill = [FakeWorker(self, "prefill", f"prefill-{i}") for i in range(self.prefills)]
        self.decode = [FakeWorker(self, "decode", f"decode-{i}") for i in range(self.decodes)]

    @property
    def timers(self) -> ManualTimers:
        """The timers that fire when a test moves the manual clock."""
        assert self._timers is not None, "this cluster runs on the machine's clock"
        return self._timers

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    async def __aenter__(self) -> Self:
        await self.registry.start()
        for worker in self.workers:
            await worker.start()
        if self.auto_step:
            self._stepper = asyncio.create_task(self._keep_stepping())
        return self

    async def __aexit__(self, *_: object) -> None:
        for dispatcher in self._dispatchers:
            await dispatcher.stop()
        if self._stepper is not None:
            self._stepper.cancel()
            await asyncio.gather(self._stepper, return_exceptions=True)
        for worker in self.workers:
            await worker.kill()
        await self.registry.stop()

    def config(self, **changes: Any) -> ServeConfig:
        """The configuration of an API process here; model_path is an empty path unless given."""
        settings = {"model_path": Path("fake"), "registry_address": self.registry.address}
        return ServeConfig(**{**settings, **changes})

    async def dispatcher(self, *, wait: bool = True, **changes: Any) -> Dispatcher:
        """A started dispatcher, stopped with the cluster. wait: until it sees every worker."""
        dispatcher = _Listening(
            self.config(**changes),
            self.security,
            self.clock,
            timers=self._timers,
        )
        self._dispatchers.append(dispatcher)
        await dispatcher.start()
        if wait:
            await until(lambda: self.sees_all(dispatcher))
        return dispatcher

    async def pass_time(self, seconds: float) -> None:
        """Advance the manual clock in steps of half a second.

        Before each, every worker that is neither dead nor hung gives a sign of life, and all that
        it has sent is taken.
        """
        while seconds > 0:
            for worker in self.workers:
                worker.sign_of_life()
            await until(self._all_heard)
            self.timers.advance(min(seconds, 0.5))
            seconds -= 0.5

    def _all_heard(self) -> bool:
        heard = Counter[tuple[str, str]]()
        for dispatcher in self._dispatchers:
            heard.update(dispatcher.heard)
        return all(
            heard[worker.worker_id, api_id] == sent
            for worker in self.workers
            if not worker.silent
            for api_id, sent in worker.sent.items()
        )

    def sees_all(self, dispatcher: Dispatcher) -> bool:
        """Whether the dispatcher knows exactly the workers that are alive."""
        alive = {(worker.worker_id, worker.epoch) for worker in self.workers if worker.alive}
        return set(open_workers(dispatcher)) == alive

    def spec(
        self,
        prompt_ids: Sequence[int] = (5, 6, 7),
        *,
        max_new_tokens: int = 6,
        timeout_s: float = 600.0,
        request_id: str = "request",
        **sampling: Any,
    ) -> GenerationSpec:
        """A request that arrived just now."""
        now_s = self.clock.monotonic_s()
        params = wire.SamplingParams(max_new_tokens=max_new_tokens, **sampling)
        prompt = Prompt(list(prompt_ids))
        return GenerationSpec(prompt, params, request_id, now_s, now_s + timeout_s)

    def expected(self, spec: GenerationSpec) -> list[int]:
        return expected_tokens(spec.prompt.ids, spec.sampling, self.network)

    def step(self) -> int:
        """One step of every worker, prefill first. Returns how many tokens they made."""
        return sum(worker.step() for worker in self.workers)

    def wake(self) -> None:
        """Tell the stepper that there is work."""
        self._work.set()

    async def submitted(self, num_rooms: int) -> list[int]:
        """Wait for this many rooms with both legs submitted; returns those rooms."""

        def complete() -> list[int]:
            rooms = [room for worker in self.prefill for room in worker.rooms.values()]
            return [room.submit.room for room in rooms if self.decode_room(room) is not None]

        await until(lambda: len(complete()) >= num_rooms)
        return complete()

    def decode_room(self, room: FakeRoom) -> FakeRoom | None:
        """The decode leg of a room at prefill."""
        ref = room.submit.decode
        for worker in self.decode:
            if (worker.worker_id, worker.epoch) == (ref.worker_id, ref.epoch) and worker.alive:
                return worker.rooms.get(room.submit.room)
        return None

    def hand_over(self, room: FakeRoom, finish: int) -> None:
        """The pages and the first token arrive at decode."""
        other = self.decode_room(room)
        assert other is not None, f"prefill computed room {room.submit.room} without a grant"
        other.token_ids = list(room.token_ids)
        other.ready = True
        if finish:
            for worker in self.decode:
                worker.rooms.pop(room.submit.room, None)

    async def _keep_stepping(self) -> None:
        while True:
            await self._work.wait()
            while self.step():  # noqa: ASYNC110  (the turn is for what the step sent)
                await asyncio.sleep(0)
            self._work.clear()
