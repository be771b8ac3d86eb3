"""Drop what orbax and tensorstore print of an error that they also raise.

one array cannot be written    -> raised, and told by our own error
orbax logs it                  -> dropped: hundreds of lines, several times
tasks of the other arrays      -> dropped: "Task exception was never retrieved", and so on
their writes end a bit later   -> dropped: tensorstore calls back an event loop that orbax has closed since
"""

import contextlib
import importlib
import logging
import sys
from typing import Any

_is_installed = False


def drop_echoes() -> None:
    """Drop them from now on. A second call does nothing."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    logging.getLogger("absl").addFilter(_is_news)
    logging.getLogger("asyncio").addFilter(_is_no_task_of_orbax)
    usual = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None if _is_late_callback(unraisable) else usual(unraisable)


def stop_counting_bytes() -> None:
    """Have orbax report no bytes written and read to jax.monitoring.

    It asks tensorstore for all its counters, twice per save, and tensorstore 0.1.86 leaks 6 kB in each answer.
    """
    with contextlib.suppress(ImportError):
        module: Any = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
        if hasattr(module, "get_tensorstore_raw_bytes"):
            module.get_tensorstore_raw_bytes = lambda direction=None: 0


def _is_news(record: logging.LogRecord) -> bool:
    of_a_thread = record.levelno == logging.ERROR and record.funcName in ("run", "_thread_func")
    return not (of_a_thread and "orbax" in record.pathname)


def _is_no_task_of_orbax(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "exception was never retrieved" not in text or ("orbax" not in text and "OCDBT" not in text)


def _is_late_callback(unraisable: Any) -> bool:
    """Return whether C++ has called an event loop that is closed: Python code would have a frame above it."""
    error, trace = unraisable.exc_value, unraisable.exc_traceback
    is_closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return is_closed and trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
