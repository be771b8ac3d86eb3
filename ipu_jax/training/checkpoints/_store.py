"""Write named arrays to a folder with orbax while the training runs, and read them.

This uses orbax's stable interface, `AsyncCheckpointer`. It writes to a temporary folder and renames the folder at the
end. Each process writes the shards that it has. In the background, orbax uses our barriers (`Meetings`), which end when
another instance fails. Elsewhere it uses the barriers of jax's coordination service, which have a time limit.
`active_processes` selects them, since orbax's default is a collective without a time limit.

A tensorstore write may never end: to a folder that is removed meanwhile, or to a disk that does not answer. So no
process waits long for orbax once another instance has failed. Orbax's threads, and our threads that start them, are
daemons and do not keep the process alive.

Orbax and tensorstore also print errors that they raise:

one array cannot be written    -> raised, and reported by our own error
orbax logs it                  -> dropped: hundreds of lines, several times
tasks of the other arrays      -> dropped: "Task exception was never retrieved", and so on
their writes end a bit later   -> dropped: tensorstore calls back an event loop that orbax has already closed
their writes have not begun    -> dropped: "coroutine 'async_serialize_from_host...' was never awaited"
"""

import concurrent.futures
import contextlib
import importlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from ipu_jax.base.annotations import Json, Tree, Value
from ipu_jax.base.keys import key_impl
from ipu_jax.distributed.agreeing import Meetings
from ipu_jax.distributed.board import on_a_daemon
from ipu_jax.training.checkpoints._description import stored

_LOOK_EVERY: Final = 0.1
_LAST_CHANCE: Final = 5.0  # seconds for a write to end after another instance has failed
_INDEX_BYTES: Final = 10**8  # bytes of the files' index that stay in memory while arrays are read


def import_orbax() -> Any:
    """Return orbax.checkpoint.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError("orbax.checkpoint cannot be imported: pip install 'ipu-jax[checkpoints]'") from error
    return ocp


class Store:
    """Writes and reads the arrays of one run.

    Args:
        seconds: the time limit of one save, and of waiting for other instances.
        meetings: where the instances meet while they write.
    """

    def __init__(self, seconds: float, meetings: Meetings):
        self._ocp = ocp = import_orbax()
        drop_echoes()
        stop_counting_bytes()
        processes = set(range(jax.process_count()))
        meet = lambda *, key, timeout_ms: meetings.meet(key, timeout_ms / 1000)
        together = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=processes)
        # weights hardly compress, and compression would slow the steps down; replicas are written once
        form = {"use_ocdbt": True, "use_zarr3": False}  # as `opened` reads it
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=together, **form)
        self._make = lambda: ocp.AsyncCheckpointer(
            handler,
            timeout_secs=max(1, math.ceil(seconds)),
            multiprocessing_options=together,
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False, barrier_sync_fn=meet),
        )
        self._checkpointer = self._make()

    def begin(self, folder: Path, arrays: dict[str, Value]) -> None:
        """Copy the arrays to the host, and write them in the background. Arrays without elements are left out.

        When this returns, the next step can reuse their buffers. If host and device share memory, as on CPUs, jax makes
        the copy: it does not reuse a buffer that is being read, and the next step takes new buffers.
        """
        held = {name: stored(array) for name, array in arrays.items() if array.size}
        on_a_daemon(lambda: self._checkpointer.save(folder, self._ocp.args.PyTreeSave(held)), "orbax").result()

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until everything is written, and raise the error if writing failed.

        Args:
            check: called several times a second. If it raises an error and the writing does not end soon, the writing
                is abandoned, and the error is raised.
        """
        written = on_a_daemon(self._checkpointer.wait_until_finished, "orbax")
        try:
            while not concurrent.futures.wait([written], _LOOK_EVERY).done:
                check()
        except Exception:
            if not concurrent.futures.wait([written], _LAST_CHANCE).done:
                self._checkpointer = self._make()
                raise
        written.result()

    def read(self, folder: Path, like: dict[str, Value], shardings: dict[str, Tree]) -> dict[str, Value]:
        """Return arrays on the devices; each process reads the parts that its devices need.

        Args:
            folder: where they were written.
            like: by name, an object with the shape and dtype of the array.
            shardings: by name, the sharding of the array.
        """
        wanted: dict[str, Value] = {}
        how: dict[str, Any] = {}
        for name, array in like.items():
            data, sharding = jax.eval_shape(stored, array), shardings[name]
            if data.size:
                wanted[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
                how[name] = self._ocp.ArrayRestoreArgs(sharding=sharding, global_shape=data.shape, dtype=data.dtype)
        found = self._checkpointer.restore(folder, self._ocp.args.PyTreeRestore(item=wanted, restore_args=how))
        for name, array in like.items():
            if not array.size:
                empty = np.zeros(array.shape, array.dtype)
                found[name] = jax.make_array_from_callback(
                    empty.shape, shardings[name], lambda i, empty=empty: empty[i]
                )
        return {name: as_key(found[name], str(array.dtype)) for name, array in like.items()}

    def opened(self, folder: Path, saved: Mapping[str, Json]) -> dict[str, Any]:
        """Return arrays by name, of which `np.asarray(array[index])` reads a part from the file; keys are their data.

        Whole pieces are read, as the devices that saved them held them, but no more is kept than the part.

        Args:
            folder: where they were written.
            saved: by name, the saved shape and dtype.
        """
        tensorstore = importlib.import_module("tensorstore")  # comes with orbax, which reads and writes by it
        context = tensorstore.Context({"cache_pool#ocdbt": {"total_bytes_limit": _INDEX_BYTES}})

        def opening(name: str) -> Any:
            base = {"driver": "file", "path": f"{folder.absolute()}/"}
            where = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
            spec = {"driver": "zarr", "kvstore": {**where, "cache_pool": "cache_pool#ocdbt"}}
            return tensorstore.open(spec, open=True, read=True, context=context)

        found = {name: opening(name) for name, array in saved.items() if math.prod(array["shape"])}
        empty = {name: array for name, array in saved.items() if name not in found}
        opened = {name: future.result() for name, future in found.items()}
        return opened | {name: np.zeros(of["shape"], jax.numpy.dtype(of["dtype"])) for name, of in empty.items()}

    def close(self) -> None:
        """Free orbax's resources, when it has nothing left to write."""
        self._checkpointer.close()


def as_key(array: Value, dtype: str) -> Value:
    """Return what was stored of an array of this dtype: the array itself, or the keys whose data it is."""
    impl = key_impl(dtype)
    return array if impl is None else jax.random.wrap_key_data(array, impl=impl)


# what orbax prints and counts

_drops_echoes = False


def drop_echoes() -> None:
    """Drop what orbax prints about errors that it also raises. A second call does nothing."""
    global _drops_echoes
    if _drops_echoes:
        return
    _drops_echoes = True
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
