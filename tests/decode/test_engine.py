"""Which row of a step each slot of a plan has, and memory for pages that arrive."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import msgspec
import numpy as np
import pytest

from decode.admission import Seat
from decode.engine import DecodeEngine, SlotStart, _places
from decode.local import LocalPrompt, local_buckets
from model.buckets import mask_words
from model.chunks import FirstSample
from model.pieces import Piece
from model.programs import Program
from model.sampling import Asks
from model.transformer import Model
from serving.demo import demo_model_path
from tests.model.harness import full_steps, open_plainly
from transfer.prefix_cache import Sharing
from transfer.wire import SamplingParams


def mask_of(token_id: int) -> np.ndarray:
    """u32[1, words] of the demo model: this token and no other."""
    mask = np.zeros((1, mask_words(2048)), np.uint32)
    mask[0, token_id // 32] = 1 << (token_id % 32)
    return mask


@pytest.mark.parametrize(
    ("ranks", "dp_size", "within", "most"),
    [
        ([0, 0, 0], 1, [0, 1, 2], 3),
        ([1, 0, 1, 1, 0], 2, [0, 0, 1, 2, 1], 3),
        ([2, 2], 4, [0, 1], 2),
    ],
)
def test_rows_of_a_rank_follow_each_other_in_the_order_of_the_plan(
    ranks: list[int], dp_size: int, within: list[int], most: int
) -> None:
    found, fullest = _places(np.array(ranks, np.int32), dp_size)
    assert (found.tolist(), fullest) == (within, most)


@pytest.mark.parametrize(
    ("groups", "computes", "is_capped"), [(1, False, False), (2, False, True), (2, True, False)]
)
def test_an_accelerators_memory_is_for_prefixes_where_decode_keeps_them(
    monkeypatch: pytest.MonkeyPatch, groups: int, computes: bool, is_capped: bool
) -> None:
    page_size, context = 16, 128
    opened = open_plainly(demo_model_path(), page_size, context)
    kv = replace(opened.kv, groups=groups)
    local = local_buckets(context, 64, page_size) if computes else None
    asked: list[int] = []

    def make_pool(*args: Any) -> Any:
        asked.append(args[3])
        raise InterruptedError

    monkeypatch.setattr("decode.engine.on_cpu", lambda: False)
    monkeypatch.setattr("decode.engine.make_pool", make_pool)
    with pytest.raises(InterruptedError):
        DecodeEngine(replace(opened, kv=kv), full_steps(2, context, page_size), 0.0, 0, local)
    running = 2 * context // page_size
    assert asked[0] == running if is_capped else asked[0] > 1000 * running


def test_pages_that_come_wait_once_as_many_as_were_planned_for_are_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page_size, context = 16, 128
    opened = open_plainly(demo_model_path(), page_size, context)
    buckets = full_steps(1, context, page_size)
    engine = DecodeEngine(opened, buckets, 0.0, 4 * context)
    longest = buckets.run_pages[-1]
    assert engine.plan.scratch_bytes > engine._runs.most_placing * engine.plan.page_bytes

    placed: list[int] = []
    waits: list[int] = []  # runs placed before each wait
    wait = jax.block_until_ready

    def counted(value: object) -> object:
        waits.append(len(placed))
        return wait(value)

    monkeypatch.setattr(jax, "block_until_ready", counted)
    kv = opened.kv
    shape = (kv.num_layers, kv.planes, longest, page_size, kv.num_kv_heads, kv.head_dim)
    run = np.ones(shape, np.float32)
    for number in range(20):
        engine.place_run(0, range(longest), [run])
        placed.append(number)
    assert waits == [4, 8, 12, 16]


def test_an_engine_that_is_told_every_call_has_the_same_on_its_device() -> None:
    page_size, context = 16, 128
    led, told = (
        DecodeEngine(
            open_plainly(demo_model_path(), page_size, context),
            full_steps(2, context, page_size),
            0.0,
            4 * context,
            local_buckets(48, 48, page_size),
        )
        for _ in range(2)
    )
    results = []

    def tell(name: str, key: int, arrays: Sequence[np.ndarray]) -> None:
        copies = [np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape) for a in arrays]
        results.append(told.calls.take(name, key, *copies))

    led.calls.tell = tell
    ids = np.arange(40, dtype=np.int32)
    params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=7, presence_penalty=0.5)
    pages = [3, 1, 6, 2]
    prompt = LocalPrompt(Seat(5, 40, 0.0, 0, pages=pages), Sharing(ids, "", 0))
    led.run_chunk([[Piece(prompt, 0, 40)]])
    out = led.sample_first([FirstSample(0, params, ids, 40)])
    tokens = [int(out.ids[0])]
    led.start_slots([SlotStart(1, np.append(ids, tokens).astype(np.int32), 40, pages, params)])
    for number in range(8):
        if number == 5:
            led.set_masks(np.array([1], np.int32), mask_of(17))
        nowhere = np.array([-1], np.int32)
        flight = led.step(np.array([1], np.int32), nowhere, nowhere, nowhere)
        tokens.append(int(flight.token_ids()[0][0, 0]))
    chunk, sampled, _, *steps = results
    steps = [step for step in steps if step is not None]
    assert [int(sampled.ids[0]), *(int(step.ids[0]) for step in steps)] == tokens
    assert len(set(tokens)) > 3
    assert (np.asarray(chunk[0]) == np.asarray(led._chunks._logits)).all()  # type: ignore[union-attr]
    assert (np.asarray(led._pool) == np.asarray(told._pool)).all()


def test_steps_that_look_at_short_page_tables_draw_what_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on accelerators: one slot outgrows the short tables, another stays within them."""
    page_size, context = 16, 128
    ids = np.arange(25, dtype=np.int32)
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=7)
    pages = np.arange(16).reshape(2, 8)[:, ::-1]
    drawn, used = [], []
    for short in (0, 48):
        monkeypatch.setattr(Model, "short_context", lambda *_, short=short: short)
        opened = open_plainly(demo_model_path(), page_size, context)
        engine = DecodeEngine(opened, full_steps(2, context, page_size), 0.0, 2 * context)
        names: list[str] = []
        for kind, program in engine._step.items():
            engine._step[kind] = cast(Program, _Noted(program, names))
        engine.start_slots(
            [SlotStart(slot, ids[: 25 - 12 * slot], 12, pages[slot], params) for slot in range(2)]
        )
        slots, nowhere = np.arange(2, dtype=np.int32), np.full(2, -1, np.int32)
        tokens = []
        for length in range(25, 60):
            flight = engine.step(
                slots, nowhere, nowhere, nowhere, num_pages=-(-length // page_size)
            )
            tokens.append(flight.token_ids()[0][:, 0].tolist())
        drawn.append(tokens)
        used.append(names)
    assert drawn[0] == drawn[1]
    assert used[0] == ["step[slots=2]"] * 35
    assert used[1] == ["step[slots=2, pages=3]"] * 24 + ["step[slots=2]"] * 11


def test_tokens_drawn_apart_are_those_of_steps_that_draw_them() -> None:
    """As on accelerators: programs in which the host waits for no predicate."""
    page_size, context = 16, 128
    greedy = SamplingParams(max_new_tokens=40, temperature=0.0)
    drawn = msgspec.structs.replace(greedy, temperature=1.0, seed=7)
    filtered = msgspec.structs.replace(drawn, top_k=40, top_p=0.9)
    edited = msgspec.structs.replace(filtered, repetition_penalty=1.2, num_top_logprobs=2)
    all_params = [greedy, drawn, filtered, edited]
    ids, slots = np.arange(20, dtype=np.int32), np.arange(4, dtype=np.int32)
    found, names = [], list[str]()
    for apart in (False, True):
        opened = open_plainly(demo_model_path(), page_size, context)
        engine = DecodeEngine(
            opened, full_steps(4, context, page_size), 0.0, 4 * context, apart=apart
        )
        if engine._draws is not None:
            for key, program in engine._draws._programs.items():
                has_tests = " conditional(" in str(program.compiled.as_text())
                assert has_tests is (key[-1] is Asks.ANYTHING)
                engine._draws._programs[key] = cast(Program, _Noted(program, names))
        engine.start_slots(
            [
                SlotStart(slot, ids, 19, [2 * slot, 2 * slot + 1], params)
                for slot, params in enumerate(all_params)
            ]
        )
        steps = []
        for number in range(10):
            live = slots[: 1 + number % 4]
            nowhere = np.full(len(live), -1, np.int32)
            out = engine.step(live, nowhere, nowhere, nowhere)
            steps.append([np.asarray(array)[: len(live)] for array in out.out])
        found.append(steps)
    for one, other in zip(*found, strict=True):
        for array, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(array, same)
    kinds = [f"draw[slots=4, {asks.name.lower()}]" for asks in Asks]
    assert names == (kinds * 3)[:10]


class _Noted:
    """A program that notes its name whenever it runs."""

    def __init__(self, program: Program, names: list[str]) -> None:
        self._program, self._names = program, names

    def __call__(self, *args: Any) -> Any:
        self._names.append(self._program.name)
        return self._program(*args)


@pytest.mark.parametrize("apart", [False, True])
def test_a_slot_that_names_its_ids_draws_as_under_one_mask_in_every_step(apart: bool) -> None:
    """Slot 0 is told the mask anew before each step, slot 1 names the same ids; slot 2 is free."""
    page_size, context = 16, 128
    opened = open_plainly(demo_model_path(), page_size, context)
    local = local_buckets(48, 48, page_size)
    steps = full_steps(3, context, page_size)
    engine = DecodeEngine(opened, steps, 0.0, 4 * context, local, apart=apart)
    mask = np.bitwise_or.reduce([mask_of(token_id) for token_id in (7, 40, 900, 2047)])
    free = SamplingParams(max_new_tokens=20, temperature=1.0, seed=7)
    held = msgspec.structs.replace(free, grammar="any")
    named = msgspec.structs.replace(free, allowed=mask.tobytes())
    ids = np.arange(40, dtype=np.int32)
    pages = [[3 * slot + page for page in range(3)] for slot in range(3)]
    firsts: list[tuple[int, float]] = []
    for params, given in ((held, mask[0]), (named, None), (free, None)):
        prompt = LocalPrompt(Seat(5, 40, 0.0, 0, pages=pages[len(firsts)]), Sharing(ids, "", 0))
        engine.run_chunk([[Piece(prompt, 0, 40)]])
        out = engine.sample_first([FirstSample(0, params, ids, 40, given)])
        tokens = np.append(ids, np.asarray(out.ids)[:1])
        slot = len(firsts)
        engine.start_slots([SlotStart(slot, tokens, 40, pages[slot], params)])
        firsts.append((int(out.ids[0]), float(out.logprobs[0])))
    drawn = []
    slots, nowhere = np.arange(3, dtype=np.int32), np.full(3, -1, np.int32)
    for _ in range(7):
        engine.set_masks(slots[:1], mask)
        out = engine.step(slots, nowhere, nowhere, nowhere).out
        drawn.append(list(zip(out.ids.tolist(), out.logprobs.tolist(), strict=True)))
    assert firsts[0] == firsts[1]
    assert all(one == other for one, other, _ in drawn)
    ids_drawn = {firsts[1][0]} | {of_named[0] for _, of_named, _ in drawn}
    assert len(ids_drawn) > 1
    assert ids_drawn <= {7, 40, 900, 2047}
    assert not {firsts[2][0]} | {of_free[0] for *_, of_free in drawn} <= {7, 40, 900, 2047}


def test_each_slot_draws_what_its_own_mask_leaves() -> None:
    """Two ranks, whose slots are numbered consecutively; more slots than one call takes."""
    page_size, context = 16, 128
    opened = open_plainly(demo_model_path(), page_size, context, dp_size=2)
    engine = DecodeEngine(opened, full_steps(6, context, page_size), 0.0, 12 * context)
    free = SamplingParams(max_new_tokens=9, temperature=1.0, seed=7)
    held = msgspec.structs.replace(free, grammar="any")
    slots = np.array([0, 3, 4, 6, 7, 10, 11], np.int32)
    ids = np.arange(20, dtype=np.int32)
    for slot in slots.tolist():
        pages = [2 * (slot % 6), 2 * (slot % 6) + 1]
        engine.start_slots([SlotStart(slot, ids, 19, pages, free if slot == 3 else held)])
    drawn = []
    for number in (40, 900):
        masked = np.delete(slots, 1)
        only = [mask_of(number + slot) for slot in masked.tolist()]
        engine.set_masks(masked, np.concatenate(only))
        nowhere = np.full(len(slots), -1, np.int32)
        flight = engine.step(slots, nowhere, nowhere, nowhere)
        drawn.append(flight.token_ids()[0][:, 0].tolist())
    for number, tokens in zip((40, 900), drawn, strict=True):
        free_token = tokens.pop(1)
        assert tokens == [number + slot for slot in np.delete(slots, 1).tolist()]
        assert free_token != number + 3
