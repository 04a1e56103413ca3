"""Runs of pages are cut into frames, and their bytes are read without copying."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tests.transfer.samples import KV, a_grant, logical_pages, sharded
from transfer import wire
from transfer.backend import FirstToken, Frame, Kind, Refused, SenderEvent
from transfer.clock import ManualClock
from transfer.layout import plan_heads
from transfer.outbound import Job, Lane, Sender, cut_frames, segments

PAGE_BYTES = KV.page_bytes


def shards_of(num_pages: int, shards: int = 1) -> list[np.ndarray]:
    return sharded(logical_pages(num_pages), 4, shards, ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("max_pages", "expected"),
    # Of sizes in between, only the run lengths that decode has compiled: 2, 8, 32.
    [(0, [1] * 5), (1, [1] * 5), (2, [2, 2, 1]), (4, [2, 2, 1]), (5, [5]), (9, [5])],
)
def test_a_run_is_cut_by_pages_to_the_frame_s_bound(max_pages: int, expected: list[int]) -> None:
    jobs = cut_frames(
        a_grant(1, "a", 9), 4, shards_of(5), plan_heads(4, 1, 4, 1, 4), max_pages * PAGE_BYTES
    )
    assert [job.frame.num_pages for job in jobs] == expected
    assert [job.frame.page_start for job in jobs] == [
        4 + sum(expected[:i]) for i in range(len(jobs))
    ]
    assert all(job.num_bytes <= max(1, max_pages) * PAGE_BYTES for job in jobs)


def test_a_page_larger_than_the_bound_travels_alone() -> None:
    jobs = cut_frames(a_grant(1, "a", 2), 0, shards_of(2), plan_heads(4, 1, 4, 1, 4), 1)
    assert [job.frame.num_pages for job in jobs] == [1, 1]


def test_every_head_run_is_cut_at_the_same_pages() -> None:
    runs = plan_heads(4, 2, 4, 4, 4)
    jobs = cut_frames(a_grant(1, "a", 5), 0, shards_of(5, 2), runs, PAGE_BYTES // 2)
    cuts = {
        shard: [
            (job.frame.page_start, job.frame.num_pages)
            for job in jobs
            if job.frame.dst_shard == shard
        ]
        for shard in range(4)
    }
    assert all(cut == cuts[0] for cut in cuts.values())
    assert len(jobs) == len(runs) * len(cuts[0])


@pytest.mark.parametrize(
    "cut",
    [np.s_[:], np.s_[:, :, 1:3], np.s_[:, :, 1:3, :, 1:2], np.s_[:, :, :, :, 2:]],
    ids=["whole", "pages", "pages and heads", "heads"],
)
def test_segments_are_the_bytes_of_the_pages_in_order(cut: tuple[slice, ...]) -> None:
    pages = shards_of(4)[0][cut]
    assert b"".join(segments(pages)) == pages.tobytes()


def test_a_cut_of_pages_is_read_from_where_it_lies() -> None:
    shard = shards_of(4)[0]
    parts = segments(shard[:, :, 1:3])
    before = parts[0][0]
    shard.view(np.uint8)[0, 0, 1, 0, 0, 0] ^= 0xFF
    assert parts[0][0] == before ^ 0xFF
    assert len(parts) == KV.num_layers * 2


def test_no_pages_have_no_segments() -> None:
    assert segments(None) == []


class StillLane(Lane):
    """A lane that only the test empties."""

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class QuickLane(StillLane):
    """Sends jobs in the thread that brings them, while it is open."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.is_open = True
        self.told = 0
        self.left: list[tuple[Kind, int]] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def wake(self) -> None:
        self.told += 1

    def try_send(self, job: Job) -> bool:
        assert self.leaving.locked()
        self.meanwhile()
        if self.is_open:
            self.left.append((job.frame.kind, job.frame.room))
        return self.is_open


class StillSender(Sender):
    def __init__(self, connections: int = 1, lane: Lane | None = None) -> None:
        self.events: list[SenderEvent] = []
        super().__init__(self.events.append, PAGE_BYTES, connections)
        self.clock: ManualClock = ManualClock(100.0)
        self.lane = lane or StillLane("a")
        self.num_opened = 0

    def _open_lane(self, address: str) -> Lane:
        self.num_opened += 1
        return self.lane

    def left(self) -> list[tuple[Kind, int]]:
        """Send all that is queued; returns what was sent."""
        jobs = []
        while (job := self.next_job(self.lane)) is not None:
            begun_s = self.clock.monotonic_s()
            self.clock.advance(1.0)
            self.sent(self.lane, job, begun_s)
            jobs.append((job.frame.kind, job.frame.room))
        return jobs


def queue_room(sender: StillSender, room: int, num_pages: int) -> None:
    grant = a_grant(room, "a", num_pages)
    sender.send_pages(grant, 0, shards_of(num_pages), plan_heads(4, 1, 4, 1, 4))
    sender.finish(grant, FirstToken(1, 0, 4 * num_pages))


def test_a_grant_opens_the_connection_that_its_pages_take() -> None:
    sender = StillSender(connections=2)
    for room in (1, 2):
        sender.open(a_grant(room, "a", 1))
    assert sender.num_opened == 1
    assert not sender.lane.rooms
    queue_room(sender, 1, 1)
    assert sender.num_opened == 1
    assert list(sender.lane.rooms) == [1]


def test_an_address_is_behind_while_more_than_so_much_waits_for_all_its_lanes() -> None:
    sender = StillSender()
    assert sender.behind(0) == frozenset()
    queue_room(sender, 1, 2)
    queue_room(sender, 2, 1)
    assert sender.behind(3 * PAGE_BYTES - 1) == {"a"}
    assert sender.behind(3 * PAGE_BYTES) == frozenset()
    sender.cancel(1)
    assert sender.behind(PAGE_BYTES - 1) == {"a"}
    assert sender.left()
    assert sender.behind(0) == frozenset()


def test_small_jobs_leave_by_the_thread_that_brings_them() -> None:
    lane = QuickLane("a")
    sender = StillSender(lane=lane)
    queue_room(sender, 1, 1)
    assert lane.left == [(Kind.PAGES, 1), (Kind.FINISH, 1)]
    assert lane.told == 1  # of a first room: its thread asks for signs of life from now on
    assert sender.in_flight_bytes == 0
    shipped = sender.cancel(1)
    assert shipped is not None
    assert shipped.num_bytes == PAGE_BYTES
    assert not lane.leaving.locked()


def test_nothing_leaves_before_what_waits() -> None:
    lane = QuickLane("a")
    sender = StillSender(lane=lane)
    lane.is_open = False
    queue_room(sender, 1, 1)
    lane.is_open = True
    queue_room(sender, 2, 1)
    assert lane.left == []
    assert lane.told == 4
    assert sender.left() == [
        (Kind.PAGES, 1),
        (Kind.PAGES, 2),
        (Kind.FINISH, 1),
        (Kind.FINISH, 2),
    ]
    assert sender.in_flight_bytes == 0


def test_what_the_lane_s_thread_is_sending_is_not_overtaken() -> None:
    lane = QuickLane("a")
    sender = StillSender(lane=lane)
    with lane.leaving:
        queue_room(sender, 1, 1)
    assert lane.left == []
    assert sender.left() == [(Kind.PAGES, 1), (Kind.FINISH, 1)]


def test_several_frames_or_a_long_one_are_left_to_the_lane_s_thread() -> None:
    lane = QuickLane("a")
    sender = StillSender(lane=lane)
    queue_room(sender, 1, 2)
    assert lane.left == []
    lane = QuickLane("a")
    sender = StillSender(lane=lane)
    pages = np.zeros((2, 2, 1, 4, 4, 1 << 10), np.float32)
    sender.send_pages(a_grant(2, "a", 1), 0, [pages], plan_heads(4, 1, 4, 1, 4))
    assert pages.nbytes > 64 << 10
    assert lane.left == []


def test_a_job_that_could_not_leave_is_dropped_when_its_room_ended_meanwhile() -> None:
    lane = QuickLane("a")
    sender = StillSender(lane=lane)
    lane.is_open = False
    lane.meanwhile = lambda: sender.cancel(1)
    queue_room(sender, 1, 1)
    assert sender.left() == [(Kind.CANCEL, 1)]
    assert sender.in_flight_bytes == 0


def test_rooms_take_turns_so_a_long_one_does_not_hold_up_short_ones() -> None:
    sender = StillSender()
    for room, num_pages in ((1, 100), (2, 1), (3, 2)):
        queue_room(sender, room, num_pages)
    left = sender.left()
    assert left[:8] == [
        (Kind.PAGES, 1),
        (Kind.PAGES, 2),
        (Kind.PAGES, 3),
        (Kind.PAGES, 1),
        (Kind.FINISH, 2),
        (Kind.PAGES, 3),
        (Kind.PAGES, 1),
        (Kind.FINISH, 3),
    ]
    assert left[8:] == [(Kind.PAGES, 1)] * 97 + [(Kind.FINISH, 1)]
    assert sender.in_flight_bytes == 0


def test_the_shards_of_a_run_leave_together() -> None:
    sender = StillSender()
    for room in (1, 2):
        grant = a_grant(room, "a", 2, 1, 2, 4)
        sender.send_pages(grant, 0, shards_of(2), plan_heads(4, 1, 4, 2, 4))
    jobs = [sender.next_job(sender.lane) for _ in range(4)]
    frames = [(job.frame.room, job.frame.page_start, job.frame.dst_shard) for job in jobs if job]
    assert frames == [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1)]


def test_without_room_for_pages_what_needs_none_leaves() -> None:
    sender = StillSender()
    queue_room(sender, 1, 2)
    grant = a_grant(2, "a", 1)
    sender.finish(grant, FirstToken(1, 0, 4))
    job = sender.next_job(sender.lane, with_pages=False)
    assert job is not None
    assert (job.frame.kind, job.frame.room) == (Kind.FINISH, 2)
    assert sender.next_job(sender.lane, with_pages=False) is None


def test_a_cancel_leaves_first_and_takes_the_rooms_frames_along() -> None:
    sender = StillSender()
    queue_room(sender, 1, 3)
    queue_room(sender, 2, 1)
    sender.cancel(1)
    assert sender.left() == [(Kind.CANCEL, 1), (Kind.PAGES, 2), (Kind.FINISH, 2)]
    assert sender.in_flight_bytes == 0


def test_a_lost_lane_leaves_nothing_in_flight() -> None:
    sender = StillSender()
    queue_room(sender, 1, 3)
    sender.lost(sender.lane, "gone")
    assert sender.in_flight_bytes == 0
    assert sender.left() == []


def test_what_left_for_a_room_is_told_with_its_end() -> None:
    sender = StillSender()
    queue_room(sender, 1, 3)
    sender.left()
    sender.clock.advance(5.0)
    sender.heard(sender.lane, Frame(Kind.ACK, 1), b"")
    (event,) = sender.events
    shipped = event.shipped
    assert shipped is not None
    assert (shipped.way, shipped.num_bytes, shipped.num_frames) == ("tcp", 3 * PAGE_BYTES, 3)
    assert (shipped.first_s, shipped.last_s, shipped.acked_s) == (100.0, 103.0, 109.0)
    assert shipped.page_ends == {1: 101.0, 2: 102.0, 3: 103.0}


def test_what_left_is_told_of_a_room_that_ends_badly_too_and_kept_of_none() -> None:
    sender = StillSender()
    for room in (1, 2, 3):
        queue_room(sender, room, 1)
    sender.left()
    cancelled = sender.cancel(1)
    sender.heard(sender.lane, Frame(Kind.NACK, 2), wire.encode(Refused("stale", "old")))
    sender.lost(sender.lane, "reset")
    found = [cancelled, *(event.shipped for event in sender.events)]
    assert [shipped.num_frames for shipped in found if shipped is not None] == [1, 1, 1]
    assert [event.kind for event in sender.events] == ["nacked", "lost"]
    assert [sender.cancel(room) for room in (1, 2, 3, 4)] == [None] * 4


class OneThreadSender(StillSender):
    """A sender whose process has threads for only one connection."""

    def _open_lane(self, address: str) -> Lane:
        if self._lanes:
            raise RuntimeError("can't start new thread")
        return super()._open_lane(address)


def test_a_connection_that_cannot_be_opened_costs_its_room_or_nothing() -> None:
    sender = OneThreadSender(connections=2)
    queue_room(sender, 1, 1)
    queue_room(sender, 2, 1)  # takes the connection that there is
    assert sender.events == []
    assert sender.counters["connections_not_opened"] == 1
    grant = a_grant(3, "b", 1)
    sender.send_pages(grant, 0, shards_of(1), plan_heads(4, 1, 4, 1, 4))
    sender.finish(grant, FirstToken(1, 0, 4))
    assert sender.events == [SenderEvent("unsent", 3, "b: can't start new thread")]
    assert len(sender.left()) == 4
    assert sender.in_flight_bytes == 0
