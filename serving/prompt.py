"""One prompt's tokens, and what is derived from them once for all choices and attempts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from serving.prefix_index import prefix_chain
from transfer import wire


@dataclass(frozen=True)
class Prompt:
    """text: what `echo` shows; rendered: the text of a chat. "" when nothing shows them.

    ids and texts never change.
    """

    ids: Sequence[int]
    text: str = ""
    rendered: str = ""
    _chains: dict[tuple[int, str], list[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def packed(self) -> bytes:
        """The ids as messages hold them."""
        return wire.pack_i32(self.ids)

    def chain(self, page_size: int, salt: str) -> list[int]:
        """The keys of its pages, as `prefix_chain` makes them; cached."""
        found = self._chains.get((page_size, salt))
        if found is None:
            found = self._chains[page_size, salt] = prefix_chain(self.packed, page_size, salt)
        return found
