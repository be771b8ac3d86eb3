"""Train on the digits in device calls of many weight updates, and measure the accuracy on the test images.

An update is a step of `ipu_jax.make_train_step`. The number of updates in a call is an argument of the compiled
program, so that the last call of an epoch can be shorter without compiling another program. Calls are dispatched ahead:
while the IPUs work on one call, the host reads the losses of the call before. Meanwhile the images of the next call are
gathered, by the caller or by workers of the feed.
"""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ipu_jax import (
    REPLICA_AXIS,
    DynamicScale,
    Half,
    Pipeline,
    Precision,
    TrainOptions,
    TrainState,
    make_train_step,
    popdist,
)
from mnist_example.batches import Batches
from mnist_example.checks import check_count
from mnist_example.feeding import make_feed
from mnist_example.optimizers import make_optimizer
from mnist_example.tracing import Tracing

NO_LABEL = -1
"""The label of images that fill up a batch: they count neither as right nor as wrong."""

_CALLS_AHEAD = 1
_POLL_SECONDS = 0.005
_ACCURACY_SECONDS = 1800.0


class DivergedError(ArithmeticError):
    """Raised if a loss is not finite."""


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """The outputs of one device call.

    Attributes:
        losses: the loss of each of its updates, float32.
        skipped: how many of its updates were not made because their gradients overflowed; only with a `DynamicScale`.
        updates: how many updates were tried up to its end, including those of earlier epochs.
        epoch: the number of epochs up to its end, such as 0.5 in the middle of the first.
    """

    losses: npt.NDArray[np.float32]
    skipped: int
    updates: int
    epoch: float


class _CallResults(NamedTuple):
    """The results of a call besides the state: losses float32 (updates_per_call,), skipped int32 ()."""

    losses: Any
    skipped: Any


class Trainer:
    """Trains a pipeline of any network of `mnist_example.network`.

    Args:
        pipeline: the model, on one replica or several.
        batches: what to train on; its `gradient_accumulation` and `replicas` must be those of the pipeline.
        learning_rate: of the optimizer, positive. Under reduction="sum" gradients are sums over the micro-batches and
            replicas, so with twice as many of these, plain SGD needs half the learning rate.
        optimizer: a name in `mnist_example.optimizers.NAMES`.
        shard_optimizer: let each replica keep and update its part of the optimizer's state.
        precision, half, loss_scale: as for `ipu_jax.TrainOptions`.
        repeat_count, eight_bit_io, num_workers: as for `make_feed`.
        tracing: what runs the device calls.

    Attributes:
        pipeline: the model as it runs, in its precision.
        feed: the feed of its batches; close it if there are workers.

    Raises:
        ValueError: a learning rate that is not a positive number, an unknown optimizer, a count below 1, or batches
            with another M or R than the pipeline's.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Batches,
        *,
        learning_rate: float,
        optimizer: str = "sgd",
        shard_optimizer: bool = False,
        precision: Precision = "32.32",
        half: Half = "bfloat16",
        loss_scale: float | DynamicScale = 1.0,
        repeat_count: int = 100,
        eight_bit_io: bool = True,
        num_workers: int = 0,
        tracing: Tracing | None = None,
    ):
        if not (learning_rate > 0 and math.isfinite(learning_rate)):
            raise ValueError(f"learning_rate={learning_rate} is not a positive number")
        if batches.gradient_accumulation != pipeline.options.gradient_accumulation:
            raise ValueError(
                f"batches of gradient_accumulation={batches.gradient_accumulation} don't fit a pipeline of "
                f"{pipeline.options.gradient_accumulation}: make both with the same"
            )
        if batches.replicas != pipeline.replicas:
            raise ValueError(
                f"batches of replicas={batches.replicas} don't fit a pipeline of {pipeline.replicas}: "
                "make both with the same"
            )
        self.batches, self.learning_rate, self.tracing = batches, learning_rate, tracing or Tracing()
        self.updates_per_call = min(check_count("repeat_count", repeat_count), batches.updates_per_epoch)
        # not device_iterations: a step makes always the same number of them, and the last call of an epoch makes fewer
        options = TrainOptions(precision=precision, half=half, shard_optimizer=shard_optimizer, loss_scale=loss_scale)
        self.step = make_train_step(pipeline, make_optimizer(optimizer, learning_rate), options)
        self.pipeline: Pipeline = self.step.model
        self.feed = make_feed(
            batches, pipeline.mesh, repeat_count=repeat_count, eight_bit_io=eight_bit_io, num_workers=num_workers
        )
        of_replicas = PartitionSpec() if pipeline.replicas == 1 else PartitionSpec(None, REPLICA_AXIS)
        self._of_passes = NamedSharding(pipeline.mesh, of_replicas)
        self._everywhere = NamedSharding(pipeline.mesh, PartitionSpec())
        self._program: Any = None
        # whole on every IPU, so that each instance can read it
        self._count_correct = jax.jit(self._evaluate, out_shardings=self._everywhere)

    def init(self, params: dict[str, Any], stages: dict[str, Any] | None = None) -> TrainState:
        """Place whole weights, and the stages' state if they have any, on the IPUs.

        Args:
            params: whole weights, such as a network's `init_params` returns.
            stages: the stages' state, such as its `init_state` returns.
        """
        return self.step.init(params, stages=stages or None)

    def compile(self, state: TrainState) -> float:
        """Compile the training program, and return the seconds it took. Otherwise the first `run_epoch` compiles it."""
        start = time.perf_counter()
        # the state that one call returns is an argument of the next one, so it needs the same sharding
        of_state = jax.tree.map(lambda leaf: leaf.sharding, state)
        program = jax.jit(self._run_updates, donate_argnums=0, out_shardings=(of_state, self._everywhere))
        self._program = program.lower(state, self.feed.like, np.int32(0)).compile()
        return time.perf_counter() - start

    def explain(self, state: TrainState) -> str:
        """Return the schedule as text, and a table of what each IPU stores, computes and sends. Nothing is compiled."""
        shape = (*self._micro_batches, *self.batches.images.shape[1:])
        like = self.feed.like
        batch = {
            "images": jax.ShapeDtypeStruct(shape, like["images"].dtype),
            "labels": jax.ShapeDtypeStruct(self._micro_batches, like["labels"].dtype),
        }
        report = self.pipeline.report(state.params, batch, state.stages, compile=False)
        return f"{self.pipeline.schedule}\n{report}"

    def run_epoch(
        self, state: TrainState, epoch: int, *, on_call: Callable[[Call], None], updates: int | None = None
    ) -> TrainState:
        """Train for one epoch, or the first `updates` of it.

        Args:
            state: from `init` or the epoch before. Its arrays are donated, and cannot be used afterwards.
            epoch: counted from 0; it decides the order of the images.
            on_call: called for each device call, in order, while the next one already runs.
            updates: the number of updates; None for the whole epoch.

        Returns:
            The state after the epoch.

        Raises:
            DivergedError: the loss of an update is not finite; the message names the update.
        """
        if self._program is None:
            self.compile(state)
        assert self._program is not None, "compile sets it"
        left = self.batches.updates_per_epoch if updates is None else updates
        done = epoch * self.batches.updates_per_epoch
        pending: collections.deque[tuple[_CallResults, int]] = collections.deque()
        self.feed.seek(epoch)
        for batch in itertools.islice(self.feed.epoch(), -(-left // self.updates_per_call)):
            count = min(batch.updates, left)
            state, results = self.tracing.run(self._program, state, batch.data, count)
            left -= count
            pending.append((results, count))
            # At most one call runs and one waits: many queued calls with collectives deadlock XLA's CPU backend.
            while len(pending) > _CALLS_AHEAD:
                done = self._report(*pending.popleft(), done, on_call)
        while pending:
            done = self._report(*pending.popleft(), done, on_call)
        return state

    def accuracy(self, state: TrainState, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> float:
        """Return the fraction of the images that the network classifies correctly. Their number need not divide evenly.

        Args:
            state: from `init` or `run_epoch`; it is not changed.
            images: (N, 28, 28) uint8.
            labels: (N,) uint8.
        """
        per_pass = self.batches.images_per_update
        passes = -(-len(images) // per_pass)
        filled = np.full(passes * per_pass, NO_LABEL, np.int32)
        filled[: len(labels)] = labels
        padded = np.zeros((passes * per_pass, *images.shape[1:]), np.uint8)
        padded[: len(images)] = images
        shape = (passes, *self._micro_batches)
        batches = {"images": padded.reshape(*shape, *images.shape[1:]), "labels": filled.reshape(shape)}
        of_instance = lambda leaf: jax.make_array_from_callback(leaf.shape, self._of_passes, lambda i: leaf[i])  # noqa: E731
        on_ipus = jax.tree.map(of_instance, batches)
        with popdist.busy("measuring the accuracy", _ACCURACY_SECONDS):
            return int(self._count_correct(state.params, state.stages, on_ipus)) / len(images)

    @property
    def _micro_batches(self) -> tuple[int, ...]:
        batches = self.batches
        of_update = (batches.gradient_accumulation, batches.batch_size)
        return of_update if batches.replicas == 1 else (batches.replicas, *of_update)

    def _run_updates(self, state: TrainState, calls: Any, count: jax.Array) -> tuple[TrainState, _CallResults]:
        if self.updates_per_call == 1:
            calls = jax.tree.map(lambda leaf: leaf[None], calls)

        def update(i: jax.Array, carry: tuple[TrainState, _CallResults]) -> tuple[TrainState, _CallResults]:
            state, (losses, skipped) = carry
            state, outputs = self.step(state, jax.tree.map(lambda leaf: leaf[i], calls))
            made = 1 if outputs.updated is None else outputs.updated
            return state, _CallResults(losses.at[i].set(outputs.loss), skipped + 1 - made)

        results = _CallResults(jnp.zeros(self.updates_per_call, jnp.float32), jnp.int32(0))
        return lax.fori_loop(0, count, update, (state, results))

    def _evaluate(self, params: Any, stages: Any, batches: dict[str, jax.Array]) -> jax.Array:
        def count(correct: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            _, aux = self.pipeline.loss(params, batch, state=stages)
            return correct + aux["correct"].sum(dtype=jnp.int32), None

        return lax.scan(count, jnp.int32(0), batches)[0]

    def _report(self, results: _CallResults, count: int, done: int, on_call: Callable[[Call], None]) -> int:
        """Wait for a call, check its losses and pass them to `on_call`; return how many updates were tried up to it."""
        while not (results.losses.is_ready() and results.skipped.is_ready()):
            time.sleep(_POLL_SECONDS)  # inside XLA, Ctrl-C would have no effect until the call has ended
        losses = np.asarray(results.losses)[:count]
        bad = np.flatnonzero(~np.isfinite(losses))
        if len(bad):
            raise DivergedError(
                f"the loss of update {done + bad[0] + 1} is {losses[bad[0]]}: training diverged; "
                f"use a learning rate below {self.learning_rate:g}"
            )
        done += count
        # one for the call: poprun takes an instance for stuck after several times its usual step, and calls are long
        popdist.count_steps()
        on_call(Call(losses, int(results.skipped), done, done / self.batches.updates_per_epoch))
        return done
