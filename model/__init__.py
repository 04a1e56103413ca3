"""The network, as pure functions on arrays."""
