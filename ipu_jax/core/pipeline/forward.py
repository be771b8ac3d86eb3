"""Run a pipeline's weights forward only: its own outputs, logits, a test loss, one step of decoding.

    pipeline = Pipeline.from_function(loss, params, micro_batch, ipus=4, ...)      trains the weights
    logits = pipeline.forward(model.apply, tokens)                                 reads them, where they are
    decode = pipeline.forward(one_step, token, state=cache)                        and keeps a cache beside them

Each is cut so that a stage holds what it reads (`core/cutting/forward.py`), and runs as `Pipeline.predict` does.
"""

from typing import Any

import jax

from ipu_jax.base import facts
from ipu_jax.base.annotations import Batch, Function, Tree
from ipu_jax.base.decorators import public_on_mesh
from ipu_jax.base.keys import with_keys
from ipu_jax.base.showing import Shown, Table, counted
from ipu_jax.core.cutting.forward import forward_of
from ipu_jax.core.cutting.function import FunctionModel
from ipu_jax.core.cutting.given import shapes
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.pipeline._programs import Programs
from ipu_jax.core.pipeline.arguments import check_predictable
from ipu_jax.core.pipeline.placed_stages import PlacedStages
from ipu_jax.core.stage import Stage
from ipu_jax.core.step_args import StepArgs, given_dims


@public_on_mesh
class Forward(Shown):
    """A function of a pipeline's weights, forward only; `Pipeline.forward` makes it. A call runs micro-batches of it.

    Attributes:
        stages: how it was cut; they hold what the pipeline's stages hold.
        mesh, ipus, replicas: as the pipeline's.
        inputs, outputs: the shapes of one micro-batch, and of what the function returns for it.
        takes_key: whether a call needs a key.
        has_state: whether it has a state of its own, which a call takes and returns.
    """

    def __init__(self, pipeline: Any, fn: Function, inputs: Batch, state: Tree):
        if state is not None and pipeline.replicas > 1:
            raise ValueError(
                f"state= with {pipeline.replicas} replicas: each replica would change its own copy; use a pipeline of "
                "one replica, whose micro-batches change it one after the other"
            )
        placed = None
        if isinstance(state, Forward):
            placed, state = _placed(state, pipeline), state._state
        function = forward_of(pipeline.function, fn, inputs, state, placed)
        self.outputs, self._state = function.outputs, None if state is None else shapes("state", state)
        self._pipeline = pipeline.replace(stages=function)
        self.placement: PlacedStages = self._pipeline.placement
        self._programs = Programs(self.placement)
        self.stages, self.mesh = self._pipeline.stages, self._pipeline.mesh
        self.ipus, self.replicas = self._pipeline.ipus, self._pipeline.replicas
        self.inputs, self.takes_key, self.has_state = function.microbatch, function.key is not None, state is not None

    def __call__(
        self, params: Sharded, inputs: Batch, state: Sharded | None = None, key: jax.Array | None = None
    ) -> Tree:
        """Return the function's outputs for any number of micro-batches.

        Communicates, in each tick, one ppermute of an activation between neighbours. At the end it broadcasts the
        outputs to all IPUs.

        Args:
            params: the weights on the IPUs: from the pipeline's `shard`, a training state's `params`, or a checkpoint.
            inputs: leaves (m, micro-batch, ...), for any m, or (replicas, m, micro-batch, ...) on several replicas.
                Micro-batches can have another size than `inputs`: the function is cut for each once.
            state: the function's own state, from `shard_state` or an earlier call, whose buffers are reused.
                Micro-batches replace it one after the other. Without a state of its own: the pipeline's state, such as
                a training state's `stages`, which is only read.
            key: a typed key, if the function takes one; micro-batch m of replica r gets `fold_in(fold_in(key, r), m)`.

        Returns:
            The outputs, each with leading dims (m,), or (replicas, m), whole on every IPU; of a function with a state
            of its own, `(outputs, new state)`.

        Raises:
            ValueError: the weights, inputs, state or key do not fit. It is raised before anything is compiled.
        """
        given = StepArgs(params, inputs, state, key)
        self.check(given)
        outputs, new_state = self._programs.predict(given, reuses_state=self.has_state)
        function = self.placement.of_batch(inputs).function
        assert function is not None, "it was cut"
        outputs = jax.tree.map(with_keys, outputs, function.outputs)
        return (outputs, new_state) if self.has_state else outputs

    def check(self, given: StepArgs) -> None:
        """Raise the `ValueError` that a call raises for these arguments."""
        if self.takes_key and given.key is None:
            raise ValueError("key is missing: the function takes one, pass key=jax.random.key(...)")
        if self.has_state and given.state is None:
            raise ValueError("state is missing: pass what shard_state or an earlier call of this function returned")
        self.placement.check(given, "prediction")

    def shard_state(self, state: Tree) -> Sharded:
        """Place the function's own state on the IPUs: each leaf, or each layer's rows, where it is used.

        Raises:
            ValueError: the function has none, or the tree is not like the one that `forward` was given.
        """
        if not self.has_state:
            raise ValueError("the function has no state of its own: give forward(fn, inputs, state=...)")
        return self._pipeline.shard_state(state)

    def unshard(self, state: Sharded) -> Tree:
        """Return a state, or weights, whole: the inverse of `shard_state`. It communicates as `Pipeline.unshard`."""
        return self._pipeline.unshard(state)

    def lower(self, params: Sharded, inputs: Batch, state: Sharded | None = None, key: jax.Array | None = None) -> Any:
        """Return the program of a call, lowered but not run. Compile it to see its memory and its HLO.

        Raises:
            ValueError: as in a call.
        """
        given = StepArgs(params, inputs, state, key)
        self.check(given)
        return self._programs.lower_prediction(given, reuses_state=self.has_state)

    def _shown(self) -> list[str | Table]:
        replicas = f"{self.replicas} replicas x " * given_dims(self.replicas)
        of = f"{counted(len(self.stages), 'stage')} on {replicas}{counted(self.ipus, 'IPU')}"
        function = self.placement.function
        assert function is not None, "it was cut"
        return [f"Forward pass of {of}", *function.described]


def _placed(function: Forward, pipeline: Any) -> PackedLayout | None:
    """Return who holds the state of a function, for another function that shares it.

    Raises:
        ValueError: it has no state of its own, or belongs to a pipeline with stages in other places.
    """
    is_like = [stage.ipu for stage in function.stages] == [stage.ipu for stage in pipeline.stages]
    if not function.has_state or not is_like:
        found = "belongs to a pipeline with stages in other places" if function.has_state else "has no state of its own"
        raise ValueError(f"state= is a function that {found}: give one that this pipeline made with state=, or a tree")
    cut = function.placement.function
    assert cut is not None, "it was cut"
    return cut.state


@public_on_mesh
class WithForward:
    """The methods of `Pipeline` that run its weights forward only: its last stage's outputs, and other functions."""

    stages: tuple[Stage, ...]
    replicas: int
    placement: PlacedStages
    function: FunctionModel | None
    _programs: Programs

    def predict(
        self,
        params: Sharded,
        batch: Batch,
        state: Sharded | None = None,
        key: jax.Array | None = None,
        *,
        return_state: bool = False,
    ) -> Tree:
        """Return the outputs of the last stage for any number of micro-batches, without labels or a loss.

        Each stage runs `predict`, or else `evaluate`, or else `fn`; the last stage must have `predict`. Aux is not
        computed. The schedule is "grouped" without its backward, which fills the pipeline as fast as possible.

        Communicates, in each tick: one ppermute of an activation between neighbours, and for each run of concurrent
        stages a broadcast of its input. At the end it broadcasts the outputs of a local last stage to all IPUs.

        Args:
            params: from `shard`.
            batch: a pytree whose leaves are (m, micro-batch, ...), for any m, or (replicas, m, micro-batch, ...) if
                there are several replicas. Leaves that no stage reads in prediction, such as labels, may be missing.
            state: from `shard_state`, a training step, or an earlier prediction, if a stage has state.
            key: a typed key. It is needed only if a random stage has neither `predict` nor `evaluate`.
            return_state: whether to return the new state as well, on one replica: the state that `predict` functions
                return, micro-batch after micro-batch, such as a cache; and the given state of other stages. Without it,
                each micro-batch still reads the state from earlier micro-batches of the same call.

        Returns:
            The pytree that the last stage returns, with leading dims (m,), or (replicas, m): whole on every IPU, except
            outputs that `Stage(predict_specs=...)` keeps split over the IPUs; these are split `jax.Array`s, padded like
            the weights (`logits[..., :size]` removes the padding). With `return_state`, `(outputs, new state)`.

        Raises:
            ValueError: the last stage has no `predict`; the pipeline was cut from a function, and `forward` predicts;
                `return_state` is given with several replicas or without state; or as in `value_and_grad`. It is raised
                before anything is compiled.

        >>> import jax.numpy as jnp
        >>> from ipu_jax import Pipeline, Stage
        >>> loss = lambda w, x, mb: jnp.mean((mb["x"] @ w - mb["y"]) ** 2)
        >>> stage = Stage(loss, params="w", ipu=0, predict=lambda w, x, mb: mb["x"] @ w)
        >>> pipeline = Pipeline([stage], gradient_accumulation=2)
        >>> params = pipeline.shard({"w": jnp.ones((3, 1))})
        >>> pipeline.predict(params, {"x": jnp.ones((5, 4, 3))}).shape  # 5 micro-batches of 4 rows
        (5, 4, 1)
        """
        if self.function is not None:
            raise ValueError(
                "this pipeline was cut from a loss function: cut the function that predicts, too, "
                "outputs = pipeline.forward(fn, inputs), and call outputs(params, batch)"
            )
        check_predictable(self.stages, self.replicas, return_state)
        given = StepArgs(params, batch, state, key)
        self.placement.check(given, "prediction")
        outputs, new_state = self._programs.predict(given)
        return (outputs, new_state) if return_state else outputs

    @facts.during("cutting a function")
    def forward(self, fn: Function, inputs: Batch, *, state: Tree = None) -> Forward:
        """Return another function of the weights, such as logits, a test loss, or one step of decoding. Nothing is run.

        It is cut so that each operation runs on the IPU that holds the weights it reads, so it reads the weights that
        the pipeline trains, where they are. It can have other inputs than the loss, of another size, and its own
        outputs. It must read weights in the order of the loss function, on the way of each input: a model may be called
        on several inputs, but not on its own outputs. One pipeline can have several such functions. A step's `model`
        computes them in the step's precision.

        Args:
            fn: `fn(params, inputs)`, or `fn(params, inputs, key)`, returns any pytree of arrays. With `state`,
                `fn(params, state, inputs)` returns `(outputs, new_state)`: micro-batches replace it one by one. If the
                pipeline has a state, and none is given here, `fn(params, state, inputs)` reads that one, such as the
                averages of batch norm, and returns outputs alone.
            inputs: one micro-batch, or its shapes, any pytree of arrays.
            state: a state of the function's own, or its shapes, such as a cache. Each leaf is on the IPU that replaces
                it; of a leaf that is stacked over the layers of a scan, each IPU holds its layers' rows. Or another
                function with a state, `state=prefill`: both take one state, which is where that function has it.

        Raises:
            ValueError: the pipeline was made of stages; the function takes or returns something else; it has a state
                and the pipeline several replicas; or it reads weights in another order than the loss function does.
                The message names the leaf and the line.

        >>> import jax, jax.numpy as jnp
        >>> from ipu_jax import Pipeline
        >>> def model(params, x):
        ...     for w in params["layers"]:
        ...         x = jnp.tanh(x @ w)
        ...     return x
        >>> loss = lambda params, batch: jnp.mean((model(params, batch["x"]) - batch["y"]) ** 2)
        >>> params, x = {"layers": [jnp.eye(3)] * 4}, jnp.ones((5, 3))
        >>> pipeline = Pipeline.from_function(loss, params, {"x": x, "y": x}, ipus=2, gradient_accumulation=8)
        >>> outputs = pipeline.forward(model, x[:1])  # one row, where the loss has five
        >>> print(outputs)
        Forward pass of 2 stages on 2 IPUs
          stage  IPU  work   weights  sends per micro-batch
          0      0    50.0%  72 B     1 array, 12 B
          1      1    50.0%  72 B     1 array, 12 B
        >>> outputs(pipeline.shard(params), jnp.ones((4, 1, 3))).shape  # 4 micro-batches
        (4, 1, 3)
        """
        if self.function is None:
            raise ValueError(
                "this pipeline was made of stages: give the last one predict=, and call pipeline.predict; forward "
                "cuts a function of the weights that Pipeline.from_function cut"
            )
        return Forward(self, fn, inputs, state)
