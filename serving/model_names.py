"""The names that clients may ask for: the model's, and those of its adapters."""

from serving.errors import ApiError, quoted, unavailable
from serving.protocol import Request, ServedModel


def adapter_of(name: str | None, model: ServedModel, field: str = "model") -> str:
    """The adapter that a request names as its model; "" where it names ours, or none.

    Raises ApiError (404) for any other name; 503 while no worker has told of its adapters.
    """
    if not name or name == model.name:
        return ""
    known = model.adapters()
    if known is None:
        what = f"no worker is there yet to say whether it has {quoted(name)}"
        raise unavailable(f"{field}: {what}; try again", "not_ready")
    if name not in known:
        served = ", ".join(map(repr, (model.name, *known)))
        message = f"the model {quoted(name)} does not exist; this server has {served}"
        raise ApiError(404, f"{field}: {message}", field, "model_not_found")
    return name


def name_of(request: Request, model: ServedModel) -> str:
    """What the answer calls the model: as the client did."""
    return request.adapter or model.name
