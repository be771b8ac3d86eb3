"""Write down what a training does: the flags --log-file, --tensorboard and --report.

On the first instance only; the others keep nothing. The page is made of what was logged, at the end, whatever that is.
"""

import argparse
import contextlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jax

from ipu_jax import RunLog, RunLogWarning, TrainState, __version__, popdist, write_report
from ipu_jax.tools.process import CANNOT_WRITE
from mnist_example.instances import is_first
from mnist_example.layouts import Mode
from mnist_example.places import reason_of
from mnist_example.train import Call, Trainer
from mnist_example.warning_lines import warnings_as_lines

_PACKAGES: Final = ("jax", "jaxlib", "flax", "optax", "numpy")


class RunRecord:
    """Keeps the events of a training, and makes the page of it.

    Args:
        args: the flags.

    Attributes:
        status: the exit status that follows from it: 0 unless the page could not be written.

    Raises:
        ValueError: the log file holds something else.
        OSError: it cannot be opened.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        is_kept = is_first() and any((args.log_file, args.tensorboard, args.report))
        self._log = RunLog(args.log_file, tensorboard=args.tensorboard) if is_kept else None
        self._trainer: Trainer | None = None
        self._memory: dict[str, Any] | None = None
        self._clock = time.perf_counter()
        self.status = 0

    def start(self, mode: Mode, trainer: Trainer, state: TrainState, updates: int) -> None:
        """Write down what is trained, and on what."""
        self._trainer = trainer
        if self._log is None:
            return
        pipeline, batches = trainer.pipeline, trainer.batches
        kinds = sorted({device.device_kind for device in jax.devices()})
        if self._args.report:
            self._memory = _memory_of(trainer, state)
        self._log.event(
            "start",
            command=[Path(sys.argv[0]).name, *sys.argv[1:]],
            attempt=int(os.environ.get("IPU_JAX_ATTEMPT", 0)),
            mode=mode,
            model=self._args.model,
            ipus=pipeline.ipus,
            replicas=pipeline.replicas,
            instances=popdist.get_num_instances(),
            devices=f"{len(jax.devices())} x {', '.join(kinds)}",
            samples_per_update=batches.images_per_update,
            updates_per_epoch=batches.updates_per_epoch,
            total_updates=updates,
            flags={name.replace("_", "-"): _text(value) for name, value in sorted(vars(self._args).items())},
            versions=_versions(),
        )

    def resumed(self, updates: int, path: Path) -> None:
        """Write down from which checkpoint the training goes on."""
        self._event("resumed", updates=updates, path=str(path))

    def compiled(self, seconds: float) -> None:
        """Write down how long compiling took; the clock of the first call starts."""
        self._event("compiled", compile_seconds=round(seconds, 3))
        self._clock = time.perf_counter()

    def call(self, call: Call) -> None:
        """Write down the losses and the speed of a device call."""
        now = time.perf_counter()
        assert self._trainer is not None, "a training has started"
        images = len(call.losses) * self._trainer.batches.images_per_update
        speed = images / max(now - self._clock, 1e-9)
        self._clock = now
        self._event(
            "losses",
            updates=call.updates,
            epoch=call.epoch,
            losses=call.losses.tolist(),
            samples_per_second=round(speed, 1),
        )
        for text in call.nonfinite:
            self._event("skipped", updates=call.updates, reason=text)
        if call.skipped:
            self._event("skipped", updates=call.updates, count=call.skipped, reason="their gradients overflowed")

    def accuracy(self, updates: int, epoch: float, accuracy: float) -> None:
        """Write down a test accuracy; the clock of the next call starts."""
        self._event("accuracy", updates=updates, epoch=epoch, accuracy=accuracy)
        self._clock = time.perf_counter()

    def saved(self, updates: int, folder: Path) -> None:
        """Write down that a checkpoint is being saved."""
        self._event("saved", updates=updates, folder=str(folder))

    def stopped(self, reason: str) -> None:
        """Write down that SIGTERM has stopped the training."""
        self._event("stopped", reason=reason)

    def failed(self, error: Exception) -> None:
        """Write down the error that has ended the training."""
        self._event("failed", error=" ".join(str(error).split()))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Print the log's warnings as lines of the command; at the end of a `with` block, make the page."""
        with warnings_as_lines(RunLogWarning):
            try:
                yield
            finally:
                self._finish()

    def _finish(self) -> None:
        if self._log is None:
            return
        if not any(event["event"] in ("stopped", "failed") for event in self._log.events[-1:]):
            ended = "an error" if sys.exc_info()[0] else "all updates were made"
            self._log.event("end", reason=ended)
        self._log.close()
        path: Path | None = self._args.report
        if path is None or self._trainer is None:
            return
        schedule = self._trainer.pipeline.schedule
        try:
            with popdist.busy("writing the report"):
                write_report(
                    path,
                    self._log.events,
                    title=f"run-sharded-mnist: {self._args.model}, {self._args.pipeline_mode}",
                    schedules={f"{schedule.name}, as planned": schedule.to_svg()},
                    timeline=self._trainer.tracing.timeline,
                    memory=self._memory,
                )
        except Exception as error:
            print(f"run-sharded-mnist: --report {path} was not written ({reason_of(error)})", file=sys.stderr)
            self.status = CANNOT_WRITE
        else:
            print(f"Report: {path}", flush=True)

    def _event(self, name: str, **values: Any) -> None:
        if self._log is not None:
            self._log.event(name, **values)


def _memory_of(trainer: Trainer, state: TrainState) -> dict[str, Any]:
    """Return the predicted bytes of each IPU by kind, with the optimizer's state, and the limit."""
    report, device = trainer.needs(state), jax.local_devices()[0]
    shares = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.optimizer)]
    ipus = [{**report.bytes_by_kind(part.ipu), "optimizer": sum(shares)} for part in report.ipus]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return {"ipus": ipus, "limit": limit, "limit_of": f"the memory of one {device.device_kind}"}
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"ipus": ipus, "limit": whole, "limit_of": "the host's memory, which all virtual IPUs share"}


def _versions() -> dict[str, str]:
    found = {"ipu_jax": __version__, "Python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in _PACKAGES} | {"system": platform.platform()}


def _text(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
