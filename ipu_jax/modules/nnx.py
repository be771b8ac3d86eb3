"""Make a stage of a `flax.nnx` module.

nnx.Param    -> weights                  nnx.BatchStat and other variables -> state
nnx.RngState -> made anew from the key of this update, replica, micro-batch and stage
module.train() in training, module.eval() in evaluation
"""

from collections.abc import Callable
from typing import Any

import jax

from ipu_jax.devices import AllIpus
from ipu_jax.modules.parts import Inputs, ModuleStage, Recompute, import_library, make_module_stage


def nnx_stage(
    module: Any,
    name: str,
    *,
    ipu: int | AllIpus = 0,
    inputs: Inputs = None,
    loss: Callable[[Any, Any], Any] | None = None,
    recompute: Recompute = "auto",
) -> ModuleStage:
    """Make a stage of a `flax.nnx` module.

    The stage calls copies of the module: one in training mode (`module.train()`), and one in evaluation mode
    (`module.eval()`) for `Pipeline.loss`. The module itself does not change. What it sows is dropped. The module
    communicates only if it contains collectives.

    A module with random streams, as dropout has, makes a random stage: before each call its streams are reseeded from
    the stage's key, `nnx.reseed(module, name_of_the_stream=key)`. If its streams have several names, the i-th of them
    in alphabetical order, counted from 0, is reseeded from `jax.random.fold_in(key, i)`.

    After training, `nnx.update(module, params[name], state[name])` writes what `Pipeline.unshard` or `TrainStep.whole`
    returned into the module; without state, `nnx.update(module, params[name])`.

    Args:
        module: an `nnx.Module`. Its result is the input of the next stage, or that of `loss`.
        name: of the stage, of its parameter group and of its state group.
        ipu, recompute: as `Stage` takes them.
        inputs: what the module is called with: the name of a leaf of the micro-batch, such as "images"; a function of
            `(x, microbatch)` that returns the tuple of its arguments; or None for the result of the stage before.
        loss: for the last stage: a function of the module's result and the micro-batch, which returns the micro-batch's
            mean loss, a float scalar, or `(loss, aux)`.

    Returns:
        The `ModuleStage`. Its params are an `nnx.State` of the `nnx.Param` variables, its state one of all others but
        the random streams.

    Raises:
        ValueError: `module` is not an `nnx.Module`, or another argument is of the wrong kind.
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
    nnx = import_library("flax.nnx")
    if not isinstance(module, nnx.Module):
        raise ValueError(
            f"module={type(module).__name__} is not an nnx.Module: for flax.linen use linen_stage, for equinox "
            "equinox_stage"
        )
    graphs = {}
    for mode in ("train", "eval"):
        copy = nnx.clone(module)
        getattr(copy, mode)()
        graphs[mode] = nnx.graphdef(copy)
    _, params, streams, state = nnx.split(module, nnx.Param, nnx.RngState, ...)
    tags = sorted({node.key.tag for _, node in nnx.iter_graph(module) if isinstance(node, nnx.RngStream)})

    def call(params: Any, state: Any, args: tuple[Any, ...], key: Any, *, training: bool) -> Any:
        graph = graphs["train" if training else "eval"]
        variables = [tree for tree in (params, streams, state) if tree is not None]
        running = nnx.merge(graph, *variables, copy=True)  # the call changes variables, and these are the stage's
        if key is not None:
            nnx.reseed(running, policy="match_shape", **_seeds(tags, key))
        y = running(*args)
        if state is None:
            return y, None
        nnx.pop(running, nnx.Intermediate)
        return y, nnx.split(running, nnx.Param, nnx.RngState, ...)[3]

    return make_module_stage(
        call,
        name,
        params or None,
        state or None,
        ipu=ipu,
        inputs=inputs,
        loss=loss,
        random=bool(tags),
        recompute=recompute,
    )


def _seeds(tags: list[str], key: Any) -> dict[str, Any]:
    """Return a key for the streams of each name."""
    if len(tags) == 1:
        return {tags[0]: key}
    return {tag: jax.random.fold_in(key, number) for number, tag in enumerate(tags)}
