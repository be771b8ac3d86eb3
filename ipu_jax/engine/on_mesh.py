"""Run one IPU's program on all IPUs and replicas of a mesh, and collect its results."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ipu_jax.devices import REPLICA_AXIS
from ipu_jax.engine.scan import Result
from ipu_jax.weights import packing
from ipu_jax.weights.packing import Sharded


def run_on_mesh(
    program: Callable[[Sharded, Any, Sharded, Any], Result],
    mesh: Mesh,
    params: Sharded,
    batch: Any,
    state: Sharded,
    key: Any,
    *,
    backward: bool,
) -> tuple[Any, dict[str, Any], Sharded | None, Sharded]:
    """Return the loss, aux, the gradients in the dtypes of `params` (None without `backward`), and the new state.

    Args:
        program: gets one IPU's weights, its replica's batch of leaves (M, ...), its state, and the key.
        mesh: of replicas and IPUs.
        params, batch, state, key: the whole arguments. Leaves of the batch, and of aux, are (replicas, M, ...) if there
            are several replicas, else (M, ...).
        backward: whether there are gradients.
    """
    replicas = mesh.shape[REPLICA_AXIS]
    batch_spec = PartitionSpec() if replicas == 1 else PartitionSpec(REPLICA_AXIS)
    params_specs, state_specs = packing.specs_of(params.layout), packing.specs_of(state.layout)

    def on_ipu(params: Sharded, batch: Any, state: Sharded, key: Any) -> Any:
        if replicas > 1:
            batch = jax.tree.map(lambda leaf: leaf[0], batch)
        result = program(params, batch, state, key)
        aux = jax.tree.map(lambda leaf: leaf[None], result.aux) if replicas > 1 else result.aux
        gradients = result.gradients and jax.tree.map(lambda g, p: g.astype(p.dtype), result.gradients, params)
        return result.loss, aux, gradients, result.state

    mapped = jax.shard_map(
        on_ipu,
        mesh=mesh,
        in_specs=(params_specs, batch_spec, state_specs, PartitionSpec()),
        out_specs=(PartitionSpec(), batch_spec, params_specs if backward else PartitionSpec(), state_specs),
        check_vma=False,
    )
    return mapped(params, batch, state, key)
