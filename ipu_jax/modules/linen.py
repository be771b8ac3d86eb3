"""Make a stage of a `flax.linen` module.

variables["params"]  -> weights          variables["batch_stats"] and other collections -> state
train=True, deterministic=False, ...     in training; the opposite in evaluation
rngs=key                                 the key of this update, replica, micro-batch and stage
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from ipu_jax.devices import AllIpus
from ipu_jax.modules.parts import Inputs, ModuleStage, Recompute, make_module_stage

MODES: Final = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
"""Arguments by which linen modules are told their mode, with their values in training."""


def linen_stage(
    module: Any,
    variables: Mapping[str, Any],
    name: str,
    *,
    ipu: int | AllIpus = 0,
    inputs: Inputs = None,
    loss: Callable[[Any, Any], Any] | None = None,
    random: bool = False,
    training: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    recompute: Recompute = "auto",
) -> ModuleStage:
    """Make a stage of a `flax.linen` module.

    In training the stage is `module.apply(variables, *inputs, **training, rngs=key, mutable=state's collections)`, and
    in evaluation (`Pipeline.loss`) it is `module.apply(variables, *inputs, **evaluation)`. What the module sows is
    dropped. The module communicates only if it contains collectives.

    After training, the module's variables are `{"params": params[name], **state[name]}` of what `Pipeline.unshard` or
    `TrainStep.whole` returned.

    Args:
        module: the module. Its result is the input of the next stage, or that of `loss`.
        variables: what `module.init` returned, whole: `{"params": ...}` and other collections.
        name: of the stage, of its parameter group and of its state group.
        ipu, recompute: as `Stage` takes them.
        inputs: what the module is called with: the name of a leaf of the micro-batch, such as "images"; a function of
            `(x, microbatch)` that returns the tuple of its arguments; or None for the result of the stage before.
        loss: for the last stage: a function of the module's result and the micro-batch, which returns the micro-batch's
            mean loss, a float scalar, or `(loss, aux)`.
        random: whether the module draws random numbers in training, as dropout does. It then gets the stage's key as
            `rngs=key`, from which Flax makes all its streams.
        training, evaluation: the keyword arguments that tell the module its mode. Default: whichever of `train`,
            `training`, `is_training`, `deterministic` and `use_running_average` the module's `__call__` has.

    Returns:
        The `ModuleStage`. Its params are `variables["params"]`, its state all other collections.

    Raises:
        ValueError: `module` is not a linen module, `variables` is not a mapping of collections, or another argument is
            of the wrong kind.

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> from ipu_jax import Pipeline
    >>> dense = nn.Dense(3)
    >>> mean = lambda y, microbatch: jnp.mean(y)
    >>> part = linen_stage(dense, dense.init(jax.random.key(0), jnp.ones((1, 2))), "dense", inputs="x", loss=mean)
    >>> pipeline = Pipeline([part.stage], gradient_accumulation=2)
    >>> loss, gradients = pipeline.value_and_grad(pipeline.shard(part.params), {"x": jnp.ones((2, 4, 2))})
    >>> [round(float(g), 4) for g in pipeline.unshard(gradients)["dense"]["bias"]]
    [0.3333, 0.3333, 0.3333]
    """
    if not (hasattr(module, "apply") and hasattr(module, "init")):
        raise ValueError(
            f"module={type(module).__name__} is not a flax.linen module, with init and apply: for nnx use nnx_stage, "
            "for equinox equinox_stage"
        )
    if not isinstance(variables, Mapping):
        raise ValueError(
            f"variables of stage {name!r} are {type(variables).__name__}: give what module.init(key, inputs) returned"
        )
    modes = (_mode(module, training, in_training=True), _mode(module, evaluation, in_training=False))
    params = variables.get("params")
    state = {collection: tree for collection, tree in variables.items() if collection != "params"}

    def call(params: Any, state: Any, args: tuple[Any, ...], key: Any, *, training: bool) -> Any:
        given = {} if params is None else {"params": params}
        given |= state or {}
        mode = modes[0 if training else 1]
        if state is None or not training:
            return module.apply(given, *args, **mode, rngs=key), None
        y, changed = module.apply(given, *args, **mode, rngs=key, mutable=list(state))
        return y, {**state, **changed}

    return make_module_stage(
        call, name, params, state or None, ipu=ipu, inputs=inputs, loss=loss, random=random, recompute=recompute
    )


def _mode(module: Any, given: Mapping[str, Any] | None, *, in_training: bool) -> dict[str, Any]:
    if given is not None:
        return dict(given)
    parameters = inspect.signature(type(module).__call__).parameters
    return {argument: value == in_training for argument, value in MODES.items() if argument in parameters}
