"""A pool takes what memory is left: on a CPU the same at the next start, and what was asked for."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import opening, processors
from model.errors import MemoryShortage, ModelError
from model.opening import OpenedModel, make_pool
from model.programs import Program, mib, steady, tree_bytes
from model.promises import Promises, _own_bytes
from tests.model.harness import GOLDENS, open_plainly

CONTEXT, PAGE_SIZE = 128, 16
MIB = 1 << 20
NEAR = 16 * MIB  # what a process may take or give back beside what is meant


@pytest.fixture(scope="module")
def opened() -> OpenedModel:
    path = GOLDENS / "llama" / "model"
    return open_plainly(path, PAGE_SIZE, CONTEXT, kv_cache_dtype="float32")


def pages(opened: OpenedModel, free: int, monkeypatch: pytest.MonkeyPatch, tokens: int = 0) -> int:
    """The pool's size in pages, if this much memory is a worker's share."""
    monkeypatch.setattr(opening, "memory_budget_bytes", lambda fraction, devices: free)
    return pool_pages(opened, 0.0, tokens)


def test_what_compiling_leaves_behind_keeps_no_promise(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Scratch memory is still to come then, and others must not count on it."""
    left: list[bytes] = []

    def programs(num_pages: int) -> list[Program]:
        left.append(b"x" * (300 * MIB))
        return [Program("nothing", jnp.negative, (jnp.zeros(()),))]

    monkeypatch.setattr(opening, "memory_budget_bytes", lambda fraction, devices: 3_200 * MIB)
    monkeypatch.setattr(opening, "PROMISES", Promises(tmp_path))
    _, plan, _ = make_pool(opened, 0.0, 1_001 * PAGE_SIZE, 100_000, programs)
    promised = int((tmp_path / str(os.getpid())).read_text())
    assert plan.scratch_bytes == pytest.approx(200 * MIB, rel=0.01)
    assert promised - _own_bytes(os.getpid()) == pytest.approx(plan.scratch_bytes, abs=NEAR)


def test_what_serving_takes_is_promised_where_scratch_memory_leaves_no_room_for_it(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def programs(num_pages: int) -> list[Program]:
        return [Program("nothing", jnp.negative, (jnp.zeros(()),))]

    promises: list[int] = []
    monkeypatch.setattr(Promises, "make", lambda _, num_bytes: promises.append(num_bytes))
    monkeypatch.setattr(opening, "memory_budget_bytes", lambda fraction, devices: 600 * MIB)
    spare = 300 * MIB
    _, plan, _ = make_pool(opened, 0.0, 1_001 * PAGE_SIZE, 100_000, programs, 0, spare)
    pool = plan.num_pages * plan.page_bytes
    before, after = (promise - pool for promise in promises)
    assert before == plan.scratch_bytes == pytest.approx(338 * MIB, rel=0.01)
    assert after == pytest.approx(spare + 160 * MIB, abs=MIB)


def pool_pages(opened: OpenedModel, fraction: float, tokens: int = 0) -> int:
    """The pool's size in pages. Raises ModelError."""

    def programs(num_pages: int) -> list[Program]:
        return [Program("nothing", jnp.negative, (jnp.zeros(()),))]

    _, plan, _ = make_pool(opened, fraction, tokens, 100_000, programs)
    return plan.num_pages


def test_free_memory_that_differs_a_little_makes_the_same_pool(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = opened.kv.all_layers_bytes
    few, many = (pages(opened, share * 1_000 * page // 100, monkeypatch) for share in (105, 107))
    assert few == many == 960  # a sixteenth of the budget is reserved for programs
    assert pages(opened, 2_100 * page, monkeypatch) == 2 * few


def test_a_number_that_was_asked_for_is_not_rounded(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2_000 * opened.kv.all_layers_bytes
    assert pages(opened, free, monkeypatch, 1_001 * PAGE_SIZE) == 1_001


def test_one_request_fits_whatever_is_rounded(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    least, weights = 17, tree_bytes(opened.params)
    long = replace(opened, context_length=least * PAGE_SIZE)
    kept = least * opened.kv.all_layers_bytes + weights
    assert pages(long, kept * 16 // 15 - weights + 16, monkeypatch) == least


@pytest.mark.parametrize(
    ("contexts_free", "got"),  # of 100 pages; a tenth of what is free is the least
    [(5, 128), (20, 400), (36, 400), (60, 512)],
)
def test_a_pool_has_four_contexts_if_they_fit_in_three_tenths_of_free_memory(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, contexts_free: int, got: int
) -> None:
    least = 100
    long = replace(opened, context_length=least * PAGE_SIZE)
    free = contexts_free * least * opened.kv.all_layers_bytes
    monkeypatch.setattr(opening, "memory_budget_bytes", lambda fraction, _: int(fraction * free))
    assert pool_pages(long, 0.0) == got


def test_a_share_that_was_asked_for_is_not_exceeded(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = 100
    long = replace(opened, context_length=least * PAGE_SIZE)
    free = 9 * least * opened.kv.all_layers_bytes
    monkeypatch.setattr(opening, "memory_budget_bytes", lambda fraction, _: int(fraction * free))
    assert pool_pages(long, 0.0) >= least
    with pytest.raises(ModelError, match=r"100 pages .* do not fit in .* raise --mem-fraction"):
        pool_pages(long, 0.1)


@pytest.mark.parametrize(("tokens", "promised_pages"), [(0, 8), (40 * PAGE_SIZE, 40)])
def test_a_pool_of_a_size_that_was_asked_for_is_promised_before_weights_are_loaded(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, tokens: int, promised_pages: int
) -> None:
    promises: list[int] = []
    monkeypatch.setattr(Promises, "make", lambda _, num_bytes: promises.append(num_bytes))
    path = GOLDENS / "llama" / "model"
    open_plainly(path, PAGE_SIZE, CONTEXT, max_total_tokens=tokens)
    weights = tree_bytes(opened.params)
    assert promises == [weights + promised_pages * opened.kv.all_layers_bytes]


def test_weights_larger_than_all_that_is_free_do_not_fit_in_what_is_free(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = tree_bytes(opened.params) // 4
    monkeypatch.setattr(opening, "memory_budget_bytes", lambda fraction, _: int(fraction * free))
    with pytest.raises(
        ModelError, match=rf"do not fit in {re.escape(mib(free))}; choose a smaller"
    ):
        open_plainly(GOLDENS / "llama" / "model", PAGE_SIZE, CONTEXT)


def test_what_compiling_took_is_given_back_before_the_pool_takes_it(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(name: str) -> None:
        function = getattr(opening, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(opening, name, called)

    for name in ("compile_all", "give_back_freed", "init_pool"):
        noted(name)
    pool_pages(opened, 0.0)
    assert order == ["compile_all", "give_back_freed", "init_pool"]


@pytest.mark.parametrize(("total", "error"), [(60, MemoryShortage), (30, ModelError)])
def test_memory_that_others_have_now_may_be_free_at_a_later_start(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, total: int, error: type[ModelError]
) -> None:
    weights, least = tree_bytes(opened.params), 100
    long = replace(opened, context_length=least * PAGE_SIZE)
    context = least * opened.kv.all_layers_bytes
    monkeypatch.setattr(opening, "memory_budget_bytes", lambda fraction, _: int(fraction * context))
    # A tenth, beside the weights, of the total.
    monkeypatch.setattr(opening, "total_bytes", lambda: weights + total * context // 4)
    with pytest.raises(ModelError, match="too little memory") as caught:
        pool_pages(long, 0.1)
    assert type(caught.value) is error


@pytest.mark.parametrize(("total", "error"), [(1 << 40, MemoryShortage), (0, ModelError)])
def test_that_is_told_apart_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, total: int, error: type[ModelError]
) -> None:
    monkeypatch.setattr(opening, "memory_budget_bytes", lambda *_: 0)
    monkeypatch.setattr(opening, "total_bytes", lambda: total)
    monkeypatch.setattr(opening, "load_params", lambda *_, **__: pytest.fail("weights are loaded"))
    with pytest.raises(ModelError, match="too little memory") as caught:
        open_plainly(GOLDENS / "llama" / "model", PAGE_SIZE, CONTEXT)
    assert type(caught.value) is error


def test_padding_costs_on_a_cpu_unless_the_network_is_small(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [opened.padding_costs]  # a hidden size of 96
    monkeypatch.setattr(processors, "_SMALL", 95)
    found.append(opened.padding_costs)
    monkeypatch.setattr(opening, "on_cpu", lambda: False)
    found.append(opened.padding_costs)
    assert found == [False, True, False]


def test_on_an_accelerator_a_model_keeps_its_dtype_and_its_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "on_cpu", lambda: False)
    opened = open_plainly(GOLDENS / "gpt_oss" / "model", 0, 0, dtype="auto")
    assert (opened.model.dtype.name, opened.kv.dtype) == ("bfloat16", "bfloat16")
    assert opened.context_length == 8192 > opening.CPU_CONTEXT_LENGTH
    assert (opened.kv.page_size, opened.run_pages) == (64, 32)


def test_on_an_accelerator_the_pool_takes_all_that_is_left_and_nothing_is_promised(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(opening, "on_cpu", lambda: False)
    monkeypatch.setattr(opening, "PROMISES", Promises(tmp_path))
    budget, page_bytes = 777 * MIB, opened.kv.all_layers_bytes
    left = budget - budget // 16 - tree_bytes(opened.params)
    assert pages(opened, budget, monkeypatch) == left // page_bytes
    assert [file.name for file in tmp_path.iterdir()] == ["turn"]


@given(st.integers(1, 1 << 40))
def test_a_steady_number_is_at_most_a_ninth_less(number: int) -> None:
    assert 0 <= number - steady(number) < number / 9
    assert steady(steady(number)) == steady(number)
