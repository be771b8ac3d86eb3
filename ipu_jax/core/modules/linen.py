"""Make a stage of a `flax.linen` module.

variables["params"]  -> weights          variables["batch_stats"] and other collections -> state
self.sow             -> the loss, if losses= names the collection
train=True, deterministic=False, ...     in training; the opposite in evaluation
rngs=key                                 the key of this update, replica, micro-batch and stage
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import jax

from ipu_jax.base.annotations import Batch, Key, Params, Tree, Value
from ipu_jax.core.mesh.devices import AllIpus
from ipu_jax.core.modules import parts
from ipu_jax.core.modules.parts import Inputs, Losses, ModuleStage, Recompute

MODES: Final = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
"""Arguments that set the mode of linen modules, with their values in training."""


def linen_stage(
    module: Any,
    variables: Mapping[str, Tree],
    name: str,
    *,
    ipu: int | AllIpus = 0,
    inputs: Inputs = None,
    loss: Callable[[Tree, Batch], Value] | None = None,
    random: bool = False,
    training: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    recompute: Recompute = "auto",
    takes: tuple[str, ...] = (),
    sends: tuple[str, ...] = (),
    losses: Losses = None,
) -> ModuleStage:
    """Make a stage of a `flax.linen` module.

    In training the stage is `module.apply(variables, *inputs, **training, rngs=key, mutable=state's collections)`, and
    in evaluation (`Pipeline.loss`) it is `module.apply(variables, *inputs, **evaluation)`. The module communicates only
    if it contains collectives.

    What the module sows in training is added to the loss if `losses` names its collection. Otherwise it is dropped,
    with a `UserWarning` when the stage is first traced; "intermediates" are dropped without one, as Flax drops them.

    After training, the module's variables are `{"params": params[name], **state[name]}`, with the params and state
    that `Pipeline.unshard` or `TrainStep.whole` returned.

    Args:
        module: the module. Its result is the input of the next stage or of `loss`.
        variables: all that `module.init` returned: `{"params": ...}` and other collections. It can contain sown
            values.
        name: the name of the stage, of its parameter group and of its state group.
        ipu, recompute: as `Stage` takes them.
        inputs: the module's arguments: the name of a leaf of the micro-batch, such as "images"; a function of
            `(x, microbatch)` that returns the tuple of arguments; or None for the result of the previous stage.
        loss: for the last stage: a function of the module's result and the micro-batch, which returns the micro-batch's
            mean loss, a float scalar, or `(loss, aux)`.
        random: whether the module draws random numbers in training, as dropout does. It then gets the stage's key as
            `rngs=key`, from which Flax makes all its streams.
        training, evaluation: the keyword arguments that set the module's mode. Default: all of `train`, `training`,
            `is_training`, `deterministic` and `use_running_average` that the module's `__call__` takes.
        takes: names of skips that earlier stages send. The module gets them after its other arguments; if `inputs` is a
            function, it gets `(x, microbatch, skips)` and returns all arguments.
        sends: names of the skips that this stage sends; the module returns `(y, *skips)`.
        losses: a weight per collection, such as `{"losses": 0.01}`. In training, the sum of all elements that the
            module sows into the collection, times the weight, is added to the micro-batch's loss. 0 drops it without a
            warning. Evaluation and prediction leave it out.

    Returns:
        The `ModuleStage`. Its params are `variables["params"]`, its state all other collections that `losses` does not
        name.

    Raises:
        ValueError: `module` is not a linen module, `variables` is not a mapping of collections, or another argument has
            the wrong type. When the stage is traced: the module sows nothing into a collection of `losses`, or does
            not return `(y, *skips)`.

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
    parts.check_instance(module, name)
    if not (hasattr(module, "apply") and hasattr(module, "init")):
        raise ValueError(
            f"module={type(module).__name__} is not a flax.linen module, with init and apply: for nnx use nnx_stage, "
            "for equinox equinox_stage"
        )
    if not isinstance(variables, Mapping):
        raise ValueError(
            f"variables of stage {name!r} are {type(variables).__name__}: give what module.init(key, inputs) returned"
        )
    weights = parts.check_losses(name, losses, "'losses'")
    modes = (_mode(module, training, in_training=True), _mode(module, evaluation, in_training=False))
    params = variables.get("params")
    state = {collection: tree for collection, tree in variables.items() if collection not in {"params", *weights}}
    sown: list[frozenset[str]] = []  # the dropped collections, known once the module has been traced

    def call(params: Params, state: Tree, args: tuple[Tree, ...], key: Key, *, training: bool) -> Tree:
        given = {} if params is None else {"params": params}
        given |= state or {}
        apply = functools.partial(module.apply, rngs=key, **modes[0 if training else 1])
        if not training:
            return apply(given, *args), None, None
        if not sown:
            sown.append(_dropped(lambda given, mutable: apply(given, *args, mutable=mutable), given, weights))
            parts.warn_dropped(name, sown[0] - {"intermediates"})
        given = {collection: tree for collection, tree in given.items() if collection not in sown[0]}
        kept = [collection for collection in given if collection != "params"]
        y, changed = apply(given, *args, mutable=[*kept, *weights])
        new_state = state and {**state, **{name: tree for name, tree in changed.items() if name in kept}}
        return y, new_state, parts.add_up(name, weights, changed)

    return parts.make_module_stage(call, name, params, state, ipu, inputs, loss, random, recompute, takes, sends)


def _dropped(
    apply: Callable[[Mapping[str, Tree], Tree], Tree], variables: Mapping[str, Tree], losses: Iterable[str]
) -> frozenset[str]:
    """Return the collections that a module sows into, but that are in neither its state nor the loss.

    A sown collection is one that the module creates, and that it can run without.

    Args:
        apply: calls the module with variables and with the mutable collections.
        variables: its weights and state, which can contain values that `init` has sown.
        losses: the collections that are added to the loss.
    """
    flax = parts.import_library("flax")

    def created(without: str, mutable: Any) -> set[str] | None:
        given = {collection: tree for collection, tree in variables.items() if collection != without}
        try:
            changed = jax.eval_shape(lambda: apply(given, mutable)[1])
        except flax.errors.FlaxError:  # the module needs the missing collection, or writes to an immutable one
            return None
        return {collection for collection, tree in changed.items() if jax.tree.leaves(tree)} - given.keys()

    dropped = created("", flax.core.DenyList(["params", "intermediates", *losses])) or set()
    state = [collection for collection in variables if collection != "params"]
    for collection in state:
        others = [other for other in state if other != collection]
        if created(collection, others) is not None and collection in (created(collection, state) or ()):
            dropped.add(collection)
    return frozenset(dropped)


def _mode(module: Any, given: Mapping[str, Tree] | None, *, in_training: bool) -> dict[str, Any]:
    if given is not None:
        return dict(given)
    parameters = inspect.signature(type(module).__call__).parameters
    return {argument: value == in_training for argument, value in MODES.items() if argument in parameters}
