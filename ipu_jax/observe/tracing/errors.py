"""The error of a recording that did not succeed."""


class TraceError(RuntimeError):
    """Raised if nothing could be recorded, if what was recorded does not fit the plan, or if it cannot be written."""
