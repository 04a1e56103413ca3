"""Compiles steps and chunks for a GPU that is not here, and counts what they launch, move and need.

    python -m bench.gpu_compile --shape qwen3-30b-a3b --json out.jsonl
    python -m bench.gpu_compile --shape qwen3-8b --workers --lora-rank 16

Needs the packages of requirements-cuda.lock and no GPU. Nothing runs, so no row is a run time: what
launches and waits cost depends on the machine. Bytes are those that XLA's operations move, without
kernels of our own. A loop whose length is data counts as one turn. Products get the tiles that XLA
takes when it cannot try which are fastest.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from bench.arguments import at_least
from bench.endings import exit_with
from bench.hlo import count
from bench.report import Report
from bench.shapes import SHAPES, Shape
from bench.surroundings import describe

GPU_SHAPES: Final = tuple(name for name, shape in SHAPES.items() if shape.dtype == "bfloat16")
POOL_TOKENS: Final = 1 << 18
# What XLA would ask a real H200 for. Source: NVIDIA's tuning guide for Hopper, and what CUDA's
# queries return for that device.
H200: Final = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 28 }
runtime_version { major: 13 minor: 0 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when all was compiled, 2 when the packages for that are missing."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", action="append", choices=GPU_SHAPES, help="may be repeated")
    parser.add_argument(
        "--slots", action="append", type=at_least(1), help="slots of a step; may be repeated"
    )
    parser.add_argument(
        "--chunk", action="append", type=at_least(1), help="tokens of a chunk; may be repeated"
    )
    parser.add_argument(
        "--workers",
        action="store_true",
        help="all programs of a prefill and a decode worker instead of a step and a chunk alone: "
        "the largest step and chunk, draws, copies of pages, also to and from the host",
    )
    parser.add_argument(
        "--lora-rank", type=at_least(0), default=0, help="of three adapters; with --workers"
    )
    parser.add_argument(
        "--drafts", type=at_least(0), default=0, help="tokens drafted for a slot; with --workers"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append rows here")
    parser.add_argument("--text", type=Path, metavar="FOLDER", help="write compiled programs here")
    args = parser.parse_args(argv)
    if (args.lora_rank or args.drafts) and not args.workers:
        parser.error("--lora-rank and --drafts need --workers")
    for name in args.shape or GPU_SHAPES:
        if args.lora_rank and SHAPES[name].cfg.latent is not None:
            parser.error(f"--lora-rank: adapters do not change the latent attention of {name}")
    os.environ["JAX_PLATFORMS"] = "cpu"  # the only device that must be here
    try:
        device = _device()
    except NotImplementedError as error:
        print(f"gpu_compile: {error}", file=sys.stderr)
        return 2
    surroundings = replace(describe(with_jax=False), device=f"compiled for {device.device_kind}")
    try:
        report = Report("gpu_compile", surroundings, 0, args.json)
    except OSError as error:
        parser.error(f"--json: {error}")
    for name in args.shape or GPU_SHAPES:
        shape = SHAPES[name]
        bench = CompileBench(report, shape, device, args.text)
        if args.workers:
            slots, chunks = args.slots or shape.slots[-1:], args.chunk or shape.chunks[:1]
            for sizes in product(slots, chunks):
                bench.workers(*sizes, args.lora_rank, args.drafts)
            continue
        for slots in args.slots or (() if args.chunk else shape.slots):
            bench.step(slots)
        for tokens in args.chunk or (() if args.slots else shape.chunks):
            bench.chunk(tokens)
    return 0


def _device() -> Any:
    """An H200 for which programs can be compiled, but not run.

    Raises NotImplementedError, saying what is missing.
    """
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=H200, topology="1x1x1"
        ).devices[0]
    except (NotImplementedError, RuntimeError) as error:
        raise NotImplementedError(
            f"needs the packages of requirements-cuda.lock to compile for CUDA: {error}"
        ) from error
    return found


class CompileBench:
    """One network without weights, on one device that is not here."""

    def __init__(self, report: Report, shape: Shape, device: Any, folder: Path | None) -> None:
        import jax

        from bench.fitting import model_of
        from model.kv import abstract_pool

        self.report, self.shape, self.folder, self.device = report, shape, folder, device
        self.model = model_of(shape, device)
        mesh = self.model.mesh
        self.params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding(mesh)),
            self.model.param_leaves(),
        )
        self.pool = abstract_pool(self.model.kv_spec(), POOL_TOKENS // shape.page_size, mesh)

    def step(self, slots: int) -> None:
        """One token for every slot, with page tables as long as the shape's context needs."""
        from bench.fitting import table_pages
        from bench.kernels import greedy_step

        shape = self.shape
        pages = table_pages(shape, slots, self.model)
        sizes = [(slots,), (slots,), (slots, pages), (slots,)]
        self._compile(
            f"decode step x{slots}",
            partial(greedy_step, self.model),
            self._i32(sizes),
            {"slots": slots, "context": shape.context},
        )

    def chunk(self, tokens: int) -> None:
        """One prompt in one chunk, including the logits of its last token."""
        from bench.kernels import last_logits
        from model.attention import ChunkBatch
        from model.buckets import pages_for

        pages = pages_for(tokens, self.shape.page_size)
        sizes: list[tuple[int, ...]] = [(tokens,)] * 4 + [(pages,)] * 3 + [()]
        self._compile(
            f"prefill chunk {tokens}",
            partial(last_logits, self.model),
            (ChunkBatch(*self._i32(sizes)),),
            {"tokens": tokens},
        )

    def workers(self, slots: int, chunk: int, lora_rank: int, drafts: int) -> None:
        """All programs of both workers whose largest step and chunk these are."""
        from bench.absent import absent_model
        from bench.decode_programs import decode_programs
        from bench.prefill_programs import prefill_programs

        opened = absent_model(self.shape, self.device, lora_rank)
        sizes = {"context": opened.context_length, "lora_rank": lora_rank}
        for program in decode_programs(opened, slots, drafts):
            name = f"decode {program.name}"
            self._compiled(name, program, sizes | {"slots": slots, "drafts": drafts})
        for program in prefill_programs(opened, chunk):
            self._compiled(f"prefill {program.name}", program, sizes | {"tokens": chunk})

    def _i32(self, sizes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
        from jax.sharding import PartitionSpec

        from model.sharding import abstract_i32

        return tuple(abstract_i32(size, self.model.mesh, PartitionSpec()) for size in sizes)

    def _compile(
        self,
        case: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        sizes: dict[str, int],
    ) -> None:
        from model.programs import Program

        program = Program(case, function, (self.params, self.pool, *args), donate=(1,))
        self._compiled(case, program, sizes)

    def _compiled(self, case: str, program: Any, sizes: dict[str, int]) -> None:
        """Compile a program and report what it does."""
        start_s = time.monotonic()
        program.compile()
        took_s = time.monotonic() - start_s
        text = str(program.compiled.as_text())
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"{self.shape.name} {case}.hlo".replace(" ", "-")
            (self.folder / name).write_text(text, encoding="utf-8")
        work = count(text)
        self._add(case, "bytes beside kernels", work.num_bytes / 1e9, "GB", sizes)
        self._add(case, "launches", work.launches, "count", sizes)
        self._add(case, "kernels of our own", work.kernels, "count", sizes)
        self._add(case, "waits for the device", work.waits, "count", sizes)
        self._add(case, "scratch", program.temp_bytes / 1e6, "MB", sizes)
        self._add(case, "compile", took_s, "s", sizes)

    def _add(
        self,
        case: str,
        metric: str,
        value: float,
        unit: str,
        sizes: dict[str, int],
    ) -> None:
        shapes = {"shape": self.shape.name, "dtype": self.shape.dtype, **sizes}
        self.report.add(f"{self.shape.name} {case}", metric, value, unit, shapes=shapes)


if __name__ == "__main__":
    exit_with("gpu_compile", main)
