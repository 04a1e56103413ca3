"""A plan's figures for workers that do not run, against what real ones would have."""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.floors import Ceilings, decode_step_cost, experts_touched, prefill_chunk_cost
from bench.plan import Group, GroupConfig, PlanConfig, main, plan_group, report
from bench.shapes import (
    DEEPSEEK_V2_LITE,
    DEMO_MOE,
    GPT_OSS_20B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    Shape,
)
from model.config import ModelConfig
from model.errors import ModelError
from model.lora import lora_shape, read_adapters
from model.opening import OpenedModel
from model.page_runs import PlacedRuns
from model.programs import mib
from model.promises import Promises
from model.sharding import make_mesh
from model.transformer import Model
from model.weights import stored_bytes
from prefill.config import PrefillConfig
from tests.cluster import environment
from tests.model.harness import GOLDENS
from transfer import host_sizes
from transfer.checks import NamedPath
from transfer.errors import ConfigError
from transfer.keeping import most_saving

H200 = Ceilings(4300.0, 790.0)
PLAN = PlanConfig(Path())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"tp_size": 4}),
        ("qwen3", {"dp_size": 2, "tp_size": 2}),
        ("qwen3_moe", {"tp_size": 4, "ep_size": 2, "ep_num_redundant_experts": 4}),
        ("gpt_oss", {"tp_size": 2, "dp_size": 2, "ep_size": 4}),
        ("deepseek_v3", {"tp_size": 4, "ep_size": 2}),
    ],
)
def test_weights_and_pages_are_those_that_a_worker_stores(name: str, sizes: dict[str, Any]) -> None:
    cfg = ModelConfig.from_dir(GOLDENS / name / "model")
    config = GroupConfig(dtype="bfloat16", page_size=16, **sizes)
    group = plan_group(cfg, config, 1.0)
    mesh = make_mesh(config.tp_size, config.ep_size, dp_size=config.dp_size)
    model = Model.create(
        cfg,
        mesh,
        "bfloat16",
        16,
        config.ep_size > config.tp_size,
        redundant_experts=config.ep_num_redundant_experts,
    )
    assert group.weights_bytes * group.num_devices == stored_bytes(model)
    assert group.page_bytes * config.tp_size == model.kv_spec().all_layers_bytes
    left = int(0.85 * 2**30) - int(0.85 * 2**30) // 16 - group.weights_bytes
    assert group.num_pages == left // group.page_bytes


@pytest.mark.parametrize(
    ("name", "adapters", "sizes"),
    [
        ("llama", ("all", "queries"), {"tp_size": 4, "dp_size": 2}),
        ("qwen3_moe", ("attention",), {"tp_size": 2, "ep_size": 2}),
    ],
)
def test_adapters_take_what_a_worker_stores_for_them(
    name: str, adapters: tuple[str, ...], sizes: dict[str, Any]
) -> None:
    cfg = ModelConfig.from_dir(GOLDENS / name / "model")
    read = read_adapters([(x, GOLDENS / "lora" / f"{name}_{x}") for x in adapters], cfg)
    config = GroupConfig(dtype="bfloat16", page_size=16, **sizes)
    bare, group = (plan_group(cfg, config, 1.0, each) for each in ((), read))
    mesh = make_mesh(config.tp_size, config.ep_size, dp_size=config.dp_size)
    model = Model.create(cfg, mesh, "bfloat16", 16, lora=lora_shape(read))
    each = group.weights_bytes + group.lora_bytes
    assert each * group.num_devices == stored_bytes(model)
    assert (bare.weights_bytes, bare.lora_bytes) == (group.weights_bytes, 0)
    left = int(0.85 * 2**30) - int(0.85 * 2**30) // 16 - each
    assert group.num_pages == left // group.page_bytes < bare.num_pages
    assert f"adapters of a device        {mib(group.lora_bytes)}" in told(group, bare)
    assert "adapters" not in told(bare, bare)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_pages_that_move_to_the_host_and_back_leave_the_pool_less_room(dp_size: int) -> None:
    cfg = ModelConfig.from_dir(GOLDENS / "gpt_oss" / "model")
    config = GroupConfig(dtype="bfloat16", page_size=16, dp_size=dp_size)
    keeping = dataclasses.replace(config, enable_hierarchical_cache=True)
    runs = (1, 4)
    bare, group = (plan_group(cfg, each, 0.1, run_pages=runs) for each in (config, keeping))
    model = Model.create(cfg, make_mesh(1, 1, dp_size=dp_size), "bfloat16", 16)
    kv = model.kv_spec()
    spare = most_saving(runs) + PlacedRuns(kv, model.mesh, runs).spare_pages
    left = int(0.1 * 0.85 * 2**30) - int(0.1 * 0.85 * 2**30) // 16 - group.weights_bytes
    assert bare.num_pages == left // group.page_bytes
    assert group.num_pages == (left - spare * kv.page_bytes) // group.page_bytes
    decode = plan_group(cfg, keeping, 0.1, computes_prompts=False)
    assert (decode.num_pages, decode.kept_pages) == (bare.num_pages, 0)
    assert "host: evicted prefixes      none: prefill computes the prompts" in told(bare, decode)


@pytest.mark.parametrize("fields", [{}, {"hicache_ratio": 0.5}, {"hicache_size": 3}])
def test_the_host_keeps_as_many_pages_as_a_worker_takes_memory_for(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cfg = ModelConfig.from_dir(GOLDENS / "gpt_oss" / "model")
    sizes: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_hierarchical_cache": True}
    group = plan_group(cfg, GroupConfig(dtype="bfloat16", page_size=16, **sizes, **fields), 0.1)
    worker = PrefillConfig(tmp_path, "127.0.0.1:1", **sizes, **fields)
    model = Model.create(cfg, make_mesh(2, 1, dp_size=2), "bfloat16", 16)
    opened = cast(OpenedModel, SimpleNamespace(kv=model.kv_spec(), model=model))
    engine = cast(Any, SimpleNamespace(num_pages=group.num_pages, max_run_pages=32))
    monkeypatch.setattr(host_sizes, "PROMISES", Promises(tmp_path))
    monkeypatch.setattr(host_sizes, "HostMemory", lambda *_: None)
    monkeypatch.setattr(host_sizes, "available_bytes", lambda: group.kept_bytes)
    taken = host_sizes.take_hosts(worker, opened, engine).num_pages
    assert taken == group.kept_pages
    assert f"host: evicted prefixes      {taken:,} pages, " in told(group, group)
    monkeypatch.setattr(host_sizes, "available_bytes", lambda: group.kept_bytes - 1)
    with pytest.raises(ModelError, match=f"{taken} pages take "):
        host_sizes.take_hosts(worker, opened, engine)


def test_what_waits_for_decode_is_bounded_by_a_queue_and_two_chunks_or_by_decodes_pool() -> None:
    group = plan_group(QWEN3_8B.cfg, GroupConfig(dtype="bfloat16", dp_size=2), 139.0)
    page_bytes = 36 * 2 * 8 * 128 * 64 * 2
    plan = dataclasses.replace(PLAN, transfer_queue_bytes=3 << 30)
    waiting = ((3 << 30) + 2 * 2 * 128 * page_bytes) / 2**30
    assert PLAN.transfer_queue_bytes == PrefillConfig.transfer_queue_bytes
    line = "host: pages to be sent      {:.1f} GiB for each decode worker"
    assert line.format(waiting) in told(group, group, plan)
    small = dataclasses.replace(group, num_pages=100)
    assert line.format(200 * page_bytes / 2**30) in told(group, small, plan)


def told(prefill: Group, decode: Group, plan: PlanConfig = PLAN) -> str:
    """The report of groups for requests that any of the models takes."""
    return "\n".join(report(dataclasses.replace(plan, input_tokens=64), prefill, decode))


def test_one_device_takes_the_floor_of_the_whole() -> None:
    for shape in (QWEN3_8B, QWEN3_30B_A3B):
        group = plan_group(shape.cfg, GroupConfig(dtype="bfloat16"), 139.0)
        step, chunk = group.step_s(16, 1024, H200), group.chunk_s(2048, 1, H200)
        assert step == pytest.approx(decode_step_cost(shape, 16, 1024).floor_s(H200))
        assert chunk == pytest.approx(prefill_chunk_cost(shape, 2048).floor_s(H200))


def test_devices_share_a_step_and_ranks_that_share_experts_read_them_once() -> None:
    cfg = QWEN3_30B_A3B.cfg
    sizes: list[dict[str, Any]] = [
        {},
        {"tp_size": 4},
        {"dp_size": 4},
        {"dp_size": 4, "ep_size": 4},
    ]
    one, quarter, apart, together = (
        plan_group(cfg, GroupConfig(dtype="bfloat16", **x), 139.0).step_s(64, 1024, H200)
        for x in sizes
    )
    assert quarter == pytest.approx(one / 4)
    assert apart == pytest.approx(one)
    # Four times the rows read a quarter of nearly all experts; the rest costs what one device pays.
    assert one / 4 < together < one / 2


@pytest.mark.parametrize(("shape", "tp_size"), [(DEEPSEEK_V2_LITE, 8), (QWEN3_30B_A3B, 8)])
def test_devices_with_a_copy_each_of_a_key_read_it_each(shape: Shape, tp_size: int) -> None:
    config = GroupConfig(dtype="bfloat16", tp_size=tp_size)
    group = plan_group(shape.cfg, config, 139.0)
    token_bytes = group.page_bytes / config.page_size
    context, slots = 16384, 64
    shorter, longer = (group.step_s(slots, x, H200) for x in (context, 2 * context))
    assert longer - shorter == pytest.approx(slots * context * token_bytes / 4300e9, rel=0.01)
    few = Ceilings(1.0, 1e9)  # so low a bandwidth that bytes decide
    one, two = (group.chunk_s(x, 1, few) for x in (4096, 8192))
    assert two - one > 2 * 4096 * token_bytes / 1e9


def test_more_prompts_in_a_chunk_read_the_weights_once() -> None:
    one, two = (prefill_chunk_cost(QWEN3_8B, 64, count) for count in (1, 2))
    weights = 2 * prefill_chunk_cost(QWEN3_8B, 64).num_bytes - two.num_bytes
    params = 8.19e9 - 151936 * 4096  # the embedding is not read
    assert weights == pytest.approx(2 * params, rel=2e-3)
    assert two.flops == pytest.approx(2 * one.flops)


def test_pages_of_a_byte_a_number_are_half_as_large_and_read_in_half_the_time() -> None:
    cfg = QWEN3_8B.cfg
    config = GroupConfig(dtype="bfloat16")
    wide = plan_group(cfg, config, 139.0)
    narrow = plan_group(cfg, dataclasses.replace(config, kv_cache_dtype="fp8_e4m3"), 139.0)
    assert narrow.page_bytes * 2 == wide.page_bytes
    gained = wide.step_s(64, 8192, H200) - narrow.step_s(64, 8192, H200)
    kv_bytes = 36 * 2 * 8 * 128 * 64 * 8192
    assert gained == pytest.approx(kv_bytes / 4300e9)


def test_codes_take_half_of_the_memory_and_are_read_in_half_the_time() -> None:
    cfg, config = QWEN3_30B_A3B.cfg, GroupConfig(dtype="bfloat16")
    wide = plan_group(cfg, config, 139.0)
    narrow = plan_group(cfg, dataclasses.replace(config, quantization="fp8"), 139.0)
    experts, dense = 48 * 128 * 3 * 2048 * 768, 48 * 2048 * 128 * (2 * 32 + 2 * 4)
    assert wide.weights_bytes - narrow.weights_bytes == (experts + dense) * (2 - 1 - 4 / 128)
    touched = experts_touched(cfg, 64) / 128 * experts + dense
    gained = wide.step_s(64, 1024, H200) - narrow.step_s(64, 1024, H200)
    assert gained == pytest.approx(touched * (1 - 4 / 128) / 4300e9)
    # Where two devices share each expert, no scale spans both of them.
    halves = plan_group(cfg, dataclasses.replace(config, quantization="fp8", tp_size=2), 139.0)
    assert halves.dims.coded_inputs["experts_down"][:2] == (384, 128)


def test_a_plan_has_the_codes_that_a_checkpoint_of_its_kind_has() -> None:
    cfg, config = QWEN3_30B_A3B.cfg, GroupConfig(dtype="bfloat16", quantization="fp8")
    four = dataclasses.replace(cfg, quantization="int4", quantized_block=(1, 32))
    assert plan_group(four, config, 139.0).dims.coded == ("experts_gate_up", "experts_down")
    # Of 16 devices each has 684 of a dense layer's 10,944 inputs, of which 4 could share a scale.
    narrow = dataclasses.replace(DEEPSEEK_V2_LITE.cfg, quantization="fp8")
    wide = dataclasses.replace(config, tp_size=16, ep_size=16)
    kept = plan_group(narrow, wide, 139.0).dims.coded
    assert "down" not in kept
    assert {"gate_up", "experts_down", "shared_down"} <= set(kept)
    eight = dataclasses.replace(cfg, quantization="fp8")
    assert plan_group(eight, config, 139.0).dims.coded == tuple(
        plan_group(cfg, config, 139.0).dims.coded_inputs
    )


def test_codes_of_a_plan_are_what_the_checkpoint_has_or_refused() -> None:
    cfg, config = QWEN3_30B_A3B.cfg, GroupConfig(dtype="bfloat16", quantization="int8")
    assert plan_group(cfg, config, 139.0).shape.codes == "int8"
    eight = dataclasses.replace(cfg, quantization="int8-packed", quantized_block=(1, 0))
    group = plan_group(eight, config, 139.0)
    assert group.dims.coded == tuple(group.dims.coded_inputs)
    assert group.weights_bytes == plan_group(cfg, config, 139.0).weights_bytes
    with pytest.raises(ModelError, match=r"do not fit: .* or give --quantization int8"):
        plan_group(eight, dataclasses.replace(config, quantization="auto"), 40.0)
    with pytest.raises(ModelError, match=r"--quantization fp8: .* weights are int8-packed, "):
        plan_group(eight, dataclasses.replace(config, quantization="fp8"), 139.0)


def test_what_a_device_holds_is_told_with_its_codes_in_units_that_fit_it() -> None:
    config = GroupConfig(dtype="bfloat16", quantization="fp8")
    large, small = (plan_group(shape.cfg, config, 139.0) for shape in (QWEN3_30B_A3B, DEMO_MOE))
    lines = report(PLAN, large, large)
    assert "  weights of a device         29.9 GiB, bfloat16, layers in fp8" in lines
    plan = dataclasses.replace(PLAN, input_tokens=64, output_tokens=8)
    (line,) = {x for x in report(plan, small, small) if "weights of a device" in x}
    assert re.fullmatch(
        r"  weights of a device +[1-9][0-9.]+ MiB, bfloat16(, layers in fp8)?", line
    )


def test_codes_of_a_folder_in_orbax_form_are_refused_as_a_worker_refuses_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "params").mkdir()
    shutil.copy(GOLDENS / "qwen3_moe" / "model" / "config.json", tmp_path)
    line = r"in Orbax form; accepted with --quantization int8: safetensors"
    with pytest.raises(ModelError, match=line):
        main(["--model-path", str(tmp_path), "--decode-quantization=int8"])


def test_a_request_keeps_and_sends_what_windows_see_of_half_of_the_layers() -> None:
    cfg, config = GPT_OSS_20B.cfg, GroupConfig(dtype="bfloat16")
    whole = plan_group(cfg, config, 80.0)
    decode = plan_group(cfg, config, 80.0, computes_prompts=False)
    assert (whole.num_pages, whole.ring_pages, decode.ring_pages) == (decode.num_pages, 0, 3)
    assert whole.requests(8192) == whole.num_pages // 128
    assert decode.requests(8192) == 2 * decode.num_pages // (128 + 3)
    assert decode.requests(64) == decode.num_pages  # no window is that short
    page_bytes = 64 * 24 * 2 * 8 * 64 * 2
    assert whole.sent_bytes(8192) == 128 * page_bytes
    assert decode.sent_bytes(8192) == (128 + 2) * page_bytes // 2
    assert decode.sent_bytes(8193) == (129 + 3) * page_bytes // 2
    other = plan_group(QWEN3_8B.cfg, config, 80.0, computes_prompts=False)
    assert (other.ring_pages, other.requests(8192)) == (0, other.num_pages // 128)


def test_the_number_of_workers_follows_from_the_slower_role() -> None:
    cfg = QWEN3_30B_A3B.cfg
    prefill, decode = (plan_group(cfg, GroupConfig(dtype="bfloat16"), 139.0) for _ in range(2))
    lines = report(PLAN, prefill, decode)
    taken = 8 / prefill.chunk_s(1024, 8, H200)
    ended = 256 / decode.step_s(256, 1152, H200) / 255
    assert f"1.0 prefill, {taken / ended:.1f} decode" in lines[-2]
    assert f"{taken:,.1f} /s" in lines[-1]
    longer = report(
        dataclasses.replace(PLAN, input_tokens=16384, output_tokens=16), prefill, decode
    )
    assert "prefill, 1.0 decode" in longer[-2]


def test_decode_draws_all_tokens_of_an_answer_but_the_first() -> None:
    group = plan_group(QWEN3_30B_A3B.cfg, GroupConfig(dtype="bfloat16"), 139.0)
    told = report(dataclasses.replace(PLAN, input_tokens=64, output_tokens=2), group, group)
    taken, ended = 8 / group.chunk_s(64, 8, H200), 256 / group.step_s(256, 65, H200)
    assert f"{ended / taken:.1f} prefill, 1.0 decode" in told[-2]
    told = report(dataclasses.replace(PLAN, output_tokens=1), group, group)
    taken = 8 / group.chunk_s(1024, 8, H200)
    assert told[-2].endswith("prefill alone, as decode only receives")
    assert told[-1].endswith(f"{taken:,.1f} /s for each prefill worker")


@pytest.mark.parametrize("most", [PrefillConfig.max_seqs_per_chunk, 16])
def test_a_chunk_has_no_more_prompts_than_a_prefill_worker_packs(most: int) -> None:
    group = plan_group(QWEN3_30B_A3B.cfg, GroupConfig(dtype="bfloat16"), 139.0)
    plan = dataclasses.replace(PLAN, input_tokens=64, max_seqs_per_chunk=most)
    assert PLAN.max_seqs_per_chunk == PrefillConfig.max_seqs_per_chunk
    told = "\n".join(report(plan, group, group))
    assert f"chunks of {most} prompt(s)" in told
    assert f"{most / group.chunk_s(64, most, H200):,.1f} prompts/s" in told


def test_slots_are_of_all_ranks_as_those_of_a_worker() -> None:
    cfg = QWEN3_30B_A3B.cfg
    group = plan_group(cfg, GroupConfig(dtype="bfloat16", dp_size=4), 139.0)
    told = report(dataclasses.replace(PLAN, max_running_requests=32), group, group)
    assert "step of 8 slot(s)" in told[-3]
    with pytest.raises(ConfigError, match="--dp-size 4 must divide --max-running-requests 30"):
        report(dataclasses.replace(PLAN, max_running_requests=30), group, group)


@pytest.mark.parametrize(
    ("values", "memory_gib", "message"),
    [
        ({}, 40.0, "weights of 56.9 GiB a device do not fit: 0.85 of 40 GiB, less a sixteenth"),
        ({"tp_size": 3}, 139.0, "tp_size 3 and 4 kv heads"),
        ({"page_size": 24}, 139.0, "--page-size must be a power of two, got 24"),
        ({"ep_num_redundant_experts": 8}, 139.0, "8 redundant experts: 128 experts in 1 parts"),
        (
            {"enable_hierarchical_cache": True, "hicache_ratio": 1e-9},
            139.0,
            "keeps not one page of 6.0 MiB in the host's memory",
        ),
        (
            {"enable_hierarchical_cache": True},
            72.6,
            "weights of 56.9 GiB, pages that move to and from the host of 1.5 GiB a device do not",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    values: dict[str, Any], memory_gib: float, message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        plan_group(QWEN3_30B_A3B.cfg, GroupConfig(dtype="bfloat16", **values), memory_gib)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (GroupConfig, {"tp_size": 0}, "--tp-size must be at least 1, got 0"),
        (GroupConfig, {"tp_size": 2, "ep_size": 4}, "--ep-size 4 must divide --tp-size 2"),
        (GroupConfig, {"mem_fraction_static": 0.0}, "--mem-fraction-static must be in (0, 1]"),
        (PlanConfig, {"output_tokens": 0}, "--output-tokens must be above 0, got 0"),
        (PlanConfig, {"max_running_requests": -1}, "--max-running-requests must be at least 0"),
        (PlanConfig, {"max_running_requests": 9000}, "--max-running-requests must be at most 8192"),
        (GroupConfig, {"tp_size": 2048}, "--tp-size 2048: at most 1024 devices, got 2048"),
        (PlanConfig, {"copy_gb": 1e300}, "--copy-gb must be at most 1000000000.0, got 1e+300"),
        (PlanConfig, {"link_gb": 1e-320}, "--link-gb must be at least 1e-06, got 1e-320"),
        (PlanConfig, {"device_memory_gib": 1e300}, "--device-memory-gib must be at most"),
        (PlanConfig, {"link_gb": -1.0}, "--link-gb must be above 0, got -1.0"),
        (PlanConfig, {"copy_gb": float("nan")}, "--copy-gb must be above 0, got nan"),
        (GroupConfig, {"hicache_ratio": 0.0}, "--hicache-ratio must be above 0, got 0.0"),
        (GroupConfig, {"hicache_ratio": 1e308}, "--hicache-ratio must be at most 1000000, got"),
        (GroupConfig, {"hicache_size": -1}, "--hicache-size must be at least 0, got -1"),
        (PlanConfig, {"transfer_queue_bytes": -1}, "--transfer-queue-bytes must be at least 0"),
        (PlanConfig, {"lora_paths": 2 * (NamedPath("a", Path()),)}, "must name each adapter once"),
    ],
)
def test_a_value_out_of_range_is_refused(kind: Any, values: dict[str, Any], message: str) -> None:
    given = {"model_path": Path()} if kind is PlanConfig else {}
    with pytest.raises(ConfigError) as caught:
        kind(**given, **values)
    assert message in str(caught.value)


def test_pages_that_differ_and_requests_too_long_are_refused() -> None:
    cfg = QWEN3_30B_A3B.cfg
    one, other, narrow = (
        plan_group(cfg, GroupConfig(dtype="bfloat16", **x), 139.0)
        for x in ({}, {"page_size": 16}, {"kv_cache_dtype": "fp8_e4m3"})
    )
    with pytest.raises(ModelError, match="page_size differs: prefill has 64, decode has 16"):
        report(PLAN, one, other)
    with pytest.raises(ModelError, match="page_dtype differs: prefill has bfloat16, decode has fl"):
        report(PLAN, one, narrow)
    with pytest.raises(ModelError, match="50256 tokens are above the model's 40960"):
        report(dataclasses.replace(PLAN, input_tokens=50_000), one, one)
    with pytest.raises(ModelError, match="--page-size 64 does not divide --chunked-prefill-size 1"):
        report(dataclasses.replace(PLAN, chunked_prefill_size=100), one, one)
    small = dataclasses.replace(one, num_pages=19)  # 20 pages of 64 tokens would be needed
    with pytest.raises(ModelError, match="no request of 1280 tokens fits the pages of decode"):
        report(PLAN, one, small)


def test_the_command_reads_a_checkpoint_and_no_device(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "serving.launch", "plan", "--model-path")
    path = str(GOLDENS / "qwen3_moe" / "model")
    flags = (
        *("--input-tokens=64", "--output-tokens=8", "--prefill-tp-size=2", "--page-size=16"),
        f"--lora-paths=a={GOLDENS / 'lora' / 'qwen3_moe_attention'}",
        *("--prefill-enable-hierarchical-cache", "--hicache-size=1", "--transfer-queue-bytes=0"),
    )
    done = subprocess.run(
        [*command, path, *flags],
        env=environment() | {"JAX_PLATFORMS": "nowhere"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "prefill, 2 device(s)" in done.stdout
    assert "decode, 1 device(s)" in done.stdout
    assert "adapters of a device" in done.stdout
    assert "host: evicted prefixes" in done.stdout
    for bad, line in (
        (["/nowhere"], "--model-path /nowhere is not a folder"),
        ([path, f"--lora-paths=a={tmp_path}"], f"{tmp_path}/adapter_config.json: no such file"),
    ):
        failed = subprocess.run(
            [*command, *bad],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert failed.returncode == 2
        assert failed.stderr.startswith(f"kvferry plan: {line}")
