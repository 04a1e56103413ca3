"""Slots with a grammar, and what happens to them when the grammar cannot continue."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

from decode.constrained import ConstrainedSlots
from model.config import ModelConfig
from serving.demo import demo_model_path
from serving.grammar import schema_rules
from serving.tokenizer import Tokenizer
from tests.transfer.test_grammars import constraint
from transfer.errors import Code
from transfer.grammars import Grammars

NAMES = [f"p{number}" for number in range(3000)]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(demo_model_path(), ModelConfig.from_dir(demo_model_path()))
    yield grammars
    grammars.close()


def test_a_limit_that_a_drawn_token_meets_is_the_fault_of_the_grammar(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {name: {} for name in NAMES}}
    wide = json.dumps({"grammars": [schema_rules("json_schema", schema)]})
    brace = Tokenizer.from_dir(demo_model_path()).token_id("{") or 0
    slots = ConstrainedSlots()
    at_first = slots.start(3, constraint(grammars, wide), brace)
    slots.start(4, constraint(grammars, wide), brace)
    [(place, later)] = slots.take(np.array([2, 4]), np.array([brace, brace]))
    assert place == 1
    for error in (at_first, later):
        assert error is not None
        assert error.code == Code.BAD_REQUEST
        assert "the grammar cannot be followed" in error.message
        assert "\n" not in error.message
