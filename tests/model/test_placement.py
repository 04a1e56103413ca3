"""Experts move while a network is in use: weights, map and counts agree afterwards."""

import json
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decode.engine import DecodeEngine, SlotStart
from model.buckets import prefill_buckets
from model.config import ModelConfig
from model.eplb import AS_TRAINED, ExpertPolicy
from model.errors import ModelError
from model.moe import with_rows
from model.opening import OpenedModel
from model.placement import PlacedExperts, read_location
from model.programs import abstract_like, compile_all
from model.sharding import make_mesh
from model.transformer import Model, random_params
from model.weights import load_params
from prefill.engine import PrefillEngine
from prefill.scheduler import PrefillScheduler, Prompt
from tests.model.harness import GOLDENS, Golden, Harness, full_steps, open_plainly
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache
from transfer.wire import SamplingParams

# (checkpoint, tp, ep, dp, redundant experts): parts that are whole devices, parts that devices
# share, parts that ranks share; experts with biases, and experts after dense layers.
MESHES = [
    ("qwen3_moe", 4, 4, 1, 8),
    ("gpt_oss", 4, 2, 1, 2),
    ("deepseek_v3", 2, 4, 2, 4),
    ("mixtral", 2, 2, 1, 0),
]


def _open(name: str, tp: int, ep: int, dp: int, policy: ExpertPolicy = AS_TRAINED) -> OpenedModel:
    path = GOLDENS / name / "model"
    sizes = {"tp_size": tp, "ep_size": ep, "dp_size": dp}
    return open_plainly(path, 16, 128, **sizes, placing=policy)


def _told(opened: OpenedModel, experts: PlacedExperts, seed: int) -> None:
    """Count rows as a call would: rows of every rank, skewed at random."""
    loads = experts.args.loads
    rng = np.random.default_rng(seed)
    counts = (1000 * rng.random(loads.shape) ** 4).astype(np.int32)
    experts.counted(jax.device_put(counts, loads.sharding))


@pytest.mark.parametrize(("name", "tp", "ep", "dp", "redundant"), MESHES)
def test_weights_are_where_the_map_says_whatever_moved(
    name: str, tp: int, ep: int, dp: int, redundant: int
) -> None:
    policy = ExpertPolicy(redundant, enable_eplb=True, eplb_rebalance_num_iterations=1)
    opened = _open(name, tp, ep, dp, policy)
    experts, params = opened.experts, opened.params
    compile_all(experts.programs(abstract_like(params)))
    trained = load_params(GOLDENS / name / "model", _open(name, tp, ep, dp).model)
    cfg = opened.model.cfg
    for seed in range(3):
        before = experts.placed
        _told(opened, experts, seed)
        while experts.counters["eplb_rebalances"] <= seed:
            params = experts.turn(params)
            experts.counted(experts.args.loads)
        placed, (places, counts) = experts.placed, experts.args.expert_map
        assert (placed != before)[list(cfg.moe_layers)].any()
        layer = 0
        for run, stacks in zip(trained["layers"], params["layers"], strict=True):
            num_layers = len(stacks["attn_norm"])
            for key in (key for key in stacks if key.startswith("experts_")):
                found, want = np.asarray(stacks[key]), np.asarray(run[key])
                for i in range(num_layers):
                    assert (found[i] == want[i][placed[layer + i]]).all()
            layer += num_layers
        for row, (where, many) in enumerate(
            zip(np.asarray(places), np.asarray(counts), strict=True)
        ):
            assert many.sum() == len(placed[row])
            for expert, count in enumerate(many):
                assert (placed[row][where[expert][:count]] == expert).all()


@pytest.mark.parametrize(("name", "tp", "ep", "dp", "redundant"), MESHES)
def test_a_move_has_one_layer_beside_the_weights_and_what_travels(
    name: str, tp: int, ep: int, dp: int, redundant: int
) -> None:
    opened = _open(name, tp, ep, dp, ExpertPolicy(redundant, enable_eplb=True))
    programs = opened.experts.programs(abstract_like(opened.params))
    compile_all(programs)
    runs = [run for run in opened.params["layers"] if "experts_down" in run]
    for run, program in zip(runs, programs, strict=True):
        shards = [run[key].addressable_shards[0].data for key in run if key.startswith("experts_")]
        layer = sum(shard.nbytes // shard.shape[0] for shard in shards)
        expert = layer // shards[0].shape[1]
        # Buffers sent to each part and received from each, and the one expert that is picked out.
        assert program.temp_bytes < layer + (2 * ep + 1) * expert + 4096, program.name


def test_copies_of_random_experts_are_copies() -> None:
    cfg = ModelConfig.from_dir(GOLDENS / "mixtral" / "model")
    models = [
        Model.create(cfg, make_mesh(*mesh), "float32", 16, redundant_experts=redundant)
        for mesh, redundant in [((1, 1), 0), ((2, 2), 2)]
    ]
    plain, copied = (random_params(model, 3)["layers"][0]["experts_down"] for model in models)
    assert copied.shape[1] == plain.shape[1] + 2
    assert (np.asarray(copied) == np.asarray(plain)[:, [*range(8), 0, 1]]).all()


def test_rows_are_counted_once_for_every_expert_that_they_choose() -> None:
    recorded = Golden("qwen3_moe")
    prompts = list(recorded.prompts.values())
    policy = ExpertPolicy(enable_eplb=True, eplb_rebalance_num_iterations=1000)
    opened = _open("qwen3_moe", 2, 4, 2, policy)
    engine = PrefillEngine(opened, prefill_buckets(16, 2, 128, 16), 0.0, 512, 1)
    pool = PagePool(engine.num_pages)
    scheduler = PrefillScheduler(pool, PrefixCache(pool, 16, False), 16, 2, 64)
    mine = [prompt[:100] for prompt in prompts]
    for room, ids in enumerate(mine):
        scheduler.add(Prompt(room, np.array(ids, np.int32), 0.0))
        scheduler.grant(room)
    while pieces := scheduler.plan():
        engine.run_chunk([(), pieces])
        for piece in pieces:
            if piece.is_last:
                scheduler.release(piece.prompt.room)
    captured = Harness(recorded.checkpoint).capture(*mine)[1].expert_ids
    want = np.zeros((opened.model.cfg.num_layers, 16), np.int64)
    for layer in np.flatnonzero(opened.model.cfg.moe_layers):
        want[layer] += np.bincount(captured[layer].ravel(), minlength=16)
    loads = np.asarray(opened.experts.args.loads)
    assert (loads[0] == 0).all()
    assert (loads[1] == want).all()


def test_a_count_that_is_full_stays_full() -> None:
    full = np.iinfo(np.int32).max
    counts = np.array([full - 2, full - 3, full, 5], np.int32)
    ids = np.array([[0, 1], [0, 3], [0, 1], [0, 2]], np.int32)
    found = with_rows(jnp.asarray(counts), jnp.asarray(ids), jnp.array([True, True, True, False]))
    assert found.tolist() == [full, full - 1, full, 6]


def test_steps_draw_the_same_tokens_while_experts_move() -> None:
    policy = ExpertPolicy(8, enable_eplb=True, eplb_rebalance_num_iterations=3)
    still, moving = (
        _decoded(x) for x in (_open("qwen3_moe", 1, 1, 1), _open("qwen3_moe", 2, 4, 2, policy))
    )
    assert moving == still


def _decoded(opened: OpenedModel) -> list[list[int]]:
    engine = DecodeEngine(opened, full_steps(2, 128, 16), 0.0, 512)
    params = SamplingParams(max_new_tokens=100)
    engine.start_slots(
        [
            SlotStart(
                slot, np.arange(5 + slot, dtype=np.int32), 4, range(4 * slot, 4 * slot + 4), params
            )
            for slot in (0, 1)
        ]
    )
    slots, no_pages = np.arange(2, dtype=np.int32), np.full(2, -1, np.int32)
    tokens = []
    for _ in range(40):
        flight = engine.step(slots, no_pages, no_pages, no_pages)
        tokens.append(flight.token_ids()[0][:, 0].tolist())
    counted = opened.experts.counters
    assert not counted or min(counted["eplb_rebalances"], counted["eplb_experts_moved"]) > 3
    return tokens


def test_what_was_counted_is_written_as_the_next_start_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "counts.json"
    policy = ExpertPolicy(2, "trivial", True, str(file), eplb_rebalance_num_iterations=1)
    opened = _open("mixtral", 2, 2, 1, policy)
    experts, params = opened.experts, opened.params
    compile_all(experts.programs(abstract_like(params)))
    _told(opened, experts, 5)
    counts = np.asarray(experts.args.loads).sum(axis=0)
    while not experts.counters["eplb_rebalances"]:
        params = experts.turn(params)
        experts.counted(experts.args.loads)
    _have_written(experts)
    assert json.loads(file.read_text()) == {"logical_count": counts.tolist()}
    again = _open("mixtral", 2, 2, 1, ExpertPolicy(2, str(file))).experts
    assert (np.sort(again.placed) == np.sort(experts.placed)).all()
    # If the folder goes away, the only effect is a line in the log.
    file.unlink()
    tmp_path.rmdir()
    while experts.counters["eplb_rebalances"] < 2:
        params = experts.turn(params)
        experts.counted(experts.args.loads)
    _have_written(experts)
    assert f"{file} is not written: " in caplog.text


def test_two_workers_of_one_process_id_may_write_one_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "counts.json"
    policy = ExpertPolicy(0, "trivial", True, str(file), eplb_rebalance_num_iterations=1)
    opened = _open("mixtral", 2, 2, 1, policy)
    one, other = (PlacedExperts(opened.model, policy) for _ in range(2))
    replace = Path.replace

    def after_the_other(begun: Path, target: Path) -> Path:
        """Let the other write its counts while the first is in the middle of writing its own."""
        monkeypatch.setattr(Path, "replace", replace)
        _counted_rows(opened, other, 2)
        _have_written(other)
        return replace(begun, target)

    monkeypatch.setattr(Path, "replace", after_the_other)
    counts = _counted_rows(opened, one, 1)
    _have_written(one)
    assert json.loads(file.read_text()) == {"logical_count": counts.tolist()}
    assert "is not written" not in caplog.text
    assert list(tmp_path.iterdir()) == [file]


def test_what_could_not_be_written_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "counts.json"
    file.mkdir()  # a folder, which no file can replace
    policy = ExpertPolicy(0, "trivial", True, str(file), eplb_rebalance_num_iterations=1)
    opened = _open("mixtral", 2, 2, 1, policy)
    _counted_rows(opened, opened.experts, 1)
    _have_written(opened.experts)
    assert f"{file} is not written: " in caplog.text
    assert list(tmp_path.iterdir()) == [file]


def test_a_disk_that_hangs_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "counts.json"
    policy = ExpertPolicy(0, "trivial", True, str(file), eplb_rebalance_num_iterations=1)
    opened = _open("mixtral", 2, 2, 1, policy)
    experts = PlacedExperts(opened.model, policy)
    disk_works = threading.Event()
    replace = Path.replace

    def replace_later(begun: Path, target: Path) -> Path:
        assert disk_works.wait(60)
        return replace(begun, target)

    monkeypatch.setattr(Path, "replace", replace_later)
    compile_all(experts.programs(abstract_like(opened.params)))
    counts, params = _counted_rows(opened, experts, 1), opened.params
    while experts.counters["eplb_rebalances"] < 2:
        params = experts.turn(params)
        experts.counted(experts.args.loads)
    assert f"{file} is not written: the counts before these are still being" in caplog.text
    disk_works.set()
    _have_written(experts)
    assert json.loads(file.read_text()) == {"logical_count": counts.tolist()}


def _have_written(experts: PlacedExperts) -> None:
    assert experts.written is not None
    experts.written.result(60)


def _counted_rows(opened: OpenedModel, experts: PlacedExperts, seed: int) -> np.ndarray:
    """Have counts read and written, before any layer is looked at. Returns the counts."""
    _told(opened, experts, seed)
    counts = np.asarray(experts.args.loads).sum(axis=0)
    for _ in range(2):
        experts.turn(opened.params)
        experts.counted(experts.args.loads)
    experts.turn(opened.params)
    return counts


@pytest.mark.parametrize("kind", ["map", "counts", "counts over time"])
def test_a_file_says_where_experts_are_at_the_start(kind: str, tmp_path: Path) -> None:
    layers = _open("mixtral", 1, 1, 1).model.cfg.num_layers
    loads = np.tile([1, 9, 1, 1, 9, 1, 1, 1], (layers, 1))
    maps = np.tile([3, 1, 0, 4, 2, 5, 6, 7, 4, 1], (layers, 1))
    told: dict[str, Any] = {
        "map": {"physical_to_logical_map": maps.tolist()},
        "counts": {"logical_count": loads.tolist()},
        "counts over time": {"logical_count": [loads.tolist(), (8 * loads).tolist()]},
    }
    file = tmp_path / "where.json"
    file.write_text(json.dumps(told[kind]))
    opened = _open("mixtral", 2, 2, 1, ExpertPolicy(2, str(file)))
    experts = opened.experts
    if kind == "map":
        assert (experts.placed == maps).all()
    assert (np.bincount(experts.placed[0]) == [1, 2, 1, 1, 2, 1, 1, 1]).all()
    compile_all(experts.programs(abstract_like(opened.params)))
    first = np.asarray(opened.params["layers"][0]["experts_down"][0])
    params = experts.settle(opened.params)
    placed = np.asarray(params["layers"][0]["experts_down"][0])
    assert (placed == first[experts.placed[0]]).all()
    assert experts.args.loads is None


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("no", "is no JSON file: "),
        ("[" * 100_000, "is no JSON file: "),
        ("[]", 'takes "physical_to_logical_map" or "logical_count"'),
        ("{}", 'takes "physical_to_logical_map" or "logical_count"'),
        (
            '{"logical_count": [[1]], "physical_to_logical_map": [[1]]}',
            'takes "physical_to_logical_map" or "logical_count"',
        ),
        (
            '{"physical_to_logical_map": [[0, 1, 2, 3]]}',
            "physical_to_logical_map is int64[1, 4]; accepted: integers from 0 on, [2, 4]",
        ),
        (
            '{"physical_to_logical_map": [[0, 1, 2, 0], [0, 1, 1, 0]]}',
            "must have each of 3 experts in every layer, and no other",
        ),
        (
            '{"physical_to_logical_map": [[0, 1, 2, 0], [0, 1, 2, 3]]}',
            "must have each of 3 experts in every layer, and no other",
        ),
        (
            '{"physical_to_logical_map": [[0, 1, 2, 0], [0, 0, 1, 2]]}',
            "has an expert twice in one of 2 parts; accepted: copies in different parts",
        ),
        ('{"physical_to_logical_map": [[0, 1, 2, -1], [0, 1, 2, 0]]}', "integers from 0 on"),
        ('{"physical_to_logical_map": [[0, 1, 2, 0.5], [0, 1, 2, 0]]}', "is float64[2, 4]"),
        ('{"logical_count": [[1, 2], [1, 2, 3]]}', "logical_count is list; accepted"),
        ('{"logical_count": {"0": 1}}', "logical_count is dict; accepted"),
        (
            '{"logical_count": [[1, 2], [1, 2]]}',
            "logical_count is int64[2, 2]; accepted: integers from 0 on, [2, 3] or [any, 2, 3]",
        ),
        ('{"logical_count": []}', "logical_count is float64[0]"),
    ],
)
def test_a_location_that_does_not_fit_is_refused(told: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "where.json"
    file.write_text(told)
    with pytest.raises(ModelError) as caught:
        read_location(str(file), 2, 3, 4, 2)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
