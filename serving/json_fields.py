"""The fields of a JSON body: read into a struct, and refused where nobody serves them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from serving.errors import ApiError, from_decode_error, not_served


def read_json[T: msgspec.Struct](decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The struct in a body. Raises ApiError naming the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise from_decode_error(error) from error
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not UTF-8", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error


def refuse(fields: msgspec.Struct, names: Sequence[str]) -> None:
    """Raises ApiError for the first of the fields that holds anything."""
    for name in names:
        if getattr(fields, name) not in (None, False, "", [], {}):
            raise not_served(name)


def refuse_unless(fields: msgspec.Struct, neutral: Mapping[str, Any]) -> None:
    """Raises ApiError for the first of the fields that holds neither null nor its neutral value."""
    for name, value in neutral.items():
        if getattr(fields, name) not in (None, value):
            raise not_served(name)
