"""Places each live generation at a pair of workers, and at another pair when that one fails."""

import itertools
import logging
import secrets
from typing import Literal, Protocol

from serving.config import ServeConfig
from serving.generation import Generation
from serving.health import WorkerHealth
from serving.membership import Membership
from serving.router import Key, Pair, Router
from serving.timeline import Timelines
from serving.timers import Timers
from serving.worker_link import WorkerLink
from transfer import wire
from transfer.clock import Clock
from transfer.errors import Code, RequestError
from transfer.prefix_cache import sharing_salt

logger = logging.getLogger(__name__)

_BACKOFF_FIRST_S = 0.05
_BACKOFF_LONGEST_S = 1.0
_WORD_S = 1.0  # longest time between two workers' messages about the end of one room
# A full queue, a late request and one that no worker could serve are no fault of the worker.
_WORKERS_FAULT = frozenset({Code.PEER_LOST, Code.STALE, Code.INTERNAL})
_GOLDEN = 0.6180339887498949


class PlacementOwner(Protocol):
    """Ends generations that cannot be placed any more, and counts moves."""

    def fail(self, generation: Generation, error: RequestError) -> None: ...

    def end(self, generation: Generation, reason: Literal["abort"]) -> None: ...

    def retried(self, reason: str) -> None: ...


class Placement:
    """Every live generation is in a room, or waits for a pair of workers, or backs off.

    A room is at both workers or at neither: both legs are submitted in the same turn of the loop,
    and whatever ends one of them (a refusal, a failure, a lost worker) aborts the other before the
    next room is made.
    """

    def __init__(
        self,
        config: ServeConfig,
        membership: Membership,
        router: Router,
        clock: Clock,
        timers: Timers,
        owner: PlacementOwner,
        timelines: Timelines,
    ) -> None:
        self._config = config
        self._membership = membership
        self._router = router
        self._clock = clock
        self._timers = timers
        self._owner = owner
        self._timelines = timelines
        self._live: dict[Generation, None] = {}
        self._rooms: dict[int, Generation] = {}
        self._waiting: dict[Generation, None] = {}
        # Unique over all API processes: random high bits, and a counter that never wraps.
        self._next_room = itertools.count((secrets.randbits(31) << 32) + 1)
        self._next_jitter = itertools.count(1)

    def __len__(self) -> int:
        return len(self._live)

    def all(self) -> list[Generation]:
        return list(self._live)

    def at(self, room: int, key: Key) -> Generation | None:
        """The generation in the room, if that worker is one of its pair."""
        generation = self._rooms.get(room)
        if generation is None or not generation.involves(key):
            return None
        return generation

    def health_of(self, link: WorkerLink) -> WorkerHealth:
        """Why this process passes the worker over, if it does."""
        breaker = self._router.breakers.state(link.key, self._clock.monotonic_s())
        stalled = link.key in self._membership.stalled()
        return WorkerHealth(link.member.draining, breaker.value, stalled)

    def health(self) -> dict[str, WorkerHealth]:
        """The health of every worker whose stream is open, by id."""
        return {link.worker_id: self.health_of(link) for link in self._membership.open_links()}

    def place(self, generation: Generation) -> None:
        """Give it a room at the best pair now, or, without a pair, as soon as there is one."""
        self._live[generation] = None
        generation.retry_timer = None
        pair = self._router.pick(
            self._takers("prefill", generation),
            self._takers("decode", generation),
            len(generation.spec.prompt.ids) + len(generation.token_ids),
            self._clock.monotonic_s(),
            generation.avoid,
            generation.spec.prompt,
            sharing_salt(generation.spec.adapter, generation.spec.cache_salt),
            self._membership.stalled(),
            generation.spec.ranks,
            may_be_local=generation.may_be_local,
        )
        if pair is None:
            if self._is_of_another_model(generation):
                why = "its first tokens are of another model than the workers now serve"
                self._owner.fail(generation, RequestError(Code.PEER_LOST, why))
            else:
                self._wait_for_pair(generation)
            return
        links = []
        for key in pair.keys:
            link = self._membership.link(key)
            assert link is not None, f"{key} takes work but has no link"
            links.append(link)
        # Each row's key is compared with these. Comparing an object with itself is quicker than
        # comparing equal objects.
        pair.decode_key, pair.prefill_key = links[0].key, links[-1].key
        generation.begin_attempt(next(self._next_room), pair)
        generation.model_digest = pair.decode.info.model_digest
        self._rooms[generation.room] = generation
        self._timelines.began(generation.timeline, generation.room, pair)
        spec = generation.spec
        for link in links:
            message = generation.submit_message(link.api_id)
            link.submit(message, spec.arrival_s, spec.deadline_s)

    def _takers(self, role: wire.Role, generation: Generation) -> list[wire.Member]:
        """Workers that take new work; once it has tokens, those whose model drew them.

        Of these, those that can hold it, if any can: smaller ones may have come since it began.
        """
        takers = self._membership.takers(role)
        if not generation.started:
            return takers
        takers = [m for m in takers if m.info.model_digest == generation.model_digest]
        spec = generation.spec
        more = spec.sampling.max_new_tokens if role == "decode" else len(generation.token_ids)
        most = len(spec.prompt.ids) + more
        return [m for m in takers if m.info.max_request_tokens >= most] or takers

    def _is_of_another_model(self, generation: Generation) -> bool:
        """Whether all workers have another model by now than drew its tokens.

        The registry admits one model at a time, so those that had its own do not come back.
        """
        return generation.started and generation.model_digest != self._membership.model_digest

    def place_waiting(self) -> None:
        """Place the waiting generations: a worker may take work now."""
        waiting, self._waiting = self._waiting, {}
        for generation in waiting:
            if generation.retry_timer is not None:
                generation.retry_timer.cancel()
            self.place(generation)

    def found_cached(self, generation: Generation, cached_tokens: int) -> None:
        """The worker that computed the prompt had so many of its tokens in its cache."""
        if generation.pair is None:
            return
        # If logprobs of the prompt are asked, it computes even what it has, so nobody can tell.
        asks = generation.spec.sampling.prompt_logprobs_start >= 0
        self._router.found_cached(generation.pair, None if asks else cached_tokens)

    def progressed(self, generation: Generation) -> None:
        """The attempt's first or second token arrived: prefill, or decode, has done its part."""
        pair = generation.pair
        if pair is not None:
            self._router.prefilled(pair)
            self._speak_for(pair, generation)
        generation.refusals = 0
        generation.refused_since_s = None
        generation.avoid = frozenset()

    def _speak_for(self, pair: Pair, generation: Generation) -> None:
        """Tell the breakers that the pair's workers did well."""
        breakers, picked_s = self._router.breakers, pair.picked_s
        if pair.is_local:
            breakers.succeeded(pair.decode_key, picked_s, of_pages=False)
            # It will not say whether pages reach the worker: another attempt may try that.
            breakers.left(pair.decode_key, pair)
            return
        breakers.succeeded(pair.prefill_key, picked_s)
        # If the first token ends the request, decode reports nothing: it had granted pages, but
        # their contents may not have reached it (of_pages is False then).
        if generation.decoding or generation.finish:
            breakers.succeeded(pair.decode_key, picked_s, of_pages=generation.decoding)

    def remove(self, generation: Generation, *, tell_workers: bool) -> None:
        """It ended. tell_workers: its room is still alive at the workers, so abort it there."""
        generation.ended = True
        self._waiting.pop(generation, None)
        del self._live[generation]
        if generation.room:
            self._leave(generation, None, tell_workers)

    def move_preempted(self, generation: Generation, over_at: Key) -> None:
        """An older room needed its pages: it goes on elsewhere, as often as this happens."""
        self._leave(generation, over_at)
        self._timelines.left(generation.timeline, "preempted")
        self.place(generation)

    def await_word(self, generation: Generation, message: str, over_at: Key, avoid: str) -> None:
        """One worker found that the other gave the room up: wait for the other to say why.

        Its message is on the way and may report a preemption, which is no failure. If it does not
        come within _WORD_S, that is a failure (STALE). over_at, avoid: as in `move`.
        """
        room = generation.room

        def silent() -> None:
            if generation.room == room:
                self.move(generation, Code.STALE, message, over_at, avoid)

        self._timers.call_later(_WORD_S, silent)

    def move(
        self, generation: Generation, code: Code, message: str, over_at: Key | None, avoid: str
    ) -> None:
        """Its room failed: find another place, or give the generation up when `code` says so.

        over_at: the worker that is known to have dropped the room. avoid: id of the worker to
        blame for the failure.
        """
        if code in _WORKERS_FAULT:
            told_by_peer = over_at is not None and over_at[0] != avoid
            self._count_failure(generation.pair, avoid, of_pages=told_by_peer)
        if over_at is not None and code is not Code.QUEUE_FULL:
            # Workers had accepted it, so later refusals are counted anew.
            generation.refusals, generation.refused_since_s = 0, None
        self._leave(generation, over_at)
        self._timelines.left(generation.timeline, code.value, message)
        if code is Code.ABORTED:
            self._owner.end(generation, "abort")
        elif not code.retryable:
            self._owner.fail(generation, RequestError(code, message))
        elif code is Code.DRAINING:
            # That worker is now known to be draining, so it cannot be picked again.
            self._owner.retried(code.value)
            self.place(generation)
        elif code is Code.QUEUE_FULL:
            self._back_off(generation, message, avoid)
        else:
            self._retry(generation, code, message, avoid)

    def _count_failure(self, pair: Pair | None, worker_id: str, of_pages: bool) -> None:
        if pair is None:
            return
        for key in pair.keys:
            if key[0] == worker_id:
                now_s = self._clock.monotonic_s()
                self._router.breakers.failed(key, pair.picked_s, now_s, of_pages)

    def worker_lost(self, key: Key, message: str, drained: bool = False) -> None:
        """Move every generation that still needed that incarnation.

        Prefill is not needed once decode has drawn a token: all pages have arrived by then. The
        first token alone does not prove that, since it overtakes the pages; it does if the worker
        drained, because then it saw its pages arrive. Requests that a drained worker was sent and
        never accepted move without using up one of their attempts.
        """
        code = Code.DRAINING if drained else Code.PEER_LOST
        for generation in list(self._rooms.values()):
            pair = generation.pair
            if pair is None:  # moved or ended meanwhile
                continue
            done = generation.computed if drained else generation.decoding
            if pair.needs(key, done):
                self.move(generation, code, message, key, key[0])
        self._router.forget(key)

    def _leave(
        self, generation: Generation, over_at: Key | None, tell_workers: bool = True
    ) -> None:
        pair = generation.pair
        assert pair is not None, f"room {generation.room} has no pair"
        if tell_workers:
            for key in pair.keys:
                link = self._membership.link(key)
                if link is not None and key != over_at:
                    link.abort(generation.room)
        del self._rooms[generation.room]
        self._router.ended(pair)
        generation.leave_attempt()

    def _retry(self, generation: Generation, code: Code, message: str, avoid: str) -> None:
        generation.retries += 1
        if generation.retries > self._config.max_retries:
            self._owner.fail(
                generation,
                RequestError(
                    Code.PEER_LOST, f"given up after {generation.retries} attempts: {message}"
                ),
            )
            return
        logger.info("%s moves: %s", generation.spec.request_id, message)
        self._owner.retried(code.value)
        generation.avoid |= {avoid}
        # At once the first time; later slowly enough for this process to notice that a dead
        # worker's stream has ended.
        if generation.retries == 1:
            self.place(generation)
        else:
            self._place_later(generation, generation.retries - 2)

    def _back_off(self, generation: Generation, message: str, avoid: str) -> None:
        now_s = self._clock.monotonic_s()
        if generation.refused_since_s is None:
            generation.refused_since_s = now_s
        waited_s = now_s - generation.refused_since_s
        # A client that has seen tokens is past every queue, so it waits until its deadline.
        if not generation.started and waited_s >= self._config.queue_timeout_s:
            self._owner.fail(generation, RequestError(Code.QUEUE_FULL, message))
            return
        self._owner.retried(Code.QUEUE_FULL.value)
        generation.avoid = frozenset({avoid})
        self._place_later(generation, generation.refusals)
        generation.refusals += 1

    def _wait_for_pair(self, generation: Generation) -> None:
        """Wait until workers take it: for queue_timeout_s, or to the deadline if it has tokens."""
        self._waiting[generation] = None
        now_s = self._clock.monotonic_s()
        if generation.unplaced_since_s is None:
            generation.unplaced_since_s = now_s
        if not generation.started:
            left_s = generation.unplaced_since_s + self._config.queue_timeout_s - now_s
            generation.retry_timer = self._timers.call_later(
                left_s, lambda: self._nobody_came(generation)
            )

    def _nobody_came(self, generation: Generation) -> None:
        waited_s = self._config.queue_timeout_s
        message = f"waited {waited_s:g} s for workers that take it"
        if missing := self._membership.missing_roles():
            message += f"; no {' and no '.join(missing)} worker takes work"
        self._owner.fail(generation, RequestError(Code.PEER_LOST, message))

    def _place_later(self, generation: Generation, exponent: int) -> None:
        """Place it after a delay that doubles with `exponent`.

        The delay is spread by a quarter either way, so that generations that were refused together
        do not come back together.
        """
        delay_s = min(_BACKOFF_FIRST_S * 2 ** min(exponent, 10), _BACKOFF_LONGEST_S)
        spread = 0.75 + 0.5 * (next(self._next_jitter) * _GOLDEN % 1.0)
        generation.retry_timer = self._timers.call_later(
            delay_s * spread, lambda: self.place(generation)
        )
