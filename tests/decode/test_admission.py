"""Slots and pages: the oldest request first, no overtaking, and the youngest is preempted."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode.admission import Admission, Seat
from transfer.pages import PagePool
from transfer.prefix_cache import Sharing

PAGE = 4


def admission(
    num_pages: int = 16,
    num_slots: int = 4,
    headroom_pages: int = 0,
    ranks: int = 1,
    caching: bool = False,
) -> Admission:
    pools = [PagePool(num_pages) for _ in range(ranks)]
    return Admission(pools, num_slots, PAGE, headroom_pages, caching)


def sharing(token_ids: Sequence[int], salt: str = "") -> Sharing:
    return Sharing(np.array(token_ids, np.int32), salt, len(token_ids) - 1)


def rooms(seats: tuple[Seat, ...]) -> list[int]:
    return [seat.room for seat in seats]


def test_the_oldest_is_seated_first_and_equal_ages_go_by_room() -> None:
    desk = admission()
    for room, arrival_s in ((4, 2.0), (3, 2.0), (9, 1.0)):
        desk.add(room, 1, arrival_s)
    assert rooms(desk.admit()) == [9, 3, 4]


def test_a_seat_has_pages_for_its_prompt_and_first_token() -> None:
    desk = admission()
    for room, num_tokens in enumerate((1, 3, 4, 5)):
        desk.add(room, num_tokens, float(room))
    assert [len(seat.pages) for seat in desk.admit()] == [1, 1, 2, 2]
    desk.check()


def test_nobody_overtakes_one_who_waits_for_pages() -> None:
    desk = admission(num_pages=4)
    desk.add(1, 8, 1.0)
    desk.add(2, 8, 2.0)  # needs three pages, one is free
    desk.add(3, 1, 3.0)
    assert rooms(desk.admit()) == [1]
    assert desk.admit() == ()
    assert (desk.num_waiting, desk.waiting_tokens) == (2, 9)
    desk.release(1)
    assert rooms(desk.admit()) == [2, 3]


def test_no_more_seats_than_slots() -> None:
    desk = admission(num_slots=2)
    for room in (1, 2, 3):
        desk.add(room, 1, float(room))
    seated = desk.admit()
    assert sorted(seat.slot for seat in seated) == [0, 1]
    assert desk.num_free_slots == 0
    freed = desk.release(1)
    assert freed is not None
    assert [seat.slot for seat in desk.admit()] == [freed.slot]


def test_headroom_is_left_for_those_who_are_there_but_not_asked_of_the_first() -> None:
    desk = admission(num_pages=4, headroom_pages=2)
    desk.add(1, 12, 1.0)  # all four pages: it would never fit with headroom
    assert rooms(desk.admit()) == [1]
    desk.release(1)
    desk.add(2, 1, 2.0)
    desk.add(3, 1, 3.0)
    desk.add(4, 1, 4.0)
    assert rooms(desk.admit()) == [2, 3]  # a third would leave one page of headroom


def test_a_seat_grows_a_page_at_a_time_until_the_pool_is_dry() -> None:
    desk = admission(num_pages=3)
    desk.add(1, 1, 1.0)
    (seat,) = desk.admit()
    grown = [desk.grow(seat) for _ in range(3)]
    assert grown[2] is None
    assert seat.pages[1:] == grown[:2]
    desk.check()
    desk.release(1)
    desk.check()


def test_the_victim_is_the_youngest_seat_at_worst_the_only_one() -> None:
    desk = admission()
    for room, arrival_s in ((1, 1.0), (2, 9.0), (3, 5.0)):
        desk.add(room, 1, arrival_s)
    desk.admit()
    desk.add(4, 1, 99.0)  # waits: it holds nothing to give up
    order = []
    for _ in range(3):
        order.append(desk.victim(0).room)
        desk.release(order[-1])
    assert order == [2, 3, 1]


def test_a_waiting_room_is_released_without_a_seat() -> None:
    desk = admission()
    desk.add(1, 5, 1.0)
    assert desk.release(1) is None
    assert desk.release(1) is None
    assert desk.num_waiting == 0
    assert desk.admit() == ()


# --- several ranks ------------------------------------------------------------------------------


def ranks(seats: tuple[Seat, ...]) -> dict[int, int]:
    return {seat.room: seat.rank for seat in seats}


def test_a_room_goes_where_most_pages_are_free_then_most_slots() -> None:
    desk = admission(num_pages=8, num_slots=4, ranks=2)
    for room, num_tokens in enumerate((11, 3, 3, 3, 3), start=1):
        desk.add(room, num_tokens, float(room))
    # Three pages, then one each: rank 1 has more free pages until both have five.
    assert ranks(desk.admit()) == {1: 0, 2: 1, 3: 1, 4: 1, 5: 0}
    desk.check()


def test_slots_count_over_all_ranks_and_pages_within_each() -> None:
    desk = admission(num_pages=1, num_slots=2, ranks=3)
    for room in (1, 2, 3):
        desk.add(room, 1, float(room))
    seated = desk.admit()
    assert [(seat.rank, seat.slot, seat.pages) for seat in seated] == [
        (0, 0, [0]),
        (1, 2, [0]),
        (2, 4, [0]),
    ]
    assert (desk.num_slots, desk.num_free_slots, desk.rank_free_slots(1)) == (6, 3, 1)


def test_a_dictated_room_waits_for_its_rank_and_is_not_overtaken_there() -> None:
    desk = admission(num_pages=4, num_slots=1, ranks=2)
    desk.add(1, 1, 1.0, rank=1)
    desk.add(2, 1, 2.0, rank=1)
    desk.add(3, 1, 3.0)
    desk.add(4, 1, 4.0)
    assert ranks(desk.admit()) == {1: 1, 3: 0}
    desk.release(1)
    assert ranks(desk.admit()) == {2: 1}
    desk.release(3)
    assert ranks(desk.admit()) == {4: 0}


def test_one_who_waits_for_pages_of_any_rank_is_overtaken_in_none() -> None:
    desk = admission(num_pages=2, num_slots=4, ranks=2)
    desk.add(1, 1, 1.0, rank=0)
    desk.add(2, 1, 2.0, rank=1)
    desk.add(3, 4, 3.0)  # two pages: each rank has one free
    desk.add(4, 1, 4.0)
    desk.add(5, 1, 5.0, rank=0)
    assert ranks(desk.admit()) == {1: 0, 2: 1}
    desk.release(2)
    assert ranks(desk.admit()) == {3: 1, 4: 0}
    desk.check()


def test_a_rank_takes_its_victim_from_its_own_seats() -> None:
    desk = admission(ranks=2)
    for room, rank in ((1, 0), (2, 1), (3, 0), (4, 1)):
        desk.add(room, 1, float(room), rank)
    desk.admit()
    assert (desk.victim(0).room, desk.victim(1).room) == (3, 4)


def test_a_rank_that_could_evict_all_it_has_is_roomier_than_one_in_use() -> None:
    desk = admission(num_pages=8, ranks=2, caching=True)
    desk.add(1, 20, 1.0, rank=0, sharing=sharing(range(20)))
    (seat,) = desk.admit()
    desk.filled(seat, 20)
    desk.release(1)  # on rank 0 three pages are free, five cached
    desk.add(2, 15, 2.0, rank=1)  # half of rank 1's pages
    desk.add(3, 1, 3.0)
    assert ranks(desk.admit()) == {2: 1, 3: 0}


def test_a_prompt_computed_here_shares_the_pages_of_one_before_it() -> None:
    desk = admission(caching=True)
    desk.add(1, 10, 1.0, sharing=sharing(range(10)))
    (first,) = desk.admit()
    desk.filled(first, 6)  # a chunk that fills one page
    desk.add(2, 9, 2.0, sharing=sharing(range(9)))
    desk.add(3, 9, 3.0, sharing=sharing(range(9), "other"))
    desk.add(4, 9, 4.0)  # prefill computes it, into pages of its own
    second, third, fourth = desk.admit()
    assert second.num_cached == PAGE
    assert second.pages[0] == first.pages[0]
    assert third.num_cached == fourth.num_cached == 0
    assert len({page for seat in (first, second, third, fourth) for page in seat.pages}) == 11
    desk.check()


def test_what_is_cached_is_as_good_as_free_but_for_pages_in_use() -> None:
    desk = admission(num_pages=4, caching=True)
    desk.add(1, 12, 1.0, sharing=sharing(range(12)))
    (first,) = desk.admit()
    desk.filled(first, 12)
    desk.release(1)
    assert len(desk.caches[0]) == 3
    desk.add(2, 12, 2.0, sharing=sharing(range(12)))  # two cached pages, and two more
    (second,) = desk.admit()
    assert second.num_cached == 2 * PAGE
    assert desk.grow(second) is None
    desk.add(3, 1, 3.0)
    assert desk.admit() == ()
    desk.release(2)
    assert rooms(desk.admit()) == [3]
    desk.check()


@pytest.mark.parametrize("fault", ["lost", "freed", "not kept", "slot", "seat"])
def test_the_numbers_alone_tell_that_something_is_lost_or_free_too_early(fault: str) -> None:
    pool = PagePool(16)
    desk = Admission([pool], 4, PAGE, 0, caching=True)
    for room in (1, 2):
        desk.add(room, 12, float(room), sharing=sharing(range(12)))
        seat = desk.admit()[0]
        desk.filled(seat, 12)
    desk.check(each_page=False)
    match fault:
        case "lost":
            seat.pages.pop()
        case "freed":
            pool.release(seat.pages[-1:])
        case "not kept":
            pool.let_go(seat.pages[:1])
        case "slot":
            desk._free_slots[0].pop()
        case "seat":
            del desk._seats[1]
    with pytest.raises(AssertionError):
        desk.check(each_page=False)


class AdmissionBesideModel(RuleBasedStateMachine):
    """Random arrivals, growth and ends; plain dicts model which rooms wait and which are seated."""

    caching = False

    def __init__(self) -> None:
        super().__init__()
        self.desk = admission(num_pages=10, num_slots=3, headroom_pages=1, caching=self.caching)
        self.waiting: dict[int, tuple[float, int]] = {}  # room -> age, tokens
        self.seated: dict[int, Seat] = {}
        self.next_room = 0

    @rule(num_tokens=st.integers(1, 30), arrival_s=st.integers(0, 5))
    def arrive(self, num_tokens: int, arrival_s: int) -> None:
        self.next_room += 1
        prompt = sharing([0] * num_tokens) if self.caching else None
        self.desk.add(self.next_room, num_tokens, float(arrival_s), sharing=prompt)
        self.waiting[self.next_room] = float(arrival_s), num_tokens

    @rule()
    def admit(self) -> None:
        for seat in self.desk.admit():
            oldest = min(self.waiting, key=lambda room: (self.waiting[room][0], room))
            assert seat.room == oldest
            assert len(seat.pages) == self.waiting[oldest][1] // PAGE + 1
            del self.waiting[oldest]
            self.seated[oldest] = seat
            self.sat(seat)
        if self.waiting and not self.seated:
            oldest = min(self.waiting, key=lambda room: (self.waiting[room][0], room))
            assert self.waiting[oldest][1] // PAGE + 1 > 10, "it fits, and nobody is in its way"

    def sat(self, seat: Seat) -> None:
        self.desk.filled(seat, seat.num_tokens)

    @precondition(lambda self: self.seated)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        seat = self.seated[data.draw(st.sampled_from(sorted(self.seated)))]
        held = len(self.pages())
        page = self.desk.grow(seat)
        assert (page is None) == (held == 10)

    @precondition(lambda self: self.seated)
    @rule()
    def preempt(self) -> None:
        youngest = max(self.seated.values(), key=lambda seat: (seat.arrival_s, seat.room))
        assert self.desk.victim(0) is youngest
        self.desk.release(youngest.room)
        del self.seated[youngest.room]

    @precondition(lambda self: self.seated or self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(sorted([*self.seated, *self.waiting])))
        seat = self.desk.release(room)
        assert seat is self.seated.pop(room, None)
        self.waiting.pop(room, None)

    def pages(self) -> set[int]:
        """All pages that seats hold."""
        return {page for seat in self.seated.values() for page in seat.pages}

    @invariant()
    def slots_and_pages_add_up(self) -> None:
        self.desk.check()
        held = sum(len(seat.pages) for seat in self.seated.values())
        assert self.caching or len(self.pages()) == held
        assert self.desk.num_waiting == len(self.waiting)
        assert self.desk.waiting_tokens == sum(tokens for _, tokens in self.waiting.values())


AdmissionBesideModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAdmissionBesideModel = AdmissionBesideModel.TestCase


class SharedPagesBesideModel(AdmissionBesideModel):
    """The same, with every prompt computed here and starting with the same tokens."""

    caching = True


SharedPagesBesideModel.TestCase.settings = AdmissionBesideModel.TestCase.settings
TestSharedPagesBesideModel = SharedPagesBesideModel.TestCase


class SentPagesBesideModel(AdmissionBesideModel):
    """The same, with prompts that begin alike and differ later, and pages that come late or never.

    What is written to each page is known, so that nobody shares one with other tokens, or takes one
    that others still read.
    """

    caching = True

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[int, list[int]] = {}  # by room
        self.coming: set[int] = set()  # rooms whose pages prefill still sends
        self.written: dict[int, list[int]] = {}  # page -> the prompt up to its end

    @rule(zeros=st.sampled_from((0, 19, 20)), ones=st.integers(1, 10), arrival_s=st.integers(0, 5))
    def arrive(self, zeros: int, ones: int, arrival_s: int) -> None:
        self.next_room += 1
        room, ids = self.next_room, [0] * zeros + [1] * ones
        self.desk.add(room, len(ids), float(arrival_s), sharing=sharing(ids))
        self.waiting[room] = float(arrival_s), len(ids)
        self.prompts[room] = ids

    def sat(self, seat: Seat) -> None:
        num_shared = seat.num_cached // PAGE
        assert num_shared * PAGE < seat.num_tokens, "prefill sends at least one page"
        self.coming.add(seat.room)
        for page in seat.pages[num_shared:]:
            self.written.pop(page, None)

    @precondition(lambda self: self.coming & self.seated.keys())
    @rule(data=st.data())
    def some_come(self, data: st.DataObject) -> None:
        seat = self.one_coming(data)
        most = (seat.num_tokens - seat.num_cached) // PAGE
        self.desk.digest(seat, data.draw(st.integers(0, most)))

    @precondition(lambda self: self.coming & self.seated.keys())
    @rule(data=st.data())
    def all_come(self, data: st.DataObject) -> None:
        seat = self.one_coming(data)
        self.coming.discard(seat.room)
        ids = self.prompts[seat.room]
        for idx in range(seat.num_cached // PAGE, len(ids) // PAGE):
            self.written[seat.pages[idx]] = ids[: (idx + 1) * PAGE]
        self.desk.filled(seat, seat.num_tokens)

    @precondition(lambda self: self.seated)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        super().grow(data)
        for seat in self.seated.values():
            for page in seat.pages[seat.num_tokens // PAGE :]:
                self.written.pop(page, None)

    @rule()
    def flush(self) -> None:
        self.desk.caches[0].flush()

    def one_coming(self, data: st.DataObject) -> Seat:
        return self.seated[data.draw(st.sampled_from(sorted(self.coming & self.seated.keys())))]

    @invariant()
    def everyone_reads_the_own_prompt(self) -> None:
        for room, seat in self.seated.items():
            ids = self.prompts[room]
            num_here = (seat.num_cached if room in self.coming else len(ids)) // PAGE
            for idx, page in enumerate(seat.pages[:num_here]):
                assert self.written[page] == ids[: (idx + 1) * PAGE]


SentPagesBesideModel.TestCase.settings = AdmissionBesideModel.TestCase.settings
TestSentPagesBesideModel = SentPagesBesideModel.TestCase


def test_those_behind_one_that_left_are_looked_at_again_at_once() -> None:
    desk = admission(num_pages=4)
    for room, num_tokens in ((1, 8), (2, 8), (3, 1)):
        desk.add(room, num_tokens, float(room))
    assert rooms(desk.admit()) == [1]
    desk.release(2)
    assert rooms(desk.admit()) == [3]


def test_pages_that_sharing_frees_seat_who_waits() -> None:
    desk = admission(num_pages=8, caching=True)
    for room in (1, 2):
        desk.add(room, 12, float(room), sharing=sharing(range(12)))
    first, second = desk.admit()
    desk.add(3, 4, 3.0)
    assert desk.admit() == ()
    desk.filled(first, 12)
    desk.share(second)
    assert rooms(desk.admit()) == [3]


def test_pages_that_a_seat_shares_with_one_who_waits_are_not_counted_twice() -> None:
    """Both may come at once: the second is considered again when the first has been computed."""
    desk = admission(num_pages=6, headroom_pages=1, caching=True)
    tokens = range(4 * PAGE)
    for room in (1, 2):
        desk.add(room, len(tokens), float(room), sharing=sharing(tokens))
    (first,) = desk.admit()
    assert len(first.pages) == 5
    looks = [desk.may_admit]
    desk.filled(first, 2 * PAGE)
    looks.append(desk.may_admit)
    assert desk.admit() == ()  # it needs three more pages, and one is left
    desk.filled(first, len(tokens))
    looks.append(desk.may_admit)
    assert desk.admit() == ()  # it needs two more, and one is kept for the first to grow
    assert looks == [False, True, True]
    desk.release(1)
    assert rooms(desk.admit()) == [2]
    desk.check()


def test_who_begins_as_a_seat_does_needs_few_pages_of_its_own() -> None:
    desk = admission(num_pages=7, caching=True)
    tokens = range(4 * PAGE)
    for room in (1, 2):
        desk.add(room, len(tokens), float(room), sharing=sharing(tokens))
    (first,) = desk.admit()
    desk.filled(first, len(tokens))
    (second,) = desk.admit()
    assert second.pages[:3] == first.pages[:3]
    assert second.num_cached == 3 * PAGE
    assert desk.release(1) is not None
    desk.check()
