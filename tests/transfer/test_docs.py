"""docs/transfer.md says what the code does."""

import re
from pathlib import Path

from transfer.backend import HEADER_BYTES, Kind
from transfer.errors import Refusal
from transfer.room import LEGAL, Side, State

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "transfer.md").read_text(encoding="utf-8")


def rows(first_heading: str) -> list[list[str]]:
    """The cells of the table that has this first heading."""
    _, found, rest = PAGE.partition(f"| {first_heading} |")
    assert found, f"no table begins with {first_heading!r}"
    lines = rest.split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_legal_transition_is_in_the_table_and_no_other():
    told = {
        (Side[side.upper()], State[state]): tuple(State[name] for name in nexts.split(", "))
        for side, state, nexts in rows("Side")
    }
    known = {
        (side, state): nexts for side, moves in LEGAL.items() for state, nexts in moves.items()
    }
    assert told == known


def test_every_kind_of_frame_has_its_number():
    (cell,) = [row[2] for row in rows("Bytes") if row[1] == "kind"]
    told = {int(number): name for number, name in re.findall(r"(\d+) ([A-Z]+)", cell)}
    assert told == {kind.value: kind.name for kind in Kind}


def test_the_fields_of_a_header_add_up():
    fields = [row[0] for row in rows("Bytes")]
    sizes = [int(size) for cell in fields for size in cell.split(", ") if size.isdigit()]
    *header, digest = sizes
    assert sum(header) == HEADER_BYTES
    assert digest == 8


def test_every_reason_to_refuse_a_frame_is_named():
    sentence = PAGE.partition("`refused_...`:")[2].partition(". ACK")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(Refusal)
