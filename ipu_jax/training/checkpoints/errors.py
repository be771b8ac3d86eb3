"""Define the errors and warnings of checkpoints.

Nothing here imports jax.
"""

import re


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, or none can be restored. The message says which, where and why.

    Attributes:
        errno: the operating system's error number, such as 28 for a full disk; None if there is none.
    """

    def __init__(self, message: str, errno: int | None = None):
        super().__init__(message)
        self.errno = errno


class SaveError(CheckpointError):
    """Raised if a checkpoint cannot be saved."""


class UnreadableError(CheckpointError):
    """A checkpoint may be whole, but this program cannot read it, so it must not be replaced or removed."""


class CheckpointWarning(UserWarning):
    """A checkpoint was skipped because it is damaged, or a save or a removal failed and the training goes on."""


def errno_of(error: BaseException) -> int | None:
    """Return the operating system's number of an error, also from the text of a tensorstore error.

    Our own errors carry the number of the error that they report.

    >>> errno_of(OSError(28, "No space left")), errno_of(ValueError("No space left on device [os_error_code='28']"))
    (28, 28)
    >>> errno_of(CheckpointError("saving failed on instance 1", 28))
    28
    """
    seen: BaseException | None = error
    while seen is not None:
        number = getattr(seen, "errno", None)
        if isinstance(number, int):
            return number
        found = re.search(r"os_error_code='(\d+)'", str(seen))
        if found:
            return int(found[1])
        seen = seen.__cause__ or seen.__context__
    return None
