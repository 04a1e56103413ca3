"""serving/detokenizer against the recorded streams, and stop strings against plain searching."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serving.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopStrings, WindowDecoder
from serving.marked_text import TOKEN_SEAL
from serving.tokenizer import Tokenizer
from tests.serving.test_tokenizer import GOLDENS, sentencepiece_like

STREAMS = json.loads((Path(GOLDENS) / "streams.json").read_text(encoding="utf-8"))["streams"]
TOKENIZER = Tokenizer.from_dir(GOLDENS)


def recorded(stream, kind):
    found = stream[kind]
    return stream["keep_special"] if isinstance(found, str) else found


@pytest.mark.parametrize("kind", ["keep_special", "skip_special"])
def test_streams_show_the_recorded_pieces_at_once(kind):
    for case in STREAMS:
        want = recorded(case, kind)
        stream = TOKENIZER.stream(skip_special_tokens=kind == "skip_special")
        pieces = [stream.push([token_id]) for token_id in case["ids"]]
        assert pieces == want["pieces"], case["name"]
        assert stream.flush() == want["flush"], case["name"]
        assert stream.flush() == ""


def test_many_ids_at_once_show_what_they_show_one_by_one():
    for case in STREAMS:
        want = recorded(case, "skip_special")
        for cut in range(len(case["ids"]) + 1):
            stream = TOKENIZER.stream()
            first = stream.push(case["ids"][:cut])
            assert first == "".join(want["pieces"][:cut])
            rest = stream.push(case["ids"][cut:])
            assert first + rest + stream.flush() == want["text"]


ids_strategy = st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=40)


@settings(max_examples=200)
@given(ids=ids_strategy, skip=st.booleans())
def test_pieces_and_flush_join_into_the_decoding_of_any_ids(ids, skip):
    stream = TOKENIZER.stream(skip)
    text = "".join([stream.push([token_id]) for token_id in ids]) + stream.flush()
    assert text == TOKENIZER.decode(ids, skip)


@settings(max_examples=200)
@given(text=st.text(max_size=30))
def test_no_replacement_is_shown_for_a_character_on_its_way(text):
    stream = TOKENIZER.stream()
    ids = TOKENIZER.encode(text)
    pieces = [stream.push([token_id]) for token_id in ids]
    assert "".join(pieces).count(REPLACEMENT) == text.count(REPLACEMENT)
    assert stream.flush() == ""


# --- vocabularies without bytes -----------------------------------------------------------------

LLAMA = sentencepiece_like()


def window_stream(before=()):
    specials = {0, 1, 2}
    return IncrementalDetokenizer(
        WindowDecoder(
            decode=lambda ids: LLAMA.decode(ids, skip_special_tokens=True),
            adds_text=lambda token_id: token_id not in specials,
        ),
        before,
    )


@settings(max_examples=200)
@given(text=st.text(alphabet=" abthe.é世😀", max_size=20), place=st.integers(0, 20))
def test_a_window_shows_the_whole_text_with_special_tokens_anywhere(text, place):
    ids = LLAMA.encode(text).ids
    ids.insert(min(place, len(ids)), 2)
    stream = window_stream()
    pieces = [stream.push([token_id]) for token_id in ids]
    # A special token between the bytes of a character leaves it whole, as decoding does.
    assert "".join(pieces) + stream.flush() == LLAMA.decode(ids, skip_special_tokens=True)
    assert REPLACEMENT not in "".join(pieces)


@settings(max_examples=200)
@given(
    text=st.text(alphabet=" abthe.é世😀", max_size=30),
    cut=st.integers(0, 30),
    place=st.integers(0, 9),
)
def test_a_window_goes_on_from_the_prompt_and_drops_no_space(text, cut, place):
    ids = LLAMA.encode(text).ids
    before, after = ids[:cut], ids[cut:]
    prompt = LLAMA.decode(before)
    assume(not prompt.endswith(REPLACEMENT))
    stream = window_stream([*before[:place], 1, *before[place:]])
    shown = stream.push(after) + stream.flush()
    assert prompt + shown == LLAMA.decode(ids)


def test_half_a_character_at_the_end_of_a_prompt_is_not_waited_for():
    stream = window_stream([*LLAMA.encode("the").ids, 3 + 0xE4])
    assert stream.push([*LLAMA.encode("a the").ids]) == " a the"
    stream = window_stream([3 + 0xE4, 3 + 0xB8])
    assert stream.push([3 + 0x96]) + stream.flush() == REPLACEMENT


@pytest.mark.parametrize("prompt", ["a 世世世", "世é😀😀", "a 😀😀😀", "ééé世世"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_prompt_that_ends_in_many_bytes_leaves_the_space_after_it(prompt, cut):
    ids = LLAMA.encode(prompt).ids
    stream = window_stream(ids[: len(ids) - cut])
    assert stream.push(LLAMA.encode("the a").ids) == " the a"


def test_a_window_gives_up_on_bytes_that_never_become_a_character():
    stream = window_stream()
    lead = 3 + 0xE4
    pieces = [stream.push([lead]) for _ in range(40)]
    assert "".join(pieces[:20]).count(REPLACEMENT) >= 8
    assert "".join(pieces) + stream.flush() == REPLACEMENT * 40


def test_a_window_flushes_half_a_character():
    stream = window_stream()
    assert stream.push([3 + 0xE4, 3 + 0xB8]) == ""
    assert stream.flush() == REPLACEMENT * 2


# --- stop strings -------------------------------------------------------------------------------

letters = st.text(alphabet="ab", min_size=1, max_size=5)


def first_match(text, stops):
    """The plain search: (start, stop) of the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


@settings(max_examples=500)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    stops=st.lists(letters, max_size=3).map(tuple),
    include=st.booleans(),
)
def test_stop_strings_cut_where_the_plain_search_does_and_never_leak(pieces, stops, include):
    text = "".join(pieces)
    match = first_match(text, stops)
    judge = StopStrings(stops, include)
    shown, found = "", None
    for index, piece in enumerate(pieces):
        new, found_now = judge.feed(piece)
        shown += new
        if found_now is not None:
            found = found_now
        arrived = "".join(pieces[: index + 1])
        if found is None:
            held = arrived[len(shown) :]
            assert arrived.startswith(shown)
            # Held back is exactly the longest end of the text with which a stop may begin.
            ends = [arrived[-n:] for n in range(1, len(arrived) + 1)]
            starts = [end for end in ends if any(stop.startswith(end) for stop in stops)]
            assert held == max(starts, key=len, default="")
    if match is None:
        assert found is None
        assert shown + judge.flush() == text
    else:
        start, stop = match
        assert found == stop
        assert shown == text[: start + len(stop) if include else start]
        assert judge.flush() == ""
    assert judge.flush() == ""


@given(
    pieces=st.lists(st.text(alphabet=f"ab{TOKEN_SEAL}", max_size=5), max_size=8),
    stops=st.lists(letters, min_size=1, max_size=2).map(tuple),
    include=st.booleans(),
)
def test_stop_strings_pass_over_the_seals_of_markers(pieces, stops, include):
    judge, plain = StopStrings(stops, include), StopStrings(stops, include)
    shown, arrived = "", ""
    for piece in pieces:
        arrived += piece
        new, found = judge.feed(piece)
        shown += new
        expected = plain.feed(piece.replace(TOKEN_SEAL, ""))
        assert (new.replace(TOKEN_SEAL, ""), found) == expected
        assert arrived.startswith(shown)
    if found := judge.feed("")[1]:
        # A seal stays with the marker before it, unless the stop string ends there.
        assert include or not arrived.removeprefix(shown).startswith(TOKEN_SEAL)
    else:
        assert shown + judge.flush() == arrived


def test_text_after_a_match_is_dropped():
    judge = StopStrings(("END",), include=False)
    assert judge.feed("so E") == ("so ", None)
    assert judge.feed("ND and more") == ("", "END")
    assert judge.feed("still more") == ("", "END")
    assert judge.flush() == ""


def test_a_false_start_is_shown_with_the_text_that_ends_it():
    judge = StopStrings(("\n\nUser:",), include=False)
    assert judge.feed("a\n\nUse") == ("a", None)
    assert judge.feed("d") == ("\n\nUsed", None)


def test_without_stop_strings_nothing_is_held():
    judge = StopStrings((), include=False)
    assert judge.feed("anything") == ("anything", None)
    assert judge.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(("a", ""), include=False)
