"""Make a stage of a `flax.nnx` module.

nnx.Param    -> weights                  nnx.BatchStat and other variables -> state
nnx.RngState -> reseeded from the key of this update, replica, micro-batch and stage
module.sow   -> the loss, if losses= names the type of variable
module.train() in training, module.eval() in evaluation
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from ipu_jax.base.annotations import Batch, Key, Params, Tree, Value
from ipu_jax.core.mesh.devices import AllIpus
from ipu_jax.core.modules import parts
from ipu_jax.core.modules.parts import Inputs, Losses, ModuleStage, Recompute


def nnx_stage(
    module: Any,
    name: str,
    *,
    ipu: int | AllIpus = 0,
    inputs: Inputs = None,
    loss: Callable[[Tree, Batch], Value] | None = None,
    recompute: Recompute = "auto",
    takes: tuple[str, ...] = (),
    sends: tuple[str, ...] = (),
    losses: Losses = None,
) -> ModuleStage:
    """Make a stage of a `flax.nnx` module.

    The stage calls copies of the module: one in training mode (`module.train()`), and one in evaluation mode
    (`module.eval()`) for `Pipeline.loss`. The module itself does not change. The stage communicates only if the module
    contains collectives.

    What the module sows in training is added to the loss if `losses` names its variable type. Otherwise it is dropped,
    with a `UserWarning` when the stage is first traced; an `nnx.Intermediate` is dropped without one.

    A module with random streams, such as dropout, makes a random stage: before each call its streams are reseeded from
    the stage's key, `nnx.reseed(module, name_of_the_stream=key)`. If its streams have several names, the i-th name in
    alphabetical order, counted from 0, is reseeded from `jax.random.fold_in(key, i)`.

    After training, write the params and state that `Pipeline.unshard` or `TrainStep.whole` returned into the module
    with `nnx.update(module, params[name], state[name])`; without state, `nnx.update(module, params[name])`.

    Args:
        module: an `nnx.Module`. Its result is the input of the next stage or of `loss`.
        name: the name of the stage, of its parameter group and of its state group.
        ipu, recompute: as `Stage` takes them.
        inputs: the module's arguments: the name of a leaf of the micro-batch, such as "images"; a function of
            `(x, microbatch)` that returns the tuple of arguments; or None for the result of the previous stage.
        loss: for the last stage: a function of the module's result and the micro-batch, which returns the micro-batch's
            mean loss, a float scalar, or `(loss, aux)`.
        takes: names of skips that earlier stages send. The module gets them after its other arguments; if `inputs` is a
            function, it gets `(x, microbatch, skips)` and returns all arguments.
        sends: names of the skips that this stage sends; the module returns `(y, *skips)`.
        losses: a weight per variable type or its name, such as `{BalanceLoss: 0.01}` for
            `class BalanceLoss(nnx.Variable)`. In training, the sum of all sown elements of this type, times the weight,
            is added to the micro-batch's loss. 0 drops it without a warning. Evaluation and prediction leave it out.

    Returns:
        The `ModuleStage`. Its params are an `nnx.State` of the `nnx.Param` variables, its state an `nnx.State` of all
        other variables except the random streams and those that `losses` names.

    Raises:
        ValueError: `module` is not an `nnx.Module`, or another argument has the wrong type. When the stage is
            traced: the module sows nothing of a type in `losses`, or does not return `(y, *skips)`.
        ImportError: Flax is not installed.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> from ipu_jax import Pipeline
    >>> mean = lambda y, microbatch: jnp.mean(y)
    >>> part = nnx_stage(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "linear", inputs="x", loss=mean)
    >>> pipeline = Pipeline([part.stage], gradient_accumulation=2)
    >>> loss, gradients = pipeline.value_and_grad(pipeline.shard(part.params), {"x": jnp.ones((2, 4, 2))})
    >>> [round(float(g), 4) for g in pipeline.unshard(gradients)["linear"]["bias"][...]]
    [0.3333, 0.3333, 0.3333]
    """
    parts.check_instance(module, name)
    nnx = parts.import_library("flax.nnx")
    if not isinstance(module, nnx.Module):
        raise ValueError(
            f"module={type(module).__name__} is not an nnx.Module: for flax.linen use linen_stage, for equinox "
            "equinox_stage"
        )
    weights = {_type_of(name, kind): weight for kind, weight in parts.check_losses(name, losses, "BalanceLoss").items()}
    sowable = tuple(dict.fromkeys((*weights, nnx.Intermediate)))
    module = nnx.clone(module)
    _popped(module, sowable)  # left over from an earlier call
    graphs = {}
    for mode in ("train", "eval"):
        copy = nnx.clone(module)
        getattr(copy, mode)()
        graphs[mode] = nnx.graphdef(copy)
    _, params, streams, state = nnx.split(module, nnx.Param, nnx.RngState, ...)
    before = dict(nnx.to_flat_state(state))
    warned: list[bool] = []
    tags = sorted({node.key.tag for _, node in nnx.iter_graph(module) if isinstance(node, nnx.RngStream)})

    def call(params: Params, state: Tree, args: tuple[Tree, ...], key: Key, *, training: bool) -> Tree:
        graph = graphs["train" if training else "eval"]
        variables = [tree for tree in (params, streams, state) if tree is not None]
        running = nnx.merge(graph, *variables, copy=True)  # the call must not change the stage's variables
        if key is not None:
            nnx.reseed(running, policy="match_shape", **_seeds(tags, key))
        with warnings.catch_warnings():
            # it recommends nnx.capture, which would have to know all types
            warnings.filterwarnings("ignore", "Using 'Module.sow", DeprecationWarning)
            y = running(*args)
        sown = _popped(running, sowable)
        after = dict(nnx.to_flat_state(nnx.split(running, nnx.Param, nnx.RngState, ...)[3]))
        grown = [path for path, new in after.items() if not _fits(before.get(path), new)]
        if training and not warned:
            warned.append(True)
            parts.warn_dropped(name, {type(after[path]) for path in grown})
        if state is not None:
            old = dict(nnx.to_flat_state(state))
            kept = {path: old[path] if path in grown else after[path] for path in before}
            state = nnx.from_flat_state(kept.items())
        return y, state, parts.add_up(name, weights, sown) if training else None

    return parts.make_module_stage(call, name, params, state, ipu, inputs, loss, bool(tags), recompute, takes, sends)


def _type_of(name: str, kind: Any) -> Any:
    """Return the variable type that a key of `losses` names."""
    nnx = parts.import_library("flax.nnx")
    found = nnx.variable_type_from_name(kind, allow_register=True) if isinstance(kind, str) else kind
    if not (isinstance(found, type) and issubclass(found, nnx.Variable)) or issubclass(found, nnx.Param):
        raise ValueError(
            f"losses of stage {name!r} names {kind!r}, which is not a type of variable that a module sows: give one "
            "such as BalanceLoss, for class BalanceLoss(nnx.Variable)"
        )
    return found


def _popped(module: Any, kinds: tuple[Any, ...]) -> dict[Any, Any]:
    """Remove the variables of exactly these types from a module, and return them by type."""
    nnx = parts.import_library("flax.nnx")
    return {kind: nnx.pop(module, lambda _, leaf, kind=kind: type(leaf) is kind) for kind in kinds}


def _fits(old: Tree, new: Tree) -> bool:
    """Return whether a variable has the same tree as before the call: sown variables are new, or grow."""
    return old is not None and jax.tree.structure(old.get_value()) == jax.tree.structure(new.get_value())


def _seeds(tags: list[str], key: Key) -> dict[str, Key]:
    """Return a key per stream name."""
    if len(tags) == 1:
        return {tags[0]: key}
    return {tag: jax.random.fold_in(key, number) for number, tag in enumerate(tags)}
