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

from ipu_jax.base.keys import is_key
from ipu_jax.core.instances import on_host
from ipu_jax.core.optimizer.blocks import Blocks, blocks_of_layout, blocks_of_tree
from ipu_jax.core.optimizer.state import OptimizerState, copied
from ipu_jax.core.optimizer.update import ShardedUpdate
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.weights import packing
from ipu_jax.core.weights.packed_layout import WHOLE
from ipu_jax.core.weights.packing import Sharded
from ipu_jax.core.weights.place import Place, places_of_layout
from ipu_jax.core.weights.whole_tree import joined
from ipu_jax.training.update._average import divided_average, whole_average
from ipu_jax.training.update._loss_scale import initial_scale
from ipu_jax.training.update._precision import cast_floats
from ipu_jax.training.update.replicas import Replicas
from ipu_jax.training.update.state import TrainState


class Placement:
    """Places the states of one training step, and returns them whole.

    Args:
        model: the model with all its replicas.
        optimizer: the optimizer, including the step's clipping.
        options: the step's options.

    Attributes:
        held: the dtype in which float weights are held, unless the precision is "32.32".
    """

    def __init__(self, model: Pipeline | Replicas, optimizer: optax.GradientTransformation, options: TrainOptions):
        self._model, self._optimizer, self._options = model, optimizer, options
        self.held = jnp.dtype(options.half if options.precision == "16.16" else jnp.float32)
        self._updates: dict[Any, ShardedUpdate] = {}  # by the layout of the weights

    def update_for(self, params: Any) -> ShardedUpdate:
        """Return the optimizer's update for weights laid out like these; it is traced once per layout.

        Raises:
            ValueError: the optimizer needs a divided leaf in one piece.
        """
        is_sharded = isinstance(params, Sharded)
        leaves, treedef = jax.tree.flatten(params)
        where = params.layout if is_sharded else (treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves))
        if where not in self._updates:
            replicas = self._model.replicas if self._options.shard_optimizer else 1
            blocks = (
                blocks_of_layout(params.layout, replicas=replicas)
                if is_sharded
                else blocks_of_tree(params, replicas=replicas)
            )
            self._updates[where] = ShardedUpdate(self._optimizer, blocks)
        return self._updates[where]

    def first(self, params: Any, stages: Any, key: Any) -> TrainState:
        """Place whole weights, the first state of the optimizer, and the weights as their own average."""
        of_stages = self._placed_stages(stages)
        _, placed, trained = self._placed_params(params)
        update = self.update_for(placed)
        optimizer = update.init(update.blocks.logical_tree([jnp.asarray(value) for value in trained]))
        ema = None if self._options.ema_decay is None else divided_average(update.blocks, trained)
        scale = initial_scale(self._options)
        return self._state(placed, optimizer, of_stages, scale=scale, step=0, key=key, ema=ema)

    def shapes(self, params: Any, stages: Any, key: Any) -> TrainState:
        """Return what `first` returns, with the shape, dtype and sharding of each array in place of the array."""
        model: Any = self._model
        of_stages = model.shard_state_shapes(stages) if self._check_stages(stages) else None
        if self._options.precision != "32.32":
            shape_of = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf  # noqa: E731
            params = cast_floats(jax.tree.map(shape_of, params), self.held)
        if not isinstance(model, Pipeline):
            model.check_params(params)
        placed = model.shard_shapes(params)
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
        on_mesh = lambda leaf, spec: jax.ShapeDtypeStruct(  # noqa: E731
            leaf.shape, leaf.dtype, sharding=NamedSharding(model.mesh, spec)
        )
        return jax.tree.map(on_mesh, state, self.specs(state))

    def placed(self, whole: dict[str, Any]) -> TrainState:
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
            shapes_of = lambda tree: jax.tree.map(jnp.shape, tree)  # noqa: E731
            if shapes_of(average) != shapes_of(params):
                raise ValueError("the saved 'ema' is not a tree like the saved 'params': give what whole returned")
            ema = divided_average(update.blocks, self._trained(placed, average))
        optimizer, scale = update.state_layout.restore(whole["optimizer"]), whole["scale"]
        return self._state(placed, optimizer, of_stages, scale=scale, step=whole["step"], key=whole["key"], ema=ema)

    def whole(self, state: TrainState) -> dict[str, Any]:
        """Return whole copies of everything in a state, each in its owner's form; None for what is not in it."""
        update, model = self.update_for(state.params), self._model
        params = model.unshard(state.params)
        stages = state.stages if isinstance(model, Pipeline) else None
        return {
            "params": params,
            "optimizer": update.state_layout.whole(state.optimizer),
            "stages": None if stages is None else model.unshard(stages),
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
        if isinstance(state.params, Sharded):
            params = places_of_layout(state.params.layout, "params")
        else:
            params = [
                Place(leaf.path, leaf.shape, leaf.dtype, f"params.{i}") for i, leaf in enumerate(update.blocks.leaves)
            ]
        blocks, stages = update.blocks, state.stages
        averages = range(0 if state.ema is None else len(blocks.leaves))
        return {
            "params": params,
            "optimizer": update.state_layout.places("optimizer"),
            "stages": [] if stages is None else places_of_layout(stages.layout, "stages"),
            "ema": [blocks.place(leaf, f"ema.{blocks.block_of(leaf)}", jnp.float32) for leaf in averages],
        }

    def assembled(self, state: TrainState, leaves: dict[str, list[Any]]) -> dict[str, Any]:
        """Return the trees that `whole` returns, from whole leaves in the order of the paths in `places(state)`."""
        update = self.update_for(state.params)
        trees: dict[str, Any] = {"optimizer": update.state_layout.assembled(leaves["optimizer"])}
        for name, like in (("params", state.params), ("stages", state.stages)):
            if isinstance(like, Sharded):
                trees[name] = like.layout.assembled(leaves[name])
            else:
                trees[name] = None if like is None else jax.tree.unflatten(jax.tree.structure(like), leaves[name])
        ema = None if state.ema is None else self._with_trained(state, trees["params"], leaves["ema"])
        return {**trees, "ema": ema}

    def specs(self, state: TrainState) -> TrainState:
        """Return the PartitionSpec of every array of a state."""
        everywhere = lambda tree: jax.tree.map(lambda _: WHOLE, tree)  # noqa: E731
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

    def _placed_params(self, params: Any) -> tuple[Any, Any, list[Any]]:
        """Return the whole weights in their held dtypes, the same weights on the IPUs, and the whole trained leaves."""
        if self._options.precision != "32.32":
            params = cast_floats(params, self.held)
        if isinstance(self._model, Pipeline):
            placed = self._model.shard(params)
        else:
            self._model.check_params(params)
            placed = jax.tree.map(lambda leaf: self._place(leaf), params)
        return params, placed, self._trained(placed, params)

    def _trained(self, placed: Any, whole: Any) -> list[Any]:
        """Return the trained leaves of a whole tree with the structure of the weights."""
        return placed.layout.trained_leaves(whole) if isinstance(placed, Sharded) else jax.tree.leaves(whole)

    def _whole_average(self, blocks: Blocks, state: TrainState, params: Any) -> Any:
        """Return the weights with the trained ones replaced by their average."""
        averages = joined(blocks.logical_tree(whole_average(blocks, state.ema or [])))
        return self._with_trained(state, params, jax.tree.leaves(averages))

    def _with_trained(self, state: TrainState, params: Any, trained: Sequence[Any]) -> Any:
        """Return whole weights with the trained ones replaced by `trained`."""
        following = iter(trained)
        leaves, treedef = jax.tree.flatten(params)
        both = zip(leaves, _frozen(state.params), strict=True)
        return jax.tree.unflatten(treedef, [w if is_frozen else next(following) for w, is_frozen in both])

    def _state(
        self, params: Any, optimizer: OptimizerState, stages: Any, *, scale: Any, step: int, key: Any, ema: Any
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

    def _placed_stages(self, stages: Any) -> Sharded | None:
        model: Any = self._model
        return model.shard_state(stages) if self._check_stages(stages) else None

    def _check_stages(self, stages: Any) -> bool:
        """Return whether the model's stages hold state; raise `ValueError` unless it is given if, and only if, so."""
        model = self._model
        groups = sorted(stage.state for stage in model.stages if stage.state) if isinstance(model, Pipeline) else []
        if stages is None and groups:
            raise ValueError(f"stages is missing: pass stages={{...}} with the state of {', '.join(map(repr, groups))}")
        if stages is not None and not groups:
            raise ValueError("stages were given, but the model holds no state: leave them out")
        return bool(groups)

    def _place(self, value: Any, spec: PartitionSpec = WHOLE) -> jax.Array:
        if is_key(value):
            return jax.random.wrap_key_data(self._place(jax.random.key_data(value)), impl=jax.random.key_impl(value))
        whole = on_host(value)  # each device gets a copy, so that the step can donate its buffers
        sharding = NamedSharding(self._model.mesh, spec)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: np.array(whole[index]))


def specs_of(tree: Any) -> Any:
    """Return the PartitionSpec of each array of placed weights or state. A plain tree is whole on every IPU."""
    return packing.specs_of(tree.layout) if isinstance(tree, Sharded) else jax.tree.map(lambda _: WHOLE, tree)


def _frozen(placed: Any) -> list[bool]:
    """Return, per leaf of the whole weights, whether it is frozen."""
    if not isinstance(placed, Sharded):
        return [False] * len(jax.tree.leaves(placed))
    return placed.layout.frozen_whole_leaves()
