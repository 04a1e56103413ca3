"""The table of tiles that were fastest for experts' products on a GPU; bench/tune.py writes it."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from model.kernels.tiles import Tiles

TABLE: Final = Path(__file__).with_name("tuned.json")
NUMBERS: Final = "numbers"  # weights that are not codes
MEASURED_FIRST: Final = (2048, 768)  # hidden and width for which there are lines of every kind


class Tuned(NamedTuple):
    """One line of the table.

    weights: NUMBERS, or the kind of codes. rows: of an expert at most, if all get equally many; inf
    in the last line of a kind. first, second: of the two products, with equally many rows. source:
    what it was measured on, and when.
    """

    weights: str
    hidden: int
    width: int
    rows: float
    first: Tiles
    second: Tiles
    source: str

    @property
    def sizes(self) -> tuple[str, int, int]:
        """The weights and sizes that the line is for."""
        return self.weights, self.hidden, self.width


def read(path: Path = TABLE) -> tuple[Tuned, ...]:
    """All lines of the table, in its order."""
    return tuple(_line(**line) for line in json.loads(path.read_text()))


def write(lines: Iterable[Tuned], path: Path) -> None:
    """Write each entry on a line of its own, those of one kind ordered by their rows."""
    ordered = sorted(lines, key=lambda line: (*line.sizes, line.rows))
    texts = [json.dumps(_fields(line)) for line in ordered]
    path.write_text("[\n" + ",\n".join(texts) + "\n]\n")


def tiles_for(
    lines: Sequence[Tuned], sizes: tuple[str, int, int], even: float
) -> tuple[Tiles, Tiles]:
    """Tiles of the line for so many rows of an expert: for these sizes, or those measured first.

    sizes: kind of codes or NUMBERS, hidden, width. even: rows of an expert, if all have equally
    many.
    """
    for own in (sizes, (sizes[0], *MEASURED_FIRST)):
        found = [line for line in lines if line.sizes == own and even <= line.rows]
        if found:
            nearest = min(found, key=lambda line: line.rows)
            return nearest.first, nearest.second
    raise ValueError(f"no line of {sizes[0]} for {even} rows of an expert")


def _line(
    weights: str,
    hidden: int,
    width: int,
    rows: float | None,
    first: list[int],
    second: list[int],
    source: str,
) -> Tuned:
    most = math.inf if rows is None else rows
    return Tuned(weights, hidden, width, most, Tiles(*first), Tiles(*second), source)


def _fields(line: Tuned) -> dict[str, object]:
    def numbers(cut: Tiles) -> list[int]:
        return [cut.rows, cut.outputs, cut.inputs, cut.warps, cut.stages]

    rows = None if math.isinf(line.rows) else line.rows
    return line._asdict() | {
        "rows": rows,
        "first": numbers(line.first),
        "second": numbers(line.second),
    }
