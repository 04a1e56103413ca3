"""Turns the fields of a Responses request into a `Request`, by way of a chat's."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from serving.arrival import Arrival
from serving.errors import ApiError
from serving.model_names import name_of
from serving.openai_api import ChatReader
from serving.own_names import by_own_names
from serving.protocol import Request, ServedModel
from serving.responses_answers import ResponsesAnswer
from serving.responses_fields import OWN_NAMES, ResponsesFields, chat_of, places_of_parameters
from serving.stream import Spelling
from transfer.clock import Clock


class ResponsesReader(ChatReader):
    """One request on its way to a `Request`."""

    id_prefix = "resp_"

    def __init__(self, fields: ResponsesFields, model: ServedModel) -> None:
        """Raises ApiError if any field is wrong."""
        self.asked = fields
        with by_own_names(OWN_NAMES), _untruncated(fields):
            super().__init__(chat_of(fields), model)

    async def finish(self, request_id: str | None) -> Request:
        """As ChatReader."""
        with by_own_names(OWN_NAMES), _untruncated(self.asked):
            return await super().finish(request_id)

    def spelling(self, request: Request, arrival: Arrival, clock: Clock) -> Spelling:
        """As ChatReader."""
        model, created = self._model, arrival.created
        name = name_of(request, model)
        return ResponsesAnswer(request, self.asked, model.tokenizer, name, created, self.parsing)

    def _places_of_parameters(self) -> Mapping[str, str]:
        return places_of_parameters(self.asked)


@contextmanager
def _untruncated(fields: ResponsesFields) -> Iterator[None]:
    """If the client allows truncation, say in errors about length that no items are dropped."""
    try:
        yield
    except ApiError as error:
        if error.code != "context_length_exceeded" or fields.truncation != "auto":
            raise
        message = f"{error.message}; with truncation auto, too, this server drops no items"
        raise error.reworded(message, error.param) from error
