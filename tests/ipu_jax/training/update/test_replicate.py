"""Test replicas of a loss function: sums of halves, aux, keys and evaluation; and both ways of asking for some."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Outputs
from ipu_jax.steps import replicate
from ipu_jax.training.update.replicas import replicas_of
from support.dense import largest_relative_error
from support.small_problems import tanh_loss, tanh_problem


@pytest.mark.parametrize("m", [1, 261])
def test_losses_and_gradients_in_half_are_added_up_in_float32(m):
    """In bfloat16, which has 8 bits, 256 + 1 is 256; if 2 replicas rounded first, their sum would be smaller by 4."""
    ones = np.ones((2, m, 1), np.float32)
    ones[0, 257:] = 0  # 257 on one replica, 261 on the other
    model = replicate(lambda w, mb: jnp.sum(w * mb), replication_factor=2, gradient_accumulation=m, reduction="sum")
    params, batch = model.shard(jnp.ones(1, jnp.bfloat16)), jnp.asarray(ones, jnp.bfloat16)
    loss, gradient = model.value_and_grad(params, batch)
    assert loss.dtype == model.loss(params, batch).dtype == jnp.float32
    assert float(loss) == float(model.loss(params, batch)) == np.float32(ones.sum()) / np.float32(2 * m)
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient[0]) == (520 if m > 1 else 2)  # 518, rounded once


@pytest.mark.slow
def test_aux_keys_and_evaluation():
    def noisy(params, microbatch, *, key):
        noise = jax.random.normal(key)
        return Outputs(tanh_loss(params, microbatch) + noise, aux={"noise": noise})

    params, batch = tanh_problem(2, 3)
    model = replicate(noisy, replication_factor=2, gradient_accumulation=3, random=True)
    key = jax.random.key(0)
    (loss, aux), gradients = model.value_and_grad(model.shard(params), batch, key)
    noise_of = lambda r, i: jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, r), i))
    expected = jax.jit(lambda: jnp.stack([jnp.stack([noise_of(r, i) for i in range(3)]) for r in (0, 1)]))()
    np.testing.assert_allclose(aux["noise"], expected, rtol=1e-6)
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), batch)
    dense_loss, dense = jax.jit(jax.value_and_grad(tanh_loss))(
        params, rows
    )  # of the whole batch at once, on one device
    assert abs(float(loss) - float(dense_loss) - float(np.mean(expected))) < 1e-5
    assert largest_relative_error(gradients, dense) <= 1e-6
    evaluated, again = model.loss(model.shard(params), batch, key)
    assert abs(float(evaluated) - float(loss)) < 1e-6
    np.testing.assert_array_equal(again["noise"], aux["noise"])
    one = replicate(lambda p, mb: (tanh_loss(p, mb), mb["y"].sum()), replication_factor=1, gradient_accumulation=2)
    assert one.loss(one.shard(params), jax.tree.map(lambda leaf: leaf[0, :2], batch))[1].shape == (2,)


@pytest.mark.parametrize(
    ("asked", "replicas"),
    [
        ({"replication_factor": 3}, 3),
        ({"replication_factor": 3, "ipus_per_replica": 2}, 3),
        ({"num_ipus": 6}, 6),
        ({"num_ipus": 6, "ipus_per_replica": 2}, 3),
        ({"num_ipus": 2, "ipus_per_replica": 2}, 1),
        ({"num_ipus": np.int64(6), "ipus_per_replica": np.int32(2)}, 3),
        ({"replication_factor": np.int64(3)}, 3),
    ],
)
def test_both_ways_of_asking(asked, replicas):
    assert replicas_of(**asked) == replicas
    assert type(replicas_of(**asked)) is int
