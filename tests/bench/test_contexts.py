"""Rows of mixed context lengths that together fill the pages there are."""

from dataclasses import replace

from bench.contexts import decode_contexts, mixed_contexts
from bench.shapes import SHAPES


def test_rows_of_all_lengths_fit_into_the_pages_there_are():
    assert mixed_contexts(64, 4352)[::15] == [1, 131072]
    for num_pages in (16, 100, 1000):
        rows = mixed_contexts(64, num_pages)
        assert rows == sorted(rows)
        assert sum(-(-(tokens + 1) // 64) for tokens in rows) <= num_pages
        assert mixed_contexts(64, num_pages, 2)[-1] == 2
    assert mixed_contexts(64, 3) == []


def test_attention_is_measured_with_steps_of_the_shape_longer_rows_and_all_lengths():
    shape = SHAPES["qwen3-30b-a3b"]
    found = decode_contexts(shape, 4352)
    assert [*found] == ["x1", "x16", "x64", "x256", "x64 of 4096", "x16 of 1 to 131072"]
    assert {len(rows) for rows in found.values()} == {1, 16, 64, 256}
    assert [*decode_contexts(replace(shape, slots=(1,)), 17)] == ["x1", "x16 of 1 to 64"]
