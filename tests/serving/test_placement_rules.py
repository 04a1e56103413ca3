"""What one attempt says of its workers, and where and when the next one is made.

The router, the links and the timers are recorded: each rule is seen by itself.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from serving.config import ServeConfig
from serving.generation import Generation, GenerationSpec
from serving.membership import Membership
from serving.placement import Placement
from serving.prompt import Prompt
from serving.router import Key, Pair, Router
from serving.timeline import Timelines
from tests.recording import ManualTimers, RecordingSink
from tests.serving.test_router import member
from transfer import wire
from transfer.clock import ManualClock
from transfer.errors import Code

PREFILL, DECODE = "p", "d"


@dataclass
class Breakers:
    """Notes every attempt's outcome; `of_pages` as it was passed."""

    told: list[tuple[Any, ...]] = field(default_factory=list)

    def succeeded(self, key: Key, picked_s: float, of_pages: bool = True) -> None:
        self.told.append(("well", key[0], picked_s, of_pages))

    def failed(self, key: Key, picked_s: float, now_s: float, of_pages: bool) -> None:
        self.told.append(("badly", key[0], picked_s, now_s, of_pages))

    def left(self, key: Key, attempt: object) -> None:
        self.told.append(("left", key[0]))


@dataclass
class Placed:
    """A Placement whose surroundings are lists of what was asked of them."""

    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.breakers = Breakers()
        self.lengths: list[int] = []
        self.avoided: list[frozenset[str]] = []
        self.picked_at: list[float] = []
        self.prefilled: list[Pair] = []
        self.ended: list[Pair] = []
        self.cached: list[int | None] = []
        self.forgotten: list[Key] = []
        self.aborted: list[str] = []
        self.failed: list[str] = []
        self.retried: list[str] = []
        self.has_pair = True
        self.is_local = False
        router = SimpleNamespace(
            breakers=self.breakers,
            pick=self._pick,
            prefilled=self.prefilled.append,
            found_cached=lambda pair, cached: self.cached.append(cached),
            ended=self.ended.append,
            forget=self.forgotten.append,
        )
        membership = SimpleNamespace(
            takers=lambda role: [],
            stalled=frozenset,
            link=self._link,
            open_links=list,
            missing_roles=lambda: [] if self.has_pair else ["decode"],
        )
        config = ServeConfig(Path("m"), "127.0.0.1:1", **self.config)
        owner = SimpleNamespace(
            fail=lambda generation, error: self.failed.append(error.message),
            end=lambda generation, reason: self.failed.append(reason),
            retried=self.retried.append,
        )
        self.placement = Placement(
            config,
            cast(Membership, membership),
            cast(Router, router),
            self.clock,
            self.timers,
            owner,
            Timelines(0, {}, self.clock),
        )

    def begun(self, **sampling: Any) -> Generation:
        """A request in its first room."""
        params = wire.SamplingParams(**{"max_new_tokens": 8} | sampling)
        now_s = self.clock.monotonic_s()
        spec = GenerationSpec(Prompt([1, 2, 3]), params, "r", now_s, now_s + 600)
        generation = Generation(spec, RecordingSink())
        self.placement.place(generation)
        return generation

    def fail(self, generation: Generation, code: Code, over_at: str | None, avoid: str) -> None:
        """Fail its room, as the worker `over_at` says, through the fault of `avoid`."""
        key = None if over_at is None else self._key(over_at)
        self.placement.move(generation, code, "why", key, avoid)

    def waits(self) -> float:
        """Move time to the next attempt; how many seconds it took to come."""
        began_s, count = self.clock.monotonic_s(), len(self.picked_at)
        while len(self.picked_at) == count:
            self.timers.advance(0.001)
        return self.picked_at[-1] - began_s

    def _key(self, worker_id: str) -> Key:
        return next(key for key in self._pair().keys if key[0] == worker_id)

    def _pair(self) -> Pair:
        prefill, decode = member(PREFILL, "prefill"), member(DECODE, "decode")
        return Pair(decode if self.is_local else prefill, decode, 3, self.clock.monotonic_s())

    def _pick(self, *args: Any, **_: Any) -> Pair | None:
        self.lengths.append(args[2])
        self.avoided.append(args[4])
        self.picked_at.append(self.clock.monotonic_s())
        return self._pair() if self.has_pair else None

    def _link(self, key: Key) -> Any:
        return SimpleNamespace(
            key=key,
            api_id="api",
            submit=lambda message, *times: None,
            abort=lambda room: self.aborted.append(key[0]),
        )


def tell(placed: Placed, generation: Generation, num_tokens: int, finish: int = 0) -> None:
    """Tell its next tokens; each attempt's first two say that its workers do well."""
    for _ in range(num_tokens):
        generation.accept(len(generation.token_ids), [7], finish, None)
        placed.placement.progressed(generation)


@pytest.mark.parametrize(
    ("over_at", "avoid", "of_pages"),
    [
        (DECODE, PREFILL, True),  # decode says that prefill did not come through
        (PREFILL, DECODE, True),
        (DECODE, DECODE, False),  # decode's own fault says nothing of pages
        (None, DECODE, False),
    ],
)
def test_a_failure_counts_against_the_one_at_fault(
    over_at: str | None, avoid: str, of_pages: bool
) -> None:
    placed = Placed()
    generation = placed.begun()
    picked_s = placed.clock.monotonic_s()
    placed.clock.advance(1.5)
    placed.fail(generation, Code.INTERNAL if over_at else Code.PEER_LOST, over_at, avoid)
    now_s = placed.clock.monotonic_s()
    if over_at:  # no other try is of use after an internal error, and none is made
        assert placed.failed == ["why"]
    assert placed.breakers.told == [("badly", avoid, picked_s, now_s, of_pages)]
    assert placed.aborted == [role for role in (DECODE, PREFILL) if role != over_at]


def test_tokens_speak_for_the_worker_that_made_them() -> None:
    placed = Placed()
    generation = placed.begun()
    picked_s = placed.clock.monotonic_s()
    tell(placed, generation, 1)
    assert placed.breakers.told == [("well", PREFILL, picked_s, True)]
    assert len(placed.prefilled) == 1
    placed.breakers.told.clear()
    tell(placed, generation, 1)
    assert placed.breakers.told == [
        ("well", PREFILL, picked_s, True), ("well", DECODE, picked_s, True),
    ]  # fmt: skip


def test_a_request_that_its_first_token_ends_says_of_decode_that_it_granted_pages() -> None:
    placed = Placed()
    generation = placed.begun()
    tell(placed, generation, 1, finish=wire.STOP)
    assert [told[1::2] for told in placed.breakers.told] == [(PREFILL, True), (DECODE, False)]


def test_a_prompt_that_decode_computes_itself_says_nothing_of_pages() -> None:
    placed = Placed()
    placed.is_local = True
    generation, picked_s = placed.begun(), placed.clock.monotonic_s()
    tell(placed, generation, 1)
    # While it goes on, others may try whether pages come through.
    assert placed.breakers.told == [("well", DECODE, picked_s, False), ("left", DECODE)]
    tell(placed, generation, 1)
    assert len(set(placed.breakers.told)) == 2


def test_workers_that_failed_are_avoided_until_a_token_comes() -> None:
    placed = Placed({"max_retries": 9})
    generation = placed.begun()
    for avoid in (PREFILL, DECODE):
        placed.fail(generation, Code.PEER_LOST, None, avoid)
        if len(placed.avoided) < 3:
            placed.timers.advance(5.0)
    assert placed.avoided == [frozenset(), {PREFILL}, {PREFILL, DECODE}]
    tell(placed, generation, 1)
    placed.fail(generation, Code.PEER_LOST, None, DECODE)
    placed.timers.advance(5.0)
    assert placed.avoided[-1] == {DECODE}


def test_a_second_try_comes_at_once_and_later_ones_wait_for_longer_each_time() -> None:
    placed = Placed({"max_retries": 9})
    generation = placed.begun()
    placed.fail(generation, Code.PEER_LOST, None, DECODE)
    assert len(placed.picked_at) == 2
    delays = []
    for _ in range(7):
        placed.fail(generation, Code.PEER_LOST, None, DECODE)
        delays.append(placed.waits())
    expected = [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    for delay_s, middle_s in zip(delays, expected, strict=True):
        assert 0.74 * middle_s < delay_s < 1.27 * middle_s
    spreads = {round(delay / middle, 2) for delay, middle in zip(delays, expected, strict=True)}
    assert len(spreads) > 4  # those that failed together spread out


def test_who_is_refused_asks_another_and_waits_longer_until_somebody_takes_it() -> None:
    placed = Placed()
    generation = placed.begun()
    delays = []
    for avoid in (DECODE, PREFILL, DECODE):
        placed.fail(generation, Code.QUEUE_FULL, avoid, avoid)
        delays.append(placed.waits())
        assert placed.avoided[-1] == {avoid}  # only the last one: places come free
    assert delays[0] < 0.07 < delays[1] < 0.14 < delays[2]
    assert placed.breakers.told == []
    # Taken, then lost: refusals after that count from the start.
    placed.fail(generation, Code.PEER_LOST, DECODE, PREFILL)
    placed.fail(generation, Code.QUEUE_FULL, DECODE, DECODE)
    assert placed.waits() < 0.07


def test_refusals_after_a_token_begin_anew() -> None:
    placed = Placed({"queue_timeout_s": 1.0})
    generation = placed.begun()
    for _ in range(3):
        placed.fail(generation, Code.QUEUE_FULL, DECODE, DECODE)
        placed.waits()
    tell(placed, generation, 1)
    placed.clock.advance(5.0)
    placed.fail(generation, Code.QUEUE_FULL, DECODE, DECODE)
    assert placed.waits() < 0.07
    assert placed.failed == []


def test_what_waited_to_be_admitted_counts_while_no_pair_is_there() -> None:
    placed = Placed({"queue_timeout_s": 2.0})
    now_s = placed.clock.monotonic_s()
    spec = GenerationSpec(Prompt([1]), wire.SamplingParams(4), "r", now_s, now_s + 600)
    placed.clock.advance(1.5)  # in the queue
    placed.clock.set_ahead(-3600.0)  # the wall clock does not count
    placed.has_pair = False
    placed.placement.place(Generation(spec, RecordingSink()))
    placed.timers.advance(0.4)
    assert placed.failed == []
    placed.timers.advance(0.2)
    message = "waited 2 s for workers that take it; no decode worker takes work"
    assert placed.failed == [message]


def test_what_a_cache_had_is_learnt_unless_the_prompt_was_computed_all_the_same() -> None:
    placed = Placed()
    placed.placement.found_cached(placed.begun(), 2)
    placed.placement.found_cached(placed.begun(prompt_logprobs_start=0), 0)
    assert placed.cached == [2, None]


def test_an_incarnation_that_is_lost_is_forgotten_and_its_rooms_move() -> None:
    placed = Placed()
    generation = placed.begun()
    room, (decode, prefill) = generation.room, placed._pair().keys
    placed.placement.worker_lost(prefill, "gone")
    assert placed.forgotten == [prefill]
    assert placed.aborted == [DECODE]
    assert generation.room != room
    tell(placed, generation, 2)
    room = generation.room
    placed.placement.worker_lost(prefill, "gone")  # decode has all that it needs
    assert generation.room == room
    placed.placement.worker_lost(decode, "gone")
    assert generation.room != room
    placed.waits()
    assert placed.lengths == [3, 3, 5]  # tokens so far are computed, too
    assert len(placed.ended) == 2
    placed.placement.remove(generation, tell_workers=False)
    assert len(placed.ended) == 3  # no attempt stays a worker's load
