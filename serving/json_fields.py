"""Reads the fields of a JSON body into a struct, and refuses those that are not served.

Some languages write every number as a float. A field that takes integers takes 5.0 as well, as in
vLLM and SGLang, but not 5.5.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from serving.errors import ApiError, from_decode_error, not_served

T = TypeVar("T")
_NOT_SERVED: Final = "not served"
# A field that would change the answer, and that this server does not serve: see `refuse`.
NotServed = Annotated[T | None, _NOT_SERVED]
# From here on a float may stand for several integers.
_MAX_EXACT: Final = 1 << 53
_MAX_ITEMS: Final = 16_384  # of all lists of a body: so many are searched for floats, one by one
_MAX_VALUES: Final = 1 << 18  # of a field without a type, which are all searched
_untyped = msgspec.json.Decoder(float_hook=float)  # takes 1e999, for fields that nothing reads
_FLOAT_FOR_INT = re.compile(r"^Expected `(?:bool \| )?int\b.*, got `float`")


def read_json[T: msgspec.Struct](decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The struct in a body. Raises ApiError naming the field at fault."""
    try:
        return _decoded(decoder, body)
    except msgspec.DecodeError as error:
        if not body or body.isspace():
            what = "the body is empty: expected a JSON object"
            raise ApiError(400, what, code="invalid_json") from error
        raise from_decode_error(error) from error
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not UTF-8", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error


def refuse(fields: msgspec.Struct, names: Sequence[str] = ()) -> None:
    """Raises ApiError for the first of these fields that holds anything.

    names: by default those of the NotServed fields.
    """
    for name in names or _not_served(type(fields)):
        if getattr(fields, name) not in (None, False, "", [], {}):
            raise not_served(name)


@cache
def _not_served(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    hints = get_type_hints(struct, include_extras=True)
    return tuple(n for n, kind in hints.items() if _NOT_SERVED in getattr(kind, "__metadata__", ()))


def refuse_unless(fields: msgspec.Struct, neutral: Mapping[str, Any]) -> None:
    """Raises ApiError for the first of the fields that holds neither null nor its neutral value."""
    for name, value in neutral.items():
        if getattr(fields, name) not in (None, value):
            raise not_served(name)


# --- integers that are written as floats ----------------------------------------------------------


def _decoded[T: msgspec.Struct](decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises DecodeError."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not _FLOAT_FOR_INT.match(str(error)):
            raise
    # Few bodies have such a float, and only these are read twice.
    value = _Integers().of(_untyped.decode(body), _type_info(decoder.type))
    return msgspec.convert(value, decoder.type, str_keys=True)


@cache
def _type_info(struct: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(struct)


class _Integers:
    """Replaces whole floats by integers, in one body, where a field's type takes only integers.

    What a field takes untyped, such as arguments of a template, stays as it is. A number that no
    float holds is refused there too: Python would write it as Infinity, which is no JSON.
    """

    def __init__(self) -> None:
        self._left = _MAX_ITEMS

    def of(self, value: Any, kind: inspect.Type, path: str = "$") -> Any:
        """The value with its whole floats replaced; objects and lists are changed in place.

        Raises ValidationError for a number that no float holds.
        """
        kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
        if isinstance(value, float):
            takes_floats = any(
                isinstance(one, inspect.FloatType | inspect.AnyType) for one in kinds
            )
            takes_integers = any(isinstance(one, inspect.IntType) for one in kinds)
            if math.isinf(value) and (takes_floats or takes_integers):
                raise msgspec.ValidationError(f"Number out of range - at `{path}`")
            is_one = value.is_integer() and abs(value) <= _MAX_EXACT
            return int(value) if is_one and takes_integers and not takes_floats else value
        if any(isinstance(one, inspect.AnyType | inspect.DictType) for one in kinds):
            _check_finite(value, path)
        for one in kinds:
            if isinstance(one, inspect.StructType) and isinstance(value, dict):
                for field in one.fields:
                    name = field.encode_name
                    if name in value:
                        value[name] = self.of(value[name], field.type, f"{path}.{name}")
            elif isinstance(one, inspect.ListType) and isinstance(value, list):
                self._left -= len(value)
                if self._left >= 0:
                    value[:] = [self.of(item, one.item_type, f"{path}[...]") for item in value]
        return value


def _check_finite(value: Any, path: str) -> None:
    """Raises ValidationError for an infinite number anywhere in a JSON value, or for too many
    values: they are looked at one by one.
    """
    waiting, left = [value], _MAX_VALUES
    while waiting:
        one = waiting.pop()
        left -= 1
        if left < len(waiting):
            raise msgspec.ValidationError(f"More than {_MAX_VALUES} values - at `{path}`")
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, float) and math.isinf(one):
            raise msgspec.ValidationError(f"Number out of range - at `{path}`")
