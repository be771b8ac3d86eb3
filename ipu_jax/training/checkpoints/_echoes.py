"""Drop the output of orbax and tensorstore about errors that they also raise.

one array cannot be written    -> raised, and reported by our own error
orbax logs it                  -> dropped: hundreds of lines, several times
tasks of the other arrays      -> dropped: "Task exception was never retrieved", and so on
their writes end a bit later   -> dropped: tensorstore calls back an event loop that orbax has already closed
their writes have not begun    -> dropped: "coroutine 'async_serialize_from_host...' was never awaited"
"""

import contextlib
import importlib
import logging
import sys
import warnings
from typing import Any

_is_installed = False


def drop_echoes() -> None:
    """Drop these messages from now on. A second call does nothing."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    logging.getLogger("absl").addFilter(_is_news)
    logging.getLogger("asyncio").addFilter(_is_no_task_of_orbax)
    warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host", RuntimeWarning)
    usual = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None if _is_late_callback(unraisable) else usual(unraisable)


def stop_counting_bytes() -> None:
    """Stop orbax from reporting bytes written and read to jax.monitoring.

    To report them, orbax asks tensorstore for all its counters twice per save. tensorstore 0.1.86 leaks 6 kB each time.
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
    """Return whether C++ has called a closed event loop: a call from Python code would have a frame above it."""
    error, trace = unraisable.exc_value, unraisable.exc_traceback
    is_closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return is_closed and trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
