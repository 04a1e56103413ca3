"""Numbers out of range are told by the bound that they break, and never in thousands of digits."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serving.errors import ApiError
from serving.protocol import Request
from tests.serving.test_protocol import chat, completion, generate

HUGE = 10**4299  # has the most digits that are read; Python prints no number with more
MOST = (1 << 31) - 1

Read = Callable[..., Awaitable[Request]]


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling_params": fields}


async def refused(read: Read, **fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        await read(**fields)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize("value", [MOST + 1, HUGE, HUGE * 9 + (HUGE - 1)])
@pytest.mark.parametrize(
    ("read", "name", "fields"),
    [
        (completion, "max_tokens", {}),
        (chat, "max_tokens", {}),
        (chat, "max_completion_tokens", {}),
        (generate, "max_new_tokens", None),
    ],
)
async def test_a_count_beyond_32_bits_is_refused_by_the_bound(
    read: Read, name: str, fields: dict[str, Any] | None, value: int
) -> None:
    given = sampling(**{name: value}) if fields is None else {name: value}
    got = value if value == MOST + 1 else "a number of more than 20 digits"
    message = await refused(read, **given)
    assert message.startswith(f"{name}: must be at least ")
    assert message.endswith(f" and at most 2147483647, got {got}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": MOST + 1}, "at least 0 and at most 2147483647, got 2147483648"),
        ({"min_tokens": -1}, "at least 0, got -1"),
        ({"temperature": 2147483648.0}, "at least 0 and at most 2147483647, got 2147483648.0"),
        ({"top_k": MOST + 1}, "-1 (all), or at least 0 and at most 2147483647, got 2147483648"),
        ({"top_k": -2}, "-1 (all), or at least 0, got -2"),
        ({"repetition_penalty": 0}, "at least 0.01, got 0.0"),
        ({"repetition_penalty": 1e30}, "at least 0.01 and at most 2147483647, got 1e+30"),
        ({"top_p": 0}, "above 0 and at most 1, got 0.0"),
        ({"max_tokens": 1 - HUGE}, "at least 1, got a number of more than 20 digits"),
        ({"n": HUGE}, "at least 1 and at most 128, got a number of more than 20 digits"),
        ({"routed_dp_rank": 1 - HUGE}, "at least 0, got a number of more than 20 digits"),
    ],
)
async def test_the_bound_that_is_broken_is_named(fields: dict[str, Any], message: str) -> None:
    (name,) = fields
    assert await refused(completion, **fields) == f"{name}: must be {message}"


async def test_a_token_id_of_thousands_of_digits_is_not_echoed() -> None:
    message = await refused(completion, prompt=[HUGE])
    assert message == (
        "prompt: token id a number of more than 20 digits is not in the vocabulary, 0 to 1023"
    )


async def test_the_widest_values_are_taken() -> None:
    (choice,) = (await completion(temperature=MOST, top_k=MOST)).choices
    assert (choice.sampling.temperature, choice.sampling.top_k) == (MOST, MOST)


async def test_more_tokens_at_least_than_the_default_gives_are_refused() -> None:
    message = await refused(completion, min_tokens=30)
    assert message == "min_tokens: 30 is more than 16, the default of max_tokens here"
    (choice,) = (await completion(min_tokens=16)).choices
    assert choice.sampling.min_tokens == choice.sampling.max_new_tokens == 16


async def test_more_tokens_at_least_than_the_context_has_left_are_refused() -> None:
    (choice,) = (await chat()).choices
    left = choice.sampling.max_new_tokens
    message = await refused(chat, min_tokens=left + 1)
    assert message == f"min_tokens: {left + 1} is more than {left}, the default of max_tokens here"
    (choice,) = (await chat(min_tokens=left)).choices
    assert choice.sampling.min_tokens == choice.sampling.max_new_tokens == left


async def test_generate_refuses_more_tokens_at_least_than_its_default_too() -> None:
    message = await refused(generate, **sampling(min_new_tokens=200))
    assert message == "min_new_tokens: 200 is more than 128, the default of max_new_tokens here"


async def test_a_prompt_that_is_only_scored_has_no_least_number_of_tokens() -> None:
    message = await refused(completion, min_tokens=1, max_tokens=0, echo=True)
    assert message == "min_tokens: 1 is more than the most tokens asked, 0"
