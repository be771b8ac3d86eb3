"""Send the rows of this instance to the mesh, as the batch that a feed returns."""

import dataclasses
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax.data.dims import BatchDims
from ipu_jax.devices import REPLICA_AXIS


@dataclasses.dataclass(frozen=True, eq=False)
class FeedBatch:
    """One batch, on the IPUs.

    Attributes:
        data: a pytree like the source's, with leaves `jax.Array` of shape (device_iterations, replicas, M, micro-batch,
            ...), where each of the first two dims is left out if it is 1. With one device iteration,
            `Pipeline.value_and_grad` takes it.
        epoch: the epoch that the batch belongs to, from 0.
        examples: the number of its real examples, over all instances.
        updates: the number of its device iterations that contain a real example. These are the first ones.
        is_real: bool, which rows of this instance are real examples. Its dims are the leading dims of this instance's
            part of `data`.
        nbytes: the bytes of this instance's rows, as they were sent to each IPU of a replica.
    """

    data: Any
    epoch: int
    examples: int
    updates: int
    is_real: npt.NDArray[np.bool_]
    nbytes: int


class Sender:
    """Makes a `FeedBatch` of rows on the host.

    Args:
        mesh: a mesh with an axis "replica".
        dims: of a batch.
        like: the pytree of one example, with leaves `jax.ShapeDtypeStruct`.

    Attributes:
        like: the pytree of a batch's `data`, with leaves `jax.ShapeDtypeStruct` with sharding.
    """

    def __init__(self, mesh: Mesh, dims: BatchDims, like: Any):
        iterations, own_replicas, *update = dims.shape
        # per leading dim: its size in the whole batch, its size on this instance, and its mesh axis
        of_iterations = (iterations, iterations, None)
        of_replicas = (mesh.shape[REPLICA_AXIS], own_replicas, REPLICA_AXIS)
        leading = [dim for dim in (of_iterations, of_replicas) if dim[0] > 1]
        shape, self._shape = (*[dim[0] for dim in leading], *update), (*[dim[1] for dim in leading], *update)
        sharding = NamedSharding(mesh, PartitionSpec(*[dim[2] for dim in leading]))
        self._dims = dims
        self.like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape), leaf.dtype, sharding=sharding), like
        )

    def __call__(self, rows: Any, *, epoch: int, examples: int, is_real: npt.NDArray[np.bool_]) -> FeedBatch:
        """Return the batch of these rows.

        Args:
            rows: leaves (rows of this instance, ...), in new memory.
            epoch: the epoch that the batch belongs to.
            examples: the number of its real examples, over all instances.
            is_real: which of the rows are real, of any shape with so many elements.
        """
        return FeedBatch(
            jax.tree.map(self._send, self.like, rows),
            epoch,
            examples,
            self._dims.updates(examples),
            is_real.reshape(self._shape),
            sum(leaf.nbytes for leaf in jax.tree.leaves(rows)),
        )

    def _send(self, like: jax.ShapeDtypeStruct, rows: npt.NDArray[Any]) -> jax.Array:
        of_instance = rows.reshape(*self._shape, *rows.shape[1:])
        return jax.make_array_from_process_local_data(like.sharding, of_instance, like.shape)


def replicas_of(mesh: Mesh, instances: int, instance: int) -> int:
    """Return the number of replicas of all instances.

    Raises:
        ValueError: the mesh has no axis of replicas, or does not lie on the processes of the instances.
    """
    if REPLICA_AXIS not in mesh.axis_names:
        raise ValueError(
            f"mesh has axes {mesh.axis_names}, none is 'replica': make it with make_mesh(replicas, ipus_per_replica)"
        )
    rows = np.moveaxis(mesh.devices, mesh.axis_names.index(REPLICA_AXIS), 0)
    owners = [{device.process_index for device in row.flat} for row in rows.reshape(len(rows), -1)]
    processes = set().union(*owners)
    if processes == {jax.process_index()}:
        return len(rows) * instances
    if len(processes) != instances:
        raise ValueError(f"mesh lies on {len(processes)} processes, but instances={instances}: give one for each")
    each = len(rows) // instances
    if owners[instance * each : (instance + 1) * each] != [{jax.process_index()}] * each or len(rows) % instances:
        raise ValueError(
            f"mesh has replicas of the processes {[sorted(of_row) for of_row in owners]}, and instance={instance} is "
            f"process {jax.process_index()}: give each instance as many replicas, whole ones, in the order of instances"
        )
    return len(rows)
