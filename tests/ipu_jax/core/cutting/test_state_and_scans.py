"""Test cut functions with a state and with scans: the stages compute the loss, gradients and new state of plain jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipu_jax.core.cutting.forward import forward_of
from ipu_jax.core.layout.tree_parts import joined
from support.composed import composed, cut_into
from support.inputs import normal

LAYERS, ROWS, D = 6, 5, 4
PARAMS = {"w": 0.5 * normal((LAYERS, D, D)), "head": normal((D, 3), seed=1), "unread": jnp.ones(2)}
STATE = {
    "mean": normal((D,), seed=2),
    "before": normal((D,), seed=6),  # the mean
    "count": jnp.zeros((), jnp.int32),
    "rate": jnp.float32(0.9),
    "unread": normal((3,), seed=3),
    "means": normal((LAYERS, D), seed=7),  # of each layer
}
BATCH = {"unread": jnp.ones(7), "x": normal((ROWS, D), seed=4), "scale": 1 + 0.1 * normal((LAYERS, D), seed=5)}


def cut(loss, stages):
    return cut_into(stages, loss, PARAMS, BATCH, state=STATE)


def each(x, rows):
    for row in rows:
        x = x + jnp.sin(x @ row)
    return x


def counted(state, **changed):
    return {**state, "count": state["count"] + 1, **changed}


def mean_of_batches(p, s, b):
    """The first and the last layer read what the state and the batch decide."""
    shifted, mean = b["x"] - s["mean"], 0.9 * s["mean"] + 0.1 * jnp.mean(b["x"], 0)
    return each(shifted, p["w"]) + shifted, {}, counted(s, mean=mean)


def mean_of_activations(p, s, b):
    x = each(b["x"], p["w"][:2])
    shifted, mean = x - s["mean"], jnp.mean(x, 0)
    return each(shifted, p["w"][2:]), {"shift": s["mean"] - mean}, counted(s, mean=mean)


def state_unchanged(p, s, b):
    return each(b["x"] - s["mean"], p["w"]) * s["mean"], {}, s


def state_unread(p, s, b):
    return each(b["x"], p["w"]), {"number": 3.0}, s


def reversed_scan(p, s, b):
    """Rows of the batch and a result of each layer, too."""

    def layer(x, row):
        w, scale = row
        return x + jnp.sin(x @ w) * scale, jnp.mean(x, 0)

    y, means = lax.scan(layer, b["x"] - s["mean"], (p["w"], b["scale"]), reverse=True)
    return y, {"means": means}, counted(s)


def scan_before_the_state(p, s, b):
    """The new state follows from results of all layers."""

    def layer(x, w):
        return x + jnp.sin(x @ w), jnp.mean(x, 0)

    y, means = lax.scan(layer, b["x"], p["w"])
    return y, {"last": means[-1]}, counted(s, mean=s["mean"] + jnp.sum(means, 0))


def leaves_that_follow_from_others(p, s, b):
    """The first stage reads the count, the last one the rate; both need the count for the new rate."""
    x = b["x"] + s["count"]
    y = each(x, p["w"]) * s["rate"]
    return y, {"sum": s["rate"] + s["count"]}, counted(s, rate=s["rate"] * 0.5 ** s["count"])


def leaves_that_change_places(p, s, b):
    return each(b["x"] - s["mean"], p["w"]) * s["before"], {}, {**s, "mean": s["before"], "before": s["mean"]}


def leaf_that_follows_from_a_mean(p, s, b):
    """The first layer reads what a later layer's mean replaces: one stage has both leaves."""
    x = each(b["x"] - s["before"], p["w"][:3])
    new = {"mean": jnp.mean(x, 0), "before": s["mean"], "rate": 0.5 * s["rate"] + jnp.mean(s["before"])}
    return each(x, p["w"][3:]) * s["rate"], {"old": s["mean"] - s["rate"]}, counted(s, **new)


def leaf_that_follows_through_another(p, s, b):
    """`before` follows from `mean`, which follows from `rate`, which the last layers replace."""
    x = each(b["x"], p["w"])
    return x * s["rate"], {}, counted(s, before=2 * s["mean"], mean=s["mean"] * s["rate"], rate=jnp.mean(x))


def callback_without_results(p, s, b):
    x = each(b["x"], p["w"])
    jax.debug.callback(lambda *values: None, jnp.mean(x), p["w"])
    return x, {}, s


def norm_of_the_weights(p, s, b):
    """The last stage adds it up, and the function does not read the old one."""
    return each(b["x"], p["w"]), {}, counted(s, rate=jnp.linalg.norm(p["w"]))


def norm_that_the_first_layer_reads(p, s, b):
    return each(b["x"] * s["rate"], p["w"]), {}, counted(s, rate=jnp.linalg.norm(p["w"]))


def rows_that_are_read_whole(p, s, b):
    def layer(x, row):
        w, mean = row
        return x + jnp.sin((x - mean) @ w), 0.5 * mean + jnp.mean(x, 0)

    y, means = lax.scan(layer, b["x"] - s["mean"], (p["w"], s["means"]))
    return y * jnp.mean(s["means"]), {}, counted(s, means=means)


FUNCTIONS = (
    leaf_that_follows_through_another,
    *(rows_that_are_read_whole, norm_of_the_weights, norm_that_the_first_layer_reads),
    *(leaves_that_follow_from_others, leaves_that_change_places, leaf_that_follows_from_a_mean),
    callback_without_results,
    *(mean_of_batches, mean_of_activations, state_unchanged, state_unread, reversed_scan, scan_before_the_state),
)


def loss_of(function):
    def loss(params, state, batch):
        y, aux, new = function(params, state, batch)
        return jnp.mean((y @ params["head"]) ** 2), aux, new

    return loss


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_stages_compute_the_loss_the_gradients_and_the_new_state(function):
    """Params, state and batch have leaves that the function does not read."""
    loss = loss_of(function)

    def plain(*args):
        value, *others = loss(*args)
        return value, tuple(others)

    expected = jax.jit(jax.value_and_grad(plain, has_aux=True))(PARAMS, STATE, BATCH)
    for stages in (1, 3):
        model = cut(loss, stages)
        assert model.state is not None
        (value, (aux, new)), gradients = jax.jit(jax.value_and_grad(composed(model), has_aux=True))(
            PARAMS, STATE, BATCH
        )
        found = (value, (aux, joined(model.state.join(new)))), gradients
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for (path, leaf), actual in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
            limit = 1e-5 * np.abs(leaf).max()
            np.testing.assert_allclose(actual, leaf, rtol=1e-5, atol=limit, err_msg=jax.tree_util.keystr(path))


def test_values_of_batch_and_state_are_computed_once_and_sent():
    """The last stage reads `shifted`, and neither the batch nor the state, of which it would need a copy."""
    model = cut(loss_of(mean_of_batches), 3)
    assert model.state is not None
    mean = model.state.paths.index("state['mean']")
    assert [group.name for group in model.state.groups for leaf in group.leaves if leaf.part.leaf == mean] == [
        "stage 0"
    ]
    assert model.cut.sent[-1] == 2 * BATCH["x"].nbytes


def test_another_function_can_read_at_any_stage_what_the_loss_leaves_alone():
    """Batch norm of Equinox only counts in training, and divides by what follows from the count in evaluation."""

    def at_the_end(params, state, x):
        return each(x, params["w"]) * (1 + state["count"]) @ params["head"]

    forward = forward_of(cut(loss_of(mean_of_batches), 3), at_the_end, BATCH["x"], None)
    state = {**STATE, "count": jnp.int32(4)}
    found, _ = jax.jit(composed(forward))(PARAMS, state, BATCH["x"])
    np.testing.assert_allclose(found, jax.jit(at_the_end)(PARAMS, state, BATCH["x"]), rtol=1e-5)
