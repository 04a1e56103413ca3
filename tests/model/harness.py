"""Drives a network as an engine would, but plainly: packed chunks, then paged decoding."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from model import products
from model.buckets import DecodeBuckets, decode_buckets
from model.config import ModelConfig
from model.config_quantised import codes_of
from model.kv import init_pool
from model.lora import lora_shape, read_adapters
from model.opening import OpenedModel, open_model
from model.pieces import NO_ADAPTER
from model.replicated import decode_hidden, logits, prefill_hidden
from model.sharding import Dims, Stacks, make_mesh
from model.transformer import ChunkBatch, Model
from model.weights import coded_parameters, load_adapters, load_params, narrow_parameters
from tests.model.captured import Captured, prefill_captured

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
PAGE_SIZE = 16
CHUNK = 16
NUM_PAGES = 40
MAX_PAGES = 12
PAGE_LIST = 32


def open_plainly(path: Path, page_size: int, context_length: int, **more: Any) -> OpenedModel:
    """A checkpoint as a worker of one device opens it, in float32, unless `more` says otherwise."""
    plain: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "auto"}
    plain |= {"tp_size": 1, "ep_size": 1} | more
    return open_model(path, page_size=page_size, context_length=context_length, **plain)


class Golden:
    """The numbers recorded for one checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.checkpoint = GOLDENS / name / "model"
        self.info: dict[str, Any] = json.loads((GOLDENS / name / "golden.json").read_text())
        self.numbers = load_file(GOLDENS / name / "golden.safetensors")
        self.prompts = {p["name"]: p["ids"] for p in self.info["prompts"]}
        self.first_position = {p["name"]: p["first_logit_position"] for p in self.info["prompts"]}


class Ran(NamedTuple):
    """One prompt's run: logits at every prompt position, chosen ids, the logits of each choice."""

    logits: np.ndarray
    ids: list[int]
    step_logits: np.ndarray


class Harness:
    """A loaded model with its programs. All chunks have one padded shape, and all steps."""

    def __init__(
        self,
        checkpoint: Path,
        tp: int = 1,
        ep: int = 1,
        dtype: str = "float32",
        page_dtype: str = "",  # "": as dtype
        dp: int = 1,  # ranks, which all compute the same
        stacks: Stacks | None = None,
        platform: str = "",  # compute as on this platform
        coded: bool | str = False,  # whether to keep codes where possible, or which codes
        narrow: bool = False,  # whether to hold matrices in bfloat16 where the checkpoint does
        optimized: bool = False,  # see compiled_soon
        lora: Sequence[tuple[str, Path]] = (),  # adapters
    ) -> None:
        self._optimized = optimized
        cfg = ModelConfig.from_dir(checkpoint)
        mesh = make_mesh(tp, ep, dp_size=dp)
        codes = codes_of(cfg.quantization, coded if isinstance(coded, str) else "auto")
        how, dims = codes if coded else "none", Dims.of(cfg, mesh, ep > tp, codes=codes)
        names = coded_parameters(checkpoint, dims, how, True)
        adapters = read_adapters(lora, cfg)
        self.model = Model.create(
            cfg,
            mesh,
            dtype,
            PAGE_SIZE,
            ep > tp,
            stacks,
            platform=platform,
            coded=names,
            codes=codes,
            narrow=narrow_parameters(checkpoint, dims) if narrow else (),
            lora=lora_shape(adapters),
        )
        self.params = load_params(checkpoint, self.model) | load_adapters(adapters, self.model)
        self.pages = self.model.kv_spec()
        if page_dtype:
            self.pages = dataclasses.replace(self.pages, dtype=page_dtype)

    @cached_property
    def _prefill(self) -> Any:
        return compiled_soon(prefill_hidden, self._optimized)

    @cached_property
    def _decode(self) -> Any:
        return compiled_soon(decode_hidden, self._optimized)

    @cached_property
    def _logits(self) -> Any:
        return jax.jit(logits, static_argnums=0)

    def new_pool(self, num_pages: int = NUM_PAGES) -> jax.Array:
        return init_pool(self.pages, num_pages, self.model.mesh)

    def run(
        self, prompts: Sequence[list[int]], new_tokens: int, adapters: Sequence[int] = ()
    ) -> list[Ran]:
        """Prefill all prompts in chunks that mix them, then decode all greedily in one batch.

        adapters: of each prompt; (): the model has none.
        """
        pages = scattered_pages([len(p) + new_tokens for p in prompts])
        pool = self.new_pool()
        rows: list[np.ndarray] = []
        for batch in chunks(prompts, pages):
            if adapters:
                of_seqs = np.array([*adapters, NO_ADAPTER], np.int32)
                batch = batch._replace(adapters=i32(of_seqs[np.asarray(batch.seq_idx)]))
            hidden, pool = self._prefill(self.model, self.params, pool, batch)
            rows.append(np.asarray(self._logits(self.model, self.params, hidden)))
        ends = np.cumsum([len(p) for p in prompts])
        prompt_logits = np.split(np.concatenate(rows)[: ends[-1]], ends[:-1])
        step_logits = [[one[-1]] for one in prompt_logits]
        for step in range(new_tokens - 1):
            ids = [int(np.argmax(one[-1])) for one in step_logits]
            positions = [len(p) + step for p in prompts]
            found, pool = self.decode_step(pool, ids, positions, pages, adapters)
            for one, row in zip(step_logits, found, strict=True):
                one.append(row)
        return [
            Ran(one, [int(i) for i in np.argmax(steps, axis=-1)], np.array(steps))
            for one, steps in zip(prompt_logits, step_logits, strict=True)
        ]

    def decode_step(
        self,
        pool: jax.Array,
        ids: list[int],
        positions: list[int],
        pages: list[list[int]],
        adapters: Sequence[int] = (),
    ) -> tuple[np.ndarray, jax.Array]:
        """One step with a padding row at the end. Returns the logits of the other rows."""
        table = np.zeros((len(ids) + 1, MAX_PAGES), np.int32)
        for row, listed in enumerate(pages):
            table[row, : len(listed)] = listed
        kv_idx = [
            listed[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
            for at, listed in zip(positions, pages, strict=True)
        ]
        arrays = i32([*ids, 0]), i32([*positions, -1]), i32(table), i32([*kv_idx, 0])
        own = i32([*adapters, NO_ADAPTER]) if adapters else None
        hidden, pool = self._decode(self.model, self.params, pool, *arrays, own)
        found = np.asarray(self._logits(self.model, self.params, hidden))
        return found[:-1], pool

    def capture(self, *prompts: list[int]) -> tuple[np.ndarray, Captured]:
        """Run prompts as one chunk, capturing its inside. Also returns the last hidden states."""
        lengths = [len(prompt) for prompt in prompts]
        (batch,) = chunks(prompts, scattered_pages(lengths), sum(lengths))
        run = compiled_soon(prefill_captured, self._optimized)
        hidden, _, captured = run(self.model, self.params, self.new_pool(), batch)
        return np.asarray(hidden), jax.tree.map(np.asarray, captured)


@contextmanager
def sizes_of_products(sizes: Mapping[str, int]) -> Iterator[None]:
    """Tiles and blocks of model.products have these sizes, by the names of its constants."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(products, name, size)
        jax.clear_caches()  # drops earlier traces of the same model
        yield
    jax.clear_caches()


def compiled_soon(function: Any, optimized: bool) -> Any:
    """A program of (model, params, pool, ...), not optimized by default: it gets few calls.

    It is compiled for the shapes of its first call. Under `jax.jit` alone, the second call would
    compile again for the pool that the first returned: its sharding is the same, but spelt
    differently.
    optimized: takes up to three times as long to compile; for programs whose calls take longer.
    """
    # The passes left out took a sixth of the time, and programs run no more slowly without them.
    options = {
        "xla_backend_optimization_level": 3 if optimized else 0,
        "xla_llvm_disable_expensive_passes": optimized,
    }
    program = jax.jit(function, static_argnums=0, donate_argnums=2, compiler_options=options)
    compiled: list[jax.stages.Compiled] = []

    def run(model: Model, *args: Any) -> Any:
        if not compiled:
            compiled.append(program.lower(model, *args).compile())
        return compiled[0](*args)

    return run


def full_steps(slots: int, context: int, page_size: int, window: int = 0) -> DecodeBuckets:
    """Buckets whose only step has all slots, since compiling is what takes time in tests."""
    buckets = decode_buckets(slots, context, page_size, window=window)
    return dataclasses.replace(buckets, slots=(slots,))


def i32(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


def scattered_pages(lengths: Sequence[int]) -> list[list[int]]:
    """Pages for sequences of these lengths, in random order."""
    free = list(np.random.default_rng(5).permutation(NUM_PAGES))
    return [[int(free.pop()) for _ in range(-(-n // PAGE_SIZE))] for n in lengths]


def chunks(
    prompts: Sequence[list[int]], pages: list[list[int]], size: int = CHUNK
) -> list[ChunkBatch]:
    """Cut the prompts, laid end to end, every `size` tokens; pad the last chunk."""
    tokens = [
        (token, at, seq, pages[seq][at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
        for seq, prompt in enumerate(prompts)
        for at, token in enumerate(prompt)
    ]
    found: list[ChunkBatch] = []
    for first in range(0, len(tokens), size):
        part = tokens[first : first + size]
        reach: dict[int, int] = {}
        for _, at, seq, _ in part:
            reach[seq] = at + 1
        listed = [
            (pages[seq][i], seq, i * PAGE_SIZE)
            for seq, length in reach.items()
            for i in range(-(-length // PAGE_SIZE))
        ]
        used = len(listed)
        part += [(0, 0, len(prompts), NUM_PAGES * PAGE_SIZE)] * (size - len(part))
        listed += [(0, len(prompts), 0)] * (PAGE_LIST - used)
        columns = [*zip(*part, strict=True)], [*zip(*listed, strict=True)]
        found.append(ChunkBatch(*map(i32, [*columns[0], *columns[1], used])))
    return found
