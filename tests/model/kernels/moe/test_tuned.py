"""The table of tiles that comes with the code, and how the line for some sizes is found."""

import math
from pathlib import Path

import pytest

from model.kernels.moe import tuned
from model.kernels.tiles import Tiles

LINES, KINDS = tuned.read(), ("numbers", "fp8", "int8")


def test_the_table_has_a_line_for_any_number_of_rows_of_every_kind() -> None:
    for kind in KINDS:
        own = [line.rows for line in LINES if line.sizes == (kind, *tuned.MEASURED_FIRST)]
        assert max(own) == math.inf


def test_both_products_of_a_line_have_as_many_rows() -> None:
    assert all(line.first.rows == line.second.rows for line in LINES)


def test_codes_are_added_up_in_the_order_in_which_numbers_are() -> None:
    """So that experts kept as codes give the same bits as their weights."""
    for hidden, width in {line.sizes[1:] for line in LINES}:
        for even in (0.1, 1.0, 2.0, 8.0, 9.0, 24.0, 25.0, 96.0, 97.0, 256.0):
            inputs = [
                [cut.inputs for cut in tuned.tiles_for(LINES, (kind, hidden, width), even)]
                for kind in KINDS
            ]
            assert inputs[0] == inputs[1] == inputs[2], (hidden, width, even)


def test_a_line_is_that_of_the_sizes_or_of_those_that_were_measured_first() -> None:
    def line(width: int, rows: float, tile_rows: int) -> tuned.Tuned:
        cut = Tiles(tile_rows, 64, 64)
        return tuned.Tuned("numbers", 2048, width, rows, cut, cut, "")

    lines = [line(64, 8.0, 16), line(768, 4.0, 32), line(768, math.inf, 128)]
    for width, even, rows in ((64, 8.0, 16), (64, 9.0, 128), (768, 1.0, 32), (96, 2.0, 32)):
        first, second = tuned.tiles_for(lines, ("numbers", 2048, width), even)
        assert first.rows == second.rows == rows
    with pytest.raises(ValueError, match=r"no line of fp8 for 2\.0 rows"):
        tuned.tiles_for(lines, ("fp8", 2048, 64), 2.0)


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
