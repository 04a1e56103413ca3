"""A setting for tests of streams over real sockets: each writes for itself, or columns do."""

import pytest

from serving import plain_streams
from serving.connection import BodyWriter, Borrower


@pytest.fixture(params=[False, True], ids=["own", "lent"])
def lent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots that streams lent to: none, or one of each stream whenever it has settled."""
    slots: list[int] = []
    lend = BodyWriter.lend

    def noted(self: BodyWriter, borrower: Borrower, slot: int) -> None:
        slots.append(slot)
        lend(self, borrower, slot)

    monkeypatch.setattr(BodyWriter, "lend", noted)
    monkeypatch.setattr(plain_streams, "LEAST_STREAMS", 1 if request.param else 1 << 30)
    return slots
