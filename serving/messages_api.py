"""Turns the fields of a Messages request into a `Request`, by way of a chat's."""

from collections.abc import Mapping

from serving.arrival import Arrival
from serving.messages_answers import MessagesAnswer
from serving.messages_fields import OWN_NAMES, MessagesFields, chat_of, format_name
from serving.model_names import name_of
from serving.openai_api import ChatReader
from serving.own_names import by_own_names
from serving.protocol import Request, ServedModel
from serving.stream import Spelling
from transfer.clock import Clock


class MessagesReader(ChatReader):
    """One request on its way to a `Request`."""

    id_prefix = "msg_"

    def __init__(self, fields: MessagesFields, model: ServedModel) -> None:
        """Raises ApiError if any field is wrong."""
        self.asked = fields
        self._own_names = OWN_NAMES | {"response_format": format_name(fields)}
        with by_own_names(self._own_names):
            super().__init__(chat_of(fields), model)

    async def finish(self, request_id: str | None) -> Request:
        """As ChatReader."""
        with by_own_names(self._own_names):
            return await super().finish(request_id)

    def spelling(self, request: Request, arrival: Arrival, clock: Clock) -> Spelling:
        """As ChatReader."""
        model, name = self._model, name_of(request, self._model)
        return MessagesAnswer(request, self.asked, model.tokenizer, name, self.parsing)

    def _fit(self, num_prompt: int, asked: int | None, default: int | None) -> int:
        """As much of max_tokens as the context has left: here a request has to name some number."""
        return super()._fit(num_prompt, None, asked)

    def _places_of_parameters(self) -> Mapping[str, str]:
        tools = enumerate(self.asked.tools or ())
        return {tool["name"]: f"tools[{i}].input_schema" for i, tool in tools}
