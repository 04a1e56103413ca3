"""Three prefill and two decode workers under load: one of each is killed, and nobody can tell."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.faults.system import System, until
from tests.faults.traffic import Traffic
from tests.serving.commands import MODEL

PATIENCE_S = 60.0
# Few programs to compile: seven lives of a worker on as many cores as there are.
SIZES = {
    "prefill": ("--chunked-prefill-size=32", "--max-seqs-per-chunk=1"),
    "decode": ("--max-running-requests=4", "--max-total-tokens=1024"),
}


class Load:
    """Clients of a system, with what they found wrong and how much ran to its end since."""

    def __init__(self, system: System) -> None:
        self.findings: list[str] = []
        self.traffic = Traffic(system, 11, self.findings.append, 8, num_asks=8)
        self._system = system

    async def until(self, true: Callable[[], bool]) -> None:
        """Let them ask on until then. Raises when one was told something wrong."""
        await until(lambda: bool(self.findings) or true(), PATIENCE_S, self._system.describe)
        assert self.findings == []

    async def until_done(self, more: int) -> None:
        """Until so many more answers are complete."""
        enough = self.traffic.ends["done"] + more
        await self.until(lambda: self.traffic.ends["done"] >= enough)

    async def until_hit(self) -> None:
        """Until some stream is in the middle of its text."""
        flights = self.traffic.flights
        await self.until(lambda: any(f.told.frames > 2 for f in flights.values()))


async def moves(system: System) -> float:
    """How often a request went on elsewhere, for whatever reason."""
    transport = httpx.AsyncHTTPTransport(uds=str(system.uds("api-0")))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        text = (await http.get("/metrics")).text
    return sum(map(float, re.findall(r"^kvferry_retries_total\{.*\} (\S+)$", text, re.MULTILINE)))


@pytest.mark.timeout(240)
async def test_workers_killed_under_load_and_replaced_change_no_token(tmp_path: Path) -> None:
    system = System(
        tmp_path, backend="shm", workers=2, prefills=3, apis=1, model=MODEL, sizes=SIZES
    )
    load = Load(system)
    try:
        await system.start()
        await load.traffic.start()
        load.traffic.go()
        await load.until_done(5)
        kills = Counter({"prefill-1": 0, "decode-0": 0})
        while not kills.total() or await moves(system) == 0:  # who is idle has nothing to move
            assert kills.total() < 10
            for name in kills:
                await load.until_hit()
                system.members[name].kill()
                kills[name] += 1
                await load.until_done(10)
            await system.whole()
        lives = {name: system.members[name].life - 1 for name in kills}
        assert lives == kills
        await load.until_done(10)  # by those that came as well
        load.traffic.hold()
        await load.until(lambda: not load.traffic.flights)
        assert set(load.traffic.ends) == {"done"}
        assert load.traffic.given_up == []
        assert system.unexpected == []
        workers = (await system.info("api-0"))["workers"]
        assert len(workers) == 5
        assert all(worker["rooms"] == worker["pages_held"] == 0 for worker in workers)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{system.logs()}") from error
    finally:
        await load.traffic.close()
        await system.close()
