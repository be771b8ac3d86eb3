"""Test where functions are cut: even stages, at waists, at marks, between layers, and under one checkpoint each."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ipu_jax import Pipeline, everywhere, stage_end
from ipu_jax.core.cutting.cut import Places, work_of
from ipu_jax.core.cutting.trace import trace_of
from ipu_jax.costs import measure_costs
from support.dense import largest_relative_error
from support.inputs import normal

X = jnp.ones((4, 8))


def cut_of(loss, params, stages, micro_batch=X, **options):
    function = Pipeline.from_function(loss, params, micro_batch, ipus=stages, **options).function
    assert function is not None
    return function


def chain(widths):
    """Return a loss with a product per width, and its weights."""
    weights = [normal((m, n), seed=k) for k, (m, n) in enumerate(itertools.pairwise([8, *widths]))]

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return loss, weights


def looped(p, x):
    for w in p:
        x = jnp.tanh(x @ w)
    return x


def places_of(loss, params):
    program, _ = trace_of(lambda p, s, x, k: (loss(p, x), None, None), params, None, X, None)
    return Places(program, work_of(program))


def brute_force(places, stages):
    """Return the work of the heaviest stage of the best of all cuts at waists."""
    total = np.cumsum(places.work)
    waists = np.flatnonzero(places.allowed & places.is_waist)
    ends = [
        np.concatenate([[0.0], total[list(chosen)], total[-1:]])
        for chosen in itertools.combinations(waists, stages - 1)
    ]
    return min(np.diff(of_cut).max() for of_cut in ends)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([2, 8, 24, 40]), min_size=3, max_size=6), st.integers(2, 4))
def test_the_heaviest_stage_is_within_5_percent_of_the_best_cut_of_all(widths, stages):
    loss, params = chain(widths)
    assert max(cut_of(loss, params, stages).cut.work) <= 1.05 * brute_force(places_of(loss, params), stages)


def test_work_is_counted_as_stages_count_it():
    """A product with weights takes F, and as much again for the weights' gradient, and for x's where x has one."""
    loss, params = chain([16, 4])
    first, second = cut_of(loss, params, 2).cut.work
    assert first == pytest.approx(2 * 2 * 4 * 8 * 16, rel=0.2)
    assert second == pytest.approx(3 * 2 * 4 * 16 * 4, rel=0.2)


def test_a_block_under_a_checkpoint_counts_its_f_once_more():
    def loss(p, x):
        for w in p:
            x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
        return jnp.mean(x**2)

    _, params = chain([8] * 6)  # each block is too small a part to be opened
    plain, again = places_of(chain([8] * 6)[0], params).work, places_of(loss, params).work
    assert sum(again) - sum(plain) == 6 * (2 * 4 * 8 * 8 + 4 * 8)


def stopped_weights(p, x):
    y = x
    for w in p:
        y = jnp.tanh(y @ jax.lax.stop_gradient(w))
    return y


@pytest.mark.parametrize(
    "teacher",
    [
        stopped_weights,
        lambda p, x: jax.lax.stop_gradient(stopped_weights(p, x)),
        lambda p, x: jax.lax.stop_gradient(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(p))[0]),
        lambda p, x: jax.checkpoint(lambda p, x: jax.lax.stop_gradient(looped(p, x)))(p, x),
        lambda p, x: jnp.argmax(looped(p, x), 1, keepdims=True).astype(jnp.float32),
    ],
    ids=["weights", "weights and result", "scan", "checkpoint", "ints"],
)
def test_nothing_behind_a_stop_gradient_is_differentiated(teacher):
    _, params = chain([8] * 8)
    loss = lambda p, x: jnp.mean((looped(p, x) - teacher(p, x)) ** 2)
    plain = sum(places_of(lambda p, x: jnp.mean(looped(p, x) ** 2), params).work)
    forward = 8 * (2 * 4 * 8 * 8 + 4 * 8)
    assert sum(places_of(loss, params).work) == pytest.approx(plain + forward, abs=6 * X.size)


def test_no_stage_runs_b_for_what_a_later_stage_stops():
    """The border is between the value and its `stop_gradient`."""
    loss = lambda p, x: jnp.mean((looped(p, x) - jax.lax.stop_gradient(looped(p, x))) ** 2)
    _, params = chain([8] * 8)
    function = cut_of(loss, params, 4)
    costs = measure_costs(function.stages, function.weights.split(params), X)
    assert costs == pytest.approx(function.cut.work, rel=0.1)


def test_what_is_computed_for_aux_alone_has_no_b():
    _, params = chain([8] * 6)
    program, _ = trace_of(lambda p, s, x, k: (jnp.mean(x @ p[0]), looped(p, x), None), params, None, X, None)
    assert sum(work_of(program).values()) == pytest.approx((2 + 6) * 2 * 4 * 8 * 8, rel=0.1)


SCANS = {
    "over stacked weights": lambda p, x: jax.lax.scan(lambda x, w: (x @ w, None), x, p),
    "with one weight": lambda p, x: jax.lax.scan(lambda x, _: (x @ p[0], None), x, length=len(p)),
}


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_each_iteration_of_a_scan_counts_its_f_and_its_b(scan):
    """B takes two products, for the gradients of x and w."""
    work = places_of(lambda p, x: jnp.mean(scan(p, x)[0]), jnp.ones((6, 8, 8))).work
    assert sum(work) == pytest.approx(6 * 3 * 2 * 4 * 8 * 8, rel=0.02)


def test_traced_work_is_the_work_of_the_stages():
    loss, params = chain([16, 24, 8, 8])
    function = cut_of(loss, params, 3, costs="traced")
    costs = measure_costs(function.stages, function.weights.split(params), X)
    assert function.cut.work == pytest.approx(costs)
    assert max(costs) <= 1.05 * max(cut_of(loss, params, 3).cut.work)


def attention(p, x):
    q, k, v = (x @ p[name] for name in "qkv")
    return x + jax.nn.softmax(q @ k.T) @ v


BLOCK = {name: normal((8, 8), seed=n) for n, name in enumerate("qkv")}


def test_cuts_are_at_waists_where_these_give_even_stages():
    loss = lambda p, x: jnp.mean(attention(p[2], attention(p[1], attention(p[0], x))) ** 2)
    cut = cut_of(loss, [BLOCK] * 3, 3).cut
    assert cut.at_waists
    assert cut.sent == (X.nbytes, X.nbytes)
    assert cut.waists < cut.places


def test_where_no_value_is_alone_the_cut_takes_all_that_are_live():
    def loss(p, x):  # each layer reads the results of all before it
        found = [x]
        for w in p:
            found.append(jnp.tanh(sum(found) @ w))
        return jnp.mean(sum(found) ** 2)

    cut = cut_of(loss, [normal((8, 8), seed=k) for k in range(6)], 3).cut
    assert not cut.at_waists
    assert max(cut.work) <= 1.2 * sum(cut.work) / 3
    assert all(sent <= 5 * X.nbytes for sent in cut.sent)


def test_no_stage_is_left_without_work_to_send_less():
    def loss(p, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)
        return jnp.mean(x**2)

    cut = cut_of(loss, normal((5, 8, 8), seed=0), 4).cut
    assert min(cut.work) > 0.15 * sum(cut.work)


def test_a_large_head_is_not_cut_apart_to_send_its_result():
    widths = [8, 64, 64, 64, 64]
    layers = [normal(shape, seed=k) for k, shape in enumerate(itertools.pairwise(widths))]
    params = {"layers": layers, "head": normal((64, 400))}

    def loss(p, x):
        for w in p["layers"]:
            x = jnp.tanh(x @ w)
        return jnp.mean(jax.nn.logsumexp(x @ p["head"], 1))

    cut = cut_of(loss, params, 4).cut
    assert max(cut.sent) == 4 * 64 * 4  # not 4 * 400 * 4
    assert min(cut.work) > 0.01 * sum(cut.work)  # not a stage for the mean alone, which would send less


def test_a_loss_that_early_layers_make_is_sent_to_the_last_stage():
    """`sent` counts all that a stage returns to the next one: here also the loss, while aux is still computed."""
    _, params = chain([8] * 6)

    def loss(p, x):
        means = []
        for w in p:
            x = jnp.tanh(x @ w)
            means.append(jnp.mean(x**2))
        return means[0] + 0 * means[-1], means[-1]

    function = cut_of(loss, params, 3)
    weights, sent, nbytes = function.weights.split(params), None, []
    for stage in function.stages:
        sent = jax.eval_shape(stage.fn, weights[str(stage.params)], sent, X).y
        nbytes.append(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sent)))
    assert function.cut.sent == (X.nbytes + 4, X.nbytes + 4) == (*nbytes[:2],)


MARKED = [normal((8, 8), seed=k) for k in range(6)]


def marked(p, x, mark):
    for k, w in enumerate(p):
        x = jnp.tanh(x @ w)
        x = mark(x) if k in (0, 3) else x
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    ("mark", "options"),
    [
        (stage_end, {}),
        (lambda x: checkpoint_name(x, "layer"), {"cuts": ["layer"]}),
    ],
)
def test_marks_say_where_to_cut(mark, options):
    function = cut_of(lambda p, x: marked(p, x, mark), MARKED, 3, **options)
    assert function.cut.marked
    assert [len(group.leaves) for group in function.weights.groups] == [1, 3, 2]
    assert any("marks" in str(line) for line in function.described)
    assert len(cut_of(lambda p, x: marked(p, x, mark), MARKED, 2, **options).cut.ends) == 2  # the better of both


def scan_over_layers(p, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["w"] + w["b"]), None), x, p["layers"])
    return jnp.mean(x**2)


STACKED = {"layers": {"w": normal((6, 8, 8), seed=0), "b": jnp.zeros((6, 8))}}


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_a_checkpoint_around_all_layers_becomes_one_like_it_in_each_stage(policy):
    run = jax.checkpoint(scan_over_layers, policy=policy, prevent_cse=False)
    function = cut_of(lambda p, x: run(p, x) * 1.0, STACKED, 3)
    for stage, parts in zip(function.stages, function.weights.parts_of_groups.values(), strict=True):
        weights = [jax.tree.leaves(STACKED)[part.leaf][slice(*part.rows or ())] for part in parts]
        x = (X,) if stage.ipu else None
        program = jax.make_jaxpr(lambda w, x, stage=stage: stage.fn(w, x, X).y)(weights, x)
        (found,) = [eqn.params for eqn in program.eqns if eqn.primitive.name == "remat2"]
        assert (found["policy"], found["prevent_cse"]) == (policy, False)


def test_a_penalty_of_all_weights_stays_with_the_weights():
    loss, params = chain([8, 8, 8, 8])
    penalised = lambda p, x: loss(p, x) + 0.1 * sum(jnp.sum(w**2) for w in p)
    function = cut_of(penalised, params, 4)
    assert [len(group.leaves) for group in function.weights.groups] == [1] * 4
    assert not any(stage.shared for stage in function.stages)
    assert all(sent <= X.nbytes + 8 for sent in function.cut.sent)


def test_what_only_weights_and_batch_decide_is_computed_again_and_not_sent():
    def loss(p, x):
        mask = jnp.tril(jnp.ones((4, 4)))
        scale = jnp.where(x > 0, 1.0, 2.0)
        for w in p:
            x = jnp.tanh(mask @ (x @ w.astype(jnp.float32))) * scale
        return jnp.mean(x**2)

    assert cut_of(loss, [normal((8, 8), seed=k) for k in range(3)], 3).cut.sent == (X.nbytes, X.nbytes)


@pytest.mark.parametrize(
    "late",
    [
        lambda p, means, old: [jnp.clip(mean, -9, 9) for mean in means],
        lambda p, means, old: [0.9 * average + 0.1 * w for w, average in zip(p, old, strict=True)],
    ],
    ids=["clipped at the end", "averages of weights"],
)
def test_a_new_state_belongs_to_its_layer_wherever_it_is_computed(late):
    def loss(p, state, x):
        means = []
        for w, average in zip(p, state, strict=True):
            means.append(0.9 * average + 0.1 * x.mean(0))
            x = jnp.tanh((x - average.mean(0)) @ w)
        return jnp.mean(x**2), late(p, means, state)

    weights = [normal((8, 8), seed=k) for k in range(8)]
    model = cut_of(loss, weights, 4, state=weights)
    assert max(model.cut.work) < 1.1 * np.mean(model.cut.work)
    assert len(model.weights.leaves) == len(weights)  # none is held twice
    assert model.state is not None
    assert len(model.state.groups) == 4


def test_print_says_which_state_keeps_the_work_in_one_stage():
    def stacked(p, state, x):
        x, means = jax.lax.scan(lambda x, ws: (jnp.tanh((x - ws[1]) @ ws[0]), x.mean(0)), x, (p["w"], state["mean"]))
        new = {"mean": means / jnp.linalg.norm(means), "count": state["count"] + 1}
        return jnp.mean(jnp.tanh(jnp.tanh(x)) ** 2), new

    state = {"count": jnp.zeros(()), "mean": jnp.zeros((6, 8))}
    text = str(Pipeline.from_function(stacked, {"w": normal((6, 8, 8))}, X, ipus=3, state=state))
    assert "state['mean'] keeps 9" in text
    assert "hold one leaf per layer" in text


def test_print_says_where_and_why():
    def loss(p, x):
        with jax.named_scope("encoder"):
            x = jnp.tanh(x @ p["table"])
        with jax.named_scope("decoder"):
            return jnp.mean((x @ p["w"] @ p["table"].T) ** 2)

    text = str(Pipeline.from_function(loss, {"table": normal((8, 8), seed=0), "w": normal((8, 8), seed=1)}, X, ipus=2))
    for words in ("encoder", "decoder", "test_places.py:"):
        assert words in text


def test_the_program_names_the_users_modules_within_each_task():
    def loss(p, x):
        with jax.named_scope("encoder"):
            return jnp.mean(jnp.tanh(x @ p[0]) @ p[1] ** 2)

    pipeline = Pipeline.from_function(loss, [normal((8, 8)), normal((8, 8), seed=1)], X, ipus=2)
    text = (
        jax.jit(pipeline.value_and_grad).lower(pipeline.shard([normal((8, 8))] * 2), X[None]).as_text(debug_info=True)
    )
    for task in "FB":
        assert re.search(rf"ipu_jax\.{task}\.\d+/while/body/[\w()]*\(encoder\)+/dot_general", text)


@pytest.mark.slow
def test_a_state_that_the_end_replaces_keeps_its_readers_in_one_stage():
    def loss(p, state, x):  # written by the fourth of six layers, read by the second
        kept = state
        for k, w in enumerate(p):
            x = jnp.tanh(x @ w) * (state["scale"] if k == 1 else 1.0)
            kept = {"scale": jnp.mean(x)} if k == 3 else kept
        return jnp.mean(x**2), kept

    _, params = chain([8] * 6)
    state = {"scale": np.float32(0.5)}
    pipeline = Pipeline.from_function(loss, params, X, ipus=3, state=state, gradient_accumulation=2)
    batch = jnp.stack([X, 2 * X])
    value, gradients, new = pipeline.value_and_grad(pipeline.shard(params), batch, pipeline.shard_state(state))
    (first, s), g1 = jax.value_and_grad(loss, has_aux=True)(params, state, X)
    (second, s), g2 = jax.value_and_grad(loss, has_aux=True)(params, s, 2 * X)
    np.testing.assert_allclose(value, (first + second) / 2, rtol=1e-6)
    np.testing.assert_allclose(pipeline.unshard(new)["scale"], s["scale"], rtol=1e-6)
    for actual, one, other in zip(pipeline.unshard(gradients), g1, g2, strict=True):
        np.testing.assert_allclose(actual, (one + other) / 2, rtol=1e-5, atol=1e-7)


def test_a_leaf_that_two_stages_of_one_ipu_read_is_there_once():
    def loss(p, x):
        return jnp.mean((jnp.tanh(jnp.tanh(x @ p["table"]) @ p["w"]) @ p["table"].T) ** 2)

    params = {"table": normal((8, 8)), "w": normal((8, 8), seed=1)}
    stages = Pipeline.from_function(loss, params, X, ipus=1, schedule="zbv").stages
    assert [(stage.params, stage.shared) for stage in stages] == [("stage 0", ()), ("stage 0", ())]


def test_a_cell_of_a_notebook_has_no_line():
    """Jupyter calls the file of a cell by a number, which says nothing to its reader."""
    source = "import jax.numpy as jnp\n\n\ndef loss(p, mb):\n    return jnp.mean(jnp.tanh(mb @ p[0]) @ p[1])\n"
    weights, rows = [np.ones((4, 4), np.float32)] * 2, np.ones((2, 4), np.float32)
    for name, has_lines in (("/tmp/model.py", True), ("/tmp/ipykernel_12/3456.py", False)):
        cell = {}
        exec(compile(source, name, "exec"), cell)
        text = str(Pipeline.from_function(cell["loss"], weights, rows, ipus=2))
        assert (".py:5" in text) == has_lines, text


def test_frozen_layers_before_the_trained_ones_have_no_backward_pass():
    loss, params = chain([8] * 4)

    def stopped(params, x):
        return loss(params[2:], jax.lax.stop_gradient(looped(params[:2], x)))

    def flops(loss):
        options = {"gradient_accumulation": 4, "schedule": "1f1b", "frozen": [True, True, False, False]}
        pipeline = Pipeline.from_function(loss, params, X, ipus=4, **options)
        report = pipeline.report(pipeline.shard_shapes(params), jnp.ones((4, *X.shape)), compile=False)
        return [part.flops for part in report.ipus]

    assert flops(loss) == flops(stopped)


# concurrent stages


@pytest.mark.parametrize("ipus", [1, 2])
@pytest.mark.parametrize("is_split", [False, True])
def test_no_concurrent_stage_reaches_beyond_a_mark(ipus, is_split):
    """Without the mark, all IPUs would add the bias, and hold it: that is cheap."""

    def squares(w, x):
        own = jnp.mean((x @ w) ** 2)
        return lax.psum(own, "ipu") if is_split else own

    head = everywhere(squares, in_specs=(P(None, "ipu") if is_split else P(), P()))
    weights = {"a": normal((8, 256)), "b": normal((256, 256)), "bias": normal((256,)), "head": normal((256, 6))}

    def loss(params, x):
        x = stage_end(jnp.tanh(stage_end(x @ params["a"]) @ params["b"] + params["bias"]))
        return head(params["head"], x)

    pipeline = Pipeline.from_function(loss, weights, X, ipus=ipus, gradient_accumulation=2)
    sharded, batch = pipeline.shard(weights), normal((2, *X.shape), seed=3)
    assert [leaf.shape[-2:] for leaf in sharded.layout.group("all IPUs").leaves] == [(256, 6)]
    value, gradients = pipeline.value_and_grad(sharded, batch)
    mean = lambda params: jnp.mean(jnp.stack([loss(params, x) for x in batch]))
    expected, of_weights = jax.value_and_grad(mean)(weights)
    scale = ipus if is_split else 1  # each IPU takes the mean of its own columns
    assert float(value) == pytest.approx(scale * float(expected), rel=1e-5)
    scaled = jax.tree.map(lambda leaf: scale * leaf, of_weights)
    assert largest_relative_error(pipeline.unshard(gradients), scaled) < 1e-5
