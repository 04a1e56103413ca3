"""Checks, while tests run, that arrays have the shapes and dtypes that annotations name."""

import inspect
from collections.abc import Callable
from typing import Any, get_args

import jaxtyping


def check_arrays_of(package: str) -> None:
    """On every call of its functions, which for those under `jax.jit` means while tracing.

    The hook would wrap all functions, those without arrays and those that others define at each of
    their calls, too, whose annotations mypy has read: a tenth of the time of tests of model/.
    """
    wrap = jaxtyping.jaxtyped

    def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
        checked = wrap(typechecker=typechecker)

        def decorate(what: Any) -> Any:
            if inspect.isfunction(what):
                named = map(_names_arrays, what.__annotations__.values())
                return checked(what) if any(named) else what
            return checked(what)

        return decorate

    # What the hook writes above each function is looked up when the function is defined.
    jaxtyping.jaxtyped = jaxtyped  # type: ignore[assignment]
    jaxtyping.install_import_hook(package, "beartype.beartype")


def _names_arrays(annotation: Any) -> bool:
    if isinstance(annotation, str):  # which may name anything
        return True
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_names_arrays, get_args(annotation)))
