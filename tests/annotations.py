"""Checks, while tests run, that arrays have the shapes and dtypes their annotations declare."""

import inspect
from collections.abc import Callable
from typing import Any, get_args

import jaxtyping


def check_arrays_of(package: str) -> None:
    """Check every call of the package's functions; under `jax.jit` that means while tracing.

    jaxtyping's import hook would wrap every function, also those without arrays and those defined
    anew at each call of another one. mypy has checked those annotations already, and wrapping them
    takes a tenth of the time of the tests of model/.
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

    # The decorator that the hook writes above a function is looked up when that is defined.
    jaxtyping.jaxtyped = jaxtyped  # type: ignore[assignment]
    jaxtyping.install_import_hook(package, "beartype.beartype")


def _names_arrays(annotation: Any) -> bool:
    if isinstance(annotation, str):  # it may name anything
        return True
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_names_arrays, get_args(annotation)))
