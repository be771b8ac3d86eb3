"""The same stages, unsharded: the program that a pipeline must equal, and the comparison.

`reference_value_and_grad` runs the stages one after the other on one device, micro-batch by micro-batch, on whole
weights, differentiated by `jax.value_and_grad`. A stage's `reference` function takes the place of its `fn`; a
concurrent stage without one runs on a mesh of a single IPU, where its collectives do nothing. `verify` compares.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.halves import loss_and_aux
from ipu_jax.packing import Sharded
from ipu_jax.pipeline import Pipeline
from ipu_jax.stage import Segment


class VerificationError(AssertionError):
    """A pipeline's loss or a gradient differs from the unsharded program's."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        loss, reference_loss: the pipeline's and the unsharded program's.
        loss_error: relative to the reference.
        gradient_errors: per leaf, the largest difference relative to the leaf's largest reference magnitude.
    """

    loss: float
    reference_loss: float
    loss_error: float
    gradient_errors: dict[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The gradient leaf with the largest relative error, and that error."""
        return max(self.gradient_errors.items(), key=lambda item: item[1], default=("(no weights)", 0.0))

    def __str__(self) -> str:
        leaf, error = self.worst
        return (
            f"loss {self.loss:.6g}, unsharded {self.reference_loss:.6g}, relative error {self.loss_error:.1e}; "
            f"{len(self.gradient_errors)} gradients, largest relative error {error:.1e} at {leaf}"
        )


def reference_value_and_grad(pipeline: Pipeline, params: dict[str, Any], batch: Any) -> tuple[Any, dict[str, Any]]:
    """Loss and gradients of the unsharded program.

    Args:
        pipeline: whose stages, gradient accumulation and reduction to use; its mesh and schedule play no part.
        params: `{group: pytree}`, whole weights.
        batch: as `Pipeline.value_and_grad` takes it.

    Returns:
        `(loss, {group: pytree of gradients})`: mean loss over micro-batches and replicas; gradients reduced as the
        pipeline's `reduction` says, accumulated in float32 at least. Runs on the mesh's first device; nothing is sent.
    """
    device = pipeline.mesh.devices.flat[0]
    alone = Mesh(np.array([[device]]), (REPLICA_AXIS, IPU_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))
    everything = Segment(pipeline.stages, 0)
    if pipeline.replicas > 1:
        batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
    count = pipeline.options.gradient_accumulation * pipeline.replicas

    def one(params: dict[str, Any], microbatch: Any) -> Any:
        return loss_and_aux(everything(params, None, microbatch, reference=True), everything)[0]

    def program(params: dict[str, Any], batch: Any) -> tuple[Any, dict[str, Any]]:
        def add(sums: Any, microbatch: Any) -> tuple[Any, None]:
            return jax.tree.map(lambda total, v: total + v, sums, jax.value_and_grad(one)(params, microbatch)), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
        (loss, gradients), _ = jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), batch)
        scale = 1.0 if pipeline.options.reduction == "sum" else 1.0 / count
        return loss / count, jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), gradients, params)

    whole = PartitionSpec()
    mapped = jax.shard_map(program, mesh=alone, in_specs=whole, out_specs=whole, check_vma=False)
    params, batch = jax.device_put((params, batch), device)
    return jax.jit(mapped)(params, batch)


def verify(pipeline: Pipeline, params: Sharded, batch: Any, *, rtol: float | None = None) -> Report:
    """Runs the pipeline and the unsharded program on the same weights and batch, and compares loss and every gradient.

    Args:
        pipeline: the pipeline.
        params: from `pipeline.shard`.
        batch: as `Pipeline.value_and_grad` takes it.
        rtol: the largest relative error allowed, of the loss and of each gradient leaf (relative to the leaf's largest
            magnitude). Default: 1e-5, or 8 machine epsilons of the coarsest weight dtype where that is more.

    Returns:
        The `Report`.

    Raises:
        VerificationError: an error is above `rtol` or not a number; it names the worst leaf.

    >>> from ipu_jax.stage import Stage
    >>> halve = Stage(lambda w, x, mb: mb * w, params="first", ipu=0)
    >>> square = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="second", ipu=1)
    >>> pipeline = Pipeline([halve, square], gradient_accumulation=3)
    >>> params = pipeline.shard({"first": jnp.ones(2), "second": jnp.ones((2, 2))})
    >>> verify(pipeline, params, jnp.ones((3, 4, 2))).loss
    4.0
    """
    if rtol is None:
        dtypes = [leaf.dtype for group in params.layout.groups for leaf in group.leaves]
        rtol = max([1e-5, *(8 * float(jnp.finfo(dtype).eps) for dtype in dtypes if dtype != "float32")])
    whole = pipeline.unshard(params)
    value, gradients = pipeline.value_and_grad(params, batch)
    loss = value[0] if isinstance(value, tuple) else value
    expected_loss, expected = reference_value_and_grad(pipeline, whole, batch)
    found = pipeline.unshard(gradients)
    errors = {
        f"params{jax.tree_util.keystr(path)}": _relative_error(np.asarray(g), np.asarray(e))
        for (path, g), e in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    }
    report = Report(
        float(loss), float(expected_loss), _relative_error(np.asarray(loss), np.asarray(expected_loss)), errors
    )
    if not report.loss_error <= rtol:
        raise VerificationError(f"the loss differs from the unsharded program's by more than rtol={rtol:g}: {report}")
    wrong = {leaf: error for leaf, error in errors.items() if not error <= rtol}
    if wrong:
        leaf, error = max(wrong.items(), key=lambda item: np.inf if np.isnan(item[1]) else item[1])
        raise VerificationError(
            f"the gradient of {leaf} differs from the unsharded program's by {error:.3g} relative, "
            f"more than rtol={rtol:g} ({len(wrong)} of {len(errors)} gradients differ): {report}"
        )
    return report


def _relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    if not found.size:
        return 0.0
    scale = np.abs(expected).max()
    with np.errstate(invalid="ignore"):  # inf - inf is not a number, and so above any bound
        return float(np.abs(found - expected).max() / (scale if scale > 0 else 1.0))
