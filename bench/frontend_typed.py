"""Encodes chat events as validated pydantic objects, one per chunk, as most Python front ends do.

The fields and their order are the product's, so that designs differ in work and not in bytes.
pydantic comes with the development dependencies; nothing that serves imports it.
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from serving.choice import Choice, Piece
from serving.errors import ApiError, error_event
from serving.openai_answers import DONE
from serving.stream import Frame


class Delta(BaseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    """One choice of a chunk."""

    index: int
    delta: Delta
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None


class Chunk(BaseModel):
    """One `chat.completion.chunk`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]


class TypedEvents:
    """The events of one plain chat answer (serving.stream.Events)."""

    def __init__(self, request_id: str, model_name: str, created: int) -> None:
        """created: unix seconds."""
        self._request_id = request_id
        self._model_name = model_name
        self._created = created

    def opening(self, choice: Choice) -> bytes:
        return self._event(choice, Delta(role="assistant", content=""))

    def frame(self, choice: Choice) -> Frame | None:
        return None

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        return self._event(choice, Delta(content=piece.text))

    def finish(self, choice: Choice, rest: Piece) -> bytes:
        data = self.piece(choice, rest) if rest.text else b""
        ended = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return data + self._event(choice, Delta(), **ended)

    def closing(self, choices: Sequence[Choice]) -> bytes:
        return DONE

    def failed(self, choice: Choice, error: ApiError) -> bytes:
        return error_event(error)

    def _event(self, choice: Choice, delta: Delta, **ended: Any) -> bytes:
        values: dict[str, Any] = {"finish_reason": None} | ended
        index = choice.ask.index
        chunk = Chunk(
            id=self._request_id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model_name,
            choices=[ChunkChoice(index=index, delta=delta, logprobs=None, **values)],
        )
        return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()
