"""A long prompt's logprobs are spelled beside the loop; what comes meanwhile keeps its order."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from serving import stream
from serving.choice import Choice
from serving.errors import ApiError
from serving.generation import Tokens
from serving.openai_answers import completion_answer
from serving.prompt import Prompt
from serving.protocol import ChoiceAsk, Request
from serving.sglang_api import GenerateAnswer
from serving.stream import Spelling
from serving.tokenizer import Tokenizer
from tests.recording import until
from tests.serving.live import LETTER_A
from tests.serving.streaming import LETTERS, TOKENIZER, Streaming, asked
from transfer import wire
from transfer.clock import ManualClock
from transfer.errors import BadMessage, Code, RequestError

PROMPT = [LETTER_A, 1, 2]
TOLD = wire.PromptLogprobs(
    1,
    np.asarray(PROMPT[1:], "<i4").tobytes(),
    np.asarray([-0.5, np.nan], "<f4").tobytes(),
    np.asarray([1, 3, 4, 2], "<i4").tobytes(),
    np.asarray([-0.5, -1.5, -0.25, -np.inf], "<f4").tobytes(),
)


class Held:
    """Openings that wait for `free`, each in a thread of its own."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.begun = threading.Event()

    def opening(self, spell: Callable[[Choice], bytes]) -> Callable[[Choice], bytes]:
        def held(choice: Choice) -> bytes:
            assert threading.current_thread() is not threading.main_thread()
            self.begun.set()
            assert self.free.wait(20)
            return spell(choice)

        return held


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(stream, "INLINE_LOGPROBS", 0)
    made = Held()
    yield made
    made.free.set()


def ask(index: int = 0, **shown: Any) -> ChoiceAsk:
    more = {"echo": True, "num_logprobs": 1, "num_prompt_logprobs": 1, **shown}
    return asked(index, prompt=Prompt(PROMPT, "abc"), **more)


def run_of(
    monkeypatch: pytest.MonkeyPatch, held: Held, num_choices: int = 1, **shown: Any
) -> Streaming:
    """A completion whose openings are held."""

    def spell(*args: Any) -> Spelling:
        answer = completion_answer(*args)
        monkeypatch.setattr(answer, "opening", held.opening(answer.opening))
        return answer

    asks = [ask(index, **shown) for index in range(num_choices)]
    return Streaming(asks, spell=spell, prompt_logprobs=TOLD)


async def spelled(sink: stream.StreamedChoice, held: Held) -> None:
    """Free the openings, and wait until this one is spelled."""
    held.free.set()
    opener = sink._opener
    assert opener is not None
    await opener


def tell(run: Streaming, count: int) -> None:
    for letter in LETTERS[:count]:
        run.answer.sinks[0].on_tokens(Tokens([letter], [-1.0], [[(letter, -1.0)]]))


async def test_tokens_and_the_end_wait_for_the_opening_and_follow_it(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as few:
        few.setattr(stream, "INLINE_LOGPROBS", 1 << 12)
        at_once = Streaming([ask()], is_chat=False, prompt_logprobs=TOLD)
    tell(at_once, 3)
    at_once.answer.sinks[0].on_end("length")
    assert at_once.events[-1] == "[DONE]"

    run = run_of(monkeypatch, held)
    tell(run, 3)
    run.answer.sinks[0].on_end("length")
    await until(held.begun.is_set)
    assert run.events == []
    held.free.set()
    await until(lambda: bool(run.events))
    await run.bench.stream.closed
    assert run.events == at_once.events
    first = run.events[0]["choices"][0]["logprobs"]
    assert first["token_logprobs"] == [None, -0.5, -9999.0]
    assert [len(top or ()) for top in first["top_logprobs"]] == [0, 1, 2]


async def test_a_stop_string_that_was_told_meanwhile_ends_the_choice_once(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(monkeypatch, held, stops=("b",))
    tell(run, 3)
    run.answer.sinks[0].on_end("length")
    held.free.set()
    await until(lambda: bool(run.events))
    await run.bench.stream.closed
    assert run.texts()[1:] == ["a"]
    reasons = [event["choices"][0]["finish_reason"] for event in run.events[:-1]]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert run.events[-1] == "[DONE]"
    assert [reason for _, reason in run.aborted] == ["stop"]


async def test_an_error_waits_for_no_opening_and_is_a_status(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(monkeypatch, held)
    sink = run.answer.sinks[0]
    tell(run, 2)
    sink.on_error(RequestError(Code.PEER_LOST, "both workers are gone"))
    with pytest.raises(ApiError, match="both workers are gone"):
        await run.bench.stream.closed
    await spelled(sink, held)
    assert run.events == []


async def test_an_opening_alone_does_not_begin_the_stream(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(monkeypatch, held)
    sink = run.answer.sinks[0]
    await spelled(sink, held)
    assert run.events == []
    tell(run, 1)
    assert run.texts() == ["abc", "a"]


async def test_each_of_several_choices_waits_for_its_own_opening(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(monkeypatch, held, num_choices=2)
    tell(run, 2)
    run.answer.sinks[1].on_end("length")
    run.answer.sinks[0].on_end("length")
    held.free.set()
    await until(lambda: bool(run.events) and run.events[-1] == "[DONE]")
    assert [run.texts(0), run.texts(1)] == [["abc", "a", "b"], ["abc"]]
    reasons = [event["choices"][0]["finish_reason"] for event in run.events[:-1]]
    assert [reason for reason in reasons if reason] == ["length"] * 2


async def test_events_that_repeat_the_prompt_wait_for_it_as_well(held: Held) -> None:
    def spell(_: Request, tokenizer: Tokenizer, *__: Any) -> Spelling:
        return GenerateAnswer(tokenizer, False, 0.0, ManualClock())

    run = Streaming([ask(token_ids=True)], spell=spell, prompt_logprobs=TOLD)
    tell(run, 1)
    assert run.events == []
    await until(lambda: bool(run.events))
    (event,) = run.events
    told = event["meta_info"]["input_token_logprobs"]
    assert [logprob for logprob, *_ in told] == [None, -0.5, -9999.0]


async def test_a_client_that_left_meanwhile_is_written_nothing(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(monkeypatch, held)
    sink = run.answer.sinks[0]
    tell(run, 1)
    run.answer.close()
    await spelled(sink, held)
    assert run.events == []


async def test_an_opening_that_cannot_be_spelled_ends_the_stream(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(choice: Choice) -> bytes:
        raise ValueError("no text")

    run = Streaming([], is_chat=False)
    monkeypatch.setattr(run.spelling, "opening", fails)
    choice = Choice(ask(), TOKENIZER)
    stream.StreamedChoice(choice, run.answer).on_prefilled(0, TOLD)
    with pytest.raises(ValueError, match="no text"):
        await run.bench.stream.closed


async def test_a_prompt_of_few_logprobs_is_spelled_at_once() -> None:
    run = Streaming([ask()], is_chat=False, prompt_logprobs=TOLD)
    tell(run, 1)
    assert run.texts() == ["abc", "a"]


def test_arrays_that_disagree_are_refused_where_they_come() -> None:
    choice = Choice(ask(), TOKENIZER)
    tops = np.zeros(3, "<f4").tobytes()
    wrong = wire.PromptLogprobs(1, TOLD.token_ids, TOLD.logprobs, tops, tops)
    with pytest.raises(BadMessage, match="2 values, 3 top ids"):
        choice.prefilled(0, wrong)
