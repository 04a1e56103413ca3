"""Finds the fastest tiles for products of experts on this GPU; writes the table that kernels read.

    python -m bench.tune --shape qwen3-30b-a3b --shape qwen3-30b-a3b-fp8 --out tuned.json

The search starts from the tiles of the table. Each round tries all tiles that differ from the best
so far in one or two numbers, until nothing is faster. Tiles whose products differ are left out.
Codes are multiplied with as many rows and inputs at a time as numbers are, so that sums are added
up in the same order: name shapes of numbers first. A few rows that each have experts of their own
are not measured, because the host takes at least as long to launch their products.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.arguments import at_least
from bench.endings import exit_with
from bench.floors import Ceilings
from bench.kernels import KernelBench
from bench.report import Report
from bench.shapes import SHAPES, Shape
from bench.surroundings import describe
from bench.timing import seconds_per_call
from model.kernels.moe import grouped, tuned
from model.kernels.moe.sorting import Blocks, blocks
from model.kernels.tiles import LEAST, Tiles
from model.programs import Program

# Most rows of an expert for which a line of the table is, and the rows with which it is measured.
ROWS: Final = {1.0: 1, 8.0: 4, 24.0: 16, 96.0: 64, math.inf: 512}
_LAYERS: Final = 8  # enough weights that no cache holds them
_ROUNDS: Final = 3
_GAIN: Final = 0.985  # of the time; a smaller gain is noise
_MOST_SHARED: Final = 232448  # bytes of shared memory that a program may have on an H200
_MOST_SUMS: Final = 128  # that a thread keeps
_MOST_ROWS: Final = 128
_NEAR: Final = 0.02  # most difference, as a share of the largest number


class Timed(NamedTuple):
    """Time of one layer's product with some tiles."""

    seconds: float
    cut: Tiles


class Work(NamedTuple):
    """One of the two products. halves: weights whose tiles are multiplied side by side.

    function: (rows or the first product's results, blocks, stacks, layer, cut) -> slots. outputs,
    inputs: of the weights. given: rows of a block -> what is multiplied, and its blocks.
    """

    name: str
    halves: int
    function: Callable[..., Any]
    outputs: int
    inputs: int
    given: Callable[[int], tuple[Any, Blocks]]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every line asked for was measured, 2 if experts are not multiplied in tiles."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    moe = [name for name, shape in SHAPES.items() if shape.cfg.num_experts]
    parser.add_argument("--shape", action="append", choices=moe, required=True, help="repeatable")
    parser.add_argument(
        "--rows", action="append", type=float, choices=[*ROWS], help="rows of an expert; repeatable"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=tuned.TABLE,
        metavar="FILE",
        help="table to write; default: the one that kernels read",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append rows here")
    parser.add_argument(
        "--budget-s",
        type=at_least(0.001, float),
        default=0.03,
        help="seconds to time one product (default: 0.03)",
    )
    args = parser.parse_args(argv)
    if not os.access(args.out if args.out.exists() else args.out.parent, os.W_OK):
        parser.error(f"--out {args.out}: cannot be written")  # now, and not when it is measured
    try:
        report = Report("tune", describe(with_jax=True), 0, args.json)
        lines = list(tuned.read(args.out if args.out.exists() else tuned.TABLE))
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"a file that cannot be used: {error}")
    for name in args.shape:
        bench = KernelBench(report, shallow(SHAPES[name]), Ceilings(1.0, 1.0), args.budget_s)
        try:
            own = Tuning(bench)
        except NotImplementedError as error:
            print(f"tune: {error}", file=sys.stderr)
            return 2
        for rows in args.rows or ROWS:
            lines = own.tune(rows, lines)
            tuned.write(lines, args.out)
    return 0


def shallow(shape: Shape) -> Shape:
    """The shape with just the layers whose experts take turns, and a small pool."""
    cfg = shape.cfg
    ends = np.flatnonzero(np.cumsum(cfg.moe_layers) == min(_LAYERS, sum(cfg.moe_layers)))
    layers = int(ends[0]) + 1
    moe_layers, window_layers = cfg.moe_layers[:layers], cfg.window_layers[:layers]
    cfg = replace(cfg, num_layers=layers, moe_layers=moe_layers, window_layers=window_layers)
    return replace(shape, cfg=cfg, slots=(1,), chunks=(shape.page_size,), context=1)


class Tuning:
    """Experts of one shape on one device."""

    def __init__(self, bench: KernelBench) -> None:
        """Raises NotImplementedError if experts are multiplied in another way."""
        kernel = bench.model.kernels.experts
        if not isinstance(kernel, partial) or kernel.func is not grouped.experts:
            raise NotImplementedError("experts are multiplied in tiles on GPUs alone")
        self.bench, self.cfg = bench, bench.shape.cfg
        self.how = {name: kernel.keywords[name] for name in ("limit", "alpha", "interpret")}
        self.layers = bench.experts_of_layers()
        stacks = self.layers[0][0]
        width, hidden = stacks.down.shape[2:]
        self.sizes = grouped.weights_of(stacks), hidden, width
        self.of_codes = stacks.down_scale is not None

    def tune(self, rows: float, lines: list[tuned.Tuned]) -> list[tuned.Tuned]:
        """The table with a newly measured line for experts of at most `rows` rows."""
        even = min(ROWS[rows], grouped.MOST_OF_CODES) if self.of_codes else ROWS[rows]
        tokens = even * self.cfg.num_experts // self.cfg.num_experts_per_tok
        start = tuned.tiles_for(lines, self.sizes, float(even))
        if self.of_codes:
            numbers = tuned.tiles_for(lines, (tuned.NUMBERS, *self.sizes[1:]), float(even))
            pairs = zip(start, numbers, strict=True)
            first, second = (replace(own, rows=of.rows, inputs=of.inputs) for own, of in pairs)
            start = first, second
        works = self._works(tokens)
        before = sum(self._time(work, [cut])[0].seconds for work, cut in self._fitted(works, start))
        size = start[0].rows
        sizes = [size] if self.of_codes else [size // 2, size, size * 2]
        best: list[Timed] = []
        for size in (size for size in sizes if LEAST <= size <= _MOST_ROWS):
            cuts = replace(start[0], rows=size), replace(start[1], rows=size)
            found = [self._descended(work, cut) for work, cut in self._fitted(works, cuts)]
            if not best or sum(one.seconds for one in found) < sum(one.seconds for one in best):
                best = found
        return self._told((rows, even), tokens, lines, best, before)

    def _told(
        self,
        rows: tuple[float, int],
        tokens: int,
        lines: list[tuned.Tuned],
        best: list[Timed],
        before: float,
    ) -> list[tuned.Tuned]:
        """Report what was found; returns the table with it. rows: of the line, and measured."""
        seconds, cuts = sum(one.seconds for one in best), [one.cut for one in best]
        name, report = self.bench.shape.name, self.bench.report
        shapes = {"shape": name, "tokens": tokens, "first": str(cuts[0]), "second": str(cuts[1])}
        case = f"{name} experts' products, {rows[1]} rows each"
        report.add(case, "time", seconds * 1e6, "us", before * 1e6, shapes=shapes)
        source = f"{name}, {rows[1]} rows each: {seconds * 1e6:.1f} us, before {before * 1e6:.1f}"
        source += f"; {report.surroundings.device}"
        line = tuned.Tuned(*self.sizes, rows[0], cuts[0], cuts[1], source)
        same = self.sizes, rows[0]
        return [old for old in lines if (old.sizes, old.rows) != same] + [line]

    def _works(self, tokens: int) -> tuple[Work, Work]:
        x, ids, _ = jax.device_put(self.bench.experts_inputs(tokens)[:3])
        _, hidden, width = self.sizes
        sort = jax.jit(partial(blocks, interpret=self.how["interpret"]), static_argnums=(1, 2))

        def rows_of(size: int) -> tuple[Any, Blocks]:
            return x, sort(ids, self.cfg.num_experts, size)

        def inner_of(size: int) -> tuple[Any, Blocks]:
            sorted_ = sort(ids, self.cfg.num_experts, size)
            return self.bench.random((len(sorted_.rows), width)), sorted_

        second = partial(grouped.down, interpret=self.how["interpret"])
        return (
            Work("first", 2, partial(grouped.gate_up, **self.how), width, hidden, rows_of),
            Work("second", 1, second, hidden, width, inner_of),
        )

    def _fitted(self, works: Sequence[Work], cuts: Sequence[Tiles]) -> Iterator[tuple[Work, Tiles]]:
        """Each product with its tiles, fitted as the kernels would fit them."""
        for work, cut in zip(works, cuts, strict=True):
            yield work, grouped.fitted(cut, work.outputs, work.inputs, self._size)

    @property
    def _size(self) -> int:
        return int(jnp.dtype(self.bench.model.dtype).itemsize)

    def _descended(self, work: Work, cut: Tiles) -> Timed:
        """The fastest tiles found by a search, round by round, from these tiles on."""
        (best,) = self._time(work, [cut])
        for _ in range(_ROUNDS):
            found = self._time(work, [best.cut, *self._near(work, best.cut)])
            round_best = min(found, key=lambda one: one.seconds)
            if round_best.seconds > _GAIN * found[0].seconds:
                break
            best = round_best
        return best

    def _near(self, work: Work, cut: Tiles) -> list[Tiles]:
        """Tiles that fit and differ from `cut` in one or two numbers other than its rows."""
        changes: list[dict[str, int]] = [
            {name: value}
            for name, values in {
                "outputs": (cut.outputs * 2, cut.outputs // 2),
                "inputs": () if self.of_codes else (cut.inputs * 2, cut.inputs // 2),
                "warps": (8 if cut.warps == 4 else 4,),
                "stages": (cut.stages + 1, cut.stages - 1),
            }.items()
            for value in values
        ]
        found = [replace(cut, **one) for one in changes]
        for i, one in enumerate(changes):
            others = [other for other in changes[i + 1 :] if other.keys() != one.keys()]
            found += [replace(cut, **one, **other) for other in others]
        fitting = (grouped.fitted(near, work.outputs, work.inputs, self._size) for near in found)
        return [near for near in dict.fromkeys(fitting) if near != cut and self._fits(work, near)]

    def _fits(self, work: Work, cut: Tiles) -> bool:
        wide = cut.outputs * work.halves
        shared = cut.stages * (cut.rows + wide) * cut.inputs * self._size
        least = min(cut.inputs, cut.outputs // (2 if self.of_codes else 1))
        is_small = shared <= _MOST_SHARED and cut.rows * wide <= _MOST_SUMS * 32 * cut.warps
        return is_small and least >= LEAST and cut.stages >= 2

    def _time(self, work: Work, cuts: Sequence[Tiles]) -> list[Timed]:
        """Time the tiles that compile and whose product is near that of the first.

        Raises RuntimeError if the first fails.
        """
        rows, sorted_ = jax.device_put(work.given(cuts[0].rows))
        turns = [(rows, sorted_, *own) for own in self.layers]
        programs = [Program(str(cut), partial(work.function, cut=cut), turns[0]) for cut in cuts]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            errors = list(threads.map(_compiled, programs))
        timed: list[Timed] = []
        expected: Any = None
        for cut, program, error in zip(cuts, programs, errors, strict=True):
            if not error:
                # Slots that belong to no row may hold anything, so only the others are compared.
                out = np.asarray(program(*turns[0])[sorted_.slots], np.float32)
                expected = out if expected is None else expected
                # Written with `not`, so that NaN counts as far.
                if not np.abs(out - expected).max() <= _NEAR * np.abs(expected).max():
                    error = "gives other numbers"
            if error and not timed:
                raise RuntimeError(f"{work.name} product with {cut}: {error}")
            if error:
                print(f"left out: {work.name} {cut}: {error}", file=self.bench.report.out)
                continue
            call = _in_turn(program, turns)
            taken = seconds_per_call(call, jax.block_until_ready, self.bench.budget_s)
            timed.append(Timed(taken, cut))
        return timed


def _in_turn(program: Program, turns: Sequence[tuple[Any, ...]]) -> Callable[[], Any]:
    waiting = cycle(turns)
    return lambda: program(*next(waiting))


def _compiled(program: Program) -> str:
    """Compile; returns the first line of the compiler's error, or "" if there is none."""
    try:
        program.compile()
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        return (str(error) or repr(error)).splitlines()[0][:200]
    return ""


if __name__ == "__main__":
    exit_with("tune", main)
