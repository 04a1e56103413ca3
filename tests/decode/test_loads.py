"""What decode reports of itself: routers choose by it, so every room it holds has to show."""

from typing import cast

from serving.router import Router
from tests.serving.test_router import member, pick
from tests.sim.alone import Alone
from tests.sim.workers import SimDecode
from transfer import wire


def decode(**sizes: int) -> tuple[Alone, SimDecode]:
    alone = Alone("decode", **sizes)
    return alone, cast(SimDecode, alone.worker)


def test_a_slot_that_waits_for_pages_is_as_taken_as_one_that_draws_tokens() -> None:
    alone, worker = decode(num_pages=16, num_slots=2)
    for room in (1, 2, 3):
        alone.submit(room)
    alone.turn()
    load = worker.load()
    assert (load.queued_requests, load.running_requests, load.slots_free) == (1, 2, 0)


def test_a_router_passes_over_a_worker_whose_slots_all_wait_for_pages() -> None:
    alone, worker = decode(num_pages=64, num_slots=2)
    for room in (1, 2):
        alone.submit(room)
    alone.turn()
    full = wire.Member(member("full").info, 1, worker.load())
    half = member("half", slots_total=2, slots_free=1, running_requests=1)
    assert pick(Router("least_load"), [member("p", "prefill")], [full, half], 1, 0.0).decode is half


def test_rooms_that_wait_for_a_rank_are_in_its_load_until_they_are_seated_or_end() -> None:
    alone, worker = decode(num_slots=1, dp_size=2)
    for room in (1, 2, 3):
        alone.submit(room, num_tokens=3, routed_dp_rank=1)
    alone.turn()

    def told() -> list[tuple[int, int, int]]:
        alone.turn()
        loads = worker.rank_loads()
        return [(x.queued_requests, x.queued_tokens, x.running_requests) for x in loads]

    assert told() == [(0, 0, 0), (2, 6, 1)]
    worker.drop(2, "aborted")
    assert told() == [(0, 0, 0), (1, 3, 1)]
    worker.drop(1, "aborted")
    assert told() == [(0, 0, 0), (0, 0, 1)]
    assert worker.load().queued_requests == 0
