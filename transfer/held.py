"""What a worker of either role knows of one room, and how the room's first token is drawn."""

from dataclasses import dataclass, field

from model.chunks import FirstSample, Placed
from model.pieces import ChunkPrompt
from transfer import wire
from transfer.chunk_times import ChunkTimes
from transfer.grammars import Constraint
from transfer.prompt_logprobs import CollectedLogprobs
from transfer.room import Room


@dataclass(slots=True)
class HeldRoom:
    """What a worker of either role knows of one room."""

    submit: wire.Submit
    room: Room
    received_s: float = field(init=False)  # monotonic, when the submit reached this process
    constraint: Constraint | None = field(init=False, default=None)  # once its grammar is compiled
    # Of a prompt that is computed here; logprobs only if the request wants them.
    chunks: list[ChunkTimes] = field(init=False, default_factory=list)
    logprobs: CollectedLogprobs | None = field(init=False, default=None)

    @property
    def waits_for_grammar(self) -> bool:
        return self.constraint is None and self.submit.sampling.grammar != ""

    def first_sample(self, placed: Placed[ChunkPrompt]) -> FirstSample:
        """How to draw the first token. placed: where the prompt's last piece lies in its chunk."""
        submit, constraint = self.submit, self.constraint
        return FirstSample(
            placed.row,
            submit.sampling,
            placed.piece.prompt.token_ids,
            submit.num_prompt_tokens,
            constraint.first_mask if constraint is not None else None,
        )
