"""The error of a failed recording."""


class TraceError(RuntimeError):
    """Raised if nothing could be recorded, or if the recording does not fit the plan or cannot be written."""
