"""Train on the digits in device calls of many weight updates, and measure the accuracy on the test images.

An update is a step of `ipu_jax.make_train_step`. The number of updates in a call is an argument of the compiled
program, so that the last call of an epoch can be shorter without compiling another program. Calls are dispatched ahead:
while the IPUs work on one call, the host reads the losses of the call before. Meanwhile the images of the next call are
gathered, by the caller or by workers of the feed.
"""

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping
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
    OnNonFinite,
    Pipeline,
    PipelineReport,
    Precision,
    TrainOptions,
    TrainState,
    make_train_step,
    popdist,
)
from mnist_example.batches import Batches
from mnist_example.checks import check_count
from mnist_example.feeding import make_feed
from mnist_example.nonfinite import told
from mnist_example.optimizers import make_optimizer
from mnist_example.tracing import Tracing

NO_LABEL = -1
"""The label of images that fill up a batch: they count neither as right nor as wrong."""

AfterCall = Callable[[TrainState, int, Callable[[], None]], bool]

_CALLS_AHEAD = 1
_POLL_SECONDS = 0.005
_ACCURACY_SECONDS = 1800.0


class DivergedError(ArithmeticError):
    """Raised if the loss or the gradients of an update are not finite, or of many in a row under "skip"."""


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """The outputs of one device call.

    Attributes:
        losses: the loss of each of its updates, float32.
        skipped: how many of its updates were not made because their gradients overflowed; only with a `DynamicScale`.
        updates: how many updates were tried up to its end, including those of earlier epochs.
        epoch: the number of epochs up to its end, such as 0.5 in the middle of the first.
        nonfinite: a text about each of its updates that was skipped since it was not finite.
    """

    losses: npt.NDArray[np.float32]
    skipped: int
    updates: int
    epoch: float
    nonfinite: tuple[str, ...] = ()


class _CallResults(NamedTuple):
    """The results of a call besides the state.

    Losses float32 (updates_per_call,), skipped int32 (), nonfinite int32 (updates_per_call,).
    """

    losses: Any
    skipped: Any
    nonfinite: Any


class Trainer:
    """Trains a pipeline of any network of `mnist_example.network`.

    Args:
        pipeline: the model, on one replica or several.
        batches: what to train on; its `gradient_accumulation` and `replicas` must be those of the pipeline.
        learning_rate: of the optimizer, positive. Under reduction="sum" gradients are sums over the micro-batches and
            replicas, so with twice as many of these, plain SGD needs half the learning rate.
        optimizer: a name in `mnist_example.optimizers.NAMES`.
        shard_optimizer: let each replica keep and update its part of the optimizer's state.
        precision, half, loss_scale, on_nonfinite: as for `ipu_jax.TrainOptions`.
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
        on_nonfinite: OnNonFinite = "stop",
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
        options = TrainOptions(
            precision=precision,
            half=half,
            shard_optimizer=shard_optimizer,
            loss_scale=loss_scale,
            on_nonfinite=on_nonfinite,
        )
        self.step = make_train_step(pipeline, make_optimizer(optimizer, learning_rate), options)
        self.pipeline: Pipeline = self.step.model
        self._make_feed = functools.partial(
            make_feed,
            batches,
            pipeline.mesh,
            repeat_count=repeat_count,
            eight_bit_io=eight_bit_io,
            num_workers=num_workers,
        )
        self.feed = self._make_feed()
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
        return f"{self.pipeline.schedule}\n{self.needs(state)}"

    def needs(self, state: TrainState) -> PipelineReport:
        """Return what each IPU stores, computes and sends. Nothing is compiled."""
        shape = (*self._micro_batches, *self.batches.images.shape[1:])
        like = self.feed.like
        batch = {
            "images": jax.ShapeDtypeStruct(shape, like["images"].dtype),
            "labels": jax.ShapeDtypeStruct(self._micro_batches, like["labels"].dtype),
        }
        return self.pipeline.report(state.params, batch, state.stages, compile=False)

    def go_to(self, position: Mapping[str, int]) -> None:
        """Let the feed go on from what its `state()` returned."""
        self.feed.close()
        self.feed = self._make_feed(state=position)

    def run_epoch(
        self,
        state: TrainState,
        epoch: int,
        *,
        on_call: Callable[[Call], None],
        updates: int | None = None,
        start: int = 0,
        after_call: AfterCall | None = None,
    ) -> TrainState:
        """Train for one epoch, or for its updates from `start` to `updates`.

        Args:
            state: from `init` or the epoch before. Its arrays are donated, and cannot be used afterwards.
            epoch: counted from 0; it decides the order of the images.
            on_call: called for each device call, in order, while the next one already runs.
            updates: the number of updates, with those before `start`; None for the whole epoch.
            start: updates of this epoch that were made before; the feed is there already, by `go_to`.
            after_call: called when a device call is dispatched, with the state that it returns, its number of updates,
                and a function that waits for all calls so far. The epoch ends here if it returns True.

        Returns:
            The state after the epoch.

        Raises:
            DivergedError: an update is not finite; the message names update, replica, micro-batch and stage.
        """
        if self._program is None:
            self.compile(state)
        assert self._program is not None, "compile sets it"
        left = (self.batches.updates_per_epoch if updates is None else updates) - start
        done = epoch * self.batches.updates_per_epoch + start
        pending: collections.deque[tuple[_CallResults, int, Any]] = collections.deque()

        def report_all_but(waiting: int) -> None:
            nonlocal done
            while len(pending) > waiting:
                done = self._report(*pending.popleft(), done, on_call, state)

        if not start:
            self.feed.seek(epoch)
        for batch in itertools.islice(self.feed.epoch(), -(-left // self.updates_per_call)):
            count = min(batch.updates, left)
            state, results = self.tracing.run(self._program, state, batch.data, count)
            left -= count
            pending.append((results, count, batch.data))
            # At most one call runs and one waits: many queued calls with collectives deadlock XLA's CPU backend.
            report_all_but(_CALLS_AHEAD)
            if after_call is not None and after_call(state, count, lambda: report_all_but(0)):
                break
        report_all_but(0)
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
            state, (losses, skipped, nonfinite) = carry
            state, outputs = self.step(state, jax.tree.map(lambda leaf: leaf[i], calls))
            has_overflowed = (outputs.updated == 0) & (outputs.nonfinite == 0)
            nonfinite = nonfinite.at[i].set(outputs.nonfinite)
            return state, _CallResults(losses.at[i].set(outputs.loss), skipped + has_overflowed, nonfinite)

        zeros = jnp.zeros(self.updates_per_call, jnp.float32)
        results = _CallResults(zeros, jnp.int32(0), zeros.astype(jnp.int32))
        return lax.fori_loop(0, count, update, (state, results))

    def _evaluate(self, params: Any, stages: Any, batches: dict[str, jax.Array]) -> jax.Array:
        def count(correct: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            _, aux = self.pipeline.loss(params, batch, state=stages)
            return correct + aux["correct"].sum(dtype=jnp.int32), None

        return lax.scan(count, jnp.int32(0), batches)[0]

    def _report(
        self,
        results: _CallResults,
        count: int,
        calls: Any,
        done: int,
        on_call: Callable[[Call], None],
        state: TrainState,
    ) -> int:
        """Wait for a call, check its losses and pass them to `on_call`; return how many updates were tried up to it."""
        while not (results.losses.is_ready() and results.skipped.is_ready()):
            time.sleep(_POLL_SECONDS)  # inside XLA, Ctrl-C would have no effect until the call has ended
        losses = np.asarray(results.losses)[:count]
        nonfinite, numbers = [], np.asarray(results.nonfinite)[:count]
        if numbers.any():
            if self.updates_per_call == 1:
                calls = jax.tree.map(lambda leaf: leaf[None], calls)
            for text, stops in told(self.step, state, calls, losses, numbers):
                if stops:
                    raise DivergedError(f"{text}: training diverged; use a learning rate below {self.learning_rate:g}")
                nonfinite.append(text)
        done += count
        # one for the call: poprun takes an instance for stuck after several times its usual step, and calls are long
        popdist.count_steps(updates=count, samples=count * self.batches.images_per_update)
        on_call(Call(losses, int(results.skipped), done, done / self.batches.updates_per_epoch, tuple(nonfinite)))
        return done
