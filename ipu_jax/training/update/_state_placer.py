"""Place whole states of a training step on the IPUs, and return states whole, as checkpoints need them.

{group: pytree}, optax's state, ...  -- placed -->  TrainState: arrays on the mesh, split as `specs` says
                                     <-- whole --
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ipu_jax.base.annotations import Batch, Key, Params, Tree, Value
from ipu_jax.core.layout.blocks import Blocks, from_blocks
from ipu_jax.core.layout.layout import WHOLE
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.layout.place import Place, places_of_layout
from ipu_jax.core.layout.tree_parts import joined
from ipu_jax.core.mesh.instances import on_host, put_copy
from ipu_jax.core.optimizer import zero
from ipu_jax.core.optimizer.state import OptimizerState, copied
from ipu_jax.core.optimizer.update import ShardedUpdate
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.step_args import StepArgs, given_dims
from ipu_jax.training.update._model import Model
from ipu_jax.training.update._precision import held_in, initial_scale
from ipu_jax.training.update.models import specs_of
from ipu_jax.training.update.state import TrainState


def _shape_of(leaf: Value) -> Value:
    is_array = isinstance(getattr(leaf, "dtype", None), np.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf


class StatePlacer:
    """Places the states of one training step, and returns them whole.

    Args:
        model: the model with all its replicas.
        optimizer: the optimizer, including the step's clipping.
        options: the step's options.

    Attributes:
        model: as given.
        held: the dtype in which float weights are held, unless the precision is "32.32".
    """

    def __init__(self, model: Model, optimizer: optax.GradientTransformation, options: TrainOptions):
        self.model, self._optimizer, self._options = model, optimizer, options
        self.held = jnp.dtype(options.half if options.precision == "16.16" else jnp.float32)
        self._updates: dict[Any, ShardedUpdate] = {}  # by the layout of the weights

    def update_for(self, params: Params) -> ShardedUpdate:
        """Return the optimizer's update for weights laid out like these; it is traced once per layout.

        Raises:
            ValueError: the optimizer needs a divided leaf in one piece.
        """
        where = self.model.layout(params)
        if where not in self._updates:
            replicas = self.model.replicas if self._options.shard_optimizer else 1
            self._updates[where] = ShardedUpdate(self._optimizer, self.model.blocks(params, replicas))
        return self._updates[where]

    def first(self, params: Params, stages: Tree, key: Key) -> TrainState:
        """Place whole weights, the first state of the optimizer, and the weights as their own average."""
        of_stages = self._placed_stages(stages)
        _, placed, trained = self._placed_params(params)
        update = self.update_for(placed)
        optimizer = update.init(update.blocks.logical_tree([jnp.asarray(value) for value in trained]))
        ema = None if self._options.ema_decay is None else divided_average(update.blocks, trained)
        scale = initial_scale(self._options)
        return self._state(placed, optimizer, of_stages, scale=scale, step=0, key=key, ema=ema)

    def shapes(self, params: Params, stages: Tree, key: Key) -> TrainState:
        """Return what `first` returns, with the shape, dtype and sharding of each array in place of the array."""
        model = self.model
        of_stages = model.runs.shard_state_shapes(stages) if self._check_stages(stages) else None
        placed = model.runs.shard_shapes(self._in_held(jax.tree.map(_shape_of, params)))
        update = self.update_for(placed)
        blocks = update.blocks
        averages = [
            jax.ShapeDtypeStruct(blocks.global_shape(k), jnp.promote_types(block.dtype, jnp.float32))
            for k, block in enumerate(blocks)
        ]
        count = jax.ShapeDtypeStruct((), np.int32)
        state = TrainState(
            params=placed,
            optimizer=update.state_layout.shapes(),
            stages=of_stages,
            scale=jax.eval_shape(lambda: initial_scale(self._options)),
            step=count,
            key=None if key is None else jax.ShapeDtypeStruct(key.shape, key.dtype),
            ema=None if self._options.ema_decay is None else averages,
            nonfinite=None if self._options.on_nonfinite is None else count,
        )
        on_mesh = lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(model.mesh, spec)
        )
        return jax.tree.map(on_mesh, state, self.specs(state))

    def placed(self, whole: dict[str, Tree]) -> TrainState:
        """Place a state that `whole` returned, perhaps from a step for other IPUs or replicas.

        Raises:
            ValueError: the state does not fit the model, the optimizer or the options.
        """
        of_stages = self._placed_stages(whole["stages"])
        params, placed, _ = self._placed_params(whole["params"])
        update, average = self.update_for(placed), whole.get("ema")
        if (average is None) != (self._options.ema_decay is None):
            raise ValueError(
                "the saved state and this step differ in whether they average the weights by ema_decay: give whole the "
                "'ema' None, or to begin the average anew its own 'params'"
            )
        ema = None
        if average is not None:
            shapes_of = lambda tree: (jax.tree.structure(tree), [*map(jnp.shape, jax.tree.leaves(tree))])
            if shapes_of(average) != shapes_of(params):
                raise ValueError("the saved 'ema' is not a tree like the saved 'params': give what whole returned")
            ema = divided_average(update.blocks, self.model.trained(placed, average))
        optimizer, scale = update.state_layout.restore(whole["optimizer"]), whole["scale"]
        return self._state(placed, optimizer, of_stages, scale=scale, step=whole["step"], key=whole["key"], ema=ema)

    def whole(self, state: TrainState) -> dict[str, Tree]:
        """Return whole copies of everything in a state, each in its owner's form; None for what is not in it."""
        update, model = self.update_for(state.params), self.model
        params = model.runs.unshard(state.params)
        return {
            "params": params,
            "optimizer": update.state_layout.whole(state.optimizer),
            "stages": None if state.stages is None else model.runs.unshard(state.stages),
            "scale": jax.tree.map(copied, state.scale),
            "step": int(state.step),
            "key": None if state.key is None else copied(state.key),
            "ema": None if state.ema is None else self._whole_average(update.blocks, state, params),
        }

    def places(self, state: TrainState) -> dict[str, list[Place]]:
        """Return where each leaf of `whole` is in the arrays of a state, under "params", "optimizer", "stages", "ema".

        Arrays have the same names as in checkpoints. "ema" lists only the leaves that are trained.
        """
        update = self.update_for(state.params)
        blocks, stages = update.blocks, state.stages
        averages = range(0 if state.ema is None else len(blocks.leaves))
        return {
            "params": self.model.places(state.params),
            "optimizer": update.state_layout.places("optimizer"),
            "stages": [] if stages is None else places_of_layout(stages.layout, "stages"),
            "ema": [blocks.place(leaf, f"ema.{blocks.block_of(leaf)}", jnp.float32) for leaf in averages],
        }

    def assembled(self, state: TrainState, leaves: dict[str, list[Value]]) -> dict[str, Tree]:
        """Return the trees that `whole` returns, from whole leaves in the order of the paths in `places(state)`."""
        update = self.update_for(state.params)
        params, stages = self.model.assembled(state.params, leaves["params"]), state.stages
        return {
            "params": params,
            "optimizer": update.state_layout.assembled(leaves["optimizer"]),
            "stages": None if stages is None else stages.layout.assembled(leaves["stages"]),
            "ema": None if state.ema is None else self._with_trained(state, params, leaves["ema"]),
        }

    def of_one_update(self, state: TrainState, batch: Batch) -> StepArgs:
        """Return the arguments of one update of a call as a user gives them, with the shapes of its batch if K > 1."""
        dims, key = given_dims(self._options.device_iterations), state.key if self.model.random else None
        shape_of = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[dims:], leaf.dtype)
        return StepArgs(state.params, jax.tree.map(shape_of, batch) if dims else batch, state.stages, key)

    def specs(self, state: TrainState) -> TrainState:
        """Return the PartitionSpec of every array of a state."""
        everywhere = lambda tree: jax.tree.map(lambda _: WHOLE, tree)
        update = self.update_for(state.params)
        return TrainState(
            params=specs_of(state.params),
            optimizer=update.state_layout.specs(state.optimizer),
            stages=specs_of(state.stages),
            scale=everywhere(state.scale),
            step=WHOLE,
            key=everywhere(state.key),
            ema=None if state.ema is None else [update.blocks.spec(k) for k in range(len(update.blocks))],
            nonfinite=everywhere(state.nonfinite),
        )

    def _placed_params(self, params: Params) -> tuple[Params, Params, list[Value]]:
        """Return the whole weights in their held dtypes, the same weights on the IPUs, and the whole trained leaves."""
        params = self._in_held(params)
        placed = self.model.place(params)
        return params, placed, self.model.trained(placed, params)

    def _in_held(self, params: Params) -> Params:
        """Return whole weights, or their shapes, in the dtypes in which the step holds them."""
        if self._options.precision == "32.32":
            return params
        frozen = self.model.frozen(self.model.runs.shard_shapes(jax.tree.map(_shape_of, params)))
        return held_in(params, self.held, frozen)

    def _whole_average(self, blocks: Blocks, state: TrainState, params: Params) -> Params:
        """Return the weights with the trained ones replaced by their average."""
        averages = joined(blocks.logical_tree(whole_average(blocks, state.ema or [])))
        return self._with_trained(state, params, jax.tree.leaves(averages))

    def _with_trained(self, state: TrainState, params: Params, trained: Sequence[Value]) -> Params:
        """Return whole weights with the trained ones replaced by `trained`."""
        following = iter(trained)
        leaves, treedef = jax.tree.flatten(params)
        both = zip(leaves, self.model.frozen(state.params), strict=True)
        return jax.tree.unflatten(treedef, [w if is_frozen else next(following) for w, is_frozen in both])

    def _state(
        self, params: Params, optimizer: OptimizerState, stages: Tree, *, scale: Value, step: int, key: Key, ema: Value
    ) -> TrainState:
        """Return the state made of placed weights and stages' state, and of everything else, still on the host."""
        update = self.update_for(params)
        blocks = update.blocks
        return TrainState(
            params=params,
            optimizer=jax.tree.map(self._place, optimizer, update.state_layout.specs(optimizer)),
            stages=stages,
            scale=jax.tree.map(lambda a: self._place(a), scale),
            step=self._place(np.int32(step)),
            key=None if key is None else self._place(key),
            ema=None if ema is None else [self._place(array, blocks.spec(k)) for k, array in enumerate(ema)],
            nonfinite=self.no_streak(),
        )

    def no_streak(self) -> jax.Array | None:
        """Return a new `TrainState.nonfinite`: 0 on the IPUs, or None without `on_nonfinite`."""
        return None if self._options.on_nonfinite is None else self._place(np.int32(0))

    def _placed_stages(self, stages: Tree) -> Sharded | None:
        return self.model.runs.shard_state(stages) if self._check_stages(stages) else None

    def _check_stages(self, stages: Tree) -> bool:
        """Return whether the model's stages hold state; raise `ValueError` unless it is given if, and only if, so."""
        groups = self.model.state_groups
        if stages is None and groups:
            raise ValueError(f"stages is missing: pass stages={{...}} with the state of {', '.join(map(repr, groups))}")
        if stages is not None and not groups:
            raise ValueError("stages were given, but the model holds no state: leave them out")
        return bool(groups)

    def _place(self, value: Tree, spec: PartitionSpec = WHOLE) -> jax.Array:
        return put_copy(value, NamedSharding(self.model.mesh, spec))


def with_average(blocks: Blocks, params: Params, averages: Sequence[Value]) -> Params:
    """Return the weights with the trained ones replaced by their averages, in the weights' dtypes.

    Call it inside the program. Under `shard_optimizer` it communicates one all_gather over "replica" per bucket.
    """
    arrays = []
    for k, (average, own) in enumerate(zip(averages, blocks.chunks_of(params), strict=True)):
        array, mask = average[0, 0].astype(own.dtype), blocks.leaf_mask(k)
        # a slot may hold frozen weights of this IPU
        arrays.append(array if mask is None else jnp.where(mask, array, own))
    return from_blocks(params, zero.gather(blocks, arrays))


def divided_average(blocks: Blocks, leaves: Sequence[Value]) -> list[np.ndarray]:
    """Split the averages of whole leaves into blocks: host arrays of `Blocks.global_shape`."""
    averages = []
    for k, block in enumerate(blocks):
        averages.append(np.zeros(blocks.global_shape(k), jnp.promote_types(block.dtype, jnp.float32)))
        for leaf in {leaf for leaf in block.leaves if leaf is not None}:
            blocks.write_leaf(leaf, np.asarray(leaves[leaf], averages[k].dtype), averages[k])
    return averages


def whole_average(blocks: Blocks, averages: Sequence[Value]) -> list[jax.Array]:
    """Return copies of the averages as whole leaves: the inverse of `divided_average`.

    Communicates one all-gather per array that is split over several instances.
    """
    arrays = [on_host(average) for average in averages]
    leaves = range(len(blocks.leaves))
    return [jnp.array(blocks.place(leaf, "").leaf(arrays[blocks.block_of(leaf)])) for leaf in leaves]
