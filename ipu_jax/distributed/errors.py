"""Define the errors between instances of a run.

Nothing here imports jax.
"""


class InstancesDifferError(RuntimeError):
    """The instances of a run don't match: one has different flags, versions or counts. The message names it."""


class InstancesMissingError(TimeoutError):
    """Some instances did not arrive in time at a point where all of them must meet. The message names them."""


class PortTakenError(OSError):
    """Another program is listening on the coordinator's port."""
