"""Cut a function, and run its stages one after the other: plain jax on one device, without the engine.

What a cut decides is right or wrong in these stages alone: the operations, weights, state, keys and messages of each.
"""

from collections.abc import Callable
from typing import Any

from ipu_jax.core.cutting.function import FunctionModel, Source, model_of


def cut_into(stages: int, loss: Any, params: Any, micro_batch: Any, *, state: Any = None) -> FunctionModel:
    """Return a loss function as this number of stages, each on an IPU of its own."""
    return model_of(Source(loss, params, micro_batch, range(stages), stages, state=state))


def composed(model: FunctionModel) -> Callable[..., Any]:
    """Return a function of (params, state, micro-batch, key) that runs the stages.

    It returns `(loss, (aux, {group: new state}))`. Copies of one leaf of the state are in several groups.
    """

    def call(params: Any, state: Any, batch: Any, key: Any = None) -> Any:
        groups = model.weights.split(params)
        states = {} if model.state is None else model.state.split(state)
        x, aux, new = None, {}, dict(states)
        for stage in model.stages:
            given: dict[str, Any] = {"shared": {name: groups[name] for name in stage.shared}} if stage.shared else {}
            given |= {"state": states[stage.state]} if stage.state is not None else {}
            given |= {"key": key} if stage.random else {}
            outputs: Any = stage.fn(groups.get(stage.params or ""), x, batch, **given)
            x = outputs.y
            aux |= {stage.name: outputs.aux} if outputs.aux else {}
            new |= {stage.state: outputs.state} if stage.state is not None else {}
        return x, (model.whole_aux(aux), new)

    return call
