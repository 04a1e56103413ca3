"""What a step counts: groups, gaps, probes, strays, and seats for as many as there are."""

import asyncio
import dataclasses
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from serving import plain_streams, steps
from serving.generation import Generation
from serving.interval import AutoInterval
from serving.timeline import ChoiceTimeline
from serving.worker_link import WorkerLink
from tests.serving.live import EOS, LETTER_A
from tests.serving.stepped import DECODE, OTHER, PREFILL, Crowd, turns
from tests.serving.test_seats import LATER_ROOM, Told
from transfer import wire

NOBODYS_ROOM = 77


@pytest.fixture(autouse=True)
def _any_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_streams, "LEAST_STREAMS", 1)


def counted(crowd: Crowd, name: str) -> float:
    """A metric without labels."""
    text = crowd.metrics.own_text().decode()
    found = re.search(rf"^kvferry_{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


async def tell_own(told: Told, *indices: int) -> None:
    """Tell a step in which the one stream has these tokens."""
    await told.tell(DECODE, [row for idx in indices for row in told.rows(idx)])


# --- tokens ---------------------------------------------------------------------------------------


async def test_groups_of_streams_are_told_in_turns_of_their_own() -> None:
    crowd = Crowd(3, 1, [None] * 3, group_size=2)
    rows = [(g.room, 0, LETTER_A, 0) for g in crowd.generations]
    step = asyncio.ensure_future(crowd.tell_only(PREFILL, rows))
    await turns(1)
    assert [len(g.token_ids) for g in crowd.generations] == [1, 1, 0]
    await turns(1)
    assert [len(g.token_ids) for g in crowd.generations] == [1, 1, 1]
    await step


@pytest.mark.parametrize("least_streams", [1, 99])
async def test_tokens_that_came_together_have_no_gap_between_them(
    least_streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_streams, "LEAST_STREAMS", least_streams)
    told = Told(1)
    await told.tell(PREFILL, told.rows(0))
    for idx in (1, 2):
        told.clock.advance(1.0)
        await tell_own(told, idx)
    assert told.gaps() == (2, 2.0)
    told.clock.advance(1.0)
    await tell_own(told, 3, 4, 5)
    assert told.num_lent == (least_streams == 1)
    assert told.gaps() == (5, 3.0)
    assert counted(told, "generation_tokens_total") == 6


async def test_tokens_of_a_request_are_counted_and_timed_and_those_of_a_probe_are_not() -> None:
    told = Told(2)
    told.clock.advance(3.0)
    probe, asked = told.generations
    probe.spec = dataclasses.replace(probe.spec, is_probe=True)
    asked.timeline = ChoiceTimeline(0, "id", 3)
    await told.tell(PREFILL, told.rows(0, (0, 1)))
    assert counted(told, "generation_tokens_total") == 1
    await told.tell(DECODE, told.rows(1, (0, 1)))
    assert counted(told, "time_to_first_token_seconds_count") == 1
    assert asked.timeline.first_token_s == told.clock.monotonic_s()


async def test_rows_that_came_are_counted_whoever_they_are_for() -> None:
    told = Told(2)
    await told.tell(PREFILL, told.rows(0, (0, 1)))
    await told.tell(DECODE, [(NOBODYS_ROOM, 0, LETTER_A, 0)])
    assert told.steps.rows_taken == 3


async def test_a_worker_that_is_gone_leaves_no_lag_to_measure_its_next_step_by() -> None:
    told = Told(1)
    link = cast(WorkerLink, told.links[DECODE])

    async def step_after(seconds: float) -> float:
        """Take a step made so long ago; how much later that is than the quickest step."""
        batch = wire.StepBatch(
            *DECODE,
            1,
            told.clock.monotonic_s() - seconds,
            rooms=wire.pack_i64([NOBODYS_ROOM]),
            token_ids=wire.pack_i32([LETTER_A]),
            token_idx=wire.pack_i32([0]),
            finish=wire.pack_u8([0]),
        )
        await told.steps.take(link, batch)
        return told.steps.lag_s

    assert await step_after(1.0) == 0.0
    assert await step_after(3.0) == 2.0
    told.steps.keep({DECODE})
    assert await step_after(3.0) == 2.0
    told.steps.keep(())
    assert await step_after(3.0) == 0.0


async def test_an_interval_of_its_own_making_hears_how_late_each_step_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[float] = []
    monkeypatch.setattr(
        AutoInterval, "observe", lambda self, lag_s, now_s, loop_cpu_s: heard.append(lag_s)
    )
    crowd = Crowd(1, cast(Any, "auto"), [None])
    for idx in range(2):
        await crowd.tell(PREFILL, [(crowd.generations[0].room, idx, LETTER_A, 0)])
    assert heard == [0.0, 0.0]


# --- the prompt -----------------------------------------------------------------------------------


class Prefilled(Told):
    """Notes what its placement hears of cached prompts and its streams of computed ones."""

    def __init__(self, num_streams: int) -> None:
        super().__init__(num_streams)
        self.found: list[int] = []
        self.told: list[int] = []
        as_any: Any = self.cluster
        as_any.found_cached = lambda generation, cached: self.found.append(cached)
        for generation in self.generations:
            self._watch(generation)

    def _watch(self, generation: Generation) -> None:
        generation.sink = cast(
            Any, SimpleNamespace(on_prefilled=lambda cached, logprobs: self.told.append(cached))
        )

    def prefilled(self, room: int, cached_tokens: int = 0) -> None:
        event = wire.RoomEvent(room, "prefilled", cached_tokens=cached_tokens)
        self.steps.prefilled(cast(WorkerLink, self.links[PREFILL]), event)


async def test_a_prompt_is_counted_once_and_what_was_cached_of_it_at_most_whole() -> None:
    crowd = Prefilled(1)
    (generation,) = crowd.generations
    num_tokens = len(generation.spec.prompt.ids)
    for _ in range(2):  # the second is of another attempt
        crowd.prefilled(generation.room, num_tokens + 4)
    assert crowd.told == [num_tokens]
    assert crowd.found == [num_tokens + 4] * 2
    assert counted(crowd, "prompt_tokens_total") == num_tokens
    assert counted(crowd, "cached_tokens_total") == num_tokens


async def test_the_prompt_of_a_probe_is_told_and_not_counted() -> None:
    crowd = Prefilled(1)
    (probe,) = crowd.generations
    probe.spec = dataclasses.replace(probe.spec, is_probe=True)
    crowd.prefilled(probe.room)
    assert crowd.told == [0]
    assert counted(crowd, "prompt_tokens_total") == 0


async def test_a_sink_that_cannot_take_its_prompt_ends_its_own_request_only() -> None:
    crowd = Prefilled(2)
    failed: list[Generation] = []
    crowd.cluster.stream_failed = (  # type: ignore[method-assign]
        lambda generation, error: failed.append(generation)
    )
    broken, other = crowd.generations
    broken.sink = cast(Any, SimpleNamespace())
    for generation in (broken, other):
        crowd.prefilled(generation.room)
    assert failed == [broken]
    assert crowd.told == [0]


# --- strays ---------------------------------------------------------------------------------------


class Strays(Prefilled):
    """Rows of rooms that nobody expects."""

    def __init__(self) -> None:
        super().__init__(1)

    async def stray(self, room: int, times: int = 1) -> list[int]:
        """Tell so many rows of a room; the rooms that decode was told to drop so far."""
        for _ in range(times):
            await self.tell(DECODE, [(room, 0, LETTER_A, 0)])
        return self.links[DECODE].aborted


async def test_the_fourth_row_of_a_room_that_nobody_expects_is_a_leak_each_time_anew() -> None:
    strays = Strays()
    assert await strays.stray(NOBODYS_ROOM, 3) == []
    assert await strays.stray(NOBODYS_ROOM) == [NOBODYS_ROOM]
    assert await strays.stray(NOBODYS_ROOM, 3) == [NOBODYS_ROOM]
    assert await strays.stray(NOBODYS_ROOM) == [NOBODYS_ROOM] * 2
    assert counted(strays, "stale_rows_total") == 8


async def test_strays_are_counted_by_worker_and_prompts_of_nobody_are_some_too() -> None:
    strays = Strays()
    assert await strays.stray(NOBODYS_ROOM, 3) == []
    for _ in range(3):
        strays.prefilled(NOBODYS_ROOM)
    assert strays.links[PREFILL].aborted == []
    strays.prefilled(NOBODYS_ROOM)
    assert strays.links[PREFILL].aborted == [NOBODYS_ROOM]
    assert strays.links[DECODE].aborted == strays.links[OTHER].aborted == []


async def test_no_more_strays_are_remembered_than_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_STRAYS_REMEMBERED", 2)
    strays = Strays()
    for room in range(9):
        await strays.stray(NOBODYS_ROOM + room)
        assert len(strays.steps._strays) <= 2


# --- seats ----------------------------------------------------------------------------------------


@pytest.fixture
def _two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_streams, "_FIRST_CAPACITY", 2)
    monkeypatch.setattr(plain_streams, "_TOGETHER", 2)


@pytest.mark.usefixtures("_two_at_a_time")
async def test_more_streams_than_there_were_seats_or_texts_at_a_time_miss_nothing() -> None:
    crowd = Crowd(5, 3, [None] * 5)
    for idx in range(10):
        rows = [(g.room, idx, LETTER_A + idx, 0) for g in crowd.generations]
        await crowd.tell(DECODE if idx else PREFILL, rows)
    assert crowd.num_lent == 5
    await crowd.tell(DECODE, [(g.room, 10, EOS, wire.STOP) for g in crowd.generations])
    assert [stream.texts() for stream in crowd.streams] == [["a", "bcd", "efg", "hij"]] * 5


@pytest.mark.usefixtures("_two_at_a_time")
async def test_seats_are_taken_again_and_all_of_them() -> None:
    told = Told(2)
    (first, second), room, idx = told.generations, LATER_ROOM, 0
    for _ in range(4):
        await told.tell(PREFILL, told.rows(idx, (0, 1)))
        await told.tell(DECODE, told.rows(idx + 1, (0, 1)))
        assert told.num_lent == 2
        assert len(told.steps._plain._room) == 2
        idx += 2
        for generation in (first, second):
            room += 1
            told.cluster.leave(generation)
            told.attempt(generation, room)
