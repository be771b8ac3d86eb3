"""Make a training step: accumulate gradients, reduce them over replicas and update the weights, in one program.

step = make_train_step(pipeline, optax.adamw(1e-3), TrainOptions(device_iterations=10, max_gradient_norm=1.0))
state = step.init(params)
for batch in batches:                     # leaves (10, M, micro-batch, ...)
    state, outputs = step(state, batch)   # the old state's buffers are reused for the new one (donate=False keeps it)

gradients of M micro-batches -> sum over replicas -> unscale, clip -> optax -> round -> weights
                                (or a part each)                              (gathered)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ipu_jax._keys import is_key, is_one_key
from ipu_jax.devices import REPLICA_AXIS, InFlight
from ipu_jax.optimizer.blocks import blocks_of_layout, blocks_of_tree
from ipu_jax.optimizer.update import ShardedUpdate, copied
from ipu_jax.options import DynamicScale, TrainOptions
from ipu_jax.pipeline import Pipeline
from ipu_jax.training._loss_scale import initial_scale
from ipu_jax.training._model import model_for
from ipu_jax.training._precision import cast_floats
from ipu_jax.training._update_program import Iteration, StepOutputs, TrainState
from ipu_jax.training.replicas import Replicas, over_replicas
from ipu_jax.weights import packing
from ipu_jax.weights.arguments import check_alive
from ipu_jax.weights.packed_layout import WHOLE
from ipu_jax.weights.packing import Sharded


def make_train_step(
    model: Pipeline | Replicas | Callable[..., Any],
    optimizer: optax.GradientTransformation,
    options: TrainOptions | None = None,
) -> "TrainStep":
    """Make a training step of a model with any optax optimizer.

    Args:
        model: a `Pipeline`, `Replicas`, or a loss function as `Replicas` takes it.
        optimizer: sees the logical weights, leaf by leaf, wherever they are: `{group: pytree}` for a pipeline, with
            `optax.MaskedNode()` for frozen leaves.
        options: how the step runs; `TrainOptions()` if None.

    Raises:
        ValueError: the options contradict the model's, or an argument is of the wrong type.

    >>> loss_fn = lambda w, rows: jnp.mean((rows @ w) ** 2)
    >>> step = make_train_step(loss_fn, optax.sgd(0.1), TrainOptions(replication_factor=2, device_iterations=3))
    >>> state, outputs = step(step.init(jnp.ones(3)), jnp.ones((3, 2, 1, 4, 3)))
    >>> round(float(outputs.loss), 4), int(state.step)
    (0.2304, 3)
    """
    return TrainStep(model, optimizer, TrainOptions() if options is None else options)


class TrainStep:
    """Update a model's weights: `state = step.init(params)`, then `state, outputs = step(state, batch)` repeatedly.

    `make_train_step` makes it.

    Attributes:
        model: the `Pipeline` or `Replicas` that runs. `step.model.loss(state.params, batch)` evaluates it.
        options: as they were given.
    """

    def __init__(self, model: Any, optimizer: optax.GradientTransformation, options: TrainOptions):
        if not isinstance(optimizer, optax.GradientTransformation):
            raise ValueError(f"optimizer={optimizer!r} is no optax.GradientTransformation: give optax.sgd(...) or such")
        if not isinstance(options, TrainOptions):
            raise ValueError(f"options={options!r} are no TrainOptions: give TrainOptions(...), or leave them out")
        self.options, self.model = options, model_for(model, options)
        self._is_pipeline = isinstance(self.model, Pipeline)
        self.random = (
            any(stage.random for stage in self.model.stages) if isinstance(self.model, Pipeline) else self.model.random
        )
        clip = options.max_gradient_norm
        self._optimizer = optimizer if clip is None else optax.chain(_clip(clip), optimizer)
        self._held = jnp.dtype(options.half if options.precision == "16.16" else jnp.float32)
        self._window = InFlight()
        self._updates: dict[Any, ShardedUpdate] = {}  # by the layout of the weights
        self._program = jax.jit(self._run, donate_argnums=(0,) if options.donate else ())

    # state

    def init(self, params: Any, *, stages: Any = None, key: Any = None) -> TrainState:
        """Place whole weights, and the optimizer's first state for them, on the IPUs.

        Args:
            params: `{group: pytree}` for a pipeline, any pytree of floating arrays for a function. They are copied.
            stages: `{group: pytree}` if a pipeline's stages hold state, else None.
            key: a typed key if the model or the rounding is random, else None.

        Raises:
            ValueError: the weights don't fit the model, a key or the stages' state is missing or superfluous, or the
                optimizer needs in one piece what is in parts. Nothing has been compiled by then.
        """
        if isinstance(params, Sharded):
            raise ValueError("params are placed already: give whole weights, such as step.whole(state)['params']")
        self._check_key(key)
        return self._placed(params, stages, key, None)

    def restore(self, whole: dict[str, Any]) -> TrainState:
        """Return the state to continue with from what `whole` returned.

        It may be from this step, or from a step for other IPUs, replicas or stage placements.

        Args:
            whole: as `whole` returned it, with jax's or numpy's arrays.

        Raises:
            ValueError: as in `init`, or the optimizer's state is another optimizer's.
        """
        missing = {"params", "optimizer", "stages", "scale", "step", "key"} - set(whole)
        if missing:
            raise ValueError(f"the saved state has no {sorted(missing)}: give what step.whole(state) gave")
        self._check_key(whole["key"])
        state = self._placed(whole["params"], whole["stages"], whole["key"], whole["optimizer"])
        if (whole["scale"] is None) != (state.scale is None):
            raise ValueError("the saved state and this step differ in whether they scale the loss by a DynamicScale")
        scale = jax.tree.map(lambda a: self._place(a), whole["scale"])
        return dataclasses.replace(state, scale=scale, step=self._place(np.int32(whole["step"])))

    def whole(self, state: TrainState) -> dict[str, Any]:
        """Return the state to save or compare: `{"params", "optimizer", "stages", "scale", "step", "key"}`.

        Every value is whole, in its owner's form: weights and the stages' state by group, the optimizer's state as
        optax made it. What the step doesn't have is None. All are copies, which later calls don't change. `restore`
        takes the result.

        Raises:
            ValueError: the state is not of this step, or was given to a call before.
        """
        update = self._checked_update(state)
        return {
            "params": self.model.unshard(state.params),
            "optimizer": update.whole(state.optimizer),
            "stages": self.model.unshard(state.stages)
            if isinstance(self.model, Pipeline) and state.stages is not None
            else None,
            "scale": jax.tree.map(copied, state.scale),
            "step": int(state.step),
            "key": None if state.key is None else copied(state.key),
        }

    def _placed(self, params: Any, stages: Any, key: Any, optimizer_state: Any) -> TrainState:
        """Return the state that starts with these weights; `optimizer_state` is whole, or None for the first one."""
        if self.options.precision != "32.32":
            params = cast_floats(params, self._held)
        of_stages = self._placed_stages(stages)
        if isinstance(self.model, Pipeline):
            placed = self.model.shard(params)
            whole = [
                value
                for name in sorted(params)
                for leaf, value in zip(placed.layout.group(name).leaves, jax.tree.leaves(params[name]), strict=True)
                if not leaf.frozen
            ]
        else:
            self.model.check_params(params)
            whole = jax.tree.leaves(params)
            placed = jax.tree.map(lambda leaf: self._place(leaf), params)
        update = self._update_for(placed)
        if optimizer_state is None:
            state = update.init(update.blocks.logical_tree([jnp.asarray(value) for value in whole]))
        else:
            state = update.restore(optimizer_state)
        optimizer = dataclasses.replace(
            state,
            per_block=[
                [self._place(array, update.blocks.spec(k)) for array in of_block]
                for k, of_block in enumerate(state.per_block)
            ],
            replicated=[self._place(array) for array in state.replicated],
        )
        return TrainState(
            params=placed,
            optimizer=optimizer,
            stages=of_stages,
            scale=jax.tree.map(lambda a: self._place(a), initial_scale(self.options)),
            step=self._place(np.int32(0)),
            key=None if key is None else self._place(key),
        )

    def _placed_stages(self, stages: Any) -> Sharded | None:
        groups = sorted(stage.state for stage in self.model.stages if stage.state) if self._is_pipeline else []
        if stages is None and groups:
            raise ValueError(f"stages is missing: pass stages={{...}} with the state of {', '.join(map(repr, groups))}")
        if stages is not None and not groups:
            raise ValueError("stages were given, but the model holds no state: leave them out")
        return None if stages is None else self.model.shard_state(stages)

    def _update_for(self, params: Any) -> ShardedUpdate:
        """Return the optimizer's update for weights laid out as these are; it is traced once per layout."""
        is_sharded = isinstance(params, Sharded)
        leaves, treedef = jax.tree.flatten(params)
        where = params.layout if is_sharded else (treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves))
        if where not in self._updates:
            replicas = self.model.replicas if self.options.shard_optimizer else 1
            blocks = (
                blocks_of_layout(params.layout, replicas=replicas)
                if is_sharded
                else blocks_of_tree(params, replicas=replicas)
            )
            self._updates[where] = ShardedUpdate(self._optimizer, blocks)
        return self._updates[where]

    def _checked_update(self, state: Any) -> ShardedUpdate:
        """Return a state's update; raise `ValueError` if the state is another step's or an earlier call used it up."""
        if not isinstance(state, TrainState) or isinstance(state.params, Sharded) != self._is_pipeline:
            raise ValueError("state is not of this step: make it with step.init(params)")
        check_alive(
            "state", state, "go on with the state that it returned, or keep states with TrainOptions(donate=False)"
        )
        if isinstance(state.params, Sharded) and self.model.apply_frozen(state.params) is not state.params:
            raise ValueError(
                "state is of a step with other frozen weights, and the optimizer's state with it: begin anew with its "
                "weights, step.init(other.whole(state)['params'], ...)"
            )
        if self.options.precision != "32.32":
            for path, leaf in jax.tree.leaves_with_path(state.params):
                if leaf.dtype in (jnp.float32, jnp.bfloat16, jnp.float16) and leaf.dtype != self._held:
                    raise ValueError(
                        f"state.params{jax.tree_util.keystr(path)} is {leaf.dtype}, but precision="
                        f"{self.options.precision!r} holds {self._held}: begin anew with its weights, "
                        "step.init(other.whole(state)['params'], ...)"
                    )
        update = self._update_for(state.params)
        update.check(state.optimizer)
        if (state.scale is None) == isinstance(self.options.loss_scale, DynamicScale):
            raise ValueError("the state and this step differ in whether they scale the loss by a DynamicScale")
        self._check_key(state.key)
        return update

    def _place(self, value: Any, spec: PartitionSpec = WHOLE) -> jax.Array:
        if is_key(value):
            return jax.random.wrap_key_data(self._place(jax.random.key_data(value)), impl=jax.random.key_impl(value))
        whole = np.asarray(value)  # each device gets a copy: the step's buffers are its own, and may be donated
        sharding = NamedSharding(self.model.mesh, spec)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: np.array(whole[index]))

    def _check_key(self, key: Any) -> None:
        needs = "the model is random" if self.random else "stochastic_rounding=True draws numbers"
        if (key is None) != (not self.random and not self.options.stochastic_rounding):
            if key is None:
                raise ValueError(f"key is missing, and {needs}: pass init(..., key=jax.random.key(seed))")
            raise ValueError("a key was given, but neither the model nor the rounding is random: leave it out")
        if key is not None and not is_one_key(key):
            raise ValueError(f"key={key!r} is not one typed key: make it with jax.random.key(seed)")

    # the call

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, StepOutputs]:
        """Make `device_iterations` weight updates.

        Communicates what the model communicates, and per update one psum of all gradients over the replicas; or, with
        `shard_optimizer`, one psum_scatter of gradients and one all_gather of weights per bucket.

        Args:
            state: from `init` or the previous call. Its buffers are reused, and it can't be used afterwards, unless
                the options say `donate=False`.
            batch: leaves (device_iterations, replicas, M, micro-batch, ...), without those of the first two dims that
                are 1.

        Returns:
            The new state, and what `options.outputs` asks for. No more than a few calls are ever in flight.

        Raises:
            ValueError: the batch does not fit, or the state is not of this step or was given to an earlier call.
                Nothing has been compiled by then.
        """
        self._check_batch(state, batch)
        state, outputs = self._program(state, batch)
        self._window.admit(outputs.loss)
        return state, outputs

    def lower(self, state: TrainState, batch: Any) -> Any:
        """Return the program of a call, lowered but not run. Compile it to see its memory and its HLO."""
        self._check_batch(state, batch)
        return self._program.lower(state, batch)

    def _check_batch(self, state: TrainState, batch: Any) -> None:
        self._checked_update(state)
        check_alive("batch", batch)
        count = self.options.device_iterations
        if count > 1:
            for path, leaf in jax.tree.leaves_with_path(batch):
                if getattr(leaf, "shape", ())[:1] != (count,):
                    raise ValueError(
                        f"batch{jax.tree_util.keystr(path)} has shape {tuple(getattr(leaf, 'shape', ()))}: "
                        f"its first dim must be device_iterations={count}"
                    )
            batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)
        key = state.key if self.random else None
        if isinstance(self.model, Pipeline):
            self.model.check(state.params, batch, state.stages, key)
        else:
            self.model.check(state.params, batch, key)

    def _run(self, state: TrainState, batch: Any) -> tuple[TrainState, StepOutputs]:
        several, alone = self.options.device_iterations > 1, self.model.replicas == 1
        if alone:  # the mapped program has a replica axis even for one replica
            batch = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, int(several)), batch)
        of_batch = PartitionSpec(*[None] * several, REPLICA_AXIS)
        stacked = several and self.options.outputs != "sum" and self.options.every < self.options.device_iterations
        of_outputs = StepOutputs(WHOLE, PartitionSpec(*[None] * stacked, REPLICA_AXIS), WHOLE)
        of_state = self._specs(state)
        iteration = Iteration(self.model, self.options, self._update_for(state.params), random=self.random)
        program = lambda state, batch: iteration.run(state, batch, stacked=stacked)  # noqa: E731
        if isinstance(self.model, Pipeline):
            mapped: Any = jax.shard_map(
                program,
                mesh=self.model.mesh,
                in_specs=(of_state, of_batch),
                out_specs=(of_state, of_outputs),
                check_vma=False,
            )
        else:
            mapped = over_replicas(
                program, self.model.devices, in_specs=(of_state, of_batch), out_specs=(of_state, of_outputs)
            )
        state, outputs = mapped(state, batch)
        if alone:
            aux = jax.tree.map(lambda leaf: jnp.squeeze(leaf, int(stacked)), outputs.aux)
            outputs = dataclasses.replace(outputs, aux=aux)
        return state, outputs

    def _specs(self, state: TrainState) -> TrainState:
        everywhere = lambda tree: jax.tree.map(lambda _: WHOLE, tree)  # noqa: E731
        layout_specs = lambda tree: packing.specs_of(tree.layout) if isinstance(tree, Sharded) else everywhere(tree)  # noqa: E731
        blocks = self._update_for(state.params).blocks
        per_block = [[blocks.spec(k) for _ in of_block] for k, of_block in enumerate(state.optimizer.per_block)]
        return TrainState(
            params=layout_specs(state.params),
            optimizer=dataclasses.replace(
                state.optimizer, per_block=per_block, replicated=everywhere(state.optimizer.replicated)
            ),
            stages=layout_specs(state.stages),
            scale=everywhere(state.scale),
            step=WHOLE,
            key=everywhere(state.key),
        )


def _clip(largest: float) -> optax.GradientTransformation:
    """Scale gradients down to a global norm of `largest`. Unlike optax's own, this squares half types in float32."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(updates)]
        norm = jnp.sqrt(sum(squares, jnp.float32(0)))
        factor = jnp.where(norm > largest, largest / norm, 1)
        return jax.tree.map(lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
