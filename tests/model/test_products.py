"""Products tile by tile: the numbers of whole products, with memory for only one tile."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.coded import decoded
from model.products import LayerWeights, Matrix, product

SIZES = st.sampled_from((8, 24, 64, 96, 320, 520, 1536))
OUTPUTS = st.sampled_from((1, 40, 1024, 6144, 7000, 16385, 20000))


def _codes(
    draw: np.random.Generator,
    shape: tuple[int, ...],
    group: int,
    axis: int = -2,
    dtype: type = np.uint8,
) -> tuple[Any, Any]:
    of_groups = list(shape)
    of_groups[axis] //= group
    if dtype is np.int8:
        integers = draw.integers(-128, 127, shape, np.int8, endpoint=True)
        scales = draw.uniform(1e-4, 1e-3, of_groups)
        return jnp.asarray(integers), jnp.asarray(scales, jnp.float32)
    codes = draw.integers(0, 127, shape, dtype=np.uint8) | draw.choice(
        np.array([0, 128], np.uint8), shape
    )
    return jnp.asarray(codes), jnp.asarray(draw.uniform(1e-4, 1e-3, of_groups), jnp.float32)


def _numbers(codes: Any, scales: Any, dtype: Any) -> np.ndarray:
    """What codes [inputs, outputs] represent, by NumPy, which compiles nothing for their shape."""
    values = np.asarray(codes)
    plain = values if values.dtype == np.int8 else values.view(ml_dtypes.float8_e4m3fn)
    of_each = np.repeat(np.asarray(scales), len(values) // len(scales), axis=0)
    return (plain.astype(np.float32) * of_each).astype(dtype)


def _among_others(own: Any) -> Any:
    """A stack [2, 3, ...] with `own` in its last place, and ones as other weights and scales."""
    stack = np.ones((2, 3, *own.shape), own.dtype)
    stack[1, 2] = own
    return jnp.asarray(stack)


def _expected(x: Any, weights: Any) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(weights, np.float64)


@settings(max_examples=60)
@given(
    rows=st.sampled_from((1, 2, 8, 33, 70)),
    inputs=SIZES,
    outputs=OUTPUTS,
    group=st.sampled_from((0, 8, 16, 32, 128, 512)),
    stacked=st.booleans(),
    on_cpu=st.booleans(),
    dtype=st.sampled_from((jnp.float32, jnp.bfloat16)),
    kind=st.sampled_from((np.uint8, np.int8)),
    narrow=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_product_is_that_of_the_numbers_whatever_its_tiles(
    rows: int,
    inputs: int,
    outputs: int,
    group: int,
    stacked: bool,
    on_cpu: bool,
    dtype: Any,
    kind: type,
    narrow: bool,
    seed: int,
) -> None:
    draw = np.random.default_rng(seed)
    group = int(np.gcd(group, inputs))
    scales: Any = None
    at: tuple[Any, ...] = ()
    if group > 1:
        values, scales = _codes(draw, (inputs, outputs), group, dtype=kind)
        numbers = _numbers(values, scales, dtype)
    else:
        numbers = draw.standard_normal((inputs, outputs), np.float32).astype(dtype)
        held = numbers.astype(jnp.bfloat16 if narrow else dtype)
        values, numbers = jnp.asarray(held), held.astype(dtype)
    if stacked:
        at = (jnp.int32(1), jnp.int32(2))
        values, scales = (None if own is None else _among_others(own) for own in (values, scales))
    x = jnp.asarray(draw.standard_normal((rows, inputs), np.float32).astype(dtype))

    def run(x: Any, values: Any, scales: Any) -> Any:
        matrix = Matrix(values, scales, jnp.dtype(dtype), on_cpu, at)
        some, narrow = matrix.tile(rows)
        assert inputs % some == some % matrix.group == 0
        assert narrow <= outputs
        assert on_cpu or (some, narrow) == (inputs, outputs)
        return product(x, matrix)

    found = jax.jit(run)(x, values, scales)
    expected = _expected(x, numbers)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_turned_matrix_is_multiplied_by_one_row_as_it_lies(dtype: str) -> None:
    draw = np.random.default_rng(5)
    table = jnp.asarray(draw.standard_normal((48, 32)), dtype)
    x = jnp.asarray(draw.standard_normal((1, 32)), dtype)
    found = product(x, Matrix(table, None, jnp.dtype(dtype), False, turned=True))
    other = product(x, Matrix(table.T, None, jnp.dtype(dtype), False))
    assert (found.dtype, found.shape) == (jnp.float32, (1, 48))
    np.testing.assert_allclose(found, other, rtol=0, atol=1e-5)


def test_a_parameter_of_several_axes_of_inputs_is_one_matrix() -> None:
    draw = np.random.default_rng(6)
    codes, scales = _codes(draw, (2, 3, 32, 40), 16)
    weights = LayerWeights({"o": codes, "o_scale": scales}, jnp.float32, True)
    matrix = weights.matrix("o", inputs=3)
    assert (matrix.shape, matrix.group) == ((192, 40), 16)
    x = jnp.asarray(draw.standard_normal((5, 192)), jnp.float32)
    numbers = decoded(codes, scales, 2, jnp.float32, True).reshape(192, 40)
    np.testing.assert_allclose(product(x, matrix), _expected(x, numbers), rtol=0, atol=1e-5)


def test_a_layer_of_a_stack_is_one_matrix() -> None:
    draw = np.random.default_rng(7)
    codes, scales = _codes(draw, (3, 32, 2, 20), 16, axis=1)
    stack = {"gate_up": codes, "gate_up_scale": scales, "norm": jnp.ones(32)}
    weights = LayerWeights(stack, jnp.float32, True, frozenset({"gate_up", "down"}), jnp.int32(2))
    assert (weights.shape("gate_up"), weights.shape("norm")) == ((32, 2, 20), (32,))
    x = jnp.asarray(draw.standard_normal((5, 32)), jnp.float32)
    numbers = decoded(codes, scales, 1, jnp.float32, True)[2].reshape(32, 40)
    found = product(x, weights.matrix("gate_up"))
    np.testing.assert_allclose(found, _expected(x, numbers), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("size", [(320, 6144), (64, 20000), (640, 6144)])
def test_a_row_that_is_not_finite_spoils_no_other(size: tuple[int, int], rows: int) -> None:
    """Sizes whose tiles are some of the outputs, some of the inputs, and both."""
    draw = np.random.default_rng(8)
    weights = jnp.asarray(draw.standard_normal(size), jnp.bfloat16)
    matrix = Matrix(weights, None, jnp.dtype(jnp.float32), True)
    assert matrix.tile(rows) != size
    x = draw.standard_normal((rows, size[0])).astype(np.float32)
    broken = x.copy()
    broken[0] = np.inf
    run = jax.jit(lambda x: product(x, matrix))
    np.testing.assert_array_equal(run(broken)[1:], run(x)[1:])


@settings(max_examples=30)
@given(
    rows=st.sampled_from((32, 64, 96, 100, 256)),
    size=st.sampled_from(((320, 6144), (1536, 1000), (64, 320))),
    used=st.integers(0, 256),
    kind=st.sampled_from(("plain", "bfloat16", "codes")),
)
def test_rows_that_only_pad_are_left_out(
    rows: int, size: tuple[int, int], used: int, kind: str
) -> None:
    draw = np.random.default_rng(rows + used)
    used, scales = min(used, rows), None
    if kind == "codes":
        values, scales = _codes(draw, size, 32)
        numbers = _numbers(values, scales, jnp.float32)
    else:
        values = jnp.asarray(draw.standard_normal(size), jnp.bfloat16)
        values = values if kind == "bfloat16" else values.astype(jnp.float32)
        numbers = np.asarray(values, np.float32)
    x = draw.standard_normal((rows, size[0])).astype(np.float32)

    def matrix(used: Any) -> Matrix:
        return Matrix(values, scales, jnp.dtype(jnp.float32), True, used=used)

    found = np.asarray(jax.jit(lambda x, used: product(x, matrix(used)))(x, jnp.int32(used)))
    expected = _expected(x, numbers)
    within = {"rtol": 0, "atol": 1e-5 * np.abs(expected).max()}
    np.testing.assert_allclose(found[:used], expected[:used], **within)
    in_blocks = -(-used // 32) * 32
    if matrix(jnp.int32(used)).in_blocks(rows) and 8 * in_blocks <= 7 * rows:
        assert not found[in_blocks:].any()
    else:
        np.testing.assert_allclose(found, expected, **within)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("group", [128, 512])
@pytest.mark.parametrize(
    "kind", ["codes", "an expert", "an expert's codes", "codes of integers", "bfloat16", "plain"]
)
def test_a_processor_has_memory_for_a_tile_and_not_for_all(
    kind: str, group: int, rows: int
) -> None:
    """All weights are 96 MiB in float32; i is the expert, and how many rows are used."""
    inputs, outputs = 2048, 12288
    lead, at = ((1, 2), (jnp.int32(0),)) if "expert" in kind else ((), ())
    coded = "codes" in kind
    of_codes = jnp.int8 if "integers" in kind else jnp.uint8
    of_numbers = jnp.bfloat16 if kind == "bfloat16" else jnp.float32

    def run(x: Any, values: Any, scales: Any, i: Any) -> Any:
        place = (*at, i) if at else ()
        return product(x, Matrix(values, scales, jnp.float32, True, place, used=i))

    def of(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((*lead, *shape), dtype)

    program = jax.jit(run).lower(
        jax.ShapeDtypeStruct((rows, inputs), jnp.float32),
        of((inputs, outputs), of_codes if coded else of_numbers),
        of((inputs // group, outputs), jnp.float32) if coded else None,
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    memory = program.compile().memory_analysis()
    assert memory is not None
    assert memory.argument_size_in_bytes > 0
    assert memory.temp_size_in_bytes < 20 * 2**20


@pytest.mark.parametrize("kind", ["bfloat16", "codes"])
@pytest.mark.parametrize("rows", [2, 16, 96])
def test_small_matrices_of_many_layers_are_not_widened_all_at_once(rows: int, kind: str) -> None:
    """Each is 2.3 MiB in float32. XLA computes what waits for nothing first, and keeps it."""
    num_layers, size = 12, 768

    def run(x: Any, layers: Any) -> Any:
        for values, scales in layers:
            x = product(x, Matrix(values, scales, jnp.float32, True))
        return x

    shape = jax.ShapeDtypeStruct
    scales = shape((size // 128, size), jnp.float32) if kind == "codes" else None
    values = shape((size, size), jnp.bfloat16 if kind == "bfloat16" else jnp.int8)
    layers = [(values, scales)] * num_layers
    program = jax.jit(run).lower(shape((rows, size), jnp.float32), layers).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 8 * 2**20
