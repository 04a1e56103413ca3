"""The one error a model raises: a checkpoint, a configuration or a mesh that cannot be served."""


class ModelError(ValueError):
    """A file, a field or a size does not allow this model. The message is one line.

    It names the file or the field, the value got and the values accepted.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
