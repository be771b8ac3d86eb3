"""Test that a model is divided alike however it is written: what each IPU holds, what it computes, and the work.

The even share is counted from shapes alone. Tied leaves apart, the largest IPU may hold 1.1 of it.
"""

import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from ipu_jax import Pipeline, TrainOptions, make_train_step
from ipu_jax.core.cutting.cut import work_of
from ipu_jax.core.cutting.function import Source, model_of
from ipu_jax.core.cutting.trace import trace_of
from ipu_jax.core.layout.tree_parts import joined
from support.composed import composed, cut_into
from support.dense import largest_relative_error

from . import spellings, state_spellings
from .spellings import SPELLINGS, spelling
from .state_spellings import STATES, state_spelling

MOST = 1.1
FEW = (
    *("scan", "loop", "take", "fori_loop", "weight norm, scan", "linen, axis 1", "scan of scans", "flat vector"),
    *("quantised per layer, scan", "lora, einsum", "L2 of all leaves", "norm as aux", "even and odd rows"),
    *("checkpoints that close over the stack", "list stacked by the function"),
)
"""The spellings whose half precision is tested by a fast test: one of each kind."""
FEWER = ("fori_loop", "flat vector", "lora, einsum", "even and odd rows", "norm as aux", "L2 of all leaves")
"""The spellings whose numbers are tested by a fast test."""
FEWER_STATES = ("scan, columns", "loop, stack along 1", "at[k].set", "reversed scan", "scan, cast first")
NEVER = {
    "both runs read each row, and tied layers are on all IPUs": ("scan twice",),
    "each IPU has room for parts of one row and of two": ("unlike stacks-2",),
    "a leaf is divided along one dim, and here groups and their layers are two": ("linen, remat_scan-4",),
    "it counts over all rows at once": ("histogram as aux",),
    "the mean of all rows is needed where each of them is": ("variance as aux",),
}
"""Reasons why the layers of a spelling cannot be divided, or only over fewer IPUs, and these spellings."""


def cases(*named: Any) -> list[Any]:
    """Return all combinations as parameters; what cannot pass must fail."""
    why = {name: reason for reason, names in NEVER.items() for name in names}
    found = []
    for values in itertools.product(*named):
        keys = ["-".join(map(str, values[:count])) for count in range(1, len(values) + 1)]
        reasons = [why[key] for key in keys if key in why]
        marks = (
            [pytest.mark.xfail(strict=True, raises=(AssertionError, ValueError), reason=reasons[0])] if reasons else []
        )
        found.append(pytest.param(*values, id=keys[-1], marks=marks))
    return found


def bytes_of(tree: Any) -> int:
    """Return the bytes of each IPU: it holds one shard of each array, which is as large as every other."""
    local = lambda leaf: int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
    return sum(map(local, jax.tree.leaves(tree)))


@pytest.mark.fast(*(f"{name}-4-32.32" for name in [*SPELLINGS][::2]), *(f"{name}-4-16.32" for name in FEW))
@pytest.mark.parametrize(("name", "ipus", "precision"), cases(SPELLINGS, (2, 4), ("32.32", "16.32", "16.16")))
def test_each_ipu_holds_its_share_of_the_layers(name, ipus, precision):
    """So it does with adam's state. All IPUs have room for the head."""
    loss, params = spelling(name)
    pipe = Pipeline.from_function(loss, params, spellings.BATCH, ipus=ipus, gradient_accumulation=4)
    state = make_train_step(pipe, optax.adam(1e-3), TrainOptions(precision=precision)).shapes(params)
    layers = sum(leaf.size for leaf in jax.tree.leaves(params)) - params["head"].size
    share = (layers / ipus + params["head"].size) * (2 if precision == "16.16" else 4)
    assert bytes_of(state.params) < MOST * share
    assert bytes_of((state.params, state.optimizer)) < MOST * 3 * share


@pytest.mark.fast(*(f"{name}-4" for name in FEWER))
@pytest.mark.parametrize("ipus", [2, 4])
@pytest.mark.parametrize("name", SPELLINGS)
def test_the_stages_compute_what_the_function_computes(name, ipus):
    loss, params = spelling(name)
    run = lambda p, mb: (lambda found: found if isinstance(found, tuple) else (found, None))(loss(p, mb))
    expected = jax.jit(jax.value_and_grad(run, has_aux=True))(params, spellings.BATCH)
    stages = composed(cut_into(ipus, loss, params, spellings.BATCH))
    (value, (aux, _)), gradients = jax.jit(jax.value_and_grad(stages, has_aux=True))(params, None, spellings.BATCH)
    assert largest_relative_error(((value, aux), gradients), expected) < 1e-5


def lightest(loss: Any, params: Any, state: Any, stages: int) -> float:
    """Return the heaviest stage's part of the work in the best of all cuts, wherever the state is."""
    run = lambda p, s, mb, _: (lambda value, new: (value, None, new))(*loss(p, s, mb))
    trace, _ = trace_of(run, params, state, state_spellings.BATCH, None)
    done = np.cumsum([*work_of(trace).values()])
    cuts = np.array([*itertools.combinations(np.unique(done), stages - 1)])
    ends = np.concatenate([np.zeros((len(cuts), 1)), cuts, np.full((len(cuts), 1), done[-1])], 1)
    return np.diff(ends).max(1).min() / done[-1]


@pytest.mark.fast(*(f"{name}-4" for name in STATES if name != "linen under vmap"))
@pytest.mark.parametrize(("name", "ipus"), cases(STATES, (2, 4)))
def test_state_is_where_its_layers_are_and_leaves_the_work_even(name, ipus):
    loss, params, state = state_spelling(name)
    model = cut_into(ipus, loss, params, state_spellings.BATCH, state=state)
    assert model.state is not None
    held = model.state.split(jax.eval_shape(lambda: state))
    numbers = [sum(leaf.size for leaf in held.get(stage.state or "", ())) for stage in model.stages]
    assert max(numbers) <= MOST * sum(np.size(leaf) for leaf in jax.tree.leaves(state)) / ipus
    assert max(model.cut.work) / sum(model.cut.work) <= 1.05 * lightest(loss, params, state, ipus)


@pytest.mark.fast(*(f"{name}-4" for name in FEWER_STATES))
@pytest.mark.parametrize("ipus", [2, 4])
@pytest.mark.parametrize("name", STATES)
def test_the_stages_compute_the_new_state(name, ipus):
    loss, params, state = state_spelling(name)
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, state, state_spellings.BATCH)
    model = cut_into(ipus, loss, params, state_spellings.BATCH, state=state)
    assert model.state is not None
    run = jax.jit(jax.value_and_grad(composed(model), has_aux=True))
    (value, (_, new)), gradients = run(params, state, state_spellings.BATCH)
    assert largest_relative_error(((value, joined(model.state.join(new))), gradients), expected) < 1e-5


def test_a_function_can_be_divided_twice_and_its_state_as_well():
    """Traced costs divide it at every waist first, and then into as many stages: here these are the same."""
    loss, params, state = state_spelling("scan, averaged late")
    places = range(len(state["m"]))
    model = model_of(Source(loss, params, state_spellings.BATCH, places, len(places), state=state, costs="traced"))
    assert model.state is not None
    value, (_, new) = jax.jit(composed(model))(params, state, state_spellings.BATCH)
    expected = jax.jit(loss)(params, state, state_spellings.BATCH)
    assert largest_relative_error((value, joined(model.state.join(new))), expected) < 1e-6
