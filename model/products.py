"""Products of rows with weights, which are numbers or codes; a CPU computes them tile by tile.

A tile is copied, widened or decoded into the CPU's cache and multiplied there. Left alone, XLA on
CPU first moves the whole matrix where its dtype is not that of products, or it is one expert of a
stack, or where rows are few but more than one: it packs weights for every product
(docs/adr/0051). A single row is multiplied in a sum instead, within which XLA widens and decodes
in registers (docs/adr/0068). Rows that only pad a chunk are left out (docs/adr/0069).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from model.coded import decoded, from_codes

# Tiles of one or two million weights, which were best or nearly so on all shapes tried, and as wide
# as that allows: strips of fewer outputs are slower, of codes by up to a third.
_INPUTS: Final = 256
_OUTPUTS: Final = 6144  # of a tile with so many inputs; a wider one has half as many
_WIDEST: Final = 16384  # outputs; more of them are multiplied strip by strip
_STRIP: Final = 8192
_SMALL: Final = 2**20  # weights that are one tile
# The same for a matrix that is widened or decoded and has an array of its own. XLA would do that at
# the start of the program for those of all layers, and keep what it made.
_SMALL_APART: Final = 2**17
_COLUMNS: Final = 512  # outputs of a tile that has all inputs, for many rows
_BLOCK: Final = 32  # rows that are multiplied at once where many are padding
_LEAST: Final = 64  # inputs of a tile; a size that has no such divisor stays whole
# For weights that are numbers, and not indexed in a stack, XLA's own product is faster, unless the
# number of rows is in _FEW_ROWS and the matrix has at least _LARGE weights.
_FEW_ROWS: Final = range(2, 33)
_UNIT_ROWS: Final = 16
_LARGE: Final = 2 * 2**20  # weights; smaller ones stay in the processor's cache
# A sum for one row: terms of an output that are added at once, and weights of a turn.
_TERMS: Final = 8
_TURN: Final = 2**19

Axes = tuple[int, ...]
# (rows, matrix) -> parts to be added up; see `product_parts`.
ProductParts = Callable[[Array, "Matrix"], Array]


@dataclass(frozen=True)
class Matrix:
    """Weights [inputs, outputs], or those at one place in a stack of such matrices.

    values: [*stack, inputs, outputs], of the products' dtype or a narrower one that is widened, or
    codes where there are scales.
    scales: [*stack, groups, outputs], float32; see model/coded.py.
    dtype: of products. on_cpu: whether products are made for a CPU.
    at: the place, an index for each axis of the stack.
    turned: values are [outputs, inputs], which have neither scales nor a stack; never on a CPU.
    used: how many of the rows it is multiplied by mean something, which are the first ones; None:
    all. What the others give is finite if they are.
    """

    values: Array
    scales: Array | None
    dtype: Any
    on_cpu: bool
    at: tuple[Int32[Array, ""], ...] = ()
    turned: bool = False
    used: Int32[Array, ""] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs."""
        inputs, outputs = self.values.shape[len(self.at) :]
        return (outputs, inputs) if self.turned else (inputs, outputs)

    @property
    def group(self) -> int:
        """Inputs that share a scale; 1 without scales."""
        return 1 if self.scales is None else self.shape[0] // int(self.scales.shape[-2])

    def part(
        self, first: tuple[Array, Array], size: tuple[int, int]
    ) -> Float[Array, "inputs outputs"]:
        """The part of this size from `first` on, as numbers.

        Its inputs are whole groups, or a part of one.
        """
        values = self._slice(self.values, first, size)
        if self.scales is None:
            return values.astype(self.dtype)
        scales = self._scales(first, (max(1, size[0] // self.group), size[1]))
        return decoded(values, scales, 0, self.dtype, native=not self.on_cpu)

    def unscaled(
        self, first: tuple[Array, Array], size: tuple[int, int]
    ) -> Float[Array, "inputs outputs"]:
        """A part of codes, as numbers before they are scaled; float32."""
        return from_codes(self._slice(self.values, first, size), native=not self.on_cpu)

    def scales_of(self, first_input: Int32[Array, ""]) -> Float[Array, "1 outputs"]:
        """The scale that this input and its group have, for each output."""
        return self._scales((first_input, jnp.int32(0)), (1, self.shape[1]))

    def _scales(self, first: tuple[Array, Array], size: tuple[int, int]) -> Array:
        """size: groups and outputs."""
        assert self.scales is not None
        return self._slice(self.scales, (lax.div(first[0], np.int32(self.group)), first[1]), size)

    def _slice(self, array: Array, first: tuple[Array, Array], size: tuple[int, int]) -> Array:
        ones = (1,) * len(self.at)
        return lax.dynamic_slice(array, (*self.at, *first), (*ones, *size)).reshape(size)

    def in_blocks(self, rows: int) -> bool:
        """Whether so many rows are multiplied block by block, as far as they are used."""
        inputs, outputs = self.shape
        if self.used is None or rows <= _BLOCK or rows % _BLOCK or inputs * outputs <= _SMALL:
            return False
        return self.tile(rows)[0] == inputs

    def tile(self, rows: int) -> tuple[int, int]:
        """Inputs and outputs of the tiles that are multiplied with so many rows."""
        inputs, outputs = self.shape
        is_plain = self.values.dtype == self.dtype and not self.at
        small = _SMALL if is_plain or self.at else _SMALL_APART
        if self.turned or not self.on_cpu or inputs * outputs <= small:
            return inputs, outputs
        if is_plain and (rows not in _FEW_ROWS or inputs * outputs < _LARGE):
            return inputs, outputs
        if rows >= _FEW_ROWS.stop and not self.at:
            return inputs, min(outputs, _COLUMNS)
        if self.group > _INPUTS:
            return self.group, min(outputs, max(_LEAST, 2 * _SMALL // self.group))
        narrow = outputs if outputs <= _WIDEST else _STRIP
        most = _INPUTS if narrow <= _OUTPUTS else max(_INPUTS // 2, self.group)
        fits = [n for n in range(self.group, most + 1, self.group) if inputs % n == 0]
        return max((n for n in fits if n >= _LEAST), default=inputs), narrow


@dataclass(frozen=True)
class LayerWeights(Mapping[str, Array]):
    """One layer's parameters by name; those of experts are whole stacks over layers.

    dtype: of products. on_cpu: see Matrix.
    stacked: which other parameters are whole stacks, too. idx: the layer's place in all stacks.
    used: see Matrix. adapters: which of the adapters each row has, see model/adapted.py.
    """

    arrays: Mapping[str, Array]
    dtype: Any
    on_cpu: bool
    stacked: frozenset[str] = frozenset()
    idx: Int32[Array, ""] | None = None
    used: Int32[Array, ""] | None = None
    adapters: Bool[Array, "rows adapters"] | None = None

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the layer's own part."""
        return self.arrays[name].shape[name in self.stacked :]

    def matrix(self, name: str, inputs: int = 1) -> Matrix:
        """A parameter as a matrix, for a product over its first `inputs` axes."""
        at = (self.idx,) if name in self.stacked and self.idx is not None else ()

        def flat(array: Array) -> Array:
            lead, own = array.shape[: len(at)], array.shape[len(at) :]
            return array.reshape(*lead, math.prod(own[:inputs]), -1)

        scales = self.arrays.get(f"{name}_scale")
        values, own = flat(self.arrays[name]), None if scales is None else flat(scales)
        return Matrix(values, own, self.dtype, self.on_cpu, at, used=self.used)


def zeros_after(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Zeros in float32, shaped as x and made only once x exists.

    XLA makes the plain zeros of every layer's loops at the start of a program, and keeps them all:
    194 MiB per layer for an 8k chunk of Qwen3-30B on a GPU, 22 MiB for one of 512 tokens of
    Qwen3-0.6B on a CPU.
    """
    return x.astype(jnp.float32) * np.float32(0)


def contract(
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    over: tuple[Axes, Axes],
    each: tuple[Axes, Axes] = ((), ()),
) -> Float[Array, "..."]:
    """The sum of x * w over some axes, for each entry of others, in float32, from w's dtype.

    over, each: axes of x and axes of w, so that nothing has to be transposed: see lax.dot_general.
    """
    exact = lax.Precision.HIGHEST if w.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x.astype(w.dtype), w, (over, each), precision=exact, preferred_element_type=jnp.float32
    )


def with_company(x: Float[Array, "1 a"]) -> Float[Array, "rows a"]:
    """A row and as many rows of zeros as a matrix unit takes, for a product on an accelerator.

    For a row alone XLA for CUDA computes a sum, and writes its terms to memory: that takes four
    times as long as the product.
    """
    return jnp.pad(x, ((0, _UNIT_ROWS - 1), (0, 0)))


def product(x: Float[Array, "rows a"], w: Matrix) -> Float[Array, "rows b"]:
    """x @ w in float32, from operands of the products' dtype."""
    rows = x.shape[0]
    if rows == 1 and w.on_cpu and (w.at or w.values.dtype != jnp.float32):
        return _row_in_turns(x, w)
    if rows == 1 and not w.on_cpu:
        if w.scales is not None:
            return _row_by_codes(x, w)
        return product(with_company(x), w)[:1]
    outputs, (some, narrow) = w.shape[1], w.tile(rows)
    in_blocks = w.in_blocks(rows)
    if narrow == outputs and not in_blocks:
        return _strip(x, w, jnp.int32(0), (some, narrow))

    def put_strip(i: Array, out: Array) -> Array:
        first = _start(i, narrow, outputs)
        if in_blocks:
            return _put_used(x, w, first, narrow, out)
        own = _strip(x, w, first, (some, narrow))
        return lax.dynamic_update_slice(out, own, (jnp.int32(0), first))

    nothing = _nothing(x, (rows, outputs))
    return lax.fori_loop(np.int32(0), np.int32(-(-outputs // narrow)), put_strip, nothing)


def up_to_last(live: Bool[Array, " rows"]) -> Int32[Array, ""]:
    """How many of the first rows hold all that are live."""
    ends = jnp.arange(1, live.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(live, ends, np.int32(0)))


def _nothing(x: Float[Array, "rows a"], shape: tuple[int, int]) -> Float[Array, "b c"]:
    """What a loop over tiles begins with: zeros that are made only once x exists.

    Each row's are made of that row, so that one that is not finite spoils no other.
    """
    return jnp.broadcast_to(zeros_after(x[:, :1]), shape)


def _start(i: Array, size: int, whole: int) -> Int32[Array, ""]:
    """Where strip i begins; the last one begins earlier where strips do not fit evenly."""
    return jnp.minimum(i * np.int32(size), np.int32(whole - size))


def product_parts(x: Float[Array, "rows a"], w: Matrix) -> Float[Array, "parts rows b"]:
    """`product`, as parts that are still to be added up."""
    return product(x, w)[None]


def _row_by_codes(x: Float[Array, "1 a"], w: Matrix) -> Float[Array, "1 b"]:
    """The product of one row with codes on an accelerator, as a sum.

    XLA for CUDA decodes weights within a sum, but writes them to memory before a product.
    """
    (inputs, outputs), zero = w.shape, jnp.int32(0)
    by_group = inputs // w.group, w.group
    numbers = w.part((zero, zero), w.shape).astype(jnp.float32).reshape(*by_group, outputs)
    row = x.astype(w.dtype).astype(jnp.float32).reshape(*by_group, 1)
    # XLA would split a single sum over all inputs differently, and write decoded weights, too.
    sums = lax.optimization_barrier(jnp.sum(row * numbers, axis=1))
    return jnp.sum(sums, axis=0, keepdims=True)


def _strip(
    x: Float[Array, "rows a"], w: Matrix, first_output: Int32[Array, ""], size: tuple[int, int]
) -> Float[Array, "rows c"]:
    """x by some of the outputs. size: of a tile."""
    (inputs, _), (some, narrow), zero = w.shape, size, jnp.int32(0)
    if w.turned:
        return contract(x, w.values, ((1,), (1,)))
    if some == inputs:
        return contract(x, w.part((zero, first_output), size), ((1,), (0,)))

    def add_tile(i: Array, out: Array) -> Array:
        first = i * np.int32(some)
        own = lax.dynamic_slice(x, (zero, first), (x.shape[0], some))
        return out + contract(own, w.part((first, first_output), size), ((1,), (0,)))

    nothing = _nothing(x, (x.shape[0], narrow))
    return lax.fori_loop(np.int32(0), np.int32(inputs // some), add_tile, nothing)


def _put_used(
    x: Float[Array, "rows a"], w: Matrix, first: Int32[Array, ""], narrow: int, out: Array
) -> Float[Array, "rows b"]:
    """Put x by so many outputs, from the first on, into `out`, as far as rows are used.

    They are multiplied block by block, or all at once where most are used: each block packs the
    weights anew.
    """
    rows, inputs = x.shape
    assert w.used is not None
    blocks = lax.div(w.used + np.int32(_BLOCK - 1), np.int32(_BLOCK))
    tile = w.part((jnp.int32(0), first), (inputs, narrow))

    def put(count: int, i: Array, out: Array) -> Array:
        row = i * np.int32(count)
        own = lax.dynamic_slice(x, (row, jnp.int32(0)), (count, inputs))
        return lax.dynamic_update_slice(out, contract(own, tile, ((1,), (0,))), (row, first))

    return lax.cond(
        8 * _BLOCK * blocks > 7 * rows,
        lambda out: put(rows, jnp.int32(0), out),
        lambda out: lax.fori_loop(np.int32(0), blocks, partial(put, _BLOCK), out),
        out,
    )


def _row_in_turns(x: Float[Array, "1 a"], w: Matrix) -> Float[Array, "1 b"]:
    """The product of one row on a CPU, as a sum.

    All inputs, or those that share a scale, are cut into _TERMS parts of equal size, and a turn
    takes some inputs of each. So it reads memory in as many places, and the CPU reads ahead in each
    of them; rows of weights that lie beside each other are read half as fast.
    """
    inputs, outputs = w.shape
    # Scaled once a turn; numbers that are rounded after scaling must be scaled one by one.
    scaled = w.scales is not None and jnp.dtype(w.dtype) == jnp.float32
    shared = w.group if scaled else inputs
    terms = math.gcd(shared, _TERMS)
    apart = shared // terms
    within = apart if scaled or w.scales is None else math.gcd(apart, w.group)
    most = min(within, max(1, _TURN // (terms * outputs)))
    some = max(n for n in range(1, most + 1) if within % n == 0)
    row, zero = x[0].astype(w.dtype).astype(jnp.float32), jnp.int32(0)

    def add_turn(i: Array, sums: Array) -> Array:
        turns = np.int32(apart // some)
        start = lax.div(i, turns) * np.int32(shared) + lax.rem(i, turns) * np.int32(some)
        found = jnp.zeros_like(sums) if scaled else sums
        for term in range(terms):
            at = start + np.int32(term * apart), zero
            numbers = (w.unscaled if scaled else w.part)(at, (some, outputs)).astype(jnp.float32)
            found = found + lax.dynamic_slice(row, at[:1], (some,))[:, None] * numbers
        return sums + found * w.scales_of(start) if scaled else found

    nothing = _nothing(x, (some, outputs))
    sums = lax.fori_loop(zero, np.int32(inputs // (terms * some)), add_turn, nothing)
    return jnp.sum(sums, axis=0, keepdims=True)
