"""Run one IPU's program on all IPUs and replicas of a mesh, and collect its results.

Leaves of the batch and of results per micro-batch are (replicas, M, ...) if there are several replicas, else (M, ...).
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ipu_jax.core.collectives import rounded
from ipu_jax.core.devices import REPLICA_AXIS
from ipu_jax.core.engine.scan import Result
from ipu_jax.core.mesh_axes import over_ipus
from ipu_jax.core.weights import packing
from ipu_jax.core.weights.packing import Sharded

Program = Callable[[Sharded, Any, Sharded, Any], Result]


def run_on_mesh(
    program: Program, mesh: Mesh, params: Sharded, batch: Any, state: Sharded, key: Any, *, backward: bool
) -> tuple[Any, dict[str, Any], Sharded | None, Sharded]:
    """Return the loss, aux, the gradients in the dtypes of `params` (None without `backward`), and the new state.

    Args:
        program: gets one IPU's weights, its replica's batch of leaves (M, ...), its state, and the key.
        mesh: the mesh of replicas and IPUs.
        params, batch, state, key: the whole arguments.
        backward: whether there are gradients.
    """
    several = mesh.shape[REPLICA_AXIS] > 1

    def results(params: Sharded, result: Result) -> Any:
        aux = jax.tree.map(lambda leaf: leaf[None], result.aux) if several else result.aux
        gradients = result.gradients and jax.tree.map(lambda g, p: rounded(g, p.dtype), result.gradients, params)
        return result.loss, aux, gradients, result.state

    aux_specs = PartitionSpec(REPLICA_AXIS) if several else PartitionSpec()
    gradient_specs = packing.specs_of(params.layout) if backward else PartitionSpec()
    specs = (PartitionSpec(), aux_specs, gradient_specs, packing.specs_of(state.layout))
    return _mapped(program, mesh, params, state, results, specs)(params, batch, state, key)


def predict_on_mesh(
    program: Program, mesh: Mesh, params: Sharded, batch: Any, state: Sharded, key: Any, *, output_specs: Any
) -> tuple[Any, Sharded]:
    """Return the outputs of the last stage and the new state.

    Args:
        program, mesh, params, batch, state, key: as for `run_on_mesh`. With several replicas, the new state is any one
            replica's.
        output_specs: the last stage's `predict_specs`.
    """
    several = mesh.shape[REPLICA_AXIS] > 1

    def results(params: Sharded, result: Result) -> Any:
        outputs = jax.tree.map(lambda leaf: leaf[None], result.outputs) if several else result.outputs
        return outputs, result.state

    leading = (REPLICA_AXIS, None) if several else (None,)
    outputs_specs = jax.tree.map(
        lambda spec: PartitionSpec(*leading, *spec), output_specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    specs = (outputs_specs, packing.specs_of(state.layout))
    return _mapped(program, mesh, params, state, results, specs)(params, batch, state, key)


def _mapped(
    program: Program, mesh: Mesh, params: Sharded, state: Sharded, results: Callable[..., Any], out_specs: Any
) -> Callable[..., Any]:
    several = mesh.shape[REPLICA_AXIS] > 1
    batch_spec = PartitionSpec(REPLICA_AXIS) if several else PartitionSpec()

    def on_ipu(params: Sharded, batch: Any, state: Sharded, key: Any) -> Any:
        if several:
            batch = jax.tree.map(lambda leaf: leaf[0], batch)
        return results(params, program(params, batch, state, key))

    in_specs = (packing.specs_of(params.layout), batch_spec, packing.specs_of(state.layout), PartitionSpec())
    return over_ipus(on_ipu, mesh, in_specs=in_specs, out_specs=out_specs)
