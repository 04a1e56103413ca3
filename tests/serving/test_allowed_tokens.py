"""allowed_token_ids: what is read of them, and what is refused."""

from typing import Any

import numpy as np
import pytest

from serving.errors import ApiError
from tests.serving.live import EOS
from tests.serving.test_protocol import chat, completion, generate
from tests.serving.test_refused_fields import responses


async def of_generate(**fields: Any) -> Any:
    renamed = {"min_tokens": "min_new_tokens"}
    return await generate(sampling_params={renamed.get(k, k): v for k, v in fields.items()})


READS = [completion, chat, responses, of_generate]


@pytest.mark.parametrize("read", READS)
async def test_the_ids_arrive_as_bits_of_a_mask(read: Any) -> None:
    for ids in ([0], [7, 1023, 7, 32], list(range(1024))):
        (choice,) = (await read(allowed_token_ids=ids)).choices
        mask = np.frombuffer(choice.sampling.allowed, "<u4")
        assert len(mask) == 1024 // 32
        found = [i for i in range(1024) if mask[i // 32] >> np.uint32(i % 32) & 1]
        assert found == sorted(set(ids))
    assert (await read()).choices[0].sampling.allowed == b""


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "must have at least one token"),
        ([5, 1024], "token id 1024 is not in the vocabulary, 0 to 1023"),
        ([-1], "token id -1 is not in the vocabulary, 0 to 1023"),
        ([1 << 80], "token id a number of more than 20 digits is not in the vocabulary"),
        ([5] * 1025, "at most 1024, got 1025"),
        (["a"], "Expected"),
        (5, "Expected"),
    ],
)
async def test_ids_that_no_answer_can_be_made_of_are_refused(
    read: Any, ids: Any, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        await read(allowed_token_ids=ids)
    assert (caught.value.status, message in caught.value.message) == (400, True)
    assert "allowed_token_ids" in caught.value.message


@pytest.mark.parametrize("read", READS)
async def test_a_form_says_by_itself_which_tokens_may_follow(read: Any) -> None:
    with pytest.raises(ApiError, match="allowed_token_ids: cannot go with regex") as caught:
        await read(allowed_token_ids=[5], regex="a+")
    assert (caught.value.status, caught.value.param) == (400, "allowed_token_ids")


@pytest.mark.parametrize("read", READS)
async def test_something_is_left_to_draw_before_the_text_may_end(read: Any) -> None:
    named = {"min_tokens": 2, "stop_token_ids": [9]}
    for ids in ([EOS], [EOS, 9]):
        await read(allowed_token_ids=ids, stop_token_ids=[9])
        with pytest.raises(ApiError, match="only ids that end the text") as caught:
            await read(allowed_token_ids=ids, **named)
        assert (caught.value.status, caught.value.param) == (400, "allowed_token_ids")
    await read(allowed_token_ids=[EOS, 9, 10], **named)
    await read(allowed_token_ids=[EOS], ignore_eos=True, min_tokens=2)
