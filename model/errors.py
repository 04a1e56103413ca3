"""The errors a model raises: what cannot be served, and nodes of a mesh that are not there."""


class ModelError(ValueError):
    """A file, a field or a size does not allow this model. The message is one line.

    It names the file or the field, the value got and the values accepted.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class MemoryShortage(ModelError):
    """Something else has the memory that is needed, and may give it back: a later start may do."""


class NodeLost(RuntimeError):
    """Another process of the mesh is gone, or never came: this process cannot mend that.

    The message is one line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ProfileError(RuntimeError):
    """A profile cannot begin, or could not be written. The message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
