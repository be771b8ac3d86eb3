"""Make a stage of any callable that takes weights, state, arguments and a key, and gather these stages.

    module --linen_stage, nnx_stage, equinox_stage--> ModuleStage(stage, params, state) \\
    module -------------------------------------------> ModuleStage(stage, params, state)  gather_stages
    module -------------------------------------------> ModuleStage(stage, params, state) /
                                                              |
    Pipeline(stages, ...), pipeline.shard(params), pipeline.shard_state(state)
"""

import dataclasses
import importlib
import math
import numbers
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Batch, Function, Key, Params, Tree, Value
from ipu_jax.core.mesh.devices import AllIpus
from ipu_jax.core.stage import Origin, Outputs, Stage, check_untied

Inputs = str | Callable[..., tuple[Any, ...]] | None
"""A module's arguments: None for the result of the previous stage, the name of a leaf of the micro-batch, or a
function of `(x, microbatch)`, or of `(x, microbatch, skips)`, that returns the tuple of arguments."""

Recompute = Literal["auto", "none", "all"] | Function
Losses = Mapping[Any, float] | None
"""The weight of each collection (linen) or variable type (NNX) of sown values in the loss."""


@dataclasses.dataclass(frozen=True)
class ModuleStage:
    """Hold a module's stage, with its initial weights and state.

    A plain stage can be put between modules: `ModuleStage(Stage(fn, params="scale"), {"scale": weights})`.

    Attributes:
        stage: the stage, for `Pipeline`.
        params: `{group: pytree of whole weights}`, as `Pipeline.shard` takes it; empty if the stage has no weights.
        state: `{group: pytree of whole state}`, as `Pipeline.shard_state` takes it; empty if it has no state.
    """

    stage: Stage
    params: dict[str, Params] = dataclasses.field(default_factory=dict)
    state: dict[str, Tree] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        added = (*_origins("params", self.params), *_origins("state", self.state))
        if isinstance(self.stage, Stage) and added:
            # the stage keeps its first origins: mapped weights, such as cast ones, came from them, too
            stage = dataclasses.replace(self.stage, origins=(*self.stage.origins, *added))
            object.__setattr__(self, "stage", stage)


def _origins(kind: Literal["params", "state"], groups: dict[str, Any]) -> Iterator[Origin]:
    for path, leaf in jax.tree.leaves_with_path(groups):
        if isinstance(leaf, (jax.Array, np.ndarray)):
            yield Origin(kind, f"{kind}{jax.tree_util.keystr(path)}", weakref.ref(leaf))


def gather_stages(parts: Iterable[ModuleStage]) -> tuple[list[Stage], dict[str, Params], Tree]:
    """Return the stages of several modules, their weights and their state.

    An array, or an `nnx.Variable`, that two modules share would become one array per stage, each trained on its own. So
    it is refused, here and by `Pipeline`, even if the weights of the parts were cast or copied. To tie weights, send
    them from one stage to the other, as docs/how-to.md shows. A tie is not detected if the array of one module was
    replaced by a copy before its stage was made.

    Args:
        parts: from `linen_stage`, `nnx_stage` and `equinox_stage`, in the order of the pipeline.

    Returns:
        `(stages, params, state)`, for `Pipeline(stages)`, `Pipeline.shard(params)` and `Pipeline.shard_state(state)`,
        or for `step.init(params, stages=state)`. `state` is None if no stage has state.

    Raises:
        ValueError: a part is not a `ModuleStage`, two parts have a group of the same name, or their weights
            or state came from the same array.

    >>> half = ModuleStage(Stage(lambda w, x, mb: mb * w, params="half"), {"half": 0.5})
    >>> stages, params, state = gather_stages([half])
    >>> stages[0].name, params, state
    ('half', {'half': 0.5}, None)
    """
    stages: list[Stage] = []
    params: dict[str, Params] = {}
    state: dict[str, Tree] = {}
    for part in parts:
        if not isinstance(part, ModuleStage):
            raise ValueError(
                f"{part!r} is not a ModuleStage: give what linen_stage, nnx_stage or equinox_stage returned, or "
                "ModuleStage(Stage(...), params={group: weights})"
            )
        for kind, groups, new in (("params", params, part.params), ("state", state, part.state)):
            twice = groups.keys() & new.keys()
            if twice:
                raise ValueError(f"two stages have {kind} of the name {min(twice)!r}: give each stage another name")
            groups.update(new)
        stages.append(part.stage)
    check_untied(stages)
    return stages, params, state or None


def check_instance(module: Any, name: str) -> None:
    """Raise `ValueError` if a module is a class."""
    if isinstance(module, type):
        raise ValueError(f"module={module.__name__} of stage {name!r} is a class: give an instance of it")


def import_library(module: str) -> Any:
    """Return a module of Flax or Equinox, which are optional dependencies.

    Raises:
        ImportError: the module cannot be imported; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.split(".")[0]
        raise ImportError(f"{module} cannot be imported: pip install 'ipu-jax[{library}]'") from error


class ModuleCall(Protocol):
    """Calls a module: `(params, state, args, key)` to `(result, new state, loss to add)`; the last two can be None."""

    def __call__(self, params: Params, state: Tree, args: tuple[Tree, ...], key: Key, *, training: bool) -> Tree: ...


def make_module_stage(
    call: ModuleCall,
    name: str,
    params: Params,
    state: Tree,
    ipu: int | AllIpus,
    inputs: Inputs,
    loss: Callable[[Tree, Batch], Value] | None,
    random: bool,
    recompute: Recompute,
    takes: tuple[str, ...],
    sends: tuple[str, ...],
) -> ModuleStage:
    """Make the stage of a module that `call` runs.

    Args:
        call: runs the module in either mode.
        name: the name of the stage and of its groups.
        params, state: the initial weights and state; None or a tree without leaves if the module has none.
        ipu, recompute, random: as `Stage` takes them.
        inputs: the module's arguments.
        loss: for the last stage, a function of `(y, microbatch)`.
        takes: the names of the skips that the module gets.
        sends: the names of the skips that the module returns after y.

    Raises:
        ValueError: `name` is not a name, or `inputs`, `loss` or `sends` has the wrong type.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r} is not the name of a stage: give a string such as 'encoder'")
    if not (inputs is None or isinstance(inputs, str) or callable(inputs)):
        raise ValueError(
            f"inputs={inputs!r} of stage {name!r} is neither a leaf of the micro-batch nor a function: give a name "
            "such as 'images', a function of (x, microbatch) that returns a tuple, or None for the stage before"
        )
    if not (loss is None or callable(loss)):
        raise ValueError(f"loss={loss!r} of stage {name!r} is not callable: give a function of (y, microbatch)")
    if isinstance(sends, str) or not all(isinstance(skip, str) for skip in sends):
        raise ValueError(f"sends={sends!r} of stage {name!r} is not a tuple of names: give sends=('name',)")

    params, state = (tree if jax.tree.leaves(tree) else None for tree in (params, state))

    def in_mode(*, training: bool, finish: Callable[[Tree, Batch], Value] | None) -> Function:
        def run(
            params: Params, x: Tree, microbatch: Batch, *, state: Tree = None, key: Key = None, skips: Tree = None
        ) -> Outputs:
            args = _arguments(name, inputs, x, microbatch, takes, skips)
            result, new_state, added = call(params, state, args, key, training=training)
            y, sent = _sent(name, sends, result)
            y = y if finish is None else finish(y, microbatch)
            return Outputs(y, state=new_state, skips=sent, loss=added) if training else Outputs(y, skips=sent)

        return run

    stage = Stage(
        in_mode(training=True, finish=loss),
        params=None if params is None else name,
        ipu=ipu,
        name=name,
        recompute=recompute,
        state=None if state is None else name,
        random=random,
        takes=takes,
        evaluate=in_mode(training=False, finish=loss),
        predict=in_mode(training=False, finish=None),
    )
    return ModuleStage(stage, {} if params is None else {name: params}, {} if state is None else {name: state})


def _sent(name: str, sends: tuple[str, ...], result: Tree) -> tuple[Tree, dict[str, Tree]]:
    """Return a module's y, and the skips that follow it."""
    if not sends:
        return result, {}
    if not isinstance(result, tuple) or len(result) != 1 + len(sends):
        found = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ValueError(
            f"the module of stage {name!r} returns {found}, but sends={tuple(sends)!r}: return "
            f"(y, {', '.join(sends)}), or leave sends out"
        )
    return result[0], dict(zip(sends, result[1:], strict=True))


def _arguments(
    name: str, inputs: Inputs, x: Tree, microbatch: Batch, takes: tuple[str, ...], skips: Tree
) -> tuple[Tree, ...]:
    taken = tuple(skips[skip] for skip in takes)
    if inputs is None:
        if x is None:
            raise ValueError(
                f"stage {name!r} is the first one, and no stage before it gives it an input: say what its module reads "
                "of the micro-batch, such as inputs='images' or inputs=lambda x, microbatch: (microbatch,)"
            )
        return (x, *taken)
    if isinstance(inputs, str):
        try:
            return (microbatch[inputs], *taken)
        except (KeyError, TypeError, IndexError) as error:
            has = sorted(microbatch) if isinstance(microbatch, dict) else type(microbatch).__name__
            raise ValueError(
                f"stage {name!r} reads inputs={inputs!r} of the micro-batch, which is {has}: give one of its names, or "
                "a function of (x, microbatch)"
            ) from error
    args = inputs(x, microbatch, skips) if takes else inputs(x, microbatch)
    if not isinstance(args, tuple):
        raise ValueError(
            f"inputs of stage {name!r} returned {type(args).__name__}: return the tuple of the module's arguments, "
            "such as (x,)"
        )
    return args


# values that Flax modules sow: added to the loss, or dropped with one warning
#
# self.sow("losses", "balance", value)     losses={"losses": 0.01}  ->  0.01 x the sum of its elements, to the loss
# self.sow("metrics", "load", value)       not named                ->  dropped, with one warning
# self.sow("intermediates", "h", value)    not named                ->  dropped, as Flax itself does


def check_losses(name: str, losses: Losses, example: str) -> dict[Any, float]:
    """Return the weights of the losses of stage `name`; `example` is a key for the error message.

    Raises:
        ValueError: `losses` is not a mapping to finite numbers.
    """
    if losses is None:
        return {}
    weights = losses.values() if isinstance(losses, Mapping) else [None]
    if not all(isinstance(w, numbers.Real) and not isinstance(w, bool) and math.isfinite(w) for w in weights):
        raise ValueError(
            f"losses={losses!r} of stage {name!r} does not give each of them a finite weight: give a dict such as "
            f"{{{example}: 0.01}}"
        )
    return {what: float(weight) for what, weight in losses.items()}


def add_up(name: str, losses: Mapping[Any, float], sown: Mapping[Any, Value]) -> Value:
    """Return the weighted sum of all sown elements; None if all weights are 0.

    Args:
        name: the name of the stage.
        losses: the weights.
        sown: trees of arrays, named like the weights.

    Raises:
        ValueError: nothing was sown under one of the names.
    """
    total = None
    for what, weight in losses.items():
        if weight == 0:
            continue
        leaves = jax.tree.leaves(sown.get(what))
        if not leaves:
            raise ValueError(
                f"losses of stage {name!r} names {shown(what)}, into which its module sows nothing in training: leave "
                "it out, or give the name that the module's sow has"
            )
        for leaf in leaves:
            added = weight * jnp.sum(leaf, dtype=jnp.promote_types(jnp.result_type(leaf), jnp.float32))
            total = added if total is None else total + added
    return total


def warn_dropped(name: str, dropped: Iterable[Any]) -> None:
    """Warn that the module of stage `name` sows values under these names, and that they are dropped."""
    for what in sorted(map(shown, dropped)):
        warnings.warn(
            f"the module of stage {name!r} sows into {what}, which is dropped: give losses={{{what}: weight}} to add "
            f"it to the loss, or losses={{{what}: 0}} to drop it without this warning",
            stacklevel=2,
        )


def shown(what: Any) -> str:
    """Return a collection or a variable type as written in a program."""
    return what.__name__ if isinstance(what, type) else repr(what)
