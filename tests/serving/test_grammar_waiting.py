"""Requests that wait for a grammar's trial: behind which, for how long, and which are refused."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psutil
import pytest

from serving import grammar_trial
from serving.demo import demo_model_path
from serving.grammar_trial import LANES, TOO_MUCH, GrammarTrial, LaneLimits
from serving.trial_process import TrialProcess, Word
from tests.fakes import ManualTimers
from tests.recording import until
from tests.serving.live import Live, live_server
from tests.serving.trials import endless, held, processes, schema, slow
from transfer.clock import ManualClock
from transfer.errors import Code, RequestError

KNOWN = schema({"const": "known"})


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that trial processes were asked about, in order."""
    asked: list[str] = []
    word = TrialProcess.word

    def noted(self: TrialProcess, grammar: str) -> Word:
        asked.append(grammar)
        return word(self, grammar)

    monkeypatch.setattr(TrialProcess, "word", noted)
    return asked


@pytest.fixture
def timers() -> ManualTimers:
    return ManualTimers(ManualClock())


@pytest.fixture
async def trial(timers: ManualTimers) -> AsyncIterator[GrammarTrial]:
    """A trial whose first lane has its process; two grammars may wait there."""
    lanes = (LaneLimits(LANES[0].cpu_s, max_waiting=2), LANES[1])
    trial = GrammarTrial(demo_model_path(), 5.0, timers, lanes)
    assert await trial.fault(KNOWN) == ""
    yield trial
    trial.close()


@pytest.fixture
async def patient() -> AsyncIterator[GrammarTrial]:
    """A trial whose second lane has time for a slow grammar, on a busy host too."""
    lanes = (LANES[0], LaneLimits(20 * LANES[1].cpu_s, LANES[1].max_waiting))
    trial = GrammarTrial(demo_model_path(), lanes=lanes)
    assert await trial.fault(KNOWN) == ""
    yield trial
    trial.close()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not processes()


async def test_a_good_grammar_waits_for_one_short_trial_of_each_bad_one(tried: list[str]) -> None:
    trial = GrammarTrial(demo_model_path())
    bad = [schema(endless(number)) for number in range(8)]
    good = schema({"const": "good"})
    asking = [asyncio.create_task(trial.fault(grammar)) for grammar in [*bad, good]]
    assert await asking[-1] == ""
    assert not all(task.done() for task in asking[:-1])
    # Trials of the second lane come in between; the good grammar does not wait for them.
    first_lane = [grammar for at, grammar in enumerate(tried) if grammar not in tried[:at]]
    assert first_lane == [*bad, good]
    assert await asking[0] == TOO_MUCH
    trial.close()
    for task in asking[2:-1]:
        with pytest.raises(RequestError, match="shutting down"):
            await task


async def test_a_verdict_is_kept_good_or_bad_and_costs_no_process(trial: GrammarTrial) -> None:
    bad = schema(endless(0))
    assert await trial.fault(bad) == TOO_MUCH
    first, second = processes()
    with held(first), held(second):
        assert await trial.fault(KNOWN) == ""
        assert await trial.fault(bad) == TOO_MUCH


async def test_many_bad_grammars_drive_out_no_good_verdict(
    trial: GrammarTrial, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "_MAX_BAD", 2)
    bad = [schema({"type": f"nothing{number}"}) for number in range(4)]
    for grammar in bad:
        assert "nothing" in await trial.fault(grammar)
    (process,) = processes()
    with held(process):
        assert await trial.fault(KNOWN) == ""
        assert "nothing3" in await trial.fault(bad[3])
    assert "nothing0" in await trial.fault(bad[0])
    assert tried == [*bad, bad[0]]


async def test_a_full_lane_refuses_the_next_grammar_and_takes_those_it_has(
    trial: GrammarTrial,
) -> None:
    (process,) = processes()
    with held(process):
        taken = [asyncio.create_task(trial.fault(schema({"const": n}))) for n in range(3)]
        await until(lambda: trial.num_waiting == 2)
        with pytest.raises(RequestError, match="at most 2 may wait") as refused:
            await trial.fault(schema({"const": 3}))
        assert refused.value.code is Code.QUEUE_FULL
        same = asyncio.create_task(trial.fault(schema({"const": 2})))  # waits already
        await asyncio.sleep(0)
    assert await asyncio.gather(*taken, same) == [""] * 4


async def test_a_grammar_waits_no_longer_than_a_request_in_a_queue(
    trial: GrammarTrial, timers: ManualTimers
) -> None:
    (process,) = processes()
    with held(process):
        taken = asyncio.create_task(trial.fault(schema({"const": 0})))
        late = asyncio.create_task(trial.fault(schema({"const": 1})))
        await until(lambda: trial.num_waiting == 1)
        timers.advance(5.5)
        with pytest.raises(RequestError, match="waited 5 s") as refused:
            await late
        assert refused.value.code is Code.QUEUE_FULL
    assert await taken == ""


async def test_a_trial_goes_on_while_one_of_its_clients_is_there(
    trial: GrammarTrial, tried: list[str]
) -> None:
    (process,) = processes()
    grammar, other = schema({"const": 1}), schema({"const": 2})
    with held(process):
        begun = asyncio.create_task(trial.fault(schema({"const": 0})))
        await until(lambda: len(tried) == 1)
        left, stays = (asyncio.create_task(trial.fault(grammar)) for _ in range(2))
        alone = asyncio.create_task(trial.fault(other))
        await until(lambda: trial.num_waiting == 2)
        left.cancel()
        alone.cancel()
        await until(lambda: trial.num_waiting == 1)
    assert [await begun, await stays] == ["", ""]
    assert other not in tried


@pytest.mark.parametrize("whole", [True, False], ids=["the process", "its child alone"])
async def test_a_trial_that_was_killed_from_outside_is_made_again(
    patient: GrammarTrial, whole: bool
) -> None:
    grammar = schema(slow())
    asking = asyncio.create_task(patient.fault(grammar))
    first, second, child = await _in_second_lane()
    (second if whole else child).kill()
    assert await asking == ""
    now = processes()
    assert first in now
    assert (second in now) != whole


async def test_who_is_killed_each_time_is_told_so_and_may_come_again(patient: GrammarTrial) -> None:
    grammar = schema(slow())
    asking = asyncio.create_task(patient.fault(grammar))
    *_, child = await _in_second_lane()
    child.kill()
    *_, again = await _in_second_lane(child)
    again.kill()
    with pytest.raises(RequestError, match="killed twice") as failed:
        await asking
    assert failed.value.code is Code.INTERNAL
    assert await patient.fault(grammar) == ""


async def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    trial = GrammarTrial(demo_model_path())
    with pytest.raises(RequestError, match="did not start") as failed:
        await trial.fault(KNOWN)
    assert failed.value.code is Code.INTERNAL


async def _in_second_lane(but: psutil.Process | None = None) -> list[psutil.Process]:
    """Both processes and the second one's child, once it has one other than `but`."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        now = processes()
        found[:] = [*now, *(c for p in now[1:] for c in p.children() if c != but)]
        return len(found) == 3

    await until(is_there)
    return found


# --- over HTTP ------------------------------------------------------------------------------------


def chat(value: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"schema": value}}
    messages = [{"role": "user", "content": "Hi"}]
    return {"messages": messages, "max_tokens": 4, "response_format": form}


async def asked(live: Live, value: Any) -> httpx.Response:
    return await live.post("/v1/chat/completions", chat(value))


def counted(live: Live, line: str) -> bool:
    return f"kvferry_{line}\n" in live.dispatcher.metrics.render().decode()


async def test_too_many_new_forms_are_a_429_as_of_a_full_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = (LaneLimits(LANES[0].cpu_s, max_waiting=1), LANES[1])
    monkeypatch.setattr(GrammarTrial.__init__, "__defaults__", (30.0, None, lanes))
    async with live_server() as live:
        assert (await asked(live, {"const": "known"})).status_code == 200
        (process,) = processes()
        with held(process):
            taken = [asyncio.create_task(asked(live, {"const": n})) for n in range(2)]
            await until(lambda: counted(live, "num_queue_grammars 1.0"))
            refused = await asked(live, {"const": 2})
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert counted(live, "requests_rejected_total 1.0")
            assert (await asked(live, {"const": "known"})).status_code == 200
        assert [response.status_code for response in await asyncio.gather(*taken)] == [200, 200]


async def test_a_form_whose_client_left_is_not_tried(tried: list[str]) -> None:
    async with live_server() as live:
        assert (await asked(live, {"const": "known"})).status_code == 200
        (process,) = processes()
        with held(process):
            first = asyncio.create_task(asked(live, {"const": 0}))
            await until(lambda: len(tried) == 2)
            left = asyncio.create_task(asked(live, {"const": 1}))
            await until(lambda: counted(live, "num_queue_grammars 1.0"))
            left.cancel()
            await until(lambda: counted(live, "num_queue_grammars 0.0"))
        assert (await first).status_code == 200
        assert (await asked(live, {"const": 2})).status_code == 200
        assert len(tried) == 3


async def test_a_request_waits_for_its_trial_until_its_deadline() -> None:
    async with live_server(request_timeout_s=8.0) as live:
        assert (await asked(live, {"const": "known"})).status_code == 200
        (process,) = processes()
        with held(process):
            late = await asked(live, {"const": 0})
            assert processes() == [process]  # given up only later than that
        # The process tries one after the other: once this one is over, so is the first.
        assert (await asked(live, {"const": 1})).status_code == 200
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "deadline"
