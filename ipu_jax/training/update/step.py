"""Make a training step: accumulate gradients, reduce them over replicas and update the weights, in one program.

step = make_train_step(pipeline, optax.adamw(1e-3), TrainOptions(device_iterations=10, max_gradient_norm=1.0))
state = step.init(params)
for batch in batches:                     # leaves (10, M, micro-batch, ...)
    state, outputs = step(state, batch)   # the old state's buffers are reused for the new one (donate=False keeps it)
loss = step.loss(state, batch)            # as training computes it, without an update

gradients of M micro-batches -> sum over replicas -> unscale, clip -> optax -> round -> weights
                                (or a part each)                              (gathered)
"""

import dataclasses
import functools
from typing import Any, NoReturn

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax.base import facts, status
from ipu_jax.base.annotations import Batch, Function, Key, Params, Tree
from ipu_jax.base.decorators import public_on_mesh
from ipu_jax.base.showing import counted
from ipu_jax.core.layout.leaf import WHOLE
from ipu_jax.core.layout.packing import Sharded, batch_shapes, check_alive, unshard_tree, whole_shapes
from ipu_jax.core.mesh.devices import REPLICA_AXIS, check_there
from ipu_jax.core.mesh.host_memory import check_has_host_memory
from ipu_jax.core.mesh.in_flight import InFlight
from ipu_jax.core.mesh.instances import put, shapes_by, taken
from ipu_jax.core.optimizer.pipeline_optimizer import checked_optimizer
from ipu_jax.core.options import DynamicScale, TrainOptions
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.pipeline.arguments import count_samples
from ipu_jax.core.pipeline.init_function import InitFunction, is_init_function
from ipu_jax.core.proof.exact import exact_options
from ipu_jax.core.step_args import StepArgs, given_dims, with_dims, without_dims
from ipu_jax.training.update._alike import Alike
from ipu_jax.training.update._arguments import Arguments
from ipu_jax.training.update._decision import BatchesInFlight
from ipu_jax.training.update._replay import Replay
from ipu_jax.training.update._state_placer import StatePlacer, with_average
from ipu_jax.training.update._update_program import Iteration, clip
from ipu_jax.training.update.models import loss_of_batch, model_for, specs_of
from ipu_jax.training.update.nonfinite import NonFinite
from ipu_jax.training.update.replicas import Replicas
from ipu_jax.training.update.state import StepOutputs, TrainState


@public_on_mesh
def make_train_step(
    model: Pipeline | Replicas | Function,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    options: TrainOptions | None = None,
) -> "TrainStep":
    """Make a training step for a model with any optax optimizer.

    Args:
        model: a `Pipeline`, `Replicas`, or a loss function as `Replicas` takes it.
        optimizer: sees the logical weights, leaf by leaf, wherever they are: `{group: pytree}` for a pipeline, with
            `optax.MaskedNode()` for frozen leaves. `optax.MultiSteps(...)` works as it is. If its update takes
            `value=`, it gets the loss.
        options: how the step runs; `TrainOptions()` if None.

    Raises:
        ValueError: the options contradict the model's options, an argument has the wrong type, or the optimizer's
            update calls the loss function itself (`optax.lbfgs` with its line search) or reads the gradients of each
            example (`optax.contrib.dpsgd`).

    >>> import jax.numpy as jnp
    >>> loss_fn = lambda w, rows: jnp.mean((rows @ w) ** 2)
    >>> step = make_train_step(loss_fn, optax.sgd(0.1), TrainOptions(replication_factor=2, device_iterations=3))
    >>> state, outputs = step(step.init(jnp.ones(3)), jnp.ones((3, 2, 1, 4, 3)))
    >>> round(float(outputs.loss), 4), int(state.step)
    (0.2304, 3)
    """
    return TrainStep(model, optimizer, TrainOptions() if options is None else options)


@public_on_mesh
class TrainStep:
    """Update a model's weights: `state = step.init(params)`, then `state, outputs = step(state, batch)` repeatedly.

    Made by `make_train_step`.

    Attributes:
        model: the `Pipeline` or `Replicas` that runs, on all replicas and in the precision of the options.
        options: the options as given.
        random: whether the model takes a key.
    """

    def __init__(self, model: Any, optimizer: Any, options: TrainOptions):
        self._given = model, optimizer
        optimizer = checked_optimizer(optimizer)
        if not isinstance(options, TrainOptions):
            raise ValueError(f"options={options!r} is not a TrainOptions: give TrainOptions(...), or leave it out")
        self.options, self._model = options, model_for(model, options)
        self.model: Any = self._model.runs
        self.random = self._model.random
        if options.max_gradient_norm is not None:
            optimizer = optax.chain(clip(options.max_gradient_norm), optimizer)
        if options.offload:
            check_has_host_memory(self.mesh)
        self._placer = StatePlacer(self._model, optimizer, options)
        self._arguments = Arguments(self._model, options, self._placer)
        self._alike = Alike(self.mesh, self._placer, self._settings)
        self._window = InFlight()
        compiler_options = exact_options(optimized=True) if options.exact else None
        donated = (1,) if options.donate else ()
        self._program = jax.jit(self._run, static_argnums=0, donate_argnums=donated, compiler_options=compiler_options)
        self._averaged = jax.jit(self._run_average)
        on_all = NamedSharding(self.mesh, PartitionSpec())
        self._placed_ends = functools.lru_cache(64)(lambda made: put(_ends(made), on_all))
        self._replay = Replay(self._model, options)
        self._batches = None if options.on_nonfinite is None else BatchesInFlight(options, self._replay.find)

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of replicas (and IPUs) that a `Feed` sends batches to."""
        return self.model.mesh

    @property
    def gradient_accumulation(self) -> int:
        """Return M, the number of micro-batches of an update on each replica."""
        return self.model.options.gradient_accumulation

    @property
    def placement(self) -> StatePlacer:
        """Return the object that places this step's states, for checkpoints."""
        return self._placer

    def offloading(self, offload: tuple[str, ...]) -> "TrainStep":
        """Return the step with another `TrainOptions.offload`."""
        return TrainStep(*self._given, dataclasses.replace(self.options, offload=offload))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TrainStep holds programs, and can be neither copied nor pickled: make another one")

    def __repr__(self) -> str:
        default = TrainOptions()
        fields = {field.name: getattr(self.options, field.name) for field in dataclasses.fields(self.options)}
        changed = [f"{name}={value!r}" for name, value in fields.items() if value != getattr(default, name)]
        return f"TrainStep({', '.join([self._model.describe(), *changed])})"

    # state

    @facts.during("placing the state")
    @jax.transfer_guard("allow")  # the caller asks for this transfer
    def init(self, params: Params | Function, *args: Tree, stages: Tree = None, key: Key = None) -> TrainState:
        """Place weights, and the optimizer's first state for them, on the IPUs.

        Args:
            params: a function that makes the weights, as for `Pipeline.init`; or whole weights, `{group: pytree}` for a
                pipeline, any pytree of floating arrays for a function; or placed weights, as `Pipeline.shard` and
                `import_weights` return them. Of a function each IPU computes its own weights, the optimizer's state
                for them and their average: nothing is whole anywhere. Weights are copied. Those of another pipeline
                are made whole first, which communicates as `Pipeline.unshard` does.
            args: what the function takes, such as a key; else nothing.
            stages: `{group: pytree}` if a pipeline's stages hold state, else None.
            key: a typed key if the model or the rounding is random. Otherwise it is not used, and a warning says so.

        Raises:
            ValueError: the weights don't fit the model, a key is missing, the stages' state is missing or superfluous,
                the optimizer needs a divided leaf in one piece, or the IPUs are only described (then use `shapes`).
                Nothing has been compiled by then.

        >>> import jax.numpy as jnp
        >>> step = make_train_step(lambda w, rows: jnp.mean((rows @ w) ** 2), optax.adam(0.1))
        >>> state = step.init(lambda key: jax.random.normal(key, (3,)), jax.random.key(0))
        >>> state.params.shape
        (3,)
        """
        check_there(self.mesh, "init", "shapes(params)")
        key = self._arguments.key_for_state(key)
        if is_init_function(params):
            init = InitFunction.traced(params, args)
            init.warn(self._placer.weights(init.shapes), stacklevel=4)
            if not init.calls_host:
                given = {"arguments": init.args, "constants": init.closed.consts}
                return self._alike.noted(self._placer.born(init, stages, key), given, stages, key)
            params = init.whole()
        elif args:
            raise ValueError(
                f"init got {counted(len(args), 'argument')} after the weights: a function of them takes these, "
                "init(init_fn, key); the key of a random step is init(params, key=...)"
            )
        if isinstance(params, Sharded):
            check_alive("params", params)
            if self._placer.is_placed(params):
                return self._placer.first(params, stages, key)
            params = unshard_tree(params)
        return self._alike.noted(self._placer.first(params, stages, key), params, stages, key)

    def shapes(self, params: Params, *, stages: Tree = None, key: Key = None) -> TrainState:
        """Return what `init` returns, with the shape, dtype and sharding of each array in place of the array.

        `lower` takes it. Nothing is placed or computed, so the IPUs may be only described.

        Args:
            params, stages, key: as for `init`, arrays or their shapes.

        Raises:
            ValueError: as in `init`.

        >>> import jax.numpy as jnp
        >>> step = make_train_step(lambda w, rows: jnp.mean((rows @ w) ** 2), optax.adam(0.1))
        >>> state = step.shapes(jax.ShapeDtypeStruct((3,), "float32"))
        >>> step.lower(state, jax.ShapeDtypeStruct((1, 4, 3), "float32")).compile().memory_analysis() is None
        False
        """
        if isinstance(params, Sharded):
            params = whole_shapes(params.layout)
        return self._placer.shapes(params, stages, self._arguments.key_for_state(key, stacklevel=3))

    @facts.during("placing the state")
    @jax.transfer_guard("allow")  # the caller asks for this transfer
    def restore(self, whole: dict[str, Tree]) -> TrainState:
        """Return the state to continue with from what `whole` returned.

        It may be from this step, or from a step for other IPUs, replicas or stage placements.

        Args:
            whole: as `whole` returned it, with jax or numpy arrays. "ema" can be missing if there is no average.

        Raises:
            ValueError: as in `init`, or the optimizer's state belongs to another optimizer.
        """
        check_there(self.mesh, "restore", "shapes(params)")
        missing = {"params", "optimizer", "stages", "scale", "step", "key"} - set(whole)
        if missing:
            raise ValueError(f"the saved state has no {sorted(missing)}: give what step.whole(state) gave")
        whole = {**whole, "key": self._arguments.key_for_state(whole["key"])}
        if (whole["scale"] is None) == isinstance(self.options.loss_scale, DynamicScale):
            raise ValueError("the saved state and this step differ in whether they scale the loss by a DynamicScale")
        return self._alike.noted(self._placer.placed(whole), *(whole[name] for name in ("params", "stages", "key")))

    @facts.during("gathering the state")
    @jax.transfer_guard("allow")  # the caller asks for this transfer
    def whole(self, state: TrainState) -> dict[str, Tree]:
        """Return the state to save or compare: `{"params", "optimizer", "stages", "scale", "step", "key", "ema"}`.

        Every value is whole, in its owner's form: weights and the stages' state by group, the optimizer's state as
        optax made it, the average like the weights, in float32 at least. Values that the step doesn't have are None.
        All are copies, which later calls don't change. `restore` takes the result.

        Across several instances, all of them must call this, and each gets the complete result. It communicates one
        all-gather per array that is split over instances.

        Raises:
            ValueError: the state does not belong to this step, or an earlier call used it up.
        """
        self._arguments.check_state(state)
        return self._placer.whole(state)

    # the call

    def __call__(
        self, state: TrainState, batch: Batch, *, updates: int | range | None = None
    ) -> tuple[TrainState, StepOutputs]:
        """Make `device_iterations` weight updates, or some of them with the same program.

        Communicates what the model communicates, and per update one psum of all gradients over the replicas; or, with
        `shard_optimizer`, one psum_scatter of gradients and one all_gather of weights per bucket.

        Args:
            state: from `init` or the previous call. Its buffers are reused, and it can't be used afterwards, unless
                the options say `donate=False`.
            batch: leaves (device_iterations, replicas, M, micro-batch, ...), where a first or second dim of 1 is left
                out; or the `FeedBatch` of a `Feed`. Padding rows of an incomplete update are rows like any other here:
                let the model count them as 0, and set `weighted=True` in the options. Across several instances, arrays
                that are not from a `Feed` are the whole batch, the same on each instance.
            updates: the number of updates to make, from the batch's first one on, or a range of them, counted from 0.
                By default the updates of a `FeedBatch` with real examples, and otherwise all. This is an argument of
                the compiled program: another number compiles nothing.

        Returns:
            The new state, and the outputs that `options.outputs` selects. Only a few calls are ever in flight.

        Across several instances, the first call compares what they are about to run, unless
        `popdist.init(check_programs=False)`: one message each, before anything is compiled.

        Raises:
            ValueError: the batch does not fit, the state does not belong to this step, or an earlier call used it up.
                Nothing has been compiled by then.
            InstancesDifferError: in the first call, an instance has another batch, feed, program or first weights than
                the others; the message names it, and both values.
            InstancesMissingError: an instance did not make the first call.
            NonFiniteLossError: under `on_nonfinite`, an update of an earlier call stopped the state. Nothing was
                dispatched, so the state stays usable. Under "skip", a skipped update of an earlier call gives a
                `NonFiniteLossWarning`.
        """
        given = batch
        batch, made = self._arguments.batch_of_call(state, given, updates)
        is_traced = isinstance(state.step, Tracer)
        batches = None if is_traced else self._batches
        if batches is not None:
            batches.settle(state, keep=self._window.limit)
        ends = _ends(made) if is_traced else self._placed_ends(made)
        batch = taken(batch)
        args = (state, batch, ends)
        chosen = self._model.scheduled(lambda: self._placer.of_one_update(state, batch))
        if not is_traced:
            self._alike.check(state, given, batch, made, lambda: self._program.lower(chosen, *args))
        chosen = self._model.guarded(chosen, self._program, args, lambda of: self._lowered(of, state, batch, made))
        self._window.begin((state, batch))
        state, outputs, *before = self._program(chosen, *args)
        k = self.options.device_iterations
        samples = count_samples(batch, 2 + given_dims(k, self.model.replicas)) * len(made) // k
        self._window.admit(outputs.loss, updates=len(made), samples=samples)
        if batches is not None:
            batches.add(before[0], batch, made, outputs.nonfinite)
        if given_dims(self._rows) and len(made) < k:
            outputs = _rows(outputs, made.start // self.options.every, -(-made.stop // self.options.every))
        return state, outputs

    def check(self, state: TrainState) -> None:
        """Wait for all calls, and report what was not finite in them. Call it after the last call of a loop.

        Under `TrainOptions(on_nonfinite=)` a call reports only on earlier calls that have ended, so not on the last
        few. Without the option this does nothing. Across several instances, all of them must call it.

        Args:
            state: the state that the last call returned.

        Raises:
            NonFiniteLossError: as in a call.
        """
        if self._batches is not None:
            self._batches.settle(state, keep=0)

    def check_state(self, state: TrainState) -> None:
        """Check that a state belongs to this step, and that no earlier call has used it up.

        Raises:
            ValueError: it does not, or is used up.
        """
        self._arguments.check_state(state)

    @jax.transfer_guard("allow")  # the caller asks for this transfer
    def find_nonfinite(self, state: TrainState, batch: Batch, *, step: int | None = None) -> NonFinite | None:
        """Name the first value that is not finite in an update, by replica, micro-batch and stage. Nothing is updated.

        Runs forward and backward of each stage again, one after the other, with the update's keys, state and loss
        scale, on the same IPUs. The first call compiles two programs per stage. It checks weights, batch, state of
        stages, outputs, loss and gradients.

        Communicates each stage's weights, and its results, among the IPUs of a replica. Across several instances, all
        of them must call it.

        Args:
            state: the state before the update, such as a stopped state.
            batch: the batch of one update: leaves (replicas, M, micro-batch, ...), without the first dim if it is 1; or
                a `FeedBatch` of one update.
            step: the number of the update, counted from 1, for its random keys. Default: the state's next update.

        Returns:
            The first value that is not finite; None if all are finite.

        Raises:
            ValueError: the batch or the state does not fit.

        >>> import jax.numpy as jnp
        >>> def loss_fn(w, rows):
        ...     return jnp.mean(jnp.log(rows @ w))
        >>> step = make_train_step(loss_fn, optax.sgd(0.1), TrainOptions(gradient_accumulation=3))
        >>> print(step.find_nonfinite(step.init(jnp.ones(2)), jnp.ones((3, 4, 2)).at[1, 2].set(0)))
        update 1, replica 0, micro-batch 1: the loss is -inf
        """
        arrays = self._arguments.batch_of_update(state, batch)
        return self._replay.find(state, arrays, int(state.step) + 1 if step is None else step)

    @jax.transfer_guard("allow")  # the caller asks for this transfer
    def loss(self, state: TrainState, batch: Batch, *, key: Key = None, ema: bool = False) -> Tree:
        """Return the loss of a batch, or `(loss, aux)`, by the stages' `evaluate` functions, without an update.

        It is the loss that training computes: in the step's precision, with the stages' state, and under `weighted`
        divided by the count of all micro-batches and replicas.

        Communicates what `Pipeline.loss` or `Replicas.loss` communicates; with `ema` under `shard_optimizer`, also one
        all_gather of the average per bucket.

        Args:
            state: from `init` or a call. It stays usable.
            batch: as a call takes it, also a `FeedBatch`. The loss is over all its updates.
            key: a typed key, if the model is also random in evaluation.
            ema: whether to evaluate the moving average of the weights, cast to their dtype. Stages' state is not
                averaged.

        Returns:
            The loss, or `(loss, aux)` if the model returns an aux or a count; aux leaves are ([device_iterations,]
            [replicas,] M, ...). Under reduction="sum" and `weighted` it is the sum, averaged over updates.

        Raises:
            ValueError: the batch, the state or the key does not fit, or the options have no `ema_decay`.

        >>> import jax.numpy as jnp
        >>> step = make_train_step(lambda w, mb: jnp.mean((mb - w) ** 2), optax.sgd(0.5), TrainOptions(ema_decay=0.5))
        >>> state, _ = step(step.init(jnp.float32(0)), jnp.ones((1, 4)))
        >>> float(step.loss(state, jnp.ones((1, 4)))), float(step.loss(state, jnp.ones((1, 4)), ema=True))
        (0.0, 0.25)
        """
        batch = self._arguments.batch_of_loss(state, batch)
        params = state.params
        if ema:
            if state.ema is None:
                raise ValueError("ema=True, but no average is kept: make the step with TrainOptions(ema_decay=0.999)")
            params = self._averaged(params, state.ema)
        return loss_of_batch(self._model, self.options, StepArgs(params, batch, state.stages, key))

    def lower(self, state: TrainState, batch: Batch) -> Any:
        """Return the program of a call, lowered but not run. Compile it to see its memory and its HLO.

        Args:
            state: from `init`, a call, or `shapes`.
            batch: as for a call, or with `jax.ShapeDtypeStruct` in place of arrays. Leaves that don't say where they
                are are split over the replicas.

        Raises:
            ValueError: as in a call.
        """
        return self.lowered(state, batch)[1]

    def lowered(self, state: TrainState, batch: Batch) -> tuple[Any, Any]:
        """Return the stages as they run in this call, or None without a pipeline, and the program of `lower`."""
        arrays, made = self._arguments.batch_of_call(state, batch)
        lower = lambda chosen: self._lowered(chosen, state, arrays, made)
        chosen = self._model.scheduled(lambda: self._placer.of_one_update(state, arrays))
        chosen = self._model.guarded(chosen, self._program, (state, arrays), lower, runs=False)
        return chosen, lower(chosen)

    def _lowered(self, chosen: Any, state: TrainState, batch: Batch, made: range) -> Any:
        of_updates = [None] * given_dims(self.options.device_iterations)
        of_replicas = [REPLICA_AXIS] * given_dims(self.model.replicas)
        spec = PartitionSpec(*of_updates, *of_replicas)
        shapes = shapes_by(state, self._placer.shardings(state))
        return self._program.lower(chosen, shapes, batch_shapes(batch, self.mesh, spec), _ends(made))

    def _settings(self) -> dict[str, str]:
        """Return the options of the step, and the schedule of a pipeline, as texts."""
        options = {f"options.{name}": str(value) for name, value in dataclasses.asdict(self.options).items()}
        placed = getattr(self.model, "placement", None)  # of a pipeline
        schedule = str(placed and placed.schedule).splitlines()[0]  # without its table
        return {"model": self._model.describe(), "schedule": schedule, **options}

    @property
    def _rows(self) -> int:
        """Return of how many updates of a call, or sums over updates, there are outputs."""
        return self.options.device_iterations // self.options.every

    def _run(self, chosen: Any, state: TrainState, batch: Batch, updates: Any) -> Tree:
        """Return the new state, the outputs and, under `on_nonfinite`, the number of updates before the call."""
        model = self._model.on(chosen)
        before, replicas = state.step, self.model.replicas
        batch = with_dims(batch, self.options.device_iterations, replicas)
        of_replicas = PartitionSpec(None, REPLICA_AXIS)
        of_outputs = dataclasses.replace(StepOutputs(*[WHOLE] * len(dataclasses.fields(StepOutputs))), aux=of_replicas)
        of_state, update = self._placer.specs(state), self._placer.update_for(state.params)
        in_specs, out_specs = (of_state, of_replicas, WHOLE), (of_state, of_outputs)
        program = Iteration(model, self.options, update).run
        mapped = model.on_ipus(program, in_specs=in_specs, out_specs=out_specs)
        with status.tracing("the training step"):
            state, outputs = mapped(state, batch, updates)
        aux = without_dims(outputs.aux, self._rows, replicas)
        others = without_dims(dataclasses.replace(outputs, aux=None), self._rows)
        outputs = dataclasses.replace(others, aux=aux)
        return (state, outputs) if self.options.on_nonfinite is None else (state, outputs, before)

    def _run_average(self, params: Params, averages: Sharded) -> Params:
        """Return the weights with the trained ones replaced by their averages."""
        blocks, of_params = self._placer.update_for(params).blocks, specs_of(params)
        program = lambda params, averages: with_average(blocks, params, averages)
        in_specs = (of_params, specs_of(averages))
        return self._model.on_ipus(program, in_specs=in_specs, out_specs=of_params)(params, averages)


def _ends(updates: range) -> tuple[np.int32, np.int32]:
    return np.int32(updates.start), np.int32(updates.stop)


@functools.partial(jax.jit, static_argnums=(1, 2))  # an array across several instances can be sliced only in a program
def _rows(outputs: StepOutputs, first: int, stop: int) -> StepOutputs:
    return jax.tree.map(lambda leaf: leaf[first:stop], outputs)
