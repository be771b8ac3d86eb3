"""Training on the digits: device calls of many weight updates, and the accuracy on the test images.

An update is `ipu_jax.make_train_step`'s. How many of them a call makes is an argument of its program, so that the last
call of an epoch may be shorter, and there is still only one program to compile. Calls are dispatched ahead: while the
IPUs work on one, the host reads the losses of the one before; the images of the next are gathered meanwhile, by the
caller or by workers of the feed.
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

from ipu_jax import REPLICA_AXIS, DynamicScale, Pipeline, TrainOptions, TrainState, make_train_step
from mnist_example.batches import Batches, make_feed
from mnist_example.checks import check_count
from mnist_example.optimizers import make_optimizer

NO_LABEL = -1
"""The label of what fills up a batch: counted neither as right nor as wrong."""

_CALLS_AHEAD = 1
_POLL_SECONDS = 0.005


class DivergedError(ArithmeticError):
    """A loss is not finite."""


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """The outputs of one device call.

    Attributes:
        losses: the loss of each of its updates, float32.
        skipped: how many of its updates were not made, since their gradients overflowed: under a `DynamicScale` only.
        updates: how many updates were tried until its end, those of earlier epochs included.
        epoch: how many epochs that is, such as 0.5 in the middle of the first.
    """

    losses: npt.NDArray[np.float32]
    skipped: int
    updates: int
    epoch: float


class _Told(NamedTuple):
    """A call's results beside the state: losses float32 (updates_per_call,), skipped int32 ()."""

    losses: Any
    skipped: Any


class Trainer:
    """Trains a pipeline of any network of `mnist_example.network`.

    Args:
        pipeline: the model, on one replica or several.
        batches: what to train on; its `gradient_accumulation` and `replicas` are the pipeline's.
        learning_rate: of the optimizer, positive. Under reduction="sum" gradients are sums over the micro-batches and
            replicas, so that twice as many of them take half the learning rate of plain SGD.
        optimizer: a name of `mnist_example.optimizers.NAMES`.
        shard_optimizer: each replica keeps and updates its part of the optimizer's state.
        loss_scale: of `ipu_jax.TrainOptions`.
        repeat_count, eight_bit_io, num_workers: of `make_feed`.

    Attributes:
        feed: of its batches, to be closed where there are workers.

    Raises:
        ValueError: a learning rate that is no positive number, an unknown optimizer, a count below 1, or batches of
            another M or R.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Batches,
        *,
        learning_rate: float,
        optimizer: str = "sgd",
        shard_optimizer: bool = False,
        loss_scale: float | DynamicScale = 1.0,
        repeat_count: int = 100,
        eight_bit_io: bool = True,
        num_workers: int = 0,
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
        self.pipeline, self.batches, self.learning_rate = pipeline, batches, learning_rate
        self.updates_per_call = min(check_count("repeat_count", repeat_count), batches.updates_per_epoch)
        # the network computes in its own precision; and of device iterations a step knows a fixed number
        options = TrainOptions(shard_optimizer=shard_optimizer, loss_scale=loss_scale)
        self.step = make_train_step(pipeline, make_optimizer(optimizer, learning_rate), options)
        self.feed = make_feed(
            batches, pipeline.mesh, repeat_count=repeat_count, eight_bit_io=eight_bit_io, num_workers=num_workers
        )
        of_replicas = PartitionSpec() if pipeline.replicas == 1 else PartitionSpec(None, REPLICA_AXIS)
        self._of_passes = NamedSharding(pipeline.mesh, of_replicas)
        self._program: Any = None
        self._count_correct = jax.jit(self._evaluate)

    def init(self, params: dict[str, Any], stages: dict[str, Any] | None = None) -> TrainState:
        """Place whole weights, and the stages' state if they have any, on the IPUs.

        Args:
            params: such as a network's `init_params` makes.
            stages: such as its `init_state` makes.
        """
        return self.step.init(params, stages=stages or None)

    def compile(self, state: TrainState) -> float:
        """Compile the training program, which the first `run_epoch` does otherwise; return the seconds it took."""
        start = time.perf_counter()
        # what one call returns is what the next one takes
        of_state = jax.tree.map(lambda leaf: leaf.sharding, state)
        program = jax.jit(self._run_updates, donate_argnums=0, out_shardings=(of_state, None))
        self._program = program.lower(state, self.feed.like, np.int32(0)).compile()
        return time.perf_counter() - start

    def run_epoch(
        self, state: TrainState, epoch: int, *, on_call: Callable[[Call], None], updates: int | None = None
    ) -> TrainState:
        """Train for one epoch, or the first `updates` of it.

        Args:
            state: from `init` or the epoch before. Its arrays are reused, and hold nothing afterwards.
            epoch: counted from 0; it decides the order of the images.
            on_call: told of each device call, in order; meanwhile the next one runs already.
            updates: None for the whole epoch.

        Returns:
            The state after it.

        Raises:
            DivergedError: the loss of an update is not finite; names the update.
        """
        if self._program is None:
            self.compile(state)
        assert self._program is not None, "compile sets it"
        left = self.batches.updates_per_epoch if updates is None else updates
        done = epoch * self.batches.updates_per_epoch
        pending: collections.deque[tuple[_Told, int]] = collections.deque()
        self.feed.seek(epoch)
        for batch in itertools.islice(self.feed.epoch(), -(-left // self.updates_per_call)):
            count = min(batch.updates, left)
            state, told = self._program(state, batch.data, np.int32(count))
            left -= count
            pending.append((told, count))
            # One call runs and one waits for it, and never more: many queued calls with collectives deadlock XLA's CPU.
            while len(pending) > _CALLS_AHEAD:
                done = self._report(*pending.popleft(), done, on_call)
        while pending:
            done = self._report(*pending.popleft(), done, on_call)
        return state

    def accuracy(self, state: TrainState, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> float:
        """Return the share of the images that the network names rightly: of all of them, however many there are.

        Args:
            state: from `init` or `run_epoch`; it stays as it is.
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
        on_ipus = jax.device_put(batches, self._of_passes)
        return int(self._count_correct(state.params, state.stages, on_ipus)) / len(images)

    @property
    def _micro_batches(self) -> tuple[int, ...]:
        batches = self.batches
        of_update = (batches.gradient_accumulation, batches.batch_size)
        return of_update if batches.replicas == 1 else (batches.replicas, *of_update)

    def _run_updates(self, state: TrainState, calls: Any, count: jax.Array) -> tuple[TrainState, _Told]:
        if self.updates_per_call == 1:
            calls = jax.tree.map(lambda leaf: leaf[None], calls)

        def update(i: jax.Array, carry: tuple[TrainState, _Told]) -> tuple[TrainState, _Told]:
            state, (losses, skipped) = carry
            state, outputs = self.step(state, jax.tree.map(lambda leaf: leaf[i], calls))
            made = 1 if outputs.updated is None else outputs.updated
            return state, _Told(losses.at[i].set(outputs.loss), skipped + 1 - made)

        told = _Told(jnp.zeros(self.updates_per_call, jnp.float32), jnp.int32(0))
        return lax.fori_loop(0, count, update, (state, told))

    def _evaluate(self, params: Any, stages: Any, batches: dict[str, jax.Array]) -> jax.Array:
        def count(correct: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            _, aux = self.pipeline.loss(params, batch, state=stages)
            return correct + aux["correct"].sum(dtype=jnp.int32), None

        return lax.scan(count, jnp.int32(0), batches)[0]

    def _report(self, told: _Told, count: int, done: int, on_call: Callable[[Call], None]) -> int:
        """Wait for a call, checks its losses and hands them out; returns how many updates were tried with it."""
        while not (told.losses.is_ready() and told.skipped.is_ready()):
            time.sleep(_POLL_SECONDS)  # and not in XLA, where Ctrl-C is heard only when the call has ended
        found = np.asarray(told.losses)[:count]
        bad = np.flatnonzero(~np.isfinite(found))
        if len(bad):
            raise DivergedError(
                f"the loss of update {done + bad[0] + 1} is {found[bad[0]]}: training diverged; "
                f"use a learning rate below {self.learning_rate:g}"
            )
        done += count
        on_call(Call(found, int(told.skipped), done, done / self.batches.updates_per_epoch))
        return done
