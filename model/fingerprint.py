"""What makes a program, as a text: the same for the same program, in every process."""

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

OURS = "model", "decode", "prefill"  # packages that programs are traced from
_KNOWN = *OURS, "jax", "numpy", "ml_dtypes", "functools", "builtins"


class NoFingerprint(TypeError):
    """Something has no value that could be told."""


def fingerprint(value: Any) -> str:
    """A text that is the same for values that make the same program, and for no others.

    Raises NoFingerprint for what has no such text.
    """
    match value:
        case enum.Enum():
            return f"{_name(type(value))}.{value.name}"
        case None | bool() | int() | float() | str() | bytes() | np.generic():
            return f"{type(value).__name__} {value!r}"
        case np.dtype():
            return f"dtype {value.name}"
        case np.ndarray() if value.dtype != object:
            digest = hashlib.sha256(value.tobytes()).hexdigest()
            return f"array {value.dtype.name} {value.shape} {digest}"
        case type():
            return f"type {_name(value)}"
        case tuple() | list():
            return f"{_name(type(value))}[{', '.join(map(fingerprint, value))}]"
        case set() | frozenset():
            return f"set[{', '.join(sorted(map(fingerprint, value)))}]"
        case Mapping():
            told = (f"{fingerprint(key)}: {fingerprint(item)}" for key, item in value.items())
            return f"{_name(type(value))}{{{', '.join(told)}}}"
    return _tell_jax(value) or _tell_function(value) or _tell_fields(value)


def _tell_jax(value: Any) -> str:
    match value:
        case jax.ShapeDtypeStruct():
            parts = value.shape, value.dtype, value.weak_type, value.sharding
            return f"shape {fingerprint(parts)}"
        case NamedSharding():
            return f"sharding {fingerprint((value.mesh, value.spec, value.memory_kind))}"
        case SingleDeviceSharding():
            return f"sharding {fingerprint((sorted(value.device_set, key=_id), value.memory_kind))}"
        case PartitionSpec():
            return repr(value)
        case Mesh():
            axes = value.axis_names, value.axis_types, value.devices.shape
            return f"mesh {fingerprint((*axes, list(value.devices.flat)))}"
        case jax.Device():
            return f"device {value.id} {value.platform} {value.device_kind}"
    return ""


def _tell_function(value: Any) -> str:
    match value:
        case functools.partial():
            return f"partial {fingerprint((value.func, value.args, value.keywords))}"
        case types.BuiltinFunctionType():
            return f"builtin {value.__module__}.{value.__qualname__}"
        case types.FunctionType():
            code, module = (
                value.__code__,
                value.__globals__["__name__"],
            )  # its own, whatever it wraps
            if code.co_name == "<lambda>":
                raise NoFingerprint(f"a lambda of {module} may not be alone in its line")
            name = _known(f"{module}.{code.co_qualname}:{code.co_firstlineno}")
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            held = cells, value.__defaults__, value.__kwdefaults__
            return f"function {name} {fingerprint(held)}"
    if callable(value) and hasattr(value, "__wrapped__"):  # by jax.jit and its like
        return f"{type(value).__name__} of {fingerprint(value.__wrapped__)}"
    return ""


def _tell_fields(value: Any) -> str:
    if not dataclasses.is_dataclass(value):
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise NoFingerprint(f"{name} has no value to tell")
    fields = (f"{f.name}={fingerprint(getattr(value, f.name))}" for f in dataclasses.fields(value))
    return f"{_name(type(value))}({', '.join(fields)})"


def _name(of: type) -> str:
    return _known(f"{of.__module__}.{of.__qualname__}")


def _known(name: str) -> str:
    """The name, if its source is one of those that are told of, or has a version that is."""
    if name.partition(".")[0] not in _KNOWN:
        raise NoFingerprint(f"{name} is of no package whose source is told")
    return name


def _id(device: jax.Device) -> int:
    return device.id
