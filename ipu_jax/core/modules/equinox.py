"""Make a stage of an Equinox module.

floating arrays       -> weights         eqx.nn.State -> state; everything else stays in the module
inference=False       in training, eqx.nn.inference_mode in evaluation
jax.vmap over examples, each with its own key, as Equinox's modules expect
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh

from ipu_jax.base.annotations import Batch, Function, Key, Params, Tree, Value
from ipu_jax.core.mesh.devices import AllIpus
from ipu_jax.core.modules.parts import Inputs, ModuleStage, Recompute, check_instance, import_library, make_module_stage


def equinox_stage(
    module: Any,
    name: str,
    *,
    state: Tree = None,
    ipu: int | AllIpus = 0,
    inputs: Inputs = None,
    loss: Callable[[Tree, Batch], Value] | None = None,
    random: bool = False,
    vmap: str | None = "batch",
    recompute: Recompute = "auto",
    takes: tuple[str, ...] = (),
    sends: tuple[str, ...] = (),
) -> ModuleStage:
    """Make a stage of an Equinox module, or of any callable pytree.

    In training the stage calls `eqx.nn.inference_mode(module, False)`, and in evaluation (`Pipeline.loss`)
    `eqx.nn.inference_mode(module)`, for each example under `jax.vmap`: `module(example)`, or `module(example, state)`
    if it has state, with `key=` if it is random. The stage communicates only if the module contains collectives.

    After training, `eqx.combine(params[name], module)` is the trained module, with the params that `Pipeline.unshard`
    or `TrainStep.whole` returned; `state[name]` is its `eqx.nn.State`.

    Args:
        module: the module. Its result is the input of the next stage or of `loss`.
        name: the name of the stage, of its parameter group and of its state group.
        state: the `eqx.nn.State` of the module, or of a larger model that contains it, from `eqx.nn.make_with_state`.
        ipu, recompute: as `Stage` takes them.
        inputs: the module's arguments: the name of a leaf of the micro-batch, such as "images"; a function of
            `(x, microbatch)` that returns the tuple of arguments; or None for the result of the previous stage. All
            have a leading dim of examples.
        loss: for the last stage: a function of the results of all examples and the micro-batch, which returns the
            micro-batch's mean loss, a float scalar, or `(loss, aux)`.
        random: whether the module takes `key=`. In training it gets one of `jax.random.split(stage's key, examples)`.
            In evaluation it gets None, unless `Pipeline.loss` is given a key.
        vmap: the name of the axis over examples, which batch norm needs; None if the module itself takes the whole
            micro-batch, and the stage's key as it is. In half precision `eqx.nn.BatchNorm` needs mode="batch": the mode
            "ema" refuses weights and state of different dtypes.
        takes: names of skips that earlier stages send. The module gets them after its other arguments, one example at a
            time; if `inputs` is a function, it gets `(x, microbatch, skips)` and returns all arguments.
        sends: names of the skips that this stage sends; the module returns `(y, *skips)`.

    Returns:
        The `ModuleStage`. Its params are the module with only its floating arrays (`eqx.partition`), its state is an
        `eqx.nn.State`.

    Raises:
        ValueError: `module` is not callable, `state` is not an `eqx.nn.State`, or another argument has the wrong type.
        ImportError: Equinox is not installed.

    >>> import equinox as eqx, jax, jax.numpy as jnp
    >>> from ipu_jax import Pipeline
    >>> mean = lambda y, microbatch: jnp.mean(y)
    >>> part = equinox_stage(eqx.nn.Linear(2, 3, key=jax.random.key(0)), "linear", inputs="x", loss=mean)
    >>> pipeline = Pipeline([part.stage], gradient_accumulation=2)
    >>> loss, gradients = pipeline.value_and_grad(pipeline.shard(part.params), {"x": jnp.ones((2, 4, 2))})
    >>> [round(float(g), 4) for g in pipeline.unshard(gradients)["linear"].bias]
    [0.3333, 0.3333, 0.3333]
    """
    eqx = import_library("equinox")
    check_instance(module, name)
    if not callable(module):
        raise ValueError(f"module={type(module).__name__} of stage {name!r} is not callable: give an Equinox module")
    if not (state is None or isinstance(state, eqx.nn.State)):
        raise ValueError(
            f"state={type(state).__name__} of stage {name!r} is not an eqx.nn.State: give the second result of "
            "eqx.nn.make_with_state(Model)(...)"
        )
    params, in_training = eqx.partition(eqx.nn.inference_mode(module, False), eqx.is_inexact_array)
    in_evaluation = eqx.partition(eqx.nn.inference_mode(module), eqx.is_inexact_array)[1]
    own_state = None if state is None else state.substate(module)

    def call(params: Params, state: Tree, args: tuple[Tree, ...], key: Key, *, training: bool) -> Tree:
        def run(params: Params, state: Tree, args: tuple[Tree, ...], key: Key) -> Tree:
            running = eqx.combine(params, in_training if training else in_evaluation)

            def one(args: tuple[Tree, ...], key: Key) -> Tree:
                result = running(*args, *([] if state is None else [state]), **({"key": key} if random else {}))
                return (result, None) if state is None else result

            if vmap is None:
                return one(args, key)
            keys = None if key is None else jax.random.split(key, len(jax.tree.leaves(args)[0]))
            # the new state is the same for all examples: batch norm averages over them
            return jax.vmap(one, axis_name=vmap, out_axes=(0, None))(args, keys)

        if state is None:
            return *run(params, state, args, key), None
        return *_traced_alone(run, params, state, args, key), None

    return make_module_stage(call, name, params, own_state, ipu, inputs, loss, random, recompute, takes, sends)


def _traced_alone(run: Function, *args: Tree) -> Tree:
    """Run a function, but trace it as if there were no mesh.

    Equinox compares the old and the new value of a state, including their shardings. Inside a `shard_map`, computed
    values have a sharding, and constants have none.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), args)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        traced, result = jax.make_jaxpr(run, return_shape=True)(*shapes)
    return jax.tree.unflatten(jax.tree.structure(result), jaxpr_as_fun(traced)(*jax.tree.leaves(args)))
