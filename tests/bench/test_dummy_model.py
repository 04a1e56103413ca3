"""Model folders without weights: read back, they have the shape's sizes; every id has a text."""

from pathlib import Path

import pytest

from bench.dummy_model import EOS, WRITABLE, flags_of, write_model
from bench.shapes import SHAPES
from model.config import ModelConfig
from model.sharding import Dims
from model.weights import narrow_parameters
from serving.tokenizer import Tokenizer


@pytest.mark.parametrize("name", WRITABLE)
def test_a_folder_is_read_back_as_its_shape_with_a_text_for_every_id(
    name: str, tmp_path: Path
) -> None:
    shape = SHAPES[name]
    write_model(shape, tmp_path)
    assert ModelConfig.from_dir(tmp_path) == shape.cfg
    tokenizer, size = Tokenizer.from_dir(tmp_path), shape.cfg.vocab_size
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (size, size - 1)
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
    assert all(texts)
    assert texts[-1] == EOS
    assert len(set(texts[256:])) == size - 256


def test_text_goes_through_the_tokenizer_and_back_and_words_are_tokens(tmp_path: Path) -> None:
    write_model(SHAPES["demo"], tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    text = "A ferry, über Nacht: abc 7 渡"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("abc")) == 1


def test_the_models_that_are_measured_are_among_them() -> None:
    wanted = {"demo", "demo-moe", "demo-moe-fp8", "qwen3-8b", "qwen3-30b-a3b"}
    assert wanted <= set(WRITABLE)


def test_codes_are_asked_for_where_the_shape_has_them() -> None:
    coded, plain = (flags_of(SHAPES[f"demo-moe{end}"], Path("f")) for end in ("-fp8", ""))
    assert coded == [*plain, "--quantization", "fp8"]
    assert flags_of(SHAPES["middle-moe-int8"], Path("f"))[-1] == "int8"


@pytest.mark.parametrize("name", ["middle", "middle-bfloat16", "middle-moe-bfloat16"])
def test_a_processor_that_serves_the_folder_holds_the_matrices_as_the_shape_does(
    name: str, tmp_path: Path
) -> None:
    shape = SHAPES[name]
    write_model(shape, tmp_path)
    dims = Dims(ModelConfig.from_dir(tmp_path), 1, 1)
    assert narrow_parameters(tmp_path, dims, dummy=True) == shape.narrow


def test_a_shape_of_another_architecture_is_refused_with_those_accepted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shape gpt-oss-20b; accepted: demo, demo-moe, "):
        write_model(SHAPES["gpt-oss-20b"], tmp_path)
