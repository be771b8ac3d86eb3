"""Define what goes wrong with checkpoints.

Nothing here imports jax.
"""

import re


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, or none can be restored. The message says which, where and why.

    Attributes:
        errno: the operating system's number of the error, such as 28 for a full disk; None if it gave none.
    """

    def __init__(self, message: str, errno: int | None = None):
        super().__init__(message)
        self.errno = errno


class SaveError(CheckpointError):
    """Raised if a checkpoint cannot be saved."""


class UnreadableError(CheckpointError):
    """A checkpoint may be whole, but this program cannot read it: nobody may replace or remove it."""


class CheckpointWarning(UserWarning):
    """A checkpoint was skipped because it is damaged, or a save or a removal failed and the training goes on."""


def errno_of(error: BaseException) -> int | None:
    """Return the operating system's number of an error, also from the text of one of tensorstore's.

    An error of ours that passes one on has its number.

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
