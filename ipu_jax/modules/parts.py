"""Make a stage of anything that is called with weights, state, arguments and a key, and gather such stages.

    module --linen_stage, nnx_stage, equinox_stage--> ModuleStage(stage, params, state) \\
    module -------------------------------------------> ModuleStage(stage, params, state)  gather_stages
    module -------------------------------------------> ModuleStage(stage, params, state) /
                                                              |
    Pipeline(stages, ...), pipeline.shard(params), pipeline.shard_state(state)
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from ipu_jax.devices import AllIpus
from ipu_jax.stage import Outputs, Stage

Inputs = str | Callable[[Any, Any], tuple[Any, ...]] | None
"""What a module is called with: None for the result of the stage before, a name for that leaf of the micro-batch, or a
function of `(x, microbatch)` that returns the tuple of arguments."""

Recompute = Literal["auto", "none", "all"] | Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class ModuleStage:
    """A module's stage, with the weights and the state that it starts with.

    A plain stage can stand between modules: `ModuleStage(Stage(fn, params="scale"), {"scale": weights})`.

    Attributes:
        stage: the stage, for `Pipeline`.
        params: `{group: pytree of whole weights}`, as `Pipeline.shard` takes it; empty if the stage has no weights.
        state: `{group: pytree of whole state}`, as `Pipeline.shard_state` takes it; empty if it has no state.
    """

    stage: Stage
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


def gather_stages(parts: Iterable[ModuleStage]) -> tuple[list[Stage], dict[str, Any], Any]:
    """Return the stages of several modules, their weights and their state.

    Args:
        parts: from `linen_stage`, `nnx_stage` and `equinox_stage`, in the order of the pipeline.

    Returns:
        `(stages, params, state)`, for `Pipeline(stages)`, `Pipeline.shard(params)` and `Pipeline.shard_state(state)`,
        or for `step.init(params, stages=state)`. `state` is None if no stage has state.

    Raises:
        ValueError: a part is not a `ModuleStage`, or two parts have a group of the same name.

    >>> half = ModuleStage(Stage(lambda w, x, mb: mb * w, params="half"), {"half": 0.5})
    >>> stages, params, state = gather_stages([half])
    >>> stages[0].name, params, state
    ('half', {'half': 0.5}, None)
    """
    stages: list[Stage] = []
    params: dict[str, Any] = {}
    state: dict[str, Any] = {}
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
    return stages, params, state or None


def import_library(module: str) -> Any:
    """Return a module of Flax or Equinox, which only those who use it have to install.

    Raises:
        ImportError: it cannot be imported; the message names the extra that has it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.split(".")[0]
        raise ImportError(f"{module} cannot be imported: pip install 'ipu-jax[{library}]'") from error


class Call(Protocol):
    """Calls a module: `(params, state, args, key)` to `(y, new state)`; the state is None if the module has none."""

    def __call__(self, params: Any, state: Any, args: tuple[Any, ...], key: Any, *, training: bool) -> Any: ...


def make_module_stage(
    call: Call,
    name: str,
    params: Any,
    state: Any,
    *,
    ipu: int | AllIpus,
    inputs: Inputs,
    loss: Callable[[Any, Any], Any] | None,
    random: bool,
    recompute: Recompute,
) -> ModuleStage:
    """Make the stage of a module that `call` runs.

    Args:
        call: runs the module in either mode.
        name: of the stage and of its groups.
        params, state: what the module starts with; None or a tree without leaves if it has none.
        ipu, recompute, random: as `Stage` takes them.
        inputs: what the module is called with.
        loss: of the last stage, a function of `(y, microbatch)`.

    Raises:
        ValueError: `name` is not a name, or `inputs` or `loss` is of the wrong kind.
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

    def in_mode(*, training: bool, finish: Callable[[Any, Any], Any] | None) -> Callable[..., Any]:
        def run(params: Any, x: Any, microbatch: Any, *, state: Any = None, key: Any = None) -> Outputs:
            y, new_state = call(params, state, _arguments(name, inputs, x, microbatch), key, training=training)
            return Outputs(y if finish is None else finish(y, microbatch), state=new_state if training else None)

        return run

    stage = Stage(
        in_mode(training=True, finish=loss),
        params=None if params is None else name,
        ipu=ipu,
        name=name,
        recompute=recompute,
        state=None if state is None else name,
        random=random,
        evaluate=in_mode(training=False, finish=loss),
        predict=in_mode(training=False, finish=None),
    )
    return ModuleStage(stage, {} if params is None else {name: params}, {} if state is None else {name: state})


def _arguments(name: str, inputs: Inputs, x: Any, microbatch: Any) -> tuple[Any, ...]:
    if inputs is None:
        if x is None:
            raise ValueError(
                f"stage {name!r} is the first one, and no stage before it gives it an input: say what its module reads "
                "of the micro-batch, such as inputs='images' or inputs=lambda x, microbatch: (microbatch,)"
            )
        return (x,)
    if isinstance(inputs, str):
        try:
            return (microbatch[inputs],)
        except (KeyError, TypeError, IndexError) as error:
            has = sorted(microbatch) if isinstance(microbatch, dict) else type(microbatch).__name__
            raise ValueError(
                f"stage {name!r} reads inputs={inputs!r} of the micro-batch, which is {has}: give one of its names, or "
                "a function of (x, microbatch)"
            ) from error
    args = inputs(x, microbatch)
    if not isinstance(args, tuple):
        raise ValueError(
            f"inputs of stage {name!r} returned {type(args).__name__}: return the tuple of the module's arguments, "
            "such as (x,)"
        )
    return args
