"""Define what goes wrong between instances.

Nothing here imports jax.
"""


class InstancesDifferError(RuntimeError):
    """The instances of a run don't fit together: one has other flags, versions or counts. The message names it."""


class InstancesMissingError(TimeoutError):
    """Some instances did not come in time to where all of them must meet. The message names them."""


class PortTakenError(OSError):
    """Another program listens on the port of the coordinator."""
