"""Write named arrays to a folder by orbax while the training goes on, and read them.

Orbax's stable interface is used, `AsyncCheckpointer`: it writes to a temporary folder and renames it at the end, and
each process writes the shards that it has. Its barriers are ours in the background (`Meetings`), which end when another
instance fails, and otherwise those of jax's coordination service, which end by a time limit: `active_processes` chooses
them, since orbax's default is a collective without one.

A write of tensorstore's may never end: to a folder that is removed meanwhile, or to a disk that does not answer. So
nobody waits long for orbax once another instance has failed. Orbax's threads are daemons, as those of ours that begin
them, and do not keep the process alive.
"""

import concurrent.futures
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from ipu_jax.checkpoints._arrays import key_impl, stored
from ipu_jax.checkpoints._echoes import drop_echoes, stop_counting_bytes
from ipu_jax.distributed.meetings import Meetings

_LOOK_EVERY: Final = 0.1
_LAST_CHANCE: Final = 5.0  # seconds in which a write may end after another instance has failed
_READ_AT_ONCE: Final = 1 << 28  # bytes of arrays that a host holds besides the leaves that it puts together


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
    """Writes and reads the arrays of one training.

    Args:
        seconds: the time limit of one save, and of waiting for other instances.
        meetings: where the instances meet while they write.
    """

    def __init__(self, seconds: float, meetings: Meetings):
        self._ocp = ocp = import_orbax()
        drop_echoes()
        stop_counting_bytes()
        processes = set(range(jax.process_count()))
        meet = lambda *, key, timeout_ms: meetings.meet(key, timeout_ms / 1000)  # noqa: E731
        together = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=processes)
        # random bits don't compress, and compression would take the steps' time; replicas are written once
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=together)
        self._make = lambda: ocp.AsyncCheckpointer(
            handler,
            timeout_secs=max(1, math.ceil(seconds)),
            multiprocessing_options=together,
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False, barrier_sync_fn=meet),
        )
        self._checkpointer = self._make()

    def begin(self, folder: Path, arrays: dict[str, Any]) -> None:
        """Copy the arrays to the host, and write them in the background. Arrays without elements are left out.

        When this returns, the next step may reuse their buffers. Where host and device share memory, as on CPUs, the
        copy is jax's: a buffer that is being read is not reused, and the next step takes new ones.
        """
        held = {name: stored(array) for name, array in arrays.items() if array.size}
        _on_a_daemon(lambda: self._checkpointer.save(folder, self._ocp.args.PyTreeSave(held))).result()

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until all is written; raise what went wrong.

        Args:
            check: called several times a second. If it raises an error and the writing does not end soon, the writing
                is left to itself, and the error is raised.
        """
        written = _on_a_daemon(self._checkpointer.wait_until_finished)
        try:
            while not concurrent.futures.wait([written], _LOOK_EVERY).done:
                check()
        except Exception:
            if not concurrent.futures.wait([written], _LAST_CHANCE).done:
                self._checkpointer = self._make()
                raise
        written.result()

    def read(self, folder: Path, like: dict[str, Any], shardings: dict[str, Any]) -> dict[str, Any]:
        """Return arrays on the devices; each process reads the parts that its devices need.

        Args:
            folder: where they were written.
            like: by name, what has the shape and dtype of the array.
            shardings: by name.
        """
        wanted: dict[str, Any] = {}
        for name, array in like.items():
            data = jax.eval_shape(stored, array)
            if data.size:
                wanted[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=shardings[name])
        how = {
            name: self._ocp.ArrayRestoreArgs(sharding=each.sharding, global_shape=each.shape, dtype=each.dtype)
            for name, each in wanted.items()
        }
        found = self._checkpointer.restore(folder, self._ocp.args.PyTreeRestore(item=wanted, restore_args=how))
        for name, array in like.items():
            if not array.size:
                empty = np.zeros(array.shape, array.dtype)
                found[name] = jax.make_array_from_callback(
                    empty.shape, shardings[name], lambda i, empty=empty: empty[i]
                )
        return {name: _as_key(found[name], str(array.dtype)) for name, array in like.items()}

    def whole(self, folder: Path, saved: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) of whole arrays on the host, some at a time; typed keys as such.

        Args:
            folder: where they were written.
            saved: by name, the shape and dtype that were saved.
            names: of the arrays to read.
        """
        together: list[str] = []
        for i, name in enumerate(names):
            if math.prod(saved[name]["shape"]):
                together.append(name)
            else:
                yield name, np.zeros(saved[name]["shape"], jax.numpy.dtype(saved[name]["dtype"]))
            if together and (i + 1 == len(names) or sum(_bytes(saved[each]) for each in together) >= _READ_AT_ONCE):
                yield from self._read_whole(folder, saved, together).items()
                together = []

    def close(self) -> None:
        """Free what orbax holds; it has nothing to write any more."""
        self._checkpointer.close()

    def _read_whole(self, folder: Path, saved: dict[str, Any], names: list[str]) -> dict[str, Any]:
        item = dict.fromkeys(names, 0)
        how = {name: self._ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        args = self._ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        found = self._checkpointer.restore(folder, args)
        return {name: _as_key(found[name], saved[name]["dtype"]) for name in names}


def _on_a_daemon(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Begin some work on a thread of its own, which does not keep the process alive, and return its result to come."""
    result: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="orbax", daemon=True).start()
    return result


def _as_key(array: Any, dtype: str) -> Any:
    impl = key_impl(dtype)
    return array if impl is None else jax.random.wrap_key_data(array, impl=_IMPLS.get(impl, impl))


# dtypes of keys are printed with short names
_IMPLS: Final = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}


def _bytes(described: dict[str, Any]) -> int:
    is_key = key_impl(described["dtype"]) is not None
    return math.prod(described["shape"]) * (16 if is_key else jax.numpy.dtype(described["dtype"]).itemsize)
