"""One worker's grammars: compiled in separate threads, resumed, bounded, and refused clearly."""

import json
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config import ModelConfig
from serving.demo import demo_model_path
from serving.grammar import schema_rules
from serving.tokenizer import Tokenizer
from transfer import grammars as module
from transfer import wire
from transfer.errors import Code, RequestError
from transfer.grammars import Constraint, Grammars, Outcome

NOBODY = wire.WorkerRef("", 0, "")
SCHEMA = {
    "type": "object",
    "properties": {"port": {"enum": ["north", "south"]}, "boats": {"type": "boolean"}},
    "required": ["port", "boats"],
    "additionalProperties": False,
}


def regex(pattern: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]})


def submit(grammar: str, generated: tuple[int, ...] = ()) -> wire.Submit:
    params = wire.SamplingParams(max_new_tokens=9, grammar=grammar)
    data = wire.pack_i32([5, 6, 7, *generated])
    return wire.Submit(1, "", "", data, 3, params, 0.0, 0.0, NOBODY, NOBODY)


def begin(grammars: Grammars, asked: wire.Submit) -> Outcome:
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    grammars.begin(asked, lambda: True, outcomes.put)
    return outcomes.get(timeout=60)


def constraint(grammars: Grammars, grammar: str, generated: tuple[int, ...] = ()) -> Constraint:
    outcome = begin(grammars, submit(grammar, generated))
    assert isinstance(outcome, Constraint), outcome
    return outcome


def allowed(mask: np.ndarray) -> list[int]:
    """Token ids that a mask allows, by the definition of its words."""
    return [t for t in range(len(mask) * 32) if int(mask[t // 32]) >> (t % 32) & 1]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_dir(demo_model_path())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(demo_model_path())


@pytest.fixture(scope="module")
def grammars(config: ModelConfig) -> Iterator[Grammars]:
    opened = Grammars(demo_model_path(), config)
    yield opened
    opened.close()


def test_whatever_is_drawn_within_the_masks_is_a_text_of_the_grammar(
    grammars: Grammars, config: ModelConfig, tokenizer: Tokenizer
) -> None:
    grammar = json.dumps({"grammars": [schema_rules("a", SCHEMA)]})
    rng = np.random.default_rng(3)
    texts = set()
    for _ in range(30):
        place = constraint(grammars, grammar)
        mask, ids = place.first_mask, []
        while True:
            choices = allowed(mask)
            assert max(choices) < config.vocab_size
            ids.append(int(rng.choice(choices)))
            if ids[-1] in config.eos_token_ids:
                break
            assert place.take(ids[-1])
            (mask,) = grammars.masks([place])
        told = json.loads(tokenizer.decode(ids))
        assert set(told) == {"port", "boats"}
        texts.add((told["port"], told["boats"]))
    assert len(texts) == 4


def test_a_request_that_moved_goes_on_where_it_was(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("abab", add_special_tokens=False)
    first = constraint(grammars, regex("(ab)+c"))
    for token_id in ids:
        assert first.take(token_id)
    moved = constraint(grammars, regex("(ab)+c"), tuple(ids))
    (mask,) = grammars.masks([first])
    assert allowed(mask) == allowed(moved.first_mask)
    assert tokenizer.token_id("c") in allowed(mask)


def test_requests_with_one_grammar_are_each_at_their_own_place(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammar = regex("[a-c]{3}")
    ids = [tokenizer.token_id(letter) or 0 for letter in "abc"]
    places = [constraint(grammars, grammar) for _ in range(3)]
    for number, place in enumerate(places):
        assert all(place.take(token_id) for token_id in ids[:number])
    masks = grammars.masks(places)
    alone = [constraint(grammars, grammar, tuple(ids[:number])).first_mask for number in range(3)]
    assert [mask.tolist() for mask in masks] == [mask.tolist() for mask in alone]
    assert len(allowed(masks[0])) > len(allowed(masks[2])) == 3


def test_a_token_of_no_text_of_the_grammar_is_told_and_ends_its_masks(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    place, healthy = constraint(grammars, regex("abc")), constraint(grammars, regex("abc"))
    assert not place.take(tokenizer.token_id("c") or 0)
    masks = grammars.masks([place, healthy])
    assert not masks[0].any()
    assert masks[1].any()
    assert place.failure.code == Code.BAD_REQUEST


def test_a_grammar_may_be_as_deep_as_it_is_long(grammars: Grammars, tokenizer: Tokenizer) -> None:
    rules = "\n".join(f'a{number}: "b" a{number + 1}' for number in range(5000))
    deep = json.dumps({"grammars": [{"lark_grammar": f'start: a0\n{rules}\na5000: "b"\n'}]})
    ids = (tokenizer.token_id("b") or 0,)
    place = constraint(grammars, deep, ids)
    assert place.first_mask.tolist() == grammars.masks([place])[0].tolist()
    assert ids[0] in allowed(place.first_mask)


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        (submit("no grammar"), Code.BAD_REQUEST, "cannot be followed"),
        (submit(regex("(a")), Code.BAD_REQUEST, "cannot be followed"),
        (submit(regex("abc"), (0, 0)), Code.INTERNAL, "do not follow"),
    ],
)
def test_what_cannot_be_followed_fails_with_a_reason(
    grammars: Grammars, asked: wire.Submit, code: Code, words: str
) -> None:
    outcome = begin(grammars, asked)
    assert isinstance(outcome, RequestError)
    assert (outcome.code, words in outcome.message) == (code, True)


def test_a_request_that_ended_meanwhile_is_not_told(grammars: Grammars) -> None:
    outcomes: list[Any] = []
    grammars.begin(submit(regex("abc")), lambda: False, outcomes.append)
    for _ in range(2):  # one for each thread
        constraint(grammars, regex("abd"))
    assert not outcomes


def test_few_grammars_are_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILED", 3)
    for number in range(8):
        constraint(grammars, regex(f"a{{{number + 1}}}"))
        constraint(grammars, regex("kept"))
    assert len(grammars._compiled) == 3
    assert regex("kept") in grammars._compiled


def test_a_model_without_a_tokenizer_refuses_grammars_alone(
    tmp_path: Path, config: ModelConfig
) -> None:
    shutil.copy(demo_model_path() / "tokenizer.json", tmp_path)  # its config is missing
    grammars = Grammars(tmp_path, config)
    for _ in range(2):
        outcome = begin(grammars, submit(regex("abc")))
        assert isinstance(outcome, RequestError)
        assert outcome.code == Code.BAD_REQUEST
        assert "tokenizer" in outcome.message
    grammars.close()
