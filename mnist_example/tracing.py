"""Record what each IPU runs in a few updates early in the training: `run-sharded-mnist --trace FOLDER`.

A device call makes many updates. The first one is divided, so that the trace is of a few updates, and not of the first:

    call of 100 updates     1 (warm-up) | 3 (recorded) | 96        the same program, the same updates in the same order
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax import Recording, Timeline, TraceError, trace
from mnist_example.batches import Batches
from mnist_example.flag_checks import updates_of
from mnist_example.instances import is_first
from mnist_example.layouts import Mode


class Tracing:
    """Runs device calls, and records a few updates of the first ones; without a folder it only runs them.

    Args:
        folder: where the trace is written.
        steps: how many updates to record.
        say: prints the report.

    Attributes:
        has_failed: whether there is no trace, after all; the reason was printed.
        timeline: what was recorded; None before, and without a folder.

    Raises:
        ValueError: the folder cannot be written to, or the devices are not those of a CPU.
    """

    def __init__(self, folder: Path | None = None, steps: int = 3, say: Callable[[str], object] = print):
        self._say = say
        self.has_failed = False
        self.timeline: Timeline | None = None
        self._recording: Recording | None = None if folder is None else trace(folder, steps=steps)
        self._is_warm, self._recorded = False, 0

    def __enter__(self) -> "Tracing":
        if self._recording is not None:
            self._recording.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._recording is None:
            return
        if kind is not None:
            self._recording.__exit__(kind, error, None)
        else:
            self._finish(self._recording)

    def run(self, program: Any, state: Any, batch: Any, count: int) -> tuple[Any, Any]:
        """Run the first `count` updates of a call.

        Args:
            program: as `Trainer` compiles it: `(state, batch, count) -> (state, results)`.
            state: donated.
            batch: leaves have a leading dim of updates, unless a call makes only one.
            count: updates.
        """
        recording = self._recording
        if recording is None or recording.is_recorded:
            return program(state, batch, np.int32(count))
        results: list[Any] = []
        counts: list[int] = []
        while sum(counts) < count:
            left = count - sum(counts)
            piece = min(left, recording.steps - self._recorded if self._is_warm else 1) or left
            rest = _without(batch, sum(counts)) if counts else batch
            state, of_piece = recording.run(program, state, rest, np.int32(piece), steps=piece)
            self._recorded += piece if self._is_warm else 0
            self._is_warm = True
            results.append(of_piece)
            counts.append(piece)
        if recording.is_recorded:
            self._finish(recording)
        return state, _joined(tuple(counts))(results) if len(counts) > 1 else results[0]

    def _finish(self, recording: Recording) -> None:
        self._recording = None
        try:
            recording.finish()
        except TraceError as error:
            self.has_failed = True
            if is_first():
                print(f"run-sharded-mnist: --trace: {error}", file=sys.stderr)
            return
        self.timeline = recording.timeline
        self._say(f"{recording.report}\nTrace: {recording.path}, for https://ui.perfetto.dev")


def tracings_of(
    args: argparse.Namespace, batches: Batches, modes: Sequence[Mode], say: Callable[[str], object]
) -> dict[Mode, Tracing]:
    """Return what runs the calls of each mode; several modes have a folder each.

    Raises:
        ValueError: the flags ask for fewer updates than are recorded, or as in `Tracing`.
    """
    if args.trace is None:
        return {mode: Tracing() for mode in modes}
    steps, updates = args.trace_steps or 3, updates_of(args, batches)
    if updates <= steps:
        raise ValueError(
            f"--trace records {steps} updates after the first one, and the flags ask for {updates}: give more "
            "--epochs, or fewer --trace-steps"
        )
    return {mode: Tracing(args.trace / mode if len(modes) > 1 else args.trace, steps, say) for mode in modes}


def _without(batch: Any, count: int) -> Any:
    """Return a call's batch without its first updates, as long as before and laid out alike."""
    return jax.tree.map(lambda leaf: _rolled(leaf.sharding)(leaf, np.int32(count)), batch)


@functools.cache
def _rolled(sharding: Any) -> Any:
    return jax.jit(lambda leaf, count: jnp.roll(leaf, -count, axis=0), out_shardings=sharding)


@functools.cache
def _joined(counts: tuple[int, ...]) -> Any:
    """Return what joins the results of pieces of a call to those of the call."""

    def join(results: list[Any]) -> Any:
        def of_updates(name: str) -> jax.Array:
            made = [getattr(of, name)[:count] for of, count in zip(results, counts, strict=True)]
            joined = jnp.concatenate(made)
            return jnp.zeros_like(getattr(results[0], name)).at[: len(joined)].set(joined)

        skipped = sum(of.skipped for of in results)
        return results[0]._replace(losses=of_updates("losses"), skipped=skipped, nonfinite=of_updates("nonfinite"))

    return jax.jit(join)
