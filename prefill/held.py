"""What prefill knows of one room, and how the room's first token is drawn."""

from dataclasses import dataclass, field

from model.chunks import FirstSample
from prefill.scheduler import Prompt
from transfer import wire
from transfer.backend import Shipped
from transfer.chunk_times import ChunkTimes
from transfer.role import HeldRoom


@dataclass(slots=True)
class Held(HeldRoom):
    """What prefill knows of one room."""

    prompt: Prompt
    grant: wire.Grant | None = None
    shipped_pages: int = 0  # of the prompt; pages of layers with a window are not counted
    first_windowed: int = 0  # from this page of the prompt on, pages of such layers go, too
    chunks: list[ChunkTimes] = field(default_factory=list)
    shipped: Shipped | None = None


def first_sample(held: Held, row: int) -> FirstSample:
    """How to draw the room's first token. row: of the prompt's last piece in the chunk."""
    submit, constraint = held.submit, held.constraint
    return FirstSample(
        row,
        submit.sampling,
        held.prompt.token_ids,
        submit.num_prompt_tokens,
        constraint.first_mask if constraint is not None else None,
    )
