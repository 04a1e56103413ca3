"""What prefill knows of one room."""

from dataclasses import dataclass

from prefill.scheduler import Prompt
from transfer import wire
from transfer.backend import Shipped
from transfer.held import HeldRoom


@dataclass(slots=True)
class Held(HeldRoom):
    """What prefill knows of one room."""

    prompt: Prompt
    grant: wire.Grant | None = None
    # Of the prompt, with those that decode had; pages of layers with a window are not counted.
    shipped_pages: int = 0
    first_windowed: int = 0  # from this page of the prompt on, pages of such layers go, too
    shipped: Shipped | None = None
