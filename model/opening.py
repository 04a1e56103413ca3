"""Open a checkpoint for one role: resolve what flags leave open, load weights, size the pool."""

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from model.buckets import MAX_RUN_PAGES, check_page_size, pages_for, run_pages_on_cpu
from model.config import FP8, KVSpec, ModelConfig
from model.config_quantised import codes_of
from model.eplb import AS_TRAINED, ExpertPolicy
from model.errors import ModelError
from model.executables import ExecutableCache
from model.host_memory import give_back_freed, total_bytes
from model.kv import init_pool
from model.lora import Adapter, adapters_digest, lora_shape, read_adapters
from model.members import any_of_all, least_of_all
from model.params import Params
from model.placement import PlacedExperts
from model.processors import is_small
from model.programs import (
    MemoryPlan,
    Program,
    compile_all,
    memory_budget_bytes,
    plan_memory,
    steady,
    tree_bytes,
)
from model.promises import PROMISES
from model.sharding import Dims, kv_spec, make_mesh, num_ranks, own_devices
from model.transformer import Model, random_params
from model.weights import (
    coded_parameters,
    dummy_digest,
    load_adapters,
    load_params,
    model_digest,
    narrow_parameters,
    stored_bytes,
)

log = logging.getLogger(__name__)

CODES_CAPABILITY = 8, 9  # the least compute capability of a GPU that converts e4m3

# Suffix of the digest of a model whose weights were rounded when loaded, by what codes they became.
ROUNDED = {"fp8": "-fp8-layers", "int8": "-int8-layers"}
DUMMY_SEED = 0  # the same for all, so that every role and rank has the same network
CPU_CONTEXT_LENGTH = 4096  # default limit on CPU, where only a flag gives a longer one
# Shares of memory that a worker takes by default. On a CPU, several share what is free, with each
# other and with all else that runs there; but a model whose requests need more should not need a
# flag where there is plenty.
_ON_DEVICES = 0.85
_LEAST_ON_CPU, _MOST_ON_CPU, _FULL_CONTEXTS = 0.1, 0.3, 4
# On a CPU, what a process takes while it serves besides what is planned: blocks that malloc keeps
# for each thread, and what the control plane holds. A large network may take more (docs/adr/0066).
_SERVING_BYTES = 160 << 20


@dataclass(frozen=True)
class OpenedModel:
    """A model in memory, before its page pool."""

    model: Model
    params: Any
    kv: KVSpec
    logical_kv_heads: int
    context_length: int
    digest: str
    experts: PlacedExperts
    adapters: tuple[str, ...] = ()  # their names
    kept: ExecutableCache | None = None  # of programs that were compiled before

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return num_ranks(self.model.mesh)

    @property
    def devices(self) -> list[jax.Device]:
        """All of the mesh, those of other members too."""
        return list(self.model.mesh.devices.flat)

    @property
    def padding_costs(self) -> bool:
        """See model.buckets.PrefillBuckets."""
        return on_cpu() and not is_small(self.model.cfg.hidden_size)

    @property
    def run_pages(self) -> int:
        """The most pages that are gathered, or put in place, at once."""
        shards = len(self.devices) // self.dp_size
        return run_pages_on_cpu(self.kv.page_bytes // shards) if on_cpu() else MAX_RUN_PAGES


BeforeWeights = Callable[[OpenedModel], None]


def at_once(_: OpenedModel) -> None:
    """A `before_weights` that does nothing."""


def on_cpu() -> bool:
    """Whether the first device is a CPU. Raises ModelError when JAX finds none at all."""
    try:
        return jax.default_backend() == "cpu"
    except (RuntimeError, AssertionError) as error:  # the latter, wordless, without a plugin
        asked = os.environ.get("JAX_PLATFORMS", "")
        why = str(error) or "no plugin for it is installed"
        raise ModelError(f"JAX finds no device, JAX_PLATFORMS is {asked!r}: {why}") from error


def open_model(
    path: Path,
    *,
    dtype: str,
    kv_cache_dtype: str,
    tp_size: int,
    ep_size: int,
    page_size: int,
    context_length: int,
    chunk_size: int = 0,
    fraction: float = 0.0,
    max_total_tokens: int = 0,
    dp_size: int = 1,
    placing: ExpertPolicy = AS_TRAINED,
    quantization: str = "auto",
    load_format: str = "auto",
    lora_paths: Sequence[tuple[str, Path]] = (),
    before_weights: BeforeWeights = at_once,
) -> OpenedModel:
    """Read config and weights onto a mesh of dp_size * tp_size devices.

    dtype, kv_cache_dtype: "auto" | "float32" | "bfloat16"; auto is float32 on CPU (bfloat16
    products are an order slower there), else the checkpoint's; the cache follows the weights. On a
    CPU, matrices of a large network stay in bfloat16 for products in float32.
    kv_cache_dtype may also be "fp8_e4m3": a byte a value, unscaled, saturating at 448.
    context_length: 0 means the model's, at most CPU_CONTEXT_LENGTH on CPU.
    chunk_size (0: not checked), fraction, max_total_tokens: of the pool that is made later, so
    that a misfit is reported before the weights are read, which may take minutes.
    placing: where experts are, and when they move.
    quantization: "fp8" and "int8" keep layers' weights as such one-byte codes: of a quantised
    checkpoint the weights that are quantised there, of another all, rounded; "none" expands all to
    dtype; "auto" keeps the codes of a quantised checkpoint on CPU, and expands them elsewhere.
    load_format: "dummy" reads no weights: parameters are random, the same on every mesh.
    lora_paths: names and folders of adapters, see model/lora.py.
    before_weights: called with all but the parameters, and may raise; loading takes minutes.
    Raises ModelError, one line, for anything that does not fit.
    """
    cfg = ModelConfig.from_dir(path)
    adapters = read_adapters(lora_paths, cfg)
    _check_devices(tp_size, dp_size)
    sizes = _sizes(cfg, dtype, kv_cache_dtype, page_size, context_length, chunk_size)
    mesh = make_mesh(tp_size, ep_size, dp_size=dp_size)
    shared, redundant = ep_size > tp_size, placing.ep_num_redundant_experts
    codes, is_dummy = codes_of(cfg.quantization, quantization), load_format == "dummy"
    dims = replace(Dims.of(cfg, mesh, shared, redundant, codes=codes), lora=lora_shape(adapters))
    model = _create(path, dims, mesh, sizes, quantization, is_dummy)
    experts = PlacedExperts(model, placing)
    kv = kv_spec(model.dims, sizes.page_size, sizes.kv_dtype)
    if (model.dims.coded and codes == "fp8") or sizes.kv_dtype == FP8:
        check_reads_codes(own_devices(mesh))
    _check_memory(model, kv, sizes.context_length, fraction, max_total_tokens)
    opened = OpenedModel(
        model=model,
        params=None,
        kv=kv,
        logical_kv_heads=cfg.num_kv_heads,
        context_length=sizes.context_length,
        digest=_digest(path, model, is_dummy, adapters),
        experts=experts,
        adapters=tuple(adapter.name for adapter in adapters),
    )
    if adapters:
        names = ", ".join(opened.adapters)
        log.info("adapters, rank %d at most: %s", max(x.rank for x in adapters), names)
    loaded = load_adapters(adapters, model)  # small, so a misfit is reported before the weights
    before_weights(opened)
    params = (_draw if is_dummy else _load)(path, model)
    return replace(opened, params=params | loaded)


def _check_devices(tp_size: int, dp_size: int) -> None:
    """Raises ModelError when this process sees fewer than a mesh takes."""
    num_devices = dp_size * tp_size
    if num_devices > len(jax.devices()):
        sizes = f"--tp-size {tp_size}" + (f" with --dp-size {dp_size}" if dp_size > 1 else "")
        raise ModelError(
            f"{sizes} needs {num_devices} devices, this process sees "
            f"{len(jax.devices())} ({jax.default_backend()})"
        )


class _Sizes(NamedTuple):
    """The settings that flags may leave open, resolved."""

    dtype: str
    kv_dtype: str
    page_size: int
    context_length: int


def _sizes(
    cfg: ModelConfig,
    dtype: str,
    kv_cache_dtype: str,
    page_size: int,
    context_length: int,
    chunk_size: int,
) -> _Sizes:
    """See open_model, whose arguments these are. Raises ModelError for what does not fit."""
    if dtype == "auto":
        dtype = "float32" if on_cpu() else cfg.torch_dtype
    kv_dtype = {"auto": dtype, "fp8_e4m3": FP8}.get(kv_cache_dtype, kv_cache_dtype)
    page_size = page_size or (16 if on_cpu() else 64)
    limit = cfg.max_position_embeddings
    if context_length > limit:
        raise ModelError(
            f"--context-length {context_length} is above the model's "
            f"max_position_embeddings {limit}"
        )
    if not context_length:
        context_length = min(limit, CPU_CONTEXT_LENGTH) if on_cpu() else limit
        context_length = context_length // page_size * page_size or limit
    whole = pages_for(context_length, page_size) * page_size
    check_page_size(page_size, min(chunk_size, whole) or page_size, context_length)
    return _Sizes(dtype, kv_dtype, page_size, context_length)


def _create(
    path: Path, dims: Dims, mesh: Mesh, sizes: _Sizes, quantization: str, is_dummy: bool
) -> Model:
    """A model of these sizes, and of what the checkpoint decides: codes, and narrow matrices."""
    coded = coded_parameters(path, dims, quantization, on_cpu(), is_dummy)
    dims = replace(dims, coded=coded)
    return Model.create(
        dims.cfg,
        mesh,
        jnp.dtype(sizes.dtype),
        sizes.page_size,
        share_experts=dims.ranks_share_experts,
        redundant_experts=dims.redundant,
        coded=dims.coded,
        codes=dims.codes,
        narrow=_narrow(path, dims, sizes.dtype, is_dummy),
        lora=dims.lora,
    )


def _narrow(path: Path, dims: Dims, dtype: str, is_dummy: bool) -> tuple[tuple[str, str], ...]:
    """`Dims.narrow`: small networks stay in the CPU's cache, where nothing is gained."""
    if not on_cpu() or dtype != "float32" or is_small(dims.cfg.hidden_size):
        return ()
    return narrow_parameters(path, dims, is_dummy)


def _digest(path: Path, model: Model, is_dummy: bool, adapters: Sequence[Adapter]) -> str:
    """The digest of the network as it will be loaded, with its adapters."""
    dims = model.dims
    added = f"-lora-{adapters_digest(adapters)}" if adapters else ""
    if is_dummy:
        return dummy_digest(path, dims.coded, dims.codes, dims.narrow) + added
    rounded = dims.coded and not model.cfg.quantization
    return model_digest(path) + (ROUNDED[dims.codes] if rounded else "") + added


def _load(path: Path, model: Model) -> Params:
    """The parameters of a checkpoint."""
    by_dtype: dict[str, list[str]] = {}
    for name, dtype in model.dims.narrow:
        by_dtype.setdefault(dtype, []).append(name)
    held = "".join(f" ({', '.join(names)}: {of})" for of, names in by_dtype.items())
    log.info(
        "loading weights from %s as %s on %d device(s)",
        path,
        model.dtype.name + held,
        model.mesh.size,
    )
    return load_params(path, model, progress=_Progress())


def _draw(_: Path, model: Model) -> Params:
    """Random parameters."""
    log.warning("--load-format dummy: weights are random, and so are answers")
    params: Params = jax.block_until_ready(random_params(model, DUMMY_SEED))
    return params


def make_pool(
    opened: OpenedModel,
    fraction: float,
    max_total_tokens: int,
    natural_pages: int,
    programs_of: Callable[[int], list[Program]],
    spare_pages: int = 0,
    spare_bytes: int = 0,
) -> tuple[Array, MemoryPlan, list[Program]]:
    """Compile every program, learn their scratch memory, and give the pool what is left.

    Pages are counted per data-parallel rank; all ranks have the same number, and each page counted
    stands for one of every group.
    fraction: of the device's memory; 0 = 0.85. On CPU it is of free memory, and 0 = 0.1, or up to
    _MOST_ON_CPU of it where _FULL_CONTEXTS need more than that.
    natural_pages: more than this many could never be in use at once, or are of no benefit.
    programs_of(num_pages): programs for a pool of this size. Scratch does not depend on the
    pool's size (a test holds that), so a second round, if one is needed, is the last.
    spare_pages, spare_bytes: what the caller keeps besides the pool: pages of one group for each
    rank, and bytes over all devices.
    Each member of a mesh over several processes plans for its own devices; the pool has as many
    pages as the member with the least memory can hold.
    Returns (pool, plan, programs). Raises ModelError when it does not fit, see plan_memory.
    """
    page_size = opened.kv.page_size
    least = pages_for(opened.context_length, page_size)
    weights = tree_bytes(opened.params)
    own = own_devices(opened.model.mesh)
    num_members = len(opened.devices) // len(own)
    # Loaded weights are no longer free memory, but belong to the budget all the same.
    beside = weights if on_cpu() else 0
    exact = max_total_tokens > 0
    wanted = max_total_tokens // page_size if exact else max(natural_pages, least)

    def plan(scratch: int) -> MemoryPlan:
        few = wanted if exact else min(wanted, _FULL_CONTEXTS * least)
        with PROMISES.turn():
            budget = beside + _budget(fraction, own, scratch + few * page_bytes)
            sizes = budget, weights, scratch, page_bytes
            wants, counts = (wanted, exact, least), (opened.dp_size, opened.kv.groups)
            mine = plan_memory(*sizes, *wants, *counts, _most_budget(fraction, weights))
            pages = mine.num_pages
            if on_cpu():
                PROMISES.make(scratch + pages * page_bytes)
        if on_cpu() and pages not in (few, wanted):  # free memory there differs at every start
            pages = max(steady(pages), least)
        return replace(mine, num_pages=least_of_all(pages))

    page_bytes = opened.dp_size * opened.kv.all_layers_bytes // num_members
    spare = spare_pages * page_bytes // opened.kv.groups + spare_bytes // num_members
    # Everything is compiled again only if this was too little.
    with PROMISES.turn():
        reserve = (beside + _budget(fraction, own, 0)) // 16 + spare
    final = plan(reserve)
    programs = programs_of(final.num_pages)
    compile_all(programs, kept=opened.kept)
    scratch = max(program.temp_bytes for program in programs) * len(own)
    scratch += spare
    if any_of_all(scratch > reserve):
        final = plan(scratch)
        programs = programs_of(final.num_pages)
        compile_all(programs, kept=opened.kept)
    give_back_freed()  # the plan has given the pool what compiling took
    if on_cpu():
        with PROMISES.turn():  # again, since compiling leaves something behind for good
            most = max(final.scratch_bytes, scratch + _SERVING_BYTES)
            PROMISES.make(most + final.num_pages * page_bytes)
    pool = init_pool(opened.kv, final.num_pages, opened.model.mesh)
    return jax.block_until_ready(pool), final, programs


def check_reads_codes(devices: Sequence[Any]) -> None:
    """Raises ModelError for a GPU that has no conversion of e4m3.

    Source: NVIDIA's PTX manual, cvt.
    """
    for device in devices:
        capability = str(getattr(device, "compute_capability", ""))
        parts = re.fullmatch(r"(\d+)\.(\d+)", capability)
        if parts is not None and tuple(map(int, parts.groups())) < CODES_CAPABILITY:
            raise ModelError(
                f"{device.device_kind} has compute capability {capability}; --quantization fp8 "
                "and --kv-cache-dtype fp8_e4m3 need 8.9 or later"
            )


def _budget(fraction: float, own: Sequence[jax.Device], needed_bytes: int) -> int:
    """What a worker may take, beside its weights on CPU.

    fraction: see make_pool. needed_bytes: for scratch and _FULL_CONTEXTS.
    """
    if fraction or not on_cpu():
        return memory_budget_bytes(fraction or _ON_DEVICES, own)
    least, most = (memory_budget_bytes(share, own) for share in (_LEAST_ON_CPU, _MOST_ON_CPU))
    return max(least, min(most, needed_bytes))


def _most_budget(fraction: float, weights: int) -> int:
    """On CPU, the budget if nothing else took memory; elsewhere 0: a worker has its devices alone.

    fraction: see make_pool.
    """
    share = fraction or _MOST_ON_CPU
    return int(share * total_bytes() + (1.0 - share) * weights) if on_cpu() else 0


def _check_memory(
    model: Model, kv: KVSpec, context_length: int, fraction: float, max_total_tokens: int
) -> None:
    """Raises ModelError when weights and the fewest pages allowed cannot fit, scratch aside.

    Calculates as make_pool will, but before weights are loaded: on CPU they take free memory.
    """
    weights = stored_bytes(model)
    share = fraction or (_MOST_ON_CPU if on_cpu() else _ON_DEVICES)
    own = own_devices(model.mesh)
    least = pages_for(context_length, kv.page_size)
    exact = max_total_tokens > 0
    wanted = max_total_tokens // kv.page_size if exact else least
    ranks = num_ranks(model.mesh)
    page_bytes = ranks * kv.all_layers_bytes * len(own) // model.mesh.size
    with PROMISES.turn():
        budget = memory_budget_bytes(share, own)
        if on_cpu():
            # Of larger weights only what is free counts: an error should not name more than that.
            budget += int((1.0 - share) * min(weights, budget / share))
        sizes, wants = (budget, weights, 0, page_bytes), (wanted, exact, least)
        plan_memory(*sizes, *wants, ranks, kv.groups, _most_budget(fraction, weights))
        if on_cpu():
            PROMISES.make(weights + wanted * page_bytes)


class _Progress:
    """Logs loading at each quarter, so that a log file stays short."""

    def __init__(self) -> None:
        self._quarter = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        quarter = 4 * done_bytes // max(total_bytes, 1)
        if quarter > self._quarter:
            self._quarter = quarter
            log.info("weights %d%% of %.1f MiB", 25 * quarter, total_bytes / 2**20)
