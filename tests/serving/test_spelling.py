"""Every chunk of a stream is what plain code spells, for any text, option, interval and cut."""

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk

from model.byte_level import spelled
from serving.generation import Tokens
from serving.prompt import Prompt
from serving.protocol import ChoiceAsk, Shown
from serving.tokenizer import Tokenizer
from tests.serving.plain import Asked, PlainAnswer, PromptToken, Reason, Token
from tests.serving.streaming import Streaming
from transfer import wire

SPECIAL = "<|special|>"
# What JSON, SSE or a decoder might stumble over, beside whatever hypothesis finds.
AWKWARD = [
    '"', "\\", "\\u0041", "\n", "\r\n", "\n\n", "\0", "\x1b", "\x7f", "\u0085", "\u2028", "\u2029",
    "\ufeff", "\ufffd", "\uffff", "\u200d", "é", "世", "😀", "data: ", "[DONE]", "</script>",
]  # fmt: skip
NO_TEXT = [b"\xff", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xed\xa0", b"\xf4\x90", b"\xf8\x88"]


def tokenizer_of(raw: Sequence[bytes]) -> Tokenizer:
    """A vocabulary of exactly these bytes; the last one is a special token."""
    vocab = {spelled(data): i for i, data in enumerate(raw[:-1])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens([tokenizers.AddedToken(SPECIAL, special=True)])
    return Tokenizer(backend, {}, {}, is_byte_level=True)


characters = st.one_of(
    st.sampled_from(AWKWARD), st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
)


@st.composite
def halves(draw: Any) -> list[bytes]:
    """A character in pieces, each a token."""
    data = draw(st.characters(min_codepoint=0x80, exclude_categories=["Cs"])).encode()
    cut = draw(st.integers(1, len(data) - 1))
    return [data[:cut], data[cut:]]


vocabularies = (
    st.lists(
        st.one_of(
            characters.map(lambda text: [text.encode()]),
            halves(),
            st.sampled_from(NO_TEXT).map(lambda data: [data]),
            st.binary(min_size=1, max_size=4).map(lambda data: [data]),
        ),
        min_size=1,
        max_size=8,
    )
    .map(lambda groups: list(dict.fromkeys(itertools.chain(*groups))))
    .filter(lambda raw: SPECIAL.encode() not in raw)
    .map(lambda raw: [*raw, SPECIAL.encode()])
)
logprobs = st.one_of(
    st.floats(-30, 0, width=32), st.sampled_from([float("-inf"), float("nan"), -1e30])
)
any_text = st.text(max_size=8)  # with lone surrogates: ids and prompts come from clients


@dataclass(frozen=True)
class Script:
    """What a client asks, and what the workers tell of it and when."""

    asked: Asked
    num_choices: int
    prompt: list[PromptToken]
    runs: list[tuple[int, list[Token]]]  # (choice, its next tokens)
    reasons: list[Reason]

    def play(self, listener: Any) -> None:
        """Each choice ends right after its last tokens; those without any at the very end."""
        last = {index: place for place, (index, _) in enumerate(self.runs)}
        for place, (index, run) in enumerate(self.runs):
            listener.take(index, run)
            if last[index] == place:
                listener.end(index, self.reasons[index])
        for index in range(self.num_choices):
            if index not in last:
                listener.end(index, self.reasons[index])


@st.composite
def scripts(draw: Any) -> Script:
    raw = draw(vocabularies)
    skips_special = draw(st.booleans())
    # With one id past the vocabulary, as padded models have.
    ids = st.integers(0, len(raw))
    num_logprobs, num_prompt = draw(st.integers(-1, 3)), draw(st.integers(0, 2))
    tops = st.lists(st.tuples(ids, logprobs), min_size=3, max_size=3, unique_by=lambda t: t[0])
    if len(raw) < 3:
        tops = st.just([])
    tokens = st.builds(Token, ids, logprobs, tops)
    prompt_ids = draw(st.lists(ids, min_size=1, max_size=4))
    is_chat, echo = draw(st.booleans()), draw(st.booleans())
    num_own = draw(st.integers(-1, num_prompt))
    has_prompt = num_own >= 0 or (echo and not is_chat and num_logprobs >= 0)
    asked = Asked(
        is_chat=is_chat,
        raw=raw,
        request_id=draw(any_text),
        model=draw(any_text),
        prompt_ids=prompt_ids,
        prompt_text=draw(any_text),
        interval=draw(st.integers(1, 7)),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt if has_prompt else -1,
        num_own_prompt_logprobs=num_own,
        echo=echo,
        token_ids=draw(st.booleans()),
        tokens_as_ids=draw(st.booleans()),
        include_usage=draw(st.booleans()),
        continuous_usage=draw(st.booleans()),
        skipped=frozenset({len(raw) - 1}) if skips_special else frozenset(),
    )
    finite = st.floats(-30, 0, width=32)
    prompt = [
        PromptToken(
            token_id,
            draw(finite) if place else None,
            [(i, draw(finite)) for i in range(num_prompt)] if place else [],
        )
        for place, token_id in enumerate(prompt_ids)
    ]
    num_choices = draw(st.integers(1, 3))
    run = st.tuples(st.integers(0, num_choices - 1), st.lists(tokens, min_size=1, max_size=5))
    runs = draw(st.lists(run, max_size=14))
    reason = st.sampled_from(["stop", "length", "abort"])
    reasons = draw(st.lists(reason, min_size=num_choices, max_size=num_choices))
    return Script(asked, num_choices, prompt if has_prompt else [], runs, reasons)


class Spliced:
    """The code under test, told the same as the plain one."""

    def __init__(self, script: Script) -> None:
        asked = script.asked
        shown = Shown(
            skip_special_tokens=bool(asked.skipped),
            num_logprobs=asked.num_logprobs,
            num_prompt_logprobs=asked.num_prompt_logprobs,
            num_own_prompt_logprobs=asked.num_own_prompt_logprobs,
            echo=asked.echo,
            token_ids=asked.token_ids,
            tokens_as_ids=asked.tokens_as_ids,
        )
        prompt = Prompt(list(asked.prompt_ids), asked.prompt_text)
        sampling = wire.SamplingParams(max_new_tokens=99)
        self._num_logprobs = asked.num_logprobs
        self.run = Streaming(
            [
                ChoiceAsk(index, 0, asked.request_id, prompt, sampling, shown)
                for index in range(script.num_choices)
            ],
            tokenizer=tokenizer_of(asked.raw),
            interval=asked.interval,
            is_chat=asked.is_chat,
            model_name=asked.model,
            request_id=asked.request_id,
            prompt_logprobs=_packed(script.prompt),
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
        )

    def take(self, index: int, run: Sequence[Token]) -> None:
        told = Tokens([token.token_id for token in run])
        if self._num_logprobs >= 0:
            told.logprobs = [token.logprob for token in run]
        if self._num_logprobs > 0:
            told.top = [token.top[: self._num_logprobs] or None for token in run]
        self.run.answer.sinks[index].on_tokens(told)

    def end(self, index: int, reason: Reason) -> None:
        self.run.answer.sinks[index].on_end(reason)


def _packed(prompt: Sequence[PromptToken]) -> wire.PromptLogprobs | None:
    """The prompt's logprobs as prefill tells them: every position but the first."""
    if len(prompt) < 2:
        return None
    told = prompt[1:]
    return wire.PromptLogprobs(
        1,
        wire.pack_i32([token.token_id for token in told]),
        wire.pack_f32([token.logprob or 0.0 for token in told]),
        wire.pack_i32([token_id for token in told for token_id, _ in token.top]),
        wire.pack_f32([value for token in told for _, value in token.top]),
    )


def spliced(script: Script) -> list[Any]:
    """The events that leave the server."""

    async def play() -> list[Any]:
        listener = Spliced(script)
        script.play(listener)
        events = listener.run.events
        await listener.run.bench.stream.closed
        data = b"".join(listener.run.bench.wire.bodies)
        # An event is one line to whoever reads lines, whatever its text.
        assert len(data.splitlines()) == 2 * len(events)
        return events

    return asyncio.run(play())


@given(scripts())
@settings(max_examples=120)
def test_every_chunk_is_what_plain_code_spells(script: Script) -> None:
    plain = PlainAnswer(script.asked, script.num_choices, script.prompt)
    script.play(plain)
    events = spliced(script)
    assert events == plain.events
    for event in events[:-1]:
        reasons = {choice["finish_reason"] for choice in event["choices"]}
        if script.asked.is_chat and "abort" not in reasons:
            ChatCompletionChunk.model_validate(event)


def text_of(events: Sequence[Any], index: int) -> str:
    """A choice's text as a client puts it together."""
    items = [e["choices"][0] for e in events if e != "[DONE]" and e["choices"]]
    found = [item for item in items if item["index"] == index]
    return "".join(item.get("text") or item.get("delta", {}).get("content") or "" for item in found)


@given(
    scripts().filter(lambda script: not script.asked.echo),
    st.integers(1, 64),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
@settings(max_examples=50)
def test_the_joined_text_is_the_same_for_every_interval_and_every_cut(
    script: Script, interval: int, cuts: list[int]
) -> None:
    other = dataclasses.replace(
        script,
        asked=dataclasses.replace(script.asked, interval=interval),
        runs=[
            (index, run)
            for index in range(script.num_choices)
            for run in cut_anew(tokens_of(script, index), cuts)
        ],
    )
    one, two = spliced(script), spliced(other)
    for index in range(script.num_choices):
        whole = script.asked.text_of([token.token_id for token in tokens_of(script, index)])
        assert text_of(one, index) == text_of(two, index) == whole


def tokens_of(script: Script, index: int) -> list[Token]:
    return [token for of, run in script.runs if of == index for token in run]


def cut_anew(tokens: list[Token], cuts: Sequence[int]) -> list[list[Token]]:
    """The same tokens in runs of these sizes, over and over."""
    runs: list[list[Token]] = []
    while tokens:
        size = cuts[len(runs) % len(cuts)]
        runs.append(tokens[:size])
        tokens = tokens[size:]
    return runs


@given(
    interval=st.integers(1, 9),
    runs=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    is_chat=st.booleans(),
)
@settings(max_examples=60)
def test_pieces_are_the_first_tokens_then_every_full_interval_then_the_rest(
    interval: int, runs: list[int], is_chat: bool
) -> None:
    want, unsent = [], 0
    for place, size in enumerate(runs):
        unsent += size
        if place == 0 or unsent >= interval:
            want.append(unsent)
            unsent = 0
    want += [unsent] if unsent else []
    asked = Asked(is_chat=is_chat, raw=[b"a", SPECIAL.encode()], interval=interval)
    told = [(0, [Token(0)] * size) for size in runs]
    events = spliced(Script(asked, 1, [], told, ["length"]))
    items = [event["choices"][0] for event in events[:-1]]
    texts = [item["delta"].get("content") if is_chat else item["text"] for item in items]
    assert [len(text) for text in texts if text] == want
