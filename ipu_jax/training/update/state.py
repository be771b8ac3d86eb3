"""Define what a training step takes and returns: its state on the IPUs, and the outputs of a call.

>>> from ipu_jax.core.layout.layout import PackedLayout
>>> TrainState(jnp.ones((3, 2)), Sharded([jnp.ones((3, 2))], PackedLayout()), None, None, jnp.int32(7), None)
TrainState(step=7, 6 weights in 24 B, optimizer state in 24 B)
>>> StepOutputs(jnp.float32(0.25), {"tokens": jnp.ones((4, 16))}, jnp.int32(1))
StepOutputs(loss=0.25, aux={'tokens': float32[4, 16]}, updated=1)
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ipu_jax.base.annotations import Key, Params, Tree, Value
from ipu_jax.base.keys import is_key
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.programs.cost import in_units
from ipu_jax.training.update._precision import Scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class TrainState:
    """Hold the state that an update changes, on the IPUs. A pytree.

    Its repr shows the number of updates, the number of weights, and bytes. Copies on several IPUs count once. Bytes
    include the padding of weights that share an array.

    Attributes:
        params: the weights, as `Pipeline.shard` or `Replicas.shard` places them.
        optimizer: the optimizer's state, in arrays that are divided like the weights; `print(state.optimizer.layout)`
            shows where each part is, and `TrainStep.whole` returns it as optax's tree.
        stages: the state of a pipeline's stages, or None.
        scale: the dynamic loss scale, or None.
        step: int32, the number of updates that were tried; an update that stops the state is not counted.
        key: the typed key from which each update's own key is folded, or None.
        ema: under `TrainOptions(ema_decay=)` the moving average of the trained weights, in float32 at least, in arrays
            laid out like the optimizer's state; else None. `TrainStep.whole` returns it as a tree.
        nonfinite: under `TrainOptions(on_nonfinite=)`, int32: the number of consecutive updates, up to the last one,
            that were not made because they were not finite; else None. 1 under "stop", or `max_skips` under "skip",
            means that the state is stopped: no update changes it any more, and `step` is the number of updates before
            the one that stopped it. It is not saved: `TrainStep.restore` returns a state that is not stopped.
    """

    params: Params
    optimizer: Sharded
    stages: Sharded | None
    scale: Scale | None
    step: Value
    key: Key
    ema: Sharded | None = None
    nonfinite: Value = None

    def __repr__(self) -> str:
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self) if _is_concrete(leaf)):
            return "TrainState(used up: a call reused its buffers; go on with the state that it returned)"
        parts = [f"step={_value(self.step)}", f"{_weights(self.params):,} weights in {_bytes(self.params)}"]
        held = {"optimizer state": self.optimizer, "state of stages": self.stages, "average of weights": self.ema}
        where = lambda tree: " of the host" * any(array.memory for array in tree.layout.arrays)
        parts += [f"{name} in {_bytes(tree)}{where(tree)}" for name, tree in held.items() if jax.tree.leaves(tree)]
        if self.scale is not None:
            parts.append(f"loss scale {_value(self.scale.scale)}")
        if self.nonfinite is not None and _value(self.nonfinite) != "0":
            parts.append(f"{_value(self.nonfinite)} updates in a row were not finite")
        return f"TrainState({', '.join(parts)})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class StepOutputs:
    """Hold the outputs of a call. If they are from several updates, every leaf has a leading dim of updates.

    Attributes:
        loss: over all micro-batches and replicas, unscaled.
        aux: what the model returned besides the loss, leaves (M, ...) or (replicas, M, ...); None if nothing.
        updated: under a `DynamicScale` or `on_nonfinite`, int32: 1 if the update was made, 0 if it was not; else None.
        gradient_norm: under `TrainOptions(norms=True)`, float32 at least: the norm over all gradients of all IPUs,
            reduced over micro-batches and replicas, unscaled, and before `max_gradient_norm`; else None.
        parameter_norm: under `TrainOptions(norms=True)`, float32 at least: the norm over all trained weights of all
            IPUs, before the update; else None.
        learning_rate: float32 at least, this update's learning rate if the optimizer keeps it in its state, as
            `optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)` does. None if it is not in the state, as in
            `optax.adamw(schedule)`, or in several places.
        nonfinite: under `TrainOptions(on_nonfinite=)`, int32: the number, counted from 1, of the first update since the
            previous outputs that was not made because it was not finite; 0 if there is none. Updates that a stopped
            state did not make have the number of the update that stopped it. None without the option.
        skipped: under a `DynamicScale` or `on_nonfinite`, int32: the number of updates since the previous outputs that
            were not made, whatever `TrainOptions(outputs=)` returns; else None.
    """

    loss: Value
    aux: Tree
    updated: Value
    gradient_norm: Value = None
    parameter_norm: Value = None
    learning_rate: Value = None
    nonfinite: Value = None
    skipped: Value = None

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        shown = [f"{name}={_tree(value)}" for name, value in values.items() if value is not None]
        return f"StepOutputs({', '.join(shown)})"


def _weights(params: Params) -> int:
    """Return the number of logical weights, frozen ones included."""
    if isinstance(params, Sharded):
        return sum(leaf.size for leaf in params.layout.leaves)
    return sum(getattr(leaf, "size", 0) for leaf in jax.tree.leaves(params))


def _bytes(tree: Tree) -> str:
    # jax sometimes replaces leaves by objects that are not arrays
    arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype") and not is_key(leaf)]
    return in_units(sum(leaf.size * leaf.dtype.itemsize for leaf in arrays), "B")


def _is_concrete(leaf: Value) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def _tree(tree: Tree) -> str:
    """Return the text of a tree, with small arrays as numbers and other arrays as their dtype and shape."""
    return repr(jax.tree.map(lambda leaf: _Text(_value(leaf)), tree))


class _Text(str):
    """A text that a container shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _value(leaf: Value) -> str:
    if not hasattr(leaf, "dtype"):
        return repr(leaf)
    is_here = isinstance(leaf, np.ndarray | np.generic) or (
        _is_concrete(leaf) and (leaf.is_fully_addressable or leaf.is_fully_replicated)
    )
    if leaf.size > 8 or not is_here or is_key(leaf):
        return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return np.array2string(np.asarray(leaf, np.float64), separator=", ", formatter={"float_kind": "{:.6g}".format})
    return np.array2string(np.asarray(leaf), separator=", ")
