"""The table of tiles that comes with the code, and how a line of it is found."""

import math
from pathlib import Path

import pytest

from model.kernels.moe import tuned
from model.kernels.tiles import Tiles

LINES = tuned.read()


def test_the_table_has_a_line_for_any_number_of_rows_of_every_kind() -> None:
    for kind in ("numbers", "fp8", "int8"):
        sizes = {line.sizes for line in LINES if line.weights == kind}
        assert (kind, 2048, 768) in sizes
        for own in sizes:
            assert max(line.rows for line in LINES if line.sizes == own) == math.inf


def test_both_products_of_a_line_have_as_many_rows() -> None:
    assert all(line.first.rows == line.second.rows for line in LINES)


def test_codes_are_added_up_in_the_order_in_which_numbers_are() -> None:
    """So that experts of codes give, bit for bit, what their weights do."""
    for line in LINES:
        for even in (1.0, 2.0, 8.0, 9.0, 24.0, 25.0, 96.0, 97.0, 256.0):
            codes = tuned.tiles_for(LINES, line.sizes, even)
            numbers = tuned.tiles_for(LINES, (tuned.NUMBERS, *line.sizes[1:]), even)
            for own, other in zip(codes, numbers, strict=True):
                assert own.inputs == other.inputs, (line.sizes, even)


def test_a_line_is_that_of_the_sizes_or_of_the_first_that_were_measured() -> None:
    def line(hidden: int, rows: float, tile_rows: int) -> tuned.Tuned:
        cut = Tiles(tile_rows, 64, 64)
        return tuned.Tuned("numbers", hidden, 64, rows, cut, cut, "")

    lines = [line(64, 8.0, 16), line(64, math.inf, 64), line(128, math.inf, 128)]
    for hidden, even, rows in ((64, 8.0, 16), (64, 9.0, 64), (128, 1.0, 128), (256, 2.0, 16)):
        first, second = tuned.tiles_for(lines, ("numbers", hidden, 64), even)
        assert first.rows == second.rows == rows


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    tuned.write(reversed(LINES), path)
    assert {*tuned.read(path)} == {*LINES}
    assert path.read_text().count("\n") == len(LINES) + 2


def test_a_line_without_its_tiles_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text('[{"weights": "numbers", "hidden": 64, "width": 64, "rows": 8}]')
    with pytest.raises(TypeError, match="first"):
        tuned.read(path)
