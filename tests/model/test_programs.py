"""Programs compile concurrently; the page pool takes the memory that is left, or says why not."""

import re
import threading
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from model import processors
from model.errors import ModelError
from model.programs import MemoryPlan, Program, compile_all, memory_budget_bytes, plan_memory

MIB = 2**20


def plan(
    budget: int = 100,
    weights: int = 40,
    scratch: int = 10,
    wanted: int = 1000,
    exact: bool = False,
    least: int = 5,
) -> MemoryPlan:
    """A plan for sizes in MiB, with pages of 2 MiB."""
    return plan_memory(budget * MIB, weights * MIB, scratch * MIB, 2 * MIB, wanted, exact, least)


def test_the_pool_takes_what_is_left() -> None:
    assert plan().num_pages == 25


def test_the_pool_takes_no_more_than_could_be_in_use() -> None:
    assert plan(wanted=7).num_pages == 7


def test_a_number_that_was_asked_for_is_given_or_refused() -> None:
    assert plan(wanted=25, exact=True).num_pages == 25
    with pytest.raises(ModelError, match=re.escape("26 pages 52.0 MiB do not fit in 100.0 MiB")):
        plan(wanted=26, exact=True)


def test_too_little_for_one_request_is_refused_with_the_figures_and_the_flags() -> None:
    with pytest.raises(ModelError) as refused:
        plan(budget=59)
    message = str(refused.value)
    for part in (
        "weights 40.0 MiB",
        "scratch 10.0 MiB",
        "5 pages 10.0 MiB",
        "59.0 MiB",
        "--max-total-tokens",
        "--context-length",
        "--mem-fraction-static",
    ):
        assert part in message


def test_weights_alone_above_the_budget_are_refused() -> None:
    with pytest.raises(ModelError, match="too little memory"):
        plan(weights=200)


@pytest.mark.parametrize("budget", [100, 59])  # whether or not a full context would fit
def test_a_pool_asked_for_that_holds_no_full_context_is_refused(budget: int) -> None:
    with pytest.raises(ModelError, match="gives 4 pages, one request of full context needs 5"):
        plan(budget, wanted=4, exact=True)


def test_a_plan_reads_as_one_line() -> None:
    line = str(plan())
    assert line == (
        "weights 40.0 MiB, scratch 10.0 MiB, 25 pages 50.0 MiB, of a budget of 100.0 MiB"
    )


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(ModelError, match=re.escape(f"(0, 1], got {fraction}")):
        memory_budget_bytes(fraction, [])


def test_each_accelerator_gives_as_much_as_the_one_with_the_least_memory() -> None:
    limits = [{"bytes_limit": 80 * MIB}, {"bytes_limit": 60 * MIB}]
    devices: Any = [SimpleNamespace(platform="gpu", memory_stats=lambda x=x: x) for x in limits]
    assert memory_budget_bytes(0.5, devices) == 2 * 30 * MIB


def test_a_plan_for_several_ranks_says_what_each_has() -> None:
    planned = plan_memory(100 * MIB, 40 * MIB, 10 * MIB, 4 * MIB, 1000, False, 5, num_ranks=2)
    assert planned.num_pages == 12
    assert "12 pages for each of 2 ranks 48.0 MiB" in str(planned)
    with pytest.raises(ModelError, match=r"13 pages for each of 2 ranks 52\.0 MiB do not"):
        plan_memory(100 * MIB, 40 * MIB, 10 * MIB, 4 * MIB, 13, True, 5, num_ranks=2)


def test_pages_are_told_for_each_group_of_layers() -> None:
    planned = plan_memory(100 * MIB, 40 * MIB, 10 * MIB, 4 * MIB, 12, True, 5, num_groups=2)
    assert "12 pages of each of 2 groups of layers 48.0 MiB" in str(planned)


ROW = jax.device_put(np.arange(4, dtype=np.float32))


def test_programs_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "available", lambda: 3)
    all_traced = threading.Barrier(3)

    def program(add: int) -> Program:
        def function(row: jax.Array) -> jax.Array:
            all_traced.wait(60)
            return row + add

        return Program(f"add {add}", function, [ROW])

    programs = [program(add) for add in range(3)]
    compile_all(programs)
    for add, one in enumerate(programs):
        assert np.asarray(one(ROW)).tolist() == [add, add + 1, add + 2, add + 3]


def test_processes_that_share_a_mesh_compile_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "available", lambda: 3)
    traced: list[int] = []

    def program(add: int) -> Program:
        def function(row: jax.Array) -> jax.Array:
            traced.append(add)
            return row + add

        return Program(f"add {add}", function, [ROW])

    programs = [program(add) for add in range(20)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("model.programs.texts_of_all", lambda text: [text, text])
    compile_all(programs)
    assert traced == list(range(20))


def test_a_program_that_cannot_be_compiled_ends_it_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processors, "available", lambda: 1)

    def wrong(row: jax.Array) -> jax.Array:
        return row @ row[:2]

    after = Program("after", lambda row: row, [ROW])
    with pytest.raises(TypeError, match=r"got \(4,\) and \(2,\)"):
        compile_all([Program("wrong", wrong, [ROW]), after])
    assert not hasattr(after, "compiled")
