"""Memory shared by two processes: sealed, of the announced size, and one owner for each slot."""

import gc
import os
import weakref

import numpy as np
import pytest

from transfer import wire
from transfer.backend import MAX_META_BYTES
from transfer.errors import BadMessage
from transfer.staging import BorrowedSlots, Credit, SharedSlots, SlotShape, slot_shape

SHAPE = SlotShape(slot_bytes=4096, num_slots=4)


def test_memory_that_could_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("kvferry-pages", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SHAPE.num_bytes)
    with pytest.raises(BadMessage, match="not sealed"):
        BorrowedSlots(fd, SHAPE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_of_another_size_is_not_mapped() -> None:
    lent = SharedSlots(SHAPE, lambda: None)
    with pytest.raises(BadMessage, match=r"16384 .*20480"):
        BorrowedSlots(lent.fd, SlotShape(4096, 5))


@pytest.mark.parametrize("slots", [[0], [9], [-1], [3, 3]])
def test_credit_for_what_was_not_given_is_refused(slots: list[int]) -> None:
    borrowed = BorrowedSlots(SharedSlots(SHAPE, lambda: None).fd, SHAPE)
    slot, _ = borrowed.write(np.zeros(10, np.uint8))
    assert slot == 0
    borrowed.take_back(Credit(wire.pack_i32([0])))
    with pytest.raises(BadMessage, match="credit"):
        borrowed.take_back(Credit(wire.pack_i32(slots)))


def test_a_slot_comes_back_with_the_last_view_of_it() -> None:
    told: list[int] = []
    lent = SharedSlots(SHAPE, lambda: told.append(1))
    borrowed = BorrowedSlots(lent.fd, SHAPE)
    slot, _ = borrowed.write(np.arange(10, dtype=np.uint8))
    view = lent.take(slot, 10)
    part = view[3:5].view(np.int8)
    del view
    assert lent.credit() is None
    assert part.tolist() == [3, 4]
    del part
    credit = lent.credit()
    assert credit is not None
    borrowed.take_back(credit)
    assert (told, borrowed.num_free) == ([1], 4)


def test_more_slots_than_a_message_names_come_back_in_several() -> None:
    shape = SlotShape(1, 20_000)
    lent = SharedSlots(shape, lambda: None)
    borrowed = BorrowedSlots(lent.fd, shape)
    views = [lent.take(borrowed.write(np.zeros(1, np.uint8))[0], 1) for _ in range(20_000)]
    views.clear()
    while (credit := lent.credit()) is not None:
        assert len(wire.encode(credit)) < MAX_META_BYTES
        borrowed.take_back(credit)
    assert borrowed.num_free == 20_000


def test_slots_live_as_long_as_what_was_lent_of_them() -> None:
    """Memory registered by NIXL goes back to the kernel with its last view, whoever else let go."""
    lent = SharedSlots(SHAPE, lambda: None)
    BorrowedSlots(lent.fd, SHAPE)
    view = lent.take(2, 10)
    lent.close()
    alive = weakref.ref(lent)
    del lent
    gc.collect()
    assert alive() is not None
    del view
    assert alive() is None


def test_what_fits_no_free_slot_is_known_before() -> None:
    borrowed = BorrowedSlots(SharedSlots(SHAPE, lambda: None).fd, SHAPE)
    assert borrowed.fits(4096)
    assert not borrowed.fits(4097)
    slots = [borrowed.write(np.zeros(1, np.uint8))[0] for _ in range(4)]
    assert not borrowed.fits(1)
    borrowed.keep(slots[0])
    assert borrowed.fits(1)


def test_a_frame_longer_than_a_slot_is_refused_before_it_is_written() -> None:
    borrowed = BorrowedSlots(SharedSlots(SHAPE, lambda: None).fd, SHAPE)
    with pytest.raises(BadMessage, match=r"4097 .*4096"):
        borrowed.write(np.zeros(4097, np.uint8))
    assert borrowed.num_free == 4


def test_memory_that_is_lent_cannot_be_cut_short() -> None:
    lent = SharedSlots(SHAPE, lambda: None)
    with pytest.raises(PermissionError):
        os.ftruncate(lent.fd, 4096)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_there_is_no_credit_for_slots_that_nobody_used(num_slots: int) -> None:
    assert SharedSlots(SlotShape(4096, num_slots), lambda: None).credit() is None


def test_a_slot_holds_a_page_that_is_longer_than_a_frame() -> None:
    assert slot_shape((4 << 20) + 1, 1, 4 << 20, 0).slot_bytes > 4 << 20
