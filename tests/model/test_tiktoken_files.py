"""model/tiktoken_files: ids as tiktoken recorded them and by plain ranks, and broken files."""

import base64
import itertools
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tokenizer_files import read_tokenizer
from model.tokenizer_reading import TokenizerError

GOLDENS = Path(__file__).parents[1] / "goldens" / "tiktoken"
CONFIG = json.loads((GOLDENS / "tokenizer_config.json").read_text())
RECORDED = json.loads((GOLDENS / "encodings.json").read_text())
NUM_BASE, NUM_SPECIAL = RECORDED["num_base_tokens"], 256
BACKEND = read_tokenizer(GOLDENS).backend
BYTES = [bytes([byte]) for byte in range(256)]


@pytest.fixture
def folder(tmp_path):
    """A copy of the tokenizer that a test may break."""
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copyfile(GOLDENS / name, tmp_path / name)
    return tmp_path


def lines_of(tokens):
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]


def encode(backend, text):
    return backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("case", RECORDED["encodings"], ids=lambda case: ascii(case["text"][:20]))
def test_a_text_has_the_ids_that_tiktoken_recorded(case):
    assert encode(BACKEND, case["text"]) == case["ids"]
    assert BACKEND.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_nothing_is_put_around_a_text():
    assert BACKEND.encode("a").ids == BACKEND.encode("a", add_special_tokens=False).ids


@settings(max_examples=300)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back(text):
    assert BACKEND.decode(encode(BACKEND, text), skip_special_tokens=False) == text


def joined_by_rank(text, ranks):
    """Ids by tiktoken's definition: join the pair of lowest rank first, the leftmost if several."""
    if text in ranks:
        return [ranks[text]]
    parts = list(text)
    while pairs := [
        (ranks[left + right], at)
        for at, (left, right) in enumerate(itertools.pairwise(parts))
        if left + right in ranks
    ]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


tokens_of_two_letters = st.lists(st.text("ab", min_size=2, max_size=6), unique=True, max_size=12)


@settings(max_examples=300)
@given(more=tokens_of_two_letters, texts=st.lists(st.text("ab", min_size=1, max_size=16)))
def test_merges_do_what_ranks_say_whatever_the_vocabulary(more, texts):
    """Also if a token precedes its parts, or cannot be made from other tokens."""
    ranks = {token: 256 + place for place, token in enumerate(more)}
    ranks |= {letter: ord(letter) for letter in "ab"}
    config = {"tokenizer_class": "TikTokenTokenizer"}
    with tempfile.TemporaryDirectory() as name:
        tokens = [*BYTES, *(token.encode() for token in more)]
        Path(name, "tiktoken.model").write_bytes(b"\n".join(lines_of(tokens)))
        Path(name, "tokenizer_config.json").write_text(json.dumps(config))
        backend = read_tokenizer(Path(name)).backend
    for text in texts:
        assert encode(backend, text) == joined_by_rank(text, ranks)


@pytest.mark.parametrize("run", ["a", "A", " ", "\n", "中", "の", "!", "7", "aB", " \n", "e\u0301"])
def test_a_long_run_of_anything_takes_no_more_than_its_length(run):
    text = run * (200_000 // len(run))
    assert BACKEND.decode(encode(BACKEND, text)) == text


# --- special tokens -----------------------------------------------------------------------------


def test_every_special_id_has_its_name_or_that_of_a_reserved_one():
    named = {int(i): token for i, token in CONFIG["added_tokens_decoder"].items()}
    added = BACKEND.get_added_tokens_decoder()
    assert sorted(added) == [*range(NUM_BASE, NUM_BASE + NUM_SPECIAL)]
    for token_id, token in added.items():
        if token_id in named:
            assert token.content == named[token_id]["content"]
            assert token.special == named[token_id]["special"]
        else:
            assert token.content == f"<|reserved_token_{token_id}|>"
            assert token.special
    assert BACKEND.get_vocab_size() == RECORDED["vocab_size"]


@pytest.mark.parametrize("listed", [None, {}])
def test_a_tokenizer_may_name_none_of_its_special_tokens(folder, listed):
    set_config(folder, added_tokens_decoder=listed)
    backend = read_tokenizer(folder).backend
    assert backend.get_vocab_size() == RECORDED["vocab_size"]
    assert backend.token_to_id(f"<|reserved_token_{NUM_BASE}|>") == NUM_BASE


def test_the_two_ids_that_no_checkpoint_has_rows_for_are_never_given_out(folder):
    past = NUM_BASE + NUM_SPECIAL
    listed = {str(past): {"content": "<past>"}, str(past + 1): {"content": "<further>"}}
    set_config(folder, added_tokens_decoder=CONFIG["added_tokens_decoder"] | listed)
    backend = read_tokenizer(folder).backend
    assert backend.get_vocab_size() == past
    assert max(encode(backend, "a<past>b<further>")) < NUM_BASE


# --- files that cannot be read ------------------------------------------------------------------


def set_config(folder, **changes):
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | changes))


def refusal(folder):
    with pytest.raises(TokenizerError) as refused:
        read_tokenizer(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


FULL = lines_of([*BYTES, b"ab", b"cd"])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([*FULL[:-1], FULL[-1].replace(b"=", b"")], "line 258: expected a token in base64"),
        ([*FULL, b"YWJj"], "line 259: expected a token in base64 and its rank, got b'YWJj'"),
        ([*FULL, b"YWJj 258 9"], "line 259: expected a token"),
        ([*FULL, b"YW!j 258"], "line 259: expected a token"),
        ([*FULL, b"YWJj x"], "line 259: expected a token"),
        ([*FULL, b"\xff\xfe 258"], "line 259: expected a token"),
        ([*FULL, b"= 258"], "line 259: expected a token"),
        ([*FULL, b"YWJj 259"], "259 tokens, but none of rank 258; expected every rank below"),
        ([*FULL, b"YWJj -1"], "259 tokens, but none of rank 258"),
        ([*FULL[:5], *FULL[6:]], "257 tokens, but none of rank 5"),
        ([*FULL, b"YWJj 257"], "line 259: rank 257 for the second time"),
        ([*FULL, FULL[-1]], "line 259: rank 257 for the second time"),
        ([*FULL, b"YWI= 258"], "line 259: token b'ab' for the second time"),
        (lines_of([*BYTES[:65], b"ab", *BYTES[66:]]), "no token for 1 of the 256 bytes"),
        ([], "no token for 256 of the 256 bytes, the first 0x00"),
        ([b'{"model": {}}'], "line 1: expected a token"),
    ],
)
def test_a_vocabulary_that_is_not_whole_is_refused_with_its_line(folder, lines, said):
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    found = refusal(folder)
    assert str(folder / "tiktoken.model") in found
    assert said in found


def test_a_vocabulary_that_cannot_be_opened_is_refused(folder):
    (folder / "tiktoken.model").unlink()
    (folder / "tiktoken.model").mkdir()
    assert "cannot read" in refusal(folder)


@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast", "QWenTokenizer"])
def test_a_class_that_cuts_texts_in_a_way_of_its_own_is_refused(folder, name):
    set_config(folder, tokenizer_class=name)
    assert f"tokenizer_class is {name!r}; accepted beside tiktoken.model" in refusal(folder)


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ({str(NUM_BASE - 1): {"content": "<new>"}}, f"has {NUM_BASE - 1}; expected {NUM_BASE} to"),
        ({str(NUM_BASE + 258): {"content": "<new>"}}, f"to {NUM_BASE + 255}, behind the"),
        ({"-1": {"content": "<new>"}}, "has -1; expected"),
        ({"x": {"content": "<new>"}}, "expected tokens by their ids"),
        ({str(NUM_BASE): {}}, "expected tokens by their ids"),
        (["<new>"], "expected tokens by their ids"),
        (
            {str(NUM_BASE): {"content": "<a>"}, str(NUM_BASE + 1): {"content": "<a>"}},
            f"'<a>' as {NUM_BASE + 1}, but it is {NUM_BASE}",
        ),
        ({str(NUM_BASE): {"content": "ferry"}}, f"'ferry' as {NUM_BASE}, but it is"),
        ({str(NUM_BASE): {"content": ""}}, f"'' as {NUM_BASE}, but it is None"),
    ],
)
def test_special_tokens_that_cannot_be_taken_are_refused(folder, listed, said):
    set_config(folder, added_tokens_decoder=listed)
    found = refusal(folder)
    assert "tokenizer_config.json: added_tokens_decoder" in found
    assert said in found


def test_lines_may_be_empty_or_end_as_on_windows(folder):
    file = folder / "tiktoken.model"
    file.write_bytes(b"\n" + file.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\n")
    assert read_tokenizer(folder).backend.to_str() == BACKEND.to_str()


def test_a_tokenizer_json_beside_it_comes_first(folder):
    shutil.copyfile(GOLDENS.parent / "tokenizer" / "tokenizer.json", folder / "tokenizer.json")
    set_config(folder, added_tokens_decoder={})
    files = read_tokenizer(folder)
    assert files.backend.get_vocab_size() == 1024
    assert not files.sorts_tools
