"""Everything that shapes a program enters its fingerprint by value, or there is no fingerprint."""

import enum
import os
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model import fingerprint as module
from model.fingerprint import NoFingerprint, fingerprint
from model.sharding import make_mesh, on_ranks


class Kind(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    left: int
    right: int


@dataclass(frozen=True)
class Sizes:
    left: int
    right: Any = None


def plus(held: Any, kind: Any = None) -> Callable[[Any], Any]:
    def add(value: Any) -> Any:
        return value + held, kind

    return add


def times(held: Any) -> Callable[[Any], Any]:
    def add(value: Any) -> Any:
        return value * held

    return add


def endless() -> Callable[[], Any]:
    def again() -> Any:
        return again()

    return again


def unbound() -> Callable[[], Any]:
    function = plus(1)
    cells = tuple(types.CellType() for _ in function.__code__.co_freevars)
    return types.FunctionType(function.__code__, function.__globals__, closure=cells)


@pytest.fixture(autouse=True)
def _of_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KNOWN", (*module._KNOWN, "tests"))


def _shape(dtype: Any = jnp.float32, tp: int = 1, *spec: str | None) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(make_mesh(tp, 1), P(*spec))
    return jax.ShapeDtypeStruct((4, 4), dtype, sharding=sharding)


def test_what_makes_other_programs_is_told_apart() -> None:
    mesh = make_mesh(2, 1)
    values: list[Any] = [
        None, True, 1, 1.0, "1", b"1", Kind.ONE, np.int32(1), np.float32(1), (1,), [1], {1}, {1: 1},
        (1, 2), Pair(1, 2), Sizes(1, 2), Sizes(1), {"left": 1, "right": 2}, ("1, 2",), ("1", "2"),
        ((1,), 2), (1, (2,)), np.arange(2), np.arange(2, dtype=np.int32), np.zeros((2, 1)),
        np.zeros((1, 2)), jnp.float32, np.dtype(np.float32), jnp.bfloat16, np.dtype(jnp.bfloat16),
        plus, times, plus(1), plus(2), plus(1, 2), times(1), partial(plus, 1),
        partial(plus, held=1), max, min, np.zeros(2, ">i4"), np.dtype(">i4"), _shape(),
        _shape(jnp.int32), _shape(tp=2),
        _shape(jnp.float32, 2, "tensor"), _shape(jnp.float32, 2, None, "tensor"), mesh,
        make_mesh(1, 1), P(), P("tensor"),
        on_ranks(mesh, plus(1), (P(),), P()), on_ranks(mesh, plus(2), (P(),), P()),
        on_ranks(mesh, plus(1), (P("tensor"),), P()),
        on_ranks(make_mesh(1, 1), plus(1), (P(),), P()),
    ]  # fmt: skip
    texts = [fingerprint(value) for value in values]
    for (one, left), (other, right) in combinations(zip(values, texts, strict=True), 2):
        assert left != right, (one, other)


def test_what_makes_the_same_program_is_told_alike() -> None:
    for make in (
        lambda: plus((1, "a")),
        lambda: Sizes(1, {2, 3}),
        lambda: on_ranks(make_mesh(2, 1), partial(plus(1)), (P(),), P()),
        lambda: (_shape(), np.arange(3)),
    ):
        assert fingerprint(make()) == fingerprint(make())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "builtins.object has no value that can"),
        (lambda: 1, "a lambda of tests.model.test_fingerprint, which may share its line"),
        (plus(object()), "builtins.object"),
        (Sizes(1).__eq__, "method"),
        (np.array([object()]), "ndarray"),
        (np.zeros(1, [("a", int)]), "ndarray"),
        (jax.jit(times), "PjitFunction has no value that can"),
        ({}.get, "builtin_function_or_method"),
        (endless(), "a value contains itself"),
        (unbound(), "holds an empty cell"),
        (os.path.join, "posixpath.join:.* is from a package whose source is not in"),
        (pytest.MonkeyPatch, "is from a package"),
    ],
)
def test_what_has_no_value_of_its_own_is_refused(value: Any, says: str) -> None:
    with pytest.raises(NoFingerprint, match=says):
        fingerprint((1, value))


def test_an_array_on_a_device_is_refused() -> None:
    with pytest.raises(NoFingerprint, match="ArrayImpl has no value that can"):
        fingerprint(jnp.zeros(2))
