"""Processes die, hang and are cut off while clients stream, and every text stays the same."""

from pathlib import Path

import pytest

from tests.faults.network import why_no_namespaces
from tests.faults.plan import ON_FRAMES, ON_PROCESS, Means, draw_fault
from tests.faults.play import play
from tests.faults.system import FEW_PROGRAMS
from tests.model.harness import GOLDENS

MEANS = Means(frames=True, namespaces=False, netem=False, long_share=0.1)


def test_a_fault_is_drawn_by_its_seed_and_number_alone() -> None:
    drawn = [draw_fault(7, number, MEANS) for number in range(1, 200)]
    assert drawn == [draw_fault(7, number, MEANS) for number in range(1, 200)]
    assert drawn != [draw_fault(8, number, MEANS) for number in range(1, 200)]
    assert {fault.kind for fault in drawn} >= {*ON_PROCESS, *ON_FRAMES}
    assert {fault.role for fault in drawn} == {"prefill", "decode", "api", "registry", "link"}


@pytest.mark.timeout(600)
async def test_fifty_faults_on_real_processes_change_no_token(tmp_path: Path) -> None:
    played = await play(tmp_path, faults=50, seed=20, settle_every=50, long_share=0.1)
    assert len(played.strikes) == 50
    assert played.ends["done"] >= 20
    assert sum(len(strike.moved) for strike in played.strikes) >= 10
    hit = {strike.hit for strike in played.strikes}
    assert hit >= {"mid_chunk", "mid_frame", "last_frame"}


@pytest.mark.timeout(600)
async def test_faults_between_workers_that_share_memory_change_no_token(tmp_path: Path) -> None:
    """Half of the network's layers have a window, with pages of their own; decode has two nodes."""
    played = await play(
        tmp_path,
        faults=6,
        seed=1206,
        backend="shm",
        clients=3,
        settle_every=6,
        long_share=0.0,
        model=GOLDENS / "gpt_oss" / "model",
        sizes=FEW_PROGRAMS,
        nodes={"decode": 2},
        few_steps=True,
        num_asks=8,
    )
    assert len(played.strikes) == 6
    assert played.ends["done"]
    kinds = {(strike.fault.kind, strike.fault.role) for strike in played.strikes}
    assert kinds >= {("kill", "prefill"), ("kill", "decode")}
    assert played.strikes[0].target == "decode-0.1"
    assert any(strike.moved for strike in played.strikes)


@pytest.mark.timeout(600)
async def test_hosts_that_cannot_be_reached_change_no_token(tmp_path: Path) -> None:
    if why := why_no_namespaces():
        pytest.skip(f"no network namespaces: {why}")
    played = await play(
        tmp_path, faults=8, seed=5, network="namespaces", settle_every=8, long_share=0.3
    )
    assert len(played.strikes) == 8
    assert any(strike.fault.kind == "part" for strike in played.strikes)
    assert played.ends["done"]
