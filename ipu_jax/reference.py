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
from ipu_jax.packing import Sharded
from ipu_jax.pipeline import Pipeline
from ipu_jax.segment import NOTHING, Given, keys_of, loss_and_aux, whole


class VerificationError(AssertionError):
    """A pipeline's loss or a gradient differs from the unsharded program's."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        loss, reference_loss: the pipeline's and the unsharded program's.
        loss_error: relative to the reference.
        gradient_errors: per leaf, the largest difference relative to the leaf's largest reference magnitude.
        state_errors: likewise for the new state, where stages hold some.
    """

    loss: float
    reference_loss: float
    loss_error: float
    gradient_errors: dict[str, float]
    state_errors: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float]:
        """The gradient leaf with the largest relative error, and that error."""
        return max(self.gradient_errors.items(), key=lambda item: item[1], default=("(no weights)", 0.0))

    def __str__(self) -> str:
        leaf, error = self.worst
        return (
            f"loss {self.loss:.6g}, unsharded {self.reference_loss:.6g}, relative error {self.loss_error:.1e}; "
            f"{len(self.gradient_errors)} gradients, largest relative error {error:.1e} at {leaf}"
            + (
                f"; {len(self.state_errors)} of state, {max(self.state_errors.values()):.1e}"
                if self.state_errors
                else ""
            )
        )


def reference_value_and_grad(
    pipeline: Pipeline, params: dict[str, Any], batch: Any, state: dict[str, Any] | None = None, key: Any = None
) -> Any:
    """What `Pipeline.value_and_grad` gives, from the unsharded program.

    Args:
        pipeline: whose stages, gradient accumulation, reduction and frozen leaves to use; its mesh and schedule play no
            part.
        params: `{group: pytree}`, whole weights.
        batch, key: as `Pipeline.value_and_grad` takes them.
        state: `{group: pytree}`, whole, where stages hold state.

    Returns:
        `(loss, {group: pytree of gradients})`, with aux and new state as `Pipeline.value_and_grad` returns them: mean
        loss over micro-batches and replicas; gradients reduced as the pipeline's `reduction` says, accumulated in
        float32 at least. Runs on the mesh's first device; nothing is sent.
    """
    device = pipeline.mesh.devices.flat[0]
    alone = Mesh(np.array([[device]]), (REPLICA_AXIS, IPU_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))
    model = whole(pipeline.stages, "reference")
    replicas, m = pipeline.replicas, pipeline.options.gradient_accumulation
    if replicas == 1:
        batch = jax.tree.map(lambda leaf: leaf[None], batch)
    frozen = pipeline.is_frozen(params)
    leaves, treedef = jax.tree.flatten(params)
    learning = [leaf for leaf, is_frozen in zip(leaves, frozen, strict=True) if not is_frozen]

    def one(learning: list[Any], given: Given, state: Any) -> tuple[Any, Any]:
        following = iter(learning)
        weights = [leaf if is_frozen else next(following) for leaf, is_frozen in zip(leaves, frozen, strict=True)]
        y, new_state, aux = model(jax.tree.unflatten(treedef, weights), NOTHING, given, state)
        loss, aux = loss_and_aux(y.y, aux, pipeline.stages[-1])
        return loss, (new_state, aux)

    def program(learning: list[Any], batch: Any, state: Any, key: Any) -> Any:
        def of_micro_batch(carry: Any, at: tuple[Any, Any, Any]) -> tuple[Any, Any]:
            replica, index, microbatch = at
            sums, state = carry
            keys = keys_of(key, replica, index, range(len(pipeline.stages)), pipeline.stages)
            (loss, (state, aux)), gradients = jax.value_and_grad(one, has_aux=True)(
                learning, Given(microbatch, keys), state
            )
            return (jax.tree.map(lambda total, v: total + v, sums, (loss, gradients)), state), aux

        def of_replica(sums: Any, at: tuple[Any, Any]) -> tuple[Any, Any]:
            replica, batch = at
            indices = (jnp.full(m, replica), jnp.arange(m), batch)
            (sums, new_state), aux = jax.lax.scan(of_micro_batch, (sums, state), indices)
            return sums, (new_state, aux)

        zeros = [jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32)) for w in learning]
        sums, (states, aux) = jax.lax.scan(
            of_replica, (jnp.zeros((), jnp.float32), zeros), (jnp.arange(replicas), batch)
        )
        of_floats = lambda s: s.mean(0) if jnp.issubdtype(s.dtype, jnp.floating) else s[0]  # noqa: E731
        return *sums, jax.tree.map(of_floats, states), aux

    everywhere = PartitionSpec()
    mapped = jax.shard_map(program, mesh=alone, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    learning, leaves, batch, state = jax.device_put((learning, leaves, batch, state or {}), device)
    loss, sums, new_state, aux = jax.jit(mapped)(learning, batch, state, key)
    count = m * replicas
    scale = 1.0 if pipeline.options.reduction == "sum" else 1.0 / count
    following = iter(sums)
    gradients = [
        jnp.zeros_like(w) if is_frozen else (next(following) * scale).astype(w.dtype)
        for w, is_frozen in zip(leaves, frozen, strict=True)
    ]
    if replicas == 1:
        aux = jax.tree.map(lambda leaf: leaf[0], aux)
    value = pipeline.value_of(loss / count, aux)
    result = (value, jax.tree.unflatten(treedef, gradients))
    return (*result, new_state) if new_state else result


def verify(
    pipeline: Pipeline,
    params: Sharded,
    batch: Any,
    state: Sharded | None = None,
    key: Any = None,
    *,
    rtol: float | None = None,
) -> Report:
    """Runs the pipeline and the unsharded program on the same weights and batch, and compares loss and every gradient.

    Where stages hold state, the new state is compared too.

    Args:
        pipeline: the pipeline.
        params: from `pipeline.shard`.
        batch, state, key: as `Pipeline.value_and_grad` takes them.
        rtol: the largest relative error allowed, of the loss and of each leaf (relative to the leaf's largest
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
        layout = pipeline.adopted(params).layout
        dtypes = [leaf.dtype for group in layout.groups for leaf in group.leaves if not leaf.frozen]
        rtol = max([1e-5, *(8 * float(jnp.finfo(dtype).eps) for dtype in dtypes if dtype != "float32")])
    found = pipeline.value_and_grad(params, batch, state, key)
    whole_state = None if state is None else pipeline.unshard(state)
    expected = reference_value_and_grad(pipeline, pipeline.unshard(params), batch, whole_state, key)
    loss, expected_loss = (value[0] if isinstance(value, tuple) else value for value in (found[0], expected[0]))
    report = Report(
        float(loss),
        float(expected_loss),
        _relative_error(np.asarray(loss), np.asarray(expected_loss)),
        _errors("params", pipeline.unshard(found[1]), expected[1]),
        {} if state is None else _errors("state", pipeline.unshard(found[2]), expected[2]),
    )
    if not report.loss_error <= rtol:
        raise VerificationError(f"the loss differs from the unsharded program's by more than rtol={rtol:g}: {report}")
    for what, errors in (("the gradient of", report.gradient_errors), ("the new", report.state_errors)):
        wrong = {leaf: error for leaf, error in errors.items() if not error <= rtol}
        if wrong:
            leaf, error = max(wrong.items(), key=lambda item: np.inf if np.isnan(item[1]) else item[1])
            kind = "gradients" if errors is report.gradient_errors else "leaves of state"
            raise VerificationError(
                f"{what} {leaf} differs from the unsharded program's by {error:.3g} relative, "
                f"more than rtol={rtol:g} ({len(wrong)} of {len(errors)} {kind} differ): {report}"
            )
    return report


def _errors(what: str, found: Any, expected: Any) -> dict[str, float]:
    return {
        f"{what}{jax.tree_util.keystr(path)}": _relative_error(np.asarray(f), np.asarray(e))
        for (path, f), e in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    }


def _relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    if not found.size:
        return 0.0
    scale = np.abs(expected).max()
    with np.errstate(invalid="ignore"):  # inf - inf is not a number, and so above any bound
        return float(np.abs(found - expected).max() / (scale if scale > 0 else 1.0))
