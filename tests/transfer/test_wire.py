"""Messages survive the trip, and nothing malformed is accepted."""

import functools
import operator

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.transfer.samples import a_grant, a_worker
from transfer import wire
from transfer.backend import FirstToken
from transfer.errors import BadMessage


def a_submit(num_tokens: int = 5, num_prompt_tokens: int = 3) -> wire.Submit:
    return wire.Submit(
        room=(1 << 62) + 1,
        request_id="r",
        api_id="api-0",
        token_ids=wire.pack_i32(range(num_tokens)),
        num_prompt_tokens=num_prompt_tokens,
        sampling=wire.SamplingParams(
            max_new_tokens=4, logit_bias=((7, -1.5),), stop_token_ids=(2,)
        ),
        age_s=1.5,
        left_s=9.5,
        prefill=wire.WorkerRef("prefill-0", 1, "127.0.0.1:1"),
        decode=wire.WorkerRef("decode-0", 2, "127.0.0.1:2"),
    )


MESSAGES = [
    wire.SubmitBatch((a_submit(), a_submit())),
    wire.SubmitReply((wire.Refusal(3, "queue_full", "no room"),)),
    wire.AbortBatch((1, 2)),
    wire.GrantBatch((a_grant(1, "tcp://h:1", 3),)),
    wire.Empty(),
    wire.StepBatch(
        "decode-0",
        2,
        7,
        1.5,
        rooms=wire.pack_i64([1 << 62, 2]),
        token_ids=wire.pack_i32([5, 6]),
        token_idx=wire.pack_i32([0, 1]),
        finish=wire.pack_u8([wire.RUNNING, wire.STOP]),
        events=(wire.RoomEvent(2, "failed", "stale", "too old"),),
        legs=(
            wire.LegRecord(
                2,
                {"queued": 10, "failed": 900},
                "stale",
                chunks=wire.pack_i64([[64, 20, 500, 510, -1]]),
                shipment=wire.Shipment("shm", 1 << 20, 1, 515, 600, -1),
            ),
        ),
    ),
    wire.Register(a_worker(), 3),
    wire.Heartbeat("decode-0", 3, wire.Load(queued_requests=1)),
    wire.Routes("prefill-0", 3, 1, wire.pack_i64([7]), wire.pack_i32([2]), wire.pack_i64([5])),
    wire.ClusterView(4, (wire.Member(a_worker(), 3, wire.Load(), ranks=(wire.Load(),) * 2),)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message), type(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_cut_anywhere_is_refused(message: wire.Message) -> None:
    data = wire.encode(message)
    for length in range(len(data)):
        with pytest.raises(BadMessage):
            wire.decode(data[:length], type(message))


def test_arrays_within_arrays_without_end_are_no_message() -> None:
    extra = b"\x91" * 5000 + b"\xc0"  # after the known fields
    with pytest.raises(BadMessage, match="ClusterView"):
        wire.decode(b"\x93\x01\x90" + extra, wire.ClusterView)


@given(st.binary(max_size=64))
@example(b"\x93\xa2\x00\x80")  # a text that is not valid UTF-8
def test_foreign_bytes_never_raise_anything_but_bad_message(data: bytes) -> None:
    for kind in (wire.SubmitBatch, wire.StepBatch, wire.Register, wire.Heartbeat, wire.Routes):
        try:
            wire.decode(data, kind)
        except BadMessage as error:
            assert kind.__name__ in str(error)  # noqa: PT017  (both outcomes are legal)


SUBMITS, GRANTS = wire.SubmitBatch((a_submit(),)), wire.GrantBatch((a_grant(1, "tcp://h:1", 3),))
FIRST = FirstToken(1, 0, 3)


@pytest.mark.parametrize(
    ("message", "at", "value"),
    [
        (SUBMITS, (0, 0, 0), 1 << 63),  # room
        (SUBMITS, (0, 0, 4), 1 << 31),  # num_prompt_tokens
        (SUBMITS, (0, 0, 5, 0), 1 << 31),  # max_new_tokens
        (SUBMITS, (0, 0, 5, 2), -1),  # top_k
        (SUBMITS, (0, 0, 5, 8, 0, 0), 1 << 31),  # a token of logit_bias
        (SUBMITS, (0, 0, 5, 9), 1 << 63),  # seed
        (SUBMITS, (0, 0, 5, 10, 0), 1 << 40),  # a stop token
        (SUBMITS, (0, 0, 12), -(1 << 31) - 1),  # routed_dp_rank
        (GRANTS, (0, 0, 0), 1 << 63),  # room
        (GRANTS, (0, 0, 1), 1 << 63),  # epoch
        (GRANTS, (0, 0, 4), 0),  # tp_size
        (GRANTS, (0, 0, 5), 0),  # stored_kv_heads
        (FIRST, (0,), 1 << 40),  # token_id
        (FIRST, (0,), -1),
        (FIRST, (1,), 1 << 31),  # token_idx
        (FIRST, (3,), 3),  # finished
    ],
)
def test_a_number_that_its_array_cannot_hold_is_refused_with_the_message(message, at, value):
    """Otherwise an engine would fail when it puts the numbers into an array."""
    fields = msgspec.msgpack.decode(wire.encode(message))
    *path, last = at
    holder = functools.reduce(operator.getitem, path, fields)
    assert isinstance(holder[last], int)
    holder[last] = value
    with pytest.raises(BadMessage, match=f"not a {type(message).__name__}"):
        wire.decode(msgspec.msgpack.encode(fields), type(message))


def test_another_version_is_refused_with_both_versions_named() -> None:
    other = msgspec.structs.replace(MESSAGES[0], version=wire.WIRE_VERSION + 1)
    with pytest.raises(BadMessage, match=rf"{wire.WIRE_VERSION + 1}.*{wire.WIRE_VERSION}"):
        wire.decode(wire.encode(other), wire.SubmitBatch)


def test_a_message_of_another_type_is_refused() -> None:
    with pytest.raises(BadMessage, match="GrantBatch"):
        wire.decode(wire.encode(MESSAGES[5]), wire.GrantBatch)


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        MESSAGES[2].reason = "other"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("pack", "unpack", "dtype"),
    [
        (wire.pack_i32, wire.unpack_i32, np.int32),
        (wire.pack_i64, wire.unpack_i64, np.int64),
        (wire.pack_f32, wire.unpack_f32, np.float32),
        (wire.pack_u8, wire.unpack_u8, np.uint8),
    ],
)
def test_arrays_come_out_as_they_went_in(pack, unpack, dtype) -> None:
    values = np.array([0, 1, 255, 7], dtype)
    back = unpack(pack(values[::2]))
    assert back.dtype == dtype
    assert back.tolist() == values[::2].tolist()
    assert unpack(pack([])).shape == (0,)


@pytest.mark.parametrize("unpack", [wire.unpack_i32, wire.unpack_i64, wire.unpack_f32])
def test_a_broken_array_is_refused(unpack) -> None:
    with pytest.raises(BadMessage, match="5 bytes"):
        unpack(b"12345")


def test_generated_tokens_are_counted_behind_the_prompt() -> None:
    assert a_submit(num_tokens=5, num_prompt_tokens=3).num_generated == 2


def test_a_step_of_a_side_that_tells_no_legs_is_read_and_one_with_legs_by_it() -> None:
    """This is why legs needed no new wire version."""
    batch = next(message for message in MESSAGES if isinstance(message, wire.StepBatch))
    fields = msgspec.msgpack.decode(wire.encode(batch))
    assert fields[-2] == wire.WIRE_VERSION
    without = wire.decode(msgspec.msgpack.encode(fields[:-1]), wire.StepBatch)
    assert without == msgspec.structs.replace(batch, legs=())
    assert wire.decode(msgspec.msgpack.encode([*fields, "newer"]), wire.StepBatch) == batch
