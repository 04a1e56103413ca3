"""What a client reads when a request fails."""

import msgspec
import orjson
import pytest

from serving.errors import ApiError, bad_field, error_event, from_decode_error, from_request_error
from transfer.errors import Code, RequestError


class Inner(msgspec.Struct):
    name: str


class Outer(msgspec.Struct):
    needed: int
    ratio: float | None = None
    inner: Inner | None = None
    rows: list[Inner] = []
    bias: dict[int, float] = {}


def decode_error(body: bytes) -> ApiError:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(body, type=Outer)
    return from_decode_error(caught.value)


@pytest.mark.parametrize("code", list(Code))
def test_every_code_that_crosses_the_wire_has_a_status(code: Code) -> None:
    error = from_request_error(RequestError(code, "what happened"))
    assert 400 <= error.status < 600
    assert error.body()["error"]["message"] == "what happened"
    assert error.body()["error"]["code"] == code.value
    assert error.body()["error"]["type"]


@pytest.mark.parametrize("code", [Code.QUEUE_FULL, Code.PEER_LOST, Code.SHUTTING_DOWN])
def test_what_may_pass_later_says_when_to_try_again(code: Code) -> None:
    response = from_request_error(RequestError(code, "busy")).response()
    assert response.status_code in (429, 503)
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "needed"),
        (b'{"needed": "x"}', "needed"),
        (b'{"needed": 1, "ratio": "hot"}', "ratio"),
        (b'{"needed": 1, "inner": {}}', "inner.name"),
        (b'{"needed": 1, "inner": {"name": 3}}', "inner"),
        (b'{"needed": 1, "rows": [{"name": "a"}, {"name": 3}]}', "rows"),
        (b'{"needed": 1, "bias": {"x": 1}}', "bias"),
    ],
)
def test_a_wrong_field_is_named(body: bytes, param: str) -> None:
    error = decode_error(body)
    assert error.status == 400
    assert error.param == param
    assert error.message.startswith(param)


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"needed": NaN}', b'{"x": "\\ud800"}'])
def test_a_body_that_is_no_json_is_a_400(body: bytes) -> None:
    error = decode_error(body)
    assert (error.status, error.code, error.param) == (400, "invalid_json", None)


def test_a_body_that_is_no_object_is_a_400() -> None:
    error = decode_error(b"[1]")
    assert (error.status, error.code) == (400, "invalid_type")


def test_the_last_event_of_a_failed_stream_has_the_same_body() -> None:
    error = bad_field("stop", "must not be empty")
    event = error_event(error)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert orjson.loads(event[6:]) == error.body() == orjson.loads(error.response().body)


def test_half_of_a_surrogate_pair_is_told_of() -> None:
    error = decode_error(rb'{"needed": 1, "user": "\ud83d"}')
    assert error.code == "invalid_json"
    assert error.message.endswith("or a string ends with half of a surrogate pair")
