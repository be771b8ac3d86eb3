"""Print warnings as lines of the command."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from mnist_example.instances import is_first


@contextlib.contextmanager
def warnings_as_lines(kind: type[Warning]) -> Iterator[None]:
    """Print warnings of one kind as lines of the command, on the first instance, for the time of a `with` block."""

    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if not issubclass(category, kind):
            usual(message, category, *args, **kwargs)
        elif is_first():
            print(f"run-sharded-mnist: {message}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", kind)
        usual, warnings.showwarning = warnings.showwarning, show
        yield
