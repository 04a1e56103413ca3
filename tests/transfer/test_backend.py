"""Frame headers survive the trip, and hostile bytes are refused by name."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer import wire
from transfer.backend import (
    DIGEST_BYTES,
    HEADER_BYTES,
    MAX_META_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    Kind,
    digest_at_once,
    whole_frame,
)
from transfer.errors import BadMessage

u32 = st.integers(0, 2**32 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
frames = st.builds(
    Frame,
    st.sampled_from(Kind),
    i64,
    i64,
    u32,
    u32,
    u32,
    u32,
    u32,
    st.integers(0, MAX_META_BYTES),
    st.integers(0, MAX_PAYLOAD_BYTES),
)


@given(frames)
def test_a_header_comes_out_as_it_went_in(frame: Frame) -> None:
    data = frame.pack()
    assert len(data) == HEADER_BYTES
    assert Frame.unpack(data) == frame
    assert Frame.unpack(memoryview(bytearray(data))) == frame


@given(frames, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_changed_header_is_refused_or_another_legal_one(frame: Frame, at: int, xor: int) -> None:
    data = bytearray(frame.pack())
    data[at] ^= xor
    try:
        changed = Frame.unpack(data)
    except BadMessage:
        return
    assert changed != frame
    assert changed.payload_len <= MAX_PAYLOAD_BYTES
    assert changed.meta_len <= MAX_META_BYTES


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_foreign_bytes_are_no_header(data: bytes) -> None:
    if data.startswith(b"KVF1"):
        return
    with pytest.raises(BadMessage, match="KVF1"):
        Frame.unpack(data)


def test_another_version_is_named() -> None:
    data = bytearray(Frame(Kind.PING).pack())
    data[4] = wire.WIRE_VERSION + 1
    with pytest.raises(BadMessage, match=f"version {wire.WIRE_VERSION + 1}"):
        Frame.unpack(data)


def test_an_unknown_kind_is_named() -> None:
    data = bytearray(Frame(Kind.PING).pack())
    data[6] = 99
    with pytest.raises(BadMessage, match="kind 99"):
        Frame.unpack(data)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.PAGES, payload_len=MAX_PAYLOAD_BYTES + 1),
        Frame(Kind.FINISH, meta_len=MAX_META_BYTES + 1),
    ],
)
def test_lengths_past_the_bounds_are_refused_before_anything_is_read(frame: Frame) -> None:
    with pytest.raises(BadMessage, match="oversize"):
        Frame.unpack(frame.pack())


@pytest.mark.parametrize("length", [0, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(BadMessage, match=str(length)):
        Frame.unpack(bytes(length))


def sampled(payload: np.ndarray) -> bytes:
    return digest_at_once(b"header and meta", memoryview(payload), is_sampled=True)


@pytest.mark.parametrize("num_bytes", [1, 4096, 64 << 10])
def test_every_byte_of_a_small_payload_in_shared_memory_counts(num_bytes: int) -> None:
    payload = np.zeros(num_bytes, np.uint8)
    before = sampled(payload)
    payload[num_bytes // 2] = 1
    assert sampled(payload) != before


@pytest.mark.parametrize("num_bytes", [(64 << 10) + 1, (1 << 20) - 8, 1 << 20])
def test_any_4_kib_of_a_large_payload_that_are_not_the_right_ones_are_told(num_bytes: int) -> None:
    """As when a slot still holds an earlier frame, or already holds a later one."""
    payload = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    before = sampled(payload)
    for at in [*range(0, num_bytes, 4096), num_bytes - 64]:
        kept = payload[at : at + 4096].copy()
        payload[at : at + 4096] ^= 1
        assert sampled(payload) != before
        payload[at : at + 4096] = kept
    assert sampled(payload) == before


def test_every_byte_of_a_frame_counts_in_its_digest() -> None:
    frame = Frame(Kind.FINISH, room=5, epoch=6)
    digests = set()
    for meta, payload in [(b"ab", b"cd"), (b"abc", b"d"), (b"", b"abcd"), (b"ab", b"ce")]:
        data = whole_frame(frame, meta, [memoryview(payload)])
        told = msgspec.structs.replace(frame, meta_len=len(meta), payload_len=len(payload))
        assert Frame.unpack(data[:HEADER_BYTES]) == told
        assert data[HEADER_BYTES:-DIGEST_BYTES] == meta + payload
        digests.add(bytes(data[-DIGEST_BYTES:]))
    assert len(digests) == 4
