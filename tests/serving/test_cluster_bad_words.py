"""bad_words on a real system: whole, streamed, within a form, and when a worker dies meanwhile."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from serving.demo import demo_model_path
from serving.tokenizer import Tokenizer
from tests.cluster import Cluster, up, wait_until
from tests.served import CROWD, TEXTS

TOKENS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with up(*CROWD) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(demo_model_path())


def answered(cluster: Cluster, **more: Any) -> list[list[int]]:
    """The ids of each choice."""
    ask = {"prompt": TEXTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = cluster.post("/v1/completions", {**ask, "return_token_ids": True, **more})
    return [choice["token_ids"] for choice in answer["choices"]]


def streamed(cluster: Cluster, began: Callable[[], object], **more: Any) -> list[int]:
    """The ids of a streamed answer. began: called at its first event."""
    ask = {"prompt": TEXTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    ids: list[int] = []
    for event in cluster.events("/v1/completions", **{**ask, "return_token_ids": True, **more}):
        if not ids:
            began()
        ids += [i for choice in event["choices"] for i in choice["token_ids"]]
    return ids


def spans(ids: list[int], length: int) -> set[tuple[int, ...]]:
    return {tuple(ids[at : at + length]) for at in range(len(ids) - length + 1)}


def word_in(tokenizer: Tokenizer, ids: list[int], start: int, length: int) -> tuple[int, str]:
    """Where some tokens from `start` on are, and their text, of which one gets the same tokens."""
    for at in range(start, len(ids) - length):
        text = tokenizer.decode(ids[at : at + length])
        if tokenizer.encode(text, add_special_tokens=False) == ids[at : at + length]:
            return at, text
    raise AssertionError("no tokens are their text's own")


def test_a_sequence_of_the_answer_is_not_in_it_once_it_is_forbidden(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    (free,) = answered(cluster)
    for start, length in ((0, 1), (12, 2), (20, 3)):
        at, word = word_in(tokenizer, free, start, length)
        assert start or at == 0, "prefill draws the first token"
        (held,) = answered(cluster, bad_words=[word])
        first = min(i for i in range(TOKENS) if free[i : i + length] == free[at : at + length])
        assert held[: first + length - 1] == free[: first + length - 1]
        assert held[first + length - 1] != free[first + length - 1]
        assert tuple(free[at : at + length]) not in spans(held, length)
        assert len(held) == TOKENS
        assert streamed(cluster, lambda: None, bad_words=[word]) == held
    assert answered(cluster) == [free]
    for worker in cluster.settled():
        assert worker["compiles_after_ready"] == 0


def test_what_the_prompt_ends_with_does_not_count(cluster: Cluster, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(TEXTS[0])
    (free,) = answered(cluster, prompt=prompt)
    word = tokenizer.decode([prompt[-1], free[0]])
    assert tokenizer.encode(word, add_special_tokens=False) == [prompt[-1], free[0]]
    (held,) = answered(cluster, prompt=prompt, bad_words=[word])
    assert held[0] == free[0]


async def test_every_choice_of_the_official_client_is_without_the_words(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    letters = "etaoinsh"
    words = [*letters, "the"]
    ask: Any = {"model": cluster.model, "max_tokens": 30, "n": 3, "seed": 5, "logprobs": True}
    ask |= {"messages": [{"role": "user", "content": "When does the ferry leave?"}]}
    more = {"bad_words": words, "return_token_ids": True, "min_tokens": 30}
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        free = await client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
        held = await client.chat.completions.create(**ask, extra_body=more)
    singles = {ids for word in words for ids in tokenizer.encode(f" {word}")[-1:]}
    singles |= {tokenizer.encode(letter)[0] for letter in letters}
    assert any(singles & {*(c.model_extra or {})["token_ids"]} for c in free.choices)
    for choice in held.choices:
        assert not singles & {*(choice.model_extra or {})["token_ids"]}
        assert choice.logprobs is not None
        assert len(choice.logprobs.content or ()) == 30


def test_a_form_and_words_hold_together(cluster: Cluster, tokenizer: Tokenizer) -> None:
    form = {"regex": "(ferry|pilot|harbour)( (ferry|pilot|harbour)){7}", "ignore_eos": False}
    asked = {"temperature": 1.0, "seed": 3, **form}
    free, held = (answered(cluster, **asked, **more)[0] for more in ({}, {"bad_words": ["pilot"]}))
    assert "pilot" in tokenizer.decode(free)
    said = tokenizer.decode(held).split()
    assert len(said) == 8
    assert {*said} <= {"ferry", "pilot", "harbour"}
    for word in ("pilot", " pilot"):
        ids = tokenizer.encode(word, add_special_tokens=False)
        assert tuple(ids) not in spans(held, len(ids))


def test_limits_that_leave_nothing_to_draw_end_the_request_by_name(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    (free,) = answered(cluster)
    allowed = sorted({i for letter in "abc" for i in tokenizer.encode(letter)})
    pairs = [a + b for a in "abc" for b in "abc"]
    body = {"prompt": TEXTS[0], "max_tokens": 9, "allowed_token_ids": allowed}
    for words in (["a", "b", "c"], pairs):
        reply = cluster.http.post("/v1/completions", json={**body, "bad_words": words})
        assert reply.status_code == 400, reply.text
        assert "leave none to draw" in reply.json()["error"]["message"]
    assert answered(cluster) == [free]
    assert all(worker["pages_held"] == 0 for worker in cluster.settled())


def test_a_killed_worker_is_a_pause_and_words_stay_forbidden(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    """Prefill goes on with the next token, which what decode drew before it may forbid."""
    more: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 200}
    (free,) = answered(cluster, **more)
    words = [word_in(tokenizer, free, at, 2)[1] for at in range(5, 190, 6)]
    (want,) = answered(cluster, **more, bad_words=words)
    assert want != free
    doomed = cluster.children()["decode"]
    assert streamed(cluster, doomed.kill, **more, bad_words=words) == want
    wait_until(lambda: len(cluster.settled()) == 2, 120)
