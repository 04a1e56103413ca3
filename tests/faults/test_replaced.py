"""Three prefill and two decode workers under load: killing one of each changes no answer."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.faults.system import FEW_PROGRAMS, System, until
from tests.faults.traffic import Traffic
from tests.serving.commands import MODEL

PATIENCE_S = 60.0


class Load:
    """Clients of a system, with their findings and a count of complete answers."""

    def __init__(self, system: System) -> None:
        self.findings: list[str] = []
        self.traffic = Traffic(system, 11, self.findings.append, 8, num_asks=8)
        self._system = system

    async def until(self, true: Callable[[], bool]) -> None:
        """Let the clients go on until the condition holds. Raises if one got a wrong answer."""
        await until(lambda: bool(self.findings) or true(), PATIENCE_S, self._system.describe)
        assert self.findings == []

    async def until_done(self, more: int) -> None:
        """Wait until this many more answers are complete."""
        enough = self.traffic.ends["done"] + more
        await self.until(lambda: self.traffic.ends["done"] >= enough)

    async def until_hit(self) -> None:
        """Wait until some stream is in the middle of its text."""
        flights = self.traffic.flights
        await self.until(lambda: any(f.told.frames > 2 for f in flights.values()))


async def moves(system: System) -> float:
    """How often a request continued elsewhere, for whatever reason."""
    transport = httpx.AsyncHTTPTransport(uds=str(system.uds("api-0")))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        text = (await http.get("/metrics")).text
    return sum(map(float, re.findall(r"^kvferry_retries_total\{.*\} (\S+)$", text, re.MULTILINE)))


@pytest.mark.timeout(240)
async def test_workers_killed_under_load_and_replaced_change_no_token(tmp_path: Path) -> None:
    system = System(
        tmp_path, backend="shm", workers=2, prefills=3, apis=1, model=MODEL, sizes=FEW_PROGRAMS
    )
    load = Load(system)
    try:
        await system.start()
        await load.traffic.start()
        load.traffic.go()
        await load.until_done(5)
        kills = Counter({"prefill-1": 0, "decode-0": 0})
        while not kills.total() or await moves(system) == 0:  # an idle worker has nothing to move
            assert kills.total() < 10
            for name in kills:
                await load.until_hit()
                system.members[name].kill()
                kills[name] += 1
                await load.until_done(10)
            await system.whole()
        lives = {name: system.members[name].life - 1 for name in kills}
        assert lives == kills
        await load.until_done(10)  # also from the restarted workers
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
