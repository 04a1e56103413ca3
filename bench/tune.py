"""Which tiles experts' products are fastest with on this GPU: writes the table that kernels read.

    python -m bench.tune --shape qwen3-30b-a3b --shape qwen3-30b-a3b-fp8 --out tuned.json

From the tiles of the table on, whatever differs from them in one or two numbers is tried, and the
best of it is where the next round starts, until nothing is better. Tiles that give other numbers
are left out. Codes are multiplied with as many rows and inputs at a time as numbers are, so that
what is added up comes in the same order: shapes of numbers come first. Few rows of one expert each
are not measured: a host launches no faster than they are multiplied.
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

# Rows of an expert at most, of a line of the table, and of how many the line is measured.
ROWS: Final = {1.0: 1, 8.0: 4, 24.0: 16, 96.0: 64, math.inf: 512}
_LAYERS: Final = 8  # of weights that no cache holds
_ROUNDS: Final = 3
_GAIN: Final = 0.985  # of the time: what is less is noise
_MOST_SHARED: Final = 232448  # bytes of a program's own: an H200's
_MOST_SUMS: Final = 128  # that a thread keeps
_MOST_ROWS: Final = 128
_NEAR: Final = 0.02  # of the largest number


class Timed(NamedTuple):
    """Of one layer's product."""

    seconds: float
    cut: Tiles


class Work(NamedTuple):
    """One of the two products. halves: as many weights of a tile are multiplied side by side.

    function: (rows or what is between, blocks, stacks, layer, cut) -> slots. outputs, inputs: of
    the weights. given: what is multiplied, by the rows of a block.
    """

    name: str
    halves: int
    function: Callable[..., Any]
    outputs: int
    inputs: int
    given: Callable[[int], tuple[Any, Blocks]]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every line asked for was measured; 2 where experts are not multiplied in tiles."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    moe = [name for name, shape in SHAPES.items() if shape.cfg.num_experts]
    parser.add_argument("--shape", action="append", choices=moe, required=True, help="repeatable")
    parser.add_argument("--rows", action="append", type=float, choices=[*ROWS], help="of an expert")
    parser.add_argument("--out", type=Path, default=tuned.TABLE, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append rows here")
    parser.add_argument("--budget-s", type=float, default=0.03, help="to time one product")
    args = parser.parse_args(argv)
    report = Report("tune", describe(with_jax=True), 0, args.json)
    lines = list(tuned.read(args.out if args.out.exists() else tuned.TABLE))
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
    """As many layers as have the experts that take turns, and little to remember."""
    cfg = shape.cfg
    ends = np.flatnonzero(np.cumsum(cfg.moe_layers) == min(_LAYERS, sum(cfg.moe_layers)))
    layers = int(ends[0]) + 1
    moe_layers, window_layers = cfg.moe_layers[:layers], cfg.window_layers[:layers]
    cfg = replace(cfg, num_layers=layers, moe_layers=moe_layers, window_layers=window_layers)
    return replace(shape, cfg=cfg, slots=(1,), chunks=(shape.page_size,), context=1)


class Tuning:
    """Experts of one shape on one device."""

    def __init__(self, bench: KernelBench) -> None:
        """Raises NotImplementedError where experts are multiplied in another way."""
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
        """The table with a line for experts of so many rows at most."""
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
        """A row of what was found, and the table with it. rows: of the line, and measured."""
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
        """As kernels would take them."""
        for work, cut in zip(works, cuts, strict=True):
            yield work, grouped.fitted(cut, work.outputs, work.inputs, self._size)

    @property
    def _size(self) -> int:
        return int(jnp.dtype(self.bench.model.dtype).itemsize)

    def _descended(self, work: Work, cut: Tiles) -> Timed:
        """Round by round, from these tiles on."""
        (best,) = self._time(work, [cut])
        for _ in range(_ROUNDS):
            found = self._time(work, [best.cut, *self._near(work, best.cut)])
            round_best = min(found, key=lambda one: one.seconds)
            if round_best.seconds > _GAIN * found[0].seconds:
                break
            best = round_best
        return best

    def _near(self, work: Work, cut: Tiles) -> list[Tiles]:
        """One or two of its numbers other than they are, but for its rows."""
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
        """Of those that compile, and give what the first one does, which has to."""
        rows, sorted_ = jax.device_put(work.given(cuts[0].rows))
        turns = [(rows, sorted_, *own) for own in self.layers]
        programs = [Program(str(cut), partial(work.function, cut=cut), turns[0]) for cut in cuts]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            errors = list(threads.map(_compiled, programs))
        timed: list[Timed] = []
        expected: Any = None
        for cut, program, error in zip(cuts, programs, errors, strict=True):
            if not error:
                # What stands in slots of nobody may be anything.
                out = np.asarray(program(*turns[0])[sorted_.slots], np.float32)
                expected = out if expected is None else expected
                # Of what is no number nothing is near.
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
    """What the compiler says against it; nothing where all is well."""
    try:
        program.compile()
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        return (str(error) or repr(error)).splitlines()[0][:200]
    return ""


if __name__ == "__main__":
    exit_with("tune", main)
