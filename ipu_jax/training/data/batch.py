"""Send the rows of this instance to the mesh, as the batch that a feed returns."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax.base.annotations import Batch, Json, Tree
from ipu_jax.base.checks import as_int, check_count
from ipu_jax.base.showing import Shown, Table, counted
from ipu_jax.core.mesh.devices import REPLICA_AXIS, check_there
from ipu_jax.core.step_args import given_dims
from ipu_jax.training.data._order import BatchDims
from ipu_jax.training.data.buckets import Padding


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FeedBatch(Shown):
    """One batch, on the IPUs.

    Attributes:
        arrays: a pytree like the source's, with leaves `jax.Array` of shape (device_iterations, replicas, M,
            micro-batch, ...). Each of the first two dims is left out if it is 1. The device iterations after the first
            `updates` are filled up: a training step that is given the `FeedBatch` leaves them out.
        epoch: the epoch that the batch belongs to, from 0.
        examples: the number of its real examples, over all instances.
        updates: the number of its device iterations that contain a real example. These iterations come first.
        is_real: bool, whether each row of this instance is a real example. Its dims are the leading dims of this
            instance's part of `data`, with only the replicas of which the instance has IPUs.
        nbytes: the bytes of this instance's rows, as sent to each IPU of a replica.
        is_cut: whether `data` leaves out the filled up device iterations, as under `remainder="updates"`.
        feed: the facts of the feed that all instances must share: the order of its examples, the dims of its batches,
            and where this batch begins.
    """

    arrays: Batch
    epoch: int
    examples: int
    updates: int
    is_real: npt.NDArray[np.bool_]
    nbytes: int
    is_cut: bool = False
    feed: Mapping[str, Json] = dataclasses.field(default_factory=dict)

    def _shown(self) -> list[str | Table]:
        leaves = jax.tree.leaves_with_path(self.arrays)
        rows = [(jax.tree_util.keystr(path), str(leaf.dtype), str(leaf.shape)) for path, leaf in leaves]
        size = f"{counted(self.examples, 'example')}, {counted(self.updates, 'update')}"
        return [f"FeedBatch of epoch {self.epoch}: {size}", Table([("leaf", "dtype", "shape"), *rows], left=3)]

    @property
    def data(self) -> Batch:
        """Return the arrays, under `remainder="updates"` of the first `updates` device iterations only.

        With one device iteration, `Pipeline.value_and_grad` accepts this pytree.
        """
        return _first_updates(self.arrays, self.updates) if self.is_cut else self.arrays

    def after(self, updates: int, examples: int) -> "FeedBatch":
        """Return the rest of the batch: the batch without its first `updates` updates, which have `examples` examples.

        Its arrays have the same shapes, and are filled up with the updates that are left out.
        """
        is_real = self.is_real[updates:]
        if not self.is_cut:
            is_real = np.concatenate([is_real, np.zeros_like(self.is_real[:updates])])
        left = {"examples": self.examples - examples, "updates": self.updates - updates, "is_real": is_real}
        return dataclasses.replace(self, arrays=_rolled(self.arrays, updates), is_cut=self.is_cut, **left)


# an array across several instances can be sliced only in a program
@functools.partial(jax.jit, static_argnums=1)
def _first_updates(arrays: Batch, updates: int) -> Batch:
    return jax.tree.map(lambda leaf: leaf[:updates], arrays)


@jax.jit
def _rolled(arrays: Batch, updates: int) -> Batch:
    return jax.tree.map(lambda leaf: jnp.roll(leaf, -updates, axis=0), arrays)


class Sender:
    """Makes a `FeedBatch` from rows on the host.

    Args:
        mesh: a mesh with an axis "replica".
        dims: the dims of a batch.
        like: the pytree of one example, with leaves `jax.ShapeDtypeStruct`.
        padding: cuts batches to their bucket, or None.

    Attributes:
        like: the pytree of a batch's `data`, with leaves `jax.ShapeDtypeStruct` with sharding.
    """

    def __init__(self, mesh: Mesh, dims: BatchDims, like: Tree, padding: Padding | None = None):
        iterations, own_replicas, *update = dims.shape
        # per leading dim: its size in the whole batch, its size on this instance, and its mesh axis
        of_iterations = (iterations, iterations, None)
        of_replicas = (mesh.shape[REPLICA_AXIS], own_replicas, REPLICA_AXIS)
        leading = [dim for dim in (of_iterations, of_replicas) if given_dims(dim[0])]
        shape, self._shape = (*[dim[0] for dim in leading], *update), (*[dim[1] for dim in leading], *update)
        sharding = NamedSharding(mesh, PartitionSpec(*[dim[2] for dim in leading]))
        self._dims, self._padding = dims, padding
        self.like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape), leaf.dtype, sharding=sharding), like
        )

    def __call__(
        self, rows: Tree, *, epoch: int, examples: int, is_real: npt.NDArray[np.bool_], size: int | None = None
    ) -> FeedBatch:
        """Return the batch that contains these rows.

        Args:
            rows: leaves (rows of this instance, ...), in new memory.
            epoch: the epoch that the batch belongs to.
            examples: the number of its real examples, over all instances.
            is_real: which of the rows are real, in any shape with one element per row.
            size: the bucket of the batch, if there are buckets.
        """
        if self._padding is not None and size is not None:
            rows = self._padding.cut(rows, size)
        updates, is_real = self._dims.updates(examples), is_real.reshape(self._shape)
        is_cut = self._dims.remainder == "updates" and updates < self._dims.iterations
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(rows))
        arrays = jax.tree.map(self._send, self.like, rows)
        return FeedBatch(arrays, epoch, examples, updates, is_real[:updates] if is_cut else is_real, nbytes, is_cut)

    def _send(self, like: jax.ShapeDtypeStruct, rows: np.ndarray) -> jax.Array:
        of_instance = rows.reshape(*self._shape, *rows.shape[1:])
        leading = like.shape[: len(self._shape)]
        return jax.make_array_from_process_local_data(like.sharding, of_instance, (*leading, *rows.shape[1:]))


def share_of(mesh: Mesh, instances: int | None, instance: int | None) -> dict[str, Json]:
    """Return the replicas in all and on this instance, as arguments of `BatchDims`.

    Args:
        mesh: a mesh with an axis "replica".
        instances, instance: as in `Feed`.

    Raises:
        ValueError: the mesh has no axis of replicas or no device of this process, or contradicts these two.
    """
    if instances is not None:
        instances = check_count("instances", instances)
    check_there(mesh, "a feed", "jax.ShapeDtypeStruct for batches")
    if REPLICA_AXIS not in mesh.axis_names:
        raise ValueError(
            f"mesh has axes {mesh.axis_names}, but not 'replica': make it with make_mesh(replicas, ipus_per_replica)"
        )
    axis = mesh.axis_names.index(REPLICA_AXIS)
    rows = np.moveaxis(mesh.devices, axis, 0).reshape(mesh.devices.shape[axis], -1)  # the axis may be the only one
    owners = [[device.process_index for device in row] for row in rows]
    # in the order of the mesh, which is the order of the processes in a mesh of make_mesh
    processes, own = list(dict.fromkeys(itertools.chain.from_iterable(owners))), jax.process_index()
    if processes == [own]:
        count, number = 1 if instances is None else instances, 0 if instance is None else as_int(instance)
        if number is None or not 0 <= number < count:
            raise ValueError(f"instance={instance!r} is not one of instances={count}: give an int from 0 on")
        share = range(number * len(rows), (number + 1) * len(rows))
        return {"replicas": len(rows) * count, "own_replicas": share}
    if own not in processes:
        raise ValueError(
            f"mesh has devices of the processes {sorted(processes)}, and this is process {own}: make a feed only where "
            "the mesh has devices"
        )
    if instances not in (None, len(processes)):
        raise ValueError(
            f"mesh lies on {len(processes)} processes, but instances={instances}: give one for each, or leave it out"
        )
    if instance not in (None, processes.index(own)):
        raise ValueError(
            f"instance={instance}, but process {own} is instance {processes.index(own)} of the mesh: give that, or "
            "leave it out"
        )
    return {"replicas": len(rows), "own_replicas": [k for k, of_row in enumerate(owners) if own in of_row]}
