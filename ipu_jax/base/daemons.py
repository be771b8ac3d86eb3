"""Run work on threads that do not keep the process alive.

Nothing here imports jax.
"""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def on_a_daemon(work: Callable[[], _Result], name: str) -> concurrent.futures.Future[_Result]:
    """Start work on a new thread that does not keep the process alive, and return a future of its result."""
    result: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
