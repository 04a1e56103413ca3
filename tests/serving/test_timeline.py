"""What /requests/ID/timeline tells: while a request runs, after it ended, wherever it moved."""

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from serving.arrival import Arrival
from serving.prompt import Prompt
from serving.protocol import ChoiceAsk, Request, Shown
from serving.router import Pair
from serving.timeline import MAX_ATTEMPTS, RequestTimeline, Timelines
from tests.fakes import FakeCluster, until
from tests.serving.live import Live, alphabet, live_server
from tests.serving.processes import serving, step_until, stream
from transfer import wire
from transfer.clock import ManualClock
from transfer.errors import BadMessage, Code

ASK = {"prompt": "Hi!", "max_tokens": 3, "rid": "mine"}
PREFILL_LEG = wire.LegRecord(
    0,
    {"queued": 1000, "granted": 3500, "computing": 4000, "sending": 9000, "done": 9900},
    cached_tokens=4,
    chunks=wire.pack_i64([[8, 4000, 6000, 6100, 6500], [3, 5000, 8000, 8100, -1]]),
    shipment=wire.Shipment("shm", 4096, 2, 6200, 9300, 9800),
)
DECODE_LEG = wire.LegRecord(
    0,
    {"queued": 500, "reserved": 2000, "receiving": 7000, "ready": 9700, "done": 20_000},
    num_steps=2,
    first_step_us=12_000,
)


async def timeline(live: Live, request_id: str = "mine") -> Any:
    response = await live.http.get(f"/requests/{request_id}/timeline")
    assert response.status_code == 200, response.text
    return response.json()


async def told_by(http: httpx.AsyncClient, fits: Callable[[Any], bool]) -> None:
    """Wait for a timeline that fits; a process leaves out what another does not say in time."""
    async with asyncio.timeout(20):
        while True:
            reply = await http.get("/requests/mine/timeline")
            if reply.status_code == 200 and fits(reply.json()):
                return


async def finished(live: Live, *tasks: "asyncio.Task[Any]") -> None:
    await step_until(live.cluster, *tasks)
    await asyncio.gather(*tasks)


async def test_a_request_is_told_of_while_it_runs_and_after_it_ended() -> None:
    async with live_server(auto_step=False, prefill_policy="cache_aware") as live:
        asking = asyncio.create_task(live.events("/v1/completions", {**ASK, "stream": True}))
        (room,) = await live.cluster.submitted(1)
        running = await timeline(live)
        assert (running["state"], running["request_id"]) == ("running", "mine")
        assert running["first_write_ms"] is None
        (attempt,) = running["choices"][0]["attempts"]
        assert attempt["room"] == room
        assert not attempt["prefill"]["reported"]
        while attempt["decode"]["submit_answered_ms"] is None:  # tokens may come sooner otherwise
            (attempt,) = (await timeline(live))["choices"][0]["attempts"]
        await finished(live, asking)

        told = await timeline(live)
        (choice,) = told["choices"]
        assert (told["state"], told["stream"]) == ("ended", True)
        assert (choice["ending"], choice["output_tokens"]) == ("length", 3)
        assert choice["prompt_tokens"] == len(live.tokenizer.encode("Hi!"))
        (attempt,) = choice["attempts"]
        assert attempt["prefill"]["worker"] == "prefill-0"
        assert attempt["decode"]["worker"] == "decode-0"
        assert attempt["routing"] == {
            "prefill": {
                "policy": "cache_aware",
                "considered": {"prefill-0": {"queued_tokens": 0, "requests": 0}},
            },
            "decode": {
                "policy": "least_load",
                "considered": {"decode-0": {"used_share": 0.0, "requests": 0}},
            },
            "uncached_tokens": choice["prompt_tokens"],
        }
        moments = [
            0.0,
            told["admitted_ms"],
            attempt["routed_ms"],
            attempt["decode"]["submit_sent_ms"],
            attempt["decode"]["submit_answered_ms"],
            choice["first_token_ms"],
            told["first_write_ms"],
            told["ended_ms"],
        ]
        assert moments == sorted(moments)
        assert 1 <= told["writes"] <= 4
        assert told["arrival_unix_s"] == pytest.approx(live.cluster.clock.now_s(), abs=60)


async def test_what_workers_tell_is_placed_at_the_time_their_submit_was_sent() -> None:
    async with live_server(auto_step=False) as live:
        asking = asyncio.create_task(live.post("/v1/completions", ASK))
        (room,) = await live.cluster.submitted(1)
        await finished(live, asking)
        live.cluster.prefill[0].tell(replace(PREFILL_LEG, room=room))
        live.cluster.decode[0].tell(replace(DECODE_LEG, room=room), wire.LegRecord(99, {}))

        async def attempt_told() -> Any:
            return (await timeline(live))["choices"][0]["attempts"][0]

        attempt = await attempt_told()
        while not (attempt["prefill"]["reported"] and attempt["decode"]["reported"]):
            attempt = await attempt_told()
        prefill, decode = attempt["prefill"], attempt["decode"]
        assert since_sent(prefill) == {
            "queued_ms": 1.0,
            "granted_ms": 3.5,
            "first_token_ms": 9.0,
            "ended_ms": 9.9,
        }
        assert (prefill["grant_wait_ms"], prefill["cached_tokens"]) == (2.5, 4)
        assert prefill["ending"] == "done"
        assert [chunk["tokens"] for chunk in prefill["chunks"]] == [8, 3]
        assert since_sent({**prefill["chunks"][0], **sent_of(prefill)}) == {
            "start_ms": 4.0,
            "end_ms": 6.0,
            "handed_over_ms": 6.1,
            "sent_ms": 6.5,
        }
        assert prefill["chunks"][1]["sent_ms"] is None
        moved = prefill["transfer"]
        assert (moved["backend"], moved["bytes"], moved["frames"]) == ("shm", 4096, 2)
        assert moved["seconds"] == pytest.approx(0.0036)
        assert since_sent({**moved, **sent_of(prefill)}) == {
            "first_byte_ms": 6.2,
            "last_byte_ms": 9.3,
            "acked_ms": 9.8,
        }
        assert since_sent(decode) == {
            "queued_ms": 0.5,
            "reserved_ms": 2.0,
            "first_pages_ms": 7.0,
            "pages_complete_ms": 9.7,
            "first_step_ms": 12.0,
            "ended_ms": 20.0,
        }
        assert decode["steps"] == 2


def sent_of(leg: dict[str, Any]) -> dict[str, Any]:
    return {"submit_sent_ms": leg["submit_sent_ms"]}


def since_sent(leg: dict[str, Any]) -> dict[str, float]:
    """A worker's moments in ms, counted from when its submit was sent."""
    told = {
        name: round(value - leg["submit_sent_ms"], 3)
        for name, value in leg.items()
        if name.endswith("_ms") and value is not None and not name.startswith("submit_")
    }
    told.pop("grant_wait_ms", None)  # a duration
    return told


async def test_moves_are_told_with_their_reasons() -> None:
    async with live_server(auto_step=False) as live:
        asking = asyncio.create_task(live.post("/v1/completions", ASK))
        (first,) = await live.cluster.submitted(1)
        live.cluster.step()
        live.cluster.decode[0].preempt(first)
        await until(lambda: first not in live.cluster.decode[0].rooms and live.rooms == 2)
        (second,) = await live.cluster.submitted(1)
        live.cluster.prefill[0].fail(second, Code.STALE, "told to")
        await until(lambda: second not in live.cluster.decode[0].rooms)
        await live.cluster.submitted(1)
        await finished(live, asking)
        (choice,) = (await timeline(live))["choices"]
        assert choice["num_attempts"] == 3
        moved = [attempt["moved"] for attempt in choice["attempts"]]
        assert [(why["reason"], why["message"]) for why in moved[:2]] == [
            ("preempted", ""),
            ("stale", "told to"),
        ]
        assert moved[2] is None


async def test_each_choice_is_told_of_and_a_batch_is_found_by_any_of_its_ids() -> None:
    async with live_server() as live:
        await live.post("/v1/completions", {**ASK, "n": 3})
        choices = (await timeline(live))["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        await live.post("/generate", {"text": ["a", "b"], "rid": ["x/1", "y"]})
        both = await timeline(live, "y")
        assert [choice["request_id"] for choice in both["choices"]] == ["x/1", "y"]
        assert await timeline(live, "x/1") == both


async def test_a_request_that_fails_waits_or_is_refused_says_so() -> None:
    async with live_server(auto_step=False, max_inflight_requests=1, max_queued_requests=1) as live:
        served = asyncio.create_task(live.post("/v1/completions", {**ASK, "rid": "served"}))
        (room,) = await live.cluster.submitted(1)
        waits = asyncio.create_task(live.post("/v1/completions", {**ASK, "rid": "waits"}))
        await until(lambda: live.dispatcher.num_queued() == 1)
        assert (await timeline(live, "waits"))["state"] == "waiting"
        assert (await live.post("/v1/completions", ASK)).status_code == 429
        refused = await timeline(live)
        assert (refused["state"], refused["error"]["code"]) == ("ended", "queue_full")
        live.cluster.prefill[0].fail(room, Code.TOO_LONG, "does not fit")
        assert (await served).status_code == 400
        (choice,) = (await timeline(live, "served"))["choices"]
        assert choice["ending"] == "error"
        assert choice["error"] == {"code": "too_long", "message": "does not fit"}
        await live.cluster.submitted(1)
        await finished(live, waits)
        late = await timeline(live, "waits")
        assert late["admitted_ms"] > 0


async def test_an_unknown_id_is_a_404_and_only_the_latest_are_known() -> None:
    async with live_server(timeline_requests=2) as live:
        for number in range(3):
            await live.post("/v1/completions", {**ASK, "rid": f"r{number}"})
        for gone in ("r0", "nobody"):
            response = await live.http.get(f"/requests/{gone}/timeline")
            assert response.status_code == 404
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("not_found_error", "request_not_found")
            assert gone in error["message"]
        assert (await timeline(live, "r1"))["state"] == "ended"


async def test_nothing_is_kept_when_told_so() -> None:
    async with live_server(timeline_requests=0) as live:
        await live.post("/v1/completions", ASK)
        response = await live.http.get("/requests/mine/timeline")
        assert response.status_code == 404
        assert "--timeline-requests is 0" in response.json()["error"]["message"]


async def test_any_process_tells_of_a_request_of_another(tmp_path: Path) -> None:
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        serving(cluster, tmp_path, "--api-workers=2") as server,
        server.door(0) as asks,
        server.door(1) as other,
    ):
        read = stream(asks, rid="mine")
        await cluster.submitted(1)
        await told_by(other, lambda told: told["state"] == "running")
        await step_until(cluster, read.task)
        read = stream(other, rid="mine", max_tokens=3)
        await cluster.submitted(1)
        await step_until(cluster, read.task)
        for http in (asks, other):  # of two requests of one id, the later, whichever process had it
            await told_by(http, lambda told: told["choices"][0]["output_tokens"] == 3)
            assert (await http.get("/requests/nobody/timeline")).status_code == 404


# --- memory ---

ARRIVAL = Arrival(1.5e9, 0.0)
POLICIES: dict[wire.Role, str] = {"prefill": "least_load", "decode": "least_load"}


def asked(request_id: str, num_choices: int = 1) -> Request:
    choices = [
        ChoiceAsk(i, 0, request_id, Prompt([1, 2]), wire.SamplingParams(4), Shown())
        for i in range(num_choices)
    ]
    return Request(request_id, choices)


def a_pair() -> Pair:
    def member(role: wire.Role) -> wire.Member:
        spec = wire.KVSpecMessage(1, 1, 8, 4, "float32")
        info = wire.WorkerInfo(role, role, "", "", "m", "d", spec, 1, 1, 64, 64, 1)
        return wire.Member(info, 1, wire.Load())

    return Pair(member("prefill"), member("decode"), 2, 0.0)


def test_choices_attempts_and_rooms_are_bounded_once_requests_have_ended() -> None:
    timelines = Timelines(4, POLICIES, ManualClock())
    room = 0
    for number in range(20):
        request = timelines.open(asked(f"r{number}", 1 + number % 3), ARRIVAL)
        assert request is not None
        for choice in request.choices:
            for _ in range(3 * MAX_ATTEMPTS):
                room += 1
                timelines.began(choice, room, a_pair())
        timelines.close(request)
    kept = [request for n in range(20) if (request := timelines.find(f"r{n}")) is not None]
    choices = [choice for request in kept for choice in request.choices]
    assert 0 < len(choices) <= 4
    assert {choice.num_attempts for choice in choices} == {3 * MAX_ATTEMPTS}
    assert {len(choice.attempts) for choice in choices} == {MAX_ATTEMPTS}
    first, *_, last = choices[-1].attempts
    assert (last.room, last.room - first.room) == (room, 3 * MAX_ATTEMPTS - 1)
    assert len(timelines._rooms) == len(choices) * MAX_ATTEMPTS


def test_what_is_over_leaves_without_a_search_for_cycles() -> None:
    """The API process hardly ever searches (transfer/collector.py)."""
    timelines = Timelines(2, POLICIES, ManualClock())
    gc.collect()
    gc.disable()
    try:
        for number in range(20):
            request = timelines.open(asked(f"leaves-{number}", num_choices=2), ARRIVAL)
            assert request is not None
            for index, choice in enumerate(request.choices):
                timelines.began(choice, 10 * number + index, a_pair())
                timelines.left(choice, "ended")
                timelines.ended(choice, "stop", 3, None)
            timelines.close(request)
        there = [o for o in gc.get_objects() if isinstance(o, RequestTimeline)]
        assert sum(o.request_id.startswith("leaves-") for o in there) == 1
    finally:
        gc.enable()


def test_a_request_under_way_is_told_of_however_many_came_and_went_since() -> None:
    timelines = Timelines(1, POLICIES, ManualClock())
    old = timelines.open(asked("old"), ARRIVAL)
    assert old is not None
    timelines.began(old.choices[0], 1, a_pair())
    for number in range(3):
        later = timelines.open(asked(f"r{number}"), ARRIVAL)
        assert later is not None
        timelines.close(later)
    timelines.over("prefill", [wire.LegRecord(1, {})])
    assert timelines.find("old") is old
    assert old.choices[0].attempts[0].legs["prefill"].record is not None
    timelines.ended(old.choices[0], "length", 4, None)
    timelines.close(old)
    for number in range(2):
        assert timelines.find("old") is (None if number else old)
        later = timelines.open(asked("new"), ARRIVAL)
        assert later is not None
        timelines.close(later)
    assert not timelines._rooms


def test_a_prompt_counts_once_however_many_answers_it_has() -> None:
    timelines = Timelines(2, POLICIES, ManualClock())
    prompts = [Prompt([1, 2]), Prompt([1, 2, 3])]
    choices = [
        ChoiceAsk(i, i // 2, "r", prompts[i // 2], wire.SamplingParams(4), Shown())
        for i in range(4)
    ]
    request = timelines.open(Request("r", choices), ARRIVAL)
    assert request is not None
    assert request.num_prompt_tokens == 5


def test_the_latest_of_two_requests_of_one_id_is_found() -> None:
    timelines = Timelines(2, POLICIES, ManualClock())
    for _ in range(3):
        latest = timelines.open(asked("same"), ARRIVAL)
        assert timelines.find("same") is latest


def test_a_request_that_still_runs_is_found_after_a_later_one_of_its_id_is_gone() -> None:
    timelines = Timelines(1, POLICIES, ManualClock())

    def opened(name: str) -> RequestTimeline:
        timeline = timelines.open(asked(name), ARRIVAL)
        assert timeline is not None
        return timeline

    first, second, other = opened("same"), opened("same"), opened("other")
    timelines.close(second)
    assert timelines.find("same") is second
    timelines.close(other)  # one is kept
    assert timelines.find("same") is first
    timelines.close(first)
    timelines.close(opened("another"))
    assert timelines.find("same") is None


def test_a_leg_with_half_a_chunk_makes_no_sense() -> None:
    timelines = Timelines(2, POLICIES, ManualClock())
    with pytest.raises(BadMessage, match="12 bytes of chunks"):
        timelines.over("prefill", [wire.LegRecord(1, {}, chunks=bytes(12))])
