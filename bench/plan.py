"""`kvferry plan`: what fits on devices that need not be here, and how fast it could be at best.

Weights, adapters and pages are counted as a worker with these flags would store them. Times are
the floors of bench/floors.py on devices whose ceilings are given. They leave out traffic between
devices, launches, adapters and intermediate results, so a real step takes longer.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh

from bench.floors import (
    Ceilings,
    Cost,
    chunk_key_bytes,
    decode_step_cost,
    kv_bytes_per_token,
    moe_cost,
    prefill_chunk_cost,
    step_key_bytes,
)
from bench.shapes import Shape
from decode.config import MAX_SLOTS
from decode.rings import first_seen
from model.buckets import (
    MAX_SEQS_PER_CHUNK,
    RUN_LENGTHS,
    PrefillBuckets,
    check_page_size,
    pages_for,
    prefill_buckets,
    touched_pages,
)
from model.config import FP8, KVSpec, ModelConfig
from model.config_quantised import codes_of
from model.errors import ModelError
from model.lora import Adapter, AdapterFiles, lora_shape, lora_sources, read_adapters
from model.orbax import is_orbax, refuse_codes
from model.page_runs import RUNS_PLACED_AHEAD
from model.params import Leaf, lora_leaves, param_leaves
from model.programs import mib
from model.sharding import Dims, abstract_mesh, kv_spec
from transfer import flags, terminal
from transfer.checks import NamedPath, above_zero, at_least, at_most
from transfer.errors import ConfigError
from transfer.host_sizes import pages_kept, returning_bytes
from transfer.keeping import most_saving
from transfer.worker_config import (
    WORKER_HELP,
    WorkerConfig,
    check_devices,
    check_experts,
    check_kept,
    check_named_once,
)

ROLES: Final = ("prefill", "decode")
_LEAST, _MOST = 1e-6, 1e9  # of a device's figures: beyond, times would be 0 or without end
_SLOTS: Final = 256  # of a rank: the default of workers on accelerators
STEPS: Final = (1, 16, 64, 256)  # slots of a rank for which steps are listed, if they fit


@dataclass(frozen=True)
class GroupConfig:
    """One worker of a role. Names are those of its flags."""

    tp_size: int = 1
    ep_size: int = 1
    dp_size: int = 1
    ep_num_redundant_experts: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8_e4m3"] = "auto"
    quantization: Literal["auto", "none", "fp8", "int8"] = "auto"
    page_size: int = 64
    mem_fraction_static: float = 0.85
    enable_hierarchical_cache: bool = False
    hicache_ratio: float = WorkerConfig.hicache_ratio
    hicache_size: int = 0

    def __post_init__(self) -> None:
        for name in ("tp_size", "ep_size", "dp_size", "page_size"):
            at_least(self, name, 1)
        at_least(self, "ep_num_redundant_experts", 0)
        check_devices(self.tp_size, self.dp_size)
        check_experts(self.ep_size, self.tp_size, self.dp_size)
        if not 0.0 < self.mem_fraction_static <= 1.0:
            got = self.mem_fraction_static
            raise ConfigError(f"--mem-fraction-static must be in (0, 1], got {got}")
        check_kept(self)


@dataclass(frozen=True)
class PlanConfig:
    """The load and the devices. Defaults are about those of an H200, and were not measured."""

    model_path: Path
    lora_paths: tuple[NamedPath, ...] = ()
    input_tokens: int = 1024
    output_tokens: int = 256
    chunked_prefill_size: int = 8192
    max_seqs_per_chunk: int = 8  # prompts packed into one chunk
    max_running_requests: int = 0  # slots of all ranks, as of a worker; 0: 256 for each
    transfer_queue_bytes: int = 2 << 30
    device_memory_gib: float = 104.0  # three quarters of an H200
    copy_gb: float = 4300.0  # a second, read and written
    matmul_tflop: float = 790.0  # a second
    link_gb: float = 25.0  # a second

    def __post_init__(self) -> None:
        at_least(self, "max_running_requests", 0)
        at_most(self, "max_running_requests", MAX_SLOTS)
        at_most(self, "max_seqs_per_chunk", MAX_SEQS_PER_CHUNK)
        at_least(self, "transfer_queue_bytes", 0)
        check_named_once(self.lora_paths)
        for name in ("input_tokens", "output_tokens", "chunked_prefill_size", "max_seqs_per_chunk"):
            above_zero(self, name)
        for name in ("device_memory_gib", "copy_gb", "matmul_tflop", "link_gb"):
            above_zero(self, name)
            at_least(self, name, _LEAST)
            at_most(self, name, _MOST)

    @property
    def ceilings(self) -> Ceilings:
        return Ceilings(self.copy_gb, self.matmul_tflop)

    def slots(self, dp_size: int) -> int:
        """Most slots of each of `dp_size` ranks. Raises ConfigError if they do not divide."""
        if self.max_running_requests % dp_size:
            raise ConfigError(
                f"--dp-size {dp_size} must divide --max-running-requests "
                f"{self.max_running_requests}: all ranks have the same number of slots"
            )
        return self.max_running_requests // dp_size or _SLOTS

    @property
    def request_tokens(self) -> int:
        """Positions that a request fills in the end."""
        return self.input_tokens + self.output_tokens


HELP = {
    "model_path": "checkpoint folder; only its JSON files are read",
    "tp_size": "devices that share each layer, in each data-parallel rank",
    "ep_size": "parts into which the experts are divided",
    "dp_size": "number of data-parallel ranks",
    "ep_num_redundant_experts": "copies of experts that each layer has in addition",
    "dtype": "type of weights; auto: the checkpoint's",
    "kv_cache_dtype": "type of pages; auto: that of --dtype",
    "quantization": "type of the layers' weights; none, auto: --dtype; fp8, int8: one byte each",
    "page_size": "tokens in a page",
    "mem_fraction_static": "share of a device's memory for weights, scratch and pages",
    "input_tokens": "tokens of each prompt",
    "output_tokens": "tokens of each answer",
    "chunked_prefill_size": "maximum prompt tokens computed at once",
    "max_seqs_per_chunk": "maximum number of prompts packed into one chunk",
    "max_running_requests": "slots: maximum number of requests decoded at once, over all "
    "data-parallel ranks; 0: 256 for each rank",
    "device_memory_gib": "GiB that JAX takes of a device, three quarters of what an H200 has",
    "copy_gb": "GB per second that a device reads and writes, about an H200's",
    "matmul_tflop": "10^12 operations per second of a device's matrix products, about an H200's",
    "link_gb": "GB per second from a prefill to a decode worker",
}
# The same as of workers.
HELP |= {
    name: WORKER_HELP[name]
    for name in (
        "lora_paths",
        "enable_hierarchical_cache",
        "hicache_ratio",
        "hicache_size",
        "transfer_queue_bytes",
    )
}


@dataclass(frozen=True)
class Group:
    """What a worker stores, and the least time that its steps and chunks take."""

    config: GroupConfig
    shape: Shape
    dims: Dims
    weights_bytes: int  # of a device
    lora_bytes: int  # of a device, all adapters
    page_bytes: int  # of a device, all layers
    num_pages: int  # of a rank
    ring_pages: int  # of a request, for layers with a window; 0: as many as for the others
    kept_pages: int = 0  # evicted ones that the host keeps
    kept_bytes: int = 0  # of the host's memory, for these

    @property
    def num_devices(self) -> int:
        return self.config.dp_size * self.config.tp_size

    def requests(self, tokens: int) -> int:
        """How many requests of `tokens` positions each a rank holds at once."""
        pages = pages_for(tokens, self.config.page_size)
        groups = self.shape.cfg.page_groups
        each = pages + min(pages, self.ring_pages) if self.ring_pages else groups * pages
        return groups * self.num_pages // each

    def sent_bytes(self, tokens: int) -> int:
        """Bytes of the pages that prefill sends this group for a prompt."""
        page, cfg = self.config.page_size, self.shape.cfg
        each = pages = pages_for(tokens, page)
        if self.ring_pages:
            each = pages - first_seen(tokens, cfg.sliding_window, page)
        share = (pages + each * (cfg.page_groups - 1)) / cfg.page_groups
        return int(share * page * kv_bytes_per_token(self.shape))

    def step_s(self, slots: int, context: int, ceilings: Ceilings) -> float:
        """Least seconds of a step in which every rank has `slots` slots."""
        cost = decode_step_cost(self.shape, slots, context)
        return self._floor_s(cost, slots, step_key_bytes(self.shape, slots, context), ceilings)

    def chunk_s(self, tokens: int, prompts: int, ceilings: Ceilings) -> float:
        """Least seconds of a chunk in which every rank has `prompts` prompts of `tokens` tokens."""
        cost = prefill_chunk_cost(self.shape, tokens, prompts)
        key_bytes = chunk_key_bytes(self.shape, tokens, prompts)
        return self._floor_s(cost, tokens * prompts, key_bytes, ceilings)

    def _floor_s(self, whole: Cost, rows: int, key_bytes: float, ceilings: Ceilings) -> float:
        """whole: the cost of a rank with experts of its own, on all its devices.

        key_bytes: the bytes of `whole` for keys and values. Each device that has a copy of a key
        reads it. Ranks that share the experts compute them together, for the rows of all ranks on
        all devices.
        """
        layers, tp = sum(self.shape.cfg.moe_layers), self.config.tp_size
        own = moe_cost(self.shape, rows).times(layers) if layers else Cost(0.0, 0.0)
        copies = self.dims.kv_heads / self.shape.cfg.num_kv_heads
        num_bytes = whole.num_bytes + (copies - 1) * key_bytes
        total = _over(Cost(num_bytes - own.num_bytes, whole.flops - own.flops), tp)
        if layers:
            ranks = self.config.dp_size if self.dims.ranks_share_experts else 1
            total += _over(moe_cost(self.shape, ranks * rows).times(layers), ranks * tp)
        return total.floor_s(ceilings)


def _over(cost: Cost, devices: int) -> Cost:
    return Cost(cost.num_bytes / devices, cost.flops / devices)


def plan_group(
    cfg: ModelConfig,
    config: GroupConfig,
    memory_gib: float,
    adapters: Sequence[Adapter] = (),
    run_pages: tuple[int, ...] = RUN_LENGTHS,
    computes_prompts: bool = True,
) -> Group:
    """What one worker stores.

    run_pages: see model.buckets.PrefillBuckets. computes_prompts: if it does not, it has rings, see
    decode/rings.py, and the host keeps nothing for it.
    Raises ModelError when it does not fit, or cannot be divided so.
    """
    mesh = abstract_mesh(config.tp_size, config.ep_size, config.dp_size)
    shared = config.ep_size > config.tp_size
    codes = codes_of(cfg.quantization, config.quantization)
    dims = Dims.of(cfg, mesh, shared, config.ep_num_redundant_experts, codes=codes)
    # The devices of a plan are accelerators, where "auto" keeps no codes.
    coded = dims.coded_as_published(config.quantization)
    dims = replace(dims, coded=coded, lora=lora_shape(adapters))
    dtype = cfg.torch_dtype if config.dtype == "auto" else config.dtype
    pages = {"auto": dtype, "fp8_e4m3": FP8}.get(config.kv_cache_dtype, config.kv_cache_dtype)
    check_page_size(config.page_size, config.page_size, config.page_size)
    stored = jax.numpy.dtype(dtype)
    if adapters:
        lora_sources(AdapterFiles(adapters, stored), dims, adapters)  # refuses what does not fit
    weights = _device_bytes(param_leaves(dims, stored), mesh)
    lora = _device_bytes(lora_leaves(dims, stored), mesh)
    kv = kv_spec(dims, config.page_size, pages)
    page_bytes = kv.all_layers_bytes // config.tp_size
    budget = int(memory_gib * 2**30 * config.mem_fraction_static)
    # A sixteenth, as a worker assumes until it knows the scratch memory of its programs.
    budget -= budget // 16
    keeps = config.enable_hierarchical_cache and computes_prompts
    moving = _moving_pages(config, run_pages) * page_bytes // kv.groups if keeps else 0
    left = budget - weights - lora - moving
    if left < page_bytes:
        beside = f", adapters of {mib(lora)}" * (lora > 0)
        beside += f", pages that move to and from the host of {_gib(moving)}" * (moving > 0)
        raise ModelError(
            f"weights of {_gib(weights)}{beside} a device do not fit: {config.mem_fraction_static} "
            f"of {memory_gib:g} GiB, less a sixteenth for scratch, is {_gib(budget)}; "
            f"raise --tp-size or --ep-size{f', or give --quantization {codes}' * (not dims.coded)}"
        )
    codes = codes if dims.coded else ""
    shape = Shape("plan", cfg, dtype, config.page_size, STEPS, 0, (), pages, codes)
    apart = not computes_prompts and cfg.page_groups > 1
    ring = touched_pages(cfg.sliding_window, config.page_size) if apart else 0
    num_pages = left // page_bytes
    group = Group(config, shape, dims, weights, lora, page_bytes, num_pages, ring)
    return _with_host_pages(group, kv, run_pages[-1]) if keeps else group


def _device_bytes(tree: Any, mesh: AbstractMesh) -> int:
    """Bytes of a device for a tree of `Leaf`s."""
    leaves: list[Leaf] = jax.tree.leaves(tree)
    return sum(
        math.prod(leaf.sharding(mesh).shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in leaves
    )


def _moving_pages(config: GroupConfig, run_pages: tuple[int, ...]) -> int:
    """Pages of a rank on their way to the host and back: it has room for them beside its pool.

    As model.page_runs.PlacedRuns.spare_pages and, for the way there, most_saving.
    """
    nothing = sum(run_pages) if config.dp_size > 1 else 0
    return most_saving(run_pages) + RUNS_PLACED_AHEAD * run_pages[-1] + nothing


def _with_host_pages(group: Group, kv: KVSpec, longest_run: int) -> Group:
    """Raises ModelError if the host keeps no page."""
    config, pool_pages = group.config, group.num_pages * group.config.dp_size
    kept = pages_kept(kv, pool_pages, config.hicache_size, config.hicache_ratio)
    kept_bytes = kept * kv.all_layers_bytes + returning_bytes(kv, longest_run)
    return replace(group, kept_pages=kept, kept_bytes=kept_bytes)


def main(argv: Sequence[str], prog: str = "kvferry plan") -> None:
    """Print the plan for a prefill and a decode worker with these flags."""
    parser = flags.Parser(
        prog=prog,
        description="tell what fits on devices that need not be here, and how fast it is at best",
    )
    flags.add_flags(parser, PlanConfig, HELP)
    flags.add_flags(parser, GroupConfig, HELP)
    for role in ROLES:
        flags.add_flags(
            parser.add_argument_group(f"{role}, where it differs"), GroupConfig, HELP, prefix=role
        )
    args = parser.parse_args(argv)
    plan = flags.config_from(PlanConfig, args)
    cfg = ModelConfig.from_dir(plan.model_path)
    prefill, decode = (flags.config_from(GroupConfig, args, role) for role in ROLES)
    if is_orbax(plan.model_path):
        for config in (prefill, decode):
            refuse_codes(plan.model_path, config.quantization)
    adapters = read_adapters(plan.lora_paths, cfg)
    runs = _buckets(plan, cfg, prefill.page_size).run_pages
    sizes = plan.device_memory_gib, adapters
    groups = (
        plan_group(cfg, prefill, *sizes, runs),
        plan_group(cfg, decode, *sizes, computes_prompts=False),
    )
    terminal.say("\n".join(report(plan, *groups)))


def _buckets(plan: PlanConfig, cfg: ModelConfig, page_size: int) -> PrefillBuckets:
    """Shapes of the programs of a prefill worker with the model's whole context."""
    limit = cfg.max_position_embeddings
    context = limit // page_size * page_size or limit
    chunk = min(plan.chunked_prefill_size, pages_for(context, page_size) * page_size)
    return prefill_buckets(chunk, plan.max_seqs_per_chunk, context, page_size, cfg.page_groups)


def report(plan: PlanConfig, prefill: Group, decode: Group) -> list[str]:
    """The plan as lines. A prompt longer than a chunk is computed as if it were one chunk.

    Raises ModelError if the pages of the two differ or do not divide a chunk, or if a request is
    too long or does not fit.
    """
    for what in ("page_size", "page_dtype"):
        one, other = (getattr(group.shape, what) for group in (prefill, decode))
        if one != other:
            raise ModelError(f"{what} differs: prefill has {one}, decode has {other}")
    page_size = prefill.shape.page_size
    check_page_size(page_size, plan.chunked_prefill_size, page_size)
    cfg, whole = prefill.shape.cfg, plan.request_tokens
    if whole > cfg.max_position_embeddings:
        raise ModelError(f"{whole} tokens are above the model's {cfg.max_position_embeddings}")
    rates = f"{plan.copy_gb:,g} GB/s, {plan.matmul_tflop:,g} TFLOP/s"
    lines = [
        f"{cfg.architecture}: {plan.input_tokens:,} tokens in, {plan.output_tokens:,} out",
        f"a device: {plan.device_memory_gib:,g} GiB, {rates}; link: {plan.link_gb:,g} GB/s",
    ]
    held = ("prefill", prefill, plan.input_tokens), ("decode", decode, whole)
    for role, group, tokens in held:
        if not group.requests(tokens):
            raise ModelError(f"no request of {tokens} tokens fits the pages of {role}")
        lines += ["", f"{role}, {group.num_devices} device(s)", *_stored(group, tokens)]
        if group is prefill:
            waiting = _gib(_most_waiting(plan, prefill, decode))
            lines.append(_line("host: pages to be sent", f"{waiting} for each decode worker"))
    return [*lines, "", "at best, nothing between devices counted", *_speeds(plan, prefill, decode)]


def _most_waiting(plan: PlanConfig, prefill: Group, decode: Group) -> int:
    """Bytes of prefill's host for pages that a decode worker takes more slowly than they come.

    While --transfer-queue-bytes wait, the two chunks that are being computed may still add theirs;
    but none is computed for which decode has no room.
    """
    chunk = min(plan.chunked_prefill_size, prefill.shape.cfg.max_position_embeddings)
    chunks = 2 * prefill.config.dp_size * pages_for(chunk, prefill.config.page_size)
    of_chunks, of_decode = (
        pages * group.page_bytes * group.config.tp_size
        for pages, group in (
            (chunks, prefill),
            (decode.num_pages * decode.config.dp_size, decode),
        )
    )
    return min(plan.transfer_queue_bytes + of_chunks, of_decode)


def _speeds(plan: PlanConfig, prefill: Group, decode: Group) -> list[str]:
    ceilings = plan.ceilings
    packed = max(1, plan.chunked_prefill_size // plan.input_tokens)
    packed = min(packed, prefill.requests(plan.input_tokens), plan.max_seqs_per_chunk)
    alone_s = prefill.chunk_s(plan.input_tokens, 1, ceilings)
    taken = packed * prefill.config.dp_size / prefill.chunk_s(plan.input_tokens, packed, ceilings)
    sent = decode.sent_bytes(plan.input_tokens)
    sent_ms = 1e3 * sent / (plan.link_gb * 1e9)
    lines = [
        _line("a prompt alone", f"{1e3 * alone_s:,.2f} ms"),
        _line(
            f"chunks of {packed} prompt(s)",
            f"{taken:,.1f} prompts/s, {taken * plan.input_tokens:,.0f} tokens/s",
        ),
        _line("pages of a prompt", f"{sent / 1e6:,.1f} MB, {sent_ms:,.2f} ms"),
    ]
    num_steps = plan.output_tokens - 1  # prefill draws the first token
    if not num_steps:
        return [
            *lines,
            _line("workers that keep up", "prefill alone, as decode only receives"),
            _line("requests that these serve", f"{taken:,.1f} /s for each prefill worker"),
        ]
    context = plan.input_tokens + plan.output_tokens // 2
    slots = min(decode.requests(plan.request_tokens), plan.slots(decode.config.dp_size))
    for count in [*(x for x in STEPS if x < slots), slots]:
        step_s = decode.step_s(count, context, ceilings)
        drawn = count * decode.config.dp_size / step_s
        told = f"{1e3 * step_s:,.2f} ms, {drawn:,.0f} tokens/s"
        lines.append(_line(f"step of {count} slot(s)", told))
    ended = drawn / num_steps
    one, other = (1.0, taken / ended) if taken > ended else (ended / taken, 1.0)
    return [
        *lines,
        _line("workers that keep up", f"{one:.1f} prefill, {other:.1f} decode"),
        _line("requests that these serve", f"{max(taken, ended):,.1f} /s"),
    ]


def _stored(group: Group, tokens: int) -> list[str]:
    each = " of a rank" if group.config.dp_size > 1 else ""
    held = group.num_pages * group.config.page_size
    kinds = group.shape.dtype + f", layers in {group.shape.codes}" * bool(group.shape.codes)
    lines = [_line("weights of a device", f"{_gib(group.weights_bytes)}, {kinds}")]
    if group.lora_bytes:
        lines.append(_line("adapters of a device", mib(group.lora_bytes)))
    lines += [
        _line(f"pages{each}", f"{group.num_pages:,}, {group.shape.page_dtype}: {held:,} tokens"),
        _line(f"requests of {tokens:,} tokens", f"{group.requests(tokens):,}"),
    ]
    if group.kept_pages:
        kept = f"{group.kept_pages:,} pages, {_gib(group.kept_bytes)}"
        lines.append(_line("host: evicted prefixes", kept))
    elif group.config.enable_hierarchical_cache:
        lines.append(_line("host: evicted prefixes", "none: prefill computes the prompts"))
    return lines


def _line(what: str, value: str) -> str:
    return f"  {what:<28}{value}"


def _gib(num_bytes: int) -> str:
    if num_bytes < 1 << 30:
        return mib(num_bytes)
    return f"{num_bytes / 2**30:.1f} GiB"


if __name__ == "__main__":
    flags.run_main("plan", lambda: main(sys.argv[1:]))
