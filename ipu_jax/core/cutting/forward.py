"""Cut any other function of the weights that a loss function was cut for: its logits, its test loss, one decode step.

    loss      embed, layers 0-3 | layers 4-7 | layers 8-11, norm, table      where its stages hold the weights
    decode    embed, layers 0-3 | layers 4-7 | layers 8-11, norm, argmax     each operation where its weights are

The weights say where each operation belongs; the traces of the two functions are not compared. An operation that reads
weights of one stage runs there. Those that read none, or what all IPUs hold, run where the least is sent.
"""

import dataclasses
import functools

import jax

from ipu_jax.base.annotations import Batch, Function, Tree
from ipu_jax.base.checks import in_line
from ipu_jax.core.cutting import given
from ipu_jax.core.cutting.concurrent_head import with_concurrent_head
from ipu_jax.core.cutting.description import described
from ipu_jax.core.cutting.dividing import divide
from ipu_jax.core.cutting.everywhere import check_outside
from ipu_jax.core.cutting.function import FunctionModel, unsharded_call
from ipu_jax.core.cutting.holders import Holders, cut_along
from ipu_jax.core.cutting.stages import make_stage
from ipu_jax.core.layout.layout import PackedLayout


def forward_of(
    model: FunctionModel, fn: Function, inputs: Batch, state: Tree, placed: PackedLayout | None = None
) -> FunctionModel:
    """Return a function as stages that hold what the stages of the loss function hold.

    Args:
        model: the loss function's stages.
        fn: the function: of the weights, the state, inputs and perhaps a key.
        inputs: one micro-batch of its inputs, or their shapes.
        state: the function's own state, which it returns anew after its outputs; or None. Then it gets the loss
            function's state, if that has one, and leaves it as it is.
        placed: who holds the function's own state already, as another function of these weights has it; or None.

    Raises:
        ValueError: the function takes or returns something else, or reads weights in another order than the stages.
    """
    if not callable(fn):
        raise ValueError(f"fn={in_line(fn):.60} is not callable: give a function of (params, inputs)")
    source = model.source
    own = None if state is None else given.shapes("state", state)
    taken, microbatch = source.state if own is None else own, given.shapes("inputs", inputs)
    call = given.ForwardCall(fn, taken, [True] * len(model.weights.paths), source.cast, replaces_state=own is not None)
    trace, results, key = call.traced(source.params, microbatch, source.mesh, source.ipus)
    given.check_effects(trace)
    given.check_constants(trace)
    check_outside(trace.operations)
    if not trace.outputs:
        raise ValueError(f"fn returns {results[0]!r:.60}, without an array: return its outputs, any pytree of arrays")
    held_state = model.state if own is None else placed
    holders = Holders(model.stages, model.weights, held_state, ipus=source.ipus, replaces_state=own is not None)
    trace.frozen = {*trace.params}
    call_of = functools.partial(unsharded_call, trace, call, source.mesh, (source.params, taken, microbatch, key))
    if source.head == "concurrent":
        trace = with_concurrent_head(trace, source.ipus, source.mesh, holders.split(trace))
    as_written, trace = trace, trace.with_new_state_early()
    try:
        cut = cut_along(trace, holders, taken)
    except ValueError:
        if placed is None:
            raise
        trace = as_written  # a new value may belong to a later stage than what it follows from
        cut = cut_along(trace, holders, taken)
    division = dataclasses.replace(divide(trace, cut.of_stages, holders.homes), placed=holders.of_new_state(trace))
    held = holders.held(division)
    make = functools.partial(make_stage, division, held, microbatch, outputs=results[0], in_place=True)
    places = [(stage.name, stage.ipu) for stage in model.stages]
    stages = tuple(make(s, name=name, ipu=ipu) for s, (name, ipu) in enumerate(places))
    stages = tuple(dataclasses.replace(stage, predict=stage.fn) for stage in stages)
    return FunctionModel(
        stages=stages,
        weights=model.weights,
        state=held.state_layout(own) if own is not None else model.state,
        call=call_of(results),
        aux=jax.tree.structure(None),
        aux_home=(),
        microbatch=microbatch,
        key=key,
        trace=trace,
        cut=cut,
        source=source,
        outputs=results[0],
        resized=lambda other, like: forward_of(model, fn, other, own, None if own is None else like.state),
        describe=lambda: described(division, cut, stages, held),
    )
