"""Place whole states of a training step on the IPUs, and return states whole, as checkpoints need them.

{group: pytree}, optax's state, ...  -- placed -->  TrainState: arrays on the mesh, split as `specs` says
                                     <-- whole --
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from ipu_jax.base.annotations import Batch, Key, Params, Tree, Value
from ipu_jax.base.keys import with_keys, without_keys
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.blocks import Blocks, from_blocks, gather
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.leaf import WHOLE, Leaf
from ipu_jax.core.layout.packing import Sharded, reader, shapes_on, shardings_of, unshard_tree, whole_shapes
from ipu_jax.core.mesh.host_memory import HOST, fetched
from ipu_jax.core.mesh.instances import put_copy, shapes_by
from ipu_jax.core.optimizer.update import ShardedUpdate
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.pipeline.init_function import InitFunction
from ipu_jax.core.step_args import StepArgs, given_dims
from ipu_jax.training.update._precision import held_in, initial_scale
from ipu_jax.training.update.models import Model, specs_of
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
        self._updates: dict[PackedLayout, ShardedUpdate] = {}  # by the layout of the weights

    def update_for(self, params: Params) -> ShardedUpdate:
        """Return the optimizer's update for weights laid out like these; it is traced once per layout.

        Raises:
            ValueError: the optimizer needs a divided leaf in one piece.
        """
        layout = self.model.layout(params)
        if layout not in self._updates:
            replicas = self.model.replicas if self._options.shard_optimizer else 1
            memory = HOST if "optimizer" in self._options.offload else None
            self._updates[layout] = ShardedUpdate(self._optimizer, Blocks(layout, replicas=replicas, memory=memory))
        return self._updates[layout]

    def first(self, params: Params, stages: Tree, key: Key) -> TrainState:
        """Return the first state of whole weights, or of weights that `is_placed`, which are copied."""
        of_stages, mesh = self._placed_stages(stages), self.model.mesh
        if isinstance(params, Sharded):
            placed: Params = dataclasses.replace(params, arrays=[*map(jnp.copy, params.arrays)])
        else:
            placed = self.model.place(self._in_held(params))
        update = self.update_for(placed)
        optimizer = update.init(reader(Sharded(jax.tree.leaves(placed), self.model.layout(placed))), mesh)
        ema = None if self._options.ema_decay is None else self._first_average(update.blocks, placed)
        return self._first(placed, optimizer, of_stages, key, ema)

    def _first_average(self, blocks: Blocks, placed: Params) -> Sharded:
        """Return placed weights as their own average, which each IPU makes of its own weights."""
        if not isinstance(placed, Sharded):  # pmap, which maps a loss function, needs an argument that is divided
            return packing.shard_tree(placed, blocks.averages, self.model.mesh)
        out_specs = packing.specs_of(blocks.averages)
        program = self.model.on_ipus(blocks.first_average, in_specs=(specs_of(placed),), out_specs=out_specs)
        return jax.jit(program, out_shardings=shardings_of(blocks.averages, self.model.mesh))(placed)

    def is_placed(self, params: Sharded) -> bool:
        """Return whether weights are placed as this step places them."""
        if not self.model.has(params) or any(array.sharding.mesh != self.model.mesh for array in params.arrays):
            return False
        return self._placed_shapes(whole_shapes(params.layout)).layout == params.layout

    def born(self, init: InitFunction, stages: Tree, key: Key) -> TrainState:
        """Return what `first` returns, for the weights that a function makes: each IPU makes its own part of it."""
        of_stages, placed = self._placed_stages(stages), self._placed_shapes(init.shapes)
        layout, update = self.model.layout(placed), self.update_for(placed)
        averages = [] if self._options.ema_decay is None else [update.blocks.averages]

        def everything(params: Params) -> list[Tree]:
            params = self._in_held(params)
            optimizer = update.first_state(update.blocks.layout.trained_leaves(params))
            return [layout.leaves_of(params), optimizer, *[layout.leaves_of(params) for _ in averages]]

        layouts = [layout, update.state_layout.layout, *averages]
        made, optimizer, *ema = init.then(everything).born(layouts, self.model.mesh)
        params = made if isinstance(placed, Sharded) else jax.tree.unflatten(layout.treedef, made.arrays)
        return self._first(params, optimizer, of_stages, key, ema[0] if ema else None)

    def weights(self, params: Params) -> PackedLayout:
        """Return where the leaves of whole weights go, or of their shapes."""
        return self.model.layout(self._placed_shapes(params))

    def _placed_shapes(self, params: Params) -> Params:
        return self.model.runs.shard_shapes(self._in_held(jax.tree.map(_shape_of, params)))

    def _first(self, params: Params, optimizer: Sharded, stages: Tree, key: Key, ema: Value) -> TrainState:
        return self._state(params, optimizer, stages, scale=initial_scale(self._options), step=0, key=key, ema=ema)

    def shapes(self, params: Params, stages: Tree, key: Key) -> TrainState:
        """Return what `first` returns, with the shape, dtype and sharding of each array in place of the array."""
        model = self.model
        of_stages = model.runs.shard_state_shapes(stages) if self._check_stages(stages) else None
        placed = self._placed_shapes(params)
        update = self.update_for(placed)
        count = jax.ShapeDtypeStruct((), np.int32)
        state = TrainState(
            params=placed,
            optimizer=shapes_on(update.state_layout.layout, model.mesh),
            stages=of_stages,
            scale=jax.eval_shape(lambda: initial_scale(self._options)),
            step=count,
            key=None if key is None else jax.ShapeDtypeStruct(key.shape, key.dtype),
            ema=None if self._options.ema_decay is None else shapes_on(update.blocks.averages, model.mesh),
            nonfinite=None if self._options.on_nonfinite is None else count,
        )
        return shapes_by(state, self.shardings(state))

    def placed(self, whole: dict[str, Tree]) -> TrainState:
        """Place a state that `whole` returned, perhaps from a step for other IPUs or replicas.

        Raises:
            ValueError: the state does not fit the model, the optimizer or the options.
        """
        params, average = self._in_held(whole["params"]), whole.get("ema")
        like = self.shapes(params, whole["stages"], whole["key"])
        if (average is None) != (self._options.ema_decay is None):
            raise ValueError(
                "the saved state and this step differ in whether they average the weights by ema_decay: give whole the "
                "'ema' None, or to begin the average anew its own 'params'"
            )
        if average is not None:
            shapes_of = lambda tree: (jax.tree.structure(tree), [*map(jnp.shape, jax.tree.leaves(tree))])
            if shapes_of(average) != shapes_of(params):
                raise ValueError("the saved 'ema' is not a tree like the saved 'params': give what whole returned")
        self.update_for(like.params).state_layout.check_whole(whole["optimizer"])
        trees = {**whole, "params": params}
        leaves = {kind: layout.leaves_of(trees[kind]) for kind, layout in self.layouts(like).items()}
        value_of = lambda kind, leaf: leaf.of_whole(leaves[kind][leaf.part.leaf])
        return self.placed_by(value_of, like, scale=whole["scale"], step=whole["step"], key=whole["key"])

    def placed_by(
        self, value_of: Callable[[str, Leaf], Value], like: TrainState, *, scale: Value, step: int, key: Key
    ) -> TrainState:
        """Place a state leaf by leaf, so that the host holds one array of it at a time.

        Args:
            value_of: returns the value of a leaf of a kind in `layouts`, as for `shard_leaves`.
            like: a state of this step, or its shapes.
            scale, step, key: what the new state has of them, on the host.
        """
        placed = {
            kind: packing.shard_leaves(functools.partial(value_of, kind), layout, self.model.mesh)
            for kind, layout in self.layouts(like).items()
        }
        params = placed["params"]
        if not isinstance(like.params, Sharded):
            params = jax.tree.unflatten(params.layout.treedef, params.arrays)
        others = {"stages": placed.get("stages"), "ema": placed.get("ema")}
        return self._state(params, placed["optimizer"], **others, scale=scale, step=step, key=key)

    def whole(self, state: TrainState) -> dict[str, Tree]:
        """Return whole copies of everything in a state, each in its owner's form; None for what is not in it."""
        model = self.model
        params = model.runs.unshard(state.params)
        return {
            "params": params,
            "optimizer": unshard_tree(state.optimizer),
            "stages": None if state.stages is None else model.runs.unshard(state.stages),
            "scale": jax.tree.map(copied, state.scale),
            "step": int(state.step),
            "key": None if state.key is None else copied(state.key),
            "ema": None if state.ema is None else _with_trained(params, unshard_tree(state.ema)),
        }

    def layouts(self, state: TrainState) -> dict[str, PackedLayout]:
        """Return where each leaf of `whole` is in the arrays of a state: of its "params", "optimizer", "stages", "ema".

        No array has the leaves of "ema" that are frozen.
        """
        trees = {"optimizer": state.optimizer, "stages": state.stages, "ema": state.ema}
        of_trees = {kind: tree.layout for kind, tree in trees.items() if tree is not None}
        return {"params": self.model.layout(state.params)} | of_trees

    def of_one_update(self, state: TrainState, batch: Batch) -> StepArgs:
        """Return the arguments of one update of a call as a user gives them, with the shapes of its batch if K > 1."""
        dims, key = given_dims(self._options.device_iterations), state.key if self.model.random else None
        shape_of = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[dims:], leaf.dtype)
        return StepArgs(state.params, jax.tree.map(shape_of, batch) if dims else batch, state.stages, key)

    def specs(self, state: TrainState) -> TrainState:
        """Return the PartitionSpec of every array of a state."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings(state))

    def shardings(self, state: TrainState) -> TrainState:
        """Return where every array of a state is: how it is divided over the mesh, and in which memory."""
        mesh = self.model.mesh
        on_all = NamedSharding(mesh, WHOLE)
        of = lambda tree: shardings_of(tree.layout, mesh) if isinstance(tree, Sharded) else on_all
        is_packed = lambda node: isinstance(node, Sharded)
        return jax.tree.map(of, state, is_leaf=is_packed)

    def _in_held(self, params: Params) -> Params:
        """Return whole weights, or their shapes, in the dtypes in which the step holds them."""
        if self._options.precision == "32.32":
            return params
        layout = self.model.layout(self.model.runs.shard_shapes(jax.tree.map(_shape_of, params)))
        return held_in(params, self.held, layout.frozen)

    def _state(
        self, params: Params, optimizer: Sharded, stages: Tree, *, scale: Value, step: int, key: Key, ema: Value
    ) -> TrainState:
        """Return the state made of what is placed, and of everything else, still on the host."""
        return TrainState(
            params=params,
            optimizer=optimizer,
            stages=stages,
            scale=jax.tree.map(self._place, scale),
            step=self._place(np.int32(step)),
            key=None if key is None else self._place(key),
            ema=ema,
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

    def _place(self, value: Tree) -> jax.Array:
        return put_copy(value, NamedSharding(self.model.mesh, WHOLE))


def with_average(blocks: Blocks, params: Params, averages: Sharded) -> Params:
    """Return the weights with the trained ones replaced by their averages, in the weights' dtypes.

    Call it inside the program. Under `shard_optimizer` it communicates one all_gather over "replica" per bucket.
    """
    arrays = []
    for k, (average, own) in enumerate(zip(averages.arrays, blocks.chunks_of(params), strict=True)):
        (average,) = fetched([average]) if blocks.memory else [average]
        array, mask = average[0, 0].astype(own.dtype), blocks.leaf_mask(k)
        # a slot may hold frozen weights of this IPU
        arrays.append(array if mask is None else jnp.where(mask, array, own))
    return from_blocks(params, gather(blocks, arrays))


def copied(value: Value) -> Value:
    """Copy numbers or keys that all devices hold to a new array on the default device."""
    return with_keys(jnp.array(np.asarray(without_keys(value))), value)


def _with_trained(params: Params, averages: Params) -> Params:
    """Return whole weights with those replaced that have an average."""
    is_none = lambda node: node is None
    return jax.tree.map(lambda own, average: own if average is None else average, params, averages, is_leaf=is_none)
