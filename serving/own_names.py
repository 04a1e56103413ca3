"""Rewords errors about a chat's fields for an API that has other names for them."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from serving.errors import ApiError

_FORMAT = re.compile(r"\bresponse_format\b")


@contextmanager
def by_own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Reword errors about a field of the chat so that they name the field it was made from.

    names: the API's own names by those of a chat; they include response_format, which is named
    also in errors about other fields.
    """
    try:
        yield
    except ApiError as error:
        own_format = names["response_format"]
        message = _FORMAT.sub(own_format, error.message)
        param = error.param
        first = re.compile(rf"({'|'.join(names)})\b[\w.\[\]]*")
        if found := first.match(error.message):
            name = names[found[1]]
            message = name + _FORMAT.sub(own_format, error.message[found.end() :])
            param = name.partition(".")[0]
        raise error.reworded(message, param) from error
