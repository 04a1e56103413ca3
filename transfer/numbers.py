"""Types of fields in messages that decoding checks: integers that end up in arrays, addresses."""

from typing import Annotated

from msgspec import Meta

I32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
I64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
AtLeastOne = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Addresses = Annotated[tuple[str, ...], Meta(min_length=1)]
