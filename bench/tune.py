"""Which tiles experts' products are fastest with on this GPU: writes the table that kernels read.

    python -m bench.tune --shape qwen3-30b-a3b --shape qwen3-30b-a3b-fp8 --out tuned.json

From the tiles of the table on, whatever differs from them a little is tried, and the best of it is
where the next round starts, until nothing is better. Tiles that give other numbers are left out.
Codes are multiplied with as many rows and inputs at a time as numbers are, so that what is added up
comes in the same order: shapes of numbers come first. What is timed is a chain of layers in one
program: one layer's launches alone would take longer than few rows do.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.floors import Ceilings
from bench.kernels import KernelBench
from bench.report import Report
from bench.shapes import SHAPES, Shape
from bench.surroundings import describe
from bench.timing import seconds_per_call
from model.kernels.moe import grouped, tuned
from model.kernels.tiles import LEAST, Tiles
from model.programs import Program

# Rows of an expert at most, of a line of the table, and of how many the line is measured.
ROWS: Final = {1: 1, 8: 4, 24: 16, 96: 64, math.inf: 512}
_LAYERS: Final = 8  # of weights that no cache holds
_ROUNDS: Final = 3
_GAIN: Final = 0.985  # of the time: what is less is noise
_MOST_SHARED: Final = 232448  # bytes of a program's own: an H200's
_MOST_SUMS: Final = 128  # that a thread keeps
_NEAR: Final = 0.02  # of the largest number

type Pair = tuple[Tiles, Tiles]


class Timed(NamedTuple):
    """Seconds of one layer's experts."""

    seconds: float
    pair: Pair


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every line asked for was measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    moe = [name for name, shape in SHAPES.items() if shape.cfg.num_experts]
    parser.add_argument("--shape", action="append", choices=moe, required=True, help="repeatable")
    parser.add_argument("--rows", action="append", type=float, choices=[*ROWS], help="of an expert")
    parser.add_argument("--out", type=Path, default=tuned.TABLE, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append rows here")
    parser.add_argument("--budget-s", type=float, default=0.05, help="to time one pair of tiles")
    args = parser.parse_args(argv)
    report = Report("tune", describe(with_jax=True), 0, args.json)
    lines = list(tuned.read())
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
        self.bench, self.cfg = bench, bench.shape.cfg
        kernel = bench.model.kernels.experts
        if not isinstance(kernel, partial) or kernel.func is not grouped.experts:
            raise NotImplementedError("experts are multiplied in tiles on GPUs alone")
        self.kernel = kernel
        self.layers = [own for _, _, _, *own in bench._of_expert_layers((None,) * 3)]
        stacks = self.layers[0][0]
        width, hidden = stacks.down.shape[2:]
        self.sizes = grouped.weights_of(stacks), hidden, width
        self.of_codes = stacks.down_scale is not None

    def tune(self, rows: float, lines: list[tuned.Tuned]) -> list[tuned.Tuned]:
        """The table with a line for experts of so many rows at most."""
        even = ROWS[rows]
        tokens = -(-even * self.cfg.num_experts // self.cfg.num_experts_per_tok)
        start = tuned.tiles_for(lines, self.sizes, even)
        if self.of_codes:
            numbers = tuned.tiles_for(lines, (tuned.NUMBERS, *self.sizes[1:]), even)
            pairs = zip(start, numbers, strict=True)
            first, second = (replace(own, rows=of.rows, inputs=of.inputs) for own, of in pairs)
            start = first, second
        args = jax.device_put(self.bench.experts_inputs(tokens)[:3])
        (before,) = self._time([self._fitted(start)], args, None)
        best = before
        for _ in range(_ROUNDS):
            found = self._time(self._near(best.pair), args, best.pair)
            firsts = [best, *(one for one in found if one.pair[1] == best.pair[1])]
            seconds = [best, *(one for one in found if one.pair[0] == best.pair[0])]
            both = _fastest(firsts).pair[0], _fastest(seconds).pair[1]
            round_best = _fastest([best, *found, *self._time([both], args, best.pair)])
            if round_best.seconds > _GAIN * best.seconds:
                break
            best = round_best
        name = f"{self.bench.shape.name} experts, {even} rows each"
        shapes = {"shape": self.bench.shape.name, "tokens": tokens, "tiles": str(best.pair)}
        self.bench.report.add(
            name, "time", best.seconds * 1e6, "us", before.seconds * 1e6, shapes=shapes
        )
        source = f"{self.bench.shape.name}, {even} rows, {best.seconds * 1e6:.1f} us"
        around = self.bench.report.surroundings
        line = tuned.Tuned(*self.sizes, rows, *best.pair, f"{source}; {around.device}")
        same = self.sizes, rows
        return [old for old in lines if (old.sizes, old.rows) != same] + [line]

    def _fitted(self, pair: Pair) -> Pair:
        """As the kernel would take it."""
        size = jnp.dtype(self.bench.model.dtype).itemsize
        _, hidden, width = self.sizes
        first = grouped.fitted(pair[0], width, hidden, size)
        return first, grouped.fitted(pair[1], hidden, width, size)

    def _near(self, pair: Pair) -> list[Pair]:
        """All pairs that differ from this one in one product, or in their rows."""
        first, second = pair
        pairs = [(cut, second) for cut in self._changed(first, 2)]
        pairs += [(first, cut) for cut in self._changed(second, 1)]
        if not self.of_codes:
            for rows in (first.rows * 2, first.rows // 2):
                if LEAST <= rows <= 128:
                    pairs.append((replace(first, rows=rows), replace(second, rows=rows)))
        fitting = [self._fitted(near) for near in pairs]
        return [near for near in dict.fromkeys(fitting) if near != pair and self._is_possible(near)]

    def _changed(self, cut: Tiles, products: int) -> Iterator[Tiles]:
        """One or two of its numbers other than they are."""
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
        for i, one in enumerate(changes):
            yield replace(cut, **one)
            for other in changes[i + 1 :]:
                if one.keys() != other.keys():
                    yield replace(cut, **one, **other)

    def _is_possible(self, pair: Pair) -> bool:
        size = jnp.dtype(self.bench.model.dtype).itemsize
        for cut, products in zip(pair, (2, 1), strict=True):
            wide = cut.outputs * products
            shared = cut.stages * (cut.rows + wide) * cut.inputs * size
            sums = cut.rows * wide / (32 * cut.warps)
            least = min(cut.inputs, cut.outputs // (2 if self.of_codes else 1))
            if shared > _MOST_SHARED or sums > _MOST_SUMS or least < LEAST or cut.stages < 2:
                return False
        return True

    def _time(self, pairs: Sequence[Pair], args: Any, base: Pair | None) -> list[Timed]:
        """Of those that compile, and give what the base does. base: None for itself alone."""
        programs = [self._program(pair, args) for pair in pairs]
        expected = self._program(base, args) if base else None
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            wanted = [*programs, *([expected] if expected else [])]
            errors = list(threads.map(_compiled, wanted))
        given = (*args, self.layers)
        numbers = np.asarray(expected(*given), np.float32) if expected else None
        timed = []
        for pair, program, error in zip(pairs, programs, errors, strict=False):
            if error:
                print(f"left out: {pair}: {error}", file=self.bench.report.out)
                continue
            out = np.asarray(program(*given), np.float32)
            if numbers is not None and np.abs(out - numbers).max() > _NEAR * np.abs(numbers).max():
                print(f"left out: {pair}: gives other numbers", file=self.bench.report.out)
                continue
            call = partial(program, *given)
            taken = seconds_per_call(call, jax.block_until_ready, self.bench.budget_s)
            timed.append(Timed(taken / len(self.layers), pair))
        return timed

    def _program(self, pair: Pair, args: Any) -> Program:
        def chain(x: Any, ids: Any, weights: Any, layers: Any) -> Any:
            for stacks, layer in layers:
                out = self.kernel(x, ids, weights, stacks, layer, cuts=pair)
                x = x + (out * np.float32(0.01)).astype(x.dtype)
            return x

        return Program(str(pair), chain, (*args, self.layers))


def _fastest(timed: Sequence[Timed]) -> Timed:
    return min(timed, key=lambda one: one.seconds)


def _compiled(program: Program) -> str:
    """What the compiler says against it; nothing where all is well."""
    try:
        program.compile()
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        return (str(error) or repr(error)).splitlines()[0][:200]
    return ""


if __name__ == "__main__":
    sys.exit(main())
