"""The queue in front of the workers: bounded, first come first served, nobody waits for ever."""

import asyncio

import pytest

from serving.limits import Limiter
from tests.fakes import ManualTimers
from transfer.clock import ManualClock
from transfer.errors import Code, RequestError


@pytest.fixture
def timers():
    return ManualTimers(ManualClock())


async def waiting(limiter: Limiter, count: int = 1) -> "asyncio.Task":
    """A task that stands in the queue."""
    task = asyncio.create_task(limiter.admit(count))
    await asyncio.sleep(0)  # it runs up to its wait
    assert not task.done()
    return task


async def test_a_free_place_is_given_at_once_and_given_back_once(timers):
    limiter = Limiter(2, 0, 5.0, timers)
    ticket = await limiter.admit(2)
    assert limiter.inflight == 2
    ticket.release()
    ticket.release()
    assert limiter.inflight == 0
    ticket = await limiter.admit(1)
    assert limiter.inflight == 1
    ticket.release()
    assert limiter.inflight == 0


async def test_waiters_are_served_in_order_and_a_small_one_does_not_overtake(timers):
    limiter = Limiter(2, 8, 5.0, timers)
    first = await limiter.admit(1)
    large = await waiting(limiter, 2)
    small = await waiting(limiter, 1)
    assert limiter.queued == 3
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done()
    first.release()
    (await large).release()
    (await small).release()
    assert (limiter.inflight, limiter.queued) == (0, 0)


async def test_a_full_queue_refuses_at_once(timers):
    limiter = Limiter(2, 2, 5.0, timers)
    held = await limiter.admit(2)
    waiters = [await waiting(limiter)]
    with pytest.raises(RequestError, match="at most 2 may wait") as refused:
        await limiter.admit(2)  # only one more may wait
    assert refused.value.code is Code.QUEUE_FULL
    waiters.append(await waiting(limiter))
    with pytest.raises(RequestError, match="2 are waiting"):
        await limiter.admit()
    held.release()
    for waiter in waiters:
        (await waiter).release()


async def test_more_than_ever_fits_is_a_bad_request(timers):
    with pytest.raises(RequestError) as refused:
        await Limiter(4, 8, 5.0, timers).admit(5)
    assert refused.value.code is Code.BAD_REQUEST


async def test_a_wait_past_the_timeout_is_refused_and_lets_the_next_one_go(timers):
    limiter = Limiter(2, 8, 5.0, timers)
    held = await limiter.admit(1)
    large = await waiting(limiter, 2)
    timers.advance(4.0)
    small = await waiting(limiter, 1)
    timers.advance(1.5)
    with pytest.raises(RequestError, match="waited 5 s") as refused:
        await large
    assert refused.value.code is Code.QUEUE_FULL
    (await small).release()
    held.release()
    assert (limiter.inflight, limiter.queued, timers.num_set) == (0, 0, 0)


async def test_a_waiter_that_leaves_frees_its_place_in_the_queue(timers):
    limiter = Limiter(1, 2, 5.0, timers)
    held = await limiter.admit()
    leaver, stayer = await waiting(limiter), await waiting(limiter)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    assert limiter.queued == 1
    held.release()
    (await stayer).release()
    assert (limiter.inflight, timers.num_set) == (0, 0)


async def test_one_admitted_and_cancelled_in_the_same_turn_leaks_nothing(timers):
    limiter = Limiter(1, 2, 5.0, timers)
    held = await limiter.admit()
    leaver = await waiting(limiter)
    held.release()
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    assert (limiter.inflight, limiter.queued) == (0, 0)


async def test_one_cancelled_and_reached_in_the_same_turn_is_passed_over(timers):
    limiter = Limiter(1, 2, 5.0, timers)
    held = await limiter.admit()
    leaver, stayer = await waiting(limiter), await waiting(limiter)
    leaver.cancel()
    held.release()
    await asyncio.gather(leaver, return_exceptions=True)
    (await stayer).release()
    assert (limiter.inflight, limiter.queued) == (0, 0)


async def test_one_cancelled_as_its_time_is_over_leaves_without_a_trace(timers):
    limiter = Limiter(1, 2, 5.0, timers)
    held = await limiter.admit()
    leaver = await waiting(limiter)
    leaver.cancel()
    timers.advance(6.0)
    with pytest.raises(asyncio.CancelledError):
        await leaver
    held.release()
    assert (limiter.inflight, limiter.queued, timers.num_set) == (0, 0, 0)


async def test_one_cancelled_just_after_its_time_was_over_is_cancelled_and_not_refused(timers):
    limiter = Limiter(1, 2, 5.0, timers)
    held = await limiter.admit()
    leaver = await waiting(limiter)
    timers.advance(6.0)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    held.release()
    assert (limiter.inflight, limiter.queued, timers.num_set) == (0, 0, 0)
