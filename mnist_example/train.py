"""Training on the digits: batches, device calls of many weight updates, and the accuracy on the test images.

    epoch      every image once, in an order that seed and epoch decide, but for a remainder that fills no update
    update     gradient_accumulation micro-batches of batch_size images: one change of the weights
    call       up to repeat_count updates in one program: images move to the IPUs as bytes, losses come back

The number of updates in a call is an argument of the program, so that the last call of an epoch may be shorter, and
there is still only one program to compile. Calls are dispatched ahead: while the IPUs work on one, the host reads the
losses of the one before; the images of the next are gathered meanwhile, by the caller or by workers of the feed.
"""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax import Feed, Pipeline, normalise
from ipu_jax.options import check_count
from ipu_jax.order import Order, Place

NO_LABEL = -1
"""The label of what fills up a batch: counted neither as right nor as wrong."""

_CALLS_AHEAD = 1
_BATCHES_AHEAD = 2  # a call's batch each, and so many beside the two that run and wait
_POLL_SECONDS = 0.005


class DivergedError(ArithmeticError):
    """A loss is not finite."""


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """Which images make which update.

    An epoch has floor(images / (batch_size * gradient_accumulation)) updates. The images left over are not seen in that
    epoch: with `shuffle` they are others in each epoch, without they are always the last.

    Attributes:
        images: (N, 28, 28) uint8.
        labels: (N,) uint8.
        batch_size: images of a micro-batch, B.
        gradient_accumulation: micro-batches of an update, M.
        shuffle: a new order in each epoch, the same for the same seed; else the order of the data.
        seed: at least 0.

    Raises:
        ValueError: a count below 1, a negative seed, or too few images for one update.

    >>> images = np.zeros((7, 28, 28), np.uint8)
    >>> batches = Batches(images, np.arange(7), batch_size=1, gradient_accumulation=3, shuffle=False)
    >>> batches.updates_per_epoch, batches.of_epoch(0).tolist()
    (2, [[[0], [1], [2]], [[3], [4], [5]]])
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]
    batch_size: int
    gradient_accumulation: int
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_count("gradient_accumulation", self.gradient_accumulation)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} is negative: give one of at least 0")
        if self.updates_per_epoch < 1:
            raise ValueError(
                f"batch_size={self.batch_size} x gradient_accumulation={self.gradient_accumulation} takes "
                f"{self.images_per_update} images for an update, but there are {len(self.images)}: lower one of the two"
            )

    @property
    def images_per_update(self) -> int:
        return self.batch_size * self.gradient_accumulation

    @property
    def updates_per_epoch(self) -> int:
        return len(self.images) // self.images_per_update

    def of_epoch(self, epoch: int) -> npt.NDArray[np.intp]:
        """The numbers of the images of each update, (updates_per_epoch, M, B). Epochs count from 0."""
        order = Order(
            len(self.images),
            self.batch_size,
            gradient_accumulation=self.gradient_accumulation,
            iterations=self.updates_per_epoch,
            shuffle=self.shuffle,
            seed=self.seed,
        )
        return order.rows(Place(epoch, 0)).indices[:, 0]


class _AsFloats:
    """The images as float32 of 0 to 1, and their labels: what crosses to the IPUs when bytes shall not."""

    def __init__(self, batches: Batches):
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches.images)

    def __getitem__(self, indices: npt.NDArray[np.intp]) -> dict[str, npt.NDArray[Any]]:
        batches = self._batches
        return {"images": normalise(batches.images.take(indices, axis=0)), "labels": batches.labels[indices]}


def make_feed(
    batches: Batches, mesh: Mesh, *, repeat_count: int = 100, eight_bit_io: bool = True, num_workers: int = 0
) -> Feed:
    """The batches of device calls, on the mesh: `{"images", "labels"}`, leaves (calls, M, B, ...).

    A call has up to `repeat_count` updates; the last of an epoch may have fewer real ones. Where a call is of a single
    update, the leaves are (M, B, ...).

    Args:
        batches: which images make which update.
        mesh: of one replica.
        repeat_count: updates in one device call, at least 1.
        eight_bit_io: images cross as the bytes that they are, and the network normalises them. False: the host does,
            and four times as many bytes cross, as float32 of 0 to 1.
        num_workers: threads that assemble calls ahead of the one that is asked for; 0: the caller does, when it asks.

    Raises:
        ValueError: a `repeat_count` below 1, or a negative `num_workers`.
    """
    return Feed(
        {"images": batches.images, "labels": batches.labels} if eight_bit_io else _AsFloats(batches),
        mesh=mesh,
        micro_batch=batches.batch_size,
        gradient_accumulation=batches.gradient_accumulation,
        device_iterations=min(check_count("repeat_count", repeat_count), batches.updates_per_epoch),
        shuffle=batches.shuffle,
        seed=batches.seed,
        last="updates",
        prefetch=num_workers and max(_BATCHES_AHEAD, num_workers),
        workers=num_workers or 1,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What an update changes.

    Attributes:
        params: the weights, a `Sharded`.
        optimizer: whatever the optimizer remembers of them.
        stages: the stages' own state, such as batch norm's running averages, a `Sharded`; None where they have none.
    """

    params: Any
    optimizer: Any
    stages: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """What one device call brought.

    Attributes:
        losses: the loss of each of its updates, float32.
        updates: how many updates were made until its end, those of earlier epochs included.
        epoch: how many epochs that is, such as 0.5 in the middle of the first.
    """

    losses: npt.NDArray[np.float32]
    updates: int
    epoch: float


class Trainer:
    """Trains a pipeline of any network of `mnist_example.network` with plain SGD.

    Args:
        pipeline: the model; one replica.
        batches: what to train on; its `gradient_accumulation` is the pipeline's.
        learning_rate: of SGD, positive. Under reduction="sum" gradients are sums over the micro-batches, so that twice
            the accumulation takes half the learning rate.
        repeat_count, eight_bit_io, num_workers: of `make_feed`.

    Attributes:
        feed: of its batches, to be closed where there are workers.

    Raises:
        ValueError: a learning rate that is no positive number, a count below 1, or batches of another M.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Batches,
        *,
        learning_rate: float,
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
        self.pipeline, self.batches, self.learning_rate = pipeline, batches, learning_rate
        self.updates_per_call = min(check_count("repeat_count", repeat_count), batches.updates_per_epoch)
        self.feed = make_feed(
            batches, pipeline.mesh, repeat_count=repeat_count, eight_bit_io=eight_bit_io, num_workers=num_workers
        )
        self._optimizer = optax.sgd(learning_rate)
        self._everywhere = NamedSharding(pipeline.mesh, PartitionSpec())
        self._program: Any = None
        self._count_correct = jax.jit(self._evaluate)

    def init(self, params: dict[str, Any], stages: dict[str, Any] | None = None) -> State:
        """Whole weights, and the stages' state where they have any, placed on the IPUs.

        Args:
            params: such as a network's `init_params` makes.
            stages: such as its `init_state` makes.
        """
        sharded: Any = self.pipeline.shard(params)
        return State(sharded, self._optimizer.init(sharded), self.pipeline.shard_state(stages) if stages else None)

    def compile(self, state: State) -> float:
        """Compiles the training program, which the first `run_epoch` does otherwise; returns the seconds it took."""
        start = time.perf_counter()
        program = jax.jit(self._run_updates, donate_argnums=0)
        self._program = program.lower(state, self.feed.like, np.int32(0)).compile()
        return time.perf_counter() - start

    def run_epoch(
        self, state: State, epoch: int, *, on_call: Callable[[Call], None], updates: int | None = None
    ) -> State:
        """Trains for one epoch, or the first `updates` of it.

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
        pending: collections.deque[tuple[jax.Array, int]] = collections.deque()
        self.feed.seek(epoch)
        for batch in itertools.islice(self.feed.epoch(), -(-left // self.updates_per_call)):
            count = min(batch.updates, left)
            state, losses = self._program(state, batch.data, np.int32(count))
            left -= count
            pending.append((losses, count))
            # One call runs and one waits for it, and never more: many queued calls with collectives deadlock XLA's CPU.
            while len(pending) > _CALLS_AHEAD:
                done = self._report(*pending.popleft(), done, on_call)
        while pending:
            done = self._report(*pending.popleft(), done, on_call)
        return state

    def accuracy(self, state: State, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> float:
        """The share of the images that the network names rightly: of all of them, however many there are.

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
        on_ipus = jax.device_put(batches, self._everywhere)
        return int(self._count_correct(state.params, state.stages, on_ipus)) / len(images)

    @property
    def _micro_batches(self) -> tuple[int, int]:
        return self.batches.gradient_accumulation, self.batches.batch_size

    def _run_updates(self, state: State, calls: Any, count: jax.Array) -> tuple[State, jax.Array]:
        if self.updates_per_call == 1:
            calls = jax.tree.map(lambda leaf: leaf[None], calls)

        def update(i: jax.Array, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
            state, losses = carry
            batch = jax.tree.map(lambda leaf: leaf[i], calls)
            # optax's types know dicts and the like, not every pytree that it updates
            results: Any = self.pipeline.value_and_grad(state.params, batch, state=state.stages)
            (loss, _), gradients, *stages = results
            changes, optimizer = self._optimizer.update(gradients, state.optimizer, state.params)
            params = optax.apply_updates(state.params, changes)
            return State(params, optimizer, *stages), losses.at[i].set(loss)

        return lax.fori_loop(0, count, update, (state, jnp.zeros(self.updates_per_call, jnp.float32)))

    def _evaluate(self, params: Any, stages: Any, batches: dict[str, jax.Array]) -> jax.Array:
        def count(correct: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            _, aux = self.pipeline.loss(params, batch, state=stages)
            return correct + aux["correct"].sum(), None

        return lax.scan(count, jnp.int32(0), batches)[0]

    def _report(self, losses: Any, count: int, done: int, on_call: Callable[[Call], None]) -> int:
        """Waits for a call, checks its losses and hands them out; returns how many updates were made with it."""
        while not losses.is_ready():
            time.sleep(_POLL_SECONDS)  # and not in XLA, where Ctrl-C is heard only when the call has ended
        found = np.asarray(losses)[:count]
        bad = np.flatnonzero(~np.isfinite(found))
        if len(bad):
            raise DivergedError(
                f"the loss of update {done + bad[0] + 1} is {found[bad[0]]}: training diverged; "
                f"use a learning rate below {self.learning_rate:g}"
            )
        done += count
        on_call(Call(found, done, done / self.batches.updates_per_epoch))
        return done
