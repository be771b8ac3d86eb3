"""Test that weights decide where a layer runs: an even share on each IPU, few messages, and the function's numbers."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, stage_end, verify
from ipu_jax.base.jaxprs import CHECKPOINTS, all_equations, variables
from ipu_jax.core.cutting.order import by_weights
from ipu_jax.core.cutting.trace import trace_of
from support.composed import composed, cut_into
from support.dense import largest_relative_error
from support.inputs import normal

from . import runs_of_layers
from .runs_of_layers import SHARES
from .test_whole_models import MODELS

EXAMPLES = {
    make.__name__: functools.cache(make) for make in (*SHARES, runs_of_layers.gan, runs_of_layers.forth_and_back)
}
MOVED = "operations that read the same weights are in one stage, wherever they are in the function"


def one_of(name, seed=0):
    return EXAMPLES[name]().micro_batch(np.random.default_rng(seed))


def pipeline(name: str, **options: Any) -> Any:
    example = EXAMPLES[name]()
    options |= {} if example.state is None else {"state": example.state}
    return Pipeline.from_function(example.loss, example.params, one_of(name), **options)


def shares(pipe, params, apart=()):
    """Return the bytes of weights on each IPU, without some leaves, over an even share, from the groups alone."""
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(params)]
    home = {stage.params: stage.ipu for stage in pipe.stages}
    held, total = np.zeros(pipe.mesh.size), 0
    for group, parts in pipe.function.weights.parts_of_groups.items():
        for part in parts:
            path, leaf = leaves[part.leaf]
            rows = np.shape(leaf)[part.axis] if part.rows else 1
            size = leaf.nbytes * (part.rows[1] - part.rows[0] if part.rows else 1) / rows
            if not any(name in path for name in apart):
                held[home.get(group, slice(None))] += size
    total = sum(leaf.nbytes for path, leaf in leaves if not any(name in path for name in apart))
    return held * pipe.mesh.size / total


@pytest.mark.parametrize("ipus", [2, 4])
@pytest.mark.parametrize("name", [make.__name__ for make in SHARES])
def test_each_ipu_holds_an_even_share_and_little_is_sent(name, ipus):
    pipe, example = pipeline(name, ipus=ipus, schedule="1f1b", gradient_accumulation=4), EXAMPLES[name]()
    assert shares(pipe, example.params, apart=["table", "head"]).max() < 1.15
    sent = [int(count) for count in re.findall(r"(\d+) arrays?, ", str(pipe))]
    assert max(sent) <= dict((make.__name__, count) for make, count in SHARES.items())[name]
    assert MOVED in str(pipe)
    work = np.array(pipe.function.cut.work)
    assert work.max() < 1.15 * work.mean()


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.fast("4-dpo_of_a_list", "4-target_of_a_stack_that_moves_first", "2-gan", "4-batch_norm_on_both")
def test_the_stages_compute_what_the_function_computes(stages, name):
    example, one = EXAMPLES[name](), one_of(name, seed=1)
    key = jax.random.key(3) if example.takes_key else None
    args = [one] if example.state is None else [example.state, one]

    def whole(params):
        found = example.loss(params, *args, *([] if key is None else [key]))
        return found if isinstance(found, tuple) else (found, None)

    model = cut_into(stages, example.loss, example.params, one, state=example.state)
    run = jax.jit(jax.value_and_grad(composed(model), has_aux=True))
    (value, (_, of_groups)), gradients = run(example.params, example.state, one, key)
    (expected, state), wanted = jax.jit(jax.value_and_grad(whole, has_aux=True))(example.params)
    assert largest_relative_error((value, gradients), (expected, wanted)) < 1e-5
    if model.state is not None:
        assert largest_relative_error(of_groups, model.state.split(state)) < 1e-5


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.fast("siamese_stack-1f1b", "target_of_a_list-zb-h1")
def test_the_engine_computes_what_the_function_computes(name, schedule):
    example = EXAMPLES[name]()
    pipe = pipeline(name, ipus=4 if schedule == "1f1b" else 2, schedule=schedule, gradient_accumulation=3)
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *(one_of(name, seed) for seed in range(3)))
    state = None if example.state is None else pipe.shard_state(example.state)
    key = jax.random.key(3) if example.takes_key else None
    verify(pipe, pipe.shard(example.params), batch, state=state, key=key)


def test_no_whole_model_is_in_another_order():
    for name, make in MODELS.items():
        example = make()
        one = example.micro_batch(np.random.default_rng(0))
        model = cut_into(4, example.loss, example.params, one, state=example.state)
        assert MOVED not in str(model.described), name


@pytest.mark.parametrize(
    ("ipus", "schedule", "most"),
    [(2, "1f1b", 1.3), (4, "1f1b", 1.5), *((ipus, schedule, 1.3) for ipus in (2, 4) for schedule in ("zbv", "looped"))],
)
def test_a_generator_runs_once_and_its_critic_twice(ipus, schedule, most):
    """In one line of 4 stages with even work, the first has layers of the generator alone, and 1.5 of an even share.

    With two stages on each IPU, its second stage has layers of the critic.
    """
    pipe = pipeline("gan", ipus=ipus, schedule=schedule, gradient_accumulation=4)
    assert shares(pipe, EXAMPLES["gan"]().params).max() <= most


def test_layers_that_run_forth_and_back_share_an_ipu_if_the_line_does():
    params = EXAMPLES["forth_and_back"]().params
    one_line = pipeline("forth_and_back", ipus=4, schedule="1f1b", gradient_accumulation=4)
    assert shares(one_line, params).max() == pytest.approx(4, rel=0.1)
    there_and_back = pipeline("forth_and_back", ipus=4, schedule="zbv", gradient_accumulation=4)
    assert shares(there_and_back, params).max() < 1.15


def test_a_checkpoint_around_a_tower_is_one_in_each_stage():
    """Operations of two towers alternate in the order of the weights; a stage runs them in the function's order."""
    name = "siamese_under_checkpoints"
    model = cut_into(4, EXAMPLES[name]().loss, EXAMPLES[name]().params, one_of(name))
    groups, x = model.weights.split(EXAMPLES[name]().params), None
    for stage in model.stages:
        assert stage.params is not None
        run = functools.partial(stage.fn, groups[stage.params], x, one_of(name))
        found = [eqn for eqn in all_equations(jax.make_jaxpr(run)().jaxpr) if eqn.primitive.name in CHECKPOINTS]
        assert len(found) == 2
        x = run().y


STACK = normal((8, 16, 16), seed=0)
X = jnp.ones((4, 16))


def tower(p, x, mark=lambda x: x):
    for k in range(len(p)):
        x = mark(jnp.tanh(x @ p[k]))
    return x


def test_marks_of_two_towers_are_places_after_both():
    loss = lambda p, x: jnp.mean(tower(p, x, stage_end) * tower(p, -x, stage_end))
    model = cut_into(4, loss, STACK, X)
    assert MOVED in str(model.described)
    assert [leaf.part.rows for leaf in model.weights.leaves] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_a_table_that_most_weights_are_in_does_not_hide_the_layers():
    """It is read at both ends of two towers, so no order can divide it."""
    params, ids = {"table": normal((500, 16), seed=1), "layers": list(STACK)}, np.arange(8).reshape(2, 4)

    def loss(p, ids):
        one, other = (tower(p["layers"], p["table"][row]) for row in ids)
        return jnp.mean((one - p["table"][other.argmax(-1)]) ** 2)

    model = cut_into(4, loss, params, ids)
    assert MOVED in str(model.described)
    assert [len(parts) for name, parts in model.weights.parts_of_groups.items() if "shared" not in name] == [2, 2, 2, 2]


@pytest.mark.parametrize("seed", range(6))
def test_any_order_follows_from_what_is_read(seed):
    """Layers run in any order, on any earlier result: each operation is there once, after what it reads."""
    rng = np.random.default_rng(seed)
    calls = [(int(rng.integers(8)), int(rng.integers(n + 1))) for n in range(20)]

    def loss(p, x):
        values = [x]
        for k, n in calls:
            values.append(jnp.tanh(values[n] @ p[k]) + values[n])
        return sum(jnp.mean(value) for value in values[1:]), None, None

    trace, _ = trace_of(lambda p, s, x, key: loss(p, x), list(STACK), None, X, None)
    order = by_weights(trace, trace.reads)
    assert sorted(map(id, order.operations)) == sorted(map(id, trace.activations))
    made = {v for op in order.operations for v in op.outvars}
    seen = set()
    for op in order.operations:
        assert made.intersection(variables(op.invars)) <= seen
        seen.update(op.outvars)
    for first, last in order.together:
        read = [trace.reads[id(op)] for op in order.operations[first : last + 1]]
        assert all(set.union(*read[:k]) & set.union(*read[k:]) for k in range(1, len(read)))
    run = lambda p, mb: loss(p, mb)[0]
    for count in (2, 3):
        stages = composed(cut_into(count, run, list(STACK), X))
        value, gradients = jax.value_and_grad(lambda p, stages=stages: stages(p, None, X)[0])(list(STACK))
        expected = jax.value_and_grad(run)(list(STACK), X)
        assert largest_relative_error((value, gradients), expected) < 1e-5


def test_a_new_state_that_is_a_number_is_no_operation():
    loss = lambda p, s, x: (jnp.mean(tower(p, x) * tower(p, -x)) + s, 0.5)
    model = cut_into(2, loss, STACK, X, state=np.float32(1))
    assert MOVED in str(model.described)
    value, (_, new) = composed(model)(STACK, np.float32(1), X)
    assert float(value) == pytest.approx(float(loss(STACK, 1, X)[0]), rel=1e-5)
    assert jax.tree.leaves(new) == [0.5]


def test_an_order_that_makes_one_ipu_much_busier_is_named_and_left():
    """Of four layers with equal weights the first has nearly all of the work, in each of two towers."""
    pooled = lambda p, x: tower(p[1:], jnp.tanh(x @ p[0]).mean(0))
    loss = lambda p, x: jnp.mean(pooled(p, x) * pooled(p, -x))
    pipe = Pipeline.from_function(loss, list(STACK[:4]), jnp.ones((400, 16)), ipus=2, gradient_accumulation=2)
    lines = str(pipe).splitlines()
    assert lines[-1].startswith("ordered by weights, an IPU would have up to 3.1 kB of them, but the busiest IPU ")
    assert re.search(r"\d\d% more work: take more layers, or fewer IPUs$", lines[-1])
