"""Run any optax transformation on a pipeline's weights, in a custom training loop.

gradients, params      Sharded, packed arrays  ->  each IPU updates its own leaves  ->  the new params
optax's own functions  see {group: pytree}, leaf by leaf, whatever the arrays are
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from ipu_jax.base import status
from ipu_jax.base.annotations import Function, Params, Tree, Value
from ipu_jax.base.checks import in_line
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.blocks import Blocks, to_blocks
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.packing import Sharded, check_alive
from ipu_jax.core.layout.rule import LayoutRule
from ipu_jax.core.mesh.axes import over_ipus
from ipu_jax.core.optimizer._analysis import MissingArgumentError, updated
from ipu_jax.core.optimizer.update import ShardedUpdate


class PipelineOptimizer:
    """Runs an optax transformation where a pipeline's weights are; made by `Pipeline.optimizer`.

    `init` makes the first state and `apply` updates weights and state. You can call `apply` in your own `jax.jit`,
    beside `Pipeline.value_and_grad`. optax sees the logical tree `{group: pytree}`, so that masks, norms and shapes of
    leaves have their usual meaning. Frozen leaves do not change.
    """

    def __init__(self, pipeline: Any, rule: LayoutRule, transformation: optax.GradientTransformation):
        self._pipeline, self._rule, self._transformation = pipeline, rule, checked_optimizer(transformation)
        self._updates: dict[PackedLayout, ShardedUpdate] = {}
        self._programs: dict[PackedLayout, Function] = {}

    def init(self, params: Sharded) -> Sharded:
        """Return the optimizer's first state.

        Communicates nothing, unless the state copies weights: those like `Pipeline.unshard`. It cannot be called inside
        `jax.jit`.

        Args:
            params: from `Pipeline.shard`.

        Raises:
            ValueError: the optimizer needs a divided leaf in one piece (the message names leaf and operation), the
                weights are of another pipeline, or `jax.jit` traces the call.
        """
        _check_concrete("init", params)
        return self._update_for(params).init(packing.reader(params), self._pipeline.mesh)

    def apply(
        self, gradients: Sharded, state: Sharded, params: Sharded, value: Value = None
    ) -> tuple[Sharded, Sharded]:
        """Return the new weights, which are the weights plus optax's updates, and the new state.

        Communicates one all_gather of a few numbers for each level of norms over leaves of several IPUs, or over the
        parts of one leaf; nothing for an elementwise optimizer. Weights are rounded to their dtype once, from float32.

        Args:
            gradients: the gradients of `params`, from `Pipeline.value_and_grad`.
            state: from `init`, or from the previous update.
            params: from `Pipeline.shard`, or from the previous update.
            value: the loss, a float scalar, for transformations that need it, such as
                `optax.contrib.reduce_on_plateau`.

        Raises:
            ValueError: the weights are of another pipeline, the gradients are of other weights, the state is from
                another optimizer or of weights in other places, or the transformation reads the loss and `value` is
                missing or not a scalar.
        """
        update, layout = self._update_for(params), self._rule.as_trained(params.layout)
        if not isinstance(gradients, Sharded):
            raise ValueError(f"gradients are a {type(gradients).__name__}: give what value_and_grad returned")
        if gradients.layout not in (params.layout, layout) or _shapes(gradients) != _shapes(params):
            raise ValueError("gradients are not laid out as params: give what value_and_grad returned for these params")
        check_alive("gradients", gradients)
        self._check_state(update, state)
        if value is None and update.reads_loss:
            raise ValueError("this optimizer reads the loss: give it, apply(gradients, state, params, value=loss)")
        if value is not None and jnp.shape(value):
            raise ValueError(f"value has shape {jnp.shape(value)}: give the loss of the update, a scalar")
        if layout not in self._programs:
            self._programs[layout] = self._program(update, layout)
        value = jnp.zeros(()) if value is None else jnp.asarray(value)
        gradients, trained = (dataclasses.replace(tree, layout=layout) for tree in (gradients, params))
        with status.SILENT:
            new, state = self._programs[layout](gradients, state, trained, value)
        return dataclasses.replace(new, layout=params.layout), state

    def _program(self, update: ShardedUpdate, layout: PackedLayout) -> Function:
        """Return the program of `apply`."""

        def on_ipu(gradients: Sharded, state: Sharded, params: Sharded, value: Value) -> Tree:
            with status.tracing("the optimizer"):
                new, _, state = update.apply(to_blocks(gradients), state, params, value)
            return new, state

        weights, states = packing.specs_of(layout), packing.specs_of(update.state_layout.layout)
        in_specs = (weights, states, weights, PartitionSpec())
        return jax.jit(over_ipus(on_ipu, self._pipeline.mesh, in_specs=in_specs, out_specs=(weights, states)))

    def whole(self, state: Sharded, params: Sharded) -> Tree:
        """Return the whole state as optax's tree, to save it. Communicates like `Pipeline.unshard`.

        Raises:
            ValueError: the state is from another optimizer or of other weights, or `jax.jit` traces the call.
        """
        _check_concrete("whole", state)
        update = self._update_for(params)
        self._check_state(update, state)
        return packing.unshard_tree(state)

    def restore(self, whole: Tree, params: Sharded) -> Sharded:
        """Place a state that `whole` returned on the IPUs, for these weights.

        Raises:
            ValueError: the state is from another optimizer or of other weights, or `jax.jit` traces the call.
        """
        _check_concrete("restore", whole)
        return self._update_for(params).restore(whole, self._pipeline.mesh)

    def _update_for(self, params: Params) -> ShardedUpdate:
        self._rule.check(params)
        layout = self._rule.as_trained(params.layout)
        if layout not in self._updates:
            self._updates[layout] = ShardedUpdate(self._transformation, Blocks(layout, replicas=1))
        return self._updates[layout]

    def _check_state(self, update: ShardedUpdate, state: Tree) -> None:
        check_alive("state", state)
        if not update.state_layout.fits(state):
            is_other = isinstance(state, Sharded)
            found = "another optimizer's, or of weights in other places" if is_other else f"a {type(state).__name__}"
            raise ValueError(
                f"state is {found}: give what init or restore of this optimizer, or its last apply, returned"
            )


def checked_optimizer(optimizer: Any) -> optax.GradientTransformation:
    """Return an optimizer as a `GradientTransformation`, which `optax.MultiSteps` is not.

    Raises:
        ValueError: it is not an optimizer, such as `optax.adam` without its arguments.
        MissingArgumentError: a trace with small test weights shows what `updated` refuses.
    """
    if isinstance(optimizer, optax.MultiSteps):
        several: Any = optimizer.update
        optimizer = optax.GradientTransformationExtraArgs(optimizer.init, several)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(f"optimizer={in_line(optimizer)} is not an optax.GradientTransformation: give optax.sgd(...)")

    def update(params: Params, value: Value) -> Tree:
        return updated(optimizer, params, optimizer.init(params), params, value)

    try:
        matrix, bias, loss = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 2), (3,), ()))
        jax.eval_shape(update, [matrix, bias], loss)  # of unequal rows, which cannot be examples
    except MissingArgumentError:
        raise
    except Exception:
        pass  # perhaps the optimizer needs certain weights: `analyze_update` calls it with the real weights
    return optimizer


def _check_concrete(method: str, tree: Tree) -> None:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise ValueError(
            f"{method} was called inside jax.jit: call it outside, and pass the state to the jitted function"
        )


def _shapes(tree: Tree) -> list[tuple[int, ...]]:
    return [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
