"""Run one IPU's program on all IPUs and replicas of a mesh, and collect its results."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from ipu_jax.core.collectives import rounded
from ipu_jax.core.devices import REPLICA_AXIS
from ipu_jax.core.engine.scan import Result
from ipu_jax.core.mesh_axes import over_ipus
from ipu_jax.core.step_args import StepArgs
from ipu_jax.core.weights import packing


class Results(NamedTuple):
    """The results of a run on all IPUs; those that the run does not have are None.

    Attributes:
        loss: the mean over micro-batches and replicas.
        aux: per stage that returned one, leaves (R, M, ...).
        outputs: in prediction, the outputs of the last stage, leaves (R, m, ...).
        gradients: in the dtypes and the layout of the weights.
        state: the new state; in prediction with several replicas, any one replica's.
    """

    loss: Any
    aux: Any
    outputs: Any
    gradients: Any
    state: Any


def run_on_mesh(
    program: Callable[[StepArgs], Result], mesh: Mesh, args: StepArgs, *, backward: bool, output_specs: Any
) -> Results:
    """Run a program on all IPUs.

    Args:
        program: gets one IPU's weights and state, its replica's batch of leaves (M, ...), and the key.
        mesh: the mesh of replicas and IPUs.
        args: the whole arguments.
        backward: whether there are gradients.
        output_specs: the last stage's `predict_specs`.
    """

    def on_ipu(args: StepArgs) -> Results:
        result, params = program(args.of_replica()), args.params
        aux, outputs = jax.tree.map(lambda leaf: leaf[None], (result.aux, result.outputs))
        gradients = result.gradients and jax.tree.map(lambda g, p: rounded(g, p.dtype), result.gradients, params)
        return Results(result.loss, aux, outputs, gradients, result.state)

    whole, of_replicas = PartitionSpec(), PartitionSpec(REPLICA_AXIS)
    weights, state = packing.specs_of(args.params.layout), packing.specs_of(args.state.layout)
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    of_outputs = jax.tree.map(lambda spec: PartitionSpec(REPLICA_AXIS, None, *spec), output_specs, is_leaf=is_spec)
    in_specs = (StepArgs(weights, of_replicas, state, whole),)
    out_specs = Results(whole, of_replicas, of_outputs, weights if backward else whole, state)
    return over_ipus(on_ipu, mesh, in_specs=in_specs, out_specs=out_specs)(args)
